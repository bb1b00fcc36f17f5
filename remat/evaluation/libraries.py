"""Libraries: which operators of a step ask cuBLAS, which keeps a workspace for every thread that does.

Forward runs in the caller's thread and backward in one of autograd's, with all that it recomputes.
"""

from __future__ import annotations

import numpy as np

from remat.evaluation.graph import Graph, OpKind

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "_scaled_mm", "_addmm_activation")


def multiplies(kind: OpKind) -> bool:
    """Return whether an operator calls cuBLAS for a product."""
    return kind.name.removeprefix("aten.").partition(".")[0] in _PRODUCTS


def products(graph: Graph) -> np.ndarray:
    """Mark the operators of the step that call cuBLAS for a product."""
    return np.array([multiplies(kind) for kind in graph.kinds], dtype=bool)[np.asarray(graph.op_kind)]


def threads_that_multiply(graph: Graph) -> int:
    """Return the number of threads of the step that keep a workspace: forward's, and backward's."""
    found = products(graph)
    phases = found[: graph.forward_end], found[graph.forward_end : graph.backward_end]
    return sum(bool(phase.any()) for phase in phases)
