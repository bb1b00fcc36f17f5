"""A model's state is put back, whatever a forward changed and wherever it is kept; and what changed is named."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import logging
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils import parametrizations, parametrize

import tests.helpers_with_state
from remat.capture import model_state
from remat.capture.code_names import globals_in, modules_named
from remat.capture.copies import copied
from remat.capture.generators import generators_kept as kept
from remat.capture.holders import GROWN, NUMBER, OTHER, TENSOR, StateLost, _is_installed
from remat.capture.kept_tensors import KeptTensor
from remat.capture.model_state import (
    LARGEST_BYTES,
    MOST_NAMED_BYTES,
    MOST_NAMED_OBJECTS,
    ModelState,
    Numbers,
    SharedState,
)
from remat.host.weights import _load
from remat.workload.workload import StepModule
from tests import helpers_with_state
from tests.helpers_with_state import HELPERS

COUNT: dict[str, Any] = {"calls": 0}
RANDOM = np.random.default_rng(0)


class Slotted:
    __slots__ = ("calls", "unset")

    def __init__(self) -> None:
        self.calls = 0


@dataclasses.dataclass
class Plain:
    calls: int = 0
    past: list[torch.Tensor] = dataclasses.field(default_factory=list)


class Model(nn.Module):
    """Keeps something in every place that there is."""

    seen: set[int] = set()  # noqa: RUF012
    calls = 0
    buffer: torch.Tensor
    layer: Any
    plain: Any
    turns: Any
    logger: Any
    optimizer: Any
    generators: Any
    helper: Any

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.register_buffer("buffer", torch.full((2,), 3.0))
        self.plain, self.nothing, self.steps, self.rate = torch.zeros(2), None, 0, 0.5
        self.tied = self.plain
        self.table: dict[Any, Any] = {("a", 1): torch.zeros(1), "inner": {"deep": [0]}}
        self.pair = (torch.zeros(1), Plain())
        self.queue, self.ids = collections.deque([torch.zeros(1)], maxlen=2), {1}
        self.slotted, self.array, self.turns = Slotted(), np.zeros(3), itertools.count()
        self.listed, self.unset = iter([1, 2]), float("nan")
        self.generators = [torch.Generator(), random.Random(0), np.random.default_rng(0), np.random.RandomState(0)]
        self.name = types.SimpleNamespace(text="before")
        count = 0

        def counted() -> int:
            nonlocal count
            count += 1
            return count

        self.counted = counted
        self.handle = self.layer.register_forward_hook(self.note)

    def note(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.table["output"] = output


CHANGES: dict[str, tuple[Callable[[Model], Any], dict[str, str]]] = {
    "attribute": (lambda m: setattr(m, "nothing", torch.ones(1)), {"nothing": TENSOR}),
    "number": (lambda m: setattr(m, "steps", 1), {"steps": NUMBER}),
    "float": (lambda m: setattr(m, "rate", 0.25), {"rate": NUMBER}),
    "number from nan": (lambda m: setattr(m, "unset", 0.5), {"unset": NUMBER}),
    "new attribute": (lambda m: setattr(m, "new", 1), {"new": OTHER}),
    "lost attribute": (lambda m: delattr(m, "rate"), {"rate": OTHER}),
    "in place": (lambda m: m.plain.add_(1), {"plain": TENSOR}),
    "buffer in place": (lambda m: m.buffer.add_(1), {"buffer": TENSOR}),
    "buffer resized": (lambda m: m.buffer.resize_(3).fill_(1), {"buffer": TENSOR}),
    "buffer takes the storage of another": (
        lambda m: setattr(m.buffer, "data", m.plain.add_(1)),
        {"buffer": TENSOR, "plain": TENSOR},
    ),
    "buffer": (lambda m: setattr(m, "buffer", torch.ones(2)), {"buffer": TENSOR}),
    "new buffer": (lambda m: m.register_buffer("second", torch.ones(2)), {"second": TENSOR}),
    "statistics": (
        lambda m: m.layer[1](torch.ones(3, 2)),
        {f"layer.1.{name}": TENSOR for name in ("running_mean", "running_var", "num_batches_tracked")},
    ),
    "key": (lambda m: m.table.update(new=1), {"table['new']": OTHER}),
    "deep": (lambda m: m.table["inner"]["deep"].__setitem__(0, 5), {"table['inner']['deep']": NUMBER}),
    "within a tuple": (lambda m: m.pair[0].add_(1), {"pair": TENSOR}),
    "object": (lambda m: setattr(m.pair[1], "calls", 1), {"pair.calls": NUMBER}),
    "list grows": (lambda m: m.pair[1].past.append(torch.ones(1)), {"pair.past": GROWN}),
    "queue": (lambda m: m.queue.extend([torch.ones(1), torch.ones(1)]), {"queue": TENSOR}),
    "set": (lambda m: m.ids.add(2), {"ids": OTHER}),
    "slot": (lambda m: setattr(m.slotted, "calls", 1), {"slotted.calls": NUMBER}),
    "new slot": (lambda m: setattr(m.slotted, "unset", 1), {"slotted.unset": OTHER}),
    "array": (lambda m: m.array.__iadd__(1), {"array": NUMBER}),
    "iterator": (lambda m: next(m.turns), {"turns": NUMBER}),
    "iterator of a list": (lambda m: next(m.listed), {"listed": OTHER}),
    "closure": (lambda m: m.counted(), {"counted.count": NUMBER}),
    "namespace": (lambda m: setattr(m.name, "text", "after"), {"name.text": NUMBER}),
    "hook's": (lambda m: m.layer(torch.ones(3, 2)) if m.eval() else None, {}),
    "new hook": (lambda m: m.layer[0].register_forward_hook(print), {}),
    "mode": (lambda m: m.layer.eval(), {f"layer{name}.training": NUMBER for name in ("", ".0", ".1")}),
    "class": (lambda m: setattr(Model, "calls", 1), {"Model.calls": NUMBER}),
    "class's set": (lambda m: Model.seen.add(1), {"Model.seen": OTHER}),
    "global": (lambda m: counts(), {f"{__name__}.COUNT['calls']": NUMBER}),
}


def counts() -> None:
    COUNT["calls"] += 1


def scaled(x: torch.Tensor, by: torch.Tensor = torch.ones(2), *, plus: Any = torch.zeros(2)) -> torch.Tensor:  # noqa: B008
    return x * by + plus


class Constants:
    shift = torch.zeros(2)


@functools.lru_cache(maxsize=8)
def positions(count: int) -> torch.Tensor:
    return torch.arange(count)


HALVED = functools.partial(torch.mul, torch.full((2,), 0.5))


class Naming(nn.Module):
    """Names tensors that no module holds: by a default, a partial function, a class and a cached function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return HALVED(scaled(x)) + Constants.shift + positions(2)


def tensors_named() -> list[torch.Tensor]:
    assert scaled.__defaults__ and scaled.__kwdefaults__
    return [scaled.__defaults__[0], scaled.__kwdefaults__["plus"], HALVED.args[0], Constants.shift]


def test_tensors_that_code_names_are_fakes_while_borrowed_and_itself_afterwards() -> None:
    model, before, mode = Naming(), tensors_named(), FakeTensorMode()
    shared, real = SharedState(model, mode.from_tensor), positions(2)
    for _ in range(2):
        with shared.borrowed(), mode:
            assert all(isinstance(each, FakeTensor) for each in (*tensors_named(), model(torch.zeros(2)), positions(2)))
        assert all(now is then for now, then in zip(tensors_named(), before, strict=True))
        assert not isinstance(positions(2), FakeTensor)
    assert torch.equal(positions(2), real)


def kept_apart() -> None:
    raise AssertionError(NEVER_READ, "runs in an evaluation alone")


NEVER_READ = torch.ones(3)


class Evaluating(Naming):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            kept_apart()
        return super().forward(x)


def test_tensors_of_functions_that_are_named_are_told_apart_from_those_of_the_model() -> None:
    model: Any = Evaluating()
    model.own = torch.zeros(1)
    state = ModelState(model, data=False)
    assert {id(each) for each in (NEVER_READ, *tensors_named()[:2])} <= {id(each) for each in state.named}
    assert {id(each) for each in (model.own, HALVED.args[0])} == {id(each) for each in state.unregistered}


class Helped(nn.Module):
    """Names a helper function by `way`, and the helper alone names what it keeps."""

    def __init__(self, way: Callable[[], Any]) -> None:
        super().__init__()
        self.way = way

    def forward(self) -> torch.Tensor:
        return torch.as_tensor(self.way()).clone()


def counts_in_a_module() -> int:
    helpers_with_state.CALLS += 1
    return helpers_with_state.CALLS


WAYS: dict[str, Callable[[], Any]] = {
    **HELPERS,
    "function of a module": lambda: helpers_with_state.dictionary(),
    "number of a module": lambda: counts_in_a_module(),
    "function of a module in a package": lambda: tests.helpers_with_state.dictionary(),
}


@pytest.mark.parametrize("name", WAYS)
def test_what_a_helper_keeps_is_put_back(name: str) -> None:
    model = Helped(WAYS[name])
    before, first = ModelState(model), model()
    has_changed = bool(before.changes()) or "generator" in name
    before.put_back()
    assert before.changes() == {}
    again = model()
    before.put_back()
    assert has_changed and torch.equal(first, again) and not before.only_once


FAR: list[Any] = []


def test_what_is_too_much_to_be_copied_is_known_and_a_long_list_is_data(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Helped(lambda: far())
    monkeypatch.setattr(f"{__name__}.FAR", [torch.zeros(2**20) for _ in range(17)])  # of 4 MiB each
    assert ModelState(model).only_once == [f"what is reached from {__name__}.FAR"]
    assert ModelState(model, data=False).only_once == []
    assert sum(tensor.nbytes for tensor in ModelState(model).named) <= MOST_NAMED_BYTES
    monkeypatch.setattr(f"{__name__}.FAR", [(1, 2)] * (MOST_NAMED_OBJECTS + 1))
    state = ModelState(model)
    assert state.only_once == [] and all(len(holder.was) <= MOST_NAMED_OBJECTS for holder in state.holders)
    monkeypatch.setattr(f"{__name__}.FAR", [[[i] for i in range(1000)] for _ in range(9)])
    assert ModelState(model).only_once == []


def test_tensors_that_helpers_name_are_not_copied_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.FAR", [torch.zeros(4), np.zeros(4), 1])
    state = ModelState(Helped(lambda: far()), named=False)
    assert [id(each) for each in state.named] == [id(FAR[0])] and not any(t.has_copy_beside for t in state._tensors)
    FAR[0].add_(1)
    FAR[2] = 2
    state.put_back()
    assert FAR[0].sum() == 4 and FAR[2] == 1 and state.only_once == []


class Raising(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        return self[name]

    def items(self) -> Any:
        raise RuntimeError


class RaisingList(list[int]):
    def __iter__(self) -> Any:
        raise RuntimeError


class Odd:
    table = Raising(n=1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(4).to_sparse(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: Odd,
        lambda: Raising(n=1),
        lambda: RaisingList([1]),
    ],
    ids=["sparse", "nested", "attribute that raises", "items that raise", "iteration that raises"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_odd_objects_that_helpers_name_are_read(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.FAR", [make()])
    state = ModelState(Helped(lambda: far()))
    assert state.changes() == {} and ModelState(Helped(lambda: far()), data=False).changes() == {}
    state.put_back()


def test_blocked_imports_and_functions_of_many_names_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "remat_blocked", None)
    names = "".join(f"        name{i}, {i + 1000}\n" for i in range(300))
    table: dict[str, Any] = {"__name__": __name__, "__package__": "tests"}
    exec(f"def many():\n    if len(()):\n{names}    import remat_blocked\n    from . import helpers_with_state", table)
    found = [each.module.__name__ for each in modules_named(table["many"], lambda name: name.startswith("tests"))]
    assert found[0] == "tests"


def far() -> Any:
    return FAR[0]


def test_a_notebook_is_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    _is_installed.cache_clear()
    try:
        assert not _is_installed("__main__") and _is_installed("builtins") and _is_installed("torch")
    finally:
        _is_installed.cache_clear()


def counting(x: torch.Tensor, calls: int = 0) -> torch.Tensor:
    counting.__defaults__ = (calls + 1,)
    return x


class Defaulted(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return counting(x)


def test_a_default_that_is_a_number_is_put_back() -> None:
    state = ModelState(Defaulted(), data=False)
    numbers = Numbers(state, set(state.shared_names))
    Defaulted()(torch.zeros(1))
    numbers.put_back()
    assert counting.__defaults__ == (0,)


class Frozen(type):
    def __setattr__(cls, name: str, value: Any) -> None:
        raise AttributeError("frozen")


class Fixed(metaclass=Frozen):
    shift = torch.zeros(2)


class Fixing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + Fixed.shift


def test_a_class_whose_attributes_cannot_be_set_is_left_as_it_is() -> None:
    before, mode = Fixed.shift, FakeTensorMode()
    with SharedState(Fixing(), mode.from_tensor).borrowed():
        assert Fixed.shift is before


@dataclasses.dataclass
class Table:
    rows: torch.Tensor


class Tabled(nn.Module):
    @staticmethod
    @functools.lru_cache(maxsize=2)
    def table(count: int) -> Table:
        return Table(torch.ones(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.table(2).rows


def test_a_cached_method_keeps_no_fake_within_an_object() -> None:
    model, mode = Tabled(), FakeTensorMode()
    shared = SharedState(model, mode.from_tensor)
    with shared.borrowed(), mode:
        assert isinstance(model.table(2).rows, FakeTensor)
    assert not isinstance(model.table(2).rows, FakeTensor)


def test_results_that_hold_no_tensor_stay_in_their_cache() -> None:
    model, mode = Shaped(), FakeTensorMode()
    kept = names(1)
    with SharedState(model, mode.from_tensor).borrowed():
        model(torch.zeros(2))
    assert names(1) is kept and names.cache_info().currsize == 2


@functools.lru_cache(maxsize=8)
def names(count: int) -> list[str]:
    return ["x"] * count


class Shaped(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * len(names(2))


class Counts(Model):
    def forward(self) -> None:
        COUNT["calls"] += 1


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_is_named_and_put_back_in_place(name: str) -> None:
    change, said = CHANGES[name]
    model = Counts()
    holders = [model.table, model.queue, model.pair[1].past, model.ids, model.array]
    state = ModelState(model)
    assert state.changes() == {}
    with torch.no_grad():
        change(model)
    found = state.changes()
    assert found == said or (not said and found)
    state.put_back()
    assert state.changes() == {} and ModelState(model).changes() == {}
    now = [model.table, model.queue, model.pair[1].past, model.ids, model.array]
    assert all(one is other for one, other in zip(holders, now, strict=True))
    assert model.tied is model.plain and model.rate == 0.5 and next(model.turns) == 0 and len(model.pair[1].past) == 0


def test_generators_give_again_what_they_gave_and_are_no_change() -> None:
    model = Model()
    ours, pythons, numpys, old = model.generators

    def drawn() -> list[Any]:
        return [
            torch.rand(1, generator=ours).item(),
            pythons.random(),
            numpys.random(),
            old.random(),
            torch.rand(1).item(),
            random.random(),
            np.random.rand(),
        ]

    state = ModelState(model)
    first = drawn()
    assert drawn() != first and state.changes() == {}
    state.put_back()
    assert drawn() == first
    state.put_statistics_back()
    assert drawn() == first


def test_statistics_alone_are_put_back_where_that_is_asked_for() -> None:
    model = Model()
    state = ModelState(model)
    with torch.no_grad():
        model.buffer.add_(1)
        model.plain.add_(1)
    assert state.changes(statistics=False) == {"plain": TENSOR}
    state.put_statistics_back()
    assert state.changes() == {"plain": TENSOR}


def test_what_is_written_into_parameters_stays_and_is_said() -> None:
    model = Model()
    first, second = model.layer[0].weight, model.layer[0].bias
    state = ModelState(model)
    with torch.no_grad():
        first.add_(1)
    second.data = torch.ones(2)
    state.put_back()
    assert state.changes() == {"layer.0.weight": TENSOR, "layer.0.bias": TENSOR}


ONCE: dict[str, Callable[[], Any]] = {
    "generator": lambda: (i for i in range(3)),
    "cycle": lambda: itertools.cycle([1, 2]),
    "enumerate": lambda: enumerate([1, 2]),
    "zip": lambda: zip([1, 2], [3, 4], strict=True),
    "map": lambda: map(abs, [1, 2]),
    "islice": lambda: itertools.islice([1, 2], 2),
    "chain": lambda: itertools.chain([1], [2]),
    "of iterators": lambda: zip(itertools.count(), itertools.cycle([1, 2]), strict=False),
}


@pytest.mark.parametrize("kind", ONCE)
def test_what_gives_a_value_once_is_known_and_refused_by_name_where_it_has_gone_on(kind: str) -> None:
    model = Model()
    model.turns = ONCE[kind]()
    state = ModelState(model)
    assert state.only_once == ["turns"]
    state.put_back()
    next(model.turns)
    model.steps = 1
    assert state.changes() == {"turns": OTHER, "steps": NUMBER}
    with pytest.raises(StateLost, match="`turns` of the model is a Python generator or an iterator"):
        state.put_back()
    assert model.steps == 0  # all else is put back


def test_what_cannot_be_put_back_keeps_nothing_else_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    state = ModelState(model)
    drawn = torch.rand(1).item()
    model.steps = 1
    with torch.no_grad():
        model.plain.add_(1)
    put_back = KeptTensor.put_back

    def fail(kept: Any) -> None:
        if kept.name == "plain":
            raise RuntimeError("no kernel for this")
        put_back(kept)

    monkeypatch.setattr(KeptTensor, "put_back", fail)
    with pytest.raises(StateLost, match=r"`plain` of the model cannot be put back .* no kernel for this"):
        state.put_back()
    assert model.steps == 0 and torch.rand(1).item() == drawn


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta")
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda t: t.to_sparse(), id="coo"),
        pytest.param(lambda t: t.to_sparse_csr(), id="csr"),
        pytest.param(lambda t: t.to_sparse_csc(), id="csc"),
        pytest.param(lambda t: t.to(torch.cfloat).conj(), id="conjugate"),
        pytest.param(torch._neg_view, id="negative"),
    ],
)
def test_tensors_of_every_layout_are_compared_and_put_back(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = Model()
    model.plain = model.tied = make(torch.eye(3))
    state = ModelState(model)
    assert state.changes() == {}
    with torch.no_grad():
        (model.plain.values() if model.plain.layout == torch.sparse_csr else model.plain).mul_(2)
    assert state.changes() == {"plain": TENSOR}
    state.put_back()
    assert state.changes() == {} and torch.equal(model.plain.to_dense(), make(torch.eye(3)).to_dense())


def test_a_model_of_its_own_is_known_however_large_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_state, "MOST_OBJECTS", 10)
    model = Counts()
    models = nn.ModuleList([model, Counts()])
    state = ModelState(models)
    model.steps = 1
    state.put_back()
    assert model.steps == 0 and any("what is reached from" in name for name in state.only_once)


@contextlib.contextmanager
def entered() -> Iterator[None]:
    yield


@entered()
def decorated() -> None:
    """A function as those of `transformers` are."""


class Owner:
    """As a trainer: it refers to much that is no state of the model."""


def test_the_machinery_of_libraries_is_left_alone() -> None:
    model = Model()
    model.logger, model.optimizer = logging.getLogger("x"), torch.optim.SGD(model.parameters(), lr=1.0)
    model.helper = decorated
    state = ModelState(model)
    assert state.only_once == []  # a context manager that decorates begins anew in each call
    model.optimizer.param_groups[0]["lr"] = 2.0
    assert state.changes() == {}


def test_hooks_of_this_library_are_no_state_of_the_model() -> None:
    model, place = Model(), torch.ones(3)
    first = model.register_forward_pre_hook(functools.partial(_load, {0: place}))
    state = ModelState(model)
    assert all(tensor is not place for tensor in state.tensors)
    hooks = {key: hook for key, hook in model._forward_pre_hooks.items() if key != first.id}
    first.remove()
    second = model.register_forward_pre_hook(functools.partial(_load, {}))
    assert state.changes() == {}
    model.register_forward_pre_hook(lambda module, args: None)
    hooks[second.id] = model._forward_pre_hooks[second.id]
    state.put_back()
    assert model._forward_pre_hooks == hooks


def test_tensors_beside_parameters_and_buffers_are_known() -> None:
    model = Model()
    found = {id(tensor) for tensor in ModelState(model).unregistered}
    expected = [model.plain, model.table["a", 1], model.pair[0], model.queue[0]]
    assert found == {id(tensor) for tensor in expected}


GLOBAL = nn.Linear(3, 2).requires_grad_(False)


def by_global(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (GLOBAL(x) - model(x)).sum()
    return loss


def by_default(model: nn.Module, x: torch.Tensor, network: nn.Module = GLOBAL) -> torch.Tensor:
    return by_global(model, x)


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = GLOBAL

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x).sum()


CRITERION = Criterion()


def by_criterion(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return CRITERION(x) + model(x).sum()


class Training:
    """An object that a step belongs to, or is; the model that it trains is another's."""

    def __init__(self) -> None:
        self.network, self.model = GLOBAL, nn.Linear(3, 2)

    def step(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (self.network(x) - model(x)).sum()

    __call__ = step


def by_closure() -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    network = GLOBAL
    return lambda model, x: (network(x) - model(x)).sum()


def with_network(network: nn.Module, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (network(x) - model(x)).sum()


STEPS: dict[str, Callable[..., torch.Tensor]] = {
    "global": by_global,
    "default": by_default,
    "criterion": by_criterion,
    "method": Training().step,
    "object": Training(),
    "closure": by_closure(),
    "partial": functools.partial(with_network, GLOBAL),
}


@pytest.mark.parametrize("is_planned", [False, True], ids=["apply", "planned-step"])
@pytest.mark.parametrize("how", STEPS)
def test_a_frozen_network_counts_wherever_a_step_has_it(how: str, is_planned: bool) -> None:
    step, model, mode = STEPS[how], nn.Linear(3, 2), FakeTensorMode()
    whole = StepModule(model, step) if is_planned else model
    real = list(GLOBAL.parameters())
    state = ModelState(whole, data=False, step=None if is_planned else step)
    assert {id(each) for each in state.unregistered} == {id(each) for each in real}
    shared = SharedState(whole, mode.from_tensor, step=None if is_planned else step)
    for _ in range(2):
        with shared.borrowed(), mode:
            assert all(isinstance(each, FakeTensor) for each in (*GLOBAL.parameters(), *model.parameters()))
            assert isinstance(step(model, torch.zeros(1, 3)), FakeTensor)
        assert all(now is then for now, then in zip(GLOBAL.parameters(), real, strict=True))


@pytest.mark.parametrize("as_step", [lambda banked: banked, lambda banked: banked.step], ids=["object", "method"])
def test_a_large_bank_of_a_planned_steps_object_is_its_state(as_step: Callable[[Any], Callable[..., Any]]) -> None:
    banked = Training()
    banked.bank = torch.zeros(LARGEST_BYTES // 4 + 1)  # type: ignore[attr-defined]
    state = ModelState(StepModule(nn.Linear(3, 2), as_step(banked)))
    banked.bank.add_(1)  # type: ignore[attr-defined]
    state.put_back()
    assert not banked.bank.any()  # type: ignore[attr-defined]


def test_numbers_are_put_back_and_lists_where_that_is_asked_for() -> None:
    model = Model()
    names = {"steps", "pair.calls", "Model.calls"}
    numbers, lists = Numbers(ModelState(model), names), Numbers(ModelState(model), (), lists={"pair.past"})
    model.steps, model.pair[1].calls = 7, 7
    Model.calls = 7
    model.pair[1].past.append(torch.zeros(1))
    numbers.put_back()
    assert (model.steps, model.pair[1].calls, Model.calls) == (0, 0, 0) and len(model.pair[1].past) == 1
    lists.put_back()
    assert model.pair[1].past == []


def test_numbers_in_containers_are_put_back() -> None:
    model: Any = Model()
    model.listed, model.mixed = [1, 2], [1, torch.ones(1)]
    numbers = Numbers(ModelState(model), {"ids", "listed", "mixed"})
    model.ids.add(2)
    model.listed[:] = [3]
    model.mixed.clear()  # of what else it holds nothing is known
    numbers.put_back()
    assert (model.ids, model.listed, model.mixed) == ({1}, [1, 2], [])


def test_another_order_of_keys_is_a_change_and_is_put_back() -> None:
    model: Any = Model()
    model.ordered = table = collections.OrderedDict(a=1, b=2)
    state = ModelState(model)
    table["c"] = 3
    assert state.changes() == {"ordered['c']": "other"}
    table.move_to_end("a")
    assert state.changes() == {"ordered['c']": "other", "ordered": "other"}
    assert state.lengths["ordered"] == 2 and ModelState(model).lengths["ordered"] == 3
    state.put_back()
    assert [*table] == ["a", "b"] and not state.changes()


# On fakes


@pytest.fixture
def clean() -> Iterator[None]:
    before = dict(COUNT)
    yield
    COUNT.clear()
    COUNT.update(before)
    Model.seen.clear()


def test_what_a_model_shares_is_as_it_left_it_only_while_it_runs_on_fakes(clean: None) -> None:
    model, mode = Counts(), FakeTensorMode()
    COUNT["tensor"] = torch.ones(1)
    shared = SharedState(model, mode.from_tensor)
    assert isinstance(model.plain, FakeTensor) and model.tied is model.plain and isinstance(model.pair[0], FakeTensor)
    for calls in (1, 2):
        with shared.borrowed(), shared.borrowed():
            assert isinstance(COUNT["tensor"], FakeTensor)
            model()
            Model.seen.add(calls)
            assert COUNT["calls"] == calls == len(Model.seen)
        assert not isinstance(COUNT["tensor"], FakeTensor) and COUNT["calls"] == 0 and not Model.seen


class Draws(nn.Module):
    def forward(self) -> float:
        return float(RANDOM.random())


def test_generators_are_kept_those_that_a_model_on_fakes_shares_too() -> None:
    mode = FakeTensorMode()

    @kept()
    def planned() -> list[float]:
        model = Draws()
        SharedState(model, mode.from_tensor)
        return [model(), random.random(), float(np.random.rand()), torch.rand(1).item()]

    assert planned() == planned()


def test_a_copy_has_forwards_and_generators_of_its_own() -> None:
    model = Model()
    inner = model.layer[0]
    twice = functools.lru_cache(lambda: 2)  # an object around a function, which nothing copies

    def wrapped(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = nn.Linear.forward(inner, x) * twice()
        return found

    inner.forward = types.MethodType(wrapped, inner)
    twin: Any = copied(model, {})
    with torch.no_grad():
        twin.layer[0].weight.zero_()
        twin.layer[0].bias.zero_()
    assert twin.layer[0](torch.ones(1, 2)).eq(0).all() and not inner(torch.ones(1, 2)).eq(0).all()
    assert twin.generators[0] is not model.generators[0]


class Parametrized(nn.Linear):
    """Names a table of its own as torch does."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.parametrizations = nn.ModuleDict({"log": nn.Tanh()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.parametrizations["log"](super().forward(x))
        return found


def test_a_copy_keeps_a_class_that_only_looks_parametrized() -> None:
    model = Parametrized()
    twin = copied(model, {})
    assert type(twin) is Parametrized and torch.equal(twin(torch.ones(2, 4)), model(torch.ones(2, 4)))


def test_a_copy_of_a_parametrized_module_holds_itself_alone() -> None:
    model: Any = nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 2), orthogonal_map="householder"))
    twin: Any = copied(model, {})
    assert type(twin[0]).__name__ == type(model[0]).__name__ and ModelState(twin).unregistered == []
    with parametrize.cached():
        assert torch.equal(model[0].weight, twin[0].weight) and model[0].weight is not twin[0].weight
    assert copied(twin, {})(torch.ones(1, 4)).equal(model(torch.ones(1, 4)))


def test_an_attribute_that_has_the_name_of_a_global_is_none() -> None:
    def forward(self: Any, x: Any) -> Any:
        global RANDOM
        RANDOM = self.model.labels
        return [lambda: len(x), self.COUNT]

    assert globals_in(forward.__code__) == {"RANDOM", "len"}
