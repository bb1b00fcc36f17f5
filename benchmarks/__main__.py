"""`python -m benchmarks [NAME[:ARGUMENT,...] ...]`: run the named benchmarks, or all but those that take long.

`main_job:t5-base,swin-base` runs that benchmark for two families only.
"""

from __future__ import annotations

import importlib
import sys

NAMES = ("commands", "sweep", "main_job", "estimates", "fuzzing", "architectures", "curves")
# Only when named:
LONG = (
    "default_solver",
    "strategies",
    "scale",
    "peers",
    "machinery",
    "compiled_budgets",
    "fits",
    "token_caps",
    "fragmentation",
    "published",
    "matrix",
    "proofs",
    "crossings",
    "slices",
    "sliced_here",
    "equal_peaks",
    "mlps",
    "fused",
    "offloads",
    "offloads_here",
    "weights",
    "step_in_backward",
    "cards",
    "by_name",
    "alive",
    "shards",
    "combinations",
    "lengths",
    "mixed_lengths",
    "trainers",
    "roofline",
    "kernel_tables",
    "repriced",
    "gpu_steps",
    "menus",
    "counted_work",
)


def main(names: list[str]) -> None:
    for text in names or NAMES:
        name, _, arguments = text.partition(":")
        if name not in (*NAMES, *LONG):
            raise SystemExit(f"there is no benchmark {name!r}; choose from {', '.join((*NAMES, *LONG))}.")
        importlib.import_module(f"benchmarks.{name}").main(*filter(None, arguments.split(",")))


if __name__ == "__main__":
    main(sys.argv[1:])
