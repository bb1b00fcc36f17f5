"""Tiny workloads with every difficulty of large ones, and plans for them that need no solver."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from remat.costing.costs import Costs, estimated_costs
from remat.evaluation.evaluator import Memory
from remat.evaluation.graph import Graph
from remat.evaluation.plan import Plan, Region, to_refs
from remat.execution.apply import planned_forward
from remat.execution.eager.planned_graphs import PlannedGraphs
from remat.formulation.search_space import Space, blocks, find_space
from remat.recording.fake_step import FakeStep
from remat.recording.record import record
from remat.workload.target import TARGETS
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload
from tests.devices import DEVICE

CPU = torch.device("cpu")
WIDTH, VOCAB, LENGTH = 16, 32, 8


class Block(nn.Module):
    """Attention and a feed-forward half, as in a transformer: two residual sums, three dropouts."""

    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind()
        rate = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norms[1](x)))), self.dropout, self.training)


class Transformer(nn.Module):
    """Token ids and labels to a loss; the output layer shares its weight with the embedding."""

    def __init__(self, layers: int = 4, width: int = WIDTH, dropout: float = 0.2):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList([Block(width, dropout) for _ in range(layers)])
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Residual(nn.Module):
    """Two convolutions with batch normalisation and a dropout of channels."""

    def __init__(self, channels: int):
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(x + F.dropout2d(self.norms[1](self.second(y)), 0.2, self.training))


class ConvNet(nn.Module):
    """Images and labels to a loss."""

    def __init__(self, blocks: int = 3, channels: int = 8):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.layers = nn.ModuleList([Residual(channels) for _ in range(blocks)])
        self.head = nn.Linear(channels, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


def step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(*batch)
    return loss


def tokens(samples: int, length: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (samples, length or LENGTH)
    return torch.randint(VOCAB, shape), torch.randint(VOCAB, shape)


def images(samples: int, length: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, 3, 8, 8), torch.randint(10, (samples,))


TRANSFORMER = Workload("toy-transformer", Transformer, tokens, step, batch_size=4, seq_len=LENGTH)
TRANSFORMER_BF16 = dataclasses.replace(TRANSFORMER, name="toy-transformer-amp", autocast=torch.bfloat16)
SHORT = dataclasses.replace(TRANSFORMER, build=functools.partial(Transformer, layers=2))
CONVNET = Workload("toy-convnet", ConvNet, images, step, batch_size=4)

WORKLOADS = {"transformer": TRANSFORMER, "transformer-amp": TRANSFORMER_BF16, "convnet": CONVNET}


# Plans without a solver: regions chosen by hand, predictions by the evaluator.

Choose = Callable[[Graph], Sequence[Region]]


def every_block(graph: Graph) -> list[Region]:
    return [Region(first, end) for first, end in blocks(graph)]


def all_in_one(graph: Graph) -> list[Region]:
    """One region around all layers."""
    found = blocks(graph)
    return [Region(found[0][0], found[-1][1])]


def nested(graph: Graph) -> list[Region]:
    """Regions of two layers, each layer of which is a region."""
    found = blocks(graph)
    pairs = [found[i : i + 2] for i in range(0, len(found), 2)]
    return [Region(pair[0][0], pair[-1][1], inner=tuple(Region(*part) for part in pair)) for pair in pairs]


def nested_with_rest(graph: Graph) -> list[Region]:
    """One region around all layers, in which only every second layer is one."""
    found = blocks(graph)
    return [Region(found[0][0], found[-1][1], inner=tuple(Region(*part) for part in found[::2]))]


def _saving(*ops: str) -> Choose:
    def choose(graph: Graph) -> list[Region]:
        space = find_space(graph)
        named = {v for v in space.saveable if any(op in graph.nodes[v].op for op in ops)}
        return [Region(first, end, tuple(v for v in range(first, end) if v in named)) for first, end in blocks(graph)]

    return choose


def half_saved(graph: Graph) -> list[Region]:
    """Every block a region that saves every second of the nodes that it may."""
    named = set(find_space(graph).saveable[::2])
    return [Region(first, end, tuple(v for v in range(first, end) if v in named)) for first, end in blocks(graph)]


def first_dropout_saved(graph: Graph) -> list[Region]:
    """Of each block's random nodes the first is saved, so that later ones are recomputed after it."""
    chosen = []
    for region in every_block(graph):
        random = [v for v in range(region.first, region.end) if graph.nodes[v].random]
        chosen.append(dataclasses.replace(region, saved=tuple(random[:1])))
    return chosen


def pairs_of_segments(graph: Graph) -> list[Region]:
    """Regions between the cuts that a solver would see, two segments each, so that most begin inside a layer."""
    space: Space = find_space(graph)
    found = []
    for a, b in space.stretches():
        found += [Region(space.segments[i].first, space.segments[min(i + 2, b) - 1].end) for i in range(a, b, 2)]
    return [region for region in found if graph.nodes[region.first].call == graph.nodes[region.end - 1].call]


CHOICES: dict[str, Choose] = {
    "nothing": lambda graph: [],
    "every-block": every_block,
    "all-in-one": all_in_one,
    "nested": nested,
    "nested-with-rest": nested_with_rest,
    "saved-matmuls": _saving("linear", "conv", "attention"),
    "half-saved": half_saved,
    "first-dropout-saved": first_dropout_saved,
    "pairs-of-segments": pairs_of_segments,
}


def recorded(workload: Workload, loop: TrainingLoop | None = None) -> tuple[FakeStep, Graph]:
    fake = FakeStep(workload, device=DEVICE, loop=loop)
    return fake, record(fake)


@functools.lru_cache(maxsize=16)
def graph_of(workload: Workload) -> Graph:
    """The graph alone, which nobody changes: recorded once for all files of a process."""
    return recorded(workload)[1]


def planned_graphs(model: nn.Module) -> PlannedGraphs:
    """The forward that a plan of regions of nodes gave to `model`."""
    forward = planned_forward(model)
    assert isinstance(forward, PlannedGraphs)
    return forward


def plan_by_hand(graph: Graph, regions: Sequence[Region], costs: Costs | None = None, **changes: object) -> Plan:
    """A Plan of `regions` whose budget is what the evaluator says that it needs."""
    costs, regions = costs or estimated_costs(graph, TARGETS["h100-80gb"]), tuple(regions)
    memory = Memory(graph, costs.workspace_per_op(graph))
    step_us, again_us = costs.step_time_us(graph), memory.recompute_time_us(regions, costs.per_op_us(graph))
    peak = memory.curve(regions).peak_bytes
    plan = Plan(
        regions=to_refs(graph, regions),
        fingerprints=graph.fingerprints,
        about=graph.about,
        target="cpu",
        costs=costs.source,
        budget_bytes=peak,
        predicted={
            "peak_bytes": peak,
            "step_time_us": step_us + again_us,
            "recompute_time_us": again_us,
            "overhead": again_us / step_us,
            "recomputed_nodes": memory.recomputed_nodes(regions),
        },
        without_checkpointing={"peak_bytes": memory.peak_without_checkpointing, "step_time_us": step_us},
        solver={"name": "by hand", "status": "feasible", "objective_us": again_us, "bound_us": 0.0, "gap": 1.0},
        space=find_space(graph).about(),
        identities=graph.identities,
    )
    return dataclasses.replace(plan, **changes)  # type: ignore[arg-type]


def plan_for(workload: Workload, choose: Choose = every_block, **changes: object) -> Plan:
    graph = graph_of(workload)
    return dataclasses.replace(plan_by_hand(graph, choose(graph)), **changes)  # type: ignore[arg-type]
