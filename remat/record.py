"""Record: run a workload's step on fake tensors once, and write down the Graph.

The step runs exactly as it would in training (Dynamo's guards, autograd's engine, the real optimizer class), but no
tensor has data. Forward and backward are recorded in one pass: a saved-tensors hook gives autograd a private copy
of everything that it saves, so that the life of a storage without autograd and every single save can be told
apart, and a region's behaviour follows from the record.

A step is recorded in its steady state: the optimizer's state exists, and with gradient accumulation so do the
gradients. That is the larger of the two cases. Of the first step, the part that differs is noted: the optimizer making
its state.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import platform
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils._pytree import tree_leaves, tree_map

from remat.anchors import identity_of, module_path, module_paths, updates_statistics
from remat.answers import Answers
from remat.attention_masks import OnesSeen, eager_attention_masks
from remat.capture import GraphCalls, fake_model, without_cache
from remat.circumstances import given_to, state_of, versions
from remat.errors import CaptureError, RematError
from remat.graph import (
    CALLED_MODULES,
    CAST,
    IDENTITY,
    OPTIMIZER_STATE,
    OUTSIDE,
    Graph,
    Node,
    Packs,
    Parameter,
    Storages,
)
from remat.grouped_products import grouped_products
from remat.holding import Held
from remat.identity import NodeId
from remat.loop import Loop
from remat.optimizer_forms import forms_of
from remat.rewrite import as_function, bracket_of, called, captured_nodes, replace_target
from remat.schemas import draws_random_numbers
from remat.settling import recording_models, settle
from remat.tracker import FIXED, Tracker
from remat.view_histories import ViewHistories
from remat.workload import Workload, trainable

NUMBER_BYTES = 16  # eight in forward, eight more while it is recomputed
LARGEST_NORM = 1.0  # of gradients that are clipped; any number takes the same memory
EMA_DECAY = 0.999  # likewise


class Finish:
    """What a training step does after backward: clipping, the optimizer, the running average, letting gradients go.

    averages  the running average's tensors, parameters first; none before the first step
    """

    def __init__(self, loop: Loop, model: nn.Module, optimizer: torch.optim.Optimizer | None):
        self.loop, self.model, self.optimizer = loop, model, optimizer
        self.averages: list[torch.Tensor] = []

    def __call__(self) -> None:
        if self.loop.clip_grad_norm:
            nn.utils.clip_grad_norm_(trainable(self.model), LARGEST_NORM)
        if self.optimizer is not None:
            self.optimizer.step()
        if self.loop.ema:
            self._update_averages()
        if not self.loop.accumulates:
            self.model.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _update_averages(self) -> None:
        current = [p.detach() for p in self.model.parameters()]
        if not self.averages:
            self.averages = [tensor.clone() for tensor in (*current, *self.model.buffers())]
        get_ema_multi_avg_fn(EMA_DECAY)(self.averages[: len(current)], current, 1)


class _NotedCalls(GraphCalls):
    """Also notes what the forward is given, see `circumstances.given_to`."""

    given: dict[str, str]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.given = given_to(self.function, args, kwargs)
        return super().__call__(*args, **kwargs)


class FakeStep:
    """A workload's training step on fake tensors: captured once, run as often as needed.

    device     the device that tensors pretend to be on
    loop       what training does around forward and backward; its shards are not run, see `sharding.py`. It may be
               changed between records
    prepare    changes a captured graph before its first run (the target's kernels)
    recompute_context  what forward and recomputations run under where kernels are substituted: the emulated cache
               of weight casts
    kernels_of  the type of the device whose kernels run, where that is not the type of `device`
    eager_context  what the model's own, untraced forward runs under, for the same kernels as `prepare` gives
    compiled       whether training will compile the step: code that asks whether it is being traced then hears so
    """

    def __init__(
        self,
        workload: Workload,
        *,
        device: torch.device,
        loop: Loop | None = None,
        prepare: Callable[[fx.GraphModule], None] | None = None,
        recompute_context: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
        kernels_of: str | None = None,
        eager_context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        compiled: bool = False,
    ):
        self.workload = workload
        self.device = device
        self.mode = FakeTensorMode()
        self.loop = loop or Loop()
        self._prepare = prepare
        self._prepared: dict[int, fx.GraphModule] = {}
        self._recompute_context = recompute_context
        self._views = ViewHistories()
        self.eager_context = eager_context
        self.model = fake_model(workload.build, self.mode, device)
        with self.mode, torch.device(device), (seen := OnesSeen()):
            self.batch = workload.batch(workload.batch_size, workload.seq_len)
        self.run_call: Any = _run_plainly
        self._forward = self.model.forward
        self._ones = seen
        self._settled = compiled
        self.capture_anew(None if compiled else Answers())
        self._kernels_of = kernels_of or device.type
        self.finish = Finish(self.loop, self.model, self._make_optimizer())
        self.held = Held()

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        return self.finish.optimizer

    def capture_anew(self, answers: Answers | None) -> None:
        """Forget what was captured, and capture with `answers` from now on."""
        self.calls = _NotedCalls(self._forward, self._run_call, answers=answers, is_ones=self._ones.hold)
        self.model.forward = self._traced_forward

    def _settle(self) -> None:
        if not self._settled:
            with self.mode, grouped_products():
                settle(self)
        self._settled = True

    def _make_optimizer(self) -> torch.optim.Optimizer | None:
        if self.workload.optimizer is None:
            return None
        with self.mode, Tracker() as tracker, self._after_backward(tracker):
            return self.workload.optimizer(trainable(self.model))

    @contextlib.contextmanager
    def _after_backward(self, tracker: Tracker) -> Iterator[None]:
        """What optimizers are made and stepped under: their questions are answered, their form is the device's."""
        with tracker.answering(), forms_of(self._kernels_of, self.device.type):
            yield

    def _run_call(self, call: int, graph_module: fx.GraphModule, args: tuple[Any, ...]) -> Any:
        if id(graph_module) not in self._prepared:
            identity_of(graph_module)  # before kernels are put in
            if self._prepare is not None:
                self._prepare(graph_module)
            self._prepared[id(graph_module)] = graph_module
        substituted = self._recompute_context is not None  # such kernels cast by themselves
        autocast = torch.autocast(self.device.type, enabled=False) if substituted else contextlib.nullcontext()
        with autocast, self._views:
            return tree_map(self._views.renewed, self.run_call(call, graph_module, args))

    @contextlib.contextmanager
    def recompute_context(self) -> Iterator[None]:
        """What recomputations run under."""
        with (self._recompute_context or contextlib.nullcontext)(), self._views:
            yield

    @contextlib.contextmanager
    def _forward_context(self) -> Iterator[None]:
        """Autocast, which models may ask about while they are traced, and the emulated cache of casts."""
        with (
            autocast_context(self.device, self.workload.autocast),
            (self._recompute_context or contextlib.nullcontext)(),
        ):
            yield

    def forward(self) -> torch.Tensor:
        """The loss of one forward; raises CaptureError if `step` fails or returns something else."""
        try:
            with self._forward_context(), self._holding():
                loss = self.workload.step(self.model, self.batch)
        except RematError:
            raise
        except DataDependentOutputException as error:
            raise CaptureError(
                f"the step of {self.workload.name!r} reads a number off a tensor (`item()`, `float()`, `if tensor`)"
                f"{_line_of(error)}, and no tensor has data while planning; compute it without, or leave it out."
            ) from error
        except Exception as error:
            raise CaptureError(
                f"the step of {self.workload.name!r} fails on fake tensors: {describe(error)}"
            ) from error
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise CaptureError(f"`step` of {self.workload.name!r} must return a scalar loss that requires grad.")
        return loss

    def _holding(self) -> contextlib.AbstractContextManager[None]:
        return self.held.catching(self.model) if self.loop.holds_outputs else contextlib.nullcontext()

    def _traced_forward(self, *args: Any, **kwargs: Any) -> Any:
        with without_cache(self.model):
            return self.calls(*args, **kwargs)

    def eager_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, untraced."""
        masks = self.calls.look(args, kwargs)
        with self.eager_context(), self._views, eager_attention_masks(masks), without_cache(self.model):
            return self._forward(*args, **kwargs)

    def warm_up(self, alignment_bytes: int = 1) -> tuple[int, Tracker]:
        """Capture, and bring the optimizer and the gradients to their steady state.

        Returns the most bytes alive after the first backward, above those that were there before it, and the tracker of
        the first step. What the forward made is not counted: nothing of it is left but what Dynamo notes in its graphs,
        and what the loop holds.
        """
        self._settle()
        self.held.let_go()
        self.model.zero_grad(set_to_none=True)
        self.finish = Finish(self.loop, self.model, self._make_optimizer())
        with self.mode, grouped_products(), Tracker(alignment_bytes) as tracker:
            loss = self.forward()
            forward_end = tracker.op_count
            loss.backward()
            del loss
            backward_end = tracker.op_count
            with self._after_backward(tracker):
                self.finish()
        return int(tracker.alive(since=forward_end)[backward_end:].max(initial=0)), tracker

    def run(self, tracker: Tracker, after_forward: Callable[[], None], after_backward: Callable[[], None]) -> None:
        """One whole step under `tracker`: forward, backward, optimizer."""
        with self.mode, grouped_products(), tracker:
            loss = self.forward()
            after_forward()
            loss.backward()
            after_backward()
            del loss
            with self._after_backward(tracker):
                self.finish()

    def fix_state(self, tracker: Tracker) -> dict[str, int]:
        """Tell `tracker` what exists before the step; returns its bytes by category."""
        parameters = list(self.model.parameters())
        fixed = {
            "parameters": tracker.fix(parameters),
            "buffers": tracker.fix(list(self.model.buffers())),
            "batch": tracker.fix(self.batch),
            "gradients": tracker.fix([p.grad for p in parameters if p.grad is not None]),
            OPTIMIZER_STATE: tracker.fix(dict(self.optimizer.state)) if self.optimizer else 0,
            "running average": tracker.fix(self.finish.averages),
            "gradient buckets": sum(map(tracker.bytes_of, trainable(self.model))) if self.loop.ddp else 0,
        }
        return {name: size for name, size in fixed.items() if size}

    def parameters(self, tracker: Tracker) -> Iterator[Parameter]:
        """The parameters and what the optimizer keeps for each; of their gradients only the size."""
        for name, p in self.model.named_parameters():
            state = self.optimizer.state.get(p, {}) if self.optimizer else {}
            kept = [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
            size, sizes = tracker.bytes_of(p), tuple(map(tracker.bytes_of, kept))
            yield Parameter(name, size, size if p.requires_grad else 0, sum(sizes), state_tensors=sizes)


def _line_of(error: BaseException) -> str:
    """The last line of the traceback that is neither torch's nor ours, as ` at file:line`."""
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(("<", *ours))]
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def describe(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def autocast_context(device: torch.device, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(device.type, dtype) if dtype else contextlib.nullcontext()


def _run_plainly(call: int, graph_module: fx.GraphModule, args: tuple[Any, ...]) -> Any:
    return graph_module(*args)


def record(step: FakeStep, *, alignment_bytes: int = 1) -> Graph:
    """The Graph of `step`. Raises `CaptureError` for a model that cannot be captured, naming the operator."""
    first_step_rise, first = step.warm_up(alignment_bytes)
    recorder = _Recorder(alignment_bytes, step.model.buffers())
    fixed = step.fix_state(recorder)
    made = ("gradients", OPTIMIZER_STATE, "running average")  # by the first step itself
    before = sum(size for name, size in fixed.items() if name not in made)
    step.run_call = recorder.run_call
    held: list[tuple[int, int]] = []

    def note(replace: Callable[[], None]) -> None:
        before_bytes = first.alive_now
        replace()
        held.append((before_bytes - first.alive_now, recorder.op_count))

    step.held.replacing = note
    with torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack):
        step.run(recorder, recorder.after_forward, lambda: recorder.after_backward(step.model))
    step.run_call, step.held.replacing = _run_plainly, None
    if recorder.numbers and step.device.type == "cpu" and alignment_bytes == 1:  # elsewhere they are not on the device
        fixed["numbers"] = NUMBER_BYTES * recorder.numbers
    paths = {path for path, _ in step.model.named_modules()}  # others, kept in a list say, have no path to be found by
    graph = recorder.graph(
        fixed, {**_about(step), CALLED_MODULES: [path for path in recorder.modules if path in paths]}
    )
    return dataclasses.replace(
        graph,
        parameters=tuple(recorder.parameters_of(step)),
        first_step_bytes=before + first_step_rise + sum(size for size, _ in held),
        held=tuple(held),
    )


def _about(step: FakeStep) -> dict[str, Any]:
    workload = step.workload
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in step.model.parameters()})
    return {
        "workload": workload.name,
        "batch_size": workload.batch_size,
        "seq_len": workload.seq_len,
        "batch_elements": sum(step.calls.elements.values()),
        "batch_inputs": step.calls.elements,
        "masks": dataclasses.asdict(step.calls.masks),
        "autocast": str(workload.autocast).removeprefix("torch.") if workload.autocast else None,
        "parameter_dtypes": dtypes,
        "parameter_count": sum(p.numel() for p in step.model.parameters()),
        "trainable_count": sum(p.numel() for p in trainable(step.model)),
        "optimizer": type(step.optimizer).__name__ if step.optimizer else None,
        "traced_branches": None if (answers := step.calls.answers) is None else answers.given_up,
        "recording_models": recording_models(step.model),
        **step.loop.to_json(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "versions": versions(),
        "batch": step.calls.given,
        **state_of(step.model),
    }


class _Recorder(Tracker):
    """Attributes operators and saves to nodes while a step runs."""

    def __init__(self, alignment_bytes: int, buffers: Iterable[torch.Tensor]):
        super().__init__(alignment_bytes)
        self._buffers = {id(buffer.untyped_storage()) for buffer in buffers}
        self._nodes: list[dict[str, Any]] = []
        self.index: dict[tuple[int, str], int] = {}  # (call, name in its graph) -> node
        self._current: int | None = None
        self._op_nodes: list[int] = []
        self._storage_nodes: list[int] = []
        self._sequence: list[int] = []  # autograd sequence number at the start of each node
        self._packs: list[dict[str, int]] = []
        self._sequence_after = 0
        self._open = 0
        self._readers: dict[int, set[int]] = {}  # id of a fixed storage -> nodes of forward that take it
        self._writers: dict[int, set[int]] = {}  # ... that change it
        self.numbers = 0
        self.modules: dict[str, None] = {}  # paths of those that are called, in order
        self._forward_end = self._backward_end = -1
        self._gradients: tuple[int, ...] = ()
        self._gradient_of: dict[str, int] = {}

    # Nodes

    def run_call(self, call: int, graph_module: fx.GraphModule, args: tuple[Any, ...]) -> Any:
        self.modules.update((path, None) for node in captured_nodes(graph_module) for path in module_paths(node))
        return _instrumented(graph_module, self, call)(*args)

    def begin(
        self,
        call: int,
        name: str,
        op: str = "outside",
        module: str = "",
        effect: str = "other",
        wired: set[int] = frozenset(),  # type: ignore[assignment]
        given: set[int | None] = frozenset(),  # type: ignore[assignment]
        known: NodeId | None = None,
    ) -> None:
        """A node starts; `wired` are the nodes of its graph that it takes values of, `given` those of others.

        None in `given` stands for a tensor that was there before the step.
        """
        self._current = len(self._nodes)
        self.index[call, name] = self._current
        self._sequence.append(torch._C._autograd._get_sequence_nr())
        self._nodes.append(
            {
                "name": name,
                "op": op,
                "module": module,
                "call": call,
                "inputs": tuple(sorted(wired.union(i for i in given if i is not None))),
                "values": (),
                "first": self.op_count,
                "end": self.op_count,
                "random": False,
                "effect": effect,
                "mutates": (),
                "crossable": True,
                "bracketed": False,
                "wired": tuple(sorted(wired)),
                "takes_fixed": None in given,
                "reused": (),
                "reused_at": (),
                **({name: getattr(known, name) for name in IDENTITY} if known else {}),
            }
        )

    def finish(self, value: Any, bracket: int) -> None:
        assert self._current is not None
        node = self._nodes[self._current]
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        storages = {self.storage_of(tensor) for tensor in tensors} - {FIXED}
        self._open += bracket
        node["values"] = tuple(sorted(storages))
        node["end"] = self.op_count
        node["crossable"] = isinstance(value, torch.Tensor)
        node["bracketed"] = self._open > 0
        self._sequence_after = torch._C._autograd._get_sequence_nr()
        self._current = None

    def producer(self, tensor: Any) -> int | None:
        """The node that made the storage of `tensor`, None if it was there before the step."""
        storage = self.storage_of(tensor) if isinstance(tensor, torch.Tensor) else FIXED
        return None if storage == FIXED else self._storage_nodes[storage]

    def take(self, tensor: torch.Tensor) -> int | None:
        """`producer`, for a node that is handed `tensor`: so is known which values came from between two graphs."""
        producer = self.producer(tensor)
        if producer is not None and (node := self._nodes[producer])["call"] == OUTSIDE:
            node["values"] = tuple(sorted({*node["values"], self.storage_of(tensor)}))
        return producer

    # Operators

    def dispatched(self, op: int, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        in_forward = self._forward_end < 0
        if in_forward and self._current is None:
            self._begin_outside(op)
        node = self._nodes_now(in_forward)
        self._op_nodes.append(node)
        self._storage_nodes += [node if in_forward else -1] * (len(self.storages) - len(self._storage_nodes))
        if in_forward:
            self._count_numbers(func, args)
            self._note_effects(node, func, args, kwargs)
            self._note_reused(op, node, args, kwargs)
            self._nodes[node]["end"] = self.op_count

    def _count_numbers(self, func: Any, args: Any) -> None:
        """Count Python numbers given where a tensor is meant: autograd keeps each as a tensor that no hook sees."""
        for value, argument in zip(args, func._schema.arguments, strict=False):
            if isinstance(value, (int, float)) and str(argument.type) == "Tensor":
                self.numbers += 1

    def _begin_outside(self, first: int) -> None:
        """Let what runs between graph calls from operator `first` on be a node of its own."""
        last = len(self._nodes) - 1
        if last < 0 or self._nodes[last]["call"] != OUTSIDE:
            self.begin(OUTSIDE, f"outside_{len(self._nodes)}")
            # Autograd has numbered the first operator already: the node begins where the one before ended.
            self._nodes[-1]["first"], self._sequence[-1] = first, self._sequence_after
            self._current = None

    def _nodes_now(self, in_forward: bool) -> int:
        if in_forward:
            return len(self._nodes) - 1 if self._current is None else self._current
        autograd_node = torch._C._current_autograd_node()
        if autograd_node is None or self._backward_end >= 0:
            return -1
        number = autograd_node._sequence_nr()
        if number >= self._sequence_end:  # gradient accumulation belongs to whoever ran before
            return self._op_nodes[-1] if self.op_count - 1 > self._forward_end else len(self._nodes) - 1
        return max(bisect.bisect_right(self._sequence, number) - 1, 0)

    def _note_reused(self, op: int, node: int, args: Any, kwargs: Any) -> None:
        """Note casts that an older node made, and that are no value that this one is given.

        Autocast would make them before the casts that it makes for the same operator.
        """
        record = self._nodes[node]
        taken = {self.storage_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        older = {u for u in taken - {FIXED} if self.storages[u].cast and self._storage_nodes[u] < node}
        if not older:
            return
        given = {u for source in record["inputs"] for u in self._nodes[source]["values"]}
        new = sorted(older - given - {*record["reused"]})
        if not new:
            return
        kinds = list(self.kinds.values())
        while op > record["first"] and kinds[self.op_kinds[op - 1]].name == CAST:
            op -= 1
        record["reused"] += tuple(new)
        record["reused_at"] += (op,) * len(new)

    def _note_effects(self, node: int, func: Any, args: Any, kwargs: Any) -> None:
        record = self._nodes[node]
        if draws_random_numbers(func, args, kwargs):
            record["random"] = True
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and self.storage_of(tensor) == FIXED:
                self._readers.setdefault(id(tensor.untyped_storage()), set()).add(node)
        if not func._schema.is_mutable:
            return
        if record["effect"] == "" and any(returned.alias_info is None for returned in func._schema.returns):
            record["effect"] = "other"  # it writes beside its result, which neither early stop nor saving provides for
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for tensor in tree_leaves(value):
                if isinstance(tensor, torch.Tensor):
                    self._note_write(record, node, tensor)

    def _note_write(self, record: dict[str, Any], node: int, tensor: torch.Tensor) -> None:
        producer = self.producer(tensor)
        if producer is None:
            self._writers.setdefault(id(tensor.untyped_storage()), set()).add(node)
            if record["effect"] == "":
                record["effect"] = "other" if tensor.is_floating_point() else "counter"
        elif producer < node:
            record["mutates"] = (*record["mutates"], producer)

    def _settle_effects(self) -> None:
        """Whoever reads what another node changes would read something else when recomputed: it stays plain.

        A counter that somebody reads is none.
        """
        for storage, writers in self._writers.items():
            readers = self._readers.get(storage, set()) | writers
            if readers == writers and all(self._nodes[node]["effect"] == "counter" for node in readers):
                continue
            for node in readers:
                self._nodes[node]["effect"] = "other"

    # What autograd saves

    @torch._disable_dynamo
    def pack(self, tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Give autograd a private copy, so that the life of the copy is the life of this save."""
        if self._current is None:
            self._begin_outside(self.op_count)
        node = len(self._nodes) - 1 if self._current is None else self._current
        is_state = self._nodes[node]["effect"] == "batch_norm" and id(tensor.untyped_storage()) in self._buffers
        row = {
            "node": node,
            "storage": self.storage_of(tensor),
            "copy_bytes": self._rounded(tensor.untyped_storage().nbytes()) if is_state else 0,
            "at": self.op_count,
            "unpack": -1,
            "used": -1,
            "release": -1,
        }
        self._packs.append(row)
        return len(self._packs) - 1, self._copy(tensor, row, "release")

    @torch._disable_dynamo
    def unpack(self, packed: tuple[int, torch.Tensor]) -> torch.Tensor:
        index, copy = packed
        row = self._packs[index]
        if row["unpack"] < 0:
            row["unpack"] = self.op_count
        return self._copy(copy, row, "used")

    def _copy(self, tensor: torch.Tensor, row: dict[str, int], event: str) -> torch.Tensor:
        """A private copy whose end of life is written to `row[event]`."""
        self.paused = True
        with torch.no_grad():
            copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        self.paused = False
        storage = copy.untyped_storage()
        self._ids[id(storage)] = FIXED
        weakref.finalize(storage, self._ended, row, event, id(storage)).atexit = False
        return copy

    def _ended(self, row: dict[str, int], event: str, key: int) -> None:
        row[event] = self.op_count - 1
        self._ids.pop(key, None)

    # Phases

    def after_forward(self) -> None:
        self._forward_end = self.op_count
        self._sequence_end = torch._C._autograd._get_sequence_nr()

    def after_backward(self, model: nn.Module) -> None:
        self._backward_end = self.op_count
        self._gradient_of = {
            name: self.storage_of(p.grad) for name, p in model.named_parameters() if p.grad is not None
        }
        self._gradients = tuple(sorted(set(self._gradient_of.values()) - {FIXED}))

    def parameters_of(self, step: FakeStep) -> Iterator[Parameter]:
        """The parameters, with the storages that their gradients had when backward ended."""
        for known in step.parameters(self):
            gradient = self._gradient_of.get(known.name, FIXED)
            yield dataclasses.replace(known, gradient=gradient)

    def graph(self, fixed: dict[str, int], about: dict[str, Any]) -> Graph:
        last = self.op_count - 1
        self._settle_effects()
        nodes = tuple(Node(**node) for node in self._nodes)
        storages = Storages(
            size_bytes=_column(s.size_bytes for s in self.storages),
            birth=_column(s.birth for s in self.storages),
            death=_column(last if s.death is None else s.death for s in self.storages),
            node=_column(self._storage_nodes),
            cast=_column(int(s.cast) for s in self.storages),
        )
        packs = Packs(
            **{
                name: _column(last if name == "release" and row[name] < 0 else row[name] for row in self._packs)
                for name in ("node", "storage", "copy_bytes", "at", "unpack", "used", "release")
            }
        )
        return Graph(
            nodes=nodes,
            kinds=tuple(self.kinds.values()),
            op_kind=_column(self.op_kinds),
            op_node=_column(self._op_nodes),
            storages=storages,
            packs=packs,
            forward_end=self._forward_end,
            backward_end=self._backward_end,
            fixed_bytes=fixed,
            parameter_gradients=self._gradients,
            about=about,
        )


def _column(values: Any) -> np.ndarray:
    return np.array(list(values), dtype=np.int64)


def _instrumented(graph_module: fx.GraphModule, recorder: _Recorder, call: int) -> fx.GraphModule:
    """A copy of `graph_module` that tells `recorder` where each node begins and ends.

    Only targets change, so that the generated code lets go of its values where the original does.
    """
    graph = fx.Graph()
    environment: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(graph_module.graph, environment))
    for node in captured_nodes(graph_module):
        copy = environment[node]
        replace_target(copy, _recorded(node, as_function(copy), recorder, call))
    return fx.GraphModule(graph_module, graph)


def _recorded(node: fx.Node, function: Callable[..., Any], recorder: _Recorder, call: int) -> Callable[..., Any]:
    effect = "batch_norm" if updates_statistics(node) else ""
    bracket, text, module, known = bracket_of(node), called(node), module_path(node), node.meta["identity"]
    names = [argument.name for argument in node.all_input_nodes if argument.op not in ("placeholder", "get_attr")]
    wiring = tree_leaves((node.args, node.kwargs))

    def recorded(*args: Any, **kwargs: Any) -> Any:
        wired = {recorder.index[call, name] for name in names}
        given = {
            recorder.take(value)  # from an earlier graph call, or nobody
            for argument, value in zip(wiring, tree_leaves((args, kwargs)), strict=False)
            if isinstance(argument, fx.Node) and argument.op == "placeholder" and isinstance(value, torch.Tensor)
        }
        recorder.begin(call, node.name, text, module, effect, wired, given, known)
        try:
            value = function(*args, **kwargs)
        except RematError:
            raise
        except Exception as error:
            raise CaptureError(
                f"operator {text} (node {node.name!r}, module {module or 'the model'!r}) "
                f"cannot run on fake tensors: {describe(error)}"
            ) from error
        recorder.finish(value, bracket)
        return value

    return recorded
