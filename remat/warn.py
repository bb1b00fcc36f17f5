"""Warnings from inside of a training script, at a line of the script."""

from __future__ import annotations

import sys
import types
import warnings

_OURS = frozenset(("remat", "torch", "contextlib", "functools"))  # packages whose lines say nothing to a user


def warn(text: str) -> None:
    """Warn at the innermost line that runs outside of `remat` and torch."""
    line = sys._getframe(1)
    while _package_of(line) in _OURS and line.f_back is not None:
        line = line.f_back
    known = line.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, UserWarning, line.f_code.co_filename, line.f_lineno, registry=known)


def _package_of(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
