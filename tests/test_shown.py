"""Results of the library show themselves: as aligned lines, and as a small table in a notebook."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from remat.costing.profile import Profile
from remat.evaluation.plan import Plan
from remat.formulation.solution import Limits
from remat.planning.budget import Budget
from remat.shown import as_html, as_text
from remat.units import gib
from remat.validation.report import Report
from tests.command_line import Remat
from tests.studies import compared, traced

STEP = ("--model", "model.py:stack", "--target", "h100-80gb")
BUDGET = 72 << 20
REPORT = Report(
    workload="a < b",
    device="cpu",
    batch_size=2,
    seq_len=None,
    measured={"peak_bytes": 1 << 30, "step_time_us": 2000},
    predicted={"peak_bytes": 1 << 30, "step_time_us": 1000},
    untouched={"peak_bytes": 1 << 31, "step_time_us": 1500, "fits": True},
    limit=("budget", 1 << 29),
    loss_equal=True,
    gradients_equal=True,
    max_gradient_error=0.0,
    recomputed_nodes={"planned": 3, "observed": 3},
    kernel_differences=(),
    notes=("reduced",),
)


class Table(HTMLParser):
    """Rows of a table, and every tag, closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.open.append(tag)
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def test_rows_line_up_and_escape() -> None:
    assert as_text("title", [("a", "1"), ("long", "22")], ("name", "n"), ["note"]) == (
        "title\n  name   n\n  a      1\n  long  22\n  note"
    )
    text = as_html("<b>", [("a<", "1")], ("x", "&"))
    assert "<b>" not in text and Table(text).rows == [["x", "&"], ["a<", "1"]]


@pytest.fixture
def made(remat: Remat) -> tuple[Plan, Profile]:
    remat("plan", *STEP, "--budget", "72MiB")
    remat("profile", *STEP, "--out", "step.json")
    return Plan.load("stack.plan.json"), Profile.load(Path("step.json"))


def test_every_result_is_a_small_static_table_with_its_numbers(made: tuple[Plan, Profile]) -> None:
    plan, profile = made
    limits = Limits(time_s=5)
    comparison = compared(profile, Budget(BUDGET, BUDGET), strategies=["every-block", "exact"], limits=limits)
    curve = traced(profile, points=3, limits=limits, strategies=["none"])
    wanted: list[tuple[Any, list[str]]] = [
        (plan, [gib(plan.predicted["peak_bytes"]), gib(BUDGET)]),
        (profile, [gib(plan.without_checkpointing["peak_bytes"]), "operators"]),
        (comparison, ["every-block", "exact", gib(BUDGET)]),
        (curve, [gib(point.peak_bytes) for point in curve.points]),
        (REPORT, ["FAILED", "EXCEEDED", "1.00 GiB", "reduced", "a &lt; b"]),
    ]
    for value, words in wanted:
        text = value._repr_html_()
        assert not {"script", "style", "link", "img"} & Table(text).tags
        assert len(text) < 6000
        assert [word for word in words if word not in text] == []
        assert max(map(len, str(value).splitlines())) <= 120
        assert "ndarray" not in str(value) and "(" not in str(value).splitlines()[0]
