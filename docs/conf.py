"""Documentation: MyST pages, the API from docstrings, the command line from its options. Built offline."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))  # for `commands` and `plan_fields`

CODE = re.compile(r"`+([^`]+)`+")
WRITTEN = {"reference/command-line": "commands", "reference/plan-file": "plan_fields"}  # pages, by what writes them
OUTSIDE = re.compile(r"\]\((\.\./\.\./)")

project = "remat"
html_title = "remat"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
myst_heading_anchors = 3
autodoc_typehints = "description"
autodoc_member_order = "bysource"
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["wide.css"]
smartquotes = False  # two hyphens begin an option
highlight_language = "text"


def setup(app: Sphinx) -> None:
    app.connect("source-read", _completed)
    app.connect("autodoc-process-docstring", _as_written)


def _completed(app: Sphinx, name: str, source: list[str]) -> None:
    """Pages of the reference get what is written from options and schema, at their end.

    Links out of this folder (results, examples) lead to files that readers can take with them.
    """
    if name in WRITTEN:
        source[0] += "\n".join(importlib.import_module(WRITTEN[name]).reference())
    source[0] = OUTSIDE.sub(r"](path:\1", source[0])


def _as_written(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Docstrings here are plain text in aligned columns: paragraphs stay text, columns stay as they stand."""
    paragraphs: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            paragraphs[-1].append(line)
        elif paragraphs[-1]:
            paragraphs.append([])
    lines[:] = [line for paragraph in paragraphs for line in _shown(paragraph)]


def _shown(paragraph: list[str]) -> list[str]:
    if any("  " in line.strip() or line.startswith(" ") for line in paragraph):
        return ["::", "", *(f"   {line}" for line in paragraph), ""]
    return [*(CODE.sub(r"``\1``", line) for line in paragraph), ""]
