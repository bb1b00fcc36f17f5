"""Parts of a measurement, each in a process of its own, most telling first; a second call goes on where one ended.

Rule 1  A part writes what it finds into FOLDER/NAME.json as it goes. Whatever ends it (a segmentation fault, a time
        limit, the loss of the machine), what it had found is there, and the next part begins.
Rule 2  A part that is done is not run again. One that was never begun comes before one that did not end well.
Rule 3  No part may take more than its own seconds, nor all together more than the seconds of the call. What the call's
        end cut off is run by the next call.
Rule 4  This process never imports torch: a context on the GPU would be counted as memory that a part uses.
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

DONE, RUNNING, CUT_OFF, TOO_LONG, DIED = "done", "running", "cut off", "too long", "died"
LEAST_S = 5.0  # nothing begins that close to the end
GRACE_S = 3.0  # between asking a part to end and killing it
LOG_LINES = 12


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the half hour.

    name         of its file and of its function
    shows        its purpose, in words
    seconds      that it may take
    environment  besides this process's
    """

    name: str
    shows: str
    seconds: float
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def stem(self) -> str:
        return self.name.replace(":", "_").replace("/", "_")


class Runner:
    """Runs parts by `command`, a function from a part to what to execute; results go to `folder`."""

    def __init__(self, parts: Sequence[Part], folder: Path, command: Callable[[Part], Sequence[str]]):
        self.parts, self.folder, self._command = parts, folder, command

    def run(self, seconds: float, patience: float = 1.0) -> None:
        """Begin part after part for `seconds`; write the summary after each. A part gets `patience` times its own."""
        end = time.monotonic() + seconds
        for part in self._waiting():
            left = end - time.monotonic()
            if left < LEAST_S:
                break
            self._run(dataclasses.replace(part, seconds=patience * part.seconds), left)
            self.summarize()
        self.summarize()

    def result(self, part: Part) -> dict[str, Any]:
        """Return the findings of a part; empty if it was not begun, or its file is no JSON."""
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(self._path(part).read_text())
            return found if isinstance(found, dict) else {}
        return {}

    def _path(self, part: Part) -> Path:
        return self.folder / f"{part.stem}.json"

    def _waiting(self) -> list[Part]:
        """List the parts that are not done: first those never begun or cut off. (Rule 2)"""
        status = {part.name: self.result(part).get("status") for part in self.parts}
        waiting = [part for part in self.parts if status[part.name] != DONE]
        return sorted(waiting, key=lambda part: status[part.name] in (TOO_LONG, DIED))

    def _run(self, part: Part, left: float) -> None:
        limit, began = min(part.seconds, left), time.monotonic()
        attempts = self.result(part).get("attempts", 0) + 1
        self._path(part).unlink(missing_ok=True)
        print(f"{part.name}: {part.shows} (at most {limit:.0f} s)", flush=True)
        log = self.folder / f"{part.stem}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                self._command(part),
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **part.environment},
                start_new_session=True,
            )
            try:
                code = process.wait(limit)
                status = DONE if code == 0 else DIED
            except subprocess.TimeoutExpired:
                status, code = (TOO_LONG if limit == part.seconds else CUT_OFF), None
            except KeyboardInterrupt:
                status, code = CUT_OFF, None
                raise
            finally:
                _end(process)
                outcome = {"status": status, "exit": code, "attempts": attempts}
                self._settle(part, outcome, round(time.monotonic() - began, 1), log)

    def _settle(self, part: Part, outcome: dict[str, Any], seconds: float, log: Path) -> None:
        """Note how a part ended beside what it found."""
        found = {**self.result(part), "part": part.name, "shows": part.shows, **outcome, "seconds": seconds}
        if outcome["status"] != DONE:
            found["log"] = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        write(self._path(part), found)
        failures = len(found.get("failures", {}))
        print(
            f"  {outcome['status']} after {seconds:.0f} s" + (f", {failures} failures" if failures else ""), flush=True
        )

    def summarize(self) -> None:
        """device.json and device.md: every part, in order, with what it said."""
        results = [self.result(part) or {"part": part.name, "shows": part.shows} for part in self.parts]
        short = ("part", "shows", "status", "exit", "seconds", "attempts", "said", "failures", "log")
        rows = [{key: result[key] for key in short if key in result} for result in results]
        write(self.folder / "device.json", {"parts": rows})
        lines = ["| part | shows | how it ended | s |", "| --- | --- | --- | --- |"]
        lines += [f"| {row['part']} | {row['shows']} | {_ending(row)} | {row.get('seconds', '')} |" for row in rows]
        for row in rows:
            if row.get("said") or row.get("failures"):
                lines += ["", f"## {row['part']}", ""]
                lines += [f"- {text}" for text in row.get("said", ())]
                lines += [f"- failed: {name}: {text.splitlines()[0]}" for name, text in row.get("failures", {}).items()]
        (self.folder / "device.md").write_text("\n".join(lines) + "\n")


def _ending(row: dict[str, Any]) -> str:
    status = row.get("status", "not begun")
    code = row.get("exit")
    if status == DIED and isinstance(code, int):
        return f"died, {signal.Signals(-code).name}" if code < 0 else f"died, exit {code}"
    failures = len(row.get("failures", ()))
    return f"{status}, {failures} steps failed" if failures else str(status)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part and what it started: politely, so that it can save, then not."""
    for number, patience in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
            if number == signal.SIGKILL:
                return


def write(path: Path, data: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(data, indent=1, default=str) + "\n")
    os.replace(temporary, path)
