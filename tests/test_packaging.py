"""Packages hold the tree: an sdist that tests itself, and a wheel of it that holds every module.

Nothing is downloaded: the sdist is made by the build backend at hand, the wheel out of the unpacked sdist alone, and
installed without what it needs into a folder of its own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"remat": "remat", "solvers": "remat/solvers", "models": "remat/models"}  # in the tree, in the wheel
SHIPPED = (*FOLDERS, "tests", "benchmarks", "examples", "docs", "results", ".ci", ".github")
SHIPPED_FILES = (
    *("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md"),
    *("Makefile", "MANIFEST.in", "constraints.txt", ".gitignore", ".pre-commit-config.yaml"),
)
LEFT_BY_TOOLS = shutil.ignore_patterns("__pycache__", "*.egg-info")


class Built(NamedTuple):
    """A built, unpacked or installed package."""

    sdist: Path
    wheel: Path
    installed: Path


def files_in(folder: Path) -> set[str]:
    """Every file below, by its path from there, without what tools left."""
    found = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)) for path in found}


def run(*command: str, cwd: Path, path: Path | None = None) -> str:
    environment = {**os.environ, **({"PYTHONPATH": str(path)} if path else {})}
    ran = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("built")
    for folder in SHIPPED:
        shutil.copytree(ROOT / folder, tree / folder, ignore=LEFT_BY_TOOLS)
    for file in SHIPPED_FILES:
        shutil.copy(ROOT / file, tree / file)
    backend = f"from setuptools import build_meta; build_meta.build_sdist({str(out)!r})"
    run(sys.executable, "-c", backend, cwd=tree)
    (archive,) = out.glob("remat-*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(out, filter="data")
    sdist = out / archive.name.removesuffix(".tar.gz")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    alone = ("--no-deps", "--no-index")
    run(*pip, "wheel", "--no-build-isolation", *alone, "--wheel-dir", str(out), str(sdist), cwd=out)
    (wheel,) = out.glob("remat-*.whl")
    run(*pip, "install", *alone, "--target", str(out / "installed"), str(wheel), cwd=out)
    return Built(sdist, wheel, out / "installed")


@pytest.mark.exhaustive
@pytest.mark.parametrize("folder", SHIPPED)
def test_the_sdist_has_every_file_that_the_tree_has(built: Built, folder: str) -> None:
    assert files_in(built.sdist / folder) == files_in(ROOT / folder)


@pytest.mark.exhaustive
@pytest.mark.nightly
def test_tests_are_collected_in_the_sdist_alone(built: Built) -> None:
    ran = run(sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", cwd=built.sdist)
    assert re.search(r"^\d+ tests collected", ran, re.MULTILINE), ran


@pytest.mark.exhaustive
def test_the_wheel_has_every_module_and_nothing_else(built: Built) -> None:
    wanted = {
        f"{target}/{file}"
        for folder, target in FOLDERS.items()
        for file in files_in(ROOT / folder)
        if file.endswith((".py", "py.typed", ".schema.json")) or "/assets/" in file
    }
    names = zipfile.ZipFile(built.wheel).namelist()
    assert {name for name in names if ".dist-info/" not in name} == wanted


@pytest.mark.exhaustive
def test_what_is_installed_loads_from_there_and_answers(built: Built, tmp_path: Path) -> None:
    program = """
import json, sys, remat, remat.cli.main, remat.models, remat.solvers, remat.compiled.backend
for name in remat.__all__:
    getattr(remat, name)
files = {name: module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "remat"}
print(json.dumps([remat.__version__, files]))
"""
    version, files = json.loads(run(sys.executable, "-c", program, cwd=tmp_path, path=built.installed))
    assert built.wheel.name.startswith(f"remat-{version}-")
    assert [name for name, file in files.items() if not Path(file).is_relative_to(built.installed)] == []
    assert "gpt2" in run(sys.executable, "-m", "remat", "models", cwd=tmp_path, path=built.installed)


def test_every_folder_of_modules_is_a_package() -> None:
    """A folder without `__init__.py` imports from a checkout, and is in no wheel."""
    folders = {path.parent for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_every_file_that_the_readme_links_is_there() -> None:
    """The image by an absolute path: it stands wherever the page is shown under the repository's root."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", readme) if "://" not in link]
    assert [link for link in links if not (ROOT / link.lstrip("/")).exists()] == []
    assert [link for link in re.findall(r"!\[[^]]*\]\(([^)]+)\)", readme) if not link.startswith("/")] == []


def test_the_workflow_runs_what_a_person_runs() -> None:
    steps = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]["all"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == [".ci/run"]


def test_hooks_before_a_commit_are_targets_of_make() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {hook["entry"].removeprefix("make ") for hook in repository["hooks"]} == {"lint", "types"} <= set(targets)
