"""A forward is captured on this machine as the device would trace it that a plan is for."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import queue
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from remat.capture.anchors import identity_of
from remat.capture.nodes import called, captured_nodes
from remat.costing.planning_device import find_planning_device
from remat.errors import CaptureError
from remat.evaluation.evaluator import Memory
from remat.evaluation.graph import Graph
from remat.evaluation.identity import canonical
from remat.fusion.casts import with_casts
from remat.fusion.groups import find_groups
from remat.planning.profiling import fake_step
from remat.recording.record import record
from remat.workload.workload import Workload

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),  # of torch's own imports
]

H100 = "h100-80gb"


class Toy(nn.Module):
    """`function` of a layer's output, in a model."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.function(self.linear(x)).float()).square().sum()


def workload(function: Callable[[Tensor], Tensor], autocast: torch.dtype | None = None) -> Workload:
    return Workload(
        "toy",
        lambda: Toy(function),
        lambda size, length: {"x": torch.randn(8, 8)},
        lambda model, batch: model(**batch),
        batch_size=4,
        autocast=autocast,
    )


def captured(function: Callable[[Tensor], Tensor], target: str, autocast: torch.dtype | None = None) -> fx.GraphModule:
    """The one graph of a forward, as it is captured for a target."""
    step = fake_step(workload(function, autocast), find_planning_device(target))
    step.warm_up()
    (graph_module,) = (module for _, module in step.graphs.distinct)
    return graph_module


def calls(graph_module: fx.GraphModule) -> list[str]:
    return [node.op for node in identity_of(graph_module)]


def values(graph_module: fx.GraphModule) -> dict[str, Any]:
    """The last value of each operator."""
    return {canonical(called(node)): node.meta.get("example_value") for node in captured_nodes(graph_module)}


QUESTIONS = {
    "type": lambda x: x.device.type == "cuda",
    "type among others": lambda x: x.device.type not in ("cpu", "mps"),
    "is_cuda": lambda x: x.is_cuda,
    "is_cpu": lambda x: not x.is_cpu,
    "equal": lambda x: x.device == torch.device("cuda", 0),
    "index": lambda x: x.get_device() == 0,
    "text": lambda x: "cuda" in str(x.device),
    "available": lambda x: torch.cuda.is_available() and x.is_cuda,
    "capability": lambda x: x.is_cuda and torch.cuda.get_device_capability(x.device) == (9, 0),
    "made there": lambda x: torch.zeros(2, device=x.device).is_cuda,
    "moved there": lambda x: torch.zeros(2).to(x.device).device.type == "cuda",
    "named there": lambda x: x.is_cuda and torch.zeros(2, device="cuda:0").device == x.device,
}


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS.keys())
def test_code_that_asks_where_a_tensor_is_takes_the_branch_of_the_target(question: Callable[[Tensor], bool]) -> None:
    def function(x: Tensor) -> Tensor:
        return x.sin() if question(x) else x.cos()

    assert "sin" in calls(captured(function, H100))
    assert "cos" in calls(captured(function, "cpu"))


def test_what_is_made_on_the_target_is_made_here() -> None:
    def function(x: Tensor) -> Tensor:
        row = torch.arange(8, device=x.device) + torch.ones(8, device="cuda") + x.new_ones(8, device=x.device)
        return x * row.to(x.device, x.dtype)

    for node in captured(function, H100).graph.nodes:
        assert "cuda" not in str((node.args, node.kwargs))
        assert not isinstance(value := node.meta.get("example_value"), Tensor) or value.device.type == "cpu"


def test_who_compiles_beside_a_capture_hears_where_the_tensors_are() -> None:
    def beside(x: Tensor) -> Tensor:
        return x.sin() if x.is_cuda else x.cos()

    found: queue.SimpleQueue[Tensor] = queue.SimpleQueue()  # no state of the model that is put back

    @torch.compiler.disable
    def compiled() -> None:
        found.put(torch.compile(beside, backend="eager")(torch.ones(2)))

    def function(x: Tensor) -> Tensor:
        compiled()
        return x.sin()

    step = fake_step(workload(function), find_planning_device(H100))
    record(step)
    assert found.get_nowait().shape == (2,)
    assert torch.equal(torch.compile(beside, backend="eager")(torch.ones(2)), torch.ones(2).cos())


def by_type(x: Tensor) -> Tensor:
    with torch.autocast(device_type=x.device.type, enabled=False):
        return x.float() @ x.float().t()


def maybe(x: Tensor) -> Tensor:
    """As libraries turn autocast off, where it is on."""
    on = torch.is_autocast_enabled(x.device.type)
    with torch.autocast(x.device.type, enabled=False) if on else contextlib.nullcontext():
        return x.float() @ x.float().t()


def by_default(x: Tensor) -> Tensor:
    with torch.autocast(x.device.type):
        return x @ x.t()


def asked(x: Tensor) -> Tensor:
    """As attention that takes 16 bits asks."""
    wanted = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else torch.float64
    return x.to(wanted).contiguous()


def asked_of_cuda(x: Tensor) -> Tensor:
    return x.to(torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else torch.float64).contiguous()


@pytest.mark.filterwarnings("ignore:.*get_autocast_gpu_dtype.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("function", "autocast", "dtype"),
    [
        pytest.param(by_type, torch.bfloat16, torch.float32, id="off by type"),
        pytest.param(maybe, torch.bfloat16, torch.float32, id="off where on"),
        pytest.param(by_default, None, torch.float16, id="CUDA's default"),
        pytest.param(by_default, torch.bfloat16, torch.bfloat16, id="that around it"),
        pytest.param(asked, torch.bfloat16, torch.bfloat16, id="asked by type"),
        pytest.param(asked, None, torch.float64, id="asked by type, off"),
        pytest.param(asked_of_cuda, torch.bfloat16, torch.bfloat16, id="asked of CUDA"),
        pytest.param(asked_of_cuda, None, torch.float64, id="asked of CUDA, off"),
    ],
)
def test_autocast_of_the_target_is_that_of_the_step(
    function: Callable[[Tensor], Tensor], autocast: torch.dtype | None, dtype: torch.dtype
) -> None:
    found = values(captured(function, H100, autocast))
    assert found["matmul" if "matmul" in found else "contiguous"].dtype is dtype


STEPS: dict[str, Callable[[], Any]] = {
    "named": lambda: torch.autocast("cuda", torch.bfloat16),
    "default": lambda: torch.autocast("cuda"),
    "older": lambda: torch.cuda.amp.autocast(dtype=torch.bfloat16),
    "of the batch": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.filterwarnings("ignore:.*torch.cuda.amp.autocast:FutureWarning")
@pytest.mark.parametrize("entered", STEPS)
def test_autocast_that_a_step_enters_is_that_of_the_target(entered: str) -> None:
    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with STEPS[entered]():
            loss: Tensor = model(**batch)
        return loss

    def function(x: Tensor) -> Tensor:
        return torch.softmax(x @ x, -1).pow(2)

    own = dataclasses.replace(workload(function), step=step)
    around = workload(function, torch.float16 if entered == "default" else torch.bfloat16)
    graphs = [record(fake_step(each, find_planning_device(H100))) for each in (own, around)]
    assert graphs[0].about["autocast"] == graphs[1].about["autocast"] is not None
    sizes = [(graph.storages.size_bytes.tolist(), graph.storages.death.tolist()) for graph in graphs]
    assert sizes[0] == sizes[1]


def test_autocast_of_the_target_that_was_made_before_the_step_is_refused() -> None:
    with warnings.catch_warnings(action="ignore"):
        before = torch.autocast("cuda", torch.bfloat16)
    if before._enabled:
        pytest.skip("CUDA is at hand")

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with before:
            loss: Tensor = model(**batch)
        return loss

    with pytest.raises(CaptureError, match=r"enters a torch.autocast\('cuda'\) that was made outside"):
        record(fake_step(dataclasses.replace(workload(torch.relu), step=step), find_planning_device(H100)))


@pytest.mark.parametrize(
    ("function", "here"),
    [
        pytest.param(lambda x: x.pow(2), torch.bfloat16, id="pow"),
        pytest.param(lambda x: F.layer_norm(x, (8,)), torch.bfloat16, id="layer_norm"),
        pytest.param(lambda x: F.softmax(x, -1), torch.bfloat16, id="softmax"),
        pytest.param(lambda x: F.softplus(x), torch.bfloat16, id="softplus"),
    ],
)
def test_values_have_the_dtypes_that_the_target_gives_them(
    function: Callable[[Tensor], Tensor], here: torch.dtype
) -> None:
    """And so have the dtypes that code asks for while it is traced."""

    def asking(x: Tensor) -> Tensor:
        return x.relu().to(function(x).dtype).contiguous()

    for target, dtype in ((H100, torch.float32), ("cpu", here)):
        assert values(captured(asking, target, torch.bfloat16))["contiguous"].dtype is dtype


def test_groups_are_those_of_the_target() -> None:
    """CUDA widens a power, so what a product takes of it is cast; on the CPU there is nothing to cast."""

    def function(x: Tensor) -> Tensor:
        return (0.5 * x.pow(3) + x) @ x.t()

    def groups(target: str) -> list[str]:
        return [group.text for group in find_groups(with_casts(captured(function, target, torch.bfloat16)))]

    assert groups(H100) != groups("cpu")


def nodes_of(function: Callable[[Tensor], Tensor], target: str) -> Graph:
    return record(fake_step(workload(function, torch.bfloat16), find_planning_device(target)))


def counted(x: Tensor) -> Tensor:
    """As grouped experts count their tokens."""
    experts = x.argmax(-1)
    numbers = experts.float() if x.device.type in ("cpu", "mps") else experts.int()
    ends = torch.histc(numbers, bins=8, min=0, max=7).cumsum(0, dtype=torch.int32)
    return x * ends


def test_integers_are_counted_as_on_the_target() -> None:
    assert "int" in calls(captured(counted, H100)) and "int" not in calls(captured(counted, "cpu"))
    assert nodes_of(counted, H100).nodes


def test_a_kernel_that_is_not_modelled_is_refused_in_words_of_ours() -> None:
    """Dynamo wraps the refusal, and prints the operator's arguments before it."""
    layer = nn.GRU(8, 8)
    with pytest.raises(CaptureError, match=r"^`gru` cannot be planned for a CUDA device from here"):
        captured(lambda x: layer(x)[0], H100)


@pytest.mark.cuda
@pytest.mark.parametrize("function", [counted, by_type, maybe, by_default, lambda x: x.pow(3) + x])
def test_a_capture_by_name_is_that_on_the_device(function: Callable[[Tensor], Tensor]) -> None:
    for autocast in (None, torch.bfloat16):
        by_name, at_hand = (identity_of(captured(function, target, autocast)) for target in (H100, "cuda"))
        assert by_name == at_hand


# Code that is not traced


def attended(x: Tensor) -> Tensor:
    heads = x.view(4, 64, 4, 32).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1).square().mean()


OWN_LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "widened": lambda x: F.layer_norm(x.softmax(-1), (128,)).pow(2).exp().mean(),
    "entropy": lambda x: (F.softmax(x, -1) * F.log_softmax(x, -1)).sum(-1).mean(),
    "attention": attended,
}


class Scores(nn.Module):
    def __init__(self, loss: Callable[[Tensor], Tensor]):
        super().__init__()
        self.linear, self.loss = nn.Linear(64, 128), loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.linear(x))


def recorded(within: Callable[[Tensor], Tensor], behind: Callable[[Tensor], Tensor]) -> Graph:
    """Record a step under bfloat16 whose model ends with `within`, and which itself ends with `behind`."""
    step = Workload(
        "scores",
        functools.partial(Scores, within),
        lambda size, _: torch.randn(size, 64),
        lambda model, batch: behind(model(batch)),
        batch_size=256,
        autocast=torch.bfloat16,
    )
    return record(fake_step(step, find_planning_device(H100)), alignment_bytes=1)


@pytest.mark.parametrize("own", OWN_LOSSES)
def test_code_of_the_step_and_between_graphs_has_the_kernels_of_the_device(own: str) -> None:
    """It needs what the same code needs in a captured graph, whose nodes have them."""
    loss = OWN_LOSSES[own]
    apart = torch.compiler.disable(lambda x: loss(x))
    at: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
        "in the model": (loss, lambda x: x),
        "in the step": (lambda x: x, loss),
        "between graphs": (apart, lambda x: x),
    }
    peaks = {}
    for where, (within, behind) in at.items():
        peaks[where] = Memory(recorded(within, behind)).peak_without_regions
    assert set(peaks.values()) == {peaks["in the model"]}


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_what_a_step_recomputes_by_itself_has_the_kernels_of_its_forward(is_reentrant: bool) -> None:
    again = functools.partial(checkpoint, OWN_LOSSES["widened"], use_reentrant=is_reentrant)
    graph = recorded(lambda x: x, again)
    norms = [op for op, kind in enumerate(graph.op_kind) if graph.kinds[kind].name == "aten.native_layer_norm.default"]
    first, second = norms
    assert first < graph.forward_end < second
    assert graph.op_kind[first] == graph.op_kind[second]


def test_hooks_of_a_step_have_the_kernels_of_the_device() -> None:
    def hooked(x: Tensor) -> Tensor:
        x.register_hook(lambda gradient: F.dropout(gradient, 0.1))
        return x.square().mean()

    graph = recorded(lambda x: x, hooked)
    in_backward = {graph.kinds[kind].name for kind in graph.op_kind[graph.forward_end :]}
    assert "aten.native_dropout.default" in in_backward


class Counting(TorchFunctionMode):
    """Counts calls of torch's functions, and has a state that Dynamo reads."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {})) * self.step if func is torch.square else func(*args, **(kwargs or {}))


class UnderAMode(nn.Module):
    """Two graphs, the first of which ends under a mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        with Counting():
            x = torch.square(self.linear(x))
            torch._dynamo.graph_break()
            x = torch.square(x)
        return self.linear(x).square().mean()


@pytest.mark.parametrize("where", ["model", "step"])
def test_function_modes_of_a_user_are_planned_as_before(where: str) -> None:
    def step(model: nn.Module, batch: Tensor) -> Tensor:
        with Counting() if where == "step" else contextlib.nullcontext():
            return model(batch)

    build = UnderAMode if where == "model" else functools.partial(Scores, lambda x: torch.square(x).mean())
    under = Workload("modes", build, lambda size, _: torch.randn(size, 64), step, batch_size=8)
    here, there = (record(fake_step(under, find_planning_device(target))) for target in ("cpu", H100))
    assert [node.op for node in here.nodes] == [node.op for node in there.nodes]
