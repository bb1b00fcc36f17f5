"""The host's memory in training: copies between it and a device, the optimizer's state and weights kept there.

In: tensors of a device. Out: their place on the host, and back. Training runs this; nothing here plans.
"""
