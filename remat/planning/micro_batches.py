"""Micro-batches: one workload under one budget at any size, each with the best plan for it.

Rule 1  Candidates are the divisors of a rank's samples and the largest micro-batch that fits. One whose time without
        any recomputation is not better than the best so far is not solved.
Rule 2  Sizes come from two records (`scaling.py`) where costs are estimated; measured costs need a record each, and so
        does a single sample, which broadcasting treats differently. What is chosen is recorded, solved and replayed.
Rule 3  The loss is averaged over the samples: micro-batch i counts with its share of them (`Window.weights`).
Rule 4  At every size the step may run in other forms, as in a plan (`forms.py`): losses in slices where micro-batches
        are all alike and a power of two, else the loss is multiplied by what rounds. Records of slices at two sizes are
        hollow: how many operators they take depends on the size. So the losses are run by themselves at each
        (`reslice.filled`).
Rule 5  A size that the model itself refuses is no candidate, nor is one whose last micro-batch is (`refused_sizes.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from remat.costing.costs import estimated_costs, with_forward_alone, with_library_workspaces
from remat.costing.planning_device import PlanningDevice
from remat.costing.profile import Profile
from remat.errors import Infeasible, NoPlanInTime, UsageError
from remat.evaluation.evaluator import Memory
from remat.evaluation.form import CAPTURED_FORM, Form
from remat.evaluation.forwards import PASSES
from remat.evaluation.graph import FORWARD_ALONE, Graph
from remat.evaluation.plan import Plan, Region
from remat.evaluation.scaling import Family, UnroundedRecord, family
from remat.evaluation.sharding import shard
from remat.formulation.solution import Solution
from remat.offloading.link import Link
from remat.planning.budget import Budget
from remat.planning.forms import StepForm
from remat.planning.links import beside_state, require_offloads
from remat.planning.planner import plan_study
from remat.planning.portfolio import fastest
from remat.planning.profiling import VariantProfiles, fake_step, profile_step
from remat.planning.refused_sizes import TakenSizes, with_refused
from remat.planning.request import PlanRequest
from remat.planning.strategies import OFFLOAD_ALL, offloaded_by_hand, peak_of, strategy_solution
from remat.planning.study import FoundPlan, Study
from remat.planning.untraced import with_untraced
from remat.planning.windows import (
    SEVERAL,
    BatchCandidate,
    Window,
    between,
    divisors,
    even_window,
    neighbours,
    samples_that_fit,
)
from remat.recording.fake_step import FakeStep
from remat.recording.record import record
from remat.recording.reslice import HeadCall, Resliced, filled
from remat.recording.tracker import Tracker
from remat.solvers import EXACT
from remat.workload.batches import tensors_of
from remat.workload.training_loop import TrainingLoop, is_power_of_two
from remat.workload.workload import Workload

RUNGS = ("as is", "accumulate", "checkpoint")  # of the classic ladder
OFFLOAD_RUNG = "offload"  # the last of them, where there is a link
RECORDED_AT = (2, 4)  # batch sizes
FALL_BACKS = 5  # doublings of the first of them, where the model refuses that
DIVISORS_ABOVE = 8  # of the largest micro-batch that a search met, where the model refuses some
EVEN_CUTS = 8  # of a rank's samples, where the largest micro-batch leaves a last one that the model refuses
NO_SOLUTION = Solution("exact", "unknown")

_UpdateTime = Callable[[Profile, Memory, tuple[Region, ...], int], float]  # of so many micro-batches, and the optimizer


@dataclasses.dataclass(frozen=True)
class _Hollow:
    """Hollow records of a step in slices, at two sizes, and their losses."""

    family: Family
    low: Sequence[HeadCall]
    high: Sequence[HeadCall]

    def heads_at(self, batch_size: int) -> list[HeadCall]:
        begin, end = (int(each.graph.about["batch_size"]) for each in (self.family.low, self.family.high))

        def line(one: int, other: int) -> int:
            return one + -(-(other - one) * (batch_size - begin) // (end - begin))

        return [one.between(other, line) for one, other in zip(self.low, self.high, strict=True)]


class MicroBatches:
    """One workload under one budget at any micro-batch.

    request  options of plans; unless its execution runs as evaluated, plans are replayed at every size
    link     to the host's memory, where activations may be offloaded
    scaled   whether sizes come from two records if possible, else each from one of its own (Rule 2)
    """

    def __init__(
        self,
        workload: Workload,
        place: PlanningDevice,
        budget: Budget,
        loop: TrainingLoop,
        request: PlanRequest,
        on_try: Callable[[str], None],
        *,
        link: Link | None = None,
        scaled: bool = True,
    ):
        self.workload, self.place, self.budget, self.loop, self.request = workload, place, budget, loop, request
        self.limits = request.limits if link is None else request.limits.at_most(request.limits.clock.window_s)
        self.on_try, self.how = on_try, request.how
        request.require_of(loop, has_model=True)
        if link is not None:
            require_offloads(self.how, loop)
        self._scaled, self._link = scaled and place.device is None, link
        self.taken = TakenSizes(workload, place)
        self._to_record: dict[int, FakeStep] = {}
        self._families: dict[bool, Family | None] = {}
        self._hollow: dict[tuple[bool, Form], _Hollow | None] = {}
        self._profiles: dict[tuple[int, bool], Profile] = {}
        self._recorded_forms: dict[tuple[int, bool], VariantProfiles] = {}
        self._steps: dict[tuple[int, bool], FakeStep] = {}  # of those that have a record of their own
        self._studies: dict[tuple[int, bool], Study] = {}
        self._solutions: dict[tuple[int, bool, str], Solution] = {}

    # Steps at any size (Rule 2)

    def profile(self, micro_batch: int, accumulates: bool) -> Profile:
        """Return the profile of the captured step."""
        key = (micro_batch, accumulates)
        if key not in self._profiles:
            scaled = self._family_for(micro_batch, accumulates)
            if scaled is None:
                self._record(key)
            else:
                found = self._costed(scaled.at(micro_batch))
                self._profiles[key] = dataclasses.replace(found, graph=with_forward_alone(found.graph, found.costs))
        return self._profiles[key]

    def _record(self, key: tuple[int, bool]) -> None:
        micro_batch, accumulates = key
        self._profiles[key], self._steps[key] = self.recorded(micro_batch, SEVERAL if accumulates else 1)

    def study(self, micro_batch: int, accumulates: bool) -> Study:
        """Return the study of the step at a size, in all its forms."""
        key = (micro_batch, accumulates)
        if key not in self._studies:
            if not self.how.runs_as_evaluated and key not in self._steps:
                self._record(key)
            profile, profile_in, step = self.profile(*key), None, self._steps.get(key)
            if step is None:
                scaled, pair = self._family(accumulates), self._pair()
                assert scaled is not None and pair is not None
                step = self._to_record[pair[0]]
                profile_in = functools.partial(self._scaled_in, scaled, *key)
            self._studies[key] = Study(
                profile,
                dataclasses.replace(self.request, limits=self.limits),
                step,
                link=self._link_beside(profile.graph),
                replays=not self.how.runs_as_evaluated,
                profile_in=profile_in,
            )
        return self._studies[key]

    def _family_for(self, micro_batch: int, accumulates: bool) -> Family | None:
        return self._family(accumulates) if self._scaled and micro_batch > 1 else None

    def _costed(self, graph: Graph) -> Profile:
        graph = with_library_workspaces(graph, self.place.target)
        return Profile(graph, estimated_costs(graph, self.place.target, self.place.table), self.place.target)

    def _family(self, accumulates: bool) -> Family | None:
        if accumulates not in self._families:
            self._families[accumulates] = self._recorded_family(self._loop(accumulates))
        return self._families[accumulates]

    def _recorded_family(self, loop: TrainingLoop) -> Family | None:
        if (pair := self._pair()) is None:
            return None
        low, high = (self._to_scale(size, loop) for size in pair)
        return family(low, high, self.place.target.alignment_bytes)

    def _pair(self) -> tuple[int, int] | None:
        """Return two sizes to record, which the model takes; None if there seem to be none. (Rule 5)"""
        low, high = RECORDED_AT
        firsts = (low, self.workload.batch_size, *(low << more for more in range(1, FALL_BACKS)))
        pairs = ((first, first * high // low) for first in firsts if first > 1)
        return next((pair for pair in pairs if all(map(self.taken.takes, pair))), None)

    def _loop(self, accumulates: bool) -> TrainingLoop:
        return dataclasses.replace(self.loop, accumulation=SEVERAL if accumulates else 1)

    # ... in other forms (Rule 4)

    def _scaled_in(self, whole: Family, micro_batch: int, accumulates: bool, form: Form) -> Profile:
        """Return the profile in a form from two hollow records, or a full record where these do not suffice.

        Fused groups and chunked MLPs are recorded at each size: a compiler's memory and the number of slices do not
        grow linearly.
        """
        if form.fused or form.rows:
            return self._recorded_in(micro_batch, accumulates).profile(form)
        key = accumulates, form.in_one_slice
        if key not in self._hollow:
            self._hollow[key] = self._hollow_family(whole, accumulates, form)
        found, alignment_bytes = self._hollow[key], self.place.target.alignment_bytes
        if found is not None:
            step, at = self._to_record[found.family.low.graph.about["batch_size"]], found.family.at(micro_batch)
            heads = found.heads_at(micro_batch)
            if (graph := filled(at, heads, step, form, alignment_bytes)) is not None:
                untraced_bytes = whole.at(micro_batch).untraced_bytes
                known = self.profile(micro_batch, accumulates).graph
                about = {**graph.about, FORWARD_ALONE: known.about[FORWARD_ALONE]}
                return self._costed(dataclasses.replace(graph, untraced_bytes=untraced_bytes, about=about))
        return self._recorded_in(micro_batch, accumulates).profile(form)

    def _recorded_in(self, micro_batch: int, accumulates: bool) -> VariantProfiles:
        key = (micro_batch, accumulates)
        if key not in self._recorded_forms:
            profile, step = self.recorded(micro_batch, SEVERAL if accumulates else 1)
            self._recorded_forms[key] = VariantProfiles(step, self.place, profile)
        return self._recorded_forms[key]

    def _hollow_family(self, whole: Family, accumulates: bool, form: Form) -> _Hollow | None:
        records = []
        for recorded in (whole.low, whole.high):
            step = self._to_record[recorded.graph.about["batch_size"]]
            step.loop = self._loop(accumulates)
            if step.finish.loop != step.loop:  # its gradients and its optimizer are those of the other family
                step.warm_up()
            sliced = Resliced(step, alignment_bytes=1, whole=recorded.graph)
            if (graph := sliced.hollow(form)) is None:
                return None
            records.append((dataclasses.replace(recorded, graph=graph), sliced.heads))
        (low, low_heads), (high, high_heads) = records
        found = family(low, high, self.place.target.alignment_bytes)
        return None if found is None else _Hollow(found, low_heads, high_heads)

    def _to_scale(self, micro_batch: int, loop: TrainingLoop) -> UnroundedRecord:
        self.on_try(f"recording micro-batch {micro_batch}")
        with self.taken.recorded_at(micro_batch):
            return self._unrounded(micro_batch, loop)

    def _unrounded(self, micro_batch: int, loop: TrainingLoop) -> UnroundedRecord:
        if micro_batch not in self._to_record:
            self._to_record[micro_batch] = fake_step(self.workload.sized(micro_batch), self.place, loop=loop)
        step = self._to_record[micro_batch]
        step.loop = loop  # accumulated or not, it is captured once
        graph, target = _in_one_pass(record(step)), self.place.target
        unrounded = dataclasses.replace(target, alignment_bytes=1)
        graph = with_untraced(graph, step, estimated_costs(graph, target), unrounded)
        alignment_bytes = target.alignment_bytes
        fixed = step.fix_state(Tracker(alignment_bytes)) if alignment_bytes > 1 else graph.fixed_bytes
        shared = shard(dataclasses.replace(graph, fixed_bytes=fixed), loop)
        return UnroundedRecord(
            shard(graph, loop),
            shared.fixed_bytes,
            tuple(t.untyped_storage().nbytes() for t in tensors_of(step.batch)),
        )

    def recorded(self, micro_batch: int, accumulation: int) -> tuple[Profile, FakeStep]:
        """Record the step at exactly this size."""
        self.on_try(f"recording micro-batch {micro_batch}")
        loop = dataclasses.replace(self.loop, accumulation=accumulation)
        with self.taken.recorded_at(micro_batch):
            step = fake_step(self.workload.sized(micro_batch), self.place, loop=loop)
            profile = profile_step(step, self.place)
        _in_one_pass(profile.graph)
        return profile, step

    def _link_beside(self, graph: Graph) -> Link | None:
        """Return the link less the host bytes of the optimizer's state. Raises UsageError if they do not fit."""
        return beside_state(self._link, graph, self.request.host_bytes(self.place))

    def study_of(self, window: Window) -> Study:
        """Return the study of a window; losses stay whole where a slice's factor would round. (Rule 4)"""
        found = self.study(*_key(window))
        are_alike = window.last == window.micro_batch and is_power_of_two(window.accumulation)
        return found if are_alike else found.with_losses_whole

    # Candidates

    def windows(self, samples: int) -> list[Window]:
        """List the windows to try, the largest micro-batch first. (Rules 1 and 5)

        Raises CaptureError if the model refuses all of them.
        """
        if self.loop.step_in_backward:  # which accumulates nothing
            return self._taken_of(samples, [samples])
        whole = self.largest(samples, in_slices=False)
        most = self.largest(samples, above=whole)
        sizes = {size for size in divisors(samples) if size <= most} | {
            whole,
            most,
            *self._divisors_above(most, samples),
        }
        sizes -= {0}
        sizes |= {cut for size in {whole, most} - {0} for cut in self._cuts(Window(samples, size))}
        if sizes and (found := self._taken_of(samples, sizes)):
            return found
        if found := self._taken_of(samples, divisors(samples)):
            return found[-1:]
        raise self.taken.refusal()

    def _divisors_above(self, most: int, samples: int) -> Iterator[int]:
        """Yield larger divisors of `samples` that are taken and fit: a search that leaves out sizes may miss them."""
        larger = [size for size in divisors(samples) if most < size < samples][::-1] if self.taken.refused else []
        for size in filter(self.taken.takes, larger[:DIVISORS_ABOVE]):
            if not self.feasible(size, accumulates=True):
                return
            yield size

    def _taken_of(self, samples: int, sizes: Iterable[int]) -> list[Window]:
        """Return the windows of `sizes` that the model takes, the largest first."""
        return [window for size in sorted(sizes, reverse=True) if self.takes(window := Window(samples, size))]

    def takes(self, window: Window) -> bool:
        """Return whether the model takes all micro-batches of a window. (Rule 5)"""
        return self.taken.takes(window.micro_batch) and self.taken.takes(window.last)

    def _cuts(self, window: Window) -> list[int]:
        """Return the largest micro-batch below that of `window` that the model takes, if it refuses its last one."""
        if self.takes(window):
            return []
        samples, most = window.samples, window.micro_batch
        even = {-(-samples // (window.accumulation + more)) for more in range(EVEN_CUTS)}
        powers = {1 << power for power in range(most.bit_length())}
        sizes = {size for size in {*even, *powers, *neighbours(most, 0, most)} if size <= most}
        return next(([size] for size in sorted(sizes, reverse=True) if self.takes(Window(samples, size))), [])

    def largest(self, at_most: int, *, above: int = 0, in_slices: bool = True) -> int:
        """Return the largest micro-batch up to `at_most` that some plan fits; `above` is known to fit."""
        whole = self.taken.takes(at_most)
        if above == at_most or (whole and self.feasible(at_most, accumulates=False, in_slices=in_slices)):
            return at_most

        def fits(size: int) -> bool:
            return self.feasible(size, accumulates=True, in_slices=in_slices)

        return between(above, at_most, fits, self.taken.near)

    def guess(self, *, accumulates: bool) -> int:
        """Guess how many samples fit without a plan, from forward and backward of two sizes; at least 1."""
        if (pair := self._pair()) is None:
            return self.workload.batch_size
        low, high = (self._peak_before_optimizer(size, accumulates) for size in pair)
        per_sample = (high - low) / (pair[1] - pair[0])
        fixed = low - pair[0] * per_sample
        return max(samples_that_fit(self.budget.limit_bytes, fixed, per_sample), 1) if per_sample > 0 else 1

    def _peak_before_optimizer(self, micro_batch: int, accumulates: bool) -> int:
        study = self.study(micro_batch, accumulates)
        problem = study.problem(study.captured, self.budget.limit_bytes)
        return int(problem.memory.curve(()).alive_bytes[: problem.graph.backward_end].max())

    def feasible(self, micro_batch: int, *, accumulates: bool, in_slices: bool = True) -> bool:
        """Return whether some plan fits `micro_batch`; without `in_slices`, one that leaves losses and MLPs whole."""
        window, study = even_window(micro_batch, accumulates), self.study(micro_batch, accumulates)
        problem = study.problem(study.captured, self.budget.limit_bytes)
        if self.how.runs_as_evaluated and problem.memory.peak_without_regions <= self.budget.limit_bytes:
            return True
        self.on_try(f"is there a plan for micro-batch {micro_batch}")
        if self._whole(window, "every-block").fits:
            return True
        forms = self.study_of(window).forms if in_slices else None
        if forms is not None and self._fits_in_one_of(study, forms):
            return True
        return self._whole(window, "exact").fits or (
            forms is not None and self._fits_in_one_of(study, forms.with_rows())
        )

    def _fits_in_one_of(self, study: Study, forms: Iterable[StepForm]) -> bool:
        return any(study.least(at, self.limits).peak_bytes <= self.budget.limit_bytes for at in forms)

    def best(self, window: Window, below_us: float = math.inf) -> BatchCandidate | None:
        """Return the best plan at a micro-batch; None if its time cannot be below `below_us`. (Rule 1)"""
        if self._least_time_us(window) >= below_us:
            return None
        self.on_try(f"micro-batch {window.micro_batch}")
        study = self.study_of(window)
        try:
            found = fastest(study, self.budget.limit_bytes, self.limits, judged=not self.how.runs_as_evaluated)
        except (Infeasible, NoPlanInTime):
            return self._candidate(window, "exact", FoundPlan(study.captured, NO_SOLUTION, self.limits))
        if found.interrupted:
            raise KeyboardInterrupt
        return self._candidate(window, "exact", found.found, found.gap)

    def _least_time_us(self, window: Window) -> float:
        """Return the time of an optimizer step in its fastest form without recomputation."""
        return self._time_us(window, (), Form(fused=self.request.fuses))

    def ladder(self, samples: int, windows: list[Window]) -> dict[str, BatchCandidate | None]:
        """Return the rungs of the classic ladder: the largest micro-batch of each kind that fits."""
        as_is = Window(samples, samples)
        rungs = {RUNGS[0]: self._rung(as_is, "none") if self.takes(as_is) else None}
        others = [(RUNGS[1], "none"), (RUNGS[2], "every-block")]
        others += [(OFFLOAD_RUNG, OFFLOAD_ALL)] if self._link is not None else []
        for name, strategy in others:
            fitting = (self._rung(window, strategy) for window in windows)
            rungs[name] = next((found for found in fitting if found.fits), None)
        return rungs

    def _rung(self, window: Window, strategy: str) -> BatchCandidate:
        study = self.study(*_key(window))
        return self._candidate(window, strategy, FoundPlan(study.captured, self._whole(window, strategy), self.limits))

    def _whole(self, window: Window, strategy: str) -> Solution:
        """Solve the step without changes of form with a strategy."""
        key = (*_key(window), strategy)
        if key not in self._solutions:
            self._solutions[key] = self._found_by(strategy, self.study(*_key(window)))
        if self._solutions[key].interrupted:
            raise KeyboardInterrupt
        return self._solutions[key]

    def _found_by(self, strategy: str, study: Study) -> Solution:
        alone, limit_bytes = study.without_link, self.budget.limit_bytes
        if strategy == OFFLOAD_ALL:
            assert study.link is not None
            return offloaded_by_hand(alone.problem(study.captured, limit_bytes), study.link, strategy)
        at = study if strategy in EXACT else alone
        return strategy_solution(at, study.captured, strategy, limit_bytes, self.limits)

    def _candidate(self, window: Window, strategy: str, found: FoundPlan, gap: float | None = None) -> BatchCandidate:
        study, solution, form = self.study(*_key(window)), found.solution, found.at.form
        problem, fits, regions = study.problem(found.at, self.budget.limit_bytes), solution.fits, solution.regions
        peak = solution.replayed_bytes
        if peak is None:
            peak = study.peak_bytes(found) if solution.offloads else peak_of(problem, strategy, regions)
        plain_us = self._time_us(window, ())
        time_us = self._time_us(window, regions, form, self._stall_us(window, strategy, solution))
        return BatchCandidate(
            strategy=strategy,
            micro_batch=window.micro_batch,
            accumulation=window.accumulation,
            last=window.last,
            peak_bytes=peak,
            time_us=time_us if fits else None,
            overhead=time_us / plain_us - 1 if fits and plain_us else None,
            regions=regions,
            gap=gap if fits else None,
            slices=form.slices,
            fused=form.fused,
            offloaded_bytes=int(sum(problem.graph.storages.size_bytes[each.storage] for each in solution.offloads)),
        )

    def _stall_us(self, window: Window, strategy: str, solution: Solution) -> float:
        """Return the time that all micro-batches wait for copies."""
        if not solution.stall_us or window.last == window.micro_batch:
            return window.accumulation * solution.stall_us
        last = self._whole(even_window(window.last, accumulates=True), strategy)
        return (window.accumulation - 1) * solution.stall_us + last.stall_us

    def _time_us(
        self, window: Window, regions: tuple[Region, ...], form: Form = CAPTURED_FORM, stall_us: float = 0.0
    ) -> float:
        """Return the time of one optimizer step: the device's with its stalls or the host's, whichever is longer."""
        device_us = self._total_us(window, regions, form, Profile.device_time_us) + stall_us
        return max(device_us, self._total_us(window, regions, form, Profile.host_time_us))

    def _total_us(self, window: Window, regions: tuple[Region, ...], form: Form, update_us: _UpdateTime) -> float:
        """Add up the full micro-batches, the last one, and the optimizer."""

        def taken(size: int, accumulates: bool, micro_batches: int) -> float:
            profile = self._profile_in(size, accumulates, form)
            return update_us(profile, Memory(profile.graph), regions, micro_batches)

        if window.last == window.micro_batch:
            return taken(*_key(window), window.accumulation)
        rest_us = taken(window.last, True, 1) - taken(window.last, True, 0)
        return taken(*_key(window), window.accumulation - 1) + rest_us

    def _profile_in(self, micro_batch: int, accumulates: bool, form: Form) -> Profile:
        if form == CAPTURED_FORM:
            return self.profile(micro_batch, accumulates)
        forms = self.study(micro_batch, accumulates).forms
        assert forms is not None
        return forms.of(form).profile

    # For real

    def plan(self, window: Window) -> Plan:
        """Record the step at a micro-batch, solve it and replay its plan. Raises SizeRefused. (Rule 5)"""
        if window.last != window.micro_batch:
            self.taken.require(window.last)
        profile, step = self.recorded(window.micro_batch, window.accumulation)
        self.on_try(f"solving micro-batch {window.micro_batch}")
        link = self._link_beside(profile.graph)
        made = plan_study(Study(profile, self.request, step, budget=self.budget, link=link))
        return with_refused(made, self.taken.refused)

    def least_bytes(self, window: Window) -> int:
        """Return the least peak of the step in any of its forms."""
        study = self.study_of(window)
        return min(study.least(at, self.limits).peak_bytes for at in _forms_of(study))

    def refusal(self, window: Window) -> Infeasible:
        """Return the refusal: not even one sample at a time fits."""
        study, limit_bytes = self.study_of(window), self.budget.limit_bytes
        at = min(_forms_of(study), key=lambda at: study.least(at, self.limits).peak_bytes)
        return study.refused(at, limit_bytes, self.limits)


def _forms_of(study: Study) -> list[StepForm]:
    return [study.captured, *(study.forms or ())]


def _key(window: Window) -> tuple[int, bool]:
    return window.micro_batch, window.accumulation > 1


def _in_one_pass(graph: Graph) -> Graph:
    """Return `graph`. Raises UsageError if its step runs several passes, since one was recorded at a fixed size."""
    if PASSES in graph.about:
        raise UsageError(
            f"the step runs {graph.about[PASSES]} mini-batches in its backward, each by itself, and their size is not "
            "that of its batch: choose it where the loss is made, and plan the step as it is (`remat.plan`)."
        )
    return graph
