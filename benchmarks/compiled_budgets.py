"""Compiled budgets: `remat.compile` on the CPU, beside PyTorch's own memory budget.

For each family at two layers, and for shares of what the step needs beside its fixed bytes when it is compiled as
PyTorch does by default, the peak that `remat` promised and the one that was measured; and the highest ratio of
`activation_memory_budget` whose compiled code fits too, by the same lowering, with its measured peak. Prices are those
of the program: traffic of saved values and time to make the others again, by this machine's roofline. Steps are timed
in turns. Gradients are compared with those of the default compilation under one seed; 0 is bitwise.

`python -m benchmarks compiled_budgets:gpt2,vit,share=0.7,share=0.5`
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._functorch import config as functorch_config

import remat
from benchmarks import report
from remat._torch.inductor import chosen_decompositions, compiling_with, inductor_with
from remat.compiled.outside import Outside
from remat.compiled.partitioner import RATIOS, BudgetPartitioner, Cut, Search
from remat.costing.device_allocator import measure_peak, time_once_us
from remat.models import bert, convnext, gpt2, llama, resnet, vit
from remat.recording.fake_step import autocast_context
from remat.units import MIB
from remat.workload.workload import Workload

CPU = torch.device("cpu")
_TEXT: dict[str, Any] = {"width": 128, "layers": 2, "heads": 4, "batch_size": 8, "positions": 128, "vocab": 512}
_CONVOLUTIONS: dict[str, Any] = {"batch_size": 16, "image_size": 64, "labels": 10}
FAMILIES: dict[str, Callable[[], Workload]] = {
    "gpt2": lambda: gpt2.workload("gpt2-2", **_TEXT),
    "llama": lambda: llama.workload("llama-2", kv_heads=2, mlp=384, tied=True, seq_len=128, **_TEXT),
    "bert": lambda: bert.workload("bert-2", **_TEXT),
    "vit": lambda: vit.workload("vit-2", width=128, layers=2, heads=4, batch_size=16, image_size=128, labels=10),
    "resnet": lambda: resnet.workload("resnet-2", stem=16, widths=(32, 64), depths=(1, 1), **_CONVOLUTIONS),
    "convnext": lambda: convnext.workload("convnext-2", widths=(32, 64), depths=(1, 1), **_CONVOLUTIONS),
}
REPEATS = 5
COLUMNS = [
    "workload",
    "share",
    "budget_mib",
    "predicted_mib",
    "measured_mib",
    "of_predicted_percent",
    "price_ms",
    "gap_percent",
    "gradient_error",
    "plan_s",
    "step_ms",
    "ratio",
    "ratio_measured_mib",
    "ratio_price_ms",
    "ratio_step_ms",
    "of_ratio_time",
    "failure",
]


class Ratios(BudgetPartitioner):
    """Notes what PyTorch would have at every ratio, and cuts by default."""

    found: tuple[tuple[float, int, float], ...] = ()  # ratio, bytes of the graph, price

    def __call__(self, gm: Any, joint_inputs: Sequence[Any], **options: Any) -> Any:
        search = Search(gm, joint_inputs, options, self.budget_bytes, 1, False)
        choices = zip(RATIOS, search.portfolio, strict=True)
        self.found = tuple((ratio, search.needs(search.lower(choice)), choice.price_us) for ratio, choice in choices)
        return search.cut(search.default)


class Step:
    """A workload's training step, compiled."""

    def __init__(self, workload: Workload, compiled: Callable[[Any], Any]):
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model = workload.build().train()
        self.batch = workload.batch(workload.batch_size, workload.seq_len)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.workload, self.run = workload, compiled(self.model)
        self.forward_and_backward()
        self.gradients = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        self.finish()
        state = [value for each in self.optimizer.state.values() for value in each.values()]
        inputs = [value for value in self.batch.values() if isinstance(value, torch.Tensor)]
        kept = itertools.chain(self.model.parameters(), self.model.buffers(), state, inputs)
        self.fixed_bytes = sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in kept}.values())
        self.peak_bytes = self.fixed_bytes + measure_peak(self, CPU)

    def forward_and_backward(self) -> None:
        torch.manual_seed(1)
        with autocast_context(CPU, self.workload.autocast):
            self.workload.step(self.run, self.batch).backward()

    def finish(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def __call__(self) -> None:
        self.forward_and_backward()
        self.finish()


def main(*arguments: str) -> None:
    shares = [float(given.partition("=")[2]) for given in arguments if given.startswith("share=")] or [0.7, 0.5]
    rows: list[dict[str, Any]] = []
    for name in [given for given in arguments if not given.startswith("share=")] or list(FAMILIES):
        for row in _rows(FAMILIES[name](), shares):
            rows.append(row)
            print({key: row[key] for key in COLUMNS if key in row}, flush=True)
            report.write(report.stem("compiled_budgets", CPU), report.provenance(CPU), rows, COLUMNS)  # so far


def _rows(workload: Workload, shares: Sequence[float]) -> Iterator[dict[str, Any]]:
    ratios = Ratios(1 << 60, Outside(0, 0, 0))

    def by_default(graph: Any, inputs: Any) -> Any:
        with compiling_with(ratios, chosen_decompositions):
            return inductor_with(None, {})(graph, inputs)

    default = Step(workload, lambda model: torch.compile(model, backend=by_default))
    for share in shares:
        budget = int(default.fixed_bytes + share * (default.peak_bytes - default.fixed_bytes))
        row: dict[str, Any] = {"workload": f"{workload.name} {workload.batch_size} x {workload.seq_len}"}
        row |= {"share": share, "budget_mib": _mib(budget)}
        try:
            yield row | _compared(workload, default, budget, ratios.found)
        except remat.RematError as error:  # a row that fails stays in the table
            yield row | {"failure": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}


def _compared(workload: Workload, default: Step, budget: int, ratios: Sequence[tuple[float, int, float]]) -> Any:
    options: dict[str, Any] = {"budget": budget, "holds": "loss", "cuts": {}}
    planned = Step(workload, lambda model: torch.compile(model, backend="remat", options=options))
    cut: Cut = next(iter(options["cuts"].values()))
    row: dict[str, Any] = {
        "predicted_mib": _mib(cut.peak_bytes),
        "measured_mib": _mib(planned.peak_bytes),
        "of_predicted_percent": round(100 * planned.peak_bytes / cut.peak_bytes, 4),
        "price_ms": round(cut.choice.price_us / 1000, 2),
        "gap_percent": round(100 * cut.gap, 2),
        "gradient_error": max(map(_error, planned.gradients, default.gradients)),
        "plan_s": round(cut.seconds, 1),
    }
    fitting = [each for each in ratios if default.fixed_bytes + each[1] <= budget]
    if not fitting:
        return row | {"step_ms": _ms(_times([planned])[0]), "ratio": None}
    ratio, _, price = max(fitting)
    with functorch_config.patch(activation_memory_budget=ratio):
        other = Step(workload, torch.compile)
        ours, theirs = _times([planned, other])
    return row | {
        "step_ms": _ms(ours),
        "ratio": ratio,
        "ratio_measured_mib": _mib(other.peak_bytes),
        "ratio_price_ms": round(price / 1000, 2),
        "ratio_step_ms": _ms(theirs),
        "of_ratio_time": round(ours / theirs, 3),
    }


def _times(steps: Sequence[Step]) -> list[float]:
    """Median times, measured in turns."""
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(REPEATS):
        for each, step in zip(times, steps, strict=True):
            each.append(time_once_us(step, CPU))
    return [statistics.median(each) for each in times]


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest gradient."""
    return float(f"{((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item():.1e}")


def _ms(time_us: float) -> float:
    return round(time_us / 1000, 1)


def _mib(size: int) -> float:
    return round(size / MIB, 3)
