"""Reached shares: of a target's peaks, those that kernels reach, by the generation of the card (see `roofline.py`)."""

from __future__ import annotations

import dataclasses

from remat.workload.target import Target


@dataclasses.dataclass(frozen=True)
class Shares:
    """Of a generation's peaks what its kernels reach.

    product  arithmetic of large aligned products; fitted, below the best that a single shape reaches (0.87 on an A100,
             0.80 on an H100: Bekman, ml-engineering, table of maximum achievable matmul FLOPS, August 2026)
    flash, cudnn, efficient  arithmetic of attention forward, heads 128 wide, long sequences
    stream   bandwidth of pointwise kernels; what large copies reach, fitted for GeForce cards
    full     arithmetic of large products in float32 without TF32
    l2       traffic that fits L2 beside traffic that does not (Rule 7)
    single   elements per microsecond and processor where a kernel loads numbers one by one (Rule 6)
    cast     the same where it also casts between floating-point types, or finds the place of each by arithmetic
    scattered  the same where numbers that lie together in the result do not in the argument; 0 where unknown
    loose    of `stream`, kernels that load numbers of 32 bits one by one
    permuted  of `stream`, copies into another order, where elements do not count
    written  of `stream`, traffic of products, whose results go out behind the arithmetic
    patches  of a product's rate, convolutions (Rule 3)
    loaded   of a product's rate, by the largest power of two bytes that divides every row of its operands (Rule 2)
    stored   the same of its result
    """

    product: float
    flash: float
    cudnn: float
    efficient: float
    stream: float
    full: float
    l2: float
    single: float
    cast: float
    scattered: float = 0.0
    loose: float = 1.0
    permuted: float = 0.65  # assumed
    written: float = 1.0
    patches: float = 0.8  # fitted
    loaded: tuple[float, ...] = (0.5, 0.7, 0.85, 1.0)  # of 2, 4, 8, 16 bytes: assumed
    stored: tuple[float, ...] = (0.5, 0.7, 0.85, 1.0)


# Flash attention on an A100: 73 % (Dao 2023, FlashAttention-2, section 4.1). On an H100, for torch's kernel and for
# cuDNN's: 370 and 610 of 989 teraflops (Shah et al. 2024, FlashAttention-3, figure 5, which times both).
# Memory-efficient attention: assumed. GeForce cards run above their rated clock, so their shares are high. Measured are
# Ada's product, stream and L2, elements loaded one by one on Ada and on Ampere, and Hopper's all but flash, cuDNN and
# stream. Whole steps of torch before 2.9 on Hopper fit a lower share of products than their kernels alone reach.
_AMPERE = Shares(0.78, 0.73, 0.73, 0.40, 0.85, 0.78, 1.4, 1600, 1600)
_HOPPER = Shares(
    *(0.75, 0.37, 0.61, 0.15, 0.88, 0.78, 1.4, 2500, 1650),
    scattered=950,
    loose=0.8,
    permuted=1.0,
    written=0.85,
    patches=0.69,  # so that convolutions reach 0.52, as fitted
    loaded=(0.2, 0.37, 0.37, 1.0),
    stored=(0.135, 0.35, 0.37, 1.0),
)
_HOPPER_BEFORE = dataclasses.replace(_HOPPER, product=0.65, patches=0.8)
_ADA = Shares(0.64, 0.73, 0.73, 0.40, 0.765, 0.64, 6.5, 3400, 3400)
_GEFORCE = Shares(1.0, 0.73, 0.73, 0.40, 0.95, 1.0, 1.4, 3400, 3400)
_SHARES = {80: _AMPERE, 86: _GEFORCE, 89: _ADA, 90: _HOPPER}


def rate_of(dtype: str, target: Target) -> float:
    return target.flops_per_us.get(dtype, target.flops_per_us["float32"])


def shares_of(target: Target) -> Shares:
    found = _GEFORCE if target.geforce else _SHARES.get(target.capability, _HOPPER)
    return _HOPPER_BEFORE if found is _HOPPER and is_before(target, (2, 9)) else found


def is_before(target: Target, release: tuple[int, int]) -> bool:
    """Return whether the target trains with an older torch; one that states none has the newest."""
    return (0, 0) < target.torch_release < release
