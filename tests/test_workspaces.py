"""Workspaces by formula: the arithmetic of the sources beside each, and where the bytes of libraries are counted."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Callable

import pytest
import torch

from remat.costing.costs import estimated_costs, with_library_workspaces
from remat.costing.kernel_calls import Call, overload
from remat.costing.operator_timing import _workspace_bytes
from remat.costing.planning_device import find_planning_device
from remat.costing.profile import Profile
from remat.costing.workspaces import FORMULAS, cublas_bytes, without_formula, workspace_bytes
from remat.errors import UsageError
from remat.evaluation.argument_copies import copies_of
from remat.evaluation.breakdown import at_peak
from remat.evaluation.evaluator import Memory
from remat.evaluation.graph import LIBRARY_WORKSPACES, OpKind
from remat.evaluation.libraries import threads_that_multiply
from remat.formulation.solution import Limits
from remat.planning.budget import Budget
from remat.planning.profiling import fake_step, profile_step
from remat.units import GIB, KIB, MIB
from remat.workload.target import TARGETS, Target
from remat.workload.training_loop import TrainingLoop
from tests import toys
from tests.cached import cached
from tests.devices import ON_CARD
from tests.studies import micro_batches, plan_profile

H100 = TARGETS["h100-80gb"].with_versions("2.13.0")
CPU = Target("cpu", "cpu", GIB, 1e4, {"float32": 1e6})
A100 = TARGETS["a100-80gb"].with_versions("2.13.0")


def tensor(*shape: int, dtype: str = "bfloat16", stride: tuple[int, ...] | None = None) -> dict[str, object]:
    made = [1]
    for size in reversed(shape[1:]):
        made.insert(0, made[0] * size)
    return {"tensor": [list(shape), list(stride or made), dtype]}


def by_token(b: int, h: int, s: int, d: int, dtype: str = "bfloat16") -> dict[str, object]:
    """(batch, heads, length, size), laid out as (batch, length, heads, size)."""
    return tensor(b, h, s, d, dtype=dtype, stride=(s * h * d, d, h * d, 1))


def attention_backward(name: str, b: int, h: int, kv: int, s: int, d: int, dtype: str = "bfloat16") -> OpKind:
    q, k = by_token(b, h, s, d, dtype), by_token(b, kv, s, d, dtype)
    op = f"aten._scaled_dot_product_{name}_attention_backward.default"
    return OpKind(op, [[q, q, k, k, q, tensor(b, h, s, dtype="float32")], {}], 0, 0, dtype)


def added_up(*shape: int, dims: tuple[int, ...] = (0,), dtype: str = "bfloat16", **options: object) -> OpKind:
    return OpKind("aten.sum.dim_IntList", [[tensor(*shape, dtype=dtype), [*dims]], options], 0, 0, dtype)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # A block is 32 x 4 threads, each with 4 columns: 32 blocks. 16 blocks on each of 132 processors would be 66
        # times as many; 1,024 rows are 64 times 16. 64 x 4,096 columns x 32 x 4 fp32, and 32 semaphores
        pytest.param(added_up(4096, 4096), 64 * 4096 * 128 * 4 + 32 * 4, id="bias of 4096"),
        pytest.param(added_up(4096, 1024), 64 * 1024 * 128 * 4 + 8 * 4, id="bias of 1024"),
        pytest.param(added_up(8, 512, 1024, dims=(0, 1)), 64 * 1024 * 128 * 4 + 8 * 4, id="samples and rows are one"),
        pytest.param(added_up(512, 1024), 0, id="few rows: 128 for each thread"),
        pytest.param(added_up(4096, 4096, dims=(1,)), 0, id="along rows"),
        # in fp32, as many; in fp64, twice
        pytest.param(added_up(4096, 1024, dtype="float64"), 64 * 1024 * 128 * 8 + 8 * 4, id="fp64"),
        # All of it: one result, 512 threads. 4 blocks on a processor, but 2 of 16 values are enough
        pytest.param(added_up(1 << 24, dims=()), 528 * 4 + 4, id="all"),
        # 2.3 GB: halves of 524,288 rows, 131,072 for each thread; 35 blocks, 512 shares; sums apart in fp32
        pytest.param(added_up(1 << 20, 1100), 512 * 1100 * 128 * 4 + 9 * 4 + 1100 * 4, id="more than 32 bits"),
    ],
)
def test_sums_share_what_their_source_says(kind: OpKind, expected: int) -> None:
    assert workspace_bytes(kind, H100) == expected
    assert workspace_bytes(kind, CPU) == 0


@pytest.mark.parametrize(
    ("name", "gates", "values"),
    [("aten._thnn_fused_lstm_cell_backward_impl", 4, 4), ("remat._thnn_fused_gru_cell_backward", 3, 5)],
)
def test_backward_of_a_recurrent_cell_takes_what_the_sums_of_its_biases_take(
    name: str, gates: int, values: int
) -> None:
    def backward(has_bias: bool) -> OpKind:
        return OpKind(f"{name}.default", [[tensor(2000, 64), tensor(2000, values * 64), has_bias], {}], 0, 0, "")

    assert workspace_bytes(backward(True), H100) == workspace_bytes(added_up(2000, gates * 64), H100) > 0
    assert workspace_bytes(backward(False), H100) == 0


def test_partial_results_of_a_variance_are_four_numbers_each() -> None:
    """Mean, sum of squares and two counts; a thread loads two neighbours in place of four."""
    for name in ("std", "std_mean", "var", "var_mean"):
        kind = OpKind(f"aten.{name}.correction", [[tensor(4096, 1024), [0]], {"correction": 1}], 0, 0, "")
        assert workspace_bytes(kind, H100) == 64 * 1024 * 128 * 16 + 8 * 4


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("name", "function"),
    [("sum.dim_IntList", torch.sum), ("var.correction", functools.partial(torch.var, correction=0))],
)
def test_reductions_allocate_by_formula(name: str, function: Callable[..., torch.Tensor]) -> None:
    draw, target, found = random.Random(0), find_planning_device(H100.name).target, 0
    extents = (1, 2, 3, 5, 8, 16, 50, 64, 100, 128, 197, 512, 768, 1000, 1024, 4096)
    for _ in range(300):
        rank = draw.choice([1, 2, 2, 3, 4])
        shape = [draw.choice(extents) for _ in range(rank)]
        while math.prod(shape) > 1 << 24:
            shape[draw.randrange(rank)] = draw.choice([1, 2, 8])
        dtype = draw.choice([torch.float32, torch.bfloat16, torch.float16, torch.float64])
        x = torch.empty(shape, device="cuda", dtype=dtype).permute(*draw.sample(range(rank), rank))
        dims = draw.sample(range(rank), draw.randint(1, rank))
        given = tensor(*x.shape, dtype=str(dtype).removeprefix("torch."), stride=x.stride())
        kind = OpKind(f"aten.{name}", [[given, dims], {}], 0, 0, "")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        y = function(x, dims)
        rise = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
        assert rise - y.nbytes == workspace_bytes(kind, target), (shape, x.stride(), dtype, dims)
        found += rise > y.nbytes
    assert found > 30


def call(name: str, *args: object) -> OpKind:
    return OpKind(f"aten.{name}", [list(args), {}], 0, 0, "")


def described(x: torch.Tensor) -> dict[str, object]:
    return tensor(*x.shape, dtype=str(x.dtype).removeprefix("torch."), stride=x.stride())


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, device="meta", dtype=dtype)


def norm_backward(rows: int, width: int, *, laid_out: bool = True) -> OpKind:
    given, statistics = meta(rows, width, dtype=torch.float32), meta(rows, 1, dtype=torch.float32)
    args = [given if laid_out else given.as_strided((rows, width), (1, rows)), given]
    rest = [statistics, statistics, meta(width, dtype=torch.float32), meta(width, dtype=torch.float32)]
    x = [*map(described, args), [width], *map(described, rest), [True, True, True]]
    return call("native_layer_norm_backward.default", *x)


def convolution(*, backward: bool, last: str, depthwise: bool = False) -> OpKind:
    """`last` names those of input, weight and gradient that are laid out with channels last."""
    groups = 64 if depthwise else 1
    given = {"gradient": meta(8, 64, 16, 16), "input": meta(8, 64, 16, 16), "weight": meta(64, 64 // groups, 3, 3)}
    given |= {name: given[name].to(memory_format=torch.channels_last) for name in last.split()}
    settings = [[1, 1], [1, 1], [1, 1], False, [0, 0], groups]
    names = ("gradient", "input", "weight") if backward else ("input", "weight")
    tensors = [described(given[name]) for name in names]
    if backward:
        return call("convolution_backward.default", *tensors, [64], *settings, [True, True, True])
    return call("convolution.default", *tensors, None, *settings)


def attention(width: int) -> OpKind:
    q = meta(2, 4, 256, width)
    return call("_scaled_dot_product_efficient_attention.default", *[described(q)] * 3, None, True)


def backward_of_attention(dtype: torch.dtype, *, by_token: bool) -> OpKind:
    """Of efficient attention, its gradient laid out by token or not."""
    q = meta(2, 4, 256, 64, dtype=dtype)
    gradient = meta(2, 256, 4, 64, dtype=dtype).transpose(1, 2) if by_token else q
    given = [*map(described, (gradient, q, q, q)), None, described(gradient)]
    rest = [described(meta(2, 4, 256, dtype=torch.float32)), *[{"tensor": [[], [], "int64"]}] * 2]
    name = "_scaled_dot_product_efficient_attention_backward.default"
    return call(name, *given, *rest, 0.0, [True, True, True, False], True)


def product(name: str, *tensors: torch.Tensor) -> OpKind:
    return call(f"{name}.default", *map(described, tensors))


GAPS = meta(64, 128, dtype=torch.float32)[:, ::2]
FULL = meta(64, 64, dtype=torch.float32)
TRANSPOSED = described(meta(16, 64, 64, dtype=torch.float32).transpose(1, 2))
CONTIGUOUS = described(meta(16, 64, 64, dtype=torch.float32))
PICTURES = described(meta(8, 64, 16, 16).to(memory_format=torch.channels_last))
SOME_CHANNELS = described(meta(8, 64, 16, 16).to(memory_format=torch.channels_last)[:, :32])
WORKING = {
    "roll 2": call("roll.default", CONTIGUOUS, [1, 1], [0, 1]),
    "roll 3": call("roll.default", CONTIGUOUS, [1, 1, 1], [0, 1, 2]),
    "roll 1": call("roll.default", CONTIGUOUS, [1], [0]),
    "roll 1 transposed": call("roll.default", TRANSPOSED, [1], [0]),
    "norm": call("native_layer_norm.default", CONTIGUOUS, [64], None, None, 1e-5),
    "norm transposed": call("native_layer_norm.default", TRANSPOSED, [64], None, None, 1e-5),
    "norm backward": norm_backward(4096, 128),
    "norm backward transposed": norm_backward(4096, 128, laid_out=False),
    "norm backward of many rows": norm_backward(100352, 256),
    "norm backward of more rows": norm_backward(401408, 128),
    "norm backward of many rows transposed": norm_backward(401408, 128, laid_out=False),
    "product": product("mm", FULL, FULL.t()),
    "product of a matrix with gaps": product("mm", GAPS, FULL),
    "product of an expanded gradient": product("mm", FULL[:1, :1].expand(64, 64), FULL),
    "products": product("bmm", FULL.expand(8, 64, 64), FULL.t().expand(8, 64, 64)),
    "products of matrices with gaps": product("bmm", GAPS.expand(8, 64, 64), FULL.expand(8, 64, 64)),
    "attention backward": backward_of_attention(torch.bfloat16, by_token=True),
    "attention backward, its gradient by head": backward_of_attention(torch.bfloat16, by_token=False),
    "attention backward in fp32": backward_of_attention(torch.float32, by_token=True),
    "attention backward in fp32, its gradient by head": backward_of_attention(torch.float32, by_token=False),
    "logarithm of a sum of exponents": call("logsumexp.default", CONTIGUOUS, [-1]),
    "count of a mask": call("sum.dim_IntList", tensor(16, 64, 64, dtype="bool"), [1], True),
    "attention of wide heads": attention(256),
    "attention": attention(128),
    "softmax transposed": call("_softmax.default", TRANSPOSED, -1, False),
    "logarithm of softmax transposed": call("_log_softmax.default", TRANSPOSED, -1, False),
    "pictures grown, backward, of channels last": call(
        "upsample_bilinear2d_backward.default", PICTURES, [16, 16], [8, 64, 4, 4], False
    ),
    "pictures grown, backward, of some channels": call(
        "upsample_bilinear2d_backward.default", SOME_CHANNELS, [16, 16], [8, 32, 4, 4], False
    ),
    "softmax where rows may be left out": call("_safe_softmax.default", CONTIGUOUS, -1),
    "sum of all before": call("cumsum.default", TRANSPOSED, -1),
    "softmax backward": call("_softmax_backward_data.default", CONTIGUOUS, CONTIGUOUS, -1, {"dtype": "float32"}),
    "softmax backward of 16 bits": call(
        "_softmax_backward_data.default", *[described(meta(64, 128))] * 2, -1, {"dtype": "bfloat16"}
    ),
    "embedding of indices that are repeated": call(
        "embedding.default",
        tensor(2, 64, dtype="float32"),
        described(meta(1, 128, dtype=torch.int64).expand(32, 128)),
    ),
}


# What PyTorch lays out before cuDNN has it.
LAID_OUT = {
    "convolution": convolution(backward=False, last=""),
    "convolution of channels last": convolution(backward=False, last="input"),
    "convolution with a weight of channels last": convolution(backward=False, last="weight"),
    "convolution all channels last": convolution(backward=False, last="input weight"),
    "convolution by depth of channels last": convolution(backward=False, last="input", depthwise=True),
    "convolution backward": convolution(backward=True, last=""),
    "convolution backward of channels last": convolution(backward=True, last="input"),
    "convolution backward, its gradient alone": convolution(backward=True, last="gradient"),
    "convolution backward, all but the weight": convolution(backward=True, last="gradient input"),
}


def worked_in(kind: OpKind) -> int:
    function = overload(kind.name)
    assert function is not None
    card = torch.device("cuda")
    ready = Call(function, kind, card)
    ready()
    return _workspace_bytes(ready, card)


@pytest.mark.cuda
@pytest.mark.parametrize("case", WORKING)
def test_kernels_work_in_the_bytes_of_their_formula(case: str) -> None:
    kind, target = WORKING[case], find_planning_device(H100.name).target
    assert worked_in(kind) == pytest.approx(workspace_bytes(kind, target), abs=64)  # states of generators


@pytest.mark.cuda
@pytest.mark.skipif(not ON_CARD, reason="a GPU's cuDNN works in bytes of its own")
@pytest.mark.parametrize("case", LAID_OUT)
def test_convolutions_are_laid_out_as_is_said(case: str) -> None:
    assert worked_in(LAID_OUT[case]) == sum(copies_of(LAID_OUT[case]))


def convolved(given: list[int], weight: list[int], side: int, stride: int = 1, *, backward: bool = False) -> OpKind:
    """In bfloat16, channels first, into planes of `side`, with gradients of input and weight."""
    made = [given[0], weight[0], side, side]
    settings = [[stride, stride], [weight[2] // 2] * 2, [1, 1], False, [0, 0], 1]
    moved = 2 * sum(map(math.prod, (given, weight, made)))
    tensors = [tensor(*shape) for shape in ([made, given, weight] if backward else [given, weight])]
    args = [*tensors, [0], *settings, [True, True, False]] if backward else [*tensors, None, *settings]
    name = "convolution_backward" if backward else "convolution"
    return OpKind(f"aten.{name}.default", [args, {}], 1, moved, "bfloat16")


@pytest.mark.parametrize(
    ("kind", "measured"),
    [
        pytest.param(convolved([256, 3, 224, 224], [64, 3, 7, 7], 112, 2), 616_612_880, id="three-channels"),
        pytest.param(convolved([256, 64, 56, 56], [64, 64, 3, 3], 56), 205_594_771, id="three-by-three"),
        pytest.param(convolved([256, 256, 56, 56], [512, 256, 1, 1], 28, 2), 616_562_688, id="strided"),
        pytest.param(convolved([256, 64, 56, 56], [256, 64, 1, 1], 56), 0, id="product"),
        pytest.param(
            convolved([256, 128, 28, 28], [512, 128, 1, 1], 28, backward=True), 67_108_864, id="product-backward"
        ),
    ],
)
def test_convolutions_work_in_what_an_h100_measured(kind: OpKind, measured: int) -> None:
    """With cuDNN 9.19, in steps of ResNet-50 (`benchmarks/gpu/kernels.py`)."""
    assert workspace_bytes(kind, H100) == pytest.approx(measured, abs=MIB // 4)


@pytest.mark.cuda
@pytest.mark.parametrize("is_whole", [False, True])
def test_scattering_takes_no_more_than_its_formula(is_whole: bool) -> None:
    mask = tensor(4, 512, 256, dtype="bool") if is_whole else tensor(4, 512, 1, dtype="bool")
    kind = call("masked_scatter.default", tensor(4, 512, 256), mask, tensor(4 * 512, 256))
    formula = workspace_bytes(kind, find_planning_device(H100.name).target)
    assert 0.99 * formula < worked_in(kind) <= formula


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [32, 3000])
@pytest.mark.parametrize("count", [16384, 65536, 262144])
def test_sorting_takes_no_more_than_its_formula(count: int, rows: int) -> None:
    indices, added = tensor(count, dtype="int64"), tensor(count, 4, dtype="float32", stride=(1, count))
    target = find_planning_device(H100.name).target
    for kind in (
        call("embedding_dense_backward.default", added, indices, rows, -1, False),
        call("index_put.default", tensor(rows, 4, dtype="float32"), [indices], added, True),
    ):
        assert 0.9 * workspace_bytes(kind, target) < worked_in(kind) <= workspace_bytes(kind, target)


def bags_backward(count: int, rows: int, mode: int = 0, dtype: str = "int64") -> OpKind:
    """The backward of bags of 16 indices, 64 numbers wide."""
    indices, bags = tensor(count, dtype=dtype), tensor(count // 16, dtype=dtype)
    of_maximum = tensor(count // 16, 64, dtype=dtype) if mode == 2 else tensor(0, dtype=dtype)
    gradient = tensor(count // 16, 64, dtype="float32")
    given = gradient, indices, bags, tensor(count, dtype=dtype), bags, of_maximum
    return call("_embedding_bag_backward.default", *given, rows, False, mode, False, None)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("rows", [1000, 30000])
@pytest.mark.parametrize("count", [1024, 65536])
def test_bags_take_what_their_formula_says(count: int, rows: int, dtype: str) -> None:
    target = find_planning_device(H100.name).target
    for mode in range(3):
        kind = bags_backward(count, rows, mode, dtype)
        assert workspace_bytes(kind, target) == pytest.approx(worked_in(kind), rel=1e-3, abs=1024)


@pytest.mark.parametrize(
    ("kind", "copies"),
    [
        pytest.param(OpKind("aten.roll.default", [[tensor(2, 8, 8), [3, 3], [1, 2]], {}], 0, 0, ""), 1, id="two dims"),
        pytest.param(OpKind("aten.roll.default", [[tensor(2, 8, 8), [3]], {}], 0, 0, ""), 0, id="flat"),
        pytest.param(
            OpKind("aten.native_layer_norm.default", [[tensor(2, 8, 8, stride=(64, 1, 8)), [8]], {}], 0, 0, ""),
            1,
            id="norm of what is transposed",
        ),
    ],
)
def test_copies_that_kernels_make(kind: OpKind, copies: int) -> None:
    assert workspace_bytes(kind, H100) == copies * 2 * 8 * 8 * 2
    assert workspace_bytes(kind, CPU) == 0


def four_bits(rows: int, inputs: int, outputs: int) -> OpKind:
    """A product with a weight of 4 bits, quantised twice, in blocks of 64."""
    packed, scales = tensor(inputs * outputs // 2, 1, dtype="uint8"), tensor(inputs * outputs // 64, dtype="float32")
    given = [tensor(1, rows, inputs), packed, [outputs, inputs], scales, 64, "nf4"]
    return OpKind("bitsandbytes.gemm_4bit.default", [given, {}], 0, 0, "bfloat16")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # the weight in bf16, 4096 x 4096 x 2 = 32 MiB; its 262,144 scales in fp32, twice 1 MiB
        pytest.param(four_bits(2048, 4096, 4096), 34 * MIB, id="four-bits"),
        # GPT-2: dq_accum 16 x 1024 x 12 x 64 fp32 = 48 MiB, softmax_d 16 x 12 x 1024 fp32 = 0.75 MiB
        pytest.param(attention_backward("flash", 16, 12, 12, 1024, 64), 48 * MIB + 768 * KIB, id="flash-gpt2"),
        # llama-1b: dq_accum 4 x 2048 x 32 x 64 fp32 = 64, softmax_d 1, dk and dv of 32 heads in bf16 2 x 32 MiB
        pytest.param(attention_backward("flash", 4, 32, 8, 2048, 64), 129 * MIB, id="flash-grouped-llama-1b"),
        # 200 queries are padded to 256, heads of 80 to 96
        pytest.param(attention_backward("flash", 1, 1, 1, 200, 80), 256 * (96 + 1) * 4, id="flash-padded"),
        # dQ_accum 64 MiB, softmax_sum 1 MiB, dk and dv of 32 heads in bf16 2 x 32 MiB
        pytest.param(attention_backward("cudnn", 4, 32, 8, 2048, 64), 129 * MIB, id="cudnn-llama-1b"),
        # delta, and one block of 64 x 64 fp32 and 16 bytes for each 64 queries
        pytest.param(
            attention_backward("efficient", 2, 4, 4, 128, 64),
            2 * 4 * (128 * 4 + 2 * (64 * 64 * 4 + 16)),
            id="efficient-16-bit",
        ),
    ],
)
def test_attention_backward_allocates_what_its_source_says(kind: OpKind, expected: int) -> None:
    assert workspace_bytes(kind, H100) == expected


def test_flash_attention_backward_copies_a_gradient_that_is_not_by_token() -> None:
    kind = attention_backward("flash", 2, 4, 4, 128, 64)
    plain = workspace_bytes(kind, H100)
    kind.signature[0][0] = tensor(2, 4, 128, 64)
    assert workspace_bytes(kind, H100) - plain == 2 * 4 * 128 * 64 * 2


def embedding_backward(tokens: int, width: int, rows: int, dtype: str = "float32") -> OpKind:
    args = [tensor(tokens, width, dtype=dtype), tensor(tokens, dtype="int64"), rows, -1, False]
    return OpKind("aten.embedding_dense_backward.default", [args, {}], 0, 0, dtype)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        pytest.param(embedding_backward(3072, 768, 50257), 0, id="few-indices"),
        # 16384 segments, 16384/10 + 16384 = 18022 rows of 768; 3 x 16384 + 2 x 16384 + 18022 indices
        pytest.param(embedding_backward(16384, 768, 50257), 18022 * 768 * 4 + (5 * 16384 + 18022) * 8, id="gpt2"),
        pytest.param(
            embedding_backward(16384, 768, 50257, "bfloat16"), 18022 * 768 * 4 + (5 * 16384 + 18022) * 8, id="in-fp32"
        ),
        # two rows, added atomically into two fp32 rows: sorting takes more, 4 x 16384 indices and CUB's
        pytest.param(embedding_backward(16384, 1024, 2, "bfloat16"), 4 * 16384 * 8 + 5461 + 4096, id="token-types"),
    ],
)
def test_embedding_backward_keeps_a_row_for_each_part_of_a_segment(kind: OpKind, expected: int) -> None:
    assert workspace_bytes(kind, H100) == expected


def test_bags_backward_keeps_such_rows_too_for_few_indices_and_none_for_a_maximum() -> None:
    """1024 segments, 1024/10 + 1024 = 1126 rows of 64; 3 x 1024 + 2 x 1024 + 1126 indices."""
    assert workspace_bytes(bags_backward(1024, 30000), H100) == 1126 * 64 * 4 + (5 * 1024 + 1126) * 8
    assert workspace_bytes(bags_backward(1024, 30000, dtype="int32"), H100) == 1126 * 64 * 4 + (5 * 1024 + 1126) * 4
    assert workspace_bytes(bags_backward(1024, 30000, mode=2), H100) == 0
    assert workspace_bytes(bags_backward(1024, 30000), CPU) == 0


def test_what_has_no_formula_is_named_and_counted_as_nothing() -> None:
    recurrent = OpKind("aten._cudnn_rnn.default", [[tensor(1, 1, 1)] * 3, {}], 1, 1, "float32")
    product = OpKind("aten.mm.default", [[tensor(1, 1), tensor(1, 1)], {}], 1, 1, "float32")
    assert without_formula([recurrent, product]) == ("_cudnn_rnn",)
    assert workspace_bytes(recurrent, H100) == 0
    assert "aten.mm.default" not in FORMULAS


# Libraries


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (H100, 32 * MIB),
        (A100, 8 * MIB + 128 * KIB),
        (TARGETS["rtx4090"], 8 * MIB + 128 * KIB),
        (dataclasses.replace(H100, torch="2.11.0"), 33 * MIB),
        (dataclasses.replace(H100, capability=120, torch="2.11.0"), 9 * MIB + 128 * KIB),
        (dataclasses.replace(H100, capability=120, torch="2.12.0"), 32 * MIB),
    ],
)
def test_cublas_gets_what_torch_gives_it(target: Target, expected: int) -> None:
    assert cublas_bytes(target) == expected


@pytest.mark.parametrize(
    ("said", "expected"), [(":4096:8", 32 * MIB), (":4096:2:16:8", 8 * MIB + 128 * KIB), ("other", 8 * MIB + 128 * KIB)]
)
def test_a_workspace_that_the_user_has_chosen_counts(said: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", said)
    assert cublas_bytes(TARGETS["a100-80gb"]) == expected


@cached
def profiled(target: str = "h100-80gb", loop: TrainingLoop | None = None) -> Profile:
    place = find_planning_device(target)
    return profile_step(fake_step(toys.TRANSFORMER_BF16, place, loop=loop), place)


@pytest.mark.exhaustive
def test_a_step_that_multiplies_forward_and_backward_keeps_two_handles() -> None:
    profile = profiled()
    assert threads_that_multiply(profile.graph) == 2
    assert profile.graph.fixed_bytes[LIBRARY_WORKSPACES] == 64 * MIB
    assert at_peak(Memory(profile.graph), ())[LIBRARY_WORKSPACES] == 64 * MIB
    assert profiled("a100-80gb").graph.fixed_bytes[LIBRARY_WORKSPACES] == 16 * MIB + 256 * KIB


def test_a_step_on_the_cpu_keeps_none() -> None:
    graph = profiled().graph
    bare = dataclasses.replace(graph, fixed_bytes={})
    assert with_library_workspaces(bare, dataclasses.replace(H100, device="cpu")) is bare


def test_where_costs_are_measured_so_are_libraries() -> None:
    graph = dataclasses.replace(profiled().graph, fixed_bytes={})
    costs = dataclasses.replace(estimated_costs(graph, H100), source="measured", about={"library_bytes": 5 * MIB})
    assert with_library_workspaces(graph, H100, costs).fixed_bytes == {LIBRARY_WORKSPACES: 10 * MIB}


@pytest.mark.exhaustive
@pytest.mark.parametrize("loop", [TrainingLoop(), TrainingLoop(ranks=2, shard="zero3")], ids=["whole", "zero3"])
def test_the_replay_counts_libraries_once(loop: TrainingLoop) -> None:
    """The plan's peak is the evaluator's, the replay's, and within the budget."""
    place = find_planning_device("h100-80gb")
    step = fake_step(toys.TRANSFORMER_BF16.sized(256), place, loop=loop)
    profile = profile_step(step, place)
    peak = Memory(profile.graph, profile.costs.workspace_per_op(profile.graph)).peak_without_checkpointing
    limit = peak - (peak - profile.graph.fixed_total) // 4
    plan = plan_profile(profile, Budget(limit, limit), step=step, limits=Limits(time_s=20))
    assert plan.solver["status"] == "optimal"  # not tightened: evaluator and replay agree
    assert plan.predicted["breakdown"][LIBRARY_WORKSPACES] == 64 * MIB


@pytest.mark.exhaustive
def test_a_step_at_another_batch_size_has_its_workspaces() -> None:
    place = find_planning_device("h100-80gb")
    sizes = micro_batches(toys.TRANSFORMER_BF16, place, Budget(GIB, GIB))
    scaled = sizes.profile(48, False)
    recorded, _ = sizes.recorded(48, 1)
    assert scaled.graph.fixed_bytes[LIBRARY_WORKSPACES] == recorded.graph.fixed_bytes[LIBRARY_WORKSPACES]
    found, expected = (p.costs.workspace_per_op(p.graph) for p in (scaled, recorded))
    assert found.any() and found.tolist() == expected.tolist()
    times, truth = (p.costs.per_op_us(p.graph) for p in (scaled, recorded))
    assert times.tolist() == pytest.approx(truth.tolist(), rel=1e-3)


# What a target assumes


def test_a_target_assumes_the_torch_that_plans_and_the_cudnn_of_its_wheels() -> None:
    assert TARGETS["h100-80gb"].with_versions("2.13.0").cudnn == (9, 20)
    assert TARGETS["h100-80gb"].with_versions("2.99.0").cudnn == (9, 26)  # the newest known
    assert find_planning_device("h100-80gb,torch=2.11.0").target.cudnn == (9, 19)
    assert find_planning_device("h100-80gb,cudnn=9.10").target.cudnn == (9, 10)


def test_a_target_with_versions_keeps_its_name_through_files() -> None:
    target = find_planning_device("h100-80gb,torch=2.11.0,cudnn=9.10").target
    assert find_planning_device(target.name).target == target
    assert Target(**{**dataclasses.asdict(target), "cudnn": [9, 10]}) == target


@pytest.mark.parametrize("torch_", ["9.9", "2.10", "2.16.0"])
def test_a_torch_whose_kernels_are_not_known_is_refused(torch_: str) -> None:
    with pytest.raises(UsageError, match=r"the kernels of torch [\d.]+ are not known; 2\.11 to 2\.15 are"):
        find_planning_device(f"h100-80gb,torch={torch_}")


@pytest.mark.parametrize("text", ["h100-80gb,cudnn=new", "h100-80gb,cuda=13.0", "h100-80gb,cudnn"])
def test_a_setting_that_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no version; write h100-80gb,torch"):
        find_planning_device(text)


@pytest.mark.exhaustive
def test_a_prediction_names_what_it_rests_on() -> None:
    found = {target: profiled(target).graph.about for target in ("h100-80gb,torch=2.11.0", "h100-80gb,torch=2.13.0")}
    assert [about["assumes"] for about in found.values()] == ["torch 2.11.0, cuDNN 9.19", "torch 2.13.0, cuDNN 9.20"]
    assert [about["attention"] for about in found.values()] == [["cudnn"], ["flash"]]  # a dropout of 0.2
