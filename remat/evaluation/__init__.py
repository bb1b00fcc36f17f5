"""Bytes and time of a step under any plan, without torch: recorded `Graph`, `Plan`, and the evaluator between them.

In: a graph and regions. Out: bytes alive at every operator, time, recomputed nodes; by category, at any batch size, on
one of several ranks. Also what a plan knows its graph by (`identity.py`).
"""
