"""Races are seen on the card: what forgets to wait gives other numbers under some schedule, what waits under none.

Each fault is one that a GPU would show now and then. `late-copies` runs copies when somebody waits for them,
`late-compute` runs them as soon as they are issued, `shuffled` draws an order; see tests/card/runtime/streams.h.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from remat.host.optimizer_state import OffloadedState
from tests import test_offloading, test_offloading_optimizers, test_weights_on_host
from tests.devices import ON_CARD, SCHEDULES, streams
from tests.offloads import FAULTS, ORDERS, LateStreams
from tests.toys import CHOICES, plan_for

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not ON_CARD, reason="is about the card, see tests/card"),
    pytest.mark.usefixtures("fresh_dynamo", "one_thread"),
]

Numbers = list[torch.Tensor]
UNVERIFIED = {"verify_first_step": False}  # the first step's check would raise before numbers are compared


def activations(fault: str | None, choice: str = "every-block") -> Numbers:
    _, planned, _ = test_offloading.offloading_all(LateStreams(fault), choice, **UNVERIFIED)
    step = test_offloading.STEPS["two forwards before a backward"]
    return [*test_offloading.trained(planned, step), *test_offloading.trained(planned, step)]


def optimizer(fault: str | None) -> Numbers:
    model = test_offloading_optimizers.made_of()
    made = test_offloading_optimizers.optimizer_of("AdamW", model, {"foreach": True})
    OffloadedState(made, LateStreams(fault), 1)
    test_offloading_optimizers.trained(model, made, 6)
    return [p.detach().clone() for p in model.parameters()]


def weights(fault: str | None, choice: str = "every-block") -> Numbers:
    plan = plan_for(test_weights_on_host.FROZEN, CHOICES[choice])
    copies = LateStreams(fault, shares_host=False)
    model = test_weights_on_host.on_host(
        copy.deepcopy(test_weights_on_host.frozen()).cuda(), plan, copies, **UNVERIFIED
    )
    return [each for _ in range(2) for each in test_weights_on_host.gradients(model)]


RUNS: dict[str, Callable[[str | None], Numbers]] = {
    "activations": activations,
    "activations, some saved": functools.partial(activations, choice="saved-matmuls"),
    "optimizer": optimizer,
    "weights": weights,
    "weights, nothing recomputed": functools.partial(weights, choice="nothing"),
}
# Frozen weights never go out: they are on the host, and are read alone.
BACK = ("uses before the copy back", "brings back where compute still reads")
RACES = [(name, fault) for name in RUNS for fault in ((*FAULTS, *ORDERS) if "weights" not in name else BACK)]


def under(schedule: str, run: Callable[[str | None], Numbers], fault: str | None) -> Numbers:
    with streams(schedule):
        found = run(fault)
        torch.cuda.synchronize()
    return found


def same(left: Numbers, right: Numbers) -> bool:
    return all(map(torch.equal, left, right))


@pytest.mark.parametrize("name", RUNS)
def test_what_waits_computes_the_same_under_every_schedule(name: str) -> None:
    expected = under("now", RUNS[name], None)
    assert [schedule for schedule in SCHEDULES if not same(expected, under(schedule, RUNS[name], None))] == []


@pytest.mark.parametrize(("name", "fault"), RACES)
def test_what_forgets_to_wait_is_caught(name: str, fault: str) -> None:
    expected = under("now", RUNS[name], None)
    assert any(not same(expected, under(schedule, RUNS[name], fault)) for schedule in SCHEDULES)


def used_on_another_stream(recorded: bool) -> torch.Tensor:
    """A sum on a side stream of memory that compute lets go of, and takes again for something else."""
    side, model = torch.cuda.Stream(), nn.Linear(64, 64).cuda()
    with torch.no_grad():
        x = model.weight * 2
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            total = x.sum(0)
        if recorded:
            x.record_stream(side)
        del x
        torch.full((64, 64), 7.0, device="cuda")
        torch.cuda.current_stream().wait_stream(side)
        return total - 2 * model.weight.sum(0)


def test_memory_used_on_another_stream_must_be_recorded() -> None:
    with streams("late-copies"):
        kept, lost = used_on_another_stream(recorded=True), used_on_another_stream(recorded=False)
        assert kept.abs().max() < 1e-4 and lost.abs().max() > 100


def test_a_copy_from_pinned_memory_reads_it_when_it_runs_and_from_pageable_memory_at_once() -> None:
    with streams("late-copies"):
        for pinned, expected in ((True, 2.0), (False, 1.0)):
            source, side = torch.ones(8, pin_memory=pinned), torch.cuda.Stream()
            with torch.cuda.stream(side):
                there = source.to("cuda", non_blocking=True)
            source.fill_(2)
            side.synchronize()
            assert there.tolist() == [expected] * 8


def test_an_event_is_done_when_what_was_issued_before_it_has_run() -> None:
    with streams("late-copies"):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            made = torch.ones(4, device="cuda").exp()
            done = side.record_event()
        assert not done.query() and not side.query()
        done.synchronize()
        assert done.query() and made.isfinite().all()
