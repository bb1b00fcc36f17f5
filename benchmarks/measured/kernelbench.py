"""Eager float32 forwards of 240 problems on an H100: ScalingIntelligence/KernelBench (MIT), whole models among them.

Times are its `results/timing/H100_Modal/baseline_time_torch.json` (torch 2.9, L2 emptied before every run), problems
its folder `KernelBench` at commit 423217d, which a person fetches: they are other people's code and are run here, on
fake tensors. Two of them need einops. Two have changed since they were timed, and eight recurrent ones run a kernel
without a formula.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterator
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.measured.measurement import Kernels, Measurement, card, flushed, kernels_of, on_fakes
from remat.capture.fake_model import fake_model

_CHANGED = ("level1/12_", "level1/97_")
_RECURRENT = tuple(f"level3/{number}_" for number in (35, 36, 37, 38, 39, 40, 41, 42))
WHOLE_MODEL = "whole model"
_FAMILIES = (  # of level 1, by name
    ("attention", "attention"),
    ("loss", "loss"),
    ("softmax", "softmax"),
    ("pool", "pooling"),
    ("conv", "convolution"),
    ("cum|scan", "scan"),
    ("norm", "normalisation"),
    ("reduction|argmax|argmin", "reduction"),
    ("matmul|matrix|multiplication", "product"),
)


def measurements(folder: Path, problems: Path) -> Iterator[Measurement]:
    """Every problem, in the order of the levels; odd ones were fitted to."""
    times = json.loads((folder / "kernelbench" / "H100_Modal" / "baseline_time_torch.json").read_text())
    target = flushed(card("NVIDIA H100 80GB HBM3"))
    for level in ("level1", "level2", "level3"):
        for file, found in sorted(times[level].items(), key=lambda item: int(item[0].partition("_")[0])):
            name = f"{level}/{file}"
            if name.startswith((*_CHANGED, *_RECURRENT)):
                continue
            odd = int(file.partition("_")[0]) % 2 == 1
            yield Measurement(
                "kernelbench h100-80gb",
                _family(level, file),
                name.removesuffix(".py"),
                "fit" if odd else "check",
                target,
                1e3 * found["mean"],
                _kernels(problems / level / file),
                eager=True,
            )


def _family(level: str, file: str) -> str:
    if level == "level3":
        return WHOLE_MODEL
    if level == "level2":
        return "chain of a convolution" if "conv" in file.lower() else "chain of a product"
    return next((family for pattern, family in _FAMILIES if re.search(pattern, file.lower())), "pointwise")


def _kernels(path: Path) -> Kernels:
    module = types.ModuleType(path.stem)
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    built = module.Model(*module.get_init_inputs())  # with data: some read a number while they are built
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # and some keep a tensor that is no parameter
    model, _ = fake_model(lambda: built, mode, torch.device("cpu"))
    with on_fakes(mode), torch.no_grad():
        given = module.get_inputs()
        return kernels_of(lambda: model(*given))
