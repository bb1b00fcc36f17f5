"""LoRA adapters on a ready-made model (Hu et al. 2021), through peft: the weights frozen, adapters trained.

Adapters go on every linear layer but the head, as QLoRA's authors found best (Dettmers et al. 2023, section 4), except
where a library forbids one. The experts of a mixture are no linear layers, and get none. Unless another dtype is asked
for, frozen weights are in bf16, adapters in fp32, and the step runs under bf16 autocast, as TRL's Trainers do on a
model that was loaded in bf16.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import warnings
from typing import Any, cast

import torch
from torch import nn

from remat.errors import UsageError
from remat.workload.workload import Workload

_SETTING = re.compile(r"(?P<name>\w+)=(?P<value>[^,]+)")
# A Mamba layer's fast path reads the weights of these past their modules, where an adapter would not be seen.
_MAMBA = (".out_proj", ".conv1d")
# In a mixture peft takes these names, in any layer, for the experts' (`_convert_peft_config_moe`, peft 0.21).
_MLP = (".gate_proj", ".up_proj", ".down_proj")


@dataclasses.dataclass(frozen=True)
class Lora:
    """Adapters of rank `r`, with `dropout` on their inputs."""

    r: int
    dropout: float = 0.0

    @staticmethod
    def parsed(text: str) -> Lora:
        """Parse `r=16` or `r=16,dropout=0.05`.

        Raises UsageError for other texts.
        """
        found = [_SETTING.fullmatch(part.strip()) for part in text.split(",")]
        settings = {match["name"]: match["value"] for match in found if match}
        try:
            if None in found or not {"r"} <= set(settings) <= {"r", "dropout"}:
                raise ValueError
            made = Lora(int(settings["r"]), float(settings.get("dropout", 0)))
            if made.r < 1 or not 0 <= made.dropout < 1:
                raise ValueError
        except ValueError:
            raise UsageError(f"adapters {text!r} are not understood; say r=16, or r=16,dropout=0.05.") from None
        return made


def peft() -> Any:
    """Return the library `peft`. Raises an error that says how to install it."""
    try:
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # which peft imports, and which warns of kernels
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import peft as library
    except ModuleNotFoundError as error:
        raise UsageError(f"adapters need the package peft, which cannot be imported: {error}.") from error
    return library


def with_lora(workload: Workload, lora: Lora, frozen: torch.dtype | None = torch.bfloat16) -> Workload:
    """Return the workload that trains adapters alone; `frozen` is the dtype of other weights, None for their own."""
    library = peft()

    def build() -> nn.Module:
        model: Any = workload.build()
        if frozen is not None:
            model = model.to(frozen)
        settings = library.LoraConfig(r=lora.r, lora_dropout=lora.dropout, target_modules=_targets(model))
        own = next(model.parameters()).dtype
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapted: Any = library.get_peft_model(model, settings)
        for parameter in adapted.parameters():
            if parameter.requires_grad:  # which peft always leaves in fp32 on the meta device
                parameter.data = parameter.data.to(own if workload.autocast is None else torch.float32)
        return cast(nn.Module, adapted.train())

    return dataclasses.replace(workload, name=f"{workload.name} lora r={lora.r}", build=build)


def _targets(model: Any) -> list[str]:
    """List the paths of the linear layers. (peft's `all-linear` also reaches the experts of some mixtures.)."""
    from transformers.pytorch_utils import Conv1D  # GPT-2's linear layers

    head, kinds = model.get_output_embeddings(), [name for name, _ in model.named_modules()]
    forbidden = (*(_MAMBA if _has_mamba(model) else ()), *(_MLP if any(k.endswith(".experts") for k in kinds) else ()))
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head and not name.endswith(forbidden)
    ]


def _has_mamba(model: nn.Module) -> bool:
    return any("mamba" in type(module).__name__.lower() for module in model.modules())
