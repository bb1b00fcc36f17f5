"""Worked numbers of training memory, reproduced by the code that plans: recorded graphs, real optimizers, real plans.

Sources print some of these wrong; what stands here was recomputed. States and shards are in `test_states.py`, windows
and the largest micro-batch in `test_fitting.py`, the four thirds of recomputing all in `test_estimating.py`.
b micro-batch, s sequence, h width, a heads, L layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from remat.costing.planning_device import find_planning_device
from remat.evaluation.evaluator import Memory
from remat.evaluation.graph import Graph
from remat.evaluation.plan import Region
from remat.formulation.search_space import blocks
from remat.models import gpt2
from remat.planning.profiling import fake_step
from remat.recording.fake_step import FakeStep
from remat.recording.record import record
from remat.units import GIB
from remat.workload.workload import Workload
from tests.cached import cached
from tests.graphs import ToyNode, toy_graph

GB = 10**9


def recorded(build: Callable[[], nn.Module], *shape: int) -> Graph:
    """A step of a model without an optimizer, on fakes."""
    workload = Workload("fact", build, lambda b, s: torch.empty(shape), lambda m, x: m(x).sum(), 1, optimizer=None)
    return record(FakeStep(workload, device=torch.device("cpu")))


def made_by(graph: Graph, op: str) -> list[int]:
    """Bytes of what each node that calls `op` returns."""
    return [sum(int(graph.storages.size_bytes[u]) for u in node.values) for node in graph.nodes if node.op == op]


# Single tensors


def test_a_convolutions_output_is_batch_by_channels_by_height_by_width() -> None:
    graph = recorded(lambda: nn.Sequential(nn.Conv2d(3, 64, 7, stride=2, padding=3), nn.ReLU()), 8, 3, 224, 224)
    assert made_by(graph, "conv2d") == [8 * 64 * 112 * 112 * 4]


def test_a_matrix_products_output_is_batch_by_rows_by_columns() -> None:
    graph = recorded(lambda: nn.Sequential(nn.Linear(32, 48), nn.ReLU()), 4, 16, 32)
    assert made_by(graph, "linear") == [4 * 16 * 48 * 4]


# Boundaries of blocks


@cached
def boundary_bytes(width: int, tokens: int, heads: int = 8, seq: int = 1000) -> int:
    """Return the bytes that the second of two checkpointed blocks keeps through forward, on fakes in bf16."""
    workload = gpt2.workload(
        "fact", n_embd=width, n_layer=2, n_head=heads, n_positions=seq, batch_size=tokens // seq, vocab_size=128
    )
    graph = record(fake_step(workload.with_dtype("bf16"), find_planning_device("h200")))
    first, second = (Region(*block) for block in blocks(graph))

    def kept(*regions: Region) -> int:
        return int(Memory(graph).curve(regions, plain=(0, 0)).alive_bytes[graph.forward_end - 1])

    return kept(first, second) - kept(first)


@pytest.mark.exhaustive
def test_gpt3_2_7b_boundaries_in_16_bit() -> None:
    assert 32 * boundary_bytes(2560, 10**6) == 32 * 10**6 * 2560 * 2
    assert 32 * boundary_bytes(2560, 10**6) / GIB == pytest.approx(152.59, abs=0.005)


@pytest.mark.exhaustive
def test_gpt3_175b_boundaries_in_16_bit() -> None:
    boundary = boundary_bytes(12288, 3_200_000, heads=96)
    assert boundary / GB == pytest.approx(78.64, abs=0.005)
    assert 96 * boundary / GB == pytest.approx(7549.7, abs=0.05)


@pytest.mark.exhaustive
def test_boundaries_of_a_70b_shape_alone_are_40_gib() -> None:
    assert 80 * boundary_bytes(8192, 8 * 4096, heads=64, seq=4096) / GIB == 40


# Interiors of blocks


class MegatronBlock(nn.Module):
    """The block of Korthikanti et al. 2022, table 2: attention written down, dropouts, a GeLU of width 4h."""

    def __init__(self, width: int, heads: int, fused: bool):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.fused = heads, fused

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = (q * (q.shape[-1] ** -0.5)) @ k.transpose(-1, -2)
        return F.dropout(scores.softmax(-1), 0.1) @ v

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        x = x + F.dropout(self.out(self.attend(q, k, v).transpose(1, 2).flatten(2)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.second(x)), approximate="tanh")), 0.1)


@functools.cache
def interior_bytes(b: int, s: int, h: int, a: int, fused: bool) -> int:
    """Return the bytes that autograd keeps for the second of two blocks, in bf16 with a GPU's kernels."""
    workload = Workload(
        "block",
        lambda: nn.Sequential(MegatronBlock(h, a, fused), MegatronBlock(h, a, fused)),
        lambda batch, seq: torch.empty(batch, seq, h),  # type: ignore[arg-type]
        lambda model, x: model(x).float().sum(),
        batch_size=b,
        seq_len=s,
        optimizer=None,
    )
    graph = record(fake_step(workload.with_dtype("bf16"), find_planning_device("h200")))
    _, second = blocks(graph)

    def kept(of: tuple[int, int]) -> int:
        return int(Memory(graph).curve((), plain=of).alive_bytes[graph.forward_end - 1])

    return kept(second) - kept((0, 0))


@pytest.mark.fast("2-512-2048-16")
@pytest.mark.parametrize(("b", "s", "h", "a"), [(4, 2048, 4096, 32), (1, 1024, 1024, 16), (2, 512, 2048, 16)])
def test_the_interior_of_a_block_is_34_and_5_bytes(b: int, s: int, h: int, a: int) -> None:
    """s b h (34 + 5 a s / h) bytes; the tensors of a few bytes a token (statistics) are beyond the formula."""
    assert interior_bytes(b, s, h, a, False) == pytest.approx(s * b * h * (34 + 5 * a * s / h), rel=0.02)


def test_the_interiors_of_llama_2_7b() -> None:
    unfused = 32 * interior_bytes(4, 2048, 4096, 32, False)
    assert unfused / GB == pytest.approx(122.4, rel=0.02)


def test_fused_attention_leaves_34_bytes() -> None:
    fused = 32 * interior_bytes(4, 2048, 4096, 32, True)
    assert fused / GB == pytest.approx(36.5, rel=0.05)


def test_selective_recomputation_of_attention_frees_70_percent_of_a_block_of_gpt3() -> None:
    whole, without = (interior_bytes(1, 2048, 12288, 96, fused) for fused in (False, True))
    assert 1 - without / whole == pytest.approx(80 / (34 + 80), abs=0.02)


@pytest.mark.exhaustive
@pytest.mark.nightly
def test_interiors_are_linear_in_the_batch_and_quadratic_in_the_sequence_unless_fused() -> None:
    two, four, eight = (interior_bytes(b, 512, 1024, 16, False) for b in (2, 4, 8))
    assert eight - four == 2 * (four - two)
    for fused, degree in ((False, 2), (True, 1)):
        sizes = [interior_bytes(2, s, 1024, 16, fused) for s in (256, 512, 768, 1024)]
        fit = np.polynomial.Polynomial.fit([256, 512, 768, 1024], sizes, 3).convert().coef
        share = fit[2] * 1024**2 / sizes[-1]
        assert (share > 0.5) == (degree == 2) and abs(fit[3] * 1024**3) < 1e-3 * sizes[-1]


# Chains: N layers, a boundary c, an interior A, a region every K layers


def chain_bytes(every: int, layers: int = 32, interior: float = 1.6 * GB, boundary: float = 67e6) -> float:
    """(N/K) c + K A, with the evaluator on a toy chain of so many layers."""
    size, kept = round(boundary / 1e6), round(interior / 1e6)  # in megabytes
    nodes = [ToyNode(size, (i - 1,) if i else (), frozenset({"extra"}), extra=kept) for i in range(layers)]
    graph, _ = toy_graph(nodes)
    regions = [Region(first, min(first + every, layers)) for first in range(0, layers, every)]
    return Memory(graph).curve(regions).peak_bytes * 1e6


@pytest.mark.parametrize(("every", "gigabytes"), [(1, 3.75), (4, 6.94), (6, 10.0)])
def test_of_32_layers_with_large_interiors_every_layer_is_the_best_region(every: int, gigabytes: float) -> None:
    """1.6 GB of interior, 67 MB of boundary: sqrt(N) would be about 6."""
    assert 32 / every * 0.067 + every * 1.6 == pytest.approx(gigabytes, abs=0.05)  # the closed form
    assert chain_bytes(every) == pytest.approx(gigabytes * GB, rel=0.04)


def test_the_best_spacing_is_the_root_of_n_only_where_boundaries_weigh_as_much_as_interiors() -> None:
    def best(interior: float, boundary: float, layers: int = 36) -> int:
        spacings = [every for every in range(1, layers + 1) if layers % every == 0]
        return min(spacings, key=lambda k: chain_bytes(k, layers, interior, boundary))

    assert best(1.6 * GB, 67e6) == 1  # sqrt(N c / A) = 1.2
    assert best(GB, GB) == 6
