"""Layers that real models are made of and that recomputation can get wrong, one difficulty each, by name.

Each takes a float tensor (samples, LENGTH, WIDTH) and gives one like it, so that any of them can follow any other.
`model_of` stacks them between linear layers; `largest` and its variants are regions around whatever may be in one.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat.evaluation.graph import OUTSIDE, Graph
from remat.evaluation.plan import Region
from remat.formulation.search_space import legal_cuts, saveable
from remat.workload.workload import Workload

WIDTH, LENGTH, SAMPLES = 8, 6, 4


class Lambda(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Transposed(nn.Module):
    """A layer for (samples, channels, length)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(1, 2)).transpose(1, 2)


class Images(nn.Module):
    """A layer for (samples, channels, height, width)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.unflatten(1, (2, -1)).permute(0, 3, 1, 2)).permute(0, 2, 3, 1).flatten(1, 2)


# Randomness


class Attention(nn.Module):
    """Dropout inside fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        rate = 0.3 if self.training else 0.0
        return x + F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True).transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    """The library's own attention, with its dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


class DropPath(nn.Module):
    """Whole samples are dropped, as timm writes it: a new tensor, filled in place, scaled in place."""

    def forward(self, x: Tensor) -> Tensor:
        keep = 0.6
        mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
        mask.div_(keep)
        return x + x.tanh() * mask


class FlooredDropPath(nn.Module):
    """The same as transformers writes it."""

    def forward(self, x: Tensor) -> Tensor:
        keep = 0.6
        mask = keep + torch.rand((x.shape[0], 1, 1), dtype=x.dtype, device=x.device)
        mask.floor_()
        return x + x.tanh().div(keep) * mask


class Gumbel(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.gumbel_softmax(x, tau=0.7, hard=True) * x


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand_like(x) + torch.randn(x.shape[-1], device=x.device) * x


RANDOM: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Dropout(0.4),
    "dropout-in-place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4, inplace=True)),
    "dropout-functional": lambda: Lambda(lambda x: F.dropout(x, 0.4)),
    "dropout-of-channels": lambda: Transposed(nn.Dropout1d(0.4)),
    "dropout-of-images": lambda: Images(nn.Dropout2d(0.4)),
    "alpha-dropout": lambda: nn.AlphaDropout(0.4),
    "feature-alpha-dropout": lambda: nn.FeatureAlphaDropout(0.4),
    "everything-dropped": lambda: Lambda(lambda x: x + F.dropout(x, 1.0)),
    "rrelu": lambda: nn.RReLU(),
    "fused-attention": Attention,
    "multi-head-attention": SelfAttention,
    "encoder-layer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.3, batch_first=True),
    "drop-path": DropPath,
    "drop-path-floored": FlooredDropPath,
    "gumbel": Gumbel,
    "noise": Noise,
}


# State that a forward changes


class SharedNorm(nn.Module):
    """One batch normalisation, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        return self.norm(self.norm(x).tanh()).transpose(1, 2)


class MovingAverage(nn.Module):
    """A buffer changed in place, as an exponential moving average is, and read."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        return x - self.mean


class Assigned(nn.Module):
    """A buffer replaced by a new tensor."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        return x - self.mean


class CountedScale(nn.Module):
    """A counter that the output depends on: read, advanced, and read again."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        x = x.tanh() * (1 + self.steps)
        self.steps += 1
        return x / (1 + self.steps)


class ReadThenWritten(nn.Module):
    """A buffer that is read before it is written, its value saved by nobody."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = (x + self.shift).tanh()
        with torch.no_grad():
            self.shift.add_(1.0)
        return x


class ViewedThenWritten(nn.Module):
    """Views of buffers are taken amid operators that are recomputed, and the buffers are written after their use."""

    codes: Tensor
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.linspace(-1.0, 1.0, WIDTH * WIDTH).reshape(WIDTH, WIDTH))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        codes, steps = self.codes.t(), self.steps.view(1)
        x = x.tanh()
        shift = codes[0]
        x = (x.sigmoid() + shift).cos()
        with torch.no_grad():
            self.codes.mul_(0.9)
            steps.add_(1)
        return x


class Renormalized(nn.Module):
    """The running statistics of a normalization are read beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        assert self.norm.running_var is not None
        spread = (self.norm.running_var + 1e-3).sqrt()
        x = x.tanh() / spread
        return self.norm(x.transpose(1, 2)).transpose(1, 2).sin()


class TrainedThenEvaluated(nn.Module):
    """A second pass normalizes by the running statistics that the first pass has updated."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        norm, first = self.norm, self.norm(x).sin()
        return first + F.batch_norm(x.cos(), norm.running_mean, norm.running_var, norm.weight, norm.bias).sin()


class StackedStatistics(nn.Module):
    """The statistics of several domains are rows of one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("means", torch.zeros(2, LENGTH))
        self.register_buffer("variances", torch.ones(2, LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        means, variances = self.get_buffer("means"), self.get_buffer("variances")
        return F.batch_norm(x.sin(), means[1], variances[1], training=True).cos()


class OwnOperator(nn.Module):
    """`torch.batch_norm` itself, whose arguments have another order."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        of = self.norm
        given = x.sin(), of.weight, of.bias, of.running_mean, of.running_var
        return torch.batch_norm(*given, True, 0.1, 1e-5, False).cos()


class Queue(nn.Module):
    """A slice of a buffer is overwritten, as in a memory bank."""

    bank: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.bank[1:2] = x.mean((0, 1))
        return x * self.bank.sum(0).cos()


class SparseMask(nn.Module):
    """Keeps a sparse mask, as Whisper does its heads for alignment; training does not read it."""

    def __init__(self, *, reads: bool = False) -> None:
        super().__init__()
        self.linear, self.reads = nn.Linear(WIDTH, WIDTH), reads
        self.register_buffer("mask", torch.eye(WIDTH).to_sparse(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return torch.sparse.mm(self.mask, x[0]) if self.reads else x


STATE: dict[str, Callable[[], nn.Module]] = {
    "batch-norm": lambda: Transposed(nn.BatchNorm1d(WIDTH)),
    "batch-norm-of-images": lambda: Images(nn.BatchNorm2d(WIDTH)),
    "batch-norm-without-statistics": lambda: Transposed(nn.BatchNorm1d(WIDTH, track_running_stats=False)),
    "batch-norm-without-weights": lambda: Transposed(nn.BatchNorm1d(WIDTH, affine=False)),
    "batch-norm-cumulative": lambda: Transposed(nn.BatchNorm1d(WIDTH, momentum=None)),
    "batch-norm-shared": SharedNorm,
    "instance-norm": lambda: Transposed(nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=True)),
    "moving-average": MovingAverage,
    "assigned-buffer": Assigned,
    "counted-scale": CountedScale,
    "read-then-written": ReadThenWritten,
    "viewed-then-written": ViewedThenWritten,
    "renormalized": Renormalized,
    "trained-then-evaluated": TrainedThenEvaluated,
    "stacked-statistics": StackedStatistics,
    "own-operator": OwnOperator,
    "queue": Queue,
    "sparse-buffer": SparseMask,
    "sparse-product": lambda: SparseMask(reads=True),
    "spectral-norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "weight-norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
}


# Values: in place, views, several outputs


def _sliced(x: Tensor) -> Tensor:
    y = x.sin()
    y[:, 0] = 0.5
    y[:, 1:3].mul_(2.0)
    return y + x


def _accumulated(x: Tensor) -> Tensor:
    y = x.cos()
    y += x.sin()
    y.mul_(0.9)
    return y


def _through_a_view(x: Tensor) -> Tensor:
    y = x.sin()
    y.transpose(0, 1).mul_(0.5)
    return y.transpose(1, 2).contiguous().transpose(1, 2) * x


def _masked(x: Tensor) -> Tensor:
    return x.cos().masked_fill_(x.detach() > 0.5, 0.0) + x


def _halves(x: Tensor) -> Tensor:
    left, right = x.sin().chunk(2, dim=-1)
    return torch.cat([right.exp(), left * right], dim=-1)


def _unbound(x: Tensor) -> Tensor:
    return torch.stack([row.tanh() for row in x.sigmoid().unbind(1)], dim=1)


def _sorted(x: Tensor) -> Tensor:
    values, order = x.sort(dim=-1)
    best, where = x.topk(2, dim=-1)
    return values * order.to(x.dtype).cos() + best.sum(-1, keepdim=True) * where.sum(-1, keepdim=True)


def _extremes(x: Tensor) -> Tensor:
    most, _ = x.max(dim=1, keepdim=True)
    least, most_of_all = torch.aminmax(x.exp(), dim=-1, keepdim=True)
    return x.tanh() * most + least * most_of_all


def _deviations(x: Tensor) -> Tensor:
    variance, mean = torch.var_mean(x, dim=-1, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + 1e-3)


def _expanded(x: Tensor) -> Tensor:
    weights = x.mean(1, keepdim=True).expand(-1, x.shape[1], -1)
    return x * weights.softmax(-1).unsqueeze(0).squeeze(0)


def _diagonal(x: Tensor) -> Tensor:
    y = x.sin()
    y.diagonal(dim1=1, dim2=2).add_(1.0)
    return y * x.flip(1).roll(1, -1)


def _heard(x: Tensor) -> Tensor:
    """`istft` reads whether its windows overlap."""
    window = torch.hann_window(8)
    spectrum = torch.stft(x.flatten(1), 8, window=window, return_complex=True)
    return torch.istft(spectrum, 8, window=window, length=LENGTH * WIDTH).view_as(x)


VALUES: dict[str, Callable[[], nn.Module]] = {
    "relu-in-place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
    "slices-assigned": lambda: Lambda(_sliced),
    "sum-in-place": lambda: Lambda(_accumulated),
    "in-place-through-a-view": lambda: Lambda(_through_a_view),
    "masked-in-place": lambda: Lambda(_masked),
    "diagonal-in-place": lambda: Lambda(_diagonal),
    "halves": lambda: Lambda(_halves),
    "unbound": lambda: Lambda(_unbound),
    "sorted": lambda: Lambda(_sorted),
    "extremes": lambda: Lambda(_extremes),
    "variance-and-mean": lambda: Lambda(_deviations),
    "expanded": lambda: Lambda(_expanded),
    "checked-by-torch": lambda: Lambda(_heard),
    "one-hot": lambda: Lambda(lambda x: x * F.one_hot(x.argmax(-1), WIDTH)),
    "pooled-with-indices": lambda: Transposed(
        Lambda(lambda x: F.max_unpool1d(*F.max_pool1d_with_indices(x, (2,)), kernel_size=(2,)))
    ),
}


# Structure


class Twice(nn.Module):
    """One layer, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).tanh()).sigmoid()


class Transposing(nn.Module):
    """Two uses of one weight, one of them transposed, as between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).relu() @ self.weight.t()


class Exponential(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x.exp()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (result,) = ctx.saved_tensors
        return gradient * result * 0.5


class Lstm(nn.Module):
    """Dynamo does not follow into it: two graphs, and an operator outside them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.rnn, self.down = nn.Linear(WIDTH, WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.rnn(self.up(x).tanh())[0])


class Break(nn.Module):
    """Two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x).tanh()
        torch._dynamo.graph_break()
        return self.after(x).sigmoid()


class Brackets(nn.Module):
    """Contexts opened and closed within."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x).tanh()
        with torch.no_grad():
            scale = x.abs().amax(dim=-1, keepdim=True) + 1
        with torch.autocast("cpu", enabled=False):
            return (x.float() / scale.float()).exp()


class Checkpointed(nn.Module):
    """The user's own checkpoint, with a dropout in it."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=self.reentrant)


STRUCTURE: dict[str, Callable[[], nn.Module]] = {
    "one-layer-twice": Twice,
    "one-weight-twice": Transposing,
    "function-of-its-own": lambda: Lambda(Exponential.apply),
    "lstm": Lstm,
    "graph-break": Break,
    "brackets": Brackets,
    "frozen": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
    "checkpointed": Checkpointed,
    "checkpointed-reentrant": lambda: Checkpointed(reentrant=True),
}

TRICKY_LAYERS = {**RANDOM, **STATE, **VALUES, **STRUCTURE}


class Stack(nn.Module):
    """Tricky layers between linear ones, and a loss."""

    def __init__(self, tricky: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), layer) for layer in tricky)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def vectors(samples: int, length: int | None) -> Tensor:
    return torch.randn(samples, length or LENGTH, WIDTH)


def step(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch)
    return loss


def workload_of(name: str, copies: int = 2, **options: Any) -> Workload:
    """A model of `copies` of the piece called `name`."""

    def build() -> nn.Module:
        return Stack([TRICKY_LAYERS[name]() for _ in range(copies)])

    return Workload(name, build, vectors, step, batch_size=SAMPLES, seq_len=LENGTH, **options)


# Regions around whatever may be in one


def largest(graph: Graph) -> tuple[Region, ...]:
    """The fewest regions that hold all nodes that may be in one."""
    cuts = legal_cuts(graph)
    plain = [node.call == OUTSIDE or node.effect == "other" for node in graph.nodes]
    regions: list[Region] = []
    first = 0
    while first < len(cuts) - 1:
        a, found = cuts[first], 0
        for i in range(first + 1, len(cuts)):
            inside = range(a, cuts[i])
            if any(plain[v] for v in inside) or len({graph.nodes[v].call for v in inside}) > 1:
                break
            found = i
        if found:
            regions.append(Region(a, cuts[found]))
        first = found or first + 1
    return tuple(regions)


def thirds(graph: Graph) -> tuple[Region, ...]:
    """The same regions, each cut in about three."""
    cuts = legal_cuts(graph)
    found = []
    for region in largest(graph):
        within = [p for p in cuts if region.first <= p <= region.end]
        marks = sorted({within[round(k * (len(within) - 1) / 3)] for k in range(4)})
        found += [Region(a, b) for a, b in itertools.pairwise(marks)]
    return tuple(found)


def saving(graph: Graph) -> tuple[Region, ...]:
    """The largest regions, each saving every second node that it may."""
    can_save = saveable(graph)[::2]
    return tuple(dataclasses.replace(r, saved=tuple(v for v in can_save if v in r)) for r in largest(graph))


def nested(graph: Graph) -> tuple[Region, ...]:
    """The largest regions, each made of smaller ones."""
    parts = thirds(graph)
    return tuple(dataclasses.replace(r, inner=tuple(p for p in parts if p.first in r)) for r in largest(graph))


CHOICES: dict[str, Callable[[Graph], tuple[Region, ...]]] = {
    "largest": largest,
    "thirds": thirds,
    "saving": saving,
    "nested": nested,
}
