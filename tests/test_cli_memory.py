"""The commands that answer questions about memory without a plan in hand: estimate, fit, timeline."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from remat.evaluation.plan import Plan
from tests.command_line import Remat

SHORT = ("--model", "model.py:short", "--target", "h100-80gb")  # two layers, which a search may plan for often
MODEL = ("--model", "model.py:stack", "--target", "h100-80gb")


# estimate


def test_an_estimate_is_a_document(remat: Remat) -> None:
    data = remat("estimate", *MODEL, "--json").data
    peaks, speed = data["peaks"], data["speed"]
    assert sum(peaks["parts"].values()) == peaks["peak_bytes"] == max(peaks["phases"].values())
    assert peaks["first_step_bytes"] <= peaks["peak_bytes"]
    assert (speed["samples"], speed["tokens"], data["levers"]) == (4096, None, None)
    (accumulating,) = data["other_accumulation"]
    assert accumulating["loop"]["accumulation"] == 2
    assert accumulating["peaks"]["peak_bytes"] > peaks["peak_bytes"]


def test_an_estimate_is_a_text(remat: Remat) -> None:
    text = remat("estimate", *MODEL).stdout
    for words in (
        "stack on h100-80gb, costs estimated",
        "first step",
        "accumulating",
        "at the peak",
        "samples/s",
        "MFU",
    ):
        assert words in text


@pytest.mark.exhaustive
def test_an_estimate_under_a_plan_is_the_plans(remat: Remat) -> None:
    remat("plan", *MODEL, "--budget", "72MiB", "--accumulation", "2")
    plan = Plan.load("stack.plan.json")
    data = remat("estimate", "--plan", "stack.plan.json", "--json").data
    assert data["peaks"]["peak_bytes"] == plan.predicted["peak_bytes"]
    assert data["peaks"]["parts"] == plan.predicted["breakdown"]
    assert data["loop"] == {"accumulation": 2}
    assert data["speed"]["recompute_time_us"] == pytest.approx(2 * plan.predicted["recompute_time_us"])


@pytest.mark.exhaustive
def test_levers_are_listed_with_what_they_free(remat: Remat) -> None:
    ran = remat("estimate", *MODEL, "--advice")
    assert "micro-batch 2048" in ran.stdout and "frees" in ran.stdout


@pytest.mark.exhaustive
def test_the_loop_around_the_step_is_counted(remat: Remat) -> None:
    plain = remat("estimate", *MODEL, "--json").data["peaks"]
    more = remat("estimate", *MODEL, "--ema", "--ddp", "--clip-grad-norm", "--json").data
    assert {"running average", "gradient buckets"} <= set(more["peaks"]["parts"])
    assert more["peaks"]["peak_bytes"] > plain["peak_bytes"]
    assert more["loop"] == {"accumulation": 1, "ema": True, "ddp": True, "clip_grad_norm": True}


def test_states_need_no_model(remat: Remat) -> None:
    asked = ("estimate", "--parameters", "7B", "--dtype", "bf16-master", "--ranks", "8", "--shard")
    totals = [remat(*asked, shard, "--json").data["total_bytes"] for shard in ("zero1", "zero2", "zero3")]
    assert totals == [38_500_000_000, 26_250_000_000, 14_000_000_000]
    assert "14.00 GB" in remat(*asked, "zero3").stdout


# fit


@pytest.mark.exhaustive
def test_a_fit_is_a_ladder_a_document_and_a_plan(remat: Remat) -> None:
    data = remat("fit", *SHORT, "--budget", "67MiB", "--global-batch", "4096", "--json").data
    assert list(data["rungs"]) == ["as is", "accumulate", "checkpoint", "joint optimum"]
    best = data["rungs"]["joint optimum"]
    assert best["fits"] and best["micro_batch"] * best["accumulation"] == 4096
    times = [rung["time_us"] for rung in data["rungs"].values() if rung and rung["time_us"]]
    assert best["time_us"] == min(times)
    assert sum(data["loss_weights"]) == pytest.approx(1.0)
    plan = Plan.load(data["plan_path"])
    assert plan.about["batch_size"] == best["micro_batch"] == plan.about["model_spec"]["batch_size"]
    assert plan.predicted["peak_bytes"] <= 67 << 20


@pytest.mark.exhaustive
def test_a_fit_says_which_won_and_why(remat: Remat) -> None:
    ran = remat("fit", *MODEL, "--budget", "70MiB", "--global-batch", "4096", "--ranks", "2", "--shard", "zero3")
    assert ran.exit_code == 0, ran.stderr
    assert "global batch 4096 over 2 ranks within 70.00 MiB" in ran.stdout
    assert "as is" in ran.stdout and "micro-batch" in ran.stdout
    assert "times exclude communication between ranks" in ran.stdout


@pytest.mark.exhaustive
def test_the_largest_batch_is_a_plan(remat: Remat) -> None:
    data = remat("fit", *SHORT, "--budget", "67MiB", "--max-batch", "--json").data
    assert data["max_batch"] == data["batch_size"] == Plan.load(data["plan_path"]).about["batch_size"] > 512
    refused = remat("plan", *SHORT, "--budget", "67MiB", "--no-advice", "--batch-size", str(data["max_batch"] + 1))
    assert refused.exit_code == 3


def test_sizes_that_a_batch_function_refuses_are_left_out_of_a_fit_and_named(remat: Remat) -> None:
    odd = ("fit", "--model", "model.py:odd", "--target", "h100-80gb")
    ran = remat(*odd, "--budget", "66MiB", "--max-batch")
    assert ran.exit_code == 0, ran.stderr
    assert "ValueError: no such size (model.py:" in ran.stdout and "the search left them out" in ran.stdout
    ran = remat("plan", *odd[1:], "--budget", "66MiB", "--batch-size", "600")
    assert ran.exit_code == 2 and "`batch` of odd raises ValueError: no such size (model.py:" in ran.stderr


# timeline


def test_a_timeline_is_a_chart_and_a_snapshot(remat: Remat) -> None:
    ran = remat("timeline", *MODEL, "--budget", "84MiB", "--snapshot", "step.pickle")
    assert ran.exit_code == 0 and "peak " in ran.stdout and "budget 84.00 MiB" in ran.stdout
    with Path("step.pickle").open("rb") as file:
        assert pickle.load(file)["device_traces"][0]


def test_a_timeline_of_a_plan_shows_its_budget(remat: Remat) -> None:
    remat("plan", *MODEL, "--budget", "72MiB")
    data = remat("timeline", "--plan", "stack.plan.json", "--json").data
    assert data["budget_bytes"] == 72 << 20
    assert data["peak_bytes"] == max(map(sum, zip(*data["parts"].values(), strict=True)))


@pytest.mark.exhaustive
def test_on_the_cpu_the_measured_curve_is_drawn_beside(remat: Remat) -> None:
    on_cpu = ("--model", "model.py:stack", "--target", "cpu", "--batch-size", "512")
    data = remat("timeline", *on_cpu, "--measure", "--json").data
    assert max(data["measured"]["bytes"]) == pytest.approx(data["peak_bytes"], rel=0.005)


# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fit", *MODEL, "--budget", "72MiB"), "give exactly one of"),
        (("fit", *MODEL, "--budget", "72MiB", "--max-seq"), "has no sequences"),
        (("fit", *MODEL, "--budget", "72MiB", "--global-batch", "4", "--ranks", "8"), "choose at least 8"),
        (("fit", *MODEL, "--budget", "72MiB", "--global-batch", "12", "--ranks", "8"), "choose 8 or 16"),
        (
            ("fit", *MODEL, "--budget", "72MiB", "--global-batch", "8", "--accumulation", "2"),
            "--accumulation is chosen by fit",
        ),
        (("fit", *MODEL, "--budget", "72MiB", "--max-batch", "--batch-size", "2"), "--batch-size is chosen by fit"),
        (("fit", "--model", "gpt2", "--budget", "8GiB", "--max-seq", "--seq-len", "64"), "--seq-len is found by"),
        (("estimate", "--parameters", "many"), "is not a number of things"),
        (("estimate", "--parameters", "7B", "--batch-size", "2"), "--batch-size does not go with --parameters"),
        (("estimate", "--parameters", "7B", "--shard", "zero9", "--ranks", "2"), "'zero9' is not known"),
        (("estimate", "--parameters", "7B", "--shard", "zero3"), "say how many with --ranks"),
        (("estimate", *MODEL, "--optimizer", "adamw:slow"), "the form 'slow' is not known"),
        (("estimate", "--model", "model.py:stack", "--target", "h300"), "target 'h300' is not known"),
        (("estimate", *MODEL, "--plan", "some.plan.json"), "cannot go with --plan"),
        (("estimate", "--model", "gpt2", "--seq-len", "2048"), "more than the 1024 positions"),
        (("timeline", *MODEL, "--measure"), "add --target cpu"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(remat: Remat, arguments: tuple[str, ...], message: str) -> None:
    ran = remat(*arguments)
    assert ran.exit_code == 2
    assert ran.stderr.splitlines()[-1].startswith("error: ") and message in ran.stderr
    assert ran.stdout == ""
