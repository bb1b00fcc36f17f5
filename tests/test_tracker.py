"""A Tracker sees the layouts of the real CPU kernels on fake tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from remat.recording.tracker import Tracker


def transposed() -> Tensor:
    return torch.ones(4, 6, 8).transpose(1, 2)


def channels_last() -> Tensor:
    return torch.ones(4, 8, 6, 6).to(memory_format=torch.channels_last)


def permuted() -> Tensor:
    return torch.ones(4, 6, 8, 6).permute(0, 2, 3, 1)


def of_one_channel() -> Tensor:
    return torch.ones(4, 6, 6, 1).permute(0, 3, 1, 2)


def of_one_pixel() -> Tensor:
    return torch.ones(4, 1, 1, 8).permute(0, 3, 1, 2)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "batch-norm": lambda x: F.batch_norm(x, None, None, training=True),
    "elu": F.elu,
    "glu": lambda x: F.glu(x, 1),
    "hardswish": F.hardswish,
    "hardtanh": F.hardtanh,
    "log-sigmoid": F.logsigmoid,
    "roll": lambda x: x.roll(1, -1),
    "softplus": F.softplus,
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("make", [transposed, channels_last, permuted])
def test_results_and_gradients_have_the_strides_of_the_real_ones(function: str, make: Callable[[], Tensor]) -> None:
    def strides() -> list[tuple[int, ...]]:
        x = make().requires_grad_()
        y = FUNCTIONS[function](x)
        (gradient,) = torch.autograd.grad(y, x, torch.ones(y.shape))
        return [y.stride(), gradient.stride()]

    real = strides()
    with FakeTensorMode(), Tracker():
        assert strides() == real


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(x.shape),
    "views": lambda x: x.view(4, 1, *x.shape[1:]).view(x.shape),
    "reshape": lambda x: x.reshape(x.shape),
    "view-of-one": lambda x: x.sum().view(1, 1),
    "view-of-steps": lambda x: x.flatten()[::4].view(-1, 1),
    "add": lambda x: x + x,
    "add-number": lambda x: x + 1,
    "add-broadcast": lambda x: x + torch.ones(1, 1, 1),
    "clone": torch.clone,
    "conv": lambda x: F.conv2d(x, torch.ones(2, x.shape[1], 1, 1)),
    "group-norm": lambda x: F.group_norm(x, 1),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2),
    "mul": lambda x: x * x.sigmoid(),
    "power": lambda x: x**2,
    "relu6": F.relu6,
    "replicate": lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"),
    "roll": lambda x: x.roll(1, 0),
    "tanh": torch.tanh,
}


@pytest.mark.parametrize("function", LAYOUTS)
@pytest.mark.parametrize("make", [channels_last, of_one_channel, of_one_pixel])
def test_dimensions_of_one_have_the_strides_of_the_real_ones(function: str, make: Callable[[], Tensor]) -> None:
    def strides() -> list[tuple[int, ...]]:
        x = make().requires_grad_()
        y = LAYOUTS[function](x)
        (gradient,) = torch.autograd.grad(y, x, torch.ones(y.shape))
        return [y.stride(), gradient.stride()]

    real = strides()
    with FakeTensorMode(), Tracker():
        assert strides() == real


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
