"""Where a token goes is decided once, in forward: a recomputation that rounds otherwise sends no token elsewhere.

On CUDA a recomputation may round otherwise than forward did, where a kernel before it adds in any order. Here it is
given noise in place of that, far more than rounding.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from remat.capture.schemas import written
from remat.costing.costs import estimated_costs
from remat.evaluation.evaluator import Memory
from remat.evaluation.graph import Graph
from remat.evaluation.plan import Region, from_refs, saved_nodes, to_refs
from remat.execution.eager import rewrite
from remat.execution.eager.replay import replay
from remat.execution.eager.rewritten_calls import RewrittenCalls
from remat.execution.modules.search_space import find_module_space
from remat.formulation.check import check
from remat.formulation.problem import Problem
from remat.formulation.search_space import find_space
from remat.formulation.solution import Solution
from remat.recording.fake_step import FakeStep
from remat.recording.record import record
from remat.workload.target import TARGETS
from remat.workload.workload import Workload
from tests.graphs import recorded
from tests.test_rewrite import assert_same_outcome, real_step
from tests.toys import CPU, every_block

WIDTH, EXPERTS, LENGTH = 8, 4, 16


class Router(nn.Module):
    """Scores of experts to the best two; `in_place`: their weights are normalised in place."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.scores, self.in_place = nn.Linear(WIDTH, EXPERTS), in_place

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = self.scores(x).softmax(-1).topk(2)
        if self.in_place:
            weights /= weights.sum(-1, keepdim=True)
        return weights, experts


class Mixture(nn.Module):
    """x + the sum of what two experts of each token make of it, every expert a matrix."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), Router(in_place)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        weights, experts = self.router(y)
        made = torch.einsum("nd,nkde->nke", y, self.experts[experts]).tanh()
        return x + (made * weights[..., None]).sum(1)


class Layers(nn.Module):
    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixture(in_place) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def rows(samples: int, length: int | None) -> Tensor:
    return torch.randn(samples, WIDTH)


def step(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch)
    return loss


PLAIN = Workload("mixture", lambda: Layers(False), rows, step, batch_size=LENGTH)
IN_PLACE = Workload("mixture-in-place", lambda: Layers(True), rows, step, batch_size=LENGTH)
toys = pytest.mark.parametrize("workload", [PLAIN, IN_PLACE], ids=lambda workload: workload.name)


def undecided(graph: Graph) -> Graph:
    """`graph` as it would be without the rule."""
    return dataclasses.replace(graph, nodes=tuple(dataclasses.replace(node, decides=False) for node in graph.nodes))


class Reads(TorchDispatchMode):
    """Notes every operator that reads integers, with these: the experts of every token among them."""

    def __init__(self, seen: set[tuple[str, bytes]]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        overwritten = {id(tensor) for tensor in written(func, args, kwargs or {})}
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.dtype in (torch.int32, torch.int64) and id(leaf) not in overwritten:
                self.seen.add((str(func), leaf.contiguous().numpy().tobytes()))
        return func(*args, **(kwargs or {}))


def shaken(patch: pytest.MonkeyPatch) -> None:
    """Recomputations are given noise on top of their activations."""
    run, noise = rewrite._Body.__call__, torch.Generator().manual_seed(0)

    def with_noise(self: Any, tape: Any, state: Any, *inputs: Any) -> Any:
        shift = tape.replaying
        return run(self, tape, state, *(_with_noise(each, noise) if shift else each for each in inputs))

    patch.setattr(rewrite._Body, "__call__", with_noise)


def _with_noise(value: Any, noise: torch.Generator) -> Any:
    if not isinstance(value, Tensor) or isinstance(value, nn.Parameter) or not value.is_floating_point():
        return value
    return value + torch.randn(value.shape, generator=noise)


def reads_of(workload: Workload, graph: Graph, regions: Sequence[Region]) -> tuple[set[Any], set[Any]]:
    """Return what operators of a step, and those of its recomputations, read; the step has trained."""
    whole, again = set[tuple[str, bytes]](), set[tuple[str, bytes]]()
    rewritten = RewrittenCalls(to_refs(graph, tuple(regions)), recompute_context=lambda: Reads(again))

    def run(*given: Any) -> Any:
        with Reads(whole):
            return rewritten(*given)

    found = real_step(workload).outcome(run)
    assert all(bool(value.isfinite().all()) for name, value in found.items() if name.startswith("grad"))
    assert again
    return whole, again


def assert_decided_once(workload: Workload, graph: Graph, patch: pytest.MonkeyPatch) -> None:
    regions = every_block(graph)
    assert any(saved_nodes(graph, region) for region in regions)
    shaken(patch)
    forward, again = reads_of(workload, graph, regions)
    assert again <= forward
    forward, again = reads_of(workload, undecided(graph), regions)
    assert not again <= forward  # without the rule experts are chosen anew


@toys
def test_a_recomputation_that_rounds_otherwise_uses_the_experts_of_forward(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_decided_once(workload, recorded(workload).graph, monkeypatch)


@toys
def test_weights_of_experts_stay_with_their_experts(workload: Workload) -> None:
    """Values and indices of a `topk` are saved together, in copies where the values are changed later."""
    graph = recorded(workload).graph
    (router, *_), node = graph.deciding, graph.nodes[graph.deciding[0]]
    assert (node.op, len(node.values)) == ("call_method:topk", 2)
    assert (router in graph.changed) == (workload is IN_PLACE)
    regions = tuple(every_block(graph))
    assert_same_outcome(workload, regions)
    tokens = LENGTH * 2 * (4 + 8)  # two weights in fp32 and two experts in int64 a token
    assert Memory(graph).saved_storages(regions[0]).tolist() == sorted(node.values)
    assert graph.storages.size_bytes[list(node.values)].sum() == tokens


@toys
def test_the_evaluator_knows_what_the_executor_keeps(workload: Workload) -> None:
    found = recorded(workload)
    graph, regions = found.graph, tuple(every_block(found.graph))
    predicted = Memory(graph).curve(regions)
    replayed = replay(found.step, to_refs(graph, regions)) + graph.unseen_bytes
    assert predicted.peak_bytes == replayed.max()
    if workload is PLAIN:  # a copy is an operator of its own
        assert predicted.alive_bytes[predicted.executed].tolist() == replayed.tolist()


def test_what_only_a_gradient_reads_decides_nothing() -> None:
    """Pooling makes integers of floats too, the places of the maxima; so does an unread argmax."""

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv1d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            best, _ = self.layer(x).max(dim=1)
            return torch.nn.functional.max_pool1d(best, 2, return_indices=False).sum()

    def batch(samples: int, length: int | None) -> Tensor:
        return torch.randn(samples, 3, LENGTH)

    assert record(FakeStep(Workload("pooled", Pooled, batch, step, batch_size=2), device=CPU)).deciding == ()


def test_no_region_of_modules_holds_a_router() -> None:
    """Such a region saves nothing. Smaller modules may be regions."""
    graph = recorded(PLAIN).graph
    found = find_module_space(graph).modules or ()
    without = find_module_space(undecided(graph)).modules or ()
    assert {path for _, _, path in without} >= {"layers.0", "layers.0.router"}
    assert not [path for first, end, path in found if any(first <= v < end for v in graph.deciding)]


def test_no_region_around_regions_holds_a_router() -> None:
    """Such a region saves nothing either."""

    def around(graph: Graph) -> list[Region]:
        problem = Problem(graph, estimated_costs(graph, TARGETS["h100-80gb"]), find_space(graph), 1 << 40)
        return [run.region for run in problem.runs if run.region and run.region.inner]

    graph = recorded(PLAIN).graph
    assert around(undecided(graph))
    assert not [region for region in around(graph) if any(v in region for v in graph.deciding)]


def test_a_plan_that_would_decide_again_is_refused() -> None:
    graph = recorded(PLAIN).graph
    problem = Problem(graph, estimated_costs(graph, TARGETS["h100-80gb"]), find_space(graph), 1 << 40)
    first, *_, last = every_block(graph)
    nested = Region(first.first, last.end, inner=tuple(every_block(graph)))
    (fault,) = [each for each in check(problem, Solution("any", "feasible", (nested,))) if "decide" in each]
    assert fault == f"the region at node {first.first} holds regions and nodes that decide, and so would not save these"


def test_a_plan_from_before_the_rule_runs_as_it_did() -> None:
    """It names no router among its saves; one is run again with its region."""
    graph, step = recorded(PLAIN).graph, real_step(PLAIN)
    refs = to_refs(undecided(graph), tuple(every_block(graph)))
    assert not any(ref.saved for ref in refs)
    found, expected = step.outcome(RewrittenCalls(refs)), step.outcome(None)
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_what_decides_stands_in_a_profile_and_is_unknown_in_one_from_before_the_rule() -> None:
    graph = recorded(PLAIN).graph
    data = json.loads(json.dumps(graph.to_json()))
    assert Graph.from_json(data).deciding == graph.deciding
    old = {**data, "nodes": undecided(graph).to_json()["nodes"]}
    assert len(old["nodes"][graph.deciding[0]]) < len(data["nodes"][graph.deciding[0]])
    assert Graph.from_json(old).deciding == ()
    regions = tuple(every_block(graph))
    assert from_refs(graph, to_refs(graph, regions)) == regions


MIXTURES = (
    *("MixtralForCausalLM", "Qwen3MoeForCausalLM", "OlmoeForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM"),
    *("Glm4MoeForCausalLM", "GraniteMoeForCausalLM", "JambaForCausalLM"),
)


@pytest.mark.exhaustive
@pytest.mark.often("MixtralForCausalLM")
@pytest.mark.filterwarnings("ignore")  # the library's own
@pytest.mark.parametrize("name", MIXTURES)
def test_every_mixture_uses_the_experts_of_forward(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    architectures: Any = importlib.import_module("benchmarks.architectures")
    (found,) = [each for each in architectures.ALL if each.model == name]
    torch._dynamo.reset()
    found = dataclasses.replace(found, options={**found.options, "num_hidden_layers": 2})
    workload = architectures.workload_of(found)
    assert_decided_once(workload, recorded(workload).graph, monkeypatch)
