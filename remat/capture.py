"""Capture: get a model's training forward as torch.fx graphs, through a `torch.compile` backend.

Dynamo is used as a tracer and as a dispatcher: it guards on shapes, flags and module attributes, hands every graph
to our backend, and calls what the backend returned. The same mechanism records a step under fake tensors
(`record.py`) and runs a plan in training (`applying.py`), so a plan is applied to exactly the graph that it was made
for. `torch.fx.symbolic_trace` fails on current transformers models, `torch.export` on their outputs; both would
also lose the guards.

A forward may consist of several graphs (Dynamo breaks where it cannot follow), and one graph may be called several
times (a loop over layers that breaks inside). What identifies a node is therefore the *call*: the how-manieth graph
call of the forward, and the node's name in that graph.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch._dynamo
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from remat.answers import Answers, answering
from remat.errors import CaptureError, RematError
from remat.grouped_products import grouped_products
from remat.opaque import open_nodes
from remat.sizes import has_sizes, move_sizes_first

RECOMPILE_LIMIT = 1 << 16
# Captures of one model class do not count against each other's limit, where this torch can keep them apart.
_ISOLATED: dict[str, Any] = (
    {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}
)
_VIEWS = {"expand", "expand_as", "permute", "reshape", "squeeze", "transpose", "unsqueeze", "view"}


class SizesNotOpen(RematError):
    """A graph for batches of every size is not the one that is wanted: trace each size by itself."""


class RunCall(Protocol):
    """Executes graph call number `call` of a forward on `args`."""

    def __call__(self, call: int, graph_module: fx.GraphModule, args: tuple[Any, ...]) -> Any: ...


class CompileCall(Protocol):
    """Compiles a graph, first seen as call number `call`; the result executes any call of it, given the number."""

    def __call__(self, call: int, graph_module: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]: ...


class GraphCalls:
    """A function traced by Dynamo whose graph calls are executed by `run_call`, or by what `compile_call` gave.

    count     graph calls of the last call          elements  of the tensors that it was given
    fits      whether a graph with open sizes (`sizes.py`) will do; without it, every new shape is traced by itself
    answers   what code hears that asks whether it is being traced; by default what Dynamo says

    Raises `CaptureError` where Dynamo cannot trace at all, `SizesNotOpen` where a graph with open sizes does not fit.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        run_call: RunCall | None = None,
        compile_call: CompileCall | None = None,
        fits: Callable[[fx.GraphModule], bool] | None = None,
        answers: Answers | None = None,
    ):
        self.function = function
        self.answers = answers
        self._run_call = run_call
        self._compile_call = compile_call
        self._fits = fits
        dynamic = False if fits is None else None
        self._compiled = torch.compile(function, backend=self._backend, dynamic=dynamic, **_ISOLATED)
        self.count = 0
        self.elements = 0

    def _backend(self, graph_module: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        open_nodes(graph_module)
        drop_dead_views(graph_module)
        if self._fits is not None and has_sizes(graph_module) and not self._will_do(graph_module):
            raise SizesNotOpen("the graph depends on the sizes of the batch.")
        if self._compile_call is not None:
            execute = self._compile_call(self.count, graph_module, example_inputs)
        else:
            assert self._run_call is not None
            execute = _interpreted(self._run_call, graph_module)

        def run(*args: Any) -> Any:
            call = self.count
            self.count += 1
            return execute(call, *args)

        return torch._dynamo.disable(run)

    @property
    def opens_sizes(self) -> bool:
        return self._fits is not None

    def _will_do(self, graph_module: fx.GraphModule) -> bool:
        assert self._fits is not None
        return move_sizes_first(graph_module) and self._fits(graph_module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count = 0
        self.elements = element_count(args, kwargs)
        with (
            dynamo_settings(),
            answering(),
            grouped_products(),
            eager_attention_masks(args, kwargs),
            warnings.catch_warnings(),
        ):
            # Dynamo looks at .grad of every tensor that crosses a graph break.
            warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
            # It follows into the functions behind caches, as it must.
            warnings.filterwarnings("ignore", message=r"Dynamo detected a call to a `functools\.lru_cache`-wrapped")
            try:
                return self._compiled(*args, **kwargs)
            except torch._dynamo.exc.TorchDynamoException as error:
                if isinstance(reason := getattr(error, "inner_exception", None), RematError):
                    raise reason from error
                raise CaptureError(f"the model cannot be captured: {_first_line(error)}") from error


def _interpreted(run_call: RunCall, graph_module: fx.GraphModule) -> Callable[..., Any]:
    return lambda call, *args: run_call(call, graph_module, args)


def frames_traced() -> int:
    """How many functions Dynamo has traced, or tried to, in this process."""
    return int(torch._dynamo.utils.counters["frames"]["total"])


def forget_traces() -> None:
    """Let Dynamo trace everything anew.

    A function that raised while it was traced is not followed into again, and would break every later graph.
    """
    torch._dynamo.reset()


def drop_dead_views(graph_module: fx.GraphModule) -> None:
    """Remove views that nobody looks at.

    Models make some for certain shapes only (positions expanded to a batch of more than one), which would make a plan
    for the one not belong to the other.
    """
    for node in reversed(graph_module.graph.nodes):
        if node.op == "call_method" and node.target in _VIEWS and not node.users:
            graph_module.graph.erase_node(node)
    graph_module.recompile()


def element_count(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Elements of all tensors that a forward is given: how large its batch is."""
    return sum(leaf.numel() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))


@contextlib.contextmanager
def dynamo_settings() -> Iterator[None]:
    """Fail loudly instead of falling back to eager, and allow as many batch shapes as training may bring.

    Inside DistributedDataParallel Dynamo would cut every graph at the borders of gradient buckets: no plan would fit.
    Recurrent layers are followed into, and hooks that come or go between two steps are seen.
    """
    with torch._dynamo.config.patch(
        recompile_limit=RECOMPILE_LIMIT,
        accumulated_recompile_limit=RECOMPILE_LIMIT,
        fail_on_recompile_limit_hit=True,
        suppress_errors=False,
        optimize_ddp=False,
        allow_rnn=True,
        skip_nnmodule_hook_guards=False,
    ):
        yield


def _first_line(error: BaseException) -> str:
    """What a tracer's long message says: its first line, the reason that it wraps, and the user's own line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[:1] or [type(error).__name__]
    said += [line for line in lines[1:] if line.startswith(("Explanation:", "Developer debug context:"))][:2]
    if error.__cause__ is not None:
        said.append(
            f"{type(error.__cause__).__name__}: {str(error.__cause__).splitlines()[0] if str(error.__cause__) else ''}"
        )
    frames = [line for line in lines if line.startswith('File "') and "/torch/" not in line]
    return "; ".join([*said, *frames[-1:]])


@contextlib.contextmanager
def eager_attention_masks(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Let transformers choose its attention mask as it does in eager mode.

    In eager mode transformers looks at the data, sees that nothing is padded or packed, and passes no mask, which
    is what lets attention use its flash kernel. While traced, and on fake tensors, it cannot look, and builds an
    explicit mask. Where the caller gave neither a mask nor position ids there is nothing to look at, so the eager
    answer is known.
    """
    masking = sys.modules.get("transformers.masking_utils")
    if masking is None or any(kwargs.get(key) is not None for key in ("attention_mask", "position_ids")):
        yield
        return
    answers: dict[str, Callable[..., Any]] = {
        "find_packed_sequence_indices": _nothing_packed,
        "is_torchdynamo_exporting": _not_exporting,
        "is_tracing": _not_exporting,
    }
    originals = {name: getattr(masking, name) for name in answers if hasattr(masking, name)}
    for name in originals:
        setattr(masking, name, answers[name])
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(masking, name, original)


def _nothing_packed(position_ids: Any) -> None:
    return None


def _not_exporting(tensor: Any = None) -> bool:
    return False


def fake_model(build: Callable[[], nn.Module], mode: Any, device: torch.device) -> nn.Module:
    """`build()` on the meta device, with every parameter and buffer made a fake tensor on `device`.

    Tied parameters stay tied. Raises `CaptureError` if the model cannot be built without data.
    """
    try:
        with torch.device("meta"):
            model = build()
    except Exception as error:
        raise CaptureError(f"the model cannot be built on the meta device: {_first_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise CaptureError(f"`build` returned {type(model).__name__}, not a torch.nn.Module.")
    fakes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the original is kept: its id must stay its own
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in fakes:
                    fakes[id(tensor)] = (tensor, _fake_like(tensor, mode, device))
                table[name] = fakes[id(tensor)][1]  # type: ignore[assignment]
    return model.train()


def _fake_like(tensor: torch.Tensor, mode: Any, device: torch.device) -> torch.Tensor:
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake
