"""The first step: trust a plan, then verify it, where training begins.

A plan is applied to a model that it was not validated for. So before the first training forward runs under the plan,
the model's own forward runs on the same batch, from the same state and random state, which are put back afterwards, and
nothing of it is kept but digests (`digests.py`). Then the planned forward has to return what it returned, and leave
buffers as it left them; and in the backward that follows, regions have to recompute what their forward had
(`recomputed.py`): the loss alone does not tell of wrong gradients.

Rule 1  The untouched forward makes a graph as training does, and keeps nothing that the graph saves: what code does
        without gradients may be something else. It takes less than the planned forward does, but for values that a plan
        never has at once: logits, what Python's names keep, what a gradient of the forward's own needs. Planning has
        recorded how much (`untraced.py`). Where the budget has no room for that, it ends in front of the head, and
        what the head is given is compared; where there is no such place, nothing is, and that is said.
Rule 2  Values are compared bit by bit. A plan that announces other roundings (slices, fused groups, masks that a
        batch would do without) may be as far away as they explain. Where a device does not repeat itself, the
        untouched forward is run again, and the planned one may be `NOISE` times as far away.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from remat._torch.recording import unwrapped
from remat._torch.training import clear_cublas_workspaces, fakes_are_on
from remat.capture.dynamo import without_cache
from remat.capture.holders import StateLost
from remat.capture.kept_tensors import strided_parts
from remat.capture.model_state import MOST_NAMED_BYTES, ModelState
from remat.capture.trl_head import selects_rows
from remat.capture.written_parameters import NoRoom, WrittenParameters
from remat.chunking.chunked_loss import Watch
from remat.errors import FirstStepMismatch, is_out_of_memory
from remat.evaluation.form import CAPTURED_FORM, form_of
from remat.evaluation.forwards import forwards_of
from remat.evaluation.graph import FORWARD_ALONE, OPTIMIZER_STATE, STATE
from remat.evaluation.plan import Plan
from remat.execution.digests import Digest, digest_of
from remat.execution.eager.region_tape import RegionWatch
from remat.execution.recomputed import REMEDY, Recomputed
from remat.host.weights import weights_on_host
from remat.units import first_few, gib
from remat.warn import warn
from remat.workload.batches import Anew
from remat.workload.held_outputs import output_tensors, parameters_reached

NEAR = {False: 1e-3, True: 0.1}  # of a norm, by whether the step rounds to 16 bits: distances that rounding explains
NOISE = 4.0

_NOTHING_SAVED = "nothing was saved for a backward"
Forward = Callable[..., Any]


class _HeadReached(BaseException):
    """Ends a forward without the plan in front of the last head; no other code catches it."""


@dataclasses.dataclass(frozen=True)
class _Observation:
    """Digests of a forward's outputs, of the buffers that it left and of the heads' inputs, and the parameters reached.

    A forward that ended in front of a head has the digests of the heads' inputs alone.
    """

    values: Mapping[str, Digest]
    heads: Sequence[Digest]
    reached: frozenset[str] | None


class FirstStep:
    """Compare the first training forward of `model` under `plan` with the one without, if it `is_on`.

    regions, heads  see `RewriteOptions.watch` and `ChunkedLoss.watch`.
    """

    def __init__(self, model: nn.Module, plan: Plan, regions: RegionWatch, heads: Watch, *, is_on: bool):
        self._model, self._plan, self._regions, self._heads = model, plan, regions, heads
        self._is_on = is_on
        self._form = form_of(plan.about)
        self._done: set[int] = set()  # forwards of the step

    def run(self, number: int, planned: Forward, untouched: Forward, given: Any, rounds: Callable[[], bool]) -> Any:
        """Run `planned`, forward `number` of the step, and return its outputs; verify them if that is due.

        untouched  takes the arguments `given` too, or rather copies of their containers
        rounds     asked afterwards, whether the planned one may differ in rounding

        Raises FirstStepMismatch, now or in the backward, if the plan is not this model's.
        """
        if not self._is_due(number):
            return planned()
        comparison = self._prepared(number, untouched, given)
        found: list[Digest] = []
        before, self._heads.on_sums = self._heads.on_sums, lambda head, given, sums: found.append(_of_rows(given.rows))
        try:
            with self.recomputing(number):
                outputs = planned()
        finally:
            self._heads.on_sums = before
        self._done.add(number)
        if isinstance(comparison, str):
            _cannot(comparison)
        elif comparison is not None:
            # a reentrant checkpoint of the model hides its parameters, and does nothing under a plan
            shows = not self._plan.about.get("own_checkpoints")
            seen = _seen(self._model, outputs, found, reached=shows)
            comparison.require(seen, may_round=rounds() or self._announces_roundings)
        return outputs

    @contextlib.contextmanager
    def recomputing(self, number: int) -> Iterator[None]:
        """Compare the tensors that regions recompute with the saved ones, during forward `number` of the step."""
        if not self._is_due(number):
            yield
            return
        self._regions.recomputed = Recomputed(self._model)
        try:
            yield
            self._done.add(number)
        finally:
            self._regions.recomputed = None

    def expect(self, number: int) -> None:
        """Verify the next forward `number` again."""
        self._done.discard(number)

    def _is_due(self, number: int) -> bool:
        first = next(self._model.parameters(), None)
        is_transformed = first is not None and unwrapped(first) is not first
        return self._is_on and number not in self._done and not fakes_are_on() and not is_transformed

    @property
    def _announces_roundings(self) -> bool:
        about = self._plan.about
        device = next((p.device for p in self._model.parameters()), torch.device("cpu"))
        by_trl = bool(about.get("opaque_functions")) and device.type == "cuda" and selects_rows(device)
        return self._form != CAPTURED_FORM or bool(about.get("traced_branches")) or by_trl

    # The untouched forward (Rule 1)

    def _prepared(self, number: int, forward: Forward, given: Any) -> _ForwardComparison | str | None:
        """Run the forward without the plan, or return why it cannot run; None while weights are on the host."""
        if weights_on_host(self._model) is not None:
            return None
        heads, room_bytes = self._linear_heads(number), self._room_bytes(number)
        ends = room_bytes < 0
        if ends and (not heads or self._form.rows):
            if FORWARD_ALONE not in self._plan.about:
                return "the plan is of an older version, and does not say how much memory that takes"
            return self._no_room
        before = ModelState(self._model)
        if once := before.only_once:
            return f"a forward more would change `{once[0]}` of the model for good: it cannot be put back"
        failures: list[Exception] = []
        run = functools.partial(_untouched, self._model, before, forward, given, heads, room_bytes)
        for under in WAYS_ALONE:
            try:
                narrow = self._plan.about.get("autocast") or _are_narrow(self._model)
                again = functools.partial(_again, self._model, before, functools.partial(run, under))
                return _ForwardComparison(run(under), again, NEAR[bool(narrow)])
            except StateLost:
                raise
            except NoRoom:
                return self._no_room
            except Exception as error:
                failures.append(_without_frames(error))
        if any(_NOTHING_SAVED in str(error) for error in failures):
            return "the forward differentiates inside, and without the plan that takes the memory which a plan saves"
        return f"the forward without the plan {_said_of(failures[-1])}"

    @property
    def _no_room(self) -> str:
        return f"the forward without the plan has no room in the budget of {gib(self._plan.budget_bytes)}"

    def _room_bytes(self, number: int) -> float:
        """Return what the budget leaves beside forward `number` without the plan; negative if it has no room for that.

        Earlier forwards of the step have run under the plan, and keep what it saves. All ranks have the same answer,
        whatever their batches: a forward may wait for the others.
        """
        needed_bytes = self._plan.about.get(FORWARD_ALONE)
        if needed_bytes is None:  # a plan from before this was known
            return math.inf if self._form == CAPTURED_FORM else -1
        there = [*self._model.parameters(), *self._model.buffers()]
        there += [p.grad for p in self._model.parameters() if p.is_leaf and p.grad is not None]
        state = ModelState(self._model, data=False)
        beside = state.unregistered
        planned = self._plan.predicted.get("breakdown", {})
        state_bytes = _bytes_of(there) + max(_bytes_of(beside), planned.get(STATE, 0))
        if all(p.device.type == "cpu" for p in self._model.parameters()):  # where copies take as much again
            copied = (t for t in beside if not isinstance(t, nn.Parameter))
            state_bytes += _bytes_of(self._model.buffers()) + _bytes_of(copied)
            state_bytes += min(_bytes_of(t for t in state.named if not isinstance(t, nn.Parameter)), MOST_NAMED_BYTES)
        state_bytes += planned.get(OPTIMIZER_STATE, 0) + 2 * planned.get("batch", 0)
        room_bytes = max(self._plan.budget_bytes, self._plan.predicted["peak_bytes"])
        kept_bytes = self._plan.predicted.get("kept_before_bytes") or [0] * (number + 1)
        return room_bytes - state_bytes - kept_bytes[number] - needed_bytes

    def _linear_heads(self, number: int) -> list[nn.Module]:
        """List the modules that compute the logits of chunked losses in forward `number`, as often as they do so."""
        modules = dict(self._model.named_modules())
        forwards = forwards_of(self._plan.about, len(self._plan.fingerprints))
        seen_first = forwards[forwards[number].like]
        calls = range(seen_first.first, seen_first.first + seen_first.calls)
        found = [modules.get(chunk.module) for chunk in self._form.chunks if chunk.call in calls]
        return [module for module in found if isinstance(module, nn.Linear)]


def _untouched(
    model: nn.Module,
    before: ModelState,
    forward: Forward,
    given: Any,
    heads: Sequence[nn.Module],
    room_bytes: float,
    under: Callable[[], contextlib.AbstractContextManager[Any]],
) -> _Observation:
    """Run `forward`, digest its results, and restore the model to its state `before`.

    room_bytes  beside the forward, for parameters that it writes into; negative: it ends in front of the heads
    """
    rows: list[Digest] = []
    learns = under is not torch.no_grad

    def note(head: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() != learns:
            return  # logits that no loss learns from, such as those that the next inputs are drawn from
        rows.append(_of_rows(args[0]))
        if room_bytes < 0 and len(rows) == len(heads):
            raise _HeadReached

    arguments, parameters = Anew(given), WrittenParameters(model, max(room_bytes, 0))
    handles = [head.register_forward_pre_hook(note) for head in set(heads)]
    try:
        with without_cache(model), under(), casts_forgotten(), parameters:
            args, kwargs = arguments.for_a_run()
            seen = _seen(model, forward(*args, **kwargs), rows, reached=torch.is_grad_enabled())
        before.keep_changed()
        return seen
    except _HeadReached:
        return _Observation({}, rows, None)
    finally:
        for handle in handles:
            handle.remove()
        before.put_back()
        parameters.put_back()
        arguments.put_back()
        _give_back()


@contextlib.contextmanager
def casts_forgotten() -> Iterator[None]:
    """Let autocast forget the casts made within, which no backward may use, and keep those that the step shares."""
    enable, before = torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled()
    enable(False)
    try:
        with mock.patch.object(torch, "set_autocast_cache_enabled", lambda _: None):  # an autocast of the model's own
            yield
    finally:
        enable(before)


def _give_back() -> None:
    """Release CUDA segments that were cut for this forward, which would stay and which the planned one uses badly."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # cuBLAS may be using the workspaces that are in such segments
        clear_cublas_workspaces()
        torch.cuda.empty_cache()


def _again(model: nn.Module, before: ModelState, run: Callable[[], _Observation]) -> _Observation:
    """Run `run` from the model state `before`, then restore the present state."""
    after = ModelState(model)
    before.put_back()
    try:
        return run()
    finally:
        after.put_back()


def saving_nothing() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which autograd builds its graph and saves nothing."""

    def refuse(saved: None) -> Tensor:
        raise RuntimeError(_NOTHING_SAVED)

    return saved_tensors_hooks(lambda tensor: None, refuse)


WAYS_ALONE = (saving_nothing, torch.no_grad)  # to run a forward, in turn; the first forbids to differentiate inside


def _seen(model: nn.Module, outputs: Any, heads: Sequence[Digest], *, reached: bool) -> _Observation:
    named = [(name, tensor) for name, tensor in output_tensors(outputs) if tensor.is_floating_point()]
    values = {name: digest_of(tensor, signed=True) for name, tensor in named}
    values |= {f"buffer {name}": digest_of(buffer, signed=True) for name, buffer in model.named_buffers()}
    return _Observation(
        values, list(heads), parameters_reached(model, [tensor for _, tensor in named]) if reached else None
    )


def _of_rows(rows: Tensor) -> Digest:
    """Digest a head's input as its product takes it, under autocast."""
    kind = rows.device.type
    if rows.dtype == torch.float32 and torch.is_autocast_enabled(kind):
        rows = rows.to(torch.get_autocast_dtype(kind))
    return digest_of(rows.flatten(0, -2), signed=True)


# The comparison (Rule 2)


@dataclasses.dataclass(frozen=True)
class _ForwardComparison:
    """The expected results of the forward without the plan, a way to run it again, and the tolerance."""

    expected: _Observation
    run_again: Callable[[], _Observation]
    near: float

    def require(self, found: _Observation, *, may_round: bool) -> None:
        """Raise FirstStepMismatch if `found` differs."""
        allowed = dict.fromkeys(found.values, self.near if may_round else 0.0)
        differ = self._different(found, allowed, self.near if may_round else 0.0)
        if differ and not may_round:
            noise = self._noise()
            if noise is None:
                _cannot(f"{differ[0]}, and there is no memory to see whether the model repeats itself any better")
                return
            differ = self._different(found, {name: NOISE * noise.get(name, 0.0) for name in allowed}, 0.0)
        if not differ:
            return
        raise FirstStepMismatch(
            f"the first forward under the plan is not that of the model: {first_few(sorted(differ), between='; ')}. "
            f"The plan does not announce that, and training would go on with wrong numbers. {REMEDY}"
        )

    def _different(self, found: _Observation, allowed: Mapping[str, float], of_heads: float) -> list[str]:
        """List in words the results that differ from those expected."""
        said = [
            f"{name} is {found.values[name]}, and without the plan {value}"
            for name, value in self.expected.values.items()
            if name in found.values and not value.is_near(found.values[name], allowed[name])
        ]
        if len(self.expected.heads) == len(found.heads):
            said += [
                f"the head of the loss is given {other}, and without the plan {one}"
                for one, other in zip(self.expected.heads, found.heads, strict=True)
                if one.shape == other.shape and not one.is_near(other, of_heads)
            ]
        if self.expected.reached is not None and found.reached is not None:
            gone, new = self.expected.reached - found.reached, found.reached - self.expected.reached
            said += [f"no gradient reaches {first_few(sorted(gone))}, and without the plan one does"] if gone else []
            said += [f"a gradient reaches {first_few(sorted(new))}, and without the plan none does"] if new else []
        return said

    def _noise(self) -> dict[str, float] | None:
        """Return the differences of the model from itself, by name; None if there is no memory to measure them."""
        try:
            again = self.run_again()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None
        both = self.expected.values.keys() & again.values.keys()
        return {name: self.expected.values[name].apart(again.values[name]) for name in both}


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(part.nbytes for tensor in tensors for part in strided_parts(tensor))


def _are_narrow(model: nn.Module) -> bool:
    return any(p.is_floating_point() and p.element_size() < 4 for p in model.parameters())


def _without_frames(error: Exception) -> Exception:
    """Let go of what the frames of `error` hold: values of a forward that has failed."""
    each: BaseException | None = error
    while each is not None:
        each.__traceback__, each = None, each.__cause__ or each.__context__
    return error


def _said_of(error: Exception) -> str:
    if is_out_of_memory(error):
        return "runs out of memory"
    return f"fails by itself ({type(error).__name__}: {(str(error).splitlines() or [''])[0]})"


def _cannot(why: str) -> None:
    warn(
        f"the first step under the plan is not verified: {why}. `remat.validate` compares the plan with the model.",
    )
