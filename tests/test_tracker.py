"""A Tracker sees the memory of the real CPU kernels on fake tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from remat.recording.tracker import Tracker, _hashable

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "binary-cross-entropy": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y),
    "binary-cross-entropy-with-logits": F.binary_cross_entropy_with_logits,
    "huber": F.huber_loss,
    "kl-div": lambda x, y: F.kl_div(x, y, reduction="sum"),
    "l1": F.l1_loss,
    "mse": F.mse_loss,
    "mse-sum": lambda x, y: F.mse_loss(x, y, reduction="sum"),
    "mse-none": lambda x, y: F.mse_loss(x, y, reduction="none"),
    "smooth-l1": F.smooth_l1_loss,
    "soft-margin": F.soft_margin_loss,
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_keeps_the_memory_that_the_real_one_keeps(loss: str) -> None:
    def kept() -> int:
        return LOSSES[loss](torch.ones(16, 32), torch.ones(16, 32)).untyped_storage().nbytes()

    with FakeTensorMode(), Tracker():
        on_fakes = kept()
    assert on_fakes == kept()


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_fold_keeps_the_memory_of_its_columns(step: int) -> None:
    """Overlapping columns are more than the image: nine for each place, with steps of one."""

    def kept() -> list[int]:
        x = torch.ones(2, 4, 12, 12, requires_grad=True)
        columns = F.unfold(x, 3, stride=step)
        y = F.fold(columns, (12, 12), 3, stride=step)
        (gradient,) = torch.autograd.grad(y, x, torch.ones(y.shape))
        return [tensor.untyped_storage().nbytes() for tensor in (y, gradient)]

    with FakeTensorMode(), Tracker():
        on_fakes = kept()
    assert on_fakes == kept()


def test_a_product_that_is_given_the_dtype_of_its_result_is_counted() -> None:
    """TRL's head adds up its gradients so."""
    with FakeTensorMode(), Tracker() as tracker:
        a, b = torch.empty(4, 8, dtype=torch.bfloat16), torch.empty(8, 2, dtype=torch.bfloat16)
        torch.addmm(torch.empty(4, 2), a, b, out_dtype=torch.float32)
    assert [kind.flops for kind in tracker.kinds.values()][-1] == 2 * 4 * 8 * 2


def test_calls_that_differ_in_shape_strides_type_or_number_are_of_two_kinds() -> None:
    x = torch.empty(4, 6)
    given = [x, x.t(), x.T.contiguous(), x.bfloat16(), 1, 1.0, True, None, "1", torch.float32, torch.device("cpu")]
    given += [
        torch.preserve_format,
        torch.contiguous_format,
        torch.strided,
        [1, 2],
        [[1], 2],
        [1, [2]],
        [x],
        [x, x],
        [],
    ]
    for one, other in itertools.combinations(given, 2):
        assert _hashable([one]) != _hashable([other]), (one, other)
    assert _hashable([x, [x, 1]]) == _hashable([torch.empty(4, 6), [torch.empty(4, 6), 1]])
