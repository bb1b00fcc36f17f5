"""Functions that torch makes of other operators, on the fake tensors of a step: those that a device runs.

A composite function of ATen may look at what it is given, and call other operators for fakes than for real tensors: its
storages, and what a region saves of it, are not those of training. And its own checks read a flag off a tensor, which
fakes do not have. While this context is open these functions do what they do on real tensors, and their checks pass:

Rule 1  `one_hot` writes ones into zeros (`one_hot`, ATen/native/Onehot.cpp); for fakes it compares with a range, and
        casts. A CPU looks for the smallest and the largest class first. Without a number of classes it reads one. Under
        `vmap` it compares on every device.
Rule 2  `istft` looks whether its windows overlap, `cov` whether weights and degrees of freedom are positive
        (ATen/native/SpectralOps.cpp, Correlation.cpp). `corrcoef` calls `cov`.

Rule 1 is for what a recorded step has on fakes (`StepFakes`): compilers trace with fakes of their own, and what they
make of `one_hot` they run. Rule 2 is for captures too (`eager_answers.py`), where Dynamo would break its graph. Other
composites that look are in `recording/in_place.py`. A mode for functions was rejected: it sees neither `torch.ops` nor
what C++ calls. As of torch 2.13; `tests/test_composites.py` compares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from remat._torch.recording import composites_replaced, is_batched, unwrapped
from remat._torch.step_fakes import StepFakes
from remat._torch.training import UnseenMode
from remat.shared import Shared

Tensor = torch.Tensor
Whole = Callable[..., Tensor]  # a composite function as torch has it


def one_hot(classes: Tensor, count: int) -> Tensor:
    """Return ones at `classes`, written into zeros."""
    like: Any = {"dtype": classes.dtype, "layout": classes.layout, "device": classes.device}
    shape = (*classes.shape, count)
    if 0 in classes.shape:
        return torch.empty(shape, **like)
    return torch.zeros(shape, **like).scatter_(-1, classes.unsqueeze(-1), 1)


def is_one_hot(classes: Tensor, count: int) -> bool:
    """Return whether ones are written into zeros: not under `vmap`, nor where the number of classes is read."""
    return classes.dtype == torch.int64 and count > 0 and not is_batched(classes)


def _one_hot(whole: Whole, classes: Tensor, count: int = -1) -> Tensor:
    """Run `one_hot` by Rule 1."""
    is_counted = count == -1 and 0 not in classes.shape and classes.dtype == torch.int64
    if not _is_of_step(classes) or not (is_counted or is_one_hot(classes, count)):
        return whole(classes, count)
    return one_hot(classes, _classes(classes, None if is_counted else count))


def _classes(classes: Tensor, count: int | None) -> int:
    """Return the number of classes, as given or one more than the largest, and look for it as the device does."""
    if classes.device.type == "cpu" and 0 not in classes.shape:
        _, largest = torch.aminmax(classes)
    elif count is None:
        largest = classes.max()
    return int(largest.item()) + 1 if count is None else count


def _istft(whole: Whole, *args: Any) -> Tensor:
    """Run `istft` by Rule 2."""
    return _answered(whole, args, [False])


def _cov(whole: Whole, data: Tensor, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Tensor:
    """Run `cov` by Rule 2."""
    weights = [each for each in (fweights, aweights) if each is not None]
    return _answered(
        lambda *args: whole(*args, correction=correction, fweights=fweights, aweights=aweights),
        (data,),
        [*(True for _ in weights), *([True] if weights else []), False],
    )


def _answered(whole: Whole, args: Sequence[Any], answers: list[bool]) -> Tensor:
    if not isinstance(unwrapped(args[0]), FakeTensor):
        return whole(*args)
    with _Comparisons(answers):
        return whole(*args)


class _Comparisons(UnseenMode):
    """Answers comparisons of two tensors, in order."""

    def __init__(self, answers: list[bool]):
        super().__init__()
        self._answers = answers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.equal.default and self._answers:
            return self._answers.pop(0)
        return func(*args, **(kwargs or {}))


def _is_of_step(tensor: Tensor) -> bool:
    fake = unwrapped(tensor)
    return isinstance(fake, FakeTensor) and isinstance(fake.fake_mode, StepFakes)


CHECKED = ("istft", "cov", "corrcoef")  # by Rule 2
_INSTEAD: dict[str, Callable[..., Tensor]] = {"one_hot": _one_hot, "istft": _istft, "cov": _cov}

composites_on_fakes = Shared(lambda: composites_replaced(_INSTEAD))  # composites of a step are those of real tensors
