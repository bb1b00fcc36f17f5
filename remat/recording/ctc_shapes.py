"""Shapes of CTC's loss (connectionist temporal classification) on fake tensors.

One of its results is as wide as the longest target, which fakes do not know: torch refuses `_ctc_loss` on them. Given
the lengths as numbers, the shapes are those that `ATen/native/LossCTC.cpp` and `cuda/LossCTC.cu` make, which are alike
(torch 2.11 to 2.15). cuDNN's loss is none of this: torch takes it for int32 targets in one row, blanks of class 0, and
targets of fewer than 256, unless `torch.backends.cudnn` is off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def _ctc_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: Any, target_lengths: Sequence[int], *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    steps, samples, _ = log_probs.shape
    extended = 2 * max(target_lengths, default=0) + 1  # a blank on either side of every target
    return log_probs.new_empty(samples), log_probs.new_empty(samples, steps, extended)


def _ctc_loss_backward(grad: torch.Tensor, log_probs: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


CTC_SHAPES: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._ctc_loss.default: _ctc_loss,
    torch.ops.aten._ctc_loss_backward.default: _ctc_loss_backward,
}
