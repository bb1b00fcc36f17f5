"""The common beginning of two forms of a step: shapes found there are those of the other."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.costing.planning_device import find_planning_device
from remat.execution.executions import load
from remat.formulation.problem import Problem
from remat.models import gpt2
from remat.offloading.link import Link
from remat.planning.profiling import fake_step, profile_step
from tests.examples import examples
from tests.graphs import ToyNode, chain, every_cut, toy_graph, toys
from tests.studies import forms_of

AMPLE = 10**12
CHANGES: tuple[dict[str, Any], ...] = ({"time_us": 99}, {"extra": 40}, {"parameter": 44}, {"workspace_bytes": 48})


def posed(nodes: list[ToyNode], *, depth: int = 2, like: Problem | None = None, link: Link | None = None) -> Problem:
    graph, costs = toy_graph(nodes)
    return Problem(graph, costs, every_cut(graph, depth=depth), AMPLE, link, like)


def alike(one: list[ToyNode], other: list[ToyNode]) -> int:
    return posed(one)._beginnings.alike(posed(other)._beginnings)


@pytest.mark.exhaustive
@given(toys(most=8), st.data(), st.sampled_from((1, 2)))
@settings(max_examples=examples(40, 150))
def test_shapes_of_another_form_are_those_found_alone(nodes: list[ToyNode], data: st.DataObject, depth: int) -> None:
    changed = list(nodes)
    for at in data.draw(st.sets(st.integers(0, len(nodes) - 1), max_size=2)):
        more = data.draw(st.sampled_from(CHANGES))
        changed[at] = dataclasses.replace(changed[at], **more)
    if data.draw(st.booleans()):
        changed.append(ToyNode(4, inputs=(len(changed) - 1,)))
    known = posed(nodes, depth=depth)
    assert known.runs
    assert posed(changed, depth=depth, like=known).runs == posed(changed, depth=depth).runs


EIGHT = chain(4, 4, 4, 4, 4, 4, 4, 4)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"size": 8}, id="size"),
        pytest.param({"time_us": 5}, id="time"),
        pytest.param({"workspace_bytes": 5}, id="workspace"),
        pytest.param({"parameter": 7}, id="gradient"),
        pytest.param({"keeps": frozenset({"inputs"})}, id="saves"),
    ],
)
def test_forms_are_alike_up_to_where_they_differ(change: dict[str, Any]) -> None:
    other = [*EIGHT[:5], dataclasses.replace(EIGHT[5], **change), *EIGHT[6:]]
    assert alike(EIGHT, EIGHT) == 8
    assert alike(EIGHT, other) == (4 if "size" in change else 5)  # the backward of node 4 begins with that much


def test_a_longer_head_leaves_what_comes_before_it_alike() -> None:
    longer = [*EIGHT[:6], ToyNode(12, (5,)), ToyNode(4, (6,)), ToyNode(4, (7,))]
    assert alike(EIGHT, longer) == 5  # while the backward of node 5 begins, the gradient that it was given goes


def test_forms_that_differ_at_once_share_nothing() -> None:
    assert alike(EIGHT, [dataclasses.replace(EIGHT[0], size=8), *EIGHT[1:]]) == 0


def test_with_a_link_only_what_leaves_everything_on_the_device_is_shared() -> None:
    link = Link(bytes_per_us=1.0, latency_us=0.0, host_bytes=AMPLE)
    linked = posed(EIGHT, link=link)
    assert linked.without_link().runs
    problem = posed(EIGHT, link=link, like=linked)
    assert problem._like is None
    assert problem.without_link()._shapes == linked.without_link()._shapes


@pytest.mark.exhaustive
@pytest.mark.nightly
def test_a_step_with_its_loss_in_slices_takes_nearly_all_shapes_from_the_step_as_captured() -> None:
    place = find_planning_device("h100-80gb")
    workload = gpt2.workload("gpt2", n_embd=32, n_layer=5, n_head=2, batch_size=2, n_positions=16, vocab_size=512)
    step, how = fake_step(workload, place), load("eager")
    profile = profile_step(step, place)
    sliced = forms_of(step, profile).in_slices(2).profile
    known = how.pose(profile, how.space(profile.graph), AMPLE)
    assert known.runs
    problem = how.pose(sliced, how.space(sliced.graph), AMPLE, like=known)
    assert problem.runs == how.pose(sliced, how.space(sliced.graph), AMPLE).runs
    assert problem._beginnings.alike(known._beginnings) >= len(problem.space.segments) - 3
