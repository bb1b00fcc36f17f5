"""Files: atomic writes, read errors that name the file, and the cache folder."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from remat.errors import UsageError


def default_cache() -> Path | None:
    """Return `$XDG_CACHE_HOME/remat` or `~/.cache/remat`; None if there is no home."""
    if root := os.environ.get("XDG_CACHE_HOME"):
        return Path(root) / "remat"
    try:
        return Path.home() / ".cache" / "remat"
    except RuntimeError:
        return None


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` so that no half-written file is ever visible. Raises `UsageError` if that fails."""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from error
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        os.unlink(temporary)
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from error


def read_json(path: Path, form: str, version: int, what: str) -> dict[str, Any]:
    """Read the JSON document at `path`. Raises `UsageError` unless it is a `form` of at most `version`."""
    try:
        text = path.read_text()
        data = json.loads(text)
    except FileNotFoundError:
        raise UsageError(f"there is no {what} file at {path}.") from None
    except OSError as error:
        raise UsageError(f"the {what} file {path} cannot be read: {error.strerror}.") from error
    except json.JSONDecodeError as error:
        is_cut = text.startswith("{") and (error.pos >= len(text.rstrip()) or not text.rstrip().endswith("}"))
        cut = f"it ends in line {error.lineno}, in the middle of it; copy it again, or make it again"
        raise UsageError(f"{path} is not a {what} file: {cut if is_cut else error}.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not a {what} file: {error}.") from error
    if not isinstance(data, dict) or data.get("format") != form:
        raise UsageError(f"{path} is not a {what} file: it lacks `format: {form}`.")
    found = data.get("version")
    if not isinstance(found, int) or found > version:
        raise UsageError(
            f"{path} has {what} version {found}; this remat reads up to {version}. Update remat or plan again."
        )
    return data
