"""Private parts of torch for fake steps: autograd's numbers, layouts, the lists by which optimizers choose kernels."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch

from remat._torch.door import internal

DEVICE = torch.ops.prim.device.default  # called when a fake tensor is asked for its device

# Autograd


def autograd_node() -> Any:
    """Return the node of autograd's graph whose backward runs in this thread; None in forward."""
    return internal("_C._current_autograd_node", "tell whose backward an operator is")()


def backward_number() -> int:
    """Return the number of the backward that runs in this thread; -1 if there is none."""
    return int(internal("_C._current_graph_task_id", "tell one backward from another")())


def nodes_behind(roots: Iterable[Any]) -> Iterator[Any]:
    """Iterate over the nodes of autograd's graph that a backward from `roots` reaches, each once; None is no node."""
    waiting = [root for root in roots if root is not None]
    known = set(waiting)
    while waiting:
        yield (node := waiting.pop())
        new = {each for each, _ in node.next_functions if each is not None and each not in known}
        known |= new
        waiting += new


def next_sequence_number() -> int:
    """Return the number that autograd gives to the next node that is made in this thread."""
    return int(internal("_C._autograd._get_sequence_nr", "tell whose backward an operator is")())


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that has the storage, within a `vmap` or another transform of torch.func."""
    is_wrapped = internal("_C._functorch.is_functorch_wrapped_tensor", "find storages under torch.func")
    while is_wrapped(tensor):
        tensor = internal("_C._functorch.get_unwrapped", "find storages under torch.func")(tensor)
    return tensor


def is_batched(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is one of many that `vmap` runs at once."""
    asked = internal("_C._functorch.is_batchedtensor", "know which operators `vmap` calls")
    is_wrapped = internal("_C._functorch.is_functorch_wrapped_tensor", "find storages under torch.func")
    while is_wrapped(tensor):
        if asked(tensor):
            return True
        tensor = internal("_C._functorch.get_unwrapped", "find storages under torch.func")(tensor)
    return False


@contextlib.contextmanager
def transforms_left() -> Iterator[None]:
    """Leave the transforms of torch.func that an error inside kept open: no later checkpoint or `jvp` would work."""
    why = "leave transforms of torch.func"
    depth, were_on = internal("_C._functorch.get_dynamic_layer_stack_depth", why)(), _hooks_are_on(why)
    was_dual, level, nesting = _is_dual(why), torch.autograd.forward_ad._current_level, _transforms(why).JVP_NESTING
    try:
        yield
    except BaseException:
        if not was_dual and _is_dual(why):  # first: a level keeps its tangents until it is left
            internal("_C._exit_dual_level", why)(level=0)
        torch.autograd.forward_ad._current_level, _transforms(why).JVP_NESTING = level, nesting
        internal("_C._functorch.pop_dynamic_layer_stack_and_undo_to_depth", why)(depth)
        if were_on and not _hooks_are_on(why):
            internal("_C._autograd._saved_tensors_hooks_enable", why)()
        raise


def _transforms(why: str) -> Any:
    return internal("_functorch.eager_transforms", why)


def _is_dual(why: str) -> bool:
    """Return whether the level of forward-mode differentiation is entered; torch has one, and tells by refusing it."""
    try:
        level = internal("_C._enter_dual_level", why)()
    except RuntimeError:
        return True
    internal("_C._exit_dual_level", why)(level=level)
    return False


def _hooks_are_on(why: str) -> bool:
    return bool(internal("_C._autograd._saved_tensors_hooks_is_enabled", why)())


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep Dynamo from following into `function`; unlike `torch.compiler.disable` this does not load Dynamo."""
    found: Callable[..., Any] = internal("_disable_dynamo", "record beside a trace")(function)
    return found


def beside_functions() -> contextlib.AbstractContextManager[None]:
    """Return a context in which no torch function mode is called: reading a tensor's shape would go through each."""
    found: contextlib.AbstractContextManager[None] = internal("_C.DisableTorchFunction", "record a step quickly")()
    return found


# Kernels


def memory_format_of(tensor: torch.Tensor) -> torch.memory_format:
    """Return the memory format that a kernel derives from the strides of `tensor`."""
    found: torch.memory_format = internal("_prims_common.suggest_memory_format", "lay results out as kernels do")(
        tensor
    )
    return found


def elementwise_strides(*tensors: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of the result of an elementwise kernel that passes over `tensors`, which have one shape."""
    found: tuple[int, ...] = internal(
        "_prims_common.compute_elementwise_output_strides", "lay results out as kernels do"
    )(*tensors)
    return found


def nll_loss_nd(*args: Any) -> torch.Tensor:
    """Return the loss of log-probabilities that `cross_entropy` calls, with any number of dimensions."""
    found: torch.Tensor = builtin_functions().nll_loss_nd(*args)
    return found


def builtin_functions() -> Any:
    """Return the module of torch's layer functions in C++, which `torch.nn.functional` passes on."""
    return internal("_C._nn", "find functions of layers by name")


def functions_of_lengths() -> Any:
    """Return the module through which `torch.nn` calls recurrent layers, and packs and pads sequences."""
    return internal("_VF", "read lengths of packed sequences")


@contextlib.contextmanager
def composites_replaced(instead: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Run `instead[name](whole, *args)` for functions of ATen that are made of other operators, in every thread.

    whole  the function as it is
    """
    found = {_composite(name): function for name, function in instead.items()}
    for composite, function in found.items():
        composite.instead = function
    try:
        yield
    finally:
        for composite in found:
            composite.instead = None


class _Composite:
    """A function of ATen that is made of other operators, and another to run `instead`, or None.

    It stays registered: another thread may be calling it.
    """

    def __init__(self, name: str):
        purpose = "record composite functions as devices run them"
        _, call, _ = internal("_C._get_operation_overload", purpose)(f"aten::{name}", "")
        self._whole = functools.partial(call, internal("_C.DispatchKey", purpose).CompositeImplicitAutograd)
        self.instead: Callable[..., Any] | None = None
        self._library = torch.library.Library("aten", "IMPL")
        for device in ("CPU", "CUDA"):
            self._library.impl(name, self._run, f"Autograd{device}")

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        instead = self.instead
        return self._whole(*args, **kwargs) if instead is None else instead(self._whole, *args, **kwargs)


_composite = functools.cache(_Composite)


@contextlib.contextmanager
def shape_of_grouped_products(shape: Callable[..., Any]) -> Iterator[None]:
    """Let `shape(original, make, *args)` be torch's shape function of grouped products, in `_meta_registrations`.

    original  torch's own        make  makes the result, without checking types

    Does nothing if this version of torch has no such function.
    """
    asks, makes = "_meta_grouped_mm_common", "_create_grouped_mm_output_tensor"
    shapes = getattr(torch, "_meta_registrations", None)
    if not (hasattr(shapes, asks) and hasattr(shapes, makes)):
        yield
        return
    original = getattr(shapes, asks)
    with mock.patch.object(shapes, asks, functools.partial(shape, original, getattr(shapes, makes))):
        yield


# Optimizers

_CHOOSE = ("torch.optim.optimizer", "torch.utils._foreach_utils")


def devices_with_foreach() -> list[str]:
    """List the types of devices that have kernels for many tensors at once."""
    return list(
        internal("utils._foreach_utils._get_foreach_kernels_supported_devices", "choose an optimizer's kernels")()
    )


@contextlib.contextmanager
def foreach_takes(kind: type[torch.Tensor], device_type: str | None) -> Iterator[None]:
    """Let foreach, fused and capturable kernels be chosen for tensors of `kind`, and on `device_type` if there is one.

    Both lists of types are called `_foreach_supported_types`; the lists of devices (`torch/utils/_foreach_utils.py`,
    `torch/optim/optimizer.py`) all name what `torch._C._get_privateuse1_backend_name()` says. These change: fake
    tensors ask too, in torch 2.11, and look for the current CPU.
    """
    purpose = "choose an optimizer's kernels"
    lists: tuple[list[Any], ...] = (
        internal("optim.optimizer._foreach_supported_types", purpose),
        internal("utils._foreach_utils._foreach_supported_types", purpose),
    )
    original = internal("_C._get_privateuse1_backend_name", purpose)

    def spare_backend() -> str:
        asks = sys._getframe(1).f_globals["__name__"]
        return device_type if device_type is not None and asks in _CHOOSE else original()

    for supported in lists:
        supported.append(kind)
    try:
        with mock.patch.object(torch._C, "_get_privateuse1_backend_name", spare_backend):
            yield
    finally:
        for supported in lists:
            supported.remove(kind)
