"""Dispatches and saves of a graph whose calls are CUDA's, counted by hand on fake tensors."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

from remat.costing.planning_device import find_planning_device
from remat.cuda_kernels import autocast as kernel_casts
from remat.cuda_kernels import rules as kernel_rules
from remat.cuda_kernels import substitute as kernels
from remat.cuda_kernels.attention import cudnn_attention_of
from remat.errors import CaptureError
from remat.execution.eager.saving import Save
from remat.recording.tracker import Tracker
from remat.workload.target import target_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
VIEWS_AND_QUERIES = ("prim.device", "aten.detach", "aten.view", "aten.t", "aten.expand", "aten._unsafe_view")


@pytest.fixture(autouse=True)
def fake() -> Iterator[FakeTensorMode]:
    with FakeTensorMode() as mode:
        yield mode


class Ops(TorchDispatchMode):
    """The names of the dispatched operators, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).rsplit(".", 1)[0]
        if name not in VIEWS_AND_QUERIES:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


class LastOutputs(TorchDispatchMode):
    """Note the results of the last operator that returns several tensors."""

    outputs: tuple[Any, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, tuple):
            self.outputs = result
        return result


def leaf(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, requires_grad=True)


def add_call(
    graph: torch.fx.Graph, target: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.fx.Node:
    """A name is a method of Tensor."""
    if isinstance(target, str):
        return graph.call_method(target, args, kwargs)
    return graph.call_function(target, args, kwargs)


def graph_of(
    *calls: tuple[str | Callable[..., Any], tuple[Any, ...], dict[str, Any]],
) -> torch.fx.GraphModule:
    """A graph of one placeholder `x`, then each call on the result of the one before."""
    graph = torch.fx.Graph()
    last = graph.placeholder("x")
    for target, args, kwargs in calls:
        last = add_call(graph, target, (last, *args), kwargs)
    graph.output(last)
    return torch.fx.GraphModule({}, graph)


def on_cuda(
    function: str | Callable[..., Any],
    *args: Any,
    autocast: torch.dtype | None = None,
    cudnn: kernel_casts.CudnnAttention | None = None,
    **kw: Any,
) -> tuple[torch.Tensor, list[str], list[torch.Tensor], list[str]]:
    """Substitute a graph of one call; its output, operators, what it saves, operators of its backward."""
    names = [f"a{i}" if isinstance(arg, torch.Tensor) else None for i, arg in enumerate(args)]
    graph = torch.fx.Graph()
    nodes = [arg if name is None else graph.placeholder(name) for name, arg in zip(names, args, strict=True)]
    graph.output(add_call(graph, function, tuple(nodes), kw))
    module = torch.fx.GraphModule({}, graph)
    kernels.substitute(module, autocast, cudnn_attention=cudnn)

    saved: dict[int, torch.Tensor] = {}
    with (
        Ops() as forward,
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(id(t), t), lambda t: t),
    ):
        output = module(*(arg for arg in args if isinstance(arg, torch.Tensor)))
    gradient = torch.empty_like(output)
    with Ops() as backward:
        if output.requires_grad:
            output.backward(gradient)
    return output, forward.names, list(saved.values()), backward.names


def bytes_of(tensors: list[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


# ---- dropout ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [F.dropout, torch.dropout], ids=["functional", "torch"])
def test_dropout_keeps_a_bool_mask(function: Callable[..., Any]) -> None:
    _, forward, saved, backward = on_cuda(function, leaf(4, 8), 0.1, True)
    assert forward == ["aten.native_dropout"]
    assert bytes_of(saved) == 4 * 8 * 1  # one byte an element, where the CPU keeps four
    assert backward == ["aten.native_dropout_backward"]


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.3, False)])
def test_dropout_that_drops_nothing_dispatches_nothing(p: float, training: bool) -> None:
    _, forward, saved, _ = on_cuda(F.dropout, leaf(4, 8), p, training)
    assert (forward, saved) == ([], [])


def test_dropping_all_multiplies_by_zero() -> None:
    assert on_cuda(F.dropout, leaf(4, 8), 1.0, True)[1] == ["aten.zeros", "aten.mul"]


def test_feature_dropout_is_not_fused() -> None:
    _, forward, saved, _ = on_cuda(F.dropout2d, leaf(4, 8, 5, 5), 0.1, True)
    assert "aten.native_dropout" not in forward
    assert bytes_of(saved) == 4 * 8 * 4  # a float mask of [4, 8, 1, 1]


def test_dropout_in_place_is_not_fused() -> None:
    assert "aten.bernoulli_" in on_cuda(F.dropout, torch.empty(4, 8), 0.1, True, True)[1]


# ---- attention -------------------------------------------------------------------------------------------

FLASH = "aten._scaled_dot_product_flash_attention"
EFFICIENT = "aten._scaled_dot_product_efficient_attention"
CUDNN = "aten._scaled_dot_product_cudnn_attention"
SDPA = F.scaled_dot_product_attention


def qkv(b: int = 2, h: int = 4, s: int = 16, d: int = 8, dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    return [leaf(b, h, s, d, dtype=dtype) for _ in range(3)]


def test_flash_attention_keeps_q_k_v_out_and_logsumexp() -> None:
    output, forward, saved, backward = on_cuda(SDPA, *qkv(), None, 0.1, True)
    assert forward == [FLASH]
    assert backward == [FLASH + "_backward"]
    four_tensors = 4 * (2 * 4 * 16 * 8) * 2
    logsumexp, seed = (2 * 4 * 16) * 4, 3 * 8
    assert bytes_of(saved) == four_tensors + logsumexp + seed
    assert output.dtype == BF16


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(
    ("allowed", "takes"),
    [
        (SDPBackend.FLASH_ATTENTION, {BF16: FLASH}),
        (SDPBackend.EFFICIENT_ATTENTION, {BF16: EFFICIENT, FP32: EFFICIENT}),
        (SDPBackend.CUDNN_ATTENTION, {BF16: CUDNN}),
        (SDPBackend.MATH, {BF16: "aten._safe_softmax", FP32: "aten._safe_softmax"}),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_script_that_allows_one_kernel_gets_it_or_an_error(
    allowed: SDPBackend, takes: dict[torch.dtype, str], dtype: torch.dtype
) -> None:
    with sdpa_kernel(allowed):
        if dtype in takes:
            assert takes[dtype] in on_cuda(SDPA, *qkv(dtype=dtype))[1]
        else:
            with pytest.raises(RuntimeError, match="No available kernel"):
                on_cuda(SDPA, *qkv(dtype=dtype))


def test_flash_attention_pads_heads_to_eight() -> None:
    output, forward, saved, _ = on_cuda(SDPA, *qkv(d=6))
    assert forward[:4] == ["aten.constant_pad_nd"] * 3 + [FLASH]
    assert output.shape[-1] == 6
    assert bytes_of(saved) == 4 * (2 * 4 * 16 * 8) * 2 + (2 * 4 * 16) * 4 + 3 * 8


def test_autocast_casts_before_it_chooses() -> None:
    _, forward, _, _ = on_cuda(SDPA, *qkv(dtype=FP32), autocast=BF16)
    assert forward == ["aten._to_copy"] * 3 + [FLASH]


def test_float32_attention_is_memory_efficient() -> None:
    _, forward, saved, backward = on_cuda(SDPA, *qkv(dtype=FP32), is_causal=True)
    assert forward == [EFFICIENT]
    assert backward[0] == EFFICIENT + "_backward"
    logsumexp = (2 * 4 * 32) * 4  # rows are rounded up to 32
    assert bytes_of(saved) == 4 * (2 * 4 * 16 * 8) * 4 + logsumexp + 2 * 8


def test_a_bool_mask_becomes_a_bias_in_the_dtype_of_the_query() -> None:
    _, forward, saved, _ = on_cuda(SDPA, *qkv(), torch.empty(2, 1, 16, 16, dtype=torch.bool))
    assert forward == [
        "aten.logical_not",
        "aten.scalar_tensor",
        "aten.scalar_tensor",
        "aten.where",
        EFFICIENT,
    ]
    assert {t.shape for t in saved if t.dim() == 4} == {(2, 4, 16, 8), (2, 4, 16, 16)}  # expanded, not copied


def test_an_unaligned_bias_is_padded() -> None:
    q, k, v = qkv(s=15)
    _, forward, _, _ = on_cuda(SDPA, q, k, v, torch.empty(15, 15, dtype=BF16))
    assert forward == ["aten.constant_pad_nd", "aten.slice", EFFICIENT]


@pytest.mark.parametrize(
    ("tensors", "kwargs"),
    [
        pytest.param(qkv, {"d": 264}, id="flash-to-256-wide-heads"),
        pytest.param(lambda **_: [leaf(2, 4, s, 8, dtype=BF16) for s in (16, 24, 24)], {"causal": True}, id="causal"),
    ],
)
def test_what_flash_does_not_take_is_memory_efficient(tensors: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    causal = kwargs.pop("causal", False)
    assert on_cuda(SDPA, *tensors(**kwargs), is_causal=causal)[1] == [EFFICIENT]


def test_grouped_heads_stay_grouped_in_flash() -> None:
    q, k, v = leaf(2, 4, 16, 8, dtype=BF16), leaf(2, 2, 16, 8, dtype=BF16), leaf(2, 2, 16, 8, dtype=BF16)
    _, forward, saved, _ = on_cuda(SDPA, q, k, v, enable_gqa=True)
    assert forward == [FLASH]
    q_bytes = (2 * 4 * 16 * 8) * 2
    assert bytes_of(saved) == q_bytes * (1 + 0.5 + 0.5 + 1) + (2 * 4 * 16) * 4 + 3 * 8


def test_grouped_heads_in_float32_are_unfused() -> None:
    q, k, v = leaf(2, 4, 16, 8), leaf(2, 2, 16, 8), leaf(2, 2, 16, 8)
    _, forward, _, backward = on_cuda(SDPA, q, k, v, None, 0.1, enable_gqa=True)
    assert "aten._safe_softmax" in forward
    assert "aten.native_dropout" in forward  # not the CPU's
    assert "aten.bmm" in backward


def test_unfused_attention_adds_its_mask_in_place() -> None:
    q, k, v = (leaf(2, 4, 16, 6) for _ in range(3))  # 6 is no multiple of 4: not memory-efficient
    _, forward, _, _ = on_cuda(SDPA, q, k, v, torch.empty(16, 16))
    assert "aten.add_" in forward
    assert "aten.add" not in forward


def test_unfused_attention_holds_its_float32_inputs_and_casts_its_weights_as_well() -> None:
    """In C++ the copies are alive until it returns, and its second result is made before its first."""
    q, k, v = (leaf(2, 4, 16, 60, dtype=BF16) for _ in range(3))  # 60 is no multiple of 8: not memory-efficient
    kernel = kernels.OnCuda(SDPA, kernel_casts.Device(None))
    mask = torch.empty(16, 16, dtype=BF16)
    with Tracker() as tracker:
        kernel(q, k, v, mask)
    copy, weights = (2 * 4 * 16 * 60) * 4, (2 * 4 * 16 * 16) * 4
    copies = 3 * copy + 2 * copy  # of all three; of two, scaled
    assert tracker.alive().max() == copies + weights + weights // 2 + copy + copy // 2


@pytest.mark.parametrize(
    ("target", "dropout", "head", "kernel"),
    [
        pytest.param("h100-80gb,torch=2.13.0", 0.125, 8, CUDNN, id="sixteenths"),
        pytest.param("h100-80gb,torch=2.13.0", 0.1, 8, FLASH, id="other-dropout"),
        pytest.param("h100-80gb,torch=2.11.0", 0.1, 8, CUDNN, id="any-dropout-until-2.11"),
        pytest.param("h100-80gb,torch=2.12.0", 0.1, 8, FLASH, id="sixteenths-from-2.12"),
        pytest.param("h200,torch=2.13.0", 0.0, 8, CUDNN, id="h200"),
        pytest.param("h100-80gb,torch=2.13.0,cudnn=9.15.0", 0.0, 8, FLASH, id="cudnn-9.15.0"),
        pytest.param("h100-80gb,torch=2.13.0,cudnn=9.15.1", 0.0, 8, CUDNN, id="cudnn-9.15.1"),
        pytest.param("a100-80gb,torch=2.13.0", 0.0, 8, FLASH, id="capability-8.0"),
        pytest.param("rtx4090,torch=2.13.0", 0.0, 8, FLASH, id="capability-8.9"),
        pytest.param("h100-80gb,torch=2.11.0", 0.0, 256, CUDNN, id="wide-heads"),
        pytest.param("h200,torch=2.13.0", 0.0, 136, CUDNN, id="heads-between"),
        pytest.param("h100-80gb,torch=2.13.0", 0.0, 264, EFFICIENT, id="heads-too-wide"),
    ],
)
def test_the_target_decides_whether_attention_is_cudnns(target: str, dropout: float, head: int, kernel: str) -> None:
    cudnn = cudnn_attention_of(find_planning_device(target).target)
    assert on_cuda(SDPA, *qkv(d=head), None, dropout, cudnn=cudnn)[1] == [kernel]


@pytest.mark.cuda
@pytest.mark.parametrize("head", [8, 128, 136, 256, 264])
def test_the_kernel_that_the_target_decides_is_the_one_that_runs(head: int) -> None:
    named = target_of(torch.cuda.get_device_name())
    if named is None:
        pytest.skip("the device has no data sheet here")
    cudnn = cudnn_attention_of(find_planning_device(named.name).target)
    (predicted,) = on_cuda(SDPA, *qkv(d=head), None, 0.0, cudnn=cudnn)[1]
    tensors = [torch.randn(2, 4, 16, head, device="cuda", dtype=BF16, requires_grad=True) for _ in range(3)]
    with Ops() as ops:
        SDPA(tensors[0], tensors[1], tensors[2])
    assert [name for name in ops.names if "attention" in name] == [predicted]


def test_without_gradient_no_logsumexp_is_asked_for() -> None:
    with torch.no_grad(), LastOutputs() as last:
        kernels.OnCuda(SDPA, kernel_casts.Device(None))(*qkv(dtype=FP32))
    assert last.outputs[1].shape == (2, 4, 0)


# ---- autocast --------------------------------------------------------------------------------------------


def test_a_bias_is_added_out_of_place_where_a_region_saves_the_result() -> None:
    """So it is on the device, under any dispatch mode, where the input is no matrix."""
    x, w, b = leaf(6, 4, 8), leaf(8, 8), leaf(8)
    graph = torch.fx.Graph()
    steps, weight, bias = (graph.placeholder(name) for name in ("x", "w", "b"))
    graph.output(graph.call_function(F.linear, (graph.call_method("transpose", (steps, 0, 1)), weight, bias)))
    module = torch.fx.GraphModule({}, graph)
    kernels.substitute(module, None)
    with Save() as save:
        module(x, w, b)
    with Ops() as plain:
        module(x, w, b)
    assert "aten.add_" in plain.names and "aten.add" not in plain.names
    assert [str(func) for func, _ in save.tape.results][-1] == "aten.add.Tensor"


def test_linear_under_autocast_saves_the_lower_precision() -> None:
    x, w, b = leaf(2, 3, 8), leaf(5, 8), leaf(5)
    output, forward, saved, _ = on_cuda(F.linear, x, w, b, autocast=BF16)
    assert forward == ["aten._to_copy"] * 3 + ["aten.addmm"]
    assert output.dtype == BF16
    assert bytes_of(saved) == (2 * 3 * 8 + 5 * 8) * 2


@pytest.mark.parametrize(("cached", "casts"), [(True, 2 + 1), (False, 2 + 2)])  # two inputs, and the weight
def test_a_weight_is_cast_once_in_a_context(cached: bool, casts: int) -> None:
    weight = leaf(8, 8)
    linear = kernels.OnCuda(F.linear, kernel_casts.Device(BF16))
    x, y = torch.empty(2, 8), torch.empty(2, 8)
    with Ops() as ops:
        if cached:
            with kernel_casts.weight_cast_cache():
                linear(x, weight), linear(y, weight)
        else:
            linear(x, weight), linear(y, weight)
    assert ops.names.count("aten._to_copy") == casts


def test_copies_of_weights_live_until_the_outermost_exit() -> None:
    weight = leaf(8, 8)
    linear = kernels.OnCuda(F.linear, kernel_casts.Device(BF16))
    with kernel_casts.weight_cast_cache():
        with kernel_casts.weight_cast_cache():
            linear(torch.empty(2, 8), weight)
        assert [copy.shape for _, copy in kernel_casts._weight_casts.copies.values()] == [(8, 8)]
    assert kernel_casts._weight_casts.copies == {}


def test_an_activation_or_a_view_is_not_cached() -> None:
    with kernel_casts.weight_cast_cache():
        kernels.OnCuda(F.linear, kernel_casts.Device(BF16))(leaf(2, 8) * 1, leaf(8, 8)[:4])
        assert kernel_casts._weight_casts.copies == {}


@pytest.mark.parametrize(
    ("function", "args", "result"),
    [
        pytest.param(torch.matmul, (leaf, leaf), BF16, id="matmul"),
        pytest.param(torch.Tensor.__matmul__, (leaf, leaf), BF16, id="operator"),
        pytest.param("bmm", (leaf, leaf), BF16, id="method"),
        pytest.param(torch.baddbmm, (leaf, leaf, leaf), BF16, id="baddbmm"),
        pytest.param("exp", (leaf,), FP32, id="exp"),
        pytest.param("softmax", (leaf, -1), FP32, id="softmax"),
        pytest.param(F.softmax, (leaf, -1), FP32, id="functional-softmax"),
        pytest.param("sum", (leaf,), FP32, id="sum"),
        pytest.param("norm", (leaf,), FP32, id="norm"),
        pytest.param("pow", (leaf, 2), FP32, id="pow"),
        pytest.param("square", (leaf,), FP32, id="square"),
        pytest.param(operator.truediv, (1, leaf), FP32, id="reciprocal"),
        pytest.param(operator.truediv, (leaf, leaf), BF16, id="division-is-in-no-list"),
        pytest.param(F.mse_loss, (leaf, leaf), FP32, id="mse"),
        pytest.param(F.normalize, (leaf,), FP32, id="normalize"),
        pytest.param(F.group_norm, (leaf, 2), FP32, id="group-norm"),
        pytest.param(F.gelu, (leaf,), BF16, id="gelu-is-in-no-list"),
        pytest.param("mean", (leaf,), BF16, id="mean-is-in-no-list"),
    ],
)
def test_results_of_bfloat16_inputs_under_autocast(
    function: Callable[..., Any], args: tuple[Any, ...], result: torch.dtype
) -> None:
    given = [leaf(4, 4, 4, dtype=BF16) if arg is leaf else arg for arg in args]
    assert on_cuda(function, *given, autocast=BF16)[0].dtype == result


def test_an_asked_dtype_is_respected() -> None:
    assert on_cuda("sum", leaf(4, dtype=BF16), autocast=BF16, dtype=BF16)[0].dtype == BF16


@pytest.mark.parametrize(("other", "result"), [(FP32, FP32), (BF16, BF16)])
def test_promotion_to_the_widest(other: torch.dtype, result: torch.dtype) -> None:
    x, y, z = leaf(4, dtype=BF16), leaf(4, dtype=other), leaf(4, dtype=BF16)
    assert on_cuda(torch.addcmul, x, y, z, autocast=BF16)[0].dtype == result


def test_float16_softmax_converts_inside_the_kernel() -> None:
    output, forward, _, _ = on_cuda("softmax", leaf(4, 8, dtype=FP16), -1, autocast=FP16)
    assert (output.dtype, forward) == (FP32, ["aten._softmax"])
    assert on_cuda("softmax", leaf(4, 8, dtype=BF16), -1, autocast=BF16)[1] == [
        "aten._to_copy",
        "aten._softmax",
    ]


def test_cross_entropy_upcasts_between_log_softmax_and_loss() -> None:
    logits, target = leaf(6, 10, dtype=BF16), torch.zeros(6, dtype=torch.long)
    output, forward, saved, _ = on_cuda(F.cross_entropy, logits, target, autocast=BF16)
    assert output.dtype == FP32
    assert forward == ["aten._log_softmax", "aten._to_copy", "aten.nll_loss_forward"]
    assert bytes_of(saved) == 6 * 10 * 2 + 6 * 10 * 4 + 6 * 8 + 4  # both dtypes, targets, total weight


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(6, 10), (10,), (6, 10, 4)])
@pytest.mark.parametrize("of_probabilities", [False, True])
def test_cross_entropy_under_autocast_runs_the_operators_of_its_source(
    reduction: str, is_weighted: bool, label_smoothing: float, shape: tuple[int, ...], of_probabilities: bool
) -> None:
    """Between them are casts alone: torch itself takes the loss apart where autocast is off."""
    classes = shape[:1] if len(shape) == 1 else shape[:1] + shape[2:]
    labels = torch.zeros(() if len(shape) == 1 else classes, dtype=torch.long)
    given = (leaf(*shape, dtype=BF16), torch.ones(shape) if of_probabilities else labels)
    weight = torch.ones(10, dtype=BF16) if is_weighted else None  # in the dtype of the logits, for the source's sake

    def run(autocast: torch.dtype | None) -> tuple[torch.dtype, list[str]]:
        output, forward, *_ = on_cuda(
            F.cross_entropy, *given, weight, reduction=reduction, label_smoothing=label_smoothing, autocast=autocast
        )
        assert "aten._to_copy" not in forward[: forward.index("aten._log_softmax")]  # of the logits
        return output.dtype, [name for name in forward if name != "aten._to_copy"]

    assert run(BF16) == (FP32, run(None)[1])


def test_autocast_regions_inside_the_graph() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    enter = graph.call_function(torch.amp.autocast_mode._enter_autocast, ("cpu", None, False, None))
    y = graph.call_function(torch.matmul, (x, x))
    graph.call_function(torch.amp.autocast_mode._exit_autocast, (enter,))
    graph.output((y, graph.call_function(torch.matmul, (x, x))))
    module = torch.fx.GraphModule({}, graph)
    kernels.substitute(module, BF16)
    inside, after = module(torch.empty(4, 4))
    assert (inside.dtype, after.dtype) == (FP32, BF16)
    assert kernel_casts._weight_casts.depth == 0


# ---- cells of recurrent layers ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("kind", "states", "values"), [("lstm", 2, 4), ("gru", 1, 5)])
def test_a_recurrent_cell_is_one_fused_kernel_that_saves_its_gates(
    kind: str, states: int, values: int, dtype: torch.dtype
) -> None:
    gates = 4 if kind == "lstm" else 3
    taken = [leaf(6, 3), *(leaf(6, 8) for _ in range(states))]
    weights = [leaf(gates * 8, 3), leaf(gates * 8, 8), leaf(gates * 8), leaf(gates * 8)]
    graph = torch.fx.Graph()
    x, *rest = (graph.placeholder(f"a{i}") for i in range(len(taken) + 4))
    hx, weight_nodes = (tuple(rest[:2]) if states == 2 else rest[0]), rest[states:]
    cell = torch.lstm_cell if kind == "lstm" else torch.gru_cell
    state = graph.call_function(cell, (x, hx, *weight_nodes))
    graph.output(graph.call_function(operator.getitem, (state, 0)) if states == 2 else state)
    module = torch.fx.GraphModule({}, graph)
    kernels.substitute(module, None if dtype == FP32 else dtype)
    saved: dict[int, torch.Tensor] = {}
    with Ops() as forward, torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(id(t), t), lambda t: t):
        output = module(*taken, *weights)
    kernel = f"{'aten' if kind == 'lstm' else 'remat'}._thnn_fused_{kind}_cell"
    assert [name for name in forward.names if name != "aten._to_copy"] == ["aten.mm", "aten.mm", kernel]
    assert output.dtype == dtype
    of_gates = [t for t in saved.values() if t.shape == (6, gates * 8)]
    assert len(of_gates) == (3 if kind == "lstm" else 2)  # both products; an LSTM's workspace is as large
    assert any(t.shape == (6, values * 8) for t in saved.values())
    output.sum().backward()
    assert all(t.grad is not None and t.grad.shape == t.shape for t in (*taken, *weights))


# ---- norms, linear ---------------------------------------------------------------------------------------


def test_layer_norm_under_autocast_is_float32() -> None:
    x, w, b = leaf(6, 8, dtype=BF16), leaf(8), leaf(8)
    output, forward, saved, _ = on_cuda(F.layer_norm, x, (8,), w, b, autocast=BF16)
    assert output.dtype == FP32
    assert forward == ["aten._to_copy", "aten.native_layer_norm"]
    assert bytes_of(saved) == (6 * 8 + 6 + 6 + 8 + 8) * 4


def test_layer_norm_of_bfloat16_keeps_float32_statistics() -> None:
    x, w, b = leaf(6, 8, dtype=BF16), leaf(8, dtype=BF16), leaf(8, dtype=BF16)
    output, forward, saved, backward = on_cuda(F.layer_norm, x, (8,), w, b)
    assert (output.dtype, forward) == (BF16, ["remat.native_layer_norm"])
    assert bytes_of(saved) == (6 * 8 + 8 + 8) * 2 + (6 + 6) * 4
    assert backward == ["remat.native_layer_norm_backward"]
    assert [t.grad.shape for t in (x, w, b) if t.grad is not None] == [(6, 8), (8,), (8,)]


def test_rms_norm_is_fused() -> None:
    x, w = leaf(6, 8, dtype=BF16), leaf(8, dtype=BF16)
    output, forward, saved, backward = on_cuda(F.rms_norm, x, (8,), w)
    assert (output.shape, forward) == ((6, 8), ["remat._fused_rms_norm"])
    assert bytes_of(saved) == (6 * 8 + 8) * 2 + 6 * 4
    assert backward == ["remat._fused_rms_norm_backward"]


@pytest.mark.parametrize(("listed", "dtype"), [(True, FP32), (False, BF16)])
def test_rms_norm_under_autocast_follows_the_list_of_this_torch(
    monkeypatch: pytest.MonkeyPatch, listed: bool, dtype: torch.dtype
) -> None:
    assert TorchVersion(torch.__version__) < "2.12" or kernel_rules.RMS_NORM_IN_FLOAT32
    monkeypatch.setattr(kernel_rules, "RMS_NORM_IN_FLOAT32", listed)
    output, _, saved, _ = on_cuda(F.rms_norm, leaf(6, 8, dtype=BF16), (8,), leaf(8, dtype=BF16), autocast=BF16)
    assert output.dtype == dtype
    assert bytes_of(saved) == (6 * 8 + 8) * dtype.itemsize + 6 * 4


@pytest.fixture
def warns_always() -> Iterator[None]:
    """torch warns of some things once in a process: a test before may have had the warning."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


@pytest.mark.usefixtures("warns_always")
def test_rms_norm_of_mixed_dtypes_is_not_fused() -> None:
    with pytest.warns(UserWarning, match="Mismatch dtype"):
        assert "aten.rsqrt" in on_cuda(F.rms_norm, leaf(6, 8, dtype=BF16), (8,), leaf(8))[1]


@pytest.mark.parametrize(
    ("dtype", "kernel"),
    [(FP32, "aten.cudnn_batch_norm"), (FP16, "aten.cudnn_batch_norm"), (BF16, "aten.native_batch_norm")],
)
def test_batch_norm(dtype: torch.dtype, kernel: str) -> None:
    x, mean, var, w, b = leaf(2, 3, 4, 4, dtype=dtype), torch.zeros(3), torch.ones(3), leaf(3), leaf(3)
    output, forward, saved, backward = on_cuda(F.batch_norm, x, mean, var, w, b, True, autocast=dtype)
    assert output.dtype == dtype  # in none of autocast's lists
    assert kernel in forward
    assert kernel + "_backward" in backward
    if dtype == FP32:
        statistics = 5 * 3 * 4  # saved and running mean and variance, weight; the reserve is empty on fakes
        assert bytes_of(saved) == 2 * 3 * 4 * 4 * x.element_size() + statistics


def test_linear_adds_the_bias_in_place_where_it_cannot_flatten() -> None:
    x, w, b = leaf(3, 2, 8).transpose(0, 1), leaf(5, 8), leaf(5)
    assert on_cuda(F.linear, x, w, b)[1] == ["aten.clone", "aten.mm", "aten.add_"]


# ---- the graph -------------------------------------------------------------------------------------------


def module_of_all_kinds() -> torch.fx.GraphModule:
    return graph_of(
        (torch.relu, (), {}),
        ("softmax", (-1,), {}),
        (F.dropout, (0.1, True), {}),
        (F.normalize, (), {"dim": -1}),
        (torch.pow, (2,), {}),
        ("sum", (), {}),
    )


@pytest.mark.parametrize("autocast", [None, BF16, FP16])
def test_nodes_keep_number_order_and_names(autocast: torch.dtype | None) -> None:
    module = module_of_all_kinds()
    before = [node.name for node in module.graph.nodes]
    kernels.substitute(module, autocast)
    assert [node.name for node in module.graph.nodes] == before
    module.graph.lint()


def test_the_code_names_what_is_substituted() -> None:
    module = module_of_all_kinds()
    kernels.substitute(module, BF16)
    assert "torch.relu(x)" in module.code
    assert "remat_cuda_kernels_substitute_cuda_dropout(softmax, 0.1, True)" in module.code
    module.recompile()
    again = copy.deepcopy(module)
    assert module(leaf(4, 8)).dtype == again(leaf(4, 8)).dtype == FP32


def test_without_autocast_only_other_kernels_are_substituted() -> None:
    module = module_of_all_kinds()
    kernels.substitute(module, None)
    changed = [n.name for n in module.graph.nodes if isinstance(n.target, kernels.OnCuda)]
    assert changed == ["softmax", "dropout", "normalize"]


def test_substituted_methods_are_found_as_functions() -> None:
    module = module_of_all_kinds()
    kernels.substitute(module, BF16)
    (node,) = (n for n in module.graph.nodes if n.name == "softmax")
    assert module.graph.find_nodes(op="call_function", target=node.target) == [node]
    assert module.graph.find_nodes(op="call_method", target="softmax") == []


@pytest.mark.parametrize("function", [F.dropout, F.linear, torch.matmul, torch.Tensor.softmax, SDPA, torch.exp])
def test_targets_pickle(function: Callable[..., Any]) -> None:
    target = kernels.OnCuda(function, kernel_casts.Device(BF16))
    assert pickle.loads(pickle.dumps(target)) == target


def test_multi_head_attention_is_run_with_the_kernels_of_cuda() -> None:
    x, in_w, out_w = leaf(16, 2, 16), leaf(48, 16), leaf(16, 16)
    attend = kernels.OnCuda(F.multi_head_attention_forward, kernel_casts.Device(BF16))
    with Ops() as ops:
        output, _ = attend(
            x, x, x, 16, 2, in_w, None, None, None, False, 0.1, out_w, None, True, None, need_weights=False
        )
    assert FLASH in ops.names
    assert output.dtype == BF16


def test_pooling_is_alike() -> None:
    output, forward, saved, _ = on_cuda(F.max_pool2d, leaf(2, 3, 8, 8), 2, autocast=BF16)
    assert forward == ["aten.max_pool2d_with_indices"]
    assert bytes_of(saved) == (2 * 3 * 8 * 8) * 4 + (2 * 3 * 4 * 4) * 8  # the input, and int64 indices
    assert output.dtype == FP32


def test_what_is_not_modelled_is_refused_by_name() -> None:
    with pytest.raises(CaptureError, match="`lstm` cannot be planned for a CUDA device"):
        kernels.OnCuda(torch.lstm, kernel_casts.Device(None))(torch.empty(1))
    with pytest.raises(CaptureError, match="`binary_cross_entropy` is an error under CUDA's autocast"):
        on_cuda(F.binary_cross_entropy, leaf(4), leaf(4), autocast=BF16)
