"""The roofline's knowledge of kernels, one claim each, and the published speeds that it is held to."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from remat.costing.roofline import kernel_us
from remat.cuda_kernels import stand_ins
from remat.evaluation.graph import OpKind
from remat.recording.tracker import Tracker
from remat.workload.target import TARGETS, Target

published: Any = importlib.import_module("benchmarks.published")
H100, A100 = TARGETS["h100-80gb"], TARGETS["a100-80gb"]
BF16 = torch.bfloat16


def kinds_of(function: Callable[[], Any]) -> dict[str, OpKind]:
    """The kinds that `function` dispatches on fake tensors, by name."""
    tracker = Tracker(512)
    with FakeTensorMode(), tracker:
        function()
    return {kind.name.removeprefix("aten.").partition(".")[0]: kind for kind in tracker.kinds.values()}


def only(function: Callable[[], Any], name: str) -> OpKind:
    return kinds_of(function)[name]


def product(rows: int, inner: int, columns: int, dtype: torch.dtype = BF16) -> OpKind:
    def run() -> Tensor:
        return torch.empty(rows, inner, dtype=dtype) @ torch.empty(inner, columns, dtype=dtype)

    return only(run, "mm")


# Traffic


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, requires_grad=True)


def cross_entropy() -> None:
    F.cross_entropy(leaf(100, 1000), torch.empty(100, dtype=torch.int64)).backward()


def embedding() -> None:
    F.embedding(torch.empty(100, dtype=torch.int64), leaf(5000, 8)).sum().backward()


@pytest.mark.parametrize(
    ("function", "name", "expected"),
    [
        # reads one score and one label a row, writes the loss and the sum of weights
        pytest.param(cross_entropy, "nll_loss_forward", 100 * (8 + 4) + 4 + 4, id="loss"),
        # writes zeros and a number a row; reads labels and the sum of weights
        pytest.param(cross_entropy, "nll_loss_backward", 100 * 1000 * 4 + 100 * 8 + 4, id="loss-backward"),
        pytest.param(embedding, "embedding", 100 * 8 + 2 * 100 * 8 * 4, id="embedding"),
        pytest.param(lambda: torch.empty(100).add_(torch.empty(100)), "add_", 3 * 400, id="in-place"),
        pytest.param(lambda: torch.empty(100) + torch.empty(100), "add", 3 * 400, id="out-of-place"),
        pytest.param(lambda: torch.empty(100).zero_(), "zero_", 400, id="zero"),
        pytest.param(lambda: torch.empty(100).exponential_(), "exponential_", 400, id="drawn"),
        pytest.param(lambda: torch.empty(100).copy_(torch.empty(100, dtype=BF16)), "copy_", 600, id="copy"),
        pytest.param(lambda: torch.empty(100), "empty", 0, id="empty"),
        pytest.param(
            lambda: torch._foreach_add_([torch.empty(100)] * 1, [torch.empty(100)]), "_foreach_add_", 1200, id="foreach"
        ),
        pytest.param(
            lambda: torch.empty(1000, 8).gather(0, torch.empty(10, 8, dtype=torch.int64)),
            "gather",
            80 * 8 + 2 * 80 * 4,
            id="gather",
        ),
        pytest.param(
            lambda: torch.empty(1000, 8).index_add_(0, torch.empty(10, dtype=torch.int64), torch.empty(10, 8)),
            "index_add_",
            10 * 8 + 3 * 80 * 4,
            id="scatter",
        ),
    ],
)
def test_an_operator_is_charged_for_what_it_reads_and_writes(
    function: Callable[[], Any], name: str, expected: int
) -> None:
    assert only(function, name).moved_bytes == expected


# Of kernels whose stand-ins a CPU build records: the arguments that ATen's own have instead. x, gradient, weight and
# statistics of a (4096, 1024) input.
_STAND_INS: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[list[Any], list[Any]]]] = {
    "native_layer_norm": lambda x, w, s: ([x, 1, w, w], [x, [1024], w, w, 1e-5]),
    "native_layer_norm_backward": lambda x, w, s: (
        [x, x, s, s, w, w],
        [x, x, [1024], s, s, w, w, [True, True, True]],
    ),
    "_fused_rms_norm": lambda x, w, s: ([x, 1, w], [x, [1024], w, 1e-5]),
    "_fused_rms_norm_backward": lambda x, w, s: ([x, x, s, w], [x, x, [1024], s, w, [True, True]]),
    "_thnn_fused_gru_cell": lambda x, w, s: ([x, x, x, w, w], [x, x, x, w, w]),
    "_thnn_fused_gru_cell_backward": lambda x, w, s: ([x, x, True], [x, x, True]),
}


def test_every_stand_in_has_arguments_of_aten_here() -> None:
    assert set(re.findall(r'"remat::(\w+)"', inspect.getsource(stand_ins))) == set(_STAND_INS)


@pytest.mark.parametrize("name", _STAND_INS)
def test_a_stand_in_costs_what_its_kernel_costs(name: str) -> None:
    """A CPU build records `remat.native_layer_norm`; the card runs `aten.native_layer_norm`."""

    def signature(arguments: list[Any]) -> list[Any]:
        is_tensor = (isinstance(a, Tensor) for a in arguments)
        described = [
            {"tensor": [list(a.shape), list(a.stride()), "bfloat16"]} if tensor else a
            for a, tensor in zip(arguments, is_tensor, strict=True)
        ]
        return [described, {}]

    with FakeTensorMode():
        given = torch.empty(4096, 1024), torch.empty(1024), torch.empty(4096, 1)
        own, atens = map(signature, _STAND_INS[name](*given))
    moved = 1 << 30
    recorded = OpKind(f"remat.{name}.default", own, 0, moved, "bfloat16")
    expected = dataclasses.replace(recorded, name=f"aten.{name}.default", signature=atens)
    assert kernel_us(recorded, H100) == kernel_us(expected, H100)
    passes = 1.5 if "norm" in name else 1.0  # a norm reads its input twice
    assert kernel_us(recorded, H100) > passes * moved / H100.bytes_per_us


# Passes over memory


def passes(function: Callable[[], Any], name: str, target: Target = H100) -> float:
    """Traffic that `name` is charged for, over the bytes that it reads and writes once."""
    kind = only(function, name)
    return (kernel_us(kind, target) - 2 * target.launch_us) * target.bytes_per_us * 0.88 / kind.moved_bytes


@pytest.mark.parametrize(
    ("columns", "forward", "backward"),
    [
        pytest.param(8192, 1, 2, id="kept-on-the-chip"),  # backward: a product first, 6 passes for 3
        pytest.param(131072, 2, 2, id="read-three-times"),  # 3 reads and a write for 2
    ],
)
def test_softmax_reads_long_rows_three_times(columns: int, forward: float, backward: float) -> None:
    def run() -> None:
        torch.softmax(leaf(8192, columns), -1).sum().backward()

    assert passes(run, "_softmax") == pytest.approx(forward, rel=0.02)
    assert passes(run, "_softmax_backward_data") == pytest.approx(backward, rel=0.02)


def test_layer_norm_reads_its_input_twice_and_its_backward_more_often() -> None:
    def run() -> None:
        F.layer_norm(leaf(8192, 4096), (4096,), leaf(4096), leaf(4096)).sum().backward()

    assert 1.5 <= passes(run, "native_layer_norm") < 1.7  # 3 passes for 2
    kind = only(run, "native_layer_norm_backward")
    assert kernel_us(kind, H100) > 2.3 * kind.moved_bytes / (0.88 * H100.bytes_per_us)  # 7 for 3


def test_few_long_rows_leave_processors_of_a_layer_norm_idle() -> None:
    def normalised(rows: int) -> OpKind:
        width = (1 << 28) // rows
        return only(lambda: F.layer_norm(leaf(rows, width), (width,)), "native_layer_norm")

    few, many = normalised(16), normalised(16384)
    assert kernel_us(few, H100) > 10 * kernel_us(many, H100)  # 8.1 ms measured (KernelBench level 1, 40)


def test_numbers_of_16_bits_that_are_loaded_one_by_one_are_slower() -> None:
    def halves() -> None:
        gate, up = torch.chunk(torch.empty(8192, 16384, dtype=BF16), 2, -1)
        F.silu(gate) * up

    def whole() -> None:
        F.silu(torch.empty(8192, 8192, dtype=BF16))

    strided, dense = (kernel_us(only(function, "silu"), H100) for function in (halves, whole))
    assert strided > 1.5 * dense

    def broadcast(dtype: torch.dtype) -> OpKind:
        return only(lambda: torch.empty(8192, 1, dtype=dtype) + torch.empty(8192, 8192, dtype=dtype), "add")

    single = [kernel_us(broadcast(dtype), H100) for dtype in (BF16, torch.float32)]
    assert single[1] < 2 * single[0]  # float32 moves twice as much and is not held up


def copied(shape: list[int], stride: list[int], dtype: str = "bfloat16") -> OpKind:
    """A copy of a strided tensor into the order of its dimensions."""
    tensor, size = {"tensor": [shape, stride, dtype]}, 2 if dtype == "bfloat16" else 4
    moved = 2 * size * torch.Size(shape).numel()
    return OpKind("aten.clone.default", [[tensor], {"memory_format": "contiguous"}], 0, moved, dtype)


def test_copies_that_gather_scattered_elements_are_slowest() -> None:
    pixels = 56 * 56
    rows = copied([128, pixels, 128], [128 * pixels, 128, 1])
    heads = copied([128, 16, pixels, 8], [128 * pixels, 8, 128, 1])  # eight elements lie together
    planes = copied([128, 128, pixels], [128 * pixels, 1, 128])  # none do
    dense, strided, scattered = (kernel_us(kind, H100) for kind in (rows, heads, planes))
    assert dense < strided < scattered
    assert scattered == pytest.approx(426, rel=0.1)  # 223.5 us measured for half as many elements


def test_a_mask_of_one_byte_is_loaded_apart_but_for_dropout() -> None:
    def run() -> None:
        x = leaf(8192, 8192, dtype=BF16)
        x.detach().masked_fill(torch.empty(8192, 8192, dtype=torch.bool), 0.0)
        torch.ops.aten.native_dropout_backward(x.detach(), torch.empty(8192, 8192, dtype=torch.bool), 1.1)

    masked, dropped = (only(run, name) for name in ("masked_fill", "native_dropout_backward"))
    assert masked.moved_bytes == dropped.moved_bytes
    assert kernel_us(masked, H100) > 1.3 * kernel_us(dropped, H100)


def test_sums_of_columns_meet_in_memory() -> None:
    def summed(dim: int) -> OpKind:
        return only(lambda: torch.empty(16384, 1024, dtype=BF16).sum(dim), "sum")

    columns, rows = (kernel_us(summed(dim), H100) for dim in (0, 1))
    assert columns == pytest.approx(29, rel=0.2) and rows < 0.6 * columns  # measured


def test_a_batch_norm_of_few_channels_leaves_processors_idle() -> None:
    def normalised(channels: int, size: int) -> OpKind:
        def run() -> None:
            x, scale = torch.empty(256, channels, size, size, dtype=BF16), torch.empty(channels)
            torch.ops.aten.native_batch_norm(x, scale, scale, scale, scale, True, 0.1, 1e-5)

        return only(run, "native_batch_norm")

    few, many = normalised(64, 112), normalised(256, 56)  # as many bytes
    assert kernel_us(few, H100) == pytest.approx(3106, rel=0.1)  # measured
    assert kernel_us(few, H100) > 2 * kernel_us(many, H100)


def test_the_gradient_of_a_norms_weights_waits_for_few_blocks() -> None:
    def backward(rows: int, width: int) -> OpKind:
        def run() -> None:
            F.layer_norm(leaf(rows, width), (width,), leaf(width), leaf(width)).sum().backward()

        return only(run, "native_layer_norm_backward")

    narrow, wide = (kernel_us(backward(*shape), H100) for shape in ((50176, 128), (3136, 2048)))
    assert narrow > 2.5 * wide  # as many bytes; 265 us measured, and 66 us


def test_a_small_table_is_read_from_l2() -> None:
    def rows_of(table: int) -> OpKind:
        return only(lambda: torch.empty(table, 4096)[torch.empty(65536, dtype=torch.int64)], "index")

    small, large = rows_of(64), rows_of(65536)
    assert kernel_us(small, H100) < 0.6 * kernel_us(large, H100)


def test_the_gradient_of_a_table_sorts_many_indices() -> None:
    def backward(indices: int) -> OpKind:
        def run() -> None:
            F.embedding(torch.empty(indices, dtype=torch.int64), leaf(1024, 768)).sum().backward()

        return only(run, "embedding_dense_backward")

    few, many = (kernel_us(backward(indices), H100) for indices in (3072, 3073))
    assert many > few + 5


def test_an_operator_on_lists_is_a_kernel_for_so_many_blocks() -> None:
    def added(tensors: int, size: int) -> OpKind:
        return only(lambda: torch._foreach_add_([torch.empty(size) for _ in range(tensors)], 1.0), "_foreach_add_")

    whole, parts = added(1, 220 * 4096), added(220, 4096)
    assert kernel_us(parts, H100) - kernel_us(whole, H100) == pytest.approx(5.0)  # 110 tensors in each of two kernels
    assert kernel_us(added(1, 640 << 16), H100) > kernel_us(added(1, 320 << 16), H100) + 5  # 320 blocks in each


def test_what_fits_l2_moves_faster_and_what_only_allocates_takes_no_time() -> None:
    def negated(mega: int) -> OpKind:
        return only(lambda: torch.empty(mega << 20).neg(), "neg")

    small, large = negated(2), negated(256)
    per_byte = [(kernel_us(kind, A100) - A100.launch_us) / kind.moved_bytes for kind in (small, large)]
    assert per_byte[0] < 0.8 * per_byte[1]
    assert kernel_us(only(lambda: torch.empty(1 << 20), "empty"), A100) == 0


def test_a_row_or_a_column_is_traffic_alone() -> None:
    one = product(2048, 1 << 20, 1, torch.float32)
    assert kernel_us(one, H100) == pytest.approx(one.moved_bytes / (0.88 * H100.bytes_per_us), rel=0.01)


def test_pooling_is_paid_by_its_windows() -> None:
    def pooled(window: int) -> OpKind:
        def run() -> None:
            F.max_pool2d(torch.empty(32, 64, 256, 256), window, 1, window // 2)

        return only(run, "max_pool2d_with_indices")

    assert kernel_us(pooled(11), H100) > 4 * kernel_us(pooled(3), H100)


def test_a_bias_is_a_pass_over_what_a_convolution_gives() -> None:
    def convolved(biased: bool) -> OpKind:
        def run() -> None:
            image = torch.empty(32, 64, 128, 128).to(memory_format=torch.channels_last)
            F.conv2d(image, torch.empty(64, 64, 3, 3), torch.empty(64) if biased else None, padding=1)

        return only(run, "convolution")

    plain, added = (kernel_us(convolved(given), H100) for given in (False, True))
    assert added - plain == pytest.approx(2 * 4 * 32 * 64 * 128 * 128 / (0.88 * H100.bytes_per_us), rel=0.01)


def test_data_centre_ada_is_not_priced_as_geforce() -> None:
    kind = only(lambda: torch.empty(1 << 28).neg(), "neg")
    l40s, geforce = TARGETS["l40s"], TARGETS["rtx4090"]
    reached = [kind.moved_bytes / kernel_us(kind, target) / target.bytes_per_us for target in (l40s, geforce)]
    assert reached == [pytest.approx(0.765, rel=0.01), pytest.approx(0.95, rel=0.01)]


# Arithmetic


def rate(kind: OpKind, target: Target) -> float:
    return kind.flops / (kernel_us(kind, target) - target.launch_us)


def test_a_padded_vocabulary_is_faster_than_an_odd_one() -> None:
    odd, padded = (kernel_us(product(16384, 768, columns), A100) for columns in (50257, 50304))
    assert padded < 0.7 * odd


@pytest.mark.parametrize(
    ("columns", "teraflops"),
    [pytest.param(50257, 96, id="odd"), pytest.param(30522, 255, id="multiple-of-4-bytes")],
)
def test_odd_rows_of_a_result_take_older_kernels_on_hopper(columns: int, teraflops: float) -> None:
    assert rate(product(24576, 768, columns), H100) / 1e6 == pytest.approx(teraflops, rel=0.1)  # measured


def test_products_that_add_an_odd_vocabulary_up_are_less_slow() -> None:
    made, summed = product(24576, 768, 50257), product(24576, 50257, 768)
    assert rate(summed, H100) > 1.4 * rate(made, H100)  # 143 and 96 teraflops measured


def test_no_product_is_faster_than_the_best_that_was_published() -> None:
    for target, best in ((A100, 271.2e6), (H100, 794.5e6)):  # teraflops, ml-engineering's table
        rates = [rate(product(n, n, n), target) for n in (1024, 4096, 16384)]
        assert rates == sorted(rates) and rates[-1] < best


def test_the_last_round_of_tiles_is_paid_in_full() -> None:
    full, more = (product(256 * tiles, 4096, 128) for tiles in (108, 109))
    assert kernel_us(more, A100) > 1.1 * kernel_us(full, A100)  # for 0.9 % more work


def test_few_tiles_with_a_deep_inner_dimension_are_split() -> None:
    whole = rate(product(4096, 16384, 4096), A100)
    assert rate(product(768, 16384, 768), A100) > 0.5 * whole  # 18 tiles for 108 processors


def convolution(groups: int = 1, dtype: torch.dtype = BF16, layout: Any = torch.channels_last) -> dict[str, OpKind]:
    def run() -> None:
        x = leaf(32, 256, 56, 56, dtype=dtype).to(memory_format=layout)
        weight = leaf(256, 256 // groups, 3, 3, dtype=dtype)
        F.conv2d(x, weight.to(memory_format=layout), padding=1, groups=groups).sum().backward()

    return kinds_of(run)


def test_float32_convolutions_use_tensor_cores_and_float32_products_do_not() -> None:
    one = convolution(dtype=torch.float32)["convolution"]
    same = product(32 * 56 * 56, 9 * 256, 256, torch.float32)
    assert one.flops == same.flops
    assert rate(one, A100) > 3 * A100.flops_per_us["float32"] > 3 * rate(same, A100)


def test_channels_first_cost_their_way_to_the_tensor_cores_and_back() -> None:
    layouts = torch.channels_last, torch.contiguous_format
    last, first = (kernel_us(convolution(layout=layout)["convolution"], A100) for layout in layouts)
    assert first > 1.1 * last


def test_convolutions_of_single_pixels_are_products_where_planes_are_aligned() -> None:
    def convolved(size: int) -> OpKind:
        return only(
            lambda: F.conv2d(torch.empty(64, 256, size, size, dtype=BF16), leaf(256, 256, 1, 1, dtype=BF16)),
            "convolution",
        )

    aligned, odd = convolved(56), convolved(55)  # planes of 6272 and of 6050 bytes
    assert kernel_us(odd, H100) > 1.5 * kernel_us(aligned, H100)


def test_the_backward_of_a_grouped_convolution_has_no_more_work_than_twice_its_forward() -> None:
    found = convolution(groups=256)
    forward, backward = (kernel_us(found[name], A100) for name in ("convolution", "convolution_backward"))
    assert forward < backward < 3 * forward


def attention(name: str, length: int, *, causal: bool, backward: bool = False) -> OpKind:
    shape = [4, 16, length, 128]
    tensor = {"tensor": [shape, [16 * length * 128, length * 128, 128, 1], "bfloat16"]}
    flops = (5 if backward else 2) * 2 * 4 * 16 * length**2 * 128
    forward = {"flash": [tensor] * 3 + [0.0, causal], "cudnn": [tensor] * 3 + [None, True, 0.0, causal]}[name]
    args = [tensor] * 6 + [None, None, length, length, 0.0, causal] if backward else forward
    ending = "attention_backward" if backward else "attention"
    return OpKind(f"aten._scaled_dot_product_{name}_{ending}.default", [args, {}], flops, 1, "bfloat16")


def test_a_causal_mask_halves_the_work_of_long_sequences() -> None:
    whole, half = (kernel_us(attention("flash", 16384, causal=causal), A100) for causal in (False, True))
    assert 0.5 < half / whole < 0.55


def test_dropout_draws_a_number_for_every_score() -> None:
    kind = attention("cudnn", 1024, causal=True)
    arguments, keywords = kind.signature
    dropped = dataclasses.replace(kind, signature=[[*arguments[:5], 0.1, *arguments[6:]], keywords])
    scores = 4 * 16 * 1024 * 512
    assert kernel_us(dropped, H100) - kernel_us(kind, H100) == pytest.approx(scores / (9000 * 132))


def test_attention_lies_where_its_papers_measured_it() -> None:
    flash, cudnn = (rate(attention(name, 16384, causal=False), H100) for name in ("flash", "cudnn"))
    assert (flash / 1e6, cudnn / 1e6) == (pytest.approx(370, rel=0.05), pytest.approx(600, rel=0.05))
    backward = rate(attention("flash", 16384, causal=False, backward=True), A100)
    assert backward / 1e6 == pytest.approx(196, rel=0.05)  # 63 % of 312


def test_a_target_whose_rates_were_measured_is_taken_at_its_word() -> None:
    measured = dataclasses.replace(A100, efficiency=1.0)
    kind = product(4096, 4096, 4096)
    assert kernel_us(kind, measured) == kind.flops / A100.flops_per_us["bfloat16"]


def test_every_kernel_takes_a_launch() -> None:
    kind = only(lambda: torch.empty(1) + 1, "add")
    assert A100.launch_us <= kernel_us(kind, A100) < 1.01 * A100.launch_us


@pytest.mark.exhaustive
@pytest.mark.often("mpt-125m a100-80gb")
@pytest.mark.parametrize("name", ["mpt-125m a100-80gb", "mpt-350m a100-80gb", "bert-base-squad h100-80gb"])
def test_published_speeds_are_met(name: str) -> None:
    row = published.row_of(next(run for run in published.published_runs() if run.name == name))
    assert abs(row["error_percent"]) <= published.WITHIN_PERCENT


def test_a_fused_group_takes_its_traffic_whatever_shapes_meet_there() -> None:
    logits = {"tensor": [[24, 1024, 50257], [51463168, 50257, 1], "bfloat16"]}
    rows = {"tensor": [[24576, 1], [1, 1], "float32"]}
    group = OpKind("remat.fused.default", [["name", [logits, rows, rows]], {}], 0, 4_000_000_000, "bfloat16")
    alone = OpKind("remat.fused.default", [["name", [logits]], {}], 0, 4_000_000_000, "bfloat16")
    target = TARGETS["h100-80gb"]
    assert kernel_us(group, target) == kernel_us(alone, target) == pytest.approx(1359, rel=0.01)
