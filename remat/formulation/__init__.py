"""The integer program's data, without a solver and without torch.

In: a graph, its costs, a space of plans and a budget. Out: a `Problem`: runs, what they keep and why, rows that limit
them. And `check`, which judges the solution of any solver.
"""
