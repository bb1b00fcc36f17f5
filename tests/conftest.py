"""Tests marked `cuda` are reported as skipped without a CUDA device, those marked `browser` without Chromium."""

from __future__ import annotations

import gc
import logging
import math
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.command_line import MODEL, Ran, Remat

# Inductor asks once a process, by compiling, whether the vectors that the processor has can be used: for 13 seconds.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# Toys are too small to share: threads of several processes would only wait for each other, and burn what they wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Every day the same examples are drawn; `--hypothesis-profile nightly` draws others each time.
settings.register_profile("daily", derandomize=True, deadline=None)
settings.register_profile("nightly", derandomize=False, deadline=None, print_blob=True)
settings.load_profile("daily")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="see tests/devices.py")
    parser.addoption("--at-most", type=float, default=math.inf, help="seconds after which no further test is begun")


def pytest_configure(config: pytest.Config) -> None:
    if (device := config.getoption("--device")) != "cpu":
        os.environ["REMAT_TEST_DEVICE"] = device


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--device") != "cpu":
        _keep_those_for_any_device(config, items)
    all_there = not any("::" in argument for argument in config.args)
    _keep_representatives(items, "fast", pytest.mark.exhaustive, all_there=all_there)
    _keep_representatives(items, "often", pytest.mark.nightly, all_there=all_there)
    _keep_every_third(items)
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


def _keep_those_for_any_device(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = [item for item in items if item.get_closest_marker("any_device") or item.get_closest_marker("cuda")]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(wanted)])
    items[:] = wanted


def _keep_representatives(
    items: list[pytest.Item], name: str, others: pytest.MarkDecorator, *, all_there: bool
) -> None:
    """Of tests with the marker `name`, mark the cases that it does not name as `others`."""
    missing: dict[str, set[str]] = {}
    for item in items:
        if (marker := item.get_closest_marker(name)) is None:
            continue
        if name == "often" and item.get_closest_marker("nightly"):
            raise pytest.UsageError(f"{item.nodeid} is nightly, and `often` says nothing")
        case, test = item.callspec.id, item.nodeid.partition("[")[0]  # type: ignore[attr-defined]
        missing.setdefault(test, set(marker.args)).discard(case)
        if case not in marker.args and (name == "fast" or item.get_closest_marker("exhaustive")):
            item.add_marker(others)
    for test, cases in missing.items():
        if cases and all_there:
            raise pytest.UsageError(f"{test} has no case {', '.join(sorted(cases))}")


def _keep_every_third(items: list[pytest.Item]) -> None:
    """Mark two of three exhaustive cases of a test as nightly, unless `often` says which these are."""
    seen: Counter[str] = Counter()
    for item in items:
        if item.get_closest_marker("exhaustive") and not item.get_closest_marker("often"):
            test = item.nodeid.partition("[")[0]
            if seen[test] % 3:
                item.add_marker(pytest.mark.nightly)
            seen[test] += 1


_BEGUN = time.monotonic()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.monotonic() - _BEGUN > item.config.getoption("--at-most"):
        pytest.skip("no time left, see --at-most")
    _leave_traces_unwritten()
    _nothing_old()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    _leave_traces_unwritten()


def _leave_traces_unwritten() -> None:
    """Take away pytest's handler of a log that torch writes only where there is one: it holds each graph as text."""
    logging.getLogger("torch.__trace").handlers.clear()


def _nothing_old() -> None:
    """Take what imports and earlier tests left out of the collector's sight: steps collect before they are measured."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def no_old_captures() -> Iterator[None]:
    """Drop Dynamo's captures after each file, see `fresh_dynamo`: one that records few models need not ask for that."""
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
    from remat.planning.request import FormChoice

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FormChoice, "default", lambda: FormChoice(slices=(2,), most_row_slices=0))
        yield


_RATES: dict[Any, dict[str, float]] = {}  # of this process, by device


@pytest.fixture(scope="module", autouse=True)
def quick_costs() -> Iterator[None]:
    """Measure costs on this machine in three samples, and its rates once: no test is about how long operators take.

    Measured properly, the operators of a toy take ten seconds, and the rates seven wherever a test has its own cache.
    """
    from remat.costing import operator_timing

    quick: dict[str, Any] = {"repeats": 3, "seconds_per_kind": 0.0}
    known = operator_timing.time_operators.__kwdefaults__ or {}
    measure = operator_timing._measured_rates

    def fastest_us(kind: Any, device: Any) -> float:
        return operator_timing.time_operator(kind, device, repeats=3).time_us

    def rates(device: Any) -> dict[str, float]:
        return dict(_RATES.get(device) or _RATES.setdefault(device, measure(device)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operator_timing, "_measured_rates", rates)
        patch.setattr(operator_timing, "_fastest_us", fastest_us)
        patch.setattr(operator_timing.time_operators, "__kwdefaults__", known | quick)
        patch.setattr(operator_timing.time_operator, "__defaults__", tuple(quick.values()))
        yield


@pytest.fixture(scope="module", autouse=True)
def quick_searches() -> Iterator[None]:
    """Give the integer program four seconds where no time limit is set, in place of forty.

    It then runs for what the chain left unproved, which seconds rarely prove. No test is about how much they gain.
    """
    from remat.formulation.solution import Limits

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vars(Limits.clock), "program_s", 4.0)  # of the clock that all limits share by default
        yield


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Drop Dynamo's captures after the test: it compares every new model of a class with all known ones.

    Compiled steps are planned anew, in place of being read from what an earlier run kept.
    """
    import torch
    from torch._functorch import config

    with config.patch(enable_autograd_cache=False):
        yield
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
def alone_in_a_group() -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def late_copies(request: pytest.FixtureRequest) -> Iterator[None]:
    """On the card, what holds on any device holds however late the streams of copies are."""
    if "CARD_HOME" not in os.environ or request.node.get_closest_marker("any_device") is None:
        yield
        return
    from tests.devices import streams

    with streams("late-copies"):
        yield


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
