"""Cuts are where a region may begin or end, and nowhere else."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from remat.evaluation.graph import OUTSIDE, Graph
from remat.formulation.search_space import Segment, Space, blocks, find_space, legal_cuts, saveable
from remat.workload.workload import Workload
from tests.graphs import BATCH_NORM, BRACKETS, DYNAMO_LOOKS_AT_GRAD, TOYS, WIDTH, ToyNode, chain, recorded, toy_graph

pytestmark = pytest.mark.filterwarnings(DYNAMO_LOOKS_AT_GRAD)

ALL = {**TOYS, BRACKETS.name: BRACKETS, BATCH_NORM.name: BATCH_NORM}


def nodes_of(graph: Graph, op: str) -> list[int]:
    found = [i for i, node in enumerate(graph.nodes) if node.op == op]
    assert found, f"no {op} among {[node.op for node in graph.nodes]}"
    return found


def test_a_plain_chain_may_be_cut_anywhere() -> None:
    assert legal_cuts(toy_graph(chain(4, 4, 4, 8))[0]) == [0, 1, 2, 3, 4]


def test_no_cut_parts_an_in_place_operator_from_what_it_changes() -> None:
    graph = recorded(TOYS["in-place"]).graph
    legal = set(legal_cuts(graph))
    changing = [i for i, node in enumerate(graph.nodes) if node.mutates]
    assert len(changing) == 8  # relu_ and mul_ of each of four layers
    for i in changing:
        assert not legal & set(range(min(graph.nodes[i].mutates) + 1, i + 1))
    for i in nodes_of(graph, "relu_"):
        assert {i - 1, i + 1} <= legal


@pytest.mark.parametrize(
    ("opening", "closing"), [("_enter_autocast", "_exit_autocast"), ("_set_grad_enabled", "_set_grad_enabled")]
)
def test_no_cut_is_inside_a_context(opening: str, closing: str) -> None:
    graph = recorded(BRACKETS).graph
    opened, closed = nodes_of(graph, opening), nodes_of(graph, closing)
    pairs = zip(opened[::2], closed[1::2], strict=True) if opening == closing else zip(opened, closed, strict=True)
    legal = set(legal_cuts(graph))
    for first, last in pairs:
        assert first < last
        assert not legal & set(range(first + 1, last + 1))
        assert {first, last + 1} <= legal


@pytest.mark.parametrize("op", ["call_method:chunk", "call_method:split", "call_method:max", "call_method:unbind"])
def test_no_cut_is_where_a_tuple_crosses(op: str) -> None:
    graph = recorded(TOYS["multi-output"]).graph
    for i in nodes_of(graph, op):
        last = max(k for k, node in enumerate(graph.nodes) if i in node.graph_inputs)
        assert not set(legal_cuts(graph)) & set(range(i + 1, last + 1))


@pytest.mark.fast("transformer", "broken", "held-logits", "between", "frozen", "reused")
@pytest.mark.parametrize("name", ALL)
def test_segments_cover_all_nodes_between_legal_cuts(name: str) -> None:
    graph = recorded(ALL[name]).graph
    segments = find_space(graph).segments
    assert [segment.first for segment in segments] == [0, *(segment.end for segment in segments[:-1])]
    assert segments[-1].end == len(graph.nodes)
    assert_regions_possible(graph)


def assert_regions_possible(graph: Graph) -> None:
    """Every segment that is not plain begins and ends where a region may, in one call, without lasting effects."""
    legal = set(legal_cuts(graph))
    for segment in find_space(graph).segments:
        if not segment.plain:
            inside = graph.nodes[segment.first : segment.end]
            assert {segment.first, segment.end} <= legal
            assert len({node.call for node in inside}) == 1
            assert all(node.effect != "other" and node.call != OUTSIDE for node in inside)


class MovingAverage(nn.Module):
    """A buffer is updated without gradients, as a quantiser's codebook or a router's bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.average: Tensor
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
            with torch.no_grad():
                self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x.mean()


class InPlaceAcrossBreak(nn.Module):
    """The second graph doubles a value of the first one in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        x.mul_(2.0)
        return self.second(x).tanh().mean()


class TupleAcrossBreak(nn.Module):
    """The second graph takes one result of an operator of the first one that has two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        values, _ = self.first(x).topk(4, dim=-1)
        torch._dynamo.graph_break()
        return self.second(values).tanh().mean()


@pytest.mark.parametrize("model", [MovingAverage, InPlaceAcrossBreak, TupleAcrossBreak])
def test_forced_cuts_are_no_excuse(model: type[nn.Module]) -> None:
    workload = Workload(model.__name__, model, lambda batch, _: torch.randn(batch, WIDTH), lambda m, x: m(x), 4)
    assert_regions_possible(recorded(workload).graph)


class Renewed(nn.Module):
    """Residual layers whose weights are normalized by a power iteration, which writes buffers without gradients."""

    def __init__(self) -> None:
        super().__init__()
        normed = nn.utils.parametrizations.spectral_norm
        self.layers = nn.ModuleList(normed(nn.Linear(WIDTH, WIDTH)) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.layers[::2], self.layers[1::2], strict=True):
            x = x + down(up(x.tanh()).tanh())
        return x.mean()


class RenewedFirst(Renewed):
    """Reads all weights before the first layer, as docs/explanation/limits.md advises."""

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            for layer in self.layers:
                assert layer.weight is not None
            return super().forward(x)


def test_weights_that_are_read_first_leave_the_layers_to_regions() -> None:
    workload = Workload("first", RenewedFirst, lambda batch, _: torch.randn(batch, WIDTH), lambda m, x: m(x), 4)
    graph = recorded(workload).graph
    plain = [segment for segment in find_space(graph).segments if segment.plain]
    assert len(plain) == 6 and plain[-1].end < nodes_of(graph, "linear")[0]


class TwoStreamsAcrossBreak(nn.Module):
    """A tuple crosses between graphs, and beside it a second stream, for which the forward has places enough."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(20))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        other = x.sin()
        values, _ = (x.cos() * other.tanh()).topk(WIDTH, dim=-1)
        torch._dynamo.graph_break()
        return (values.sigmoid() * other).exp().mean()


@pytest.mark.fast("power-iteration")
@pytest.mark.parametrize(
    ("model", "free", "runs"),
    [
        pytest.param(Renewed, {"call_method:tanh", "linear", "add"}, 6, id="power-iteration"),
        pytest.param(TwoStreamsAcrossBreak, {"linear", "call_method:tanh", "mul", "call_method:exp"}, 2, id="break"),
    ],
)
def test_what_no_region_may_hold_is_alone_in_its_segments(model: type[nn.Module], free: set[str], runs: int) -> None:
    workload = Workload(model.__name__, model, lambda batch, _: torch.randn(batch, WIDTH), lambda m, x: m(x), 4)
    graph = recorded(workload).graph
    plain = [segment for segment in find_space(graph).segments if segment.plain]
    assert len(plain) == runs
    for segment in plain:
        ops = [node.op for node in graph.nodes[segment.first : segment.end]]
        assert not free.intersection(ops)
    assert_regions_possible(graph)


def test_what_the_step_does_outside_the_model_is_plain() -> None:
    graph = recorded(TOYS["tied"]).graph
    last = find_space(graph).segments[-1]
    assert graph.nodes[-1].call == OUTSIDE
    assert last.plain and last.end == len(graph.nodes)


def test_saveable_is_what_allocates_and_is_never_changed() -> None:
    graph = recorded(TOYS["in-place"]).graph
    names = {graph.nodes[v].op for v in saveable(graph)}
    assert names <= {"add", "square", "mean", "call_method:square", "call_method:mean"}
    assert "add" in names and "linear" not in names and "relu_" not in names


def test_views_contexts_and_counters_cannot_be_saved() -> None:
    nodes = [ToyNode(4), ToyNode(4, (0,), kind="view", keeps=frozenset()), ToyNode(8, (1,))]
    assert saveable(toy_graph(nodes)[0]) == (0,)  # 1 is a view; 2 is the loss, which the caller holds
    graph = recorded(BATCH_NORM).graph
    assert all(not graph.nodes[v].effect for v in saveable(graph))


def test_a_mask_that_every_layer_uses_hides_no_cut() -> None:
    """The transformer's mask crosses every position; the space still parts its layers."""
    graph = recorded(TOYS["transformer"]).graph
    starts = {segment.first for segment in find_space(graph).segments}
    assert starts >= {first for first, _ in blocks(graph)[1:]}


class TwoCells(nn.Module):
    """Two LSTM cells, one above the other, whose four states every step hands on."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.above, self.out = nn.LSTMCell(WIDTH, WIDTH), nn.LSTMCell(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        below, above, outputs = (torch.zeros_like(x[0]),) * 2, (torch.zeros_like(x[0]),) * 2, []
        for here in x.unbind():
            below = self.below(here, below)
            above = self.above(below[0], above)
            outputs.append(self.out(above[0]))
        return torch.cat(outputs).square().sum()


def test_a_loop_that_carries_several_states_is_cut_between_its_steps() -> None:
    workload = Workload("cells", TwoCells, lambda n, _: torch.randn(12, n, WIDTH), lambda model, x: model(x), 4)
    segments = find_space(recorded(workload).graph).segments
    assert max(each.end - each.first for each in segments) < segments[-1].end / 4


def test_blocks_are_the_layers_of_the_model() -> None:
    graph = recorded(TOYS["residual"]).graph
    found = [{graph.nodes[i].module.split(".")[1] for i in range(*block)} for block in blocks(graph)]
    assert found == [{"0"}, {"1"}, {"2"}]


@pytest.mark.parametrize(
    ("plain", "expected"), [([], [(0, 4)]), ([0], [(1, 4)]), ([2], [(0, 2), (3, 4)]), ([0, 1, 2, 3], [])]
)
def test_stretches_are_what_lies_between_plain_segments(plain: list[int], expected: list[tuple[int, int]]) -> None:
    space = Space(tuple(Segment(i, i + 1, i in plain) for i in range(4)), (), 1)
    assert list(space.stretches()) == expected
    assert space.about() == {"segments": 4 - len(plain), "saveable_nodes": 0, "nesting_depth": 1} | {
        "longest_region_segments": 4
    }


def test_small_segments_are_merged() -> None:
    graph, _ = toy_graph(chain(*[4] * 40))
    kinds = tuple(
        dataclasses.replace(kind, moved_bytes=1000 if i % 10 == 0 else 1) for i, kind in enumerate(graph.kinds)
    )
    segments = find_space(dataclasses.replace(graph, kinds=kinds)).segments
    assert len(segments) == 4
