"""Opaque Functions: a model's own `torch.autograd.Function` that cannot be traced, as one node of a graph.

Dynamo traces a Function's forward and backward (`higher_order_ops.py`). Where it cannot, it breaks the graph around the
call, and the call is in no graph: no region can hold it, and every new size of a batch is traced anew, because only a
forward that is one graph can be tried with its sizes left open. Such a Function is called as it stands instead, in a
node of its own: eager mode's kernels in eager mode's order, which a region recomputes whole or leaves alone.

Planning finds them behind the loss, where a traced one is another class. The plan names them, since a graph is the
planned one only if the same are left whole. Dynamo's own list of such classes is for the life of the process: a class
is on it only while remat traces.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable, Iterator

import torch

from remat._torch import left_whole

Function = type[torch.autograd.Function]


def functions_behind(loss: torch.Tensor) -> frozenset[str]:
    """Names of the Functions that ran as they stand to make `loss`; torch's own and ours only run a caller's code."""
    found, seen, ahead = set(), set(), [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        ahead.extend(before for before, _ in node.next_functions)
        function = getattr(node, "_forward_cls", None)
        if function is not None and function.__module__.partition(".")[0] not in ("torch", "remat"):
            found.add(f"{function.__module__}:{function.__qualname__}")
    return frozenset(found)


@contextlib.contextmanager
def opaque(names: Iterable[str]) -> Iterator[None]:
    """While it lasts, the Functions of these names are nodes. One that is not there is nobody's."""
    with left_whole([function for function in map(_named, names) if function is not None]):
        yield


def _named(name: str) -> Function | None:
    module, _, path = name.partition(":")
    try:
        found = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):  # of a class made within a function, say
        return None
    return found if isinstance(found, type) and issubclass(found, torch.autograd.Function) else None
