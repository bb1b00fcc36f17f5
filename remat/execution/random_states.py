"""Random states: of a device's own generator, or of one that a model keeps, as a region puts them back."""

from __future__ import annotations

from typing import Any

import torch

Source = torch.device | torch.Generator  # of random numbers


def state_of(source: Source) -> Any:
    """Return the state of a generator; the CPU's as bytes, which PyTorch's allocator does not count."""
    if isinstance(source, torch.Generator):
        return source.get_state().numpy().tobytes()
    if source.type == "cpu":
        return torch.get_rng_state().numpy().tobytes()
    return torch.get_device_module(source).get_rng_state(source)


def set_state(source: Source, state: Any) -> None:
    if isinstance(source, torch.Generator):
        source.set_state(_as_tensor(state))
    elif source.type == "cpu":
        torch.set_rng_state(_as_tensor(state))
    else:
        torch.get_device_module(source).set_rng_state(state, source)


def _as_tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
