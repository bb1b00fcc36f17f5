"""Whether slices round as all rows do, on the device at hand.

A row of a matrix product is a sum over the inner dimension, in an order that the kernel chooses, and some choose it by
how many rows there are (seen on a CPU, in float32 and bfloat16). It depends on sizes, not on numbers, so it can be seen
on random ones.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from remat.chunking.bodies import chunked
from remat.chunking.chunked_loss import slices_of
from remat.chunking.rows import RowRun

MOST_OPERATIONS = {"cpu": 2e11, "cuda": 2e14}  # a few seconds; larger products are not tried


def round_alike(shape: tuple[int, int, int], slices: int, dtype: torch.dtype, device: torch.device) -> bool | None:
    """Return whether slices leave logits and gradients of rows bitwise equal; None if too large to try.

    shape  (rows, classes, width) of a head
    """
    rows, classes, width = shape
    if slices == 1:
        return True
    if 8.0 * rows * classes * width > MOST_OPERATIONS[device.type]:
        return None
    generator = torch.Generator(device).manual_seed(0)
    made = (torch.randn(size, generator=generator, device=device) for size in ((rows, width), (classes, width)))
    given, weight = (tensor.to(dtype) for tensor in made)
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        logits = F.linear(given, weight)
        found = torch.mm(logits, weight)
        for cut in slices_of(rows, slices):
            again = F.linear(given[cut], weight)
            if not torch.equal(again, logits[cut]) or not torch.equal(torch.mm(again, weight), found[cut]):
                return False
    return True


def rows_round_alike(run: RowRun, slices: int, device: torch.device, autocast: torch.dtype | None) -> bool | None:
    """Return whether slices leave a run's result and its rows' gradient bitwise equal; None as in `round_alike`.

    Some kernels of a CPU compute the last few of their numbers in another way.
    """
    if run.operations > MOST_OPERATIONS[device.type]:
        return None
    try:
        return _rounds_alike(run, slices, device, autocast)
    except torch.OutOfMemoryError:
        return None


def _rounds_alike(run: RowRun, slices: int, device: torch.device, autocast: torch.dtype | None) -> bool:
    generator = torch.Generator(device).manual_seed(0)
    values = [
        torch.randn(shape, generator=generator, device=device).to(dtype) / (shape[-1] ** 0.5 if len(shape) > 1 else 1)
        for shape, dtype in run.signature[1:]
    ]
    rows, beside, function = values[0], values[1:], chunked(run, slices)
    wanted = [True, *(False for _ in beside)]

    def under() -> torch.autocast:
        return torch.autocast(device.type, autocast, enabled=autocast is not None, cache_enabled=False)

    with torch.no_grad(), under():
        made = function.forward(rows, beside, wanted)
    gradient = torch.randn(made.shape, generator=generator, device=device).to(made.dtype)
    whole, of_rows, _ = function.untouched(rows, beside, gradient, wanted, under=under)
    found, _ = function.gradients(rows, beside, gradient, wanted, under=under)
    assert of_rows is not None and found is not None
    pairs = ((made.flatten(0, -2), whole), (found, of_rows))
    return all(torch.allclose(one, other, rtol=0, atol=0, equal_nan=True) for one, other in pairs)
