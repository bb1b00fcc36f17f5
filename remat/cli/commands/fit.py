"""`remat fit`, and its screen: micro-batch, accumulation and plan together, beside the classic ladder."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from remat.cli.commands import Answer
from remat.cli.commands.files import about_with, file_name, require_writable
from remat.cli.commands.options import BudgetOptions, Json, PricedOptions, RequestOptions
from remat.cli.commands.source import Source, opened, warn_of_budget, workload_of
from remat.errors import UsageError
from remat.units import gib

if TYPE_CHECKING:
    from remat.evaluation.plan import Plan
    from remat.planning.budget import Budget
    from remat.planning.fit import BatchFit
    from remat.planning.windows import BatchCandidate


GLOBAL_BATCH, MAX_BATCH, MAX_SEQ, MAX_TOKENS = "global_batch", "max_batch", "max_seq", "max_tokens"


def fit(
    budget: BudgetOptions,
    step: PricedOptions,
    wanted: RequestOptions,
    global_batch: Annotated[
        int | None,
        typer.Option(min=1, help="Samples of all ranks in an optimizer step; finds the fastest way to run them."),
    ] = None,
    max_batch: Annotated[bool, typer.Option("--max-batch", help="Find the largest micro-batch that fits.")] = False,
    max_seq: Annotated[bool, typer.Option("--max-seq", help="Find the longest sequence that fits the batch.")] = False,
    max_tokens: Annotated[
        bool,
        typer.Option(
            "--max-tokens", help="Find the most tokens of a batch, for rows of any length up to --seq-len, or --packed."
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="The plan file.", show_default="NAME.plan.json in this folder")
    ] = None,
    as_json: Json = False,
) -> Answer:
    """Choose micro-batch, accumulation and plan together, for the least time per token."""
    from remat.cli.screen import live_line

    question = _question(global_batch, max_batch, max_seq, max_tokens, step)
    require_writable(out or Path("new.plan.json"))
    with live_line() as line:
        from remat.planning.fit import Sizing, fitted, largest_of, longest_of
        from remat.planning.token_cap import most_tokens_of

        found = opened(step, line)
        assert found.spec is not None and found.place is not None
        request = wanted.request(line, step, budget)
        warn_of_budget(request, found.place)
        sizing = Sizing.of(workload_of(found.spec), request, found.place, found.loop, line.say)
        if global_batch is not None:
            fit = fitted(sizing, global_batch)
            return _fit_answer(fit, _save(fit.plan, found, sizing.budget, out))
        if question == MAX_TOKENS:
            plan = most_tokens_of(sizing, packed=bool(step.packed))
        else:
            plan = (largest_of if question == MAX_BATCH else longest_of)(sizing)
    return _plan_answer(plan, _save(plan, found, sizing.budget, out), question)


def _question(global_batch: int | None, max_batch: bool, max_seq: bool, max_tokens: bool, step: PricedOptions) -> str:
    """Return what is asked. Raises UsageError for no question, for two, and for what the answer chooses."""
    asked = {GLOBAL_BATCH: global_batch is not None, MAX_BATCH: max_batch, MAX_SEQ: max_seq, MAX_TOKENS: max_tokens}
    if sum(asked.values()) != 1:
        raise UsageError("give exactly one of --global-batch N, --max-batch, --max-seq and --max-tokens.")
    question = next(name for name, given in asked.items() if given)
    if question == GLOBAL_BATCH and step.accumulation is not None:
        raise UsageError("--accumulation is chosen by fit for a --global-batch; leave it out.")
    if question != MAX_SEQ and step.batch_size is not None:
        raise UsageError("--batch-size is chosen by fit; leave it out, or use --max-seq.")
    if question == MAX_SEQ and step.seq_len is not None:
        raise UsageError("--seq-len is found by --max-seq; leave it out.")
    if question == MAX_TOKENS and step.packed and step.seq_len is not None:
        raise UsageError("--seq-len of a packed row is found by --max-tokens; leave it out.")
    return question


def _save(plan: Plan, source: Source, limit: Budget, out: Path | None) -> Path:
    assert source.spec is not None
    path = out or Path(f"{file_name(plan.about['workload'])}.plan.json")
    spec = source.spec.changed(batch_size=plan.about["batch_size"], seq_len=plan.about["seq_len"])
    dataclasses.replace(plan, about=about_with(spec, plan.about, path, limit)).save(path)
    return path


# The screen


def _plan_answer(plan: Plan, path: Path, question: str) -> Answer:
    from remat.cli.screen import plan_text
    from remat.evaluation.plan import TOKEN_CAP
    from remat.evaluation.refused import REFUSED_SIZES

    cap = plan.about.get(TOKEN_CAP, {})
    found = {MAX_BATCH: plan.about["batch_size"], MAX_SEQ: plan.about["seq_len"], MAX_TOKENS: cap.get("tokens")}[
        question
    ]
    data = {
        "model": plan.about["workload"],
        question: found,
        **({TOKEN_CAP: cap} if cap else {}),
        REFUSED_SIZES: plan.about.get(REFUSED_SIZES, []),
        "batch_size": plan.about["batch_size"],
        "seq_len": plan.about["seq_len"],
        "budget_bytes": plan.budget_bytes,
        "target": plan.target,
        "costs": plan.costs,
        "predicted": plan.predicted,
        "plan_path": str(path),
    }
    what = {MAX_BATCH: f"largest micro-batch: {found}", MAX_SEQ: f"longest sequence: {found}"}
    return Answer(
        data,
        f"{what.get(question) or _cap_text(cap)}\n\n{plan_text(plan)}\n\nwrote {path}\nnext: remat validate {path}",
    )


def _cap_text(cap: dict[str, int | bool]) -> str:
    """Say which batches the plan fits."""
    tokens = f"most tokens of a batch: {cap['tokens']:,}"
    if cap["packed"]:
        return f"{tokens}, packed into one row"
    return (
        f"{tokens}, counted as rows x tokens of the longest row\n"
        f"  at most {cap['longest']:,} tokens in a row, and {cap['rows']:,} rows\n"
        "  No such batch requests more than the budget. The plan's figures are for one of the largest."
    )


def _fit_answer(found: BatchFit, path: Path) -> Answer:
    from remat.evaluation.refused import REFUSED_SIZES

    def shown(candidate: BatchCandidate | None) -> dict[str, Any] | None:
        if candidate is None:
            return None
        return {**candidate.to_json(), "samples_per_s": found.samples_per_s(candidate)}

    data = {
        "model": found.about["workload"],
        "target": found.target,
        "costs": found.costs,
        "budget_bytes": found.budget_bytes,
        "global_batch": found.samples,
        "ranks": found.ranks,
        "rungs": {name: shown(candidate) for name, candidate in found.rungs.items()},
        "candidates": [shown(candidate) for candidate in found.candidates],
        "loss_weights": list(found.weights),
        REFUSED_SIZES: found.about.get(REFUSED_SIZES, []),
        "predicted": found.plan.predicted,
        "plan_path": str(path),
    }
    return Answer(data, _fit_text(found, path))


def _fit_text(found: BatchFit, path: Path) -> str:
    from remat.cli.screen import columns, heading

    per_token, ranks = found.about["seq_len"] is not None, f" over {found.ranks} ranks" if found.ranks > 1 else ""
    title = heading({**found.about, "accumulation": 1}, found.target, found.costs)
    unit = gib(found.budget_bytes).split()[1]
    rate = "tokens/s" if per_token else "samples/s"
    header = ("", "micro-batch", "steps", f"peak\n{unit}", "overhead\n%", "time\nms", rate)
    rows = [_cells(name, candidate, found, unit) for name, candidate in found.rungs.items()]
    above, lines = columns(header, rows)
    table = "\n".join(["  " + line.rstrip() for line in (*above, *lines)])
    return "\n\n".join(
        [
            f"{title}\nglobal batch {found.samples}{ranks} within {gib(found.budget_bytes)}",
            table,
            _verdict(found),
            "\n".join([*_notes(found), f"wrote {path}", f"next: remat validate {path}"]),
        ]
    )


def _cells(name: str, candidate: BatchCandidate | None, found: BatchFit, unit: str) -> tuple[str, ...]:
    from remat.units import parse_bytes

    if candidate is None:  # which the whole batch is only where the model refuses it
        return name, "nothing fits" if name != "as is" else "refused by the model", "", "", "", "", ""
    last = f", last {candidate.last}" if candidate.last != candidate.micro_batch else ""
    size = f"{candidate.peak_bytes / parse_bytes(f'1{unit}'):.2f}"
    if candidate.time_us is None or candidate.overhead is None:
        return name, f"{candidate.micro_batch}{last}", f"{candidate.accumulation}", size, "", "does not fit", ""
    rate = (found.samples_per_s(candidate) or 0.0) * (found.about["seq_len"] or 1)
    return (
        name,
        f"{candidate.micro_batch}{last}",
        f"{candidate.accumulation}",
        size,
        f"{100 * candidate.overhead:.1f}",
        f"{candidate.time_us / 1000:,.1f}",
        f"{rate:,.0f}" if found.about["seq_len"] else f"{rate:,.1f}",
    )


def _verdict(found: BatchFit) -> str:
    """Say in a sentence which rung won, and why."""
    best = found.best
    ladder = {name: rung for name, rung in found.rungs.items() if rung is not None and rung is not best}
    fitting = {name: rung for name, rung in ladder.items() if rung.time_us is not None}
    how = f"micro-batch {best.micro_batch} x {best.accumulation}"
    if not fitting or best.time_us is None:
        return f"only the joint optimum fits: {how}."
    name = min(fitting, key=lambda name: fitting[name].time_us or 0.0)
    rival = fitting[name]
    faster = (rival.time_us or 0.0) / best.time_us - 1
    if faster <= -0.0005:
        return f"{how} is {-100 * faster:.1f} % slower than `{name}`, whose steps wait for copies; plans here do not."
    if faster < 0.0005:
        same = "the same as" if best.micro_batch == rival.micro_batch else "as fast as"
        return f"{how} is {same} the best rung of the ladder, `{name}`: other recomputation gains nothing."
    if best.fused:
        less = "fused kernels move fewer bytes"
        return f"{how} is {100 * faster:.1f} % faster than the best rung of the ladder, `{name}`: {less}."
    why = []
    if best.micro_batch > rival.micro_batch:
        cost = f"{100 * (best.overhead or 0):.1f} %"
        why.append(f"a larger micro-batch than {rival.micro_batch} is worth an overhead of {cost}")
    elif best.micro_batch < rival.micro_batch:
        why.append(f"a smaller micro-batch than {rival.micro_batch} has less overhead")
    else:
        why.append(f"an overhead of {100 * (best.overhead or 0):.1f} % instead of {100 * (rival.overhead or 0):.1f} %")
    return f"{how} is {100 * faster:.1f} % faster than the best rung of the ladder, `{name}`: {'; '.join(why)}."


def _notes(found: BatchFit) -> list[str]:
    from remat.evaluation.refused import refused_sizes

    notes = []
    if slices := found.best.slices:
        notes.append(f"the loss runs in {slices} chunk{'s' if slices > 1 else ''}; --exact leaves it whole")
    if found.best.fused:
        notes.append("the plan has fused kernels; the ladder has none")
    if sent := found.best.offloaded_bytes:
        notes.append(f"{gib(sent)} of every micro-batch are on the host between forward and backward")
    if found.best.last != found.best.micro_batch:
        weights = sorted(set(found.weights), reverse=True)
        first, last = weights[0], weights[-1]
        notes.append(f"multiply the mean loss of a micro-batch by {first:.4g}, of the last one by {last:.4g}")
    if found.ranks > 1:
        notes.append("times exclude communication between ranks")
    return [*notes, *refused_sizes(found.about)]
