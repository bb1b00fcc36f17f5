"""Shorter: plans for shorter batches, in one plan with that for the longest.

A plan holds for all shorter batches too, and recomputes for them what only the longest need. So a step that sees many
lengths has a plan for several of them, within one budget. In training each batch runs under the first plan that holds
it. A length whose plan saves little time over the next one has none of its own.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence

from remat.errors import CaptureError, Infeasible, NoPlanInTime, UsageError, require_argument
from remat.evaluation.forwards import forwards_of, is_plain
from remat.evaluation.plan import Plan
from remat.execution.executions import EAGER
from remat.execution.forwards import holds
from remat.planning.links import ACTIVATIONS, WEIGHTS, offloads_named
from remat.planning.request import PlanRequest
from remat.planning.study import Study


def whole_lengths(lengths: Iterable[int]) -> list[int]:
    """Return the given lengths. Raises UsageError unless they are whole numbers."""
    takes = "a list of whole numbers of tokens"
    require_argument("lengths", lengths, Iterable, takes)
    found = [*lengths]
    if not all(type(length) is int for length in found):
        raise UsageError(f"`lengths=` takes {takes}, not {reprlib.repr(lengths)}.")
    return found


def require_lengths(lengths: Sequence[int], longest: int | None, request: PlanRequest) -> None:
    """Raise UsageError unless `lengths` are shorter than the `longest`, and the request allows several plans."""
    if not lengths:
        return
    if longest is None:
        raise UsageError("the model has no sequence length, so it has no shorter ones: leave `lengths` out.")
    if wrong := [length for length in lengths if not 0 < length < longest]:
        raise UsageError(
            f"`lengths` are shorter than the longest batch, of {longest} tokens: {wrong[0]} is not. Give the longest "
            "as the sequence length (`Workload(seq_len=)`, --seq-len)."
        )
    if request.execution != EAGER:
        raise UsageError(f"plans for several lengths run in eager mode, not with execution {request.execution!r}.")
    if {ACTIVATIONS, WEIGHTS} & {*offloads_named(request.offload)}:
        raise UsageError(
            "plans for several lengths share no host memory: leave `lengths` out, or offload the optimizer only."
        )


def with_shorter(
    made: Plan, study: Study, lengths: Sequence[int], planned_at: Callable[[int, PlanRequest], Plan]
) -> Plan:
    """Return `made`, of `study`, with plans for shorter batches within the same budget, where they save time.

    A length for which no plan was found has none, and none has one after Ctrl-C. Nor has one that the arguments of the
    forward do not show, since training could not tell it. `planned_at(length, request)` plans the step at a length.

    Raises UsageError if the step calls its model several times.
    """
    if lengths and not is_plain(forwards_of(made.about, len(made.fingerprints))):
        raise UsageError(
            "the step calls the model, or modules of it, several times before its backward, and each call has a length "
            "of its own: leave `lengths` out."
        )
    budget, request = study.budget, study.request
    assert budget is not None
    if budget.reserved_bytes is None:  # a share of the step is one of the longest
        request = dataclasses.replace(request, budget=budget.limit_bytes, headroom=None)
    kept, shorter = [made], made
    for length in sorted({*lengths}, reverse=True):
        if shorter.solver.get("interrupted"):
            break
        try:
            shorter = planned_at(length, request)
        except (CaptureError, Infeasible, NoPlanInTime):
            continue
        except KeyboardInterrupt:  # the plan for the longest is there
            break
        if not holds(given_of(made), given_of(shorter)) or holds(given_of(shorter), given_of(made)):
            continue  # the arguments do not show the length
        if kept[-1].predicted["overhead"] - shorter.predicted["overhead"] >= request.forms.worth:
            kept.append(shorter)
    return dataclasses.replace(made, shorter=tuple(reversed(kept[1:])))


def given_of(plan: Plan) -> Mapping[str, str]:
    """Return the arguments of the planned forward, as `given_to` describes them."""
    return forwards_of(plan.about, len(plan.fingerprints))[0].given
