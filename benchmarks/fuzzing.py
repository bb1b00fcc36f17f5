"""Fuzzing: 250 random small models under eight random plans each; every one of the 2,000 is a claim of the package.

`tests/random_models.py` makes a model from its number; `python -m benchmarks fuzzing:123` runs model 123 alone, and
`fuzzing:250-499` others than the first 250. With `rows` before the numbers (`fuzzing:rows,0-249`) linear layers are
MLPs, which run in 3 slices; with `offloads`, plans have random offloads too, whose copies are as late as they may be,
while what has been let go of is poisoned. With REMAT_TEST_DEVICE=cuda and CARD_ARITHMETIC=all `build/card/python` runs
it on the card, where streams are late (docs/card.md).
`tests/fuzzing.py` judges it, and says what is claimed.

Toys are small: a kernel's workspace that the prediction does not know weighs much more in them than in a model.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from benchmarks import report
from remat.evaluation.form import CAPTURED_FORM, Form
from tests.devices import ON_CARD
from tests.fuzzing import STEPS, TOLERANCE, few_rows, verdicts
from tests.offloads import late_copies

MODELS, PLANS = 250, 8
ROWS, SLICES, OFFLOADS = "rows", 3, "offloads"
COLUMNS = [
    "cases",
    "wrong",
    "miscounted",
    "evaluator_off",
    "above_prediction",
    "peaks_judged",
    "worst_percent",
    "refused",
    "offloads",
    "wall_s",
]


def main(*models: str) -> None:
    which = [text for text in models if text not in (ROWS, OFFLOADS)] or [f"0-{MODELS - 1}"]
    numbers = [number for text in which for number in numbers_of(text)]
    cpu = torch.device("cpu")
    path = report.stem("_".join(["fuzzing", *["card"] * ON_CARD, *models]), cpu)
    device = {"measured on": "PyTorch's CUDA build, without a GPU"} if ON_CARD else {}
    about = {**report.provenance(cpu), **device, "tolerance_percent": 100 * TOLERANCE, "steps_of_each": STEPS}
    started, rows = time.monotonic(), []
    judged = functools.partial(_judged, Form(rows=SLICES) if ROWS in models else CAPTURED_FORM, OFFLOADS in models)
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        for number, found in zip(numbers, pool.map(judged, numbers), strict=True):
            rows += found
            for row in found:
                if row["failures"]:
                    print(row, flush=True)
            if number % 25 == 24 or number == numbers[-1]:
                summary = summarise(rows, time.monotonic() - started)
                print(summary, file=sys.stderr, flush=True)
                if len(numbers) >= MODELS // 4:
                    kept = [row for row in rows if row["failures"]]
                    report.write(path, about, [summary, *kept], [*COLUMNS, "model", "plan", "failures"])  # so far


def _judged(form: Form, offloads: bool, number: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)  # toys are too small to share
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    with quiet(), few_rows():
        return verdicts(number, PLANS, form, copies=late_copies() if offloads else None)


def numbers_of(text: str) -> range:
    """Parse `7` or `250-499`."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def summarise(rows: list[dict[str, Any]], wall_s: float) -> dict[str, Any]:
    def count(word: str) -> int:
        return sum(word in failure for row in rows for failure in row["failures"])

    return {
        "cases": len(rows),
        "wrong": count("differs"),
        "miscounted": count("recomputed"),
        "evaluator_off": count("evaluator"),
        "above_prediction": count("above"),
        "worst_percent": max((row["error_percent"] for row in rows if "error_percent" in row), default=None),
        "least_percent": min((row["error_percent"] for row in rows if "error_percent" in row), default=None),
        "peaks_judged": sum("error_percent" in row for row in rows),
        "refused": count("refused"),
        "offloads": sum(row.get("offloads", 0) for row in rows),
        "regions": sum(row.get("regions", 0) for row in rows),
        "recomputed_nodes": sum(row.get("recomputed", 0) for row in rows),
        "wall_s": round(wall_s, 1),
    }


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
