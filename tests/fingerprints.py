"""Traces in a model: all that it holds is compared, by other code than that which is tested."""

from __future__ import annotations

import random
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """All that a model holds, and the global generators, by name and in a form that can be compared."""
    seen: dict[int, Any] = {}  # kept, so that an id stays its own
    found: dict[str, Any] = {}

    def note(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[name] = (
                id(value),
                value.dtype,
                value.device.type,
                value.requires_grad,
                value.detach().flatten().tolist(),
            )
        elif isinstance(value, torch.Generator):
            found[name] = value.get_state().tolist()
        elif isinstance(value, random.Random):
            found[name] = value.getstate()
        elif isinstance(value, np.random.Generator):
            found[name] = repr(value.bit_generator.state)
        elif isinstance(value, (type, bool, int, float, str, torch.dtype, type(None))):
            found[name] = repr(value)
        elif id(value) not in seen:
            seen[id(value)] = value
            found[name] = id(value)
            for inner, each in parts(value):
                note(f"{name}.{inner}", each)

    def parts(value: Any) -> Iterator[tuple[Any, Any]]:
        if isinstance(value, dict):
            yield from value.items()
        elif isinstance(value, (list, tuple, set, deque)):
            yield "length", len(value)
            yield from enumerate(value)
        elif isinstance(value, types.FunctionType):
            yield from enumerate(cell.cell_contents for cell in value.__closure__ or ())
        elif isinstance(value, types.MethodType):
            yield "self", value.__self__
        else:
            yield from ((key, each) for key, each in getattr(value, "__dict__", {}).items() if key != "forward")

    for name, module in model.named_modules():
        note(name, module)
        if type(module).__module__.startswith("tests"):
            for key, each in vars(type(module)).items():
                if isinstance(each, (dict, int)):
                    note(f"{type(module).__name__}.{key}", each)
    found["generators"] = torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())
    return found


def left_by(model: nn.Module, run: Callable[[], Any]) -> dict[str, Any]:
    """Return the changes that `run` leaves in a model, and in generators."""
    before = fingerprint(model)
    run()
    after = fingerprint(model)
    return {key: (before.get(key), after.get(key)) for key in before | after if before.get(key) != after.get(key)}
