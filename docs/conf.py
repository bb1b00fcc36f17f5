"""Documentation: MyST pages, the API from docstrings, the command line from its options. Built offline."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))  # for `commands` and `plan_fields`

WRITTEN = {"reference/command-line": "commands", "reference/plan-file": "plan_fields"}  # pages, by what writes them
OUTSIDE = re.compile(r"\]\((\.\./\.\./)")

project = "remat"
html_title = "remat"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
myst_heading_anchors = 3
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_use_ivar = True
default_role = "code"  # of names in docstrings
autodoc_member_order = "bysource"
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["wide.css"]
smartquotes = False  # two hyphens begin an option
highlight_language = "text"


def setup(app: Sphinx) -> None:
    app.connect("source-read", _completed)


def _completed(app: Sphinx, name: str, source: list[str]) -> None:
    """Pages of the reference get what is written from options and schema, at their end.

    Links out of this folder (results, examples) lead to files that readers can take with them.
    """
    if name in WRITTEN:
        source[0] += "\n".join(importlib.import_module(WRITTEN[name]).reference())
    source[0] = OUTSIDE.sub(r"](path:\1", source[0])
