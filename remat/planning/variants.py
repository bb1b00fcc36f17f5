"""Variants: a step as captured, and the same step in other forms: losses in slices, MLPs in slices, groups fused.

A variant is a step of its own: recorded, costed, posed, solved and replayed like any other. Its nodes are the same, but
that a loss head is one node, and a fused group. So a plan of one number of slices is a plan of the others, and a good
one to begin from.

Rule 1  A plan's price is what its step takes more than the captured one: what it recomputes, what its slices cost
        (smaller kernels, gradients added up), less what fusing saves. It may be negative.
Rule 2  Where slices alone cost as much as the best plan so far, no plan of them is looked for, and the bound of those
        plans is that cost. Where nothing needs to be recomputed, none are.
Rule 3  The step as captured and every variant are searched for a few seconds, and the best variant once more, for
        longer; and so are a few others that may be better still, by their bounds, and the step as captured if it may
        yet be the one to take. A search ends where its bound says that the best plan so far stands. Numbers of slices
        in the middle come first: they are often the best.
Rule 4  On a device at hand, only as many slices are tried as leave every row's gradient bitwise what it was.
Rule 5  Another form is taken where it is worth it: unless nothing else fits, by `WORTH` of the step. One that is left
        for less is told of, and the bound is then of plans for the step as captured.
Rule 6  Where groups may be fused they are, in every variant.
Rule 7  Runs of nodes that act by row (`chunking/rows.py`: MLPs) are cut all alike, into slices whose widest value has
        about `WIDE` numbers, and beside a loss in `BESIDE_ROWS` slices. Their forward is made once more, whatever the
        regions: where that alone costs as much as the best plan so far, none are tried. Not where groups are fused.
Rule 8  Plans are compared as the evaluator sees them, and the one to be taken is replayed. Where it does not keep the
        budget as it runs, and what is found in its place is slower, all are compared again.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from remat.chunking.products import round_alike, rows_round_alike
from remat.chunking.rows import RowRun
from remat.costing.planning_device import PlanningDevice
from remat.costing.profile import Profile
from remat.errors import Infeasible, NoPlanInTime, RematError, UsageError
from remat.evaluation.evaluator import Memory
from remat.evaluation.form import CAPTURED, SLICED, WHOLE, Chunk, Form, form_of
from remat.evaluation.plan import Plan, Prediction, Proof, from_refs
from remat.execution.base import Execution
from remat.formulation.problem import Problem
from remat.formulation.solution import Limits, Status
from remat.planning.profiling import VariantProfiles
from remat.planning.search import Draft, Judge, OnReplay
from remat.recording.fake_step import FakeStep
from remat.workload.training_loop import TrainingLoop

SLICES = (8, 16, 4, 2, 1)  # in the order in which they are tried
WIDE, MOST_ROW_SLICES = 1 << 25, 32  # numbers of the widest value in a slice of what acts by row; slices at most
BESIDE_ROWS = (4, 16)  # slices of the loss there
LARGE = 0.01  # of the peak: smaller logits are left whole
WORTH = 0.01  # of the step without checkpointing
QUICK_S, PATIENCE_S = 3.0, 12.0  # for the plan of a variant, at first and once more
MOST_AGAIN, OPEN = 3, 0.01  # variants once more beside the best, where their bounds are lower by so much of its price


@dataclasses.dataclass(frozen=True)
class Variant:
    """A step in another form.

    extra_us   what it takes longer than as captured, without recomputation; negative where fusing makes it faster
    untouched  `Problem.without_checkpointing` of the captured one
    """

    form: Form
    profile: Profile
    judge: Judge
    extra_us: float
    untouched: dict[str, Any]


class Variants:
    """The variants of a step but the captured one; each is recorded when it is asked for.

    step        of the model, at any batch size
    profile     of the captured step, priced for the execution
    slices      whether losses may run in slices        fuse  whether groups are fused
    rows        whether, where losses may, so may what acts by row
    on_variant  called with a form before it is recorded, or searched once more
    profile_in  the profile of the step in a form; by default that of `step`, recorded
    """

    def __init__(
        self,
        execution: Execution,
        step: FakeStep,
        profile: Profile,
        on_replay: OnReplay | None = None,
        on_variant: Callable[[Form], None] | None = None,
        *,
        slices: bool = True,
        fuse: bool = False,
        rows: bool = True,
        profile_in: Callable[[Form], Profile] | None = None,
    ):
        self._execution, self._step, self._whole, self._on_replay = execution, step, profile, on_replay
        self.on_variant = on_variant or (lambda form: None)
        self._slices, self.fuse, self._profile_in = slices, fuse, profile_in
        self._may_cut_rows = slices and rows
        self._known: dict[Form, Variant] = {}
        self._alike: dict[int, bool] = {}

    @property
    def are_any(self) -> bool:
        """Whether there is something to cut, or a group to fuse."""
        return self.fuse or bool(self._heads) or bool(self._row_runs)

    @property
    def are_losses(self) -> bool:
        """Whether there is a loss to cut."""
        return bool(self._heads)

    def __iter__(self) -> Iterator[Variant]:
        if self.fuse:
            yield self.fused()
        for slices in SLICES if self._heads else ():
            if not self._rounds_alike(slices):
                continue
            try:
                yield self.in_slices(slices)
            except RematError:  # the step, or a later graph, reads the logits
                return

    def with_rows(self) -> Iterator[Variant]:
        """The variants in which what acts by row is cut too. (Rule 7)"""
        if not self._row_slices:
            return
        made = 0
        for slices in (*BESIDE_ROWS, 0) if self._heads else (0,):
            if made and not slices:
                return
            if slices and not self._rounds_alike(slices):
                continue
            try:
                found = self.of(dataclasses.replace(self._cut(slices), rows=self._row_slices))
            except (RematError, RuntimeError):  # as above: then the loss is left whole; or a kernel takes no slices
                continue
            made += 1
            yield found

    @functools.cached_property
    def rows_us(self) -> float:
        """What cutting all that acts by row takes longer at least: its forward once more, but for the last products."""
        graph, times = self._whole.graph, self._whole.costs.per_op_us(self._whole.graph)
        first = {(node.call, node.name): node for node in graph.nodes}
        again = [(call, node) for call, run in self._row_runs for node in run.nodes if node not in run.unmade]
        made = (first[call, node.name] for call, node in again if (call, node.name) in first)
        return float(sum(times[node.first : node.end].sum() for node in made))

    @functools.cached_property
    def _row_runs(self) -> list[tuple[int, RowRun]]:
        are_asked = self._may_cut_rows and not self.fuse and MOST_ROW_SLICES > 1
        may_run = self._execution.runs_forms and self._step.loop.shard is None
        return list(self._step.row_runs) if are_asked and may_run else []

    @functools.cached_property
    def _row_slices(self) -> int:
        """Into how many slices all that acts by row is cut; 0 where nothing is. (Rules 4 and 7)"""
        if not self._row_runs:
            return 0
        widest = max(run.rows * run.widest for _, run in self._row_runs)
        slices = min(max(round(widest / WIDE), 2), MOST_ROW_SLICES)
        if self._whole.costs.source == "measured":
            device, autocast = self._step.device, self._step.workload.autocast
            different = {run.signature: run for _, run in self._row_runs}.values()
            if any(rows_round_alike(run, slices, device, autocast) is False for run in different):
                return 0
        return slices

    def fused(self) -> Variant:
        """The variant with losses whole."""
        return self.of(Form(fused=True))

    def in_slices(self, slices: int) -> Variant:
        """The variant with every loss that is large enough in so many slices."""
        return self.of(self._cut(slices))

    def like_liger(self) -> Variant:
        """The variant with as many slices as Liger-Kernel's fused linear cross-entropy takes.

        (linkedin/Liger-Kernel, `fused_linear_cross_entropy.py`: as many times fewer rows as there are more classes than
        the width, rounded up to a power of two.)
        """
        return self.of(self._cut(max((self._liger_slices(head) for head in self._heads), default=1)))

    def _liger_slices(self, head: Chunk) -> int:
        rows, classes, width = self._step.shape_of(head)
        most = 1 << (math.ceil(rows / math.ceil(classes / width)) - 1).bit_length()
        return math.ceil(rows / most)

    def profile_of(self, plan: Plan) -> Profile:
        """That of the variant that `plan` is for."""
        return next(known.profile for known in self._known.values() if known.form == form_of(plan.about))

    def _rounds_alike(self, slices: int) -> bool:
        """Whether gradients will be bitwise those of the loss whole, where that can be seen: on the device at hand."""
        if self._whole.costs.source != "measured":
            return True
        if slices not in self._alike:
            dtype, device = self._step.product_dtype, self._step.device
            found = (round_alike(self._step.shape_of(head), slices, dtype, device) for head in self._heads)
            self._alike[slices] = all(alike is not False for alike in found)
        return self._alike[slices]

    @functools.cached_property
    def _heads(self) -> list[Chunk]:
        """The losses that are large enough; none where slices would not give what they promise. (`why_whole`)"""
        if not self._slices or why_whole(self._execution, self._step) is not None:
            return []
        graph = self._whole.graph
        peak = Memory(graph).peak_without_regions
        times = graph.about["batch_size"] / self._step.workload.batch_size
        return [head for head, logits_bytes in self._step.heads if times * logits_bytes >= LARGE * peak]

    @functools.cached_property
    def _untouched(self) -> dict[str, Any]:
        graph, costs = self._whole.graph, self._whole.costs
        peak_bytes = Memory(graph, costs.workspace_per_op(graph)).peak_without_checkpointing
        return {"peak_bytes": peak_bytes, "step_time_us": costs.step_time_us(graph)}

    @functools.cached_property
    def _recorded_in(self) -> Callable[[Form], Profile]:
        device = self._step.device if self._whole.costs.source == "measured" else None
        return VariantProfiles(self._step, PlanningDevice(self._whole.target, device), self._whole).profile

    def _cut(self, slices: int) -> Form:
        return Form(tuple(dataclasses.replace(head, slices=slices) for head in self._heads if slices), self.fuse)

    def of(self, form: Form) -> Variant:
        """The variant in `form`."""
        if form not in self._known:
            self.on_variant(form)
            self._known[form] = self._recorded(form)
        return self._known[form]

    def _recorded(self, form: Form) -> Variant:
        found = self._execution.price((self._profile_in or self._recorded_in)(form))
        return Variant(
            form,
            found,
            Judge(self._execution, self._step, found, self._on_replay),
            found.costs.step_time_us(found.graph) - self._untouched["step_time_us"],
            self._untouched,
        )


def can_cut(execution: Execution, step: FakeStep, profile: Profile) -> bool:
    """Whether plans of `step` may have a loss in slices."""
    return Variants(execution, step, profile).are_losses


def require_fusible(execution: Execution, loop: TrainingLoop | None, *, exact: bool) -> None:
    """Raise UsageError where groups cannot be fused; `loop` is that of the step, None where there is only a profile."""
    if exact:
        raise UsageError(
            "`fuse=True` and `exact=True` exclude each other: fused groups round elsewhere than the untouched step."
        )
    if not execution.runs_forms:
        raise UsageError(f'groups are fused in eager execution, not under `execution="{execution}"`.')
    if loop is None:
        raise UsageError("a profile out of a file holds the step as captured; to fuse, plan from the model.")
    if loop.shard is not None:
        raise UsageError("groups are not fused where states are sharded; leave `fuse` or `shard` out.")


def is_power_of_two(count: int) -> bool:
    """Whether so many micro-batches divide a loss without rounding."""
    return not count & (count - 1)


def why_whole(execution: Execution, step: FakeStep) -> str | None:
    """Why no loss of `step` may run in slices; None where it may."""
    if not execution.runs_forms:
        return f"execution {execution} runs no slices"
    if step.loop.shard is not None:
        return "states are sharded"
    if not is_power_of_two(step.loop.accumulation):
        return "the loss is divided by a number of micro-batches that is no power of two"
    if step.computes_in_float16:
        return "gradients of a loss that is not scaled yet are too small for float16"
    return None


@dataclasses.dataclass(frozen=True)
class Effort:
    """How to look for a plan of a variant.

    time_s    seconds for it, None for all that there are
    before    the plan of another variant, which is one to begin from
    below_us  recomputation that a plan has to be below to be of use
    """

    time_s: float | None
    before: Plan | None = None
    below_us: float = math.inf

    def within(self, limits: Limits, problem: Problem) -> Limits:
        """`limits` with no more than that time, to begin from the plan before if that is one of the space."""
        limits = limits if self.time_s is None else limits.at_most(self.time_s)
        limits = dataclasses.replace(limits, below_us=self.below_us)
        if self.before is None:
            return limits
        try:
            start = from_refs(problem.graph, self.before.regions)
            problem.runs_of(start)
        except KeyError:
            return limits
        return dataclasses.replace(limits, start=start)


Attempt = Callable[[Variant, Effort], Draft]


def fastest(
    whole: Callable[[Effort], Draft], variants: Variants, attempt: Attempt, is_over: Callable[[], bool] = bool
) -> Plan:
    """The plan of least price, replayed. (Rules 1 to 5, 7 and 8)

    whole    the plan of the step as captured
    attempt  that of a variant
    is_over  whether the time for all of it is up, or somebody pressed Ctrl-C

    Both raise Infeasible or NoPlanInTime.
    """
    search = _Search(whole, variants, attempt, is_over)
    search.begin()
    try:
        search.run()
    except KeyboardInterrupt:
        if not search.has_plan:
            raise
        search.is_interrupted = True
    best = search.settled()
    if best is None and search.is_cut_short:
        raise NoPlanInTime(
            f"{min(search.refused, key=_least_budget)} That is with the loss whole or in few slices: there was no time "
            "to look for plans that cut it finer; raise --time-limit."
        )
    if best is None:
        in_time = [error for error in search.refused if isinstance(error, NoPlanInTime)]
        raise min(in_time or search.refused, key=_least_budget)  # refused for good is only what no form can do
    untouched = search.untouched
    made = best.plan
    if best is untouched and (left := search.left_for_too_little) is not None:
        made = dataclasses.replace(made, predicted={**made.predicted, SLICED: left.plan.predicted["overhead"]})
    if best is untouched and not search.leaves_open:
        return _bounded(made, best.bound_us, 0.0) if best.least_us > made.solver["bound_us"] else made
    if untouched is not None and best is not untouched:
        made = dataclasses.replace(made, predicted={**made.predicted, WHOLE: untouched.plan.predicted["overhead"]})
    if search.is_interrupted:
        made = dataclasses.replace(made, solver={**made.solver, "interrupted": True})
        search.bounds_us.append(-made.without_checkpointing["step_time_us"])  # what was not tried takes some time
    return _bounded(made, search.bound_us, search.least_us)


@dataclasses.dataclass(eq=False)
class _Tried:
    """The plan of a variant, None for the step as captured, priced from the whole step."""

    variant: Variant | None
    draft: Draft
    plan: Plan = dataclasses.field(init=False)
    is_judged: bool = False
    least_us: float = -math.inf  # what another search of it has proved

    def __post_init__(self) -> None:
        self._take(self.draft.plan)

    def judge(self) -> None:
        """Let it be the plan that the replay accepts."""
        self._take(self.draft.judged())
        self.is_judged = True

    def _take(self, plan: Plan) -> None:
        self.plan = plan if self.variant is None else priced(plan, self.variant)

    @property
    def price_us(self) -> float:
        return float(self.plan.solver["objective_us"])

    @property
    def bound_us(self) -> float:
        return max(self.least_us, float(self.plan.solver["bound_us"]))

    @property
    def is_proved(self) -> bool:
        return self.plan.solver["status"] == "optimal" or self.bound_us >= self.price_us


class _Search:
    """What was found for the step as captured and among variants; `bounds_us` are those of variants without a plan.

    (Rules 2, 3, 7 and 8)
    """

    def __init__(
        self, whole: Callable[[Effort], Draft], variants: Variants, attempt: Attempt, is_over: Callable[[], bool]
    ):
        self._whole, self._variants, self._attempt, self._is_over = whole, variants, attempt, is_over
        self.untouched: _Tried | None = None
        self._looked_below_us = -math.inf  # for the step as captured, once more
        self.tried: list[_Tried] = []
        self.bounds_us: list[float] = []
        self._refused: dict[Form, Infeasible | NoPlanInTime] = {}  # the last of each
        self.is_cut_short = self.is_interrupted = False
        self.has_dropped = False  # a plan of a variant that does not keep the budget as it runs

    @property
    def refused(self) -> list[Infeasible | NoPlanInTime]:
        """Why there is no plan of a form, for each that was refused."""
        return list(self._refused.values())

    @property
    def has_plan(self) -> bool:
        return self.untouched is not None or bool(self.tried)

    @property
    def leaves_open(self) -> bool:
        """Whether a variant may be better of which no plan is known."""
        return self.has_dropped or self.is_cut_short or self.is_interrupted

    @property
    def _plans(self) -> list[_Tried]:
        return self.tried if self.untouched is None else [self.untouched, *self.tried]

    @property
    def bound_us(self) -> float:
        """What every plan of every variant costs at least."""
        return min([*self.bounds_us, *(tried.bound_us for tried in self._plans)])

    @property
    def least_us(self) -> float:
        """What the cheapest variant costs without recomputation, as far as is known."""
        return min([0.0, *self.bounds_us, *(tried.variant.extra_us for tried in self.tried if tried.variant)])

    def begin(self) -> None:
        """Try the step as captured."""
        self.untouched = self._captured(Effort(QUICK_S))

    def _captured(self, effort: Effort) -> _Tried | None:
        try:
            return _Tried(None, self._whole(effort))
        except (Infeasible, NoPlanInTime) as error:
            self._refused[CAPTURED] = error
            return None

    def settled(self) -> _Tried | None:
        """The plan to be taken, as the replay accepts it. (Rule 8)"""
        while (best := self._best()) is not None and not best.is_judged:
            try:
                best.judge()
            except (Infeasible, NoPlanInTime) as error:
                self._drop(best, error)
            if best is not self.untouched:
                self._captured_again()  # of which too little was asked, if the best plan takes longer as it runs
        return best

    @property
    def left_for_too_little(self) -> _Tried | None:
        """The best plan of a variant, where it is better than that of the step as captured."""
        assert self.untouched is not None
        best = self._best_variant()
        return best if best is not None and best.price_us < self.untouched.price_us else None

    def _best_variant(self) -> _Tried | None:
        return min(self.tried, key=lambda tried: tried.price_us, default=None)

    def _best(self) -> _Tried | None:
        """The plan to be taken, as far as is known. (Rule 5)"""
        untouched, best = self.untouched, self._best_variant()
        if best is None or untouched is None:
            return best or untouched
        step_us = best.plan.without_checkpointing["step_time_us"]
        return untouched if untouched.price_us - best.price_us < WORTH * step_us else best

    def _drop(self, tried: _Tried, error: Infeasible | NoPlanInTime) -> None:
        self._refused[CAPTURED if tried.variant is None else tried.variant.form] = error
        self.bounds_us.append(tried.bound_us)
        if tried is self.untouched:
            self.untouched = None
        else:
            self.tried.remove(tried)
            self.has_dropped = True

    def run(self) -> None:
        """Try variants that may cost less than the step as captured, and what may be best once more, for longer."""
        if self._price_to_beat_us <= 0 and not self._variants.fuse:
            return
        self._run_variants()
        self._captured_again()

    def _run_variants(self) -> None:
        self._try_each(self._variants)
        if self._variants.rows_us < self._price_to_beat_us:
            self._try_each(self._variants.with_rows())
        elif self._variants.rows_us:
            self.bounds_us.append(self._variants.rows_us)
        best = self._best_variant()
        if best is None:
            return
        self._again(best)
        price_us = self._price_to_beat_us
        others = [
            tried for tried in self.tried if tried.bound_us < price_us - OPEN * max(price_us - self.least_us, 0.0)
        ]
        others = sorted((tried for tried in others if tried.variant is not best.variant), key=lambda t: t.bound_us)
        for tried in others[:MOST_AGAIN]:
            self._again(tried)

    def _captured_again(self) -> None:
        """Search the step as captured once more, unless it is proved not to be the one to take. (Rule 5)"""
        known, best, below_us = self.untouched, self._best_variant(), math.inf
        if best is not None:
            below_us = best.price_us + WORTH * best.plan.without_checkpointing["step_time_us"]
        if known is None and not isinstance(self._refused.get(CAPTURED), NoPlanInTime):
            return
        if known is not None and (known.is_proved or known.bound_us >= below_us):
            return
        found = None
        if below_us > self._looked_below_us and not self.is_interrupted and not self._is_over():
            self._looked_below_us = below_us
            self._variants.on_variant(CAPTURED)
            found = self._captured(Effort(None, None if known is None else known.plan, below_us))
        both = [each for each in (found, known) if each is not None]
        if both:
            self.untouched = min(both, key=lambda each: each.price_us)
            self.untouched.least_us = max(each.bound_us for each in both)
        elif isinstance(self._refused[CAPTURED], NoPlanInTime):
            self.bounds_us.append(0.0)

    def _again(self, tried: _Tried) -> None:
        """Search a variant once more, for longer."""
        if tried.variant is None or tried.is_proved or self._is_over():
            return
        self._variants.on_variant(tried.variant.form)
        if self._try(tried.variant, PATIENCE_S, tried.plan):
            better, worse = sorted((tried, self.tried[-1]), key=lambda each: each.price_us)
            better.least_us = max(tried.bound_us, self.tried[-1].bound_us)
            self.tried.remove(worse)

    @property
    def _price_to_beat_us(self) -> float:
        return min((plan.price_us for plan in self._plans), default=math.inf)

    def _try_each(self, variants: Iterable[Variant]) -> None:
        for variant in variants:
            if self._is_over():
                self.is_cut_short = True
                self.bounds_us.append(min(variant.extra_us, 0.0))
                break
            if variant.extra_us >= self._price_to_beat_us:
                self.bounds_us.append(variant.extra_us)
                continue
            before = self.tried[-1].plan if self.tried else None
            if self._try(variant, QUICK_S, before) is None and self._try(variant, PATIENCE_S, before) is None:
                self.bounds_us.append(variant.extra_us)

    def _try(self, variant: Variant, time_s: float, before: Plan | None) -> bool | None:
        """Whether there is a plan; None where none was found in time."""
        effort = Effort(time_s, before, self._price_to_beat_us - variant.extra_us)
        try:
            self.tried.append(_Tried(variant, self._attempt(variant, effort)))
        except Infeasible as error:
            self._refused[variant.form] = error
            return False
        except NoPlanInTime as error:
            self._refused[variant.form] = error
            return None
        return True


def _least_budget(error: Infeasible | NoPlanInTime) -> float:
    return getattr(error, "minimum_budget_bytes", None) or float("inf")


def priced(made: Plan, variant: Variant) -> Plan:
    """A plan of a variant, its price and its bound counted from the whole step. (Rule 1)"""
    step_us = variant.untouched["step_time_us"]
    waits_us = made.predicted.get("weights_wait_us", 0.0)
    added_us = made.predicted["recompute_time_us"] + waits_us + variant.extra_us
    predicted: Prediction = {
        **made.predicted,
        "form_time_us": variant.extra_us,
        "overhead": added_us / step_us if step_us else 0.0,
    }
    solver: Proof = {
        **made.solver,
        "objective_us": made.solver["objective_us"] + variant.extra_us,
        "bound_us": made.solver["bound_us"] + variant.extra_us,
    }
    return dataclasses.replace(
        made,
        predicted=predicted,
        solver=solver,
        without_checkpointing=variant.untouched,
    )


def _bounded(made: Plan, bound_us: float, least_us: float) -> Plan:
    """A plan with the bound of all variants; the gap is a share of what it costs beyond the cheapest of them."""
    objective_us = made.solver["objective_us"]
    bound_us = min(bound_us, objective_us)
    gap = (objective_us - bound_us) / max(objective_us - least_us, 1.0)
    status: Status = "optimal" if gap <= Limits().gap else "feasible"
    return dataclasses.replace(made, solver={**made.solver, "status": status, "bound_us": bound_us, "gap": gap})
