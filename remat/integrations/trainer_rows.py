"""Rows of a Trainer's data set, and the largest batch in sight that its own collator makes of them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from remat._torch.training import fakes_are_on
from remat.errors import UsageError
from remat.integrations.generated_batches import GeneratedBatches, makes_batches, reward_models
from remat.integrations.modules_around import tensors_around
from remat.integrations.text_rows import hold_text, longest_first
from remat.integrations.trainer_model import copy_of_model, real
from remat.integrations.trainer_reference import AROUND, JUDGES, REFERENCE, named_tensors_of, reference_of
from remat.integrations.trainer_step import stand_in_of
from remat.integrations.widest_rows import length_of, longest_of_all, widest_first

MOST_ROWS = 1000  # of a data set that are looked at for the longest, beside those that its table says are
MOST_BATCHES = 100  # of a sampler that packs, the same
LENGTHS = "seq_lengths"  # of the sequences that TRL packed into a row

Batch = dict[str, Any]


class TrainerRows:
    """Rows of a Trainer's data set, and the batches that its collator makes from them.

    batch_size  samples in a batch on one device
    length      tokens of the longest row, None if it is no text
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self.batch_size: int = trainer.args.train_batch_size
        # An optimizer step's batches are fetched at once; accelerate fetches the next one too, onto the host.
        self._waiting: int = trainer.args.gradient_accumulation_steps - (trainer.args.device.type != "cpu")
        if trainer.train_dataset is None:
            raise UsageError("this Trainer has no train_dataset, whose rows a plan is made for.")
        if hasattr(trainer.train_dataset, "__len__") and not len(trainer.train_dataset):
            raise UsageError("the train_dataset of this Trainer is empty, and a plan is made for its rows.")
        with real():
            loader = trainer.get_train_dataloader()
            self._collate: Callable[[list[Any]], Any] = loader.collate_fn
            self._generated = _generated(trainer)
            if self._generated is not None:
                self._collate, self._waiting = self._generated, self._generated.waiting
            packed = _packed(loader)
            self.batch_size = len(packed[0]) if packed else self.batch_size
            if not (sampled := self._sampled(loader, packed)):
                raise UsageError("the train_dataset of this Trainer gives no rows, and a plan is made for its rows.")
            self._rows = sampled[: self.batch_size]
            self._padded = self._masks_with_padding(sampled)
            self.length = self._generated.length(self._rows) if self._generated else _longest(self._rows)
        self._made: dict[tuple[int, int | None], Batch] = {}
        with real():
            self._reference = named_tensors_of(reference_of(trainer))
            self._around = {name: tensor.detach() for name, tensor in tensors_around(trainer).items()}
            self._judges = [named_tensors_of(each) for each in reward_models(trainer)]

    def _sampled(self, loader: Any, packed: list[Any]) -> list[Any]:
        """Return rows of the data set, the longest first; if its sampler packs, each is a list of packed rows."""
        data = loader.dataset
        if packed:
            rows: list[Any] = [[data[i] for i in row] for batch in packed for row in batch]
        elif hasattr(data, "__getitem__") and hasattr(data, "__len__"):
            every = -(-len(data) // MOST_ROWS)
            longest = longest_of_all(data, self.batch_size) if every > 1 else []
            rows = [data[i] for i in dict.fromkeys([*range(0, len(data), every), *longest])]
        else:
            rows = [row for row, _ in zip(data, range(self.batch_size), strict=False)]
        if self._generated is not None:
            return self._generated.longest_first(rows)
        if hold_text(rows):
            return longest_first(rows, self._collate)
        return widest_first(rows, self.batch_size, self._collate)

    def _masks_with_padding(self, rows: list[Any]) -> frozenset[str]:
        """Return the names of masks with zeros in a batch of the longest and the shortest of `rows`."""
        if self.batch_size == 1 or len(rows) < 2:
            return frozenset()
        try:
            inputs = dict(self._collate([copy.copy(rows[0]), copy.copy(rows[-1])]))
        except Exception:  # any error of a collator that does not pad
            return frozenset()
        return frozenset(name for name, value in inputs.items() if _is_mask(name, value) and not _is_ones(value))

    def batch(self, batch_size: int, length: int | None) -> Batch:
        """Make the inputs of `compute_loss`, their number of items, and the state beside them; a Workload.batch."""
        key = (batch_size, length)
        if key not in self._made:
            with real():
                self._made[key] = self._collated(batch_size, length)
        made = {name: _here(name, value) for name, value in self._made[key].items()}
        beside: dict[str, Any] = {REFERENCE: self._reference, AROUND: self._around, JUDGES: self._judges}
        return made | {name: _here(name, tensors) for name, tensors in beside.items() if tensors}

    def _collated(self, batch_size: int, length: int | None) -> Batch:
        rows = [copy.copy(self._rows[i % len(self._rows)]) for i in range(batch_size)]
        if self._generated is not None:
            inputs = self._generated.of_length(rows, length)
        elif length is not None and length != self.length:
            inputs = dict(self._collate([_resized(row, length) for row in rows]))
        else:
            inputs = dict(self._collate(rows))
        for name in self._padded:
            if _is_mask(name, inputs.get(name)) and _is_ones(inputs[name]):
                inputs[name] = inputs[name].clone()
                inputs[name][-1, -1] = 0
        count = getattr(self._trainer, "_get_num_items_in_batch", None)
        items = count([inputs], torch.device("cpu")) if count else None
        return {"inputs": inputs, "items": items, "waiting": [inputs] * self._waiting}


def _generated(trainer: Any) -> GeneratedBatches | None:
    """Return the batches of a Trainer that generates them, made on a stand-in whose model has shapes only."""
    if not makes_batches(trainer):
        return None
    with torch.device("meta"):
        model = copy_of_model(trainer.model)
    return GeneratedBatches(stand_in_of(trainer, model))


def _packed(loader: Any) -> list[Any]:
    """Return batches of a sampler that packs (axolotl's), each of rows that are lists of indices; else none."""
    sampler: Any = getattr(loader, "batch_sampler", None)
    while type(sampler).__module__.startswith("accelerate."):  # which shares batches among processes
        sampler = sampler.batch_sampler
    if sampler is None or type(sampler).__module__.startswith("torch."):
        return []
    with torch.random.fork_rng(devices=[]):
        batches = list(itertools.islice(sampler, MOST_BATCHES))
    return batches if batches and batches[0] and isinstance(batches[0][0], (list, tuple)) else []


def _longest(rows: list[Any]) -> int | None:
    """Return the tokens of the longest of `rows`; None if they are no text."""
    return max((length for row in rows if (length := length_of(row)) is not None), default=None)


def _resized(row: Any, length: int) -> Any:
    """Cut or repeat `row` of text, or the packed rows in it, to `length` tokens."""
    was = length_of(row)
    if was and isinstance(row, list):
        each = [length_of(member) or 0 for member in row]
        return [_resized(row[i % len(row)], cut) for i, cut in enumerate(_cut(each, length)) if cut]
    if not was:
        return dict(row)
    made: dict[str, Any] = {}
    for name, value in row.items():
        if name == LENGTHS:
            made[name] = list(_cut(value, length))
        elif hasattr(value, "__len__") and not isinstance(value, (str, bytes)) and len(value) == was:
            made[name] = (
                torch.cat([value] * -(-length // was))[:length]
                if isinstance(value, torch.Tensor)
                else ((list(value) * -(-length // was))[:length])
            )
        else:
            made[name] = value
    return made


def _cut(lengths: Iterable[int], total: int) -> Iterator[int]:
    """Yield the lengths of packed sequences, over and over, up to `total`."""
    lengths = list(lengths)
    while total > 0:
        for each in lengths:
            if total > 0:
                yield min(each, total)
            total -= each


def _here(name: str, value: Any) -> Any:
    """Put `value` of a real batch on the default device; under fakes without floats, and with masks of ones."""
    if isinstance(value, Mapping):
        return {key: _here(key, inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_here(name, inner) for inner in value]
    fake = fakes_are_on()

    def made(tensor: torch.Tensor) -> torch.Tensor:
        if not fake:
            return tensor.clone().to(torch.get_default_device())
        if name.endswith("attention_mask") and _is_ones(tensor):
            return torch.ones(tensor.shape, dtype=tensor.dtype)
        if not tensor.is_floating_point():  # which may decide shapes (`recording/known_values.py`)
            return torch.tensor(_numbers(tensor), dtype=tensor.dtype)
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    return tree_map_only(torch.Tensor, made, value)


def _is_mask(name: str, value: Any) -> bool:
    return name.endswith("attention_mask") and isinstance(value, torch.Tensor) and value.dim() == 2


def _numbers(tensor: torch.Tensor) -> Any:
    with real():
        return tensor.tolist()


def _is_ones(tensor: torch.Tensor) -> bool:
    with real():
        return bool((tensor == 1).all())
