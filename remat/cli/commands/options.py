"""Options, each described once, in groups that commands share.

A command takes a group as one parameter (`search: SearchOptions`). `spread` lays groups out for typer, one option for
each field, and gathers them again when the command is called.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from remat.cli import screen
from remat.cli.commands import Answer
from remat.errors import UsageError

if TYPE_CHECKING:
    from remat.cli.model_spec import ModelSpec
    from remat.cli.screen import LiveLine
    from remat.planning.request import PlanRequest
    from remat.workload.training_loop import TrainingLoop

STEP, LOOP, PLAN, EXPERT = "The training step", "The training loop", "The plan", "For experts"  # titles in --help

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and everything else on stderr.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Hide progress; errors and warnings remain.")]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.", show_default=False)]
PlanInPlaceOfModel = Annotated[
    Path | None,
    typer.Option("--plan", help="A plan file, in place of --model: its step, with the plan.", show_default=False),
]


def _option(*names: str, panel: str = STEP, **about: Any) -> Any:
    return typer.Option(*names, show_default=about.pop("show_default", False), rich_help_panel=panel, **about)


Advice = Annotated[bool, typer.Option(help="If the budget is too small, search for remedies (takes a while).")]
Allocator = Annotated[
    str | None,
    _option(
        "--allocator",
        show_default="as set here",
        panel=EXPERT,
        help="PYTORCH_CUDA_ALLOC_CONF of the training, '' for none.",
    ),
]


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """`--model` and the options that shape its workload: the fields of a `ModelSpec`."""

    model: Annotated[
        str | None,
        _option(
            help="A name (`remat models`), file.py:function that returns a remat.Workload, a folder with a "
            "config.json, or a hub id of a language model."
        ),
    ] = None
    trainer: Annotated[
        str | None,
        _option(
            metavar="FILE:FUNCTION",
            help="In place of --model: file.py:function that returns a built Trainer of transformers or TRL, whose "
            "own step is planned.",
        ),
    ] = None
    batch_size: Annotated[int | None, _option(min=1, help="Samples in a batch.")] = None
    seq_len: Annotated[int | None, _option(min=1, help="Tokens in a sample.")] = None
    image_size: Annotated[int | None, _option(min=1, help="Side of the images, for ready-made image models.")] = None
    dtype: Annotated[
        str | None,
        _option(
            help="amp (fp32 weights, bf16 autocast), fp32, bf16, bf16-master (fp32 copies and state in the optimizer) "
            "or bf16-master-grads (fp32 gradients too)."
        ),
    ] = None
    optimizer: Annotated[
        str | None,
        _option(
            help="A class of torch.optim (adamw, sgd), with a form (adamw:fused, :foreach, :single); adamw8bit of "
            "bitsandbytes; or none."
        ),
    ] = None

    padded: Annotated[
        bool | None,
        _option(
            "--padded",
            help="Plan for padded text: an attention mask with zeros, which needs other kernels. Batches without "
            "padding also run.",
        ),
    ] = None
    packed: Annotated[
        bool | None,
        _option(
            "--packed",
            help="Plan for packed text: each row holds several sequences of the model's own length, told apart by "
            "their position ids.",
        ),
    ] = None
    lora: Annotated[
        str | None,
        _option(
            metavar="r=RANK",
            help="Train LoRA adapters on all linear layers but the head (r=16, or r=16,dropout=0.05). By default "
            "weights are bf16, adapters fp32.",
        ),
    ] = None
    quantize: Annotated[
        str | None,
        _option(
            metavar="nf4",
            help="Weights of linear layers but the head in 4 bits, as bitsandbytes stores them; with --lora.",
        ),
    ] = None

    @property
    def given(self) -> dict[str, Any]:
        """The fields of this class and of those that extend it that were given."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def spec(self) -> ModelSpec:
        """Return the spec of the model asked for.

        Raises UsageError without a model, and with two.
        """
        if not self.model and not self.trainer:
            raise UsageError(
                "--model is missing: a ready-made model (see `remat models`), file.py:function, a folder or a hub id."
            )
        if self.model is not None and self.trainer is not None:
            raise UsageError("--model and --trainer both say what to plan for; give one of them.")
        if self.trainer is not None and ".py:" not in self.trainer:
            raise UsageError(f"--trainer {self.trainer} is no file.py:function that returns a Trainer.")
        from remat.cli.model_spec import ModelSpec

        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(ModelSpec)}
        return ModelSpec(**{**fields, "model": self.model or self.trainer})


@dataclasses.dataclass(frozen=True)
class StepOptions(ModelOptions):
    """A model, and the device that its step runs on."""

    target: Annotated[
        str | None,
        _option(
            help="cuda or cpu of this machine, auto, or a card by name: h100-80gb, h200, a100-40gb, l40s, rtx4090, ... "
            "A wrong name prints all."
        ),
    ] = None
    accumulation: Annotated[
        int | None,
        _option(min=1, help="Micro-batches of an optimizer step. More than one keeps gradients alive."),
    ] = None
    clip_grad_norm: Annotated[
        bool | None, _option("--clip-grad-norm", panel=LOOP, help="Gradients are clipped to a global norm.")
    ] = None
    ema: Annotated[
        bool | None, _option("--ema", panel=LOOP, help="The loop keeps a running average of the weights.")
    ] = None
    ddp: Annotated[
        bool | None, _option("--ddp", panel=LOOP, help="The model is wrapped in DistributedDataParallel.")
    ] = None
    ranks: Annotated[int | None, _option(min=1, panel=LOOP, help="Number of data-parallel devices.")] = None
    shard: Annotated[
        str | None,
        _option(
            panel=LOOP,
            help="State sharded over the ranks: zero1 optimizer state, zero2 + gradients, zero3 + parameters (FSDP).",
        ),
    ] = None

    holds: Annotated[
        str | None,
        _option(
            panel=LOOP,
            show_default="loss",
            help="Kept until the next forward returns: loss, or outputs (logits too).",
        ),
    ] = None

    optimizer_step: Annotated[
        str | None,
        _option(
            panel=LOOP,
            metavar="backward",
            show_default="whole",
            help="whole: after backward. backward: each parameter with its gradient.",
        ),
    ] = None

    offload: Annotated[
        str | None,
        _option(
            panel=PLAN,
            show_default="none",
            help="To the host: activations, optimizer, weights, or optimizer,activations. Bitwise.",
        ),
    ] = None

    def loop(self, own: TrainingLoop) -> TrainingLoop:
        """Return the training loop asked for; options that are not given are those of `own`.

        Raises UsageError for contradictions.
        """
        from remat.planning.links import loop_with

        names = (field.name for field in dataclasses.fields(own))
        said = {name: value for name in names if (value := getattr(self, name, None)) is not None}
        if self.optimizer_step not in (None, "whole", "backward"):
            raise UsageError(f"--optimizer-step is whole or backward, not {self.optimizer_step!r}.")
        if self.optimizer_step is not None:
            said["step_in_backward"] = self.optimizer_step == "backward"
        found = loop_with(dataclasses.replace(own, **said), self.offload)
        assert found is not None
        return found


@dataclasses.dataclass(frozen=True)
class PricedOptions(StepOptions):
    """A model, and the prices of its kernels."""

    costs: Annotated[
        Path | None,
        _option(
            metavar="TABLE.csv",
            panel=EXPERT,
            help="Kernel times measured on the target (`remat profile --costs` writes the table).",
        ),
    ] = None


@dataclasses.dataclass(frozen=True)
class SourceOptions(PricedOptions):
    """A step: of a model, or from a profile."""

    profile: Annotated[Path | None, _option(help="A file of `remat profile`, in place of --model and its options.")] = (
        None
    )


@dataclasses.dataclass(frozen=True)
class BudgetOptions:
    budget: Annotated[
        str,
        typer.Option(help="Limit on the peak: 20GiB, 90% of memory, 60%step of its own, auto."),
    ]
    headroom: Annotated[
        str | None,
        typer.Option(
            help="Bytes, or a percentage, subtracted from the budget.",
            show_default="0; where --budget auto is not simulated, 10%",
        ),
    ] = None


@dataclasses.dataclass(frozen=True)
class RequestOptions:
    """The options of a plan beside its budget: the fields of a `PlanRequest`."""

    time_limit: Annotated[
        float | None,
        _option(panel=EXPERT, show_default="none", help="Wall seconds of a search; then its best plan so far is used."),
    ] = None
    seed: Annotated[
        int, _option(panel=EXPERT, show_default=True, min=0, max=2**31 - 1, help="Random seed of solvers.")
    ] = 0
    execution: Annotated[
        str,
        _option(
            panel=EXPERT,
            show_default=True,
            help="eager; modules: whole modules as regions, for FSDP2.",
        ),
    ] = "eager"
    depth: Annotated[
        int | None,
        _option(
            panel=EXPERT,
            min=1,
            max=2,
            show_default="the most that the execution allows",
            help="Nesting depth of regions.",
        ),
    ] = None
    numerics: Annotated[
        str | None,
        _option(
            panel=PLAN,
            show_default="sums",
            help="bitwise gradients; sums: losses and MLPs in chunks; rounding: fused kernels too.",
        ),
    ] = None
    exact: Annotated[bool, _option("--exact", panel=PLAN, help="The same as --numerics bitwise.")] = False
    fuse: Annotated[bool, _option("--fuse", panel=PLAN, help="The same as --numerics rounding.")] = False
    host_budget: Annotated[
        str | None,
        _option(
            panel=PLAN,
            show_default="half of the free memory; for a target by name its size; a power of two",
            help="Host memory for offloading: bytes with a unit, or a percentage of the free memory.",
        ),
    ] = None
    allocator: Allocator = None

    def __post_init__(self) -> None:
        if self.time_limit is not None and not 0 < self.time_limit < math.inf:
            raise UsageError(f"--time-limit {self.time_limit} is not a positive number of seconds.")
        from remat.execution.executions import require_known

        require_known(self.execution)

    def request(self, line: LiveLine, source: StepOptions, budget: BudgetOptions | None = None) -> PlanRequest:
        """Make the request from the options, `--offload` of the step, and the budget."""
        from remat.formulation.solution import Limits
        from remat.planning.request import PlanRequest, numerics_of

        return PlanRequest(
            budget=None if budget is None else budget.budget,
            headroom=None if budget is None else budget.headroom,
            execution=self.execution,
            depth=self.depth,
            numerics=numerics_of(self.numerics, exact=self.exact, fuse=self.fuse),
            offload=source.offload,
            host_budget=self.host_budget,
            allocator=self.allocator,
            limits=Limits(time_s=self.time_limit, seed=self.seed, on_progress=line.solved),
        )


@dataclasses.dataclass(frozen=True)
class EachRequestOptions(RequestOptions):
    """A request to several solvers, or for several budgets; the time limit is that of each."""

    time_limit: Annotated[
        float | None,
        _option(
            panel=EXPERT,
            show_default="60 s of work, whatever the machine",
            help="Wall seconds of each search; then its best plan so far is used.",
        ),
    ] = None
    strategies: Annotated[
        str | None,
        _option(
            panel=EXPERT,
            show_default="the heuristics and exact",
            help="Names (sqrt-n,exact), or all; a wrong name prints them.",
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strategies is None:
            return
        from remat.solvers import STRATEGIES

        wrong = [name for name in self._named if name not in (*STRATEGIES, "all")]
        if wrong or not self._named:
            what = f"there is no strategy {wrong[0]!r}" if wrong else "--strategies names none"
            raise UsageError(f"{what}; choose from {', '.join(STRATEGIES)}, or all.")

    @property
    def _named(self) -> list[str]:
        return [name.strip() for name in (self.strategies or "").split(",") if name.strip()]

    @property
    def names(self) -> Sequence[str] | None:
        """The strategies asked for; None for the default choice."""
        from remat.solvers import STRATEGIES

        return STRATEGIES if "all" in self._named else self._named or None


GROUPS = (
    *(ModelOptions, StepOptions, PricedOptions, SourceOptions, BudgetOptions),
    *(RequestOptions, EachRequestOptions),
)


def spread(command: Callable[..., Answer]) -> Callable[..., Answer]:
    """Replace the groups among the parameters of `command` by their fields, and add `--quiet`."""
    hints = typing.get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if hint in GROUPS}

    @functools.wraps(command)
    def run(quiet: bool = False, **given: Any) -> Answer:
        screen.quiet = quiet
        gathered = {
            name: group(**{field.name: given.pop(field.name) for field in dataclasses.fields(group)})
            for name, group in groups.items()
        }
        return command(**gathered, **given)

    parameters = [
        parameter
        for parameter in inspect.signature(command).parameters.values()
        for parameter in (
            _fields(groups[parameter.name])
            if parameter.name in groups
            else [parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)]
        )
    ]
    parameters.append(inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Quiet))
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _fields(group: type) -> Iterator[inspect.Parameter]:
    hints = typing.get_type_hints(group, include_extras=True)
    for field in dataclasses.fields(group):
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name]
        )
