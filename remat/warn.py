"""Warnings from inside of a training script, at a line that is neither this package's nor torch's."""

from __future__ import annotations

import sys
import types
import warnings

# Packages whose lines say nothing to a user; generated code has no package.
_OURS = frozenset(("remat", "torch", "contextlib", "functools", ""))


def warn(text: str) -> None:
    """Warn at the innermost line that runs outside of `remat` and torch."""
    line = sys._getframe(1)
    while _package_of(line) in _OURS and line.f_back is not None:
        line = line.f_back
    of, code = line.f_globals, line.f_code
    known, module = of.setdefault("__warningregistry__", {}), str(of.get("__name__", "__main__"))
    warnings.warn_explicit(text, UserWarning, code.co_filename, line.f_lineno, module, known)


def _package_of(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
