"""Stages of a measurement, jobs in processes of their own; the same call again goes on where the last one ended.

Rule 1  A job writes its findings as they come. However it ends (a segmentation fault, a deadline, the loss of the
        machine), they are on disk, and the other jobs go on.
Rule 2  A stage ends at its deadline, a share of the call's seconds. A stage that is done early leaves its time to the
        next. Jobs know the deadline (MEASURE_UNTIL, seconds since 1970); one that does not heed it is ended.
Rule 3  A job that is done is not run again. One that has more to do at its deadline exits with `CUT`, one that the
        deadline ended has not ended well: the next call runs both.
Rule 4  This process never imports torch: its context on the GPU would count as a job's memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bare import ROOT

CUT = 75  # exit status: the deadline came first
DONE, CUT_OFF, DIED = "done", "cut off", "died"
LEAST_S = 10.0  # nothing begins that close to a deadline
GRACE_S = (
    4.0  # from MEASURE_UNTIL until a job that goes on is asked to end, and from there to the deadline, which kills
)


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """A process of a stage.

    attempts  in one call: a job that dies is begun again, for it leaves out what killed it
    """

    name: str
    command: Sequence[str]
    attempts: int = 1


@dataclasses.dataclass(frozen=True)
class Stage:
    """Jobs of one kind.

    until    share of the call's seconds at which the stage ends
    at_once  jobs that run beside each other
    around   a context that the jobs need
    """

    name: str
    jobs: Sequence[Job]
    until: float
    at_once: int = 1
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


class Runner:
    """Runs stages; FOLDER/device.json says how each job ended, FOLDER/STAGE.JOB.err what it complained of.

    about  is asked after each stage for what device.json should say of the machine then
    """

    def __init__(self, folder: Path, about: Callable[[], Any] = lambda: None):
        self.folder, self._about = folder, about
        self.ended: dict[str, dict[str, Any]] = {}
        with contextlib.suppress(OSError, ValueError):
            self.ended = json.loads((folder / "device.json").read_text())

    def run(self, stages: Sequence[Stage], seconds: float) -> None:
        """Run the stages, each until its share of `seconds` from now."""
        self._began = time.monotonic()
        for stage in stages:
            left = self._began + stage.until * seconds - time.monotonic()
            waiting = [job for job in stage.jobs if self._status(stage, job) != DONE]
            self._say(f"{stage.name}: {len(waiting)} of {len(stage.jobs)} jobs, {max(0.0, left):.0f} s")
            if waiting and left > LEAST_S:
                with stage.around():
                    self._run(stage, waiting, time.monotonic() + left)
                self._note(stage.name, {"nvidia-smi": self._about()})

    def _run(self, stage: Stage, waiting: list[Job], deadline: float) -> None:
        running: dict[Job, tuple[subprocess.Popen[bytes], float]] = {}
        attempts = dict.fromkeys(waiting, 0)
        try:
            while (waiting or running) and time.monotonic() < deadline - GRACE_S:
                while waiting and len(running) < stage.at_once and deadline - time.monotonic() > LEAST_S:
                    job = waiting.pop(0)
                    attempts[job] += 1
                    running[job] = self._begin(stage, job, deadline), time.monotonic()
                for job, (process, began) in list(running.items()):
                    if process.poll() is not None:
                        del running[job]
                        self._end(stage, job, process, began)
                        if process.returncode not in (0, CUT) and attempts[job] < job.attempts:
                            waiting.append(job)
                if not running and deadline - time.monotonic() <= LEAST_S:
                    break
                time.sleep(0.05)
        finally:
            kill([process for process, _ in running.values()])
            for job, (process, began) in running.items():
                self._end(stage, job, process, began, cut=True)

    def _begin(self, stage: Stage, job: Job, deadline: float) -> subprocess.Popen[bytes]:
        until = time.time() + deadline - time.monotonic() - 2 * GRACE_S
        environment = {**os.environ, **stage.environment, "MEASURE_UNTIL": str(until)}
        with (self.folder / f"{stage.name}.{job.name}.err").open("ab") as errors:
            return subprocess.Popen(job.command, stderr=errors, env=environment, cwd=ROOT, start_new_session=True)

    def _end(
        self, stage: Stage, job: Job, process: subprocess.Popen[bytes], began: float, *, cut: bool = False
    ) -> None:
        code = process.returncode
        status = CUT_OFF if cut or code == CUT else DIED if code else DONE
        row: dict[str, Any] = {"status": status, "seconds": round(time.monotonic() - began, 1)}
        if status == DIED:
            errors = (self.folder / f"{stage.name}.{job.name}.err").read_text(errors="replace").strip().splitlines()
            row |= {"ended": signal.Signals(-code).name if code < 0 else f"exit {code}", "said": errors[-1:]}
        self._note(stage.name, {job.name: row})
        self._say(f"{stage.name} {job.name}: {' '.join(map(str, row.values()))}")

    def _status(self, stage: Stage, job: Job) -> str:
        return str(self.ended.get(stage.name, {}).get(job.name, {}).get("status", ""))

    def _note(self, stage: str, row: dict[str, Any]) -> None:
        self.ended.setdefault(stage, {}).update(row)
        write(self.folder / "device.json", self.ended)

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:.0f} s] {text}", flush=True)


def kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End processes and all that they started: politely, so that they can save, then not."""
    for number, patience in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        for process in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
        end = None if patience is None else time.monotonic() + patience
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(None if end is None else max(0.0, end - time.monotonic()))


def until() -> float:
    """The deadline of this process, in seconds since 1970."""
    return float(os.environ.get("MEASURE_UNTIL", "inf"))


def write(path: Path, data: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(data, indent=1, default=str) + "\n")
    os.replace(temporary, path)
