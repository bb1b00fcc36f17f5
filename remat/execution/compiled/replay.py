"""Replay of compiled steps: what a plan needs when its forward is compiled, operator by operator, on fake tensors.

The counterpart of `replay.py` for compiled execution. The partitioner decides here too: it saves what backward needs of
a saved node and not all that the node allocates, recomputes cheap operators of plain stretches, and lets go of values
at other times. So the peak is another one, in general lower. Under Inductor kernels are fused and buffers used twice
on top of that: its generated code runs, without kernels (`generated_code.py`).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from remat._torch.inductor import rng_state_operators
from remat.costing.operator_timing import measured_workspaces
from remat.evaluation.plan import RegionRef
from remat.execution.compiled.compiling import AOT_EAGER, INDUCTOR, Compiled, compile_graph
from remat.execution.eager.rewrite import CallRegion
from remat.execution.eager.rewritten_calls import regions_by_call
from remat.fusion.generated_code import Loaded, without_kernels
from remat.recording.fake_step import FakeStep
from remat.recording.tracked_step import track
from remat.recording.tracker import Tracker

_STATE_BYTES = torch.get_rng_state().numel()


def replay_compiled(
    step: FakeStep,
    regions: Sequence[RegionRef],
    *,
    compiler: str = AOT_EAGER,
    alignment_bytes: int = 1,
    workspace_of: Mapping[tuple[str, str], int] | None = None,
    device: torch.device | None = None,
) -> np.ndarray:
    """Replay the compiled step under `regions`, and return the bytes alive at every operator.

    compiler      "aot_eager" or "inductor"
    workspace_of  workspaces by operator and signature, see `Profile.workspace_of`
    device        where other operators' workspaces are measured; None does not count them. Kernels that Inductor
                  generates have none: their temporary memory is in buffers

    Raises UsageError for nested regions and other compilers, RematError if this torch's Inductor cannot be replayed.
    """
    compiling = without_kernels() if compiler == INDUCTOR else contextlib.nullcontext()
    with compiling as loaded:
        execute_call, step.execute_call = step.execute_call, _Calls(regions, compiler, loaded)
        try:
            _execute(step, _CompiledTracker(alignment_bytes))  # compiles
            tracked = track(step, _CompiledTracker(alignment_bytes))
        finally:
            step.execute_call = execute_call
    known = dict(workspace_of or {})
    if device is not None:
        known |= measured_workspaces(tracked.tracker, known, device)
    return tracked.alive(known)


def _execute(step: FakeStep, tracker: Tracker) -> None:
    step.execute(tracker, lambda: None, lambda: None)


class _Calls:
    """Runs each graph call of a forward compiled; every graph is compiled once."""

    def __init__(self, regions: Sequence[RegionRef], compiler: str, loaded: Loaded | None):
        self._regions = regions_by_call(regions)
        self._compiler, self._loaded = compiler, loaded
        self._compiled: dict[tuple[int, int], tuple[fx.GraphModule, Compiled]] = {}

    def __call__(self, call: int, graph_module: fx.GraphModule, args: tuple[Any, ...]) -> Any:
        key = (call, id(graph_module))
        if key not in self._compiled:
            self._compiled[key] = (graph_module, self._compile(graph_module, args, self._regions.get(call, ())))
        return self._compiled[key][1](*args)

    def _compile(
        self, graph_module: fx.GraphModule, args: tuple[Any, ...], regions: tuple[CallRegion, ...]
    ) -> Compiled:
        before = self._loaded.modules if self._loaded else 0
        compiled = compile_graph(copy.deepcopy(graph_module), args, regions, self._compiler)
        if self._loaded:
            self._loaded.require_more_than(before)
        return compiled


class _CompiledTracker(Tracker):
    """Knows the operators by which a generator's state goes from forward to backward."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dispatch = super().__torch_dispatch__
        run_and_save, run_with, run_with_own = rng_state_operators()
        if func is run_and_save:
            like = {"dtype": torch.uint8, "device": torch.device("cpu")}
            state = dispatch(torch.ops.aten.empty.memory_format, types, ([_STATE_BYTES],), like)
            return state, dispatch(args[0], types, args[1:], kwargs)
        if func is run_with:
            return dispatch(args[1], types, args[2:], kwargs)
        if func is run_with_own:
            given = {name: value for name, value in kwargs.items() if name != "rng_state"}
            return dispatch(args[0], types, args[1:], given)
        return dispatch(func, types, args, kwargs)
