"""Copies between a device and the host's memory.

The maker of copies is a `Copies`. Compute never runs ahead of what it needs: `wait` returns, or holds the device's
compute stream, until a copy has ended, so what is right on an instant link is right on a slow one.
"""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from remat._torch.training import without_modes

Host = Any  # memory of the host, as a `Copies` has taken it
Copy = Any  # a copy that was begun


class Copies(Protocol):
    """Copies of flat tensors, each of one dimension and a whole storage."""

    def host(self, size_bytes: int) -> Host:
        """Allocate host memory, which is freed with its last reference."""

    def out(self, flat: Tensor, host: Host, offset: int) -> Copy:
        """Begin to copy `flat` to byte `offset` of `host`."""

    def room_for(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory on the device."""

    def back(self, host: Host, offset: int, flat: Tensor) -> Copy:
        """Begin to copy from byte `offset` of `host` to `flat`."""

    def wait(self, copy: Copy) -> None:
        """Let compute go on when `copy` has ended."""

    def abandon(self, copy: Copy) -> None:
        """Drop the result of `copy`; its memory is about to go back to the device."""

    def let_go(self, flat: Tensor) -> None:
        """Note that the memory of `flat` is about to be freed on the device."""

    def synchronize(self) -> None:
        """Return when every copy out has ended."""


class InstantCopies:
    """Copies on a CPU, whose memory is the host's: they end at once.

    The host's part is not torch's memory, so torch's allocator shows the device's part.
    """

    def host(self, size_bytes: int) -> Host:
        return torch.from_numpy(np.empty(size_bytes, dtype=np.uint8))

    def out(self, flat: Tensor, host: Host, offset: int) -> Copy:
        with unseen():
            host[offset : offset + flat.nbytes].copy_(flat.view(torch.uint8))

    def room_for(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        with unseen():
            return torch.empty(elements, dtype=dtype, device=device)

    def back(self, host: Host, offset: int, flat: Tensor) -> Copy:
        with unseen():
            flat.view(torch.uint8).copy_(host[offset : offset + flat.nbytes])

    def wait(self, copy: Copy) -> None:
        pass

    def abandon(self, copy: Copy) -> None:
        self.wait(copy)

    def let_go(self, flat: Tensor) -> None:
        pass

    def synchronize(self) -> None:
        pass


class StreamCopies:
    """Copies on CUDA: a stream out, a stream back, pinned memory, and events between them and compute.

    Memory is allocated and freed on the compute stream alone, which waits for a copy before it frees or uses the
    copied memory; so the caching allocator needs no `record_stream`.

    shares_host  whether pending copies may write and read one place on the host, so that copies out and back wait for
                 each other
    """

    def __init__(self, device: torch.device, shares_host: bool = True):
        self._device, self._shares_host = device, shares_host
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def host(self, size_bytes: int) -> Host:
        with unseen():
            return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def out(self, flat: Tensor, host: Host, offset: int) -> Copy:
        with unseen():
            if self._shares_host:
                self._out.wait_stream(self._back)  # which may still read an older forward's data in this place
            return self._copy(self._out, host[offset : offset + flat.nbytes], flat.view(torch.uint8))

    def room_for(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        with unseen():
            return torch.empty(elements, dtype=dtype, device=device)

    def back(self, host: Host, offset: int, flat: Tensor) -> Copy:
        with unseen():
            if self._shares_host:
                self._back.wait_stream(self._out)  # fetched data has left before
            return self._copy(self._back, flat.view(torch.uint8), host[offset : offset + flat.nbytes])

    def _copy(self, stream: torch.cuda.Stream, to: Tensor, source: Tensor) -> Copy:
        compute = torch.cuda.current_stream(self._device)  # whose memory it is
        stream.wait_stream(compute)
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
            return stream.record_event(), compute

    def wait(self, copy: Copy) -> None:
        ended, _ = copy
        torch.cuda.current_stream(self._device).wait_event(ended)

    def abandon(self, copy: Copy) -> None:
        ended, compute = copy
        compute.wait_event(ended)

    def let_go(self, flat: Tensor) -> None:
        pass

    def synchronize(self) -> None:
        self._out.synchronize()


@contextlib.contextmanager
def unseen() -> Any:
    """Hide the code within from all modes and from autograd, since it is no part of the step."""
    with without_modes(), torch.no_grad():
        yield


def copies_on(device: torch.device, shares_host: bool = True) -> Copies:
    """Return the copies between `device` and the host; see `StreamCopies`."""
    return StreamCopies(device, shares_host) if device.type == "cuda" else InstantCopies()
