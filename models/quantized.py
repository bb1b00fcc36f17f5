"""4-bit weights on a ready-made model (Dettmers et al. 2023), through bitsandbytes: nf4, quantised twice.

Every linear layer but the head becomes bitsandbytes' `Linear4bit`, computing in bf16, as transformers makes it of
`BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
bnb_4bit_compute_dtype=torch.bfloat16)`. Such weights are frozen; adapters train beside them (`adapters.py`).

A weight is quantised when it is moved to a device, which needs its data. On the meta device it is given the tensors
that quantising would make: a byte for two weights, a byte of scale for 64 of them, and a float for 256 scales.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import math
from typing import Any

import torch
from torch import nn

from remat.errors import UsageError
from remat.workload.workload import Workload

BLOCK, BLOCK_OF_SCALES = 64, 256
SCHEMES = ("nf4",)


def bitsandbytes() -> Any:
    """Return the library `bitsandbytes`. Raises an error that says how to install it."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of kernels that training does not need
    try:
        return importlib.import_module("bitsandbytes")
    except ModuleNotFoundError as error:
        raise UsageError(f"4-bit weights need the package bitsandbytes, which cannot be imported: {error}.") from error


def quantized(workload: Workload, scheme: str) -> Workload:
    """Return the workload with linear layers, except the head, in 4 bits, and other weights in bf16."""
    if scheme not in SCHEMES:
        raise UsageError(f"weights cannot be quantised as {scheme!r}; choose {', '.join(SCHEMES)}.")
    library = bitsandbytes()

    def build() -> nn.Module:
        model: Any = workload.build().to(torch.bfloat16)
        head = model.get_output_embeddings()
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear and child is not head:
                    setattr(parent, name, _layer(library, child))
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        found: nn.Module = model.train()
        return found

    return dataclasses.replace(workload, name=f"{workload.name} {scheme}", build=build)


def _layer(library: Any, linear: nn.Linear) -> nn.Module:
    """Quantise `linear` to 4 bits."""
    made = library.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        compute_dtype=torch.bfloat16,
        compress_statistics=True,
        quant_type="nf4",
        device="meta",
    )
    made.compute_type_is_set = True  # which the first forward would find out of its input
    made.bias = linear.bias
    data, options = linear.weight.data, {"compress_statistics": True, "quant_type": "nf4", "module": made}
    if data.is_meta:
        made.weight = library.nn.Params4bit(
            torch.empty(math.ceil(data.numel() / 2), 1, dtype=torch.uint8),
            requires_grad=False,
            quant_state=_state(library, data),
            bnb_quantized=True,
            **options,
        )
        made.quant_state = made.weight.quant_state
    else:
        made.weight = library.nn.Params4bit(data, requires_grad=False, **options)
        made.to(data.device)
    return made


def _state(library: Any, weight: torch.Tensor) -> Any:
    """Return the state that quantising `weight` would leave beside its bytes."""
    scales = math.ceil(weight.numel() / BLOCK)
    of_scales = library.functional.QuantState(
        absmax=torch.empty(math.ceil(scales / BLOCK_OF_SCALES), dtype=torch.float32),
        code=torch.empty(256, dtype=torch.float32),
        blocksize=BLOCK_OF_SCALES,
        dtype=torch.float32,
    )
    return library.functional.QuantState(
        absmax=torch.empty(scales, dtype=torch.uint8),
        shape=weight.shape,
        code=torch.empty(16, dtype=torch.float32),
        blocksize=BLOCK,
        quant_type="nf4",
        dtype=weight.dtype,
        offset=torch.empty((), dtype=torch.float32),
        state2=of_scales,
    )
