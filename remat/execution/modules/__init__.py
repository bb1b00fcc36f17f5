"""The forward of whole modules under `torch.utils.checkpoint`, untraced, as FSDP2 needs it."""
