"""Under DistributedDataParallel and fully_shard, on two processes, a plan changes memory and nothing else.

All scenarios run once, in two spawned processes (`distributed_steps.py`); the tests read what these found.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from remat.evaluation.plan import Plan
from remat.execution.eager.replay import replay
from remat.execution.modules.replay import replay_modules
from remat.recording.fake_step import FakeStep
from tests.distributed_steps import SCENARIOS, WIDE, WIDE_BF16, Found, run
from tests.test_modules import plan_of
from tests.toys import every_block, graph_of, plan_by_hand, recorded

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this torch has no gloo", allow_module_level=True)

LAYERS = 3
RANKS = (0, 1)


@pytest.fixture(scope="module")
def step() -> Iterator[FakeStep]:
    yield recorded(WIDE)[0]
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    graph, graph_bf16 = graph_of(WIDE), graph_of(WIDE_BF16)
    return {
        "nodes": plan_by_hand(graph, every_block(graph)),
        "modules": plan_of(graph),
        "modules bf16": plan_of(graph_bf16),
    }


FAST = {"refused", "ddp nodes", "fsdp2 modules"}


@pytest.fixture(scope="module")
def found(
    plans: dict[str, Plan], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> list[dict[str, Any]]:
    """The results of each rank, by scenario; all scenarios if exhaustive tests are to be run."""
    folder = tmp_path_factory.mktemp("two_ranks")
    here = [item for item in request.session.items if item.path == request.path]
    every = any(item.get_closest_marker("exhaustive") for item in here)
    names = {*SCENARIOS, "refused", "late", "accelerate"} if every else FAST
    torch.multiprocessing.spawn(run, args=(str(folder), plans, names), nprocs=len(RANKS))
    return [torch.load(Path(folder) / f"found_{rank}.pt", weights_only=False) for rank in RANKS]


@pytest.fixture(scope="module")
def predicted(plans: dict[str, Plan], step: FakeStep) -> dict[str, int]:
    """Peaks of the executors' replays, above parameters and batch."""
    fixed = sum(p.numel() * p.element_size() for p in WIDE.build().parameters())
    fixed += sum(t.numel() * t.element_size() for t in WIDE.batch(WIDE.batch_size, WIDE.seq_len))
    regions = {kind: plans[kind].regions for kind in ("nodes", "modules")}
    peaks = {"nodes": replay(step, regions["nodes"]).max(), "modules": replay_modules(step, regions["modules"]).max()}
    peaks["nothing"] = replay(step, ()).max()
    return {kind: int(peak) - fixed for kind, peak in peaks.items()}


@pytest.mark.fast("ddp nodes-0", "ddp nodes-1", "fsdp2 modules-0")
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_losses_and_gradients_are_bitwise_those_without_a_plan(scenario: str, rank: int, found: Any) -> None:
    untouched, planned = found[rank][scenario]
    assert planned.losses == untouched.losses
    assert len(planned.gradients) == len(untouched.gradients) > 0
    assert all(torch.equal(a, b) for a, b in zip(planned.gradients, untouched.gradients, strict=True))


@pytest.mark.fast("ddp nodes", "fsdp2 modules")
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_plan_runs_on_both_ranks(scenario: str, found: Any) -> None:
    for rank in RANKS:
        planned = found[rank][scenario][1]
        assert planned.regions == planned.steps * LAYERS


def test_the_ranks_reduced_their_gradients(found: Any) -> None:
    left, right = (found[rank]["ddp nodes"][1] for rank in RANKS)
    assert left.losses != right.losses  # each had its own batch
    assert all(torch.equal(a, b) for a, b in zip(left.gradients, right.gradients, strict=True))


@pytest.mark.fast("ddp nodes")
@pytest.mark.parametrize("scenario", ["ddp nodes", "ddp nodes small buckets", "ddp modules"])
def test_under_ddp_the_peak_is_the_predicted_one_above_the_buckets(scenario: str, found: Any, predicted: Any) -> None:
    """DDP's buckets, as large as all gradients, are there before the step; above them nothing is added."""
    for rank in RANKS:
        untouched, planned = found[rank][scenario]
        assert untouched.peak_bytes == predicted["nothing"]
        assert planned.peak_bytes == pytest.approx(predicted[SCENARIOS[scenario][0]], abs=64)


@pytest.mark.exhaustive
def test_with_gradients_as_views_of_the_buckets_the_peak_is_lower(found: Any, predicted: Any) -> None:
    for rank in RANKS:
        assert found[rank]["ddp modules bucket views"][1].peak_bytes < predicted["modules"]


@pytest.mark.parametrize("rank", RANKS)
def test_under_fully_shard_the_plan_saves_what_it_says(rank: int, found: Any, predicted: Any) -> None:
    """To the precision of what can be measured here: gathered parameters of up to three layers come on top."""
    untouched, planned = found[rank]["fsdp2 modules"]
    layer = sum(p.numel() * p.element_size() for p in WIDE.build().layers[0].parameters())  # type: ignore[union-attr,index]
    assert planned.peak_bytes <= predicted["modules"] + 3 * layer
    assert untouched.peak_bytes - planned.peak_bytes >= predicted["nothing"] - predicted["modules"] - layer


@pytest.mark.exhaustive
@pytest.mark.parametrize("rank", RANKS)
def test_a_model_that_accelerate_shards_trains_with_its_plan_of_modules(rank: int, found: Any) -> None:
    untouched, planned = found[rank]["accelerate"]
    if planned is None:
        pytest.skip("accelerate is not installed")
    assert planned.losses == untouched.losses
    assert planned.regions == planned.steps * LAYERS
    assert len(planned.gradients) == len(untouched.gradients) > 0
    assert all(torch.equal(a, b) for a, b in zip(planned.gradients, untouched.gradients, strict=True))


@pytest.mark.exhaustive
def test_a_plan_may_be_applied_after_sharding(found: Any) -> None:
    for rank in RANKS:
        late: Found = found[rank]["late"]
        planned = found[rank]["fsdp2 modules"][1]
        assert (late.losses, late.regions) == (planned.losses, planned.regions)
        assert all(torch.equal(a, b) for a, b in zip(late.gradients, planned.gradients, strict=True))


def test_a_plan_of_nodes_is_refused_by_a_sharded_model(found: Any) -> None:
    assert 'plan with `execution="modules"`' in found[0]["refused"]
