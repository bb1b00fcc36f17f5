"""Compile: keep a plan's regions in a graph that a compiler goes on with.

`torch.utils.checkpoint` is lost where a captured graph is compiled further: nothing is recomputed, and nothing says so.
Compilers know one language for it, tags on nodes. AOTAutograd traces forward and backward into one joint graph, in
which every operator carries the tag of the captured node that it comes from, and a partitioner decides by the tags
what forward saves and what backward computes again. So here the regions become tags, and `partitioning.py` splits
the joint graph.

Tags are one level deep, because a joint graph computes a value again at most once: nested regions are refused. In
plain stretches the partitioner is free: it may recompute there what costs it nothing.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from remat._torch.inductor import aot_eager_with, backend_called, chosen_decompositions, compiling_with
from remat.capture.nodes import captured_nodes
from remat.errors import PlanMismatch, UsageError
from remat.evaluation.form import CAPTURED, form_of
from remat.evaluation.plan import Plan, RegionRef
from remat.execution.compiled.tags import RECOMPUTED, SAVED
from remat.execution.eager.rewrite import CallRegion, Counts

INDUCTOR, AOT_EAGER = COMPILERS = "inductor", "aot_eager"

# Decompositions that memory is better without. Max pooling's gradient as a scatter needs int64 indices twice and, in 16
# bits, a buffer in fp32: five times the gradient's bytes. Inductor can lower the operator itself, to one kernel.
_WASTEFUL = (torch.ops.aten.max_pool2d_with_indices_backward.default,)

Compiled = Callable[..., Any]
Backend = Callable[..., Compiled]


class CompiledCalls:
    """One captured graph, compiled for every call that a plan has of it; called with the number of the call.

    regions  of every such call

    Raises PlanMismatch for a call that the plan does not know.
    """

    def __init__(
        self,
        regions: Mapping[int, tuple[CallRegion, ...]],
        graph_module: fx.GraphModule,
        example_inputs: Sequence[Any],
        inner: str | Backend,
        counts: Counts,
    ):
        self.regions = regions
        self._counts = counts
        *others, last = dict.fromkeys(self.regions.values())
        graphs = {regions: copy.deepcopy(graph_module) for regions in others} | {last: graph_module}
        self._compiled = {
            regions: compile_graph(graph, example_inputs, regions, inner) for regions, graph in graphs.items()
        }

    def __call__(self, call: int, *args: Any) -> Any:
        regions = self.regions.get(call)
        if regions is None:
            raise PlanMismatch(
                f"graph call {call} of this forward is another graph than the plan was made for; make a plan for this "
                "model."
            )
        self._counts.regions += len(regions)
        return self._compiled[regions](*args)


def compile_graph(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], regions: Sequence[CallRegion], inner: str | Backend
) -> Compiled:
    """Compile `graph_module` by `inner` and keep `regions`.

    inner  "inductor", "aot_eager", or the object that `torch.compile` makes of one of them and its options

    Raises UsageError for nested regions, and for a compiler that would drop regions silently.
    """
    require_kept(regions, inner)
    inputs = list(example_inputs)
    if not regions:
        return found_backend(inner)(graph_module, inputs)
    tag(graph_module, regions)
    if name_of(inner) == AOT_EAGER:
        return _aot_eager(graph_module, inputs)
    with _inductor_settings():
        return found_backend(inner)(graph_module, inputs)


def require_kept(regions: Sequence[CallRegion] | Sequence[RegionRef], inner: str | Backend) -> None:
    """Raise UsageError if `inner` would not keep `regions`."""
    if name_of(inner) not in COMPILERS:
        raise UsageError(f"a plan is kept by the compilers {INDUCTOR} and {AOT_EAGER}, not by {name_of(inner)!r}.")
    if any(region.inner for region in regions):
        raise UsageError(
            "this plan nests regions, and a compiled graph computes a value again at most once: make a plan without "
            "nesting (`depth=1`), or run this one without torch.compile."
        )


def require_whole(plan: Plan) -> None:
    """Raise UsageError if `plan` has chunked losses, chunked MLPs or fused groups, which compilers do not run."""
    if (form := form_of(plan.about)) != CAPTURED:
        what = "fused groups" if form.fused and not form.chunks else str(form)
        raise UsageError(
            f"this plan runs {what}, which does not go through torch.compile: make a plan that leaves losses and MLPs "
            "whole and fuses nothing (`exact=True`), without nesting (`depth=1`), or run this one without "
            "torch.compile."
        )


def tag(graph_module: fx.GraphModule, regions: Sequence[CallRegion]) -> None:
    """Mark every node of `regions` as recomputed or saved; the operators that it is traced to inherit the mark."""
    nodes = captured_nodes(graph_module)
    for index, region in enumerate(regions):
        for ordinal in range(region.first, region.last + 1):
            nodes[ordinal].meta["ac_graph_id"] = index
            nodes[ordinal].meta["recompute"] = SAVED if ordinal in region.saved else RECOMPUTED


def name_of(inner: str | Backend) -> str:
    """Return the name by which `torch.compile` knows a compiler."""
    if isinstance(inner, str):
        return inner
    return str(getattr(inner, "compiler_name", None) or getattr(inner, "__name__", inner))


def found_backend(inner: str | Backend) -> Backend:
    if not isinstance(inner, str):
        return inner
    return backend_called(inner)


def _aot_eager(graph_module: fx.GraphModule, inputs: list[Any]) -> Compiled:
    from remat.execution.compiled.partitioning import partition

    return aot_eager_with(partition)(graph_module, inputs)


@contextlib.contextmanager
def _inductor_settings() -> Iterator[None]:
    """Compile with our partitioner.

    Inductor's cache of joint graphs ignores tags, so a plan would be lost in it. The decompositions in `_WASTEFUL` are
    left out, in forward and backward.
    """
    from remat.execution.compiled.partitioning import Partitioner

    with compiling_with(Partitioner(), _decompositions):
        yield


def _decompositions() -> dict[Any, Any]:
    """Return Inductor's decompositions without the wasteful ones; a named function, as part of a cache's key."""
    return {operator: how for operator, how in chosen_decompositions().items() if operator not in _WASTEFUL}
