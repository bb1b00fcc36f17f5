"""A report is one file that needs nothing, and every number in it is the evaluator's, the plan's or a document's."""

from __future__ import annotations

import dataclasses
import html
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.costing.profile import Profile
from remat.errors import UsageError
from remat.evaluation.evaluator import Memory
from remat.evaluation.plan import Plan
from remat.offloading.link import Link
from remat.offloading.refs import to_offload_refs
from remat.offloading.schedule import all_offloads
from remat.report import page as page_module
from remat.report.curve import curve_of
from remat.report.decisions import DecisionBranch, Leaf, tree_of
from remat.report.material import Material, kind_of
from remat.report.page import page_of, rendered
from remat.report.proof import added_at
from remat.report.scale import Scale, area
from remat.report.step import BACK, OUT, step_of
from remat.units import GIB, MIB, gib
from remat.workload.target import TARGETS
from tests.command_line import Remat, once
from tests.examples import examples
from tests.graphs import ToyNode, plans, toy_graph, toys

MODEL = ("--model", "model.py:stack", "--target", "h100-80gb")
PLANNED = ("plan", *MODEL, "--budget", "72MiB")
LOOSER = ("plan", *MODEL, "--budget", "76MiB")  # under which something is kept


def profiled(nodes: list[ToyNode]) -> Profile:
    graph, costs = toy_graph(nodes, fixed_bytes=7)
    return Profile(graph, costs, TARGETS["h100-80gb"])


def leaves(tree: DecisionBranch) -> list[Leaf]:
    return sorted(tree.leaves, key=lambda leaf: leaf.index)


# What the page says is what is known


@given(toys(), st.data())
@settings(deadline=None, derandomize=True, max_examples=examples(20, 60))
def test_the_decisions_add_up_to_what_the_evaluator_says(nodes: list[ToyNode], data: st.DataObject) -> None:
    profile = profiled(nodes)
    regions = data.draw(plans(profile.graph))
    memory, op_us = Memory(profile.graph), profile.costs.per_op_us(profile.graph)
    found = leaves(tree_of(profile, regions))
    assert [leaf.index for leaf in found] == list(range(len(profile.graph.nodes)))
    assert sum(leaf.again_us for leaf in found) == pytest.approx(memory.recompute_time_us(regions, op_us))
    if not any(region.inner for region in regions):
        assert sum(leaf.decision == "recomputed" for leaf in found) == memory.recomputed_nodes(regions)
    saved = {node for region in regions for part in (region, *region.inner) for node in part.saved}
    assert {leaf.index for leaf in found if leaf.decision == "saved"} == saved


# Offloads


def offloading(material: Material) -> Material:
    """The plan with all that the link carries on the host."""
    plan, profile = material.plan, material.profile
    assert plan is not None and profile is not None
    op_us = profile.costs.per_op_us(profile.graph)
    link = Link(profile.target.host_bytes_per_us, 1 << 40)
    offloads = all_offloads(material.memory, material.regions, op_us, link)
    refs = to_offload_refs(material.memory, material.regions, offloads)
    assert offloads
    return dataclasses.replace(material, plan=dataclasses.replace(plan, offloads=refs), offloads=offloads)


def test_what_lies_on_the_host_is_a_decision_with_its_bytes(remat: Remat) -> None:
    once(remat, *LOOSER)
    once(remat, "profile", *MODEL, "--out", "stack.profile.json")
    material = offloading(material_of(Path()))
    profile = material.profile
    assert profile is not None
    tree = tree_of(profile, material.regions, material.offloads)
    sizes = profile.graph.storages.size_bytes
    assert tree.host_bytes == sum(int(sizes[each.storage]) for each in material.offloads)
    without = tree_of(profile, material.regions)
    assert tree.held_bytes == without.held_bytes - tree.host_bytes
    assert any(leaf.decision == "offloaded" for leaf in tree.leaves)


def test_copies_are_lanes_under_the_step_and_rows_of_a_table(remat: Remat) -> None:
    once(remat, *LOOSER)
    once(remat, "profile", *MODEL, "--out", "stack.profile.json")
    material = offloading(material_of(Path()))
    step, plain = step_of(material), step_of(dataclasses.replace(material, offloads=()))
    assert step is not None and plain is not None
    assert [name for name, _ in step.lanes] == ["copies to the host", "copies back"] and plain.lanes == ()
    for _, spans in step.lanes:
        assert len(spans) == len(material.offloads) == len(step.copied)
        in_order = sorted((span.begin, span.begin + span.length) for span in spans)
        assert all(end <= begin + 0.002 for (_, end), (begin, _) in itertools.pairwise(in_order))  # a queue
    kinds = [kind for spans in step.spans for *_, kind in spans]
    assert kinds.count(OUT) == kinds.count(BACK) == len(material.offloads)
    text = rendered(page_of(material))
    assert material.plan is not None
    size = gib(sum(each.size_bytes for each in material.plan.offloads))
    for words in ("copies back", "Copies as a table", "offloaded <b>", f"{size} of activations are on the host"):
        assert words in text
    assert Reader(text).open == []


def test_modules_are_sums_of_what_they_hold_and_a_module_of_one_module_stands_with_it(remat: Remat) -> None:
    remat(*PLANNED, "--json")
    once(remat, "profile", *MODEL, "--out", "stack.profile.json")
    profile = Profile.load("stack.profile.json")
    tree = tree_of(profile, ())
    names = [part.name for part in tree.parts if isinstance(part, DecisionBranch)]
    assert names == [str(number) for number in range(16)]
    assert tree.held_bytes == tree.plain_bytes == sum(part.held_bytes for part in tree.parts) > 0
    nested = [dataclasses.replace(node, module=f"body.layers.{node.module}") for node in profile.graph.nodes]
    below = tree_of(dataclasses.replace(profile, graph=dataclasses.replace(profile.graph, nodes=tuple(nested))), ())
    (body,) = (part for part in below.parts if isinstance(part, DecisionBranch))
    assert (body.name, [part.name for part in body.parts][:2]) == ("body.layers", ["layers.0", "layers.1"])


def test_the_step_shows_the_peak_and_knows_where_every_node_runs(remat: Remat) -> None:
    once(remat, *PLANNED)
    once(remat, "profile", *MODEL, "--out", "stack.profile.json")
    material = material_of(Path())
    step = step_of(material)
    assert step is not None and material.plan is not None and material.profile is not None
    assert step.peak_bytes == material.plan.predicted["peak_bytes"]
    in_kib = np.sum(list(step.columns["kib"].values()), axis=0)
    assert in_kib.max() == pytest.approx(step.peak_bytes / 1024, abs=len(step.columns["kib"]))
    spans = [span for spans in step.spans for span in spans]
    assert all(0 <= begin <= end <= 10_000 for begin, end, _ in spans)
    again_us = sum(span.length for span in step.recomputed) / 100 * step.total_us
    assert again_us == pytest.approx(material.plan.predicted["recompute_time_us"], rel=0.01)


def material_of(folder: Path, **others: Any) -> Material:
    """The plan and the profile that commands wrote into a folder."""
    from remat.execution.regions_in_graph import require_regions_in

    plan, profile = Plan.load(folder / "stack.plan.json"), Profile.load(folder / "stack.profile.json")
    return Material(plan, profile=profile, regions=require_regions_in(plan, profile.graph), **others)


SWEEP: dict[str, Any] = {
    "without_checkpointing": {"peak_bytes": 30 * GIB, "step_time_us": 1000.0},
    "points": [
        {"peak_bytes": 10 * GIB, "budget_bytes": 10 * GIB, "overhead": 0.4, "recompute_time_us": 400.0}
        | {"status": "optimal", "gap": 0.0, "bound_us": 400.0, "regions": 4, "saved": 0},
        {"peak_bytes": 20 * GIB, "budget_bytes": 21 * GIB, "overhead": 0.2, "recompute_time_us": 200.0}
        | {"status": "feasible", "gap": 0.5, "bound_us": 100.0, "regions": 2, "saved": 3},
        {"peak_bytes": 30 * GIB, "budget_bytes": 30 * GIB, "overhead": 0.0, "recompute_time_us": 0.0}
        | {"status": "optimal", "gap": 0.0, "bound_us": 0.0, "regions": 0, "saved": 0},
    ],
    "others": [],
}


@pytest.mark.parametrize(
    ("budget", "added"),
    [(10, 0.4), (15, 0.3), (25, 0.1), (30, 0.0), (31, 0.0), (9, None)],  # by the two points around each
)
def test_the_curve_is_read_between_its_points(budget: int, added: float | None) -> None:
    assert added_at(SWEEP, budget * GIB) == (added if added is None else pytest.approx(added))


def test_proved_points_and_others_look_different(remat: Remat) -> None:
    once(remat, *PLANNED)
    found = curve_of(Material(Plan.load("stack.plan.json"), sweep=SWEEP))
    assert [mark.kind for mark in found.marks] == ["curve", "open", "curve", "without", "plan"]
    assert found.path.startswith("M") and found.band.count("Z") == 2


@pytest.mark.parametrize(
    ("scale", "unit", "labels"),
    [
        (Scale(0, 30 * GIB), GIB, ["0", "10", "20", "30"]),
        (Scale(9.2 * GIB, 12 * GIB), GIB, ["10", "11", "12"]),
        (Scale(0, 2.4 * MIB), MIB, ["0.0", "0.5", "1.0", "1.5", "2.0"]),
        (Scale(-0.03, 0.22), 0.01, ["0", "5", "10", "15", "20"]),
        (Scale(0, 1.1), 1, ["0.00", "0.25", "0.50", "0.75", "1.00"]),
    ],
)
def test_ticks_are_round_values(scale: Scale, unit: float, labels: list[str]) -> None:
    assert [tick.label for tick in scale.ticks(unit, "")] == labels


def test_an_area_steps_from_one_height_to_the_next() -> None:
    assert area([0, 500, 700], [100, 100, 300]) == "M0 1000H0V900H700V700H1000V1000Z"


# The file


class Reader(HTMLParser):
    """Collect a page's references and its text, and check that its elements are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.open: list[str] = []
        self.said: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attributes if name in ("src", "href", "srcset", "action")]
        if tag not in ("meta", "link", "br", "path", "circle", "use", "!doctype"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attributes if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.said.append(data.strip())


@pytest.mark.exhaustive
def test_a_report_is_one_file_that_refers_to_nothing_outside(remat: Remat) -> None:
    once(remat, *PLANNED)
    assert remat("sweep", *MODEL, "--points", "3", "--out", "curve.json").exit_code == 0
    compared = remat("compare", *MODEL, "--budget", "72MiB", "--strategies", "every-block,exact", "--json")
    Path("compared.json").write_text(compared.stdout)
    Path("validated.json").write_text(remat("validate", "stack.plan.json", "--device", "cpu", "--json").stdout)
    ran = remat("report", "stack.plan.json", "curve.json", "compared.json", "validated.json", "--out", "r.html")
    assert ran.exit_code == 0, ran.stderr
    text = Path("r.html").read_text()
    read = Reader(text)
    assert read.open == []
    assert {link for link in read.links if not link.startswith("#")} == {"data:,"}
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org)", text)
    assert len(text.encode()) < 1 << 20
    plan, said = Plan.load("stack.plan.json"), " ".join(read.said)
    for words in (
        f"within {gib(plan.budget_bytes)}",
        gib(plan.predicted["peak_bytes"]),
        f"{100 * plan.predicted['overhead']:.1f} % longer",
        "times estimated",
        "validation passed",
        "every-block",
        "binding moment",
        "Data as a table",
    ):
        assert words in said
    assert "curve, step, decisions, measured, strategies, proof, next steps" in ran.stdout


def test_a_profile_alone_is_a_report_of_the_step_as_it_is(remat: Remat) -> None:
    once(remat, "profile", *MODEL, "--out", "stack.profile.json")
    data = remat("report", "stack.profile.json", "--json").data
    assert data["sections"] == ["step", "decisions"]
    profile = Profile.load("stack.profile.json")
    memory = Memory(profile.graph, profile.costs.workspace_per_op(profile.graph))
    assert (
        f"is predicted to need {gib(memory.peak_without_checkpointing)}" in data["sentence"]
        and data["path"] == "report.html"
    )


def test_a_plan_and_its_profile_need_no_model(remat: Remat) -> None:
    once(remat, "profile", *MODEL, "--out", "stack.profile.json")
    remat("plan", "--profile", "stack.profile.json", "--budget", "72MiB")
    Path("model.py").unlink()
    assert "decisions" in remat("report", "stack.plan.json", "stack.profile.json", "--json").data["sections"]


def test_a_plan_that_cannot_say_how_to_build_its_model_has_no_step_and_says_so(remat: Remat) -> None:
    once(remat, *PLANNED)
    plan = Plan.load("stack.plan.json")
    dataclasses.replace(plan, about={**plan.about, "model_spec": None}).save("stack.plan.json")
    assert remat("report", "stack.plan.json", "--json").data["sections"] == ["curve", "proof", "next steps"]
    assert "Give the profile" in Path("report.html").read_text()


@pytest.mark.exhaustive
def test_levers_are_listed_where_they_are_asked_for(remat: Remat) -> None:
    once(remat, *PLANNED)
    assert remat("report", "stack.plan.json", "--advice").exit_code == 0
    text = html.unescape(Path("report.html").read_text())
    assert "Micro-batch 2048" in text and "remat report --advice" not in text


def test_names_are_text_whatever_they_hold(remat: Remat) -> None:
    once(remat, *PLANNED)
    plan = Plan.load("stack.plan.json")
    evil = "</script><script>alert(1)</script>"
    once(remat, "profile", *MODEL, "--out", "stack.profile.json")
    material = material_of(Path())
    assert material.profile is not None
    nodes = tuple(dataclasses.replace(node, name=evil) for node in material.profile.graph.nodes)
    graph = dataclasses.replace(material.profile.graph, nodes=nodes)
    named = dataclasses.replace(plan, about={**plan.about, "workload": evil})
    page = page_of(
        dataclasses.replace(material, plan=named, profile=dataclasses.replace(material.profile, graph=graph))
    )
    text = rendered(page)
    assert evil not in text and html.escape(evil) in text
    assert page_module._coded(f"`{evil}`") == f"<code>{html.escape(evil)}</code>"
    assert text.count("<script") == 2 and Reader(text).open == []


def test_a_page_that_grows_too_large_leaves_nodes_out_and_says_so(
    remat: Remat, monkeypatch: pytest.MonkeyPatch
) -> None:
    once(remat, *PLANNED)
    once(remat, "profile", *MODEL, "--out", "stack.profile.json")
    page = page_of(material_of(Path()))
    assert "data-n=" in rendered(page)
    monkeypatch.setattr(page_module, "MOST_BYTES", 1 << 14)
    text = rendered(page)
    assert "data-n=" not in text and "modules are listed without nodes" in text


# What is refused


def test_documents_are_known_by_what_they_hold() -> None:
    assert kind_of({"format": "remat-plan"}, "x") == "plan"
    assert kind_of({"rows": [], "budget_bytes": 1, "without_checkpointing": {}}, "x") == "comparison"
    others: list[object] = [{"rows": []}, [], 3, {"format": "other"}]
    for other in others:
        with pytest.raises(UsageError, match="neither a plan nor a profile"):
            kind_of(other, "x")


@pytest.mark.fast("files1-there is no file at none.json", "files5-is of another step than the plan")
@pytest.mark.parametrize(
    ("files", "message"),
    [
        (("curve.json",), "none is among these files"),
        (("stack.plan.json", "none.json"), "there is no file at none.json"),
        (("stack.plan.json", "model.py"), "no JSON document"),
        (("stack.plan.json", "curve.json", "copy.json"), "a report takes one"),
        (("stack.plan.json", "other.json"), "a report is about one step"),
        (("stack.plan.json", "smaller.json"), "is of another step than the plan"),
        (("stack.plan.json", "other.plan.json"), "a plan for another step"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(remat: Remat, files: tuple[str, ...], message: str) -> None:
    once(remat, *PLANNED)
    plan = Plan.load("stack.plan.json")
    own = {"peak_bytes": plan.without_checkpointing["peak_bytes"], "step_time_us": 1.0}
    curve = {**SWEEP, "model": "stack", "target": "h100-80gb", "without_checkpointing": own}
    smaller = {**curve, "without_checkpointing": {**own, "peak_bytes": 1}}
    for name, document in (("curve", curve), ("copy", curve), ("other", {**curve, "model": "b"}), ("smaller", smaller)):
        Path(f"{name}.json").write_text(json.dumps(document))
    dataclasses.replace(plan, about={**plan.about, "batch_size": 3}).save("other.plan.json")
    ran = remat("report", *files)
    assert (ran.exit_code, ran.stdout) == (2, "") and message in ran.stderr
    assert not Path("report.html").exists()
