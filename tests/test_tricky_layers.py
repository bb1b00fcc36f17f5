"""Whatever a layer does, a plan leaves its training bit for bit as it was: table of layers against kinds of plan.

Every layer of `tricky_layers.py` is trained for three steps with an optimizer, untouched and under four plans. Losses,
gradients, parameters, buffers and the stream of random numbers must be equal; regions must have been entered, nodes
recomputed as often as the evaluator says, and the evaluator's curve must be the replay's.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from remat.costing.planning_device import find_planning_device
from remat.errors import CaptureError
from remat.evaluation.evaluator import Memory
from remat.evaluation.plan import to_refs
from remat.execution.apply import apply, counts_of, planned_forward
from remat.execution.eager.replay import replay
from remat.formulation.search_space import find_space
from remat.planning.profiling import fake_step
from remat.recording.record import record
from remat.recording.step_contexts import autocast_context
from remat.workload.workload import Workload
from tests import tricky_layers
from tests.graphs import DYNAMO_LOOKS_AT_GRAD
from tests.toys import CPU, plan_by_hand, recorded
from tests.tricky_layers import CHOICES, STATE, TRICKY_LAYERS, workload_of

pytestmark = [
    pytest.mark.filterwarnings(DYNAMO_LOOKS_AT_GRAD),
    pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning"),  # Dynamo does it
]

STEPS = 3
ROOM = 1 << 20  # a budget in which the first step is verified, which an LSTM needs much for
REFUSED = {
    "sparse-product": r"Tensors of a sparse layout are not supported: give dense ones",
}
WITHOUT_REGIONS = {"batch-norm-cumulative"}  # it reads its counter, which ends the graph, in the loop over layers


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """One thread, since toys are too small to share; and a Dynamo that has seen nothing."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()


def built(workload: Workload) -> nn.Module:
    torch.manual_seed(0)
    return workload.build()


def trained(workload: Workload, model: nn.Module, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """All that training changes, after every step, by name."""
    found: dict[str, torch.Tensor] = {}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for number in range(steps):
        torch.manual_seed(100 + number)
        batch = workload.batch(workload.batch_size, workload.seq_len)
        torch.manual_seed(number)
        with autocast_context(CPU, workload.autocast):
            loss = workload.step(model, batch)
        loss.backward()
        found |= {f"{number} loss": loss.detach(), f"{number} generator": torch.get_rng_state()}
        named = list(model.named_parameters())
        found |= {f"{number} gradient of {n}": p.grad.clone() for n, p in named if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        tensors = ((n, t.detach()) for n, t in (*named, *model.named_buffers()))
        found |= {f"{number} {n}": (t.to_dense() if t.is_sparse else t).clone() for n, t in tensors}
    return found


def different(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    assert left.keys() == right.keys()
    return [name for name in left if not torch.equal(left[name], right[name])]


def assert_trains_alike(workload: Workload) -> None:
    fake, graph = recorded(workload)
    memory = Memory(graph)
    expected = trained(workload, built(workload))
    model = apply(built(workload), plan_by_hand(graph, (), budget_bytes=ROOM))
    planned, state = planned_forward(model), copy.deepcopy(model.state_dict())
    for choice, choose in CHOICES.items():
        regions = choose(graph)
        assert regions, choice
        planned.plan = plan_by_hand(graph, regions, budget_bytes=ROOM)
        counts = planned.watch(observe=True)  # without tracing again
        model.load_state_dict(state)
        assert different(trained(workload, model), expected) == [], choice
        assert counts.regions == STEPS * len(regions), choice
        assert counts.recomputed_nodes == STEPS * memory.recomputed_nodes(regions) > 0, choice
        alive = replay(fake, to_refs(graph, regions))
        assert alive.max() + graph.unseen_bytes == memory.curve(regions).peak_bytes, choice


@pytest.mark.fast(
    "batch-norm",
    "checkpointed",
    "drop-path",
    "function-of-its-own",
    "graph-break",
    "in-place-through-a-view",
    "lstm",
    "read-then-written",
    "sparse-buffer",
)
@pytest.mark.parametrize("name", [name for name in TRICKY_LAYERS if name not in REFUSED.keys() | WITHOUT_REGIONS])
def test_a_layer_trains_bit_for_bit_as_without_a_plan(name: str) -> None:
    assert_trains_alike(workload_of(name, copies=1))


@pytest.mark.parametrize("name", WITHOUT_REGIONS)
def test_and_one_around_which_nothing_is_captured(name: str) -> None:
    workload = workload_of(name, copies=1)
    model = apply(built(workload), plan_by_hand(recorded(workload)[1], (), budget_bytes=ROOM))
    assert different(trained(workload, model), trained(workload, built(workload))) == []


@pytest.mark.parametrize(
    ("name", "is_free"), [("trained-then-evaluated", True), ("stacked-statistics", True), ("renormalized", False)]
)
@pytest.mark.parametrize("device", ["cpu", "h100-80gb"])
def test_what_reads_statistics_after_their_update_alone_may_be_made_again(
    name: str, is_free: bool, device: str
) -> None:
    graph = record(fake_step(workload_of(name, copies=1), find_planning_device(device)))
    assert ("other" not in {node.effect for node in graph.nodes}) == is_free


@pytest.mark.fast("batch-norm", "renormalized")
@pytest.mark.parametrize("name", sorted(STATE.keys() - REFUSED.keys()))
def test_a_targets_kernels_change_nothing_about_what_may_be_made_again(name: str) -> None:
    here, elsewhere = (
        record(fake_step(workload_of(name, copies=1), find_planning_device(device))) for device in ("cpu", "h100-80gb")
    )
    assert [(n.op, n.effect) for n in here.nodes] == [(n.op, n.effect) for n in elsewhere.nodes]


@pytest.mark.fast("fp16-batch-norm")
@pytest.mark.parametrize("name", ["fused-attention", "batch-norm", "drop-path", "relu-in-place", "halves", "brackets"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_and_under_autocast(name: str, dtype: torch.dtype) -> None:
    assert_trains_alike(workload_of(name, copies=1, autocast=dtype))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["multi-head-attention", "brackets"])
def test_autocast_that_a_step_enters_itself_lies_around_regions(name: str) -> None:
    plain = workload_of(name, copies=1)

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return plain.step(model, batch)

    entered = dataclasses.replace(plain, step=step).with_planned_step()
    outside = dataclasses.replace(plain, autocast=torch.bfloat16).with_planned_step()
    inside, around = (find_space(recorded(workload)[1]).segments for workload in (entered, outside))
    assert len([s for s in inside if not s.plain]) == len([s for s in around if not s.plain]) > 1
    assert_trains_alike(entered)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_planned_is_refused_by_name(name: str, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    with pytest.raises(CaptureError, match=REFUSED[name]):
        recorded(workload_of(name))


def test_the_users_own_checkpoint_updates_running_statistics_once_under_a_plan() -> None:
    """Untouched, it does so twice; the plan takes such a call apart, and decides itself what is recomputed."""
    workload = Workload("checkpointed-norm", CheckpointedNorm, tricky_layers.vectors, tricky_layers.step, 4)
    _, graph = recorded(workload)
    for planned, times in ((False, 2), (True, 1)):
        model = CheckpointedNorm()
        if planned:
            apply(model, plan_by_hand(graph, tricky_layers.largest(graph)))
        trained(workload, model)
        assert model.state_dict()["norm.num_batches_tracked"] == times * STEPS
    assert counts_of(model).regions == STEPS


class CheckpointedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(tricky_layers.WIDTH, tricky_layers.WIDTH), nn.BatchNorm1d(tricky_layers.WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x).transpose(1, 2)
        return torch.utils.checkpoint.checkpoint(self.norm, x, use_reentrant=False).tanh().square().mean()
