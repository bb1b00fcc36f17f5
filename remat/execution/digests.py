"""Digests: what tells the data of one tensor from another's without keeping either.

Two are equal where the tensors are, bit by bit; two that differ have equal ones as seldom as chance has it. Making one
takes next to no memory: a tensor is summed along each of its dimensions as integers, in words as wide as its numbers,
and only the sums are copied to the host. Sums along the last dimension take each word times a number of its place:
plain ones are the same for all permutations. A hash of the memory itself would need it on the host, or as much again.

Where numbers may differ in rounding, sums of each column with random signs are kept too. Of two tensors that are
apart by rounding they are apart as much; of two that have nothing in common, by more than their norm. A GPU's kernels
fill the last columns of some results up to a multiple, and leave there what was there before: these do not count.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from remat._torch.training import is_wrapper, without_modes

LONGEST = 4096  # dimension that is summed as a whole; longer ones are split
SLICES = 32  # slices in which a tensor is multiplied by numbers of its places
FILLED_COLUMNS = 31  # columns at the end of a result that may be unwritten
_NAN_DISTANCE = 1e-6  # distance if NaN is involved: the bits of two NaN may differ
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclasses.dataclass(frozen=True, eq=False)
class Digest:
    """A summary of one tensor's data.

    bits    equal if all bits are equal; None: not known
    signed  sums of columns with random signs, on the host; None if not asked for
    number  the value of a tensor with one element
    on_device  whether the tensor is not on the CPU
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    bits: int | None
    signed: Tensor | None = None
    number: float | None = None
    on_device: bool = False

    def is_equal(self, other: Digest) -> bool:
        """Return whether both may be of bitwise equal data."""
        if self.bits is None or other.bits is None:
            return True
        return (self.dtype, self.shape, self.bits) == (other.dtype, other.shape, other.bits)

    def apart(self, other: Digest) -> float:
        """Return their distance over their norm; infinite if unknown."""
        if self.is_equal(other):
            return 0.0
        if self.signed is None or other.signed is None or self.shape != other.shape:
            return math.inf
        written = max(len(self.signed) - (FILLED_COLUMNS if self.on_device else 0), 1)
        one, two = self.signed[:written].double(), other.signed[:written].double()
        known = one.isfinite()
        if not torch.equal(known, two.isfinite()):
            return math.inf
        one, two = one[known], two[known]
        norm = max(float(one.norm()), float(two.norm()))
        return float((one - two).norm()) / norm if norm else 0.0

    def is_near(self, other: Digest, tolerance: float) -> bool:
        """Return whether their distance is at most `tolerance`, or both hold non-finite values."""
        apart = self.apart(other)
        is_broken = self.signed is not None and not self.signed.isfinite().all()
        return apart <= (max(tolerance, _NAN_DISTANCE) if is_broken else tolerance)

    def __str__(self) -> str:
        if self.number is not None:
            return f"{self.number:.9g}"
        text = f"{str(self.dtype).removeprefix('torch.')} {'x'.join(map(str, self.shape))}"
        return text if self.signed is None else f"{text} of norm {float(self.signed.double().norm()):.6g}"


def digest_of(tensor: Tensor, *, signed: bool = False) -> Digest:
    """Compute the digest of `tensor`; `signed` adds the sums from which a distance is computed."""
    with torch.no_grad(), without_modes(), torch.autocast(tensor.device.type, enabled=False):
        tensor = tensor.detach()
        shape = tuple(tensor.shape)
        if is_wrapper(tensor) or tensor.layout is not torch.strided:
            return Digest(tensor.dtype, shape, None)
        number = float(tensor) if tensor.numel() == 1 and tensor.is_floating_point() else None
        sums = [each.reshape(-1) for each in _sums(_words(tensor))] if tensor.numel() else []
        bits = hash(torch.cat(sums).cpu().numpy().tobytes()) if sums else 0
        wanted = signed and tensor.is_floating_point() and tensor.element_size() > 1 and tensor.numel() > 0
        of_signs = _with_signs(tensor) if wanted else None
        return Digest(tensor.dtype, shape, bits, of_signs, number, tensor.device.type != "cpu")


def in_memory_order(tensor: Tensor) -> Tensor:
    """Permute the dimensions of `tensor` into memory order, so that it can be read by rows without a copy.

    Dimensions of size 1 are left out, since their strides mean nothing: saved and recomputed, they may differ.
    """
    if tensor.layout is not torch.strided or is_wrapper(tensor):
        return tensor
    dense = tensor.detach().squeeze()
    return dense.permute(sorted(range(dense.dim()), key=dense.stride, reverse=True))


def _words(tensor: Tensor) -> Tensor:
    """View the bits of `tensor` as integers."""
    tensor = tensor.resolve_conj().resolve_neg()
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return plain.view(_WORDS[plain.element_size()])


def _sums(words: Tensor) -> Iterator[Tensor]:
    """Yield sums along each dimension over all others, in the same dtype: a wider sum would copy its argument."""
    for i, length in enumerate(words.shape):
        if length > LONGEST:
            parts = math.isqrt(length)
            whole = length // parts * parts
            yield from _sums(words.narrow(i, 0, whole).unflatten(i, (parts, -1)))
            if whole < length:
                yield from _sums(words.narrow(i, whole, length - whole))
            return
    if words.dim() < 2:
        yield words
        return
    for i in range(words.dim() - 1):
        yield words.sum([j for j in range(words.dim()) if j != i], dtype=words.dtype)
    yield _placed_sum(words)


def _placed_sum(words: Tensor) -> Tensor:
    """Sum along the last dimension, each word times odd numbers for its place elsewhere; in slices, to save memory."""
    others = range(words.dim() - 1)
    odd = [_odd_numbers(words.shape[i], words.dtype, words.device) for i in others]
    longest = max(others, key=lambda i: words.shape[i])
    step = -(-words.shape[longest] // SLICES)
    found = words.new_zeros(words.shape[-1])
    for begin in range(0, words.shape[longest], step):
        part = words.narrow(longest, begin, min(step, words.shape[longest] - begin))
        for i in others:
            first = begin if i == longest else 0
            numbers = odd[i][first : first + part.shape[i]].view(-1, *[1] * (words.dim() - 1 - i))
            part = part.mul_(numbers) if i else part * numbers
        found += part.sum(list(others), dtype=words.dtype)
    return found


def _odd_numbers(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Draw as many odd numbers. They are not kept: training may have no room for those of every length."""
    drawn = torch.randint(1 << 30, (count,), generator=torch.Generator("cpu").manual_seed(count), device="cpu")
    return (2 * drawn + 1).to(dtype).to(device)


def _with_signs(tensor: Tensor) -> Tensor:
    """Return the sums of a tensor's columns, with a random sign for each row.

    No product of a matrix: it would take cuBLAS's workspace, which lasts, in a step that may have none.
    """
    if tensor.numel() == 1:
        return tensor.reshape(1).cpu()
    rows = tensor.reshape(-1, tensor.shape[-1])
    generator = torch.Generator("cpu").manual_seed(rows.shape[0])
    drawn = torch.rand(rows.shape[0], generator=generator, device="cpu") < 0.5
    signs = torch.where(drawn, 1.0, -1.0).to(tensor.device, tensor.dtype).unsqueeze(1)
    wide = torch.promote_types(tensor.dtype, torch.float32)
    if len(rows) <= SLICES:
        step = -(-rows.shape[1] // SLICES)
        on_host = torch.empty(rows.shape[1], dtype=wide, device="cpu")
        for part, out in zip(rows.split(step, dim=1), on_host.split(step), strict=True):
            out.copy_((part * signs).sum(0, dtype=wide))
        return on_host
    found, step = rows.new_zeros(rows.shape[1], dtype=wide), -(-len(rows) // SLICES)
    for part, sign in zip(rows.split(step), signs.split(step), strict=True):
        found += (part * sign).sum(0, dtype=wide)
    return found.cpu()
