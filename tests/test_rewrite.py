"""A rewritten step computes what the untouched one computes, bit for bit, and recomputes what was planned."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from remat.capture.dynamo import GraphCalls
from remat.capture.eager_answers import Answers
from remat.capture.nodes import captured_nodes, may_draw
from remat.evaluation.evaluator import Memory
from remat.evaluation.plan import Region, to_refs
from remat.execution.eager import region_tape
from remat.execution.eager.region_tape import Counts, RewriteOptions
from remat.execution.eager.rewrite import CallRegion, rewrite
from remat.execution.eager.rewritten_calls import RewrittenCalls
from remat.formulation.search_space import saveable
from remat.workload.workload import Workload
from tests.graphs import (
    BATCH_NORM,
    BRACKETS,
    DYNAMO_LOOKS_AT_GRAD,
    TOYS,
    autocast_left_as_found,
    may_be_region,
    plans,
    recorded,
)

pytestmark = pytest.mark.filterwarnings(DYNAMO_LOOKS_AT_GRAD)

FEW_PLANS = settings(
    max_examples=4,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],
)


@dataclasses.dataclass
class RealStep:
    """A workload's forward and backward on real tensors; `execute_call` executes its captured graphs."""

    workload: Workload
    model: nn.Module
    batch: Any
    forward: Callable[..., Any]
    calls: GraphCalls
    execute_call: Any = None

    def outcome(self, execute_call: Any) -> dict[str, torch.Tensor]:
        """Loss, gradients, buffers and the generator's state after a step; untouched if `execute_call` is None."""
        self.execute_call = execute_call
        self.model.forward = self.forward if execute_call is None else self.calls
        before = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self.model.zero_grad()
        torch.manual_seed(1)
        with torch.autocast("cpu", self.workload.autocast, enabled=self.workload.autocast is not None):
            loss = self.workload.step(self.model, self.batch)
        loss.backward()
        found = {"loss": loss.detach(), "generator": torch.get_rng_state()}
        found |= {f"grad {n}": p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}
        found |= {f"buffer {n}": b.clone() for n, b in self.model.named_buffers()}
        for name, buffer in self.model.named_buffers():
            buffer.data.copy_(before[name])
        return found


@functools.cache
def real_step(workload: Workload) -> RealStep:
    torch.manual_seed(0)
    model = workload.build()
    batch = workload.batch(workload.batch_size, workload.seq_len)

    def run(call: int, graph_module: fx.GraphModule, args: tuple[Any, ...]) -> Any:
        return step.execute_call(call, graph_module, args)

    step = RealStep(workload, model, batch, model.forward, GraphCalls(model.forward, run, answers=Answers()))
    return step


@functools.cache
def untouched(workload: Workload) -> dict[str, torch.Tensor]:
    return real_step(workload).outcome(None)


def assert_same_outcome(workload: Workload, regions: tuple[Region, ...]) -> RewrittenCalls:
    """Asserts that a step under `regions` is the untouched one; returns what ran it."""
    rewritten = RewrittenCalls(to_refs(recorded(workload).graph, regions), observe=True)
    step = real_step(workload)
    expected, found = untouched(workload), step.outcome(rewritten)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    return rewritten


@pytest.mark.fast("between", "in-place", "two-outputs")
@pytest.mark.parametrize("name", [*TOYS, BATCH_NORM.name])
@given(data=st.data())
@FEW_PLANS
def test_loss_gradients_buffers_and_generator_are_the_untouched_ones(name: str, data: st.DataObject) -> None:
    workload = TOYS.get(name, BATCH_NORM)
    graph = recorded(workload).graph
    regions = data.draw(plans(graph))
    rewritten = assert_same_outcome(workload, regions)
    assert rewritten.counts.regions == len(regions)


@pytest.mark.fast("skip", "tied", "in-place", "transformer", "two-outputs", "broken")
@pytest.mark.parametrize("name", [*TOYS, BATCH_NORM.name])
def test_everything_that_may_be_one_region_is_one(name: str) -> None:
    """The largest regions possible, saving all that can be saved: the other extreme."""
    workload = TOYS.get(name, BATCH_NORM)
    found = recorded(workload)
    starts = [
        0,
        *(i for i in range(1, len(found.graph.nodes)) if found.graph.nodes[i].call != found.graph.nodes[i - 1].call),
    ]
    borders = zip(starts, [*starts[1:], len(found.graph.nodes)], strict=True)
    regions = [Region(a, b) for a, b in borders if may_be_region(found.graph, a, b)]
    assert regions
    assert_same_outcome(workload, tuple(regions))
    saving = [dataclasses.replace(r, saved=tuple(v for v in saveable(found.graph) if v in r)) for r in regions]
    assert_same_outcome(workload, tuple(saving))


@pytest.mark.parametrize(
    "regions",
    [
        pytest.param((Region(0, 4),), id="region"),
        pytest.param((Region(0, 4), Region(5, 8)), id="two"),
        pytest.param((Region(0, 8, saved=(0, 3)),), id="saving"),
        pytest.param((Region(0, 8, inner=(Region(0, 4), Region(4, 8))),), id="nested"),
    ],
)
def test_as_many_nodes_are_recomputed_as_the_evaluator_counts(regions: tuple[Region, ...]) -> None:
    workload = TOYS["chain"]
    rewritten = assert_same_outcome(workload, regions)
    assert rewritten.counts.recomputed_nodes == Memory(recorded(workload).graph).recomputed_nodes(regions)


# The chain is linear, tanh, linear, gelu, linear, sigmoid, linear, tanh, square, mean. One linear of 4 x 8 by 8 x 8
# is 2*4*8*8 = 512 FLOPs forward; its backward is two products, the first layer's one, since the batch needs none.
LINEAR = 2 * 4 * 8 * 8
STEP = 4 * LINEAR + (2 * 4 - 1) * LINEAR


@pytest.mark.parametrize(
    ("regions", "linears_again"),
    [
        pytest.param((), 0, id="none"),
        pytest.param((Region(0, 2),), 1, id="one-layer"),
        pytest.param((Region(0, 4),), 2, id="two-layers"),
        pytest.param((Region(0, 3),), 1, id="early-stop"),  # the second linear saves its input: it is not run again
        pytest.param((Region(0, 4, saved=(2,)),), 1, id="second-saved"),
        pytest.param((Region(0, 4, saved=(0, 2)),), 0, id="both-saved"),
        pytest.param((Region(0, 2), Region(2, 4), Region(4, 6), Region(6, 8)), 4, id="every-layer"),
        # outer: layer 1 and, as the last inner region waits for itself, nothing else; inner: layer 2, then layer 1
        pytest.param((Region(0, 4, inner=(Region(0, 2), Region(2, 4))),), 3, id="nested"),
    ],
)
def test_flops_rise_by_exactly_what_is_recomputed(regions: tuple[Region, ...], linears_again: int) -> None:
    rewritten = RewrittenCalls(to_refs(recorded(TOYS["chain"]).graph, regions))
    step = real_step(TOYS["chain"])
    captured: list[Any] = []

    def keep(call: int, graph_module: fx.GraphModule, args: tuple[Any, ...]) -> Any:
        captured[:] = [call, graph_module, args]
        return graph_module(*args)

    step.outcome(keep)
    counter = FlopCounterMode(display=False)
    with counter:  # outside Dynamo, which would run the eager code under a dispatch mode
        rewritten(*captured)[0].backward()
    assert counter.get_total_flops() == STEP + linears_again * LINEAR


def test_a_rewritten_graph_reads_as_its_regions() -> None:
    """Golden text: two regions, one of them saving, in a chain of four operators."""

    def model(x: torch.Tensor) -> torch.Tensor:
        return x.sin().cos().tanh().exp()

    traced = fx.symbolic_trace(model)
    rewritten = rewrite(traced, (CallRegion(0, 1, saved=frozenset({1})), CallRegion(2, 2)), RewriteOptions(Counts()))
    lines = [line.split(";")[0].strip() for line in rewritten.code.splitlines() if "=" in line or "return" in line]
    assert [line for line in lines if not line.startswith("import")] == [
        "region_0_1 = remat_execution_eager_rewrite_region_0_1(x)",
        "region_2_2 = remat_execution_eager_rewrite_region_2_2(region_0_1)",
        "exp = region_2_2.exp()",
        "return exp",
    ]


def dropouts_around(middle: Callable[[torch.Tensor], torch.Tensor]) -> fx.GraphModule:
    return fx.symbolic_trace(lambda x: F.dropout(middle(F.dropout(x)))).train()


@pytest.mark.parametrize(
    ("middle", "saved", "random", "looked_at"),
    [
        pytest.param(F.dropout, (), (0, 1, 2), 2, id="a-run-of-three"),  # before the first; before recomputation
        pytest.param(torch.tanh, (1,), (0, 2), 2, id="around-a-saved-node"),
        pytest.param(F.dropout, (1,), (0, 2), 3, id="around-a-saved-random-node"),  # which leaves a gap in the stream
    ],
)
def test_the_generator_is_looked_at_once_for_a_run_of_random_nodes(
    middle: Any, saved: tuple[int, ...], random: tuple[int, ...], looked_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    state_of = region_tape.state_of

    def look(device: torch.device) -> Any:
        seen.append(device)
        return state_of(device)

    monkeypatch.setattr(region_tape, "state_of", look)
    source = dropouts_around(middle)
    region = CallRegion(0, 2, saved=frozenset(saved), random=frozenset(random))
    found = []
    for function in (source, rewrite(source, (region,), RewriteOptions(Counts()))):
        x = torch.ones(64, requires_grad=True)
        torch.manual_seed(0)
        function(x).square().sum().backward()
        assert x.grad is not None
        found.append((x.grad.tolist(), torch.rand(1).item()))
    assert found[0] == found[1]
    assert len(seen) == looked_at


def test_a_recomputed_node_draws_what_it_drew_from_a_generator_that_the_model_keeps() -> None:
    def masked(x: torch.Tensor, own: torch.Generator) -> torch.Tensor:
        y = torch.bernoulli(x, generator=own) * x
        return torch.bernoulli(F.dropout(y).clamp(0, 1), generator=own) * y.exp()

    source = fx.symbolic_trace(masked).train()
    last = len(captured_nodes(source)) - 1
    region = CallRegion(0, last, random=frozenset(i for i, n in enumerate(captured_nodes(source)) if may_draw(n)))
    assert len(region.random) == 3
    found = []
    for function in (source, rewrite(source, (region,), RewriteOptions(Counts()))):
        x, own = torch.full((64,), 0.5, requires_grad=True), torch.Generator()
        torch.manual_seed(0)
        function(x, own).square().sum().backward()
        assert x.grad is not None
        found.append((x.grad.tolist(), torch.rand(1).item(), torch.rand(1, generator=own).item()))
    assert found[0] == found[1]


def test_a_recomputation_leaves_autocast_as_it_found_it() -> None:
    """Otherwise the cache of weight casts outlives the step, and the next one trains with old weights."""
    graph = recorded(BRACKETS).graph
    end = next(i for i, node in enumerate(graph.nodes) if node.op == "_exit_autocast") + 1
    with autocast_left_as_found():
        before = torch.autocast_increment_nesting()
        torch.autocast_decrement_nesting()
        real_step(BRACKETS).outcome(RewrittenCalls(to_refs(graph, (Region(0, end),))))
        after = torch.autocast_increment_nesting()
        torch.autocast_decrement_nesting()
        assert after == before
