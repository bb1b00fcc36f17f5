"""Machinery: what a region costs in Python, apart from the recomputation that it is there for.

Chains of operators on tensors of a few numbers, so that kernels take no time. Each chain is run plainly, as a region
of ours, under `torch.utils.checkpoint` and under torch's selective checkpoint, in turn: one thread, its CPU time, the
least of many rounds. What counts is what a way costs above the plain chain, relative to selective checkpointing in the
same run; the recomputation itself is part of it, the same for all ways. The costs of a region and of a node are fitted
to a short and a long chain, which magnifies noise.

    plain     tanh after tanh                  saved   every second node a saved linear
    random    every second node a dropout      nested  four regions in one
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from benchmarks import report
from remat.capture.nodes import captured_nodes
from remat.execution.eager.region_tape import Counts, RewriteOptions
from remat.execution.eager.rewrite import CallRegion, rewrite

SHORT, LONG = 8, 40
ROUNDS, CALLS = 200, 3
INNER = 4
COLUMNS = ["chain", "way", "short_us", "long_us", "of_selective_short", "of_selective_long", "region_us", "node_us"]

Chain = Callable[[Tensor, Tensor], Tensor]


def main() -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    rows = []
    for name in ("plain", "saved", "random", "nested"):
        rows += measured(name)
        for row in rows[-3:]:
            print({key: row[key] for key in COLUMNS if key in row}, flush=True)
    about = {**report.provenance(device), "nodes": [SHORT, LONG], "rounds": ROUNDS, "calls": CALLS}
    report.write(report.stem("machinery", device), about, rows, COLUMNS)


@dataclasses.dataclass(frozen=True)
class Ways:
    """The same chain, run in each way."""

    plain: Chain
    remat: Chain
    checkpoint: Chain
    selective: Chain


def measured(name: str) -> list[dict[str, Any]]:
    """A row for each way but the plain one."""
    extra = {nodes: above_plain(ways(name, nodes)) for nodes in (SHORT, LONG)}
    rows: list[dict[str, Any]] = []
    for way in ("remat", "checkpoint", "selective"):
        short, long = extra[SHORT][way], extra[LONG][way]
        node = (long - short) / (LONG - SHORT)
        rows.append({"chain": name, "way": way, "region_us": short - SHORT * node, "node_us": node})
        rows[-1] |= {"short_us": short, "long_us": long}
    for row in rows:
        row["of_selective_short"] = row["short_us"] / rows[-1]["short_us"]
        row["of_selective_long"] = row["long_us"] / rows[-1]["long_us"]
    return [{key: round(v, 2) if isinstance(v, float) else v for key, v in row.items()} for row in rows]


def above_plain(chains: Ways) -> dict[str, float]:
    """CPU time of a forward and backward above the plain chain's, in us."""
    functions = {field.name: step(getattr(chains, field.name)) for field in dataclasses.fields(chains)}
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(ROUNDS):
        for way, function in functions.items():
            best[way] = min(best[way], time_us(function))
    return {way: found - best["plain"] for way, found in best.items()}


def time_us(function: Callable[[], None]) -> float:
    begin = time.process_time()
    for _ in range(CALLS):
        function()
    return (time.process_time() - begin) / CALLS * 1e6


def step(chain: Chain) -> Callable[[], None]:
    x = torch.randn(2, 2, requires_grad=True)
    weight = torch.randn(2, 2, requires_grad=True)

    def run() -> None:
        chain(x, weight).sum().backward()

    run()
    return run


# Chains


def ways(name: str, nodes: int) -> Ways:
    """The chain `name` of `nodes` nodes, in every way."""
    links = {"plain": _tanh, "saved": _linear_tanh, "random": _dropout_tanh, "nested": _tanh}[name]

    def chain(x: Tensor, weight: Tensor) -> Tensor:
        for index in range(nodes):
            x = links(index, x, weight)
        return x

    traced = fx.symbolic_trace(chain)
    kinds = [str(getattr(node.target, "__name__", node.target)) for node in captured_nodes(traced)]
    chosen = {kind: frozenset(i for i, found in enumerate(kinds) if found == kind) for kind in ("linear", "dropout")}
    part = nodes // INNER
    inner = tuple(CallRegion(i * part, (i + 1) * part - 1) for i in range(INNER)) if name == "nested" else ()
    region = CallRegion(0, nodes - 1, saved=chosen["linear"], random=chosen["dropout"], inner=inner)
    rewritten = rewrite(traced, (region,), RewriteOptions(Counts()))
    run = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=name == "random")
    saving = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    selective = functools.partial(run, context_fn=saving)
    return Ways(traced, rewritten, *(_wrapped(way, traced, chain, name, nodes) for way in (run, selective)))


def _wrapped(way: Any, traced: Chain, chain: Chain, name: str, nodes: int) -> Chain:
    if name != "nested":
        return functools.partial(way, traced)
    part = fx.symbolic_trace(_part(nodes // INNER))

    def outer(x: Tensor, weight: Tensor) -> Tensor:
        for _ in range(INNER):
            x = way(part, x, weight)
        return x

    return functools.partial(way, outer)


def _part(nodes: int) -> Chain:
    def chain(x: Tensor, weight: Tensor) -> Tensor:
        for index in range(nodes):
            x = _tanh(index, x, weight)
        return x

    return chain


def _tanh(index: int, x: Tensor, weight: Tensor) -> Tensor:
    return x.tanh()


def _linear_tanh(index: int, x: Tensor, weight: Tensor) -> Tensor:
    return x.tanh() if index % 2 else F.linear(x, weight)


def _dropout_tanh(index: int, x: Tensor, weight: Tensor) -> Tensor:
    return x.tanh() if index % 2 else F.dropout(x, 0.1)
