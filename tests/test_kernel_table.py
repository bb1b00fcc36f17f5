"""A table of measured kernels prices what it holds, what is like it, and nothing else; memory stays as it was."""

from __future__ import annotations

import ast
import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from remat.costing import kernel_calls
from remat.costing.costs import estimated_costs
from remat.costing.kernel_calls import DeviceLost, TableRow, read_table
from remat.costing.kernel_files import load_table, save_table
from remat.costing.kernel_table import KernelTable
from remat.costing.profile import Profile
from remat.costing.roofline import kernel_us
from remat.errors import UsageError
from remat.evaluation.graph import OpKind
from remat.planning.planner import plan
from remat.planning.profiling import profile
from remat.workload.target import TARGETS
from remat.workload.workload import Workload
from tests.command_line import Remat
from tests.small_models import TEST_SIZES
from tests.toys import TRANSFORMER

H100 = TARGETS["h100-80gb"]


def vector(length: int, dtype: str = "float32") -> OpKind:
    size = 4 if dtype == "float32" else 2
    described = {"tensor": [[length], [1], dtype]}
    return OpKind("aten.mul.Tensor", [[described, described], {}], 0, 3 * size * length, dtype)


def table_of(path: Path, kinds: Sequence[OpKind], times_us: Sequence[float | None]) -> KernelTable:
    save_table(path, kinds, times_us, {"device": "a card", "torch": "2.13.0"})
    return load_table(path)


def norms() -> nn.Module:
    """Of which a CPU build of torch lacks CUDA's kernels in 16 bits."""
    return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.RMSNorm(64), nn.Linear(64, 64)).bfloat16()


@pytest.fixture(scope="module", params=["norms", pytest.param("llama-1b", marks=pytest.mark.exhaustive)])
def recorded(request: pytest.FixtureRequest) -> Profile:
    if request.param != "norms":
        return profile(TEST_SIZES[request.param](), target="h100-80gb")
    step = Workload(
        "norms",
        norms,
        lambda n, _: torch.randn(n, 64, dtype=torch.bfloat16),
        lambda m, x: m(x).sum().float(),
        batch_size=512,
    )
    found = profile(step, target="h100-80gb")
    assert sum(kind.name.startswith("remat.") for kind in found.graph.kinds) == 4
    return found


def test_a_kernel_of_the_table_has_its_time_and_shares_add_up(recorded: Profile, tmp_path: Path) -> None:
    """Every kernel that ATen has, stand-ins among them; what a table cannot hold keeps the roofline's."""
    graph, target = recorded.graph, recorded.target
    doubled = [2 * us if us else None for us in recorded.costs.time_us]
    costs = estimated_costs(graph, target, table_of(tmp_path / "t.csv", graph.kinds, doubled))
    for kind, before, now in zip(graph.kinds, recorded.costs.time_us, costs.time_us, strict=True):
        assert now == pytest.approx(2 * before, abs=1e-3), kind.name
    assert costs.about["table"]["signature"] == pytest.approx(1, abs=1e-3)
    assert costs.workspace_bytes == recorded.costs.workspace_bytes


@given(st.integers(10, 28), st.floats(0.2, 5))
def test_other_sizes_have_the_factor_of_those_beside_them(exponent: int, factor: float) -> None:
    """Where all that was measured is off by one factor, all else is; at the ends too."""
    kinds = [vector(2**power) for power in (14, 20, 24)]
    table = KernelTable.of("a card", [(kind, factor * kernel_us(kind, H100)) for kind in kinds])
    unknown = vector(2**exponent + 2)
    ((time_us, source),) = table.price([unknown], H100)
    assert source == "family" and time_us == pytest.approx(factor * kernel_us(unknown, H100), rel=1e-6)


def test_between_two_sizes_the_factor_lies_between_theirs() -> None:
    low, high, between = vector(2**20), vector(2**26), vector(2**23)
    table = KernelTable.of("a card", [(low, 3 * kernel_us(low, H100)), (high, kernel_us(high, H100))])
    ((time_us, _),) = table.price([between], H100)
    assert 1 < time_us / kernel_us(between, H100) < 3


def test_another_operator_or_dtype_has_the_rooflines_time(tmp_path: Path) -> None:
    known, other = vector(2**20), vector(2**20, "bfloat16")
    table = table_of(tmp_path / "t.csv", [known], [1000.0])
    added = dataclasses.replace(known, name="aten.add.Tensor")
    assert table.price([other, added], H100) == [(kernel_us(kind, H100), "roofline") for kind in (other, added)]


def test_numbers_and_devices_among_arguments_do_not_matter(tmp_path: Path) -> None:
    described = {"tensor": [[1024], [1], "float32"]}
    here, there = (
        OpKind("aten.add.Scalar", [[described, number], {"device": {"device": device}}], 0, 8192, "float32")
        for number, device in ((0.5, "cpu"), (2.5, "cuda:0"))
    )
    table = table_of(tmp_path / "t.csv", [here], [7.0])
    assert table.price([there], H100) == [(7.0, "signature")]


# The script


def test_the_script_imports_torch_alone() -> None:
    tree = ast.parse(Path(kernel_calls.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} - sys.stdlib_module_names == {"torch"}


@pytest.mark.exhaustive
def test_the_script_fills_in_what_is_missing_and_says_what_it_cannot_measure(tmp_path: Path) -> None:
    unknown = dataclasses.replace(vector(64), name="aten.made_up.default")
    kinds, path = [vector(32), vector(64), unknown], tmp_path / "t.csv"
    save_table(path, kinds, [123.0, None, None], {})
    script = shutil.copy(kernel_calls.__file__, tmp_path)
    run = subprocess.run([sys.executable, script, path], capture_output=True, text=True, timeout=300, check=True)
    about, rows = read_table(path)
    assert about["torch"] == torch.__version__
    assert [row.time_us is None for row in rows] == [False, False, True] and rows[0].time_us == 123.0
    assert rows[1].time_us and rows[1].time_us > 0
    assert "2 of 3 kernels measured" in run.stdout and "not measured: aten.made_up.default" in run.stdout


def test_a_table_of_another_device_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    save_table(path, [vector(32), vector(64)], [123.0, None], {"device": "another card"})
    before = path.read_text()
    with pytest.raises(SystemExit, match="was measured on another card, and this is cpu"):
        kernel_calls.main(str(path))
    assert path.read_text() == before


def test_a_kernel_that_makes_the_device_unusable_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.csv"
    save_table(path, [vector(32), vector(64), vector(128)], [None, None, None], {})

    def median_us(row: TableRow, device: torch.device) -> float:
        if row.signature == read_table(path)[1][1].signature:
            raise DeviceLost("aten.add made the device unusable for this process")
        return 5.0

    monkeypatch.setattr(kernel_calls, "_median_us", median_us)
    with pytest.raises(SystemExit, match=r"unusable .* Run the command again"):
        kernel_calls.main(str(path))
    assert [row.time_us for row in read_table(path)[1]] == [5.0, None]


# The library and the command


LARGE = TRANSFORMER.sized(1024)  # beside 64 MiB of workspaces


@pytest.mark.exhaustive
def test_a_plan_says_how_much_of_its_time_was_measured(tmp_path: Path) -> None:
    """Twice the time a kernel: twice the time of the step, and the same bytes."""
    recorded, path = profile(LARGE, target="h100-80gb"), tmp_path / "t.csv"
    save_table(path, recorded.graph.kinds, [2 * us or None for us in recorded.costs.time_us], {"device": "a card"})
    without, with_table = (plan(LARGE, budget="90%step", target="h100-80gb", costs=costs) for costs in (None, path))
    one, two = without.predicted, with_table.predicted  # the host takes longer than either
    assert two["device_us"] == pytest.approx(2 * one["device_us"], rel=1e-3)
    assert two["peak_bytes"] == one["peak_bytes"]
    assert with_table.about["kernel_times"]["measured_on"] == "a card"
    assert "kernel_times" not in without.about
    assert without.regions


@pytest.mark.exhaustive
def test_the_command_writes_a_table_and_plans_by_it(remat: Remat) -> None:
    model, by_name = ("--model", "model.py:short"), ("--target", "h100-80gb", "--costs", "t.csv")
    assert "kernels, measured on" in remat("profile", *model, "--target", "cpu", "--costs", "t.csv").stdout
    assert "% of the step measured on" in remat("plan", *model, *by_name, "--budget", "20GiB", "--no-menu").stdout
    refused = remat("plan", *model, "--target", "cpu", "--costs", "t.csv", "--budget", "90%step")
    assert refused.exit_code == 2 and "kernels of this machine are measured" in refused.stderr
    assert "kernel_calls.py t.csv" in remat("profile", *model, *by_name).stdout
    refused = remat("plan", *model, *by_name, "--budget", "90%step")
    assert refused.exit_code == 2 and "t.csv has no times yet" in refused.stderr
    refused = remat("profile", *model)
    assert refused.exit_code == 2 and "--out FILE for a profile" in refused.stderr


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "operator,signature,flops,moved_bytes,dtype,time_us\n"])
def test_what_is_no_table_is_refused_by_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"t\.csv"):
        load_table(path)
