"""Files that commands write: names, refusals before the work, and the specification of the model."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remat.errors import UsageError

if TYPE_CHECKING:
    from remat.cli.model_spec import ModelSpec
    from remat.planning.budget import Budget

SPEC = "model_spec"  # key of a plan's or profile's `about`: how to make its workload again


def require_writable(path: Path) -> None:
    """Raise UsageError before the work if a file cannot be written."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a file to write.")
    require_folder(path.absolute().parent, path)


def require_folder(folder: Path, path: Path) -> None:
    """Raise UsageError if `path` cannot be written in `folder`."""
    if not folder.is_dir():
        raise UsageError(f"{path} cannot be written: there is no folder {folder}.")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{path} cannot be written: the folder {folder} is read-only.")


def file_name(workload: str) -> str:
    return re.sub(r"[^\w.-]+", "-", workload).strip("-.") or "model"


def about_with(
    spec: ModelSpec | None, about: dict[str, Any], path: Path, limit: Budget | None = None
) -> dict[str, Any]:
    """Add to `about` the spec that makes the workload again from a file at `path`, and the headroom of `limit`."""
    found = {name: value for name, value in about.items() if name != SPEC}
    if spec is not None:
        found[SPEC] = spec.to_json(path.absolute().parent)
    if limit is not None:
        found["headroom_bytes"] = limit.given_bytes - limit.limit_bytes
    return found


def spec_in(about: dict[str, Any], path: Path) -> ModelSpec | None:
    """Read the model spec in `about` of the file at `path`; None if there is no valid one."""
    from remat.cli.model_spec import ModelSpec

    return ModelSpec.from_json(about.get(SPEC), path.absolute().parent)
