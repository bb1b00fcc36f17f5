"""Starts the card's arithmetic when torch is imported (entry point `torch.backends`); see arithmetic/arithmetic.cpp."""

from __future__ import annotations

import atexit
import os
import sys
import time
from pathlib import Path


def load() -> None:
    """Wrap the CUDA kernels, as CARD_ARITHMETIC says; CARD_TALK tells of them, and of what was not computed."""
    mode = os.environ.get("CARD_ARITHMETIC", "off")
    if mode == "off":
        return
    import torch

    torch.ops.load_library(str(Path(__file__).resolve().parent.parent / "libarithmetic.so"))
    small = int(os.environ.get("CARD_SMALL_BYTES", 1 << 20))
    whole = int(os.environ.get("CARD_WHOLE_BYTES", 256 << 20))
    said = torch.ops.card.start(mode, small, whole)
    if mode == "all":
        import triton_arithmetic

        triton_arithmetic.compute_kernels()
    # Autograd's threads may still let go of Python objects, and one that asks a dying interpreter aborts the process.
    atexit.register(time.sleep, 0.2)
    if "CARD_TALK" in os.environ:
        print(f"card: {said}, mode {mode}", file=sys.stderr)
        atexit.register(lambda: print(torch.ops.card.report(), end="", file=sys.stderr))
