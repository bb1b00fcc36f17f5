"""Whether products of a slice round as those of all rows do, on the device at hand.

A row of a matrix product is a sum over the inner dimension, in an order that the kernel chooses, and some choose it by
how many rows there are (seen on a CPU, in float32 and bfloat16). It depends on sizes, not on numbers, so it can be seen
on random ones.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from remat.chunking.chunked_loss import slices_of

MOST_OPERATIONS = {"cpu": 2e11, "cuda": 2e14}  # a few seconds; larger products are not tried


def round_alike(shape: tuple[int, int, int], slices: int, dtype: torch.dtype, device: torch.device) -> bool | None:
    """Whether logits and gradients of rows are bitwise the same in slices; None where that is too much to try.

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
