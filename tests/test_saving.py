"""Whatever a saved node returns is given back in the recomputation, and none of its operators runs again.

The operators here are registered for the tests: what flash attention's schema has (tensors, integers, a random state)
and what schemas may have besides (lists, None, views of arguments, writes). Each draws random numbers, so that one run
too many is seen in the gradients and in the next random number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from remat.capture.schemas import relabels
from remat.errors import RematError
from remat.execution.eager import region_tape, saving
from remat.execution.eager.region_tape import Counts, RewriteOptions
from remat.execution.eager.rewrite import CallRegion, rewrite

SEEDED = (torch.Tag.nondeterministic_seeded,)
RATE = 0.5
calls: list[str] = []  # operators of these tests that ran


def mask_of(x: Tensor) -> Tensor:
    return (torch.rand_like(x) > RATE).to(x.dtype) / (1 - RATE)


@dataclasses.dataclass(frozen=True)
class Operator:
    """A custom operator.

    schema   without its name
    forward  its results
    mask     the position of its random mask among them
    use      how a model calls it: a tensor to a tensor
    """

    schema: str
    forward: Callable[..., Any]
    mask: Callable[[Any], Tensor]
    use: Callable[[Any, Tensor], Tensor]


def _mixed(x: Tensor) -> Any:
    mask = mask_of(x)
    return x * mask, mask, 3


def _optional(x: Tensor) -> Any:
    mask = mask_of(x)
    return x * mask, None, mask, True, 0.5


def _listed(x: Tensor) -> Any:
    mask = mask_of(x)
    return [x * mask, mask]


def _list_and_tensor(x: Tensor) -> Any:
    mask = mask_of(x)
    return [x * mask, mask], x * 2, 7


def _twice(x: Tensor) -> Any:
    mask = mask_of(x)
    return mask, mask


def _alias_beside(x: Tensor) -> Any:
    return x.view(-1), mask_of(x)


OPERATORS = {
    "tensors-and-an-integer": Operator(
        "(Tensor x) -> (Tensor, Tensor, SymInt)", _mixed, lambda out: out[1], lambda op, x: op(x)[0]
    ),
    "none-a-bool-and-a-float": Operator(
        "(Tensor x) -> (Tensor, Tensor?, Tensor, bool, float)", _optional, lambda out: out[2], lambda op, x: op(x)[0]
    ),
    "list": Operator("(Tensor x) -> Tensor[]", _listed, lambda out: out[1], lambda op, x: op(x)[0]),
    "list-and-tensor": Operator(
        "(Tensor x) -> (Tensor[], Tensor, int)", _list_and_tensor, lambda out: out[0][1], lambda op, x: op(x)[0][0]
    ),
    "one-tensor-twice": Operator(
        "(Tensor x) -> (Tensor, Tensor)", _twice, lambda out: out[0], lambda op, x: op(x.detach())[1] * x
    ),
    "view-beside-a-new-one": Operator(
        "(Tensor(a) x) -> (Tensor(a), Tensor)",
        _alias_beside,
        lambda out: out[1],
        lambda op, x: _product(op(x.detach()), x),
    ),
    "view-that-the-schema-conceals": Operator(
        "(Tensor x) -> (Tensor, Tensor)", _alias_beside, lambda out: out[1], lambda op, x: _product(op(x.detach()), x)
    ),
}


def _product(pair: Any, x: Tensor) -> Tensor:
    return pair[0].view_as(x) * pair[1] * x


def _registered(name: str, operator: Operator) -> Any:
    """The operator, with an autograd formula where its first result is differentiable."""
    qualified = f"remat_saving::{name.replace('-', '_')}"
    if hasattr(torch.ops.remat_saving, qualified.partition("::")[2]):
        return getattr(torch.ops.remat_saving, qualified.partition("::")[2]).default
    torch.library.define(qualified, operator.schema, tags=SEEDED)

    def counted(*args: Any) -> Any:
        calls.append(name)
        return operator.forward(*args)

    torch.library.impl(qualified, "CPU", counted)
    if "detach" not in operator.use.__code__.co_names:
        torch.library.register_autograd(qualified, _gradient(operator), setup_context=_keep(operator))
    return getattr(torch.ops.remat_saving, qualified.partition("::")[2]).default


def _keep(operator: Operator) -> Callable[..., None]:
    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(operator.mask(output))

    return setup


def _gradient(operator: Operator) -> Callable[..., Tensor]:
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        first = gradients[0]
        return (first[0] if isinstance(first, (list, tuple)) else first) * ctx.saved_tensors[0]

    return backward


def node(use: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`use` under a name by which a node is known to draw random numbers."""

    def dropout(x: Tensor) -> Tensor:
        return use(x)

    return dropout


def graph_around(middle: Callable[[Tensor], Tensor]) -> fx.GraphModule:
    """sin, `middle`, dropout, exp"""
    graph = fx.Graph()
    value = graph.placeholder("x")
    for function, rest in ((torch.sin, ()), (middle, ()), (F.dropout, (RATE, True)), (torch.exp, ())):
        value = graph.call_function(function, (value, *rest))
    graph.output(value)
    return fx.GraphModule({}, graph)


def outcome(function: Callable[[Tensor], Tensor], backwards: int = 1) -> list[Any]:
    """Result, gradient and the next random number."""
    torch.manual_seed(0)
    x = torch.ones(4, 250, requires_grad=True)
    y = function(x)
    for left in reversed(range(backwards)):
        y.sum().backward(retain_graph=left > 0)
    assert x.grad is not None
    return [y.tolist(), x.grad.tolist(), torch.rand(1).item()]


SAVING = CallRegion(0, 3, saved=frozenset({1}), random=frozenset({2}))


def saving_it(middle: Callable[[Tensor], Tensor], *, observe: bool = False) -> tuple[fx.GraphModule, Counts]:
    counts = Counts()
    return rewrite(graph_around(middle), [SAVING], RewriteOptions(counts, observe)), counts


@pytest.fixture(autouse=True)
def no_calls() -> Iterator[None]:
    calls.clear()
    yield


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("name", OPERATORS)
def test_a_saved_operator_is_given_back_as_it_returned(name: str, backwards: int) -> None:
    operator = _registered(name, OPERATORS[name])
    middle = node(lambda x: OPERATORS[name].use(operator, x))
    expected = outcome(graph_around(middle), backwards)
    assert len(calls) == 1
    rewritten, counts = saving_it(middle, observe=True)
    assert outcome(rewritten, backwards) == expected
    assert len(calls) == 2
    assert counts.recomputed_nodes == 3 * backwards  # sin, dropout, exp


def test_a_saved_operator_that_runs_again_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor that neither keeps nor gives back, as this one did with operators that return an integer too."""
    name = "tensors-and-an-integer"
    operator = _registered(name, OPERATORS[name])
    monkeypatch.setattr(saving.Save, "__torch_dispatch__", lambda self, f, t, a=(), k=None: f(*a, **(k or {})))
    monkeypatch.setattr(saving.Replay, "__torch_dispatch__", lambda self, f, t, a=(), k=None: f(*a, **(k or {})))
    rewritten, counts = saving_it(node(lambda x: operator(x)[0]), observe=True)
    outcome(rewritten)
    assert len(calls) == 2
    assert counts.recomputed_nodes == 4


# Flash attention's own schema

FLASH = "remat_saving::flash"
FLASH_SCHEMA = str(torch.ops.aten._scaled_dot_product_flash_attention.default._schema)


def _flash(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *_: Any, **__: Any) -> Any:
    """Unfused, and the mask is drawn from a state that is returned: as on a GPU, nothing of the mask is kept."""
    calls.append("flash")
    state = torch.get_rng_state()
    probabilities = (q @ k.mT).softmax(-1)
    out = (probabilities * _kept_weights(probabilities, dropout_p)) @ v
    none, unused = torch.empty(0), torch.empty(0)
    return out, probabilities.amax(-1), none, none.clone(), q.shape[2], k.shape[2], state, unused, torch.empty(0)


def _kept_weights(like: Tensor, dropout_p: float) -> Tensor:
    return (torch.rand_like(like) >= dropout_p).to(like.dtype) / (1 - dropout_p)


def _flash_backward(ctx: Any, gradient: Tensor, *_: Any) -> Any:
    q, k, v, state = ctx.saved_tensors
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.set_rng_state(state)
        inputs = [t.detach().requires_grad_() for t in (q, k, v)]
        probabilities = (inputs[0] @ inputs[1].mT).softmax(-1)
        out = (probabilities * _kept_weights(probabilities, ctx.rate)) @ inputs[2]
        found = torch.autograd.grad(out, inputs, gradient)
    return (*found, None, None, None)  # of what is positional


def _flash_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:3], output[6])
    ctx.rate = inputs[3]
    ctx.mark_non_differentiable(*(t for t in output[1:] if isinstance(t, Tensor)))


def flash() -> Any:
    if not hasattr(torch.ops.remat_saving, "flash"):
        torch.library.define(FLASH, FLASH_SCHEMA[FLASH_SCHEMA.index("(") :], tags=SEEDED)
        torch.library.impl(FLASH, "CPU", _flash)
        torch.library.register_autograd(FLASH, _flash_backward, setup_context=_flash_context)
    return torch.ops.remat_saving.flash.default


@pytest.mark.parametrize("rate", [0.0, 0.25])
def test_saved_attention_with_flash_s_schema_runs_once(rate: float) -> None:
    """Gradients and the next random number are bitwise those of the untouched step, dropout included."""

    def attention(x: Tensor) -> Tensor:
        q = x.view(2, 2, 25, 10)
        return flash()(q, q.flip(2), q * 2, rate)[0].reshape(x.shape)

    middle = node(attention)
    expected = outcome(graph_around(middle))
    rewritten, counts = saving_it(middle, observe=True)
    assert outcome(rewritten) == expected
    assert calls == ["flash", "flash"]  # one each
    assert counts.recomputed_nodes == 3


# Nodes of several operators, that write


def _out(x: Tensor) -> Tensor:
    with torch.no_grad():
        mask = torch.empty_like(x)
        torch.rand(x.shape, out=mask)
        torch.round(mask, out=mask)
    return x * mask


def _foreach(x: Tensor) -> Tensor:
    first, second = torch._foreach_mul([x, x.cos()], 2.0)
    with torch.no_grad():
        masks = [torch.rand_like(x), torch.rand_like(x)]
        torch._foreach_add_(masks, 1.0)
        torch._foreach_mul_(masks, masks[::-1])
    return first * masks[0] + second * masks[1]


def _cast_and_written(x: Tensor) -> Tensor:
    """A write to a cast, which is made again, and one to a kept tensor, which is not."""
    return x.to(torch.float64).detach().mul_(2).to(x.dtype) * torch.rand_like(x).add_(1) * x


def _written_and_cast(x: Tensor) -> Tensor:
    """Casts of a result before and after writes to it, as in `quantile`, and a cast of such a cast."""
    ranks = 10 * x.detach().cos()
    first = ranks.to(torch.int64)
    second = first.to(torch.float64)
    third = ranks.ceil_().to(torch.int64)
    fourth = ranks.mul_(2).to(torch.float64)
    below, above = second.to(x.dtype), third.to(x.dtype)  # the products keep these casts for backward
    return x * below * (x * above) * (x * fourth.to(x.dtype)) * torch.rand_like(x)


@torch.library.custom_op("remat_saving::fill", mutates_args=("scratch",), tags=SEEDED)
def _fill(x: Tensor, scratch: Tensor) -> Tensor:
    scratch.copy_(torch.rand_like(x))
    return torch.rand_like(x)


@torch.library.custom_op("remat_saving::only_fill", mutates_args=("scratch",), tags=SEEDED)
def _only_fill(scratch: list[Tensor]) -> None:
    for tensor in scratch:
        tensor.copy_(torch.rand_like(tensor))


def _custom(x: Tensor) -> Tensor:
    scratch = torch.empty_like(x)
    return _fill(x.detach(), scratch) * scratch * x


def _custom_list(x: Tensor) -> Tensor:
    scratch = [torch.empty_like(x), torch.empty_like(x)]
    _only_fill(scratch)
    return scratch[0] * scratch[1] * x


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda x: F.rrelu(x - 0.8, training=True), id="rrelu"),  # returns one tensor, writes another
        pytest.param(_out, id="out"),
        pytest.param(_foreach, id="foreach"),
        pytest.param(_cast_and_written, id="cast-and-written"),
        pytest.param(_written_and_cast, id="written-and-cast"),
        pytest.param(lambda x: torch.quantile(x, 0.3, dim=-1, keepdim=True) * F.dropout(x), id="quantile"),
        pytest.param(_custom, id="custom-operator"),
        pytest.param(_custom_list, id="custom-operator-without-a-result"),
        pytest.param(lambda x: F.dropout(x.to(torch.bfloat16)).to(x.dtype), id="casts"),
        pytest.param(lambda x: torch.ops.aten._unsafe_view(x.mm(x.mT), [2, 8]).sum() * F.dropout(x), id="unsafe-view"),
    ],
)
@pytest.mark.parametrize("backwards", [1, 2])
def test_what_a_saved_node_writes_is_final(use: Callable[[Tensor], Tensor], backwards: int) -> None:
    """A write that is left out advances versions all the same, and must not be taken for somebody else's."""
    middle = node(use)
    rewritten, counts = saving_it(middle, observe=True)
    for step in (1, 2):
        assert outcome(rewritten, backwards) == outcome(graph_around(middle), backwards)
        assert counts.recomputed_nodes == 3 * backwards * step


VIEWS_IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "as_strided_": lambda x: F.dropout(x).as_strided_((4, 125), (250, 2)),
    "squeeze_": lambda x: F.dropout(x.unsqueeze(1)).squeeze_(1),
    "swapaxes_": lambda x: F.dropout(x).swapaxes_(0, 1),
    "t_": lambda x: F.dropout(x).t_(),
    "transpose_": lambda x: F.dropout(x).transpose_(0, 1),
    "unsqueeze_": lambda x: F.dropout(x).unsqueeze_(0),
    "after a write": lambda x: F.dropout(x).mul_(2).t_().add_(1),
    "pooled": lambda x: F.adaptive_avg_pool2d(
        F.dropout(x).view(4, 25, 5, 2).contiguous(memory_format=torch.channels_last), 1
    ),
}


@pytest.mark.parametrize("use", VIEWS_IN_PLACE.values(), ids=VIEWS_IN_PLACE.keys())
@pytest.mark.parametrize("backwards", [1, 2])
def test_a_saved_node_gives_back_what_it_made_a_view_in_place(use: Callable[[Tensor], Tensor], backwards: int) -> None:
    """The sizes and strides of what is kept are those from before."""
    middle = node(use)
    rewritten, counts = saving_it(middle, observe=True)
    for step in (1, 2):
        assert outcome(rewritten, backwards) == outcome(graph_around(middle), backwards)
        assert counts.recomputed_nodes == 3 * backwards * step


def test_what_changes_sizes_and_strides_but_not_data() -> None:
    found: set[str] = set()
    for name in filter(lambda name: name.startswith("aten::"), torch._C._dispatch_get_all_op_names()):
        packet, _, overload = name.removeprefix("aten::").partition(".")
        func = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if func is not None and relabels(func):
            found.add(packet)
    views = {"as_strided_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_"}
    assert found == {*views, "detach_"}


# Nodes that need watching only once

WEIGHT, BIAS = torch.randn(250, 250, generator=torch.Generator().manual_seed(1)), torch.ones(250)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An entry for every call of a saved node that is watched."""
    found: list[str] = []

    class Watching(saving.Save):
        def __init__(self) -> None:
            super().__init__()
            found.append("watched")

    monkeypatch.setattr(region_tape, "Save", Watching)
    return found


@pytest.mark.parametrize(
    ("use", "times"),
    [
        pytest.param(lambda x: F.linear(x, WEIGHT), 1, id="linear"),
        pytest.param(lambda x: F.linear(x.view(2, 2, 250), WEIGHT).flatten(0, 1), 1, id="linear-of-a-sequence"),
        pytest.param(lambda x: F.linear(x.view(2, 2, 250), WEIGHT, BIAS).flatten(0, 1), 1, id="linear-with-bias"),
        pytest.param(F.gelu, 1, id="gelu"),
        pytest.param(lambda x: x + x.sum(), 3, id="two-results"),
        pytest.param(lambda x: F.layer_norm(x, (250,)), 3, id="statistics"),
        pytest.param(F.dropout, 3, id="dropout"),
        pytest.param(lambda x: (x * 2).double().float(), 3, id="casts"),
        pytest.param(lambda x: torch.mul(x, 2).add_(1), 3, id="write"),
        pytest.param(lambda x: torch.mul(x, 2).t_(), 3, id="view-in-place"),
        pytest.param(lambda x: x.view(4, 250), 3, id="view"),
    ],
)
@pytest.mark.parametrize("backwards", [1, 2])
def test_a_node_that_keeps_its_value_alone_is_watched_once(
    use: Callable[[Tensor], Tensor], times: int, backwards: int, watched: list[str]
) -> None:
    rewritten, counts = saving_it(node(use), observe=True)
    for step in (1, 2, 3):
        assert outcome(rewritten, backwards) == outcome(graph_around(node(use)), backwards)
        assert counts.recomputed_nodes == 3 * backwards * step
    assert len(watched) == times


def test_another_size_another_mode_and_autocast_are_watched_anew(watched: list[str]) -> None:
    rewritten, _ = saving_it(node(lambda x: F.linear(x, WEIGHT)))
    x = torch.ones(4, 250, requires_grad=True)
    for given, expected in ((x, 1), (x, 1), (x[:2], 2), (x[:2], 2), (x.detach(), 3), (x, 3)):
        rewritten(given)
        assert len(watched) == expected
    with torch.autocast("cpu", torch.bfloat16):
        for expected in (4, 5):
            rewritten(x).sum().backward()
            assert len(watched) == expected


# What is refused by name


@pytest.mark.parametrize(
    ("use", "message"),
    [
        pytest.param(
            lambda x: x.detach().mul_(2) * x, "mul_.*writes to a value that its node did not make", id="older"
        ),
        pytest.param(
            lambda x: _fill(x.detach(), x.to(torch.float64)).to(x.dtype) * x,
            "fill.*returns a value and writes to a cast besides",
            id="cast",
        ),
    ],
)
def test_a_write_that_can_be_neither_left_out_nor_repeated_is_refused(
    use: Callable[[Tensor], Tensor], message: str
) -> None:
    with pytest.raises(RematError, match=message):
        outcome(saving_it(node(use))[0])


def test_changing_a_saved_output_before_backward_is_refused() -> None:
    """Untouched this is legal: nobody's backward needs the sum. The recomputation would begin with the changed one."""
    held: list[Tensor] = []

    def plus_one(x: Tensor) -> Tensor:
        held.append(x + 1)
        return held[-1]

    x = torch.ones(4, 250, requires_grad=True)
    rewritten, _ = saving_it(node(plus_one))
    for _ in range(2):  # watched, and from a recipe
        y = rewritten(x)
        with torch.no_grad():
            held[-1].mul_(3)
        with pytest.raises(RematError, match=r"aten\.add.*was changed in place before its backward"):
            y.sum().backward()


def test_a_node_that_asks_for_other_operators_than_in_forward_is_refused() -> None:
    turns = iter((torch.cos, torch.tanh))
    with pytest.raises(RematError, match=r"ran aten\.cos\.default in forward, and asks for aten\.tanh\.default"):
        outcome(saving_it(node(lambda x: next(turns)(x)))[0])


def test_a_second_backward_without_retain_graph_is_refused() -> None:
    rewritten, _ = saving_it(node(F.dropout))
    x = torch.ones(4, 250, requires_grad=True)
    y = rewritten(x)
    y.sum().backward()
    with pytest.raises(RuntimeError, match=r"a second time|recompute twice"):
        y.sum().backward()
