"""The autocast that accelerate puts around the forward of a model.

accelerate does so when it first prepares the model, and notes the forward beneath as `_original_forward`. A library may
replace the forward afterwards: Trainers of TRL do, when the next one is built. Then no autocast is left, accelerate
adds none to a model that it has prepared, and its note is out of date. So the forward is read here, never the note.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

NOTE = "_original_forward"  # of accelerate


def autocast_of(accelerator: Any, model: nn.Module) -> torch.dtype | None:
    """Return the dtype of autocast that the forward of `model` trains under; None if it trains under none."""
    if around := _peeled(model.__dict__.get("forward"), model)[0]:
        return _dtype(around[-1])
    return None if getattr(model, "_is_accelerate_prepared", False) else autocast_put_by(accelerator)


def autocast_put_by(accelerator: Any) -> torch.dtype | None:
    """Return the dtype of the autocast that `accelerator` puts around models; None if it puts none.

    Its `mixed_precision` does not say so: on a CPU, "fp16" brings no autocast.
    """
    if not accelerator.native_amp:
        return None
    from accelerate.utils import get_mixed_precision_context_manager

    return _dtype(get_mixed_precision_context_manager(accelerator.native_amp, accelerator.autocast_handler))


def _dtype(context: Any) -> torch.dtype | None:
    return context.fast_dtype if isinstance(context, torch.autocast) and context._enabled else None


def name_of(dtype: torch.dtype | None) -> str | None:
    """Return the name of `dtype` as plans have it."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


def is_under_autocast(model: nn.Module) -> bool:
    """Return whether accelerate's autocast is around the forward of `model`."""
    return bool(_peeled(model.__dict__.get("forward"), model)[0])


def take_off(model: nn.Module) -> list[torch.autocast]:
    """Remove accelerate's autocasts from `model`, in place, and its note; return them, the outermost first."""
    around, forward = _peeled(model.__dict__.get("forward"), model)
    if around:
        put_forward(model, forward)
        model.__dict__.pop(NOTE, None)
    return around


@contextlib.contextmanager
def beneath_autocast(model: nn.Module) -> Iterator[None]:
    """Remove accelerate's autocasts from `model` while the context is open, and put them back afterwards."""
    if not (around := take_off(model)):
        yield
        return
    from accelerate.utils import convert_outputs_to_fp32

    try:
        yield
    finally:
        for autocast in reversed(around):
            beneath: Any = model.forward
            model.__dict__[NOTE] = beneath
            if hasattr(beneath, "__func__"):  # as accelerate does
                model.forward = types.MethodType(convert_outputs_to_fp32(autocast(beneath.__func__)), model)
            else:
                model.forward = convert_outputs_to_fp32(autocast(beneath))


def _peeled(forward: Any, model: nn.Module) -> tuple[list[torch.autocast], Any]:
    """Return accelerate's autocasts around `forward`, the outermost first, and the forward of `model` beneath."""
    found: list[torch.autocast] = []
    if "accelerate" not in sys.modules:
        return found, forward
    from accelerate.utils.operations import ConvertOutputsToFp32

    while isinstance(
        outputs := getattr(getattr(forward, "__func__", forward), "__wrapped__", None), ConvertOutputsToFp32
    ):
        decorated = outputs.model_forward  # by torch, whose closure is the autocast and the function
        cells = [cell.cell_contents for cell in getattr(decorated, "__closure__", None) or ()]
        if not (here := [each for each in cells if isinstance(each, torch.autocast)]):
            break  # a script's own
        found += here
        function = decorated.__wrapped__
        bound = types.MethodType(function, model) if isinstance(forward, types.MethodType) else function
        forward = getattr(function, "planned", bound)
    return found, forward


def put_forward(model: nn.Module, forward: Any) -> None:
    """Make `forward` that of `model`; the class's own is not stored in the instance."""
    if isinstance(forward, types.MethodType) and forward.__func__ is type(model).forward:
        model.__dict__.pop("forward", None)
    else:
        model.forward = forward
