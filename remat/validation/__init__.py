"""Plans held against the device at hand.

In: a workload and a plan. Out: a `Report`: peak, time, loss, gradients and kernels beside the eager baseline's.
"""
