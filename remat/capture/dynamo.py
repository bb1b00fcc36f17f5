"""Capture: get a model's training forward as torch.fx graphs, through a `torch.compile` backend.

Dynamo is used as a tracer and as a dispatcher: it guards on shapes, flags and module attributes, hands every graph
to our backend, and calls what the backend returned. The same mechanism records a step under fake tensors
(`record.py`) and runs a plan in training (`planned_graphs.py`), so a plan is applied to exactly the graph that it
was made for. `torch.fx.symbolic_trace` fails on current transformers models, `torch.export` on their outputs; both
would also lose the guards.

A forward may consist of several graphs (Dynamo breaks where it cannot follow), and one graph may be called several
times (a loop over layers that breaks inside). What identifies a node is therefore the *call*: the how-manieth graph
call of the forward, and the node's name in that graph.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import fx, nn
from torch.utils._pytree import MappingKey, tree_leaves_with_path

from remat._torch.dynamo import (
    FirstNode,
    graph_breaks,
    settings,
    trace_error,
    tracebacks_unwritten,
    try_again,
    without_breaks,
)
from remat.capture import causal_masks, four_bit, numpy_random, trl_head
from remat.capture.anchors import put_under
from remat.capture.attention_masks import (
    IsOnes,
    Masks,
    TracedMasks,
    all_ones,
    foreign_mask,
    given_masks,
    masks_of,
)
from remat.capture.containers import kept_containers
from remat.capture.dynamic_shapes import has_sizes, has_sizes_alone, move_sizes_first
from remat.capture.eager_answers import Answers, Capture, answering, captured_elsewhere
from remat.capture.eager_tensors import eager_tensors
from remat.capture.elsewhere import CaptureDevice
from remat.capture.grouped_products import grouped_products
from remat.capture.higher_order_ops import open_nodes
from remat.capture.kernels_on_fakes import kernels_on_fakes
from remat.capture.opaque_functions import opaque
from remat.capture.open_numbers import open_numbers
from remat.errors import CaptureError, RematError

RECOMPILE_LIMIT = 1 << 16
# Captures of one model class do not count against each other's limit, where this torch can keep them apart.
_ISOLATION_OPTIONS: dict[str, Any] = (
    {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}
)
# Methods of loggers; transformers adds some that log once.
_LOGS = ("debug", "info", "warning", "error", "info_once", "warning_once", "warning_advice")
_VIEWS = {"expand", "expand_as", "permute", "reshape", "squeeze", "transpose", "unsqueeze", "view"}
_OF_OPEN_FLOATS = ("Guard failed on the same frame", "lift_tracked_freevar_to_input should not be called")


class SizesNotOpen(RematError):
    """A graph with open sizes is not wanted: each size must be traced by itself."""


class ForeignMask(RematError):
    """The model makes an attention mask of its own, whose data is not known before the trace."""


class _DrawNotOpen(RematError):
    """No graph can be traced with the numbers that Python draws as inputs."""


class ExecuteCall(Protocol):
    """Executes graph call `call` of a forward on `args`."""

    def __call__(self, call: int, graph_module: fx.GraphModule, args: tuple[Any, ...]) -> Any: ...


Change = Callable[[int, fx.GraphModule], fx.GraphModule]


class GraphCalls:
    """A function traced by Dynamo whose graph calls run by `execute_call`.

    count     graph calls of the last call          elements  of its input tensors, by name
    first     graph calls of the step before it: the number of its own first one
    seen      attention masks that the data of the last call needs
    masks     attention masks that it was traced for; `planned`: a plan's
    fits      whether a graph with open sizes (`dynamic_shapes.py`) is usable, for a function that is one graph;
              without it, every new shape is traced
    answers   answers to code that asks whether it is being traced; by default Dynamo's
    elsewhere the device that graphs are for, if tensors are on another
    is_ones   checks whether an attention mask is all ones
    opens_numbers  whether Python numbers that change from call to call stay open (`open_numbers.py`)
    may_break whether a graph with open sizes may break
    has_begun   whether a graph of the last call has run, counted or not: it is too late to trace anew
    has_broken  whether the last call broke its graph
    change    rewrites a graph, first seen as call number `call`, before everything else
    under     path of the module whose forward it is; "" for the model's

    Raises `CaptureError` if Dynamo cannot trace at all, `SizesNotOpen` if a graph with open sizes does not fit.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        execute_call: ExecuteCall,
        fits: Callable[[fx.GraphModule], bool] | None = None,
        answers: Answers | None = None,
        elsewhere: CaptureDevice | None = None,
        planned: Masks | None = None,
        is_ones: IsOnes = all_ones,
        change: Change | None = None,
        under: str = "",
        opens_numbers: bool = False,
        may_break: bool = False,
    ):
        self.function, self.may_break = function, may_break
        self.has_begun = self.has_broken = False
        self._under = under
        self.opens_numbers = opens_numbers
        self.answers = answers
        self.elsewhere = elsewhere
        self.own_checkpoints = 0  # calls of the model's own that were taken out of its graphs
        self._execute_call = execute_call
        self._fits = fits
        self._planned = planned or Masks()
        self._is_ones = is_ones
        self._change = change
        self._compiled: dict[Masks, Callable[..., Any]] = {}
        self._given: list[torch.Tensor] = []
        self.named: dict[str, torch.Tensor] = {}  # arguments of the call under way
        self.masks_taken: list[causal_masks.Holds] = []  # whether what was found out about masks still holds
        self.opens_draws = True
        self.count = self.first = 0
        self.elements: dict[str, int] = {}
        self.seen = self.masks = Masks()

    def _traced_for(self, masks: Masks) -> Callable[..., Any]:
        """Return the function, traced for batches of these `masks` alone: Dynamo shares traces of equal backends."""
        if masks not in self._compiled:
            dynamic = None if self.opens_sizes or self.opens_numbers else False
            self._backend = _Backend(self, masks)
            self._compiled[masks] = torch.compile(
                self.function, backend=self._backend.compile, dynamic=dynamic, **_ISOLATION_OPTIONS
            )
        return self._compiled[masks]

    def compile(self, graph_module: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """Compile a graph that Dynamo has traced into a callable."""
        is_counted = not has_sizes_alone(graph_module)
        if foreign_mask(graph_module, example_inputs, self._given):
            raise ForeignMask("the model makes an attention mask of its own, beside that of ones that it is given.")
        self.own_checkpoints += open_nodes(graph_module)
        drop_dead_views(graph_module)
        if self._under:
            put_under(self._under, graph_module)
        if is_counted and self._change is not None:
            graph_module = self._change(self.first + self.count, graph_module)
        if is_counted and has_sizes(graph_module) and not self._will_do(graph_module) and self.opens_any:
            raise SizesNotOpen("the graph depends on the sizes of the batch.")

        weakly = weakref.ref(self)

        def run(*args: Any) -> Any:
            calls = weakly()
            assert calls is not None
            calls.has_begun = True
            if not is_counted:
                return graph_module.forward(*args)
            call = calls.first + calls.count
            calls.count += 1
            return calls._execute_call(call, graph_module, args)

        return torch.compiler.disable(run)

    @property
    def opens_sizes(self) -> bool:
        return self._fits is not None

    @property
    def opens_any(self) -> bool:
        return self.opens_sizes or self.opens_numbers

    def _will_do(self, graph_module: fx.GraphModule) -> bool:
        fits = move_sizes_first(graph_module) and (self._fits is None or self._fits(graph_module))
        return fits or self.has_begun

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.look(args, kwargs)
        try:
            return self._call(args, kwargs)
        except _DrawNotOpen as error:
            self.opens_draws = False
            self.forget(error)
            return self._call(args, kwargs)
        except ForeignMask as error:
            if self.has_begun:
                raise CaptureError(f"{error} Leave that out of the batch, or plan with it.") from error
        finally:
            self._given, self.named = [], {}
        self._planned = self._planned.with_explicit_masks()
        self.masks = self.seen.as_planned(self._planned)
        self.forget()
        return self._call(args, kwargs)

    def forget(self, error: BaseException | None = None) -> None:
        """Trace anew from now on, including code that Dynamo skips since `error` came out of it."""
        self._compiled.clear()
        self.masks_taken.clear()
        try_again(error)

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Masks:
        """Inspect a batch before it runs: set `elements`, `seen` and `masks`."""
        given = named_tensors(self.function, args, kwargs)
        self._given, self.elements, self.named = given_masks(given), element_counts(given), dict(given)
        self.seen = masks_of(given, self._is_ones)
        self.masks = self.seen.as_planned(self._planned)
        return self.masks

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.count, self.has_begun, breaks = 0, False, len(graph_breaks())
        if not all(holds(self.named) for holds in self.masks_taken):
            self.forget()
        # A forward that breaks with its sizes open, and not otherwise, is traced for each of them.
        refused = without_breaks() if self.opens_sizes and not self.may_break else contextlib.nullcontext()
        with (
            dynamo_settings(opens_numbers=self.opens_numbers),
            open_numbers(),
            kept_containers(),
            refused,
            answering(),
            eager_tensors(),
            captured_elsewhere(),
            grouped_products(),
            kernels_on_fakes(),
            opaque(self.answers.opaque if self.answers else ()),
            torch.compiler.set_stance("default"),
            tracebacks_unwritten(),
            warnings.catch_warnings(),
        ):
            # Dynamo looks at .grad of every tensor that crosses a graph break.
            warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
            # It follows into the functions behind caches, as it must.
            warnings.filterwarnings("ignore", message=r"Dynamo detected a call to a `functools\.lru_cache`-wrapped")
            # It makes a tensor of an array of numpy before the model's code does.
            warnings.filterwarnings("ignore", message=r"To copy construct from a tensor")
            # It breaks the graph at functions of C, as at others; `recording/repeats.py` names those that matter.
            warnings.filterwarnings("ignore", message=r"Dynamo does not know how to trace the builtin")
            # It instantiates a Function's class to trace it, which raises that class's warning.
            warnings.filterwarnings("ignore", message=r".*autograd\.function\.Function.* should not be instantiated")
            try:
                result = self._traced_for(self.masks)(*args, **kwargs)
            except trace_error() as error:
                if (reason := _own_error(error)) is not None:
                    raise reason from error
                if self.opens_draws and self._backend.has_drawn and not self.has_begun:
                    raise _DrawNotOpen(str(error)) from error
                raise CaptureError(f"the model cannot be captured: {first_line(error)}") from error
            # A float that is left open: computed in another order than by Python, or given to Functions more than once.
            except AssertionError as error:
                if self.opens_any and str(error).startswith(_OF_OPEN_FLOATS):
                    raise SizesNotOpen("the graph depends on numbers of the model.") from error
                raise
        self.has_broken = len(graph_breaks()) > breaks
        return result


class _Backend(Capture):
    """A backend for Dynamo, for batches of some `masks`; distinct from all others of the same `GraphCalls`.

    Dynamo keeps every backend and what it compiled for good. So neither holds the graph calls, and with them a model.
    """

    def __init__(self, calls: GraphCalls, masks: Masks):
        self.answers, self.elsewhere, self.opens_sizes = calls.answers, calls.elsewhere, calls.opens_sizes
        self.opens_numbers = calls.opens_numbers
        self.opens_draws = calls.opens_draws
        self._calls = weakref.ref(calls)
        self._masks = TracedMasks(masks)

    def instead(self, asker: str, function: Callable[..., Any], first: FirstNode) -> Callable[..., Any] | None:
        numpy_random.leave_alone(function)
        calls = self._calls()
        assert calls is not None
        opaque = () if self.answers is None else self.answers.opaque
        return (
            self._masks.instead(asker, function, first)
            or causal_masks.instead(function, first, calls.named, calls.masks_taken.append)
            or four_bit.instead(function, asker, opaque)
            or trl_head.instead(function, asker)
        )

    def compile(self, graph_module: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        if self._masks.missing:
            raise CaptureError(
                f"the model makes an attention mask, and transformers.masking_utils of the transformers at hand has no "
                f"{' and no '.join(self._masks.missing)}, which decides whether eager mode needs one; use transformers "
                "5.17 to 5.23."
            )
        calls = self._calls()
        assert calls is not None
        return calls.compile(graph_module, example_inputs)


def drop_dead_views(graph_module: fx.GraphModule) -> None:
    """Remove unused views.

    Models make some for certain shapes only (positions expanded to a batch of more than one), which would make a plan
    for the one not belong to the other.
    """
    for node in reversed(graph_module.graph.nodes):
        if node.op == "call_method" and node.target in _VIEWS and not node.users:
            graph_module.graph.erase_node(node)
    graph_module.recompile()


def named_tensors(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[str, torch.Tensor]]:
    """List all tensors among a forward's arguments, each with the name of its argument or key."""
    given: dict[str, Any] = kwargs
    if args:
        try:
            given = inspect.signature(function).bind_partial(*args, **kwargs).arguments
        except (TypeError, ValueError):  # the call will fail, or is of something that has no signature
            given = {"": args, **kwargs}
    found = []
    for path, leaf in tree_leaves_with_path(given):
        if isinstance(leaf, torch.Tensor):
            found.append((next((str(k.key) for k in reversed(path) if isinstance(k, MappingKey)), ""), leaf))
    return found


def element_counts(given: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """Return the elements of a forward's tensors by name, which measure its batch."""
    counts: dict[str, int] = {}
    for name, tensor in given:
        counts[name] = counts.get(name, 0) + tensor.numel()
    return counts


class _Functions(str):
    """A set of functions for a setting of Dynamo that is readable in its logs.

    torch 2.11 can neither sort nor print a plain set of functions there, and warns of it at every trace.
    """

    def __new__(cls, functions: Iterable[Callable[..., Any]]) -> _Functions:
        functions = frozenset(functions)
        self = super().__new__(cls, ", ".join(sorted(function.__name__ for function in functions)))
        self.functions = functions
        return self

    functions: frozenset[Callable[..., Any]]

    def __contains__(self, function: object) -> bool:
        return function in self.functions

    def __iter__(self) -> Iterator[Any]:
        return iter(self.functions)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Functions:
        return self


@contextlib.contextmanager
def dynamo_settings(*, opens_numbers: bool = False) -> Iterator[None]:
    """Fail loudly instead of falling back to eager, and allow as many batch shapes as training may bring.

    Inside DistributedDataParallel Dynamo would cut every graph at the borders of gradient buckets: no plan would fit.
    Recurrent layers are followed into, and hooks that come or go between two steps are seen. What a model says through
    `logging` or `warnings` in its first forward is lost: there Dynamo would break the graph, and only there. Numpy
    draws its random numbers itself (masks of SpecAugment); Dynamo would draw others, with torch's generator.
    """
    with settings(
        ignore_logger_methods=_Functions(
            [warnings.warn, *(getattr(logging.Logger, name) for name in _LOGS if hasattr(logging.Logger, name))]
        ),
        recompile_limit=RECOMPILE_LIMIT,
        accumulated_recompile_limit=RECOMPILE_LIMIT,
        fail_on_recompile_limit_hit=True,
        suppress_errors=False,
        optimize_ddp=False,
        allow_rnn=True,
        skip_nnmodule_hook_guards=False,
        use_numpy_random_stream=True,
        allow_unspec_int_on_nn_module=opens_numbers,
    ):
        yield


def _own_error(error: BaseException | None) -> RematError | None:
    """Return the error of ours that a tracer's error wraps, whose message says all."""
    while error is not None and not isinstance(error, RematError):
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return error


def first_line(error: BaseException) -> str:
    """Shorten a tracer's long message to its first line, the reason that it wraps, and the user's own line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[:1] or [type(error).__name__]
    reasons = [line for line in lines[1:] if line.startswith(("Explanation:", "Developer debug context:"))]
    said += [line for line in reasons if not line.endswith(":")][:2]
    if error.__cause__ is not None:
        said.append(
            f"{type(error.__cause__).__name__}: {str(error.__cause__).splitlines()[0] if str(error.__cause__) else ''}"
        )
    frames = [line for line in lines if line.startswith('File "') and "/torch/" not in line]
    return "; ".join([*said, *frames[-1:]])


@contextlib.contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Turn off the key-value cache of a transformers model, whatever its configuration says.

    No training step reads the cache, and it would keep the keys and values of every layer until the forward ends,
    whatever a plan recomputes. The library's own gradient checkpointing turns it off too.
    """
    configs = cache_builders(model)
    for config in configs:
        config.use_cache = False
    try:
        yield
    finally:
        for config in configs:
            config.use_cache = True


def cache_builders(model: nn.Module) -> list[Any]:
    """List the configurations in `model` that ask for a key-value cache."""
    configs = (module.__dict__.get("config") for module in model.modules())
    return list({id(config): config for config in configs if getattr(config, "use_cache", None) is True}.values())
