"""Sequences on fake tensors: CTC's loss and packed sequences, whose lengths decide shapes.

Their functions read lengths on the host, beneath all dispatch. While a step runs on fakes they are handed the values
that are known (`known_values.py`): the loss gets numbers in place of tensors, recurrent layers get batch sizes with
data, and run the operators that they run in training. What is one kernel for torch (packing, padding, and the backward
of packing) is written out here, operator by operator, after `ATen/native/PackedSequence.cpp` (torch 2.11 to 2.15).

Dynamo breaks its graph at each of these functions, in training as while planning: they are part of no region.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor
from torch.nn.utils import rnn

from remat._torch.dynamo import not_begun_at
from remat._torch.recording import functions_of_lengths, untraced
from remat._torch.training import without_modes
from remat.capture.eager_answers import traced_as
from remat.errors import CaptureError
from remat.recording.known_values import give_values, note_length, values_of
from remat.shared import Shared

_VF = functions_of_lengths()
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_pack = _VF._pack_padded_sequence
_invert: Any = rnn.invert_permutation
_ctc_loss: Callable[..., torch.Tensor] = torch.ctc_loss
_NONE, _MEAN = 0, 1  # at::Reduction


class LengthsNotKnown(CaptureError, DynamicOutputShapeException):
    """Lengths are not known; a trace breaks its graph there, as torch's own error makes it do in training."""

    def __init__(self, message: str):
        CaptureError.__init__(self, message)
        self.func = torch.ops.aten._ctc_loss.Tensor


def _sizes(tensor: torch.Tensor, reader: str) -> list[int]:
    """Return the values of lengths that decide how much memory is needed."""
    note_length(tensor)
    return _numbers(tensor, reader)


def _numbers(tensor: torch.Tensor, reader: str) -> list[int]:
    """Return the values of a tensor of lengths. Raises LengthsNotKnown if they are not known."""
    known = values_of(tensor)
    if known is None:
        raise LengthsNotKnown(
            f"{reader} reads lengths that are not known while planning: they depend on random or floating-point data "
            "of the batch, or on a weight. Let the workload's `batch` give the lengths as integers, or as a "
            "tensor that is made of Python numbers."
        )
    with without_modes():
        found: list[int] = known.tolist()
    return found


def _is_fake(*values: Any) -> bool:
    return any(isinstance(value, FakeTensor) for value in values)


@untraced
def _inverted(permutation: torch.Tensor | None) -> torch.Tensor | None:
    """Invert a permutation, and note the values of the result if those of the permutation are known."""
    inverse = _invert(permutation)
    if inverse is not None and permutation is not None and (known := values_of(permutation)) is not None:
        with without_modes():
            values = _invert(known)
        give_values(inverse, values)
    return inverse


class _Packing(torch.autograd.Function):
    """Packs sequences: forward makes one copy, backward writes the gradient into zeros."""

    @staticmethod
    def forward(ctx: Any, padded: torch.Tensor, batch_sizes: torch.Tensor, sizes: list[int], batch_first: bool) -> Any:
        ctx.save_for_backward(batch_sizes)
        ctx.sizes, ctx.batch_first, ctx.shape = sizes, batch_first, padded.shape
        steps = padded.transpose(0, 1) if batch_first else padded
        return torch.cat(
            [steps[a:b, :size].contiguous().view(-1, *steps.shape[2:]) for a, b, size in _runs_of_equal(sizes)]
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        shape = (ctx.shape[1], ctx.shape[0], *ctx.shape[2:]) if ctx.batch_first else ctx.shape
        padded, offset = torch.zeros(shape, dtype=gradient.dtype, device=gradient.device), 0
        for step, size in enumerate(ctx.sizes):
            padded[step, :size].copy_(gradient[offset : offset + size])
            offset += size
        _ = ctx.saved_tensors
        return padded.transpose(0, 1) if ctx.batch_first else padded, None, None, None


def _runs_of_equal(sizes: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (first step, end, sequences) for every run of steps with equally many sequences."""
    first = 0
    for step in range(1, len(sizes) + 1):
        if step == len(sizes) or sizes[step] != sizes[first]:
            yield first, step, sizes[first]
            first = step


@untraced
def _packed(padded: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = _sizes(lengths, "`pack_padded_sequence`")
    steps, samples = padded.shape[:2][:: -1 if batch_first else 1]
    with without_modes():  # torch checks the lengths
        sizes = _pack(torch.empty(steps, samples, 1), torch.tensor(numbers, dtype=torch.int64), False)[1].tolist()
    batch_sizes = torch.tensor(sizes)
    return _Packing.apply(padded, batch_sizes, sizes, batch_first), batch_sizes


@untraced
def _padded(
    data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = _numbers(batch_sizes, "`pad_packed_sequence`")
    samples, offset = sizes[0], 0
    shape = (max(total_length, len(sizes)), samples, *data.shape[1:])
    padded = torch.full(shape, padding_value, dtype=data.dtype, device=data.device)
    for first, end, size in _runs_of_equal(sizes):
        count = (end - first) * size
        part = data[offset : offset + count].view(end - first, size, *data.shape[1:])
        padded[first:end, :size].copy_(part)
        offset += count
    lengths = torch.tensor([sum(size > sample for size in sizes) for sample in range(samples)])
    return padded.transpose(0, 1) if batch_first else padded, lengths


@untraced
def _loss_of_numbers(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """Compute `torch.ctc_loss`, which reads its lengths off tensors; the mean is over symbols, then samples."""
    lengths = [
        read(each.reshape(-1), "`ctc_loss`") if isinstance(each, torch.Tensor) else list(each)
        for read, each in ((_numbers, input_lengths), (_sizes, target_lengths))
    ]
    if reduction != _MEAN:
        return _ctc_loss(log_probs, targets, *lengths, blank, reduction, zero_infinity)
    losses = _ctc_loss(log_probs, targets, *lengths, blank, _NONE, zero_infinity)
    symbols = torch.empty(len(lengths[1]), dtype=losses.dtype, device=losses.device).clamp_min(1)
    return (losses / symbols).mean()


def _on_fakes(original: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `instead` on fake tensors, and `original` on others."""

    @traced_as(original)
    @not_begun_at
    def function(*args: Any, **kwargs: Any) -> Any:
        return (instead if _is_fake(*args, *kwargs.values()) else original)(*args, **kwargs)

    return function


def _recurrent(name: str) -> Callable[..., Any]:
    original = getattr(_VF, name)

    @untraced
    def layer(data: torch.Tensor, state: Any, *rest: Any) -> Any:
        """Run the layer; for packed sequences, batch sizes come before the state."""
        if isinstance(state, FakeTensor) and not state.is_floating_point():
            with without_modes():
                state = torch.tensor(_numbers(state, f"`{name}` of packed sequences"))
        return original(data, state, *rest)

    return _on_fakes(original, layer)


@contextlib.contextmanager
def _functions_on_fakes() -> Iterator[None]:
    of_vf = {"_pack_padded_sequence": _packed, "_pad_packed_sequence": _padded}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "ctc_loss", _on_fakes(_ctc_loss, _loss_of_numbers)))
        stack.enter_context(mock.patch.object(rnn, "invert_permutation", _on_fakes(_invert, _inverted)))
        for name, function in of_vf.items():
            stack.enter_context(mock.patch.object(_VF, name, _on_fakes(getattr(_VF, name), function)))
        for name in _RECURRENT:
            stack.enter_context(mock.patch.object(_VF, name, _recurrent(name)))
        yield


sequences_of_known_lengths = Shared(_functions_on_fakes)  # on fakes, lengths are read from known values
