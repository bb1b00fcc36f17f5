"""A graph is the same however it is spelled, and another where that costs something; a plan finds its place in it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.utils import parametrizations, parametrize

from remat.capture.anchors import identity_of
from remat.capture.dynamo import GraphCalls
from remat.errors import PlanMismatch, UsageError
from remat.evaluation.evaluator import Memory
from remat.evaluation.graph import Graph
from remat.evaluation.identity import (
    Difference,
    Fit,
    GraphMismatch,
    Identity,
    NodeId,
    canonical,
    compare,
    from_lines,
    to_lines,
)
from remat.evaluation.plan import Plan, Region, to_refs
from remat.execution.apply import apply, counts_of
from remat.execution.eager.replay import replay
from remat.execution.eager.rewrite import CallRegion
from remat.execution.placing import Placer
from remat.execution.regions_in_graph import regions_in
from remat.formulation.search_space import find_space
from remat.recording.fake_step import WRAPPED_NUMBER_BYTES, FakeStep
from remat.recording.record import record
from remat.workload.workload import Workload
from tests import toys
from tests.graphs import BATCH_NORM, DYNAMO_LOOKS_AT_GRAD, TOYS
from tests.graphs import recorded as recorded_toy
from tests.small_models import TEST_SIZES
from tests.toys import CPU, TRANSFORMER, WIDTH, Choose, half_saved, plan_by_hand, plan_for

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo", "one_thread"),
    pytest.mark.filterwarnings(DYNAMO_LOOKS_AT_GRAD),
]

QUOTIENT_BYTES = 4 + WRAPPED_NUMBER_BYTES
GOLDEN = Path(__file__).parent / "golden"
recorded = functools.cache(toys.recorded)


# One model, spelled in two ways


class Layer(nn.Module):
    """Attention with a table of angles, a dropout and a feed-forward half."""

    angles: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out, self.up = (nn.Linear(WIDTH, n * WIDTH) for n in (3, 1, 1))
        self.register_buffer("angles", torch.linspace(0, 1, WIDTH // 2))

    def table(self, length: int) -> torch.Tensor:
        with torch.no_grad():
            return (torch.arange(length)[:, None] * self.angles[None]).cos()

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.qkv(x).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4).unbind()

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def merged(self, mixed: torch.Tensor) -> torch.Tensor:
        return mixed.transpose(1, 2).flatten(2)

    def activated(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x)

    def dropped(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.2, self.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads(self.norm(x))
        table = self.table(x.shape[1])
        x = x + self.dropped(self.out(self.merged(self.attend(q * table, k, v))))
        return x + self.activated(self.up(x))


class Model(nn.Module):
    layer: type[Layer] = Layer

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(toys.VOCAB, WIDTH)
        self.layers = nn.ModuleList(self.layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, toys.VOCAB)

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.loss(self.head(x), labels)


class OtherViews(Layer):
    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.qkv(x).unflatten(-1, (3, 2, WIDTH // 2)).transpose(1, 3).permute(2, 0, 1, 3, 4).unbind()

    def merged(self, mixed: torch.Tensor) -> torch.Tensor:
        return mixed.transpose(1, 2).contiguous().reshape(*mixed.shape[:1], -1, WIDTH).view(-1, mixed.shape[2], WIDTH)


class OtherNames(Layer):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query=q, key=k, value=v, dropout_p=0.0, is_causal=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads(self.norm(x))
        x = x.add(self.dropped(self.out(self.merged(self.attend(torch.multiply(q, self.table(x.shape[1])), k, v)))))
        return torch.add(x, self.activated(self.up(x)))


class OtherTable(Layer):
    """As two releases of one library do it: a product, or an outer product in a context of its own."""

    def table(self, length: int) -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            columns = self.angles[None, :, None].expand(1, -1, 1) @ torch.arange(length)[None, None].float()
            return columns.transpose(1, 2)[0].cos()


def model_of(layer_type: type[Layer], **methods: Any) -> type[Model]:
    return type("Model", (Model,), {"layer": type("Layer", (layer_type,), {}), **methods})


def summed(self: Model, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As a trainer computes it: a sum, divided by the number of labels."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / labels.numel()


def workload_of(build: Callable[[], nn.Module]) -> Workload:
    return dataclasses.replace(TRANSFORMER, name="spelled", build=build)


SPELLED = {
    "as-it-is": model_of(Layer),
    "other-views": model_of(OtherViews),
    "other-names": model_of(OtherNames),
    "other-table": model_of(OtherTable),
    "summed-loss": model_of(Layer, loss=summed),
    "all": model_of(type("AllOther", (OtherViews, OtherNames, OtherTable), {}), loss=summed),
}


def trained(model: nn.Module, samples: int = 4) -> list[torch.Tensor | None]:
    torch.manual_seed(1)
    loss = model(*toys.tokens(samples, toys.LENGTH))
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def twins(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(build().train())
    return made[0], made[1]


@functools.cache
def spelled(name: str) -> tuple[FakeStep, Graph]:
    return toys.recorded(workload_of(SPELLED[name]))


CHOICES: dict[str, Choose] = {
    name: toys.CHOICES[name] for name in ("every-block", "nested", "half-saved", "pairs-of-segments")
}


# Each spelling with one plan, and all of them together with every plan.
CASES = [*((here, "half-saved") for here in list(SPELLED)[1:-1]), *(("all", choice) for choice in CHOICES)]


@pytest.mark.fast("all-nested", "summed-loss-half-saved")
@pytest.mark.parametrize(("here", "choice"), CASES)
def test_a_plan_applies_to_a_model_that_is_spelled_in_another_way(here: str, choice: str) -> None:
    graph = spelled("as-it-is")[1]
    plan = plan_by_hand(graph, CHOICES[choice](graph))
    untouched, model = twins(SPELLED[here])
    apply(model, plan, on_larger="refuse")
    for one, other in zip(trained(untouched), trained(model), strict=True):
        assert (one is None) == (other is None) and (one is None or torch.equal(one, other))  # type: ignore[arg-type]
    assert counts_of(model).regions == len(plan.regions) > 0


@pytest.mark.fast("all-half-saved", "other-table-half-saved")
@pytest.mark.parametrize(("here", "choice"), CASES)
def test_a_moved_plan_takes_the_bytes_that_it_promised(here: str, choice: str) -> None:
    """The evaluator and the executor agree on the moved regions, and the peak is that of the plan.

    A quotient aside: a sum, and the number that autograd keeps for it.
    """
    planned, (step, graph) = spelled("as-it-is")[1], spelled(here)
    regions = tuple(CHOICES[choice](planned))
    moved = regions_in(plan_by_hand(planned, regions), graph)
    assert not isinstance(moved, GraphMismatch) and len(moved) == len(regions)
    promised = Memory(planned).curve(regions).peak_bytes
    assert Memory(graph).curve(moved).peak_bytes <= promised + QUOTIENT_BYTES
    assert replay(step, to_refs(graph, moved)).max() + graph.unseen_bytes == Memory(graph).curve(moved).peak_bytes


@pytest.mark.fast("all")
@pytest.mark.parametrize("there", ["other-views", "all"])
def test_a_plan_made_for_another_spelling_comes_back(there: str) -> None:
    planned, here = spelled(there)[1], spelled("as-it-is")[1]
    regions = tuple(toys.half_saved(planned))
    moved = regions_in(plan_by_hand(planned, regions), here)
    assert not isinstance(moved, GraphMismatch)
    again = regions_in(plan_by_hand(here, moved), planned)
    assert not isinstance(again, GraphMismatch)
    assert [(r.first, r.end) for r in again] == [(r.first, r.end) for r in regions]
    assert {v for r in again for v in r.saved if planned.nodes[v].anchor} == {
        v for r in regions for v in r.saved if planned.nodes[v].anchor
    }


class CachedWeights(nn.Module):
    """Layers whose weights are computed once for two calls of each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached():
            for layer in (*self.layers, *self.layers):
                x = x + F.gelu(layer(x))
        return x


@pytest.mark.parametrize("change", [lambda model: model, copy.deepcopy], ids=["as-built", "copied"])
def test_a_layer_has_its_name_though_its_weight_is_cached(change: Callable[[nn.Module], nn.Module]) -> None:
    batch = torch.randn(8, WIDTH)

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(batch).square().mean()
        return found

    workload = Workload("cached", CachedWeights, lambda n, _: torch.randn(n, WIDTH), step, batch_size=8)
    graph = recorded(workload)[1]
    assert {node.module for node in graph.nodes if node.op == "linear"} == {"layers.0", "layers.1"}
    model = change(CachedWeights())
    expected = torch.autograd.grad(step(model, batch), list(model.parameters()))
    apply(model, plan_by_hand(graph, half_saved(graph)), on_larger="refuse")
    step(model, batch).backward()
    assert counts_of(model).regions > 0
    assert all(map(torch.equal, [p.grad for p in model.parameters() if p.grad is not None], expected))


# What costs is another graph


class MoreDropout(Layer):
    def merged(self, mixed: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().merged(mixed), 0.1, self.training)


class Masked(Layer):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Unfused(Layer):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v


class InPlace(Layer):
    def activated(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu_(x)


class OutOfPlace(Layer):
    def activated(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x)


class Dropping(Layer):
    rate = 0.0

    def dropped(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.rate, self.training)


def unreduced(self: Model, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").mean()


OTHERS = {
    "dropout": (model_of(MoreDropout), "dropout in layers.0, and was linear in layers.0.out when planned"),
    "mask": (model_of(Masked), "scaled_dot_product_attention in layers.0, given 4 tensors, and was given 3"),
    "unfused": (model_of(Unfused), "matmul in layers.0, and was scaled_dot_product_attention in layers.0 when planned"),
    "relu": (model_of(OutOfPlace), "relu in layers.0, and was gelu in layers.0 when planned"),
    "unreduced": (model_of(Layer, loss=unreduced), "goes on with mean in the model"),
}


@pytest.mark.fast("dropout", "unreduced")
@pytest.mark.parametrize("other", OTHERS)
def test_a_graph_that_costs_something_else_is_refused_where_it_begins_to_differ(other: str) -> None:
    build, text = OTHERS[other]
    graph = spelled("as-it-is")[1]
    model = apply(build().train(), plan_by_hand(graph, half_saved(graph)))
    with pytest.raises(PlanMismatch) as refused:
        trained(model)
    assert text in str(refused.value) and "whose graph differs" in str(refused.value)


def test_in_place_is_not_out_of_place() -> None:
    plan = plan_for(workload_of(model_of(OutOfPlace)))
    with pytest.raises(PlanMismatch, match=r"is relu_ in layers\.0, and was relu in layers\.0 when planned"):
        trained(apply(model_of(InPlace)().train(), plan))


@pytest.mark.exhaustive
def test_a_dropout_may_be_turned_off_and_not_on() -> None:
    on, off = (model_of(type("Dropping", (Dropping,), {"rate": rate})) for rate in (0.2, 0.0))
    for one, other in ((on, off), (off, on)):
        plan = plan_for(workload_of(one))
        untouched, model = twins(other)
        apply(model, plan)
        if one is on:
            assert all(torch.equal(a, b) for a, b in zip(trained(untouched), trained(model), strict=True))  # type: ignore[arg-type]
        else:
            with pytest.raises(PlanMismatch, match="which draws random numbers, and did not when planned"):
                trained(model)


class Attends(nn.Module):
    def __init__(self, rate: float):
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, dropout=rate, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x, x, x, need_weights=False)[0]
        return found


class Recurs(nn.Module):
    def __init__(self, rate: float, kind: Callable[..., nn.Module]):
        super().__init__()
        self.inner = kind(WIDTH, WIDTH, num_layers=2, dropout=rate, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x)[0]
        return found


ONE_NODE: dict[str, Callable[[float], nn.Module]] = {
    "attention": Attends,
    "lstm": lambda rate: Recurs(rate, nn.LSTM),
    "gru": lambda rate: Recurs(rate, nn.GRU),
    "rnn": lambda rate: Recurs(rate, nn.RNN),
}


class Stacked(nn.Module):
    def __init__(self, make: Callable[[float], nn.Module], rate: float):
        super().__init__()
        self.layers = nn.ModuleList(make(rate) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.square().mean()


@pytest.mark.fast("attention")
@pytest.mark.often("attention", "lstm")
@pytest.mark.parametrize("kind", ONE_NODE)
def test_a_dropout_inside_of_one_node_may_be_turned_off_and_not_on(kind: str) -> None:
    def workload(rate: float) -> Workload:
        def batch(size: int, length: int | None) -> tuple[torch.Tensor]:
            return (torch.randn(size, 4, WIDTH),)

        return Workload("stacked", lambda: Stacked(ONE_NODE[kind], rate), batch, lambda m, b: m(*b), batch_size=2)

    def step(model: nn.Module) -> list[torch.Tensor | None]:
        torch.manual_seed(1)
        loss = model(torch.randn(2, 4, WIDTH))
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters()), torch.rand(1)]

    untouched, model = twins(workload(0.0).build)
    apply(model, plan_for(workload(0.2)))
    assert all(torch.equal(a, b) for a, b in zip(step(untouched), step(model), strict=True))  # type: ignore[arg-type]
    with pytest.raises(PlanMismatch, match="which draws random numbers, and did not when planned"):
        step(apply(workload(0.2).build().train(), plan_for(workload(0.0))))


class MoreCopies(Layer):
    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(each.contiguous() for each in super().heads(x))


@pytest.mark.exhaustive
def test_copies_that_were_not_planned_are_counted() -> None:
    """A copy is no anchor, since at other strides it is a view; what it takes is compared all the same."""
    graph = spelled("as-it-is")[1]
    plan = plan_by_hand(graph, half_saved(graph))
    copied = 4 * 2 * 4 * toys.LENGTH * WIDTH * 4  # q, k, v and what attention makes of them, 2 layers, 4 samples, fp32
    roomy = dataclasses.replace(plan, budget_bytes=plan.budget_bytes + copied)
    trained(apply(model_of(MoreCopies)().train(), roomy, on_larger="refuse"))
    with pytest.raises(
        PlanMismatch, match=r"makes up to 16\.00 KiB more than when planned \(contiguous in layers\.0\)"
    ):
        trained(apply(model_of(MoreCopies)().train(), plan))
    nearly = dataclasses.replace(plan, predicted={**plan.predicted, "peak_bytes": 1000 * copied}, budget_bytes=0)
    with pytest.warns(UserWarning, match="more than when planned") as caught:
        trained(apply(model_of(MoreCopies)().train(), nearly))
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.raises(PlanMismatch, match="more than when planned"):
        trained(apply(model_of(MoreCopies)().train(), nearly, on_larger="refuse"))


class Scores(Layer):
    """Attention with its matrix of scores, a head of which each takes as much."""

    head_count = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.head_count, -1)).permute(2, 0, 3, 1, 4).unbind()
        return x + self.out(self.merged(F.softmax(q @ k.transpose(-1, -2), -1) @ v))


class MoreHeads(Scores):
    head_count = 4


def test_a_model_with_more_heads_than_planned_is_refused() -> None:
    """Its operators are the same and its parameters have the same shapes; its scores take twice as much."""
    planned = plan_by_hand(recorded(workload_of(model_of(Scores)))[1], ())
    trained(apply(model_of(Scores)().train(), planned, on_larger="refuse"))
    with pytest.raises(PlanMismatch, match=r"makes up to .* more than when planned \((matmul|softmax) in layers\.0\)"):
        trained(apply(model_of(MoreHeads)().train(), planned))


# What a graph is known by


def other_sizes(workload: Workload) -> list[Identity]:
    return [record(FakeStep(workload.sized(batch_size=size), device=CPU)).identities[0] for size in (1, 2)]


@pytest.mark.fast("in-place")
@pytest.mark.often("in-place", "tied", "transformer")
@pytest.mark.parametrize("name", ["chain", "residual", "skip", "tied", "transformer", "in-place"])
def test_identity_does_not_depend_on_the_batch(name: str) -> None:
    planned = recorded_toy(TOYS[name]).graph.identities[0]
    for found in other_sizes(TOYS[name]):
        fit = compare(planned, found, same_shapes=False)
        assert isinstance(fit, Fit) and fit.is_exact and fit.more_bytes == 0


@pytest.mark.fast("broken", "batch-norm", "in-place", "transformer")
@pytest.mark.parametrize("name", [*TOYS, BATCH_NORM.name])
def test_what_a_captured_graph_says_of_its_nodes_is_what_the_record_saw(name: str) -> None:
    assert_as_recorded(recorded_toy(TOYS.get(name, BATCH_NORM)).graph)


@pytest.mark.exhaustive
@pytest.mark.often("convnextv2-base")
@pytest.mark.parametrize("name", TEST_SIZES)
def test_what_a_model_says_of_its_nodes_is_what_the_record_saw(name: str) -> None:
    assert_as_recorded(record(FakeStep(TEST_SIZES[name](), device=CPU)))


def assert_as_recorded(graph: Graph) -> None:
    """Loose nodes allocate what they say, and only they may be made of no parameter."""
    for members in graph.call_nodes:
        for i in members:
            node = graph.nodes[i]
            made = sum(int(graph.storages.size_bytes[u]) for u in node.values if graph.storages.node[u] == i)
            assert node.anchor or node.made_bytes == made, node
            assert not node.random or node.anchor, node


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("call_method:__eq__", "eq"),
        ("truediv", "call_method:div"),
        ("call_method:__and__", "and_"),
        ("iadd", "call_method:add_"),
        ("call_method:float", "call_method:to"),
    ],
)
def test_two_spellings_of_an_operator_are_one(one: str, other: str) -> None:
    assert canonical(one) == canonical(other)


@pytest.mark.parametrize(("one", "other"), [("relu", "relu_"), ("and_", "iand"), ("add", "iadd"), ("rsub", "sub")])
def test_two_operators_are_two(one: str, other: str) -> None:
    assert canonical(one) != canonical(other)


def node(op: str, *takes: int, module: str = "m", anchor: bool = True, **known: Any) -> NodeId:
    return NodeId(op, module, takes, anchor, **known)


def view(op: str, *takes: int, made_bytes: int = 0) -> NodeId:
    return node(op, *takes, anchor=False, made_bytes=made_bytes)


def test_wiring_is_seen_through_views() -> None:
    planned = (node("a"), node("b"), view("v", 0), node("c", 1, 2))
    assert compare(planned, (node("a"), node("b"), view("w", 0), view("v", 2), node("c", 3, 1))) == Fit((0, 1, 3, 4), 5)
    crossed = compare(planned, (node("a"), node("b"), view("v", 1), node("c", 1, 2)))
    assert isinstance(crossed, Difference) and str(crossed).endswith(
        "takes values of other operators than when planned"
    )


@pytest.mark.parametrize(("planned", "found", "more"), [(8, 24, 16), (24, 8, 0), (0, 24, 0)])
def test_results_of_anchors_are_compared_one_by_one_where_they_are_known(planned: int, found: int, more: int) -> None:
    fit = compare((node("a"), node("b", made_bytes=planned)), (node("a"), node("b", made_bytes=found)))
    assert isinstance(fit, Fit) and fit.more_bytes == more


def test_a_border_stays_behind_the_last_node_that_both_have() -> None:
    planned = (node("a"), view("v", 0), view("w", 1), node("b", 2))
    fit = compare(planned, (node("a"), view("x", 0), view("w", 1), view("y", 2), node("b", 3)))
    assert isinstance(fit, Fit) and fit.to == (0, -1, 2, 4)
    assert [list(fit.positions(p)) for p in range(5)] == [[0], [1, 2], [1, 2], [3, 4], [5]]


@pytest.mark.parametrize(
    ("planned", "found", "text"),
    [
        (2, 1, "it ends where b in m was planned (operator 1)"),
        (1, 2, "it goes on with b in m (operator 1) where the planned one ends"),
    ],
)
def test_a_graph_that_ends_early_says_where(planned: int, found: int, text: str) -> None:
    both = (node("a"), node("b", 0))
    assert str(compare(both[:planned], both[:found])) == text


@pytest.mark.parametrize("name", ["broken", "transformer", "in-place"])
def test_identities_are_lines_of_the_plan_file(name: str) -> None:
    for identity in recorded_toy(TOYS[name]).graph.identities:
        lines = to_lines(identity)
        assert from_lines(lines) == identity and all("\n" not in line for line in lines)


@pytest.mark.parametrize("lines", [["* linear - 3"], ["? linear - 3 0 m"], ["* linear x 3 0 m"]])
def test_lines_that_are_no_nodes_are_refused(tmp_path: Path, lines: list[str]) -> None:
    plan = plan_by_hand(toys.graph_of(TRANSFORMER), ()).to_json()
    (tmp_path / "plan.json").write_text(json.dumps({**plan, "identities": {"calls": [0], "graphs": [lines]}}))
    with pytest.raises(UsageError, match="is not a complete plan file"):
        Plan.load(tmp_path / "plan.json")


# Placing on the graph at hand


class Bracketed(nn.Module):
    """A context between two layers, where one version of the plan has a border."""

    angles: torch.Tensor

    def __init__(self, context: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.context = context
        self.register_buffer("angles", torch.linspace(0, 1, WIDTH))

    def table(self) -> torch.Tensor:
        if not self.context:
            return self.angles.cos()
        with torch.no_grad():
            return self.angles.cos()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
            x = self.table() * x
        return x.sum()


def captured(model: nn.Module, *args: torch.Tensor) -> fx.GraphModule:
    found = []

    def run(call: int, graph_module: fx.GraphModule, args: tuple[Any, ...]) -> Any:
        found.append(graph_module)
        return graph_module(*args)

    GraphCalls(model.forward, run)(*args)
    return found[0]


def float_workload(build: Callable[[], nn.Module]) -> Workload:
    return Workload("bracketed", build, lambda n, _: (torch.randn(n, WIDTH),), toys.step, batch_size=4)


def test_a_border_does_not_fall_into_a_context() -> None:
    graph = toys.graph_of(float_workload(lambda: Bracketed(False)))
    plan = plan_by_hand(graph, [Region(0, 3), Region(4, 7)])  # before and behind the table of the first layer
    model = Bracketed(True).train()
    found = captured(model, torch.randn(4, WIDTH))
    names = [node.op for node in identity_of(found)]
    regions = Placer(plan).regions(0, found)
    assert [graph.nodes[i].op for i in (2, 3)] == ["call_method:cos", "mul"]
    assert (regions[0].first, names[regions[0].last + 1], regions[1].first) == (0, "mul", regions[0].last + 2)
    trained_plain, trained_planned = twins(lambda: Bracketed(True))
    apply(trained_planned, plan)
    given = torch.randn(4, WIDTH)
    for each in (trained_plain, trained_planned):
        each(given).backward()
    assert all(
        torch.equal(a.grad, b.grad)  # type: ignore[arg-type]
        for a, b in zip(trained_plain.parameters(), trained_planned.parameters(), strict=True)
    )
    assert counts_of(trained_planned).regions == 2


class Normed(nn.Module):
    """Batch normalisation, whose counter two versions count in two ways."""

    seen: torch.Tensor

    def __init__(self, other: bool) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.other = other
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.other:
            self.seen += 1
        else:
            self.seen.add_(1)
        x = F.dropout(self.norm(self.first(x)), 0.3, self.training)
        return self.last(x).tanh().sum()


def test_nodes_that_draw_or_count_are_found_in_the_graph_at_hand() -> None:
    graph = toys.graph_of(float_workload(lambda: Normed(False)))
    plan = plan_by_hand(graph, [Region(0, len(graph.call_nodes[0]) - 1)])
    untouched, model = twins(lambda: Normed(True))
    apply(model, plan)
    given = torch.randn(4, WIDTH)
    for each in (untouched, model):
        torch.manual_seed(3)
        each(given).backward()
    assert counts_of(model).regions == 1
    for a, b in zip(untouched.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]
    assert all(map(torch.equal, untouched.buffers(), model.buffers()))
    (region,) = Placer(plan).regions(0, captured(Normed(True).train(), given))
    assert isinstance(region, CallRegion) and len(region.once) == 3 and len(region.random) == 1


def test_whether_a_graph_is_planned_is_a_question_that_is_not_refused() -> None:
    """A node that drew random numbers is missing, which the regions need, and its graph is the planned one."""
    graph = spelled("as-it-is")[1]
    plan, found = (
        plan_by_hand(graph, CHOICES["half-saved"](graph)),
        captured(SPELLED["all"]().train(), *toys.tokens(4, toys.LENGTH)),
    )
    lost = Placer(plan).fit(0, found).to.index(-1)  # type: ignore[union-attr]
    drew = dataclasses.replace(plan.regions[0], random=(dataclasses.replace(plan.regions[0].first, ordinal=lost),))
    placer = Placer(dataclasses.replace(plan, regions=(drew, *plan.regions[1:])))
    with pytest.raises(PlanMismatch, match="a node that drew random numbers when planned is not in this graph"):
        placer.regions(0, found)
    assert placer.fits_some(found)


# What a person is told


def test_what_is_known_to_differ_is_named() -> None:
    graph = spelled("as-it-is")[1]
    plan = plan_by_hand(graph, half_saved(graph))
    about = {
        **plan.about,
        "versions": {**plan.about["versions"], "torch": "2.0.0"},
        "batch": {"ids": "int32 4x8", "attention_mask": "int64 4x8"},
    }
    model = apply(model_of(Unfused)().train(), dataclasses.replace(plan, about=about))
    model.get_submodule("layers.1.norm").eval()
    with pytest.raises(PlanMismatch) as refused:
        trained(model)
    text = str(refused.value)
    for part in (
        "labels is given, and was not when planned",
        "attention_mask is not given, and was when planned",
        "ids is int64 4x8, planned int32 4x8",
        "evaluation mode on layers.1.norm, not when planned",
        f"torch {torch.__version__}, planned 2.0.0",
    ):
        assert part in text
    assert len(text) < 800


@pytest.mark.exhaustive
@pytest.mark.nightly
def test_fields_of_a_configuration_are_named() -> None:
    transformers = pytest.importorskip("transformers")
    workload = TEST_SIZES["gpt2"]().sized(batch_size=1, seq_len=8)
    plan = plan_for(workload)
    config: Any = workload.build().config
    config._attn_implementation = "eager"
    model = transformers.GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(PlanMismatch) as refused:
        apply(model, plan)(**workload.batch(1, 8))
    text = str(refused.value)
    assert "config.attn_implementation eager, planned sdpa" in text
    assert "scaled_dot_product_attention in transformer.h.0.attn when planned" in text
    assert plan.about["versions"]["transformers"] == transformers.__version__


# Plan files of earlier versions


@pytest.mark.fast("1", "4")
@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_plan_files_of_every_version_apply(version: int) -> None:
    plan = Plan.load(GOLDEN / f"toy-transformer.v{version}.plan.json")
    assert bool(plan.identities) == (version > 1) and plan.execution == "eager"
    assert bool(plan.offloads) == (version > 3)
    untouched, model = twins(TRANSFORMER.build)
    apply(model, plan)
    found = [trained(each) for each in (untouched, model)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert counts_of(model).regions == len(plan.regions) == 4
    graph = toys.graph_of(TRANSFORMER)
    assert regions_in(plan, graph) == tuple(half_saved(graph))


def test_plan_files_of_version_2_run_as_they_were_planned_to() -> None:
    of_modules = Plan.load(GOLDEN / "toy-transformer-modules.v2.plan.json")
    assert of_modules.execution == "modules" and of_modules.is_of_modules
    untouched, model = twins(TRANSFORMER.build)
    apply(model, of_modules)
    found = [trained(each) for each in (untouched, model)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert counts_of(model).regions == len(of_modules.regions) == 4
    compiled = Plan.load(GOLDEN / "toy-transformer-aot_eager.v2.plan.json")
    assert compiled.execution == "aot_eager" and "compiler" not in compiled.about
    with pytest.raises(UsageError, match=r"is no more: .* Use `remat\.compile\(model, budget=\.\.\.\)`"):
        apply(TRANSFORMER.build().train(), compiled)


@pytest.mark.exhaustive
def test_a_plan_file_of_version_1_refuses_another_graph() -> None:
    plan = Plan.load(GOLDEN / "toy-transformer.v1.plan.json")
    with pytest.raises(PlanMismatch, match=r"whose graph differs from this model's \(graph call 0, \d+ nodes\)"):
        trained(apply(toys.Transformer(layers=5).train(), plan))
    assert isinstance(regions_in(plan, spelled("all")[1]), GraphMismatch)


class Mapped(nn.Module):
    """It calls `torch.vmap`, within which no value has a storage of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mapped = torch.vmap(lambda row, i: torch.where(i > 0, row.tanh(), row * 2).exp())
        return self.second(mapped(self.first(x), torch.arange(len(x))).relu()).square().mean()


def test_a_model_that_calls_vmap_is_planned_and_trains_bitwise() -> None:
    workload = Workload("mapped", Mapped, lambda n, _: torch.randn(n, 8), lambda model, x: model(x), batch_size=4)
    graph = record(FakeStep(workload, device=torch.device("cpu")))
    untouched, model = twins(Mapped)
    end = len(graph.nodes) - 2
    saved = tuple(node for node in find_space(graph).saveable if node < end)
    assert saved
    apply(model, toys.plan_by_hand(graph, (Region(0, end, saved),)))
    x = torch.randn(4, 8)
    for each in (untouched, model):
        each(x).backward()
    found = [{name: p.grad for name, p in each.named_parameters() if p.grad is not None} for each in (untouched, model)]
    assert len(found[0]) == 4 and all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert counts_of(model).regions == 1
