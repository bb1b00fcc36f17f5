"""Tables of kernel times as files, which `kernel_calls.py` describes and measures."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from remat.costing.kernel_calls import TableRow, read_table, table_text
from remat.costing.kernel_table import KernelTable, as_aten, key_of
from remat.errors import UsageError
from remat.evaluation.graph import OpKind
from remat.files import write_atomically


def load_table(path: str | os.PathLike[str]) -> KernelTable:
    """Read a table. Raises UsageError if there is none, or if nothing in it is measured."""
    if not Path(path).is_file():
        raise UsageError(f"there is no table of kernel times at {path}.")
    try:
        about, rows = read_table(Path(path))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path} is no table of kernel times: {error}.") from error
    measured = [(OpKind(*row[:5]), row.time_us) for row in rows if row.time_us]
    if not measured:
        raise UsageError(
            f"{path} has no times yet: run `python kernel_calls.py {path}` on the card (the file is "
            "remat/costing/kernel_calls.py, and needs torch alone)."
        )
    return KernelTable.of(about.get("device", "a card that the table does not name"), measured)


def save_table(path: Path, kinds: Iterable[OpKind], times_us: Iterable[float | None], about: dict[str, str]) -> int:
    """Write `kinds` as a table, with the known times in microseconds; return the number of rows.

    about  where the times were measured: "device", "torch"

    Kernels without traffic or arithmetic, and those that only a plan has, are left out.
    """
    rows = {}
    for kind, time_us in zip(kinds, times_us, strict=True):
        known = as_aten(kind)
        if known.name.startswith("aten.") and (kind.moved_bytes or kind.flops):
            rows[key_of(known)] = TableRow(
                known.name, known.signature, kind.flops, kind.moved_bytes, kind.dtype, time_us
            )
    write_atomically(path, table_text(about, rows.values()))
    return len(rows)
