"""Crossings: networks in which much that is made early is read late, so that many storages cross every cut.

Skip connections of two UNets, all that a DenseNet concatenates, an encoder's output that every decoder layer reads: the
hardest for a chain of segments. How soon is a budget refused that nothing keeps, and how close to its bound is a plan
after a minute? Costs are estimated.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import report
from remat.costing.planning_device import find_planning_device
from remat.formulation.problem import Problem
from remat.formulation.search_space import find_space
from remat.formulation.solution import Limits
from remat.planning.profiling import fake_step, profile_step
from remat.solvers import load
from remat.solvers.least_peak import least_peak
from remat.units import GIB
from remat.workload.workload import Workload

TARGET = "h100-80gb"
PERCENTS = (10, 50, 90)
TIME_S = 60.0
COLUMNS = ["model", "percent", "budget_gib", "status", "exact_ms", "gap", "solver", "solve_s", "solve_cpu_s"]
COLUMNS += ["refused_s", "segments", "runs", "parameters_m", "record_s", "pose_s"]


class Residual(nn.Module):
    """Two convolutions beside a shortcut, as in diffusion UNets (Dhariwal and Nichol 2021, without the time)."""

    def __init__(self, width_in: int, width: int):
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(32, width_in), nn.SiLU(), nn.Conv2d(width_in, width, 3, padding=1))
        self.second = nn.Sequential(nn.GroupNorm(32, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
        self.shortcut = nn.Conv2d(width_in, width, 1) if width_in != width else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shortcut(x) + self.second(self.first(x))


class Attention(nn.Module):
    """Self-attention among the pixels of an image."""

    def __init__(self, width: int, heads: int = 8):
        super().__init__()
        self.norm, self.heads = nn.GroupNorm(32, width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, width, height, length = x.shape
        pixels = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(pixels).view(samples, height * length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.out(mixed).transpose(1, 2).view(samples, width, height, length)


class DiffusionUNet(nn.Module):
    """Every residual block of the way down is read by one of the way up."""

    def __init__(self, widths: Sequence[int] = (256, 512, 768, 1024), blocks: int = 2, channels: int = 4):
        super().__init__()
        self.enter = nn.Conv2d(channels, widths[0], 3, padding=1)
        made, width = [widths[0]], widths[0]
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for level, wide in enumerate(widths):
            for _ in range(blocks):
                self.down.append(self.block(width, wide, level))
                width = wide
                made.append(width)
            if level < len(widths) - 1:
                self.down.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
                made.append(width)
        self.middle = self.block(width, width, len(widths))
        for level, wide in reversed([*enumerate(widths)]):
            for index in range(blocks + 1):
                layers = [self.block(width + made.pop(), wide, level)]
                if level and index == blocks:
                    layers += [nn.Upsample(scale_factor=2), nn.Conv2d(wide, wide, 3, padding=1)]
                self.up.append(nn.Sequential(*layers))
                width = wide
        self.leave = nn.Sequential(nn.GroupNorm(32, width), nn.SiLU(), nn.Conv2d(width, channels, 3, padding=1))

    @staticmethod
    def block(width_in: int, width: int, level: int) -> nn.Module:
        residual = Residual(width_in, width)
        return nn.Sequential(residual, Attention(width)) if level >= 2 else residual

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        skips = [x]
        for layer in self.down:
            x = layer(x)
            skips.append(x)
        x = self.middle(x)
        for layer in self.up:
            x = layer(torch.cat([x, skips.pop()], 1))
        return self.leave(x)


def twice(width_in: int, width: int) -> nn.Module:
    layers: list[nn.Module] = []
    for each in (width_in, width):
        layers += [nn.Conv2d(each, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers)


class SegmentationUNet(nn.Module):
    """U-Net (Ronneberger et al. 2015), with padding and batch norm."""

    def __init__(self, widths: Sequence[int] = (64, 128, 256, 512, 1024), classes: int = 2):
        super().__init__()
        self.down = nn.ModuleList(twice(a, b) for a, b in zip((3, *widths), widths, strict=False))
        back = [*reversed(widths)]
        self.grow = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in itertools.pairwise(back))
        self.up = nn.ModuleList(twice(a, b) for a, b in itertools.pairwise(back))
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips: list[torch.Tensor] = []
        for level, layer in enumerate(self.down):
            x = layer(F.max_pool2d(x, 2) if level else x)
            skips.append(x)
        skips.pop()
        for grow, layer in zip(self.grow, self.up, strict=True):
            x = layer(torch.cat([skips.pop(), grow(x)], 1))
        return self.head(x)


def dense_layer(width_in: int, growth: int) -> nn.Module:
    wide = 4 * growth
    bottleneck = [nn.BatchNorm2d(width_in), nn.ReLU(), nn.Conv2d(width_in, wide, 1, bias=False)]
    return nn.Sequential(
        *bottleneck, nn.BatchNorm2d(wide), nn.ReLU(), nn.Conv2d(wide, growth, 3, padding=1, bias=False)
    )


class DenseNet(nn.Module):
    """DenseNet-121 (Huang et al. 2017): a layer reads what every layer of its block has made."""

    def __init__(self, growth: int = 32, blocks: Sequence[int] = (6, 12, 24, 16), classes: int = 1000):
        super().__init__()
        width = 2 * growth
        self.enter = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        self.blocks, self.between = nn.ModuleList(), nn.ModuleList()
        for count in blocks:
            self.blocks.append(nn.ModuleList(dense_layer(width + i * growth, growth) for i in range(count)))
            width += count * growth
            halved = nn.Conv2d(width, width // 2, 1, bias=False)
            self.between.append(nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), halved, nn.AvgPool2d(2)))
            width //= 2
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block, between in zip(self.blocks, self.between, strict=True):
            made = [x]
            for layer in block:  # type: ignore[attr-defined]
                made.append(layer(torch.cat(made, 1)))
            x = between(torch.cat(made, 1))
        return self.head(x.mean((2, 3)))


def images(channels: int, side: int, classes: int | None = None) -> Any:
    def batch(batch_size: int, _: int | None) -> dict[str, torch.Tensor]:
        x = torch.randn(batch_size, channels, side, side)
        return {"x": x, "y": torch.randn_like(x) if classes is None else torch.randint(classes, (batch_size,))}

    return batch


def masks(side: int, classes: int) -> Any:
    def batch(batch_size: int, _: int | None) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(batch_size, 3, side, side), "y": torch.randint(classes, (batch_size, side, side))}

    return batch


def denoise(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def classify(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def bart_large() -> Workload:
    from transformers import BartConfig, BartForConditionalGeneration

    def batch(batch_size: int, seq_len: int | None) -> dict[str, torch.Tensor]:
        assert seq_len is not None
        tokens, target = (torch.randint(3, 50_000, (batch_size, seq_len)) for _ in range(2))
        return {"input_ids": tokens, "decoder_input_ids": target, "labels": target}

    def build() -> nn.Module:
        return BartForConditionalGeneration(BartConfig()).train()  # the defaults are BART-large's

    return Workload("bart-large", build, batch, lambda model, batch: model(**batch).loss, batch_size=8, seq_len=1024)


WORKLOADS = (
    Workload("diffusion-unet", DiffusionUNet, images(4, 64), denoise, batch_size=16),
    Workload("segmentation-unet", SegmentationUNet, masks(512, 2), classify, batch_size=16),
    Workload("densenet-121", DenseNet, images(3, 224, 1000), classify, batch_size=128),
    bart_large(),
)


def main(*models: str) -> None:
    about = {**report.provenance(torch.device("cpu")), "target": TARGET, "costs": "estimated"}
    path = report.stem("crossings", torch.device("cpu"))
    rows: list[dict[str, Any]] = []
    for workload in (each for each in WORKLOADS if not models or each.name in models):
        for row in rows_of(workload):
            rows.append(row)
            print(row, flush=True)
            report.write(path, about, rows, COLUMNS)


def rows_of(workload: Workload) -> list[dict[str, Any]]:
    place, at = find_planning_device(TARGET), [time.monotonic()]
    profile = profile_step(fake_step(workload, place), place)
    at.append(time.monotonic())
    problem = Problem(profile.graph, profile.costs, find_space(profile.graph), 1 << 62)
    about = {
        "segments": len(problem.space.segments),
        "runs": len(problem.runs),
        "parameters_m": profile.graph.fixed_bytes["parameters"] // 4 / 1e6,
        "record_s": at[1] - at[0],
        "pose_s": time.monotonic() - at[1],
    }
    least, most = least_peak(problem, Limits(time_s=30)).peak_bytes, problem.memory.peak_without_checkpointing
    row = _row(problem, workload, int(0.99 * least))
    found = [{**row, "percent": None, "refused_s": row["solve_s"], **about}]
    for percent in PERCENTS:
        budget_bytes = least + (most - least) * percent // 100
        found.append({**_row(problem, workload, budget_bytes), "percent": percent, **about})
    return [{name: round(v, 5) if isinstance(v, float) else v for name, v in row.items()} for row in found]


def _row(problem: Problem, workload: Workload, budget_bytes: int) -> dict[str, Any]:
    started, cpu = time.monotonic(), time.process_time()
    found = load("exact")(problem.with_budget(budget_bytes), Limits(time_s=TIME_S))
    return {
        "model": workload.name,
        "budget_gib": budget_bytes / GIB,
        "status": found.status,
        "exact_ms": found.objective_us / 1000 if found.fits else None,
        "gap": found.gap if found.fits else None,
        "solver": found.solver,
        "solve_s": time.monotonic() - started,
        "solve_cpu_s": time.process_time() - cpu,
    }
