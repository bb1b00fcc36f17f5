"""Page: material in, the text of one HTML file out.

Templates, styles and script are files of the package (`assets/`). Everything is written into the page, and its content
security policy forbids it to load anything.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from markupsafe import Markup, escape

import remat
from remat.evaluation.alternative import Alternative
from remat.evaluation.plan import Plan
from remat.report import proof
from remat.report.answer import PlanAnswer, answer_of
from remat.report.curve import ReportCurve, curve_of
from remat.report.decisions import DECISIONS, MOST_ROWS, Decision, DecisionBranch, tree_of
from remat.report.material import Material
from remat.report.proof import Fact, NextStep
from remat.report.step import ReportStep, slug_of, step_of
from remat.units import gib, ms

MOST_BYTES = 1 << 20  # of a page: beyond that, nodes have no rows of their own
OPEN_ROWS = 14  # rows of modules that are shown at first
CODE = re.compile(r"`([^`]+)`")
HUES = 9  # that others than the curve have
TEMPLATE, STYLE, SCRIPT = "page.html.j2", "page.css", "page.js"


@dataclasses.dataclass(frozen=True)
class Page:
    """The content of the template; a part that is None or empty is left out.

    strip    (decision, begin, length) of neighbouring nodes, in parts of 10,000 of the forward's time
    decided  (decision, bytes held, nodes)      opened  paths of the modules that are expanded at first
    """

    answer: PlanAnswer
    target: str
    plan: Plan | None
    curve: ReportCurve | None
    step: ReportStep | None
    tree: DecisionBranch | None
    strip: tuple[tuple[Decision, int, int], ...]
    strip_summary: str
    decided: tuple[tuple[Decision, int, int], ...]
    opened: frozenset[str]
    shows_nodes: bool
    proof: tuple[Fact, ...]
    validated: tuple[Fact, ...]
    measuring_notes: tuple[str, ...]
    rows: Sequence[Mapping[str, Any]]
    alternatives: tuple[Alternative, ...]
    next_steps: tuple[NextStep, ...]
    advice_is_missing: bool
    footer: str
    data: Markup
    style: Markup
    script: Markup

    @property
    def idle_nodes(self) -> int:
        """Nodes that have no row, because they take neither time nor bytes."""
        return sum(leaf.is_idle for leaf in self.tree.leaves) if self.tree is not None else 0

    @property
    def sections(self) -> tuple[str, ...]:
        """The sections of the page, in order."""
        there = {
            "curve": self.curve,
            "step": self.step,
            "decisions": self.tree,
            "measured": self.validated,
            "strategies": self.rows,
            "other answers": self.alternatives,
            "proof": self.proof,
            "next steps": self.next_steps,
        }
        return tuple(name for name, part in there.items() if part)


def rendered(page: Page) -> str:
    """Render the page as text; rows of nodes are left out if it exceeds `MOST_BYTES` with them."""
    text = _template().render(page=page)
    if page.shows_nodes and len(text.encode()) > MOST_BYTES:
        text = _template().render(page=dataclasses.replace(page, shows_nodes=False))
    return text


def page_of(material: Material) -> Page:
    step = step_of(material)
    tree = None if material.profile is None else tree_of(material.profile, material.regions, material.offloads)
    places = _places(tree)
    return Page(
        answer=answer_of(material),
        target=material.target,
        plan=material.plan,
        curve=curve_of(material) if material.plan is not None else None,
        step=step,
        tree=tree,
        strip=tuple(_strip(tree, places)),
        strip_summary=_strip_summary(tree),
        decided=tuple(_decided(tree)),
        opened=_opened(tree),
        shows_nodes=tree is not None and sum(1 for _ in tree.leaves) <= MOST_ROWS,
        proof=proof.proof_of(material),
        validated=proof.validation_facts(material.validation),
        measuring_notes=tuple((material.validation or {}).get("notes", ())),
        rows=proof.compared(material.comparison),
        alternatives=material.plan.alternatives if material.plan is not None else (),
        next_steps=proof.next_steps(material),
        advice_is_missing=proof.advice_is_missing(material),
        footer=_footer(material),
        data=_data(step, tree, places),
        style=_asset(STYLE),
        script=_asset(SCRIPT),
    )


# Decisions


def _places(tree: DecisionBranch | None) -> list[tuple[int, int]]:
    """Return for every node in order its begin and end in the forward, in parts of 10,000 of its time."""
    leaves = sorted(tree.leaves, key=lambda leaf: leaf.index) if tree is not None else []
    total, so_far, found = sum(leaf.forward_us for leaf in leaves) or 1.0, 0.0, []
    for leaf in leaves:
        begin, so_far = so_far, so_far + leaf.forward_us
        found.append((round(10_000 * begin / total), round(10_000 * so_far / total)))
    return found


def _strip(tree: DecisionBranch | None, places: Sequence[tuple[int, int]]) -> list[tuple[Decision, int, int]]:
    found: list[tuple[Decision, int, int]] = []
    leaves = sorted(tree.leaves, key=lambda leaf: leaf.index) if tree is not None else []
    for leaf, (begin, end) in zip(leaves, places, strict=True):
        if end == begin:
            continue
        if found and found[-1][0] == leaf.decision:
            found[-1] = (leaf.decision, found[-1][1], end - found[-1][1])
        else:
            found.append((leaf.decision, begin, end - begin))
    return found


def _decided(tree: DecisionBranch | None) -> list[tuple[Decision, int, int]]:
    leaves = list(tree.leaves) if tree is not None else []
    by = {decision: [leaf for leaf in leaves if leaf.decision == decision] for decision in DECISIONS}
    return [(decision, sum(leaf.held_bytes for leaf in own), len(own)) for decision, own in by.items() if own]


def _strip_summary(tree: DecisionBranch | None) -> str:
    total = (tree.forward_us if tree is not None else 0.0) or 1.0
    leaves = list(tree.leaves) if tree is not None else []
    said = []
    for decision, held_bytes, count in _decided(tree):
        share = 100 * sum(leaf.forward_us for leaf in leaves if leaf.decision == decision) / total
        said.append(f"{decision}: {count} nodes, {share:.0f} % of the forward's time, {gib(held_bytes)} held")
    if tree is not None and tree.host_bytes:
        said.append(f"on the host: {gib(tree.host_bytes)}")
    return ". ".join(said)


def _opened(tree: DecisionBranch | None) -> frozenset[str]:
    """Return the modules that are expanded at first: from the top, until there are too many rows."""
    opened: set[str] = set()
    level = [part for part in tree.parts if isinstance(part, DecisionBranch)] if tree is not None else []
    rows = len(level)
    while level:
        wider = [branch for branch in level if 0 < len(branch.parts) <= OPEN_ROWS and _has_modules(branch)]
        rows += sum(len(branch.parts) for branch in wider)
        if rows > 2 * OPEN_ROWS:
            break
        opened |= {branch.path for branch in wider}
        level = [part for branch in wider for part in branch.parts if isinstance(part, DecisionBranch)]
    return frozenset(opened)


def _has_modules(branch: DecisionBranch) -> bool:
    return any(isinstance(part, DecisionBranch) for part in branch.parts)


# What the file holds beside its text


def _data(step: ReportStep | None, tree: DecisionBranch | None, places: Sequence[tuple[int, int]]) -> Markup:
    """Format the script's numbers as JSON that HTML cannot misread."""
    found: dict[str, Any] = {}
    if step is not None and tree is not None:
        leaves = sorted(_named(tree), key=lambda pair: pair[0])
        most = max(level.bytes for level in step.levels) * 1.06
        found = {
            "total_us": round(step.total_us, 1),
            "most_bytes": round(most),
            "columns": step.columns,
            "spans": step.spans,
            "strip": places,
            "nodes": [name for _, name in leaves],
        }
    text = json.dumps(found, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c"))


def _named(branch: DecisionBranch) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for part in branch.parts:
        if isinstance(part, DecisionBranch):
            found += _named(part)
        else:
            found.append((part.index, f"{part.name} in {branch.path}" if branch.path else part.name))
    return found


def _footer(material: Material) -> str:
    about = material.about
    made = f"remat {remat.__version__}"
    versions = [f"torch {about['torch']}"] if about.get("torch") else []
    budget = f"budget {material.plan.budget_bytes:,} bytes" if material.plan is not None else ""
    solved = f"solved by {material.plan.solver['name']}" if material.plan is not None else ""
    return ", ".join(filter(None, [f"Made by {made}", *versions, budget, solved])) + "."


def _asset(name: str) -> Markup:
    return Markup(importlib.resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8"))


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("remat.report", "assets"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {
        "gib": gib,
        "ms": ms,
        "slug": slug_of,
        "some": _some,
        "hue": _hue,
        "coded": _coded,
        "us": _us,
    }
    return environment.get_template(TEMPLATE)


def _coded(text: str) -> Markup:
    """Turn text in backticks into code."""
    return Markup(CODE.sub(r"<code>\1</code>", str(escape(text))))


def _some(size_bytes: int) -> str:
    """Format bytes, with a dash for none."""
    return gib(size_bytes) if size_bytes else "-"


def _hue(number: int) -> int:
    """Return the colour of a series: the curve's own is 0, the others take turns."""
    return (number - 1) % HUES + 1 if number > 0 else number


def _us(time_us: float) -> str:
    """Format a short time, with a dash for none."""
    if time_us < 0.05:
        return "-"
    return f"{time_us:.0f} us" if time_us < 1000 else ms(time_us)
