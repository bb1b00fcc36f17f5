"""What training relies on that torch keeps private does what it is relied on for; what is gone is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from remat import _torch
from remat.errors import RematError


class Seen(_torch.UnseenMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_fakes_are_seen() -> None:
    assert not _torch.fakes_are_on()
    with FakeTensorMode():
        assert _torch.fakes_are_on()
    assert not _torch.fakes_are_on()


def test_a_mode_that_is_pushed_sees_until_it_is_popped() -> None:
    seen = Seen()
    _torch.push_mode(seen)
    try:
        torch.ones(1).sin()
    finally:
        _torch.pop_mode()
    torch.ones(1).cos()
    assert "aten.sin.default" in seen.names and "aten.cos.default" not in seen.names


def test_without_modes_nobody_sees() -> None:
    with Seen() as seen:
        with _torch.without_modes():
            torch.ones(1).sin()
        torch.ones(1).cos()
    assert "aten.sin.default" not in seen.names and "aten.cos.default" in seen.names


@pytest.mark.parametrize("retain", [True, False])
def test_a_backward_says_whether_it_keeps_its_graph(retain: bool) -> None:
    found = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: found.append(_torch.keeps_graph()))
    y.sum().backward(retain_graph=retain)
    assert found == [retain]


def test_where_torch_does_not_say_the_graph_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._autograd, "_get_current_graph_task_keep_graph")
    assert _torch.keeps_graph()


def test_a_detached_tensor_shares_its_version_below_autograd() -> None:
    x = torch.ones(2)
    with Seen(), _torch.sharing_versions():
        y = x.detach()
    y.add_(1)
    assert x._version == y._version == 1


def test_wrappers_are_known() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    assert _torch.is_wrapper(TwoTensor(torch.ones(1), torch.ones(1))) and not _torch.is_wrapper(torch.ones(1))


@pytest.mark.filterwarnings("ignore")  # of Dynamo's own, about the break
def test_dynamo_tells_its_callback_its_frames_and_its_breaks() -> None:
    found: list[Any] = []

    @torch.compiler.disable
    def looked(x: torch.Tensor) -> torch.Tensor:
        found.append(_torch.frame_callback())
        return x

    def function(x: torch.Tensor) -> torch.Tensor:
        return looked(x.sin()).cos()

    frames, breaks = _torch.frames_traced(), len(_torch.graph_breaks())
    torch.compile(function, backend="eager")(torch.ones(2))
    assert _torch.frames_traced() > frames and len(_torch.graph_breaks()) > breaks
    assert len(found) == 1


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
        found.extend(_torch.own_function(node.target) for node in graph_module.graph.nodes)
        return graph_module

    for left in ([Doubled], []):
        torch._dynamo.reset()
        with _torch.left_whole(left):
            torch.compile(lambda x: Doubled.apply(x).cos(), backend=backend)(torch.ones(2, requires_grad=True))
    assert [function for function in found if function is not None] == [Doubled]


def test_what_is_gone_is_named_with_what_it_was_for() -> None:
    with pytest.raises(RematError, match=r"has no torch\._C\._gone, which remat needs to tell time; use torch 2\.11"):
        _torch._internal("_C._gone", "tell time")
