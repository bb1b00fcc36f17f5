"""Kernels that Inductor generates with arguments and with as little code as can be, to see what it allocates.

The body of a Triton kernel decides nothing about memory but which buffers it reads and writes, and those are read off
its nodes. Lowering a graph takes a quarter less time without them. A loop in C++ is generated without vectors, which
saves a third.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import sympy
import torch

from remat._torch.door import internal

_PURPOSE = "predict what Inductor allocates"


@contextlib.contextmanager
def kernels_without_bodies() -> Iterator[None]:
    """Let Inductor leave code out where kernels ask for no workspace and draw no random numbers."""
    scheduling = internal("_inductor.codegen.simd.SIMDScheduling", _PURPOSE)
    generate = scheduling.codegen_node_schedule_with_kernel

    def generate_less(self: Any, schedule: Sequence[Any], kernel: Any) -> None:
        if _needs_body(schedule, kernel):
            generate(self, schedule, kernel)
        else:
            _note_arguments(schedule, kernel)

    with mock.patch.object(scheduling, "codegen_node_schedule_with_kernel", generate_less), _scalar_loops():
        yield


@contextlib.contextmanager
def _scalar_loops() -> Iterator[None]:
    """Let Inductor leave out the vectors of C++ loops: the scalar loop, which it generates first, has all arguments.

    Loops that may share an outer loop, and buffers within it, are compared by their vectors too, and stay as they are.
    """
    cpp = internal("_inductor.codegen.cpp", _PURPOSE)
    usage = internal("_inductor.loop_body.MemoryUsageType", _PURPOSE)
    generate, make = cpp.CppScheduling.codegen_node, cpp.CppKernelProxy.__init__

    def make_scalar(self: Any, *given: Any) -> None:
        make(self, *given)
        self.picked_vec_isa = None

    def generate_less(self: Any, node: Any) -> None:
        draws = any(each._body.memory_usage[usage.LOAD_SEED] for each in node.get_nodes() if hasattr(each, "_body"))
        if draws or isinstance(node, cpp.OuterLoopFusedSchedulerNode):
            return generate(self, node)
        with mock.patch.object(cpp.CppKernelProxy, "__init__", make_scalar):
            return generate(self, node)

    with mock.patch.object(cpp.CppScheduling, "codegen_node", generate_less):
        yield


def _needs_body(schedule: Sequence[Any], kernel: Any) -> bool:
    if type(kernel) is not internal("_inductor.codegen.triton.TritonKernel", _PURPOSE):
        return True
    config = internal("_inductor.config", _PURPOSE)
    if config.combo_kernels or config.benchmark_fusion or config.triton.multi_kernel:
        return True  # several kernels are made of one schedule, or timed
    if kernel.cooperative_reduction or getattr(kernel, "mix_order_reduction", False):
        return True  # they ask for a workspace
    usage = internal("_inductor.loop_body.MemoryUsageType", _PURPOSE)
    graph = internal("_inductor.virtualized.V", _PURPOSE).graph
    for body in filter(None, (getattr(node, "_body", None) for node in schedule)):
        used = body.memory_usage
        if used[usage.LOAD_SEED] or used[usage.BUCKETIZE]:
            return True
        if any(graph.get_dtype(entry.buffer_name).itemsize < 4 for entry in used[usage.STORE_REDUCTION]):
            return True  # it is rounded after the loop, so that later loops read it from memory
    return False


def _note_arguments(schedule: Sequence[Any], kernel: Any) -> None:
    """Note in `kernel` the buffers that its nodes read and write, in their order, as generating a body does."""
    usage = internal("_inductor.loop_body.MemoryUsageType", _PURPOSE)
    marks = internal("_inductor.codegen.simd", _PURPOSE)
    operators = internal("_inductor.virtualized.V", _PURPOSE).get_ops_handler
    anywhere = sympy.Integer(0)

    def value() -> Any:
        return kernel.cse.newvar(dtype=torch.float32, shape=())

    def load(name: str, index: Any) -> Any:
        kernel.args.input(name)
        return value()

    def store(name: str, index: Any, stored: Any, mode: Any = None) -> None:
        kernel.args.output(name)

    def nodes() -> Iterator[Any]:
        with contextlib.ExitStack() as outside_of_loops:
            for node in schedule:
                if node is marks.DisableReduction:
                    outside_of_loops.enter_context(kernel.disable_reduction())
                elif node is marks.EnableReduction:
                    outside_of_loops.close()
                else:
                    yield node

    with kernel, mock.patch.multiple(kernel, load=load, store=store, store_reduction=store):
        for node in nodes():
            node.decide_inplace_update()
        for node in nodes():
            kernel.current_node, used = node, node._body.memory_usage
            kernel.compute.writeline("pass")  # so that there is a loop to end
            for read in used[usage.LOAD]:
                operators().load(read.buffer_name, anywhere)
            for kind in (usage.STORE_REDUCTION, usage.STORE):
                for written in used[kind]:
                    result = value()
                    if kind is usage.STORE_REDUCTION or not kernel.inside_reduction:
                        kernel.outside_loop_vars.add(result)
                    operators().store(written.buffer_name, anywhere, result, mode=written.mode)
        kernel.current_node = None
