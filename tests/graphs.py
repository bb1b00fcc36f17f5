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
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from remat.costs import Costs
from remat.graph import OUTSIDE, Graph, Node, OpKind, Packs, Storages
from remat.plan import Region
from remat.record import FakeStep, record
from remat.space import Segment, Space, legal_cuts, saveable
from remat.workload import Workload

WIDTH = 8

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
        _toy("brackets", lambda: Loss(Brackets()), autocast=torch.bfloat16),
        _toy("broken", Broken),
        _toy("frozen", Frozen, optimizer=SGD),
    )
}

# Rule 6 of memory.py: recomputed batch normalisation takes a few bytes that the evaluator does not count.
BATCH_NORM = _toy("batch-norm", Convolutions, batch=_images)


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A workload's step, captured and recorded."""

    workload: Workload
    step: FakeStep
    graph: Graph


@functools.cache
def recorded(workload: Workload, accumulation: int = 1) -> Recorded:
    """`workload` recorded on fake CPU tensors; tracing takes a second, so once for all tests."""
    step = FakeStep(workload, device=torch.device("cpu"), accumulation=accumulation)
    return Recorded(workload, step, record(step))


# Plans


def may_be_region(graph: Graph, first: int, end: int) -> bool:
    """Whether nodes first..end-1, between legal cuts, are of one graph call and hold no node that must stay plain."""
    inside = graph.nodes[first:end]
    return (
        len({node.call for node in inside}) == 1
        and inside[0].call != OUTSIDE
        and all(node.effect != "other" for node in inside)
    )


@st.composite
def plans(draw: st.DrawFn, graph: Graph) -> tuple[Region, ...]:
    """Disjoint regions over legal cuts; some save, some consist of inner regions."""
    cuts = legal_cuts(graph)
    can_save = saveable(graph)
    chosen = sorted(draw(st.sets(st.sampled_from(cuts), min_size=2, max_size=9)))
    regions = []
    for first, end in itertools.pairwise(chosen):
        kind = draw(st.sampled_from(("region", "saving", "nested", "plain")))
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
