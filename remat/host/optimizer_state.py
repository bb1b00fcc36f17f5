"""The optimizer's state on the host, but for the parameters that are being stepped.

    optimizer = remat.offload_optimizer(torch.optim.AdamW(model.parameters()))

Rule 1  Between two steps every large state tensor lies on the host: what `optimizer.state` shows is a host tensor, so
        `state_dict` saves it, and loads it, as ever.
Rule 2  A step goes through the parameters in parts. While a part is stepped, its state is on the device and that of
        the next one is on its way; that of the one before has left. No more than two parts are there at a time.
Rule 3  What steps a part is the optimizer itself, in the form that it chooses, with the settings of the part's group.
        An optimizer of `torch.optim` treats every parameter by itself, so the numbers are bitwise those without.

An optimizer goes over `param_groups` once a step. While it does, they are a `_Stream`: a list of the same groups, that
gives them part by part, and brings the state when the parameters of a part are asked for. Everything around the step
stays as it is: hooks, closures, gradient scalers, and schedulers, built before or after.

The state moves once an optimizer step, whatever the number of micro-batches (Rajbhandari et al. 2021, ZeRO-Infinity,
steps optimizers part by part as well; there each rank has its own share).
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from remat._torch.training import is_wrapper
from remat.errors import UsageError
from remat.host.copies import Copies, Copy, copies_on

PART_BYTES = 32 << 20  # parameters of one part, unless one alone is larger
SMALL_BYTES = 1024  # a smaller state tensor, a step counter say, stays where it is

_Optimizer = TypeVar("_Optimizer", bound=torch.optim.Optimizer)
_offloaded: weakref.WeakKeyDictionary[torch.optim.Optimizer, OffloadedState] = weakref.WeakKeyDictionary()


def offload_optimizer(optimizer: _Optimizer) -> _Optimizer:
    """Keep the state of `optimizer` on the host between its steps; returns `optimizer`, which steps as before.

    Call it before the first step, or after one: state that is there moves at once. On a CPU it changes nothing that
    matters. Loading a `state_dict` brings all state to the device for a moment, as torch does.

    Raises UsageError for an optimizer that is not exactly one of `torch.optim`, for its step may do what cannot be done
    in parts; and for parameters that are sharded tensors.
    """
    if offloaded_state(optimizer) is None:
        OffloadedState(optimizer)
    return optimizer


def offloaded_state(optimizer: torch.optim.Optimizer) -> OffloadedState | None:
    """The state of `optimizer` where it is on the host."""
    return _offloaded.get(optimizer)


def is_offloaded(parameter: nn.Parameter) -> bool:
    """Whether some optimizer that has `parameter` has its state on the host."""
    groups = (group for optimizer in list(_offloaded) for group in optimizer.param_groups)
    return any(parameter is each for group in groups for each in group["params"])


@dataclasses.dataclass(frozen=True, eq=False)
class _OnHost:
    """A state tensor that is on the host; `shown` is what the optimizer's state has in its place."""

    shown: Tensor
    host: Any


@dataclasses.dataclass
class _Moving:
    """A state tensor on its way, with all of its storage on the device."""

    parameter: nn.Parameter
    name: str
    flat: Tensor
    copy: Copy


class OffloadedState:
    """See `offload_optimizer`.

    copies      who copies; for the device of each parameter by default
    part_bytes  of the parameters of a part
    """

    def __init__(self, optimizer: torch.optim.Optimizer, copies: Copies | None = None, part_bytes: int = PART_BYTES):
        _require(optimizer)
        self.copies = copies
        self.part_bytes = part_bytes
        self._copies: dict[torch.device, Copies] = {}
        self._on_host: dict[nn.Parameter, dict[str, _OnHost]] = {}
        self._leaving: list[_Moving] = []
        self._arriving: dict[int, list[_Moving]] = {}  # by number of their part
        self._state = weakref.ref(optimizer)
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._end)
        optimizer.register_load_state_dict_post_hook(self._bring_out)
        _offloaded[optimizer] = self
        self._bring_out(optimizer)

    def on_device(self) -> list[Tensor]:
        """The state that is not on the host."""
        optimizer = self._optimizer
        shown = {id(each.shown) for found in self._on_host.values() for each in found.values()}
        values = (value for state in optimizer.state.values() for value in state.values())
        return [value for value in values if isinstance(value, Tensor) and id(value) not in shown]

    @property
    def host_bytes(self) -> int:
        """What lies on the host."""
        return sum(each.shown.nbytes for found in self._on_host.values() for each in found.values())

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        found = self._state()
        assert found is not None
        return found

    # A step (Rule 2)

    def _begin(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Before a step: its groups are a stream, but for its closure, which computes gradients."""
        if not isinstance(optimizer.param_groups, _Stream):  # one that is left of a step that failed
            optimizer.param_groups = _Stream(optimizer.param_groups, self)
        return tuple(map(self._aside, args)), {name: self._aside(value) for name, value in kwargs.items()}

    def _aside(self, value: Any) -> Any:
        """`value`; if it is a closure, one that runs while the groups are plain."""
        if not callable(value) or isinstance(value, torch.optim.Optimizer):
            return value

        @functools.wraps(value)
        def closure() -> Any:
            optimizer = self._optimizer
            stream = optimizer.param_groups
            optimizer.param_groups = stream.groups if isinstance(stream, _Stream) else stream
            try:
                return value()
            finally:
                optimizer.param_groups = stream

        return closure

    def _end(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._settle()
        for copies in self._copies.values():
            copies.synchronize()  # whoever reads the state on the host finds it there
        if isinstance(optimizer.param_groups, _Stream):
            optimizer.param_groups = optimizer.param_groups.groups

    def parts(self, groups: Iterable[dict[str, Any]]) -> list[_Part]:
        """Parameters that have a gradient, in order, a group's never together with another's."""
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
            found += [_Part(group, parameters, self) for parameters in of_group]
        for number, part in enumerate(found):
            part.number, part.following = number, found[number + 1] if number + 1 < len(found) else None
        return found

    def arrive(self, part: _Part) -> None:
        """Have the state of `part` on the device, and that of the part after it on its way."""
        self._settle()
        moving = self._arriving.pop(part.number, None)
        if moving is None:
            moving = self._fetch(part)
        if part.following is not None:
            self._arriving[part.following.number] = self._fetch(part.following)
        for each in moving:
            self._copies_on(each.flat.device).wait(each.copy)
            state = self._optimizer.state[each.parameter]
            state[each.name] = _like(each.flat, state[each.name])

    def leave(self, part: _Part) -> None:
        """Begin to bring the state of `part` to the host."""
        for parameter in part.parameters:
            for name, value in self._optimizer.state.get(parameter, {}).items():
                if self._is_moved(value, parameter):
                    self._leaving.append(self._send(parameter, name, value))

    def forget_arrivals(self) -> None:
        """A step has stopped half way: what was on its way is not asked for."""
        for moving in self._arriving.values():
            for each in moving:
                self._copies_on(each.flat.device).abandon(each.copy)
        self._arriving.clear()

    # Single tensors

    def _is_moved(self, value: Any, parameter: nn.Parameter) -> bool:
        if not isinstance(value, Tensor) or is_wrapper(value) or value.layout is not torch.strided:
            return False
        held = self._on_host.get(parameter, {}).values()
        whole = value.untyped_storage().nbytes() == value.nbytes
        return (
            value.device == parameter.device
            and whole
            and value.nbytes >= SMALL_BYTES
            and not any(value is each.shown for each in held)
        )

    def _fetch(self, part: _Part) -> list[_Moving]:
        """Begin to bring back the state of `part`: of what will be stepped."""
        found = []
        for parameter in part.parameters:
            if parameter.grad is None:
                continue
            state = self._optimizer.state.get(parameter, {})
            for name, each in self._on_host.get(parameter, {}).items():
                if state.get(name) is each.shown:
                    copies = self._copies_on(parameter.device)
                    flat = copies.room_for(each.shown.numel(), each.shown.dtype, parameter.device)
                    found.append(_Moving(parameter, name, flat, copies.back(each.host, 0, flat)))
        return found

    def _send(self, parameter: nn.Parameter, name: str, value: Tensor) -> _Moving:
        copies = self._copies_on(value.device)
        held = self._on_host.setdefault(parameter, {})
        known = held.get(name)
        if known is None or known.shown.nbytes != value.nbytes or known.shown.dtype != value.dtype:
            host = copies.host(value.nbytes)
            known = held[name] = _OnHost(_like(host.view(value.dtype), value), host)
        with torch.no_grad():
            flat = value.detach().as_strided((value.numel(),), (1,), 0)
        self._optimizer.state[parameter][name] = known.shown
        return _Moving(parameter, name, flat, copies.out(flat, known.host, 0))

    def _settle(self) -> None:
        """Let go of what has left."""
        for each in self._leaving:
            copies = self._copies_on(each.flat.device)
            copies.wait(each.copy)
            copies.let_go(each.flat)
        self._leaving.clear()

    def _bring_out(self, optimizer: torch.optim.Optimizer) -> None:
        """Everything to the host: after a `state_dict` was loaded, and where training had begun before."""
        for part in self.parts(optimizer.param_groups):
            self.leave(part)
            self._settle()
        for copies in self._copies.values():
            copies.synchronize()

    def _copies_on(self, device: torch.device) -> Copies:
        if self.copies is not None:
            return self.copies
        if device not in self._copies:
            self._copies[device] = copies_on(device, shares_host=False)
        return self._copies[device]


def _like(flat: Tensor, model: Tensor) -> Tensor:
    """The elements of `flat` in the shape of `model`."""
    return flat.as_strided(model.shape, model.stride())


class _Part(dict[str, Any]):
    """A group of an optimizer with some of its parameters: asking for them brings their state."""

    number: int
    following: _Part | None

    def __init__(self, group: dict[str, Any], parameters: list[nn.Parameter], state: OffloadedState):
        super().__init__(group, params=parameters)
        self.parameters = parameters
        self._group, self._state, self._asked = group, state, False

    def __getitem__(self, name: str) -> Any:
        if name == "params" and not self._asked:
            self._asked = True
            self._state.arrive(self)
        return super().__getitem__(name)

    def end(self) -> None:
        """It was stepped, if anybody has asked for its parameters."""
        if self._asked:
            self._state.leave(self)
        self._asked = False


class _Stream(list[Any]):
    """The groups of an optimizer, given part by part where somebody goes through them."""

    def __init__(self, groups: list[dict[str, Any]], state: OffloadedState):
        super().__init__(groups)
        self.groups, self._state = groups, state

    def __iter__(self) -> Iterator[Any]:
        try:
            for part in self._state.parts(self.groups):
                try:
                    yield part
                finally:
                    part.end()
        finally:
            self._state.forget_arrivals()


def can_be_offloaded(optimizer: Any) -> bool:
    """Whether it is known to step every parameter by itself."""
    kind = type(optimizer)
    known = {value for value in vars(torch.optim).values() if isinstance(value, type)}
    return isinstance(optimizer, torch.optim.Optimizer) and kind in known and kind.__name__ not in _WHOLE


def _require(optimizer: torch.optim.Optimizer) -> None:
    if not can_be_offloaded(optimizer):
        raise UsageError(
            f"the state of {type(optimizer).__name__} cannot be offloaded: its step may need all parameters at "
            "once. Those of torch.optim can, but for LBFGS and SparseAdam; of a wrapper, offload the optimizer inside."
        )
    if any(is_wrapper(p) for group in optimizer.param_groups for p in group["params"]):
        raise UsageError("the state of sharded parameters cannot be offloaded; each rank has its own share already.")


_WHOLE = ("LBFGS", "SparseAdam")  # a step that goes over the parameters again and again; sparse gradients
