"""Kernel results: fakes have the dtypes, sizes and strides of kernels, and peaks of such layers are those predicted."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import remat
from remat.recording.kernel_results import as_kernel
from remat.recording.layouts import laid_out
from remat.recording.reserves import with_reserve
from remat.workload.workload import Workload

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo", "one_thread"),
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),
]

BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
ROWS, CHANNELS, SIDE, LENGTH = 64, 32, 4, 6
IMAGE, SEQUENCE, FLAT = (CHANNELS, SIDE, SIDE), (LENGTH, CHANNELS), (CHANNELS,)


class Case(NamedTuple):
    """A layer, the shape of a sample that it takes, and whether samples are laid out with channels last."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    channels_last: bool = False


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class First(nn.Module):
    """The first result of a layer."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)[0]
        return out


class Bags(nn.Module):
    """Looks up bags of embeddings, one for each row, and adds them."""

    def __init__(self, mode: str):
        super().__init__()
        self.table = nn.EmbeddingBag(50, CHANNELS, mode=mode)

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.zeros(len(x), LENGTH, dtype=torch.int64, device=x.device)
        return x + self.table(ids).to(x.dtype)


def attention(x: Tensor) -> Tensor:
    heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)


def sampled(x: Tensor) -> Tensor:
    turn = torch.eye(2, 3, dtype=x.dtype, device=x.device).expand(len(x), 2, 3)
    return F.grid_sample(x, F.affine_grid(turn, list(x.shape), align_corners=False), align_corners=False)


def unpooled(x: Tensor) -> Tensor:
    pooled, places = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(pooled, places, [2, 2])


def resized(mode: str) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Upsample(scale_factor=2, mode=mode), nn.AvgPool2d(2))


norm = nn.utils.parametrizations.weight_norm
LAYERS = {
    "group": Case(lambda: nn.GroupNorm(CHANNELS, CHANNELS), IMAGE),
    "group-last": Case(lambda: nn.GroupNorm(CHANNELS, CHANNELS), IMAGE, channels_last=True),
    "group-plain": Case(lambda: nn.GroupNorm(CHANNELS, CHANNELS, affine=False), IMAGE),
    "group-flat": Case(lambda: nn.GroupNorm(8, CHANNELS), FLAT),
    "instance": Case(lambda: nn.InstanceNorm2d(CHANNELS, affine=True), IMAGE),
    "instance-running": Case(lambda: nn.InstanceNorm2d(CHANNELS, track_running_stats=True), IMAGE),
    "batch": Case(lambda: nn.BatchNorm2d(CHANNELS), IMAGE),
    "batch-last": Case(lambda: nn.BatchNorm2d(CHANNELS), IMAGE, channels_last=True),
    "batch-without-weight": Case(lambda: nn.BatchNorm2d(CHANNELS, affine=False), IMAGE),
    "batch-alone": Case(lambda: nn.BatchNorm2d(CHANNELS, affine=False, track_running_stats=False), IMAGE),
    "layer": Case(lambda: nn.LayerNorm(CHANNELS), SEQUENCE),
    "layer-without-bias": Case(lambda: nn.LayerNorm(CHANNELS, bias=False), SEQUENCE),
    "layer-plain": Case(lambda: nn.LayerNorm(CHANNELS, elementwise_affine=False), SEQUENCE),
    "rms": Case(lambda: nn.RMSNorm(CHANNELS), SEQUENCE),
    "weight": Case(lambda: norm(nn.Linear(CHANNELS, CHANNELS)), SEQUENCE),
    "weight-of-convolution": Case(lambda: norm(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)), IMAGE),
    "gru": Case(lambda: First(nn.GRU(CHANNELS, CHANNELS, batch_first=True)), SEQUENCE),
    "lstm": Case(lambda: First(nn.LSTM(CHANNELS, CHANNELS, batch_first=True)), SEQUENCE),
    "lstm-cell": Case(lambda: First(nn.LSTMCell(CHANNELS, CHANNELS)), FLAT),
    "gru-cell": Case(lambda: nn.GRUCell(CHANNELS, CHANNELS), FLAT),
    "attention": Case(lambda: Function(attention), SEQUENCE),
    "encoder": Case(lambda: nn.TransformerEncoderLayer(CHANNELS, 4, 64, batch_first=True), SEQUENCE),
    "bags-mean": Case(lambda: Bags("mean"), FLAT),
    "bags-sum": Case(lambda: Bags("sum"), FLAT),
    "bags-max": Case(lambda: Bags("max"), FLAT),
    "bilinear": Case(resized("bilinear"), IMAGE),
    "nearest": Case(resized("nearest"), IMAGE),
    "bicubic": Case(resized("bicubic"), IMAGE),
    "sampled": Case(lambda: Function(sampled), IMAGE),
    "unpooled": Case(lambda: Function(unpooled), IMAGE),
    "cumulated": Case(lambda: Function(lambda x: x.cumsum(-1)), SEQUENCE),
    "log-softmax": Case(lambda: nn.LogSoftmax(-1), SEQUENCE),
}
MODES = {
    "amp-bf16": (BFLOAT16, torch.float32),
    "amp-fp16": (FLOAT16, torch.float32),
    "bf16": (None, BFLOAT16),
    "fp16": (None, FLOAT16),
}


def form(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


class Compared(TorchDispatchMode):
    """Runs each operator on fakes too, and notes where a result differs from the kernel's."""

    def __init__(self) -> None:
        super().__init__()
        self.differing: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with FakeTensorMode() as fakes, warnings.catch_warnings(action="ignore"):  # of gradients that are no leaf's
            given, named = tree_map_only(Tensor, fakes.from_tensor, (args, kwargs))
            fake = func(*given, **named)
            fake = with_reserve(func, given, as_kernel(func, given, laid_out(func, given, fake)))
        out = func(*args, **kwargs)
        for real, found in zip(tensors(out), tensors(fake), strict=True):
            given_back = any(each.alias_info is not None for each in func._schema.returns)
            sizes = (0, 0) if given_back else (real.untyped_storage().nbytes(), found.untyped_storage().nbytes())
            if form(real) != form(found) or sizes[0] != sizes[1]:
                self.differing.append(f"{func}: {form(real)} of {sizes[0]} bytes, faked {form(found)} of {sizes[1]}")
        return out


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_fakes_are_as_kernels_make_them(name: str, mode: str, training: bool) -> None:
    case, (autocast, weights) = LAYERS[name], MODES[mode]
    layer = case.make().to(weights).train(training)
    x = torch.randn(4, *case.shape, dtype=weights)
    if case.channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    x.requires_grad_()
    with Compared() as compared, torch.autocast("cpu", autocast, enabled=autocast is not None):
        out = layer(x if autocast is None else x.to(autocast))  # as a layer before it would give it
        out.float().sum().backward()
    assert compared.differing == []


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
@pytest.mark.parametrize("padding", [-1, 0])
@pytest.mark.parametrize("mode", range(3))
@pytest.mark.parametrize("has_last", [False, True])
def test_bags_for_a_card_by_name_are_as_its_kernel_makes_them(
    mode: int, padding: int, dtype: torch.dtype, has_last: bool
) -> None:
    bags = torch.ops.aten._embedding_bag.default

    def made(device: str) -> list[tuple[Any, ...]]:
        with FakeTensorMode(), torch.device(device):
            indices, offsets = torch.zeros(48, dtype=torch.int64), torch.zeros(8, dtype=torch.int64)
            table = torch.zeros(50, CHANNELS, dtype=dtype)
            args = table, indices, offsets, False, mode, False, None, has_last, padding
            return [form(each) for each in as_kernel(bags, args, bags(*args), "cuda")]

    assert made("cpu") == made("cuda")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_norms_of_half_weights_are_kept_in_fp32_on_every_device(device: str) -> None:
    norm = torch.ops.aten._weight_norm_interface.default
    with FakeTensorMode():
        args = tuple(torch.zeros(8, size, dtype=FLOAT16, device=device) for size in (8, 1))
        assert [each.dtype for each in as_kernel(norm, args, norm(*args))] == [FLOAT16, torch.float32]


# Peaks


class Stack(nn.Module):
    """Layers of one kind behind linear ones, or behind convolutions of one pixel."""

    def __init__(self, case: Case):
        super().__init__()
        first = (
            (lambda: nn.Conv2d(CHANNELS, CHANNELS, 1)) if case.shape == IMAGE else lambda: nn.Linear(*2 * (CHANNELS,))
        )
        self.layers = nn.ModuleList(nn.Sequential(first(), case.make(), nn.SiLU()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def stacked(name: str, mode: str) -> Workload:
    case, (autocast, weights) = LAYERS[name], MODES[mode]

    def batch(rows: int, _: int | None) -> Tensor:
        x = torch.randn(rows, *case.shape, dtype=weights)
        return x.contiguous(memory_format=torch.channels_last) if case.channels_last else x

    return Workload(
        name,
        lambda: Stack(case).to(weights),
        batch,
        lambda model, x: model(x).float().square().mean(),
        batch_size=ROWS,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        autocast=autocast,
    )


DIFFERENT = {  # layers whose kernels differ from their fakes, and how they are run
    *(("group", mode) for mode in ("amp-bf16", "amp-fp16")),
    ("group-last", "amp-bf16"),
    ("batch-without-weight", "amp-bf16"),
    ("weight", "fp16"),
    ("bags-sum", "bf16"),
    ("bags-mean", "bf16"),
    ("bags-max", "amp-bf16"),
}
EVERY = [(name, mode) for name in LAYERS for mode in MODES]


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(*each, id="-".join(each), marks=() if each in DIFFERENT else pytest.mark.exhaustive)
        for each in EVERY
    ],
)
def test_a_stack_of_such_layers_is_measured_as_predicted(name: str, mode: str) -> None:
    workload = stacked(name, mode)
    report = remat.validate(workload, remat.plan(workload, budget=1 << 40, target="cpu", numerics="bitwise"), repeats=1)
    assert report.passed
    assert report.measured["peak_bytes"] == pytest.approx(report.predicted["peak_bytes"], rel=1e-4)
    assert not any("could not be measured" in note for note in report.notes)
