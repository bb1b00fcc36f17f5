"""Fusion: which nodes of a captured graph a compiler can make few kernels of, and the graph in which it does.

Enters a captured graph, leaves one in which a group of pointwise and reducing nodes is a single node (`fuse`), compiled
by itself while everything else stays eager. Recording, planning and training see that graph.
"""
