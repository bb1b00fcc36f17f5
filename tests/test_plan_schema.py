"""The schema of the plan file, which ships with the package, is what plans of every version and execution are."""

from __future__ import annotations

import copy
import dataclasses
import importlib.resources
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import remat
from remat.evaluation.form import Chunk
from remat.evaluation.plan import (
    FORMAT,
    VERSION,
    AllocatorPeaks,
    NodeRef,
    OffloadRef,
    Plan,
    Prediction,
    Proof,
    RegionRef,
    SpaceSize,
)
from remat.execution import executions
from tests.toys import TRANSFORMER, Transformer

fastjsonschema = pytest.importorskip("fastjsonschema")
pytestmark = pytest.mark.usefixtures("one_thread", "fresh_dynamo")

Document = dict[str, Any]

SCHEMA: Document = json.loads(
    (importlib.resources.files("remat.evaluation") / "plan.schema.json").read_text(encoding="utf-8")
)
GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.json"))
is_plan: Callable[[Document], Document] = fastjsonschema.compile(SCHEMA)
LARGER = dataclasses.replace(TRANSFORMER, build=lambda: Transformer(layers=3, width=32), batch_size=128)


def document(plan: Plan) -> Document:
    """`plan` as its file says it."""
    found: Document = json.loads(json.dumps(plan.to_json()))
    return found


# Plans are what the schema says


@pytest.mark.parametrize("file", GOLDEN, ids=lambda path: path.name)
def test_plan_files_of_every_version_are_what_the_schema_says(file: Path) -> None:
    is_plan(json.loads(file.read_text()))
    is_plan(document(Plan.load(file)))


def test_every_version_has_a_file() -> None:
    assert {json.loads(file.read_text())["version"] for file in GOLDEN} == set(SCHEMA["properties"]["version"]["enum"])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("options", "holds"),
    [
        pytest.param({}, lambda plan: plan.solver["status"] == "optimal", id="eager"),
        pytest.param({"exact": True, "depth": 1}, lambda plan: plan.regions, id="exact"),
        pytest.param(
            {"offload": "optimizer", "target": "h100-80gb", "budget": "100%step"},
            lambda plan: plan.about["offload_optimizer"] and plan.to_json()["version"] == 4 and not plan.offloads,
            id="optimizer's state on the host",
        ),
        pytest.param({"execution": "modules"}, lambda plan: plan.is_of_modules, id="modules"),
        pytest.param(
            {"fuse": True, "target": "h100-80gb", "budget": "100%step"},
            lambda plan: plan.about["fused"],
            id="fused",
            marks=pytest.mark.exhaustive,  # replays every group
        ),
    ],
)
def test_plans_of_every_execution_are_what_the_schema_says(options: Document, holds: Callable[[Plan], bool]) -> None:
    plan = remat.plan(LARGER, **{"target": "cpu", "budget": "90%step", **options})
    assert holds(plan)
    is_plan(document(plan))


def test_every_execution_is_named() -> None:
    assert tuple(SCHEMA["properties"]["execution"]["enum"]) == executions.NAMES + executions.EARLIER_EXECUTIONS


# The schema says what plans are


def test_the_schema_is_of_the_version_that_is_written() -> None:
    assert SCHEMA["properties"]["format"]["const"] == FORMAT
    assert max(SCHEMA["properties"]["version"]["enum"]) == VERSION


@pytest.mark.parametrize(
    ("name", "kind"), [("node", NodeRef), ("region", RegionRef), ("offload", OffloadRef), ("chunk", Chunk)]
)
def test_what_is_named_by_a_class_has_its_fields(name: str, kind: Any) -> None:
    assert list(SCHEMA["definitions"][name]["properties"]) == [field.name for field in dataclasses.fields(kind)]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("prediction", Prediction), ("proof", Proof), ("space", SpaceSize), ("allocator", AllocatorPeaks)],
)
def test_what_is_a_typed_dictionary_has_its_keys(name: str, kind: Any) -> None:
    assert list(SCHEMA["definitions"][name]["properties"]) == list(kind.__annotations__)


def test_the_file_has_the_fields_of_a_plan_and_a_head() -> None:
    fields = {field.name for field in dataclasses.fields(Plan)}
    assert SCHEMA["properties"].keys() == fields | {"format", "version", "remat", "regions_are"}


def test_everything_is_described() -> None:
    def unsaid(part: Document, where: str) -> list[str]:
        found = [] if {"description", "$ref", "const", "enum"} & part.keys() else [where]
        for name, inner in part.get("properties", {}).items():
            found += unsaid(inner, f"{where}.{name}")
        return found

    assert unsaid(SCHEMA, "plan") == []
    assert [name for name, part in SCHEMA["definitions"].items() if unsaid(part, name)] == []


# What is no plan


def changed(**entries: Any) -> Callable[[Document], None]:
    return lambda data: data.update(entries)


def changed_in(name: str, **entries: Any) -> Callable[[Document], None]:
    return lambda data: data[name].update(entries)


def without(name: str) -> Callable[[Document], None]:
    return lambda data: data.pop(name)


@pytest.mark.parametrize(
    ("version", "change"),
    [
        pytest.param(3, changed(format="remat-profile"), id="another format"),
        pytest.param(3, changed(version=5), id="a version to come"),
        pytest.param(3, changed(surprise=1), id="a field that nobody knows"),
        pytest.param(3, changed(execution="jit"), id="an execution that nobody knows"),
        pytest.param(3, changed(budget_bytes="20GiB"), id="a budget with a unit"),
        pytest.param(3, changed(budget_bytes=1.5), id="half a byte"),
        pytest.param(3, without("budget_bytes"), id="no budget"),
        pytest.param(3, without("identities"), id="version 3 without identities"),
        pytest.param(2, changed(execution="eager"), id="version 2 with an execution"),
        pytest.param(1, without("regions_are"), id="version 1 without what regions are"),
        pytest.param(4, without("offloads"), id="version 4 with nothing on the host"),
        pytest.param(4, changed(version=3), id="version 3 with offloads"),
        pytest.param(4, changed(version=5), id="version 5 that lets go of nothing between slices"),
        pytest.param(5, changed(version=4), id="version 4 that does"),
        pytest.param(3, changed(regions=[{"first": {}}]), id="half a region"),
        pytest.param(3, changed_in("solver", status="infeasible"), id="a plan that there is not"),
        pytest.param(3, changed_in("predicted", peak_bytes=-1), id="less than nothing"),
        pytest.param(3, changed_in("identities", graphs=[["linear"]]), id="a line that says half"),
        pytest.param(3, changed_in("about", batch_size=0), id="an empty batch"),
    ],
)
def test_what_is_no_plan_is_refused(version: int, change: Callable[[Document], None]) -> None:
    (file,) = (
        path for path in GOLDEN if re.fullmatch(rf"toy-(transformer|language)\.v{version}\.plan\.json", path.name)
    )
    data = json.loads(file.read_text())
    is_plan(copy.deepcopy(data))
    change(data)
    with pytest.raises(fastjsonschema.JsonSchemaValueException):
        is_plan(data)
