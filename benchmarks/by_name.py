"""Plans made by name, on a torch without CUDA, trained at full size on PyTorch's CUDA build, without a GPU.

    python -m benchmarks by_name                     every ready-made model, form and budget (hours)
    python -m benchmarks by_name:gpt2,llama-1b       of some models
    python -m benchmarks by_name:gpt2,default,least  in some forms, for some budgets
    python -m benchmarks by_name:gpt2,auto-rtx4090   `--budget auto` for a card, on one that has no byte more

It needs `make card`, and is run by the torch of constraints.txt, which plans. Each plan is trained in a process of its
own by `plain_loop.py` on the card: memory is PyTorch's allocator's, nothing is computed but integers and small tensors.
Requested bytes are held to the prediction and to the budget, reserved bytes to the simulated allocator.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from remat.models import REGISTRY
from remat.units import GIB

ROOT = Path(__file__).resolve().parent.parent
CARD = ROOT / "build" / "card" / "python"
TARGET = "h100-80gb"
SECONDS = 60  # of a search: what is found is held to the card, not to the best
AUTO = "auto-"  # and a card: `--budget auto` for it
BUDGETS = ("70%step", "45%step", "least", *(AUTO + card for card in ("rtx4090", "a100-40gb", "h100-80gb")))
FORMS = {
    "default": "",
    "bitwise": "--exact",
    "fused": "--fuse",
    "offload activations": "--offload activations",
    "offload optimizer": "--offload optimizer",
    "accumulation 4": "--accumulation 4",
    "8-bit AdamW": "--optimizer adamw8bit",
    "LoRA": "--lora r=16",
    "offload weights": "--lora r=16 --offload weights",
    "nf4": "--lora r=16 --quantize nf4",
}
COLUMNS = ["model", "form", "budget", "budget_gib", "predicted_gib", "requested_gib", "off_percent", "above_budget"]
COLUMNS += ["reserved_gib", "reserved_off_percent", "wall_s", "failure"]


def main(*names: str) -> None:
    hold("by_name", names, {name: name for name in REGISTRY}, FORMS, BUDGETS)


def hold(
    benchmark: str,
    names: Sequence[str],
    models: Mapping[str, str],
    forms: Mapping[str, str],
    budgets: Sequence[str],
    *loop: str,
) -> None:
    """Hold plans to the card: of the models, forms and budgets in `names`, or of all that there are.

    models  by name, as `--model` takes them
    forms   by name, as options of `remat plan`
    loop    words for `plain_loop.py`
    """
    chosen_models, chosen_forms, chosen_budgets = (
        [name for name in names if name in all_] or list(all_) for all_ in (models, forms, budgets)
    )
    if unknown := set(names) - {*models, *forms, *budgets}:
        raise SystemExit(f"{benchmark} has no {', '.join(sorted(unknown))}.")
    if not CARD.exists():
        raise SystemExit(f"{benchmark} needs the card: make card.")
    cpu = torch.device("cpu")
    path = report.stem("_".join([benchmark, *(re.sub(r"[ %]+", "-", name) for name in names)]), cpu)
    about = {**report.provenance(cpu), "measured on": "PyTorch's CUDA build, without a GPU", "target": TARGET}
    rows: list[dict[str, Any]] = []
    for model in chosen_models:
        for form in chosen_forms:
            for row in rows_of(models[model], forms[form], chosen_budgets, *loop):
                rows.append({"model": model, "form": form, **row})
                print(rows[-1], flush=True)
                report.write(path, about, rows, COLUMNS)


def rows_of(model: str, options: str, budgets: Sequence[str], *loop: str) -> list[dict[str, Any]]:
    """One row a budget. The untouched step is run with the first plan that is found."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        untouched_done = False
        for budget in budgets:
            started, path = time.monotonic(), Path(folder) / f"{budget.strip('%')}.plan.json"
            asked = least_of(model, options) if budget == "least" else budget
            failure = make_plan(model, options, asked, path) if asked else "no least budget was told"
            if failure is not None and (enough := re.search(r"A budget of (\d+B) .*will do", failure)):
                failure = make_plan(model, options, enough[1], path)
            if failure is not None:
                rows.append({"budget": budget, "failure": failure})
                continue
            if not untouched_done:
                rows.append({"budget": "untouched", **measured(path, *loop, untouched=True)})
                untouched_done = True
            found = measured(path, *loop, untouched=False, is_card_full=budget.startswith(AUTO))
            rows.append({"budget": budget, **found, "wall_s": round(time.monotonic() - started, 1)})
    return rows


def command(model: str, options: str, budget: str) -> list[str]:
    asked, target = ("auto", budget.removeprefix(AUTO)) if budget.startswith(AUTO) else (budget, TARGET)
    said = [
        sys.executable,
        "-m",
        "remat.cli.main",
        "plan",
        "--model",
        *model.split(),
        "--target",
        target,
        "--budget",
        asked,
    ]
    said += ["--time-limit", str(SECONDS), "--no-advice", "--json", *options.split()]
    return [*said, "--host-budget", "256GiB"] if "--offload" in options else said


def make_plan(model: str, options: str, budget: str, path: Path) -> str | None:
    """Write a plan; return what went wrong."""
    ran = subprocess.run(
        [*command(model, options, budget), "--out", str(path)], capture_output=True, text=True, check=False
    )
    return None if path.exists() else last_line(ran.stderr)


def least_of(model: str, options: str) -> str:
    """The least budget that a refusal names, and a little: a search may miss the least."""
    ran = subprocess.run(command(model, options, "1MiB"), capture_output=True, text=True, check=False)
    least_bytes = json.loads(ran.stdout or "{}").get("minimum_budget_bytes")
    return f"{round(1.003 * least_bytes)}B" if least_bytes else ""


def measured(path: Path, *loop: str, untouched: bool, is_card_full: bool = False) -> dict[str, Any]:
    """Train the plan on the card; `is_card_full` gives it no byte more than the plan's budget."""
    plan = json.loads(path.read_text())
    ran = subprocess.run(
        [
            str(CARD),
            str(ROOT / "benchmarks" / "plain_loop.py"),
            str(path),
            *loop,
            *(["untouched"] if untouched else []),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **({"CARD_BYTES": str(plan["budget_bytes"])} if is_card_full else {})},
    )
    if ran.returncode:
        return {"failure": last_line(ran.stderr)}
    found = json.loads(ran.stdout.strip().splitlines()[-1])
    predicted = (plan["without_checkpointing"] if untouched else plan["predicted"])["peak_bytes"]
    row = {
        "predicted_gib": round(predicted / GIB, 4),
        "requested_gib": round(found["requested"] / GIB, 4),
        "off_percent": round(100 * (found["requested"] / predicted - 1), 4),
        "reserved_gib": round(found["reserved"] / GIB, 3),
        "measured": found,
    }
    if untouched:
        return row
    row |= {
        "budget_gib": round(plan["budget_bytes"] / GIB, 4),
        "above_budget": found["requested"] > plan["budget_bytes"],
    }
    if simulated := plan["predicted"].get("allocator"):
        row["reserved_off_percent"] = round(100 * (found["reserved"] / simulated[0]["reserved_bytes"] - 1), 2)
    return row


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1][:300]


if __name__ == "__main__":
    main(*sys.argv[1:])
