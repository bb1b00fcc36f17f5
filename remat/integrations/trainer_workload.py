"""The step that a Trainer of transformers, or one of TRL's, runs: as a Workload, read off the built Trainer.

    trainer = SFTTrainer(model, args=args, train_dataset=data)
    plan = remat.plan(remat.workload_of(trainer), budget="20GiB", loop=remat.loop_of(trainer))

Nothing of a Trainer is described a second time here. Its own `compute_loss` runs, on a copy of its model, with a batch
that its own collator makes of rows of its own data set.

Rule 1  The model is copied, on the meta device while planning, so that the Trainer's own is never touched. What a
        library put around a forward comes along (`copies.py`); accelerate's autocast does not, a plan goes beneath it.
Rule 2  The batch is the largest that is in sight: the longest rows of those looked at, as many as a device gets. It
        has padding where a batch of rows of several lengths has, even if the longest are all of one. Under fakes it
        has its shapes and its integers, and masks that are known to be of ones; on a device, its data.
Rule 3  Accelerate runs the model's forward under autocast, and nothing else of the step, and hands out fp32. Copies
        of weights that autocast keeps go when that forward ends, and not with the step.
Rule 4  A reference model (DPO's `ref_model`) is there before the step, as the batch is: its tensors are a part of it.
        So are those of modules that hold the model (`modules_around.py`: the losses of sentence-transformers).
Rule 5  Trainers read numbers off tensors for their logs, and pick elements by a mask. Outside of the model's forward
        the number is one while planning, unless it is known, and the mask picks all; inside, both are errors as ever.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from remat._torch.dynamo import know_functions
from remat._torch.training import UnseenMode, fakes_are_on, without_modes
from remat.capture import trl_head
from remat.capture.beside_parameters import HOLDERS, carry_over, tensors_beside
from remat.capture.copies import copied
from remat.capture.generators import generators_kept
from remat.errors import UsageError
from remat.execution.accelerate_autocast import autocast_of, take_off
from remat.execution.model_as_planned import checkpoints_itself
from remat.host.weights import weights_on_host
from remat.integrations.generated_batches import GeneratedBatches, makes_batches, refuse_unknown_batches, reward_models
from remat.integrations.modules_around import around, tensors_around
from remat.integrations.one_process import one_process
from remat.integrations.settings import outputs_in_fp32
from remat.integrations.text_rows import hold_text, longest_first
from remat.integrations.widest_rows import length_of, longest_of_all, widest_first
from remat.warn import warn
from remat.workload.optimizers import MakeOptimizer
from remat.workload.reference import call_reference
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload

MOST_ROWS = 1000  # of a data set that are looked at for the longest, beside those that its table says are
MOST_BATCHES = 100  # of a sampler that packs, the same
LENGTHS = "seq_lengths"  # of the sequences that TRL packed into a row

Batch = dict[str, Any]


@generators_kept()
def workload_of(trainer: Any) -> Workload:
    """Make a workload from the step of a built `Trainer`: its model, loss, optimizer, precision and largest batch.

    Rows are cut or repeated for other batch sizes and lengths.

    Args:
        trainer: A Trainer of transformers or TRL.

    Returns:
        The workload.

    Raises:
        UsageError: No plan can be made for this Trainer, or it has no training data.

    Example:
        >>> plan = remat.plan(remat.workload_of(trainer), loop=remat.loop_of(trainer), budget="20GiB")
    """
    _refuse(trainer)
    rows = _Rows(trainer)
    autocast = autocast_of(trainer.accelerator, trainer.model)
    return Workload(
        name=f"{type(trainer).__name__} of {type(trainer.model).__name__}",
        build=functools.partial(_copied, trainer.model, checkpoints=not own_checkpointing(trainer.args, trainer.model)),
        batch=rows.batch,
        step=functools.partial(_step, trainer, autocast, _bare_reference(trainer)),
        batch_size=rows.batch_size,
        seq_len=rows.length,
        optimizer=_optimizer_of(trainer),
        autocast=autocast,
    )


def loop_of(trainer: Any) -> TrainingLoop:
    """Return the training loop of a built `Trainer`.

    Args:
        trainer: A Trainer of transformers or TRL.

    Returns:
        Its accumulation, clipping, DDP and ranks.

    Raises:
        UsageError: `trainer` is no Trainer.

    Example:
        >>> remat.loop_of(trainer).accumulation
    """
    _require_trainer(trainer)
    args = trainer.args
    return TrainingLoop(
        accumulation=args.gradient_accumulation_steps,
        clip_grad_norm=bool(args.max_grad_norm and args.max_grad_norm > 0),
        ddp=args.world_size > 1 and not trainer.is_fsdp_enabled and not trainer.is_deepspeed_enabled,
        ranks=args.world_size,
    )


def is_trainer(value: Any) -> bool:
    """Return whether `value` is a Trainer, without importing transformers."""
    return any(
        known.__name__ == "Trainer" and known.__module__ == "transformers.trainer" for known in type(value).__mro__
    )


def _require_trainer(value: Any) -> None:
    if not is_trainer(value):
        raise UsageError(f"a Trainer of transformers or TRL is needed, not {type(value).__name__}.")


def own_checkpointing(args: Any, model: nn.Module) -> bool:
    """Return whether the model's own checkpointing is on (as by LLaMA-Factory's loader), or the Trainer turns it on.

    The argument for it has two names, by the version of transformers.
    """
    named = ("gradient_checkpointing", "activation_checkpointing")
    return any(getattr(args, name, False) for name in named) or checkpoints_itself(model)


def turn_off_checkpointing(model: nn.Module) -> None:
    """Turn the model's own checkpointing off, and the gradients of its inputs, which adapters need for that alone."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            module.gradient_checkpointing = False  # type: ignore[assignment]
        for key, hook in list(module._forward_hooks.items()):  # transformers may hold a handle of the last one only
            if getattr(hook, "__name__", "").startswith(INPUTS_HOOK):
                del module._forward_hooks[key]


INPUTS_HOOK = "make_inputs_require_grad"  # of transformers (plural) and of peft


def _refuse(trainer: Any) -> None:
    _require_trainer(trainer)
    if trainer.model is None:
        raise UsageError("this Trainer has no model yet (model_init=); give it one, or plan with a Workload.")
    if (reference := _reference_of(trainer)) is not None and any(
        any(True for _ in tensors_beside(p)) for p in reference.parameters()
    ):
        raise UsageError(
            "this Trainer keeps a reference model in 4 bits beside its own (ref_model), which a plan cannot count: "
            "train adapters (peft_config=), whose reference is the same model without them."
        )
    if makes_batches(trainer):
        refuse_unknown_batches(trainer)
    if getattr(trainer.args, "activation_offloading", False):
        raise UsageError("activation_offloading is on, which moves what a plan would count: turn it off.")
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise UsageError(
            "this Trainer shards its states (DeepSpeed or FSDP), and a plan from the Trainer itself does not: plan "
            "with a Workload and `loop=TrainingLoop(ranks=..., shard=...)`."
        )
    if not trl_head.is_known() and trainer.args.device.type == "cuda" and trl_head.is_on(trainer.model):
        raise UsageError(
            "on CUDA the head that this version of TRL puts on this model selects tokens by their labels: a shape that "
            "depends on data, which no plan can be made for. Use TRL 1.16, or train with transformers' own Trainer: "
            "its loss may run in chunks."
        )


# The model (Rule 1)


def _copied(model: nn.Module, *, checkpoints: bool = True) -> nn.Module:
    """Copy a model in training mode; on the meta device, its shapes alone.

    checkpoints  whether the model's own checkpointing stays as it is; otherwise it is off, as `RematCallback` does
    """
    on_meta = torch.get_default_device().type == "meta"
    memo: dict[int, Any] = {}
    if (on_host := weights_on_host(model)) is not None:
        memo[id(on_host)] = on_host  # which no copy has a part in
    if on_meta:
        for tensor in (*model.parameters(), *model.buffers()):
            bare = _on_meta(tensor)
            kept = nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare
            carry_over(tensor, kept, _on_meta)
            for name in HOLDERS:  # which a library's layer may hold too
                if hasattr(kept, name):
                    memo[id(getattr(tensor, name))] = getattr(kept, name)
            memo[id(tensor)] = kept
    made = copied(model, memo, _bare)
    if not checkpoints:
        turn_off_checkpointing(made)
    return made.train()


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _bare(model: nn.Module) -> nn.Module:
    """Restore in place the forward of `model` that accelerate has wrapped."""
    take_off(model)
    return model


# The batch (Rule 2)


class _Rows:
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
        with _real():
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
        with _real():
            self._reference = _tensors_of(_reference_of(trainer))
            self._around = {name: tensor.detach() for name, tensor in tensors_around(trainer).items()}
            self._judges = [_tensors_of(each) for each in reward_models(trainer)]

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
        except Exception as error:  # any error of a collator that does not pad
            from remat.recording.remedies import describe

            warn(
                "the collator makes no batch of the longest and the shortest row, so the plan is for batches without "
                f"padding ({describe(error)})."
            )
            return frozenset()
        return frozenset(name for name, value in inputs.items() if _is_mask(name, value) and not _is_ones(value))

    def batch(self, batch_size: int, length: int | None) -> Batch:
        """Make the inputs of `compute_loss`, their number of items, and the state beside them; a Workload.batch."""
        key = (batch_size, length)
        if key not in self._made:
            with _real():
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
        model = _copied(trainer.model)
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
    with _real():
        return tensor.tolist()


def _is_ones(tensor: torch.Tensor) -> bool:
    with _real():
        return bool((tensor == 1).all())


def _real() -> Any:
    """Return a context of real tensors on the host, whatever modes are active around it."""
    return without_modes()


# The reference model (Rule 4)

REFERENCE, AROUND, JUDGES = "reference", "around", "judges"  # their tensors in a batch


def _reference_of(trainer: Any) -> nn.Module | None:
    found = getattr(trainer, "ref_model", None)
    return found if isinstance(found, nn.Module) else None


def _tensors_of(model: nn.Module | None) -> dict[str, torch.Tensor]:
    named = (*model.named_parameters(), *model.named_buffers()) if model is not None else ()
    return {name: tensor.detach() for name, tensor in named}


class _Reference:
    """A model of shapes only, called with a batch's tensors as its own, under autocast, as accelerate does."""

    def __init__(self, model: nn.Module, autocast: torch.dtype | None, tensors: dict[str, torch.Tensor]):
        learns = {name for name, p in model.named_parameters() if p.requires_grad}  # whose casts autocast keeps
        self._tensors = {name: t.detach().requires_grad_(name in learns) for name, t in tensors.items()}
        self._model, self._autocast = model, autocast

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        device = next(iter(self._tensors.values())).device.type
        with torch.autocast(device, dtype=self._autocast, enabled=self._autocast is not None):
            outputs = call_reference(self._forward, *args, **kwargs)
        torch.clear_autocast_cache()
        return outputs if self._autocast is None else outputs_in_fp32(outputs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self._model, self._tensors, args, kwargs)


def _bare_reference(trainer: Any) -> Callable[[dict[str, torch.Tensor]], _Reference] | None:
    """Return a function that makes the reference model of `trainer`, with shapes only, from its tensors in a batch."""
    if (found := _reference_of(trainer)) is None:
        return None
    with _real(), torch.device("meta"):
        bare = _copied(found).train(found.training)
    return functools.partial(_Reference, bare, autocast_of(trainer.accelerator, found))


# The step (Rules 3 to 5)


def _step(
    trainer: Any,
    autocast: torch.dtype | None,
    reference: Callable[[dict[str, torch.Tensor]], _Reference] | None,
    model: nn.Module,
    batch: Batch,
) -> torch.Tensor:
    """Compute the loss as the Trainer does; serves as Workload.step."""
    stand_in = stand_in_of(trainer, model)
    vars(stand_in).update(around(trainer, model, batch.get(AROUND, {})))
    if reference is not None:
        stand_in.ref_model = reference(batch[REFERENCE])
    with as_in_training(model, autocast) as answers, _hooks_too(lambda: as_in_training(model, autocast), answers):
        loss = stand_in.compute_loss(model, dict(batch["inputs"]), num_items_in_batch=batch["items"])
        return loss if _is_scaled(trainer, batch) else loss / trainer.args.gradient_accumulation_steps


@contextlib.contextmanager
def as_in_training(model: nn.Module, autocast: torch.dtype | None) -> Iterator[_Answers]:
    """Run the forward of `model`, and nothing else, as accelerate does while the context is open. (Rules 3 and 5)

    There is one process: the others do not plan.
    """
    device, forward = next(model.parameters()).device.type, model.forward
    own, answers = "forward" in model.__dict__, _Answers()

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with answers.silent(), torch.autocast(device, dtype=autocast, enabled=autocast is not None):
            outputs = forward(*args, **kwargs)
        torch.clear_autocast_cache()
        return outputs if autocast is None else outputs_in_fp32(outputs)

    model.forward = wrapped
    try:
        with one_process(), torch.autocast(device, enabled=False), answers:
            yield answers
    finally:
        if own:
            model.forward = forward
        else:
            del model.__dict__["forward"]


@contextlib.contextmanager
def _hooks_too(context: Callable[[], contextlib.AbstractContextManager[Any]], answers: _Answers) -> Iterator[None]:
    """Run hooks that a loss registers meanwhile under `context`: hooks of cached losses call the model in backward."""
    know_functions()  # or they would keep this one, and with it the model
    register = torch.Tensor.register_hook

    def register_hook(tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> Any:
        def within(gradient: torch.Tensor) -> Any:
            with context():
                return hook(gradient)

        return register(tensor, hook if answers.are_silent else within)

    with mock.patch.object(torch.Tensor, "register_hook", register_hook):
        yield


def _is_scaled(trainer: Any, batch: Batch) -> bool:
    """Return whether `training_step` leaves the loss unscaled."""
    if trainer.args.gradient_accumulation_steps == 1:
        return True
    if (said := getattr(trainer, "loss_is_scaled_for_ga", None)) is not None:
        return bool(said)
    counted = trainer.model_accepts_loss_kwargs and batch["items"] is not None
    return bool(counted or trainer.compute_loss_func is not None)


def stand_in_of(trainer: Any, model: nn.Module) -> Any:
    """Copy `trainer` with another model and with own copies of its running notes."""
    made = copy.copy(trainer)
    made.__dict__.update({name: copy.deepcopy(value) for name, value in vars(trainer).items() if _is_notes(value)})
    made.state = dataclasses.replace(trainer.state)  # without notes beside its fields (axolotl's tokens)
    made.model = made.model_wrapped = model
    made.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    return made


def _is_notes(value: Any) -> bool:
    """Return whether `value` is a container of nothing but containers, numbers and text."""
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return isinstance(value, (list, set, collections.deque)) and all(map(_is_plain, value))


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str, type(None))) or _is_notes(value)


class _Answers(UnseenMode):
    """Answers questions about data that fake tensors do not have. (Rule 5)"""

    def __init__(self) -> None:
        super().__init__()
        self._silent = 0

    def silent(self) -> _Silent:
        return _Silent(self)

    @property
    def are_silent(self) -> bool:
        return self._silent > 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._silent or not isinstance(args[0] if args else None, FakeTensor):
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:
            with contextlib.suppress(DataDependentOutputException):  # unless its value is known
                return func(*args, **(kwargs or {}))
            return 1.0 if args[0].dtype.is_floating_point else 1
        if func is torch.ops.aten.index.Tensor:
            args = (args[0], [each for index in args[1] for each in _of_all(index)], *args[2:])
        return func(*args, **(kwargs or {}))


def _of_all(index: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Replace a mask by the indices of everything; other indices stay."""
    if index is None or index.dtype not in (torch.bool, torch.uint8):
        return [index]
    return [index.new_empty(index.numel(), dtype=torch.long) for _ in range(index.dim())]


@dataclasses.dataclass
class _Silent:
    answers: _Answers

    def __enter__(self) -> None:
        self.answers._silent += 1

    def __exit__(self, *error: object) -> None:
        self.answers._silent -= 1


# The optimizer


def _optimizer_of(trainer: Any) -> MakeOptimizer:
    """Return a function that makes an optimizer of the Trainer's class, with its settings."""
    made = trainer.optimizer
    made = getattr(made, "optimizer", made)  # accelerate's wrapper
    if made is not None:
        make, settings = type(made), dict(made.defaults)
    elif getattr(trainer, "optimizer_cls_and_kwargs", None) is not None:
        make, settings = trainer.optimizer_cls_and_kwargs
    else:
        make, settings = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    if not (isinstance(make, type) and issubclass(make, torch.optim.Optimizer)) or settings.keys() & _MODEL_KEYS:
        raise UsageError(
            f"the optimizer {getattr(make, '__name__', make)!r} of this Trainer is made out of the model itself, which "
            "remat cannot step on fakes; plan with a Workload whose `optimizer` stands for it."
        )
    taken = inspect.signature(make).parameters
    return functools.partial(make, **{name: value for name, value in settings.items() if name in taken})


_MODEL_KEYS = {"params", "model", "optimizer_dict"}
