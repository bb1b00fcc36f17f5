"""Open numbers: Python numbers of a model that change from forward to forward, in graphs that stay.

A counter that a forward advances, a temperature that it lowers: Dynamo takes an attribute of a module for a constant,
and would trace anew in every step. Of a model that a plan knows to carry numbers they are left open from their second
value on, as sizes are (`dynamic_shapes.py`): inputs of the graph, out of which others are computed first.

Rule 1  Sizes of tensors stay closed where a forward is several graphs, as they do without open numbers.
Rule 2  A float that an operator is given stays open too: the graph has the rate of a dropout, not its value.
Rule 3  What numpy computes of a number is a number, open or not, in every capture: as in eager mode.
Rule 4  A number that a generator of Python's draws is an input of the graph. Where the trace fails for it, as where it
        decides a shape, the forward is traced again with a break there.

A branch that a number decides is guarded, and traced once for each way that it goes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from remat._torch.dynamo import draws_as_inputs, floats_open, numpy_of_numbers, sizes_closed
from remat.capture.eager_answers import capture_of
from remat.shared import Shared


@contextlib.contextmanager
def _open() -> Iterator[None]:
    with (
        sizes_closed(_closes_sizes),
        floats_open(_opens_floats),
        numpy_of_numbers(_is_ours),
        draws_as_inputs(_opens_draws),
    ):
        yield


open_numbers = Shared(_open)  # as far as a capture's `opens_numbers` says so


def _closes_sizes(tx: Any) -> bool:  # Rule 1
    capture = capture_of(tx)
    return capture is not None and capture.opens_numbers and not capture.opens_sizes


def _opens_floats(tx: Any) -> bool:  # Rule 2
    capture = capture_of(tx)
    return capture is not None and capture.opens_numbers


def _is_ours(tx: Any) -> bool:  # Rule 3
    return capture_of(tx) is not None


def _opens_draws(tx: Any) -> bool | None:  # Rule 4
    capture = capture_of(tx)
    if capture is None or capture.answers is None:
        return None
    capture.has_drawn = True
    return capture.opens_draws
