"""The file that `--model file.py:function` names is a module like any other: executed once, importable, picklable."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from remat.cli import model_spec as workloads
from remat.errors import UsageError
from tests.command_line import MODEL, Remat

REGISTERS = """\
import torch

torch.library.define("toyfile::twice", "(Tensor x) -> Tensor")  # fails where it is defined already
torch.library.impl("toyfile::twice", "default", lambda x: x * 2)
torch.library.register_fake("toyfile::twice", torch.empty_like)
torch.library.register_autograd("toyfile::twice", lambda context, gradient: gradient * 2)

class Twice(torch.nn.Module):
    def forward(self, x):
        return torch.ops.toyfile.twice(x)

"""


@pytest.fixture(autouse=True)
def modules_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = dict(sys.modules)
    yield
    for name in set(sys.modules) - set(before):
        if name.startswith(("_remat_model_", "written")):
            del sys.modules[name]


def written(folder: Path, text: str, name: str = "written.py") -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.exhaustive
@pytest.mark.nightly
def test_a_file_that_registers_an_operator_is_told_that_its_budget_is_too_small(remat: Remat) -> None:
    """A refusal records the step again with each lever, so it asks for the workload again and again."""
    Path("model.py").write_text(REGISTERS + MODEL.replace("nn.GELU()", "Twice()"))
    ran = remat("plan", "--model", "model.py:stack", "--target", "h100-80gb", "--budget", "1KiB", "--json")
    assert ran.exit_code == 3, ran.stderr
    assert "is below the least possible peak" in ran.data["error"] and "batch" in ran.data["error"]


def test_a_file_is_executed_again_only_when_it_was_written_anew(tmp_path: Path) -> None:
    path = written(tmp_path, "value = 1\n")
    first = workloads.load(path)
    assert workloads.load(path) is first
    path.write_text("value = 2\n")
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 1_000_000))
    assert workloads.load(path).value == 2


def test_classes_of_the_file_can_be_pickled_and_its_name_imports_it(tmp_path: Path) -> None:
    module = workloads.load(
        written(
            tmp_path,
            "from __future__ import annotations\nimport dataclasses\n\n"
            "@dataclasses.dataclass\nclass Sizes:\n    width: int\n",
            "written_sizes.py",
        )
    )
    sizes = module.Sizes(3)
    assert pickle.loads(pickle.dumps(sizes)) == sizes
    import written_sizes  # type: ignore[import-not-found]

    assert written_sizes is module


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    one = workloads.load(written(tmp_path / "a", "class Sizes:\n    pass\n"))
    other = workloads.load(written(tmp_path / "b", "class Sizes:\n    pass\n"))
    assert one is not other
    for module in (one, other):
        assert type(pickle.loads(pickle.dumps(module.Sizes()))) is module.Sizes


def test_a_file_named_like_a_known_module_does_not_take_its_place(tmp_path: Path) -> None:
    import json

    module = workloads.load(written(tmp_path, "value = 1\n", "json.py"))
    assert module.value == 1 and sys.modules["json"] is json


def test_what_the_program_imported_already_is_not_executed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, "value = []\n", "written_before.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    import written_before  # type: ignore[import-not-found]

    assert workloads.load(path) is written_before


def test_a_file_that_fails_is_tried_again(tmp_path: Path) -> None:
    path = written(tmp_path, "import missing_there\n")
    for _ in range(2):
        with pytest.raises(UsageError, match=r"raises ModuleNotFoundError: .*missing_there"):
            workloads.load(path)
    assert "written" not in sys.modules
