"""Inductor's allocations are known without compiling a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from remat._torch.inductor import chosen_decompositions, compiled, joint_of, min_cut
from remat.compiled.peak import Halves, halves
from remat.errors import RematError

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo", "one_thread"),
    pytest.mark.filterwarnings("ignore"),  # of Inductor's own
]

ROWS, WIDTH = 64, 32
MATRIX = 4 * ROWS * WIDTH


def needs() -> Halves:
    """Return the bytes of a chain of pointwise functions, a product, and a sum."""
    given = [torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(WIDTH, WIDTH, requires_grad=True)]
    joint = joint_of(lambda x, weight: ((x.sin().exp().cos() @ weight).square().sum(),), given)
    inputs = [node.meta["val"] for node in joint.graph.find_nodes(op="placeholder")]
    forward, backward = min_cut(joint, inputs, num_fwd_outputs=1)
    return halves(forward, backward, 1)


def test_fused_values_take_nothing_and_saved_ones_are_kept() -> None:
    """One fused value and the product's result are made; the loss is a number."""
    found = needs()
    assert found.forward == 2 * MATRIX + 4
    assert 2 * MATRIX <= found.kept <= found.forward < found.backward


def test_no_kernel_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.codecache import CppCodeCache

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a kernel is compiled")

    found = needs()  # asks once what vectors this machine has, by compiling
    monkeypatch.setattr(CppCodeCache, "load_async", refuse)
    assert needs() == found


def test_a_torch_whose_code_is_not_known_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import codecache

    monkeypatch.delattr(codecache.PyCodeCache, "load_by_key_path")
    with pytest.raises(RematError, match=r"has no PyCodeCache.load_by_key_path: what its Inductor allocates"):
        needs()


def test_generated_code_of_another_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import codecache

    monkeypatch.setattr(codecache.PyCodeCache, "write", _without("reinterpret_tensor = ", codecache.PyCodeCache.write))
    with pytest.raises(Exception, match=r"RematError: .* generates modules of another form"):
        needs()


def _without(text: str, write: Callable[..., tuple[str, str]]) -> Any:
    return lambda source, *args: write(source.replace(text, "renamed = "), *args)


@pytest.mark.cuda
def test_no_fused_kernel_is_benchmarked_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark takes a buffer as large as the device's cache, and its times choose the order of sums."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a kernel was benchmarked")

    monkeypatch.setattr(CachingAutotuner, "bench", refuse)

    def normed(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.nn.functional.layer_norm(x, (768,), w).tanh(), x.sum(0), x.exp().t().contiguous()

    given = [torch.randn(2048, 768, device="cuda"), torch.randn(768, device="cuda")]
    graph = make_fx(normed, chosen_decompositions(), tracing_mode="fake")(*given)
    with FakeTensorMode():
        like = [torch.empty(value.shape, device="cuda") for value in given]
    with torch.no_grad():
        run = compiled(graph, like)
    assert [result.shape for result in run(list(given))] == [(2048, 768), (768,), (768, 2048)]
