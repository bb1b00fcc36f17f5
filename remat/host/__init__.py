"""The host's memory in training: copies between it and a device, and the optimizer's state that lies there.

In: tensors of a device. Out: their place on the host, and back. Training runs this; nothing here plans.
"""
