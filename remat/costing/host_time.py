"""The host's time: how long Python and the dispatcher take to launch the kernels of a step.

A roofline prices what the device does. In eager mode the host names every kernel, and where kernels are short the
device waits for it: ResNet-18 on two images runs 88 kernels in 1.67 ms on an H100, which the device needs a fifth of.
A step takes the longer of the two sums: what the host launches, or what the device runs.

Measured: 19 us a kernel, of whole models of KernelBench (eager forward, torch 2.9, the host of an H100). Assumed: the
same in backward and in the optimizer, and 100 us for a region's own Python (`results/machinery_*`). A kernel that is
recomputed is launched again, so recomputation is not free in such a step: it takes its share of launches, not of time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from remat.evaluation.evaluator import Memory
from remat.evaluation.graph import Graph
from remat.evaluation.plan import Region
from remat.workload.target import Target

LAUNCH_US = 19.0
REGION_US = 100.0


def launches_us(graph: Graph, target: Target) -> np.ndarray:
    """Return the host's launch time for every operator of `graph`; zeros off CUDA."""
    per_kind = [LAUNCH_US if kind.moved_bytes or kind.flops else 0.0 for kind in graph.kinds]
    times = np.array(per_kind, dtype=np.float64)[graph.op_kind]
    return times if target.device == "cuda" else np.zeros_like(times)


def host_time_us(memory: Memory, target: Target, regions: Sequence[Region] = (), micro_batches: int = 1) -> float:
    """Return the host's time for an optimizer step over `micro_batches`, each under `regions`; 0 off CUDA."""
    if target.device != "cuda":
        return 0.0
    graph, times = memory.graph, launches_us(memory.graph, target)
    again_us = memory.recompute_time_us(regions, times) + REGION_US * len(regions) if regions else 0.0
    once_us, rest_us = float(times[: graph.backward_end].sum()), float(times[graph.backward_end :].sum())
    return micro_batches * (once_us + again_us) + rest_us
