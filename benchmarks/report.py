"""Where results go, and what every result says about how it was obtained."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from remat.costing.timing_cache import device_name

RESULTS = Path(__file__).parent.parent / "results"


def provenance(device: torch.device) -> dict[str, Any]:
    """Command, versions, machine and date of this run."""
    return {
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "commit": _COMMIT,
        "device": device_name(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ortools": version("ortools"),
        "transformers": version("transformers"),
    }


def version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def commit() -> str:
    """Short hash of the checked-out commit, with a plus sign where the tree has changed since."""
    root = Path(__file__).parent.parent
    try:
        short = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=root, text=True).strip()
        dirty = subprocess.check_output(["git", "status", "--porcelain", "-uno"], cwd=root, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return short + ("+" if dirty else "")


_COMMIT = commit()  # of the code that runs, should the tree change meanwhile


def stem(name: str, device: torch.device) -> Path:
    """`results/NAME_DEVICE_YYYYMM_COMMIT`, without an ending."""
    device_word = "cpu" if device.type == "cpu" else device_name(device).split()[-1].lower()
    month = datetime.date.today().strftime("%Y%m")
    RESULTS.mkdir(exist_ok=True)
    return RESULTS / f"{name}_{device_word}_{month}_{_COMMIT.rstrip('+')}"


def write(path: Path, about: dict[str, Any], rows: list[dict[str, Any]], columns: list[str]) -> None:
    """Write rows as JSON, and as a Markdown table of `columns` for people."""
    named = {
        ending: path.with_name(f"{path.name}.{ending}") for ending in ("json", "md")
    }  # a model's name may have dots
    named["json"].write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    lines = [f"- {key}: {value}" for key, value in about.items()]
    lines += ["", "| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(str(row.get(column, "")) for column in columns) + " |" for row in rows]
    named["md"].write_text("\n".join(lines) + "\n")
    print(f"wrote {named['md']} and .json", file=sys.stderr)
