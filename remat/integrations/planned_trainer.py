"""A plan for a Trainer, made when it begins to train, and kept on disk for the next time.

The file lies in `plans/` of the cache folder (`$XDG_CACHE_HOME/remat`, or `~/.cache/remat`), under a name that begins
with the model's and ends with a digest of what identifies the step: budget, device, versions, the model's class,
configuration and parameters, the batch's shapes and padding, the number of ranks, the Trainer's class with the source
of its `compute_loss`, and its arguments, less those that change no step (`_IRRELEVANT_ARGUMENTS`). Anything else that
differs is noticed at the first step, as with any plan.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils._pytree import tree_map_only

from remat.capture.attention_masks import all_ones
from remat.costing.timing_cache import workspace_settings
from remat.errors import RematError, UsageError
from remat.evaluation.alternative import in_two_lines
from remat.evaluation.plan import Plan
from remat.integrations.generated_batches import makes_batches
from remat.integrations.generation_phases import phases_of, said_of
from remat.integrations.modules_around import described
from remat.integrations.trainer_beside import FUNCTIONS, described_beside
from remat.integrations.trainer_workload import loop_of, workload_of
from remat.recording.remedies import describe
from remat.units import gib
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload

# Arguments of Trainers that change no step, by how their names begin.
_IRRELEVANT_ARGUMENTS = (
    *("output_dir", "overwrite_output_dir", "run_name", "project", "trackio", "report_to", "log", "disable_tqdm"),
    *("eval", "do_", "per_device_eval", "metric", "greater_is_better", "load_best", "prediction_loss_only"),
    *("save", "push_to_hub", "hub_", "resume_from", "restore_callback", "enable_jit_checkpoint", "ignore_data_skip"),
    *("seed", "data_seed", "learning_rate", "lr_", "warmup", "num_train_epochs", "max_steps", "dataset_num_proc"),
    *("dataloader_", "skip_memory_metrics", "include_", "debug", "use_cpu", "local_rank", "ddp_timeout"),
    *("gradient_checkpointing", "activation_checkpointing"),  # which a plan turns off
)


def plan_of(trainer: Any, budget: str | int, folder: Path | None, **options: Any) -> Plan:
    """Return the plan for the step of `trainer` within `budget`, from `folder` if it is there.

    The first process plans, the others wait for its file. `options` are those of `remat.plan`. Raises what `remat.plan`
    and `workload_of` raise.
    """
    from remat.files import default_cache

    root = folder or ((cache := default_cache()) and cache / "plans")
    if root is None and trainer.args.world_size > 1:
        raise UsageError(
            "several processes share a plan through a folder, and there is no cache folder: give `cache=`."
        )
    with trainer.args.main_process_first(desc="planning"), _undisturbed():
        workload = workload_of(trainer)
        target = trainer.args.device.type
        key = _key(trainer, workload, {"budget": budget, "target": target, **options})
        path = root and root / f"{_slug(workload.name)}-{key}.plan.json"
        made = _kept(path) or _made(trainer, workload, budget, target, path, options)
        if makes_batches(trainer):
            tell(trainer, _phases(trainer, workload, made, target))
        return made


def _phases(trainer: Any, workload: Workload, made: Plan, target: str) -> str:
    try:
        return said_of(phases_of(trainer, workload, made, target))
    except RematError:
        raise
    except Exception as error:  # any error of a model that cannot generate on fake tensors
        return f"the peaks of generation and scoring are not known ({describe(error)}): leave room for them"


def _kept(path: Path | None) -> Plan | None:
    if path and path.is_file():
        with contextlib.suppress(UsageError):  # of another version of remat
            return Plan.load(path)
    return None


def _made(
    trainer: Any, workload: Workload, budget: str | int, target: str, path: Path | None, options: dict[str, Any]
) -> Plan:
    from remat.planning.planner import plan

    options = for_data(workload, options)
    loop = holding(loop_of(trainer), options)
    require_options(options)
    tell(trainer, f"planning the step of {workload.name} within {budget}, once")
    started = time.monotonic()
    made = plan(workload, budget=budget, target=target, loop=loop, **options)
    where = "not kept: there is no cache folder"
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        made.save(path)
        where = str(path)
    peak, overhead = gib(made.predicted["peak_bytes"]), made.predicted["overhead"]
    time_change = f"{100 * abs(overhead):.1f} % {'less' if overhead < 0 else 'more'} time"
    tell(trainer, f"predicted peak {peak} at {time_change}, planned in {time.monotonic() - started:.0f} s ({where})")
    for line in in_two_lines(made.alternatives):
        tell(trainer, line)
    return made


def for_data(workload: Workload, options: dict[str, Any]) -> dict[str, Any]:
    """Return options of `remat.plan` without lengths that the data do not reach: these decide the longest."""
    if "lengths" not in options:
        return {**options}
    from remat.planning.shorter import whole_lengths

    given = whole_lengths(options["lengths"])
    return {**options, "lengths": [length for length in given if length < (workload.seq_len or 0)]}


def require_options(options: dict[str, Any]) -> None:
    """Raise UsageError for an option that `remat.plan` does not take."""
    from remat.planning.planner import plan

    try:
        inspect.signature(plan).bind_partial(**options)
    except TypeError as error:
        raise UsageError(f"RematCallback: {error}; its options are those of `remat.plan`, and `holds=`.") from None


def holding(loop: TrainingLoop, options: dict[str, Any]) -> TrainingLoop:
    """Return the loop with what it holds, which is taken out of `options`."""
    return dataclasses.replace(loop, holds=options.pop("holds", loop.holds))


def tell(trainer: Any, text: str) -> None:
    if trainer.is_world_process_zero():
        print(f"remat: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Restore random states afterwards, so that the Trainer's batches and dropouts are those without a plan."""
    from remat.validation.training import undisturbed

    with undisturbed(torch.device("cuda" if torch.cuda.is_available() else "cpu")):
        yield


# What identifies a step


def _key(trainer: Any, workload: Workload, asked: dict[str, Any]) -> str:
    from remat.capture.circumstances import state_of, versions
    from remat.execution.kernel_settings import kernel_settings

    beside = cast(functools.partial[torch.Tensor], workload.step).keywords["beside"]
    args = {n: v for n, v in trainer.args.to_dict().items() if not n.startswith(_IRRELEVANT_ARGUMENTS)}
    known = {
        "asked": asked,
        "versions": versions(),
        "device": torch.cuda.get_device_name() if asked["target"] == "cuda" else "",
        "workspaces": workspace_settings(torch.device(asked["target"])),
        "kernels": kernel_settings(),
        "model": [f"{type(m).__module__}.{type(m).__qualname__}" for m in trainer.model.modules()],
        "state": state_of(trainer.model),
        "parameters": [(n, list(p.shape), str(p.dtype), p.requires_grad) for n, p in trainer.model.named_parameters()],
        "batch": tree_map_only(torch.Tensor, _described, workload.batch(workload.batch_size, workload.seq_len)),
        "loop": dataclasses.asdict(loop_of(trainer)),  # its ranks are no arguments
        "loss": [*map(_source, (type(trainer).compute_loss, trainer.compute_loss_func, *beside[FUNCTIONS]))],
        "around": described(trainer),
        "beside": described_beside(workload.step, beside),
        "optimizer": _optimizer(workload),
        "autocast": str(workload.autocast),
        "args": args,
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=repr).encode()).hexdigest()[:12]


def _described(tensor: torch.Tensor) -> str:
    is_padding = not tensor.is_floating_point() and not all_ones(tensor)  # if it is a mask
    return f"{tensor.dtype} {tuple(tensor.shape)} {is_padding}"


def _optimizer(workload: Workload) -> list[Any]:
    make: Any = workload.optimizer
    settings = {name: value for name, value in make.keywords.items() if name not in ("lr", "initial_lr")}
    return [f"{make.func.__module__}.{make.func.__qualname__}", settings]


def _source(function: Any) -> str:
    try:
        return inspect.getsource(function)
    except (TypeError, OSError):
        return getattr(function, "__qualname__", "")


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")
