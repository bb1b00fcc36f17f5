"""TRL's fused head, as a plan has it: every position is scored, on every device.

TRL's Trainers never make all logits at once: a Function goes through the hidden states in tiles
(`opaque_functions.py`). Where Triton runs, the head first selects the positions whose labels count. How many there are
is data: no graph with a fixed shape holds it, and no plan knows what it takes. On other devices TRL itself scores every
position, and sets to zero what does not count. While a graph is captured the head hears that it is on such a device.
The Function still runs its kernels in Triton.

What does not count costs time then, and takes memory as if it did. A batch of longest rows in which every label counts
is the same work. Sums of losses and products are over more rows, of which some are zero: they may differ in rounding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

FUNCTION = "trl.kernels.chunked_logprob:ChunkedLogProbFunction"
_MAKER = "add_fused_lm_head."
_NO_CODE = (lambda: None).__code__
_ASKER, _QUESTION = "trl.trainer.utils", "_use_triton"


def is_known() -> bool:
    """Return whether this version of TRL's head asks the question that is answered here."""
    return callable(getattr(sys.modules.get(_ASKER), _QUESTION, None))


def is_on(model: nn.Module) -> bool:
    """Return whether TRL has put its head on `model`, or on a module of it."""
    return any(map(_is_on, model.modules()))


def _is_on(module: nn.Module) -> bool:
    forward = getattr(module.__dict__.get("forward"), "__func__", None)
    while forward is not None and not getattr(forward, "__code__", _NO_CODE).co_qualname.startswith(_MAKER):
        forward = getattr(forward, "__wrapped__", None)
    return forward is not None


def selects_rows(device: torch.device) -> bool:
    """Return whether, without a plan, the head scores on `device` only the positions whose labels count."""
    return is_known() and bool(getattr(sys.modules[_ASKER], _QUESTION)(device))


def instead(function: Callable[..., Any], asker: str) -> Callable[..., Any] | None:
    """Return the function to trace in place of `function`, called by module `asker`; None to trace it itself."""
    if asker != _ASKER or function is not getattr(sys.modules.get(_ASKER), _QUESTION, None):
        return None
    return _no


def _no(device: Any) -> bool:
    return False
