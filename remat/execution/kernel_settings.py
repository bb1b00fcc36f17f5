"""Which kernels of attention, cuDNN and oneDNN are on. A recomputation runs under the settings of its forward.

A script may set them around the forward alone, as `with sdpa_kernel(...): loss = model(...)` does. Other kernels give
other last bits, and may save other tensors. Neither the order in which kernels of attention are tried is restored, nor
TF32, nor deterministic algorithms. Settings are the process's: threads that run backward on two devices share them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.backends import cuda, cudnn, mkldnn

_ATTENTION = (
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
)
_LIBRARIES = ((cudnn, "enabled"), (cudnn, "deterministic"), (cudnn, "benchmark"), (mkldnn, "enabled"))


class KernelSettings:
    """The settings as they are when it is made."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values = kernel_settings()

    def restored(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which they are as they were."""
        return contextlib.nullcontext() if self._values == kernel_settings() else self._restored()

    @contextlib.contextmanager
    def _restored(self) -> Iterator[None]:
        before = kernel_settings()
        try:
            _set(self._values)
            yield
        finally:
            _set(before)


def kernel_settings() -> tuple[bool, ...]:
    """Return which kernels are on, in a fixed order."""
    return *(enabled() for enabled, _ in _ATTENTION), *(getattr(library, name) for library, name in _LIBRARIES)


def _set(values: tuple[bool, ...]) -> None:
    given = iter(values)
    for _, enable in _ATTENTION:
        enable(next(given))
    for library, name in _LIBRARIES:
        setattr(library, name, next(given))
