"""Recomputed: what a region saved for backward in forward is what it has when it is recomputed, bit by bit.

A region that hands back the wrong value when it is recomputed gives the right loss and wrong gradients. So in the first
backward under a plan every tensor that autograd saves in a region is held to the one that it saved in forward, of which
a digest is kept. `torch.utils.checkpoint` compares what is said of both; here that is their data.

What is there all the time is not compared: parameters, and buffers, which a forward may have changed since. That no
recomputation changes them is. Neither is what a kernel saves for itself, and may not have written: bytes, and seeds
that nothing is drawn with, which memory-efficient attention keeps on the host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from remat._torch.recording import backward_number, untraced
from remat._torch.training import compared_when_recomputed, is_wrapper, when_backward_ends
from remat.errors import FirstStepMismatch
from remat.execution.digests import Digest, digest_of, in_memory_order
from remat.execution.eager.saving import storage_of
from remat.host.weights import weights_on_host

NEAR = 0.01  # of a norm: kernels that add in any order are closer, values of something else are not

REMEDY = (
    "Take the plan out (`remat.remove(model)`), hold it to the model (`remat.validate`), and report it. "
    "`verify_first_step=False` trains without this check."
)


class Recomputed:
    """Compare the tensors that regions of `model` save in forward with those that they recompute in backward."""

    def __init__(self, model: nn.Module):
        self._buffers = list(model.named_buffers())
        known = [*model.parameters(), *(buffer for _, buffer in self._buffers)]
        known += [] if (weights := weights_on_host(model)) is None else weights.memory
        self._backward = -1  # whose buffers are noted
        self._depth, self._before, self._changed = 0, list[Digest](), set[str]()  # buffers that recomputations change
        self._known = {storage_of(tensor) for tensor in known if not is_wrapper(tensor)}

    def watching(self, region: str) -> contextlib.AbstractContextManager[str]:
        """Return the context under which `torch.utils.checkpoint` compares the recomputed tensors of `region`."""
        return compared_when_recomputed(functools.partial(self._saved, region))

    @untraced  # as all of this: a forward may call its backward between two graphs
    def _saved(self, region: str, tensor: Tensor) -> _Saved:
        if is_wrapper(tensor) or storage_of(tensor) in self._known or _is_of_kernel(tensor):
            return _Saved(region, Digest(tensor.dtype, tuple(tensor.shape), None))
        found = digest_of(in_memory_order(tensor), signed=tensor.device.type != "cpu")
        return _Saved(region, dataclasses.replace(found, shape=tuple(tensor.shape)))

    @untraced
    def begins(self) -> None:
        """Note that a region begins to be recomputed; `ends` follows.

        Buffers that it changes must be as they are now when the whole backward ends.
        """
        self._depth += 1
        if self._depth == 1:
            self._before = self._digests()
        if (number := backward_number()) >= 0 and number != self._backward:
            self._backward = number
            self._changed.clear()
            before = dict(zip((name for name, _ in self._buffers), self._before, strict=True))
            when_backward_ends(lambda: self._require_unchanged(before))

    @untraced
    def ends(self) -> None:
        """Note that a region has been recomputed. The model's own backward may write to buffers too."""
        self._depth -= 1
        if self._depth == 0:
            pairs = zip(self._buffers, self._before, self._digests(), strict=True)
            self._changed |= {name for (name, _), before, now in pairs if not before.is_equal(now)}

    def _digests(self) -> list[Digest]:
        return [digest_of(buffer) for _, buffer in self._buffers]

    def _require_unchanged(self, before: Mapping[str, Digest]) -> None:
        may_be = [(name, buffer) for name, buffer in self._buffers if name in self._changed]
        if changed := [name for name, buffer in may_be if not before[name].is_equal(digest_of(buffer))]:
            raise FirstStepMismatch(
                f"recomputing regions changed {', '.join(changed[:3])}, which a forward changes once. {REMEDY}"
            )


def _is_of_kernel(tensor: Tensor) -> bool:
    """Return whether `tensor` may be a kernel's own saved data, which has no defined value."""
    is_integer = not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool
    return tensor.dtype == torch.uint8 or (is_integer and (tensor.device.type != "cpu" or tensor.dim() == 0))


@dataclasses.dataclass(frozen=True, eq=False)
class _Saved:
    """The digest of a tensor that a region saved. `torch.utils.checkpoint` compares the recomputed one by `!=`."""

    region: str
    digest: Digest

    @untraced
    def __ne__(self, other: Any) -> bool:
        found: Digest = other.digest
        if (self.digest.dtype, self.digest.shape) != (found.dtype, found.shape):
            return True  # of which torch says more
        if not self.digest.is_equal(found) and not (found.signed is not None and self.digest.is_near(found, NEAR)):
            raise FirstStepMismatch(
                f"{self.region} recomputed another value than its forward had ({self.digest} in forward, {found} "
                f"recomputed): gradients would be wrong. {REMEDY}"
            )
        return False

    def __repr__(self) -> str:
        return str(self.digest)
