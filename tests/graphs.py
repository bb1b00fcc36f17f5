"""The toy models and toy graphs that the tests speak of, by name.

`TOYS` are workloads: small models, each with one thing that a planner can get wrong. `recorded` captures one, once.
`toy_graph` makes a Graph without torch from a few lines that say what every node allocates and saves, for the tests
that need hundreds of graphs or whose numbers are worked out by hand. `plans` and `toys` are what Hypothesis draws.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from remat.costing.costs import Costs
from remat.evaluation.graph import OUTSIDE, Graph, Node, OpKind, SavedTensors, Storages
from remat.evaluation.plan import Region
from remat.evaluation.writes import holds_or_leaves
from remat.formulation.search_space import (
    Segment,
    Space,
    can_be_kept,
    legal_cuts,
    saveable,
    written_for_long,
)
from remat.recording.fake_step import FakeStep
from remat.recording.record import record
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload
from tests.cached import cached

WIDTH = 8

# Dynamo reads `.grad` of every tensor that crosses a graph break ("broken"), leaf or not, and torch warns of it.
DYNAMO_LOOKS_AT_GRAD = "ignore:The .grad attribute of a Tensor that is not a leaf"

# Toy models. Each takes a float tensor (batch, WIDTH) unless it says otherwise, and returns what its step takes.


def _mlp(*activations: nn.Module) -> nn.Sequential:
    return nn.Sequential(*(layer for f in activations for layer in (nn.Linear(WIDTH, WIDTH), f)))


class Residual(nn.Module):
    """x + dropout(linear(gelu(linear(norm(x)))))"""

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Diamond(nn.Module):
    """One value, two ways, one product."""

    def __init__(self) -> None:
        super().__init__()
        self.top, self.left, self.right = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        top = torch.tanh(self.top(x))
        return torch.sigmoid(self.left(top)) * torch.tanh(self.right(top)).exp()


class Skip(nn.Module):
    """The first value is used again after all layers, as in a U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Residual() for _ in range(3))
        self.last = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.first(x))
        x = first
        for layer in self.layers:
            x = layer(x)
        return torch.tanh(self.last(torch.cat([x, first], dim=-1)))


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.side = _mlp(nn.Tanh(), nn.SiLU()), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.body(x)
        return {"main": self.head(hidden).sigmoid(), "side": self.side(hidden).relu()}


class MultiOutput(nn.Module):
    """Operators with several outputs: views (chunk, split, unbind) and new storages (max)."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, value, rest = self.wide(x).chunk(3, dim=-1)
        x = gate.sigmoid() * value
        left, right = rest.tanh().split(WIDTH // 2, dim=-1)
        x = x + torch.cat([right.exp(), left], dim=-1)
        values, _ = torch.stack([x, self.out(x)], dim=0).max(dim=0)
        first, second = torch.stack([values, values * values]).unbind(0)
        return first.cos() * second


class InPlace(nn.Module):
    """relu_ on a layer's output, mul_ on a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu_(layer(x))
            y = x.sin()
            y.view(-1).mul_(0.5)
            x = y + x
        return x


class Tied(nn.Module):
    """Token ids in, logits out through the embedding's own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(Residual() for _ in range(2))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Attention(nn.Module):
    """Attention with dropout inside one node, behind permuted views."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.3)
        return x + self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))


class Transformer(nn.Module):
    """Token ids (batch, length); a mask made once and used by every layer; tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.attention = nn.ModuleList(Attention() for _ in range(2))
        self.feed_forward = nn.ModuleList(Residual(0.1) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
        for attention, feed_forward in zip(self.attention, self.feed_forward, strict=True):
            x = feed_forward(attention(x, mask))
        return x @ self.embedding.weight.t()


class Brackets(nn.Module):
    """Contexts opened and closed within the model: no_grad, and autocast switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
            with torch.no_grad():
                scale = x.abs().amax(dim=-1, keepdim=True) + 1
            with torch.autocast("cpu", enabled=False):
                y = x.float() / scale.float()
                y = y.exp()
            x = y * x
        return x


class Reused(nn.Module):
    """Layers used again and again, the last use with nothing behind it that is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.other(self.layer(x).tanh()).sigmoid()
        return self.layer(x.exp().tanh())


class Constants(nn.Module):
    """Operators between two layers of which autograd keeps nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x).tanh() + 1
        x = ((x + 1) * 2).neg()
        return self.after(x + 1).tanh()


class Broken(nn.Module):
    """Two graphs: Dynamo cannot follow in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.ModuleList([Residual(), Residual()]), nn.ModuleList([Residual(), Residual()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.before:
            x = layer(x)
        torch._dynamo.graph_break()
        for layer in self.after:
            x = layer(x)
        return x.square().mean()


@torch._dynamo.disable
def _untraced(x: Tensor) -> Tensor:
    return x.sin().neg()


class Between(nn.Module):
    """Dynamo cannot follow in the middle, where something is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = _untraced(self.before(x).tanh())
        return self.after(x.neg().tanh() + 1).sigmoid()


class Frozen(nn.Module):
    """The first layers need no gradients; nor does every other bias."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = _mlp(nn.Tanh(), nn.Tanh()).requires_grad_(False)
        self.layers = nn.ModuleList(Residual() for _ in range(2))
        self.layers[0].up.bias.requires_grad_(False)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Convolutions(nn.Module):
    """Batch normalisation with its counters, and an in-place ReLU behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.ReLU(inplace=True))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class Loss(nn.Module):
    """A model whose forward ends in the loss."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.body(*inputs).square().mean()


def _vectors(batch_size: int, seq_len: int | None) -> Tensor:
    return torch.randn(batch_size, WIDTH)


def _ids(batch_size: int, seq_len: int | None) -> Tensor:
    return torch.randint(0, 11, (batch_size, seq_len or 5))


def _images(batch_size: int, seq_len: int | None) -> Tensor:
    return torch.randn(batch_size, 3, 6, 6)


def _call(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch)


def _squares(model: nn.Module, batch: Tensor) -> Tensor:
    return sum(output.square().mean() for output in model(batch).values())


def _cross_entropy(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch).flatten(0, -2), batch.flatten())


_held: list[Tensor] = []


def _holding_logits(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(batch)
    _held[:] = [logits]
    return F.cross_entropy(logits.flatten(0, -2), batch.flatten())


def _toy(
    name: str,
    build: Callable[[], nn.Module],
    step: Callable[[nn.Module, Any], Tensor] = _call,
    batch: Callable[[int, int | None], Tensor] = _vectors,
    **options: Any,
) -> Workload:
    return Workload(name, build, batch, step, batch_size=4, **options)


SGD = functools.partial(torch.optim.SGD, lr=0.1)

TOYS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        _toy("chain", lambda: Loss(_mlp(nn.Tanh(), nn.GELU(), nn.Sigmoid(), nn.Tanh()))),
        _toy("residual", lambda: Loss(nn.Sequential(Residual(), Residual(), Residual()))),
        _toy("diamond", lambda: Loss(Diamond()), optimizer=None),
        _toy("skip", lambda: Loss(Skip()), optimizer=SGD),
        _toy("two-outputs", TwoOutputs, _squares),
        _toy("multi-output", lambda: Loss(MultiOutput())),
        _toy("in-place", lambda: Loss(InPlace())),
        _toy("tied", Tied, _cross_entropy, _ids),
        _toy("held-logits", Tied, _holding_logits, _ids, optimizer=None),
        _toy("transformer", Transformer, _cross_entropy, _ids),
        _toy("autocast", Transformer, _cross_entropy, _ids, autocast=torch.bfloat16),
        _toy("broken", Broken),
        _toy("frozen", Frozen, optimizer=SGD),
        _toy("reused", lambda: Loss(Reused()), autocast=torch.bfloat16),
        _toy("between", lambda: Loss(Between())),
    )
}

CONSTANTS = _toy("constants", lambda: Loss(Constants()))
BRACKETS = _toy("brackets", lambda: Loss(Brackets()), autocast=torch.bfloat16)

# Rule 6 of memory.py: recomputed batch normalisation takes a few bytes that the evaluator does not count.
BATCH_NORM = _toy("batch-norm", Convolutions, batch=_images)


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A workload's step, captured and recorded."""

    workload: Workload
    step: FakeStep
    graph: Graph


@cached
def recorded(workload: Workload, accumulation: int = 1) -> Recorded:
    """`workload` recorded on fake CPU tensors; tracing takes a second, so once for all tests."""
    step = FakeStep(workload, device=torch.device("cpu"), loop=TrainingLoop(accumulation=accumulation))
    return Recorded(workload, step, record(step))


@contextlib.contextmanager
def autocast_left_as_found() -> Iterator[None]:
    """Closes what a test leaves open: autocast's nesting count, and its cache of weight casts."""
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    try:
        yield
    finally:
        torch.autocast_increment_nesting()
        while torch.autocast_decrement_nesting() > depth - 1:
            pass
        torch.clear_autocast_cache()


# Plans


def may_be_region(graph: Graph, first: int, end: int) -> bool:
    """Whether nodes first..end-1, between legal cuts, are of one graph call and hold no node that must stay plain."""
    inside = graph.nodes[first:end]
    return (
        len({node.call for node in inside}) == 1
        and inside[0].call != OUTSIDE
        and all(node.effect != "other" for node in inside)
        and all(holds_or_leaves(range(first, end), touching) for touching in written_for_long(graph))
    )


@st.composite
def plans(draw: st.DrawFn, graph: Graph, *, nested: bool = True) -> tuple[Region, ...]:
    """Disjoint regions over legal cuts; some save, some consist of inner regions (`nested`)."""
    cuts = legal_cuts(graph)
    can_save = saveable(graph)
    chosen = sorted(draw(st.sets(st.sampled_from(cuts), min_size=2, max_size=9)))
    regions = []
    for first, end in itertools.pairwise(chosen):
        kind = draw(st.sampled_from(("region", "saving", "plain", *["nested"] * nested)))
        if kind == "plain" or not may_be_region(graph, first, end):
            continue
        within = [v for v in can_save if first <= v < end]
        saved: tuple[int, ...] = ()
        inner: tuple[Region, ...] = ()
        if kind == "saving" and within:
            saved = tuple(sorted(draw(st.sets(st.sampled_from(within), max_size=6))))
        elif kind == "nested":
            between = [p for p in cuts if first < p < end]
            borders = sorted(draw(st.sets(st.sampled_from(between), max_size=4))) if between else []
            inner = tuple(Region(a, b) for a, b in itertools.pairwise([first, *borders, end]))
        regions.append(Region(first, end, saved, inner))
    return tuple(regions)


# Graphs without torch


@dataclasses.dataclass(frozen=True)
class ToyNode:
    """One node: what it takes, allocates and saves for its backward.

    size   bytes of its output, and of the gradient of it       inputs  nodes that it takes
    extra  bytes of a second result, seen by autograd alone     cast    bytes of a cast made first, as autocast does
    parameter  bytes of a parameter's gradient, made by a backward operator of its own
    keeps  what autograd saves: "output", "inputs", "extra", "cast", "fixed"
    lingers  operators of backward after its own until autograd lets its saves go
    kind   "new" allocates its output; "view" and "in-place" are about the storage of their only input
    """

    size: int
    inputs: tuple[int, ...] = ()
    keeps: frozenset[str] = frozenset({"output"})
    extra: int = 0
    cast: int = 0
    parameter: int = 0
    time_us: int = 1
    workspace_bytes: int = 0
    kind: str = "new"
    module: str = ""
    lingers: int = 0


class _Builder:
    """Writes the columns of a Graph while it goes through a step."""

    def __init__(self, nodes: Sequence[ToyNode]) -> None:
        self.toys = nodes
        self.kinds: list[OpKind] = []
        self.costs: list[tuple[int, int]] = []
        self.op_node: list[int] = []
        self.storages: list[dict[str, int]] = []
        self.saved_tensors: list[dict[str, int]] = []
        self.nodes: list[dict[str, Any]] = []
        self.gradients: list[int] = []
        self.roots: list[int] = []  # of a view the node that has the gradient

    def op(self, node: int, time_us: int = 1, workspace_bytes: int = 0, name: str = "toy.op") -> int:
        self.kinds.append(OpKind(name, [len(self.kinds)], 0, 1, "float32"))
        self.costs.append((time_us, workspace_bytes))
        self.op_node.append(node)
        return len(self.op_node) - 1

    def storage(self, size: int, birth: int, node: int, cast: int = 0) -> int:
        row = {"size_bytes": size, "birth": birth, "death": birth, "node": node, "cast": cast}
        self.storages.append(row)
        return len(self.storages) - 1

    def forward(self, index: int, toy: ToyNode) -> None:
        first = len(self.op_node)
        values = {u for i in toy.inputs for u in self.nodes[i]["values"]}
        saved: list[tuple[int, int]] = [(first, -1)] * ("fixed" in toy.keeps)
        saved += [(first, u) for u in sorted(values) if "inputs" in toy.keeps]
        self.roots.append(self.roots[toy.inputs[0]] if toy.kind == "view" else index)
        if toy.kind != "view":
            cast = self.op(index, name="aten._to_copy.default") if toy.cast else None
            if cast is not None:
                made = self.storage(toy.cast, cast, index, cast=1)
                saved += [(cast + 1, made)] * ("cast" in toy.keeps)
            main = self.op(index, toy.time_us, toy.workspace_bytes)
            if cast is not None:
                self.storages[made]["death"] = main
            if toy.kind == "new":
                values = {self.storage(toy.size, main, index)}
            saved += [(main + 1, u) for u in sorted(values) if "output" in toy.keeps]
            if toy.extra:
                extra = self.storage(toy.extra, main, index)
                saved += [(main + 1, extra)] * ("extra" in toy.keeps)
            self.saved_tensors += [{"node": index, "storage": u, "at": at} for at, u in saved]
        self.nodes.append(
            {
                "name": f"n{index}",
                "op": f"op{index}",
                "module": toy.module,
                "call": 0,
                "inputs": toy.inputs,
                "values": tuple(sorted(values)),
                "first": first,
                "end": len(self.op_node),
                "mutates": toy.inputs if toy.kind == "in-place" else (),
                "graph_inputs": toy.inputs,
            }
        )

    def die_after_last_use(self) -> None:
        for node in self.nodes:
            last = max(node["first"], node["end"] - 1)
            for u in [u for i in node["inputs"] for u in self.nodes[i]["values"]]:
                self.storages[u]["death"] = max(self.storages[u]["death"], last)

    def backward(self) -> None:
        """In reverse; a gradient lives until the node that made the value has done its backward."""
        seed = self.op(-1)
        last = len(self.toys) - 1
        arriving = {last: [self.storage(self.toys[last].size, seed, -1)]}
        for index in reversed(range(len(self.toys))):
            toy = self.toys[index]
            if toy.kind == "view":
                continue
            op = self.op(index)
            for root in sorted({self.roots[i] for i in toy.inputs}):
                arriving.setdefault(root, []).append(self.storage(self.toys[root].size, op, -1))
            if toy.parameter:
                self.gradients.append(self.storage(toy.parameter, self.op(index), -1))
            done = len(self.op_node) - 1
            for u in arriving[index]:
                self.storages[u]["death"] = done
            for row in self.saved_tensors:
                if row["node"] == index:
                    row |= {"unpack": op, "used": done, "release": done + toy.lingers}


def toy_graph(nodes: Sequence[ToyNode], *, fixed_bytes: int = 0, optimizer_bytes: int = 0) -> tuple[Graph, Costs]:
    """A step of `nodes`, the last of which is the loss and is held through backward.

    Every node but the last must be taken by a later one. The backward starts with an operator that makes the
    gradient of the loss; each node then makes the gradients of all its inputs in one operator.
    """
    builder = _Builder(nodes)
    for index, toy in enumerate(nodes):
        builder.forward(index, toy)
    builder.die_after_last_use()
    forward_end = len(builder.op_node)
    builder.backward()
    backward_end = len(builder.op_node)
    for row in builder.saved_tensors:
        row["release"] = min(row["release"], backward_end - 1)
    for u in builder.nodes[-1]["values"]:
        builder.storages[u]["death"] = backward_end - 1
    builder.storage(optimizer_bytes, builder.op(-1), -1)
    for u in builder.gradients:
        builder.storages[u]["death"] = backward_end
    graph = Graph(
        nodes=tuple(Node(**node) for node in builder.nodes),
        kinds=tuple(builder.kinds),
        op_kind=np.arange(len(builder.kinds)),
        op_node=np.array(builder.op_node),
        storages=Storages(**_columns(builder.storages, Storages)),
        saved_tensors=SavedTensors(**_columns(builder.saved_tensors, SavedTensors)),
        forward_end=forward_end,
        backward_end=backward_end,
        fixed_bytes={"parameters": fixed_bytes},
        parameter_gradients=tuple(builder.gradients),
        about={"workload": "toy"},
    )
    times, workspaces = zip(*builder.costs, strict=True)
    return graph, Costs("estimated", "toy", tuple(map(float, times)), tuple(workspaces))


def _columns(rows: list[dict[str, int]], table: type) -> dict[str, np.ndarray]:
    names = [field.name for field in dataclasses.fields(table)]
    return {name: np.array([row.get(name, 0) for row in rows], dtype=np.int64) for name in names}


def chain(*sizes: int, **options: Any) -> list[ToyNode]:
    """Each node takes the one before and saves its output."""
    return [ToyNode(size, inputs=(i - 1,) if i else (), **options) for i, size in enumerate(sizes)]


def every_cut(graph: Graph, *, depth: int = 1) -> Space:
    """The finest space: a segment between any two legal cuts, everything saveable."""
    cuts = legal_cuts(graph)
    return Space(tuple(Segment(a, b, False) for a, b in itertools.pairwise(cuts)), saveable(graph), depth)


KEEPS = ("output", "inputs", "extra", "cast", "fixed")


@st.composite
def toys(draw: st.DrawFn, *, most: int = 7) -> list[ToyNode]:
    """A small graph: chains, diamonds, skips, views, in-place operators, casts, nodes that save nothing."""
    count = draw(st.integers(2, most))
    sizes = st.integers(1, 12)
    some = st.one_of(st.just(0), sizes)
    nodes: list[ToyNode] = []
    for index in range(count):
        near = st.sets(st.integers(0, index - 1), max_size=2) if index else st.just(set())
        inputs = draw(near) | ({index - 1} if index else set())
        if index == count - 1:
            inputs |= set(range(index)) - {i for node in nodes for i in node.inputs}
        # What is written in place must have no other use, as in code that autograd accepts.
        alone = len(inputs) == 1 and index < count - 1 and not any(index - 1 in node.inputs for node in nodes)
        kind = draw(st.sampled_from(("new", "new", "new", "view", "in-place"))) if alone else "new"
        keeps = draw(st.frozensets(st.sampled_from(KEEPS), max_size=3))
        if kind == "in-place":
            keeps &= {"output", "fixed"}
        nodes.append(
            ToyNode(
                size=nodes[-1].size if kind != "new" else draw(sizes) * 4,
                inputs=tuple(sorted(inputs)),
                keeps=frozenset() if kind == "view" else keeps,
                extra=draw(some) if kind == "new" else 0,
                cast=draw(some) if kind != "view" else 0,
                parameter=draw(some) if kind != "view" else 0,
                time_us=draw(sizes),
                workspace_bytes=draw(some) if kind != "view" else 0,
                kind=kind,
            )
        )
    return nodes


@st.composite
def crossing_toys(draw: st.DrawFn, *, most: int = 7) -> list[ToyNode]:
    """A small graph in which much is read again late, as in a UNet or a DenseNet."""
    nodes: list[ToyNode] = []
    count = draw(st.integers(4, most))
    for index in range(count):
        earlier = draw(st.sets(st.integers(0, index - 1), max_size=3)) | {index - 1} if index else set()
        unread = set(range(index)) - {i for node in nodes for i in node.inputs} if index == count - 1 else set()
        keeps = draw(st.sampled_from([frozenset[str](), frozenset({"inputs"}), frozenset({"output"})]))
        inputs = tuple(sorted(earlier | unread))
        nodes.append(ToyNode(draw(st.integers(1, 12)), inputs, keeps, time_us=draw(st.integers(1, 12))))
    return nodes


@st.composite
def deciding(draw: st.DrawFn, graph: Graph) -> Graph:
    """`graph`, in which a node or two decide, so that every region around them saves them; or none."""
    able = can_be_kept(graph)
    found = draw(st.sets(st.sampled_from(able), max_size=2)) if able else set()
    return dataclasses.replace(
        graph, nodes=tuple(dataclasses.replace(node, decides=i in found) for i, node in enumerate(graph.nodes))
    )


@st.composite
def spaces(draw: st.DrawFn, graph: Graph, *, most_segments: int = 5, most_saves: int = 3) -> Space:
    """A space small enough to enumerate: few segments, some of which must stay plain, and few nodes to save."""
    count = len(graph.nodes)
    inside = [p for p in legal_cuts(graph) if 0 < p < count]
    chosen = draw(st.sets(st.sampled_from(inside), max_size=most_segments - 1)) if inside else set()
    borders = itertools.pairwise([0, *sorted(chosen), count])
    plain = draw(st.sets(st.integers(0, 2 * most_segments), max_size=1))
    segments = tuple(Segment(a, b, i in plain) for i, (a, b) in enumerate(borders))
    can_save = saveable(graph)
    saves = draw(st.sets(st.sampled_from(can_save), max_size=most_saves)) if can_save else set()
    return Space(segments, tuple(sorted(saves)), draw(st.sampled_from((1, 2))))
