"""Validate: run the step without and with its plan on the device at hand, and test the predictions.

Five claims are tested: loss and gradients are those of the untouched model; both steps run the same kernels,
recomputation aside; the plan recomputes the nodes that it says, no more and no fewer; and the peak of memory is
within the budget. A claim that cannot be tested on this device is said to be so in `Report.notes`.

Rule 1  Steps are whole (forward, backward, optimizer, gradients let go), and begin from the same parameters, buffers
        and random state. Gradients are compared in the first step, before the optimizer's; memory is measured in a
        later one, when the optimizer's state exists.
Rule 2  A peak is what was requested of the allocator above the level at the start of the step, plus what existed then:
        parameters, buffers, batch, optimizer state, gradients where they accumulate, and cuBLAS's workspaces, which
        last from the first step on. What CUDA's caching allocator makes of a request (allocated,
        reserved) is measured too, beside its simulation under the settings of this process; nothing is judged by it.
Rule 3  Where the plan was made for this device and this batch, the peak is held against the budget. Otherwise, and
        where the plan is for one of several ranks that share their states, the step is recorded here and predicted
        anew, with the workspaces of this device's kernels, and the peak is held against that prediction, without
        tolerance.
Rule 4  The batch is halved until the planned step fits the device's free memory and, on a CPU, bears waiting for; at a
        batch of one the sequence is halved for that. The eager baseline may need a smaller batch; then gradients and
        kernels are compared at that.
Rule 5  Gradients are compared bit by bit; those that a chunked loss sums in slices are held to float64 (`sums.py`),
        and a head's kernels are left out. Where groups are fused, what is compared with is the fused step in which
        nothing is recomputed, and every group is held to float64 (`groups.py`). Where they differ, the eager baseline
        is run twice: if it does not repeat itself (kernels with atomic additions), the planned one may be `NOISE` times
        as far away.
Rule 6  Tracing makes torch's kernels of NumPy's functions, and of TorchScript's, which in eager mode run in an order of
        their own. If the step calls such functions, kernels are those of the traced step without recomputation.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import os
from collections.abc import Sequence

import torch

from remat.capture.generators import generators_kept
from remat.costing.operator_timing import device_target
from remat.costing.planning_device import PlanningDevice
from remat.costing.timing_cache import device_name
from remat.errors import UsageError, ValidationFailed, is_out_of_memory
from remat.evaluation.caveats import drawn_lengths, traced_branches
from remat.evaluation.evaluator import Memory
from remat.evaluation.form import form_of
from remat.evaluation.forwards import PASSES, without_sizes
from remat.evaluation.plan import Plan, RegionRef
from remat.execution import executions
from remat.execution.apply import planned_forward, remove
from remat.execution.base import Execution
from remat.execution.eager.region_tape import Counts
from remat.execution.first_step import NOISE
from remat.execution.modules.regions import ModuleCounts
from remat.units import first_few, gib
from remat.validation.groups import GroupsSeen, far_from
from remat.validation.kernel_log import KernelLog, kernel_differences, scripted_functions, without_heads
from remat.validation.prediction import PredictedHere, Progress, predict
from remat.validation.report import Report
from remat.validation.sizes import RecordedStep, TriedSizes
from remat.validation.sums import SumsSeen
from remat.validation.training import Training, on_host, undisturbed
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload, require_workload

OF_NUMPY = "wrapped_"  # with which Dynamo's names of NumPy's functions begin


@generators_kept()
def validate(
    workload: Workload,
    plan: Plan | str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    seed: int = 0,
    repeats: int = 3,
    on_progress: Progress | None = None,
) -> Report:
    """Run the step with and without `plan` on this device, and compare.

    The batch is halved until the step fits the device.

    Args:
        workload: The training step.
        plan: A plan, or the path of its file. If it has plans for shorter batches, the one for the workload's length.
        device: "cuda" or "cpu", by default the GPU if there is one.
        seed: Seed of parameters, batch and dropout.
        repeats: Steps for a median time; a step of more than `LONG_STEP_S` is timed once.
        on_progress: Called with (done, total) while costs are measured.

    Returns:
        Peak in bytes, time in microseconds, loss and gradients, beside the prediction and the step without the plan.

    Raises:
        PlanMismatch: The plan is for another model or dtype policy.
        UsageError: This device cannot run the step.
        ValidationFailed: The planned step runs out of memory although it should fit.

    Example:
        >>> report = remat.validate(workload, "mine.plan.json")
        >>> assert report.passed, report
    """
    require_workload(workload)
    plan = Plan.of(plan).at_length(workload.seq_len)
    how = executions.load(plan.execution)
    place = _place(device)
    assert place.device is not None
    with undisturbed(place.device), torch.compiler.set_stance("force_eager"):  # as a plan runs compiled modules
        sizes = TriedSizes(workload, plan, place, how)
        planned_step = sizes.largest(sizes.planned_load)
        compared = sizes.largest(sizes.untouched_load, at_most=planned_step.workload.batch_size)
        return _Validation(plan, how, place, planned_step, compared, seed, repeats, sizes.notes).report(
            sizes, on_progress
        )


def _place(device: str | torch.device | None) -> PlanningDevice:
    """Return the device at hand as a planning device."""
    name = str(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise UsageError(
            f"`device={name!r}` is not supported; a plan is validated on this machine: choose cpu or cuda."
        )
    found = torch.device(name)
    if found.type == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(
                f"`device={name!r}` needs a CUDA device, and PyTorch sees none on this machine; choose cpu."
            )
        found = torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)
    return PlanningDevice(device_target(found), found)


# The first step (Rule 1)


@dataclasses.dataclass(frozen=True)
class _FirstStep:
    """Loss and gradients of a first step, on the host, the kernels that it ran, and TorchScript functions it called."""

    loss: torch.Tensor
    gradients: list[torch.Tensor | None]
    kernels: list[str]
    scripted: frozenset[str] = frozenset()


def _first_step(training: Training, kernels: KernelLog | None = None) -> _FirstStep:
    """Run a first step, and log its kernels."""
    with kernels or contextlib.nullcontext():
        loss, gradients = training.gradients_of(training.forward_and_backward)
    return _FirstStep(on_host(loss), gradients, kernels.found if kernels else [])


@dataclasses.dataclass(frozen=True)
class _Distance:
    """The distance of gradients: the largest absolute difference, and the largest one relative to its parameter's."""

    equal: bool
    absolute: float
    relative: float


def _distance(left: Sequence[torch.Tensor | None], right: Sequence[torch.Tensor | None]) -> _Distance:
    absolute = relative = 0.0
    equal = True
    for a, b in zip(left, right, strict=True):
        if a is None or b is None:
            if a is not b:
                return _Distance(False, math.inf, math.inf)
            continue
        if bool(((a == b) | (a.isnan() & b.isnan())).all()):
            continue
        equal = False
        apart = float((a.double() - b.double()).abs().nan_to_num(nan=math.inf).max())
        absolute = max(absolute, apart)
        relative = max(relative, apart / max(float(a.double().abs().max()), 1e-300))
    return _Distance(equal, absolute, relative)


# All of it


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """The planned first step compared with the eager baseline.

    distance  of gradients that must be bitwise equal      near     of those summed in slices, see `SumsSeen.ratios`
    groups    see `GroupsSeen.ratios`
    too_far   parameters and groups that are further from float64 than that allows
    """

    loss_equal: bool
    distance: _Distance
    near: dict[str, float]
    groups: dict[str, float]
    too_far: list[str]
    observed_nodes: int
    offloads: dict[str, int]
    differences: tuple[str, ...]


def _observed_nodes(counts: Counts, recorded: RecordedStep) -> int:
    """Count the nodes that ran again. Modules count whole, less the nodes that early stop leaves out."""
    if not isinstance(counts, ModuleCounts):
        return counts.recomputed_nodes
    memory = Memory(recorded.graph)
    regions = zip(recorded.refs, recorded.regions, strict=True)
    return sum(counts.recomputed[ref.module] * memory.recomputed_nodes([region]) for ref, region in regions)


class _Validation:
    """Compares steps: `planned_step` is measured, the gradients of `compared` are compared. (Rule 4)"""

    def __init__(
        self,
        plan: Plan,
        how: Execution,
        place: PlanningDevice,
        planned_step: RecordedStep,
        compared: RecordedStep,
        seed: int,
        repeats: int,
        notes: list[str],
    ):
        assert place.device is not None
        self.plan, self.how, self.place, self.device = plan, how, place, place.device
        self.planned_step, self.compared = planned_step, compared
        self.seed, self.repeats, self.notes = seed, repeats, notes
        self.alignment_bytes = place.target.alignment_bytes

    @property
    def fits(self) -> bool:
        """Whether the eager baseline runs at the batch of the planned one."""
        return self.planned_step is self.compared

    def report(self, sizes: TriedSizes, on_progress: Progress | None) -> Report:
        self.notes += [f"The planned step runs a traced branch: {text}." for text in traced_branches(self.plan.about)]
        self.notes += [f"{text[0].upper()}{text[1:]}." for text in drawn_lengths(self.plan.about)]
        if self._is_own_checkpointing:
            self.notes.append(
                "The model calls torch.utils.checkpoint itself, so the eager baseline recomputes too: kernels are not "
                "compared, and its predicted peak is that without these calls."
            )
        if self._is_of_padded_passes:
            self.notes.append(
                "Mini-batches without padding take an explicit attention mask under the plan, which the eager baseline "
                "leaves out: kernels are not compared."
            )
        prediction = predict(self.planned_step, self.place, on_progress)
        predicted, limit = self._promise(prediction)
        untouched, comparison, measured = self._steps(sizes)
        workload = self.planned_step.workload
        if untouched is None:
            untouched = prediction.untouched
            self.notes.append(
                f"The eager baseline does not fit at batch size {workload.batch_size}: gradients and kernels are "
                f"compared at {self.compared.workload.batch_size}."
            )
        return Report(
            workload=workload.name,
            device=device_name(self.device),
            batch_size=workload.batch_size,
            seq_len=workload.seq_len,
            measured=measured,
            predicted={**predicted, **prediction.allocator},
            untouched={**untouched, "fits": self.fits},
            limit=limit,
            loss_equal=comparison.loss_equal,
            gradients_equal=comparison.distance.equal and not comparison.too_far,
            gradients_near=comparison.near,
            groups_near=comparison.groups,
            max_gradient_error=comparison.distance.absolute,
            recomputed_nodes={
                "planned": self.compared.graph.about.get(PASSES, 1)
                * Memory(self.compared.graph).recomputed_nodes(self.compared.regions),
                "observed": comparison.observed_nodes,
            },
            offloads=comparison.offloads,
            kernel_differences=comparison.differences,
            notes=tuple(self.notes),
        )

    def _promise(self, prediction: PredictedHere) -> tuple[dict[str, int], tuple[str, int]]:
        """Return the prediction, and the limit for the measured peak. (Rule 3)"""
        plan, workload = self.plan, self.planned_step.workload
        about, here = plan.about, self.place.target.name
        if prediction.unmeasured:
            self.notes.append(
                f"The workspaces of some kernels could not be measured (kinds of kernel: {prediction.unmeasured})."
            )
        family, _, assumed = plan.target.partition(",")  # versions of torch and cuDNN are of the same device
        made_for = (family, about["batch_size"], about.get("seq_len"))
        shares = f" as one of {about['ranks']} ranks ({about['shard']})" if about.get("shard") else ""
        if made_for == (here, workload.batch_size, workload.seq_len) and not shares:
            self.notes.append(f"The measured peak is compared with the plan's budget, {gib(plan.budget_bytes)}.")
            claimed = {name: round(plan.predicted[name]) for name in ("peak_bytes", "step_time_us")}
            if claimed["peak_bytes"] != prediction.planned["peak_bytes"]:
                self.notes.append(
                    f"Recorded here, the predicted peak is {prediction.planned['peak_bytes']} bytes; "
                    f"the plan says {claimed['peak_bytes']}."
                )
            if assumed:
                self.notes.append(f"The plan was made for {assumed}; this is {self.place.target.assumes or family}.")
            if plan.costs == "estimated":
                self.notes.append("The predicted step time is estimated, not measured.")
            return claimed, ("budget", plan.budget_bytes)
        at = f"batch size {about['batch_size']}" + (f" x {about['seq_len']}" if about.get("seq_len") else "")
        self.notes.append(
            f"The plan was made for {plan.target} at {at}{shares}. Peak and time are predicted anew for the step that "
            "runs here, and the measured peak is compared with that prediction instead of the budget."
        )
        return prediction.planned, ("limit", prediction.planned["peak_bytes"])

    def _steps(self, sizes: TriedSizes) -> tuple[dict[str, int] | None, _Comparison, dict[str, int]]:
        """Return (measured eager baseline, None if it does not fit; comparison; measured planned step)."""
        training = self._built()
        try:
            return self._measured(training, sizes)
        finally:
            training.end()

    def _measured(
        self, training: Training, sizes: TriedSizes
    ) -> tuple[dict[str, int] | None, _Comparison, dict[str, int]]:
        """Run `_steps` on a model that is built."""
        if training.leave_cache_out():
            self.notes.append("The eager baseline ran with use_cache=False: a planned forward builds no cache.")
        while True:
            try:
                training.set_batch(self.compared.workload.batch_size, self.seed + 1)
                expected, untouched = self._untouched(training)
                break
            except torch.OutOfMemoryError:
                size = self.compared.workload.batch_size // 2
            if size == 0:
                raise UsageError(
                    "the step without the plan runs out of memory at batch size 1: nothing can be compared."
                )
            self.compared = sizes.at(size)
        try:
            return untouched, self._compare(training, expected), self._planned(training)
        except torch.OutOfMemoryError as error:
            raise ValidationFailed(
                f"the planned step runs out of memory on {device_name(self.device)} at batch size "
                f"{self.planned_step.workload.batch_size}: {str(error).splitlines()[0]}"
            ) from error

    def _built(self) -> Training:
        """Build the model on the device; its states alone may be too much for a device that others use too."""
        workload, graph = self.compared.workload, self.compared.graph
        try:
            loop, early = TrainingLoop.of(self.plan.about), self.plan.about.get("early_forwards", 0)
            training = Training(workload, self.device, self.seed, loop, early)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise UsageError(
                f"{workload.name} does not fit on {device_name(self.device)} even before its first step, in which "
                f"{gib(graph.fixed_total)} are there from the start ({str(error).splitlines()[0]}). "
                "Free memory on the device, or validate on one that has more."
            ) from error
        training.keeps = bool(graph.held_outputs)
        return training

    def _untouched(self, training: Training) -> tuple[_FirstStep, dict[str, int] | None]:
        training.begin_again()
        with scripted_functions() as scripted:
            found = _first_step(training, KernelLog())
        found = dataclasses.replace(found, scripted=frozenset(scripted))
        if not self.fits:
            return found, None
        training.finish()
        measured, peak = training.measure_steady_step(self.alignment_bytes, self.repeats)
        return found, {"peak_bytes": peak, "step_time_us": round(measured.time_us)}

    def _compare(self, training: Training, expected: _FirstStep) -> _Comparison:
        form, far = form_of(self.plan.about), list[str]()
        fused, kernels_expected, otherwise = form.fused, expected.kernels, self._traced_otherwise(expected)
        if fused:
            expected, far = self._unrecomputed(training, expected)
            kernels_expected = expected.kernels
        elif form.rows or otherwise:
            kernels_expected = self._first_unrecomputed(training).kernels
        self._apply(training, self.plan.regions)
        kernels = KernelLog()
        sums, groups = SumsSeen(training.model, kernels.paused), GroupsSeen(kernels.paused)
        planned = planned_forward(training.model)
        counts = planned.watch(observe=True, recompute_context=kernels.paused)
        sums.watch(planned.chunk_watch)
        if fused:
            planned.group_watch.on_run = groups
        found = _first_step(training, kernels)
        offloads, counts = self._moved(training), copy.deepcopy(counts)
        planned.watch(observe=False)
        training.finish()  # which may run forward and backward again
        names = list(training.trained)
        too_far = sums.too_far(names, expected.gradients, found.gradients)
        for i, name in enumerate(names):
            if name in sums.ratios:
                expected.gradients[i] = found.gradients[i] = None
        kernels_found, distance = found.kernels, _distance(expected.gradients, found.gradients)
        if not distance.equal:
            del found.gradients[:]
            distance = self._against_noise(training, expected, distance, set(sums.ratios))
        if form.rows:
            self.notes.append("Kernels are compared with those of chunked MLPs without recomputation.")
        elif otherwise and not fused:
            self.notes.append(
                f"The plan runs {' and '.join(otherwise)} as traced: kernels are compared with those of the traced "
                "step in which nothing is recomputed."
            )
        elif form.chunks:
            kernels_expected, kernels_found = without_heads(kernels_expected, found.kernels)
            self.notes.append("Kernels are compared outside of the chunked loss.")
        if groups.not_finite:
            self.notes.append(f"Not compared, because no result is finite in float64: {first_few(groups.not_finite)}.")
        if sums.ratios:
            self.notes.append(
                f"Gradients of {first_few(sums.ratios)} are summed in chunks: they are compared with float64."
            )
        return _Comparison(
            bool(_distance([expected.loss], [found.loss]).equal),
            distance,
            sums.ratios,
            groups.ratios,
            [*far, *too_far, *groups.too_far],
            _observed_nodes(counts, self.compared),
            offloads,
            () if self._runs_other_kernels else kernel_differences(kernels_expected, kernels_found),
        )

    def _traced_otherwise(self, untouched: _FirstStep) -> list[str]:
        """Describe the functions whose kernels tracing orders or makes anew. (Rule 6)"""
        ops = {node.op for node in self.compared.graph.nodes}
        of_numpy = sorted(op.removeprefix(OF_NUMPY) for op in ops if op.startswith(OF_NUMPY))
        found = {"TorchScript's": sorted(untouched.scripted), "NumPy's": of_numpy}
        return [f"{whose} {first_few(names)}" for whose, names in found.items() if names]

    def _moved(self, training: Training) -> dict[str, int]:
        """Count the storages that went to the host and came back in the last step."""
        if not self.plan.offloads:
            return {}
        offloader = planned_forward(training.model).offloader
        assert offloader is not None
        return {"planned": len(self.plan.offloads), "out": offloader.counts.out, "back": offloader.counts.back}

    def _apply(self, training: Training, regions: tuple[RegionRef, ...]) -> None:
        """Begin again under the plan with `regions`."""
        training.begin_again()
        about = without_sizes(self.plan.about)
        plan = dataclasses.replace(self.plan, about=about, regions=regions)
        training.apply(plan)  # a larger batch was chosen on purpose

    def _first_unrecomputed(self, training: Training) -> _FirstStep:
        """Run the first step in the plan's form without recomputation."""
        self._apply(training, ())
        kernels = KernelLog()
        planned_forward(training.model).watch(observe=False, recompute_context=kernels.paused)
        found = _first_step(training, kernels)
        training.finish()
        remove(training.model)
        return found

    def _unrecomputed(self, training: Training, untouched: _FirstStep) -> tuple[_FirstStep, list[str]]:
        """Run the first step in the plan's form without recomputation; list parameters far from the eager baseline."""
        found = self._first_unrecomputed(training)
        names = list(training.trained)
        narrow = bool(self.compared.workload.autocast) or self.compared.step.product_dtype.itemsize < 4
        far = far_from(untouched.gradients, found.gradients, names, narrow)
        if far:
            self.notes.append(f"Far from the eager baseline's, more than rounding explains: {', '.join(far[:5])}.")
        apart = _distance(untouched.gradients, found.gradients)
        loss, other = float(untouched.loss), float(found.loss)
        self.notes.append(
            "Groups are fused: loss, gradients and kernels are compared with the fused step in which nothing is "
            f"recomputed. The eager baseline's loss is {loss:.7g}, this one's {other:.7g}; gradients differ by up to "
            f"{apart.relative:.2g} of the largest."
        )
        return found, far

    @property
    def _is_own_checkpointing(self) -> bool:
        """Whether the eager baseline recomputes too, so that kernels cannot be compared."""
        return bool(self.compared.graph.about["own_checkpoints"])

    @property
    def _is_of_padded_passes(self) -> bool:
        """Whether mini-batches without padding run with the explicit mask that the plan has for the largest one."""
        about = self.compared.graph.about
        return PASSES in about and bool(about["masks"]["padded"])

    @property
    def _runs_other_kernels(self) -> bool:
        return self._is_own_checkpointing or self._is_of_padded_passes

    def _against_noise(
        self, training: Training, expected: _FirstStep, distance: _Distance, summed: set[str]
    ) -> _Distance:
        """Count `distance` as equal if the eager baseline differs from itself as much. (Rule 5)

        summed  parameters whose gradients are compared with float64, and are not among those expected
        """
        planned = planned_forward(training.model)
        remove(training.model)
        training.begin_again()
        names = list(training.trained)
        again = _first_step(training).gradients
        again = [None if name in summed else gradient for name, gradient in zip(names, again, strict=True)]
        noise = _distance(expected.gradients, again)
        training.finish()
        training.model.forward = planned
        planned.install()
        if noise.equal:
            return distance
        self.notes.append(
            f"Gradients of the eager baseline differ between two runs by {noise.relative:.2g} of their largest value: "
            "kernels on this device are not deterministic, or the step changes something that is not put back. The "
            f"planned step differs by {distance.relative:.2g}; "
            f"up to {NOISE:g} times as much counts as equal."
        )
        return dataclasses.replace(distance, equal=distance.relative <= NOISE * noise.relative)

    def _planned(self, training: Training) -> dict[str, int]:
        """Measure the planned step at full size, in its steady state."""
        if not self.fits:
            training.set_batch(self.planned_step.workload.batch_size, self.seed + 1)
            if self.plan.about.get("carried"):  # of another size
                training.begin_again()
            training.step()
        measured, peak = training.measure_steady_step(self.alignment_bytes, self.repeats)
        found = {"peak_bytes": peak, "step_time_us": round(measured.time_us)}
        if measured.reserved_bytes is None:
            return found
        allocated = peak - measured.requested_bytes + measured.peak_bytes
        return {**found, "allocated_bytes": allocated, "reserved_bytes": measured.reserved_bytes}
