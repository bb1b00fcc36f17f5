"""Peaks of a compiled forward and backward: both halves are lowered by Inductor, and what it generates runs on fakes.

So fusion, the order of kernels and the reuse of buffers are Inductor's own. Kernels are not compiled; those of
libraries may need bytes of their own, which are measured once each where the device is at hand.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from remat._torch.compiled_draws import draw_again, drawn_otherwise
from remat._torch.inductor import (
    all_aligned,
    compiled_backward,
    compiled_forward,
    counts_flops,
    keeps_code,
    random_operators_alone,
)
from remat._torch.symbols import DEPENDS_ON_DATA, hinted
from remat._torch.training import without_modes
from remat.costing.operator_timing import measured_workspaces
from remat.errors import UsageError
from remat.fusion.generated_code import without_kernels
from remat.recording.tracked_step import with_workspaces
from remat.recording.tracker import Tracker


@dataclasses.dataclass(frozen=True)
class Halves:
    """Bytes that a graph's forward and backward need beside its inputs.

    forward   the most while it runs     kept  as it has ended: results, and what is saved
    backward  the most while it runs, results of forward and gradients among it
    calls     the most from each call of a product, a convolution or attention in backward until the next, by the name
              of its node, in the order in which they run; "" before the first
    held      of results that the caller holds until the next forward returns
    ways      how forward draws random numbers, by seed
    redrawn   those of `ways` in which backward would draw in the other way; None where it cannot draw all alike
    agrees    whether backward draws all as forward does; False where the bytes did not fit, and the last of `redrawn`
              were not tried
    """

    forward: int
    kept: int
    backward: int
    calls: Mapping[str, int]
    held: int = 0
    ways: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    redrawn: Mapping[str, bool] | None = dataclasses.field(default_factory=dict)
    agrees: bool = True

    @property
    def peak(self) -> int:
        return max(self.forward, self.backward)


def halves(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    results: int,
    holds_results: bool = True,
    *,
    static: Sequence[int] = (),
    repeats_draws: bool = False,
    redraws: Collection[str] = (),
    may_fit: Callable[[Halves], bool] = lambda found: True,
    is_draft: bool = False,
) -> Halves:
    """Return the bytes that both halves of a joint graph need.

    A user sees the first `results` that forward gives.

    holds_results  whether the caller holds all of them until the next forward returns, or single numbers only
    static         positions of the inputs that stay where they are, such as parameters
    repeats_draws  whether `backward` is changed where it would draw random numbers in another way than forward
    redraws        seeds with which it would, in the code of similar halves; each one known saves a compilation
    may_fit        whether the bytes are such that the draws matter
    is_draft       whether the halves will hardly be handed out: their code is not kept

    Raises RematError where this torch's generated code is not known, and UsageError where bytes depend on data.
    """
    with without_kernels(keeps=keeps_code() and not is_draft) as loaded:
        first, strides = compiled_forward(forward, results, static)
        ways, redrawn = loaded.ways[0], dict[str, bool]()
        more: dict[str, bool] | None = {seed: ways[seed] for seed in ways.keys() & redraws}
        found = None
        while found is None or (more and may_fit(found)):
            draw_again(backward, more or {})
            redrawn |= more or {}
            second = compiled_backward(forward, backward, results, strides)
            found = _bytes_of(forward, backward, first, second, results, holds_results)
            more = drawn_otherwise(backward, ways, loaded.ways[-1]) if repeats_draws else {}
    otherwise = None if more is None else redrawn | more
    return dataclasses.replace(found, ways=ways, redrawn=otherwise, agrees=more == {})


def _bytes_of(
    forward: fx.GraphModule, backward: fx.GraphModule, first: Any, second: Any, results: int, holds_results: bool
) -> Halves:
    """Run the code of both halves, `first` and `second`, on fakes, and return the bytes that they need."""
    inputs = forward.graph.find_nodes(op="placeholder")
    mode, device = next((v.fake_mode, v.device) for v in map(_value, inputs) if isinstance(v, Tensor))  # type: ignore[attr-defined]
    tracker = Tracker()
    with mode, torch.no_grad(), all_aligned(), random_operators_alone(device):
        given = [_fresh(node) for node in inputs]
        tracker.fix(given)
        with tracker, _data_needed():
            made = first(list(given))
            ended, kept = tracker.op_count, tracker.alive_now
            by_name = dict(zip((node.name for node in inputs), given, strict=True))
            by_name |= dict(zip(_names(forward), made, strict=True))
            held = [each for each in made[:results] if holds_results or each is None or each.numel() == 1]
            tensors = [each for each in held if isinstance(each, Tensor) and each.numel() > 1]
            results_bytes = sum({tracker.storage_of(each): tracker.bytes_of(each) for each in tensors}.values())
            taken = backward.graph.find_nodes(op="placeholder")
            renamed = [name for name in _names(forward)[results:] if name not in {node.name for node in taken}]
            states = (node.name for node in taken if node.name.startswith("rng_state_output"))
            by_name |= {state: by_name[name] for state, name in zip(states, renamed, strict=False)}
            tangents = {node.name: _fresh(node) for node in taken if node.name not in by_name}  # autograd holds them
            saved = [(by_name | tangents)[node.name] for node in taken]
            del by_name, made
            gradients = second(saved)
    del held, tensors, tangents, gradients
    alive = with_workspaces(tracker, _workspaces(tracker, device))
    calls = by_call(tracker, alive, ended, backward.graph)
    first_peak, second_peak = (int(part.max(initial=0)) for part in (alive[:ended], alive[ended:]))
    return Halves(first_peak, kept, second_peak, calls, results_bytes)


@contextlib.contextmanager
def _data_needed() -> Iterator[None]:
    """Raise UsageError where code reads a number off a tensor, which has no data."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode) as error:
        raise UsageError(DEPENDS_ON_DATA) from error


def by_call(tracker: Tracker, alive: np.ndarray, begin: int, graph: fx.Graph) -> dict[str, int]:
    """Return the peak from each call to the next, by call name, from operator `begin` on.

    Inductor moves calls: a gradient that nothing waits for is made last. So a call is known by its operator and by the
    sizes of what it takes. One that is not known counts to the call before. The name "" stands for all before the first
    call.
    """
    kinds = list(tracker.kinds.values())
    waiting: dict[Any, deque[str]] = defaultdict(deque)
    for node in filter(counts_flops, graph.nodes):
        values = [arg.meta.get("val") for arg in node.args if isinstance(arg, fx.Node)]
        sizes = [[*map(hinted, value.shape)] for value in values if isinstance(value, Tensor)]
        waiting[_call(str(node.target.overloadpacket), sizes)].append(node.name)
    starts = {"": begin}
    for op in range(begin, len(alive)):
        kind = kinds[tracker.op_kinds[op]]
        if not kind.flops:
            continue
        sizes = [arg["tensor"][0] for arg in kind.signature[0] if isinstance(arg, dict) and "tensor" in arg]
        if names := waiting.get(_call(kind.name.rpartition(".")[0], sizes)):
            made = kinds[tracker.op_kinds[op - 1]].name if op > begin else ""
            starts[names.popleft()] = op - (kind.name.endswith(".out") and made.startswith("aten.empty"))  # its result
    ends = [*starts.values(), len(alive)][1:]
    return {name: int(alive[start:end].max(initial=0)) for (name, start), end in zip(starts.items(), ends, strict=True)}


def _call(operator: str, sizes: Sequence[Sequence[int]]) -> Any:
    """Return what a call is known by; a product is the same with a sum after it."""
    product = operator.replace("addmm", "mm").replace("baddbmm", "bmm")
    return product, *map(tuple, sizes[1:3] if product != operator else sizes[:2])


_MEASURED_WORKSPACES: dict[tuple[str, str], int] = {}


def _workspaces(tracker: Tracker, device: torch.device) -> dict[tuple[str, str], int]:
    """Measure the workspaces of the libraries' kernels that ran, where the device is at hand."""
    with without_modes():
        _MEASURED_WORKSPACES.update(measured_workspaces(tracker, _MEASURED_WORKSPACES, device))
    return _MEASURED_WORKSPACES


def _names(half: fx.GraphModule) -> list[str]:
    return [getattr(node, "name", "") for node in half.graph.find_nodes(op="output")[0].args[0]]


def _value(node: fx.Node) -> Any:
    return node.meta["val"]


def _fresh(node: fx.Node) -> Any:
    """Make a value like that of an input."""
    value = _value(node)
    if not isinstance(value, Tensor):
        return hinted(value)
    shape, stride = [hinted(n) for n in value.shape], [hinted(n) for n in value.stride()]
    return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
