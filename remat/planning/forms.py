"""Forms: one step unchanged, with losses in slices, with MLPs in slices, with groups fused.

A form is a step of its own: recorded, costed, posed, solved and replayed like any other. Its nodes are the same, but
that a loss head is one node, and so is a fused group. So a plan of one number of slices is a plan of the others, and a
good one to begin from. `portfolio.py` chooses among them.

Rule 1  On a device at hand, a loss is cut into no more slices than leave every row's gradient bitwise what it was,
        unless groups are fused, which round anyway.
Rule 2  Where groups may be fused they are, in every form but the captured one.
Rule 3  Runs of nodes that act by row (`chunking/rows.py`: MLPs) are cut all alike, into slices whose widest value has
        about `FormChoice.row_numbers` numbers, beside a loss in `FormChoice.beside_rows` slices. Their forward is made
        once more, whatever the regions. Where groups are fused, so are those inside.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator

from remat.chunking.products import round_alike, rows_round_alike
from remat.chunking.rows import RowRun
from remat.chunking.withheld import LogitsWithheld
from remat.costing.planning_device import PlanningDevice
from remat.costing.profile import Profile
from remat.errors import RematError
from remat.evaluation.evaluator import Memory
from remat.evaluation.form import Chunk, Form
from remat.execution.base import Execution
from remat.planning.profiling import VariantProfiles
from remat.planning.refused_sizes import SizeRefused
from remat.planning.request import FormChoice
from remat.recording.fake_step import FakeStep
from remat.warn import warn
from remat.workload.training_loop import TrainingLoop, is_power_of_two


@dataclasses.dataclass(frozen=True, eq=False)
class StepForm:
    """A step in one form.

    extra_us  time beyond that of the captured step, without recomputation; negative if fusing makes it faster
    """

    form: Form
    profile: Profile
    extra_us: float


class StepForms:
    """The forms of a step but the captured one; each is recorded when it is asked for.

    step        of the model, at any batch size
    profile     of the captured step, priced for the execution
    choice      limits on the forms to try
    slices      whether losses and MLPs may run in slices        fuse  whether groups are fused
    profile_in  returns the profile of the step in a form; by default `step` is recorded
    on_form     called with a form before it is recorded
    """

    def __init__(
        self,
        execution: Execution,
        step: FakeStep,
        profile: Profile,
        choice: FormChoice | None = None,
        *,
        slices: bool = True,
        fuse: bool = False,
        profile_in: Callable[[Form], Profile] | None = None,
        on_form: Callable[[Form], None] | None = None,
    ):
        self._execution, self._step, self._whole = execution, step, profile
        self._choice = choice or FormChoice()
        self._slices, self.fuse, self._profile_in = slices, fuse, profile_in
        self._on_form = on_form or (lambda form: None)
        self._known: dict[Form, StepForm] = {}
        self._alike: dict[int, bool] = {}
        self._refused: dict[str, None] = {}  # why no loss could be chunked

    @property
    def are_any(self) -> bool:
        """Whether there is something to cut, or a group to fuse."""
        return self.fuse or bool(self._heads) or bool(self._row_runs)

    @property
    def are_losses(self) -> bool:
        """Whether there is a loss to cut."""
        return bool(self._heads)

    def __iter__(self) -> Iterator[StepForm]:
        if self.fuse:
            yield self.fused()
        for slices in self._choice.slices if self._heads else ():
            if not self._rounds_alike(slices):
                continue
            try:
                yield self.in_slices(slices)
            except SizeRefused:  # by the model, in any form
                raise
            except RematError as error:  # as where the step, or a later graph, reads the logits
                self._refused[_reason(error)] = None
                return

    def with_rows(self) -> Iterator[StepForm]:
        """Yield the forms that also chunk MLPs. (Rule 3)"""
        if not self._row_slices:
            return
        made, failed = 0, ""
        for slices in (*self._choice.beside_rows, 0) if self._heads else (0,):
            if made and not slices:
                return
            if slices and not self._rounds_alike(slices):
                continue
            try:
                found = self.of(dataclasses.replace(self._cut(slices), rows=self._row_slices))
            except LogitsWithheld:  # as above
                continue
            except SizeRefused:
                raise
            except (RematError, RuntimeError) as error:  # as where a kernel takes no chunk of its rows
                failed = str(error).partition("\n")[0].rstrip(".")
                continue
            made += 1
            yield found
        if failed and not made:
            warn(f"MLPs are not chunked: {failed}.")

    @functools.cached_property
    def rows_us(self) -> float:
        """The least time that chunking all runs by row adds: their forward once more, except for the last products.

        Of fused runs it is that of their products.
        """
        graph, times = self._whole.graph, self._whole.costs.per_op_us(self._whole.graph)
        first = {(node.call, node.name): node for node in graph.nodes}
        runs = [(call, run, run.products if self.fuse else run.nodes) for call, run in self._row_runs]
        again = [(call, node) for call, run, nodes in runs for node in nodes if node not in run.unmade]
        made = (first[call, node.name] for call, node in again if (call, node.name) in first)
        return float(sum(times[node.first : node.end].sum() for node in made))

    @functools.cached_property
    def _row_runs(self) -> list[tuple[int, RowRun]]:
        are_asked = self._slices and self._choice.most_row_slices > 1
        may_run = self._execution.runs_forms and self._step.loop.shard is None
        return list(self._step.graphs.row_runs) if are_asked and may_run else []

    @functools.cached_property
    def _row_slices(self) -> int:
        """Number of chunks of all MLPs; 0 if none are chunked. (Rules 1 and 3)"""
        if not self._row_runs:
            return 0
        widest = self._times * max(run.rows * run.widest for _, run in self._row_runs)
        slices = min(max(round(widest / self._choice.row_numbers), 2), self._choice.most_row_slices)
        if self._whole.costs.source == "measured" and not self.fuse:
            device, autocast = self._step.device, self._step.workload.autocast
            different = {run.signature: run for _, run in self._row_runs}.values()
            if any(rows_round_alike(run, slices, device, autocast) is False for run in different):
                return 0
        return slices

    @functools.cached_property
    def with_losses_whole(self) -> StepForms:
        """The same forms without those that chunk losses or MLPs."""
        other = copy.copy(self)
        other._slices = False
        for name in ("_heads", "_row_runs", "_row_slices", "rows_us"):
            vars(other).pop(name, None)
        return other

    def fused(self) -> StepForm:
        """Return the form with fused groups and whole losses."""
        return self.of(Form(fused=True))

    def in_slices(self, slices: int) -> StepForm:
        """Return the form with every large loss in `slices` chunks."""
        return self.of(self._cut(slices))

    def like_liger(self) -> StepForm:
        """Return the form with as many slices as Liger-Kernel's fused linear cross-entropy takes.

        (linkedin/Liger-Kernel, `fused_linear_cross_entropy.py`: the rows are divided by classes / width, rounded up to
        a power of two.).
        """
        return self.of(self._cut(max((self._liger_slices(head) for head in self._heads), default=1)))

    def _liger_slices(self, head: Chunk) -> int:
        rows, classes, width = self._step.graphs.shape_of(head)
        most = 1 << (math.ceil(rows / math.ceil(classes / width)) - 1).bit_length()
        return math.ceil(rows / most)

    def _rounds_alike(self, slices: int) -> bool:
        """Return whether gradients stay bitwise those of the whole loss, tested on the device if there is one."""
        if self._whole.costs.source != "measured" or self.fuse:
            return True
        if slices not in self._alike:
            dtype, device = self._step.product_dtype, self._step.device
            found = (round_alike(self._step.graphs.shape_of(head), slices, dtype, device) for head in self._heads)
            self._alike[slices] = all(alike is not False for alike in found)
        return self._alike[slices]

    @functools.cached_property
    def _heads(self) -> list[Chunk]:
        """The losses large enough to chunk; none where chunks cannot keep their promise (`why_whole`)."""
        if not self._slices or why_whole(self._execution, self._step) is not None:
            return []
        return [head for head, logits_bytes in self._step.graphs.heads if logits_bytes >= self._large_bytes]

    @property
    def left_whole(self) -> list[str]:
        """Reasons why large losses are not chunked, one each."""
        if not self._slices:
            return []
        if (why := why_whole(self._execution, self._step)) is not None:
            return [why] if any(size >= self._large_bytes for _, size in self._step.graphs.heads) else []
        large = (each.why for each in self._step.graphs.whole_losses if each.logits_bytes >= self._large_bytes)
        return [*large, *self._refused]

    @functools.cached_property
    def _large_bytes(self) -> float:
        """Least bytes of logits, at the step's own batch size, whose loss is worth slices."""
        return self._choice.large * Memory(self._whole.graph).peak_without_regions / self._times

    @property
    def _times(self) -> float:
        """Batch size of the profile over that of the step."""
        return float(self._whole.graph.about["batch_size"] / self._step.workload.batch_size)

    @functools.cached_property
    def _recorded_in(self) -> Callable[[Form], Profile]:
        device = self._step.device if self._whole.costs.source == "measured" else None
        return VariantProfiles(
            self._step, PlanningDevice(self._whole.target, device, self._whole.costs.table), self._whole
        ).profile

    def _cut(self, slices: int) -> Form:
        return Form(tuple(dataclasses.replace(head, slices=slices) for head in self._heads if slices), self.fuse)

    def of(self, form: Form) -> StepForm:
        """Return the step in `form`."""
        if form not in self._known:
            self._on_form(form)
            self._known[form] = self._recorded(form)
        return self._known[form]

    def _recorded(self, form: Form) -> StepForm:
        found = (self._profile_in or self._recorded_in)(form)
        whole_us = self._whole.costs.step_time_us(self._whole.graph)
        return StepForm(form, found, found.costs.step_time_us(found.graph) - whole_us)


def _reason(error: RematError) -> str:
    if isinstance(error, LogitsWithheld):
        return "the step reads the logits, or the forward does after a graph break"
    return str(error).rstrip(".")


def why_whole(execution: Execution, step: FakeStep) -> str | None:
    """Return why no loss of `step` may be chunked; None if one may."""
    if why := why_whole_in(execution, step.loop):
        return why
    return "gradients of a loss that is not scaled yet are too small for float16" if step.computes_in_float16 else None


def why_whole_in(execution: Execution, loop: TrainingLoop) -> str | None:
    """Return why no loss may be chunked in `loop`; None if one may."""
    if not execution.runs_forms:
        return f"execution {execution} runs no chunks"
    if loop.shard is not None:
        return "states are sharded"
    if not is_power_of_two(loop.accumulation):
        return "the loss is divided by a number of micro-batches that is no power of two"
    return None
