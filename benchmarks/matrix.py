"""Matrix: plans made under one version of torch and transformers, applied and validated under every other.

An environment is a version of each, in a virtual environment of its own under `.matrix/`, without OR-tools; packages
are installed once, into layers that environments share. torch is installed without its dependencies: what it imports
on a CPU is in the common layer, and CUDA's libraries, where its wheel links to them, beside it.

In every environment each of the 14 models is planned at a small size for this machine's CPU, costs measured, within a
budget `SHARE` of the way from its least peak to its peak without checkpointing. Then every
environment validates the plans of all: gradients bit by bit, kernels, recomputed nodes, peak against the budget. What
is refused is told with its message; the table counts. A plan of the same environment is the control.

Each environment is a process, one after the other; what is there already is not done again (`make matrix` goes on).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from benchmarks.bare import make_importable

    make_importable()

if TYPE_CHECKING:
    from remat.evaluation.plan import Plan
    from remat.workload.workload import Workload

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".matrix"
NEWEST = "newest"
TORCHES = ("2.11.0", "2.13.0", NEWEST)
TRANSFORMERS = ("5.17.0", "5.23.0")
COMMON = (
    "numpy",
    "typer",
    "rich",
    "sympy",
    "networkx",
    "jinja2",
    "typing_extensions",
    "filelock",
    "fsspec",
    "setuptools",
)
SHARE = 0.3
BATCH, LENGTH = 2, 64
PATIENCE_S = 10.0
COLUMNS = ["planned_under", "run_under", "validated", "refused", "failed", "worst_error_percent", "refusals"]


# Environments


def name_of(torch_version: str, transformers_version: str) -> str:
    return f"torch-{torch_version}_transformers-{transformers_version}"


def environments() -> Iterator[tuple[str, Path]]:
    """(name, Python) of every environment, made where it is not there."""
    common = layer("common", *COMMON)
    for torch_version in TORCHES:
        wanted = "torch" if torch_version == NEWEST else f"torch=={torch_version}"
        torch_layer = layer(f"torch-{torch_version}", wanted, dependencies=False)
        for transformers_version in TRANSFORMERS:
            library = layer(f"transformers-{transformers_version}", f"transformers=={transformers_version}")
            name = name_of(torch_version, transformers_version)
            yield name, environment(name, torch_layer, library, common)


def layer(name: str, *packages: str, dependencies: bool = True) -> Path:
    """A folder that `packages` are installed in."""
    target = FOLDER / "layers" / name
    if not target.exists():
        unfinished = target.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        _pip(unfinished, *(() if dependencies else ("--no-deps",)), *packages)
        if not dependencies and (cuda := cuda_libraries(unfinished)):
            _pip(unfinished, *cuda)
        unfinished.rename(target)
    return target


def _pip(target: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    subprocess.run([*command, "--target", str(target), *arguments], check=True)


def cuda_libraries(installed: Path) -> list[str]:
    """List the libraries that a CUDA build of torch links to, in the versions that it names."""
    (metadata,) = installed.glob("torch-*.dist-info/METADATA")
    wanted = re.findall(r"^Requires-Dist: ((?:nvidia-|cuda-toolkit)[^;\n]*)", metadata.read_text(), re.MULTILINE)
    return [requirement.strip() for requirement in wanted]


def environment(name: str, *layers: Path) -> Path:
    """The Python of a virtual environment that sees `layers`, the first of them first."""
    folder = FOLDER / name
    if not (folder / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "layers.pth").write_text("".join(f"{each}\n" for each in layers))
    return folder / "bin" / "python"


# In an environment


def workloads() -> dict[str, Callable[[], Workload]]:
    """The ready-made models at a size that takes no time; deep ones keep several layers."""
    from remat.models import gpt2, llama
    from remat.models.common import text_model
    from tests.small_models import TEST_SIZES

    def gpt(name: str, layers: int) -> Workload:
        return gpt2.workload(
            name, n_embd=64, n_layer=layers, n_head=4, n_positions=LENGTH, vocab_size=512, batch_size=BATCH
        )

    def llama_8b() -> Workload:
        heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
        sizes = {"hidden_size": 64, "num_hidden_layers": 8, "intermediate_size": 128, "vocab_size": 512, **heads}
        shape = {**llama.SHAPE, **sizes, "tie_word_embeddings": False}
        return text_model("llama-8b", "Llama", shape, batch_size=BATCH, seq_len=LENGTH)

    def small(make: Callable[[], Workload]) -> Callable[[], Workload]:
        return lambda: (found := make()).sized(BATCH, LENGTH if found.seq_len else None)

    return {
        **{name: small(make) for name, make in TEST_SIZES.items()},
        "gpt2-medium": lambda: gpt("gpt2-medium", 8),
        "gpt2-large": lambda: gpt("gpt2-large", 10),
        "gpt2-xl": lambda: gpt("gpt2-xl", 12),
        "gpt3-175b": lambda: gpt("gpt3-175b", 12).with_dtype("bf16"),
        "llama-8b": llama_8b,
    }


def plan(folder: Path, models: list[str]) -> None:
    """Write a plan of every model to `folder`, or why there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    for model in models:
        path = folder / f"{model}.plan.json"
        if path.exists():
            continue
        try:
            planned(workloads()[model]()).save(path)
        except Exception as error:
            print(f"{folder.name} {model}: {type(error).__name__}: {error}", flush=True)
            traceback.print_exc()
        _forget()


def planned(workload: Workload) -> Plan:
    from remat.costing.planning_device import find_planning_device
    from remat.evaluation.evaluator import Memory
    from remat.formulation.solution import Limits
    from remat.planning.advice import least_peak_of
    from remat.planning.budget import Budget
    from remat.planning.profiling import fake_step, profile_step
    from tests.studies import plan_profile

    place = find_planning_device("cpu")
    step = fake_step(workload, place)
    profile = profile_step(step, place)
    most = Memory(profile.graph, profile.costs.workspace_per_op(profile.graph)).peak_without_checkpointing
    least = least_peak_of(profile.graph, profile.costs)
    budget = round(least + SHARE * (most - least))
    return plan_profile(profile, Budget(budget, budget), limits=Limits(time_s=PATIENCE_S), step=step)


def validate(folder: Path, here: str, models: list[str]) -> None:
    """Validate the plans of all environments for every model; a row of JSON each, to `folder`."""
    import remat
    from remat.errors import PlanMismatch

    folder.mkdir(parents=True, exist_ok=True)
    for model in models:
        for path in sorted((FOLDER / "plans").glob(f"*/{model}.plan.json")):
            there, out = path.parent.name, folder / f"{model}.{path.parent.name}.json"
            if out.exists():
                continue
            row: dict[str, Any] = {"model": model, "planned_under": there, "run_under": here}
            try:
                report = remat.validate(workloads()[model](), path, device="cpu", repeats=1)
                peak, limit_bytes = report.measured["peak_bytes"], report.predicted["peak_bytes"]
                row["outcome"] = "validated" if report.passed else "failed"
                row["error_percent"] = round(100 * (peak / limit_bytes - 1), 4)
                row["regions"] = len(remat.Plan.load(path).regions)
                if not report.passed:
                    row["says"] = str(report)
            except PlanMismatch as error:
                row |= {"outcome": "refused", "says": str(error)}
            except Exception as error:
                row |= {"outcome": "failed", "says": f"{type(error).__name__}: {error}"}
                traceback.print_exc()
            out.write_text(json.dumps(row, indent=1) + "\n")
            print(here, model, there, row["outcome"], row.get("says", ""), flush=True)
        _forget()


def _forget() -> None:
    import torch

    torch._dynamo.reset()


# All of it


def main(*models: str) -> None:
    import torch

    from benchmarks import report

    path, about = report.stem("matrix", torch.device("cpu")), report.provenance(torch.device("cpu"))
    every = list(models or workloads())
    pythons = dict(environments())
    for task in ("plan", "validate"):
        for name, python in pythons.items():
            _in_environment(python, task, name, every)
    rows = [json.loads(found.read_text()) for found in sorted((FOLDER / "found").glob("*/*.json"))]
    rows = [row for row in rows if row["model"] in every]
    about |= {"models": len(every), "environments": {name: versions(python) for name, python in pythons.items()}}
    report.write(path, about, summary(rows), COLUMNS)
    path.with_name(f"{path.name}_rows.json").write_text(json.dumps(rows, indent=1) + "\n")


def _in_environment(python: Path, task: str, name: str, models: list[str]) -> None:
    variables = {**os.environ, "XDG_CACHE_HOME": str(FOLDER / "cache" / name), "PYTHONWARNINGS": "ignore"}
    subprocess.run([str(python), __file__, task, name, *models], env=variables, cwd=ROOT, check=False)


def versions(python: Path) -> str:
    code = "import torch, transformers; print('torch', torch.__version__, 'transformers', transformers.__version__)"
    done = subprocess.run([str(python), "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for every pair of environments."""
    pairs = sorted({(row["planned_under"], row["run_under"]) for row in rows})
    return [
        _summary_of(*pair, [row for row in rows if (row["planned_under"], row["run_under"]) == pair]) for pair in pairs
    ]


def _summary_of(there: str, here: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    count = {outcome: [r for r in rows if r["outcome"] == outcome] for outcome in ("validated", "refused", "failed")}
    errors = [abs(row["error_percent"]) for row in rows if "error_percent" in row]
    return {
        "planned_under": there,
        "run_under": here,
        **{outcome: len(found) for outcome, found in count.items()},
        "worst_error_percent": max(errors, default=""),
        "refusals": ", ".join(row["model"] for row in (*count["refused"], *count["failed"])),
    }


def _worker(task: str, name: str, *models: str) -> None:
    import logging

    import torch

    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    if task == "plan":
        plan(FOLDER / "plans" / name, list(models))
    else:
        validate(FOLDER / "found" / name, name, list(models))


if __name__ == "__main__":
    _worker(*sys.argv[1:])
