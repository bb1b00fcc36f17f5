"""Opaque Functions: a model's own `torch.autograd.Function` that cannot be traced, as one node of a graph.

Dynamo traces a Function's forward and backward (`higher_order_ops.py`). Where it cannot, it breaks the graph around the
call, and the call is in no graph: no region can hold it, and every new size of a batch is traced anew, because only a
forward that is one graph can be tried with its sizes left open. Such a Function is called unchanged instead, in a
node of its own: eager mode's kernels in eager mode's order, which a region recomputes whole or leaves alone.

So are Functions that Dynamo traces to other numbers: those that see which gradients there are
(`ctx.set_materialize_grads(False)`), and those that change something beside their `ctx`. One whose forward counts is
refused: a recomputation would count again.

Planning finds them behind the loss, where a traced one is another class. The plan names them, since a graph is the
planned one only if the same are left whole. Dynamo's own list of such classes is for the life of the process: a class
is on it only while remat traces.
"""

from __future__ import annotations

import contextlib
import dis
import importlib
import inspect
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from remat._torch.dynamo import left_whole
from remat._torch.recording import nodes_behind
from remat._torch.training import without_modes
from remat.capture import four_bit, trl_head

Function = type[torch.autograd.Function]
NOT_A_MODELS = ("torch", "remat")


def known_functions(model: nn.Module) -> frozenset[str]:
    """List the Functions that layers of `model` are known to call: no first capture need find these."""
    known = {four_bit.FUNCTION: four_bit.has_4_bit_layers, trl_head.FUNCTION: trl_head.is_on}
    return frozenset(name for name, is_on in known.items() if is_on(model))


def changing_functions() -> tuple[frozenset[str], frozenset[str]]:
    """List the Functions of this process that are to be left whole, and those whose forward counts."""
    whole, changing = set(), set()
    for function in _all_functions(torch.autograd.Function):
        forward = [*_codes(function, "forward"), *_codes(function, "setup_context")]
        changed = [each for code in forward for each in _changed(code)]
        if changed or _sees_missing_gradients(forward) or any(map(_changed, _codes(function, "backward"))):
            whole.add(name_of(function))
        if "counts" in changed:
            changing.add(name_of(function))
    return frozenset(whole), frozenset(changing)


def _all_functions(base: Function) -> Iterator[Function]:
    for function in base.__subclasses__():
        if function.__module__.partition(".")[0] not in NOT_A_MODELS:
            yield function
        yield from _all_functions(function)


def _codes(function: Function, name: str) -> list[types.CodeType]:
    """Return the code of a method, if it is written in Python and not torch's base class's."""
    method: Any = inspect.unwrap(getattr(function, name, None))  # type: ignore[arg-type]
    is_own = method is not getattr(torch.autograd.Function, name, None)
    return [method.__code__] if is_own and hasattr(method, "__code__") else []


def _sees_missing_gradients(codes: Iterable[types.CodeType]) -> bool:
    return any("set_materialize_grads" in code.co_names for code in codes)


def _changed(code: types.CodeType) -> list[str]:
    """List what code sets beside its variables, items of them, and attributes of `ctx`.

    "given"   an attribute of an argument
    "stays"   a global, a variable of an enclosing function, an attribute or an item of one
    "counts"  such a one, to something computed of what it was: a second run sets it to something else
    """
    found, read = list[str](), {""}
    loads, copied = [(True, "")] * 2, [(True, "")] * 2  # whether of the code's own variables, and the name
    before, computed = "", False
    for instruction in dis.get_instructions(code):
        name, value = instruction.opname, instruction.argval
        is_cell = "DEREF" in name and value in code.co_cellvars
        augments = before == "SWAP"
        counts = "counts" if computed and value in read else "stays"
        if name == "STORE_ATTR":
            is_own, of = (copied if augments else loads)[-1]
            if not is_own or of not in code.co_varnames[:1]:
                found.append("given" if is_own else counts)
        elif (name == "STORE_SUBSCR" and not (copied if augments else loads)[0][0]) or (
            name in ("STORE_GLOBAL", "STORE_DEREF") and not is_cell
        ):
            found.append("counts" if name == "STORE_SUBSCR" and augments else counts)
        if name == "COPY" and before != "COPY":
            copied = loads
        elif name in ("LOAD_GLOBAL", "LOAD_DEREF") and not is_cell:
            loads = [loads[1], (False, value)]
        elif "LOAD_FAST" in name or name in ("LOAD_CONST", "LOAD_DEREF"):
            loads = [loads[1], (True, value[-1] if "LOAD_FAST" in name and isinstance(value, tuple) else value)]
        if name.startswith("LOAD_") and isinstance(value, str):
            read.add(value)
        computed = name == "BINARY_OP" or (computed and (name.startswith("LOAD_") or name == "SWAP"))
        before = name
    return found


def only_sets(function: Any) -> bool:
    """Return whether a function sets something beside its variables, and to nothing computed of what it was."""
    found = _changed(function.__code__) if hasattr(function, "__code__") else []
    return bool(found) and "counts" not in found


def name_of(function: Function) -> str:
    return f"{function.__module__}:{function.__qualname__}"


def functions_behind(loss: torch.Tensor) -> frozenset[str]:
    """Return the names of the untraced Functions that made `loss`, without torch's own and ours."""
    found = set()
    for node in nodes_behind([loss.grad_fn]):
        function = getattr(node, "_forward_cls", None)
        if function is not None and function.__module__.partition(".")[0] not in NOT_A_MODELS:
            found.add(name_of(function))
    return frozenset(found)


@contextlib.contextmanager
def opaque(names: Iterable[str]) -> Iterator[None]:
    """Make nodes of the Functions of these names while the context is open; ignore missing ones."""
    functions = [function for name in set(names) - {four_bit.FUNCTION} for function in _named(name)]
    with left_whole([*functions, four_bit.matmul_4bit]), contextlib.ExitStack() as stack:
        for function in functions:
            stack.enter_context(_keeping_sizes_open(function))
        yield


# Sizes left open (`dynamic_shapes.py`)


@contextlib.contextmanager
def _keeping_sizes_open(function: Function) -> Iterator[None]:
    """Keep open sizes from `function`, whose loops would specialize them.

    The shape of its result is derived from two runs with numbers for the sizes: a size that is the same in both is a
    number, one that follows a size of an argument is that size. In other cases the function itself runs, which closes
    the size.
    """
    own, original = "apply" in vars(function), function.apply

    def apply(*args: Any) -> Any:
        found = _outputs(original, args) if any(map(_is_open, args)) else None
        return original(*args) if found is None else _Shaped.apply(found, *args)

    function.apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        if own:
            function.apply = original  # type: ignore[method-assign]
        else:
            del function.apply


def _is_open(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)


def _outputs(original: Any, args: tuple[Any, ...]) -> list[Any] | None:
    """Return (sizes, dtype, device, requires_grad) or the value of each output; None if a size is unknown."""
    symbols = {symbol for value in args if _is_open(value) for size in value.shape for symbol in _symbols(size)}
    runs = [_run(original, args, {symbol: hint + more for symbol, hint in symbols}) for more in (0, 8)]
    sizes = {
        tuple(_number(size, {symbol: hint + more for symbol, hint in symbols}) for more in (0, 8)): size
        for value in args
        if _is_open(value)
        for size in value.shape
    }
    found: list[Any] = []
    for one, other in zip(*runs, strict=True):
        if not isinstance(one, torch.Tensor):
            found.append(one)
            continue
        dimensions = [a if a == b else sizes.get((a, b)) for a, b in zip(one.shape, other.shape, strict=True)]
        if None in dimensions or not one.is_contiguous():
            return None
        found.append((dimensions, one.dtype, one.device, one.requires_grad))
    return found


def _symbols(size: Any) -> Iterator[tuple[Any, int]]:
    if isinstance(size, torch.SymInt):
        env = size.node.shape_env
        for symbol in size.node.expr.free_symbols:
            yield (
                symbol,
                int(env.backed_var_to_val[symbol] if hasattr(env, "backed_var_to_val") else env.var_to_val[symbol]),
            )


def _number(size: Any, numbers: dict[Any, int]) -> int:
    return int(size.node.expr.subs(numbers)) if isinstance(size, torch.SymInt) else int(size)


def _run(original: Any, args: tuple[Any, ...], numbers: dict[Any, int]) -> list[Any]:
    with without_modes(), FakeTensorMode(), torch.enable_grad():
        given = [
            torch.empty(
                [_number(size, numbers) for size in value.shape], dtype=value.dtype, device=value.device
            ).requires_grad_(value.requires_grad)
            if isinstance(value, torch.Tensor)
            else value
            for value in args
        ]
        outputs = original(*given)
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


class _Shaped(torch.autograd.Function):
    """Outputs of known shapes that depend on the arguments, in place of a Function."""

    @staticmethod
    def forward(ctx: Any, outputs: list[Any], *args: Any) -> Any:
        made = tuple(
            torch.empty(each[0], dtype=each[1], device=each[2]) if isinstance(each, tuple) else each for each in outputs
        )
        ctx.mark_non_differentiable(
            *(tensor for tensor, each in zip(made, outputs, strict=True) if isinstance(each, tuple) and not each[3])
        )
        return made if len(made) > 1 else made[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("nothing is learnt while a graph is traced")


def _named(name: str) -> list[Function]:
    module, _, path = name.partition(":")
    try:
        found = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):  # of a class made within a function, say
        return [each for each in _all_functions(torch.autograd.Function) if name_of(each) == name]
    return [found] if isinstance(found, type) and issubclass(found, torch.autograd.Function) else []
