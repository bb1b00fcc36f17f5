"""Random small models and random plans for them, each from one number, so that any case can be had again.

A model is a program over a growing list of values: every line applies a layer to one or two of them. Layers come from
`tricky_layers.TRICKY_LAYERS`; beside them are residual sums, products and concatenations with any earlier value,
layers used again, operators with two results that are both used later, values written in place, and branches without
gradients. The loss takes the last value, and sometimes others.

A plan takes any legal cuts; some of its regions save nodes, some are made of smaller ones. It need not be any good.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from remat.evaluation.graph import OUTSIDE, Graph
from remat.evaluation.plan import Region
from remat.evaluation.writes import holds_or_leaves
from remat.formulation.search_space import legal_cuts, saveable, written_for_long
from remat.workload.workload import Workload
from tests.tricky_layers import LENGTH, SAMPLES, TRICKY_LAYERS, WIDTH

LEFT_OUT = {  # see test_tricky_layers.py
    "batch-norm-cumulative",  # in no graph
    "sparse-product",  # refused by name
    "checkpointed-reentrant",  # its own backward adds gradients up in another order
}
LAYERS = tuple(name for name in TRICKY_LAYERS if name not in LEFT_OUT)
BREAKING = frozenset({"graph-break"})

# What fuzzing draws for each line, and how often.
KINDS = {"layer": 6, "linear": 3, "again": 1, "sum": 2, "product": 1, "join": 1, "two": 1, "in-place": 1, "gate": 1}
PAIRS = ("join", "sum", "product", "in-place")  # a gate's second value is looked at, without a gradient


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of a program: `kind` applied to value `source`, and to `other` where it takes two."""

    kind: str
    source: int
    other: int
    layer: int = -1


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A model: its layers by name, its program, the values that enter the loss, which layers are frozen.

    has_mlps  each linear layer is one that acts by row and is wide inside
    """

    layers: tuple[str, ...]
    lines: tuple[Line, ...]
    ends: tuple[int, ...]
    frozen: frozenset[int]
    tied: bool
    autocast: bool
    accumulation: int
    optimizer: str
    holds: bool
    has_mlps: bool = False

    def __str__(self) -> str:
        return f"{len(self.lines)} lines of {', '.join(self.layers)}" + (" under autocast" if self.autocast else "")


def recipe(draw: random.Random) -> Recipe:
    """A random model of 3 to 9 lines."""
    layers: list[str] = []
    lines: list[Line] = []
    count = 1  # values so far: the input
    breaks = 0
    for _ in range(draw.randint(3, 9)):
        kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
        source = draw.choice([count - 1, count - 1, draw.randrange(count)])
        layer = -1
        if kind == "again":
            layer = draw.randrange(len(layers)) if layers else -1
            if layer < 0 or layers[layer] in BREAKING:
                kind, layer = "sum", -1
        elif kind in ("layer", "linear", "two", "join"):
            name = (
                draw.choice(LAYERS) if kind == "layer" else {"linear": "linear", "two": "wide", "join": "narrow"}[kind]
            )
            breaks += name in BREAKING
            if name in BREAKING and breaks > 1:
                name = "linear"
            layer = len(layers)
            layers.append(name)
        lines.append(Line(kind, source, draw.randrange(count), layer))
        count += 2 if kind == "two" else 1
    used = {value for line in lines for value in ((line.source, line.other) if line.kind in PAIRS else (line.source,))}
    ends = set(range(count)) - used | set(draw.sample(range(count), draw.choice((0, 0, 1))))
    return Recipe(
        layers=tuple(layers),
        lines=tuple(lines),
        ends=tuple(sorted(ends)),
        frozen=frozenset(i for i in range(len(layers)) if draw.random() < 0.1),
        tied=draw.random() < 0.2,
        autocast=draw.random() < 0.2,
        accumulation=draw.choice((1, 1, 2)),
        optimizer=draw.choice(("adamw", "sgd", "none")),
        holds=draw.random() < 0.2,
    )


class Mlp(nn.Module):
    """A run for chunking: a norm, products that widen and narrow, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))


def _layer(name: str, has_mlps: bool) -> nn.Module:
    if name == "linear" and has_mlps:
        return Mlp()
    if name in ("linear", "wide", "narrow"):
        inputs, outputs = {"linear": (1, 1), "wide": (1, 2), "narrow": (2, 1)}[name]
        return nn.Linear(inputs * WIDTH, outputs * WIDTH)
    return TRICKY_LAYERS[name]()


class RandomModel(nn.Module):
    """The model of a recipe."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(_layer(name, recipe.has_mlps) for name in recipe.layers)
        for i in recipe.frozen:
            self.layers[i].requires_grad_(False)
        self.last = nn.Linear(WIDTH, WIDTH)
        if recipe.tied:
            self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Any:
        values = [self.first(x)]
        for line in self.recipe.lines:
            values += self._line(line, values)
        ends = [values[i] for i in self.recipe.ends]
        result = self.last(functools.reduce(torch.add, ends)).tanh()
        return (result, values[-1]) if self.recipe.holds else result

    def _line(self, line: Line, values: Sequence[Tensor]) -> list[Tensor]:
        x, other = values[line.source], values[line.other]
        if line.kind in ("layer", "again", "linear"):
            return [self._same_shape(self.layers[line.layer], x)]
        if line.kind == "two":
            left, right = self.layers[line.layer](x).tanh().chunk(2, dim=-1)
            return [left, right]
        if line.kind == "join":
            return [self.layers[line.layer](torch.cat([x, other], dim=-1))]
        if line.kind == "sum":
            return [x + other]
        if line.kind == "product":
            return [x * other.sigmoid()]
        if line.kind == "gate":
            with torch.no_grad():
                scale = other.abs().amax(dim=-1, keepdim=True) + 1
            return [x / scale]
        changed = x.sin()
        changed += other
        changed.transpose(0, 1).mul_(0.5)
        return [changed]

    def _same_shape(self, layer: nn.Module, x: Tensor) -> Tensor:
        if isinstance(layer, nn.Linear) and layer.out_features == 2 * WIDTH:
            return layer(x)[..., :WIDTH]
        if isinstance(layer, nn.Linear) and layer.in_features == 2 * WIDTH:
            return layer(torch.cat([x, x], dim=-1))
        return layer(x)


_held: list[Any] = []


def step(model: nn.Module, batch: Tensor) -> Tensor:
    """The caller holds the second output, as one who looks at logits does."""
    result = model(batch)
    _held[:] = [result] if isinstance(result, tuple) else []
    return (result[0] if isinstance(result, tuple) else result).square().mean()


OPTIMIZERS: dict[str, Any] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2),
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "none": None,
}


def workload_of(recipe: Recipe, name: str, samples: int = SAMPLES) -> Workload:
    return Workload(
        name,
        functools.partial(RandomModel, recipe),
        lambda samples, length: torch.randn(samples, length or LENGTH, WIDTH),
        step,
        batch_size=samples,
        seq_len=LENGTH,
        optimizer=OPTIMIZERS[recipe.optimizer],
        autocast=torch.bfloat16 if recipe.autocast else None,
    )


def may_be_region(graph: Graph, first: int, end: int) -> bool:
    """Whether nodes first..end-1, between legal cuts, are of one graph call and hold no node that must stay plain."""
    inside = graph.nodes[first:end]
    return (
        len({node.call for node in inside}) == 1
        and inside[0].call != OUTSIDE
        and all(node.effect != "other" for node in inside)
        and all(holds_or_leaves(range(first, end), touching) for touching in written_for_long(graph))
    )


def regions(draw: random.Random, graph: Graph) -> tuple[Region, ...]:
    """Random disjoint regions between legal cuts of `graph`; at least one, where one may be."""
    cuts = legal_cuts(graph)
    borders = [
        p
        for i, p in enumerate(cuts)
        if draw.random() < 0.3
        or p in (0, len(graph.nodes))
        or (p and graph.nodes[p].call != graph.nodes[p - 1].call)
        or any(graph.nodes[v].effect == "other" for v in (p - 1, p) if 0 <= v < len(graph.nodes))
    ]
    pairs = [(a, b) for a, b in itertools.pairwise(borders) if may_be_region(graph, a, b)]
    kept = [pair for pair in pairs if draw.random() < 0.7] or pairs[:1]
    return tuple(_region(draw, graph, cuts, first, end) for first, end in kept)


def _region(draw: random.Random, graph: Graph, cuts: list[int], first: int, end: int) -> Region:
    kind = draw.choice(("region", "region", "saving", "saving", "nested"))
    can_save = [v for v in saveable(graph) if first <= v < end]
    if kind == "saving" and can_save:
        return Region(first, end, tuple(sorted(draw.sample(can_save, draw.randint(1, min(6, len(can_save)))))))
    between = [p for p in cuts if first < p < end]
    if kind == "nested" and between:
        marks = [first, *sorted(draw.sample(between, draw.randint(1, min(4, len(between))))), end]
        parts = [Region(a, b) for a, b in itertools.pairwise(marks)]
        inner = [part for part in parts if draw.random() < 0.8] or parts[:1]
        return Region(first, end, inner=tuple(inner))
    return Region(first, end)
