"""Plans to carry to a GPU, and the table of kernels of their models' steps; made where OR-tools is, by the CLI."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.bare import ROOT
from remat.costing.kernel_calls import TableRow, read_table, table_text
from remat.costing.kernel_table import key_of
from remat.evaluation.graph import OpKind

SECONDS = 60  # of a search: a plan is held to what it promises, not to the best


class Carried(NamedTuple):
    """A plan: MODEL.NAME.plan.json, made with `options` of `remat plan`."""

    model: str
    name: str
    options: str


def _default(model: str, percent: int = 45) -> Carried:
    return Carried(model, f"b{percent}", f"--budget {percent}%step")


PLANS = (
    *(_default(model) for model in ("gpt2", "bert-large", "resnet50", "vit-l16", "t5-base", "swin-base")),
    *(_default(model) for model in ("gemma-3-1b", "qwen3-moe", "convnextv2-base")),
    _default("llama-1b", 55),
    _default("gpt2-xl", 70),
    Carried("gpt2", "exact50", "--budget 50%step --exact"),
    Carried("gpt2", "fused45", "--budget 45%step --fuse --time-limit 110"),
    Carried("gpt2", "offact30", "--budget 30%step --offload activations --host-budget 256GiB"),
    Carried("llama-1b", "offopt40", "--budget 40%step --offload optimizer --host-budget 256GiB"),
)
COMPARED = ("gpt2", "55%step")
DETERMINISTIC = (
    Carried("gpt2", "flash45", "--budget 45%step"),
    Carried("gpt2", "flash50", "--budget 50%step --exact"),
    Carried("gpt2", "flashoff30", "--budget 30%step --offload activations --host-budget 256GiB"),
    Carried("llama-1b", "flash55", "--budget 55%step"),
    Carried("bert-large", "flash45", "--budget 45%step"),
)
FLASH = ",cudnn=9.10"  # whose attention PyTorch does not prefer to flash attention, which can be deterministic


def make(folder: Path, target: str, models: Collection[str] = ()) -> int:
    """Write FOLDER/plans, FOLDER/plans/deterministic and FOLDER/kernels.csv; of `models` alone if any are named.

    target  with the torch that trains there: "h100-80gb,torch=2.11"

    What is there already is left as it is. Returns the number of commands that failed.
    """
    names = set(models or {plan.model for plan in PLANS})
    plans = folder / "plans"
    made = [_made(plan, plans, target) for plan in PLANS if plan.model in names]
    made += [_made(plan, plans / "deterministic", target + FLASH) for plan in DETERMINISTIC if plan.model in names]
    if COMPARED[0] in names and not (plans / f"{COMPARED[0]}.sqrt-n.plan.json").exists():
        model, budget = COMPARED
        made.append(_remat("compare", model, target, f"--budget {budget} --save", plans))
    if not (table := folder / "kernels.csv").exists():
        made.append(_tables(table, target, sorted(names)))
    return made.count(False)


def _made(plan: Carried, folder: Path, target: str) -> bool:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{plan.model}.{plan.name}.plan.json"
    limit = "" if "--time-limit" in plan.options else f"--time-limit {SECONDS} "
    return path.exists() or _remat("plan", plan.model, target, f"{limit}--no-advice {plan.options} --out", path)


def _tables(path: Path, target: str, models: Collection[str]) -> bool:
    """Write the kernels of all models' steps, each once; whether all models could be recorded."""
    rows: dict[Any, TableRow] = {}
    good = True
    with tempfile.TemporaryDirectory() as folder:
        for model in models:
            table = Path(folder) / f"{model}.csv"
            good &= _remat("profile", model, target, "--costs", table)
            if table.exists():
                rows |= {key_of(OpKind(*row[:5])): row for row in read_table(table)[1]}
    path.write_text(table_text({}, rows.values()))
    print(f"{path}: {len(rows)} kernels", flush=True)
    return good


def _remat(command: str, model: str, target: str, options: str, path: Path) -> bool:
    """Run a command of remat; `options` ends with the one that takes `path`. Says what went wrong."""
    said = [sys.executable, "-m", "remat.cli.main", command, "--model", model, "--target", target]
    ran = subprocess.run([*said, *options.split(), str(path)], capture_output=True, text=True, cwd=ROOT, check=False)
    last = (ran.stderr.strip() or "no reason given").splitlines()[-1]
    print(f"{command} {model} {options} {path}: {'made' if not ran.returncode else last}", flush=True)
    return not ran.returncode
