"""Fused groups: found by rules, exact in float64, as near to it as the nodes one by one, predicted to the byte.

They are recomputed like any other node. A plan of a fused step is compared with the fused step without one.

Most tests let kernels run operator by operator, which takes no compiler; `exhaustive` ones compile them.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import sympy
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import remat
from remat._torch.inductor import PendingKernels
from remat.capture.nodes import called, captured_nodes
from remat.cli.screen import plan_text
from remat.costing.costs import estimated_costs
from remat.costing.operator_timing import time_operators
from remat.costing.planning_device import find_planning_device
from remat.costing.profile import Profile
from remat.errors import RematError, UsageError
from remat.evaluation.evaluator import Memory
from remat.evaluation.form import Chunk, Form, form_of
from remat.evaluation.plan import Plan, to_refs
from remat.execution.eager.replay import replay
from remat.fusion import fused_group, kernels
from remat.fusion.casts import with_casts
from remat.fusion.formed import formed
from remat.fusion.fuse import as_group, fuse, fused_groups
from remat.fusion.fused_group import GroupRun
from remat.fusion.groups import find_groups
from remat.fusion.open_sizes import Sizes, opened
from remat.fusion.sums import FEW, sum_in_stages
from remat.fusion.zeros import without
from remat.planning.planner import plan
from remat.planning.profiling import fake_step, profile_step
from remat.recording.fake_step import FakeStep
from remat.recording.record import record
from remat.validation.groups import GroupsSeen, far_from
from remat.validation.validating import validate
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload
from tests.devices import DEVICE
from tests.examples import examples
from tests.fuzzing import verdicts
from tests.graphs import DYNAMO_LOOKS_AT_GRAD
from tests.interpreted import interpreted
from tests.studies import plan_profile
from tests.toys import every_block, nested, pairs_of_segments, plan_by_hand

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")

WIDTH, CLASSES, LENGTH = 32, 160, 24
FUSED = Form(fused=True)


@pytest.fixture(autouse=True)
def without_compiler(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("exhaustive") or DEVICE.type != "cpu":
        yield
        return
    with interpreted():
        yield


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other_norm = RMSNorm(), nn.LayerNorm(WIDTH)
        self.mix, self.gate, self.up = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + F.dropout(self.mix(self.norm(x)), 0.1, self.training)
        y = self.other_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = RMSNorm(), nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).float().view(-1, CLASSES), labels.view(-1))


def batch(samples: int, length: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, CLASSES, (samples, length or LENGTH))
    return ids, ids.roll(1)


def step(model: Callable[..., Any], given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(*given)
    return loss


def workload(name: str = "decoder", autocast: torch.dtype | None = torch.bfloat16, layers: int = 2) -> Workload:
    return Workload(
        name, lambda: Decoder(layers), batch, step, batch_size=4, seq_len=LENGTH, autocast=autocast,
        optimizer=torch.optim.AdamW,
    )  # fmt: skip


def captured(
    function: Callable[..., Any], *given: Any, autocast: bool = False, dynamic: bool = False
) -> fx.GraphModule:
    """The graph of one forward, as Dynamo hands it over; `dynamic`: with sizes left open."""
    found: list[fx.GraphModule] = []

    def take(graph_module: fx.GraphModule, inputs: list[Any]) -> fx.GraphModule:
        found.append(graph_module)
        return graph_module

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        torch.compile(function, backend=take, dynamic=dynamic)(*given)
    return found[0]


def groups_in(function: Callable[..., Any], *given: Any) -> list[str]:
    return [group.text for group in find_groups(captured(function, *given))]


def vector() -> torch.Tensor:
    return torch.randn(4, 8, requires_grad=True)


# Which nodes


def test_the_groups_of_a_decoder_are_its_norms_with_the_sums_before_them_its_gates_and_its_loss() -> None:
    graph = with_casts(captured(Decoder(1).train(), *batch(2, 8), autocast=True))
    norm = "to,pow,mean,add,rsqrt,mul,to,mul"
    assert [group.text for group in find_groups(graph)] == [
        f"fused({norm.removeprefix('to,')},autocast)".replace("to,mul", "mul"),
        "fused(add,layer_norm,autocast,autocast)",
        "fused(silu,mul)",
        f"fused(add,{norm.removeprefix('to,')},autocast)".replace("to,mul", "mul"),
        "fused(to,cross_entropy)",
    ]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x @ x.t(),
        lambda x: F.dropout(x, 0.5),
        lambda x: x.sin().add_(1),
        lambda x: F.embedding(torch.tensor([1, 2]), x),
        lambda x: x.view(-1).view(4, 8),
        lambda x: x.exp(),
        lambda x: F.conv1d(x[None], x[None, :, :3]),
    ],
    ids=["product", "random", "in-place", "look-up", "views", "one kernel", "convolution"],
)
def test_what_has_no_rule_stays_outside(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert groups_in(lambda x: torch.mm(function(x).view(1, -1), function(x).view(-1, 1)), vector()) == []


def test_a_group_ends_where_somebody_outside_reads_it() -> None:
    found = groups_in(lambda x: (torch.mm(x.sin().cos(), x.t()) * 2).exp().sum(), vector())
    assert found == ["fused(sin,cos)", "fused(mul,exp,sum)"]


def test_no_context_opens_or_closes_inside_a_group() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin().cos()
        with torch.autocast("cpu", enabled=False):
            z = y.exp().tanh()
        return z.sin().cos().sum()

    assert groups_in(function, vector()) == ["fused(sin,cos)", "fused(exp,tanh)", "fused(sin,cos,sum)"]


def test_nothing_that_is_written_in_place_is_in_a_group() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.add_(1)
        return torch.mm(y, x.t()).exp().sum()

    assert groups_in(function, vector()) == ["fused(exp,sum)"]


@pytest.mark.parametrize(
    "write",
    [
        lambda h: F.leaky_relu(h, 0.1, True),
        lambda h: F.hardswish(h, True),
        lambda h: F.dropout(h, 0.5, True, True),
        lambda h: torch._foreach_add_([h], 1.0),
        lambda h: h.masked_fill_(h > 0, 0.0),
        lambda h: torch.add(h.detach(), 1, out=h.detach()),
        lambda h: F.batch_norm(h.detach(), running_mean=h.detach()[0], running_var=h.detach()[1], training=True),
    ],
    ids=["leaky", "hardswish", "dropout", "foreach", "masked_fill", "out", "statistics"],
)
def test_whoever_may_write_keeps_what_it_is_given_out_of_groups(write: Callable[[torch.Tensor], Any]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        h = torch.mm(x, x.t())
        skip = (h + 1) * 0.5
        write(h)
        return (skip + h).sum()

    assert all("mul" not in text for text in groups_in(function, vector()))


def test_a_value_that_is_written_meanwhile_is_cast_where_it_is_read() -> None:
    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        h = x * 2.0
        h[:, :4] = 0
        return F.linear(h, weight).float().sum()

    x, weight = vector(), torch.randn(5, 8, requires_grad=True)
    graph = captured(function, x, weight, autocast=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fuse(with_casts(graph))(x, weight)[0], function(x, weight))


def test_a_result_that_nobody_differentiates_has_no_gradient_and_makes_no_nan() -> None:
    norm = nn.LayerNorm(8)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        p = (x * 1.5).masked_fill(x > 0, -torch.inf).softmax(-1)
        entropy = -(p * p.log()).sum(-1)
        return (p * x).sum(), entropy.mean(), norm(p * 2.0)

    x = torch.cat([-torch.ones(4, 4), torch.ones(4, 4)], 1).requires_grad_()
    fused = torch.compile(function, backend=lambda graph, inputs: fuse(graph))
    (expected,) = torch.autograd.grad(function(x)[0], x)
    fused(x)[0].backward()
    assert x.grad is not None and torch.allclose(x.grad, expected)
    assert norm.weight.grad is None and norm.bias.grad is None


def test_missing_gradients_are_followed_only_where_they_make_zeros() -> None:
    aten, graph = torch.ops.aten, fx.Graph()
    one, other = graph.placeholder("one"), graph.placeholder("other")
    nodes = [
        graph.call_function(aten.full_like.default, (one, 3.0)),
        graph.call_function(aten.slice_scatter.default, (one, other, 0, 0, 4)),
        graph.call_function(aten.mul.Tensor, (one, other)),
        graph.call_function(aten.add.Tensor, (one, other)),
    ]
    for node in (one, other, *nodes):
        node.meta["val"] = torch.ones(4)
    graph.output(tuple(nodes))
    found = without(fx.GraphModule({}, graph), [one])(torch.full((4,), 2.0))
    assert [None if value is None else value.tolist() for value in found] == [[3.0] * 4, [2.0] * 4, None, [2.0] * 4]


def test_results_that_leave_the_graph_are_storages_of_their_own() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        r = x.sin() * 2
        return r + 1, r + 1

    one, other = torch.compile(function, backend=lambda graph, inputs: fuse(graph))(vector())
    assert one.data_ptr() != other.data_ptr()


def test_a_number_that_changes_is_no_part_of_a_group() -> None:
    def function(x: torch.Tensor, scale: float) -> torch.Tensor:
        return (x * scale).sin().exp().sum()

    fused = torch.compile(function, backend=lambda graph, inputs: fuse(graph), dynamic=True)
    x = vector()
    for scale in (0.5, 0.75, 0.9):
        assert torch.allclose(fused(x, scale), function(x, scale))


def test_what_is_made_without_a_gradient_stays_outside() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = x.abs().amax() + 1
        return (x / scale).tanh().sum()

    assert groups_in(function, vector()) == ["fused(div,tanh,sum)"]


def test_a_view_that_is_read_outside_is_looked_at_again_there() -> None:
    x = vector()
    graph = captured(lambda x: torch.mm(x.sin().cos().t(), x).sum() * 2, x)
    fused = fuse(graph)
    assert [group.text for group in fused_groups(fused)] == ["fused(sin,cos)", "fused(sum,mul)"]
    names = [node.name for node in captured_nodes(fused)]
    assert len(names) == 4, "the group, the view, the product, the rest"


def test_views_of_what_a_group_alone_reads_belong_to_it() -> None:
    def rotate(x: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
        a, b = product.view(4, 2, 4).transpose(0, 1).chunk(2, -1)
        return torch.cat([-b, a], -1) * x.sum()

    def alone(x: torch.Tensor) -> torch.Tensor:
        return rotate(x, torch.mm(x, x.t() @ x)).sum()

    def shared(x: torch.Tensor) -> torch.Tensor:
        product = torch.mm(x, x.t() @ x)
        view = product.view(4, 2, 4)
        return (view.transpose(0, 1).chunk(2, -1)[0].exp().sin() @ view.mT[:2, :2]).sum()

    def written(x: torch.Tensor) -> torch.Tensor:
        product = torch.mm(x, x.t() @ x)
        half = product[:, :4]
        product[:, 4:] = 0
        return half.exp().sin().sum() + product.sum()

    def members(function: Callable[..., Any]) -> list[list[str]]:
        groups = find_groups(captured(function, vector()))
        return [[called(node) for node in group.members if node not in group.makers] for group in groups]

    assert members(alone)[0] == ["call_method:view", "call_method:transpose", "call_method:chunk", "getitem", "getitem"]
    assert ["call_method:transpose", "call_method:chunk", "getitem"] in members(shared)
    assert not any(members(written))


def test_a_part_of_several_tensors_belongs_to_a_group_with_all_of_them_or_not_at_all() -> None:
    def function(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        q, k, v = torch.mm(x, x.t() @ x).view(4, 3, -1)[:, :, :2].unbind(1)
        return ((q * scale).exp() @ k.t() @ v).sum()

    x, scale = torch.randn(4, 6, requires_grad=True), torch.randn(2, requires_grad=True)
    graph = captured(function, x, scale)
    (group,) = [group for group in find_groups(graph) if group.text == "fused(mul,exp)"]
    assert [called(node) for node in group.members] == ["mul", "call_method:exp"]
    (found,), (expected,) = fuse(graph)(x, scale), graph(x, scale)
    made = (torch.autograd.grad(each, (x, scale)) for each in (found, expected))
    for one, two in zip(*made, strict=True):
        torch.testing.assert_close(one, two)


def test_every_argument_of_a_product_has_a_cast_of_its_own() -> None:
    """Then their gradients are added in float32, as autocast adds them."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = (x * 2.0).view(1, 1, 32, 32)
        return F.scaled_dot_product_attention(y, y, y).float().sum()

    graph = with_casts(captured(function, torch.randn(32, 32, requires_grad=True), autocast=True))
    assert sum(called(node) == "autocast" for node in graph.graph.nodes) == 3


def test_what_attention_casts_is_cast_by_the_groups_that_make_it() -> None:
    def attention(x: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
        turned = (x * cos).view(1, 2, 16, 32)
        return F.scaled_dot_product_attention(turned, turned * 2.0, x.view(1, 2, 16, 32), is_causal=True).float().sum()

    x, cos = torch.randn(32, 32, requires_grad=True), torch.randn(32, 32, requires_grad=True)
    graph = with_casts(captured(attention, x, cos, autocast=True))
    assert [group.text for group in find_groups(graph)] == [
        "fused(mul,autocast,mul,autocast)",
        "fused(to,sum)",
    ]
    fused = fuse(graph)
    with torch.autocast("cpu", torch.bfloat16):
        (expected,) = graph(x, cos)
        (found,) = fused(x, cos)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    for one, two in zip(torch.autograd.grad(found, (x, cos)), torch.autograd.grad(expected, (x, cos)), strict=True):
        torch.testing.assert_close(one, two, rtol=0.02, atol=0.02)


# What they compute

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "gelu": lambda x, w: 0.5 * x * (1 + torch.tanh(0.8 * (x + w * x.pow(3)))),
    "norm": lambda x, w: F.layer_norm(x * 2, (8,), w, w) + x,
    "rms": lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
    "rotate": lambda x, w: x * w + torch.cat([-x[..., 4:], x[..., :4]], -1) * w,
    "softmax": lambda x, w: F.softmax(x * w, -1) * x,
    "two results": lambda x, w: torch.mm((x * w).exp(), x.t()).sum() * (x.sin() * w),
    "same twice": lambda x, w: torch.mm(x.sin().cos(), torch.mm(x.sin().cos().t(), x * w * 2)),
    "expanded": lambda x, w: (x.mean(0, keepdim=True) * w).expand(4, 8).reshape(2, 16) * 3,
    "its input": lambda x, w: (x.to(x.dtype) * w).to(x.dtype).contiguous() + 0 * w,
    "loss": lambda x, w: F.cross_entropy((x * w).float().double(), torch.tensor([1, 2, -100, 0], device=DEVICE)),
}


@pytest.mark.any_device
@pytest.mark.fast("gelu", "loss", "two results", "expanded")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_fused_graph_computes_what_it_did_in_float64(name: str) -> None:
    function = FUNCTIONS[name]
    given = [torch.randn(size, dtype=torch.float64, device=DEVICE, requires_grad=True) for size in ((4, 8), (8,))]
    graph = captured(lambda x, w: function(x, w).double(), *given)
    fused = fuse(graph)
    assert fused_groups(fused), "there is something to fuse"
    for expected, found in zip(gradients(graph, given), gradients(fused, given), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6 if name == "loss" else 1e-12, atol=1e-12)


def gradients(graph: fx.GraphModule, given: list[torch.Tensor]) -> list[torch.Tensor]:
    inputs = {node.target: node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")}
    ordered = [next(g for g in given if g.shape == value.shape) for value in inputs.values()]
    (result,) = graph(*ordered)
    torch.manual_seed(1)
    return [result, *torch.autograd.grad(result, given, torch.randn_like(result))]


# Sizes that are left open


@pytest.fixture
def lowerings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lowerings from now on, "open" or "closed"; earlier ones are forgotten."""
    found: list[str] = []

    def noting(what: str, actual: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            found.append(what)
            return actual(*args)

        return call

    monkeypatch.setattr(fused_group, "lower", noting("closed", fused_group.lower))
    monkeypatch.setattr(fused_group, "lower_open", noting("open", fused_group.lower_open))
    monkeypatch.setattr(fused_group, "_LOWERED", {})
    monkeypatch.setattr(fused_group, "_OPEN", {})
    return found


OPEN_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: FUNCTIONS[name] for name in ("gelu", "rms", "softmax", "two results", "same twice", "its input")},
    "norm": lambda x, w: F.layer_norm(x * 2, (8,), w, w) + x,
    "split": lambda x, w: (x * w).view(x.shape[0], 2, 4).transpose(0, 1).exp().reshape(2 * x.shape[0], 4) * 2,
    "joined": lambda x, w: torch.cat([x * w, x.exp()], 0).sin() * w,
    "size": lambda x, w: (torch.mm(x, x.t() @ x).view(x.size()[:-1] + (2, 4)).sin() * 2).flatten(1) * w,  # noqa: RUF005
    "class token": lambda x, w: (torch.cat([w.expand(x.shape[0], -1), x], 1) * 2).exp().sum(1),
    "number": lambda x, w: (x * w).sum(0) / x.shape[0] + w,
    "not divided": lambda x, w: torch.mm((x * w).exp(), x.t()).sum() * 2 * (x.sin() * w).detach().sum(),
}


@pytest.mark.parametrize("name", OPEN_FUNCTIONS)
def test_a_group_is_lowered_once_for_all_sizes_that_are_open(name: str, lowerings: list[str]) -> None:
    def given(rows: int) -> list[torch.Tensor]:
        return [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((rows, 8), (8,))]

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return OPEN_FUNCTIONS[name](x, w)

    first = given(5)
    graph = captured(function, *first, dynamic=True)
    fused = fuse(graph)
    for rows in (5, 3, 700, 64):
        inputs = given(rows)
        taken = [_taken(node, inputs) for node in graph.graph.find_nodes(op="placeholder")]
        torch.manual_seed(1)
        results = [each(*taken)[0] for each in (graph, fused)]
        seed = torch.randn_like(results[0])
        made = [torch.autograd.grad(result, inputs, seed, allow_unused=True) for result in results]
        torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)
        for expected, found in zip(*made, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        assert set(lowerings) == {"open"} and len(lowerings) <= len(fused_groups(fused))


def _taken(node: fx.Node, inputs: list[torch.Tensor]) -> Any:
    """Return the value of a placeholder of a graph of `inputs`."""
    value = node.meta["example_value"]
    if not isinstance(value, torch.Tensor):
        return inputs[0].shape[0]
    return next(each for each in inputs if each.dim() == value.dim())


def test_a_missing_gradient_makes_no_zeros_of_another_size(lowerings: list[str]) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.exp().sin()
        return torch.mm(y, y.t()).sum(), (y * x).cumsum(0)

    first = torch.randn(5, 8, requires_grad=True)
    graph = captured(function, first, dynamic=True)
    fused = fuse(graph)
    for rows in (5, 9, 33):
        x = torch.randn(rows, 8, requires_grad=True)
        taken = [_taken(node, [x]) for node in graph.graph.find_nodes(op="placeholder")]
        for i in (0, 1):
            one, two = (torch.autograd.grad(each(*taken)[i].sum(), x)[0] for each in (graph, fused))
            torch.testing.assert_close(two, one)
    assert lowerings == ["open"] * len(fused_groups(fused))


def test_what_only_holds_for_some_sizes_is_lowered_again_for_others(lowerings: list[str]) -> None:
    """Dynamo's graph is for all of them; a group may assume more."""
    x = torch.randn(6, 8, requires_grad=True)
    graph = captured(lambda x: x.exp().sin().sum(0), x, dynamic=True)
    fused = fuse(graph)
    (group,) = fused_groups(fused)
    run = group.module.forward

    def assuming(*given: Any) -> Any:
        return run(*given) if given[-1].shape[0] < 10 else tuple(each * 1 for each in run(*given))

    group.module.forward = assuming
    for rows in (6, 7, 12, 13, 8):
        given = torch.randn(rows, 8, requires_grad=True)
        taken = [_taken(node, [given]) for node in graph.graph.find_nodes(op="placeholder")]
        torch.testing.assert_close(fused(*taken)[0], graph(*taken)[0])
    assert lowerings == ["open", "open"]


@pytest.mark.exhaustive
@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*larger than.*")
def test_batches_of_every_length_run_the_same_kernels(lowerings: list[str]) -> None:
    model, other = planned_and_plain()
    lowerings.clear()
    counts = []
    for samples, length in ((4, LENGTH), (3, LENGTH), (2, LENGTH), (4, 17), (5, 9)):
        given = batch(samples, length)
        for each in (model, other):
            each.zero_grad()
            torch.manual_seed(7)
            step(each, given).backward()
        for (name, p), q in zip(model.named_parameters(), other.named_parameters(), strict=True):
            torch.testing.assert_close(p.grad, q[1].grad, rtol=1e-3, atol=1e-5, msg=name)
        counts.append(len(lowerings))
    assert counts[2:] == [counts[1], counts[3], counts[3]]
    assert lowerings[counts[0] :] == ["open"] * (counts[3] - counts[0])


def test_pieces_of_a_loss_with_other_numbers_of_rows_run_the_same_kernels(lowerings: list[str]) -> None:
    graph = fx.Graph()
    logits, labels = graph.placeholder("logits"), graph.placeholder("labels")
    graph.output(graph.call_function(F.cross_entropy, (logits, labels), {"reduction": "none"}))
    run = as_group(fx.GraphModule(nn.Module(), graph), "fused(row_losses)", [True, True])
    for rows in (64, 40, 7, 100):
        given = torch.randn(rows, 30, requires_grad=True), torch.randint(0, 30, (rows,))
        expected = F.cross_entropy(*given, reduction="none")
        found = run(*given)
        torch.testing.assert_close(found, expected)
        seed = torch.randn(rows)
        one, two = (torch.autograd.grad(each, given[0], seed)[0] for each in (found, expected))
        torch.testing.assert_close(one, two)
    assert lowerings == ["closed", "open"]


@pytest.mark.exhaustive
@pytest.mark.nightly
def test_isomorphic_groups_share_their_kernels() -> None:
    before = len(kernels._KERNELS)
    for layers in (2, 4):
        fused = torch.compile(Decoder(layers).train(), backend=lambda graph, inputs: fuse(graph))
        step(fused, batch(2, 9)).backward()
        torch._dynamo.reset()
    made = len(kernels._KERNELS) - before
    assert made == 2 * 6, "six groups, forward and backward, however many layers"


def test_many_shapes_are_told_of_once() -> None:
    fused = fuse(captured(lambda x: x.sin().cos().sum(), vector()))
    with pytest.warns(UserWarning, match="has met 16 shapes"):
        for rows in range(1, 19):
            fused(torch.randn(rows, 8, requires_grad=True))


def test_second_derivatives_are_refused_by_name() -> None:
    x = vector()
    fused = fuse(captured(lambda x: x.sin().cos().sum(), x))
    (result,) = fused(x)
    with pytest.raises(RematError, match="first derivatives only"):
        torch.autograd.grad(result, x, create_graph=True)


@given(rows=st.integers(1, 700), width=st.integers(1, 5), split=st.booleans())
@settings(max_examples=examples(15, 40))
def test_sums_in_stages_are_the_same_sums(rows: int, width: int, split: bool) -> None:
    shape = (rows, 2, width) if split else (rows, width)
    dims = [0, 1] if split else [0]
    given = torch.randn(shape, dtype=torch.float64)
    graph = fx.experimental.proxy_tensor.make_fx(
        lambda x: torch.ops.aten.sum.dim_IntList(x, dims), tracing_mode="fake"
    )(given)
    count = len(graph.graph.nodes)
    sum_in_stages(graph)
    if (rows * (2 if split else 1)) <= FEW:
        assert len(graph.graph.nodes) == count
    torch.testing.assert_close(graph(given), given.sum(dims))


# What it takes


@pytest.mark.exhaustive
@pytest.mark.fast("h100-80gb")
@pytest.mark.parametrize("target", ["cpu", "a100-80gb", "h100-80gb"])
def test_the_evaluator_s_peak_is_the_replay_s(target: str) -> None:
    place = find_planning_device(target)
    fake = fake_step(workload(), place)
    fake.warm_up()
    with fake.in_form(FUSED):
        profile = recorded_here(fake) if target == "cpu" else profile_step(fake, place)
        graph, costs = profile.graph, profile.costs
        assert any(node.op.startswith("fused(") for node in graph.nodes)
        for regions in ((), every_block(graph), pairs_of_segments(graph), nested(graph)):
            alive = replay(
                fake,
                to_refs(graph, tuple(regions)),
                alignment_bytes=place.target.alignment_bytes,
                workspace_of=costs.workspace_of(graph),
            )
            evaluated = Memory(graph, costs.workspace_per_op(graph)).curve(tuple(regions)).alive_bytes
            assert np.array_equal(alive + graph.unseen_bytes, evaluated)


def recorded_here(fake: FakeStep) -> Profile:
    """A profile of the CPU without timing anything."""
    graph, target = record(fake), find_planning_device("cpu").target
    return Profile(graph, estimated_costs(graph, target), target)


@pytest.mark.exhaustive
@given(number=st.integers(0, 10**9))
@settings(
    max_examples=examples(2, 5),
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@pytest.mark.filterwarnings(DYNAMO_LOOKS_AT_GRAD)
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
def test_a_fused_random_model_keeps_its_promises_under_random_plans(number: int) -> None:
    assert [row for row in verdicts(number, 3, FUSED) if row["failures"]] == []


# Plans


def planned(share: float, **options: Any) -> Plan:
    """A plan for an H100, of a budget so far from the fused step's peak to nothing."""
    place = find_planning_device("h100-80gb")
    fake = fake_step(workload(), place)
    profile = profile_step(fake, place)
    peak = Memory(profile.graph).peak_without_regions
    budget = remat.planning.budget.parse_budget(f"{int(share * peak)}B", None, None)
    return plan_profile(profile, budget, step=fake, fuse=True, **options)


@pytest.mark.exhaustive
def test_a_fused_plan_is_faster_than_the_untouched_step_and_says_so() -> None:
    made = planned(1.0)
    assert form_of(made.about).fused
    assert made.predicted["overhead"] < -0.1
    assert made.predicted["step_time_us"] < made.without_checkpointing["step_time_us"]
    assert made.solver["bound_us"] <= made.solver["objective_us"] < 0
    text = plan_text(made)
    assert "8 groups" in text
    assert "added by the fused kernels alone; without them (--exact) a plan adds +0.0 %" in text


@pytest.mark.fast("options0-exclude each other", "options2-states are sharded")
@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"exact": True}, "exclude each other"),
        ({"execution": "modules"}, 'not under `execution="modules"`'),
        ({"loop": TrainingLoop(shard="zero3", ranks=2)}, "states are sharded"),
    ],
)
def test_what_cannot_be_fused_is_refused_by_name(options: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        plan(workload(), budget="1GiB", target="h100-80gb", fuse=True, **options)


def planned_and_plain() -> tuple[nn.Module, nn.Module]:
    """A decoder with a fused plan, and its copy without one."""
    made = plan_here(every_block, FakeStep(workload(autocast=None), device=DEVICE))
    torch.manual_seed(0)
    model = Decoder().train().to(DEVICE)
    return remat.apply(copy.deepcopy(model), made, on_larger="warn"), model


def plan_here(regions: Callable[[Any], Any], fake: FakeStep) -> Plan:
    with fake.in_form(FUSED):
        graph = record(fake)
    return plan_by_hand(graph, tuple(regions(graph)))


@pytest.mark.exhaustive
@pytest.mark.any_device
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")
def test_a_fused_plan_trains_evaluates_and_takes_other_batches() -> None:
    model, other = planned_and_plain()
    for samples in (4, 2, 4):
        given = (ids := batch(samples, LENGTH)[0].to(DEVICE)), ids.roll(1)
        for each in (model, other):
            torch.manual_seed(7)
            step(each, given).backward()
        for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            assert torch.allclose(p.grad, q.grad, rtol=1e-3, atol=1e-5), name
        for each in (model, other):
            each.eval()
            each.zero_grad()
        with torch.no_grad():
            assert torch.equal(step(model, given), step(other, given)), "evaluation is untouched"
        for each in (model, other):
            each.train()
    assert model.state_dict().keys() == other.state_dict().keys()


def test_where_no_kernel_can_be_compiled_the_group_runs_all_the_same_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(kernel: kernels.Kernel) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(kernels.Kernel, "_ended", fails)
    kernels._warn_once.cache_clear()
    x = vector()
    graph = captured(lambda x: (torch.mm(x.sin().cos(), x.t()) * 3).exp().sum() * 0.5, x)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        (result,) = fuse(graph)(x)
        result.backward()
    assert [str(each.message) for each in told if "fused group" in str(each.message)] == [
        "a fused group cannot be compiled here and runs operator by operator, slower than planned "
        "(RuntimeError: no compiler)."
    ]


def test_a_kernel_is_for_the_device_of_its_inputs() -> None:
    """Two cards share none: its code holds the number of the device."""
    rows = Sizes((sympy.Symbol("s"), sympy.Integer(8)), (sympy.Integer(8), sympy.Integer(1)))
    known = set()
    for device in (torch.device("cuda", 0), torch.device("cuda", 1)):
        with FakeTensorMode():
            x = torch.empty(4, 8, device=device)
            assert kernels.empty(kernels.layout_of(x)).device == device
        found = opened((rows,), (x,))
        assert found is not None
        known |= {fused_group._described(x), found.kinds}
    assert len(known) == 4


def test_gradients_that_are_far_or_no_numbers_fail() -> None:
    one = [torch.ones(8), torch.full((8,), 1e-6), None]
    assert far_from(one, [torch.ones(8) * 1.001, torch.full((8,), -1e-6), None], ["a", "b", "c"], narrow=False) == []
    far = [torch.full((8,), torch.nan), torch.full((8,), 1.0), torch.zeros(8)]
    assert far_from(one, far, ["a", "b", "c"], narrow=True) == ["a", "b", "c"]


@pytest.mark.parametrize("scale", [1.0, 1e4], ids=["finite", "overflowing"])
def test_a_group_that_overflows_is_named_and_not_compared(scale: float) -> None:
    x = (scale * torch.ones(8)).requires_grad_()
    (group,) = fused_groups(fuse(captured(lambda x: x.exp().square().mul(2.0), x)))
    results = [result.detach() for result in group.module(x)]
    gradients = [torch.ones_like(result) for result in results]
    made = torch.autograd.grad(group.module(x), x, gradients)
    seen = GroupsSeen(contextlib.nullcontext)
    seen(group, GroupRun(None, [x], results, gradients, made))
    assert (list(seen.ratios), seen.not_finite) == (([group.text], []) if scale == 1.0 else ([], [group.text]))
    assert not seen.too_far


@pytest.mark.exhaustive
@pytest.mark.often("autocast")
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "autocast"])
def test_compiled_groups_keep_the_predicted_peak_and_are_as_near_to_float64(autocast: torch.dtype | None) -> None:
    load = workload(autocast=autocast)
    fake = FakeStep(load, device=torch.device("cpu"))
    with fake.in_form(FUSED):
        profile = recorded_here(fake)
    regions = tuple(every_block(profile.graph))
    for chosen in ((), regions):
        peak = Memory(profile.graph, profile.costs.workspace_per_op(profile.graph)).curve(chosen).peak_bytes
        made = plan_by_hand(profile.graph, chosen, profile.costs, budget_bytes=peak)
        report = validate(load, made)
        assert report.passed, str(report)
        assert report.groups_near
        assert report.measured["peak_bytes"] == pytest.approx(peak, rel=0.0005)


@pytest.mark.exhaustive
@pytest.mark.often("2")
@pytest.mark.parametrize("slices", [1, 2])
def test_a_head_in_slices_is_fused_too_and_held_to_float64(slices: int) -> None:
    load = workload(autocast=torch.bfloat16)
    fake = FakeStep(load, device=torch.device("cpu"))
    with fake.in_form(Form((Chunk(0, 0, slices),), fused=True)):
        graph = record(fake)
        costs = time_operators(graph.kinds, torch.device("cpu"))
        made = plan_by_hand(graph, every_block(graph), costs)
    report = validate(load, made)
    assert report.passed, str(report)
    assert "fused(row_losses)" in report.groups_near
    assert report.gradients_near, "the head's weight is summed in slices"


@pytest.mark.exhaustive
@pytest.mark.parametrize("fails", [False, True], ids=["compiles", "fails in the end"])
def test_forward_and_backward_are_compiled_beside_each_other_and_waited_for_when_they_run(
    fails: bool, lowerings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[str] = []

    def end(waiting: PendingKernels) -> None:
        ends.append("failed" if fails else "ended")
        if fails:
            raise RuntimeError("no compiler")
        actual(waiting)

    actual = PendingKernels.end
    monkeypatch.setattr(PendingKernels, "end", end)
    monkeypatch.setattr(kernels, "_KERNELS", {})
    kernels._warn_once.cache_clear()
    x = vector()
    graph = captured(lambda x: (x.sin() * x.cos()).exp().sum(), x)
    fused = fuse(graph)
    (group,) = fused_groups(fused)
    lowered = group.lowered(x)
    assert lowered is not None and ends == []
    assert all(part.kernel._begun is not None for part in (lowered.forward, lowered.backward()))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            (found,), (expected,) = fused(x), graph(x)
            one, two = (torch.autograd.grad(each, x)[0] for each in (found, expected))
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(one, two)
    assert ends == ["failed" if fails else "ended"] * 2, "once each"
    assert ["cannot be compiled here" in str(each.message) for each in told] == [True] * fails


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_late", [False, True], ids=["one after the other", "two forwards, then two backwards"])
def test_a_kernel_runs_only_sizes_for_which_what_its_compiler_assumes_is_true(
    is_late: bool, lowerings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU Inductor adds up to 4,096 numbers in another way than more."""
    monkeypatch.setattr(kernels, "_KERNELS", {})
    scale = torch.rand((), requires_grad=True)
    graph = captured(lambda x, scale: (x * scale).sin().mul(2), torch.rand(6, 8), scale, dynamic=True)
    fused, results = fuse(graph), {}

    def forward(rows: int) -> None:
        x = torch.rand(rows, 8, generator=torch.Generator().manual_seed(rows))
        results[rows] = x, fused(*(_taken(node, [x, scale]) for node in graph.graph.find_nodes(op="placeholder")))[0]

    def check(rows: int) -> None:
        x, result = results[rows]
        exact = scale.detach().double().requires_grad_()
        (truth,) = torch.autograd.grad((x.double() * exact).sin().mul(2).sum(), exact)
        (found,) = torch.autograd.grad(result.sum(), scale)
        assert abs(float(found) - float(truth)) <= 1e-6 * abs(float(truth)), rows

    for sizes in ((100, 1_000_000),) if is_late else ((100,), (1_000_000,)):
        for rows in sizes:
            forward(rows)
        for rows in sizes:
            check(rows)
    assert lowerings == ["open", "open"] and len(kernels._KERNELS) == 4


@pytest.mark.exhaustive
@pytest.mark.nightly
def test_kernels_for_open_sizes_are_as_near_to_float64(lowerings: list[str]) -> None:
    fused, plain, exact = Decoder(), Decoder(), Decoder().double()
    for model in (fused, plain):
        model.load_state_dict(exact.state_dict())
    for model in (fused, plain, exact):
        for layer in model.layers:
            layer.eval()  # no dropout, which float64 draws otherwise
    run = torch.compile(fused, backend=lambda graph, inputs: fuse(with_casts(graph)))
    for samples, length in ((4, LENGTH), (3, LENGTH), (4, 17), (40, 300), (7, 13)):
        given, gradients = batch(samples, length), []
        for forward, model, dtype in (
            (run, fused, torch.bfloat16),
            (plain, plain, torch.bfloat16),
            (exact, exact, None),
        ):
            model.zero_grad()
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = forward(*given)
            loss.backward()
            found = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
            gradients.append(torch.cat([gradient / gradient.norm() for gradient in found]))
        near, far = (float((each - gradients[2]).norm()) for each in gradients[:2])
        assert near <= 1.1 * far, (samples, length)
    open_, closed = lowerings.count("open"), lowerings.count("closed")
    assert open_ <= 2 * closed + 1, "for the second and the third shape, and of one again for many rows"


def test_formed_is_the_graph_as_it_was_where_nothing_is_asked() -> None:
    graph = captured(Decoder(1).train(), *batch(2, 8))
    assert [n.name for n in formed(graph, Form(), 0).graph.nodes] == [n.name for n in graph.graph.nodes]
