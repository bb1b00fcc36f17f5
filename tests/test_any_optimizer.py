"""Whatever steps is planned with what it keeps: pairs, lists, optimizers around others, who asks for a closure."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, lbfgs
from torch.optim.lr_scheduler import StepLR
from torch.utils._pytree import tree_leaves

from remat.errors import CaptureError, RematError, UsageError
from remat.evaluation.graph import OPTIMIZER_STATE
from remat.execution.apply import apply, counts_of
from remat.recording.fake_step import REPEATED_STEP
from remat.recording.tracker import Tracker
from remat.validation.validating import validate
from remat.workload.any_optimizer import LBFGS_COPIES, AnyOptimizer
from remat.workload.workload import Workload
from tests.toys import CPU, every_block, plan_by_hand, recorded

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")

Parameters = Iterable[nn.Parameter]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


WORKLOAD = Workload("layers", Layers, lambda n, _: (torch.randn(n, 16), torch.randn(n, 16)), loss, batch_size=64)
WEIGHTS = 3 * 2 * 16 * 64  # numbers in matrices
BIASES = 3 * (64 + 16)
BYTES = 4 * (WEIGHTS + BIASES)
COUNTERS = 4 * 12  # AdamW's, one number for each of 12 parameters


class Pair:
    """Two optimizers as one object, as scripts with Muon hold them."""

    def __init__(self, parameters: Parameters):
        parameters = list(parameters)
        matrices, others = ([p for p in parameters if (p.ndim == 2) is wanted] for wanted in (True, False))
        self.parts = {"matrices": torch.optim.Muon(matrices), "others": torch.optim.AdamW(others)}

    def step(self) -> None:
        for part in self.parts.values():
            part.step()


class Around(torch.optim.Optimizer):
    """Keeps a copy of every parameter in an object of its own, and steps what it is around."""

    class Shadow:
        def __init__(self, tensors: list[torch.Tensor]):
            self.tensors = tensors

    def __init__(self, parameters: Parameters):
        super().__init__(parameters, {})
        self.inside = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.shadow: Around.Shadow | None = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.shadow is None:
            self.shadow = self.Shadow([p.detach().clone() for group in self.param_groups for p in group["params"]])
        self.inside.step()


class Sharp(torch.optim.Optimizer):
    """Sharpness-aware minimisation, as its best known implementation steps (Foret et al. 2021)."""

    def __init__(self, parameters: Parameters):
        super().__init__(parameters, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> None:  # type: ignore[override]
        assert closure is not None, "a closure is needed"
        parameters = [p for group in self.param_groups for p in group["params"]]
        for p in parameters:
            assert p.grad is not None
            self.state[p]["old"] = p.detach().clone()
            p.add_(p.grad, alpha=0.05)
        torch.enable_grad()(closure)()
        for p in parameters:
            p.data = self.state[p]["old"]
        self.base.step()


class Climbing(Sharp):
    """The same, which keeps where it went in place of where it was, and makes that anew in each step."""

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> None:  # type: ignore[override]
        assert closure is not None, "a closure is needed"
        parameters = [p for group in self.param_groups for p in group["params"]]
        for p in parameters:
            assert p.grad is not None
            self.state[p]["climbed"] = 0.05 * p.grad
            p.add_(self.state[p]["climbed"])
            p.grad = None
        torch.enable_grad()(closure)()
        for p in parameters:
            p.sub_(self.state[p]["climbed"])
        self.base.step()


class Silent(Sharp):
    """As published: it says nothing when it has no closure, and has begun its step by then."""

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for p in parameters:
            assert p.grad is not None
            self.state[p]["old"] = p.detach().clone()
            p.add_(p.grad, alpha=0.05)
            p.grad = None
        torch.enable_grad()(closure)()  # type: ignore[type-var, misc]
        for p in parameters:
            p.data = self.state[p]["old"]
        self.base.step()


class Asserting(Sharp):
    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> None:  # type: ignore[override]
        assert closure is not None
        super().step(closure)


class Wrapping:
    """No Optimizer, around one; it hands on what it is given."""

    def __init__(self, parameters: Parameters):
        self.inside = Asserting(parameters)

    def step(self, *given: Any) -> None:
        self.inside.step(*given)

    def zero_grad(self) -> None:
        self.inside.zero_grad()


class InTwo(Sharp):
    """The script calls the two halves of a step, with a forward and a backward between them."""

    @torch.no_grad()
    def first_step(self) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            assert p.grad is not None
            self.state[p]["old"] = p.detach().clone()
            p.add_(p.grad, alpha=0.05)

    @torch.no_grad()
    def second_step(self) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            p.data = self.state[p]["old"]
        self.base.step()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise NotImplementedError


def several(parameters: Parameters) -> Any:
    parameters = list(parameters)
    first = torch.optim.SGD(parameters[:6], lr=0.1, momentum=0.9)
    return [first, torch.optim.SGD(parameters[6:], lr=0.1)], [torch.optim.lr_scheduler.StepLR(first, 10)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("optimizer", "state", "name"),
    [
        pytest.param(Pair, 4 * WEIGHTS + 2 * 4 * BIASES + 4 * 6, "Pair", id="pair"),  # momentum; two moments, counters
        # momentum of a layer and a half: 2 x 1024 + 80, and 1024 + 64
        pytest.param(several, 4 * (2048 + 80 + 1024 + 64), "SGD and SGD", id="lists-and-a-scheduler"),
        pytest.param(lambda p: {"optimizer": torch.optim.AdamW(p)}, 2 * BYTES + COUNTERS, "AdamW", id="dictionary"),
        pytest.param(Around, 2 * BYTES, "Around", id="around-another"),
        pytest.param(None, 0, None, id="none"),
    ],
)
def test_all_that_is_kept_is_counted_and_the_peak_is_as_predicted(optimizer: Any, state: int, name: str | None) -> None:
    workload = dataclasses.replace(WORKLOAD, optimizer=optimizer)
    _, graph = recorded(workload)
    assert graph.fixed_bytes.get(OPTIMIZER_STATE, 0) == state and graph.about["optimizer"] == name
    assert REPEATED_STEP not in graph.fixed_bytes
    report = validate(workload, plan_by_hand(graph, every_block(graph)), device=CPU)
    assert report.passed, report


@pytest.mark.exhaustive
def test_state_that_a_step_makes_anew_is_measured_once() -> None:
    """The profiler does not see older memory freed on the CPU: state was counted twice, and the plan failed."""
    workload = dataclasses.replace(WORKLOAD, optimizer=Climbing)
    _, graph = recorded(workload)
    assert graph.fixed_bytes[OPTIMIZER_STATE] == 2 * BYTES and REPEATED_STEP not in graph.fixed_bytes
    report = validate(workload, plan_by_hand(graph, every_block(graph)), device=CPU)
    assert report.passed, report
    assert report.measured["peak_bytes"] == pytest.approx(report.predicted["peak_bytes"], rel=1e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", [Sharp, Asserting, Silent, Wrapping])
def test_what_is_alive_while_a_step_is_repeated_is_counted_too(optimizer: Any) -> None:
    """SAM has the parameters twice while forward and backward run again."""
    workload = dataclasses.replace(WORKLOAD, optimizer=optimizer)
    _, graph = recorded(workload)
    assert graph.fixed_bytes[OPTIMIZER_STATE] == BYTES and graph.fixed_bytes[REPEATED_STEP] == BYTES
    report = validate(workload, plan_by_hand(graph, every_block(graph)), device=CPU)
    assert report.passed, report


def test_a_closure_is_given_to_who_cannot_step_without() -> None:
    class Asks:
        def step(self, closure: Any) -> None:
            closure()

    calls: list[str] = []

    def closure() -> torch.Tensor:
        calls.append("again")
        return torch.zeros(())

    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    AnyOptimizer([Asks(), torch.optim.SGD([parameter], lr=1.0)], [parameter]).step(closure)
    assert calls == ["again"] and parameter.item() == 0.0


def with_closure(optimizer: Any, again: Callable[[], torch.Tensor]) -> None:
    optimizer.step(again)


def after_backward(optimizer: Any, again: Callable[[], torch.Tensor]) -> None:
    again()
    optimizer.step(again)


def in_two(optimizer: Any, again: Callable[[], torch.Tensor]) -> None:
    again()
    optimizer.first_step()
    again()
    optimizer.second_step()


@pytest.mark.parametrize(
    ("make", "run", "planned_with"),
    [
        pytest.param(Asserting, after_backward, Asserting, id="asserting"),
        pytest.param(Silent, after_backward, Silent, id="silent"),
        pytest.param(Wrapping, after_backward, Wrapping, id="no-optimizer"),
        pytest.param(InTwo, in_two, None, id="in-two"),
        pytest.param(lambda p: torch.optim.LBFGS(p, max_iter=4), with_closure, None, id="l-bfgs"),
    ],
)
def test_a_script_that_repeats_the_step_trains_under_a_plan_bit_by_bit(make: Any, run: Any, planned_with: Any) -> None:
    graph = recorded(dataclasses.replace(WORKLOAD, optimizer=planned_with))[1]
    plan = plan_by_hand(graph, every_block(graph))

    def trained(planned: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Layers()
        if planned:
            apply(model, plan)
        optimizer = make(model.parameters())
        for _ in range(5):
            batch = WORKLOAD.batch(64, None)

            def again(batch: Any = batch) -> torch.Tensor:
                optimizer.zero_grad()
                found = loss(model, batch)
                found.backward()
                return found

            run(optimizer, again)
        if planned:
            assert counts_of(model).regions >= 10 * len(plan.regions) > 0
        return [p.detach() for p in model.parameters()]

    assert all(map(torch.equal, trained(False), trained(True)))


def _fails() -> None:
    raise ZeroDivisionError("by zero")


class Fails:
    def __init__(self, parameters: Parameters):
        pass

    def step(self) -> None:
        _fails()


@pytest.mark.parametrize(
    ("optimizer", "error", "message"),
    [
        pytest.param(lambda p: 3, UsageError, "`optimizer` gave a int, .*Return a torch.optim", id="a-number"),
        pytest.param(lambda p: [], UsageError, "gave a list, and no optimizer", id="nothing"),
        pytest.param(lambda p: None, UsageError, "gave None, and no optimizer", id="forgotten-return"),
        pytest.param(lambda p: StepLR(SGD(p), 1), UsageError, "gave a StepLR, and no optimizer", id="scheduler"),
        # 2 x 100 + 9 copies of 25,536 bytes
        pytest.param(torch.optim.LBFGS, UsageError, "Plan with `optimizer=None`.* 209 copies", id="l-bfgs"),
        pytest.param(InTwo, CaptureError, "fails on fake tensors: NotImplementedError.*`optimizer=None`", id="in-two"),
        pytest.param(Fails, CaptureError, "fails on fake tensors: ZeroDivisionError.*`optimizer=None`", id="fails"),
    ],
)
def test_the_rest_is_refused_by_name(optimizer: Any, error: type[RematError], message: str) -> None:
    with pytest.raises(error, match=message) as found:
        recorded(dataclasses.replace(WORKLOAD, optimizer=optimizer))
    assert found.value.exit_code == 2


COPY_BYTES = 4096


def alive(tracker: Tracker, since: int = 0) -> int:
    """Copies of the parameters that were alive at once, during an operator from `since` on."""
    return int(tracker.alive()[since:].max()) // COPY_BYTES


class FollowedLBFGS:
    """L-BFGS on a closure of random losses and gradients, which reach every branch of it.

    copies    alive at once beside the parameters and their gradient      at_search  when a line search began
    """

    def __init__(self, history: int, line_search: str | None):
        self.parameter, self.copies, self.at_search = nn.Parameter(torch.randn(COPY_BYTES // 4)), 0, 0
        self.parameter.grad = torch.zeros_like(self.parameter)
        self.gradients = [torch.randn(COPY_BYTES // 4) * 10 ** (number % 5 - 2) for number in range(64)]
        self.optimizer = torch.optim.LBFGS(
            [self.parameter],
            max_iter=12,
            max_eval=60,
            history_size=history,
            line_search_fn=line_search,
            tolerance_grad=-1.0,
            tolerance_change=-1e30,
        )

    def closure(self) -> float:
        assert self.parameter.grad is not None
        self.parameter.grad.copy_(random.choice(self.gradients))
        return random.gauss(0, 1)

    def step(self, patch: pytest.MonkeyPatch) -> None:
        search = lbfgs._strong_wolfe

        def noted(*args: Any, **kwargs: Any) -> Any:
            now = sum(each.size_bytes for each in tracker.older.values() if each.death is None) + tracker.alive_now
            self.at_search = max(self.at_search, now // COPY_BYTES)
            return search(*args, **kwargs)

        with Tracker() as tracker, patch.context() as patched:
            patched.setattr(lbfgs, "_strong_wolfe", noted)
            tracker.fix(self.parameter, self.parameter.grad, self.gradients)
            leaves = tree_leaves(dict(self.optimizer.state))
            tracker.follow_older(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
            del leaves
            self.optimizer.step(self.closure)
        self.copies = max(self.copies, alive(tracker))


@pytest.mark.parametrize("history", [1, 3])
@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_the_copies_of_l_bfgs_are_those_that_it_holds_at_once(
    history: int, line_search: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line search holds six gradients at once at most, which the next test counts."""
    random.seed(0)
    torch.manual_seed(0)
    followed, most = FollowedLBFGS(history, line_search), 2 * history + LBFGS_COPIES[line_search]
    for _ in range(40):
        followed.step(monkeypatch)
    assert followed.copies <= most
    assert (followed.copies if line_search is None else followed.at_search + IN_SEARCH) == most


IN_SEARCH = 6  # gradients that a line search makes and holds at once


def test_a_line_search_holds_six_gradients_at_once() -> None:
    random.seed(0)
    torch.manual_seed(0)
    gradients, direction = [torch.randn(COPY_BYTES // 4) for _ in range(32)], torch.randn(COPY_BYTES // 4)
    slope, most = -direction.dot(gradients[0]).abs(), 0

    def evaluated(*point: Any) -> tuple[float, torch.Tensor]:
        return random.random(), torch.cat([random.choice(gradients)])

    for _ in range(100):
        with Tracker() as tracker:
            tracker.fix(gradients, direction, slope)
            lbfgs._strong_wolfe(evaluated, [], 1.0, direction, 0.9, gradients[0], slope, max_ls=12)
        most = max(most, alive(tracker))
    assert most == IN_SEARCH


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.EmbeddingBag(50, 8, mode="sum", sparse=True), nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.table(ids))
        return found


def test_sparse_gradients_are_refused_by_name() -> None:
    sparse = Workload("tables", Tables, lambda n, _: torch.randint(50, (n, 3)), lambda m, b: m(b).square().mean(), 4)
    with pytest.raises(CaptureError, match=r"gradients of table are sparse.*Plan with layers .*dense") as found:
        recorded(sparse)
    assert found.value.exit_code == 2


def test_a_frozen_model_is_told_that_nothing_is_trained() -> None:
    frozen = dataclasses.replace(WORKLOAD, build=lambda: WORKLOAD.build().requires_grad_(False))
    with pytest.raises(CaptureError, match=r"no parameter of .* requires a gradient, so its optimizer has nothing"):
        recorded(frozen)
