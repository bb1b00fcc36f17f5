"""Generators of random numbers, and the states that they had."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from remat._torch.training import without_modes


class KeptGenerator:
    """A generator, and the state that it had: of torch's as bytes, which are no tensor beside those of a step."""

    name = "a generator"

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], Any]):
        self._get, self._put, was = get, put, get()
        self._is_tensor = isinstance(was, torch.Tensor)
        self._was = bytes(was.tolist()) if self._is_tensor else was  # transforms of torch.func forbid numpy()

    @property
    def has_drawn(self) -> bool:
        """Whether the state of a generator of Python or numpy is another now; of torch's it is not asked."""
        return not self._is_tensor and repr(self._get()) != repr(self._was)

    def put_back(self) -> None:
        self._put(torch.frombuffer(bytearray(self._was), dtype=torch.uint8) if self._is_tensor else self._was)


def generator_of(value: Any) -> KeptGenerator | None:
    """Hold a generator of torch, Python or numpy; None for other objects."""
    if isinstance(value, torch.Generator):
        return KeptGenerator(value.get_state, value.set_state)
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return KeptGenerator(value.getstate, value.setstate)
    if isinstance(value, np.random.RandomState):
        return KeptGenerator(value.get_state, value.set_state)
    if isinstance(value, np.random.Generator):
        bits: Any = value.bit_generator
        return KeptGenerator(lambda: bits.state, lambda state: setattr(bits, "state", state))
    return None


def global_generators(devices: Iterable[torch.device] = ()) -> list[KeptGenerator]:
    """List the generators of Python, numpy and torch: on the host, and on the CUDA devices among `devices`."""
    found = [
        KeptGenerator(random.getstate, random.setstate),
        KeptGenerator(np.random.get_state, np.random.set_state),
        KeptGenerator(torch.get_rng_state, torch.set_rng_state),
    ]
    get, put = torch.cuda.get_rng_state, torch.cuda.set_rng_state
    for device in devices:
        found.append(KeptGenerator(functools.partial(get, device), functools.partial(put, device=device)))
    return found


_kept: contextvars.ContextVar[list[KeptGenerator]] = contextvars.ContextVar("generators that are put back")


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Restore generators afterwards: global ones of the host, and those of `let_be_put_back`.

    May decorate a function.
    """
    with without_modes():
        kept = global_generators()
    token = _kept.set(kept)
    try:
        yield
    finally:
        _kept.reset(token)
        with without_modes():
            for generator in kept:
                generator.put_back()


def let_be_put_back(generators: Iterable[KeptGenerator]) -> None:
    """Restore `generators` too at the end of the `generators_kept` that is open, if any."""
    _kept.get([]).extend(generators)
