"""Plans and what the caching allocator reserves for them: told in every plan for a GPU, kept by `--budget auto`.

The budget of a plan is one of requested bytes: they are what a plan decides, and what a solver can bound. What is
reserved depends on the order and sizes of everything, and is known of a finished plan only. So a plan that reserves
too much is followed by one that requests less (`reserving_at_most`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from remat.costing.profile import Profile
from remat.errors import Infeasible, NoPlanInTime
from remat.evaluation.evaluator import Memory
from remat.evaluation.plan import Plan, Proof, from_refs
from remat.formulation.solution import Solution
from remat.offloading.refs import from_offload_refs
from remat.reservation.allocator_settings import AllocatorSettings
from remat.reservation.fragmentation import footprints
from remat.units import gib

MOST_TRIES = 6
CLOSE = 0.02  # of the limit: a plan that leaves no more unused is not improved on


def with_footprints(made: Plan, profile: Profile, settings: AllocatorSettings) -> Plan:
    """`made`, with the footprint under `settings` and the one with or without expandable segments in its predictions.

    Where the executor needs more than the evaluator says (regions of modules), each is as much larger.
    """
    memory = Memory(profile.graph, profile.costs.workspace_per_op(profile.graph))
    memory = memory.offloading(from_offload_refs(profile.graph, made.offloads))
    regions = from_refs(profile.graph, made.regions)
    more = max(made.predicted["peak_bytes"] - memory.curve(regions).peak_bytes, 0)
    found = [each.with_more(more).to_json() for each in footprints(memory, regions, settings)]
    return dataclasses.replace(made, predicted={**made.predicted, "allocator": found})


def reserving_at_most(limit_bytes: int, first: Plan, within: Callable[[int], Plan]) -> Plan:
    """A plan that makes the allocator reserve `limit_bytes` at most: `first`, or one that requests less.

    within  the plan for so many requested bytes; raises Infeasible or NoPlanInTime

    The first excess says how much less to request; from then on the search halves what lies between a request that is
    too much and one that is not, and the fastest plan that fits is taken. Bound and budget stay those of `first`.
    Raises NoPlanInTime where nothing is found.
    """
    best, low, high = None, None, first.predicted["peak_bytes"]
    excess = _reserved(first) - limit_bytes
    if excess <= 0:
        return first
    for _ in range(MOST_TRIES):
        asked = max(high - excess, high // 2) if low is None else (low + high) // 2
        try:
            made = within(asked)
        except (Infeasible, NoPlanInTime):
            low = asked
            continue
        excess = _reserved(made) - limit_bytes
        if excess > 0:
            high = made.predicted["peak_bytes"]
            continue
        low = asked
        if best is None or made.solver["objective_us"] < best.solver["objective_us"]:
            best = made
        if -excess <= CLOSE * limit_bytes:
            break
    if best is None:
        raise _too_fragmented(first, limit_bytes)
    return _tightened(best, first)


def _reserved(made: Plan) -> int:
    """What the allocator reserves under the settings that `made` assumes."""
    return int(made.predicted["allocator"][0]["reserved_bytes"])


def _tightened(made: Plan, first: Plan) -> Plan:
    """A plan made for less than was asked for, as one for that: with the budget and the bound of `first`."""
    objective_us = made.solver["objective_us"]
    bound_us = min(first.solver["bound_us"], objective_us)
    gap = Solution("", "feasible", objective_us=objective_us, bound_us=bound_us).gap
    solver: Proof = {**made.solver, "status": "feasible", "bound_us": bound_us, "gap": gap}
    return dataclasses.replace(made, budget_bytes=first.budget_bytes, solver=solver)


def _too_fragmented(first: Plan, limit_bytes: int) -> NoPlanInTime:
    """The refusal where what `first` requests fits on the card, and what it reserves does not.

    It proves nothing: another plan that requests as much may reserve less.
    """
    assumed, other = first.predicted["allocator"]
    text = (
        f"a plan that requests {gib(assumed['requested_bytes'])} makes the caching allocator reserve "
        f"{gib(assumed['reserved_bytes'])} (simulated, {assumed['settings'] or 'with its defaults'}), more than the "
        f"{gib(limit_bytes)} that the card can give, and no tighter plan was found that fits."
    )
    if other["reserved_bytes"] > limit_bytes:
        return NoPlanInTime(f"{text} Reduce the batch, or give the budget in bytes, for what is requested alone.")
    return NoPlanInTime(
        f"{text} With PYTORCH_CUDA_ALLOC_CONF={other['settings'] or '(not set)'} it reserves "
        f"{gib(other['reserved_bytes'])} and fits: train, and plan, with that."
    )
