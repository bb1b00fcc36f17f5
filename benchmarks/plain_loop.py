"""A plain training loop under a plan, written as a user writes it: `plain_loop.py PLAN [WORDS ...]`.

No part of `remat` measures: the peaks are those of PyTorch's caching allocator in the third step, printed as JSON. The
model is built on the device, and what building left in the allocator's cache is let go of. With `requests` those
of a step more are printed too, in order; `blind` leaves out the comparison of the first step: nothing is computed.
`untouched` leaves out the plan, and `length=512` gives batches of that length.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._pytree import tree_map_only

import remat
from remat.cli.commands.files import spec_in
from remat.cli.commands.source import workload_of
from remat.evaluation.graph import block_of
from remat.evaluation.plan import Plan
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import trainable

STEPS = 3
COUNTS = ("requested", "allocated", "reserved")


def main(path: Path, *, untouched: bool, with_requests: bool, is_blind: bool, length: int | None) -> None:
    plan = Plan.load(path)
    spec = spec_in(plan.about, path)
    assert spec is not None
    workload, loop = workload_of(spec), plan.about.get("loop", {})
    on_host = 0 if untouched else plan.about.get("weights_on_host", 0)
    with torch.device("cuda"):
        model = workload.build()
        batch = workload.batch(workload.batch_size, length or workload.seq_len)
    model = model.to("cuda").train()
    batch = tree_map_only(torch.Tensor, lambda tensor: tensor.to("cuda"), batch)
    if on_host:
        remat.offload_weights(model, on_host, "cuda")
    if not untouched:
        remat.apply(model, plan, verify_first_step=not is_blind)
    model = distributed(model, TrainingLoop.of(plan.about))
    optimizer = workload.optimizer(trainable(model)) if workload.optimizer else None
    if optimizer is not None and (plan.about.get("offload_optimizer") or loop.get("offload_optimizer")):
        remat.offload_optimizer(optimizer)
    around = TrainingLoop.of(plan.about)
    if optimizer is not None and around.step_in_backward:
        remat.step_in_backward(optimizer)
    found: dict[str, Any] = steps(workload, model, batch, optimizer, around)
    if with_requests:
        torch.cuda.memory._record_memory_history(context=None, max_entries=1 << 24)
        steps(workload, model, batch, optimizer, around, count=1)
        (events,) = torch.cuda.memory._snapshot()["device_traces"]
        found["requests"] = [[e["action"], e["size"]] for e in events if e["action"] in ("alloc", "free_completed")]
    print(json.dumps(found), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def distributed(model: nn.Module, loop: TrainingLoop) -> nn.Module:
    """The model of one rank, among processes that are not there: collectives answer and move nothing."""
    if not loop.ddp and loop.shard is None:
        return model
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=max(loop.ranks, 2))
    if loop.ddp:
        replica = nn.parallel.DistributedDataParallel(model)
        # The fake group's own future holds nothing.
        replica.register_comm_hook(None, lambda _, bucket: done(bucket.buffer()))
        return replica
    for name, module in model.named_modules():
        if name and block_of(name) == name:
            fully_shard(module)
    fully_shard(model)
    return model


def done(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future


def steps(
    workload: Any, model: Any, batch: Any, optimizer: Any, around: TrainingLoop, count: int = STEPS
) -> dict[str, int]:
    """The peaks of the last step."""
    own = getattr(model, "module", model)  # within DDP
    average = AveragedModel(own, multi_avg_fn=get_ema_multi_avg_fn(), use_buffers=True) if around.ema else None
    gc.collect()
    torch.cuda.empty_cache()
    for _ in range(count):
        torch.cuda.reset_peak_memory_stats()
        for _ in range(around.accumulation):
            with torch.autocast("cuda", workload.autocast) if workload.autocast else contextlib.nullcontext():
                loss = workload.step(model, batch)
            loss.backward()
            del loss
        if around.clip_grad_norm:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        if average is not None:
            average.update_parameters(own)
    stats = torch.cuda.memory_stats()
    return {count: stats[f"{count}_bytes.all.peak"] for count in COUNTS}


if __name__ == "__main__":
    said = sys.argv[2:]
    lengths = [int(word.removeprefix("length=")) for word in said if word.startswith("length=")]
    main(
        Path(sys.argv[1]),
        untouched="untouched" in said,
        with_requests="requests" in said,
        is_blind="blind" in said,
        length=lengths[0] if lengths else None,
    )
