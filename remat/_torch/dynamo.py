"""How forwards are captured: what Dynamo tells of its traces, and what it lets itself be told.

A *translator* is what Dynamo traces one function with (`InstructionTranslator`), a *variable* what stands for a value
while it does (`VariableTracker`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import math
import os
import random
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
from torch import fx

from remat._torch.door import internal
from remat.errors import CaptureError
from remat.shared import Shared

Translator = Any
Variable = Any
Handler = Callable[..., Variable]
FirstNode = Callable[[], fx.Node | None]

# What Dynamo reports


def compiler_behind(callback: Any) -> Callable[..., Any] | None:
    """Return the compiler behind a callback of Dynamo, as its frames run under; None if there is none."""
    names = ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable")  # of torch 2.13, and of older ones
    while inside := next((getattr(callback, name) for name in names if hasattr(callback, name)), None):
        callback = inside
    return callback if callable(callback) else None


def backend_of_output(output: Any) -> Any:
    """Return the backend that `torch.compile` was given, from the output of a trace's translators (`OutputGraph`)."""
    compiler = compiler_behind(output.compiler_fn)
    return getattr(compiler, "compiler_fn", compiler)  # the wrapper of `torch.compile`


def frames_traced() -> int:
    """Return the number of functions that Dynamo has traced, or tried to trace, in this process."""
    return int(internal("_dynamo.utils.counters", "see whether a forward was traced")["frames"]["total"])


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether calls of `module` are compiled: in place, wrapped, or by its forward."""
    forward = getattr(module, "forward", None)
    by_forward = hasattr(forward, "_torchdynamo_orig_callable") and not hasattr(forward, "_torchdynamo_disable")
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None or by_forward


def graph_breaks() -> list[Any]:
    """Return the places and reasons of Dynamo's graph breaks in this process so far."""
    found: list[Any] = internal("_dynamo.utils.graph_break_reasons", "find the branch at which a graph broke")
    return found


def trace_error() -> type[Exception]:
    """Return the exception that Dynamo raises for a model that it cannot trace."""
    found: type[Exception] = internal("_dynamo.exc.TorchDynamoException", "say why a model cannot be captured")
    return found


def autocast_marks() -> tuple[Any, Any]:
    """Return the functions that a captured graph calls to begin and to end an autocast context."""
    purpose = "tell where autocast holds in a captured graph"
    return (
        internal("amp.autocast_mode._enter_autocast", purpose),
        internal("amp.autocast_mode._exit_autocast", purpose),
    )


# What Dynamo is asked to do


def settings(**changes: Any) -> contextlib.AbstractContextManager[Any]:
    """Change Dynamo's settings while the context is open, in every thread."""
    found: contextlib.AbstractContextManager[Any] = internal("_dynamo.config", "capture whole graphs").patch(**changes)
    return found


def without_breaks() -> contextlib.AbstractContextManager[Any]:
    """Raise a `trace_error` where a trace that begins meanwhile would break its graph."""
    found: contextlib.AbstractContextManager[Any] = internal(
        "_dynamo.error_on_graph_break", "leave sizes open where no graph breaks for them"
    )(True)
    return found


def predicates() -> tuple[Callable[[], bool], ...]:
    """Return every function of torch that says whether it is being traced, under all of its names."""
    purpose = "capture the branches of eager mode"
    return (
        torch.compiler.is_compiling,
        torch.compiler.is_dynamo_compiling,
        torch.compiler.is_exporting,
        internal("_dynamo.external_utils.is_compiling", purpose),
        internal("_utils.is_compiling", purpose),
    )


def handlers() -> dict[Any, Handler]:
    """Return Dynamo's handlers of torch functions that it answers itself. Raises CaptureError if there are none.

    A handler is called with the function's variable, the translator and the arguments; None means: not answered.
    """
    variable = internal("_dynamo.variables.TorchInGraphFunctionVariable", "capture the branches of eager mode")
    found = getattr(variable, "_get_handlers", None)
    known = found() if found is not None else None
    if not isinstance(known, dict) or torch.compiler.is_compiling not in known:
        raise CaptureError(
            f"torch {torch.__version__} keeps its answer to `torch.compiler.is_compiling()` elsewhere than torch 2.11 "
            "to 2.15 do: the eager branches of a model cannot be captured with it."
        )
    return known


def know_functions() -> None:
    """Let torch and Dynamo look up functions of torch and methods of tensors now, before another replaces one of them.

    They find them once, and Dynamo again after `torch.distributed.init_process_group`.
    """
    with torch.device("cpu"):  # functions that a default device is for
        torch.empty(0)
    handlers()
    purpose = "stand in for a function of torch"
    internal("_dynamo.trace_rules.get_torch_obj_rule_map", purpose)()
    internal("_dynamo.trace_rules.get_tensor_method", purpose)()
    torch.overrides.is_tensor_method_or_property(torch.Tensor.add)


def constant(value: Any) -> Variable:
    """Return the variable of a constant."""
    return internal("_dynamo.variables.ConstantVariable", "capture the branches of eager mode")(value)


def is_of_tensor(variable: Variable) -> bool:
    """Return whether a variable is one of a tensor."""
    return isinstance(variable, internal("_dynamo.variables.TensorVariable", "capture the branches of eager mode"))


def _first_node(args: Sequence[Variable], kwargs: Any = None) -> fx.Node | None:
    """Return the node in the graph being traced that made the first of `args`; None if that is no tensor."""
    node = args[0].as_proxy().node if args and is_of_tensor(args[0]) else None
    return node if isinstance(node, fx.Node) else None


def input_of(placeholder: fx.Node) -> tuple[str, Any]:
    """Return where an input of the graph being traced is from, and its value."""
    given = placeholder.meta["grapharg"]
    name = getattr(given.source, "name", "")  # a method in torch 2.11
    return str(name() if callable(name) else name), given.example


def compares_masks() -> Callable[..., bool]:
    """Return the function with which `nn.TransformerEncoder` compares its mask with a causal one."""
    purpose = "plan stacks of nn.TransformerEncoder and nn.TransformerDecoder"
    return cast(Callable[..., bool], internal("nn.modules.transformer._detect_is_causal_mask", purpose))


def as_constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let Dynamo call `function` while it traces, with tensors that have their values, and take its result as it is."""
    constant_result = internal(
        "_dynamo.assume_constant_result", "plan stacks of nn.TransformerEncoder and nn.TransformerDecoder"
    )
    return cast(Callable[..., Any], constant_result(function))


@contextlib.contextmanager
def following(instead: Callable[[Translator, Any, FirstNode], Callable[..., Any] | None]) -> Iterator[None]:
    """Let Dynamo follow `instead(translator, function, first)` in place of a Python function that traced code calls.

    `first()` is the node of its first argument if that is a tensor. Where `instead` returns None, the function is
    followed. Functions themselves, and guards on them, are as before.
    """
    variable = internal("_dynamo.variables.UserFunctionVariable", "let a library choose its attention masks")
    original = variable.call_function

    def call_function(self: Variable, translator: Translator, *args: Any, **kwargs: Any) -> Variable:
        other = instead(translator, self.fn, functools.partial(_first_node, *args))
        if other is not None:
            self = variable(other)
        return original(self, translator, *args, **kwargs)

    with mock.patch.object(variable, "call_function", call_function):
        yield


@contextlib.contextmanager
def numbers_unread(where: Callable[[Translator], bool]) -> Iterator[None]:
    """Hide the numbers in tensors from traces for which `where` is true.

    Dynamo reads the number of every tensor without dimensions that is on the host and has data, and specializes the
    trace if such a tensor is used as a Python number. A Python number that Dynamo itself has made a tensor of stays
    known.
    """
    purpose = "capture the same graphs of tensors with and without data"
    builder = internal("_dynamo.variables.builder", purpose)
    python_number = internal("_dynamo.source.FloatTensorSource", purpose)
    original = builder.wrap_to_fake_tensor_and_record

    def wrapped(tensor: Any, tx: Translator, *, source: Any, **kwargs: Any) -> Any:
        fake = original(tensor, tx, source=source, **kwargs)
        if hasattr(fake, "item_memo") and not isinstance(source, python_number) and where(tx):
            fake.item_memo = None
        return fake

    with mock.patch.object(builder, "wrap_to_fake_tensor_and_record", wrapped):
        yield


@contextlib.contextmanager
def sizes_closed(where: Callable[[Translator], bool]) -> Iterator[None]:
    """Leave no size of a tensor open in traces for which `where` is true."""
    builder = internal("_dynamo.variables.builder", "leave numbers open, and sizes not")
    original = builder._automatic_dynamic

    def decide(tensor: Any, tx: Translator, source: Any, static_shapes: bool, *args: Any, **kwargs: Any) -> Any:
        return original(tensor, tx, source, static_shapes or where(tx), *args, **kwargs)

    with mock.patch.object(builder, "_automatic_dynamic", decide):
        yield


_ARGUMENTS = "python_arg_parser.h"  # where operators in C++ ask an open float for its value
_MATH_FUNCTIONS = ("exp", "log", "sqrt", "sin", "cos", "tanh")


@contextlib.contextmanager
def floats_open(where: Callable[[Translator], bool]) -> Iterator[None]:
    """Leave floats open that operators or `math` take, in traces for which `where` is true.

    Operators that take a float (the rate of a dropout) ask for its value when they run on fakes, and Dynamo would trace
    anew for every other value. No shape depends on such an argument. Torch knows most functions of `math` as symbols,
    but not `exp` and `log`.
    """
    purpose = "leave numbers open that operators are given"
    node = internal("fx.experimental.sym_node.SymNode", purpose)
    threads = internal("_dynamo.symbolic_convert.tls", purpose)
    printer = internal("utils._sympy.printers.PythonPrinter", purpose)
    original = node.guard_float

    def guard_float(self: Any, file: str, line: int) -> float:
        tx = getattr(threads, "current_tx", None)
        if file.endswith(_ARGUMENTS) and self.hint is not None and tx is not None and where(tx):
            return float(self.hint)
        return float(original(self, file, line))

    def printed(name: str) -> Callable[..., str]:
        return lambda self, expression: f"math.{name}({self._print(expression.args[0])})"

    with contextlib.ExitStack() as changes:
        changes.enter_context(mock.patch.object(node, "guard_float", guard_float))
        for function in (math.exp, math.log):
            name = function.__name__
            changes.enter_context(mock.patch.object(torch, f"_sym_{name}", _symbolic(function), create=True))
            in_guards = f"_print_OpaqueUnaryFn_{name}"
            changes.enter_context(mock.patch.object(printer, in_guards, printed(name), create=True))
        yield


@contextlib.contextmanager
def numpy_of_numbers(where: Callable[[Translator], bool]) -> Iterator[None]:
    """Let functions of numpy return a number for a number, in traces for which `where` is true.

    Dynamo would make a tensor of it, compute with that, and break the graph where Python asks for the number.
    """
    purpose = "let numpy compute with numbers as eager mode does"
    variable = internal("_dynamo.variables.misc.NumpyVariable", purpose)
    symbol = internal("_dynamo.variables.SymNodeVariable", purpose)
    functions = {getattr(np, name): _symbolic(getattr(np, name)) for name in _MATH_FUNCTIONS}
    original = variable.call_function

    def call_function(self: Variable, tx: Translator, args: Any, kwargs: Any) -> Variable:
        made = functions.get(self.value) if isinstance(self.value, np.ufunc) and len(args) == 1 and not kwargs else None
        if made is not None and where(tx):
            if isinstance(args[0], symbol):
                return symbol.create(tx, tx.output.create_proxy("call_function", made, (args[0].as_proxy(),), {}))
            if args[0].is_python_constant() and isinstance(given := args[0].as_python_constant(), (int, float)):
                return constant(float(made(given)))
        return cast(Variable, original(self, tx, args, kwargs))

    with mock.patch.object(variable, "call_function", call_function):
        yield


_DRAWS = frozenset(  # methods of Python's generators that return a number
    (
        *("random", "uniform", "triangular", "randint", "randrange", "getrandbits", "gauss", "normalvariate"),
        *("lognormvariate", "expovariate", "vonmisesvariate", "gammavariate", "betavariate"),
        *("paretovariate", "weibullvariate"),
    )
)


@contextlib.contextmanager
def draws_as_inputs(where: Callable[[Translator], bool | None]) -> Iterator[None]:
    """Make numbers that Python's generators draw inputs of the graph, in traces for which `where` is true.

    If `where` is False, the graph ends at them; if it is None, Dynamo handles them. It has them drawn before the graph
    runs for some functions of the global generator, and breaks the graph at the others. The state of a generator that a
    model keeps becomes a part of the trace: it draws the same numbers every time.
    """
    purpose = "draw Python's random numbers as eager mode does"
    kept = internal("_dynamo.variables.misc.RandomVariable", purpose)
    bound = ("UserDefinedObjectVariable", "SkipFunctionVariable")  # variables of `random.gauss` and `random.random`
    unknown = internal("_dynamo.variables.base.VariableTracker", purpose)
    drawn = internal("_dynamo.variables.user_defined.call_random_fn", purpose)
    wrapped = internal("_dynamo.variables.builder.wrap_fx_proxy", purpose)
    is_same = internal("_dynamo.guards.GuardBuilder.ID_MATCH", purpose)
    guarded = internal("_dynamo.guards.install_guard", purpose)
    begin, called = kept.__init__, kept.call_method

    def draw(tx: Translator, generator: random.Random, name: str, args: Any, kwargs: Any) -> Variable:
        state = generator.getstate()  # an example is drawn
        try:
            tensor = drawn(tx, getattr(generator, name), args, kwargs)
            number = tx.output.create_proxy("call_method", "item", (tensor.as_proxy(),), {})
            with mock.patch.object(tx.fake_mode, "allow_scalar_outputs", True):
                return cast(Variable, wrapped(tx, number))
        finally:
            generator.setstate(state)

    def init(self: Variable, rand: random.Random | None = None, *args: Any, **kwargs: Any) -> None:
        begin(self, rand, *args, **kwargs)
        self.generator = rand

    def call_method(self: Variable, tx: Translator, name: str, args: Any, kwargs: Any) -> Variable:
        if not isinstance(getattr(self, "generator", None), random.Random) or (opens := where(tx)) is None:
            return cast(Variable, called(self, tx, name, args, kwargs))
        if name not in _DRAWS or not _are_constant(args, kwargs) or not opens:
            return cast(Variable, unknown.call_method(self, tx, name, args, kwargs))
        guarded(self.source.make_guard(is_same))
        return draw(tx, self.generator, name, args, kwargs)

    def calling(original: Callable[..., Variable]) -> Callable[..., Variable]:
        def call_function(self: Variable, tx: Translator, args: Any, kwargs: Any) -> Variable:
            generator, name = (getattr(self.value, each, None) for each in ("__self__", "__name__"))
            if type(generator) is random.Random and name in _DRAWS and _are_constant(args, kwargs) and where(tx):
                return draw(tx, generator, name, args, kwargs)
            return original(self, tx, args, kwargs)

        return call_function

    with contextlib.ExitStack() as changes:
        changes.enter_context(mock.patch.multiple(kept, __init__=init, call_method=call_method))
        for variable in (internal(f"_dynamo.variables.{name}", purpose) for name in bound):
            changes.enter_context(mock.patch.object(variable, "call_function", calling(variable.call_function)))
        yield


def _are_constant(args: Any, kwargs: Any) -> bool:
    return all(each.is_python_constant() for each in (*args, *kwargs.values()))


def _symbolic(function: Callable[[float], float]) -> Any:
    """Return `function` for numbers, including open ones."""
    purpose = "leave numbers open that functions are given"
    node, name = internal("fx.experimental.sym_node.SymNode", purpose), function.__name__
    opaque = internal(f"utils._sympy.functions.OpaqueUnaryFn_{name}", purpose)

    def computed(number: Any) -> Any:
        if not isinstance(number, (torch.SymInt, torch.SymFloat)):
            return function(number)
        known = number.node
        hint = None if known.hint is None else float(function(known.hint))
        return torch.SymFloat(node(opaque(known.expr), known.shape_env, float, hint))

    computed.__name__ = computed.__qualname__ = name
    return computed


@contextlib.contextmanager
def rows_unbound(where: Callable[[Translator], bool]) -> Iterator[None]:
    """Iterate over a tensor by `unbind`, not row by row, in traces for which `where` is true."""
    variable = internal("_dynamo.variables.tensor.TensorVariable", "iterate over tensors as eager mode does")
    original = variable.unpack_var_sequence

    def unpack(self: Variable, tx: Translator, idxes: Any = None) -> list[Variable]:
        if type(self) is not variable or not where(tx):
            return list(original(self, tx, idxes))
        return list(self.call_method(tx, "unbind", [], {}).unpack_var_sequence(tx))

    with mock.patch.object(variable, "unpack_var_sequence", unpack):
        yield


def not_begun_at(function: Any, *, nor_within: bool = False) -> Any:
    """Let no trace begin at calls of `function`; a trace that has begun follows into it.

    nor_within  let none begin at the calls that it makes either
    """
    purpose = "read values while planning"
    treat = internal("_C._dynamo.eval_frame.set_code_exec_strategy", purpose)
    skip, trace = (internal(f"_C._dynamo.eval_frame._FrameAction.{name}", purpose) for name in ("SKIP", "DEFAULT"))
    treat(
        function.__code__,
        internal("_C._dynamo.eval_frame._FrameExecStrategy", purpose)(skip, skip if nor_within else trace),
    )
    return function


def try_again(error: BaseException | None, functions: Iterable[Any] = ()) -> None:
    """Let Dynamo trace the functions again that it gave up because of `error`, and `functions`; other traces stay.

    A function that raises while it is traced runs untraced from then on, and every later graph would break at it. Those
    are the functions in the error's traceback, and in those of its causes. So does one that breaks a graph in a loop.
    """
    purpose = "capture a forward again after one that raised"
    tried = internal("_dynamo.convert_frame.input_codes", purpose)
    treat = internal("_C._dynamo.eval_frame.set_code_exec_strategy", purpose)
    trace = internal("_C._dynamo.eval_frame._FrameAction.DEFAULT", purpose)
    treatment = internal("_C._dynamo.eval_frame._FrameExecStrategy", purpose)(trace, trace)
    raised = (frame.f_code for each in _errors_behind(error) for frame, _ in traceback.walk_tb(each.__traceback__))
    for code in itertools.chain(raised, (getattr(function, "__code__", None) for function in functions)):
        if code in tried:
            treat(code, treatment)


def _errors_behind(error: BaseException | None) -> list[BaseException]:
    """Return an error and all its causes."""
    found: list[BaseException] = []
    waiting = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and each not in found:
            found.append(each)
            waiting += [each.__cause__, each.__context__]
    return found


# What it writes


def tracebacks_unwritten() -> contextlib.AbstractContextManager[None]:
    """Keep torch from logging tracebacks of operators that fail on fake tensors, and of guards that cannot be made.

    They are raised anyway. And keep it from advice to capture `Tensor.item()` in a graph, which no plan can take.

    If TORCH_LOGS or REMAT_DEBUG is set in the environment, it is logged as usual.
    """
    return _SHARED_LOG_OFF()


@contextlib.contextmanager
def _log_off() -> Iterator[None]:
    purpose = "keep its log off the screen"
    names = "_subclasses.fake_tensor", "_dynamo.variables.tensor", "_guards", "fx.experimental.symbolic_shapes"
    logs = [logging.getLogger(internal(name, purpose).__name__) for name in names]
    before = [log.level for log in logs]
    if not (os.environ.get("TORCH_LOGS") or os.environ.get("REMAT_DEBUG")):
        for log in logs:
            log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for log, level in zip(logs, before, strict=True):
            log.setLevel(level)


_SHARED_LOG_OFF = Shared(_log_off)


# Functions that are left whole


@contextlib.contextmanager
def left_whole(functions: Iterable[Any]) -> Iterator[None]:
    """Put calls of `functions` (also classes of autograd's Function) into graphs untraced while the context is open."""
    allowed = internal("_dynamo.trace_rules._allowed_callable_ids", "capture Functions that cannot be traced")
    new = [id(function) for function in functions if id(function) not in allowed]
    for key in new:
        allowed.add(key)
    try:
        yield
    finally:
        for key in new:
            allowed.remove(key)


def own_function(target: Any) -> Any:
    """Return the autograd Function class that `target` of an untraced node calls; None for other nodes."""
    if getattr(target, "__name__", "") != "trampoline_autograd_apply":
        return None
    return inspect.getclosurevars(target).nonlocals["fn_cls"]


def traced_triton_launch() -> Any:
    """Return the class of the operator that stands for the launch of a Triton kernel in a trace."""
    purpose = "leave kernels in Triton out of a fake step"
    return internal("_higher_order_ops.triton_kernel_wrap.TritonKernelWrapperMutation", purpose)


def passed_on(failure: BaseException, kind: type[Exception]) -> Exception | None:
    """Return the error of class `kind` behind a backend's `failure`, in a class that Dynamo passes on."""
    through = internal("_dynamo.exc.ShortenTraceback", "tell why a compiled step cannot be planned")
    found: Any = failure
    while found is not None and not isinstance(found, kind):
        found = getattr(found, "inner_exception", None) or found.__cause__ or found.__context__
    if found is None:
        return None
    of = type(found)
    told = str(found)  # without the advice on debugging Dynamo that is added on the way
    own = {"__init__": lambda self: None, "__str__": lambda self: told, "__module__": of.__module__}
    passed: Any = type(of.__name__, (of, through), own)()
    passed.args = found.args
    vars(passed).update(vars(found), first_useful_frame=None)
    return passed


def compilation() -> tuple[Any, Any]:
    """Return the frame that is being compiled, the same for all its compilations, and which of them this is.

    Outside a compilation both are None.
    """
    found = internal("_guards.CompileContext.current_compile_id", "know which graphs a step has")()
    return (None, None) if found is None else (found.frame_id, found)


def ddp_around() -> Any:
    """Return the DistributedDataParallel whose forward runs, or is being compiled; None outside of one."""
    purpose = "count the gradient buckets of DistributedDataParallel"
    return internal("nn.parallel.distributed.DistributedDataParallel._get_active_ddp_module", purpose)()
