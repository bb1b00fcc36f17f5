"""Findings: what a part of the half hour found so far, on disk after every step of it."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.half_hour.runner import RUNNING, write

FRAMES = 4


class Findings:
    """A part's file: `found` by name, sentences `said` for people, `failures` of single steps."""

    def __init__(self, path: Path):
        self.folder = path.parent
        self._path, self._began = path, time.monotonic()
        self._data: dict[str, Any] = {
            "status": RUNNING,
            "pid": os.getpid(),
            "said": [],
            "found": {},
            "failures": {},
            "seconds_of": {},
        }
        self._save()

    def note(self, name: str, value: Any) -> None:
        self._data["found"][name] = value
        self._save()

    def say(self, sentence: str) -> None:
        self._data["said"].append(sentence)
        print(sentence, flush=True)
        self._save()

    def step(self, name: str, work: Callable[[], Any]) -> Any:
        """Run `work` and note its result under `name`; None if it raises, because later steps are worth having."""
        began = time.monotonic()
        try:
            value = work()
            if value is not None:
                self._data["found"][name] = value
        except Exception as error:
            value = None
            self._data["failures"][name] = f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-FRAMES)}"
            print(self._data["failures"][name], file=sys.stderr, flush=True)
        self._data["seconds_of"][name] = round(time.monotonic() - began, 2)
        self._save()
        return value

    @property
    def failed(self) -> bool:
        return bool(self._data["failures"])

    def _save(self) -> None:
        write(self._path, self._data)
