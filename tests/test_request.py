"""One request is what every function and every command takes: no option is in one and missing in another."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.cli.commands.compare import compare
from remat.cli.commands.fit import fit
from remat.cli.commands.options import GROUPS, EachRequestOptions, RequestOptions, StepOptions
from remat.cli.commands.plan import plan
from remat.cli.commands.sweep import sweep
from remat.costing.planning_device import find_planning_device
from remat.errors import UsageError
from remat.formulation.solution import Limits
from remat.planning.budget import parse_budget
from remat.planning.request import PlanRequest, RequestKeywords
from remat.units import GIB
from remat.workload.training_loop import TrainingLoop
from tests.test_chunking import LANGUAGE, Language, used_twice
from tests.toys import TRANSFORMER

FIELDS = {field.name for field in dataclasses.fields(PlanRequest)}
OF_LIMITS = {"time_limit", "seed"}  # options that are fields of `Limits`
NOT_ON_A_COMMAND_LINE = {"limits", "solver", "forms"}
OLDER_KEYWORDS = {"exact", "fuse"}  # of fields


def test_keywords_are_the_fields_of_the_request() -> None:
    assert set(RequestKeywords.__annotations__) == FIELDS | OLDER_KEYWORDS | {"time_limit"}
    assert PlanRequest.of(time_limit=3.0, exact=True) == PlanRequest(limits=Limits(time_s=3.0), numerics="bitwise")
    assert PlanRequest.of(fuse=True) == PlanRequest.of(numerics="rounding") == PlanRequest(numerics="rounding")


def test_the_plan_function_spells_every_keyword_out() -> None:
    own = {"workload", "target", "costs", "loop", "batch_size", "menu", "lengths", "on_progress"}
    assert set(inspect.signature(remat.plan).parameters) == own | set(RequestKeywords.__annotations__)


@pytest.mark.parametrize(
    "function",
    [remat.compare, remat.sweep, remat.fit, remat.largest_batch, remat.longest_sequence],
    ids=lambda function: function.__name__,
)
def test_every_other_function_takes_the_same_keywords(function: Callable[..., Any]) -> None:
    hints = typing.get_type_hints(function, include_extras=True)
    assert typing.get_args(hints["wanted"]) == (RequestKeywords,)
    assert {"workload", "target", "loop"} <= set(inspect.signature(function).parameters)


@pytest.mark.parametrize("command", [plan, compare, sweep, fit], ids=lambda command: command.__name__)
def test_every_command_takes_every_option(command: Callable[..., Any]) -> None:
    groups = [hint for hint in typing.get_type_hints(command).values() if hint in GROUPS]
    options = {field.name for group in groups for field in dataclasses.fields(group)}
    beside = {"budget", "headroom"} if command is sweep else set()  # which tries budgets itself
    assert FIELDS - NOT_ON_A_COMMAND_LINE - beside | OF_LIMITS <= options


@pytest.mark.parametrize("group", [RequestOptions, EachRequestOptions])
def test_options_are_the_fields_of_the_request(group: type) -> None:
    options = {field.name for field in dataclasses.fields(group)} - OLDER_KEYWORDS - OF_LIMITS - {"strategies"}
    assert options | {"offload", "budget", "headroom"} | NOT_ON_A_COMMAND_LINE == FIELDS
    assert "offload" in {field.name for field in dataclasses.fields(StepOptions)}


@pytest.mark.parametrize(
    ("wanted", "loop", "says"),
    [
        pytest.param({"fuse": True, "exact": True}, None, "exclude each other", id="fused-and-bitwise"),
        pytest.param({"fuse": True, "numerics": "sums"}, None, "say two things", id="two-answers"),
        pytest.param({"numerics": "any"}, None, "numerics is bitwise, sums or rounding", id="no-numerics"),
        pytest.param({"fuse": True, "execution": "modules"}, None, "groups are fused in eager", id="fused-modules"),
        pytest.param({"fuse": True}, TrainingLoop(ranks=2, shard="zero3"), "states are sharded", id="fused-shards"),
        pytest.param({"offload": "activations", "execution": "modules"}, None, "nothing is offloaded", id="modules"),
        pytest.param({"offload": "weights", "execution": "modules"}, None, "no weights are on the host", id="weights"),
        pytest.param({"offload": "weights", "budget": None}, None, "is chosen for one budget", id="weights-no-budget"),
        pytest.param({"offload": "everything"}, None, "offload is activations", id="unknown"),
        pytest.param({"host_budget": "1GiB"}, None, "a host budget needs offloading", id="nothing-to-offload"),
        pytest.param({"budget": "20"}, None, "20", id="budget-without-unit"),
        pytest.param({"execution": "lazy"}, None, "is not known", id="execution"),
        pytest.param({"execution": "inductor"}, None, r"remat\.compile\(model, budget=", id="compiled"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_before_anything_is_recorded(
    wanted: dict[str, Any], loop: TrainingLoop | None, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        request = PlanRequest.of(**{"budget": "20GiB", **wanted})
        request.require(find_planning_device("h100-80gb"), request.loop(loop))


@pytest.mark.parametrize(
    "wanted", [{"time_limit": 0}, {"time_limit": -1.0}, {"time_limit": "5"}, {"depth": 0}, {"depth": "2"}], ids=str
)
def test_a_number_out_of_range_is_refused(wanted: dict[str, Any]) -> None:
    name, value = next(iter(wanted.items()))
    with pytest.raises(UsageError, match=f"`{name}={value!r}` is"):
        PlanRequest.of(**wanted)


@pytest.mark.parametrize(
    ("wanted", "takes"),
    [
        ({"offload": ["activations"]}, "a name, or two with a comma"),
        ({"execution": 3}, "a name, such as eager"),
        ({"allocator": True}, "settings of PYTORCH_CUDA_ALLOC_CONF as text"),
        ({"limits": 5}, "a remat.Limits"),
        ({"solver": "exact"}, "a function of remat.solvers"),
        ({"forms": "x"}, "a remat.FormChoice"),
        ({"loop": {"accumulation": 2}}, "a remat.TrainingLoop"),
        ({"target": None}, "auto, cuda, cpu, or a card by name"),
        ({"target": 5}, "auto, cuda, cpu, or a card by name"),
        ({"costs": 5}, "the path of a table of kernel times"),
        ({"lengths": 4}, "a list of whole numbers of tokens"),
        ({"lengths": "4"}, "a list of whole numbers of tokens"),
        ({"lengths": ["4"]}, "a list of whole numbers of tokens"),
        ({"on_progress": 3}, "a function of the numbers done and in all"),
    ],
    ids=str,
)
def test_an_argument_of_another_type_is_refused_by_its_name(wanted: dict[str, Any], takes: str) -> None:
    name, value = next(iter(wanted.items()))
    with pytest.raises(UsageError, match=re.escape(f"`{name}=` takes {takes}, not {value!r}.")):
        remat.plan(TRANSFORMER, **{"budget": "20GiB", "target": "cpu", **wanted})


@pytest.mark.parametrize("function", [remat.estimate, remat.profile, remat.check, remat.compare, remat.largest_batch])
def test_every_function_refuses_a_loop_of_another_type(function: Callable[..., Any]) -> None:
    budget = {"budget": "20GiB"} if function in (remat.check, remat.compare, remat.largest_batch) else {}
    with pytest.raises(UsageError, match=r"`loop=` takes a remat\.TrainingLoop, not 5\."):
        function(TRANSFORMER, target="cpu", loop=5, **budget)


@pytest.mark.parametrize("function", [remat.plan, remat.compare, remat.largest_batch], ids=lambda each: each.__name__)
def test_every_function_says_in_a_refusal_why_the_loss_is_whole_and_what_the_headroom_is(
    function: Callable[..., Any],
) -> None:
    workload = dataclasses.replace(LANGUAGE, build=functools.partial(Language, used_twice))
    with pytest.raises(remat.Infeasible, match=r"not chunked: `logsumexp` reads .*\. The headroom of .* comes on top"):
        function(workload, budget="1MiB", headroom="0.9MiB", target="cpu", limits=Limits(workers=1))


def test_a_host_budget_of_another_type_is_refused_by_its_name() -> None:
    with pytest.raises(UsageError, match=r"host_budget=1\.5 is neither a whole number of bytes nor text with a unit"):
        PlanRequest.of(host_budget=1.5)  # type: ignore[arg-type]


def test_a_device_of_torch_is_the_target_of_its_type() -> None:
    assert find_planning_device(torch.device("cpu")) == find_planning_device("cpu")
    assert find_planning_device(torch.device("cpu", 0)) == find_planning_device("cpu")
    with pytest.raises(UsageError, match="target 'meta' is not known; choose auto, cuda, cpu"):
        find_planning_device(torch.device("meta"))


FUNCTIONS = {name: found for name in remat.__all__ if inspect.isfunction(found := getattr(remat, name))}
TAKE_A_WORKLOAD = {name: each for name, each in FUNCTIONS.items() if "workload" in inspect.signature(each).parameters}


@pytest.mark.parametrize("given", [3, "gpt2", nn.Linear(2, 2)], ids=lambda given: type(given).__name__)
@pytest.mark.parametrize("name", TAKE_A_WORKLOAD)
def test_other_things_than_a_workload_are_refused_by_name(name: str, given: Any) -> None:
    others: dict[str, Any] = {"budget": "1GiB", "global_batch": 8, "plan": "none.plan.json", "target": "cpu"}
    function = TAKE_A_WORKLOAD[name]
    known = inspect.signature(function).parameters
    wanted = {key: value for key, value in others.items() if key in known or (key == "budget" and "wanted" in known)}
    if name != "validate":
        wanted.pop("plan", None)
    with pytest.raises(UsageError, match=rf"the step to plan is a remat\.Workload, not {type(given).__name__}"):
        function(given, **wanted)


@pytest.mark.parametrize("function", [remat.workload_of, remat.loop_of], ids=lambda function: function.__name__)
def test_other_things_than_a_trainer_are_refused_by_name(function: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match="a Trainer of transformers or TRL is needed, not int"):
        function(3)


def test_a_budget_of_more_than_the_target_is_refused_and_one_of_more_than_the_step_is_not() -> None:
    with pytest.raises(UsageError, match=r"budget '150%' is more than the memory of the target, 80\.00 GiB"):
        parse_budget("150%", None, 80 * GIB)
    assert parse_budget("150%step", None, 80 * GIB, step_bytes=2 * GIB).limit_bytes == 3 * GIB
