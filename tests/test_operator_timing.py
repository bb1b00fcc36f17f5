"""Operator timing and `device_allocator` are exact about memory; no claim is about time."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from remat.costing import operator_timing as measure_module
from remat.costing import timing_cache
from remat.costing.costs import Costs
from remat.costing.device_allocator import allocation_curve, measure_peak, measure_step
from remat.costing.kernel_calls import NotMeasurable, arguments
from remat.costing.operator_timing import device_target, time_operator, time_operators
from remat.costing.timing_cache import FATAL, Cache, device_name
from remat.errors import UsageError
from remat.evaluation.graph import OpKind
from remat.files import default_cache
from remat.recording.tracker import Tracker
from remat.workload.target import target_of
from tests.devices import DEVICE

CPU = torch.device("cpu")
MAP = {"tensor": [[4, 8, 16, 16], [2048, 256, 16, 1], "float32"]}  # 4 * 8 * 16 * 16 * 4 = 32768 bytes
FILTERS = {"tensor": [[8, 8, 3, 3], [72, 9, 3, 1], "float32"]}
MATRIX = {"tensor": [[32, 32], [32, 1], "float32"]}


def kind(name: str, *args: Any, flops: int = 0, moved_bytes: int = 0, **kwargs: Any) -> OpKind:
    return OpKind(name, [list(args), kwargs], flops, moved_bytes, "float32")


CONVOLUTION = kind("aten.convolution.default", MAP, FILTERS, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, flops=1)
ADD = kind("aten.add.Tensor", MATRIX, MATRIX)
UNKNOWN = kind("nowhere.made_up.default", MATRIX)


def quick(*kinds: OpKind, cache: Path | None = None) -> Costs:
    return time_operators(kinds, CPU, cache=cache, repeats=3, seconds_per_kind=0.0)


# The allocator


def holds_two_of_three() -> None:
    first = torch.empty(1000)  # 4000
    second = torch.empty(500)  # 4000 + 2000
    del first  # 2000
    third = torch.empty(2000)  # 2000 + 8000 = 10000
    del second, third


def test_the_peak_of_a_known_pattern_is_exact() -> None:
    assert measure_peak(holds_two_of_three, CPU) == 10_000


def test_the_curve_has_every_event_in_order() -> None:
    assert allocation_curve(holds_two_of_three).tolist() == [4000, 6000, 2000, 10000, 8000, 0]


def test_a_hundred_thousand_events_are_complete_and_in_order() -> None:
    def allocate() -> None:
        for _ in range(50_000):
            torch.empty(25)

    curve = allocation_curve(allocate)
    assert len(curve) == 100_000
    assert set(curve[0::2]) == {100}
    assert set(curve[1::2]) == {0}


def test_the_peak_of_a_backward_is_the_sum_of_its_tensors() -> None:
    leaf = torch.zeros(1000, requires_grad=True)

    def step() -> None:
        leaf.exp().sum().backward()

    # exp keeps its result (4000), the sum is 4 bytes, and so is the gradient that backward starts from; the sum's
    # gradient is a view of that; the gradient of exp is one new tensor (4000), which the leaf then owns
    assert measure_peak(step, CPU) == 4000 + 4 + 4 + 4000


def test_what_was_alive_before_is_not_counted() -> None:
    before = torch.empty(10_000)
    assert measure_peak(lambda: torch.relu(before[:10]), CPU) == 40


def test_what_an_earlier_observation_saw_made_is_not_taken_off_the_peak() -> None:
    """The profiler would: of that, or, where it is gone since, of whatever has come to lie at its address."""
    kept: list[torch.Tensor] = []

    def lets_go() -> None:
        kept.clear()
        torch.empty(2000)

    measure_peak(lambda: kept.append(torch.empty(1000)), CPU)
    assert measure_peak(lets_go, CPU) == 8000


def test_what_the_function_names_its_ranges_and_how_deep_they_are_makes_no_difference() -> None:
    def deep() -> None:
        with contextlib.ExitStack() as ranges:
            for name in ["[memory]"] * 2000:
                ranges.enter_context(torch.profiler.record_function(name))
            torch.empty(25)

    before = measure_peak(lambda: None, CPU)
    assert measure_peak(deep, CPU) >= before + 100


def test_an_error_in_the_function_ends_the_observation() -> None:
    with pytest.raises(ZeroDivisionError):
        measure_peak(lambda: 1 / 0, CPU)
    assert measure_peak(holds_two_of_three, CPU) == 10_000


def test_a_step_is_measured_after_its_warm_up() -> None:
    state: list[torch.Tensor] = []

    def step() -> None:
        if not state:
            state.append(torch.empty(1000))
        torch.empty(10)

    measured = measure_step(step, CPU, warm_up=1, repeats=1)
    assert (measured.peak_bytes, measured.requested_bytes, measured.reserved_bytes) == (40, 40, None)


@pytest.mark.exhaustive
@pytest.mark.nightly
def test_the_profiler_prints_nothing() -> None:
    program = """
import torch
from remat.costing.device_allocator import measure_peak
print(measure_peak(lambda: torch.empty(25), torch.device("cpu")))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("100\n", "")


# Workspaces


def test_outputs_are_not_workspace() -> None:
    assert time_operator(ADD, CPU, 3, 0.0).workspace_bytes == 0


def test_the_workspace_of_a_convolution_leaves_out_its_output() -> None:
    args, _ = arguments(CONVOLUTION, CPU)
    peak = measure_peak(lambda: torch.ops.aten.convolution.default(*args), CPU)
    workspace = time_operator(CONVOLUTION, CPU, 3, 0.0).workspace_bytes
    assert workspace >= 0
    assert workspace == peak - 32768


def test_a_hidden_copy_is_workspace() -> None:
    turned = {"tensor": [[256, 16], [1, 256], "float32"]}  # layer norm needs rows: 256 * 16 * 4 bytes are copied
    scale = {"tensor": [[16], [1], "float32"]}
    norm = kind("aten.native_layer_norm.default", turned, [16], scale, scale, 1e-5)
    assert time_operator(norm, CPU, 3, 0.0).workspace_bytes == 256 * 16 * 4


def test_an_operator_in_place_has_no_output() -> None:
    assert quick(kind("aten.mul_.Tensor", MATRIX, MATRIX)).workspace_bytes == (0,)


# Arguments


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        pytest.param([3, 4], [4, 1], id="contiguous"),
        pytest.param([3, 4], [1, 3], id="transposed"),
        pytest.param([3, 4], [0, 1], id="expanded"),
        pytest.param([], [], id="scalar"),
        pytest.param([0, 4], [4, 1], id="empty"),
    ],
)
def test_arguments_have_the_recorded_layout(shape: list[int], stride: list[int]) -> None:
    ((made,), _) = arguments(kind("aten.relu.default", {"tensor": [shape, stride, "bfloat16"]}), CPU)
    assert (list(made.shape), list(made.stride()), made.dtype) == (shape, stride, torch.bfloat16)


def test_arguments_that_are_not_tensors_are_made_again() -> None:
    converted = kind(
        "aten._to_copy.default",
        MATRIX,
        dtype={"dtype": "bfloat16"},
        layout={"layout": "strided"},
        device={"device": "cpu"},
        memory_format={"memory_format": "contiguous_format"},
    )
    _, kwargs = arguments(converted, CPU)
    assert kwargs == {
        "dtype": torch.bfloat16,
        "layout": torch.strided,
        "device": CPU,
        "memory_format": torch.contiguous_format,
    }


def test_indices_stay_within_what_they_index() -> None:
    table = {"tensor": [[5, 64], [64, 1], "float32"]}
    indices = {"tensor": [[1000], [1], "int64"]}
    args, _ = arguments(kind("aten.embedding.default", table, indices), CPU)
    assert set(args[1].tolist()) == {0, 1, 2, 3, 4}
    assert quick(kind("aten.embedding.default", table, indices)).about["not_measured"] == []


@pytest.mark.any_device
@pytest.mark.parametrize(
    ("shape", "stride"),
    [([32, 16], [16, 1]), ([32, 16], [1, 0]), ([32, 1], [1, 1]), ([16], [1]), ([], []), ([32, 16], [32, 1])],
    ids=["whole", "expanded", "by-row", "by-column", "one", "gaps"],
)
@pytest.mark.parametrize("given", [24, 4096])
def test_a_mask_chooses_no_more_than_is_given(shape: list[int], stride: list[int], given: int) -> None:
    """Text with the tokens of images: a GPU ends the process's work where there are too few for the mask."""
    text, tokens = {"tensor": [[32, 16], [16, 1], "float32"]}, {"tensor": [[given], [1], "float32"]}
    scattered = kind("aten.masked_scatter.default", text, {"tensor": [shape, stride, "bool"]}, tokens)
    (_, mask, _), _ = arguments(scattered, DEVICE)
    assert mask.broadcast_to(32, 16).sum() <= given and (mask.any() or given < 32 or stride == [32, 1])
    costs = time_operators([scattered], DEVICE, cache=None, repeats=3, seconds_per_kind=0.0)
    assert costs.about["not_measured"] == []
    assert DEVICE.type == "cpu" or costs.workspace_bytes[0] >= 32 * 16 * 8


@pytest.mark.any_device
@pytest.mark.parametrize("size", [40, 3, 0, None])
def test_repeats_add_up_to_the_size_that_is_asked_for(size: int | None) -> None:
    repeated = kind("aten.repeat_interleave.Tensor", {"tensor": [[7], [1], "int64"]}, output_size=size)
    (repeats,), _ = arguments(repeated, DEVICE)
    assert repeats.sum() == (7 if size is None else size)
    assert time_operators([repeated], DEVICE, cache=None, repeats=3).about["not_measured"] == []


def test_measuring_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    quick(ADD, kind("aten.bernoulli_.float", MATRIX, 0.5))
    assert torch.equal(before, torch.get_rng_state())


# What cannot be measured


@pytest.mark.parametrize(
    ("unmeasurable", "reason"),
    [
        pytest.param(UNKNOWN, "there is no operator nowhere.made_up.default", id="unknown operator"),
        pytest.param(
            kind("aten.relu.default", {"other": "a generator"}), "'a generator' cannot be made", id="argument"
        ),
        pytest.param(kind("aten.mm.default", MATRIX, FILTERS), "RuntimeError: ", id="operator raises"),
        pytest.param(kind("aten.relu.default", MATRIX, moved_bytes=1 << 60), "1073741824.00 GiB", id="does not fit"),
    ],
)
def test_what_cannot_be_measured_is_named_and_costs_nothing(unmeasurable: OpKind, reason: str) -> None:
    costs = quick(ADD, unmeasurable)
    (missing,) = costs.about["not_measured"]
    assert (missing["kind"], missing["op"]) == (1, unmeasurable.name)
    assert reason in missing["reason"]
    assert (costs.time_us[1], costs.workspace_bytes[1]) == (0.0, 0)
    assert costs.time_us[0] > 0


def test_costs_are_labelled_and_parallel_to_kinds() -> None:
    seen: list[tuple[int, int]] = []
    kinds, noted = (ADD, CONVOLUTION), lambda *at: seen.append(at)
    costs = time_operators(kinds, CPU, cache=None, repeats=3, seconds_per_kind=0.0, on_progress=noted)
    assert (costs.source, costs.device) == ("measured", device_name(CPU))
    assert len(costs.time_us) == len(costs.workspace_bytes) == len(costs.spread) == 2
    assert seen == [(1, 2), (2, 2)]
    assert Costs.from_json(costs.to_json()) == costs


# The cache


def test_a_kind_is_measured_once(tmp_path: Path) -> None:
    first = quick(ADD, UNKNOWN, cache=tmp_path)
    again = quick(ADD, UNKNOWN, cache=tmp_path)
    assert (first.about["from_cache"], again.about["from_cache"]) == (0, 1)
    assert first.time_us == again.time_us
    assert [missing["op"] for missing in again.about["not_measured"]] == [UNKNOWN.name]


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"format": "other"}', '{"rows": {"a": [1]}}'])
def test_a_corrupt_cache_is_ignored_and_written_anew(tmp_path: Path, content: str) -> None:
    quick(ADD, cache=tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(content)
    assert quick(ADD, cache=tmp_path).about["from_cache"] == 0
    assert quick(ADD, cache=tmp_path).about["from_cache"] == 1


def test_two_writers_keep_each_others_rows(tmp_path: Path) -> None:
    slow = Cache.open(tmp_path, CPU)
    quick(ADD, cache=tmp_path)
    slow.save()
    quick(CONVOLUTION, cache=tmp_path)
    assert len(Cache.open(tmp_path, CPU).rows) == 2


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert quick(ADD, cache=tmp_path / "file" / "folder").time_us[0] > 0


def test_an_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    def interrupted(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        time_operators((ADD, CONVOLUTION), CPU, cache=tmp_path, on_progress=interrupted)
    assert quick(ADD, CONVOLUTION, cache=tmp_path).about["from_cache"] == 1


@pytest.mark.exhaustive
def test_a_kind_that_ends_the_process_is_left_out_by_the_next(tmp_path: Path) -> None:
    """And nothing that was measured before it is lost."""
    program = f"""
import os, signal, sys
from pathlib import Path
from remat.costing import operator_timing, timing_cache
from tests.test_operator_timing import ADD, CONVOLUTION, quick

genuine = operator_timing.time_operator
def deadly(kind, *rest):
    return genuine(kind, *rest) if kind is ADD else os.kill(os.getpid(), signal.SIGSEGV)

operator_timing.time_operator, timing_cache.SAVE_S = deadly, 0.0
quick(ADD, CONVOLUTION, cache=Path({str(tmp_path)!r}))
"""
    ran = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parent.parent, check=False)
    assert ran.returncode == -11
    for _ in range(2):
        found = quick(ADD, CONVOLUTION, cache=tmp_path)
        assert found.about["from_cache"] == 1
        assert found.about["not_measured"] == [{"kind": 1, "op": CONVOLUTION.name, "reason": FATAL}]
    assert len(os.listdir(tmp_path)) == 1


def test_a_kind_that_is_being_measured_elsewhere_is_not_called_deadly(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path, CPU)
    with cache.trying(ADD):
        assert len(os.listdir(tmp_path)) == 1
        assert quick(ADD, cache=tmp_path).about["not_measured"] == []


def test_an_operator_that_ruins_the_device_ends_the_measurement_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ruined(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    cache = Cache.open(tmp_path, CPU)
    monkeypatch.setattr(torch.cuda, "synchronize", ruined)
    with pytest.raises(UsageError, match=r"aten\.add\.Tensor made the device unusable .*illegal memory access"):
        measure_module._forget_failure(ADD, torch.device("cuda"), cache)
    with pytest.raises(NotMeasurable, match="ended the process"), Cache.open(tmp_path, CPU).trying(ADD):
        pass


def test_workspaces_that_the_environment_sets_are_measured_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing_cache, "device_name", lambda _: "card")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    plain, on_cpu = (Cache.open(tmp_path, torch.device(kind)).path for kind in ("cuda", "cpu"))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert Cache.open(tmp_path, torch.device("cuda")).path != plain
    assert Cache.open(tmp_path, CPU).path == on_cpu


def test_processors_of_one_name_with_other_instructions_are_measured_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing_cache, "_vector_instructions", lambda: ["avx", "avx2"])
    one = Cache.open(tmp_path, CPU).path
    monkeypatch.setattr(timing_cache, "_vector_instructions", lambda: ["avx", "avx2", "avx512f"])
    other = Cache.open(tmp_path, CPU).path
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert len({one, other, Cache.open(tmp_path, CPU).path}) == 3


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "remat"
    time_operators((ADD,), CPU, repeats=3, seconds_per_kind=0.0)
    assert len(os.listdir(tmp_path / "remat")) == 1


# The device at hand


def test_the_cpu_is_a_target_with_the_memory_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_module, "_measured_rates", lambda device: {"bytes": 1e4, "float32": 1e5})
    target = device_target(CPU, cache=tmp_path)
    assert (target.name, target.device, target.alignment_bytes) == ("cpu", "cpu", 1)
    assert 0 < target.memory_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert (target.bytes_per_us, target.flops_per_us) == (1e4, {"float32": 1e5})
    monkeypatch.undo()
    assert device_target(CPU, cache=tmp_path) == target  # the rates are kept


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_on_cuda_a_product_has_no_output_in_its_workspace() -> None:
    device = torch.device("cuda")
    product = kind("aten.mm.default", MATRIX, MATRIX, flops=1)
    costs = time_operators((product, ADD), device, cache=None, repeats=3)
    assert costs.about["not_measured"] == []
    assert costs.workspace_bytes == (0, 0)
    assert measure_peak(lambda: torch.empty(1000, device=device), device, requested=True) == 4000
    assert device_target(device).alignment_bytes == 512


@pytest.mark.cuda
def test_libraries_keep_the_same_in_a_process_that_has_multiplied_before() -> None:
    device, product = torch.device("cuda"), kind("aten.mm.default", MATRIX, MATRIX, flops=1)
    torch.ones(4, 4, device=device) @ torch.ones(4, 4, device=device)
    kept = [time_operators((product,), device, cache=None, repeats=3).about["library_bytes"] for _ in range(2)]
    assert kept[0] == kept[1] > 0


@pytest.mark.parametrize(
    ("driver_name", "target"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA GH200 480GB", "gh200"),  # the CPU's memory; the GPU has 96 GB
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A100-SXM-64GB", None),
        ("NVIDIA GH200 144G HBM3e", None),
        ("NVIDIA H20", None),
    ],
)
def test_a_card_is_the_one_that_its_driver_names(driver_name: str, target: str | None) -> None:
    found = target_of(driver_name)
    assert (found.name if found else None) == target


def test_a_card_without_a_data_sheet_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 2 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    card = types.SimpleNamespace(major=9, minor=0, multi_processor_count=16)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(measure_module, "_measured_rates", lambda device: {"bytes": 4e5, "float32": 1e7})
    monkeypatch.setattr(measure_module, "measuring", lambda device: contextlib.nullcontext())
    target = device_target(torch.device("cuda"), cache=tmp_path)
    assert (target.name, target.memory_bytes) == ("nvidia h100 80gb hbm3 mig 1g.10gb", 2 << 30)
    assert (target.capability, target.processors) == (90, 16)
    assert (target.bytes_per_us, target.flops_per_us, target.efficiency) == (4e5, {"float32": 1e7}, 1.0)


# Attention's dropout: seed and offset as its forward leaves them


def backward_of_attention(name: str) -> OpKind:
    """The kind of the backward that a step for a GPU runs: recorded, not written down here."""
    dtype = torch.float32 if "efficient" in name else torch.bfloat16
    with FakeTensorMode(), Tracker() as tracker:
        q, k, v = (torch.randn(2, 4, 16, 32, dtype=dtype, requires_grad=True) for _ in range(3))
        if "flash" in name:
            out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.1)[0]
        elif "cudnn" in name:
            out = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.1)[0]
        else:
            out = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.1)[0]
        out.sum().backward()
    (found,) = [kind for kind in tracker.kinds.values() if kind.name == f"aten.{name}.default"]
    return found


@pytest.mark.parametrize(
    ("name", "on_host", "dtype", "shape"),
    [  # attention.cu and flash_api.cpp of ATen/native/transformers/cuda, torch 2.13
        ("_scaled_dot_product_efficient_attention_backward", True, torch.int64, ()),
        ("_scaled_dot_product_flash_attention_backward", False, torch.uint64, (2,)),
        ("_scaled_dot_product_cudnn_attention_backward", False, torch.int64, ()),
    ],
)
def test_seed_and_offset_of_dropout_are_made_where_the_kernel_reads_them(
    name: str, on_host: bool, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    device = torch.device("meta")  # any that is not the host
    args, _ = arguments(backward_of_attention(name), device)
    schema = getattr(torch.ops.aten, name).default._schema
    made = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)}
    for argument in ("philox_seed", "philox_offset"):
        assert made[argument].device.type == ("cpu" if on_host else "meta")
        assert made[argument].dtype == dtype
    assert tuple(made["philox_seed"].shape) == shape
    if on_host:
        assert made["philox_seed"].item() == 0
    others = [value for value in made.values() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    assert {value.device.type for value in others} == {"meta"}


def test_the_inner_backward_of_efficient_attention_reads_them_on_the_host_too() -> None:
    matrix = {"tensor": [[2, 16, 4, 32], [2048, 128, 32, 1], "float32"]}
    number = {"tensor": [[], [], "int64"]}
    sums = {"tensor": [[2, 4, 32], [128, 32, 1], "float32"]}
    args = [matrix, matrix, matrix, matrix, None, matrix, None, None, 16, 16, sums, 0.1, number, number, 0, False]
    made, _ = arguments(kind("aten._efficient_attention_backward.default", *args), torch.device("meta"))
    assert [value.device.type for value in made if isinstance(value, torch.Tensor)] == ["meta"] * 6 + ["cpu"] * 2
