"""Chunking: what of a captured graph can run slice by slice, and the graph in which it does.

Enters a captured graph, leaves one in which a loss head, or an MLP, is a single node (`chunk`). Recording, planning and
training see that graph and know nothing of slices.
"""
