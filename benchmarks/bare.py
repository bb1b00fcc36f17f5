"""Run from a bare checkout, nothing installed: `remat` with its two folders that stand at the top level, `benchmarks`.

`remat.solvers` and `remat.models` are `solvers/` and `models/` (package-dir in pyproject.toml), which only an installer
puts in their place. Here the checkout itself is searched for what `remat/` does not have. Child processes do the same
for themselves. Where another remat is installed, this checkout's comes first.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def make_importable() -> None:
    """Let `import remat`, `remat.solvers`, `remat.models` and `benchmarks` find this checkout's."""
    scripts = str(ROOT / "benchmarks")  # where Python looks first, for a script: its files are no top-level modules
    sys.path[:] = [str(ROOT), *(entry for entry in sys.path if entry not in (str(ROOT), scripts))]
    import remat

    if str(ROOT) not in remat.__path__:
        remat.__path__.append(str(ROOT))
