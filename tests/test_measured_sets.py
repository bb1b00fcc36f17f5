"""The measured sets are read as their sources say; the benchmark's rows are of them."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from remat.costing.roofline import kernel_us

roofline: Any = importlib.import_module("benchmarks.roofline")
liger: Any = importlib.import_module("benchmarks.measured.liger")
phantora: Any = importlib.import_module("benchmarks.measured.phantora")
vidur: Any = importlib.import_module("benchmarks.measured.vidur")
kernelbench: Any = importlib.import_module("benchmarks.measured.kernelbench")
h100: Any = importlib.import_module("benchmarks.measured.h100")


def names(measurement: Any) -> list[str]:
    return [kind.name.split(".")[1] for kind, count in measurement.kernels if kind.moved_bytes for _ in range(count)]


def phantora_rows(folder: Path, *rows: tuple[dict[str, Any], int]) -> list[Any]:
    (folder / "phantora-l40s").mkdir()
    text = "\n".join(f'"{json.dumps(key).replace(chr(34), chr(34) * 2)}",{nanos}' for key, nanos in rows)
    (folder / "phantora-l40s" / "compute.csv").write_text(f"key,nanos\n{text}\n")
    return list(phantora.measurements(folder))


def test_operands_of_equal_size_share_a_buffer_and_are_read_once(tmp_path: Path) -> None:
    same, other, nothing = phantora_rows(
        tmp_path,
        ({"Add": {"R": [2, [["bf16", [4, 8]]]]}}, 900),
        ({"Add": [["bf16", [4, 8]], ["bf16", [8]]]}, 900),
        ({"ForeachMulScalar_": {"R": [3, [["f32", [10]]]]}}, 900),
    )
    assert [kind.moved_bytes for kind, _ in same.kernels] == [2 * 64]  # one read, one written
    assert [kind.moved_bytes for kind, _ in other.kernels] == [2 * 64 + 16]
    assert [kind.moved_bytes for kind, _ in nothing.kernels] == [2 * 3 * 40]  # in a list each is gone through


def test_a_cast_that_does_nothing_is_left_out(tmp_path: Path) -> None:
    assert len(phantora_rows(tmp_path, ({"ConvDType": [["f32", [4]], "Float"]}, 0))) == 0


def vidur_row(folder: Path, operator: str, ranks: int) -> Any:
    (folder / "vidur").mkdir()
    header = "gpu,model,operator,num_tokens,num_tensor_parallel_workers,gflop,median_us"
    row = f"h100,Llama-2-70b-hf,{operator},4096,{ranks},0,100"
    (folder / "vidur" / "fp16_layers_median.csv").write_text(f"{header}\n{row}\n")
    (found,) = vidur.measurements(folder)
    return found


@pytest.mark.parametrize(
    ("operator", "ranks", "gflop"),
    [
        ("attn_pre_proj", 1, 687.2),
        ("attn_post_proj", 2, 274.9),
        ("mlp_up_proj", 1, 3848.0),
        ("mlp_down_proj", 2, 962.1),
    ],
)
def test_shapes_of_linear_layers_have_the_operations_that_the_source_states(
    operator: str, ranks: int, gflop: float, tmp_path: Path
) -> None:
    found = vidur_row(tmp_path, operator, ranks)
    assert names(found) == ["mm"]
    assert sum(kind.flops for kind, _ in found.kernels) / 1e9 == pytest.approx(gflop, rel=1e-3)


def test_gradients_that_nobody_drops_are_added_to() -> None:
    with liger.on_fakes():
        loss = liger._cross_entropy(64, {"B": 2, "T": 4})
        assert names_of(loss.kernels("full")).count("add_") == 1  # the script keeps the gradient of the logits
        norm = liger._layer_norm(64, {"M": 8})
        assert names_of(norm.kernels("backward")) == ["native_layer_norm_backward", "add_", "add_"]  # of the weights


def names_of(kernels: Any) -> list[str]:
    return [kind.name.split(".")[1] for kind, count in kernels if kind.moved_bytes for _ in range(count)]


def test_backward_of_megatrons_kernels_contains_their_forward() -> None:
    with liger.on_fakes():
        assert "_fused_rms_norm" in names_of(liger._megatron_rms_norm(64, {"S": 8, "B": 1}).kernels("backward"))


def test_a_problem_is_run_without_gradients_on_fakes(tmp_path: Path) -> None:
    file = tmp_path / "1_a.py"
    file.write_text(
        "import torch\nclass Model(torch.nn.Module):\n"
        "    def __init__(self, n):\n        super().__init__()\n        self.f = torch.nn.Linear(n, n)\n"
        "    def forward(self, x):\n        return torch.relu(self.f(x)).transpose(0, 1)\n"
        "def get_inputs():\n    return [torch.rand(4, 8)]\n"
        "def get_init_inputs():\n    return [8]\n"
    )
    assert names_of(kernelbench._kernels(file)) == ["addmm", "relu"]  # a view is no kernel


def test_a_row_counts_what_lies_within(tmp_path: Path) -> None:
    found = phantora_rows(tmp_path, *(({"Add": [["f32", [1 << 20]], ["f32", [1]]]}, 1) for _ in range(4)))
    price_us = kernel_us(found[0].kernels[0][0], found[0].target)
    shares = (1.0, 1.15, 1.4, 3.0)
    measured = [dataclasses.replace(m, measured_us=price_us / share) for m, share in zip(found, shares, strict=True)]
    rows = {(row["family"], row["split"]): row for row in roofline.rows_of(measured, kernel_us)}
    assert rows["all", "all"]["within 10 / 20 / 50 %"] == "25 / 50 / 75"
    assert rows["all", "check"]["n"] == rows["all", "fit"]["n"] == 2


@pytest.fixture(scope="module")
def own() -> list[Any]:
    return list(h100.measurements(Path()))


@pytest.mark.exhaustive
def test_our_own_kernels_hold_the_roofline(own: list[Any]) -> None:
    rows = {(row["set"], row["family"], row["split"]): row for row in roofline.rows_of(own, kernel_us)}
    check = rows[h100.STEPS, roofline.ALL, "check"]
    assert check["n"] > 900 and int(check["within 10 / 20 / 50 %"].split(" / ")[1]) >= 75


@pytest.mark.exhaustive
def test_the_sums_of_kernels_lie_where_those_of_a_step_do(own: list[Any]) -> None:
    steps = [each for each in own if each.family == h100.WHOLE_STEP]
    inside = [abs(roofline.device_us(each, kernel_us) / each.measured_us - 1) <= 0.1 for each in steps]
    assert len(inside) == 12 and sum(inside) >= 11  # a mixture of experts is 15 % below


def test_a_step_that_parameters_were_chosen_by_has_no_kernel_to_check_with(own: list[Any]) -> None:
    (gpt2,) = (each for each in own if each.name == "gpt2")
    fitted = [each.kernels[0][0] for each in own if each.split == "fit" and each.family != h100.WHOLE_STEP]
    assert gpt2.split == "fit" and all(kind in fitted for kind, count in gpt2.kernels if count)
    assert not any("_foreach_addcmul_" in each.name for each in own)
