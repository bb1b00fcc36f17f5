"""A plugin of pytest: failures on disk as they come, and tests that passed in an earlier call left out.

`python -m pytest -p benchmarks.gpu.failures`, with FINDINGS=FOLDER, appends to failures.txt and passed.txt in FOLDER.
Every process of pytest-xdist must leave out the same tests, so those of passed-before.txt are.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # device.py takes names from here, and pytest may not be there
    import pytest

MOST = 3500  # characters of a failure, its end
PASSED, BEFORE, FAILURES = "passed.txt", "passed-before.txt", "failures.txt"


def _folder() -> Path:
    return Path(os.environ["FINDINGS"])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    path = _folder() / BEFORE
    passed = set(path.read_text().splitlines()) if path.exists() else set()
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
    items[:] = [item for item in items if item.nodeid not in passed]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:  # the process that started the workers gets their reports too
        return
    if report.failed:
        with (_folder() / FAILURES).open("a") as file:
            file.write(f"=== {report.nodeid} {report.when} {report.duration:.1f} s\n{str(report.longrepr)[-MOST:]}\n")
    elif report.when == "call" and report.passed:
        with (_folder() / PASSED).open("a") as file:
            file.write(f"{report.nodeid}\n")
