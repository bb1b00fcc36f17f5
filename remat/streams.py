"""Streams: what libraries print by themselves is no part of an answer."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send everything printed within to stderr: file descriptor 1 itself, because C and C++ print too."""
    sys.stdout.flush()
    with descriptor_to(1, 2), contextlib.redirect_stdout(sys.stderr):
        try:
            yield
        finally:
            with contextlib.suppress(OSError, TypeError, AttributeError):
                ctypes.CDLL(None).fflush(None)  # output of C code may still be in its buffer


@contextlib.contextmanager
def descriptor_to(descriptor: int, target: int) -> Iterator[None]:
    """Let a file descriptor lead where `target` does, if the process has it."""
    try:
        kept = os.dup(descriptor)
    except OSError:
        yield
        return
    try:
        os.dup2(target, descriptor)
        yield
    finally:
        os.dup2(kept, descriptor)
        os.close(kept)
