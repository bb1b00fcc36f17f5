"""The backend `remat` of `torch.compile`, and `remat.compile`: compiled training under a budget, in one line.

    model = remat.compile(model, budget="20GiB", optimizer=optimizer)
    model = torch.compile(model, backend="remat", options={"budget": "20GiB", "optimizer": optimizer})

The first compilation plans, on the machine that trains and for the batch that it is given; sizes that are open count as
that batch has them. The budget is for the whole step. The backend sees graphs and their inputs, no model: parameters
that no graph takes are not counted. `remat.compile` knows the model.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.utils.weak import WeakIdKeyDictionary

from remat._torch.dynamo import ddp_around, passed_on
from remat._torch.inductor import chosen_decompositions, compiling_with, inductor_with
from remat.compiled.asked import NAMES, CompileArguments, WeakArgument
from remat.compiled.promise import CompiledStep, Promise
from remat.errors import RematError, UsageError
from remat.execution.reports import OnLarger
from remat.workload.training_loop import Holds

if TYPE_CHECKING:
    from remat.compiled.losses import ChunkedGraph
    from remat.compiled.outside import Outside


def compile(
    model: nn.Module,
    budget: str | int,
    *,
    optimizer: Any = torch.optim.AdamW,
    accumulation: int = 1,
    batches: int = 1,
    outside: str | int = 0,
    uses: int = 1,
    holds: Holds = "outputs",
    numerics: str = "sums",
    on_larger: OnLarger = "warn",
    mode: str | None = None,
    **options: Any,
) -> Any:
    """Compile a model with `torch.compile` so that a training step keeps a memory budget.

    The first forward plans, on the machine that trains. Needs OR-tools.

    Args:
        model: The model to compile.
        budget: Most bytes of a whole training step: "20GiB", or a number of bytes.
        optimizer: The optimizer that trains, several in a list, or what makes one of parameters, such as its class;
            None where none does.
        accumulation: Micro-batches per step. With more than one, gradients are alive while forward runs.
        batches: How many are on the device at once: 2 where the loop loads the next one before backward ends.
        outside: Bytes to set aside for what runs beside the model, such as a loss that is not compiled.
        uses: How often a step runs what is compiled, such as one block of a model that has many. A step that runs it
            more often than its budget allows raises UsageError.
        holds: All "outputs" of the model where the loop holds them until the next forward returns, as in
            `logits, loss = model(x, y)`, or the "loss" alone.
        numerics: "sums" allows a chunked loss: where the default compilation exceeds the budget, a large head and its
            loss run in chunks, and gradients of the head's weight are sums in another order. "bitwise" does not.
        on_larger: "warn" or "refuse" (raise PlanMismatch) a batch larger than the plan is for, where sizes are open.
        mode: That of `torch.compile`, such as "max-autotune-no-cudagraphs".
        options: Options of `torch.compile`, such as `dynamic=`; those of Inductor as `options={...}`.

    Returns:
        The compiled model. Its first forward raises Infeasible where the budget is less than any choice of saved values
        needs, and NoPlanInTime where the search found none that keeps it.

    Raises:
        UsageError: An argument cannot be read, or the model is no module.

    Example:
        >>> model = remat.compile(model, budget="20GiB", optimizer=optimizer)
    """
    model = getattr(model, "_orig_mod", model)  # of one that is compiled already
    if not isinstance(model, nn.Module):
        raise UsageError(f"remat.compile takes a torch.nn.Module, not {type(model).__name__}.")
    of_inductor = dict(options.pop("options", None) or {})
    asked = CompileArguments(
        budget, optimizer, accumulation, batches, outside, uses, holds, numerics, on_larger, model, mode
    )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UsageError("the model is on the meta device, without data: compile it where it trains.")
    _inductor(mode, of_inductor)
    given = of_inductor | {name: WeakArgument.of(getattr(asked, name)) for name in NAMES} | {"step": CompiledStep()}
    name_losses(model)
    compiled: nn.Module = torch.compile(model, backend=remat, options=given, **options)  # type: ignore[assignment]
    given["step"].warn_where_none_of(compiled, model, is_set_aside=asked.outside_bytes > 0)
    return compiled


def name_losses(model: nn.Module) -> None:
    """Tell models of transformers the loss that they compute anyhow.

    A class whose name does not tell (GPT2LMHeadModel) logs as it looks for one, and that breaks its graph in two: no
    chunk of logits could be beside its loss. Its `loss_type` stays as it is: by that a Trainer counts labels.
    """
    losses = sys.modules.get("transformers.loss.loss_utils")
    for module in model.modules() if losses else ():
        if vars(module).get("loss_type", "") is None and not hasattr(module, "_loss_function"):
            module.loss_function = losses.LOSS_MAPPING["ForCausalLM"]  # type: ignore[union-attr]


def remat(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a captured graph so that training keeps a budget.

    options  budget, and others as `remat.compile` takes them; unknown ones are Inductor's
    mode     Inductor's

    Returns what runs the graph. Raises UsageError without a budget, Infeasible and NoPlanInTime as
    `remat.compile` does.
    """
    try:
        return _compiled(graph_module, list(example_inputs), {} if options is None else options, mode)
    except Exception as failure:
        if (told := passed_on(failure, RematError)) is None:
            raise
        raise told from None


def _compiled(
    graph_module: fx.GraphModule, example_inputs: list[Any], options: dict[str, Any], mode: str | None
) -> Callable[..., Any]:
    if "budget" not in options:
        found = ", ".join(map(repr, options)) or "no options"
        raise UsageError(
            f'the backend "remat" needs a budget, and was given {found}: torch.compile(model, backend="remat", '
            'options={"budget": "20GiB"}). A plan file is for steps that run uncompiled.'
        )
    asked = CompileArguments(**{name: WeakArgument.held(value) for name, value in options.items() if name in NAMES})
    given = {name: value for name, value in options.items() if name not in (*NAMES, "step")}
    keeps_buffers = given.pop("allow_buffer_reuse", None)
    step = _step_of(asked, options)
    inductor = _inductor(mode or asked.mode, given)
    if not torch.is_grad_enabled():
        return inductor(graph_module, example_inputs)
    is_smaller = step.close_a_smaller(graph_module.graph, example_inputs)
    outside = _outside(asked, example_inputs, step)

    def planned(graph: fx.GraphModule, only_if: str = "") -> Callable[..., Any]:
        with step.adding(is_smaller=is_smaller) as key:
            promise = Promise(key, step, asked, outside, graph.graph, example_inputs)
            ours = _partitioner(asked, outside, step, key, only_if)
            with compiling_with(ours, chosen_decompositions, keeps_buffers):
                return promise.kept_by(inductor(graph, example_inputs))

    chunked = _chunked(asked, outside, graph_module)
    if chunked is None:
        return planned(graph_module)
    if chunked.is_likely:  # the whole loss is not traced then, where PyTorch's own choice exceeds in chunks too
        with _unless_default("exceeds"):
            return chunked.completing(planned(chunked.module, only_if="exceeds"))
    with _unless_default("fits"):
        return planned(graph_module, only_if="fits")
    return chunked.completing(planned(chunked.module))


_STEPS = WeakIdKeyDictionary()  # of models: by budget


def _step_of(asked: CompileArguments, options: dict[str, Any]) -> CompiledStep:
    """Return the step that shares a budget: all graphs of the same options, or of one model.

    A loop over blocks makes options for each: `block.compile(backend="remat", options={..., "model": model})`. These
    must stay equal: Dynamo compiles anew for others, and after eight of them runs blocks uncompiled.
    """
    if "step" in options or asked.model is None:
        step: CompiledStep = options.setdefault("step", CompiledStep())
        return step
    steps: dict[int, CompiledStep] = _STEPS.setdefault(asked.model, {})
    return steps.setdefault(asked.budget_bytes, CompiledStep())


def _chunked(asked: CompileArguments, outside: Outside, graph_module: fx.GraphModule) -> ChunkedGraph | None:
    """Return the graph with its large losses in chunks, where that may be."""
    from remat.compiled.losses import in_chunks

    if not asked.may_chunk_losses:
        return None
    return in_chunks(graph_module, asked.budget_bytes - outside.during_graphs)


@contextlib.contextmanager
def _unless_default(only_if: str) -> Iterator[None]:
    """Go on where a compilation ended because PyTorch's own choice does not do what it was for: "fits" or "exceeds"."""
    from remat.compiled.partitioner import OtherDefault

    try:
        yield
    except Exception as failure:
        if passed_on(failure, OtherDefault) is None:
            raise


def _inductor(mode: str | None, options: dict[str, Any]) -> Callable[..., Any]:
    try:
        return inductor_with(mode, options)
    except RuntimeError as error:  # of an option, or a mode, that it does not know
        text = str(error).partition(", known options are")[0]  # it lists hundreds
        raise UsageError(f"Inductor does not take these options: {text}. `remat` takes {', '.join(NAMES)}.") from error


def _outside(asked: CompileArguments, example_inputs: Sequence[Any], step: CompiledStep) -> Outside:
    from remat.compiled.outside import outside_of, parameters_in

    around = ddp_around()  # has a copy of all gradients in its buckets
    buckets = 0 if around is None else sum(each.nbytes for each in around.parameters() if each.requires_grad)
    step.note_parameters(example_inputs)
    known = list(step.parameters)  # those that graphs before it were given among them
    if (model := around if asked.model is None else asked.model) is not None:
        known = [*model.parameters(), *model.buffers()]
    step.note_batch(example_inputs, set(map(id, known)))
    return outside_of(
        example_inputs,
        asked.optimizer,
        model=[*known, *parameters_in(asked.optimizer)],
        more=asked.outside_bytes + buckets + (asked.batches - 1) * step.batch_bytes,
        kept=asked.accumulation > 1,
        holds_results=asked.holds == "outputs",
    )


def _partitioner(asked: CompileArguments, outside: Outside, step: CompiledStep, key: Any, only_if: str) -> Any:
    from remat.compiled.partitioner import BudgetPartitioner  # which needs OR-tools

    return BudgetPartitioner(asked.budget_bytes, outside, asked.uses, step.cuts, key, only_if=only_if)
