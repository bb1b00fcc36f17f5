"""The backend `remat` of `torch.compile`, and `remat.compile`: compiled training under a budget, in one line.

    model = remat.compile(model, budget="20GiB", optimizer=optimizer)
    model = torch.compile(model, backend="remat", options={"budget": "20GiB", "optimizer": optimizer})

The first compilation plans, on the machine that trains and for the batch that it is given; sizes that are open count as
that batch has them. The budget is for the whole step. The backend sees graphs and their inputs, no model: parameters
that no graph takes are not counted. `remat.compile` knows the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from remat._torch.dynamo import passed_on
from remat._torch.inductor import chosen_decompositions, compiling_with, inductor_with
from remat.errors import RematError, UsageError
from remat.units import parse_bytes
from remat.workload.training_loop import Holds

_OURS = ("budget", "optimizer", "accumulation", "outside", "model", "uses", "holds", "cuts")


def compile(
    model: nn.Module,
    budget: str | int,
    *,
    optimizer: Any = torch.optim.AdamW,
    accumulation: int = 1,
    outside: str | int = 0,
    uses: int = 1,
    holds: Holds = "outputs",
    **options: Any,
) -> Any:
    """Compile a model with `torch.compile` so that a training step keeps a memory budget.

    The first forward plans, on the machine that trains. Needs OR-tools.

    Args:
        model: The model to compile.
        budget: Most bytes of a whole training step: "20GiB", or a number of bytes.
        optimizer: The optimizer that trains, or its class; None where none does.
        accumulation: Micro-batches per step. With more than one, gradients are alive while forward runs.
        outside: Bytes to set aside for what runs beside the model, such as a loss that is not compiled.
        holds: All "outputs" of the model where the loop holds them while backward runs, or the "loss" alone.
        uses: How often a step runs what is compiled, such as one block of a model that has many.
        options: Options of `torch.compile`, such as `dynamic=`; those of Inductor as `options={...}`.

    Returns:
        The compiled model. Its first forward raises Infeasible where no choice of saved values keeps the budget.

    Raises:
        UsageError: The budget cannot be read.

    Example:
        >>> model = remat.compile(model, budget="20GiB", optimizer=optimizer)
    """
    given = dict(options.pop("options", None) or {}) | {
        "budget": budget,
        "optimizer": optimizer,
        "accumulation": accumulation,
        "outside": outside,
        "uses": uses,
        "holds": holds,
        "model": model,
    }
    _bytes(budget)
    return torch.compile(model, backend=remat, options=given, **options)


def remat(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a captured graph so that training keeps a budget.

    options  budget, and `optimizer`, `accumulation`, `outside`, `uses`, `holds` as `remat.compile` takes them; others
             are Inductor's. Or plan: a Plan or its file, see `execution.compiled.backend`
    mode     Inductor's

    Returns what runs the graph. Raises UsageError without budget and plan, Infeasible where no choice fits.
    """
    if "budget" not in (options or {}):
        from remat.execution.compiled.backend import remat as with_plan

        return with_plan(graph_module, example_inputs, options=options, mode=mode)
    assert options is not None
    options.setdefault("cuts", {})  # of all graphs that are captured with these options: they share the budget
    asked = {name: value for name, value in options.items() if name in _OURS}
    given = {name: value for name, value in options.items() if name not in _OURS}
    inductor = inductor_with(mode, given)
    if not torch.is_grad_enabled():
        return inductor(graph_module, list(example_inputs))
    try:
        with compiling_with(_partitioner(asked, example_inputs), chosen_decompositions):
            return inductor(graph_module, list(example_inputs))
    except Exception as failure:
        if (told := passed_on(failure, RematError)) is None:
            raise
        raise told from None


def _partitioner(asked: dict[str, Any], example_inputs: Sequence[Any]) -> Any:
    from remat.compiled.outside import outside_of
    from remat.compiled.partitioner import BudgetPartitioner

    model = asked.get("model")
    outside = outside_of(
        example_inputs,
        asked.get("optimizer", torch.optim.AdamW),
        model=() if model is None else (*model.parameters(), *model.buffers()),
        more=_bytes(asked.get("outside", 0)),
        kept=asked.get("accumulation", 1) > 1,
        holds_results=asked.get("holds", "outputs") == "outputs",
    )
    return BudgetPartitioner(_bytes(asked["budget"]), outside, asked.get("uses", 1), asked["cuts"])


def _bytes(size: str | int) -> int:
    if isinstance(size, str):
        return parse_bytes(size, what="budget")
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise UsageError(f"`budget=` is a size such as '20GiB' or a number of bytes, not {size!r}.")
    return size
