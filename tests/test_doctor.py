"""The doctor names why a run needed more than its plan promised: of every cause that a snapshot shows, the right."""

from __future__ import annotations

import dataclasses
import json
import pickle
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.cuda import _memory_viz

import remat as library
from remat.costing.profile import Profile
from remat.diagnosis.findings import EXECUTOR, Diagnosis, batch_of, blamed, diagnose
from remat.diagnosis.snapshot import Allocation, Frame, of_data, read
from remat.errors import UsageError
from remat.evaluation.evaluator import Memory
from remat.evaluation.plan import Plan, Region
from remat.execution.regions_in_graph import require_regions_in
from remat.units import GIB, MIB
from tests.command_line import MODEL, Ran, Remat
from tests.limited_card import CardFull
from tests.snapshots import PLANNED, UNPLANNED, Run, trained

STEP = ("--model", "model.py:stack", "--target", "h100-80gb", "--optimizer", "adamw:fused")


@dataclasses.dataclass(frozen=True)
class Planned:
    """A plan that bites, its step, and the same step with twice the batch."""

    folder: Path
    plan: Plan
    profile: Profile
    regions: tuple[Region, ...]
    doubled: Profile

    @property
    def memory(self) -> Memory:
        return memory_of(self.profile)

    def diagnosed(self, run: Run, *, with_step: bool = True) -> Diagnosis:
        profile = self.profile if with_step else None
        return diagnose(of_data(run.data()), self.plan, profile, self.regions, card_bytes=run_card(run))


def run_card(run: Run) -> int | None:
    return 80 * GIB if run.capacity_bytes else None


def memory_of(profile: Profile) -> Memory:
    return Memory(profile.graph, profile.costs.workspace_per_op(profile.graph))


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planned]:
    from remat.cli import main as cli

    folder = tmp_path_factory.mktemp("doctor")
    (folder / "model.py").write_text(MODEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        assert cli.main(["plan", *STEP, "--budget", "71MiB"]) == 0
        assert cli.main(["profile", *STEP, "--out", "step.json"]) == 0
        assert cli.main(["profile", *STEP, "--batch-size", "8192", "--out", "double.json"]) == 0
    plan, profile = Plan.load(folder / "stack.plan.json"), Profile.load(folder / "step.json")
    assert plan.regions
    regions = require_regions_in(plan, profile.graph)
    yield Planned(folder, plan, profile, regions, Profile.load(folder / "double.json"))


# The causes


def test_a_run_that_kept_its_promise_is_told_so(planned: Planned) -> None:
    found = planned.diagnosed(trained(planned.memory, planned.regions))
    assert [finding.kind for finding in found.findings] == ["as promised"]
    assert found.requested_bytes == pytest.approx(planned.plan.predicted["peak_bytes"], rel=1e-3)


@pytest.mark.parametrize("stack", [UNPLANNED, ()], ids=["by its stacks", "by its peak"])
def test_a_plan_that_was_not_applied(planned: Planned, stack: tuple[tuple[str, int, str], ...]) -> None:
    found = planned.diagnosed(trained(planned.memory, (), Run(stack)))
    assert [finding.kind for finding in found.findings] == ["not applied"]
    plain = planned.plan.without_checkpointing["peak_bytes"]
    assert found.findings[0].explains_bytes == plain - planned.plan.predicted["peak_bytes"]


@pytest.mark.parametrize("applied", [True, False])
def test_a_larger_batch(planned: Planned, applied: bool) -> None:
    stack = PLANNED if applied else UNPLANNED
    regions = planned.regions if applied else ()
    found = planned.diagnosed(trained(memory_of(planned.doubled), regions, Run(stack)))
    kinds = [finding.kind for finding in found.findings]
    assert kinds == (["larger batch"] if applied else ["not applied", "larger batch"])
    assert "8192 in place of 4096" in found.findings[-1].sentence


def test_what_the_plan_does_not_know_is_told_by_the_line_that_asked_for_it(planned: Planned) -> None:
    run = Run()
    run.stack = (("/site-packages/torch/_tensor.py", 3, "clone"), ("/home/me/metrics.py", 41, "remember"))
    for _ in range(3):
        run.malloc(5 * MIB + 8)
    run.stack = PLANNED
    found = planned.diagnosed(trained(planned.memory, planned.regions, run))
    assert [finding.kind for finding in found.findings] == ["unknown allocations"]
    assert "15.00 MiB in 3 from /home/me/metrics.py:41 remember" in found.findings[0].sentence


def test_fragmentation(planned: Planned) -> None:
    """Of three segments of 20 MiB each holds 9 that stay and 11 that are free: 33 MiB are, and 20 are refused."""
    run = Run(card_bytes=80 * GIB, others_bytes=80 * GIB - 60 * MIB)
    for block in [(run.malloc(9 * MIB), run.malloc(9 * MIB))[0] for _ in range(3)]:
        run.free(block)
    with pytest.raises(CardFull):
        run.malloc(20 * MIB)
    found = planned.diagnosed(run)
    assert found.verdict == "fragmentation"
    assert (
        "a request of 20.00 MiB failed while 33.00 MiB were free in pieces within the 60.00 MiB"
        in found.findings[0].sentence
    )


def test_another_process(planned: Planned) -> None:
    others = 80 * GIB - 70 * MIB
    found = planned.diagnosed(trained(planned.memory, planned.regions, Run(others_bytes=others)))
    assert found.out_of_memory is not None
    assert "another process" in {finding.kind for finding in found.findings}


def test_a_snapshot_without_history_says_how_to_get_one(planned: Planned) -> None:
    run = trained(planned.memory, planned.regions)
    run.events.clear()
    found = planned.diagnosed(run)
    assert found.verdict == "no history" and "_record_memory_history" in found.findings[0].remedy


# Reading


def test_torch_reads_these_snapshots_too(planned: Planned) -> None:
    data = trained(planned.memory, planned.regions).data()
    assert "mismatch" not in _memory_viz.segsum(data)
    assert _memory_viz.trace(data)


def test_a_history_that_begins_late_has_the_same_peak(planned: Planned) -> None:
    """Events are a ring: the first may be gone."""
    run = trained(planned.memory, planned.regions)
    whole = of_data(run.data())
    assert whole.peak_requested_bytes == run.peak_requested_bytes
    assert whole.moments[-1].reserved_bytes == run.reserved_bytes
    at = whole.peak_at
    assert at is not None
    late = of_data({**run.data(), "device_traces": [run.events[at:]]})
    assert late.peak_requested_bytes == whole.peak_requested_bytes
    by_address = {each.address: each.size_bytes for each in whole.alive_at(at)}
    assert sum(by_address.values()) == whole.peak_requested_bytes
    assert {each.address: each.size_bytes for each in late.alive_at(0)} == by_address


def test_requests_of_another_model_name_no_batch() -> None:
    assert batch_of([4 * MIB, 8 * MIB, *[3 * MIB] * 100], [4 * MIB, 8 * MIB], planned=8) is None


@pytest.mark.parametrize(
    ("sizes", "batch"),
    [
        ([4 * MIB, 8 * MIB], 8),
        ([6 * MIB, 12 * MIB], 12),
        ([2 * MIB, 4 * MIB], 4),
        ([5 * MIB, 7 * MIB], None),
        ([], None),
    ],
)
def test_a_batch_is_read_off_the_sizes_of_requests(sizes: list[int], batch: int | None) -> None:
    assert batch_of(sizes, [4 * MIB, 8 * MIB], planned=8) == batch


def test_the_line_that_is_blamed_is_the_users() -> None:
    frames = (Frame("??", 0, "malloc"), Frame("/x/torch/nn/modules/linear.py", 3, "forward"), Frame("/x/a.py", 9, "f"))
    assert blamed(Allocation(0, 1, frames)) == "/x/a.py:9 f"
    assert blamed(Allocation(0, 1, frames[:1])) == "?? malloc"
    assert "not recorded" in blamed(Allocation(0, 1))


def files_below(step: Callable[[], object]) -> set[str]:
    """The files in the stacks of what autograd keeps while `step` runs."""
    files: set[str] = set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        files.update(frame.filename for frame in traceback.extract_stack())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    return files


@pytest.mark.filterwarnings("ignore:hooks on saved tensors")
def test_a_plan_that_is_applied_stands_in_the_stacks_of_what_the_forward_makes(planned: Planned) -> None:
    """The frames that the doctor looks for exist: the executor's files, under their names."""
    names: dict[str, Any] = {}
    exec(MODEL, names)
    model, batch = names["build"](), names["batch"](4096, None)
    assert not any(EXECUTOR in file for file in files_below(lambda: names["step"](model, batch)))
    library.apply(model, planned.plan)
    assert any(EXECUTOR in file for file in files_below(lambda: names["step"](model, batch)))


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("called",)


@pytest.mark.parametrize(
    ("data", "message"),
    [(Evil(), "names builtins.print"), ([], "lacks segments"), ({"segments": [{}], "device_traces": [[]]}, "KeyError")],
)
def test_what_is_no_snapshot_is_refused_and_never_run(
    data: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(data))
    with pytest.raises(UsageError, match=message):
        read(path)
    assert capsys.readouterr().out == ""


# The command


def test_the_command_names_the_verdict_first(planned: Planned, remat: Remat) -> None:
    trained(planned.memory, (), Run(UNPLANNED)).save(Path("snapshot.pickle"))
    arguments = ("doctor", "snapshot.pickle", "--plan", str(planned.folder / "stack.plan.json"))
    ran: Ran = remat(*arguments, "--profile", str(planned.folder / "step.json"))
    assert ran.exit_code == 0, ran.stderr
    assert ran.stdout.index("not applied") > ran.stdout.index("predicted") and "remat.apply" in ran.stdout
    assert remat(*arguments, "--json").data["verdict"] == "not applied"  # the step recorded again from the plan


def test_without_a_step_sizes_are_not_compared_and_that_is_said(planned: Planned, remat: Remat) -> None:
    plan = dataclasses.replace(planned.plan, about={**planned.plan.about, "model_spec": None})
    plan.save("bare.plan.json")
    trained(planned.memory, (), Run(UNPLANNED)).save(Path("snapshot.pickle"))
    ran = remat("doctor", "snapshot.pickle", "--plan", "bare.plan.json")
    assert "not applied" in ran.stdout and "no comparison of sizes" in ran.stdout
    assert json.loads(remat("doctor", "snapshot.pickle", "--plan", "bare.plan.json", "--json").stdout)["findings"]
