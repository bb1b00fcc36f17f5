"""Learn about a GPU in minutes: `python benchmarks/device.py FOLDER`.

It needs this checkout, torch, numpy, transformers and typer; neither remat nor OR-tools has to be installed. Plans and
a table of kernels are made beforehand, on a machine that has OR-tools, and carried to the GPU:

    python benchmarks/device.py --make-plans FOLDER     there; an hour, and what is there is not made again
    python benchmarks/device.py FOLDER                  on the GPU: eight minutes, or `--seconds`
    python benchmarks/device.py FOLDER                  the rest

Stages, in this order; a share of the seconds is the deadline of each, and results are on disk as they come:

machine        versions, clocks, power, PCIe link, bytes of a context: FOLDER/machine.json
steps          models untouched and under FOLDER/plans, five at a time: FOLDER/steps/MODEL.json.gz
deterministic  the same with deterministic kernels, under FOLDER/plans/deterministic: FOLDER/deterministic/MODEL.json.gz
kernels        every row of FOLDER/kernels.csv: FOLDER/kernels-found.csv
tests          those marked `cuda` and `any_device`, where pytest-xdist is: FOLDER/tests/failures.txt
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bare import ROOT, make_importable

make_importable()

from benchmarks.gpu.failures import BEFORE, PASSED  # noqa: E402
from benchmarks.gpu.machine import asked_of_nvidia_smi  # noqa: E402
from benchmarks.gpu.runner import Job, Runner, Stage  # noqa: E402

SECONDS = 480.0
AT_ONCE = 5  # models: while one waits for its data or its turn, others get ready
WORKERS = 10  # of pytest, each with a context
DETERMINISTIC = {
    "DETERMINISTIC": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
}
PYTEST = "-m pytest --device cuda -q -p benchmarks.gpu.failures -p no:cacheprovider -p no:benchmark --no-header --tb=no"
NOT_HERE = ("tests/test_card.py", "tests/test_card_streams.py")  # about the stand-in for a GPU


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    models = [*filter(None, options.models.split(","))]
    if options.make_plans:
        from benchmarks.gpu.plans import make

        return make(options.make_plans, options.target, models)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # by way of what ends the jobs
    os.environ["XDG_CACHE_HOME"] = str(options.folder / "cache")
    options.folder.mkdir(parents=True, exist_ok=True)
    Runner(options.folder, asked_of_nvidia_smi).run(stages(options.folder, models, options.tests), options.seconds)
    return 0


def stages(folder: Path, models: Collection[str] = (), tests: Sequence[str] = ("tests",)) -> list[Stage]:
    """All stages that have something to run; of `models` alone if any are named."""
    table = folder / "kernels.csv"
    kernels = [_job("kernels", "kernels", table, folder / "kernels-found.csv", attempts=5)] if table.exists() else []
    found = [
        Stage("machine", [_job("machine", "machine", folder / "machine.json")], 0.1),
        Stage("steps", _models(folder, folder / "plans", "steps", models), 0.5, AT_ONCE),
        Stage(
            "deterministic",
            _models(folder, folder / "plans" / "deterministic", "deterministic", models),
            *(0.6, AT_ONCE, DETERMINISTIC),
        ),
        Stage("kernels", kernels, 0.75),
        Stage(
            "tests",
            _tests(folder / "tests", tests),
            *(1.0, 1, {"FINDINGS": str(folder / "tests")}, _laid_out_as_installed),
        ),
    ]
    return [stage for stage in found if stage.jobs]


def _job(name: str, module: str, *arguments: str | Path, attempts: int = 1) -> Job:
    return Job(name, [sys.executable, "-m", f"benchmarks.gpu.{module}", *map(str, arguments)], attempts)


def _models(folder: Path, plans: Path, stage: str, models: Collection[str]) -> list[Job]:
    """One job a model; those with the most plans, which take longest, first."""
    names = [path.name.split(".")[0] for path in plans.glob("*.plan.json")]
    chosen = sorted({*names} & {*(models or names)}, key=lambda name: (-names.count(name), name))
    return [_job(name, "steps", name, plans, folder / stage, attempts=3) for name in chosen]


def _tests(folder: Path, tests: Sequence[str]) -> list[Job]:
    if not tests or not all(map(importlib.util.find_spec, ("pytest", "xdist", "hypothesis"))):
        return []
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / PASSED).exists():
        (folder / BEFORE).write_text((folder / PASSED).read_text())
    ignored = [f"--ignore={path}" for path in NOT_HERE]
    workers = f"-n{min(WORKERS, os.cpu_count() or 1)}"
    return [Job("pytest", [sys.executable, *PYTEST.split(), workers, *ignored, *tests])]


@contextlib.contextmanager
def _laid_out_as_installed() -> Iterator[None]:
    """While `remat/` has links to `solvers/` and `models/`: tests import both, in processes that they start too."""
    links = [ROOT / "remat" / name for name in ("solvers", "models")]
    for link in links:
        if not link.exists():
            link.symlink_to(Path("..") / link.name)
    try:
        yield
    finally:
        for link in links:
            if link.is_symlink():  # of an earlier call that was killed, too
                link.unlink()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=_whole, nargs="?", default=_whole("device-results"), help="plans and results")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of all stages; the same command goes on")
    parser.add_argument("--models", default="", help="of these alone: gpt2,resnet50")
    parser.add_argument("--tests", nargs="*", default=["tests"], help="files of tests; none: no tests")
    parser.add_argument("--make-plans", type=_whole, metavar="FOLDER", help="make what is to be carried, and stop")
    parser.add_argument("--target", default="h100-80gb,torch=2.11", help="of plans: the GPU, and the torch there")
    return parser.parse_args(arguments)


def _whole(path: str) -> Path:
    return Path(path).resolve()


if __name__ == "__main__":
    sys.exit(main())
