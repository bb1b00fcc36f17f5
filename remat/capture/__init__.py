"""A model's training forward as torch.fx graphs, as eager mode would run it.

In: a model and the arguments of a forward. Out: graph modules, called in order, that training, recording and compiling
all share: a plan is applied to exactly the graph that it was made for.
"""
