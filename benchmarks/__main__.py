"""`python -m benchmarks [NAME ...]`: run the named benchmarks, or all of them."""

from __future__ import annotations

import importlib
import sys

NAMES = ("commands", "sweep", "main_job")


def main(names: list[str]) -> None:
    for name in names or NAMES:
        if name not in NAMES:
            raise SystemExit(f"there is no benchmark {name!r}; choose from {', '.join(NAMES)}.")
        importlib.import_module(f"benchmarks.{name}").main()


if __name__ == "__main__":
    main(sys.argv[1:])
