"""Clock: time limits of every part of planning. No other module of planning or solving has seconds.

A time limit that the caller sets (`Limits.time_s`) is above all of these. Where none is set, these end the search, and
are seconds of counted work (`remat/work.py`): past them, searches rarely found better plans or bounds on the models in
`results/`.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Clock:
    """Seconds.

    Searches among the forms of a step (`planning/portfolio.py`):

    first_s      for the first search of a form         longer_s  for a second search of one that may be the best
    window_s     for each micro-batch size where activations may be offloaded: its optimum is rarely proved
    layers_s     for each number of layers whose weights are on the host
    each_s       for each strategy of a comparison, and each point of a curve
    lever_s      for the least peak of a step that a lever of `planning/advice.py` changes

    Parts of the exact solver:

    program_s    for the integer program, after the chain
    finer_s      for finer tables of the chain, and `small_gap_s` if the gap is below 0.5 %
    plans_s      for tables that cannot raise the bound but may give a better plan
    stalls_s     without progress before another part of the search has its turn
    chain_s      after which a chain's search that has a plan begins nothing more, unless a time limit is given
    labels_s     for labels with one limit
    """

    first_s: float = 3.0
    longer_s: float = 12.0
    window_s: float = 8.0
    layers_s: float = 4.0
    each_s: float = 60.0
    lever_s: float = 10.0
    program_s: float = 40.0
    finer_s: float = 20.0
    small_gap_s: float = 8.0
    plans_s: float = 3.0
    stalls_s: float = 4.0
    chain_s: float = 40.0
    labels_s: float = 1.5
