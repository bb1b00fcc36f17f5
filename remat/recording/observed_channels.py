"""Channels that a fused observer sees first, on fake tensors.

An observer of channels (`FusedMovingAvgObsFakeQuantize` with a per-channel observer) begins with buffers of no or one
element. Its operator gives them one for each channel in the first forward, on every device (ATen's
`FusedObsFakeQuant.cpp` and `.cu`); torch's rule for fakes leaves them as they are. As of torch 2.13.
"""

from __future__ import annotations

import torch

FUSED_OBSERVER = torch.ops.aten._fused_moving_avg_obs_fq_helper.default


def give_channels(
    values: torch.Tensor,
    observer_on: torch.Tensor,
    fake_quant_on: torch.Tensor,
    running_min: torch.Tensor,
    running_max: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    averaging_const: float,
    quant_min: int,
    quant_max: int,
    ch_axis: int,
    per_row_fake_quant: bool = False,
    symmetric_quant: bool = False,
) -> None:
    """Resize the buffers among the arguments of `FUSED_OBSERVER` as its kernel does."""
    if per_row_fake_quant and running_min.numel() == 0:
        for buffer in (running_min, running_max, scale, zero_point):
            buffer.resize_(values.size(ch_axis))
