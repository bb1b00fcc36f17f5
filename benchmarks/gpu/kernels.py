"""Measure every kernel of a table on the GPU at hand: time, and the bytes that it allocates beside its results.

    python -m benchmarks.gpu.kernels TABLE.csv FOUND.csv      in a checkout

The table is one of `remat profile --costs TABLE.csv`. FOUND.csv has three columns more, and every row that was measured
until MEASURE_UNTIL (seconds since 1970). The same command again goes on; a kernel that ended the process is left out.
"""

from __future__ import annotations

import csv
import json
import sys
import time
from pathlib import Path

import torch

from benchmarks.bare import make_importable
from benchmarks.gpu.runner import CUT, until

make_importable()

from remat.costing.kernel_calls import NotMeasurable, read_table  # noqa: E402
from remat.costing.operator_timing import measuring, time_operator  # noqa: E402
from remat.evaluation.graph import OpKind  # noqa: E402

COLUMNS = ("operator", "signature", "flops", "moved_bytes", "dtype", "time_us", "spread", "workspace_bytes", "failure")


def main(table: Path, found: Path) -> int:
    """Append what is measured to `found`; returns `CUT` if rows are left."""
    device = torch.device("cuda", 0)
    rows = read_table(table)[1]
    done = sum(1 for _ in csv.reader(found.open())) - 1 if found.exists() else -1
    with found.open("a", newline="") as file, measuring(device):
        writer = csv.writer(file, lineterminator="\n")
        if done < 0:
            writer.writerow(COLUMNS)
            done = 0
        for row in rows[done:]:
            if time.time() > until():
                break
            known = [row.name, json.dumps(row.signature), row.flops, row.moved_bytes, row.dtype]
            trying = Path(f"{found}.trying")
            if trying.exists() and trying.read_text() == json.dumps(known):
                writer.writerow([*known, "", "", "", "ended the process"])
                continue
            trying.write_text(json.dumps(known))
            try:
                kind = OpKind(row.name, row.signature, row.flops, row.moved_bytes, row.dtype)
                cost = time_operator(kind, device, repeats=7, seconds_per_kind=0.02)
                writer.writerow([*known, f"{cost.time_us:.3f}", f"{cost.spread:.4f}", cost.workspace_bytes, ""])
            except NotMeasurable as error:
                writer.writerow([*known, "", "", "", str(error)[:200]])
                torch.cuda.synchronize()
            file.flush()
            if torch.cuda.memory_reserved() > 40 << 30:
                torch.cuda.empty_cache()
    done = sum(1 for _ in csv.reader(found.open())) - 1
    print(f"{found}: {done} of {len(rows)}, {torch.cuda.get_device_name()}")
    return CUT if done < len(rows) else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
