"""Eager tensors: what becomes of a tensor that Python takes numbers or rows out of, in a captured graph.

Dynamo makes something else of it than eager mode or the planning on fakes would. We change that, for our captures
only.

Rule 1  The number in a tensor is unknown. Dynamo would read it off one on the host, and not off a fake or one on
        a GPU, where the graph breaks instead. A plan is for all of them, so graphs break alike.
Rule 2  Iterating over a tensor unbinds it, where the answers are eager mode's. Dynamo would take one row after the
        other: in backward each would be a tensor of zeros as large as the whole, but for its row, and these be summed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from remat._torch.dynamo import numbers_unread, rows_unbound
from remat.capture.eager_answers import answers_of, capture_of
from remat.shared import Shared


@contextlib.contextmanager
def _as_in_eager_mode() -> Iterator[None]:
    with numbers_unread(_is_ours), rows_unbound(_is_answered):
        yield


eager_tensors = Shared(_as_in_eager_mode)


def _is_ours(tx: Any) -> bool:
    return capture_of(tx) is not None


def _is_answered(tx: Any) -> bool:
    return answers_of(tx) is not None
