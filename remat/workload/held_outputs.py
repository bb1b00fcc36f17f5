"""Holding: what a training loop keeps of a model's outputs from one step into the next.

In `logits, loss = model(x, y)` the names go on holding the last outputs while the next forward runs, until it returns.
So the logits are there twice when a forward ends, and once through backward and while the optimizer runs. A workload's
`step` is a function, whose names go when it returns; a loop written out is not.

`HeldOutputs` does what such a loop does, for records, replays and measurements of a loop that says so
(`TrainingLoop.holds`). `LastOutputs` notices a loop that does it and has not said so. It holds weak references only.

Every loop written out holds the last loss, and with it the graph that its backward has gone through. That keeps leaves
that the step has made itself (`x.requires_grad_()`), with their gradients. And the loss itself is a number with the
storage of a whole output where torch reduces in place (`F.mse_loss`): `HeldLoss`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from remat._torch.recording import nodes_behind, unwrapped
from remat._torch.training import is_wrapper

SMALLEST_BYTES = 4096  # a storage below that is no output that matters: a loss, a count
DEEPEST = 4  # containers within one another that are looked into


class HeldOutputs:
    """The outputs of each call of a model, held until the same call of the next step returns."""

    def __init__(self) -> None:
        self._outputs: list[Any] = []
        self._calls = 0
        self._replacing: Callable[[Callable[[], None]], None] | None = None

    @contextlib.contextmanager
    def catching(self, model: nn.Module) -> Iterator[None]:
        """Hold the outputs of `model` during a step."""
        self._calls = 0
        handle = model.register_forward_hook(self._returned)
        try:
            yield
        finally:
            handle.remove()

    @contextlib.contextmanager
    def told(self, replacing: Callable[[Callable[[], None]], None]) -> Iterator[None]:
        """Call `replacing` with a function that frees the old outputs, in place of freeing them."""
        self._replacing = replacing
        try:
            yield
        finally:
            self._replacing = None

    def let_go(self) -> None:
        self._outputs.clear()

    def _returned(self, model: nn.Module, args: Any, outputs: Any) -> None:
        call, self._calls = self._calls, self._calls + 1
        if call == len(self._outputs):
            self._outputs.append(outputs)
            return

        def replace() -> None:
            self._outputs[call] = outputs

        if self._replacing is None:
            replace()
        else:
            self._replacing(replace)


def keeps_output(loss: torch.Tensor) -> bool:
    """Return whether a loss has the storage of more than its number, at any batch size alike."""
    storage = _storage_of(loss)
    return storage is not None and storage.nbytes() > loss.nbytes


class HeldLoss:
    """The last loss, with its graph, held until the next forward returns."""

    def __init__(self) -> None:
        self._root: Any = None
        self._loss: torch.Tensor | None = None
        self._keeps: bool | None = None

    def hold(self, loss: torch.Tensor) -> None:
        self._root, self._loss = loss.grad_fn, loss if keeps_output(loss) else None

    def let_go(self) -> None:
        self._root = self._loss = None

    def keeps_tensors(self, model: nn.Module) -> bool:
        """Return whether the loss of a step of `model` keeps tensors after its backward; it is looked through once."""
        if self._loss is not None:
            self._keeps = True
        if self._keeps is None and self._root is not None:
            known = {id(parameter) for parameter in model.parameters()}
            held = (tensor for node in nodes_behind([self._root]) for tensor in _kept_by(node))
            self._keeps = any(id(tensor) not in known for tensor in held)
        return bool(self._keeps)


def _kept_by(node: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that a node of a graph keeps besides those that it has saved for backward."""
    for value in tree_leaves((getattr(node, "variable", None), dict(getattr(node, "__dict__", {})))):
        if isinstance(value, torch.Tensor):
            yield value


@dataclasses.dataclass(frozen=True)
class _Output:
    """One storage of an output: its name, its size, a weak reference, and whether it is that of a loss."""

    name: str
    size_bytes: int
    storage: StorageWeakRef
    is_loss: bool


COLLECTIONS = 3  # of cyclic garbage, at most


class LastOutputs:
    """The outputs of a model's last forwards, as far as they are kept."""

    def __init__(self) -> None:
        self._through: tuple[int, dict[str, int]] = 0, {}  # see `kept_through_backward`
        self._peak = self._budget = 0
        self._forwards: list[list[_Output]] = []
        self._collections = COLLECTIONS

    def note(self, outputs: Any, given: Any, peak_bytes: int = 0, budget_bytes: int = 0) -> None:
        """Note that a forward has returned `outputs`, without those that it was `given`, which its caller owns.

        peak_bytes  of its backward, without them        budget_bytes  of the step
        """
        self._peak, self._budget = peak_bytes, budget_bytes
        known = set(_addresses(tree_leaves(given)))
        found = []
        for name, tensor in output_tensors(outputs):
            storage = _storage_of(tensor)
            if storage is not None and storage.nbytes() >= SMALLEST_BYTES and storage._cdata not in known:
                known.add(storage._cdata)
                found.append(_Output(name, storage.nbytes(), StorageWeakRef(storage), _is_loss(tensor)))
        self._forwards.append(found)

    def alive(self, model: nn.Module, *, but_last: bool = False, but_losses: int = 0) -> dict[str, int]:
        """Return the bytes by name of outputs that are still alive, without parameters and buffers of `model`.

        A reference cycle may keep an output until Python's collector runs, so the first few times it is run.

        but_last  leave out those of the last forward too        but_losses  and losses of so many last ones
        """
        sizes = self._sizes(model, but_last, but_losses)
        if sizes and self._collections:
            self._collections -= 1
            gc.collect()
            sizes = self._sizes(model, but_last, but_losses)
        return sizes

    def backward_ends(self, model: nn.Module, forwards: int = 1) -> None:
        """Note what is kept as a backward through `forwards` has ended, besides their losses, if there was no room."""
        if self._peak + sum(output.size_bytes for found in self._forwards for output in found) <= self._budget:
            return
        sizes = self._sizes(model, but_last=False, but_losses=forwards)
        if (reached := self._peak + sum(sizes.values())) > max(self._budget, self._through[0]):
            self._through = reached, sizes

    def kept_through_backward(self) -> tuple[int, dict[str, int]]:
        """Return the peak with the outputs that were kept until a backward had ended, and their bytes by name.

        Of backwards since the last call; 0 and none where they kept the budget.
        """
        found, self._through = self._through, (0, {})
        return found

    def _sizes(self, model: nn.Module, but_last: bool, but_losses: int) -> dict[str, int]:
        kept = [[output for output in found if not output.storage.expired()] for found in self._forwards]
        new = len(kept) - but_losses  # the first forward whose loss any loop holds
        late = [
            output
            for i, found in enumerate(kept[: -1 if but_last else None])
            for output in found
            if i < new or not output.is_loss
        ]
        self._forwards = [found for found in kept[:-1] if found] + kept[-1:]
        if not late:
            return {}
        own = set(_addresses((*model.parameters(), *model.buffers())))
        sizes: dict[str, int] = {}
        for output in late:
            if output.storage.cdata not in own:
                sizes[output.name] = sizes.get(output.name, 0) + output.size_bytes
        return sizes

    def forget(self) -> None:
        self._forwards.clear()


def _is_loss(tensor: torch.Tensor) -> bool:
    """Return whether an output is a number to differentiate (`F.mse_loss` leaves it a large storage)."""
    return tensor.requires_grad and tensor.numel() == 1 and not tensor._is_view()


def _storage_of(value: Any) -> torch.UntypedStorage | None:
    """Return the storage of a tensor; None if it has none of its own (sparse tensors, wrappers such as DTensor)."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return None if is_wrapper(value) else unwrapped(value).untyped_storage()


def _addresses(values: Iterable[Any]) -> Iterator[int]:
    """Iterate over the addresses of tensors' storages."""
    return (storage._cdata for value in values if (storage := _storage_of(value)) is not None)


def output_tensors(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that a forward returns, each with its key, field or position."""
    if isinstance(value, torch.Tensor):
        yield name or "the output", value
    elif depth < DEEPEST:
        for part, inner in _parts(value):
            yield from output_tensors(inner, f"{name}{part}" if name else part.strip("."), depth + 1)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f".{key}", inner) for key, inner in value.items())
    elif isinstance(value, (tuple, list)):
        fields = getattr(value, "_fields", None)
        yield from ((f".{fields[i]}" if fields else f"[{i}]", inner) for i, inner in enumerate(value))
    else:
        yield from ((f".{field}", inner) for field, inner in fields_of(value).items())


def fields_of(value: Any) -> dict[str, Any]:
    """Return the attributes of a dataclass or another object, those in slots too; none of a module or a class."""
    if isinstance(value, (nn.Module, type)):
        return {}
    slots = (name for kind in type(value).__mro__ for name in slots_of(kind))
    return {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots if hasattr(value, name)}}


@functools.cache
def slots_of(kind: type) -> list[str]:
    """List the slots of a class, by name."""
    names = vars(kind).get("__slots__", ())
    names = (names,) if isinstance(names, str) else names
    return [name for name in names if isinstance(vars(kind).get(name), types.MemberDescriptorType)]


def parameters_reached(model: nn.Module, outputs: Sequence[torch.Tensor]) -> frozenset[str]:
    """Return the names of the parameters that a backward from `outputs` reaches."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    leaves = (getattr(node, "variable", None) for node in nodes_behind([tensor.grad_fn for tensor in outputs]))
    return frozenset(names[id(leaf)] for leaf in leaves if id(leaf) in names)
