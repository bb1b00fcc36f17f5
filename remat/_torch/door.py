"""Door to torch: look up private names, and report missing ones."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from remat.errors import RematError


@functools.cache
def internal(path: str, purpose: str) -> Any:
    """Return the object at a dotted `path` below torch. Raises RematError if there is none."""
    found: Any = torch
    done = "torch"
    for name in path.split("."):
        done = f"{done}.{name}"
        try:  # some packages take the names of their modules away
            found = getattr(found, name) if hasattr(found, name) else importlib.import_module(done)
        except ImportError:
            raise RematError(
                f"torch {torch.__version__} has no {done}, which remat needs to {purpose}; use torch 2.11 to 2.15."
            ) from None
    return found
