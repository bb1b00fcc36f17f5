"""Learn about a GPU, in parts, the most telling first: `python benchmarks/device.py [FOLDER]`.

It needs this checkout, torch, numpy and transformers; neither remat nor OR-tools has to be installed. Every part runs
in a process of its own and writes FOLDER/PART.json as it goes; FOLDER/device.md is the summary. After `--seconds` it
stops; the same command again does what is left. Plans are made beforehand, on a machine that has OR-tools:

    python benchmarks/device.py --make-plans FOLDER/plans     and FOLDER is then carried to the GPU
    python benchmarks/device.py FOLDER                        there; eight minutes
    python benchmarks/device.py FOLDER                        the rest

Costs that were measured are kept in FOLDER/cache, so that a part which was cut off goes on from there.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bare import make_importable

make_importable()

from benchmarks.half_hour.runner import Part, Runner  # noqa: E402
from remat.workload.target import target_of  # noqa: E402

SECONDS = 480.0
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
BEFORE = (
    Part("machine", "versions, attention's kernels, bytes before and after one product", 60),
    Part("gradients", "gradients of a plan that saves attention, with dropout", 75),
    Part("untouched", "GPT-2 16 x 1024: requested, allocated, reserved, times, operators, against prediction", 100),
    Part("untouched-expandable", "the same with expandable segments", 100, EXPANDABLE),
)
AFTER = (
    Part("profile:gpt2", "a measured profile, its workspaces, its sum against the wall clock", 150),
    Part("optimizer", "a step whose peak is the optimizer's", 75),
    Part("solved-here", "plans solved here from that profile, validated", 150),
    Part("profile:t5-base", "T5: attention with a bias and dropout", 120),
    Part("profile:gpt2:fp32", "GPT-2 in fp32: memory-efficient attention with dropout", 120),
    Part("profile:resnet50", "ResNet-50: workspaces of convolutions", 150),
    Part("profile:llama-1b", "llama-1b 4 x 2048, as the first profile", 150),
    Part("peers", "every block and torch's memory budget beside plans at equal peaks", 420),
)
CARRIED_S = 120.0


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if options.part:
        return _run_part(options)
    device = options.device or ("cuda" if Path("/dev/nvidiactl").exists() else "cpu")
    if options.make_plans:
        return _make_plans(options.make_plans, options.device or "cuda", options.torch)
    options.folder.mkdir(parents=True, exist_ok=True)
    plans = options.plans or options.folder / "plans"
    os.environ["XDG_CACHE_HOME"] = str((options.folder / "cache").resolve())
    runner = Runner(
        parts(plans, _target(device)), options.folder, lambda part: _command(part, options.folder, plans, device)
    )
    runner.run(options.seconds, max(1.0, options.seconds / SECONDS))
    print((options.folder / "device.md").read_text())
    return 0


def parts(plans: Path, target: str) -> list[Part]:
    """All parts, in order; in the middle the plans that were carried along, those for `target` alone if there are."""
    names = sorted(path.name.removesuffix(".plan.json") for path in plans.glob("*.plan.json"))
    carried = [name for name in names if name.endswith(f".{target}")] or names
    middle = [Part(f"carried:{name}", f"the plan {name}, made elsewhere, validated", CARRIED_S) for name in carried]
    return [*BEFORE, *middle, *AFTER]


def _target(device: str) -> str:
    """Return the device's name in the names of plans; asks nvidia-smi, without a context."""
    if device == "cpu":
        return "cpu"
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "--id=0"]
    with contextlib.suppress(OSError):
        name = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        return found.name if (found := target_of(name)) else name
    return ""


def _command(part: Part, folder: Path, plans: Path, device: str) -> list[str]:
    script = [sys.executable, str(Path(__file__).resolve()), str(folder), "--part", part.name]
    return [*script, "--plans", str(plans), "--device", device]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("device-results"), help="where results go")
    parser.add_argument("--plans", type=Path, help="folder of plans made elsewhere (FOLDER/plans)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        help="stop after so long; again goes on; more than 480 also gives each part more",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="cpu: every part at a small size")
    parser.add_argument("--make-plans", type=Path, metavar="FOLDER", help="make the plans to carry, and stop")
    parser.add_argument("--torch", default="2.11", help="with --make-plans: the torch that trains on the GPU")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _run_part(options: argparse.Namespace) -> int:
    from benchmarks.half_hour.parts import run

    stem = Part(options.part, "", 0).stem
    run(options.part, options.device, options.plans, options.folder / f"{stem}.json")
    return 0


def _make_plans(folder: Path, device: str, torch_there: str) -> int:
    import torch

    from benchmarks.half_hour.carried import make_plans

    make_plans(folder, torch.device(device), torch_there)
    return 0


if __name__ == "__main__":
    sys.exit(main())
