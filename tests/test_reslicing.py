"""The record of a step in other slices is, field for field, the one that running the step in them makes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from remat.costing.planning_device import find_planning_device
from remat.evaluation.form import Form
from remat.evaluation.graph import Graph
from remat.planning.profiling import fake_step, profile_step
from remat.recording import reslice
from remat.recording.fake_step import FakeStep
from remat.recording.record import record
from remat.recording.recorder import Recorder
from remat.recording.reslice import Resliced
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload
from tests import test_chunking, toys
from tests.test_chunking import LANGUAGE, MIXED, Language

SLICES = (2, 1, 5)


class Twice(torch.nn.Module):
    """Two passes of one model, each with a head and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Language(test_chunking.plain)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        first, second = self.model(ids, labels), self.model(ids.flip(1), labels)
        return {"loss": first["loss"] + 0.5 * second["loss"]}


def clamped(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Autograd saves the logits themselves for it, all of a slice for each of its pieces."""
    return F.cross_entropy(logits.clamp(-5.0, 5.0).flatten(0, -2), labels.flatten())


def with_loss(loss: Callable[..., torch.Tensor], **changes: Any) -> Workload:
    build = functools.partial(Language, loss, **changes)
    return dataclasses.replace(MIXED, name=loss.__name__, build=build)


WORKLOADS = [
    LANGUAGE,
    MIXED,
    with_loss(test_chunking.capped),
    with_loss(clamped),
    dataclasses.replace(with_loss(clamped), name="clamped-float32", autocast=None),
    with_loss(test_chunking.summed, bias=False),
    with_loss(test_chunking.shifted, dropout=0.0),
    dataclasses.replace(LANGUAGE, name="twice", build=Twice),
    dataclasses.replace(toys.TRANSFORMER, name="tied"),
]


def stated(graph: Graph) -> dict[str, Any]:
    """All that a record says, its kinds by operator: in what order they are listed does not matter."""
    fields = {each.name: getattr(graph, each.name) for each in dataclasses.fields(graph)}
    for table in ("storages", "saved_tensors", "inner"):
        fields |= {f"{table}.{name}": column.tolist() for name, column in vars(fields.pop(table)).items()}
    kinds = fields.pop("kinds")
    fields["op_kind"] = [kinds[kind] for kind in fields["op_kind"]]
    fields["kinds"] = {kind.key for kind in kinds}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in fields.items()}


def forms(step: FakeStep) -> list[Form]:
    heads = [head for head, _ in step.graphs.heads]
    assert heads
    return [Form(tuple(dataclasses.replace(head, slices=count) for head in heads)) for count in SLICES]


def both(workload: Workload, target: str, loop: TrainingLoop | None = None, fused: bool = False) -> list[Any]:
    """(the record from that in other slices, the record of the step as it runs), for several numbers of slices."""
    place = find_planning_device(target)
    step = fake_step(workload, place, loop=loop)
    whole = profile_step(step, place).graph if target != "cpu" else record(step)
    alignment_bytes = place.target.alignment_bytes
    resliced = Resliced(step, alignment_bytes=alignment_bytes, whole=whole)
    found = []
    for form in (dataclasses.replace(each, fused=fused) for each in forms(step)):
        graph = resliced.record(form)
        with step.in_form(form), every_operator_run():
            found.append((graph, record(step, alignment_bytes=alignment_bytes, whole=whole)))
    return found


@contextlib.contextmanager
def every_operator_run() -> Iterator[None]:
    """Run repeated parts of a head every time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorder, "known", lambda self, what: contextlib.nullcontext(False))
        yield


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Slices in which steps were recorded for `Resliced`."""
    found: list[tuple[int, ...]] = []
    original = reslice.record_with

    def noted(step: FakeStep, **options: Any) -> Any:
        found.append(tuple(chunk.slices for chunk in step.form.chunks))
        return original(step, **options)

    monkeypatch.setattr(reslice, "record_with", noted)
    return found


@pytest.mark.often(
    "shifted-h100-80gb", "language-cpu", "clamped-cpu", "summed-cpu", "twice-a100-80gb", "tied-a100-80gb"
)
@pytest.mark.fast("shifted-h100-80gb")
@pytest.mark.parametrize("target", ["cpu", "a100-80gb", "h100-80gb"])
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_the_record_in_other_slices_is_that_of_the_step(
    workload: Workload, target: str, recorded: list[tuple[int, ...]]
) -> None:
    found = both(workload.sized(128), target)
    for graph, expected in found:
        assert stated(graph) == stated(expected)
    assert len(recorded) == 1, "each was recorded by itself"
    assert len({graph.op_count for graph, _ in found}) > 1, "slices made no difference"


@pytest.mark.exhaustive
@pytest.mark.often("language-options0", "language-amp-options1", "language-amp-options2")
@pytest.mark.parametrize(
    "options", [{"loop": TrainingLoop(accumulation=4)}, {"loop": TrainingLoop(clip_grad_norm=True)}, {"fused": True}]
)
@pytest.mark.parametrize("workload", [MIXED, LANGUAGE], ids=lambda workload: workload.name)
def test_accumulation_clipping_and_fused_groups_make_no_difference(
    workload: Workload, options: Any, recorded: list[Any]
) -> None:
    for graph, expected in both(workload.sized(128), "h100-80gb", **options):
        assert stated(graph) == stated(expected)
    assert len(recorded) == 1


@pytest.mark.exhaustive
def test_a_head_that_does_other_than_the_record_says_is_recorded(
    monkeypatch: pytest.MonkeyPatch, recorded: list[Any]
) -> None:
    """Rows are laid out otherwise where the head runs by itself: their copy is an operator more."""
    original = reslice._fake_of

    def transposed(value: Any, device: torch.device) -> Any:
        found = original(value, device)
        is_rows = isinstance(found, torch.Tensor) and found.dim() == 3
        return found.transpose(0, 1).contiguous().transpose(0, 1) if is_rows else found

    monkeypatch.setattr(reslice, "_fake_of", transposed)
    for graph, expected in both(LANGUAGE.sized(128), "cpu"):
        assert stated(graph) == stated(expected)
    assert len(recorded) == len(SLICES)
