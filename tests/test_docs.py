"""The documentation runs, builds without a warning, and leads nowhere that is not there."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import remat
from tests import words

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TUTORIAL = (DOCS / "tutorial.md").read_text(encoding="utf-8")
MOST_LINES = {"README": 120, "a page": 200}
OF_ITS_WORKLOAD = {"workload", "target"}  # fields that repeat the question

TERMS = (
    "activation checkpointing",
    "selective activation checkpointing",
    "chunked cross-entropy",
    "MLP chunking",
    "fused kernels",
    "activation offloading",
    "optimizer-state offloading",
    "weight streaming",
    "micro-batch",
    "gradient accumulation",
    "eager baseline",
    "saved tensors",
    "peak memory",
    "lower bound",
    "gap",
)


@pytest.mark.exhaustive
def test_the_tutorial_is_a_program_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names: dict[str, object] = {"__name__": "tutorial"}
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", TUTORIAL, re.MULTILINE | re.DOTALL)
    assert {kind for kind, _ in blocks} == {"python"}
    for _, block in blocks:
        exec(block, names)
    said = capsys.readouterr().out
    assert "Profile of layers on cpu" in said and "MiB" in said and said.rstrip().endswith("passed")
    assert names["plan"].regions  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_every_link_of_a_page_leads_to_a_file(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    local = [link for link in links if "://" not in link]
    there = [(page.parent / link).exists() or (ROOT / link.lstrip("/")).exists() for link in local]
    assert [link for link, is_there in zip(local, there, strict=True) if not is_there] == []


def test_the_readme_is_short_and_names_every_guide() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= MOST_LINES["README"]
    pages = [*(DOCS / "guides").glob("*.md"), *(DOCS / "explanation").glob("*.md"), DOCS / "tutorial.md"]
    assert [page.name for page in pages if f"({page.relative_to(ROOT)})" not in readme] == []


def test_no_page_is_long() -> None:
    lengths = {str(page.relative_to(DOCS)): len(page.read_text(encoding="utf-8").splitlines()) for page in PAGES}
    assert {page: lines for page, lines in lengths.items() if lines > MOST_LINES["a page"]} == {}


@pytest.mark.parametrize("term", TERMS)
def test_the_index_and_the_glossary_name_a_term(term: str) -> None:
    assert term in (DOCS / "index.md").read_text(encoding="utf-8")
    (row,) = re.findall(
        rf"^\| {term}[^|]*\| ([^|]+) \|$", (DOCS / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(row.split()) >= 5


QUOTED = re.findall(r"^> (.+)$", (DOCS / "guides" / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("message", QUOTED)
def test_a_message_of_the_troubleshooting_page_is_in_the_source(message: str) -> None:
    assert any(message in template for template in words.templates()), message


PYTHON = (DOCS / "reference" / "python.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", remat.__all__)
def test_a_public_name_has_rendered_arguments_and_an_example(name: str) -> None:
    found = getattr(remat, name)
    text = inspect.getdoc(found) or ""
    assert re.search(rf"^\.\. auto\w+:: {name}$", PYTHON, re.MULTILINE) and "\nExample:\n" in text
    if inspect.isfunction(found):
        assert "\nReturns:\n" in text
        assert [
            each for each in inspect.signature(found).parameters if f"    {each}: " not in text.replace("*", "")
        ] == []
    elif dataclasses.is_dataclass(found):
        missing = [field.name for field in dataclasses.fields(found) if f"    {field.name}: " not in text]
        assert set(missing) <= OF_ITS_WORKLOAD


def test_the_tree_names_every_package_and_every_strategy() -> None:
    tree = (DOCS / "explanation" / "how-it-works.md").read_text(encoding="utf-8")
    rooms = [path.parent.name for path in (ROOT / "remat").glob("*/__init__.py")]
    files = [
        path.name for path in (ROOT / "solvers").glob("*.py") if not path.name.startswith(("_", "chain", "cp_sat"))
    ]
    assert [room for room in rooms if f"  {room}/ " not in tree] == []
    assert [file for file in files if file not in tree] == []


@pytest.mark.parametrize("written", ["commands", "plan_fields"])
def test_a_page_is_written_from_options_or_schema(written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    lines = "\n".join(importlib.import_module(written).reference())
    assert {"commands": "`--lengths`", "plan_fields": "| `shorter` | list of plans"}[written] in lines


@pytest.mark.exhaustive
@pytest.mark.skipif(importlib.util.find_spec("sphinx") is None, reason="needs the extra `docs`")
def test_the_pages_build_without_a_warning(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", str(DOCS), str(tmp_path)]
    ran = subprocess.run(build, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    reference = (tmp_path / "reference" / "command-line.html").read_text(encoding="utf-8")
    assert "remat doctor" in reference and "--time-limit" in reference
