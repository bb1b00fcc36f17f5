"""The simulated allocator is asked as CUDA's is: the same requests in the same order, of a step under a plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.alive import Noting, comparable
from remat.costing.costs import estimated_costs, with_library_workspaces
from remat.costing.planning_device import find_planning_device
from remat.costing.workspaces import workspace_bytes
from remat.cuda_kernels.autocast import cast_call
from remat.evaluation.evaluator import Memory
from remat.evaluation.graph import OpKind
from remat.planning.profiling import fake_step
from remat.recording.record import record
from remat.reservation.fragmentation import footprint
from remat.reservation.workspace_parts import parts_of
from remat.validation.training import Training, collect
from remat.workload.target import Target, target_of
from remat.workload.training_loop import TrainingLoop
from tests.small_models import TEST_SIZES
from tests.toys import every_block, plan_by_hand

LEAST_BYTES = 2048  # of a request that is compared: states of generators and scalars are left out


@pytest.mark.cuda
@pytest.mark.parametrize("recomputed", [False, True], ids=["nothing", "every-block"])
def test_a_step_asks_for_what_is_simulated_in_the_same_order(recomputed: bool) -> None:
    load, place = TEST_SIZES["gpt2"]().sized(2, 64), find_planning_device("h100-80gb")
    graph = record(fake_step(load, place), alignment_bytes=place.target.alignment_bytes)
    costs = estimated_costs(graph, place.target)
    graph = with_library_workspaces(graph, place.target, costs)
    regions = tuple(every_block(graph)) if recomputed else ()
    simulated = Noting()
    footprint(Memory(graph, costs.workspace_per_op(graph)), regions, allocator=simulated)

    device = torch.device("cuda", 0)
    training = Training(load, device, 0, TrainingLoop())
    training.begin_again()
    training.apply(plan_by_hand(graph, regions, costs))
    for _ in range(2):
        training.step()
    collect(device)
    torch.cuda.memory._record_memory_history(context=None, stacks="python")
    try:
        training.step()
        (events,) = torch.cuda.memory._snapshot()["device_traces"]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    asked = [(event["action"], event["size"]) for event in events if event["action"] in ("alloc", "free_completed")]
    assert comparable(asked, LEAST_BYTES) == comparable(simulated.asked, LEAST_BYTES)


# Workspaces in parts


def tensor(*shape: int, dtype: str = "bfloat16") -> Any:
    return {"tensor": [list(shape), list(torch.empty(shape, device="meta").stride()), dtype]}


def kind(name: str, *args: Any) -> OpKind:
    return OpKind(name, [list(args), {}], 0, 0, "bfloat16")


H100: Target = target_of("NVIDIA H100 80GB HBM3")  # type: ignore[assignment]
HEADS = {"tensor": [[24, 12, 1024, 64], [786432, 64, 768, 1], "bfloat16"]}  # contiguous by token
FLASH = kind("aten._scaled_dot_product_flash_attention_backward.default", *[HEADS] * 5)
EMBEDDING = kind(
    "aten.embedding_dense_backward.default",
    tensor(24576, 768, dtype="float32"),
    tensor(24576, dtype="int64"),
    *(50257, -1, False),
)
SUM = kind("aten.sum.dim_IntList", tensor(24576, 768), [0], True)


@pytest.mark.parametrize(
    ("operator", "parts"),  # as PyTorch's CUDA build asked for GPT-2's, without a GPU (torch 2.13)
    [
        pytest.param(FLASH, (1179648, 75497472), id="flash"),  # softmax_d, dq_accum
        pytest.param(SUM, (138412032, 24), id="sum"),  # partial results, semaphores
        pytest.param(EMBEDDING, (*[196608] * 5, 216264, 83045376), id="embedding"),
        pytest.param(kind("aten.sum.default", tensor(4)), (0,), id="none"),
    ],
)
def test_workspaces_are_asked_for_in_parts(operator: OpKind, parts: tuple[int, ...]) -> None:
    assert parts_of(operator, workspace_bytes(operator, H100)) == parts


def test_what_is_measured_otherwise_than_by_formula_stays_whole() -> None:
    assert parts_of(FLASH, 1000) == (1000,)
    assert parts_of(EMBEDDING, 1000) == (1000,)


def test_autocast_casts_the_last_argument_first(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []

    def noted(value: int, dtype: torch.dtype) -> int:
        order.append(value)
        return value

    monkeypatch.setattr("remat.cuda_kernels.autocast.cast_one", noted)
    assert cast_call((1, [2, 3]), {"bias": 4}, torch.bfloat16) == ((1, [2, 3]), {"bias": 4})
    assert order == [4, 2, 3, 1]
