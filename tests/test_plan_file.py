"""A plan file says what was decided, is whole or not there, and is read back as it was written."""

from __future__ import annotations

import itertools
import json
import math
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.errors import UsageError
from remat.evaluation.plan import (
    VERSION,
    Plan,
    Prediction,
    Proof,
    Region,
    SpaceSize,
    from_refs,
    to_refs,
)
from remat.files import write_atomically
from remat.workload.target import TARGETS
from tests.examples import examples
from tests.graphs import DYNAMO_LOOKS_AT_GRAD, TOYS, plans, recorded

pytestmark = pytest.mark.filterwarnings(DYNAMO_LOOKS_AT_GRAD)

GOLDEN = Path(__file__).parent / "golden"
REGIONS = (Region(0, 4, saved=(2,)), Region(6, 18, inner=(Region(6, 12), Region(12, 18))))


def a_plan(name: str = "residual", regions: tuple[Region, ...] = REGIONS) -> Plan:
    graph = recorded(TOYS[name]).graph
    return Plan(
        regions=to_refs(graph, regions),
        fingerprints=graph.fingerprints,
        identities=graph.identities,
        about=graph.about,
        target=TARGETS["a100-40gb"].name,
        costs="estimated",
        budget_bytes=3 << 30,
        predicted={"peak_bytes": 2 << 30, "step_time_us": 1500.0, "recompute_time_us": 300.0, "overhead": 0.25},
        without_checkpointing={"peak_bytes": 4 << 30, "step_time_us": 1200.0},
        solver={"name": "cp-sat", "status": "optimal", "gap": 0.0005},
        space={"segments": 9, "saveable_nodes": 8, "nesting_depth": 2},
    )


def test_what_is_written_is_read(tmp_path: Path) -> None:
    plan = a_plan()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert Plan.load(str(tmp_path / "plan.json")) == plan


@given(st.data())
@settings(max_examples=examples(30, 100))
def test_regions_are_placed_and_found_again(data: st.DataObject) -> None:
    graph = recorded(TOYS[data.draw(st.sampled_from(("residual", "broken", "multi-output")))]).graph
    regions = data.draw(plans(graph))
    assert from_refs(graph, to_refs(graph, regions)) == regions


def test_a_region_is_named_by_call_and_ordinal() -> None:
    graph = recorded(TOYS["broken"]).graph
    border = next(i for i, node in enumerate(graph.nodes) if node.call == 1)
    before, after = to_refs(graph, (Region(1, 3), Region(border, border + 2)))
    assert (before.call, before.first.ordinal, before.last.ordinal) == (0, 1, 2)
    assert (after.call, after.first.ordinal, after.last.ordinal) == (1, 0, 1)
    assert after.first.name == graph.nodes[border].name and after.count_nodes() == 2


def test_random_nodes_are_listed_unless_saved() -> None:
    graph = recorded(TOYS["residual"]).graph
    random = [i for i, node in enumerate(graph.nodes) if node.random]
    whole = Region(0, len(graph.nodes))
    assert [ref.ordinal for ref in to_refs(graph, (whole,))[0].random] == random and len(random) == 3
    saving = Region(0, len(graph.nodes), saved=(random[0],))
    assert [ref.ordinal for ref in to_refs(graph, (saving,))[0].random] == random[1:]


def test_a_plan_prints_what_a_person_asks() -> None:
    assert str(a_plan()).splitlines() == [
        "Plan for residual on a100-40gb within 3.00 GiB",
        "  regions       2   (1 nested, 16 nodes, 1 saved)",
        "  peak       2.00 GiB predicted, 4.00 GiB without checkpointing",
        "  step time  1.50 ms predicted from estimated costs, +25.0 % for the plan, 25.0 % recomputation",
        "  solver     cp-sat: optimal, gap 0.05 %",
    ]


# Files that are no plan


def refused(path: Path, text: str | bytes) -> str:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(UsageError) as caught:
        Plan.load(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("file", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.name)
def test_what_files_hold_has_a_name_and_is_written_as_it_was_read(file: Path) -> None:
    data, plan = json.loads(file.read_text()), Plan.load(file)
    for field, kind in (("predicted", Prediction), ("solver", Proof), ("space", SpaceSize)):
        assert data[field].keys() <= kind.__annotations__.keys()
        assert plan.to_json()[field] == data[field]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no plan file at"):
        Plan.load(tmp_path / "nowhere.json")


def test_a_folder_is_no_plan(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        Plan.load(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "3", "{}", '{"format": "remat-profile", "version": 1}', b"\xff\xfe"]
)
def test_a_corrupt_file_is_refused(tmp_path: Path, text: str | bytes) -> None:
    assert "is not a plan file" in refused(tmp_path / "plan.json", text)


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    text = json.dumps(a_plan().to_json(), indent=1)
    for end in itertools.chain(range(1, len(text), 97), [len(text) - 1]):
        assert "in the middle of it; copy it again" in refused(tmp_path / "plan.json", text[:end])


@pytest.mark.parametrize("version", [VERSION + 1, 99])
def test_a_newer_file_is_refused_with_the_remedy(tmp_path: Path, version: int) -> None:
    message = refused(tmp_path / "plan.json", json.dumps({**a_plan().to_json(), "version": version}))
    assert f"plan version {version}" in message and "Update remat" in message


@pytest.mark.parametrize("version", [None, "1", 1.5])
def test_a_version_that_is_no_number_is_refused(tmp_path: Path, version: Any) -> None:
    refused(tmp_path / "plan.json", json.dumps({**a_plan().to_json(), "version": version}))


@pytest.mark.parametrize("key", ["regions", "fingerprints", "about", "budget_bytes", "predicted", "solver"])
def test_an_incomplete_file_is_refused(tmp_path: Path, key: str) -> None:
    data = a_plan().to_json()
    del data[key]
    assert "is not a complete plan file" in refused(tmp_path / "plan.json", json.dumps(data))


@pytest.mark.parametrize("regions", [3, [3], [{}], [{"first": {"call": 0}}], [None], "text"])
def test_regions_that_are_none_are_refused(tmp_path: Path, regions: Any) -> None:
    data = {**a_plan().to_json(), "regions": regions}
    assert "is not a complete plan file" in refused(tmp_path / "plan.json", json.dumps(data))


# Writing


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        pytest.param(("budget_bytes",), "3GiB", "budget_bytes is '3GiB', not a number", id="budget in words"),
        pytest.param(("budget_bytes",), -5, "budget_bytes is -5", id="budget below nothing"),
        pytest.param(("predicted", "peak_bytes"), math.nan, "peak_bytes is nan", id="not a number"),
        pytest.param(("predicted",), {}, "peak_bytes", id="no prediction"),
        pytest.param(("regions", 0, "last", "ordinal"), 99, "node 99 of graph call 0, which is not there", id="node"),
        pytest.param(("regions", 1, "last", "ordinal"), 5, "ends with node 5, before its first", id="backwards"),
    ],
)
def test_a_file_that_was_edited_into_nonsense_is_refused(
    tmp_path: Path, path: tuple[Any, ...], value: Any, said: str
) -> None:
    data: Any = a_plan().to_json()
    held = data
    for key in path[:-1]:
        held = held[key]
    held[path[-1]] = value
    assert said in refused(tmp_path / "plan.json", json.dumps(data))


def test_a_plan_that_saves_time_is_read() -> None:
    data = a_plan().to_json()
    data["predicted"]["overhead"] = -0.475
    assert Plan.from_json(data).predicted["overhead"] == -0.475


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    write_atomically(path, "old")

    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UsageError, match="No space left on device"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_new_file_is_whole_before_it_has_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = tmp_path / "plan.json", []
    write_atomically(path, "old")
    replace = os.replace

    def watched(source: str, target: Path) -> None:
        seen.append((Path(source).read_text(), path.read_text(), Path(source).parent))
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    write_atomically(path, "new")
    assert seen == [("new", "old", tmp_path)] and path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_folder_that_is_not_there_is_an_error_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        a_plan().save(tmp_path / "nowhere" / "plan.json")
