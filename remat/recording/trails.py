"""Trails: the operators of a forward, which distinguish two forwards, and the lines that read what steers one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from remat.capture.schemas import makes_nothing
from remat.errors import RematError
from remat.recording.sources import Read, Sources, watched
from remat.recording.tracker import Tracker

MOST_SAID = 4

Trail = tuple[Any, ...]  # the operators of a forward but for views, with the shapes that they are given


def trail_of(tracker: Tracker, end: int | None = None) -> Trail:
    """Return the trail of operators that `tracker` saw until operator `end`."""
    kinds = [None if _is_view(kind.name) else (kind.name, _shapes(kind.signature)) for kind in tracker.kinds.values()]
    return tuple(kind for index in tracker.op_kinds[:end] if (kind := kinds[index]) is not None)


@functools.cache
def _is_view(name: str) -> bool:
    """Return whether an operator is a view; of an older tensor, it looks to a tracker like a new one."""
    operator: Any = torch.ops
    for part in name.split("."):
        operator = getattr(operator, part, None)
    return isinstance(operator, torch._ops.OpOverload) and makes_nothing(operator)


def _shapes(value: Any) -> Any:
    """Return the shapes of the tensors in an operator's signature; its numbers may change."""
    if isinstance(value, dict):
        return tuple(value["tensor"][0]) if "tensor" in value else tuple(map(_shapes, value.values()))
    return tuple(map(_shapes, value)) if isinstance(value, (list, tuple)) else None


def reads_of(forward: Callable[[], None], sources: Sources, within: Callable[[], bool] = lambda: True) -> list[Read]:
    """List the lines that read one of `sources` while `forward` runs and `within` is true."""
    with sources.kept(), watched(sources, within) as reads, contextlib.suppress(RematError):
        forward()
    return reads


def said_of(reads: Sequence[Read]) -> str:
    """List the first few of `reads`, for a message."""
    more = f" and {len(reads) - MOST_SAID} more" if len(reads) > MOST_SAID else ""
    return f"{', '.join(map(str, reads[:MOST_SAID]))}{more}"
