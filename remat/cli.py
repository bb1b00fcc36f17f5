"""The command line: `remat plan`, `validate`, `show`, `profile`, `models`.

Rules that every command keeps:

1. stdout carries the answer and nothing else: text for a person, or with `--json` exactly one document, errors
   included. While a command works, file descriptor 1 itself leads to stderr, because C++ libraries print too.
2. Exit codes are those of `remat.errors`; 1 is a bug in remat. No traceback, unless REMAT_DEBUG=1 asks for it.
3. An option that will be refused is refused before anything slow begins.
4. `remat --help` is quick: what needs torch is imported inside the commands.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from remat import __version__
from remat.errors import Infeasible, NoPlanInTime, RematError, UsageError, ValidationFailed
from remat.units import gib

if TYPE_CHECKING:
    from remat.planning import Budget
    from remat.plans import Plan
    from remat.profiling import Profile
    from remat.screen import LiveLine
    from remat.solution import Limits
    from remat.target import Target
    from remat.workload import Workload
    from remat.workloads import ModelSpec

INTERNAL_ERROR = 1
DEBUG = "REMAT_DEBUG"
SPEC = "model_spec"  # key of a plan's or profile's `about`: how to make its workload again
PACKAGES = ("numpy", "ortools", "torch", "transformers")

# The base of what typer raises for a bad command line; its module depends on typer's version.
CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="remat",
    add_completion=False,
    rich_markup_mode="rich",
    help="Fastest activation checkpointing for a PyTorch model within a memory budget.",
)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a command found: for a script, for a person, and how it went."""

    data: dict[str, Any]
    text: str
    failure: RematError | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` and return its exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    as_json = "--json" in arguments
    try:
        command = typer.main.get_command(app)
        answer = command.main(args=arguments, prog_name="remat", standalone_mode=False)
        if not isinstance(answer, Answer):  # of --help and --version
            return int(answer or 0)
        _print(json.dumps(answer.data, indent=2, allow_nan=False) if as_json else answer.text)
        if answer.failure is None:
            return 0
        tell_error(str(answer.failure))
        return answer.failure.exit_code
    except BrokenPipeError:  # `remat show ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return INTERNAL_ERROR
    except Exception as error:
        return _fail(error, as_json)


def _fail(error: Exception, as_json: bool) -> int:
    """Say what went wrong, once for a person and with `--json` once for a script; returns the exit code."""
    if os.environ.get(DEBUG):
        traceback.print_exception(error)
    exit_code, message = _explain(error)
    tell_error(message)
    if as_json:
        report: dict[str, Any] = {"error": message, "exit_code": exit_code}
        if isinstance(error, Infeasible):
            report |= {"minimum_budget_bytes": error.minimum_budget_bytes, "breakdown": error.breakdown}
        _print(json.dumps(report, indent=2))
    return exit_code


def _explain(error: Exception) -> tuple[int, str]:
    if isinstance(error, RematError):
        return error.exit_code, str(error)
    if isinstance(error, CommandLineError):
        context = getattr(error, "ctx", None)
        hint = f" Try `{context.command_path} --help`." if context else ""
        return UsageError.exit_code, f"{error.format_message().rstrip('.')}.{hint}"  # type: ignore[attr-defined]
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in PACKAGES:
        package = (error.name or "").partition(".")[0]
        return UsageError.exit_code, f"this needs the package {package}, which is missing. Run `pip install {package}`."
    what = f"{type(error).__name__}: {error}".splitlines()[0]
    where = traceback.extract_tb(error.__traceback__)[-1]
    return (
        INTERNAL_ERROR,
        f"internal error, {what} ({Path(where.filename).name}:{where.lineno}). This is a bug in remat; "
        f"{DEBUG}=1 shows the traceback to report.",
    )


def tell_error(message: str) -> None:
    from remat.screen import tell

    tell("error", message, "bold red")


def _print(text: str) -> None:
    print(text)
    sys.stdout.flush()


# What surrounds every command


def answering(command: Callable[..., Answer]) -> Callable[..., Answer]:
    """Run `command` under the rules above; an interrupt is an error that says so."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Answer:
        from remat.screen import quiet_libraries, stdout_to_stderr

        with stdout_to_stderr(), quiet_libraries(os.environ.get(DEBUG, "")):
            try:
                return command(*args, **kwargs)
            except KeyboardInterrupt:
                raise NoPlanInTime("interrupted before there was a result; nothing was written.") from None

    return run


# Options

Model = Annotated[
    str | None,
    typer.Option(
        help="A ready-made model (see `remat models`), path/to/file.py:function that returns a remat.Workload, a "
        "folder with a config.json, or the id of a causal language model on the Hugging Face hub. The first that fits.",
    ),
]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Samples in a batch.")]
SeqLen = Annotated[int | None, typer.Option(min=1, help="Tokens in a sample.")]
ImageSize = Annotated[int | None, typer.Option(min=1, help="Side of the images, for ready-made image models.")]
Dtype = Annotated[
    str | None, typer.Option(help="amp (fp32 weights, bf16 autocast), fp32 or bf16 (weights, gradients and state).")
]
Optimizer = Annotated[
    str | None, typer.Option(help="A class of torch.optim in any case (adamw, sgd, ...), or none.", show_default=False)
]
TargetName = Annotated[
    str | None,
    typer.Option(
        help="Device to plan for: cuda (this machine's GPU), cpu, h100-80gb, h200, a100-40gb, a100-80gb or rtx4090; "
        "auto is this machine's GPU, or else h100-80gb.",
    ),
]
Accumulation = Annotated[
    int | None, typer.Option(min=1, help="Micro-batches per optimizer step. More than one keeps gradients alive.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and all else on stderr.")]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.", show_default=False)]


class Shape(NamedTuple):
    """The options that shape a workload, as `ModelSpec` calls them."""

    batch_size: int | None
    seq_len: int | None
    image_size: int | None
    dtype: str | None
    optimizer: str | None


def _show_version(wanted: bool) -> None:
    if wanted:
        _print(f"remat {__version__} (torch {importlib.metadata.version('torch')})")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def remat(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


# Commands


@app.command(name="plan")
@answering
def plan_command(
    budget: Annotated[
        str,
        typer.Option(
            help="Limit on the peak of the whole step: bytes with a unit (20GiB, 20GB, 21474836480B), or 90% or auto "
            "of the target's memory."
        ),
    ],
    model: Model = None,
    profile: Annotated[
        Path | None, typer.Option(help="Plan from a file of `remat profile`, in place of --model.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The plan file.", show_default="NAME.plan.json in this folder")
    ] = None,
    target: TargetName = None,
    headroom: Annotated[
        str | None,
        typer.Option(
            help="Subtracted from the budget first: bytes with a unit, or a percentage of it.",
            show_default="0, and 10% of --budget auto",
        ),
    ] = None,
    batch_size: BatchSize = None,
    seq_len: SeqLen = None,
    image_size: ImageSize = None,
    dtype: Dtype = None,
    optimizer: Optimizer = None,
    accumulation: Accumulation = None,
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds for the solver; the best plan by then is taken.", show_default="none")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of the solver.")] = 0,
    as_json: Json = False,
) -> Answer:
    """Find the fastest plan within a memory budget, and write it to a file."""
    from remat.screen import live_line

    if time_limit is not None and not 0 < time_limit < math.inf:
        raise UsageError(f"--time-limit {time_limit} is not a positive number of seconds.")
    _require_writable(out or Path("new.plan.json"))
    shape = Shape(batch_size, seq_len, image_size, dtype, optimizer)
    with live_line() as line:
        limits = _limits(time_limit, seed, line)
        if profile is not None:
            _refuse_beside_profile(model=model, target=target, accumulation=accumulation, **shape._asdict())
            found, limit, spec = _plan_from_profile(profile, budget, headroom, limits, line)
        else:
            spec = _spec_from(model, shape)
            found, limit = _plan_from_model(spec, budget, headroom, target, accumulation, limits, line)
    path = out or Path(f"{_file_name(found.about['workload'])}.plan.json")
    about = {**_about(found.about, spec, path), "headroom_bytes": limit.given_bytes - limit.limit_bytes}
    found = dataclasses.replace(found, about=about)
    found.save(path)
    return _plan_answer(found, path, replayed=profile is None)


@app.command(name="profile")
@answering
def profile_command(
    out: Annotated[Path, typer.Option(help="The profile file.", show_default=False)],
    model: Model = None,
    target: TargetName = None,
    batch_size: BatchSize = None,
    seq_len: SeqLen = None,
    image_size: ImageSize = None,
    dtype: Dtype = None,
    optimizer: Optimizer = None,
    accumulation: Accumulation = None,
    as_json: Json = False,
) -> Answer:
    """Record and cost a training step, for `remat plan --profile` on any machine."""
    from remat.profiling import profile
    from remat.screen import live_line

    _require_writable(out)
    spec = _spec_from(model, Shape(batch_size, seq_len, image_size, dtype, optimizer))
    with live_line() as line:
        line.say(f"recording {spec.model}")
        found = profile(
            _workload(spec), target=target or "auto", accumulation=accumulation or 1, on_progress=line.measured
        )
    graph = dataclasses.replace(found.graph, about=_about(found.graph.about, spec, out))
    found = dataclasses.replace(found, graph=graph)
    found.save(out)
    return _profile_answer(found, out)


@app.command(name="validate")
@answering
def validate_command(
    plan: PlanFile,
    model: Model = None,
    device: Annotated[
        str, typer.Option("--device", "--target", help="cuda or cpu of this machine; auto is cuda if there is one.")
    ] = "auto",
    batch_size: BatchSize = None,
    seq_len: SeqLen = None,
    image_size: ImageSize = None,
    dtype: Dtype = None,
    optimizer: Optimizer = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of weights, data and dropout.")] = 0,
    as_json: Json = False,
) -> Answer:
    """Run the untouched and the planned step on this machine, and compare peak, time, loss and gradients."""
    from remat.plans import Plan
    from remat.screen import live_line
    from remat.validating import validate

    found, place = Plan.load(plan), _device(device)
    spec = _spec_of(found, plan, model, Shape(batch_size, seq_len, image_size, dtype, optimizer))
    with live_line() as line:
        line.say(f"validating {plan}")
        report = validate(_workload(spec), found, device=place, seed=seed, on_progress=_measuring_first(line))
    failure = None if report.passed else ValidationFailed(f"the measurement contradicts the plan {plan}.")
    return Answer(report.to_json(), str(report), failure)


@app.command(name="show")
@answering
def show_command(plan: PlanFile, as_json: Json = False) -> Answer:
    """Print a plan: what it promises, its regions, and what each saves."""
    from remat.plans import Plan
    from remat.screen import plan_text, regions_text

    found = Plan.load(plan)
    try:
        text = f"{plan_text(found)}\n\n{regions_text(found)}"
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{plan} is not a complete plan file ({type(error).__name__}: {error}).") from error
    return Answer(found.to_json(), text.rstrip())


@app.command(name="models")
@answering
def models_command(as_json: Json = False) -> Answer:
    """List the ready-made models, and the sizes that they come with."""
    from remat import models
    from remat.screen import aligned

    rows = [
        {
            "name": name,
            "batch_size": workload.batch_size,
            "seq_len": workload.seq_len,
            "autocast": str(workload.autocast).removeprefix("torch.") if workload.autocast else None,
            "optimizer": getattr(workload.optimizer, "__name__", None),
        }
        for name in models.names()
        for workload in [models.build(name)]
    ]
    cells = [tuple("-" if value is None else str(value) for value in row.values()) for row in rows]
    return Answer({"models": rows}, aligned([("model", "batch", "tokens", "autocast", "optimizer"), *cells], indent=""))


# Their parts


def _plan_from_model(
    spec: ModelSpec,
    budget: str,
    headroom: str | None,
    target: str | None,
    accumulation: int | None,
    limits: Limits,
    line: LiveLine,
) -> tuple[Plan, Budget]:
    line.say("loading PyTorch")
    from remat.planning import plan_profile
    from remat.profiling import fake_step, find_place, profile_step

    place = find_place(target or "auto")
    limit = _budget(budget, headroom, place.target)
    line.say(f"recording {spec.model}")
    step = fake_step(_workload(spec), place, accumulation=accumulation or 1)
    profile = profile_step(step, place, on_progress=line.measured)
    line.say("solving")
    with _headroom_on_top(limit):
        return plan_profile(profile, limit, limits=limits, step=step), limit


def _plan_from_profile(
    path: Path, budget: str, headroom: str | None, limits: Limits, line: LiveLine
) -> tuple[Plan, Budget, ModelSpec | None]:
    line.say(f"reading {path}")
    from remat.planning import plan_profile
    from remat.profiling import Profile
    from remat.workloads import ModelSpec

    profile = Profile.load(path)
    limit = _budget(budget, headroom, profile.target)
    line.say("solving")
    with _headroom_on_top(limit):
        plan = plan_profile(profile, limit, limits=limits)
    return plan, limit, ModelSpec.from_json(profile.graph.about.get(SPEC), path.absolute().parent)


def _budget(budget: str, headroom: str | None, target: Target) -> Budget:
    from remat.planning import parse_budget
    from remat.screen import tell

    limit = parse_budget(budget, headroom, target.memory_bytes)
    if limit.given_bytes > target.memory_bytes:
        tell(
            "warning",
            f"the budget of {gib(limit.given_bytes)} is more than the {gib(target.memory_bytes)} of {target.name}; "
            "it is planned for all the same.",
            "bold yellow",
        )
    return limit


@contextlib.contextmanager
def _headroom_on_top(limit: Budget) -> Iterator[None]:
    """A refusal names the least peak; what the headroom takes comes on top of that."""
    try:
        yield
    except Infeasible as error:
        if not (headroom := limit.given_bytes - limit.limit_bytes):
            raise
        message = f"{error} The headroom of {gib(headroom)} comes on top."
        raise Infeasible(message, error.minimum_budget_bytes, error.breakdown) from error


def _limits(time_limit: float | None, seed: int, line: LiveLine) -> Limits:
    from remat.solution import Limits

    return Limits(time_s=time_limit, seed=seed, on_progress=line.solved)


def _spec_from(model: str | None, shape: Shape) -> ModelSpec:
    if model is None:
        raise UsageError(
            "--model is missing: a ready-made model (see `remat models`), file.py:function, a folder or a hub id."
        )
    from remat.workloads import ModelSpec

    return ModelSpec(model, *shape)


def _spec_of(plan: Plan, path: Path, model: str | None, shape: Shape) -> ModelSpec:
    """How to make a plan's workload: as when it was planned, except for what is given now."""
    from remat.workloads import ModelSpec

    spec = ModelSpec.from_json(plan.about.get(SPEC), path.absolute().parent)
    if spec is None and model is None:
        raise UsageError(
            f"{path} does not say how to build its model; name it with --model, for example file.py:function."
        )
    if spec is None:
        spec = ModelSpec("", batch_size=plan.about.get("batch_size"), seq_len=plan.about.get("seq_len"))
    return spec.changed(model=model, **shape._asdict())


def _about(about: dict[str, Any], spec: ModelSpec | None, path: Path) -> dict[str, Any]:
    """`about` with what it takes to make the workload again from a file at `path`."""
    others = {name: value for name, value in about.items() if name != SPEC}
    return others if spec is None else {**others, SPEC: spec.to_json(path.absolute().parent)}


def _refuse_beside_profile(**options: Any) -> None:
    given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None]
    if given:
        raise UsageError(
            f"{', '.join(given)} cannot go with --profile: the profile holds one step on one target. "
            "Give the option to `remat profile`, or plan with --model."
        )


def _require_writable(path: Path) -> None:
    """Rule 3: find out that a file cannot be written before the work, not after it."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a file to write.")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"{path} cannot be written: there is no folder {folder}.")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{path} cannot be written: the folder {folder} is read-only.")


def _file_name(workload: str) -> str:
    return re.sub(r"[^\w.-]+", "-", workload).strip("-.") or "model"


def _device(name: str) -> str | None:
    if name == "auto":
        return None
    if name not in ("cuda", "cpu"):
        raise UsageError(f"a plan is validated on this machine: --device is auto, cuda or cpu, not {name!r}.")
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda needs a CUDA device, and PyTorch sees none on this machine; use --device cpu.")
    return name


def _measuring_first(line: LiveLine) -> Callable[[int, int], None]:
    """Progress of a validation: once the operators are measured, the steps run."""

    def on_progress(done: int, total: int) -> None:
        line.measured(done, total)
        if done == total:
            line.say("running the untouched and the planned step")

    return on_progress


def _workload(spec: ModelSpec) -> Workload:
    from remat.screen import quiet_torch

    quiet_torch(os.environ.get(DEBUG, ""))
    return spec.workload()


# Their answers


def _plan_answer(plan: Plan, path: Path, *, replayed: bool) -> Answer:
    from remat.screen import plan_text

    data = {
        "model": plan.about["workload"],
        "budget_bytes": plan.budget_bytes + plan.about["headroom_bytes"],
        "headroom_bytes": plan.about["headroom_bytes"],
        "target": plan.target,
        "costs": plan.costs,
        "predicted": plan.predicted,
        "without_checkpointing": plan.without_checkpointing,
        "solver": plan.solver,
        "plan_path": str(path),
    }
    notes = [] if replayed else ["judged by the evaluator alone: a profile has no model to replay the plan on"]
    notes += [f"wrote {path}", f"next: remat validate {path}"]
    return Answer(data, plan_text(plan) + "\n\n" + "\n".join(notes))


def _profile_answer(profile: Profile, path: Path) -> Answer:
    from remat.memory import Memory
    from remat.screen import profile_text

    graph, costs = profile.graph, profile.costs
    without_checkpointing = {
        "peak_bytes": Memory(graph, costs.workspace_per_op(graph)).peak_without_checkpointing,
        "step_time_us": costs.step_time_us(graph),
    }
    data = {
        "model": graph.about["workload"],
        "target": profile.target.name,
        "costs": costs.source,
        "without_checkpointing": without_checkpointing,
        "nodes": len(graph.nodes),
        "operators": graph.op_count,
        "kinds": len(graph.kinds),
        "not_measured": costs.about.get("not_measured", []),
        "profile_path": str(path),
    }
    notes = [f"wrote {path}", f"next: remat plan --profile {path} --budget auto"]
    return Answer(data, profile_text(data, graph.about) + "\n\n" + "\n".join(notes))


if __name__ == "__main__":
    sys.exit(main())
