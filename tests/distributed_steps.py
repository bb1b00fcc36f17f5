"""Steps that each of two processes runs in `test_distributed.py`: a toy, sharded or replicated.

Processes are spawned, so what they run must be importable; they write what they found to files. Gloo on the CPU: the
order of reductions over two ranks does not matter, so gradients can be compared bit by bit.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from remat.costing.device_allocator import measure_peak
from remat.errors import PlanMismatch
from remat.evaluation.plan import Plan
from remat.execution.apply import apply, counts_of
from remat.workload.workload import Workload
from tests.toys import TRANSFORMER, Transformer, tokens

WIDTH = 64
SAMPLES, LENGTH = 8, 32
MEASURED_IF_SHARDED = 4


def wide() -> nn.Module:
    return Transformer(layers=3, width=WIDTH)


WIDE = Workload("wide", wide, tokens, TRANSFORMER.step, batch_size=SAMPLES, seq_len=LENGTH, optimizer=None)
WIDE_BF16 = dataclasses.replace(WIDE.with_dtype("bf16"), name="wide-bf16")


@dataclasses.dataclass
class Found:
    """Of one process: losses and local gradients of two steps; peak bytes of later ones, above what was there before.

    steps  how many there were in all
    """

    losses: list[float]
    gradients: list[torch.Tensor]
    peak_bytes: int
    regions: int
    steps: int


def replicated(model: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, **options)


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


# name -> (kind of plan, how the model is wrapped, options)
SCENARIOS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "ddp nodes": ("nodes", replicated, {}),
    "ddp nodes small buckets": ("nodes", replicated, {"bucket_cap_mb": 0.1}),
    "ddp modules": ("modules", replicated, {}),
    "ddp modules bucket views": ("modules", replicated, {"gradient_as_bucket_view": True}),
    "fsdp2 modules": ("modules", sharded, {}),
    "fsdp2 modules mixed": ("modules bf16", sharded, {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}),
}


def trained(rank: int, scenario: str, plan: Plan | None, *, late: bool = False) -> Found:
    """Two steps for their gradients, more for memory; `late` applies the plan after the model is wrapped.

    A sharded step frees parameters in gloo's threads, which the profiler does not see, so what it says differs from
    step to step by a few layers: the lowest counts.
    """
    _, wrap, options = SCENARIOS[scenario]
    torch.manual_seed(0)
    model = wide()
    if plan is not None and not late:
        apply(model, plan)
    wrapped = wrap(model, **options)
    if plan is not None and late:
        apply(model, plan)
    torch.manual_seed(10 + rank)  # every rank has its own batch and its own dropout
    batch = WIDE.batch(SAMPLES, LENGTH)
    losses = []
    for _ in range(2):
        losses.append(step(wrapped, batch))
    gradients = [local(p.grad) for p in model.parameters() if p.grad is not None]
    peaks = []
    for _ in range(MEASURED_IF_SHARDED if wrap is sharded else 1):
        wrapped.zero_grad(set_to_none=True)
        peaks.append(measure_peak(lambda: step(wrapped, batch), torch.device("cpu")))
    return Found(losses, gradients, min(peaks), counts_of(model).regions if plan is not None else 0, 2 + len(peaks))


def through_accelerate(rank: int, plan: Plan | None) -> Found | None:
    """Three steps of a model that accelerate has sharded; None where it is not installed.

    On the CPU accelerate would take DistributedDataParallel whatever it is told, so its own record of what to take is
    changed; the preparation that follows is the one that GPUs get.
    """
    try:
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
        from accelerate.state import AcceleratorState
        from accelerate.utils import DistributedType
    except ImportError:
        return None
    from remat.integrations.accelerate import prepare

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost")  # met already
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = wide()
    optimizer: Any = torch.optim.AdamW(model.parameters())
    if plan is None:
        wrapped, optimizer = accelerator.prepare(model, optimizer)
    else:
        wrapped, optimizer = prepare(accelerator, model, optimizer, plan=plan)
    assert isinstance(wrapped, FSDPModule)
    torch.manual_seed(10 + rank)
    batch, losses, gradients = WIDE.batch(SAMPLES, LENGTH), [], []
    for _ in range(3):
        losses.append(step(wrapped, batch))  # type: ignore[arg-type]
        gradients = [local(p.grad) for p in wrapped.parameters() if p.grad is not None]  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad()
    AcceleratorState._reset_state(True)
    return Found(losses, gradients, 0, counts_of(wrapped).regions if plan is not None else 0, len(losses))  # type: ignore[arg-type]


def step(model: nn.Module, batch: Any) -> float:
    loss = WIDE.step(model, batch)
    loss.backward()
    return loss.item()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().clone()


def refused(plan: Plan) -> str:
    """Return the refusal of a plan of nodes by a sharded model."""
    model = sharded(apply(wide(), plan))
    try:
        step(model, WIDE.batch(SAMPLES, LENGTH))
    except PlanMismatch as error:
        return str(error)
    return ""


def run(rank: int, folder: str, plans: dict[str, Plan], names: set[str]) -> None:
    """The scenarios in `names`, without a plan and with one; called by `torch.multiprocessing.spawn`."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=120)
    )
    try:
        found: dict[str, Any] = {"refused": refused(plans["nodes"])}
        for scenario, (kind, *_) in SCENARIOS.items():
            if scenario in names:
                found[scenario] = trained(rank, scenario, None), trained(rank, scenario, plans[kind])
        if "late" in names:
            found["late"] = trained(rank, "fsdp2 modules", plans["modules"], late=True)
        if "accelerate" in names:
            found["accelerate"] = through_accelerate(rank, None), through_accelerate(rank, plans["modules"])
        torch.save(found, Path(folder) / f"found_{rank}.pt")
    finally:
        dist.destroy_process_group()
