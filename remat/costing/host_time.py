"""The host's time: how long Python and the dispatcher take to launch the kernels of a step.

A roofline prices what the device does. In eager mode the host names every kernel, and where kernels are short the
device waits for it: ResNet-18 on two images runs 88 kernels in 1.67 ms on an H100, which the device needs a fifth of.
A step takes the longer of the two, along the step: a kernel starts when it is launched and the one before has ended.

Measured: 19 us a kernel, of whole models of KernelBench (eager forward, torch 2.9, the host of an H100). Assumed: the
same in backward and in the optimizer, and 100 us for a region's own Python (`results/machinery_*`). A kernel that is
recomputed is launched again, so recomputation is not free in such a step: it takes its share of launches, not of time.
"""

from __future__ import annotations

import numpy as np

from remat.evaluation.graph import Graph
from remat.workload.target import Target

LAUNCH_US = 19.0
REGION_US = 100.0


def launches_us(graph: Graph, target: Target) -> np.ndarray:
    """The host's time for every operator of `graph`; zeros where the target is no CUDA device."""
    per_kind = [LAUNCH_US if kind.moved_bytes or kind.flops else 0.0 for kind in graph.kinds]
    times = np.array(per_kind, dtype=np.float64)[graph.op_kind]
    return times if target.device == "cuda" else np.zeros_like(times)


def along(device_us: np.ndarray, host_us: np.ndarray) -> float:
    """When the last of some kernels ends, each of which the device and the host need so long for."""
    launched = np.cumsum(host_us)
    after = np.cumsum(device_us[::-1])[::-1]  # from the start of a kernel to the end, if nothing waits
    return float((launched + after).max(initial=0.0))
