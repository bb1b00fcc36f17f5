"""One training step on fake tensors, written down.

In: a workload and a loop. Out: a `Graph`: what runs, what is allocated when, what autograd keeps, what the optimizer
holds. Nothing is computed and nothing is timed.
"""
