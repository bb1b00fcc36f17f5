"""Compiled budgets: `remat.compile` beside PyTorch's own memory budget, on this CPU or on PyTorch's CUDA build.

For each family, and for shares of what the step needs beside its fixed bytes when it is compiled as PyTorch does by
default, the peak that `remat` promised and the one that was measured in a plain loop; and the highest ratio of
`activation_memory_budget` whose compiled code fits too, by the same lowering, with its measured peak. Prices are those
of the program: traffic of saved values and time to make the others again, by the device's roofline. On the CPU, steps
are timed in turns, and gradients are compared with those of the default compilation under one seed; 0 is bitwise.

    python -m benchmarks compiled_budgets:gpt2,vit,share=0.7,share=0.5
    build/card/python -m benchmarks compiled_budgets          on PyTorch's CUDA build, without a GPU
    build/card/python -m benchmarks compiled_budgets:gpt2_124m,budget=9GiB,budget=4GiB

On CUDA a family has its usual width and four layers, on the CPU two narrow ones; gpt2_124m, only when named, is whole.
"""

from __future__ import annotations

import gc
import itertools
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch.utils._pytree import tree_map_only

import remat
from benchmarks import report
from remat._torch.inductor import chosen_decompositions, compiling_with, inductor_with
from remat.compiled.lowered_cuts import RATIOS
from remat.compiled.outside import Outside
from remat.compiled.partitioner import BudgetPartitioner, Cut
from remat.compiled.promise import CompiledStep
from remat.compiled.search import Search
from remat.costing.device_allocator import measure_peak, time_once_us
from remat.models import bert, convnext, gpt2, llama, resnet, swin, t5, vit
from remat.models.common import text_model
from remat.recording.step_contexts import autocast_context
from remat.units import MIB, parse_bytes
from remat.workload.workload import Workload

HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IS_LARGE = HERE.type == "cuda"
ON_CARD = "CARD_HOME" in os.environ
NAME = "compiled_budgets_without_a_gpu" if ON_CARD else "compiled_budgets"
_LAYERS = 4 if IS_LARGE else 2
_WIDTH, _HEADS, _SAMPLES = (768, 12, 8) if IS_LARGE else (128, 4, 8)
_LAYERED: dict[str, Any] = {"hidden_size": _WIDTH, "num_hidden_layers": _LAYERS, "num_attention_heads": _HEADS}
_GPT2: dict[str, Any] = {"n_embd": _WIDTH, "n_layer": _LAYERS, "n_head": _HEADS}
_T5: dict[str, Any] = {"d_model": _WIDTH, "num_layers": _LAYERS, "num_heads": _HEADS}
_LENGTH, _VOCAB = (1024, 32128) if IS_LARGE else (128, 512)
_TEXT: dict[str, Any] = {"max_position_embeddings": _LENGTH, "vocab_size": _VOCAB}
_LLAMA: dict[str, Any] = {**llama.SHAPE, **_LAYERED, **_TEXT, "num_key_value_heads": 4 if IS_LARGE else 2}
_LLAMA |= {"intermediate_size": 3 * _WIDTH, "tie_word_embeddings": True}
_IMAGES: dict[str, Any] = {"batch_size": 64, "image_size": 224, "labels": 1000}
if not IS_LARGE:
    _IMAGES = {"batch_size": 16, "image_size": 64, "labels": 10}
_STEM = 64 if IS_LARGE else 32
FAMILIES: dict[str, Callable[[], Workload]] = {
    "gpt2": lambda: gpt2.workload("gpt2", batch_size=_SAMPLES, n_positions=_LENGTH, vocab_size=_VOCAB, **_GPT2),
    "llama": lambda: text_model("llama", "Llama", _LLAMA, batch_size=_SAMPLES, seq_len=_LENGTH),
    "bert": lambda: bert.workload("bert", batch_size=_SAMPLES, **_TEXT, **_LAYERED),
    "t5": lambda: t5.workload("t5", batch_size=_SAMPLES, seq_len=_LENGTH, vocab_size=_VOCAB, **_T5),
    "vit": lambda: vit.workload("vit", **_LAYERED, **_IMAGES),
    "resnet": lambda: resnet.workload(
        "resnet", embedding_size=_STEM, hidden_sizes=(4 * _STEM, 8 * _STEM), depths=(2, 2), **_IMAGES
    ),
    "convnext": lambda: convnext.workload(
        "convnext", hidden_sizes=(_STEM, 2 * _STEM, 4 * _STEM, 8 * _STEM), depths=(1, 1, 2, 1), **_IMAGES
    ),
    "swin": lambda: swin.workload("swin", embed_dim=_STEM, depths=(2, 2), num_heads=(2, 4), window_size=7, **_IMAGES),
}
WHOLE: dict[str, Callable[[], Workload]] = {
    "gpt2_124m": lambda: gpt2.workload("gpt2", batch_size=24, n_embd=768, n_layer=12, n_head=12),
}
SHARES = (0.8, 0.6, 0.45, 0.3)
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
    """A workload's training step, compiled, and what it needs: bytes of its own on the device, at the peak in all."""

    def __init__(self, workload: Workload, compiled: Callable[[Any], Any]):
        torch._dynamo.reset()
        gc.collect()  # a row that failed has left a step behind, in frames of its error
        if IS_LARGE:
            torch._C._cuda_clearCublasWorkspaces()
        before = requested()
        torch.manual_seed(0)
        with HERE:
            self.model = workload.build().train()
            batch = workload.batch(workload.batch_size, workload.seq_len)
        self.batch = tree_map_only(torch.Tensor, lambda tensor: tensor.to(HERE), batch)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.workload, self.run = workload, compiled(self.model)
        self.forward_and_backward()
        self.gradients = [p.grad.cpu() for p in self.model.parameters() if p.grad is not None]
        self.finish()
        self()
        self.fixed_bytes = requested() - before if IS_LARGE else self._kept_bytes()
        self.peak_bytes = self.fixed_bytes + measure_peak(self, HERE, requested=True)

    def _kept_bytes(self) -> int:
        state = [value for each in self.optimizer.state.values() for value in each.values()]
        inputs = [value for value in self.batch.values() if isinstance(value, torch.Tensor)]
        kept = itertools.chain(self.model.parameters(), self.model.buffers(), state, inputs)
        return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in kept}.values())

    def forward_and_backward(self) -> None:
        torch.manual_seed(1)
        with autocast_context(HERE, self.workload.autocast):
            self.workload.step(self.run, self.batch).backward()

    def finish(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def __call__(self) -> None:
        self.forward_and_backward()
        self.finish()


def requested() -> int:
    """Return the bytes that are asked for on the device now."""
    return int(torch.cuda.memory_stats().get("requested_bytes.all.current", 0)) if IS_LARGE else 0


def main(*arguments: str) -> None:
    functorch_config.enable_autograd_cache = False  # plans are made anew
    names = [given for given in arguments if "=" not in given] or list(FAMILIES)
    limits = [given.split("=") for given in arguments if "=" in given] or [["share", str(share)] for share in SHARES]
    rows: list[dict[str, Any]] = []
    about = report.provenance(HERE)
    if ON_CARD:
        about["device"] = "PyTorch's CUDA build, without a GPU"
    for name in names:
        for row in _rows((FAMILIES | WHOLE)[name](), limits):
            rows.append(row)
            print({key: row[key] for key in COLUMNS if key in row}, flush=True)
            report.write(report.stem(NAME, HERE), about, rows, COLUMNS)  # so far


def _rows(workload: Workload, limits: Sequence[Sequence[str]]) -> Iterator[dict[str, Any]]:
    ratios = Ratios(1 << 60, Outside(0, 0, 0))

    def by_default(graph: Any, inputs: Any) -> Any:
        with compiling_with(ratios, chosen_decompositions):
            return inductor_with(None, {})(graph, inputs)

    default = Step(workload, lambda model: torch.compile(model, backend=by_default))
    free = default.peak_bytes - default.fixed_bytes
    for kind, limit in limits:
        budget = parse_bytes(limit) if kind == "budget" else int(default.fixed_bytes + float(limit) * free)
        row: dict[str, Any] = {"workload": f"{workload.name} {workload.batch_size} x {workload.seq_len}"}
        row |= {"share": round((budget - default.fixed_bytes) / free, 3), "budget_mib": _mib(budget)}
        try:
            yield row | _compared(workload, default, budget, ratios.found)
        except remat.RematError as error:  # a row that fails stays in the table
            yield row | {"failure": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}


def _compared(workload: Workload, default: Step, budget: int, ratios: Sequence[tuple[float, int, float]]) -> Any:
    step = CompiledStep()
    options: dict[str, Any] = {"budget": budget, "holds": "loss", "step": step}
    planned = Step(workload, lambda model: torch.compile(model, backend="remat", options=options))
    cut: Cut = next(iter(step.cuts.values()))
    row: dict[str, Any] = {
        "predicted_mib": _mib(cut.peak_bytes),
        "measured_mib": _mib(planned.peak_bytes),
        "of_predicted_percent": round(100 * planned.peak_bytes / cut.peak_bytes, 4),
        "price_ms": round(cut.choice.price_us / 1000, 3),
        "gap_percent": round(100 * cut.gap, 2),
        "plan_s": round(cut.seconds, 1),
    }
    if not IS_LARGE:  # numbers are left out on the card
        row["gradient_error"] = max(map(_error, planned.gradients, default.gradients))
    fitting = [each for each in ratios if default.fixed_bytes + each[1] <= budget]
    if not fitting:
        return row | {"ratio": None} | ({} if IS_LARGE else {"step_ms": _ms(_times([planned])[0])})
    ratio, _, price = max(fitting)
    with functorch_config.patch(activation_memory_budget=ratio):
        other = Step(workload, torch.compile)
        row |= {"ratio": ratio, "ratio_measured_mib": _mib(other.peak_bytes), "ratio_price_ms": round(price / 1000, 3)}
        if IS_LARGE:
            return row
        ours, theirs = _times([planned, other])
    return row | {"step_ms": _ms(ours), "ratio_step_ms": _ms(theirs), "of_ratio_time": round(ours / theirs, 3)}


def _times(steps: Sequence[Step]) -> list[float]:
    """Median times, measured in turns."""
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(REPEATS):
        for each, step in zip(times, steps, strict=True):
            each.append(time_once_us(step, HERE))
    return [statistics.median(each) for each in times]


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest gradient."""
    return float(f"{((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item():.1e}")


def _ms(time_us: float) -> float:
    return round(time_us / 1000, 1)


def _mib(size: int) -> float:
    return round(size / MIB, 3)
