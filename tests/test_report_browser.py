"""A report in a browser: it loads nothing, complains of nothing, links its figures, and everybody can read it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remat.evaluation.plan import Plan
from remat.report.material import Material
from remat.report.page import page_of, rendered
from tests.command_line import MODEL
from tests.test_report import material_of, offloading

pytestmark = pytest.mark.browser

WIDE, PHONE = {"width": 1100, "height": 900}, {"width": 360, "height": 780}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with every section, made by the commands that a person would use."""
    from remat.cli import main as cli

    folder = tmp_path_factory.mktemp("report")
    (folder / "model.py").write_text(MODEL)
    step = ("--model", "model.py:stack", "--target", "h100-80gb")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        assert cli.main(["plan", *step, "--budget", "76MiB"]) == 0
        assert cli.main(["sweep", *step, "--points", "6", "--out", "curve.json"]) == 0
        assert cli.main(["report", "stack.plan.json", "curve.json"]) == 0
        assert cli.main(["profile", *step, "--out", "stack.profile.json"]) == 0
    (folder / "copies.html").write_text(rendered(page_of(offloading(material_of(folder)))))
    return folder / "report.html"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


class Opened:
    """A page in a browser, what it asked for and what it said."""

    def __init__(self, browser: Any, file: Path, **settings: Any) -> None:
        self.page = browser.new_page(**settings)
        self.asked_for: list[str] = []
        self.said: list[str] = []
        self.page.on("request", lambda request: self.asked_for.append(request.url))
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.goto(file.as_uri())


@pytest.fixture
def opened(chromium: Any, report: Path) -> Iterator[Opened]:
    found = Opened(chromium, report, viewport=WIDE)
    yield found
    assert found.said == []
    found.page.close()


@pytest.mark.exhaustive
def test_it_asks_for_nothing_but_itself_and_says_nothing(opened: Opened, report: Path) -> None:
    assert opened.asked_for == [report.as_uri()]


def test_pointing_at_the_step_says_what_is_alive_and_marks_the_module(opened: Opened) -> None:
    page = opened.page
    before = page.text_content("#step-readout")
    box = page.locator("#step-plot").bounding_box()
    page.locator("#step-plot").hover(position={"x": box["width"] * 0.2, "y": box["height"] / 2})
    said = page.text_content("#step-readout")
    assert "alive" in said and "forward" in said
    assert page.locator("#tree .lit").count() == 1
    page.mouse.move(5, 5)
    assert page.text_content("#step-readout") == before


def test_keys_move_through_the_step_and_escape_ends_it(opened: Opened) -> None:
    page = opened.page
    page.locator("#step-plot").focus()
    seen = []
    for _ in range(3):
        page.keyboard.press("ArrowRight")
        seen.append(page.text_content("#step-readout"))
    assert len(set(seen)) == 3
    page.keyboard.press("Escape")
    assert page.locator("#cursor").is_hidden()


def test_a_module_shows_when_it_runs_and_is_recomputed(opened: Opened) -> None:
    page = opened.page
    page.locator("#tree summary").first.hover()
    kinds = page.eval_on_selector_all("#step-spans i", "spans => spans.map(span => span.className)")
    assert "" in kinds and "backward" in kinds
    assert page.locator("#strip-spans i").count() >= 1


def test_a_node_on_the_host_shows_when_it_is_copied(chromium: Any, report: Path) -> None:
    found = Opened(chromium, report.with_name("copies.html"), viewport=WIDE)
    page = found.page
    page.evaluate("document.querySelectorAll('#tree details').forEach(details => details.open = true)")
    assert page.locator(".lane.copies").count() == 2
    page.locator("#tree p", has_text="on the host between").first.hover()
    begins = page.eval_on_selector_all("#step-spans .copy", "spans => spans.map(span => parseFloat(span.style.left))")
    assert min(begins) < 50 < max(begins)  # out in forward and back in backward, once per storage of the node
    assert found.asked_for == [report.with_name("copies.html").as_uri()] and found.said == []
    page.close()


def test_selecting_in_a_figure_opens_the_row_and_selecting_it_again_lets_go(opened: Opened) -> None:
    page = opened.page
    box = page.locator("#strip").bounding_box()
    page.locator("#strip").click(position={"x": box["width"] * 0.3, "y": 5})
    row = page.locator("#tree .pinned")
    assert row.count() == 1 and row.is_visible()
    row.click()
    assert page.locator("#tree .pinned").count() == 0


def test_a_mark_of_the_curve_says_its_numbers_and_stands_in_the_step(opened: Opened) -> None:
    page = opened.page
    mark = page.locator(".mark.k-curve").first
    mark.focus()
    assert "best plan" in page.text_content("#curve-readout")
    assert page.locator("#ghost").is_visible()


@pytest.mark.exhaustive
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
@pytest.mark.parametrize("file", ["report.html", "copies.html"])
def test_everybody_can_read_it(chromium: Any, report: Path, scheme: str, size: dict[str, int], file: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = Opened(chromium, report.with_name(file), viewport=size, color_scheme=scheme)
    found.page.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
    violations = axe.run(found.page, options={"resultTypes": ["violations"]}).response["violations"]
    assert [(row["id"], [node["html"][:120] for node in row["nodes"]][:3]) for row in violations] == []
    assert found.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    found.page.close()


def test_without_a_script_all_is_there_to_read(chromium: Any, report: Path) -> None:
    page = chromium.new_page(java_script_enabled=False)
    page.goto(report.as_uri())
    assert page.locator("#tree summary").count() > 3
    assert page.locator(".mark").count() > 5
    page.close()


def test_a_page_without_a_step_is_silent_too(chromium: Any, report: Path) -> None:
    bare = report.with_name("bare.html")
    bare.write_text(rendered(page_of(Material(Plan.load(report.with_name("stack.plan.json"))))))
    found = Opened(chromium, bare)
    found.page.locator(".mark").first.focus()
    found.page.keyboard.press("Escape")
    assert found.said == []
    found.page.close()
