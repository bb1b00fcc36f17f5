"""Tables of measured kernels held to kernels that they lack: `python -m benchmarks kernel_tables:FOLDER`.

Of every set of single kernels (`benchmarks/roofline.py` says which there are), half make a table, drawn by chance, and
the other half is priced by it (`remat/costing/kernel_table.py`, Rule 2) and by the roofline alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import report
from benchmarks.measured import phantora, vidur
from benchmarks.measured.measurement import Measurement
from benchmarks.roofline import spread_of
from remat.costing.kernel_table import KernelTable, key_of
from remat.costing.roofline import kernel_us

COLUMNS = ["set", "priced by", "n", "times", "p10-p90", "within 10 / 20 / 50 %", "typical factor"]


def main(folder: str = "") -> None:
    """Write `results/kernel_tables_*`."""
    if not folder:
        raise SystemExit("kernel_tables:FOLDER needs the folder of the measured sets.")
    sets: dict[str, list[Measurement]] = {}
    for found in (*phantora.measurements(Path(folder)), *vidur.measurements(Path(folder))):
        if [count for _, count in found.kernels] == [1]:
            sets.setdefault(found.set, []).append(found)
    cpu = torch.device("cpu")
    rows = [row for name, found in sets.items() for row in rows_of(name, found)]
    report.write(report.stem("kernel_tables", cpu), report.provenance(cpu), rows, COLUMNS)
    for row in rows:
        print(" | ".join(str(row[column]) for column in COLUMNS))


def rows_of(name: str, found: list[Measurement]) -> list[dict[str, Any]]:
    """Price one half of a table by the other half, and by the roofline."""
    drawn = np.random.default_rng(0).permutation(len(found)) < len(found) // 2
    known = [each for each, is_known in zip(found, drawn, strict=True) if is_known]
    table = KernelTable.of(name, [(each.kernels[0][0], each.measured_us) for each in known])
    others = [each for each in found if key_of(each.kernels[0][0]) not in table.rows]
    kinds, measured = [each.kernels[0][0] for each in others], np.array([each.measured_us for each in others])
    target = others[0].target
    by = {
        "roofline": [kernel_us(kind, target) for kind in kinds],
        f"table of {len(table.rows)}": [us for us, _ in table.price(kinds, target)],
    }
    return [{"set": name, "priced by": how, **spread_of(np.array(times) / measured)} for how, times in by.items()]
