"""The roofline held to kernels that others measured: `python -m benchmarks roofline:FOLDER[,SET...][,OPTION...]`.

FOLDER has a folder for each source (`kernelbench`, `liger-kernel`, `phantora-l40s`, `vidur`); the set `h100` is our own
and lies beside its reader. What they hold, their licences and how they were measured is said in `benchmarks/measured/`.
The options:

problems=FOLDER  the folder `KernelBench` of that repository at commit 423217d; without it that set is left out
before=COMMIT    also prices by the roofline of that commit

A row is a family of one set, once for all and once for its half to check with. "times" is predicted over measured, the
median of kernels; "time-weighted" is the sum of predicted times over the sum of measured ones.
Of whole models and chains, which run eagerly and are timed by events, the host's launches count too (`host_time.py`).
The family "launch-bound" is of whole models that the host takes longer to launch than the device to run.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import report
from benchmarks.measured import h100, kernelbench, liger, phantora, vidur
from benchmarks.measured.h100 import WHOLE_STEP
from benchmarks.measured.kernelbench import WHOLE_MODEL
from benchmarks.measured.measurement import Measurement
from remat.costing.host_time import LAUNCH_US
from remat.costing.roofline import kernel_us
from remat.evaluation.graph import OpKind
from remat.workload.target import Target

Price = Callable[[OpKind, Target], float]
ALL = "all"
LAUNCH_BOUND = "launch-bound"
COLUMNS = [
    "set",
    "family",
    "split",
    "n",
    "times",
    "time-weighted",
    "p10-p90",
    "within 10 / 20 / 50 %",
    "typical factor",
    "before",
]


def main(folder: str = "", *arguments: str) -> None:
    """Write `results/roofline_*`, sets in the order given, all of them where none is."""
    if not folder:
        raise SystemExit("roofline:FOLDER[,SET...] needs the folder of the measured sets.")
    options = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    wanted = [argument for argument in arguments if "=" not in argument]
    found = list(_measurements(Path(folder), wanted, options.get("problems")))
    before = roofline_of(options["before"]) if "before" in options else None
    rows = [
        {**row, "before": other["within 10 / 20 / 50 %"] if other else ""}
        for row, other in zip(rows_of(found, kernel_us), rows_of(found, before) if before else _nothing(), strict=False)
    ]
    cpu = torch.device("cpu")
    about = report.provenance(cpu) | {
        "before": options.get("before", ""),
        "launch_us": LAUNCH_US,
        **launch_bound(found),
    }
    report.write(report.stem("roofline", cpu), about, rows, COLUMNS)
    for row in rows:
        print(" | ".join(str(row[column]) for column in COLUMNS))


def _measurements(folder: Path, wanted: Sequence[str], problems: str | None) -> Iterator[Measurement]:
    sources: dict[str, Callable[[], Iterator[Measurement]]] = {
        "liger": lambda: liger.measurements(folder),
        "vidur": lambda: vidur.measurements(folder),
        "phantora": lambda: phantora.measurements(folder),
        "h100": lambda: h100.measurements(folder),
    }
    if problems is not None:
        sources["kernelbench"] = lambda: kernelbench.measurements(folder, Path(problems))
    for name in wanted or sources:
        if name not in sources:
            raise SystemExit(f"there is no measured set {name!r}; choose from {', '.join(sources)}.")
        yield from sources[name]()
        print(f"read {name}", file=sys.stderr, flush=True)


def roofline_of(commit: str) -> Price:
    """Return the roofline of an older commit."""
    text = subprocess.check_output(["git", "show", f"{commit}:remat/costing/roofline.py"], text=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "roofline_before.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location("roofline_before", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    price: Price = module.kernel_us
    return price


def predicted_us(measurement: Measurement, price: Price) -> float:
    """Time of all kernels, or of launching them where that is longer and was measured."""
    host_us = LAUNCH_US * measurement.launches if measurement.eager and price is kernel_us else 0.0
    return max(device_us(measurement, price), host_us)


def device_us(measurement: Measurement, price: Price) -> float:
    """Time of all kernels."""
    return sum(count * price(kind, measurement.target) for kind, count in measurement.kernels)


def is_launch_bound(measurement: Measurement) -> bool:
    """Whether it is a whole model that takes longer to launch than to run, at today's prices."""
    host_us = LAUNCH_US * measurement.launches if measurement.eager else 0.0
    return measurement.family == WHOLE_MODEL and host_us > device_us(measurement, kernel_us)


def launch_bound(found: Sequence[Measurement]) -> dict[str, Any]:
    """The launch-bound models one by one, and how many are within 30 percent."""
    times = {each.name: predicted_us(each, kernel_us) / each.measured_us for each in found if is_launch_bound(each)}
    inside = sum(abs(ratio - 1) <= 0.3 for ratio in times.values())
    each = ", ".join(f"{name} {ratio:.2f}" for name, ratio in times.items())
    return {"launch-bound, within 30 percent": f"{inside} of {len(times)}: {each}"} if times else {}


def rows_of(found: Sequence[Measurement], price: Price) -> Iterator[dict[str, Any]]:
    """A row for each family of each set, and for each set as a whole."""
    times: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    for measurement in found:
        pair = predicted_us(measurement, price), measurement.measured_us
        of_all = [] if measurement.family == WHOLE_STEP else [ALL]  # which are of the same kernels again
        for family in (*of_all, measurement.family, *([LAUNCH_BOUND] if is_launch_bound(measurement) else [])):
            times[measurement.set, family, ALL].append(pair)
            times[measurement.set, family, measurement.split].append(pair)
    for (name, family, split), pairs in times.items():
        if split == ALL or family in (ALL, LAUNCH_BOUND, WHOLE_STEP):
            predicted, measured = np.array(pairs).T
            weighted = f"{predicted.sum() / measured.sum():.2f}"
            about = {"set": name, "family": family, "split": split, "time-weighted": weighted}
            yield about | spread_of(predicted / measured)


def spread_of(ratios: np.ndarray) -> dict[str, Any]:
    """How predicted times over measured ones spread: columns of a table."""
    low, middle, high = np.quantile(ratios, (0.1, 0.5, 0.9))
    inside = [round(100 * float(np.mean(np.abs(ratios - 1) <= share))) for share in (0.1, 0.2, 0.5)]
    return {
        "n": len(ratios),
        "times": f"{middle:.2f}",
        "p10-p90": f"{low:.2f}-{high:.2f}",
        "within 10 / 20 / 50 %": " / ".join(map(str, inside)),
        "typical factor": f"{np.exp(np.mean(np.abs(np.log(ratios)))):.2f}",
    }


def _nothing() -> Iterator[dict[str, Any]]:
    while True:
        yield {}
