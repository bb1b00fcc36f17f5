"""Commands: how long `remat plan` takes as a user runs it, and how much memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

from benchmarks import report
from remat.units import GIB

COMMANDS = (
    "plan --model gpt2 --budget 20GiB",
    "plan --model gpt2 --budget 24GiB",
    "plan --model gpt2 --budget 30GiB",
    "plan --model llama-8b --dtype bf16 --target h200 --batch-size 4 --seq-len 4096 --budget 120GiB",
    "plan --model llama-1b --budget 40GiB",
    "plan --model bert-large --budget 20GiB",
)
COLUMNS = ["command", "wall_s", "rss_gib", "exit_code", "status", "gap", "peak_gib", "overhead_percent", "without_gib"]


def main() -> None:
    rows = []
    cpu = torch.device("cpu")
    for command in COMMANDS:
        rows.append(run(command))
        print(rows[-1], flush=True)
        report.write(report.stem("commands", cpu), report.provenance(cpu), rows, COLUMNS)  # so far


def run(command: str) -> dict[str, Any]:
    """One command in a fresh process: its wall time, its peak resident memory and what it answered."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "remat.cli.main", *command.split(), "--json"],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdout is not None
        answer = json.loads(process.stdout.read() or "{}")
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.monotonic() - started
    row: dict[str, Any] = {
        "command": f"remat {command}",
        "wall_s": round(wall, 1),
        "rss_gib": round(usage.ru_maxrss * 1024 / GIB, 2),
        "exit_code": os.waitstatus_to_exitcode(status),
    }
    if "solver" in answer:
        row |= {
            "status": answer["solver"]["status"],
            "gap": round(answer["solver"]["gap"], 5),
            "peak_gib": round(answer["predicted"]["peak_bytes"] / GIB, 3),
            "overhead_percent": round(100 * answer["predicted"]["overhead"], 2),
            "without_gib": round(answer["without_checkpointing"]["peak_bytes"] / GIB, 2),
        }
    return row
