"""The half hour: parts die alone, a second call goes on, and a bare checkout runs all of it without OR-tools."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import device
from benchmarks.half_hour import observing
from benchmarks.half_hour.runner import CUT_OFF, DIED, DONE, TOO_LONG, Part, Runner
from remat.reservation.allocator_settings import AllocatorSettings
from remat.reservation.caching_allocator import replayed

ROOT = Path(__file__).resolve().parent.parent

# What a part of a test does: notes where it got to, and then ends in its own way.
SAVES = """
import json, os, signal, sys, time
open(sys.argv[1], "w").write(json.dumps({"status": "running", "found": {"first": 1}, "said": ["begun"]}))
"""
ENDS = {
    "good": "",
    "raises": "raise SystemExit('it went wrong')",
    "crashes": "os.kill(os.getpid(), signal.SIGSEGV)",
    "hangs": "time.sleep(60)",
    "ignores": "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)",
}


def runner_of(folder: Path, *names: str, seconds: float = 30.0) -> Runner:
    folder.mkdir(exist_ok=True)

    def command(part: Part) -> list[str]:
        program = SAVES + ENDS[part.name.rpartition("-")[2]]
        return [sys.executable, "-S", "-c", program, str(folder / f"{part.stem}.json")]

    return Runner([Part(name, f"how {name} ends", seconds) for name in names], folder, command)


def statuses(folder: Path) -> dict[str, str]:
    rows = json.loads((folder / "device.json").read_text())["parts"]
    return {row["part"]: row.get("status", "") for row in rows}


def test_each_part_survives_the_death_of_another(tmp_path: Path) -> None:
    runner_of(tmp_path, "a-good", "raises", "crashes", "b-good").run(60)
    assert statuses(tmp_path) == {"a-good": DONE, "raises": DIED, "crashes": DIED, "b-good": DONE}
    crashed = json.loads((tmp_path / "crashes.json").read_text())
    assert (crashed["found"], crashed["exit"]) == ({"first": 1}, -11)
    assert json.loads((tmp_path / "raises.json").read_text())["log"] == ["it went wrong"]
    summary = (tmp_path / "device.md").read_text()
    assert "| crashes | how crashes ends | died, SIGSEGV |" in summary


@pytest.mark.parametrize("name", ["hangs", "ignores"])
def test_a_part_that_takes_too_long_is_ended(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.half_hour.runner.GRACE_S", 0.2)
    began = time.monotonic()
    runner_of(tmp_path, name, "a-good", seconds=2.0).run(60)
    assert time.monotonic() - began < 30
    assert statuses(tmp_path) == {name: TOO_LONG, "a-good": DONE}
    assert json.loads((tmp_path / f"{name}.json").read_text())["found"] == {"first": 1}


def test_a_second_call_does_what_is_left_and_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.half_hour.runner.GRACE_S", 0.2)
    names = ("a-good", "crashes", "hangs", "b-good")
    monkeypatch.setattr("benchmarks.half_hour.runner.LEAST_S", 0.0)
    runner = runner_of(tmp_path, *names)
    runner.parts = runner.parts[:2]
    runner.run(60)
    runner = runner_of(tmp_path, *names)
    runner.parts = runner.parts[:3]
    runner.run(2)
    assert statuses(tmp_path) == {"a-good": DONE, "crashes": DIED, "hangs": CUT_OFF}
    done_at = (tmp_path / "a-good.json").stat().st_mtime_ns
    ends_now = {**ENDS, "hangs": "", "crashes": ""}
    monkeypatch.setitem(globals(), "ENDS", ends_now)
    last = runner_of(tmp_path, *names)
    assert [part.name for part in last._waiting()] == ["hangs", "b-good", "crashes"]
    last.run(60)
    assert set(statuses(tmp_path).values()) == {DONE}
    assert (tmp_path / "a-good.json").stat().st_mtime_ns == done_at
    assert json.loads((tmp_path / "crashes.json").read_text())["attempts"] == 2


def test_nothing_begins_close_to_the_end(tmp_path: Path) -> None:
    runner_of(tmp_path, "a-good").run(1)
    assert statuses(tmp_path) == {"a-good": ""}


def test_all_parts_have_a_function_and_the_first_half_fits_eight_minutes(tmp_path: Path) -> None:
    from benchmarks.half_hour.parts import FUNCTIONS

    for name in ("gpt2.h100-80gb", "gpt2.h200"):
        (tmp_path / f"{name}.plan.json").write_text("{}")
    parts = device.parts(tmp_path, "h200")
    assert {part.name.partition(":")[0] for part in parts} == set(FUNCTIONS)
    names = [part.name for part in parts]
    assert names[:5] == ["machine", "gradients", "untouched", "untouched-expandable", "carried:gpt2.h200"]
    assert len(device.parts(tmp_path, "another card")) == len(parts) + 1
    assert len({part.stem for part in parts}) == len(parts)
    assert device.SECONDS <= 480
    assert sum(part.seconds for part in device.BEFORE) < device.SECONDS  # the most telling are never cut off


# The allocator's history


def event(action: str, address: int, size: int, time_us: int) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": 0, "time_us": time_us}


KIB, MIB = 1 << 10, 1 << 20
TRACE = [  # two requests in one segment; both let go; the cache emptied; one more request
    event("segment_alloc", 0, 2 * MIB, 10),
    event("alloc", 0, 1000, 10),
    event("alloc", 1024, 3 * KIB, 20),
    event("free_requested", 0, 1000, 30),
    event("free_completed", 0, 1000, 30),
    event("free_requested", 1024, 3 * KIB, 31),
    event("free_completed", 1024, 3 * KIB, 31),
    event("segment_free", 0, 2 * MIB, 40),
    event("snapshot", 0, 0, 45),
    event("segment_alloc", 0, 20 * MIB, 50),
    event("alloc", 0, 5 * MIB, 50),
]


def test_a_history_is_trimmed_to_what_a_simulation_needs() -> None:
    found = observing.trimmed(TRACE, [("first step", 15.0), ("second step", 45.0)])
    assert found["events"] == "SaarfrfsSa"
    assert found["sizes"][:3] == [2 * MIB, 1000, 3 * KIB]
    assert found["marks"] == {"first step": 2, "second step": 8}


def test_a_history_is_what_the_simulated_allocator_is_fed_with() -> None:
    requests, reserved = observing.requests_of(TRACE)
    assert [request[0] for request in requests] == ["m", "m", "f", "f", "e", "m"]
    assert reserved == [2 * MIB] * 4 + [0, 20 * MIB]
    assert [count.reserved for count in replayed(requests, AllocatorSettings()) if count] == reserved


def test_a_history_that_is_too_long_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(observing, "MOST_BYTES", 2000)
    many = [event("alloc", 7919 * i * i, 512 + i * i % 977, i) for i in range(3000)]
    found = observing.History(torch.device("cpu")).save(tmp_path / "history.json.gz", many)
    assert (tmp_path / "history.json.gz").stat().st_size == found["bytes"] <= 2000
    assert 0 < found["events"] < 3000


# A bare checkout

BARE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]
sys.modules["ortools"] = sys.modules["typer"] = None
"""


@pytest.fixture
def bare(tmp_path: Path) -> tuple[Path, Mapping[str, str]]:
    """A copy of the checkout, and an environment in which neither remat nor OR-tools is installed."""
    copy, hooks = tmp_path / "checkout", tmp_path / "hooks"
    for folder in ("remat", "solvers", "models", "benchmarks"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(BARE)
    return copy, {**os.environ, "PYTHONPATH": str(hooks)}


def run_in(bare: tuple[Path, Mapping[str, str]], *arguments: str, seconds: float = 120) -> str:
    copy, environment = bare
    command = [sys.executable, *arguments]
    ran = subprocess.run(command, cwd=copy.parent, env=environment, capture_output=True, text=True, timeout=seconds)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    return ran.stdout


def test_a_bare_checkout_finds_all_of_its_own(bare: tuple[Path, Mapping[str, str]]) -> None:
    program = f"""
import runpy, sys
with __import__("contextlib").suppress(SystemExit):
    runpy.run_path({str(bare[0] / "benchmarks" / "device.py")!r}, run_name="not main")
import remat, remat.models, remat.solvers.chain_dp, remat.solvers.least_peak, benchmarks.half_hour.runner
print(*(sys.modules[name].__file__ for name in ("remat", "remat.models", "remat.solvers", "benchmarks")), sep="\\n")
print("ortools", sys.modules["ortools"], "report" in sys.modules)
"""
    *files, last = run_in(bare, "-c", program).splitlines()
    assert [Path(file).parent.parent for file in files] == [bare[0]] * 4
    assert last == "ortools None False"


def test_the_process_that_starts_the_parts_never_imports_torch(bare: tuple[Path, Mapping[str, str]]) -> None:
    """Its context on the GPU would count as theirs."""
    program = f"""
import runpy, sys
script = {str(bare[0] / "benchmarks" / "device.py")!r}
try:
    sys.argv = [script, "results", "--device", "cpu", "--seconds", "1"]
    runpy.run_path(script, run_name="__main__")
except SystemExit as error:
    print(error.code, "torch" in sys.modules)
"""
    assert run_in(bare, "-c", program).splitlines()[-1] == "0 False"


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
def test_every_part_runs_on_a_cpu(bare: tuple[Path, Mapping[str, str]], tmp_path: Path) -> None:
    script, results = str(bare[0] / "benchmarks" / "device.py"), tmp_path / "results"
    run_in(bare, script, "--make-plans", str(results / "plans"), "--device", "cpu", seconds=300)
    run_in(bare, script, str(results), "--device", "cpu", "--seconds", "1000", seconds=1100)
    rows = json.loads((results / "device.json").read_text())["parts"]
    assert {row["part"]: row.get("status") for row in rows} == {row["part"]: DONE for row in rows}
    assert not {row["part"]: row["failures"] for row in rows if row.get("failures")}
    assert len(rows) == len(device.parts(results / "plans", "cpu")) >= 14
