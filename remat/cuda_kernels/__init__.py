"""Record the kernels of a CUDA device on a machine that has none.

In: a captured graph on fake CPU tensors and a target. Out: the same graph calling the kernels that CUDA's dispatcher,
autocast and attention would choose there.
"""
