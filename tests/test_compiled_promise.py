"""The promise of compiled training under a budget: what is asked is checked, and a step that differs is told."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import pickle
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import remat
from remat.compiled import backend, partitioner
from remat.compiled.asked import WeakArgument
from remat.compiled.backend import _partitioner
from remat.compiled.outside import Outside, outside_of
from remat.compiled.partitioner import BudgetPartitioner
from remat.compiled.promise import CompiledStep
from remat.costing.device_allocator import measure_peak
from remat.errors import Infeasible, NoPlanInTime, PlanMismatch, UsageError
from remat.units import parse_bytes
from tests.cached import cached
from tests.graphs import DYNAMO_LOOKS_AT_GRAD
from tests.test_any_optimizer import Pair, Sharp

pytestmark = [pytest.mark.usefixtures("fresh_dynamo", "one_thread"), pytest.mark.filterwarnings(DYNAMO_LOOKS_AT_GRAD)]
WIDTH, ROWS = 16, 256
ROW = WIDTH * 4
PARAMETERS = 2 * (WIDTH * WIDTH + WIDTH) * 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def batch(rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))


def compiled(budget: int | str, **options: Any) -> Any:
    return remat.compile(Block(), budget, **{"optimizer": None, **options})


# As often as planned


def stepped(run: Callable[..., torch.Tensor], times: int) -> None:
    x = batch()
    for _ in range(times):
        x = run(x)
    x.sum().backward()


@pytest.fixture
def of_one_run() -> int:
    return peak_of_one_run()


@cached
def peak_of_one_run() -> int:
    """Of a step that runs the block once, as PyTorch saves values."""
    step = CompiledStep()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "CompiledStep", lambda: step)
        stepped(compiled("1GiB"), 1)
    torch._dynamo.reset()
    (cut,) = step.cuts.values()
    return int(cut.peak_bytes)


@pytest.mark.exhaustive
def test_a_graph_that_a_step_runs_more_often_than_its_budget_allows_is_refused(of_one_run: int) -> None:
    run = compiled(of_one_run)
    for _ in range(3):
        stepped(run, 1)  # one run at a time is as planned,
        run(batch())  # and so is one that no backward follows
    with pytest.raises(UsageError, match=r"test_compiled_promise.* 2 times or more .*`uses=1`.* Compile with `uses=`"):
        stepped(run, 3)


def test_a_graph_runs_as_often_as_its_budget_allows(of_one_run: int) -> None:
    stepped(compiled(3 * of_one_run), 3)


def test_runs_within_a_checkpoint_save_nothing_and_are_not_counted(of_one_run: int) -> None:
    run = compiled(of_one_run)
    stepped(lambda x: checkpoint(run, x.requires_grad_(), use_reentrant=False), 3)


@pytest.mark.exhaustive
def test_two_models_compiled_apart_are_told_that_neither_budget_knows_the_other(of_one_run: int) -> None:
    def step(outside: int) -> None:
        first, second = compiled(of_one_run), compiled(of_one_run + outside, outside=outside)
        x = batch()
        for _ in range(2):
            first(x).sum().backward()  # one after the other is as planned
            second(x).sum().backward()
            for model in (first, second):
                model.zero_grad()
            (first(x) + second(x)).sum().backward()  # a second warning would be an error here
            for model in (first, second):
                model.zero_grad()

    step(2 * of_one_run)
    with pytest.warns(UserWarning, match=r"models that were compiled apart have saved .* `outside=`") as caught:
        step(0)
    assert [Path(warning.filename).name for warning in caught] == [Path(__file__).name] * len(caught)
    assert len(caught) == 1


def test_gradients_that_are_there_as_a_forward_begins_are_told_once(of_one_run: int) -> None:
    run = compiled(of_one_run)
    with pytest.warns(UserWarning, match=r"gradients are there as a forward begins.*`accumulation=2`") as caught:
        for _ in range(3):
            run(batch()).sum().backward()
    assert [Path(warning.filename).name for warning in caught] == [Path(__file__).name]
    torch._dynamo.reset()
    run = compiled(2 * of_one_run)  # has room for them
    for _ in range(2):
        run(batch()).sum().backward()


@pytest.mark.parametrize("batches", [1, 3])
def test_batches_that_are_loaded_ahead_are_counted(batches: int, of_one_run: int) -> None:
    step = CompiledStep()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "CompiledStep", lambda: step)
        stepped(compiled("1GiB", batches=batches), 1)
    (cut,) = step.cuts.values()
    assert cut.peak_bytes - of_one_run == (batches - 1) * batch().nbytes


class Broken(nn.Module):
    """Blocks that are two graphs each."""

    class Half(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + nn.functional.gelu(self.up(x))
            torch._dynamo.graph_break()
            return x + nn.functional.gelu(self.down(x))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Half() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def peak_of(model: nn.Module, run: Callable[..., torch.Tensor]) -> int:
    """The peak of a later step, with all that is there before it."""
    x = batch()

    def step() -> None:
        run(x).backward()
        model.zero_grad()

    step()
    return sum(each.nbytes for each in (*model.parameters(), x)) + measure_peak(step, torch.device("cpu"))


@pytest.mark.exhaustive
def test_blocks_of_several_graphs_keep_a_budget_with_their_number_and_are_refused_without() -> None:
    model = Broken()
    budget = int(0.9 * peak_of(model, torch.compile(model)))
    torch._dynamo.reset()
    with pytest.raises(UsageError, match="`uses=1`"):
        peak_of(model, remat.compile(model, budget, optimizer=None))
    torch._dynamo.reset()
    assert peak_of(model, remat.compile(model, budget, optimizer=None, uses=4)) <= budget


class Sized(nn.Module):
    """One block of several that have the same code."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, times * WIDTH), nn.Linear(times * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


@pytest.mark.exhaustive
@pytest.mark.nightly
@pytest.mark.parametrize("sizes", [(8, 4, 2, 1), (4, 4, 4, 4)], ids=["others", "same"])
def test_what_blocks_have_saved_is_counted_whatever_their_sizes_and_though_each_has_options(sizes: Any) -> None:
    def peak(share: float = 0, **options: Any) -> int:
        torch._dynamo.reset()
        model = nn.Sequential(*map(Sized, sizes))
        for block in model.children():
            asked = {"budget": int(share * default), "optimizer": None, "model": model, **options} if share else {}
            block.compile(**({"backend": "remat", "options": asked} if share else {}))
        return peak_of(model, lambda x: model(x).square().mean())

    default = peak()
    with pytest.raises(UsageError, match=r"times or more .*`uses=1`"):
        peak(0.9)
    assert peak(0.9, uses=4) <= 0.9 * default


def test_blocks_with_equal_options_of_their_own_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[Any] = []
    make = backend._partitioner

    def noting(*asked: Any) -> Any:
        planned.append(asked)
        return make(*asked)

    monkeypatch.setattr(backend, "_partitioner", noting)
    model = nn.Sequential(*(Block() for _ in range(10)))  # Dynamo compiles a frame eight times at most
    for block in model.children():
        options = {"budget": "1GiB", "optimizer": None, "uses": 10, "model": model}
        block.compile(backend="remat", options=options)
    model(batch().requires_grad_()).sum().backward()
    assert len(planned) == 1


@pytest.mark.exhaustive
def test_a_model_that_is_compiled_anew_after_a_reset_has_its_whole_budget(of_one_run: int) -> None:
    run = compiled(of_one_run)
    stepped(run, 1)
    torch._dynamo.reset()
    stepped(run, 1)


class Wide(nn.Module):
    """Graphs whose parameters are large beside all else."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(128, 128), nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.gelu(self.first(x))
        torch._dynamo.graph_break()
        return self.second(x).square().mean()


@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda parameters: torch.optim.AdamW], ids=["there", "class"])
def test_parameters_of_all_graphs_are_counted_where_no_model_is_known(make: Callable[[Any], Any]) -> None:
    model, x = Wide(), torch.randn(4, 128)
    size = sum(each.nbytes for each in model.parameters())
    options = {"budget": 4 * size, "optimizer": make(model.parameters())}  # with state and gradients that is too little
    run = torch.compile(model, backend="remat", options=options)
    with pytest.raises(Infeasible, match="whatever forward saves"):
        run(x)


@torch._functorch.config.patch(donated_buffer=False)  # with which torch may refuse it itself
def test_a_backward_that_runs_a_second_time_is_told_of(of_one_run: int) -> None:
    run = compiled(of_one_run)
    run(batch()).sum().backward()
    (loss := run(batch()).sum()).backward(retain_graph=True)
    with pytest.warns(UserWarning, match="second time .*`retain_graph=True`"):
        loss.backward()


# For sizes as large as planned


@pytest.mark.exhaustive
def test_a_batch_larger_than_planned_is_told_of_where_it_may_exceed_the_budget() -> None:
    run = compiled(40 * ROWS * ROW, dynamic=True)
    for rows in (ROWS, ROWS // 2):
        run(batch(rows)).sum().backward()
    with pytest.warns(UserWarning, match=rf"{8 * ROWS * WIDTH} elements.* planned for {ROWS * WIDTH} .*`dynamic=True`"):
        run(batch(8 * ROWS)).sum().backward()
    run(batch(8 * ROWS)).sum().backward()  # once


@pytest.mark.exhaustive
def test_after_a_smaller_last_batch_the_others_keep_their_budget() -> None:
    """They would run a graph with open sizes, which was planned for the last."""

    def peaks(budget: int, *rows: int) -> Iterator[int]:
        model = nn.Sequential(*(Block() for _ in range(4)))
        run = remat.compile(model, budget, optimizer=None, holds="loss")
        for x in map(batch, rows):

            def step(x: torch.Tensor = x) -> None:
                run(x).sum().backward()
                model.zero_grad()

            step()
            yield measure_peak(step, torch.device("cpu")) + 4 * PARAMETERS + x.nbytes

    (default,) = peaks(1 << 30, 8 * ROWS)
    torch._dynamo.reset()
    budget = int(0.85 * default)
    first, last, second, third = peaks(budget, 8 * ROWS, 6 * ROWS, 8 * ROWS, 8 * ROWS)
    assert last < budget and first == second == third <= budget


@pytest.mark.exhaustive
def test_sizes_that_a_script_marks_after_its_first_batch_stay_open() -> None:
    run = compiled("1GiB")
    run(batch()).sum().backward()
    torch._dynamo.mark_dynamic(x := batch(200), 0)
    run(x).sum().backward()


@pytest.mark.exhaustive
def test_batches_of_many_sizes_share_a_graph() -> None:
    run, made = compiled("1GiB"), list[Any]()

    def partitioner(*given: Any) -> Any:
        made.append(given)
        return _partitioner(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "_partitioner", partitioner)
        for rows in (ROWS, 200, 180, 160, 140, 120):
            run(batch(rows)).sum().backward()
    assert len(made) == 3  # of the first, of the first smaller one, and of all others


def test_a_batch_larger_than_planned_is_refused_on_request() -> None:
    run = compiled(40 * ROWS * ROW, dynamic=True, on_larger="refuse")
    run(batch()).sum().backward()
    with pytest.raises(PlanMismatch, match="this batch has"):
        run(batch(8 * ROWS))


@pytest.mark.exhaustive
def test_the_peak_of_a_larger_batch_is_told_without_gradients_that_come_later() -> None:
    """Gradients are as large as what is kept for backward, and are made after its peak."""
    width, rows = 64, 66
    layers = (nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in "abcd")
    model = nn.Sequential(*layers)
    parameters = sum(p.nbytes for p in model.parameters())
    step = remat.compile(model, 3 * parameters, optimizer=None, dynamic=True)

    def peak(rows: int) -> int:
        x = torch.randn(rows, width)

        def run() -> None:
            step(x).sum().backward()
            model.zero_grad()

        run()
        return parameters + x.nbytes + measure_peak(run, torch.device("cpu"))

    peak(rows)
    with pytest.warns(UserWarning, match="this batch has") as told:
        measured = peak(4 * rows)
    (said,) = (re.search(r"be about (\S+ \w+);", str(each.message)) for each in told)
    assert said is not None
    assert parse_bytes(said[1]) == pytest.approx(measured, rel=0.05)


def test_a_batch_that_keeps_the_budget_however_it_grows_is_not_told_of() -> None:
    run = compiled("1GiB", dynamic=True)
    for rows in (ROWS, 8 * ROWS):
        run(batch(rows)).sum().backward()


# Under DistributedDataParallel


class Large(nn.Module):
    """Layers of 1 MiB each, which is what the smallest buckets hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return x.square().mean()


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:Profiler record function")
def test_graphs_that_ddp_cuts_share_a_budget_with_its_buckets(alone_in_a_group: None) -> None:
    def make(**options: Any) -> tuple[nn.Module, Callable[[], None]]:
        torch.manual_seed(0)
        model = Large()
        run = torch.compile(DDP(model, bucket_cap_mb=1), **options)
        return model, lambda: run(x).backward()

    x = torch.randn(64, 512)
    plain, step = make()
    step()
    torch._dynamo.reset()
    planned = CompiledStep()
    asked = {"budget": "1GiB", "optimizer": None, "step": planned}
    model, step = make(backend="remat", options=asked)
    step()
    assert len(planned.cuts) == 3 and not planned.runs
    assert all(map(torch.equal, *([each.grad for each in run.parameters()] for run in (model, plain))))
    for _ in range(2):  # the second step makes other buckets
        model.zero_grad()
        step()
    model.zero_grad()
    size = sum(each.nbytes for each in model.parameters())
    measured = 2 * size + x.nbytes + measure_peak(step, torch.device("cpu"))  # parameters and buckets
    predicted = max(cut.peak_bytes for cut in planned.cuts.values())
    assert measured <= predicted
    torch._dynamo.reset()
    with pytest.raises(NoPlanInTime, match=r"saved by graphs before this one; .*optimize_ddp = False"):
        make(backend="remat", options={**asked, "budget": predicted - x.nbytes, "step": CompiledStep()})[1]()


# Requests


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"budget": "20"}, "budget '20' is not .* 20GiB"),
        ({"budget": -1}, "`budget=` is a size .* number of bytes, not -1"),
        ({"budget": 0}, "`budget=` is more than 0 bytes, and this is 0"),
        ({"outside": "banana"}, "outside 'banana' is not"),
        ({"outside": 1.5}, "`outside=` is a size"),
        ({"holds": "output"}, "`holds=` is 'loss' or 'outputs', not 'output'"),
        ({"on_larger": "ignore"}, "`on_larger=` is 'warn' or 'refuse', not 'ignore'"),
        ({"uses": 0}, "`uses=` is a number of times, 1 or more, not 0"),
        ({"uses": True}, "`uses=` is a number"),
        ({"accumulation": 0}, "`accumulation=` is a number of times"),
        ({"mode": "fast"}, "Inductor does not take these options: .*fast"),
        ({"numerics": "rounding"}, "`numerics=` is 'bitwise' or 'sums', not 'rounding'"),
        ({"options": {"no_such": 1}}, "Inductor does not take these options: .{,60}no_such.{,20} `remat` takes budget"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_request_that_cannot_be_meant_is_refused_at_once(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        compiled(**{"budget": "1GiB", **asked})


def test_a_model_without_data_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="the model is on the meta device"):
        remat.compile(Block().to("meta"), "1GiB")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": "1GiB", "holds": "output"}, "`holds=`"),
        ({"budget": "1GiB", "model": 3}, "`model=` is an nn.Module, not int"),
        ({"budgets": "1GiB"}, 'needs a budget, and was given \'budgets\': .*options={"budget": "20GiB"}'),
        (None, "needs a budget, and was given no options"),
    ],
)
def test_the_backend_checks_its_options_too(options: dict[str, Any] | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        torch.compile(Block(), backend="remat", options=options)(batch())


def test_a_function_is_no_model() -> None:
    with pytest.raises(UsageError, match="not function"):
        remat.compile(batch, "1GiB")  # type: ignore[arg-type]


def test_a_compiled_model_that_is_dropped_is_freed_with_its_optimizer() -> None:
    model = Block()
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = remat.compile(model, budget="1GiB", optimizer=optimizer)
    compiled(batch()).sum().backward()
    optimizer.step()
    alive = [weakref.ref(each) for each in (model, optimizer, next(model.parameters()))]
    del model, optimizer, compiled
    gc.collect()
    assert [each() for each in alive] == [None] * 3


@pytest.mark.parametrize("again", [lambda option: option, copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_an_optimizer_that_is_not_kept_counts_with_its_settings(again: Callable[[Any], Any]) -> None:
    makers: list[Callable[..., Any]] = [
        functools.partial(torch.optim.SGD, momentum=0.9),
        functools.partial(torch.optim.AdamW, amsgrad=True),
    ]
    option = WeakArgument.of([make(Block().parameters()) for make in makers])
    gc.collect()
    for made, make in zip(WeakArgument.held(again(option)), makers, strict=True):
        kept, expected = made(Block().parameters()), make(Block().parameters())
        assert type(kept) is type(expected)
        assert kept.defaults == expected.defaults


@pytest.mark.exhaustive
@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_compiled_model_that_has_trained_is_copied_and_stored(again: Callable[[Any], Any]) -> None:
    first = compiled("1GiB")
    first(batch()).sum().backward()
    first.zero_grad()
    second = again(first)
    for run in (first, second):
        run(batch()).sum().backward()
    assert all(map(torch.equal, *([each.grad for each in run.parameters()] for run in (first, second))))


def test_a_mode_of_inductors_goes_with_a_budget() -> None:
    compiled("1GiB", mode="default", options={"max_fusion_size": 8})(batch()).sum().backward()


# What is not found, and what is proved


@pytest.mark.exhaustive
def test_a_search_that_finds_nothing_names_the_least_peak_it_saw_and_claims_no_proof() -> None:
    with pytest.raises(NoPlanInTime, match="nothing proves that there is none: the least peak that was seen") as caught:
        compiled(2 * PARAMETERS + ROWS * ROW)(batch())  # with gradients, and nothing for activations
    assert "TORCHDYNAMO" not in str(caught.value)  # advice to report a bug to PyTorch
    least = caught.value.least_peak_bytes
    assert least is not None
    torch._dynamo.reset()
    compiled(least)(batch())  # that one fits


@pytest.mark.parametrize("optimizer", [None, torch.optim.AdamW], ids=["graph", "optimizer"])
def test_a_budget_below_what_no_choice_changes_is_infeasible_before_any_search(
    optimizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partitioner, "Search", None)
    room = -1 if optimizer is None else 3 * PARAMETERS  # for two of state, the gradients, and temporaries of the step
    with pytest.raises(Infeasible, match="whatever forward saves") as caught:
        compiled(PARAMETERS + ROWS * ROW + room, optimizer=optimizer)(batch())
    assert caught.value.minimum_budget_bytes is None


def test_a_partitioner_is_copied_with_what_it_was_asked() -> None:
    made = BudgetPartitioner(8, Outside(1, 2, 3), uses=4)
    found = copy.deepcopy(made)
    assert (found.budget_bytes, found.outside, found.uses, found.cuts) == (8, Outside(1, 2, 3), 4, {})
    assert found.uuid() == made.uuid()


# Optimizers


class Required(torch.optim.SGD):
    """Keeps what its step reads beside groups and state."""

    def __init__(self, parameters: Any, total_steps: int, **settings: Any):
        super().__init__(parameters, **{"lr": 0.1, **settings})
        self.total_steps = total_steps

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.total_steps
        super().step(closure)


def halves_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    first, second = itertools.islice(model.parameters(), 2), itertools.islice(model.parameters(), 2, None)
    return [torch.optim.SGD(first, lr=0.1, momentum=0.9), torch.optim.SGD(second, lr=0.1, momentum=0.9)]


def scheduled(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # which puts a function in place of `step`
    return optimizer


def under_way(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(batch(2)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda model: Required(model.parameters(), 10, momentum=0.9), id="settings-unnamed"),
        pytest.param(halves_of, id="list"),
        pytest.param(lambda model: Pair(model.parameters()), id="own-class"),
        pytest.param(lambda model: Sharp(model.parameters()), id="sharpness-aware"),
        pytest.param(scheduled, id="scheduled"),
        pytest.param(under_way, id="under-way"),
    ],
)
def test_an_optimizer_that_is_there_counts_with_all_its_state(make: Callable[[nn.Module], Any]) -> None:
    model = Block()
    there = make(model)
    before = [parameter.clone() for parameter in model.parameters()]
    found = outside_of(model.parameters(), there)
    copies = {Pair: (WIDTH * WIDTH * 2 + WIDTH * 4) * 4, Sharp: 2 * PARAMETERS}.get(type(there), PARAMETERS)
    assert 0 <= found.always - PARAMETERS - copies <= 32  # counters of steps
    assert all(map(torch.equal, before, model.parameters()))
    steps = there if isinstance(there, list) else [there]
    assert make is under_way or not any(getattr(each, "state", None) for each in steps)


def test_what_an_optimizer_holds_while_it_repeats_a_step_is_there_during_graphs() -> None:
    """Like sharpness-aware minimisation that lets go of its copy after each step."""

    class Forgetful(Sharp):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)
            for kept in self.state.values():
                kept.clear()

    model = Block()
    found = outside_of(model.parameters(), Forgetful(model.parameters()))
    assert found.always == 2 * PARAMETERS  # momentum
    assert found.during_graphs == found.always + PARAMETERS + found.others


def test_an_optimizer_that_cannot_be_stepped_without_data_is_refused_with_a_remedy() -> None:
    with pytest.raises(UsageError, match=r"`optimizer=` cannot be stepped .*total_steps.*`optimizer=None`.*`outside=`"):
        outside_of(Block().parameters(), Required)
    with pytest.raises(UsageError, match="gave a int, and no optimizer"):
        outside_of(Block().parameters(), 3)
    with pytest.raises(UsageError, match="gave None, and no optimizer"):
        outside_of(Block().parameters(), lambda parameters: None)


class Skipped(nn.Module):
    """Its graph breaks inside a loop, so Dynamo skips the whole forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = doubled_apart(layer(x))
        return x


@torch._dynamo.disable
def doubled_apart(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@pytest.mark.parametrize(("model", "is_told"), [(Skipped, True), (lambda: nn.Linear(8, 8), False)])
def test_a_forward_of_which_nothing_is_captured_is_told_of_once(model: Callable[[], nn.Module], is_told: bool) -> None:
    compiled, told = remat.compile(model(), budget="1MiB"), list[str]()
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            compiled(torch.ones(8)).sum().backward()
        told += [each.filename for each in caught if "Dynamo captured no graph" in str(each.message)]
    assert told == [__file__] * is_told


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.GRU(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.first(x)[0])
        return result


def test_a_recurrent_layer_is_named_where_dynamo_leaves_it_out() -> None:
    with pytest.warns(UserWarning, match=r"captured no graph of this forward.* captures no nn\.GRU, nor what follows"):
        remat.compile(Recurrent(), budget="1MiB")(torch.ones(4, 2, 8)).sum().backward()


class PartlySkipped(nn.Module):
    """Dynamo skips the forward of its first part, and captures what follows."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped, self.head = Skipped(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.skipped(x))
        return result


@pytest.mark.parametrize(
    ("outside", "is_told"), [pytest.param(0, True, id="unseen"), pytest.param(1024, False, id="set-aside")]
)
def test_parts_that_are_not_captured_are_told_of_by_name_unless_bytes_are_set_aside(
    outside: int, is_told: bool
) -> None:
    compiled, told = remat.compile(PartlySkipped(), budget="1MiB", outside=outside), list[str]()
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            compiled(torch.ones(8)).sum().backward()
        told += [str(each.message) for each in caught if "run uncompiled" in str(each.message)]
    assert len(told) == is_told
    assert all("skipped.layers.0.bias" in each and "head" not in each for each in told)
