"""Shared parts of the families: the library, random batches, the step, and the two kinds of workload.

A family file hands the name of a family of `transformers` and its shape to `text_model` or `image_model`. The rules
that hold for all of them:

1. `transformers` is imported when a workload is made, never when this package is: importing it takes seconds.
2. No device is named. Tensors are made on the default device, which is `meta` or fake while planning.
3. A batch has ids or pixels and labels, and nothing else: a mask with padding or packed position ids would rule out
   the flash kernel. `padded` gives a batch such a mask, `packed` such position ids.
4. `build` makes a fresh configuration each time, because a model writes into the one it is given.
5. To build without memory use the `meta` device, not `FakeTensorMode`: ViT's initialisation and ConvNeXt V2's
   drop-path rates read values off a tensor, which a fake tensor does not have.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from remat.errors import UsageError
from remat.workload.workload import Workload

Batch = dict[str, torch.Tensor]
NO_LABEL = -100  # the label that the library's losses ignore

# Options of every language model's configuration: fused attention, and no key-value cache while training.
TRAINING_TEXT: dict[str, Any] = {"attn_implementation": "sdpa", "use_cache": False}


def transformers() -> Any:
    """Return the library `transformers`. Raises an error that says how to install it."""
    try:
        import transformers as library
    except ModuleNotFoundError as error:
        raise UsageError(
            f"The ready-made models need the package transformers, which cannot be imported: {error}. "
            'Run `pip install "remat[models]"`.'
        ) from error
    return library


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss, which all models here compute themselves; the step of every workload."""
    return model(**batch).loss


def token_ids(vocab: int, batch_size: int, length: int) -> torch.Tensor:
    return torch.randint(0, vocab, (batch_size, length))


def text_workload(
    name: str,
    build: Callable[[], nn.Module],
    *,
    vocab: int,
    batch_size: int,
    seq_len: int,
    positions: int | None = None,
    labels_len: Callable[[int], int] = lambda length: length,
) -> Workload:
    """Make a language-model workload on random ids; `positions` is the maximum length, None if there is none.

    `labels_len` returns the number of labels of a sequence, if it differs (encoder and decoder).
    """

    def batch(samples: int, length: int | None) -> Batch:
        if length is None:
            raise UsageError(f"model {name} needs a sequence length. Its default is {seq_len}.")
        if positions is not None and length > positions:
            raise UsageError(
                f"sequence length {length} is more than the {positions} positions of model {name}. "
                f"Choose a sequence length of at most {positions}."
            )
        return {
            "input_ids": token_ids(vocab, samples, length),
            "labels": token_ids(vocab, samples, labels_len(length)),
        }

    return Workload(name, build, batch, loss_of, batch_size, seq_len, autocast=torch.bfloat16)


def text_model(
    name: str,
    family: str,
    shape: Mapping[str, Any],
    *,
    batch_size: int,
    seq_len: int,
    config: str | None = None,
    model: str | None = None,
    labels_len: Callable[[int], int] = lambda length: length,
) -> Workload:
    """Make a workload of a `family` of transformers (`Qwen3`: Qwen3Config, Qwen3ForCausalLM) with `shape`.

    `config` and `model` name its classes if these have other names. `shape` has the published configuration's own keys.
    Raises UsageError if the installed transformers lack the class.
    """
    build, made = builder(
        name, config or f"{family}Config", model or f"{family}ForCausalLM", {**TRAINING_TEXT, **shape}
    )
    return text_workload(
        name,
        build,
        vocab=made.vocab_size,
        positions=getattr(made, "max_position_embeddings", None),
        batch_size=batch_size,
        seq_len=seq_len,
        labels_len=labels_len,
    )


def builder(name: str, config: str, model: str, shape: Mapping[str, Any]) -> tuple[Callable[[], nn.Module], Any]:
    """Return the builder of a class `model` of transformers for the workload `name`, and its configuration."""
    library = transformers()
    make_config, make_model = member(library, config, name), member(library, model, name)

    def build() -> nn.Module:
        return make_model(make_config(**copy.deepcopy(dict(shape)))).train()

    return build, make_config(**copy.deepcopy(dict(shape)))


def member(library: Any, class_name: str, model: str) -> Any:
    """Return the class of transformers that `model` needs. Raises UsageError if this version lacks it."""
    if (found := getattr(library, class_name, None)) is None:
        raise UsageError(f"model {model} needs {class_name}, which transformers {library.__version__} does not have.")
    return found


def padded(workload: Workload) -> Workload:
    """Return the text workload on batches whose last sample is half padding, without labels there."""

    def batch(samples: int, length: int | None) -> Batch:
        made = workload.batch(samples, length)
        if "input_ids" not in made:
            raise UsageError(f"padding was asked for, but model {workload.name} takes no text. Leave --padded out.")
        ids, labels = made["input_ids"], made["labels"]
        mask = torch.ones_like(ids)
        mask[-1, ids.shape[1] // 2 :] = 0
        if labels.shape == ids.shape:
            labels[-1, ids.shape[1] // 2 :] = NO_LABEL
        return {**made, "attention_mask": mask}

    return dataclasses.replace(workload, batch=batch)


def packed(workload: Workload) -> Workload:
    """Return the text workload on rows of packed sequences, whose position ids begin anew at each sequence.

    Sequences have the workload's own length; the last of a row is cut where the row ends.
    """
    own = workload.seq_len or 1

    def batch(samples: int, length: int | None) -> Batch:
        total = own if length is None else length
        sequences, tokens = -(-total // own), min(own, total)
        made = workload.batch(samples * sequences, tokens)
        if "input_ids" not in made or made["labels"].shape != made["input_ids"].shape:
            raise UsageError(f"model {workload.name} takes no packed text. Leave --packed out.")
        rows = {name: tensor.reshape(samples, -1)[:, :total] for name, tensor in made.items()}
        positions = torch.arange(tokens).repeat(sequences)[:total]
        return {**rows, "position_ids": positions.expand(samples, total)}

    return dataclasses.replace(workload, batch=batch)


def image_model(
    name: str, family: str, shape: Mapping[str, Any], *, image_size: int, stride: int, labels: int, batch_size: int
) -> Workload:
    """Make an image classifier's workload (`ViT`: ViTConfig, ViTForImageClassification) on random square images.

    Their side is a multiple of `stride`. Without a problem type, the model would derive it from the first labels and
    write it into the configuration in the middle of a captured forward.
    """
    if image_size < stride or image_size % stride:
        raise UsageError(
            f"image size {image_size} is not a multiple of {stride}, the stride of model {name}. "
            f"Choose {max(1, round(image_size / stride)) * stride}, for example."
        )
    head = {"num_labels": labels, "problem_type": "single_label_classification"}
    build, _ = builder(name, f"{family}Config", f"{family}ForImageClassification", {**shape, **head})

    def batch(samples: int, length: int | None) -> Batch:
        if length is not None:
            raise UsageError(
                f"sequence length {length} was given, but model {name} takes images. "
                "Leave it out, or choose another image size."
            )
        return {
            "pixel_values": torch.randn(samples, 3, image_size, image_size),
            "labels": torch.randint(0, labels, (samples,)),
        }

    return Workload(name, build, batch, loss_of, batch_size, autocast=torch.bfloat16)
