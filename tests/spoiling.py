"""Plans that are deliberately spoilt: each trains wrongly, and says nothing of it by itself.

A spoiler patches the executor, for one thing that could be wrong with it or with a plan. `SPOILT` has them by name,
with a workload and the regions that they spoil.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from remat.chunking.chunked_loss import ChunkedLoss
from remat.execution.eager import region_tape, rewrite, rewritten_calls
from remat.execution.modules import regions
from remat.workload.workload import Workload
from tests.toys import CONVNET, SHORT, TRANSFORMER, TRANSFORMER_BF16

Patch = pytest.MonkeyPatch
Spoiler = Callable[[Patch], None]


@dataclasses.dataclass(frozen=True)
class Spoilt:
    """choose  of `toys.CHOICES`, "modules", or "slices"; `spoil` patches what runs it"""

    workload: Workload
    choose: str
    spoil: Spoiler


# What the graph of a plan computes


def _in_graph(change: Callable[[fx.Graph], None]) -> Spoiler:
    """The rewritten graph is another than was captured."""

    def spoil(patch: Patch) -> None:
        made = rewritten_calls.rewrite

        def spoilt(graph_module: fx.GraphModule, *args: Any) -> fx.GraphModule:
            found = fx.GraphModule(graph_module, copy.deepcopy(graph_module.graph))
            change(found.graph)
            return made(found, *args)

        patch.setattr(rewritten_calls, "rewrite", spoilt)

    return spoil


def _calls(graph: fx.Graph, name: str) -> list[fx.Node]:
    found = [n for n in graph.nodes if n.op == "call_function" and getattr(n.target, "__name__", "") == name]
    assert found, f"{name} is in no {sorted({getattr(n.target, '__name__', n.op) for n in graph.nodes})}"
    return found


def _replaced(name: str, function: Callable[..., Any]) -> Callable[[fx.Graph], None]:
    def change(graph: fx.Graph) -> None:
        _calls(graph, name)[0].target = function

    return change


def _swapped_weights(graph: fx.Graph) -> None:
    linear = _calls(graph, "linear")
    one, other = linear[0], linear[4]  # of two layers
    one.args, other.args = (one.args[0], *other.args[1:]), (other.args[0], *one.args[1:])


def _residual_of_another_layer(graph: fx.Graph) -> None:
    sums = [n for n in graph.nodes if n.target in (operator.add, operator.iadd)]
    sums[4].args = (sums[0], sums[4].args[1])


def _queries_for_keys(graph: fx.Graph) -> None:
    node = _calls(graph, "scaled_dot_product_attention")[1]
    node.args = (node.args[1], node.args[0], *node.args[2:])


def _labels_of_ids(graph: fx.Graph) -> None:
    (loss,) = _calls(graph, "cross_entropy")
    given = [n for n in graph.nodes if n.op == "placeholder" and "ids" in n.name]
    flat = loss.args[1]
    assert isinstance(flat, fx.Node)
    flat.args = (given[0], *flat.args[1:])


def _stale(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The weight as it was some steps ago, as a constant."""
    return F.linear(x, weight.detach() * 0.999, bias)


def _detached(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight.detach(), bias)


def _uncast(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return F.linear(x, weight, bias).to(torch.bfloat16)


def _slower(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, *others: Any) -> Tensor:
    """Running statistics move half as fast."""
    training, momentum, eps = others
    return F.batch_norm(x, mean, var, weight, bias, training, momentum / 2, eps)


def _other_epsilon(x: Tensor, shape: Any, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, shape, weight, bias, eps=1e-3)


def _drawing_once_more(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The stream of random numbers goes on by one."""
    torch.rand(1)
    return F.dropout(x, *args, **kwargs)


def _other_rate(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return F.dropout(x, 0.25, True)


# What a region has when it is recomputed


def _recomputing(change: Callable[[Any, tuple[Any, ...]], tuple[Any, ...]]) -> Spoiler:
    """A recomputation is given other inputs: `change` makes them of its body and those that it should have."""

    def spoil(patch: Patch) -> None:
        run = rewrite._Body.__call__

        def spoilt(self: Any, tape: Any, state: Any, *inputs: Any) -> Any:
            return run(self, tape, state, *(change(self, inputs) if tape.replaying else inputs))

        patch.setattr(rewrite._Body, "__call__", spoilt)

    return spoil


def _drifted(body: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """An activation as it was before something was added to it."""
    found = [i for i, each in enumerate(inputs) if isinstance(each, Tensor) and each.dim() == 3]
    return tuple(each * 1.0001 if i in found[:1] else each for i, each in enumerate(inputs))


def _other_weights(body: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Another layer's: those of this one, in another order."""
    return tuple(each.flip(0) if isinstance(each, nn.Parameter) and each.dim() == 2 else each for each in inputs)


def _cast_before(body: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The activation was rounded once more."""
    return tuple(
        each.bfloat16().to(each.dtype)
        if isinstance(each, Tensor) and each.dim() == 3 and each.is_floating_point()
        else each
        for each in inputs
    )


def _saved_of_another_region(patch: Patch) -> None:
    tapes: list[Any] = []
    kept, replayed = region_tape.RegionTape._kept, rewrite.RegionTape._replayed

    def noted(self: Any, key: int, *args: Any) -> Any:
        value = kept(self, key, *args)
        tapes.append(self._saved[key])
        return value

    def spoilt(self: Any, replay: Any, *args: Any) -> Any:
        mine = replay._results
        alike = [t for t in tapes if len(mine) == 1 and _shapes(t.results) == _shapes(mine)]
        if alike:
            replay._results = [*alike[0].results]
        return replayed(self, replay, *args)

    patch.setattr(region_tape.RegionTape, "_kept", noted)
    patch.setattr(region_tape.RegionTape, "_replayed", spoilt)


def _shapes(results: Any) -> Any:
    kept = [getattr(value, "tensor", None) for _, value in results]
    return [(func, None if each is None else each.shape) for (func, _), each in zip(results, kept, strict=True)]


def _saved_is_overwritten(patch: Patch) -> None:
    """In a way that no version tells of."""
    replayed = region_tape.RegionTape._replayed

    def spoilt(self: Any, replay: Any, *args: Any) -> Any:
        for _, value in replay._results:
            if (tensor := getattr(value, "tensor", None)) is not None and tensor.is_floating_point():
                tensor.data.mul_(0.5)
        return replayed(self, replay, *args)

    patch.setattr(region_tape.RegionTape, "_replayed", spoilt)


def _drawn_anew(patch: Patch) -> None:
    patch.setattr(region_tape.RegionTape, "_go_back", lambda self, key, device: None)


def _drawn_as_the_first(patch: Patch) -> None:
    """Every random node of a region draws what its first one drew."""
    go_back = region_tape.RegionTape._go_back

    def spoilt(self: Any, key: int, device: Any) -> None:
        self._states[key] = self._states[min(self._states)]
        go_back(self, key, device)

    patch.setattr(region_tape.RegionTape, "_go_back", spoilt)


def _random_nodes_forgotten(patch: Patch) -> None:
    """The plan does not know that they draw."""
    patch.setattr(rewrite, "_random", rewrite._plain)


def _stepped_twice(patch: Patch) -> None:
    """The recomputation moves running statistics again."""
    patch.setattr(rewrite, "_batch_norm", rewrite._plain)


def _counted_twice(patch: Patch) -> None:
    patch.setattr(rewrite, "_once", rewrite._plain)


# Modules as regions


def _modules_draw_anew(patch: Patch) -> None:
    patch.setattr(regions, "_drawing_from", lambda states: contextlib.nullcontext())


def _modules_step_twice(patch: Patch) -> None:
    patch.setattr(regions, "_on_copies", lambda norm: contextlib.nullcontext())


def _modules_with_other_inputs(patch: Patch) -> None:
    run, seen = regions.ModuleRegion._run, set[int]()

    def spoilt(self: Any, names: Any, *values: Any) -> Any:
        again = id(self) in seen
        seen.add(id(self))
        return run(self, names, *(v * 1.0001 if again and isinstance(v, Tensor) else v for v in values))

    patch.setattr(regions.ModuleRegion, "_run", spoilt)


def _modules_at_another_rate(patch: Patch) -> None:
    enter = regions._ModuleRecomputation.__enter__

    def spoilt(self: Any) -> None:
        enter(self)
        self._region.module.dropout = 0.1

    patch.setattr(regions._ModuleRecomputation, "__enter__", spoilt)


# Losses in slices


def _sliced(change: Callable[[Tensor], Tensor]) -> Spoiler:
    def spoil(patch: Patch) -> None:
        run = ChunkedLoss.run

        def spoilt(self: ChunkedLoss, given: Any, wanted: Any) -> Any:
            losses, *rest = run(self, given, wanted)
            return change(losses), *rest

        patch.setattr(ChunkedLoss, "run", spoilt)

    return spoil


def _without_last_slice(losses: Tensor) -> Tensor:
    return torch.cat([losses[: len(losses) // 2], torch.zeros_like(losses[len(losses) // 2 :])])


def _rows_of_another(patch: Patch) -> None:
    """The head is given the rows in another order."""
    call = ChunkedLoss.__call__
    patch.setattr(ChunkedLoss, "__call__", lambda self, rows, *args: call(self, rows.roll(1, 0), *args))


SPOILT: dict[str, Spoilt] = {
    "another-function": Spoilt(SHORT, "every-block", _in_graph(_replaced("gelu", F.relu))),
    "swapped-weights": Spoilt(SHORT, "every-block", _in_graph(_swapped_weights)),
    "stale-constant": Spoilt(SHORT, "every-block", _in_graph(_replaced("linear", _stale))),
    "detached": Spoilt(SHORT, "every-block", _in_graph(_replaced("linear", _detached))),
    "residual-of-another-layer": Spoilt(TRANSFORMER, "every-block", _in_graph(_residual_of_another_layer)),
    "queries-for-keys": Spoilt(SHORT, "half-saved", _in_graph(_queries_for_keys)),
    "labels-of-ids": Spoilt(SHORT, "every-block", _in_graph(_labels_of_ids)),
    "other-epsilon": Spoilt(SHORT, "nested", _in_graph(_replaced("layer_norm", _other_epsilon))),
    "other-rate": Spoilt(SHORT, "every-block", _in_graph(_replaced("dropout", _other_rate))),
    "drawing-once-more": Spoilt(SHORT, "every-block", _in_graph(_replaced("dropout", _drawing_once_more))),
    "uncast": Spoilt(TRANSFORMER_BF16, "every-block", _in_graph(_replaced("linear", _uncast))),
    "slower-statistics": Spoilt(CONVNET, "every-block", _in_graph(_replaced("batch_norm", _slower))),
    "saved-of-another-region": Spoilt(SHORT, "saved-matmuls", _saved_of_another_region),
    "saved-of-another-region-amp": Spoilt(TRANSFORMER_BF16, "half-saved", _saved_of_another_region),
    "saved-is-overwritten": Spoilt(CONVNET, "saved-matmuls", _saved_is_overwritten),
    "drawn-anew": Spoilt(SHORT, "every-block", _drawn_anew),
    "drawn-anew-nested": Spoilt(SHORT, "nested", _drawn_anew),
    "drawn-anew-after-a-saved-one": Spoilt(SHORT, "first-dropout-saved", _drawn_anew),
    "drawn-as-the-first": Spoilt(SHORT, "every-block", _drawn_as_the_first),
    "random-nodes-forgotten": Spoilt(CONVNET, "every-block", _random_nodes_forgotten),
    "drifted-input": Spoilt(SHORT, "every-block", _recomputing(_drifted)),
    "drifted-input-nested": Spoilt(SHORT, "nested-with-rest", _recomputing(_drifted)),
    "other-weights": Spoilt(SHORT, "pairs-of-segments", _recomputing(_other_weights)),
    "cast-before": Spoilt(SHORT, "half-saved", _recomputing(_cast_before)),
    "stepped-twice": Spoilt(CONVNET, "every-block", _stepped_twice),
    "counted-twice": Spoilt(CONVNET, "all-in-one", _counted_twice),
    "modules-draw-anew": Spoilt(SHORT, "modules", _modules_draw_anew),
    "modules-step-twice": Spoilt(CONVNET, "modules", _modules_step_twice),
    "modules-with-other-inputs": Spoilt(CONVNET, "modules", _modules_with_other_inputs),
    "modules-at-another-rate": Spoilt(SHORT, "modules", _modules_at_another_rate),
    "slice-left-out": Spoilt(SHORT, "slices", _sliced(_without_last_slice)),
    "slices-scaled": Spoilt(SHORT, "slices", _sliced(lambda losses: losses * 1.01)),
    "rows-of-another": Spoilt(SHORT, "slices", _rows_of_another),
}
