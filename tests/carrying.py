"""Models whose forward keeps something for the next one: a memory, a queue, a counter, a generator, a table.

Each is of another architecture, and keeps it in another place. `CARRYING` has those whose numbers depend on it,
`COUNTING` those that change Python numbers.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from remat.workload.workload import Workload

WIDTH, ROWS, CLASSES = 32, 64, 8


class Half(nn.Module):
    """The feed-forward half of a transformer's layer."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


class Stack(nn.Module):
    """Layers and a head; subclasses keep something on the way."""

    layer: Callable[[], nn.Module] = Half

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList([type(self).layer() for _ in range(layers)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        y: torch.Tensor = self.head(x)
        return y


# What is carried


class Truncated(nn.Module):
    """Truncated backpropagation through time: the detached state of a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(WIDTH, WIDTH, 2, batch_first=True), Stack(2)
        self.state: tuple[torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, state = self.rnn(x.view(8, -1, WIDTH), None if self.state is None else self.state[0])
        self.state = (state.detach(),)
        y: torch.Tensor = self.head(x.flatten(0, 1))
        return y


class Segments(nn.Module):
    """The memory of Transformer-XL: as many positions of earlier segments as fit, of each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleList([nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2)])
        self.halves, self.head = nn.ModuleList([Half() for _ in range(2)]), nn.Linear(WIDTH, CLASSES)
        self.memory: list[torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, memory = x.view(8, -1, WIDTH), []
        for i, (attention, half) in enumerate(zip(self.attention, self.halves, strict=True)):
            seen = x if self.memory is None else torch.cat([self.memory[i], x], 1)
            memory.append(seen[:, -16:].detach())
            x = half(x + attention(x, seen, seen, need_weights=False)[0])
        self.memory = memory
        y: torch.Tensor = self.head(x).flatten(0, 1)
        return y


class Queue(Stack):
    """A queue of features that fills, and that every forward compares its own with."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: collections.deque[torch.Tensor] = collections.deque(maxlen=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        features, y = F.normalize(x, dim=-1), self.head(x)
        if self.queue:
            y = y + 0.1 * (features @ torch.cat([*self.queue]).t()).logsumexp(-1, keepdim=True)
        self.queue.append(features[:16].detach())
        return y


class Momentum(nn.Module):
    """A second encoder that follows the first, in its own parameters, and a queue in a tensor (MoCo)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.follower = (nn.Sequential(Half(), Half(), nn.Linear(WIDTH, 16)) for _ in range(2))
        self.follower.requires_grad_(False)
        self.queue, self.head = F.normalize(torch.randn(16, 64), dim=0), nn.Linear(64, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = F.normalize(self.encoder(x), dim=1)
        with torch.no_grad():
            for ours, theirs in zip(self.encoder.parameters(), self.follower.parameters(), strict=True):
                theirs.data = theirs.data * 0.9 + ours.data * 0.1
            key = F.normalize(self.follower(x), dim=1)
        y: torch.Tensor = (query * key).sum(1, keepdim=True) + self.head(query @ self.queue)
        self.queue = torch.cat([key[:8].t(), self.queue[:, :-8]], 1)
        return y


class Taught(nn.Module):
    """A teacher that follows in place, and is far from the student when training begins (BYOL)."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = (nn.Sequential(Half(), Half()) for _ in range(2))
        self.teacher.requires_grad_(False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for theirs, ours in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                theirs.mul_(0.9).add_(ours, alpha=0.1)
            target = self.teacher(x)
        y: torch.Tensor = self.head(self.student(x) - target)
        return y


class Codebook(nn.Module):
    """Vector quantisation whose codes are running averages, in plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Sequential(Half(), Half()), Stack(2)
        self.codes, self.count = torch.randn(16, WIDTH), torch.ones(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder(x)
        with torch.no_grad():
            chosen = F.one_hot(torch.cdist(x, self.codes).argmin(1), 16).float()
        y: torch.Tensor = self.decoder(x + (chosen @ self.codes - x).detach())
        with torch.no_grad():
            self.count = 0.9 * self.count + 0.1 * chosen.sum(0)
            self.codes = 0.9 * self.codes + 0.1 * (chosen.t() @ x) / self.count[:, None]
        return y


class Averaged(Half):
    """Takes a running average off, which it changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.average = torch.zeros(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return super().forward(x - self.average)


class Averages(Stack):
    layer = Averaged


class Centred(nn.Module):
    """A convolutional net whose outputs are centred by what they were (DINO)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.layers = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1) for _ in range(3)])
        self.head = nn.Linear(8 * WIDTH, CLASSES)
        self.centre: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(x.view(-1, 1, 4, WIDTH // 4)))
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        y: torch.Tensor = self.head(x.flatten(1))
        mean = y.detach().mean(0)
        self.centre = mean if self.centre is None else 0.9 * self.centre + 0.1 * mean
        return y - self.centre


@dataclasses.dataclass
class Bank:
    """A plain object with methods of its own."""

    latest: torch.Tensor | None = None
    calls: int = 0

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        mixed = x if self.latest is None else x + 0.3 * self.latest
        self.latest = x.detach()
        return mixed


class Banked(Stack):
    """The carried state is on an object within an object."""

    def __init__(self) -> None:
        super().__init__()
        self.banks = {"first": [Bank()]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        return super().forward(self.banks["first"][0].mixed(x))


class Cached(Stack):
    """Every layer adds what it had in the last forward, from one dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            if i in self.cache:
                x = x + 0.1 * self.cache[i]
            self.cache[i] = x.detach()
            x = layer(x)
        y: torch.Tensor = self.head(x)
        return y


class Hooked(Stack):
    """A hook that somebody put on a layer keeps what it returned, and adds it."""

    def __init__(self) -> None:
        super().__init__()
        past: list[torch.Tensor] = []

        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            found = output + 0.1 * past[0] if past else output
            past[:] = [output.detach()]
            return found

        self.layers[1].register_forward_hook(hook)


class Shared(Stack):
    """The carried state belongs to the class."""

    past: dict[str, torch.Tensor] = {}  # noqa: RUF012

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        past, self.past["x"] = self.past.get("x"), x.detach()
        return super().forward(x if past is None else x + 0.1 * past)


class Buffered(Stack):
    """A buffer that is replaced, and is nothing at first."""

    past: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("past", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        past, self.past = self.past, x.detach()
        return super().forward(x if past is None else self.layers[0](x + past))


class Noisy(Stack):
    """Noise of generators of its own: torch's, numpy's and Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.ours, self.numpys, self.pythons = torch.Generator(), np.random.default_rng(3), random.Random(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x * torch.empty_like(x).bernoulli_(0.9, generator=self.ours))
        y: torch.Tensor = self.head(x)
        return y * self.pythons.uniform(0.9, 1.1)


class Statistics(Stack):
    """Notes every forward, and reads none of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.norms.append(x.detach().norm())
        return super().forward(x)


class Tabled(Stack):
    """Makes its tables when they are first needed."""

    def __init__(self) -> None:
        super().__init__()
        self.table: torch.Tensor | None = None
        self.tables: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(WIDTH).float().cos()
        if len(x) not in self.tables:
            self.tables[len(x)] = torch.arange(len(x)).float().sin()[:, None]
        return super().forward(x * self.table + self.tables[len(x)])


class Pointed(Stack):
    """A queue in a buffer, and where its next features go in another (MoCo)."""

    queue: torch.Tensor
    pointer: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", F.normalize(torch.randn(WIDTH, 64), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def enqueue(self, features: torch.Tensor) -> None:
        at = int(self.pointer)
        self.queue[:, at : at + 16] = features[:16].t()
        self.pointer[0] = (at + 16) % 64

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        features = F.normalize(x, dim=-1)
        y: torch.Tensor = self.head(x) + 0.1 * (features @ self.queue.clone()).logsumexp(-1, keepdim=True)
        self.enqueue(features)
        return y


class Initialized(Stack):
    """Scales to the first batch, and notes in a buffer that this is done (activation normalization of Glow)."""

    is_done: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("is_done", torch.tensor(0, dtype=torch.uint8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        if self.training and self.is_done.item() == 0:
            self.scale.data.copy_(1 / (x.detach().std(0) + 0.1))
            self.is_done.fill_(1)
        return super().forward(x * self.scale)


CARRYING: dict[str, Callable[[], nn.Module]] = {
    kind.__name__.lower(): kind
    for kind in (
        *(
            Truncated,
            Segments,
            Queue,
            Momentum,
            Taught,
            Codebook,
            Averages,
            Centred,
            Banked,
            Cached,
            Hooked,
            Shared,
            Buffered,
        ),
        *(Noisy, Statistics, Tabled, Pointed, Initialized),
    )
}


# Numbers that change


class Counting(Stack):
    """Changes numbers as `count` says, which gives the factor of the result."""

    def __init__(self, count: Callable[[Counting], float]) -> None:
        super().__init__()
        self.count = count
        self.steps, self.rate, self.table, self.ordered = 0, 1.0, {"steps": 0}, [0, 1.0]
        self.bank = Bank()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x) * self.count(self)
        return y


def _attribute(model: Counting) -> float:
    model.steps += 1
    return min(1.0, model.steps / 1000)


def _decay(model: Counting) -> float:
    model.rate = max(0.5, 0.99 * model.rate)
    return model.rate


def _dictionary(model: Counting) -> float:
    model.table["steps"] += 1
    return 0.9 ** model.table["steps"]


def _list(model: Counting) -> float:
    model.ordered[0] += 1
    return 1 / (1 + model.ordered[0])


def _object(model: Counting) -> float:
    model.bank = dataclasses.replace(model.bank, calls=model.bank.calls + 1)
    return 1 + model.bank.calls / 100


def _annealed(model: Counting) -> float:
    model.steps += 1
    return max(0.5, math.exp(-0.01 * model.steps)) * math.cos(model.steps / 100)


def _with_numpy(model: Counting) -> float:
    model.steps += 1
    return float(2 / (1 + np.exp(-model.steps / 10)) - 1)


def _without_gradients(model: Counting) -> float:
    with torch.no_grad():
        model.steps += 1
    return min(1.0, model.steps / 1000)


def _unused(model: Counting) -> float:
    model.steps += 1
    return 1.0


class Dropping(Stack):
    """Drops more and more."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        for layer in self.layers:
            x = F.dropout(layer(x), min(0.5, 0.01 * self.steps))
        y: torch.Tensor = self.head(x)
        return y


class Layered(Half):
    """Every layer counts for itself."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x * (1 + 0.001 * self.calls))


class LayersCount(Stack):
    layer = Layered


class Broken(Stack):
    """Several graphs, each of which reads the counter."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        for layer in self.layers:
            x = layer(x) * (1 + 0.001 * self.steps)
            torch._dynamo.graph_break()
        y: torch.Tensor = self.head(x)
        return y


class BrokenBehind(Stack):
    """A break behind arithmetic that a later graph uses; a graph that only hands the result on has no nodes either."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.register_buffer("is_set", torch.tensor(True))

    def handed_on(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.is_set else -x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.steps += 1
            factor = 1 + self.steps
        torch._dynamo.graph_break()
        y = super().forward(x) * (factor / 100)
        later = 2 * self.steps
        return self.handed_on(y) * (later / 100)


class BufferCounts(Stack):
    """Counts in a buffer, and computes with the number that it reads off it."""

    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        y: torch.Tensor = super().forward(x) * min(1.0, self.steps.item() / 1000)
        return y


class BufferReadTwice(BufferCounts):
    """Decides by the number, and computes with it later."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.steps.item() < 0:
            x = -x
        factor = min(1.0, self.steps.item() / 1000)
        y: torch.Tensor = Stack.forward(self, x) * factor
        return y


class BufferDecays(BufferCounts):
    """A running average whose decay is a float that is read off a tensor, between two breaks."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        decay = (1 + self.steps) / (10 + self.steps)
        with torch.no_grad():
            self.mean.mul_(decay).add_(x.mean(0), alpha=1 - float(decay))
        return Stack.forward(self, x - self.mean)


COUNTING: dict[str, Callable[[], nn.Module]] = {
    **{
        count.__name__.strip("_"): functools.partial(Counting, count)
        for count in (
            _attribute,
            _decay,
            _dictionary,
            _list,
            _object,
            _annealed,
            _with_numpy,
            _without_gradients,
            _unused,
        )
    },
    "dropout": Dropping,
    "layers": LayersCount,
    "several-graphs": Broken,
    "broken-behind": BrokenBehind,
    "buffer": BufferCounts,
    "buffer-read-twice": BufferReadTwice,
    "buffer-decays": BufferDecays,
}


def workload(build: Callable[[], nn.Module], **changes: Any) -> Workload:
    def batch(samples: int, length: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(samples, WIDTH), torch.randint(0, CLASSES, (samples,))

    def step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return dataclasses.replace(Workload("carrying", build, batch, step, batch_size=ROWS), **changes)


def forget() -> None:
    """Let classes go of what they carry."""
    Shared.past.clear()


def names_of(models: dict[str, Any], few: set[str]) -> list[Any]:
    """Parameters for a test: all names, of which those that are not among `few` are exhaustive."""
    import pytest

    return [pytest.param(name, marks=() if name in few else pytest.mark.exhaustive) for name in models]
