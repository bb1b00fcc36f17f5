"""Causal masks: stacks of torch that compare their mask with a causal one are planned, and train as without a plan."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from remat.execution.apply import apply, counts_of
from remat.validation.validating import validate
from remat.workload.workload import Workload
from tests.toys import CPU, every_block, plan_by_hand, recorded

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")

WIDTH, LENGTH, WORDS = 16, 8, 40
causal = nn.Transformer.generate_square_subsequent_mask


def local(length: int) -> torch.Tensor:
    """A causal mask that hides the first tokens from the last."""
    mask = causal(length)
    mask[-2:, :2] = float("-inf")
    return mask


class Encoder(nn.Module):
    """A stack that is given its mask, or makes it, or keeps it."""

    def __init__(self, keeps: Any = None, makes: Any = causal):
        super().__init__()
        self.makes = makes
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.1, batch_first=True)
        self.embed, self.stack = nn.Embedding(WORDS, WIDTH), nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, WORDS)
        self.register_buffer("kept", None if keeps is None else keeps(2 * LENGTH))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        length = ids.shape[1]
        kept: Any = self.kept
        if kept is not None:
            mask = kept[:length, :length]
        elif mask is None:
            mask = self.makes(length)
        return F.cross_entropy(self.head(self.stack(self.embed(ids), mask=mask)).flatten(0, 1), ids.flatten())


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(WIDTH, 2, 32, 0.1, batch_first=True)
        self.embed, self.stack = nn.Embedding(WORDS, WIDTH), nn.TransformerDecoder(layer, 2)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return F.cross_entropy(self.head(self.stack(x, x.flip(1), tgt_mask=mask)).flatten(0, 1), ids.flatten())


def step(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(*batch)
    return loss


def batch(samples: int, length: int | None, mask: Any = None) -> tuple[torch.Tensor, ...]:
    ids = torch.randint(WORDS, (samples, length or LENGTH))
    return (ids,) if mask is None else (ids, mask(length or LENGTH))


MADE = Workload("made", Encoder, batch, step, batch_size=4, seq_len=LENGTH)
WORKLOADS = {
    "made": MADE,
    "kept": dataclasses.replace(MADE, build=functools.partial(Encoder, causal)),
    "given": dataclasses.replace(MADE, batch=functools.partial(batch, mask=causal)),
    "given-local": dataclasses.replace(MADE, batch=functools.partial(batch, mask=local)),
    "decoder": dataclasses.replace(MADE, build=Decoder, batch=functools.partial(batch, mask=causal)),
}


@pytest.mark.fast("made", "given-local")
@pytest.mark.often("decoder", "kept")
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_stack_with_a_mask_is_one_graph_whose_plan_trains_alike(name: str) -> None:
    _, graph = recorded(WORKLOADS[name])
    assert {node.call for node in graph.nodes} == {0}
    report = validate(WORKLOADS[name], plan_by_hand(graph, every_block(graph)), device=CPU)
    assert report.passed, str(report)


@pytest.mark.parametrize(("name", "is_causal"), [("given", True), ("given-local", False)])
def test_planning_knows_a_mask_that_a_batch_makes(name: str, is_causal: bool) -> None:
    step, _ = recorded(WORKLOADS[name])
    ((_, graph_module),) = step.graphs.distinct
    asked = [node.kwargs["is_causal"] for node in graph_module.graph.nodes if "is_causal" in node.kwargs]
    assert asked and set(asked) == {is_causal}


def drawn(length: int) -> torch.Tensor:
    return torch.where(torch.rand(length, length) > 0.9, float("-inf"), 0.0)


def added(length: int) -> torch.Tensor:
    mask = causal(length)
    mask += torch.full((length, length), -1.0)
    return mask


@pytest.mark.fast("local")
@pytest.mark.parametrize("makes", [local, drawn, added])
def test_a_mask_that_a_forward_writes_to_or_draws_is_that_of_eager_mode(makes: Any) -> None:
    workload = dataclasses.replace(MADE, build=functools.partial(Encoder, makes=makes))
    _, graph = recorded(workload)
    torch.manual_seed(0)
    plain = workload.build()
    planned = copy.deepcopy(plain)
    apply(planned, plan_by_hand(graph, every_block(graph)))
    losses = []
    for model in (plain, planned):
        torch.manual_seed(1)
        losses.append([model(*batch(4, LENGTH)).item() for _ in range(3)])
    assert losses[0] == losses[1]


@pytest.mark.fast("given")
@pytest.mark.parametrize("name", ["given", "kept"])
def test_a_mask_that_is_no_longer_causal_is_seen(name: str) -> None:
    _, graph = recorded(WORKLOADS[name])
    torch.manual_seed(0)
    plain = WORKLOADS[name].build()
    planned = copy.deepcopy(plain)
    apply(planned, plan_by_hand(graph, every_block(graph)))

    def trained(model: Any) -> list[torch.Tensor]:
        torch.manual_seed(1)
        losses = []
        for number in range(4):
            ids, mask = batch(4, LENGTH, mask=local if number % 2 else causal)
            if name == "kept":
                with torch.no_grad():
                    model.kept[LENGTH - 2 : LENGTH, :2] = float("-inf") if number % 2 else 0.0
            losses.append(model(ids, mask))
            losses[-1].backward()
        return [*losses, *(p.grad for p in model.parameters())]

    expected, found = trained(plain), trained(planned)
    assert all(map(torch.equal, expected, found))
    assert counts_of(planned).regions == 4 * len(every_block(graph))
