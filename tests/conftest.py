"""Tests marked `cuda` are reported as skipped without a CUDA device, those marked `browser` without Chromium."""

from __future__ import annotations

import gc
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.command_line import MODEL, Ran, Remat

# Every day the same examples are drawn; `--hypothesis-profile nightly` draws others each time.
settings.register_profile("daily", derandomize=True, deadline=None)
settings.register_profile("nightly", derandomize=False, deadline=None, print_blob=True)
settings.load_profile("daily")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if shutil.which("chromium") is None:
        for item in items:
            if item.get_closest_marker("browser"):
                item.add_marker(pytest.mark.skip(reason="needs Chromium"))
    needing_cuda = [item for item in items if item.get_closest_marker("cuda")]
    if not needing_cuda:
        return
    import torch

    if not torch.cuda.is_available():
        for item in needing_cuda:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="module", autouse=True)
def nothing_old() -> Iterator[None]:
    """Take what imports and earlier files left out of the collector's sight: steps collect before they are measured.

    And out of Dynamo's, see `fresh_dynamo`: a file that records few models need not ask for that.
    """
    gc.collect()
    gc.freeze()
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


@pytest.fixture(scope="module", autouse=True)
def few_slices(request: pytest.FixtureRequest) -> Iterator[None]:
    """A plan of a step with a loss looks at it in 2 slices besides, not in 1, 2, 4, 8 and 16: each is a record more.

    Files marked `every_slice` are about the choice among them.
    """
    if request.node.get_closest_marker("every_slice") is not None:
        yield
        return
    from remat.planning import variants

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(variants, "SLICES", (2,))
        yield


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """What Dynamo captured goes with the test: it compares every new model of a class with all that it knows."""
    yield
    import torch

    torch._dynamo.reset()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Toys are too small to share: on a busy machine threads would only wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def remat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Remat:
    """`remat(...)` in an empty folder that has model.py; measured costs are cached there too."""
    from remat.cli import main as cli
    from remat.cli import screen

    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv(screen.DEBUG, raising=False)

    def run(*arguments: str) -> Ran:
        capfd.readouterr()
        exit_code = cli.main(arguments)
        return Ran(exit_code, *capfd.readouterr())

    return run
