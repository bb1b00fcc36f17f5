"""Steps measured on a GPU, beside what was promised: `python -m benchmarks gpu_steps:FOLDER[,FOLDER...]`.

FOLDER holds what `benchmarks/gpu/steps.py` found there; one called "deterministic", what it found with DETERMINISTIC=1.
A row is a model untouched or under a plan: requested bytes against the prediction and the budget, reserved bytes,
gradients against the untouched step's, and time. "today" is the untouched step's time by today's prices, which may have
been fitted to kernels of the same card.
"""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from remat.models import REGISTRY, build
from remat.planning.profiling import profile
from remat.units import GIB

TARGET = "h100-80gb,torch=2.11"
COLUMNS = ["model", "plan", "budget_gib", "predicted_gib", "requested_gib", "off_percent", "above_budget"]
COLUMNS += ["reserved_gib", "equal_gradients", "equal_loss", "ms", "predicted_ms", "today_ms", "overhead_percent"]
COLUMNS += ["predicted_overhead_percent", "failure"]


def main(*folders: str) -> None:
    """Write `results/gpu_steps_*`; of a plan that several folders have, the last one's row."""
    write_profiles(folders)
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    machines: dict[str, str] = {}
    for path in (path for folder in folders for path in sorted(Path(folder).glob("*.json.gz"))):
        with gzip.open(path, "rt") as file:
            found = json.load(file)
        machines[f"{found['device']}, torch {found['torch']}, transformers {found['transformers']}"] = card_of(found)
        for row in found["rows"]:
            if "peaks" in row or "failure" in row:
                made = row_of(found["model"], row)
                made["plan"] += ", deterministic" if path.parent.name == "deterministic" else ""
                rows[made["model"], made["plan"]] = made
    for row in rows.values():
        untouched = rows.get((row["model"], "untouched"), {})
        if not row["plan"].startswith("untouched") and "ms" in row and "ms" in untouched and row["same_step"]:
            row["overhead_percent"] = round(100 * (row["ms"] / untouched["ms"] - 1), 1)
            predicted = row["predicted_ms"] / untouched["predicted_ms"] - 1
            row["predicted_overhead_percent"] = round(100 * predicted, 1)
    about = report.provenance(torch.device("cpu"))
    about["device"] = f"{'; '.join(machines)}; this table and today's times: cpu"
    path = named("gpu_steps", folders, machines.values())
    report.write(path, about, list(rows.values()), COLUMNS)


def card_of(found: dict[str, Any]) -> str:
    """The word for a card in the names of results: h100."""
    return str(found["device"].removeprefix("NVIDIA ").split()[0].lower())


def named(kind: str, folders: Sequence[str], cards: Iterable[str]) -> Path:
    """The path of results of these cards from these folders, without an ending."""
    path = report.stem("_".join([kind, *(Path(folder).name for folder in folders)]), torch.device("cpu"))
    return path.with_name(path.name.replace("_cpu_", f"_{'_'.join(dict.fromkeys(cards))}_"))


def write_profiles(folders: Sequence[str]) -> None:
    """Write `results/gpu_profiles_*`, one step of each model without a plan by operator and shapes.

    Rows of (operator, shapes, types, numbers, calls, microseconds on the device, {kernel: calls}), the longest first.
    """
    found: dict[str, Any] = {}
    cards: list[str] = []
    for path in (path for folder in folders for path in sorted(Path(folder).glob("*.json.gz"))):
        with gzip.open(path, "rt") as file:
            data = json.load(file)
        cards.append(card_of(data))
        for row in data["rows"] if path.parent.name != "deterministic" else ():
            if "profile" in row:
                found[data["model"]] = row["profile"]
    path = named("gpu_profiles", folders, cards)
    with gzip.open(path.with_name(f"{path.name}.json.gz"), "wt") as file:
        json.dump(found, file)


def row_of(model: str, row: dict[str, Any]) -> dict[str, Any]:
    """A row of the table."""
    name = row["plan"].split(".")[1]
    planned, special = row["planned"], "lora" in name or "acc" in name or "flash" in name
    found = {"model": model, "plan": name if planned else f"untouched{f', {name}' if special else ''}"}
    found["same_step"] = not special
    if "failure" in row:
        return found | {"failure": row["failure"].splitlines()[0][:120]}
    predicted, peaks = row["predicted"], row["peaks"]
    bits = row.get("gradients") or row.get("untouched again")  # neither where the untouched step could not train
    found |= {
        "predicted_gib": round(predicted["peak_bytes"] / GIB, 4),
        "requested_gib": round(peaks["requested"] / GIB, 4),
        "off_percent": round(100 * (peaks["requested"] / predicted["peak_bytes"] - 1), 4),
        "reserved_gib": round(peaks["reserved"] / GIB, 2),
        "equal_gradients": bits and f"{bits['equal']} of {bits['parameters']}",
        "equal_loss": bits and bits["loss equal"],
        "ms": round(row["ms"]["median"], 1),
        "predicted_ms": round(predicted["step_time_us"] / 1e3, 1),
        "measured": row["peaks"] | {"ms_each": row["ms"]["each"], "losses": row["losses"]},
    }
    if planned:
        return found | {
            "budget_gib": round(row["budget_bytes"] / GIB, 4),
            "above_budget": peaks["requested"] > row["budget_bytes"],
        }
    return found if special or model not in REGISTRY else found | {"today_ms": round(today_us(model) / 1e3, 1)}


@functools.cache
def today_us(model: str) -> float:
    """Time of the untouched step by today's prices."""
    found = profile(build(model), target=TARGET)
    return found.costs.step_time_us(found.graph)
