"""The import arrows point one way, read off the source; and `import remat` stays light.

Capturing needs torch; judging and solving do not, so a step captured on one machine can be solved on another.
Workloads know nothing of planning. Only the command line knows everybody.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "remat": "remat",
    "remat.commands": "remat/commands",
    "remat.integrations": "remat/integrations",
    "remat.solvers": "solvers",
    "remat.models": "models",
}

ENTRIES = ("remat.cli", "remat.__main__")
TORCH_FREE = {
    f"remat.{name}"
    for name in (
        "alike",
        "allocator_settings",
        "caching_allocator",
        "check",
        "costs",
        "errors",
        "fragmentation",
        "graph",
        "identity",
        "keeping",
        "loop",
        "memory",
        "module_space",
        "plans",
        "problem",
        "roofline",
        "runs",
        "streams",
        "solution",
        "space",
        "target",
        "units",
        "workspaces",
    )
}
KNOWN_TO_MODELS = {"remat.errors", "remat.units", "remat.workload"}
WATCHED = {"remat", "torch", "transformers"}

# What a user's training script imports, and what that must not cost it.
EVERYDAY = ("remat", "remat.plans", "remat.applying", "remat.modules", "remat.measure", "remat.validating")
HEAVY = ("ortools", "rich", "transformers", "typer")


def file_of(module: str) -> Path:
    package, _, name = module.rpartition(".")
    return ROOT / FOLDERS[package] / f"{name}.py" if package else ROOT / FOLDERS[module] / "__init__.py"


def modules_in(package: str) -> list[str]:
    return sorted(f"{package}.{path.stem}" for path in (ROOT / FOLDERS[package]).glob("*.py"))


def imports(module: str) -> Iterator[str]:
    """The modules that a module's source names in imports; a late import is an import."""
    for node in ast.walk(ast.parse(file_of(module).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = resolve_name("." * node.level + (node.module or ""), module.rpartition(".")[0])
            # `from remat import graph` names the module remat.graph.
            yield from [f"{origin}.{alias.name}" for alias in node.names] if origin in FOLDERS else [origin]


def watched_imports(module: str) -> set[str]:
    return {name for name in imports(module) if name.partition(".")[0] in WATCHED}


def within(package: str, names: set[str]) -> set[str]:
    return {name for name in names if name.startswith(f"{package}.")}


@pytest.mark.parametrize("module", sorted(TORCH_FREE))
def test_what_plans_are_made_of_is_free_of_torch(module: str) -> None:
    if not file_of(module).exists():
        pytest.skip(f"there is no {module}")
    assert watched_imports(module) <= TORCH_FREE


@pytest.mark.parametrize("module", modules_in("remat.solvers"))
def test_solvers_know_only_what_is_free_of_torch(module: str) -> None:
    named = watched_imports(module)
    assert named - within("remat.solvers", named) <= TORCH_FREE


@pytest.mark.parametrize("module", modules_in("remat.models"))
def test_models_know_no_stage_of_planning(module: str) -> None:
    named = within("remat", watched_imports(module))
    assert named - within("remat.models", named) <= KNOWN_TO_MODELS


def test_a_training_script_loads_neither_solver_nor_command_line() -> None:
    present = [module for module in EVERYDAY if file_of(module).exists()]
    program = f"import sys, {', '.join(present)}; print(*({set(HEAVY)} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout.split()) == (0, []), ran.stderr


@pytest.mark.parametrize("module", [m for package in FOLDERS for m in modules_in(package) if m not in ENTRIES])
def test_only_the_command_line_knows_the_commands(module: str) -> None:
    named = watched_imports(module)
    assert "remat.cli" not in named
    if not module.startswith("remat.commands."):
        assert not any(name.startswith("remat.commands") for name in named)
