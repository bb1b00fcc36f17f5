"""The command line: what scripts rely on (exit codes, one JSON document on stdout), and what a person is told.

Commands run in this process through `main`, which returns the exit code. The model is a stack of layers in a file, as
a user would write it; its batch is large, so that activations are most of the peak and a budget can bite.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import typer
from typer.testing import CliRunner

from remat.cli import model_spec as workloads
from remat.cli import screen
from remat.cli.main import app
from remat.cli.model_spec import ModelSpec
from remat.errors import NoPlanInTime, UsageError
from remat.evaluation.plan import Plan
from remat.planning import planner as planning
from remat.planning import request as asking
from remat.planning.study import Study
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload
from tests.command_line import Remat, line_of, once

ROOT = Path(__file__).resolve().parents[1]


def stack(*arguments: str, budget: str = "72MiB") -> list[str]:
    return ["plan", "--model", "model.py:stack", "--target", "h100-80gb", "--budget", budget, *arguments]


def against(*arguments: str, budget: str = "72MiB") -> list[str]:
    return ["compare", "--model", "model.py:stack", "--target", "h100-80gb", "--budget", budget, *arguments]


def over(*arguments: str) -> list[str]:
    return ["sweep", "--model", "model.py:stack", "--target", "h100-80gb", *arguments]


def left_behind() -> set[str]:
    return {path.name for path in Path().iterdir()} - {"model.py", "cache", "__pycache__"}


# plan


def test_a_plan_is_one_document_on_stdout_and_a_file(remat: Remat) -> None:
    ran = remat(*stack("--json"))
    assert (ran.exit_code, left_behind()) == (0, {"stack.plan.json"})
    assert "noise from Python\n" in ran.stderr and "noise from C\n" in ran.stderr
    data, plan = ran.data, Plan.load("stack.plan.json")
    assert data["model"] == "stack"
    assert data["budget_bytes"] == plan.budget_bytes == 72 << 20
    assert (data["target"], data["costs"]) == ("h100-80gb", "estimated")
    assert data["plan_path"] == "stack.plan.json"
    assert {"peak_bytes", "step_time_us", "recompute_time_us", "overhead", "breakdown"} <= set(data["predicted"])
    assert {"peak_bytes", "step_time_us"} <= set(data["without_checkpointing"])
    assert {"name", "status", "objective_us", "bound_us", "gap", "wall_s"} <= set(data["solver"])
    assert data["predicted"]["peak_bytes"] <= 72 << 20 < data["without_checkpointing"]["peak_bytes"]
    assert sum(data["predicted"]["breakdown"].values()) == data["predicted"]["peak_bytes"]
    assert data["predicted"] == plan.predicted and plan.regions


def test_a_person_is_told_the_budget_the_cost_and_what_is_next(remat: Remat) -> None:
    ran = remat(*stack("--out", "mine.json"))
    assert ran.exit_code == 0
    lines = [re.sub(r"  +", "  ", line.strip()) for line in ran.stdout.splitlines()]
    assert lines[0] == "stack on h100-80gb, costs estimated: batch 4096, float32 weights, AdamW"
    assert "budget  72.00 MiB" in lines
    for label in ("without checkpointing", "predicted peak", "overhead"):  # each shows a time
        assert next(line for line in lines if line.startswith(label)).endswith("(estimated)")
    assert lines[-2:] == ["wrote mine.json", "next: remat validate mine.json"]
    assert all(line == line.rstrip() for line in ran.stdout.splitlines())
    assert "noise" not in ran.stdout


def test_a_step_that_fits_is_a_plan_without_regions(remat: Remat) -> None:
    ran = remat(*stack(budget="90%"))
    assert ran.exit_code == 0
    assert "no checkpointing needed" in ran.stdout
    plan = Plan.load("stack.plan.json")
    assert plan.regions == ()
    assert plan.predicted["peak_bytes"] == plan.without_checkpointing["peak_bytes"]


def test_headroom_is_subtracted_first(remat: Remat) -> None:
    data = remat(*stack("--headroom", "1MiB", "--json", budget="73MiB")).data
    assert (data["budget_bytes"], data["headroom_bytes"]) == (73 << 20, 1 << 20)
    assert data["predicted"]["peak_bytes"] <= 72 << 20
    assert "less 1.00 MiB of headroom: 72.00 MiB" in remat("show", "stack.plan.json").stdout


def test_auto_is_the_card_less_the_context_and_what_is_reserved_fits(remat: Remat) -> None:
    """79.1 GiB less 600 MiB."""
    ran = remat(*stack("--json", "--allocator", "expandable_segments:True", budget="auto"))
    data = ran.data
    assert (data["headroom_bytes"], data["budget_bytes"]) == (0, int(79.1 * 2**30) - (600 << 20))
    assumed, other = data["predicted"]["allocator"]
    assert (assumed["settings"], other["settings"]) == ("expandable_segments:True", "")
    assert data["predicted"]["peak_bytes"] == assumed["requested_bytes"] <= assumed["reserved_bytes"]
    assert assumed["reserved_bytes"] <= data["budget_bytes"]
    assert "simulated, expandable_segments:True; allocated" in remat("show", "stack.plan.json").stdout


def test_a_budget_above_the_target_is_planned_with_a_warning(remat: Remat) -> None:
    ran = remat(*stack(budget="100GiB"))
    assert ran.exit_code == 0
    assert "warning: the budget of 100.00 GiB is more than the 79.10 GiB of h100-80gb" in ran.stderr


def test_a_share_of_the_step_is_held_against_the_target_in_bytes(remat: Remat) -> None:
    """Twice a step of a few MiB is no more than the card has."""
    assert "more than" not in remat(*stack(budget="200%step")).stderr


@pytest.mark.exhaustive
def test_the_least_budget_is_named_and_is_the_least(remat: Remat) -> None:
    refused = remat(*stack("--json", "--no-advice", budget="66MiB"))
    least = refused.data["minimum_budget_bytes"]
    assert refused.exit_code == refused.data["exit_code"] == 3
    assert sum(refused.data["breakdown"].values()) == least
    assert refused.stderr.splitlines()[-1] == f"error: {refused.data['error']}"
    assert left_behind() == set()

    assert remat(*stack("--json", budget=f"{least}B")).data["predicted"]["peak_bytes"] <= least
    assert remat(*stack("--no-advice", budget=f"{int(0.99 * least)}B")).exit_code == 3


@pytest.mark.fast("92.5 %step-0.925")
@pytest.mark.parametrize(("share", "of_the_step"), [("92%step", 0.92), ("92.5 %step", 0.925)])
def test_a_budget_may_be_a_share_of_the_step(remat: Remat, share: str, of_the_step: float) -> None:
    data = remat(*stack("--json", budget=share)).data
    assert data["budget_bytes"] == int(of_the_step * data["without_checkpointing"]["peak_bytes"])
    assert data["predicted"]["peak_bytes"] <= data["budget_bytes"]
    compared = remat(*against("--json", "--strategies", "none", budget=share)).data
    assert compared["budget_bytes"] == data["budget_bytes"]


def test_a_share_of_a_step_is_refused_where_there_is_more_than_one(remat: Remat) -> None:
    fit = ("fit", "--model", "model.py:stack", "--target", "h100-80gb", "--budget", "60%step", "--max-batch")
    assert "is a share of one step" in remat(*fit).stderr


def test_an_interrupted_plan_says_so_on_its_last_line(remat: Remat, monkeypatch: pytest.MonkeyPatch) -> None:
    from remat.solvers import load

    solve = load("exact")

    def stopped(*arguments: Any) -> Any:
        return dataclasses.replace(solve(*arguments), interrupted=True)

    monkeypatch.setattr(asking, "load", lambda name: stopped)
    ran = remat(*stack())
    assert ran.exit_code == 0 and ran.stdout.splitlines()[-1].startswith("interrupted: this is the best plan so far")
    assert Plan.load("stack.plan.json").solver["interrupted"]


def test_a_refusal_needs_no_advice(remat: Remat, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--no-advice` looks for none, and Ctrl-C meanwhile leaves the refusal as it is."""

    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("remat.planning.advice.advise", interrupted)
    for ran in (remat(*stack(budget="1KiB")), remat(*stack("--no-advice", budget="1KiB"))):
        assert ran.exit_code == 3
        assert "is below the least possible peak" in ran.stderr and "make room" not in ran.stderr


def test_headroom_comes_on_top_of_the_least_budget(remat: Remat) -> None:
    ran = remat(*stack("--no-advice", "--headroom", "1MiB", budget="66MiB"))
    assert ran.exit_code == 3
    assert ran.stderr.rstrip().endswith("The headroom of 1.00 MiB comes on top.")


def test_options_shape_the_workload(remat: Remat) -> None:
    ran = remat(*stack("--batch-size", "64", "--dtype", "bf16", "--optimizer", "SGD", "--accumulation", "2"))
    assert ran.stdout.startswith(
        "stack on h100-80gb, costs estimated: batch 64, accumulated over 2, bfloat16 weights, SGD\n"
    )
    about = Plan.load("stack.plan.json").about
    assert about["model_spec"] == {"model": "model.py:stack", "batch_size": 64, "dtype": "bf16", "optimizer": "SGD"}


@pytest.mark.parametrize("command", ["plan", "profile", "sweep"])
def test_an_interrupt_without_a_plan_says_so(remat: Remat, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    for home in ("profiling", "planner"):
        monkeypatch.setattr(f"remat.planning.{home}.fake_step", interrupted)
    commands = {
        "plan": stack("--json"),
        "profile": ["profile", "--model", "model.py:stack", "--out", "p", "--json"],
        "sweep": over("--out", "c.json", "--json"),
    }
    ran = remat(*commands[command])
    assert (ran.exit_code, ran.data["exit_code"]) == (5, 5)
    assert ran.data["error"] == "interrupted before there was a result; nothing was written."
    assert left_behind() == set()


def test_a_time_limit_without_a_plan_says_so(remat: Remat, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []

    def too_slow(study: Study) -> None:
        limits.append(study.request.limits)
        raise NoPlanInTime("no plan was found in 1 s; raise --time-limit.")

    monkeypatch.setattr(planning, "plan_study", too_slow)
    ran = remat(*stack("--time-limit", "1.5", "--seed", "7"))
    assert (ran.exit_code, ran.stdout) == (5, "")
    assert (limits[0].time_s, limits[0].seed) == (1.5, 7)
    assert left_behind() == set()


def test_a_plan_short_of_the_proof_says_how_far() -> None:
    about = {"workload": "w", "batch_size": 1, "seq_len": 8, "parameter_dtypes": ["float32"], "autocast": "bfloat16"}
    plan = Plan(
        regions=(),
        fingerprints=("f",),
        about={**about, "accumulation": 1, "optimizer": None},
        target="cpu",
        costs="measured",
        budget_bytes=1 << 30,
        predicted={
            "peak_bytes": 1 << 30,
            "peak_at": "the optimizer step",
            "step_time_us": 12_000,
            "recompute_time_us": 2_000,
            "overhead": 0.2,
            "recomputed_nodes": 1,
            "breakdown": {"parameters": 1 << 29, "activations": (1 << 29) - 1024, "batch": 1024},
        },
        without_checkpointing={"peak_bytes": 2 << 30, "step_time_us": 10_000},
        solver={"name": "s", "status": "feasible", "objective_us": 2e3, "bound_us": 1.5e3, "gap": 0.25, "wall_s": 3},
        space={},
    )
    row = {"call": 0, "ordinal": 0, "name": "mul", "module": "a"}
    region = {"first": row, "last": {**row, "ordinal": 2, "module": "b"}, "saved": [row], "random": [], "once": []}
    plan = Plan.from_json({**plan.to_json(), "regions": [{**region, "inner": []}]})
    assert screen.plan_text(plan) == (
        "w on cpu, costs measured: batch 1 x 8, float32 weights, bfloat16 autocast, no optimizer\n"
        "\n"
        "  without checkpointing   2.00 GiB   10.00 ms a step\n"
        "  budget                  1.00 GiB\n"
        "  predicted peak          1.00 GiB   12.00 ms a step\n"
        "  overhead                20.0 %     2.00 ms of recomputation\n"
        "  regions                 1          1 node recomputed, 1 output saved\n"
        "  solver                  feasible   gap 25.00 %, s, 3.0 s\n"
        "                                     not proved optimal; lower bound: 1.50 ms of recomputation\n"
        "\n"
        "at the peak, the optimizer step\n"
        "  parameters    512.00 MiB\n"
        "  activations   512.00 MiB\n"
        "  other           1.00 KiB"
    )
    assert screen.regions_text(plan) == "  region 1   a .. b   3 nodes, 1 saved\n    saves mul   a"


# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["bogus"], "No such command 'bogus'", id="command"),
        pytest.param(["vaildate"], "Did you mean 'validate'? Try `remat --help`.", id="misspelled"),
        pytest.param(["plan", "--model", "gpt2"], "Missing option '--budget'", id="no-budget"),
        pytest.param(["plan", "--budget", "1GiB"], "--model is missing", id="no-model"),
        pytest.param(stack("--model", ""), "--model is missing", id="empty-model"),
        pytest.param(stack("--bogus"), "No such option: --bogus", id="option"),
        pytest.param(stack(budget="20"), "'20' is not a number in digits with a unit", id="no-unit"),
        pytest.param(stack(budget="70%steps"), "write for example 70%, or as a budget 70%step", id="share"),
        pytest.param(stack(budget="-5GiB"), "'-5GiB' is not a number in digits with a unit", id="negative"),
        pytest.param(stack(budget="0%step"), "a budget is more than 0 bytes, and this is '0%step'", id="nothing"),
        pytest.param(stack(budget="nanGiB"), "'nanGiB' is not a number in digits", id="not-a-number"),
        pytest.param(stack("--headroom", "73MiB"), "leaves nothing; raise the budget", id="headroom"),
        pytest.param(stack("--batch-size", "0"), "Invalid value for '--batch-size'", id="batch-size"),
        pytest.param(stack("--time-limit", "nan"), "--time-limit nan is not a positive number", id="time-limit"),
        pytest.param(stack("--dtype", "int8"), "dtype 'int8' is not known; choose one of amp, fp32, bf16", id="dtype"),
        pytest.param(stack("--optimizer", "lion"), "optimizer 'lion' is not in torch.optim; choose none, ", id="optim"),
        pytest.param(stack("--optimizer", "lbfgs"), "LBFGS needs a closure", id="closure"),
        pytest.param(stack("--seq-len", "8"), "sequence length 8 was given, but model stack has none", id="seq-len"),
        pytest.param(stack("--image-size", "8"), "image size 8 was given, but only vit-l16", id="image-size"),
        pytest.param(stack("--target", "tpu"), "target 'tpu' is not known; choose auto, cuda, cpu", id="target"),
        pytest.param(stack("--out", "no/such.json"), "cannot be written: there is no folder", id="out-folder"),
        pytest.param(stack("--out", "."), ". is a folder; name a file", id="out-is-folder"),
        pytest.param(stack("--model", "no.py:stack"), "there is no file no.py", id="no-file"),
        pytest.param(stack("--model", "model.py"), "name the function that returns the workload", id="no-function"),
        pytest.param(stack("--model", "model.py:stac"), "has no function 'stac'. Did you mean stack?", id="misspelt"),
        pytest.param(
            stack("--model", "model.py:zzz"), "has no function 'zzz'; it has build, batch, step,", id="absent"
        ),
        pytest.param(
            stack("--model", "model.py:raises"),
            f"raises KeyError: 'nothing' (model.py:{line_of('nothing')}).",
            id="raises",
        ),
        pytest.param(
            stack("--model", "model.py:imports_relatively"),
            "The file is run as a script, which is in no package: import by the package's full name",
            id="relative-import",
        ),
        pytest.param(
            stack("--model", "model.py:made"),
            "'made' of model.py is an object of type Workload, and must be a function that returns one",
            id="workload-itself",
        ),
        pytest.param(stack("--model", "model.py:returns_three"), "returned an object of type int, and", id="type"),
        pytest.param(stack("--model", "model.py:returns_class"), "returned an object of type type, and", id="class"),
        pytest.param(stack("--model", "model.py:wants_more"), "missing 1 required positional argument", id="arguments"),
        pytest.param(
            stack("--model", "model.py:builds_nothing"),
            f"`build` of w raises ValueError: no weights here (model.py:{line_of('no weights')})",
            id="build",
        ),
        pytest.param(
            stack("--model", "model.py:reads_nothing"), "`batch` of w raises FileNotFoundError: [Errno 2]", id="batch"
        ),
        pytest.param(stack("--model", "./model"), "model './model' is not known", id="no-folder"),
        pytest.param(stack("--model", "."), "the folder . has no config.json", id="no-config"),
        pytest.param(["plan", "--profile", "p.json", "--budget", "1GiB"], "no profile file at p.json", id="no-profile"),
        pytest.param(
            ["plan", "--profile", "p.json", "--budget", "1GiB", "--target", "cpu", "--seq-len", "8"],
            "--seq-len, --target cannot go with --profile",
            id="profile-and-options",
        ),
        pytest.param(
            against("--strategies", "none,foo"), "there is no strategy 'foo'; choose from none, ", id="strategy"
        ),
        pytest.param(against("--strategies", ","), "--strategies names none; choose from", id="no-strategy"),
        pytest.param(against("--save", "no/such"), "no/such cannot be written: there is no folder", id="save-folder"),
        pytest.param(over("--plot", "c.pdf"), "a plot is a file that ends in .png or .svg", id="plot-ending"),
        pytest.param(over("--plot", "no/c.png"), "no/c.png cannot be written: there is no folder", id="plot-folder"),
        pytest.param(over("--points", "1"), "Invalid value for '--points'", id="points"),
        pytest.param(["show", "none.json"], "there is no plan file at none.json", id="no-plan"),
        pytest.param(["show", "model.py"], "model.py is not a plan file", id="corrupt-plan"),
        pytest.param(["validate", "none.json"], "there is no plan file at none.json", id="validate-no-plan"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(remat: Remat, arguments: list[str], message: str) -> None:
    ran = remat(*arguments, "--json")
    assert (ran.exit_code, ran.data["exit_code"]) == (2, 2)
    assert message in ran.data["error"]
    assert f"error: {ran.data['error']}" in ran.stderr and "Traceback" not in ran.stderr
    assert left_behind() == set()


def test_a_missing_package_is_named_with_its_remedy(remat: Remat, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_solver(*args: Any, **kwargs: Any) -> None:
        raise ModuleNotFoundError("No module named 'ortools'", name="ortools")

    monkeypatch.setattr(planning, "plan_study", without_solver)
    ran = remat(*stack())
    assert ran.exit_code == 2
    assert "error: this needs the package ortools, which is missing. Run `pip install ortools`." in ran.stderr


@pytest.mark.parametrize(
    ("message", "printed"),
    [
        (
            '`shard="zero3"` over one rank; say how many with `ranks=`.',
            "--shard zero3 over one rank; say how many with --ranks.",
        ),
        ("leave `depth=2` out.", "leave --depth 2 out."),
        ("raise the time limit (`time_s=`).", "raise the time limit (--time-limit)."),
        ("`del` the names; the headroom is 5 % (`layers.0`).", "`del` the names; the headroom is 5 % (`layers.0`)."),
    ],
)
def test_arguments_of_the_library_are_options_on_the_command_line(message: str, printed: str) -> None:
    assert screen.as_options(message) == printed


def test_an_error_of_the_library_names_its_arguments() -> None:
    with pytest.raises(UsageError, match='`shard="zero3"` over one rank shares nothing; say how many with `ranks=`'):
        TrainingLoop(shard="zero3")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("command", ["plan", "validate"])
def test_cuda_is_refused_where_there_is_none(remat: Remat, command: str) -> None:
    remat(*stack("--out", "a.json"))
    ran = remat(*(stack("--target", "cuda") if command == "plan" else ["validate", "a.json", "--device", "cuda"]))
    assert ran.exit_code == 2
    assert "cuda needs a CUDA device, and PyTorch sees none on this machine" in ran.stderr


def test_a_plan_is_validated_on_this_machine_alone(remat: Remat) -> None:
    remat(*stack("--out", "a.json"))
    ran = remat("validate", "a.json", "--device", "h100")
    assert ran.exit_code == 2
    assert "--device h100 is not supported; a plan is validated on this machine: choose cpu or cuda" in ran.stderr


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
        MemoryError("no more"),
    ],
    ids=["device", "host", "Python"],
)
def test_out_of_memory_is_no_bug_of_remat(remat: Remat, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def no_room(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(planning, "plan_study", no_room)
    ran = remat(*stack("--json"))
    assert (ran.exit_code, ran.data["exit_code"]) == (2, 2)
    assert ran.data["error"].startswith(f"out of memory, {type(error).__name__}: {error}")
    assert "Free memory, reduce --batch-size" in ran.data["error"]


def test_a_bug_is_one_line_and_a_traceback_on_request(remat: Remat, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("two is three\nand more")

    monkeypatch.setattr(planning, "plan_study", broken)
    ran = remat(*stack("--json"))
    assert (ran.exit_code, ran.data["exit_code"]) == (1, 1)
    assert re.fullmatch(r"internal error, AssertionError: two is three \(test_cli.py:\d+\)\. .*", ran.data["error"])
    assert "Traceback" not in ran.stderr
    monkeypatch.setenv(screen.DEBUG, "1")
    assert "Traceback" in remat(*stack()).stderr


# compare


def test_strategies_are_compared_and_their_plans_saved(remat: Remat) -> None:
    data = remat(*against("--strategies", "none, sqrt-n,exact", "--save", "plans", "--json", budget="75MiB")).data
    assert [row["strategy"] for row in data["rows"]] == ["exact", "sqrt-n", "none"]
    assert [row["fits"] for row in data["rows"]] == [True, True, False]
    assert (data["model"], data["target"], data["budget_bytes"]) == ("stack", "h100-80gb", 75 << 20)
    assert data["plan_paths"] == {name: f"plans/stack.{name}.plan.json" for name in ("exact", "sqrt-n")}
    for row in data["rows"][:2]:
        plan = Plan.load(data["plan_paths"][row["strategy"]])
        assert plan.predicted["peak_bytes"] == row["peak_bytes"] <= plan.budget_bytes == 75 << 20
        assert plan.about["model_spec"] == {"model": "../model.py:stack"}
    assert remat("show", "plans/stack.sqrt-n.plan.json").exit_code == 0


@pytest.mark.fast("60", "80")
@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_comparison_is_one_line_a_strategy_and_never_cut(
    remat: Remat, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    ran = remat(*against("--strategies", "none,chen-greedy,exact", budget="75MiB"))
    lines = ran.stdout.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("strategy "))
    table = lines[begin - 1 : begin + 4]
    assert [line.split()[:2] for line in table[2:]] == [["chen-greedy", "yes"], ["exact", "yes"], ["none", "no"]]
    assert all(len(line) <= max(columns, 75) for line in table)
    assert ("━" in table[2]) == (columns >= 80)
    assert "peak_bytes" not in ran.stdout and "\x1b" not in ran.stdout and "…" not in ran.stdout
    assert lines[-1].startswith("next: add --save FOLDER")


def test_a_comparison_of_what_nothing_keeps_names_the_least_budget(remat: Remat) -> None:
    refused = remat(*against("--json", budget="66MiB"))
    assert refused.exit_code == refused.data["exit_code"] == 3
    assert refused.data["minimum_budget_bytes"] > 66 << 20
    alone = remat(*against("--strategies", "none", budget="66MiB"))
    assert alone.exit_code == 0
    assert "no plan fits; the closest, of strategy none, needs 77.66 MiB" in alone.stdout


def test_what_is_measured_is_shown_beside(remat: Remat, monkeypatch: pytest.MonkeyPatch) -> None:
    def validate(workload: Workload, plan: Plan, **options: Any) -> Any:
        passed = bool(plan.regions)
        names = ["batch_size", "seq_len", "device", "measured", "untouched", "passed"]
        found = {"peak_bytes": 3 << 20, "step_time_us": 5000}
        return dataclasses.make_dataclass("Report", names)(64, None, "cpu", found, {"fits": False}, passed)

    monkeypatch.setattr("remat.validation.measured_comparison.validate", validate)
    data = remat(*against("--strategies", "exact", "--measure", "--json")).data
    assert data["rows"][0]["measured"] == {"peak_bytes": 3 << 20, "step_time_us": 5000}
    assert data["measured_on"] == {"device": "cpu", "batch_size": 64, "seq_len": None}
    ran = remat(*against("--strategies", "none", "--measure", budget="90%"))
    assert "measured on cpu at batch 64, not the planned 4096" in ran.stdout
    assert ran.exit_code == 4 and "error: none: the measurement contradicts the plan." in ran.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", [against(budget="84MiB"), over("--points", "3")], ids=["compare", "sweep"])
def test_regions_may_be_whole_modules_where_plans_are_compared(remat: Remat, command: list[str]) -> None:
    command = [*command, "--strategies", "every-block,exact"]
    ran = remat(*command, "--execution", "modules")
    assert ran.exit_code == 0 and "whole modules" in ran.stdout
    assert remat(*command, "--execution", "modules", "--json").data["execution"] == "modules"
    assert remat(*command, "--json").data["execution"] == "eager"
    ran = remat(*command, "--execution", "layers")
    assert ran.exit_code == 2 and "execution 'layers' is not known; choose eager or modules" in ran.stderr
    ran = remat(*command, "--execution", "inductor")
    assert ran.exit_code == 2 and "remat.compile(model, budget=...)" in ran.stderr


# sweep


@pytest.mark.exhaustive
def test_a_sweep_is_a_document_a_file_and_a_plot(remat: Remat) -> None:
    pytest.importorskip("matplotlib")
    ran = remat(*over("--points", "3", "--strategies", "none,exact", "--plot", "c.svg", "--out", "c.json", "--json"))
    assert ran.exit_code == 0 and left_behind() == {"c.svg", "c.json"}
    data = ran.data
    assert data["paths"] == {"curve": "c.json", "plot": "c.svg"}
    assert {name: value for name, value in data.items() if name != "paths"} == json.loads(Path("c.json").read_text())
    assert [point["strategy"] for point in data["others"]] == ["none"]
    assert data["points"][-1]["overhead"] == 0
    least = data["points"][0]["budget_bytes"]
    assert remat(*stack(budget=f"{least}B")).exit_code == 0


@pytest.mark.fast("80-utf-8")
@pytest.mark.parametrize(("columns", "encoding"), [(80, "utf-8"), (120, "ascii")])
def test_a_sweep_is_a_table_and_a_chart(
    remat: Remat, monkeypatch: pytest.MonkeyPatch, columns: int, encoding: str
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("rich.console.Console.encoding", property(lambda console: encoding))
    ran = remat(*over("--points", "3", "--strategies", "every-n,chen-greedy"))
    assert ran.exit_code == 0
    lines = ran.stdout.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.split()[:3] == ["MiB", "MiB", "ms"])
    assert len(lines[begin + 1].split()) == 8 and lines[begin + 4] == ""
    below = ran.stdout[ran.stdout.index(lines[begin + 5]) :]
    assert below.isascii() == (encoding == "ascii")
    mark = "@" if encoding == "ascii" else "●"
    assert f"{mark} exact" in below and "every-n" in below
    assert sum(line.count(mark) for line in below.splitlines()) == 3 + 1  # the points, and the legend
    assert all(len(line) <= columns for line in lines[begin:])


# profile, show, models


def test_a_profile_plans_as_its_model_does_and_remembers_it(remat: Remat) -> None:
    made = remat("profile", "--model", "model.py:stack", "--target", "h100-80gb", "--out", "p.json", "--json").data
    assert (made["model"], made["costs"], made["profile_path"]) == ("stack", "estimated", "p.json")
    from_model = remat(*stack("--json", "--out", "a.json")).data
    from_profile = remat("plan", "--profile", "p.json", "--budget", "72MiB", "--json", "--out", "b.json").data
    assert from_profile["without_checkpointing"] == from_model["without_checkpointing"] == made["without_checkpointing"]
    a, b = Plan.load("a.json"), Plan.load("b.json")
    assert (a.regions, a.fingerprints, a.about) == (b.regions, b.fingerprints, b.about)
    assert (a.predicted["judged_by"], b.predicted["judged_by"]) == ("replay", "evaluator")
    text = remat("plan", "--profile", "p.json", "--budget", "72MiB").stdout
    assert "a profile has no model: the evaluator computed the peak, and the loss stays whole" in text


def test_show_prints_every_region_or_the_file(remat: Remat) -> None:
    once(remat, *stack())
    plan = Plan.load("stack.plan.json")
    shown = remat("show", "stack.plan.json")
    assert shown.exit_code == 0
    assert len(re.findall(r"^  region \d+ ", shown.stdout, re.MULTILINE)) == len(plan.regions) > 0
    assert plan.regions[0].first.module in shown.stdout
    assert remat("show", "stack.plan.json", "--json").data == json.loads(Path("stack.plan.json").read_text())


@pytest.mark.fast("truncated", "inner-key")
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(lambda text: text[: len(text) // 2], "in the middle of it; copy it again", id="truncated"),
        pytest.param(lambda text: text.replace('"version": 3', '"version": 99'), "has plan version 99", id="newer"),
        pytest.param(lambda text: text.replace('"target"', '"tarket"'), "is not a complete plan file", id="key"),
        pytest.param(lambda text: text.replace('"peak_at"', '"peek"'), "is not a complete plan file", id="inner-key"),
    ],
)
def test_a_damaged_plan_is_refused(remat: Remat, damage: Callable[[str], str], message: str) -> None:
    once(remat, *stack())
    path = Path("stack.plan.json")
    path.write_text(damage(path.read_text()))
    ran = remat("show", "stack.plan.json")
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert message in ran.stderr


def test_models_are_listed_with_their_sizes(remat: Remat) -> None:
    pytest.importorskip("transformers")
    rows = remat("models", "--json").data["models"]
    assert {"name": "gpt2", "batch_size": 24, "seq_len": 1024, "autocast": "bfloat16", "optimizer": "AdamW"} in rows
    assert len(remat("models").stdout.splitlines()) == 1 + len(rows)


# validate


@dataclasses.dataclass(frozen=True)
class FakeReport:
    passed: bool

    def to_json(self) -> dict[str, Any]:
        return {"passed": self.passed}

    def __str__(self) -> str:
        return "the report"


@pytest.mark.parametrize(("passed", "exit_code"), [(True, 0), (False, 4)])
def test_validate_makes_the_planned_workload_again(
    remat: Remat, monkeypatch: pytest.MonkeyPatch, passed: bool, exit_code: int
) -> None:
    seen: list[tuple[Workload, dict[str, Any]]] = []

    def validate(workload: Workload, plan: Plan, **options: Any) -> FakeReport:
        seen.append((workload, options))
        return FakeReport(passed)

    monkeypatch.setattr("remat.validation.validating.validate", validate)
    remat(*stack("--batch-size", "64", "--optimizer", "sgd"))
    ran = remat("validate", "stack.plan.json", "--device", "cpu", "--seed", "3")
    assert (ran.exit_code, ran.stdout) == (exit_code, "the report\n")
    assert ("contradicts the plan stack.plan.json" in ran.stderr) is not passed
    assert remat("validate", "stack.plan.json", "--batch-size", "8", "--json").data == {"passed": passed}
    (first, options), (second, _) = seen
    assert (first.name, first.batch_size, second.batch_size) == ("stack", 64, 8)
    assert (options["device"], options["seed"]) == ("cpu", 3)
    assert isinstance(first.optimizer and first.optimizer(first.build().parameters()), torch.optim.SGD)


def test_a_plan_is_proved_on_this_machine(remat: Remat) -> None:
    planned = remat(*stack("--target", "cpu", "--json", budget="11MiB"))
    assert planned.data["costs"] == "measured"
    ran = remat("validate", "stack.plan.json", "--device", "cpu", "--json")
    assert ran.exit_code == 0, ran.stderr
    assert ran.data["loss_equal"] and ran.data["gradients_equal"] and ran.data["within_budget"]
    assert ran.data["recomputed_nodes"]["observed"] == ran.data["recomputed_nodes"]["planned"] > 0


def test_a_plan_for_another_model_is_refused(remat: Remat) -> None:
    once(remat, *stack())
    ran = remat("validate", "stack.plan.json", "--model", "model.py:other", "--device", "cpu", "--json")
    assert (ran.exit_code, ran.data["exit_code"]) == (6, 6)


def test_a_plan_that_names_no_model_asks_for_one(remat: Remat) -> None:
    once(remat, *stack())
    plan = Plan.load("stack.plan.json")
    about = {name: value for name, value in plan.about.items() if name != "model_spec"}
    dataclasses.replace(plan, about=about).save("bare.json")
    ran = remat("validate", "bare.json")
    assert ran.exit_code == 2
    assert "bare.json does not say how to build its model; name it with --model" in ran.stderr


# --model


def test_a_plan_beside_its_model_may_move_with_it(tmp_path: Path) -> None:
    spec = ModelSpec(str(tmp_path / "here" / "model.py") + ":stack", batch_size=3)
    stored = spec.to_json(tmp_path / "here")
    assert stored == {"model": "model.py:stack", "batch_size": 3}
    moved = ModelSpec.from_json(stored, tmp_path / "there")
    assert moved == dataclasses.replace(spec, model=str(tmp_path / "there" / "model.py") + ":stack")


@pytest.mark.parametrize("model", ["gpt2", "owner/name"])
def test_a_name_is_stored_as_it_is(tmp_path: Path, model: str) -> None:
    assert ModelSpec.from_json(ModelSpec(model).to_json(tmp_path), tmp_path) == ModelSpec(model)


@pytest.mark.parametrize("data", [None, "gpt2", {}, {"model": 3}, {"model": "gpt2", "colour": "red"}])
def test_what_makes_no_sense_in_a_file_is_no_spec(tmp_path: Path, data: Any) -> None:
    assert ModelSpec.from_json(data, tmp_path) is None


def llama(folder: Path, **changes: Any) -> Path:
    """A folder with the configuration of a tiny Llama whose weights were published in bf16."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 512, "max_position_embeddings": 128}
    shape = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "dtype": "bfloat16"}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**sizes, **shape, **changes}))
    return folder


def test_a_dtype_is_what_it_says_whatever_the_model_was_before() -> None:
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model = ModelSpec("gpt3-175b", dtype="fp32").workload().build()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}  # by itself it is bf16


def test_a_folder_with_a_configuration_is_a_causal_language_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    workload = ModelSpec(str(llama(tmp_path / "tiny"))).workload()
    assert (workload.name, workload.seq_len, workload.autocast) == ("tiny", 128, torch.bfloat16)
    model = workload.build()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert workload.step(model, workload.batch(2, 16)).requires_grad


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("{", "config.json cannot be used: OSError: ", id="not-json"),
        pytest.param('{"model_type": "vit"}', "of type 'vit', which is no causal language model", id="images"),
        pytest.param('{"model_type": "zzz"}', "config.json cannot be used: ", id="unknown-type"),
    ],
)
def test_a_configuration_of_something_else_is_refused(tmp_path: Path, text: str, message: str) -> None:
    pytest.importorskip("transformers")
    (llama(tmp_path / "bad") / "config.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        workloads.find(str(tmp_path / "bad"))


def test_a_ready_made_name_comes_before_a_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    llama(tmp_path / "gpt2")
    monkeypatch.chdir(tmp_path)
    assert workloads.find("gpt2")[0].seq_len == 1024
    assert workloads.find("./gpt2")[0].seq_len == 128


def test_an_unknown_name_is_refused_without_waiting_for_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(workloads, "hub_answers", lambda: False)
    with pytest.raises(UsageError, match=r"did you mean gpt2 .*no OWNER/NAME of the Hugging Face hub"):
        workloads.find("gpt-2")
    with pytest.raises(UsageError, match="hub, which cannot be reached, nor from its local cache: OSError"):
        workloads.find("nobody/nothing")


def test_a_cached_model_that_cannot_be_read_without_a_network_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    why = ValueError("its type is `newer`, which transformers does not know")
    monkeypatch.setattr(workloads, "hub_answers", lambda: False)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", mock.Mock(side_effect=why))
    with pytest.raises(UsageError, match="nor from its local cache: ValueError: its type is `newer`"):
        workloads.find("nobody/newer")


# The command itself


def test_help_needs_no_torch() -> None:
    program = (
        "import sys; from remat.cli.main import main; code = main(['plan', '--help']); "
        "print('torch' in sys.modules, code)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert ran.stdout.splitlines()[-1] == "False 0"
    assert "--budget" in ran.stdout


@pytest.mark.parametrize("command", typer.main.get_command(app).commands)  # type: ignore[attr-defined]
def test_help_has_at_most_two_lines_an_option_at_120_columns(command: str) -> None:
    screen = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "120", "TERMINAL_WIDTH": "120"}).output
    options = re.findall(r"^│ \*?\s*(--[\w-]+).*((?:\n│\s{20,}.*)*)", screen, re.MULTILINE)
    assert "--help" in dict(options)
    assert [name for name, more in options if more.count("\n") > 1] == []


def test_version_and_help(remat: Remat) -> None:
    assert re.fullmatch(r"remat \d+\.\d+\.\d+ \(torch \S+\)\n", remat("--version").stdout)
    assert "validate" in remat().stdout == remat("--help").stdout


def test_a_closed_pipe_is_no_bug(remat: Remat) -> None:
    once(remat, *stack())
    reader, writer = os.pipe()
    os.close(reader)  # as in `remat show ... | head -0`
    command = [sys.executable, "-m", "remat.cli.main", "show", str(Path("stack.plan.json").absolute())]
    ran = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    os.close(writer)
    assert ran.stderr == ""


@pytest.mark.parametrize(
    ("output", "arguments", "exit_code", "said"),
    [
        pytest.param(
            *("/dev/full", "models", 1, "error: the output cannot be written: No space left on device.\n"),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            *("/dev/full", "models --json", 1, "error: the output cannot be written: No space left on device.\n"),
            marks=pytest.mark.exhaustive,
        ),
        ("/dev/full", "--help", 1, "error: the output cannot be written: No space left on device.\n"),
        ("/dev/full", "show none.json --json", 2, "error: there is no plan file at none.json.\n"),
        pytest.param("&-", "models", 0, "", marks=pytest.mark.exhaustive),
    ],
)
def test_output_that_cannot_be_written_is_no_bug(output: str, arguments: str, exit_code: int, said: str) -> None:
    command = f"{sys.executable} -m remat.cli.main {arguments} >{output}"
    ran = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    assert (ran.returncode, ran.stderr) == (exit_code, said)
