"""A trace for another device than the one that its tensors are on.

While Dynamo traces, tensors say that they are on the other device, and torch says so of itself. In graphs, and where
torch is asked about a type of device, the other one is replaced by the one that the tensors are on. So code takes the
branches of the other device, and nothing is ever made there.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol
from unittest import mock

import torch
from torch import fx

from remat._torch.door import internal
from remat._torch.dynamo import Translator, Variable, constant
from remat.errors import CaptureError

_PURPOSE = "capture a forward as another device would run it"


class OtherDevice(Protocol):
    """Another device, for a trace.

    device      the other device        here  the type of the device that holds the tensors
    capability  its compute capability
    kernels     context in which values of nodes are computed
    here_for    replaces the other device by the device at hand
    """

    @property
    def device(self) -> torch.device: ...
    @property
    def here(self) -> str: ...
    @property
    def capability(self) -> tuple[int, int]: ...
    @property
    def kernels(self) -> Callable[[], contextlib.AbstractContextManager[Any]]: ...
    def here_for(self, named: Any) -> Any: ...


Find = Callable[[Any], OtherDevice | None]  # from Dynamo's `OutputGraph`, of which a translator has one


Around = Callable[[Any, fx.Node], contextlib.AbstractContextManager[Any]]  # of an `OutputGraph` and a node of it


@contextlib.contextmanager
def traced_elsewhere(find: Find, around: Around) -> Iterator[None]:
    """Trace for the device that `find` returns for a trace, while the context is open.

    around  makes the context in which the value of a node is computed, whatever the device
    """
    patches = (
        *(_devices_of_tensors, _devices_in_graphs, _questions_to_torch, _autocast_regions),
        *(functools.partial(_values_of_nodes, around), _modes_untraced),
    )
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch(find))
        yield


@contextlib.contextmanager
def _devices_of_tensors(find: Find) -> Iterator[None]:
    """Let tensors on the device at hand report the other device."""
    variable = internal("_dynamo.variables.tensor.TensorVariable", _PURPOSE)

    def answered(original: Callable[..., Any]) -> Callable[..., Any]:
        def answer(self: Variable, tx: Translator) -> Any:
            elsewhere = find(tx.output)
            if elsewhere is None or self.device is None or self.device.type != elsewhere.here:
                return original(self, tx)
            moved = copy.copy(self)
            moved.device = elsewhere.device
            return original(moved, tx)

        return answer

    names = ("method_attr_device", "method_attr_is_cuda", "method_get_device")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(variable, name, answered(getattr(variable, name))))
        is_cpu = answered(lambda self, tx: self.device and constant(self.device.type == "cpu"))
        stack.enter_context(mock.patch.object(variable, "method_attr_is_cpu", is_cpu, create=True))
        yield


@contextlib.contextmanager
def _devices_in_graphs(find: Find) -> Iterator[None]:
    """Replace the other device in arguments of nodes by the device at hand."""
    tracer = internal("_dynamo.output_graph.SubgraphTracer", _PURPOSE)
    original = tracer.create_node

    def create_node(self: Any, kind: str, *given: Any, **named: Any) -> Any:
        if kind.startswith("call_") and (elsewhere := find(self.output_graph)) is not None:
            given, named = fx.node.map_aggregate((given, named), elsewhere.here_for)
        return original(self, kind, *given, **named)

    with mock.patch.object(tracer, "create_node", create_node):
        yield


@contextlib.contextmanager
def _questions_to_torch(find: Find) -> Iterator[None]:
    """Answer questions to torch, while it is traced, as on the other device."""
    variable = internal("_dynamo.variables.TorchInGraphFunctionVariable", _PURPOSE)
    tracked = internal("_dynamo.variables.base.VariableTracker", _PURPOSE)
    original = variable.call_function

    def call_function(self: Variable, tx: Translator, args: Any, kwargs: Any) -> Variable:
        elsewhere = find(tx.output)
        if elsewhere is None or elsewhere.device.type != "cuda":
            return original(self, tx, args, kwargs)
        if self.value in (answers := _answers(elsewhere)):
            return tracked.build(tx, answers[self.value])
        if self.value in _AUTOCAST:
            given = [each.as_python_constant() for each in (*args, *kwargs.values()) if each.is_python_constant()]
            on = torch.is_autocast_enabled(elsewhere.here)
            if all(elsewhere.here_for(each) != each for each in given):
                return tracked.build(tx, on if self.value is torch.is_autocast_enabled else _dtype(elsewhere))
        return original(self, tx, args, kwargs)

    with mock.patch.object(variable, "call_function", call_function):
        yield


# Asked without an argument, they speak of CUDA.
_AUTOCAST = (torch.is_autocast_enabled, torch.get_autocast_dtype, torch.get_autocast_gpu_dtype)


def _answers(elsewhere: OtherDevice) -> dict[Any, Any]:
    return {
        torch.cuda.is_available: True,
        torch.cuda.device_count: 1,
        torch.cuda.current_device: 0,
        torch.cuda.get_device_capability: elsewhere.capability,
    }


def _dtype(elsewhere: OtherDevice) -> torch.dtype:
    """Return the dtype to which autocast casts; if it is off, the default one."""
    on = torch.is_autocast_enabled(elsewhere.here)
    return torch.get_autocast_dtype(elsewhere.here if on else elsewhere.device.type)


@contextlib.contextmanager
def _autocast_regions(find: Find) -> Iterator[None]:
    """Let autocast of the other device be autocast of the device at hand, in its dtype."""
    variable = internal("_dynamo.variables.ctx_manager.AutocastModeVariable", _PURPOSE)
    original = variable.enter

    def enter(self: Variable, tx: Translator) -> Variable:
        elsewhere = find(tx.output)
        if elsewhere is not None and self.target_values[0] == elsewhere.device.type:
            _, dtype, *rest = self.target_values
            self.target_values = [elsewhere.here, dtype or _dtype(elsewhere), *rest]
        return original(self, tx)

    with mock.patch.object(variable, "enter", enter):
        yield


@contextlib.contextmanager
def autocast_elsewhere(
    elsewhere: OtherDevice, around: Callable[[], contextlib.AbstractContextManager[Any]]
) -> Iterator[None]:
    """Let untraced code enter autocast of the other device: it becomes autocast of the device at hand, in its dtype.

    around  makes a context that is open within each autocast

    Raises CaptureError for an autocast of the other device that was made before: torch has turned it off.
    """
    begin, enter, leave = torch.autocast.__init__, torch.autocast.__enter__, torch.autocast.__exit__
    opened: list[contextlib.AbstractContextManager[Any]] = []

    @functools.wraps(begin)
    def begin_here(
        self: torch.autocast, device_type: str, dtype: torch.dtype | None = None, *args: Any, **more: Any
    ) -> None:
        is_there = elsewhere.here_for(device_type) != device_type
        begin(
            self,
            elsewhere.here_for(device_type),
            _dtype(elsewhere) if is_there and dtype is None else dtype,
            *args,
            **more,
        )

    def enter_here(self: torch.autocast) -> Any:
        if elsewhere.here_for(self.device) != self.device:
            raise CaptureError(
                f"the step enters a torch.autocast({self.device!r}) that was made outside of it, and torch turns it "
                f"off where there is no {self.device} device: make it in the step, or set the workload's `autocast`."
            )
        opened.append(around() if self._enabled else contextlib.nullcontext())
        opened[-1].__enter__()
        return enter(self)

    def leave_here(self: torch.autocast, *error: Any) -> Any:
        opened.pop().__exit__(None, None, None)
        return leave(self, *error)

    with mock.patch.multiple(torch.autocast, __init__=begin_here, __enter__=enter_here, __exit__=leave_here):
        yield


@contextlib.contextmanager
def _modes_untraced(find: Find) -> Iterator[None]:
    """Let Dynamo follow into no function mode that is for untraced code; its guards see the mode still.

    Code of Dynamo's that puts the modes of a trace back leaves such a mode below them.
    """
    state = internal("_dynamo.variables.torch_function.SymbolicTorchFunctionState", _PURPOSE)
    utils = internal("_dynamo.utils", _PURPOSE)
    begin, put = state.__init__, utils.set_torch_function_mode_stack

    def begin_without(self: Any, py_stack: Iterable[Any], *rest: Any, **more: Any) -> None:
        modes = list(py_stack)
        begin(self, modes, *rest, **more)
        kept = [traced for traced, mode in zip(self.mode_stack, modes, strict=True) if not _is_untraced(mode)]
        self.mode_stack = type(self.mode_stack)(kept)

    def put_above(modes: Sequence[Any]) -> None:
        now = utils.get_torch_function_mode_stack()
        put([*(mode for mode in now if _is_untraced(mode) and mode not in modes), *modes])

    with (
        mock.patch.object(state, "__init__", begin_without),
        mock.patch.object(utils, "set_torch_function_mode_stack", put_above),
    ):
        yield


def _is_untraced(mode: Any) -> bool:
    return getattr(mode, "is_untraced", False)


@contextlib.contextmanager
def _values_of_nodes(around: Around, find: Find) -> Iterator[None]:
    """Compute the values of nodes with the other device's kernels, each in a context of its own."""
    utils = internal("_dynamo.utils", _PURPOSE)
    original = utils.run_node

    def run_node(tracer: Any, node: fx.Node, *args: Any, **more: Any) -> Any:
        elsewhere = find(output := getattr(tracer, "output_graph", tracer))
        with contextlib.nullcontext() if elsewhere is None else elsewhere.kernels(), around(output, node):
            return original(tracer, node, *args, **more)

    with mock.patch.object(utils, "run_node", run_node):
        yield
