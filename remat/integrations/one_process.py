"""A Trainer's code, run as in one process.

Trainers gather numbers from all processes for their logs. One process plans while the others wait for its file, and
would wait for them in turn. Meanwhile accelerate hears that there is one process, which gathers its own numbers alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """Let accelerate see only this process while the context is open."""
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    alone = {"distributed_type": DistributedType.NO, "num_processes": 1, "process_index": 0}
    with mock.patch.dict(PartialState._shared_state, alone), mock.patch.dict(AcceleratorState._shared_state, alone):
        yield
