"""Private parts of torch behave as remat relies on; a missing part is named."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import math
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.optimizer import _default_to_fused_or_foreach
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from remat._torch import compiled_draws, door, dynamo, elsewhere, inductor, kernel_arguments, recording, training
from remat.errors import RematError
from remat.shared import Shared

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),  # of torch's own imports
]


@pytest.fixture
def anew() -> Iterator[None]:
    """Names are looked up in this test, and again after it."""
    door.internal.cache_clear()
    yield
    door.internal.cache_clear()


class Seen(training.UnseenMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


# Recording


def test_a_composite_function_is_replaced_while_a_context_is_open() -> None:
    """However it is called; the function as it is runs torch's C++, not a decomposition in Python."""
    index, seen = torch.zeros(2, dtype=torch.int64), Seen()

    def instead(whole: Callable[..., torch.Tensor], classes: torch.Tensor, count: int = -1) -> torch.Tensor:
        return whole(classes, count).unsqueeze(0)

    with recording.composites_replaced({"one_hot": instead}), seen:
        shapes = [f(index, 3).shape for f in (torch.nn.functional.one_hot, torch.ops.aten.one_hot)]
    assert shapes == [(1, 2, 3)] * 2
    assert "aten.scatter_.value" in seen.names
    assert torch.nn.functional.one_hot(index, 3).shape == (2, 3)


def test_no_function_mode_is_called_beside_functions() -> None:
    class Asked(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(func)
            return func(*args, **(kwargs or {}))

    asked: list[Any] = []
    tensor = torch.ones(2, 3)
    with Asked():
        with recording.beside_functions():
            assert tensor.shape == (2, 3) and tensor.stride() == (3, 1)
        assert not asked
        assert tensor.numel() == 6
    assert asked == [torch.Tensor.numel]


def test_vmap_is_seen_through_other_transforms() -> None:
    def seen(x: torch.Tensor) -> torch.Tensor:
        found.append(recording.is_batched(x))
        return x.sum()

    found: list[bool] = []
    torch.func.grad(seen)(torch.ones(2))
    torch.vmap(seen)(torch.ones(2, 2))
    torch.vmap(torch.func.grad(seen))(torch.ones(2, 2))
    assert found == [False, True, True]


# Training


def test_fakes_are_seen() -> None:
    assert not training.fakes_are_on()
    with FakeTensorMode():
        assert training.fakes_are_on()
    assert not training.fakes_are_on()


def test_a_mode_is_kept_from_dynamo_once() -> None:
    """By torch, or by UnseenMode where torch does not."""
    layers, function = 0, Seen.__dict__["__torch_dispatch__"]
    while (function := getattr(function, "__wrapped__", None)) is not None:
        layers += 1
    assert layers == 1


class Lean(training.LeanMode):
    def __init__(self) -> None:
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_lean_mode_sees_what_runs_in_it() -> None:
    with Lean() as seen:
        torch.ones(1).sin()
    torch.ones(1).cos()
    assert "aten.sin.default" in seen.names and "aten.cos.default" not in seen.names


def test_without_modes_nobody_sees() -> None:
    with Seen() as seen:
        with training.without_modes():
            torch.ones(1).sin()
        torch.ones(1).cos()
    assert "aten.sin.default" not in seen.names and "aten.cos.default" in seen.names


@pytest.mark.parametrize("retain", [True, False])
def test_a_backward_says_whether_it_keeps_its_graph(retain: bool) -> None:
    found = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: found.append(training.keeps_graph()))
    y.sum().backward(retain_graph=retain)
    assert found == [retain]


def test_what_waits_for_the_end_of_a_backward_is_called_then_and_once() -> None:
    found: list[str] = []
    x = torch.ones(2, requires_grad=True)
    (x * 2).sum().backward()
    y = x * 2
    y.register_hook(lambda gradient: training.when_backward_ends(lambda: found.append("end")))
    x.register_hook(lambda gradient: found.append("leaf"))
    y.sum().backward()
    assert found == ["leaf", "end"]


def test_an_error_at_the_end_of_a_backward_is_the_backwards() -> None:
    def fail() -> None:
        raise KeyError("end")

    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: training.when_backward_ends(fail))
    with pytest.raises(KeyError, match="end"):
        x.sum().backward()


def test_what_is_recomputed_is_compared_with_what_was_saved() -> None:
    """Each saved tensor is described in forward, and again when all are recomputed; an error is the backward's."""
    described: list[float] = []

    class Described(float):
        def __ne__(self, other: object) -> bool:
            raise KeyError("compared")

    def describe(tensor: torch.Tensor) -> Described:
        described.append(float(tensor.detach()))
        return Described(tensor.detach())

    x = torch.tensor(2.0, requires_grad=True)
    with training.compared_when_recomputed(describe) as name:
        y = checkpoint(lambda x: x.sin().cos(), x, use_reentrant=False, determinism_check=name)
    assert described == [2.0, float(x.detach().sin())]
    with pytest.raises(KeyError, match="compared"):
        y.backward()
    assert described[2] == 2.0
    with pytest.raises(ValueError, match="determinism_check"):
        checkpoint(torch.sin, x, use_reentrant=False, determinism_check=name)


def test_where_torch_does_not_say_the_graph_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._autograd, "_get_current_graph_task_keep_graph")
    assert training.keeps_graph()


def test_a_scaler_has_scaled_when_it_says_so_or_torch_does_not_say() -> None:
    scaler = torch.amp.GradScaler("cpu")
    assert not training.has_scaled(scaler)
    scaler.scale(torch.ones(1))
    assert training.has_scaled(scaler)
    del scaler._scale
    assert training.has_scaled(scaler)


def test_a_detached_tensor_shares_its_version_below_autograd() -> None:
    x = torch.ones(2)
    with Seen(), training.sharing_versions():
        y = x.detach()
    y.add_(1)
    assert x._version == y._version == 1


def test_wrappers_are_known() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    assert training.is_wrapper(TwoTensor(torch.ones(1), torch.ones(1))) and not training.is_wrapper(torch.ones(1))


def test_cublas_is_asked_for_its_workspaces_where_torch_knows_how(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[None] = []
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: asked.append(None), raising=False)
    training.clear_cublas_workspaces()
    monkeypatch.delattr(torch._C, "_cuda_clearCublasWorkspaces")
    training.clear_cublas_workspaces()
    assert asked == [None]


# Recording


def test_backward_says_whose_it_is() -> None:
    found: list[int] = []
    before = recording.next_sequence_number()
    x = torch.ones(2, requires_grad=True).sin()
    assert recording.next_sequence_number() == before + 1 and recording.autograd_node() is None
    x.register_hook(lambda gradient: found.append(recording.autograd_node()._sequence_nr()))
    x.sum().backward()
    assert found == [before]


def test_a_tensor_within_a_transform_is_unwrapped() -> None:
    x, seen = torch.ones(3, 2), []

    def function(row: torch.Tensor) -> torch.Tensor:
        seen.append(recording.unwrapped(row).untyped_storage().data_ptr())
        return row.sin()

    torch.vmap(function)(x)
    assert seen == [x.untyped_storage().data_ptr()] and recording.unwrapped(x) is x


def test_what_is_not_to_be_traced_is_not() -> None:
    traced: list[bool] = []

    @recording.untraced
    def beside() -> None:
        traced.append(torch.compiler.is_compiling())

    def function(x: torch.Tensor) -> torch.Tensor:
        beside()
        return x.sin()

    torch.compile(function, backend="eager")(torch.ones(2))
    assert traced == [False]


def test_strides_say_a_layout() -> None:
    x = torch.ones(2, 3, 4, 4)
    assert recording.memory_format_of(x) is torch.contiguous_format
    assert recording.memory_format_of(x.to(memory_format=torch.channels_last)) is torch.channels_last


def test_the_first_tensor_of_an_elementwise_kernel_decides_its_layout() -> None:
    x = torch.ones(2, 3, 4, 4)
    last, all_one = x.to(memory_format=torch.channels_last), torch.ones(()).expand(x.shape)
    assert recording.elementwise_strides(last, x) == torch.add(last, x).stride() == last.stride()
    assert recording.elementwise_strides(all_one, last, x) == torch.addcmul(all_one, last, x).stride() == last.stride()


def test_the_loss_within_cross_entropy_and_functions_that_are_passed_on() -> None:
    logits, target = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    found = recording.nll_loss_nd(logits.log_softmax(1), target, None, 1, -100)
    assert torch.equal(found, torch.nn.functional.cross_entropy(logits, target))
    assert recording.builtin_functions().gelu is torch.nn.functional.gelu


def test_every_backward_has_a_number() -> None:
    seen = [recording.backward_number()]
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: seen.append(recording.backward_number()))
    for _ in range(2):
        y.backward(retain_graph=True)
    assert seen[0] == -1 and len(set(seen)) == 3


def test_torch_nn_packs_and_runs_recurrent_layers_through_one_module() -> None:
    found = recording.functions_of_lengths()
    assert found is torch.nn.utils.rnn._VF is torch.nn.modules.rnn._VF
    names = ("_pack_padded_sequence", "_pad_packed_sequence", "lstm", "gru", "rnn_tanh", "rnn_relu")
    assert all(callable(getattr(found, name)) for name in names)


def test_a_function_that_no_trace_begins_at_nor_within_is_run_as_it_stands() -> None:
    def inside(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if torch.compiler.is_compiling() else x

    def outside(x: torch.Tensor) -> torch.Tensor:
        return inside(x) * 2

    dynamo.not_begun_at(outside, nor_within=True)
    assert torch.equal(torch.compile(outside, backend="eager")(torch.ones(2)), 2 * torch.ones(2))


def test_the_shape_of_grouped_products_is_asked_of_us_and_only_meanwhile() -> None:
    asked: list[bool] = []

    def shape(original: Callable[..., Any], make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        asked.append(callable(make))
        return original(*args, **kwargs)

    def product() -> torch.Size:
        # Sizes that nobody else asks for: fakes remember the answers.
        rows, experts = torch.ones(6, 88, dtype=torch.bfloat16), torch.ones(2, 88, 104, dtype=torch.bfloat16)
        groups = torch.tensor([2, 6], dtype=torch.int32)
        return torch.nn.functional.grouped_mm(rows, experts, offs=groups).shape

    with FakeTensorMode():
        with recording.shape_of_grouped_products(shape):
            assert product() == (6, 104)
        assert product() == (6, 104)
    assert asked == [True]


def test_optimizers_choose_kernels_for_other_tensors_and_only_meanwhile() -> None:
    with FakeTensorMode():
        fakes = [torch.ones(2) for _ in range(2)]
    kind = type(fakes[0])

    def chosen() -> bool:
        return _default_to_fused_or_foreach(fakes, False, False)[1]

    assert "cuda" in recording.devices_with_foreach()
    assert not chosen()
    with recording.foreach_takes(kind, None):
        assert not chosen()  # on a CPU nobody does
    with recording.foreach_takes(kind, "cpu"):
        assert chosen() and "cpu" in recording.devices_with_foreach()
    assert not chosen() and "cpu" not in recording.devices_with_foreach()


# Dynamo


@pytest.mark.filterwarnings("ignore")  # of Dynamo's own, about the break
def test_dynamo_tells_its_frames_and_its_breaks() -> None:
    @torch.compiler.disable
    def apart(x: torch.Tensor) -> torch.Tensor:
        return x

    def function(x: torch.Tensor) -> torch.Tensor:
        return apart(x.sin()).cos()

    frames, breaks = dynamo.frames_traced(), len(dynamo.graph_breaks())
    torch.compile(function, backend="eager")(torch.ones(2))
    assert dynamo.frames_traced() > frames and len(dynamo.graph_breaks()) > breaks
    assert dynamo.compiler_behind(None) is None


def test_modules_that_are_compiled_are_known() -> None:
    in_place, by_forward, disabled, untouched = (torch.nn.Linear(1, 1) for _ in range(4))
    in_place.compile()
    by_forward.forward = torch.compile(by_forward.forward)  # type: ignore[method-assign]
    disabled.forward = torch.compiler.disable(disabled.forward)  # type: ignore[method-assign]
    wrapped: Any = torch.compile(untouched)
    assert all(map(dynamo.is_compiled, (in_place, by_forward, wrapped)))
    assert not dynamo.is_compiled(untouched) and not dynamo.is_compiled(disabled)


@pytest.mark.parametrize("wanted", [False, True])
def test_a_failure_on_fakes_is_not_logged_unless_it_is_asked_for(
    wanted: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_LOGS", raising=False)
    monkeypatch.setenv("REMAT_DEBUG", "1" if wanted else "")
    log = logging.getLogger("torch._subclasses.fake_tensor")
    monkeypatch.setattr(log, "handlers", [caplog.handler])  # torch's loggers may not propagate
    caplog.set_level(logging.ERROR, log.name)
    before = log.level
    quiet, failing = dynamo.tracebacks_unwritten, pytest.raises(RuntimeError, match="same reduction dim")
    with FakeTensorMode(), quiet(), quiet(), failing:
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert ("failed while attempting to run meta" in caplog.text) is wanted
    assert log.level == before


def test_advice_on_a_number_that_ends_a_graph_is_not_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.variables.tensor import TensorVariable

    log = logging.getLogger("torch._dynamo.variables.tensor")
    caplog.set_level(logging.WARNING, log.name)  # a library that another test imports may have raised it
    monkeypatch.setattr(log, "handlers", [caplog.handler])
    for quiet in (dynamo.tracebacks_unwritten, contextlib.nullcontext):
        TensorVariable._warn_capture_scalar_outputs.cache_clear()
        torch._dynamo.reset()
        with quiet():
            torch.compile(lambda x: x * x.sum().item(), backend="eager")(torch.ones(2))
        assert ("Graph break from `Tensor.item()`" in caplog.text) == (quiet is contextlib.nullcontext)


def test_what_stands_for_a_traced_launch_in_triton_is_called() -> None:
    assert isinstance(dynamo.traced_triton_launch(), type)
    assert "__call__" in vars(dynamo.traced_triton_launch())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # of Dynamo's own way with Functions
def test_a_function_left_whole_is_a_node_that_says_which_it_is() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return 2 * gradient

    found: list[Any] = []

    def backend(graph_module: torch.fx.GraphModule, inputs: Any) -> Any:
        found.extend(dynamo.own_function(node.target) for node in graph_module.graph.nodes)
        return graph_module

    for left in ([Doubled], []):
        torch._dynamo.reset()
        with dynamo.left_whole(left):
            torch.compile(lambda x: Doubled.apply(x).cos(), backend=backend)(torch.ones(2, requires_grad=True))
    assert [function for function in found if function is not None] == [Doubled]


def test_dynamo_raises_an_error_of_its_own() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x

    with pytest.raises(dynamo.trace_error()):
        torch.compile(function, backend="eager", fullgraph=True)(torch.ones(2))


def test_where_breaks_are_refused_a_trace_raises_and_earlier_traces_hold() -> None:
    calls: list[int] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        calls.append(0)
        if x.shape[0] > 2:
            torch._dynamo.graph_break()
        return x.sin()

    compiled = torch.compile(function, backend="eager", dynamic=False)
    compiled(torch.ones(2))
    with dynamo.without_breaks():
        compiled(torch.ones(2))
        with pytest.raises(dynamo.trace_error()):
            compiled(torch.ones(3))
    assert len(calls) == 2
    compiled(torch.ones(3))


def test_a_captured_graph_says_where_autocast_holds() -> None:
    seen: list[Any] = []

    def backend(graph_module: fx.GraphModule, example_inputs: list[torch.Tensor]) -> Any:
        seen.extend(node.target for node in graph_module.graph.find_nodes(op="call_function", target=enter))
        seen.extend(node.target for node in graph_module.graph.find_nodes(op="call_function", target=leave))
        return graph_module

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x

    enter, leave = dynamo.autocast_marks()
    torch.compile(function, backend=backend)(torch.ones(2, 2))
    assert seen == [enter, leave]


def test_settings_hold_only_meanwhile() -> None:
    before = torch._dynamo.config.recompile_limit
    with dynamo.settings(recompile_limit=before + 1):
        assert torch._dynamo.config.recompile_limit == before + 1
    assert torch._dynamo.config.recompile_limit == before


def test_predicates_are_answered_by_handlers_of_variables() -> None:
    known, predicate = dynamo.handlers(), torch.compiler.is_compiling
    assert known.keys() & set(dynamo.predicates()) and predicate in dynamo.predicates()
    original = known[predicate]
    known[predicate] = lambda variable, tx, *args, **kwargs: dynamo.constant(False)
    try:
        traced = torch.compile(lambda x: x + 1 if torch.compiler.is_compiling() else x - 1, backend="eager")
        assert traced(torch.zeros(1)) == -1
    finally:
        known[predicate] = original


def named(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


def test_another_function_is_followed_and_guards_are_on_the_one_that_is_there() -> None:
    compiled: list[fx.GraphModule] = []
    firsts: list[str] = []

    def backend(graph_module: fx.GraphModule, example_inputs: list[torch.Tensor]) -> Any:
        compiled.append(graph_module)
        return graph_module

    def instead(translator: Any, function: Any, first: dynamo.FirstNode) -> Any:
        ours = dynamo.backend_of_output(translator.output) is backend
        if function is named and (node := first()) is not None:
            firsts.append(node.op)
        assert all(map(dynamo.is_of_tensor, (v.realize() for v in translator.symbolic_locals.values() if v)))
        return (lambda x: x.cos()) if ours and function is named else None

    ours, others = (torch.compile(lambda x: named(x), backend=each) for each in (backend, "eager"))
    x = torch.ones(2)
    with dynamo.following(instead):
        assert torch.equal(ours(x), x.cos()) and torch.equal(others(x), x.sin())
    assert torch.equal(ours(x), x.cos()) and len(compiled) == 1
    assert set(firsts) == {"placeholder"}


@pytest.mark.filterwarnings("ignore")  # of Dynamo's own, about the break
def test_no_number_is_read_off_a_tensor_where_it_is_said_and_only_meanwhile() -> None:
    found: list[int] = []

    def backend(graph_module: fx.GraphModule, example_inputs: list[torch.Tensor]) -> Any:
        found.append(len(graph_module.graph.find_nodes(op="call_method", target="view")))
        return graph_module

    def other(graph_module: fx.GraphModule, example_inputs: list[torch.Tensor]) -> Any:
        return backend(graph_module, example_inputs)

    def views(compiler: Any) -> int:
        torch._dynamo.reset()
        found.clear()
        torch.compile(lambda x, rows: x.sin().view(rows, 2), backend=compiler)(torch.ones(6), torch.tensor(3))
        return sum(found)

    with dynamo.numbers_unread(lambda translator: dynamo.backend_of_output(translator.output) is backend):
        assert views(backend) == 0 and views(other) == 1
    assert views(backend) == 1


class H100:
    device, here, capability = torch.device("cuda", 0), "cpu", (9, 0)

    def __init__(self) -> None:
        self.found: list[Any] = []

    @contextlib.contextmanager
    def kernels(self) -> Iterator[None]:
        self.found.append("kernels")
        yield

    def here_for(self, named: Any) -> Any:
        self.found.append(named)
        return torch.device("cpu") if named == self.device else "cpu" if named == "cuda" else named


def asks_where_it_is(x: torch.Tensor) -> torch.Tensor:
    if x.is_cuda and not x.is_cpu and x.device == torch.device("cuda", 0) and x.get_device() == 0:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            on = torch.is_autocast_enabled() and torch.get_autocast_dtype("cuda") is torch.bfloat16
            if on and torch.cuda.get_device_capability(x.device) == (9, 0) and torch.cuda.is_available():
                return x.sin() + torch.zeros(2, device=x.device)
    return x.cos()


def test_a_trace_for_another_device_hears_of_it_and_only_meanwhile() -> None:
    def backend(graph_module: fx.GraphModule, example_inputs: list[torch.Tensor]) -> Any:
        return graph_module

    def find(output: Any) -> H100 | None:
        return h100 if dynamo.backend_of_output(output) is backend else None

    h100, x = H100(), torch.ones(2)
    with elsewhere.traced_elsewhere(find, lambda output, node: contextlib.nullcontext()):
        assert torch.equal(torch.compile(asks_where_it_is, backend=backend)(x), x.sin())
        assert torch.equal(torch.compile(asks_where_it_is, backend="eager")(x), x.cos())
    assert {"kernels", "cuda", h100.device} <= set(h100.found)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(asks_where_it_is, backend=backend)(x), x.cos())


def product(rows: torch.Tensor) -> torch.Tensor:
    first, second = rows
    return first * second


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x: [row.sin() for row in x], id="comprehension"),
        pytest.param(lambda x: [row * i for i, row in enumerate(x)], id="enumerate"),
        pytest.param(lambda x: [row + other for row, other in zip(x, x, strict=True)], id="zip"),
        pytest.param(lambda x: torch.cat(list(x)), id="list"),
        pytest.param(lambda x: torch.hypot(*x), id="starred"),
        pytest.param(product, id="unpacked"),
    ],
)
def test_iterating_over_a_tensor_is_one_operator_where_it_is_said_and_only_meanwhile(
    function: Callable[[torch.Tensor], Any],
) -> None:
    found: list[str] = []

    def backend(graph_module: fx.GraphModule, example_inputs: list[torch.Tensor]) -> Any:
        found.extend(str(node.target) for node in graph_module.graph.find_nodes(op="call_method", target="unbind"))
        return graph_module

    def unbinds(compiler: Any) -> bool:
        torch._dynamo.reset()
        found.clear()
        given = torch.randn(2, 3)
        for one, other in zip(torch.compile(function, backend=compiler)(given), function(given), strict=True):
            assert torch.equal(one, other)
        return bool(found)

    with dynamo.rows_unbound(lambda translator: dynamo.backend_of_output(translator.output) is backend):
        assert unbinds(backend) and not unbinds("eager")
    assert not unbinds(backend)


class Compiler:
    """A backend that keeps the graphs that it is given."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, graph_module: fx.GraphModule, example_inputs: list[Any]) -> Any:
        self.graphs.append(graph_module)
        return graph_module

    def is_asked(self, translator: Any) -> bool:
        return dynamo.backend_of_output(translator.output) is self

    def graphs_for(self, function: Callable[..., torch.Tensor], given: list[tuple[Any, ...]]) -> int:
        """Of how many graphs `function` is, for all that it is `given` in turn; its results are those of eager mode."""
        torch._dynamo.reset()
        self.graphs.clear()
        compiled = torch.compile(function, backend=self)
        for args in given:
            torch.manual_seed(0)
            found = compiled(*args)
            torch.manual_seed(0)
            torch.testing.assert_close(found, function(*args))
        return len(self.graphs)


def test_sizes_stay_closed_where_numbers_are_open_in_our_captures_alone() -> None:
    given = [(torch.ones(size), number) for size, number in [(4, 2), (5, 3), (6, 4), (6, 5)]]
    ours, other = Compiler(), Compiler()
    with dynamo.sizes_closed(ours.is_asked):
        assert ours.graphs_for(lambda x, number: x * number, given) == 3  # one a size
        assert other.graphs_for(lambda x, number: x * number, given) == 2
    assert ours.graphs_for(lambda x, number: x * number, given) == 2


NUMBERS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "dropout": lambda x, steps: torch.nn.functional.dropout(x, 0.01 * steps),
    "norm": lambda x, steps: torch.nn.functional.layer_norm(x, (4,), eps=0.01 * steps),
    "exp": lambda x, steps: x * math.exp(-steps),
    "log": lambda x, steps: x * (1.0 if math.log(steps) > 100 else math.log(steps)),
    "numpy": lambda x, steps: x * float(np.exp(-steps) + np.sqrt(steps)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_an_operator_or_a_function_is_given_stays_open_while_we_capture(name: str) -> None:
    """In our captures alone, but for functions of `math`, which are symbols for everybody meanwhile."""
    given = [(torch.ones(4), steps) for steps in range(3, 8)]
    ours, other = Compiler(), Compiler()
    with dynamo.floats_open(ours.is_asked), dynamo.numpy_of_numbers(ours.is_asked):
        assert ours.graphs_for(NUMBERS[name], given) == 2
        assert other.graphs_for(NUMBERS[name], given) > 2 or name in ("exp", "log")
    assert ours.graphs_for(NUMBERS[name], given) > 2


def test_what_numpy_computes_of_a_number_is_a_number_in_our_captures_alone() -> None:
    def numbers_as_tensors(graph: fx.GraphModule) -> int:
        values = (node.meta.get("example_value") for node in graph.graph.nodes)
        return sum(isinstance(value, torch.Tensor) and not value.dim() for value in values)

    ours, other = Compiler(), Compiler()
    with dynamo.numpy_of_numbers(ours.is_asked):
        for compiler in (ours, other):
            compiler.graphs_for(lambda x: x / np.sqrt(64), [(torch.ones(4),)])
    assert numbers_as_tensors(ours.graphs[0]) == 0 < numbers_as_tensors(other.graphs[0])


def test_a_number_that_a_kept_generator_draws_is_an_input_in_our_captures_alone() -> None:
    generator = random.Random(0)
    expected = [1 + generator.uniform(0, 1) for _ in range(3)]

    def draws(compiler: Compiler) -> list[float]:
        generator.seed(0)
        scaled = torch.compile(lambda x: x * (1 + generator.uniform(0, 1)), backend=compiler, fullgraph=True)
        return [scaled(torch.ones(1, dtype=torch.float64)).item() for _ in range(3)]

    ours, other = Compiler(), Compiler()
    with dynamo.draws_as_inputs(lambda tx: ours.is_asked(tx) or None):
        assert draws(ours) == expected and len(ours.graphs) == 1
        with pytest.raises(dynamo.trace_error()):
            draws(other)


def test_dynamo_follows_again_into_what_raised_while_it_was_traced() -> None:
    """And only there: what else was compiled is not compiled anew."""
    traced: list[int] = []

    def backend(graph_module: fx.GraphModule, example_inputs: list[torch.Tensor]) -> Any:
        traced.append(len(list(graph_module.graph.nodes)))
        return graph_module

    def inner(x: torch.Tensor, fails: bool) -> torch.Tensor:
        if fails:
            raise KeyError("ours")
        return x.sin()

    def function(x: torch.Tensor, fails: bool) -> torch.Tensor:
        return inner(x.cos(), fails).tan()

    ours: list[Any] = [lambda x: x.square(), function]
    other, compiled = (torch.compile(each, backend=backend) for each in ours)
    other(torch.ones(2))
    traced.clear()
    with pytest.raises(KeyError) as raised:
        compiled(torch.ones(2), True)
    traced.clear()
    dynamo.try_again(raised.value)
    compiled(torch.ones(2), False)
    other(torch.ones(2))
    assert traced == [5]  # x, cos, sin, tan and the output, in one graph


# Compilers


def joint(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() @ x).cos().sum()


def test_inductor_is_told_its_partitioner_and_decompositions_and_has_no_cache_meanwhile() -> None:
    from torch._functorch import config as functorch_config
    from torch._inductor import compile_fx
    from torch._inductor import config as inductor_config

    class Ours(inductor.partitioner_class()):  # type: ignore[misc]
        def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
            return inductor.min_cut(gm, joint_inputs, **kwargs)

        def uuid(self) -> Any:
            return inductor.hash_of(__file__)

    ours = Ours()
    with inductor.compiling_with(ours, dict):
        assert inductor_config.custom_partitioner_fn is ours and ours.uuid()
        assert not functorch_config.enable_autograd_cache and compile_fx.select_decomp_table() == {}
        assert not inductor_config.triton.reorder_for_reducing_graph_partitions
    assert inductor_config.custom_partitioner_fn is not ours and compile_fx.select_decomp_table()
    assert inductor_config.triton.reorder_for_reducing_graph_partitions


@pytest.mark.exhaustive
def test_generated_code_frees_buffers_at_once_where_that_is_asked_for() -> None:
    given = torch.randn(8, 8)
    found = []
    for at_once in (False, True):
        graph = make_fx(lambda x: [x.mm(x).sin().mm(x).mm(x).cos().mm(x)], tracing_mode="fake")(given)
        with inductor.compiling_with(None, dict):
            if at_once:
                inductor.free_at_once()
            _, (code,) = run_and_get_code(inductor.compiled, graph, [given])
        found.append(code.count("empty_strided"))
    assert found[0] < found[1]


def test_saved_values_are_chosen_and_torchs_own_choices_are_known() -> None:
    """Halves compile as AOTAutograd would have them compiled: backward may write over what only it reads."""
    given = torch.randn(4, 6, requires_grad=True)
    joint = inductor.joint_of(lambda x: (x.sin().exp().cos(),), [given])
    values = [node.meta["val"] for node in joint.graph.find_nodes(op="placeholder")]
    kinds: list[bool] = []

    def choose(graph: fx.Graph, info: Any, own: Callable[[float], list[fx.Node]]) -> list[fx.Node]:
        kinds.extend(inductor.calls_library(node) for node in graph.nodes)
        assert own(1.0) and own(0.0) == info.inputs
        return [node for node in graph.nodes if node.target is torch.ops.aten.exp.default or node in info.inputs]

    forward, backward = inductor.partition_saving(choose)(joint, values, num_fwd_outputs=1)
    saved = [node.name for node in backward.graph.find_nodes(op="placeholder")]
    assert len(saved) == 3 and "exp" in saved and not any(kinds)
    assert inductor._donated(forward, backward, 1) == [1]  # `exp`, and not the input
    with torch.no_grad():
        first, strides = inductor.compiled_forward(forward, 1)
        second = inductor.compiled_backward(forward, backward, 1, strides)
        result, *kept = first([given.detach()])
        (gradient,) = second([*kept, torch.ones(4, 6)])
    (expected,) = torch.autograd.grad(given.sin().exp().cos().sum(), given)
    torch.testing.assert_close((result, gradient), (given.detach().sin().exp().cos(), expected))


def test_code_is_given_to_the_half_whose_key_it_has_and_once() -> None:
    from torch._inductor import config

    halves = inductor._HalfCompilers()
    halves._generate = lambda *_: "generated"
    halves.codes["forward"] = SimpleNamespace(after_deserialization=lambda constants: None)
    graph = fx.GraphModule({}, fx.Graph())
    for key, is_off, is_known in (("forward", False, True), ("backward", False, False), ("forward", True, False)):
        halves.key = key
        with config.patch(force_disable_caches=is_off):
            assert (halves._generated(graph) != "generated") == is_known
            assert halves._generated(graph) == "generated"  # a compilation that has no key


def test_a_frame_is_known_when_it_is_compiled_again() -> None:
    seen: list[Any] = []

    def backend(graph_module: fx.GraphModule, inputs: Any) -> Any:
        seen.append(dynamo.compilation())
        return graph_module

    run = torch.compile(lambda x: x + 1, backend=backend, dynamic=False)
    for size in (2, 3):
        run(torch.ones(size))
    torch.compile(lambda x: x - 1, backend=backend)(torch.ones(2))
    (first, one), (again, other), (second, _) = seen
    assert first == again != second and one != other and dynamo.compilation() == (None, None)


def test_an_error_of_ours_in_a_backend_reaches_the_caller_as_it_is() -> None:
    def backend(graph_module: fx.GraphModule, inputs: Any) -> Any:
        try:
            raise ValueError from RematError("as it is")
        except ValueError as failure:
            raise dynamo.passed_on(failure, RematError) or failure from None

    with pytest.raises(RematError, match=r"^as it is"):
        torch.compile(torch.sin, backend=backend)(torch.ones(1))


def test_what_inductor_decomposes_is_a_table_of_overloads() -> None:
    assert torch.ops.aten.native_layer_norm.default in inductor.chosen_decompositions()


def test_modules_that_inductor_generates_are_handed_over_without_kernels(tmp_path: Path) -> None:
    from torch._inductor import async_compile, codecache, config
    from torch._inductor.virtualized import V

    def load(key: str, path: str) -> str:
        return f"{key} of {path}"

    template = tmp_path / "template.py"
    template.write_text("a_kernel = 1")
    as_is = codecache.PyCodeCache.load_by_key_path
    assert inductor.hands_modules_over()
    with inductor.loading_modules(load), inductor.kernels_compiled_by("nobody"):
        graph: Any = SimpleNamespace(scheduler="made")
        with V.set_graph_handler(graph):
            assert codecache.PyCodeCache.load_by_key_path("k", "p") == "k of p" and config.force_disable_caches
        graph.scheduler = None
        with V.set_graph_handler(graph):
            assert codecache.PyCodeCache.load_by_key_path("t", str(template)).a_kernel == 1
        assert async_compile.AsyncCompile == "nobody"
    assert codecache.PyCodeCache.load_by_key_path == as_is and async_compile.AsyncCompile != "nobody"


def test_a_group_is_traced_and_compiled_and_its_results_keep_their_strides() -> None:
    given = torch.randn(4, 6, requires_grad=True)
    joint = inductor.joint_of(lambda x: (x.t().sin().cos(),), [given])
    values = [node.meta["val"] for node in joint.graph.find_nodes(op="placeholder")]
    forward, _ = inductor.min_cut(joint, values, num_fwd_outputs=1)
    with pytest.raises(RuntimeError, match="alias"):
        inductor.joint_of(lambda x: (x.view(6, 4),), [given])
    moved: list[int] = []

    def load(key: str, path: str, *args: Any, **kwargs: Any) -> Any:
        moved.append(inductor.moved_by_loops())
        raise KeyError

    with torch.no_grad():
        (result, *_) = inductor.compiled(forward, [given])([given])
        assert result.stride() == given.t().sin().cos().stride()
        with inductor.loading_modules(load), pytest.raises(Exception):  # noqa: B017
            inductor.compiled(forward, [given])
    assert moved == [2 * given.nbytes]


def test_values_that_are_kept_apart_have_kernels_of_their_own() -> None:
    given, found = torch.randn(64, 64), []
    for is_apart in (False, True):
        graph = make_fx(lambda x: [x.mm(x).sum(0) + x.mm(x.mm(x)).sum(0)], tracing_mode="fake")(given)
        inductor.keep_apart(graph, [node for node in graph.graph.nodes if is_apart and node.name.startswith("sum")])
        _, (code,) = run_and_get_code(inductor.compiled, graph, [given])
        found.append(re.findall(r"    (?:extern_kernels\.)?(mm|cpp_fused)\w*\(", code))
        assert "remat" not in code
    assert found == [["mm", "mm", "mm", "cpp_fused"], ["mm", "cpp_fused", "mm", "mm", "cpp_fused"]]


def test_a_forward_gives_out_the_weights_of_convolutions_in_their_own_layout() -> None:
    given, weight = torch.randn(2, 4, 8, 8), torch.randn(6, 4, 3, 3)
    found = []
    for keeps in (False, True):
        graph = make_fx(lambda x, w: [torch.conv2d(x, w), x, w], tracing_mode="fake")(given, weight)
        assert not keeps or inductor.keep_layouts(graph)
        compiled, _ = inductor.compiled_forward(graph, 1)
        with torch.no_grad():
            result, *inputs = compiled([given, weight])
        assert torch.equal(result, torch.conv2d(given, weight))
        found.append([each.data_ptr() == of.data_ptr() for each, of in zip(inputs, (given, weight), strict=True)])
    assert found == [[False, False], [True, True]]


def test_an_input_that_a_forward_writes_is_left_as_it_is() -> None:
    def forward(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        return [torch.conv2d(x, w), x, x.copy_(x + 1)]

    graph = make_fx(forward, tracing_mode="fake")(torch.randn(2, 4, 8, 8), torch.randn(6, 4, 3, 3))
    inductor.keep_layouts(graph)
    assert not graph.graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default)


def test_inductor_takes_a_mode_and_options() -> None:
    given = inductor.inductor_with(None, {"max_autotune": True})
    assert getattr(given, "compiler_name", None) == "inductor"


# What is gone


def halves_of_nothing() -> tuple[fx.GraphModule, fx.GraphModule]:
    graph = fx.Graph()
    graph.output(())
    return fx.GraphModule({}, graph), fx.GraphModule({}, graph)


GONE: dict[str, tuple[str, Callable[[], Any]]] = {
    "_inductor.codegen.simd.SIMDScheduling": (
        "predict what Inductor allocates",
        lambda: kernel_arguments.kernels_without_bodies().__enter__(),
    ),
    "_inductor.codegen.cpp": (
        "predict what Inductor allocates",
        lambda: kernel_arguments._scalar_loops().__enter__(),
    ),
    "_inductor.codegen.triton.TritonKernel": (
        "predict what Inductor allocates",
        lambda: kernel_arguments._needs_body([], None),
    ),
    "_inductor.loop_body.MemoryUsageType": (
        "predict what Inductor allocates",
        lambda: kernel_arguments._note_arguments([], None),
    ),
    "_C._get_dispatch_mode": ("see whether tensors are fake", training.fakes_are_on),
    "_C._push_on_torch_dispatch_stack": ("see what a saved node returns", lambda: Lean().__enter__()),
    "_C._pop_torch_dispatch_stack": ("see what a saved node returns", lambda: Lean().__exit__()),
    "_C._len_torch_dispatch_stack": ("see what a saved node returns", training.in_lean_mode),
    "overrides._get_current_function_mode_stack": (
        "name the modes that are on around a model",
        training.function_modes,
    ),
    "nn.modules.module": ("see hooks on all modules", training.hooks_on_all_modules),
    "utils._python_dispatch._disable_current_modes": ("copy buffers unseen", training.without_modes),
    "autograd.Variable._execution_engine": (
        "see the end of a backward",
        lambda: training.when_backward_ends(print),
    ),
    "utils.checkpoint._allowed_determinism_checks_to_fns": (
        "compare what is recomputed",
        lambda: training.compared_when_recomputed(id).__enter__(),
    ),
    "_C._autograd._unsafe_set_version_counter": ("undo writes", lambda: training.give_version(torch.ones(1), 1)),
    "_C._SetExcludeDispatchKeyGuard": ("see writes to what is kept", training.sharing_versions),
    "utils._python_dispatch.is_traceable_wrapper_subclass": (
        "find storages",
        lambda: training.is_wrapper(torch.ones(1)),
    ),
    "_C._current_autograd_node": ("tell whose backward an operator is", recording.autograd_node),
    "_C._autograd._top_saved_tensors_default_hooks": (
        "see which hooks take saved tensors",
        training.saved_tensors_are_hooked,
    ),
    "_C._autograd._get_sequence_nr": ("tell whose backward an operator is", recording.next_sequence_number),
    "_C._functorch.is_functorch_wrapped_tensor": (
        "find storages under torch.func",
        lambda: recording.unwrapped(torch.ones(1)),
    ),
    "_C.DisableTorchFunction": ("record a step quickly", recording.beside_functions),
    "_C._functorch.is_batchedtensor": (
        "know which operators `vmap` calls",
        lambda: recording.is_batched(torch.ones(1)),
    ),
    "_C._get_operation_overload": (
        "record composite functions as devices run them",
        lambda: recording._Composite("one_hot"),
    ),
    "_C._functorch.get_dynamic_layer_stack_depth": (
        "leave transforms of torch.func",
        lambda: recording.transforms_left().__enter__(),
    ),
    "_C._autograd._saved_tensors_hooks_is_enabled": (
        "leave transforms of torch.func",
        lambda: recording.transforms_left().__enter__(),
    ),
    **dict.fromkeys(
        ("_functorch.eager_transforms", "_C._enter_dual_level"),
        ("leave transforms of torch.func", lambda: recording.transforms_left().__enter__()),
    ),
    "_functorch.config": ("know whether results may be kept", inductor.keeps_joint_graphs),
    "_inductor.config": ("keep what planning found", inductor.settings_of_inductor),
    "_disable_dynamo": ("record beside a trace", lambda: recording.untraced(print)),
    "_prims_common.compute_elementwise_output_strides": (
        "lay results out as kernels do",
        lambda: recording.elementwise_strides(torch.ones(1)),
    ),
    "_prims_common.suggest_memory_format": (
        "lay results out as kernels do",
        lambda: recording.memory_format_of(torch.ones(1)),
    ),
    "_C._nn": ("find functions of layers by name", recording.builtin_functions),
    "_C._current_graph_task_id": ("tell one backward from another", recording.backward_number),
    "_VF": ("read lengths of packed sequences", recording.functions_of_lengths),
    "utils._foreach_utils._get_foreach_kernels_supported_devices": (
        "choose an optimizer's kernels",
        recording.devices_with_foreach,
    ),
    "optim.optimizer._foreach_supported_types": (
        "choose an optimizer's kernels",
        lambda: recording.foreach_takes(torch.Tensor, None).__enter__(),
    ),
    "_C._get_privateuse1_backend_name": (
        "choose an optimizer's kernels",
        lambda: recording.foreach_takes(torch.Tensor, None).__enter__(),
    ),
    "_dynamo.utils.counters": ("see whether a forward was traced", dynamo.frames_traced),
    "_subclasses.fake_tensor": (
        "keep its log off the screen",
        lambda: dynamo.tracebacks_unwritten().__enter__(),
    ),
    **dict.fromkeys(
        ("_dynamo.variables.tensor", "_guards", "fx.experimental.symbolic_shapes"),
        ("keep its log off the screen", lambda: dynamo.tracebacks_unwritten().__enter__()),
    ),
    "_dynamo.utils.graph_break_reasons": ("find the branch at which a graph broke", dynamo.graph_breaks),
    "_dynamo.error_on_graph_break": ("leave sizes open where no graph breaks for them", dynamo.without_breaks),
    "_higher_order_ops.triton_kernel_wrap.TritonKernelWrapperMutation": (
        "leave kernels in Triton out of a fake step",
        lambda: dynamo.traced_triton_launch(),
    ),
    "_dynamo.trace_rules._allowed_callable_ids": (
        "capture Functions that cannot be traced",
        lambda: dynamo.left_whole(()).__enter__(),
    ),
    "_dynamo.exc.TorchDynamoException": ("say why a model cannot be captured", dynamo.trace_error),
    "amp.autocast_mode._enter_autocast": ("tell where autocast holds in a captured graph", dynamo.autocast_marks),
    "_dynamo.config": ("capture whole graphs", dynamo.settings),
    "_dynamo.external_utils.is_compiling": ("capture the branches of eager mode", dynamo.predicates),
    "_dynamo.variables.TorchInGraphFunctionVariable": ("capture the branches of eager mode", dynamo.handlers),
    "_dynamo.trace_rules.get_torch_obj_rule_map": ("stand in for a function of torch", dynamo.know_functions),
    "_dynamo.variables.ConstantVariable": ("capture the branches of eager mode", lambda: dynamo.constant(1)),
    "_dynamo.variables.TensorVariable": ("capture the branches of eager mode", lambda: dynamo.is_of_tensor(1)),
    "_dynamo.variables.UserFunctionVariable": (
        "let a library choose its attention masks",
        lambda: dynamo.following(lambda tx, function, first: None).__enter__(),
    ),
    "_dynamo.variables.tensor.TensorVariable": (
        "iterate over tensors as eager mode does",
        lambda: dynamo.rows_unbound(lambda tx: True).__enter__(),
    ),
    "_dynamo.variables.builder": (
        "capture the same graphs of tensors with and without data",
        lambda: dynamo.numbers_unread(lambda tx: True).__enter__(),
    ),
    "fx.experimental.sym_node.SymNode": (
        "leave numbers open that operators are given",
        lambda: dynamo.floats_open(lambda tx: True).__enter__(),
    ),
    "_dynamo.symbolic_convert.tls": (
        "leave numbers open that operators are given",
        lambda: dynamo.floats_open(lambda tx: True).__enter__(),
    ),
    "utils._sympy.printers.PythonPrinter": (
        "leave numbers open that operators are given",
        lambda: dynamo.floats_open(lambda tx: True).__enter__(),
    ),
    "_dynamo.variables.misc.NumpyVariable": (
        "let numpy compute with numbers as eager mode does",
        lambda: dynamo.numpy_of_numbers(lambda tx: True).__enter__(),
    ),
    "_dynamo.variables.misc.RandomVariable": (
        "draw Python's random numbers as eager mode does",
        lambda: dynamo.draws_as_inputs(lambda tx: True).__enter__(),
    ),
    "_dynamo.variables.user_defined.call_random_fn": (
        "draw Python's random numbers as eager mode does",
        lambda: dynamo.draws_as_inputs(lambda tx: True).__enter__(),
    ),
    "_dynamo.variables.builder.wrap_fx_proxy": (
        "draw Python's random numbers as eager mode does",
        lambda: dynamo.draws_as_inputs(lambda tx: True).__enter__(),
    ),
    "_dynamo.guards.install_guard": (
        "draw Python's random numbers as eager mode does",
        lambda: dynamo.draws_as_inputs(lambda tx: True).__enter__(),
    ),
    "_C._dynamo.eval_frame.set_code_exec_strategy": (
        "capture a forward again after one that raised",
        lambda: dynamo.try_again(KeyError()),
    ),
    "_TorchCompileInductorWrapper": (
        "compile with Inductor's own options",
        lambda: inductor.inductor_with(None, {}),
    ),
    "nn.modules.transformer._detect_is_causal_mask": (
        "plan stacks of nn.TransformerEncoder and nn.TransformerDecoder",
        dynamo.compares_masks,
    ),
    "_dynamo.assume_constant_result": (
        "plan stacks of nn.TransformerEncoder and nn.TransformerDecoder",
        lambda: dynamo.as_constant(len),
    ),
    "_functorch.partitioners.min_cut_rematerialization_partition": (
        "choose what a compiled forward saves",
        lambda: inductor.min_cut(fx.GraphModule({}, fx.Graph()), ()),
    ),
    "_inductor.custom_graph_pass.CustomPartitionerFn": (
        "choose what a compiled forward saves",
        inductor.partitioner_class,
    ),
    "_inductor.custom_graph_pass.get_hash_for_files": ("choose what a compiled forward saves", inductor.hash_of),
    "_inductor.decomposition.select_decomp_table": (
        "compile without wasteful decompositions",
        inductor.chosen_decompositions,
    ),
    "_inductor.compile_fx.select_decomp_table": (
        "choose what a compiled forward saves",
        lambda: inductor.compiling_with(None, dict).__enter__(),
    ),
    "_functorch.config.force_non_lazy_backward_lowering": (
        "choose what a compiled forward saves",
        lambda: inductor.compiling_with(None, dict).__enter__(),
    ),
    "_inductor.codecache.FxGraphCache": ("compile halves as AOTAutograd will", inductor._HalfCompilers),
    "_inductor.output_code.CompiledFxGraphConstantsWithGm": (
        "compile halves as AOTAutograd will",
        inductor._HalfCompilers,
    ),
    "_dynamo.backends.common.AotAutograd": (
        "compile halves as AOTAutograd will",
        lambda: inductor._HalfCompilers().noted().__enter__(),
    ),
    "_inductor.graph.GraphLowering.decide_layout_opt": (
        "tell which inputs are copied",
        lambda: inductor.keep_layouts(fx.GraphModule({}, fx.Graph())),
    ),
    "_functorch.aot_autograd.aot_export_joint_simple": (
        "fuse groups of nodes",
        lambda: inductor.joint_of(lambda x: (x,), ()),
    ),
    "_inductor.compile_fx.compile_fx_inner": (
        "compile fused groups",
        lambda: inductor.compiled(fx.GraphModule({}, fx.Graph()), ()),
    ),
    "_functorch.partitioners.choose_saved_values_set": (
        "choose what a compiled forward saves",
        lambda: inductor.partition_saving(lambda *_: []),
    ),
    "_functorch.partitioners.solve_min_cut": (
        "choose what a compiled forward saves",
        lambda: inductor.partition_saving(lambda *_: []),
    ),
    "_inductor.codegen.triton.TritonOverrides": (
        "tell whether kernels draw the same numbers",
        lambda: compiled_draws.draws_alike(torch.device("cuda")),
    ),
    "_inductor.ir": ("draw random numbers again", compiled_draws._drawn_as.__wrapped__),
    "_inductor.lowering.fallbacks": (
        "tell which operators fuse",
        lambda: inductor.calls_library(fx.Graph().call_function(torch.ops.aten.add.Tensor)),
    ),
    "_inductor.graph.get_donated_idxs": (
        "predict what Inductor allocates",
        lambda: inductor.compiled_backward(*halves_of_nothing(), 0, {}),
    ),
    "_functorch._aot_autograd.graph_compile.collect_fw_donated_buffer_idxs": (
        "predict what Inductor allocates",
        lambda: inductor.compiled_backward(*halves_of_nothing(), 0, {}),
    ),
    "_dynamo.exc.ShortenTraceback": (
        "tell why a compiled step cannot be planned",
        lambda: dynamo.passed_on(RematError(), RematError),
    ),
    "_guards.CompileContext.current_compile_id": ("know which graphs a step has", dynamo.compilation),
    "nn.parallel.distributed.DistributedDataParallel._get_active_ddp_module": (
        "count the gradient buckets of DistributedDataParallel",
        dynamo.ddp_around,
    ),
    "_inductor.virtualized.V": ("know what fused groups read and write", inductor.moved_by_loops),
    "_inductor.codecache.PyCodeCache": ("predict what Inductor allocates", inductor.hands_modules_over),
    "_inductor.utils.copy_misaligned_inputs": ("predict what Inductor allocates", inductor.all_aligned),
    "_inductor.lowering.register_lowering": ("keep kernels apart", inductor._apart.__wrapped__),
    "_inductor.async_compile": ("predict what Inductor allocates", lambda: inductor.kernels_compiled_by(None)),
}


@pytest.mark.parametrize("path", GONE)
def test_what_is_gone_is_named_with_what_it_was_for(path: str, anew: None, monkeypatch: pytest.MonkeyPatch) -> None:
    purpose, ask = GONE[path]
    home, _, name = path.rpartition(".")
    door.internal(path, purpose)
    door.internal.cache_clear()
    found = door.internal(home, purpose) if home else torch
    monkeypatch.delattr(found, name)
    imported = importlib.import_module

    def found_elsewhere(name: str) -> Any:
        if name == f"torch.{path}":
            raise ImportError(name)
        return imported(name)

    monkeypatch.setattr(importlib, "import_module", found_elsewhere)
    said = rf"torch \S+ has no torch\.{path}, which remat needs to {purpose}; use torch 2\.11 to 2\.15\."
    with pytest.raises(RematError, match=said):
        ask()


def test_every_function_of_the_door_is_in_the_table() -> None:
    """By one of the names that it asks for."""
    asked = {
        name: set(re.findall(r'internal\(\s*f?"([^"]+)"', inspect.getsource(function)))
        for module in (training, recording, dynamo, inductor)
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__
    }
    assert [name for name, paths in asked.items() if paths and not paths & GONE.keys()] == []


def test_a_change_is_made_by_the_first_and_undone_by_the_last() -> None:
    told: list[str] = []

    @contextlib.contextmanager
    def change() -> Iterator[None]:
        told.append("made")
        yield
        told.append("undone")

    shared = Shared(change)
    for _ in range(2):
        with shared(), shared():
            assert told == ["made"]
        assert told == ["made", "undone"]
        told.clear()
