"""The backend `remat` of `torch.compile`, found by its entry point.

    torch.compile(model, backend="remat", options={"plan": "gpt2.plan.json", "inner": "inductor"})

A backend sees graphs, one at a time, and neither the model nor where a forward begins. So a graph is matched by its
identity alone, all its calls must have the same regions, and what `apply` says of a larger batch is not said here.
Where that is too little, or transformers builds an attention mask that the plan was not made with,
`torch.compile(remat.apply(model, plan))` does more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from remat._torch.inductor import inductor_with
from remat.capture.dynamo import drop_dead_views
from remat.errors import PlanMismatch, UsageError
from remat.evaluation.plan import Plan
from remat.execution.compiled.compiling import (
    AOT_EAGER,
    COMPILERS,
    INDUCTOR,
    Backend,
    Compiled,
    compile_graph,
    found_backend,
    require_whole,
)
from remat.execution.eager.rewrite import CallRegion
from remat.execution.placing import Placer


def remat(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Compiled:
    """Compile a captured graph with the regions that a plan has for it.

    options  plan: a Plan or its file    inner: "inductor" (the default) or "aot_eager"; any others are Inductor's
    mode     Inductor's

    Raises UsageError for other options, PlanMismatch for a graph that the plan does not know. Graphs without
    gradients are compiled without regions.
    """
    settings = dict(options or {})
    plan, inner = settings.pop("plan", None), settings.pop("inner", INDUCTOR)
    if plan is None:
        raise UsageError('the backend needs a plan: torch.compile(model, backend="remat", options={"plan": ...}).')
    compiler = _compiler(inner, mode, settings)
    if not torch.is_grad_enabled():
        return found_backend(compiler)(graph_module, list(example_inputs))
    drop_dead_views(graph_module)
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    _compare_compiler(plan, inner)
    require_whole(plan)
    regions = _regions(plan, graph_module, example_inputs)
    return compile_graph(graph_module, example_inputs, regions, compiler)


def _compiler(inner: str, mode: str | None, settings: dict[str, Any]) -> str | Backend:
    if inner == INDUCTOR:
        return inductor_with(mode, settings)
    if inner != AOT_EAGER or mode or settings:
        unknown = f"option {next(iter(settings))!r}" if inner == AOT_EAGER and settings else f"inner {inner!r}"
        raise UsageError(f"the backend has no {unknown}; inner is {INDUCTOR!r}, or {AOT_EAGER!r} without more options.")
    return inner


def _compare_compiler(plan: Plan, inner: str) -> None:
    planned = plan.execution
    if plan.is_of_modules:
        raise PlanMismatch("a plan of modules runs untraced, and a compiler would drop it; leave torch.compile out.")
    if planned in COMPILERS and planned != inner:
        raise PlanMismatch(
            f"the plan says what the step needs compiled by {planned}; choose it as inner, or make a plan for {inner}."
        )


def _regions(plan: Plan, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[CallRegion, ...]:
    """Return the regions of a graph, by its identity."""
    placer = Placer(plan)
    choices = set(placer.every(graph_module).values())
    if not choices:
        raise PlanMismatch(
            f"the plan was made for {plan.about['workload']!r}, which has no such graph {placer.fit(0, graph_module)}; "
            "make a plan for this model, or compile it as "
            "torch.compile(remat.apply(model, plan)), which captures it as planning did."
        )
    if len(choices) > 1:
        raise PlanMismatch(
            "the plan has different regions for different calls of one graph, which a backend cannot tell apart; use "
            "torch.compile(remat.apply(model, plan))."
        )
    dtypes = {str(p.dtype).removeprefix("torch.") for p in example_inputs if isinstance(p, nn.Parameter)}
    if not dtypes <= set(plan.about["parameter_dtypes"]):
        raise PlanMismatch(f"the plan is for parameters of {plan.about['parameter_dtypes']}, this model has {dtypes}.")
    return choices.pop()
