"""Captured graphs, run node by node, their regions under `torch.utils.checkpoint`."""
