"""Profile: record a workload's step, and cost its operators, on a device or for a target."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable

import torch

from remat.capture.elsewhere import CaptureDevice
from remat.capture.generators import generators_kept
from remat.costing.costs import Costs, assumptions, estimated_costs, with_forward_alone, with_library_workspaces
from remat.costing.planning_device import PlanningDevice, find_planning_device
from remat.costing.profile import Profile
from remat.errors import require_argument
from remat.evaluation.form import Form
from remat.evaluation.graph import FORWARD_ALONE, LIBRARY_WORKSPACES, TRACED_ONLY, Graph
from remat.evaluation.sharding import shard
from remat.planning.untraced import with_untraced
from remat.recording.fake_step import FakeStep
from remat.recording.record import record
from remat.recording.reslice import Resliced
from remat.workload.training_loop import TrainingLoop, require_loop
from remat.workload.workload import Workload, require_workload


def fake_step(workload: Workload, place: PlanningDevice, *, loop: TrainingLoop | None = None) -> FakeStep:
    """Make the workload's step on fake tensors that pretend to be on `place`."""
    require_workload(workload)
    require_loop(loop)
    device = place.device or torch.device("cpu")
    if not place.substituted:
        return FakeStep(workload, device=device, loop=loop)
    from remat.cuda_kernels.attention import cudnn_attention_of
    from remat.cuda_kernels.autocast import weight_cast_cache
    from remat.cuda_kernels.substitute import UntracedForward, substitute

    cudnn = cudnn_attention_of(place.target)
    return FakeStep(
        workload,
        device=device,
        loop=loop,
        prepare=functools.partial(substitute, cudnn_attention=cudnn),
        recompute_context=weight_cast_cache,
        elsewhere=CaptureDevice(
            torch.device(place.target.device, 0),
            kernels=functools.partial(UntracedForward, cudnn_attention=cudnn),
            capability=divmod(place.target.capability, 10),
        ),
    )


@generators_kept()
def profile(
    workload: Workload,
    *,
    target: str = "auto",
    costs: str | os.PathLike[str] | None = None,
    loop: TrainingLoop | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Record the workload's step with its costs.

    On this machine's device the costs are measured, kind by kind. For a target by name they are estimated.

    Args:
        workload: The training step.
        target: The device, as in `remat.plan`.
        costs: A table of kernel times measured on the target.
        loop: Everything around forward and backward.
        on_progress: Called with (done, total) while costs are measured.

    Returns:
        The profile. Times are in microseconds, sizes in bytes.

    Raises:
        CaptureError: The model cannot be captured.
        UsageError: The target or the table is wrong.

    Example:
        >>> remat.profile(workload, target="cpu").save("mine.profile.json")
    """
    place = find_planning_device(target, costs)
    step = fake_step(workload, place, loop=loop)
    return profile_step(step, place, on_progress=on_progress)


def profile_step(
    step: FakeStep, place: PlanningDevice, *, on_progress: Callable[[int, int], None] | None = None
) -> Profile:
    """Profile an existing step in its present training loop and form."""
    require_argument("on_progress", on_progress, Callable | None, "a function of the numbers done and in all")
    found = record(step, alignment_bytes=place.target.alignment_bytes)
    whole, costs = _costed(found, place, on_progress=on_progress)
    whole = with_forward_alone(with_untraced(whole, step, costs, place.target, place.device), costs)
    return _profile(whole, costs, step, place)


class VariantProfiles:
    """Profiles of a step in other forms; the memory of the step without a plan stays that of `untouched`.

    Of forms that differ only in their number of slices, one is recorded.
    """

    def __init__(self, step: FakeStep, place: PlanningDevice, untouched: Profile):
        self._step, self._place = step, place
        known = untouched.whole or untouched.graph
        libraries_bytes = known.fixed_bytes.get(LIBRARY_WORKSPACES, 0)  # will be added to both again
        self._known = dataclasses.replace(
            known,
            first_step_bytes=known.first_step_bytes - libraries_bytes,
            untraced_bytes=known.untraced_bytes - libraries_bytes,
        )
        self._records: dict[Form, Resliced] = {}  # by the common part of forms

    def profile(self, form: Form) -> Profile:
        """Return the profile of the step in `form`."""
        known, alignment_bytes = self._known, self._place.target.alignment_bytes
        alike = form.in_one_slice
        if alike not in self._records:
            self._records[alike] = Resliced(self._step, alignment_bytes=alignment_bytes, whole=known)
        whole, costs = _costed(self._records[alike].record(form), self._place)
        about = {name: known.about[name] for name in (FORWARD_ALONE, TRACED_ONLY) if name in known.about}
        whole = dataclasses.replace(whole, untraced_bytes=known.untraced_bytes, about={**whole.about, **about})
        return _profile(whole, costs, self._step, self._place)


def _costed(
    found: Graph, place: PlanningDevice, *, on_progress: Callable[[int, int], None] | None = None
) -> tuple[Graph, Costs]:
    from remat.costing.operator_timing import time_operators

    if place.device is not None:
        return found, time_operators(found.kinds, place.device, on_progress=on_progress)
    costs = estimated_costs(found, place.target, place.table)
    about = {**found.about, **assumptions(found, place.target), **costs.about_table}
    return dataclasses.replace(found, about=about), costs


def _profile(whole: Graph, costs: Costs, step: FakeStep, place: PlanningDevice) -> Profile:
    whole = with_library_workspaces(whole, place.target, costs)
    graph = shard(whole, step.loop)
    return Profile(graph, costs, place.target, whole if graph is not whole else None)
