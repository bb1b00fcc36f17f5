"""Fusion: find nodes of a captured graph that compile to few kernels, and make them one node.

Enters a captured graph, leaves one in which a group of pointwise and reducing nodes is a single node (`fuse`), compiled
by itself while everything else stays eager. Recording, planning and training see that graph.
"""
