"""Findings: why a run needed another amount of memory than its plan promised, most certain first.

Rule 1  What tensors ask for is held against the plan's predicted peak. Within 2 % of it the step did as promised, and
        what remains is what the allocator and the card did: fragmentation, another process.
Rule 2  A plan that is applied leaves its own files in the stacks of allocations. Where stacks were recorded and name
        none of them, it was not applied. Without stacks the peak decides: near the one without checkpointing.
Rule 3  A batch is read off the sizes of allocations: of all sizes that the step's activations would have at `n` tokens
        in place of those planned, the `n` whose sizes are found most often. Sizes of parameters do not depend on it.
Rule 4  A storage alive at the peak without a counterpart of its size in the prediction is unknown to the plan. It is
        named by the innermost line of its stack that is neither torch's nor remat's.
Rule 5  A request that failed although as many bytes lay free in segments that the process held failed of fragmentation.
Rule 6  What a card has, less what it still gave, less what this process held and its context, is another process's.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from remat.costing.profile import Profile
from remat.diagnosis.snapshot import HOW_TO_RECORD, Allocation, Frame, OutOfMemory, Snapshot
from remat.evaluation.breakdown import HEAD, codes_of_storages
from remat.evaluation.evaluator import Memory
from remat.evaluation.plan import Plan, Region
from remat.reservation.fragmentation import CONTEXT_BYTES, before_first_step, states
from remat.units import MIB, gib

Kind = Literal[
    "as promised",
    "not applied",
    "larger batch",
    "smaller batch",
    "unknown allocations",
    "fragmentation",
    "another process",
    "no history",
    "more than predicted",
]
CLOSE_SHARE = 0.02  # of the predicted peak
NEAR_WITHOUT = 0.05  # of the peak without checkpointing (Rule 2)
SURE_SHARE = 0.75  # of the activations' bytes have their size at a batch (Rule 3)
LEAST_SHARE = 0.1  # of all bytes asked for are such activations: less is chance
LARGEST_BATCH_FACTOR = 8  # that a batch may be larger than planned
SMALLEST = MIB  # storages and groups of allocations that are looked at
GRANULE = 512  # bytes that requests are rounded to
EXECUTOR = "remat/execution/"  # in the file names of stacks under a plan
LIBRARIES = ("/torch/", "/remat/", "torch/csrc", "<eval_with_key>", "??")
MOST_GROUPS = 5


@dataclasses.dataclass(frozen=True)
class Finding:
    """A difference: the bytes that it explains (None: unknown), a sentence, and a remedy."""

    kind: Kind
    sentence: str
    remedy: str
    explains_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """A run beside its plan, in bytes. `wanted_bytes` includes a request that failed."""

    findings: tuple[Finding, ...]
    predicted_bytes: int
    requested_bytes: int
    wanted_bytes: int
    reserved_bytes: int
    out_of_memory: OutOfMemory | None

    @property
    def verdict(self) -> Kind:
        return self.findings[0].kind


def diagnose(
    snapshot: Snapshot,
    plan: Plan,
    profile: Profile | None = None,
    regions: Sequence[Region] = (),
    card_bytes: int | None = None,
) -> Diagnosis:
    """Find the causes by which the run of `snapshot` differs from `plan`.

    profile, regions  the step in the plan's form, and the plan's regions in it; without them sizes are not compared
    card_bytes        of the device that ran; None: of the plan's target, if `profile` is given
    """
    failed = snapshot.out_of_memory
    peak = snapshot.peak_requested_bytes
    wanted = max(peak, failed.before.requested_bytes + failed.size_bytes) if failed is not None else peak
    if card_bytes is None and profile is not None:
        card_bytes = profile.target.memory_bytes
    reasons = _Reasons(snapshot, plan, profile, regions, card_bytes, wanted)
    return Diagnosis(
        findings=tuple(reasons.found()),
        predicted_bytes=plan.predicted["peak_bytes"],
        requested_bytes=peak,
        wanted_bytes=wanted,
        reserved_bytes=snapshot.peak_reserved_bytes,
        out_of_memory=failed,
    )


class _Reasons:
    def __init__(
        self,
        snapshot: Snapshot,
        plan: Plan,
        profile: Profile | None,
        regions: Sequence[Region],
        card_bytes: int | None,
        wanted_bytes: int,
    ):
        self.snapshot, self.plan, self.profile, self.regions = snapshot, plan, profile, regions
        self.card_bytes, self.wanted_bytes = card_bytes, wanted_bytes
        self.predicted_bytes = plan.predicted["peak_bytes"]
        self.excess_bytes = wanted_bytes - self.predicted_bytes

    def found(self) -> list[Finding]:
        """List every reason, in the order of the rules; never empty."""
        found = [] if self.snapshot.has_history else [self._no_history()]
        if self.excess_bytes > CLOSE_SHARE * self.predicted_bytes:
            found += self._of_the_step()
        elif self.snapshot.has_history:
            found += self._batch()  # a smaller one also explains a peak below the promise
        found += [*self._fragmentation(), *self._another_process()]
        return found or [self._as_promised()]

    def _as_promised(self) -> Finding:
        if self.excess_bytes > CLOSE_SHARE * self.predicted_bytes:
            sentence = f"the step requested {gib(self.excess_bytes)} more than predicted, for an unknown reason"
            return Finding("more than predicted", sentence, f"record stacks: {HOW_TO_RECORD}")
        return Finding("as promised", "the step requested no more than the plan predicted", "", 0)

    def _no_history(self) -> Finding:
        sentence = "the snapshot has no history: it shows the memory at its end, not at the peak"
        return Finding("no history", sentence, f"record one: {HOW_TO_RECORD}")

    # The step (Rules 2, 3, 4)

    def _of_the_step(self) -> Iterator[Finding]:
        not_applied, batch = self._not_applied(), self._batch()
        yield from not_applied
        yield from batch
        if not batch:
            yield from self._unknown(() if not_applied else self.regions)

    def _not_applied(self) -> list[Finding]:
        without = self.plan.without_checkpointing["peak_bytes"]
        files, remedy = self.snapshot.files, "call remat.apply(model, plan) before the optimizer is built"
        if not self.plan.regions:  # nothing that would be seen, or missed
            return []
        if any(EXECUTOR in name.replace("\\", "/") for name in files):
            return []
        if any(name.endswith(".py") for name in files):
            sentence = "the plan was not applied: no stack of an allocation goes through it"
        elif not files and abs(self.wanted_bytes - without) <= NEAR_WITHOUT * without:
            sentence = f"the plan seems not to be applied: without one the step needs {gib(without)}"
        else:
            return []
        return [Finding("not applied", sentence, remedy, without - self.predicted_bytes)]

    def _batch(self) -> list[Finding]:
        """Find another batch size by Rule 3."""
        planned = self.plan.about.get("batch_size")
        if self.profile is None or not planned or not self.snapshot.has_history:
            return []
        found = batch_of(self.snapshot.sizes, self._activation_sizes(), planned)
        if found is None or found == planned:
            return []
        length = self.plan.about.get("seq_len")
        rows = f"{found} x {length}" if length else f"{found}"
        as_planned = f"{planned} x {length}" if length else f"{planned}"
        kind: Kind = "larger batch" if found > planned else "smaller batch"
        sentence = f"the batch was {found / planned:.3g} times the planned one: {rows} in place of {as_planned}"
        if length:
            sentence += ", or longer sequences with as many tokens"
        changes = self.predicted_bytes - sum(self.profile.graph.fixed_bytes.values())
        remedy = f"train with {as_planned}, or plan for the batch that runs (--batch-size {found})"
        return [Finding(kind, sentence, remedy, round(changes * (found / planned - 1)))]

    def _activation_sizes(self) -> list[int]:
        """List the sizes of the storages that forward makes."""
        assert self.profile is not None
        graph = self.profile.graph
        forward = (graph.storages.birth < graph.forward_end) & (codes_of_storages(graph) <= HEAD)
        return graph.storages.size_bytes[forward].tolist()

    def _unknown(self, regions: Sequence[Region]) -> Iterator[Finding]:
        """Yield unknown allocations by Rule 4."""
        at = self.snapshot.peak_at
        if self.profile is None or at is None:
            return
        known = collections.Counter(_rounded(size) for size in _alive_at_peak(self.profile, regions))
        groups: dict[str, list[int]] = {}
        for each in self.snapshot.alive_at(at):
            size = _rounded(each.size_bytes)
            if known[size] > 0:
                known[size] -= 1
            else:
                groups.setdefault(blamed(each), []).append(each.size_bytes)
        largest = sorted(groups.items(), key=lambda item: -sum(item[1]))[:MOST_GROUPS]
        largest = [(where, sizes) for where, sizes in largest if sum(sizes) >= SMALLEST]
        if not largest:
            return
        listing = "; ".join(f"{gib(sum(sizes))} in {len(sizes)} from {where}" for where, sizes in largest)
        unknown = sum(sum(sizes) for sizes in groups.values())
        yield Finding(
            "unknown allocations",
            f"alive at the peak and not part of the planned step: {listing}",
            "free it before the step, put it into the workload's step, or plan with --headroom for it",
            unknown,
        )

    # The allocator and the card (Rules 5, 6)

    def _fragmentation(self) -> Iterator[Finding]:
        failed = self.snapshot.out_of_memory
        remedy = "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or plan with --budget auto, which simulates it"
        if failed is not None:
            idle = failed.before.reserved_bytes - failed.before.requested_bytes
            if idle >= failed.size_bytes:
                sentence = (
                    f"fragmentation: a request of {gib(failed.size_bytes)} failed while {gib(idle)} were free "
                    f"in pieces within the {gib(failed.before.reserved_bytes)} that the process held"
                )
                yield Finding("fragmentation", sentence, remedy, idle)
            return
        simulated = next(iter(self.plan.predicted.get("allocator") or ()), None)
        if simulated is None or self.excess_bytes > CLOSE_SHARE * self.predicted_bytes:
            return
        reserved = self.snapshot.peak_reserved_bytes
        if (more := reserved - simulated["reserved_bytes"]) > CLOSE_SHARE * self.predicted_bytes:
            asked_for = gib(self.snapshot.peak_requested_bytes)
            sentence = f"fragmentation: {gib(reserved)} were reserved for {asked_for}, {gib(more)} more than simulated"
            yield Finding("fragmentation", sentence, remedy, more)

    def _another_process(self) -> Iterator[Finding]:
        failed = self.snapshot.out_of_memory
        if failed is None or self.card_bytes is None:
            return
        others = self.card_bytes - failed.device_free_bytes - failed.before.reserved_bytes - CONTEXT_BYTES
        if others > CLOSE_SHARE * self.card_bytes:
            own, free = gib(failed.before.reserved_bytes), gib(failed.device_free_bytes)
            sentence = (
                f"another process, or memory outside of PyTorch, held about {gib(others)} of {gib(self.card_bytes)}: "
                f"this process had reserved {own}, and {free} were free"
            )
            remedy = "look with nvidia-smi; free it, or lower the budget by it"
            yield Finding("another process", sentence, remedy, others)


def batch_of(sizes: Sequence[int], activations: Sequence[int], planned: int) -> int | None:
    """Return the batch whose activations would have the requested sizes; None if none is sure. (Rule 3)

    sizes        of all requests
    activations  sizes of those that the planned step makes, for `planned` samples
    """
    seen = collections.Counter(_rounded(size) for size in sizes)
    wanted = collections.Counter(size for size in activations if size >= SMALLEST)
    total, asked_for = (sum(size * count for size, count in all_of.items()) for all_of in (wanted, seen))
    if not total or not asked_for:
        return None

    def shares(batch: int) -> tuple[float, float]:
        """Return the share of activations' bytes with a request of their size, and the share of such requests."""
        scaled = {size: _rounded(size * batch // planned) for size in wanted if size * batch % planned == 0}
        met = sum(size * min(wanted[size], seen[then]) for size, then in scaled.items())
        of_them = sum(then * seen[then] for then in set(scaled.values()))
        return met / total, of_them / asked_for

    candidates = [planned, *(batch for batch in range(1, LARGEST_BATCH_FACTOR * planned + 1) if batch != planned)]
    # Sizes are rounded, so neighbours may be equally good: prefer the planned one, then a large common divisor with it.
    best = max(candidates, key=lambda batch: (min(shares(batch)), math.gcd(batch, planned)))
    met, of_them = shares(best)
    return best if met >= SURE_SHARE and of_them >= LEAST_SHARE else None


def _rounded(size: int) -> int:
    return -(-size // GRANULE) * GRANULE


def _alive_at_peak(profile: Profile, regions: Sequence[Region]) -> list[int]:
    """List the sizes of everything alive at the planned step's peak, including what exists before it."""
    graph = profile.graph
    memory = Memory(graph, profile.costs.workspace_per_op(graph))
    lives, at = memory.lives(regions), memory.curve(regions).peak_at
    alive = (lives.birth <= at) & (lives.death >= at)
    workspace = int(memory.workspace_bytes[lives.op[at]])
    own = lives.size_bytes[alive & (lives.size_bytes > 0)].astype(np.int64).tolist()
    return [*own, workspace, *before_first_step(graph), *states(graph)]


def blamed(allocation: Allocation) -> str:
    """Return the line that asked for it: the user's innermost one, else the innermost. (Rule 4)"""
    if not allocation.frames:
        return "a place that was not recorded"
    own = [frame for frame in allocation.frames if _is_the_users(frame)]
    return str((own or allocation.frames)[0])


def _is_the_users(frame: Frame) -> bool:
    return frame.filename.endswith(".py") and not any(part in frame.filename for part in LIBRARIES)
