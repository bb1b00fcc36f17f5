"""Replay under aot_eager: what a plan needs when its forward is compiled, operator by operator, on fake tensors.

The counterpart of `replay.py` for compiled execution. The partitioner decides here too: it saves what backward needs of
a saved node and not all that the node allocates, recomputes cheap operators of plain stretches, and lets go of values
at other times. So the peak is another one, in general lower. What Inductor makes of the same two graphs (fused kernels,
buffers used twice) is not modelled.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import fx
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state

from remat.compiling import AOT_EAGER, Compiled, compile_graph
from remat.plans import PlacedRegion
from remat.record import FakeStep
from remat.replay import regions_by_call
from remat.tracker import Tracker

_STATE_BYTES = torch.get_rng_state().numel()


def replay_compiled(step: FakeStep, regions: Sequence[PlacedRegion], *, alignment_bytes: int = 1) -> np.ndarray:
    """Bytes alive at every operator of the step under `regions` and aot_eager, fixed bytes included.

    Kernels' workspaces are not counted. Raises UsageError for nested regions.
    """
    run_call, step.run_call = step.run_call, _Calls(regions)
    try:
        _run(step, _CompiledTracker(alignment_bytes))  # compiles
        tracker = _CompiledTracker(alignment_bytes)
        fixed = sum(step.fix_state(tracker).values())
        _run(step, tracker)
    finally:
        step.run_call = run_call
    return tracker.alive() + fixed


def _run(step: FakeStep, tracker: Tracker) -> None:
    step.run(tracker, lambda: None, lambda: None)


class _Calls:
    """Runs each graph call of a forward compiled; every graph is compiled once."""

    def __init__(self, regions: Sequence[PlacedRegion]):
        self._regions = regions_by_call(regions)
        self._compiled: dict[tuple[int, int], tuple[fx.GraphModule, Compiled]] = {}

    def __call__(self, call: int, graph_module: fx.GraphModule, args: tuple[Any, ...]) -> Any:
        key = (call, id(graph_module))
        if key not in self._compiled:
            compiled = compile_graph(copy.deepcopy(graph_module), args, self._regions.get(call, ()), AOT_EAGER)
            self._compiled[key] = (graph_module, compiled)
        return self._compiled[key][1](*args)


class _CompiledTracker(Tracker):
    """Knows the two operators by which a generator's state goes from forward to backward."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dispatch = super().__torch_dispatch__
        if func is run_and_save_rng_state:
            like = {"dtype": torch.uint8, "device": torch.device("cpu")}
            state = dispatch(torch.ops.aten.empty.memory_format, types, ([_STATE_BYTES],), like)
            return state, dispatch(args[0], types, args[1:], kwargs)
        if func is run_with_rng_state:
            return dispatch(args[1], types, args[2:], kwargs)
        return dispatch(func, types, args, kwargs)
