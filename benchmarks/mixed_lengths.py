"""Plans for several lengths beside one for the longest: time of a run on chats of many lengths, and peaks by length.

    python -m benchmarks mixed_lengths              both models
    python -m benchmarks mixed_lengths:gpt2

A plan by name, as `by_name.py`. Of each length, the peak is that of a plain loop on PyTorch's CUDA build, without a
GPU; a length between two plans is among them. Times are estimated for the target, at the lengths of plans and between
them by a straight line. The run has batches of rows drawn by chance from `measured/chat_lengths.json`, each padded to
its longest row, or drawn from rows of like length, as `group_by_length` of a Trainer does.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import remat
from benchmarks import report
from benchmarks.by_name import ROOT, TARGET, last_line, make_plan, measured
from remat.evaluation.plan import Plan
from remat.models import build
from remat.units import GIB

CASES = {"gpt2": (24, 1024, (128, 256, 512, 768)), "llama-1b": (8, 4096, (512, 1024, 2048, 3072))}
BUDGET, BATCHES, GROUP = "50%step", 1000, 50  # a group has rows for 50 batches
COLUMNS = [
    *("model", "batch", "budget_gib", "tokens", "added_percent", "predicted_gib", "requested_gib", "off_percent"),
    *("above_budget", "mixed_gain_percent", "grouped_gain_percent", "failure"),
]


def main(*names: str) -> None:
    cpu = torch.device("cpu")
    about = {**report.provenance(cpu), "measured on": "PyTorch's CUDA build, without a GPU", "target": TARGET}
    rows: list[dict[str, Any]] = []
    path = report.stem("_".join(["mixed_lengths", *names]), cpu)
    for name in names or CASES:
        for row in rows_of(name, *CASES[name]):
            rows.append({"model": name, "batch": f"{CASES[name][0]} x {CASES[name][1]}", **row})
            print(rows[-1], flush=True)
            report.write(path, about, rows, COLUMNS)


def rows_of(name: str, samples: int, longest: int, lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    """A row for each length that has a plan, one between two plans, and the run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "many.plan.json"
        options = f"--lengths {','.join(map(str, lengths))}"
        failure = make_plan(f"{name} --batch-size {samples} --seq-len {longest}", options, BUDGET, path)
        if failure is not None:
            return [{"failure": last_line(failure)}]
        plan = Plan.load(path)
        rows = []
        plans = {each.about["seq_len"]: each for each in (*plan.shorter, plan)}
        for length in sorted({*plans, longest - longest // 8 - 1}):
            found = measured(path, "blind", f"length={length}", untouched=False)
            row = {"tokens": length, "budget_gib": round(plan.budget_bytes / GIB, 4)}
            if length in plans:
                predicted = plans[length].predicted
                row["added_percent"] = round(100 * predicted["overhead"], 2)
                row["predicted_gib"] = round(predicted["peak_bytes"] / GIB, 4)
            if "measured" not in found:
                rows.append({**row, "failure": found["failure"]})
                continue
            requested = found["measured"]["requested"]
            row |= {"requested_gib": round(requested / GIB, 4), "above_budget": requested > plan.budget_bytes}
            if length in plans:
                row["off_percent"] = round(100 * (requested / predicted["peak_bytes"] - 1), 4)
            rows.append(row)
    return [*rows, {"tokens": "a run", **gains(name, samples, longest, plan)}]


def gains(name: str, samples: int, longest: int, plan: Plan) -> dict[str, Any]:
    """How much less time a run takes with all plans, in percent."""
    workload = build(name).sized(batch_size=samples)
    plans = [*plan.shorter, plan]
    ends = [each.about["seq_len"] for each in plans]
    points = [ends[0] // 4, *ends]

    def times_us(under: Plan, at: list[int]) -> list[float]:
        found = [remat.estimate(workload.sized(seq_len=length), plan=under, target=TARGET) for length in at]
        return [each.speed.update_time_us for each in found]

    alone = times_us(plan, points)
    own = [times_us(each, points[i : i + 2]) for i, each in enumerate(plans)]
    known = np.array(json.loads((ROOT / "benchmarks" / "measured" / "chat_lengths.json").read_text())["tokens"])
    drawn = random.Random(0)
    rows = np.minimum([known[drawn.randrange(len(known))] for _ in range(samples * BATCHES)], longest)
    groups = np.sort(rows.reshape(-1, samples * GROUP), axis=1)
    found = {}
    for kind, batches in (("mixed", rows), ("grouped", groups)):
        padded = batches.reshape(-1, samples).max(axis=1)
        one_us = np.interp(padded, points, alone).sum()
        number = np.searchsorted(ends, padded)
        many_us = sum(np.interp(padded[number == i], points[i : i + 2], own[i]).sum() for i in range(len(plans)))
        found[f"{kind}_gain_percent"] = round(100 * float(1 - many_us / one_us), 2)
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
