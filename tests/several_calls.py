"""Steps that call their model more than once, or modules of it in its place: encoders, critics, roll-outs, caches."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from remat.workload.workload import Workload

WIDTH = 32


def mlp(*widths: int) -> nn.Sequential:
    layers = [(nn.Linear(a, b), nn.SiLU()) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*[each for pair in layers for each in pair][:-1])


def critic_step(model: nn.Module, batch: Any) -> torch.Tensor:
    real, fake = batch
    return F.relu(1 - model(real)).mean() + F.relu(1 + model(fake)).mean()


class Encoder(nn.Module):
    """A transformer that takes a mask; columns of other lengths have other graphs."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        make = nn.TransformerEncoderLayer
        self.layers = nn.ModuleList([make(WIDTH, 2, 4 * WIDTH, dropout, batch_first=True) for _ in range(3)])

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=mask)
        return F.normalize((x * ~mask.unsqueeze(-1)).sum(1), dim=-1)


def pairs(samples: int, _: int | None) -> Any:
    columns = []
    for length in (12, 20):
        ids = torch.randint(50, (samples, length))
        lengths = torch.randint(length // 2, length + 1, (samples,))
        columns.append((ids, torch.arange(length) >= lengths[:, None]))
    return columns


def contrastive_step(model: nn.Module, batch: Any) -> torch.Tensor:
    first, second = (model(ids, mask) for ids, mask in batch)
    return F.cross_entropy(10 * first @ second.T, torch.arange(len(first)))


class Convolutions(nn.Module):
    """Normalised over the batch: its statistics change in every call, and once in each."""

    def __init__(self) -> None:
        super().__init__()
        channels = (3, 8, 16, 16)
        parts: list[nn.Module] = []
        for a, b in itertools.pairwise(channels):
            parts += [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True)]
        self.features, self.head = nn.Sequential(*parts), nn.Linear(16, 8)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.features(images).mean((2, 3)))
        return found


def triplet_step(model: nn.Module, batch: Any) -> torch.Tensor:
    anchor, positive, negative = map(model, batch)
    return F.triplet_margin_loss(anchor, positive, negative)


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gates, self.out, self.drop = nn.Linear(2 * WIDTH, 3 * WIDTH), mlp(WIDTH, 4 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keep, write, value = self.gates(torch.cat([x, state], -1)).chunk(3, -1)
        state = torch.sigmoid(keep) * state + torch.sigmoid(write) * torch.tanh(value)
        return self.drop(self.out(state)), state


def rollout_step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Every step predicts the next, and goes on from its own prediction."""
    state, x = torch.zeros_like(batch[0]), batch[0]
    loss = torch.zeros(())
    for target in batch[1:]:
        x, state = model(x, state)
        loss = loss + F.mse_loss(x, target)
    return loss


class Adversaries(nn.Module):
    """Two models in one, without a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = mlp(16, 128, 128, WIDTH), mlp(WIDTH, 128, 128, 1)


def gan_step(model: Any, batch: Any) -> torch.Tensor:
    real, noise = batch
    made = model.generator(noise)
    judged = F.softplus(model.critic(made.detach())).mean() + F.softplus(-model.critic(real)).mean()
    return judged + F.softplus(-model.critic(made)).mean()


class InParts(nn.Module):
    """A forward, and methods that people call in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp(WIDTH, 256, 256, 64), mlp(64, 256, 1)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.body(x), dim=-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.body(x))
        return found


def encode_step(model: Any, batch: Any) -> torch.Tensor:
    first, second = map(model.encode, batch)
    return F.mse_loss(first, second) + model.head(first).square().mean()


def mixed_step(model: Any, batch: Any) -> torch.Tensor:
    first, second = batch
    return F.relu(1 + model(first) - model.head(model.encode(second))).mean()


def layers_step(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """The forward written out, layer by layer."""
    for layer in model:
        batch = layer(batch)
    return batch.square().mean()


def blocks() -> nn.ModuleList:
    return nn.ModuleList([mlp(WIDTH, 256, WIDTH) for _ in range(3)])


def teacher_step(model: nn.Module, batch: Any) -> torch.Tensor:
    first, second = batch
    with torch.no_grad():
        target = model(second)
    return F.mse_loss(model(first), target)


class State:
    """The state of a generator, to draw the same numbers again."""

    def __init__(self) -> None:
        self.state = torch.get_rng_state()

    def __enter__(self) -> None:
        self.after = torch.get_rng_state()
        torch.set_rng_state(self.state)

    def __exit__(self, *error: Any) -> None:
        torch.set_rng_state(self.after)


def cached_step(model: nn.Module, batch: Any, mini_batch: int = 16) -> torch.Tensor:
    """GradCache: embeddings without gradients, and each mini-batch once more in the backward of the loss."""
    columns = [
        [(i, m) for i, m in zip(ids.split(mini_batch), mask.split(mini_batch), strict=True)] for ids, mask in batch
    ]
    states: list[list[State]] = []
    embedded: list[list[torch.Tensor]] = []
    for column in columns:
        states.append([])
        embedded.append([])
        for part in column:
            states[-1].append(State())
            with torch.no_grad():
                embedded[-1].append(model(*part).detach().requires_grad_())
    first, second = map(torch.cat, embedded)
    inner = F.cross_entropy(10 * first @ second.T, torch.arange(len(first)))
    inner.backward()
    gradients = [[each.grad for each in column] for column in embedded]
    loss = inner.detach().requires_grad_()

    def run_again(scale: torch.Tensor) -> None:
        with torch.enable_grad():
            for column, known, wanted in zip(columns, states, gradients, strict=True):
                for part, state, gradient in zip(column, known, wanted, strict=True):
                    with state:
                        found = model(*part)
                    (torch.dot(found.flatten(), gradient.flatten()) * scale).backward()  # type: ignore[union-attr]

    loss.register_hook(run_again)
    return loss


def vectors(count: int, *widths: int) -> Callable[[int, int | None], Any]:
    return lambda samples, _: tuple(torch.randn(samples, width) for width in widths * count)


def workload(name: str, build: Callable[[], nn.Module], batch: Any, step: Any, samples: int) -> Workload:
    return Workload(name, build, batch, step, batch_size=samples)


STEPS = {
    each.name: each
    for each in (
        workload("critic", lambda: mlp(64, 256, 256, 1), vectors(2, 64), critic_step, 128),
        workload("siamese", Encoder, pairs, contrastive_step, 16),
        workload(
            "triplet", Convolutions, lambda n, _: tuple(torch.randn(n, 3, 16, 16) for _ in range(3)), triplet_step, 8
        ),
        workload("rollout", Cell, lambda n, _: torch.randn(7, n, WIDTH), rollout_step, 256),
        workload("gan", Adversaries, vectors(1, WIDTH, 16), gan_step, 256),
        workload("encode", InParts, vectors(2, WIDTH), encode_step, 256),
        workload("mixed", InParts, vectors(2, WIDTH), mixed_step, 256),
        workload("layers", blocks, lambda n, _: torch.randn(n, WIDTH), layers_step, 256),
        workload("teacher", lambda: mlp(WIDTH, 256, 256, 64), vectors(2, WIDTH), teacher_step, 256),
        workload("cached", Encoder, pairs, cached_step, 64),
    )
}
