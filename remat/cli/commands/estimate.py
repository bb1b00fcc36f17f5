"""`remat estimate`, and its screen: where every byte of a training step goes, and how fast it can be."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from remat.cli.commands import Answer
from remat.cli.commands.options import Allocator, Json, PlanInPlaceOfModel, SourceOptions
from remat.cli.commands.source import Source, levers_of, opened_step
from remat.errors import UsageError
from remat.units import gib, ms, parse_count

if TYPE_CHECKING:
    from remat.cli.screen import LiveLine
    from remat.costing.profile import Profile
    from remat.evaluation.plan import Plan
    from remat.planning.advice import Lever
    from remat.planning.estimate import Estimate, Peaks
    from remat.recording.fake_step import FakeStep
    from remat.recording.optimizer_states import States
    from remat.workload.training_loop import TrainingLoop

SEVERAL = 2  # micro-batches: from the second on, all are alike
MODULES = 10  # rows
EAGER_MATTERS = 1.001


def estimate(
    source: SourceOptions,
    plan: PlanInPlaceOfModel = None,
    parameters: Annotated[
        str | None,
        typer.Option(help="States of so many parameters only (8B, 1e9); needs no model.", show_default=False),
    ] = None,
    advice: Annotated[
        bool, typer.Option("--advice", help="Also list remedies with the bytes that each frees (about a minute).")
    ] = False,
    allocator: Allocator = None,
    as_json: Json = False,
) -> Answer:
    """Show the memory of a training step by category and module, and its time. Nothing is solved."""
    from remat.cli.screen import live_line

    if parameters is not None:
        return _states(parse_count(parameters, what="--parameters"), source)
    with live_line() as line:
        found, loaded = opened_step(source, plan, line)
        profile, step = found.record()
        from remat.planning.estimate import allocator_of, estimate_under

        settings = allocator_of(loaded, allocator)
        estimates = [estimate_under(loaded, profile, settings)]
        if step is not None and found.loop is not None:
            again = _other_loop(found.loop)
            estimates.append(estimate_under(loaded, _recorded_again(step, found, again), settings))
        levers = _advice(found, profile, step, loaded, line) if advice else None
    return _answer(estimates, levers)


def _other_loop(loop: TrainingLoop) -> TrainingLoop:
    """Return the loop with accumulation turned on or off; if it steps in backward, the loop that does not."""
    if loop.step_in_backward:
        return dataclasses.replace(loop, step_in_backward=False)
    return dataclasses.replace(loop, accumulation=1 if loop.accumulates else SEVERAL)


def _recorded_again(step: FakeStep, found: Source, loop: TrainingLoop) -> Profile:
    from remat.planning.profiling import profile_step

    assert found.place is not None
    before, step.loop = step.loop, loop
    try:
        return profile_step(step, found.place)
    finally:
        step.loop = before


def _advice(found: Source, profile: Profile, step: FakeStep | None, plan: Plan | None, line: LiveLine) -> list[Lever]:
    if found.spec is None or found.place is None or found.loop is None or step is None:
        raise UsageError("--advice records the step again with each remedy, and needs --model.")
    if plan is not None:
        raise UsageError("--advice is about the step without a plan; leave --plan out.")
    return levers_of(found, profile, step, line)


# Only the states


def _states(count: int, source: SourceOptions) -> Answer:
    from remat.recording.optimizer_states import states_of
    from remat.workload.optimizers import optimizer_named
    from remat.workload.training_loop import TrainingLoop
    from remat.workload.workload import weights_and_optimizer

    other = [name for name in source.given if name not in ("optimizer", "dtype", "ranks", "shard", "target")]
    if other:
        raise UsageError(f"--{other[0].replace('_', '-')} does not go with --parameters: leave one of the two out.")
    named = optimizer_named(source.optimizer or "adamw")
    dtype, optimizer = weights_and_optimizer(source.dtype or "fp32", named)  # type: ignore[arg-type]
    loop = TrainingLoop(ranks=source.ranks or 1, shard=source.shard)  # type: ignore[arg-type]
    states = states_of([(count,)], dtype, optimizer).per_rank(loop.ranks, loop.shard)
    data: dict[str, Any] = {"parameters": count, "ranks": loop.ranks, "shard": loop.shard, "total_bytes": states.total}
    data |= {"states": dataclasses.asdict(states)}
    return Answer(data, _states_text(count, states, source, loop))


def _states_text(count: int, states: States, source: SourceOptions, loop: TrainingLoop) -> str:
    from remat.cli.screen import aligned

    per_rank = f", one of {loop.ranks} ranks ({loop.shard or 'nothing shared'})" if loop.ranks > 1 else ""
    title = f"{count:,} parameters, {source.dtype or 'fp32'}, {source.optimizer or 'adamw'}{per_rank}: states alone"
    rows = [("parameters", states.parameters), ("gradients", states.gradients), *states.optimizer.items()]
    width = len(gib(states.total))
    table = [
        (name, f"{gib(size):>{width}}", f"{size / 1e9:,.2f} GB") for name, size in [*rows, ("in all", states.total)]
    ]
    return f"{title}\n\n{aligned(table)}\n\nactivations, temporaries and gathered states come on top: use --model"


# The screen


def _answer(estimates: Sequence[Estimate], levers: list[Lever] | None) -> Answer:
    from remat.workload.training_loop import TrainingLoop

    first = estimates[0]
    data = first.to_json()
    data["other_accumulation"] = [
        {"loop": TrainingLoop.of(other.about).to_json(), "peaks": dataclasses.asdict(other.peaks)}
        for other in estimates[1:]
    ]
    data["levers"] = None if levers is None else [dataclasses.asdict(lever) for lever in levers]
    return Answer(data, _text(estimates, levers))


def _text(estimates: Sequence[Estimate], levers: list[Lever] | None) -> str:
    from remat.cli.screen import heading

    first = estimates[0]
    paragraphs = [
        heading(first.about, first.target, first.costs),
        _peaks_text(estimates),
        f"at the peak, {first.peaks.at}\n{_shares(first.peaks.parts)}",
    ]
    if first.peaks.modules:
        paragraphs.append(f"of activations, logits and loss\n{_shares(first.peaks.modules, MODULES)}")
    paragraphs.append(_speed_text(first))
    if levers is not None:
        paragraphs.append(_levers_text(levers))
    return "\n\n".join(paragraphs)


def _peaks_text(estimates: Sequence[Estimate]) -> str:
    from remat.cli.screen import aligned, reserved_rows

    first = estimates[0]
    peaks = first.peaks
    rows: list[tuple[str, ...]] = [
        ("peak", gib(peaks.peak_bytes), f"of {gib(first.memory_bytes)} on {first.target}"),
        *reserved_rows([each.to_json() for each in first.allocator]),
        *_eager_row(peaks),
        ("first step", gib(peaks.first_step_bytes), "the optimizer's state does not exist yet"),
        *((name, gib(size), "") for name, size in peaks.phases.items() if size),
    ]
    for other in estimates[1:]:
        rows.append((_other_name(first), gib(other.peaks.peak_bytes), _OTHER_WHY[_other_name(first)]))
    return aligned(rows)


_OTHER_WHY = {
    "accumulating": "gradients are alive through forward",
    "no accumulation": "gradients are freed after each step",
    "step after backward": "gradients stay until backward ends",
}


def _other_name(first: Estimate) -> str:
    """Name the difference between the loop of `_other_loop` and that of `first`."""
    if first.about.get("step_in_backward"):
        return "step after backward"
    return "accumulating" if first.about["accumulation"] == 1 else "no accumulation"


def _eager_row(peaks: Peaks) -> list[tuple[str, ...]]:
    """Make a row for the eager peak, if it is notably larger."""
    if peaks.eager_bytes is None or peaks.eager_bytes < EAGER_MATTERS * peaks.peak_bytes:
        return []
    return [("in eager mode", gib(peaks.eager_bytes), "local variables keep tensors that a trace frees")]


def _shares(parts: dict[str, int], most: int = 1 << 30) -> str:
    """Format bytes and shares, largest first; small parts, and those beyond the first `most`, share one row."""
    from remat.cli.screen import aligned

    total = sum(parts.values())
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    large = [(name, size) for name, size in ordered[:most] if 100 * size >= total]
    if rest := total - sum(size for _, size in large):
        large.append(("other", rest))
    width = max(len(gib(size)) for _, size in large)
    return aligned((name, f"{gib(size):>{width}}", f"{100 * size / total:5.1f} %") for name, size in large)


def _speed_text(found: Estimate) -> str:
    from remat.cli.screen import aligned

    speed, estimated = found.speed, " (estimated)" if found.costs == "estimated" else ""
    rate = f"{speed.tokens_per_s:,.0f} tokens/s" if speed.tokens_per_s else f"{speed.samples_per_s:,.1f} samples/s"
    size = f"{speed.tokens:,} tokens" if speed.tokens else f"{speed.samples:,} samples"
    rows: list[tuple[str, ...]] = [("optimizer step", f"{ms(speed.update_time_us)}{estimated}", f"{size}, {rate}")]
    if speed.host_us > speed.device_us:
        rows.append(
            ("bound by the host", "", f"launching kernels takes this time; running them takes {ms(speed.device_us)}")
        )
    if speed.mfu is not None and speed.hfu is not None:
        recomputed = "" if speed.hfu == speed.mfu else f"; HFU {100 * speed.hfu:.1f} % with recomputation"
        flops = f"{speed.model_flops / 1e12:,.1f} TFLOP{recomputed}"
        rows.append(("utilisation", f"MFU {100 * speed.mfu:.1f} %{estimated}", flops))
    return aligned(rows)


def _levers_text(levers: list[Lever]) -> str:
    from remat.cli.screen import aligned

    if not levers:
        return "no remedy frees memory"
    rows = [(lever.what, f"frees {gib(lever.frees_bytes)}", f"leaves {gib(lever.peak_bytes)}") for lever in levers]
    return f"remedies, each alone, without checkpointing\n{aligned(rows)}"
