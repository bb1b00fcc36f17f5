"""The simulated caching allocator against PyTorch's own, event by event, without a GPU.

PyTorch's allocator is in libc10_cuda.so, which needs a CUDA runtime and nothing of the card but addresses. `card/` is
a runtime that hands those out and counts bytes. So the allocator itself, out of a CUDA build of PyTorch, answers on any
machine with a C++ compiler and CUDA's headers:

    python -m benchmarks.real_allocator site-packages/torch [number of traces]    compare, write a report
    python -m benchmarks.real_allocator site-packages/torch record                write what the tests hold it to

Traces are random: sizes around those where a rule changes, most of them repeated, as in training; some on a card so
small that requests are refused. And they are training steps at full size, as `fragmentation.py` feeds them, without
checkpointing and under a plan for four fifths of its peak.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from remat.costing.planning_device import find_planning_device
from remat.evaluation.evaluator import Memory
from remat.evaluation.plan import from_refs
from remat.formulation.solution import Limits
from remat.models import build
from remat.planning.budget import Budget
from remat.planning.profiling import fake_step, profile_step
from remat.reservation.allocator_settings import AllocatorSettings
from remat.reservation.caching_allocator import Block
from remat.reservation.fragmentation import footprint
from remat.solvers import load
from remat.units import GIB, MIB
from tests.limited_card import Event, Levels, LimitedCard, replayed
from tests.studies import plan_profile

HERE = Path(__file__).parent
CUDA = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
RECORDED = HERE.parent / "tests" / "allocator_traces.json.gz"
SETTINGS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:64",
    "max_split_size_mb:30,max_non_split_rounding_mb:50",
    "large_segment_size_mb:40",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[4:2,64:8]",
    "roundup_power2_divisions:[>:8]",
    "expandable_segments:True,roundup_power2_divisions:[1:2,8:4,>:8]",
    "expandable_segments:True,max_split_size_mb:64",
)
CARDS = (80 * GIB, 700 * MIB)
EVENTS = 800
SIZES = (100, 5000, 300_000, MIB, MIB + 1, 3 * MIB, 9 * MIB, 10 * MIB, 11 * MIB, 25 * MIB, 60 * MIB, 200 * MIB)
STEPS = ("gpt2", "resnet50", "llama-1b")
COLUMNS = ["trace", "settings", "card_mib", "traces", "events", "refused", "different"]


class Recording(LimitedCard):
    """A simulated allocator that keeps what happened to it, and what it answered."""

    def __init__(self, settings: AllocatorSettings):
        super().__init__(settings)
        self.trace: list[Event] = []
        self.answers: list[Levels | None] = []
        self._number: dict[Block, int] = {}

    def malloc(self, size_bytes: int) -> Block:
        block = super().malloc(size_bytes)
        self._number[block] = len(self.trace)
        self.trace.append(("m", len(self.trace), size_bytes))
        self.answers.append(self.counts)
        return block

    def free(self, block: Block) -> None:
        super().free(block)
        self.trace.append(("f", self._number.pop(block)))
        self.answers.append(self.counts)


class RealAllocator:
    """PyTorch's allocator in a process of its own for every trace. `torch_dir` holds a CUDA build's lib/ and include/.

    Raises CalledProcessError where it cannot be built.
    """

    def __init__(self, torch_dir: Path, folder: Path):
        self.folder, libraries = folder, torch_dir / "lib"
        needed = subprocess.check_output(["readelf", "-d", libraries / "libc10_cuda.so"], text=True)
        runtime = next(word.strip("[]") for word in needed.split() if word.startswith("[libcudart"))
        (folder / "version.map").write_text(f"{runtime} {{ global: *; }};\n")
        headers = [f"-I{torch_dir / 'include'}", f"-I{CUDA / 'include'}"]
        shared = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", *headers, str(HERE / "card" / "card.cpp")]
        for name, more in ((runtime, [f"-Wl,--version-script={folder / 'version.map'}"]), ("libnvidia-ml.so.1", [])):
            subprocess.run([*shared, f"-Wl,-soname,{name}", *more, "-o", folder / name], check=True)
        link = [f"-L{libraries}", "-lc10", "-lc10_cuda", f"-L{folder}", f"-l:{runtime}", f"-Wl,-rpath,{libraries}"]
        program = ["g++", "-std=c++20", "-O1", *headers, str(HERE / "card" / "drive.cpp"), *link]
        subprocess.run([*program, "-o", folder / "drive"], check=True)

    def __call__(self, trace: list[Event], settings: str, card_bytes: int) -> list[Levels | None]:
        """The counts after every event of `trace`, None where a request was refused."""
        text = "".join(" ".join(map(str, event)) + "\n" for event in trace)
        environment = {"LD_LIBRARY_PATH": str(self.folder), "CARD_BYTES": str(card_bytes)}
        environment |= {"PYTORCH_CUDA_ALLOC_CONF": settings}
        out = subprocess.run([self.folder / "drive"], input=text, env=environment, capture_output=True, text=True)
        out.check_returncode()
        lines = [line.split() for line in out.stdout.splitlines()]
        return [None if line == ["full"] else Levels(*map(int, line)) for line in lines]


def random_trace(rng: random.Random, count: int) -> list[Event]:
    """Requests, releases, and now and then an emptied cache."""
    sizes = [rng.choice(SIZES) + rng.randrange(70_000) for _ in range(12)]
    grows = rng.choice([0.5, 0.55, 0.6])
    trace: list[Event] = []
    live: list[int] = []
    while len(trace) < count:
        if rng.random() < 0.004:
            trace.append(("e",))
        elif rng.random() < grows or not live:
            size = rng.choice(sizes) if rng.random() < 0.8 else int(2 ** rng.uniform(5, 28))
            live.append(len(trace))
            trace.append(("m", len(trace), size))
        else:
            trace.append(("f", live.pop(rng.randrange(len(live)) if rng.random() < 0.6 else -1)))
    return trace


def main(torch_dir: str, count: str = "50") -> None:
    with tempfile.TemporaryDirectory() as folder:
        real = RealAllocator(Path(torch_dir).resolve(), Path(folder))
        if count == "record":
            _record(real)
            return
        device = torch.device("cpu")
        path, about = report.stem("real_allocator", device), report.provenance(device)
        version = (Path(torch_dir) / "version.py").read_text().split("__version__ = ")[1].split()[0]
        about["allocator"] = f"libc10_cuda.so of torch {version}"
        rows = [_compared(real, text, card, int(count)) for text in SETTINGS for card in CARDS]
        rows += [row for model in STEPS for row in _steps(real, model)]
        events, different = (sum(row[name] for row in rows) for name in ("events", "different"))
        report.write(path, {**about, "events": events, "different": different}, rows, COLUMNS)


def _compared(real: RealAllocator, text: str, card_bytes: int, count: int) -> dict[str, Any]:
    settings = AllocatorSettings.parse(text)
    row: dict[str, Any] = {
        "trace": "random",
        "settings": text or "defaults",
        "card_mib": card_bytes // MIB,
        "traces": count,
    }
    row |= {"events": 0, "refused": 0, "different": 0}
    for seed in range(count):
        trace = random_trace(random.Random(seed), EVENTS)
        simulated, found = replayed(trace, settings, card_bytes), real(trace, text, card_bytes)
        row["events"] += len(trace)
        row["refused"] += sum(counts is None for counts in found)
        row["different"] += sum(a != b for a, b in zip(simulated, found, strict=True))
    print(row, file=sys.stderr, flush=True)
    return row


def _steps(real: RealAllocator, model: str) -> Iterator[dict[str, Any]]:
    """Training until it reserves nothing more, fed to both."""
    place = find_planning_device("h100-80gb")
    profile = profile_step(fake_step(build(model), place), place)
    memory = Memory(profile.graph, profile.costs.workspace_per_op(profile.graph))
    budget = int(0.8 * memory.peak_without_checkpointing)
    made = plan_profile(profile, Budget(budget, budget), limits=Limits(time_s=20), solver=load("chain-dp"))
    for name, regions in (("untouched", ()), ("planned", from_refs(profile.graph, made.regions))):
        for text in SETTINGS[:2]:
            simulated = Recording(AllocatorSettings.parse(text))
            footprint(memory, regions, allocator=simulated)
            found = real(simulated.trace, text, 1 << 42)
            row = {
                "trace": f"{model}, {name}",
                "settings": text or "defaults",
                "card_mib": (1 << 42) // MIB,
                "traces": 1,
            }
            row |= {"events": len(found), "refused": sum(counts is None for counts in found)}
            row["different"] = sum(a != b for a, b in zip(simulated.answers, found, strict=True))
            print(row, file=sys.stderr, flush=True)
            yield row


def _record(real: RealAllocator) -> None:
    """One trace for each setting and card, with what the allocator said, for the tests."""
    rows = []
    for seed, text in enumerate(SETTINGS):
        for card in CARDS:
            trace = random_trace(random.Random(seed), EVENTS // 2)
            found = [counts and tuple(counts) for counts in real(trace, text, card)]
            rows.append({"settings": text, "card_bytes": card, "trace": trace, "counts": found})
    RECORDED.write_bytes(gzip.compress(json.dumps(rows).encode(), mtime=0))
    print(f"wrote {RECORDED}", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
