"""Peers: what others offer for less memory, beside plans, on one model, in one process, by one accounting.

The untouched step; Hugging Face's `gradient_checkpointing_enable`; `torch.compile` at eleven values of
`activation_memory_budget`; and eager plans with the peaks that torch reached as budgets, then with smaller ones down to
the least feasible. `remat.costing.device_allocator` counts every one of them: inductor's code allocates where eager
code does, which `require_counted` makes sure of.

A time is the median, over pairs of steps run in turn, of the time of a setting's step over that of the untouched one:
a machine that is busy with something else slows both. Nothing is asserted of times.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import nn

import remat
from benchmarks import report
from remat.cli.plots.sweep_plot import COLOUR, OTHER_COLOURS
from remat.costing.device_allocator import measure_peak, time_once_us
from remat.costing.planning_device import find_planning_device
from remat.formulation.problem import Problem
from remat.formulation.search_space import find_space
from remat.formulation.solution import Limits
from remat.models import build, gpt2
from remat.planning.budget import Budget
from remat.planning.profiling import fake_step, profile_step
from remat.solvers.least_peak import least_peak
from remat.units import MIB
from remat.validation.training import Training
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload
from tests.studies import plan_profile

COLUMNS = [
    "peer",
    "setting",
    "budget_mib",
    "peak_mib",
    "peak_ratio",
    "step_time_us",
    "untouched_time_us",
    "time_ratio",
    "fits",
    "ready_s",
    "failure",
]
UNTOUCHED, HUGGING_FACE, COMPILED, PLANNED = "untouched", "Hugging Face", "torch.compile", "remat"
RATIOS = tuple(i / 10 for i in range(10, -1, -1))
FALLBACK = "aot_eager_decomp_partition"  # the same partitioner, without a compiler of kernels
BELOW = 4  # budgets from the least feasible up to torch's least peak
WARM_UP = 2  # steps


def main(backend: str = "inductor", repeats: int | str = 3, *ratios: str) -> None:
    """`peers:inductor,3,1.0,0.5,0.0` tries these three values of the memory budget: each may compile for minutes."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    note = ""
    try:
        require_counted(backend, device)
    except Exception as error:  # whatever a missing compiler raises
        note = f"{backend} cannot run here ({str(error).strip().splitlines()[0]}): {FALLBACK} took its place"
        backend = FALLBACK
        require_counted(backend, device)
    peers = Peers(_workload(device), device, int(repeats))
    peers.run(backend, tuple(map(float, ratios)) or RATIOS)
    path = report.stem("peers" if backend == "inductor" else f"peers_{backend}", device)
    about = {**report.provenance(device), **peers.about, "backend": backend, "repeats": int(repeats)}
    report.write(path, about | ({"note": note} if note else {}), peers.rows, COLUMNS)
    draw(peers.rows, f"{peers.about['workload']}, fixed memory included", backend, path.with_suffix(".png"))


def _workload(device: torch.device) -> Workload:
    if device.type == "cuda":
        return build("gpt2")
    small = gpt2.workload("gpt2-peers", n_embd=128, n_layer=4, n_head=4, batch_size=4, n_positions=256, vocab_size=512)
    return small.with_dtype("fp32")


def require_counted(backend: str, device: torch.device) -> None:
    """Raise where the accounting misses what compiled code allocates: here two matrices alive at once."""
    side = 512
    matrix = torch.randn(side, side, device=device)

    def product_of_products() -> torch.Tensor:
        return (matrix @ matrix).relu() @ (matrix.t() @ matrix).relu()

    compiled = torch.compile(product_of_products, backend=backend)
    compiled()
    peak = measure_peak(compiled, device, requested=True)
    torch._dynamo.reset()
    assert peak >= 2 * matrix.nbytes, f"{backend}: {peak} bytes counted where at least {2 * matrix.nbytes} were live"


class Peers:
    """The rows so far; the untouched step, which every other is timed against."""

    def __init__(self, workload: Workload, device: torch.device, repeats: int):
        self.workload, self.device, self.repeats = workload, device, repeats
        self.on_row: Callable[[], object] = lambda: None
        self.rows: list[dict[str, Any]] = []
        self.place = find_planning_device(device.type)
        self.fake = fake_step(workload, self.place)
        self.profile = profile_step(self.fake, self.place)
        self.about = {
            "workload": f"{workload.name} {workload.batch_size} x {workload.seq_len}, {self._dtype()}",
            "fixed_mib": round(self.profile.graph.fixed_total / MIB, 2),
        }

    def _dtype(self) -> str:
        return f"autocast to {self.workload.autocast}" if self.workload.autocast else "fp32"

    def run(self, backend: str, ratios: tuple[float, ...]) -> None:
        self._measure_eager()
        for ratio in ratios:
            self._measure_compiled(backend, ratio)
        for budget in self._budgets():
            self._plan_and_measure(budget)

    def run_at_equal_peaks(self, backend: str, ratios: tuple[float, ...]) -> None:
        """Every peer followed at once by a plan that may take what it took: what is cut off is comparable so far."""
        self.space = find_space(self.profile.graph)
        self._measure_eager()
        self._plan_and_measure_at_last_peak()
        for ratio in ratios:
            self._measure_compiled(backend, ratio)
            self._plan_and_measure_at_last_peak()

    def _measure_eager(self) -> None:
        self.untouched = self._training().step
        self._measure(UNTOUCHED, "", contextlib.nullcontext)
        self._measure(HUGGING_FACE, "every block", contextlib.nullcontext, checkpoint_blocks)

    def _measure_compiled(self, backend: str, ratio: float) -> None:
        self._measure(COMPILED, f"{ratio:.1f}", lambda: _memory_budget(ratio), _compile_with(backend))

    def _plan_and_measure_at_last_peak(self) -> None:
        if (peak := self.rows[-1].get("peak_bytes")) is not None:
            self._plan_and_measure(peak)

    def _budgets(self) -> list[int]:
        """The peaks of torch that a plan can keep, and `BELOW` budgets below, falling."""
        graph = self.profile.graph
        self.space = find_space(graph)
        problem = Problem(graph, self.profile.costs, self.space, 1 << 62)
        most = problem.memory.peak_without_checkpointing
        least = least_peak(problem, Limits(time_s=30)).peak_bytes
        reached = {row["peak_bytes"] for row in self.rows if row["peer"] == COMPILED and "peak_bytes" in row}
        self.about["remat_least_mib"] = round(least / MIB, 2)
        lowest = min([*reached, most])
        below = [least + (lowest - least) * i // BELOW for i in range(BELOW)] if least < lowest else [least]
        return sorted({*(peak for peak in reached if peak >= least), *below}, reverse=True)

    def _plan_and_measure(self, budget: int) -> None:
        def planned(model: nn.Module) -> None:
            plan = plan_profile(
                self.profile,
                Budget(budget, budget),
                step=self.fake,
                space=self.space,
                limits=Limits(time_s=20),
            )
            remat.apply(model, plan)

        self._measure(PLANNED, f"{budget / MIB:.1f} MiB", contextlib.nullcontext, planned, budget)

    def _training(self, prepare: Callable[[nn.Module], object] | None = None) -> Training:
        return trained(self.workload, self.device, prepare)

    def _measure(
        self,
        peer: str,
        setting: str,
        surroundings: Callable[[], contextlib.AbstractContextManager[Any]],
        prepare: Callable[[nn.Module], object] | None = None,
        budget: int | None = None,
    ) -> None:
        """Add the row of a setting; `prepare` changes the model, `surroundings` hold while it is changed and run."""
        row: dict[str, Any] = {"peer": peer, "setting": setting, "fits": ""}
        if budget is not None:
            row |= {"budget_bytes": budget, "budget_mib": _mib(budget)}
        torch._dynamo.reset()
        try:
            with surroundings():
                row |= self._measured(prepare)
        except Exception as error:  # a row that fails stays in the table
            row["failure"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
        if budget is not None and "peak_bytes" in row:
            row["fits"] = row["peak_bytes"] <= budget
        self.rows.append(row)
        if "peak_bytes" in row and "peak_bytes" in self.rows[0]:
            row["peak_ratio"] = round(row["peak_bytes"] / self.rows[0]["peak_bytes"], 4)
        self.on_row()
        print({key: row[key] for key in COLUMNS if row.get(key, "") != ""}, flush=True)

    def _measured(self, prepare: Callable[[nn.Module], object] | None) -> dict[str, Any]:
        started = time.monotonic()
        training = self._training(prepare)
        ready_s, step = time.monotonic() - started, training.step
        peak = training.peak_of_update(self.place.target.alignment_bytes)
        pairs = [
            (time_once_us(self.untouched, self.device), time_once_us(step, self.device)) for _ in range(self.repeats)
        ]
        return {
            "peak_bytes": peak,
            "peak_mib": _mib(peak),
            "untouched_time_us": round(statistics.median(base for base, _ in pairs)),
            "step_time_us": round(statistics.median(own for _, own in pairs)),
            "time_ratio": round(statistics.median(own / base for base, own in pairs), 3),
            "pairs_us": [[round(base), round(own)] for base, own in pairs],
            "ready_s": round(ready_s, 1),
        }


def trained(workload: Workload, device: torch.device, prepare: Callable[[nn.Module], object] | None) -> Training:
    """The model as `prepare` changes it, trained until the optimizer's state exists and everything is compiled."""
    training = Training(workload, device, 0, TrainingLoop())
    training.begin_again()
    if prepare:
        prepare(training.model)
    for _ in range(WARM_UP):
        training.step()
    return training


def checkpoint_blocks(model: Any) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _compile_with(backend: str) -> Callable[[nn.Module], None]:
    return lambda model: model.compile(backend=backend)


@contextlib.contextmanager
def _memory_budget(ratio: float) -> Iterator[None]:
    with functorch_config.patch(activation_memory_budget=ratio):
        yield


def _mib(size: int) -> float:
    return round(size / MIB, 2)


def draw(rows: list[dict[str, Any]], title: str, backend: str, path: Path) -> None:
    """Step time over the untouched one's, against peak."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), dpi=160, layout="constrained")
    axes = figure.subplots()
    looks = {
        UNTOUCHED: ("D", "#222222", "untouched"),
        HUGGING_FACE: ("s", OTHER_COLOURS[0], "Hugging Face, every block"),
        COMPILED: ("^", OTHER_COLOURS[1], f"torch.compile ({backend}), by activation_memory_budget"),
        PLANNED: ("o", COLOUR, "remat, eager"),
    }
    for peer, (marker, colour, label) in looks.items():
        found = [row for row in rows if row["peer"] == peer and "peak_bytes" in row]
        if peer == PLANNED:
            found.sort(key=lambda row: row["peak_bytes"])
        line = "-" if peer == PLANNED else ":" if peer == COMPILED else ""
        peaks, ratios = [row["peak_mib"] for row in found], [row["time_ratio"] for row in found]
        axes.plot(peaks, ratios, marker=marker, linestyle=line, linewidth=1.2, color=colour, label=label)
        if peer == COMPILED:
            named: dict[tuple[float, float], list[str]] = {}
            for row in found:
                named.setdefault((row["peak_mib"], row["time_ratio"]), []).append(row["setting"])
            for point, names in named.items():
                axes.annotate(
                    ", ".join(names), point, xytext=(4, 5), textcoords="offset points", fontsize=7, color=colour
                )
    axes.axhline(1.0, color="#777777", linewidth=0.8)
    axes.set(xlabel="peak of the whole training step, MiB", ylabel="step time / untouched step time", title=title)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)
