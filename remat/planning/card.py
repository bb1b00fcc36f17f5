"""Plans and the bytes that the caching allocator reserves for them.

They are reported in every plan for a GPU, and are the budget of `--budget auto`.

The budget of a plan is one of requested bytes: a plan decides them, and a solver can bound them. Reserved bytes depend
on the order and sizes of all allocations, and are known of a finished plan only. So a plan that reserves too much is
followed by one that requests less (`reserving_at_most`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from remat.errors import Infeasible, NoPlanInTime
from remat.formulation.solution import gap_of
from remat.planning.portfolio import BestPlan
from remat.planning.study import Study
from remat.reservation.allocator_settings import AllocatorSettings
from remat.reservation.fragmentation import Footprint, footprints
from remat.units import gib

MOST_TRIES = 6
CLOSE_SHARE = 0.02  # of the limit: a plan that leaves less unused is final


def footprints_of(study: Study, outcome: BestPlan, settings: AllocatorSettings) -> tuple[Footprint, ...]:
    """Simulate the plan's footprint under `settings`, and with expandable segments switched.

    Where the executor needs more than the evaluator says (regions of modules), each footprint grows by the excess.
    """
    solution = outcome.found.solution
    memory = study.problem(outcome.found.at, 0).memory.offloading(solution.offloads)
    more_bytes = max(outcome.peak_bytes - memory.curve(solution.regions).peak_bytes, 0)
    return tuple(each.with_more(more_bytes) for each in footprints(memory, solution.regions, settings))


def reserving_at_most(
    limit_bytes: int,
    first: BestPlan,
    within: Callable[[int], BestPlan],
    footprints_of: Callable[[BestPlan], Sequence[Footprint]],
) -> BestPlan:
    """Return `first` if the allocator reserves at most `limit_bytes` for it, else a plan that requests less.

    within         returns the plan for a limit on requested bytes; raises Infeasible or NoPlanInTime
    footprints_of  returns a plan's footprints: under the assumed settings, and under the others

    The first excess lowers the request. The search then halves the range between a request that is too large and one
    that fits, and returns the fastest plan that fits. The bound stays that of `first`. Ctrl-C ends the search. Raises
    NoPlanInTime if no plan fits.
    """
    first_footprints = footprints_of(first)
    excess = first_footprints[0].reserved_bytes - limit_bytes
    if excess <= 0:
        return first
    best, low, high = None, None, first.peak_bytes
    is_interrupted = first.interrupted
    for _ in range(MOST_TRIES):
        if is_interrupted:
            break
        asked = max(high - excess, high // 2) if low is None else (low + high) // 2
        try:
            made = within(asked)
        except (Infeasible, NoPlanInTime):
            low = asked
            continue
        except KeyboardInterrupt:
            is_interrupted = True
            break
        is_interrupted = made.interrupted
        excess = footprints_of(made)[0].reserved_bytes - limit_bytes
        if excess > 0:
            high = made.peak_bytes
            continue
        low = asked
        if best is None or made.found.price_us < best.found.price_us:
            best = made
        if -excess <= CLOSE_SHARE * limit_bytes:
            break
    if best is None and is_interrupted:
        raise KeyboardInterrupt
    if best is None:
        raise _too_fragmented(first_footprints, limit_bytes)
    price_us = best.found.price_us
    bound_us, floor_us = min(first.bound_us, price_us), min(first.floor_us, price_us)
    gap = gap_of(price_us, bound_us, first.cheapest_us)
    return dataclasses.replace(
        best, bound_us=bound_us, gap=gap, status="feasible", floor_us=floor_us, interrupted=is_interrupted
    )


def _too_fragmented(footprints: Sequence[Footprint], limit_bytes: int) -> NoPlanInTime:
    """Return the refusal of a plan whose requested bytes fit the card but whose reserved bytes do not.

    It proves nothing: another plan that requests as much may reserve less.
    """
    assumed, other = footprints
    text = (
        f"a plan that requests {gib(assumed.requested_bytes)} makes the caching allocator reserve "
        f"{gib(assumed.reserved_bytes)} (simulated, {assumed.settings or 'with its defaults'}), more than the "
        f"{gib(limit_bytes)} that the card can give, and no tighter plan was found that fits."
    )
    if other.reserved_bytes > limit_bytes:
        return NoPlanInTime(f"{text} Reduce the batch, or give the budget in bytes, for what is requested alone.")
    return NoPlanInTime(
        f"{text} With PYTORCH_CUDA_ALLOC_CONF={other.settings or '(not set)'} it reserves "
        f"{gib(other.reserved_bytes)} and fits: train, and plan, with that."
    )
