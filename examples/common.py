"""Shared parts of the examples: small models, data made on the spot, and a table of results.

The text is sums, character by character ("17+25=42;"); the images are bars in one of four directions, under noise.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from remat.costing.device_allocator import measure_peak
from remat.units import gib
from remat.validation.training import release_libraries

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TARGET = DEVICE.type  # plan for the device that trains
CHARACTERS = "0123456789+=;"
BATCH_SIZE, LENGTH = 16, 64
IMAGE, CLASSES = 24, 4
QUIET: dict[str, Any] = {  # of Trainers
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": DEVICE.type == "cpu",
    "dataloader_pin_memory": DEVICE.type != "cpu",
}


def options(description: str | None, budget: int | str, steps: int = 40) -> argparse.ArgumentParser:
    """Options with a budget: text, or MiB for model and batch, to which 64 come for the libraries of CUDA."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=steps)
    if isinstance(budget, int):
        budget = f"{budget + 64 * (DEVICE.type == 'cuda')}MiB"
    parser.add_argument("--budget", default=budget, help=f"limit on the peak of a step ({budget})".replace("%", "%%"))
    return parser


# Text


def gpt2() -> nn.Module:
    """GPT-2 with four layers, for sums."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=len(CHARACTERS),
        n_positions=LENGTH,
        n_embd=64,
        n_layer=4,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"  # the library would read it off the class's name, with a warning in the first step
    return model


def llama() -> Any:
    """Llama with four layers, always the same, for what loads a model and its `tokenizer`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(CHARACTERS) + 1,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=len(CHARACTERS),
        bos_token_id=CHARACTERS.index(";"),
        eos_token_id=CHARACTERS.index(";"),
    )
    return LlamaForCausalLM(config)


@functools.cache
def tokenizer() -> Any:
    """One token a character, without a download."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {character: i for i, character in enumerate([*CHARACTERS, "<pad>"])}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token=";")


@functools.cache
def sums(rows: int = 4000) -> list[dict[str, str]]:
    """Rows of one to nine sums, of which a trainer packs several into one."""
    rng = torch.Generator(device="cpu").manual_seed(0)
    numbers = torch.randint(0, 50, (rows, 9, 2), generator=rng, device="cpu").tolist()
    return [{"text": "".join(f"{a}+{b}={a + b};" for a, b in row[: 1 + i % 9])} for i, row in enumerate(numbers)]


def text(samples: int, length: int | None = LENGTH) -> dict[str, torch.Tensor]:
    """Sums, one after the other, cut to `length` characters."""
    rows = []
    for _ in range(samples):
        numbers = torch.randint(0, 50, (length or LENGTH, 2), device="cpu").tolist()
        line = "".join(f"{a}+{b}={a + b};" for a, b in numbers)[:length]
        rows.append([CHARACTERS.index(character) for character in line])
    ids = torch.tensor(rows)
    return {"input_ids": ids, "labels": ids.clone()}


def random_text(samples: int, length: int | None) -> dict[str, torch.Tensor]:
    """The shapes of `text`, which is all that a plan depends on."""
    ids = torch.randint(0, len(CHARACTERS), (samples, length or LENGTH))
    return {"input_ids": ids, "labels": ids.clone()}


# Images


class Residual(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.body(x))


def convnet() -> nn.Module:
    """A residual network of six blocks, for bars."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        *(Residual(16) for _ in range(6)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )


def images(samples: int, length: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy bars and their directions."""
    rows, columns = torch.meshgrid(torch.arange(IMAGE), torch.arange(IMAGE), indexing="ij")
    waves = torch.stack([torch.sin(0.8 * phase) for phase in (rows, columns, rows + columns, rows - columns)])
    labels = torch.randint(0, CLASSES, (samples,))
    return waves.to(labels.device)[labels].unsqueeze(1) + 0.5 * torch.randn(samples, 1, IMAGE, IMAGE), labels


# What is found


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """The losses of a training, and its peak memory above the memory in use before it."""

    losses: list[float]
    peak_bytes: int


def observed(train: Callable[[], Sequence[float]]) -> TrainingResult:
    """Run `train` once, from the same seed each time."""
    torch.manual_seed(0)
    losses: list[float] = []
    gc.collect()  # what an earlier training left must not be freed meanwhile
    release_libraries(DEVICE)  # their workspaces count in every training, not in the first alone
    peak = measure_peak(lambda: losses.extend(train()), DEVICE)
    return TrainingResult(losses, peak)


def report(without: TrainingResult, planned: TrainingResult) -> None:
    print(f"{'':16}{'loss':>22}{'peak':>14}")
    for name, run in (("without a plan", without), ("with the plan", planned)):
        print(f"{name:16}{run.losses[0]:10.4f} -> {run.losses[-1]:8.4f}{gib(run.peak_bytes):>14}")
    same = "the same to the last bit" if without.losses == planned.losses else "different"
    print(f"losses {same}; peak {100 * (1 - planned.peak_bytes / without.peak_bytes):.0f} % lower")
