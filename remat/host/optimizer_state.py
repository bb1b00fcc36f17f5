"""The optimizer's state on the host, but for the parameters that are being stepped.

    optimizer = remat.offload_optimizer(torch.optim.AdamW(model.parameters()))

Rule 1  Between two steps every large state tensor is on the host: what `optimizer.state` shows is a host tensor, so
        `state_dict` saves it, and loads it, as ever.
Rule 2  A step goes through the parameters in parts. While a part is stepped, its state is on the device and that of
        the next one is on its way; that of the one before has left. No more than two parts are there at a time.
Rule 3  What steps a part is the optimizer itself, in the form that it chooses, with the settings of the part's group.
        An optimizer of `torch.optim` treats every parameter by itself, so the numbers are bitwise those without.
Rule 4  A place on the host belongs to one tensor of the state. A tensor that others put into `optimizer.state` gets a
        place of its own, so a `state_dict` that was taken before stays what it was.

An optimizer goes over `self.param_groups` once a step. A hook before the step hands its function another `self`: the
same optimizer in all but one thing, its groups come part by part (`OptimizerView`). So hooks, closures, schedulers and
gradient scalers see the optimizer as it is, and nothing has to be put back after a step that fails.

The state moves once an optimizer step, whatever the number of micro-batches (Rajbhandari et al. 2021, ZeRO-Infinity,
steps optimizers part by part as well; there each rank has its own share).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from remat._torch.training import is_wrapper
from remat.errors import UsageError
from remat.host.copies import Copies, Copy, copies_on

PART_BYTES = 32 << 20  # parameters of one part, unless one alone is larger
SMALL_BYTES = 1024  # a smaller state tensor, a step counter say, stays where it is

OFFLOAD = "have its state on the host"
_WHOLE = ("LBFGS", "SparseAdam")  # a step that goes over the parameters again and again; sparse gradients
_Optimizer = TypeVar("_Optimizer", bound=torch.optim.Optimizer)
_offloaded: weakref.WeakKeyDictionary[torch.optim.Optimizer, OffloadedState] = weakref.WeakKeyDictionary()


def offload_optimizer(optimizer: _Optimizer) -> _Optimizer:
    """Keep the state of `optimizer` in the host's memory between its steps.

    The optimizer steps as before. Existing state moves at once. On a CPU nothing changes. Loading a `state_dict`
    brings all state to the device for a moment, as torch does. A copy of the optimizer, and an unpickled one, is not
    offloaded. A step under `torch.compile` runs uncompiled.

    Args:
        optimizer: An optimizer of `torch.optim`.

    Returns:
        The same optimizer.

    Raises:
        UsageError: The class is not one of `torch.optim` that steps every parameter independently, parameters are
            sharded, or `differentiable=True`.

    Example:
        >>> optimizer = remat.offload_optimizer(torch.optim.AdamW(model.parameters()))
    """
    if not isinstance(optimizer, torch.optim.Optimizer) or offloaded_state(optimizer) is None:
        OffloadedState(optimizer)
    return optimizer


def offloaded_state(optimizer: torch.optim.Optimizer) -> OffloadedState | None:
    """Return the state of `optimizer` if it is on the host."""
    return _offloaded.get(optimizer)


def is_offloaded(parameter: nn.Parameter) -> bool:
    """Return whether some optimizer of `parameter` has its state on the host."""
    groups = (group for optimizer in list(_offloaded) for group in optimizer.param_groups)
    return any(parameter is each for group in groups for each in group["params"])


def can_be_offloaded(optimizer: Any) -> bool:
    """Return whether `optimizer` is known to step every parameter by itself."""
    kind = type(optimizer)
    known = {value for value in vars(torch.optim).values() if isinstance(value, type)}
    return isinstance(optimizer, torch.optim.Optimizer) and kind in known and kind.__name__ not in _WHOLE


@dataclasses.dataclass(frozen=True, eq=False)
class _OnHost:
    """A state tensor on the host; `shown` takes its place in the optimizer's state."""

    shown: Tensor
    host: Any


@dataclasses.dataclass(eq=False)
class _MovingState:
    """A state tensor that is moving, with all of its storage on the device."""

    parameter: nn.Parameter
    name: str
    flat: Tensor
    copy: Copy


@dataclasses.dataclass(eq=False)
class _Part:
    """Some parameters of a group, stepped together; without a group, one whose gradient is still to come.

    arriving  their state, once it is moving
    """

    group: dict[str, Any]
    parameters: list[nn.Parameter]
    following: _Part | None = None
    arriving: list[_MovingState] | None = None


class OffloadedState:
    """The state of an optimizer on the host, see `offload_optimizer`.

    copies      makes the copies; chosen for the device of each parameter by default
    part_bytes  of the parameters of a part
    """

    def __init__(self, optimizer: torch.optim.Optimizer, copies: Copies | None = None, part_bytes: int = PART_BYTES):
        require_steps_by_parameter(optimizer, OFFLOAD)
        self.copies = copies
        self.part_bytes = part_bytes
        self._copies: dict[torch.device, Copies] = {}
        self._on_host: dict[nn.Parameter, dict[str, _OnHost]] = {}
        self._brought: dict[tuple[nn.Parameter, str], Tensor] = {}  # tensors in the state that were fetched
        self._leaving: list[_MovingState] = []
        self._parts: list[_Part] = []
        self._reference = weakref.ref(optimizer)
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_load_state_dict_post_hook(self._bring_out)
        optimizer.register_state_dict_pre_hook(self._synchronize)
        _offloaded[optimizer] = self
        self._bring_out(optimizer)

    def on_device(self) -> list[Tensor]:
        """List the state that is not on the host."""
        shown = {id(each.shown) for found in self._on_host.values() for each in found.values()}
        values = (value for state in self._optimizer.state.values() for value in state.values())
        return [value for value in values if isinstance(value, Tensor) and id(value) not in shown]

    @property
    def host_bytes(self) -> int:
        """The bytes on the host."""
        return sum(each.shown.nbytes for found in self._on_host.values() for each in found.values())

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        found = self._reference()
        assert found is not None
        return found

    # A step (Rule 2)

    @torch.compiler.disable
    def _begin(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Replace the optimizer in a step's arguments by one whose groups come part by part."""
        require_steps_by_parameter(optimizer, OFFLOAD)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise UsageError("a step whose state is on the host cannot be captured in a CUDA graph.")
        self._stop()  # of a step that failed
        return (OptimizerView(optimizer, lambda: _Stream(self.stream())), *args[1:]), kwargs

    def stream(self) -> Iterator[dict[str, Any]]:
        """Yield the optimizer's groups part by part, each with its state on the device."""
        self._parts = self._split(self._optimizer.param_groups)
        try:
            for part in self._parts:
                self._arrive(part)
                given = {**part.group, "params": part.parameters}
                yield given
                part.group.update({name: value for name, value in given.items() if name != "params"})
                self._leave(part)
        finally:
            self._stop()
        self._forget_what_is_gone()

    @contextlib.contextmanager
    def here(self, parameter: nn.Parameter, following: nn.Parameter | None) -> Iterator[None]:
        """Have the state of `parameter`, whose gradient exists, on the device, and begin to fetch that of `following`.

        Backward goes on between two such parameters. `step()` frees state that was fetched in vain.
        """
        coming = {id(each.parameters[0]): each for each in self._parts}
        part = coming.pop(id(parameter), _Part({}, [parameter]))
        if following is not None:
            part.following = coming.setdefault(id(following), _Part({}, [following]))
        self._parts = list(coming.values())
        self._arrive(part)
        yield
        self._leave(part)

    def _split(self, groups: Iterable[dict[str, Any]]) -> list[_Part]:
        """Split all parameters into parts in order, without mixing groups."""
        found: list[_Part] = []
        for group in groups:
            of_group: list[list[nn.Parameter]] = [[]]
            size = 0
            for parameter in group["params"]:
                if size and size + parameter.nbytes > self.part_bytes:
                    of_group.append([])
                    size = 0
                of_group[-1].append(parameter)
                size += parameter.nbytes
            found += [_Part(group, parameters) for parameters in of_group]
        for part, following in itertools.pairwise(found):
            if not {*map(id, part.parameters)} & {*map(id, following.parameters)}:  # stepped twice: torch only warns
                part.following = following
        return found

    def _arrive(self, part: _Part) -> None:
        """Have the state of `part` on the device, and begin to fetch that of the part after it."""
        self._settle()
        if part.arriving is None:
            self._fetch(part)
        if part.following is not None and part.following.arriving is None:
            self._fetch(part.following)
        for each in part.arriving or ():
            self._copies_on(each.flat.device).wait(each.copy)
            state = self._optimizer.state[each.parameter]
            back = _like(each.flat, state[each.name])
            state[each.name] = self._brought[each.parameter, each.name] = back
        part.arriving = None

    def _leave(self, part: _Part) -> None:
        """Begin to bring the state of `part` to the host."""
        for parameter in part.parameters:
            for name, value in self._optimizer.state.get(parameter, {}).items():
                if self._is_moved(value, parameter, name):
                    self._leaving.append(self._send(parameter, name, value))
        self._brought.clear()

    def _stop(self) -> None:
        """Drop state that is moving to the device, and complete all copies to the host."""
        for part in self._parts:
            for each in part.arriving or ():
                self._copies_on(each.flat.device).abandon(each.copy)
            part.arriving = None
        self._parts = []
        self._settle()
        self._synchronize()

    def _synchronize(self, _: object = None) -> None:
        """Make the state on the host complete for readers."""
        for copies in [*self._copies.values(), *([self.copies] if self.copies is not None else [])]:
            copies.synchronize()

    # Single tensors

    def _is_moved(self, value: Any, parameter: nn.Parameter, name: str) -> bool:
        if not isinstance(value, Tensor) or is_wrapper(value) or value.layout is not torch.strided:
            return False
        known = self._on_host.get(parameter, {}).get(name)
        if known is not None and value is known.shown:
            return False
        whole = value.untyped_storage().nbytes() == value.nbytes
        return value.device == parameter.device and whole and value.nbytes >= SMALL_BYTES

    def _fetch(self, part: _Part) -> None:
        """Begin to fetch the state of those parameters of `part` that will be stepped."""
        part.arriving = []
        for parameter in part.parameters:
            if parameter.grad is None and part.group:
                continue
            state, copies = self._optimizer.state.get(parameter, {}), self._copies_on(parameter.device)
            for name, each in self._on_host.get(parameter, {}).items():
                if state.get(name) is each.shown and not any(
                    other.parameter is parameter and other.name == name for other in part.arriving
                ):
                    flat = copies.room_for(each.shown.numel(), each.shown.dtype, parameter.device)
                    part.arriving.append(_MovingState(parameter, name, flat, copies.back(each.host, 0, flat)))

    def _send(self, parameter: nn.Parameter, name: str, value: Tensor) -> _MovingState:
        """Begin to copy `value` to its former place on the host, or to a new one. (Rule 4)"""
        copies, places = self._copies_on(value.device), self._on_host.setdefault(parameter, {})
        known = places.get(name)
        if known is None or self._brought.get((parameter, name)) is not value:
            host = copies.host(value.nbytes)
            known = places[name] = _OnHost(_like(host.view(value.dtype), value), host)
        flat = value.detach().as_strided((value.numel(),), (1,), 0)
        self._optimizer.state[parameter][name] = known.shown
        return _MovingState(parameter, name, flat, copies.out(flat, known.host, 0))

    def _settle(self) -> None:
        """Free the device memory of state that has left."""
        for each in self._leaving:
            copies = self._copies_on(each.flat.device)
            copies.wait(each.copy)
            copies.let_go(each.flat)
        self._leaving.clear()

    def _bring_out(self, optimizer: torch.optim.Optimizer) -> None:
        """Move everything to the host: after a `state_dict` was loaded, and when the state existed before."""
        for part in self._split(optimizer.param_groups):
            self._leave(part)
            self._settle()
        self._stop()
        self._forget_what_is_gone()

    def _forget_what_is_gone(self) -> None:
        """Drop places on the host whose values are no longer in the state."""
        state = self._optimizer.state
        for parameter, places in list(self._on_host.items()):
            of_it = state.get(parameter, {})
            left = {name: each for name, each in places.items() if of_it.get(name) is each.shown}
            if left:
                self._on_host[parameter] = left
            else:
                del self._on_host[parameter]

    def _copies_on(self, device: torch.device) -> Copies:
        if self.copies is not None:
            return self.copies
        if device not in self._copies:
            self._copies[device] = copies_on(device, shares_host=False)
        return self._copies[device]


def _like(flat: Tensor, model: Tensor) -> Tensor:
    """Return the elements of `flat` in the shape of `model`."""
    return flat.as_strided(model.shape, model.stride())


class _Stream:
    """An iterator that is not traced: it allocates and copies while the step that uses it may be compiled."""

    def __init__(self, parts: Iterator[dict[str, Any]]):
        self._parts = parts

    def __iter__(self) -> _Stream:
        return self

    @torch.compiler.disable
    def __next__(self) -> dict[str, Any]:
        return next(self._parts)


class OptimizerView:
    """The optimizer as its step function sees it: iterating over its groups gives `groups`."""

    def __init__(self, optimizer: torch.optim.Optimizer, groups: Callable[[], Iterable[dict[str, Any]]]):
        vars(self).update(_optimizer=optimizer, _groups=groups)

    @property
    def param_groups(self) -> Iterable[dict[str, Any]]:
        return self._groups()

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_optimizer"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._optimizer, name, value)


def require_steps_by_parameter(optimizer: torch.optim.Optimizer, what: str) -> None:
    """Raise UsageError unless `optimizer` steps every parameter by itself, as `what` requires."""
    kind = type(optimizer)
    if kind.__name__ == "SparseAdam":
        raise UsageError(f"SparseAdam cannot {what}: its gradients are sparse.")
    if not can_be_offloaded(optimizer):
        raise UsageError(
            f"{kind.__module__}.{kind.__qualname__} cannot {what}: its step may need all parameters at once. Every "
            "class of torch.optim can, but for LBFGS and SparseAdam. Master weights and other wrappers cannot."
        )
    if any(is_wrapper(p) for group in optimizer.param_groups for p in group["params"]):
        raise UsageError(f"an optimizer of sharded parameters cannot {what}; each rank has its own share already.")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UsageError(f"an optimizer with `differentiable=True` cannot {what}.")
