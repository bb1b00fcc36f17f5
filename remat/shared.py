"""A change to a library that several threads need: the first makes it, the last undoes it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any


class Shared:
    """A change that holds while any thread needs it: the first makes it, the last undoes it."""

    def __init__(self, change: Callable[[], contextlib.AbstractContextManager[Any]]):
        self._change = change
        self._lock = threading.Lock()
        self._users = 0
        self._made = contextlib.ExitStack()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if self._users == 0:
                self._made.enter_context(self._change())
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._made.close()
