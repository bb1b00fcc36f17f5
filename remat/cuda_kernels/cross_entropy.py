"""Cross-entropy under autocast on a CUDA device. (Rule 12 of `substitute.py`)

C++ asks log-softmax for the dtype of the logits, which autocast respects; sums become float32. `cross_entropy_loss`,
`cross_entropy_loss_prob_target` and `cross_entropy_loss_label_smoothing` in aten/src/ATen/native/LossNLL.cpp, torch
2.13.
"""

from __future__ import annotations

import torch

from remat._torch.recording import nll_loss_nd
from remat.cuda_kernels.autocast import Call, Device, Tensor, cast, eligible

_NONE, _MEAN = 0, 1  # at::Reduction


def cross_entropy(
    device: Device,
    function: Call,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Run cross-entropy by Rule 12."""
    if not device.autocast or not eligible(input) or input.dtype == torch.float32:
        return function(input, target, weight, reduction, ignore_index, label_smoothing)
    logs = torch.log_softmax(input, 0 if input.dim() == 1 else 1, input.dtype)
    if input.shape == target.shape:
        return _of_probabilities(logs, target, weight, reduction, label_smoothing)
    in_float32, weight_in_float32 = cast((logs, weight), torch.float32)
    loss = nll_loss_nd(in_float32, target, weight_in_float32, reduction, ignore_index)
    if label_smoothing == 0:
        return loss
    classes = logs.shape[0 if logs.dim() == 1 else 1]
    smooth = _smooth(logs, target, weight, reduction, ignore_index)
    return (1 - label_smoothing) * loss + smooth * (label_smoothing / classes)


def _of_probabilities(
    logs: Tensor, target: Tensor, weight: Tensor | None, reduction: int, label_smoothing: float
) -> Tensor:
    classes_at = 0 if logs.dim() == 1 else 1
    classes = logs.shape[classes_at]
    if label_smoothing > 0:
        target = target * (1 - label_smoothing) + label_smoothing / classes
    losses = logs * target if weight is None else logs * target * _of_classes(weight, logs)
    if reduction == _NONE:
        return -losses.sum(classes_at, dtype=torch.float32)
    total = -losses.sum(dtype=torch.float32)
    return total / (logs.numel() / classes) if reduction == _MEAN else total


def _smooth(logs: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int) -> Tensor:
    """Return the loss of a target that is all classes alike."""
    weighted = logs if weight is None else logs * _of_classes(weight, logs)
    losses = -weighted.sum(0 if logs.dim() == 1 else 1, dtype=torch.float32)
    ignored = target == ignore_index
    losses.masked_fill_(ignored, 0.0)
    if reduction == _NONE:
        return losses
    if reduction != _MEAN:
        return losses.sum()
    if weight is None:
        counted = ~ignored
    else:
        counted = weight.gather(0, target.masked_fill(ignored, 0).flatten()).masked_fill_(ignored.flatten(), 0)
    count = counted.sum()
    return losses.sum() / count


def _of_classes(weight: Tensor, logs: Tensor) -> Tensor:
    return weight if logs.dim() == 1 else weight.view(1, -1, *[1] * (logs.dim() - 2))
