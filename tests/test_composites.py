"""Functions that torch makes of other operators run, while a step is recorded, those that a device runs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from remat._torch.step_fakes import StepFakes
from remat._torch.training import UnseenMode
from remat.capture.composites_on_fakes import composites_on_fakes
from remat.costing.device_allocator import measure_peak
from remat.costing.planning_device import find_planning_device
from remat.evaluation.evaluator import Memory
from remat.evaluation.graph import Graph
from remat.evaluation.plan import Region
from remat.execution.apply import apply
from remat.planning.profiling import fake_step
from remat.recording.known_values import KnownValues
from remat.recording.record import record
from remat.workload.workload import Workload
from tests.devices import DEVICE
from tests.toys import CPU, plan_by_hand, recorded

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")

ROWS, WIDTH = 256, 32
LOOKED_AT = ("prim.device.default", "aten.detach.default", "aten.alias.default", "aten._local_scalar_dense.default")


class Seen(UnseenMode):
    """Operators that run, without reads."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) not in (*LOOKED_AT, "aten.equal.default"):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def on_fakes() -> Iterator[None]:
    with StepFakes(allow_non_fake_inputs=True), KnownValues().followed(), composites_on_fakes():
        yield


def operators(function: Callable[[], Any], around: Callable[[], contextlib.AbstractContextManager[Any]]) -> list[str]:
    torch.manual_seed(0)
    with torch.device(DEVICE), around(), Seen() as seen:
        function()
    return seen.names


def r(*shape: int) -> Tensor:
    return torch.rand(*shape)


def i(count: int = 4) -> Tensor:
    return (r(count) * 4).long()


def spectrum() -> Tensor:
    return torch.stft(r(2, 256), 64, window=torch.hann_window(64), return_complex=True)


def one_hot_of_a_function(x: Tensor) -> Tensor:
    return (F.one_hot(i(), 5) * x).sum()


COMPOSITES: dict[str, Callable[[], Any]] = {
    "one_hot": lambda: F.one_hot(i(), 8),
    "one_hot-of-torch.ops": lambda: torch.ops.aten.one_hot(i().view(2, 2), 8),
    "one_hot-of-nothing": lambda: F.one_hot(i()[:0], 8),
    "one_hot-under-autocast": lambda: torch.autocast(DEVICE.type, torch.bfloat16)(lambda: F.one_hot(i(), 8))(),
    "one_hot-without-gradients": lambda: torch.no_grad()(lambda: F.one_hot(i(), 8))(),
    "one_hot-in-inference": lambda: torch.inference_mode()(lambda: F.one_hot(i(), 8))(),
    "one_hot-counted": lambda: F.one_hot(torch.arange(4)),
    "one_hot-in-vmap": lambda: torch.vmap(lambda x: F.one_hot(x, 8))(i().view(2, 2)),
    "one_hot-in-grad": lambda: torch.func.grad(one_hot_of_a_function)(r(5)),
    "alpha_dropout": lambda: F.alpha_dropout(r(4, 8), training=True),
    "baddbmm": lambda: torch.baddbmm(r(2, 4, 4), r(2, 4, 8), r(2, 8, 4)),
    "batch_norm": lambda: F.batch_norm(r(4, 2, 4, 4), None, None, training=True),
    "bilinear": lambda: F.bilinear(r(4, 8), r(4, 8), r(2, 8, 8)),
    "binary_cross_entropy": lambda: F.binary_cross_entropy_with_logits(r(4, 8), r(4, 8), pos_weight=r(8)),
    "block_diag": lambda: torch.block_diag(r(2, 2), r(2, 2)),
    "cartesian_prod": lambda: torch.cartesian_prod(i(), i()),
    "cdist": lambda: torch.cdist(r(4, 8), r(4, 8)),
    "cosine_embedding_loss": lambda: F.cosine_embedding_loss(r(4, 8), r(4, 8), r(4)),
    "cosine_similarity": lambda: F.cosine_similarity(r(4, 8), r(4, 8)),
    "cross_entropy-of-probabilities": lambda: F.cross_entropy(r(4, 8), r(4, 8)),
    "cross_entropy-smooth": lambda: F.cross_entropy(r(4, 8), i(), label_smoothing=0.1),
    "dropout2d": lambda: F.dropout2d(r(4, 8, 2, 2)),
    "einsum": lambda: torch.einsum("bi,bj->ij", r(4, 8), r(4, 8)),
    "embedding-with-a-norm": lambda: F.embedding(i(), r(8, 4), max_norm=1.0),
    "embedding_bag": lambda: F.embedding_bag(i().view(2, 2), r(8, 4)),
    "fft": lambda: torch.fft.irfft2(torch.fft.rfft2(r(4, 8))),
    "gumbel_softmax": lambda: F.gumbel_softmax(r(4, 8), hard=True),
    "gather-sorted": lambda: torch.take_along_dim(r(4, 8), r(4, 8).argsort(-1), -1),
    "corrcoef": lambda: torch.corrcoef(r(4, 8)),
    "cov": lambda: torch.cov(r(4, 8)),
    "cov-weighted": lambda: torch.cov(r(4, 8), fweights=i(8), aweights=r(8)),
    "gaussian_nll_loss": lambda: F.gaussian_nll_loss(r(4, 8), r(4, 8), r(4, 8)),
    "instance_norm": lambda: F.instance_norm(r(4, 2, 4, 4)),
    "interpolate": lambda: F.interpolate(r(1, 2, 8, 8), scale_factor=2, mode="bicubic"),
    "isin": lambda: torch.isin(i(), i(2)),
    "istft": lambda: torch.istft(spectrum(), 64, window=torch.hann_window(64)),
    "kl_div": lambda: F.kl_div(r(4, 8), r(4, 8), reduction="batchmean"),
    "kron": lambda: torch.kron(r(2, 2), r(2, 2)),
    "linear": lambda: F.linear(r(2, 4, 8), r(4, 8), r(4)),
    "local_response_norm": lambda: F.local_response_norm(r(4, 4, 4, 4), 2),
    "lstm-cell": lambda: nn.LSTMCell(8, 8)(r(4, 8)),
    "margin": lambda: F.multi_margin_loss(r(4, 8), i()),
    "matmul": lambda: r(2, 1, 4, 8) @ r(3, 8, 4),
    "matrix_norm": lambda: torch.linalg.matrix_norm(r(4, 8)),
    "max_unpool2d": lambda: F.max_unpool2d(*F.max_pool2d_with_indices(r(1, 2, 4, 4), (2, 2)), (2, 2)),
    "multi_dot": lambda: torch.linalg.multi_dot([r(4, 8), r(8, 4), r(4, 4)]),
    "multi_head_attention": lambda: nn.MultiheadAttention(8, 2, dropout=0.1)(r(4, 2, 8), r(4, 2, 8), r(4, 2, 8)),
    "pad-circular": lambda: F.pad(r(1, 2, 8), (2, 2), mode="circular"),
    "pdist": lambda: F.pdist(r(4, 8)),
    "pixel_shuffle": lambda: F.pixel_shuffle(r(1, 8, 4, 4), 2),
    "poisson_nll_loss": lambda: F.poisson_nll_loss(r(4, 8), r(4, 8), full=True),
    "quantile": lambda: r(4, 8).quantile(0.5, -1),
    "renorm": lambda: r(4, 8).renorm(2, 0, 1.0),
    "repeat_interleave": lambda: r(4, 4).repeat_interleave(2, 0),
    "rms_norm": lambda: F.rms_norm(r(4, 8), (8,)),
    "rrelu": lambda: F.rrelu(r(4, 8), training=True),
    "scatter_reduce": lambda: r(4, 8).scatter_reduce(0, i().expand(1, 4), r(4, 8), "amax"),
    "std": lambda: r(4, 8).std(),
    "stft": spectrum,
    "tensordot": lambda: torch.tensordot(r(4, 8), r(8, 4), 1),
    "transformer-layer": lambda: nn.TransformerEncoderLayer(8, 2, 16)(r(4, 2, 8)),
    "trapezoid": lambda: torch.trapz(r(4, 8)),
    "triplet_margin_loss": lambda: F.triplet_margin_loss(r(4, 8), r(4, 8), r(4, 8)),
    "vander": lambda: torch.vander(r(4)),
    "write-at": lambda: r(4, 8).__setitem__((i(2),), 0.0),
}


@pytest.mark.any_device
@pytest.mark.parametrize("name", COMPOSITES)
def test_fakes_of_a_step_run_the_operators_of_real_tensors(name: str) -> None:
    assert operators(COMPOSITES[name], on_fakes) == operators(COMPOSITES[name], contextlib.nullcontext)


def test_a_number_of_classes_is_read_as_ever() -> None:
    with on_fakes(), pytest.raises(DataDependentOutputException):
        F.one_hot(i())
    with on_fakes(), pytest.raises(RuntimeError, match="LongTensor"):
        F.one_hot(i().int(), 4)


def test_a_compiler_s_own_fakes_and_real_tensors_are_left_alone() -> None:
    def names(around: contextlib.AbstractContextManager[Any]) -> list[str]:
        return operators(lambda: F.one_hot(i(), 8), lambda: around)

    alone, real = names(FakeTensorMode()), names(contextlib.nullcontext())
    with on_fakes():
        pass
    with composites_on_fakes():
        assert names(FakeTensorMode()) == alone != real == names(contextlib.nullcontext())


# A step


class Routed(nn.Module):
    """Chooses by `chosen`, straight through: gradients pass what chose."""

    def __init__(self, chosen: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.chosen = chosen

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            p = layer(x).softmax(-1)
            x = x + (self.chosen(p.argmax(-1)) + p - p.detach()) * x
        return x.square().mean()


def workload(chosen: Callable[[Tensor], Tensor], autocast: torch.dtype | None = None) -> Workload:
    return Workload(
        "routed",
        lambda: Routed(chosen),
        lambda size, length: torch.randn(size, WIDTH),
        lambda model, batch: model(batch),
        batch_size=ROWS,
        autocast=autocast,
        optimizer=None,
    )


CHOSEN: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda index: F.one_hot(index, WIDTH),
    "broken": lambda index: (torch._dynamo.graph_break(), F.one_hot(index, WIDTH))[1],
    "vmap": lambda index: torch.vmap(lambda each: F.one_hot(each, WIDTH))(index),
}


def test_a_step_with_one_hot_peaks_as_predicted_with_and_without_regions() -> None:
    """A cast of a comparison is not saved, and zeros that ones are written into are."""
    w = workload(CHOSEN["whole"])
    _, graph = recorded(w)
    memory = Memory(graph)
    middle = [number for number, node in enumerate(graph.nodes) if "one_hot" in node.op]
    assert len(middle) == 3
    regions = (Region(middle[0] - 1, middle[2], saved=(middle[1],)),)
    found = []
    for chosen in ((), regions):
        torch.manual_seed(0)
        model = w.build()
        apply(model, plan_by_hand(graph, chosen, budget_bytes=1 << 30))
        x = w.batch(ROWS, None)
        for _ in range(2):
            w.step(model, x).backward()
            model.zero_grad()
        fixed = sum(p.nbytes for p in model.parameters()) + x.nbytes
        step = functools.partial(lambda model, x: w.step(model, x).backward(), model, x)
        peak = fixed + measure_peak(step, CPU, requested=True)
        found.append(peak - memory.curve(chosen).peak_bytes)
    assert found == [0, 0]


@pytest.mark.parametrize("chosen", CHOSEN)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_plan_for_a_gpu_has_its_operators(chosen: str, autocast: torch.dtype | None) -> None:
    """It checks no classes before it writes; under `vmap` every device compares."""
    graph: Graph = record(fake_step(workload(CHOSEN[chosen], autocast), find_planning_device("h100-80gb")))
    names = {kind.name for kind in graph.kinds}
    written = {"aten.zeros.default", "aten.scatter_.value"}
    assert "aten.aminmax.default" not in names
    assert names >= {"aten.eq.Tensor"} if chosen == "vmap" else names >= written and "aten.eq.Tensor" not in names
