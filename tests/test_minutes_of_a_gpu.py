"""Minutes of a GPU: jobs die alone, a second call goes on, nobody is let onto a full card, a bare checkout will do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks import device
from benchmarks.gpu import plans, runner, steps
from benchmarks.gpu.runner import CUT, CUT_OFF, DIED, DONE, Job, Runner, Stage
from remat.models import REGISTRY

ROOT = Path(__file__).resolve().parent.parent

# Each job notes that it began, and then ends in its own way.
BEGINS = "import os, signal, sys, time; open(sys.argv[1], 'a').write(sys.argv[2] + '\\n');"
ENDS = {
    "good": "",
    "raises": "raise SystemExit('it went wrong')",
    "crashes": "os.kill(os.getpid(), signal.SIGSEGV)",
    "hangs": "time.sleep(60)",
    "ignores": "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)",
    "leaves": f"sys.exit({CUT})",
    "tells": "print(os.environ['MEASURE_UNTIL'], os.environ['TOLD'], file=open(sys.argv[1], 'a'))",
}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "GRACE_S", 0.2)
    monkeypatch.setattr(runner, "LEAST_S", 0.1)


def job(folder: Path, name: str, attempts: int = 1) -> Job:
    program = BEGINS + ENDS[name.rpartition("-")[2]]
    return Job(name, [sys.executable, "-S", "-c", program, str(folder / "begun.txt"), name], attempts)


def jobs(folder: Path, *names: str) -> list[Job]:
    return [job(folder, name) for name in names]


def begun(folder: Path) -> list[str]:
    return (folder / "begun.txt").read_text().split("\n")[:-1]


def statuses(folder: Path, stage: str) -> dict[str, str]:
    rows = json.loads((folder / "device.json").read_text())[stage]
    return {name: row["status"] for name, row in rows.items() if name != "nvidia-smi"}


def test_each_job_survives_the_death_of_another(tmp_path: Path) -> None:
    stage = Stage("stage", jobs(tmp_path, "a-good", "raises", "crashes", "b-good"), 1.0, at_once=2)
    Runner(tmp_path, lambda: "warm").run([stage, Stage("next", jobs(tmp_path, "c-good"), 1.0)], 60)
    assert statuses(tmp_path, "stage") == {"a-good": DONE, "raises": DIED, "crashes": DIED, "b-good": DONE}
    assert statuses(tmp_path, "next") == {"c-good": DONE}
    found = json.loads((tmp_path / "device.json").read_text())["stage"]
    assert (found["crashes"]["ended"], found["raises"]["ended"]) == ("SIGSEGV", "exit 1")
    assert (found["raises"]["said"], found["nvidia-smi"]) == (["it went wrong"], "warm")


@pytest.mark.parametrize("name", ["hangs", "ignores"])
def test_a_job_that_takes_too_long_is_ended_and_the_next_stage_begins(tmp_path: Path, name: str) -> None:
    began = time.monotonic()
    stages = [Stage("one", jobs(tmp_path, name, "a-good"), 0.05, at_once=2), Stage("two", jobs(tmp_path, "b-good"), 1)]
    Runner(tmp_path).run(stages, 30)
    assert time.monotonic() - began < 20
    assert statuses(tmp_path, "one") == {name: CUT_OFF, "a-good": DONE}
    assert statuses(tmp_path, "two") == {"b-good": DONE}


@pytest.mark.exhaustive
def test_a_second_call_does_what_is_left_and_nothing_again(tmp_path: Path) -> None:
    stages = [Stage("stage", jobs(tmp_path, "a-good", "leaves", "crashes", "hangs"), 1.0, at_once=4)]
    Runner(tmp_path).run(stages, 2)
    assert statuses(tmp_path, "stage") == {"a-good": DONE, "leaves": CUT_OFF, "crashes": DIED, "hangs": CUT_OFF}
    (tmp_path / "begun.txt").unlink()
    Runner(tmp_path).run(stages, 2)
    assert sorted(begun(tmp_path)) == ["crashes", "hangs", "leaves"]


def test_a_job_that_dies_is_begun_again_as_often_as_it_may(tmp_path: Path) -> None:
    Runner(tmp_path).run([Stage("stage", [job(tmp_path, "crashes", 3), job(tmp_path, "leaves", 3)], 1.0)], 60)
    assert sorted(begun(tmp_path)) == ["crashes"] * 3 + ["leaves"]


def test_a_job_knows_its_deadline_and_its_stage(tmp_path: Path) -> None:
    began = time.time()
    Runner(tmp_path).run([Stage("stage", jobs(tmp_path, "tells"), 0.5, environment={"TOLD": "so"})], 60)
    until, told = begun(tmp_path)[1].split()
    assert (began + 29 < float(until) < began + 32, told) == (True, "so")


def test_nothing_begins_close_to_a_deadline(tmp_path: Path) -> None:
    Runner(tmp_path).run([Stage("stage", jobs(tmp_path, "a-good"), 1.0)], 0.05)
    assert not (tmp_path / "begun.txt").exists()


# The card


@pytest.mark.parametrize(
    ("others", "size", "admitted"),
    [
        pytest.param({}, 90, True, id="too-large-and-alone"),
        pytest.param({"2": 0, "3": 0}, 90, True, id="too-large-and-the-others-wait"),
        pytest.param({"2": 40, "3": 0}, 38, True, id="exactly"),  # 38 + 40 + 2 contexts = 80
        pytest.param({"2": 40, "3": 0}, 38.01, False, id="a-little-more"),
        pytest.param({"2": 20, "3": 20, "4": 0}, 38, False, id="contexts"),  # 38 + 40 + 3 = 81
        pytest.param({"1": 70, "2": 40}, 39, True, id="its-own-room-is-not-counted"),  # 39 + 40 + 1 = 80
    ],
)
def test_a_process_is_let_onto_the_card_where_it_fits_beside_rooms_and_contexts(
    others: Mapping[str, float], size: float, admitted: bool
) -> None:
    gib = steps.OTHER_BYTES
    assert steps.fits({pid: held * gib for pid, held in others.items()}, "1", size * gib, 80 * gib) is admitted


def test_rows_are_kept_as_they_come_and_say_if_the_process_ended(tmp_path: Path) -> None:
    findings = steps.Findings("toy", tmp_path)
    with findings.added(good := {"plan": "b45", "planned": False}):
        good["peaks"] = 1
    with findings.added({"plan": "b45", "planned": True}):
        raise MemoryError("too small")
    with pytest.raises(SystemExit), findings.added({"plan": "exact", "planned": True}):
        sys.exit("asked to end")
    with findings.added({"plan": "fused", "planned": True}):
        while_it_runs = steps.Findings("toy", tmp_path)
    assert while_it_runs.row("fused", planned=True)["failure"] == steps.ENDED
    after = steps.Findings("toy", tmp_path)
    assert after.row("b45", planned=False) == {"plan": "b45", "planned": False, "peaks": 1}
    assert after.row("b45", planned=True)["failure"].startswith("MemoryError: too small")
    assert (after.row("exact", planned=True), len(after.rows)) == ({}, 3)


# The stages


def test_stages_run_what_is_carried_and_nothing_else(tmp_path: Path) -> None:
    assert [stage.name for stage in device.stages(tmp_path, tests=())] == ["machine"]
    for name in ("plans/bert.b45", "plans/gpt2.b45", "plans/gpt2.exact", "plans/deterministic/gpt2.flash"):
        path = tmp_path / f"{name}.plan.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "kernels.csv").touch()
    found = {stage.name: stage for stage in device.stages(tmp_path)}
    assert list(found) == ["machine", "steps", "deterministic", "kernels", "tests"]
    assert [job.name for job in found["steps"].jobs] == ["gpt2", "bert"]
    assert [job.name for job in found["deterministic"].jobs] == ["gpt2"]
    assert (found["steps"].at_once, found["kernels"].at_once) == (5, 1)
    shares = [stage.until for stage in found.values()]
    assert shares == sorted(shares) and shares[-1] == 1.0
    assert [job.name for job in device.stages(tmp_path, ["bert"])[1].jobs] == ["bert"]


def test_plans_to_carry_have_names_of_their_own_and_known_models() -> None:
    for carried in (plans.PLANS, plans.DETERMINISTIC):
        assert len({(plan.model, plan.name) for plan in carried}) == len(carried)
        assert {plan.model for plan in carried} <= set(REGISTRY)


@pytest.mark.exhaustive
def test_failures_are_on_disk_and_passed_tests_are_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "test_toy.py").write_text("def test_a(): pass\ndef test_b(): assert 1 == 2\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.gpu.failures", "-p", "no:cacheprovider"]
    command += ["--rootdir", str(tmp_path), str(tmp_path / "test_toy.py")]
    environment = {**os.environ, "FINDINGS": str(tmp_path)}
    environment.pop("PYTEST_XDIST_WORKER", None)  # this test's own worker, not one of that run's

    def ran() -> str:
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False).stdout

    assert "1 failed, 1 passed" in ran()
    assert "assert 1 == 2" in (tmp_path / "failures.txt").read_text()
    (tmp_path / "passed.txt").rename(tmp_path / "passed-before.txt")
    assert "1 failed, 1 deselected" in ran()


# A bare checkout

BARE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]
sys.modules["ortools"] = None
"""


@pytest.mark.exhaustive
def test_a_bare_checkout_finds_all_of_its_own_and_the_first_process_never_imports_torch(tmp_path: Path) -> None:
    """Its context on the GPU would count as a job's."""
    copy, hooks = tmp_path / "checkout", tmp_path / "hooks"
    for folder in ("remat", "solvers", "models", "benchmarks"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(BARE)
    script = copy / "benchmarks" / "device.py"
    program = f"""
import runpy, sys
sys.argv = [{str(script)!r}, {str(tmp_path / "found")!r}, "--seconds", "1"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as error:
    print(error.code, "torch" in sys.modules)
import benchmarks.gpu.steps, benchmarks.gpu.kernels, remat.models, remat.solvers
print(*(sys.modules[name].__file__ for name in ("remat", "remat.models", "remat.solvers", "benchmarks")), sep="\\n")
"""
    command = [sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(hooks)}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    _, said, *files = ran.stdout.rstrip().rsplit("\n", 5)
    assert said == "0 False", ran.stderr
    assert [Path(file).parent.parent for file in files] == [copy] * 4
