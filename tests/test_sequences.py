"""CTC's loss and packed sequences on fakes run what training runs; lengths that nobody knows are refused."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from remat.capture.dynamo import GraphCalls
from remat.errors import CaptureError
from remat.execution.apply import apply
from remat.planning.estimate import estimate
from remat.recording.known_values import KnownValues
from remat.recording.sequences import sequences_of_known_lengths
from remat.validation.validating import validate
from remat.workload.workload import Workload
from tests.toys import CPU, every_block, graph_of, plan_by_hand

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")

CLASSES, SAMPLES, STEPS, WIDTH = 7, 3, 10, 4


class Ran(TorchDispatchMode):
    """Names of operators that allocate, with the shapes of what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, list[tuple[int, ...]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.is_floating_point()]
        shapes = [tuple(t.shape) for t in made if t.untyped_storage()._cdata not in given]
        if shapes:
            self.found.append((str(func), shapes))
        return out


def on_fakes(function: Callable[[], torch.Tensor]) -> Ran:
    known = KnownValues()
    with FakeTensorMode(), known.followed(), sequences_of_known_lengths(), Ran() as ran:
        function().backward()
    return ran


def for_real(function: Callable[[], torch.Tensor]) -> Ran:
    with Ran() as ran:
        function().backward()
    return ran


def ctc(targets: Callable[[], torch.Tensor], lengths: Callable[[list[int]], Any], **options: Any) -> torch.Tensor:
    scores = torch.randn(STEPS, SAMPLES, CLASSES, requires_grad=True)
    return F.ctc_loss(
        scores.log_softmax(-1), targets(), lengths([10, 8, 9]), lengths([5, 2, 3]), zero_infinity=True, **options
    ).sum()


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(
    "targets",
    [
        pytest.param(lambda: torch.ones(SAMPLES, 5, dtype=torch.long), id="padded"),
        pytest.param(lambda: torch.ones(10, dtype=torch.long), id="in-one-row"),
    ],
)
def test_ctc_runs_the_operators_of_training(reduction: str, targets: Callable[[], torch.Tensor]) -> None:
    expected = for_real(lambda: ctc(targets, tuple, reduction=reduction)).found
    for lengths in (tuple, torch.tensor):
        assert on_fakes(functools.partial(ctc, targets, lengths, reduction=reduction)).found == expected
    assert ("aten._ctc_loss.default", [(3,), (3, 10, 11)]) in expected  # 2 x 5 + 1 = 11


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("batch_first", [True, False])
def test_packed_sequences_run_the_operators_of_training(kind: Callable[..., nn.RNNBase], batch_first: bool) -> None:
    def step() -> torch.Tensor:
        x = torch.randn((SAMPLES, STEPS, WIDTH) if batch_first else (STEPS, SAMPLES, WIDTH), requires_grad=True)
        layer = kind(WIDTH, WIDTH, num_layers=2, bidirectional=True, batch_first=batch_first)
        lengths = torch.tensor([4, 10, 4])
        packed, _ = layer(pack_padded_sequence(x, lengths, batch_first=batch_first, enforce_sorted=False))
        padded, again = pad_packed_sequence(packed, batch_first=batch_first, total_length=12)
        assert again.tolist() == [4, 10, 4]
        return padded.sum()

    def but_for_packing(ran: Ran) -> list[Any]:
        """Packing is one kernel, or the copies that it makes and joins."""
        names = [name for name, _ in ran.found]
        first = next(i for i, name in enumerate(names) if "pack" in name or name == "aten.cat.default")
        return ran.found[first + 1 :]

    assert but_for_packing(on_fakes(step)) == but_for_packing(for_real(step))


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(lambda lengths: ctc(lambda: torch.ones(SAMPLES, 5).long(), lambda _: lengths), id="ctc_loss"),
        pytest.param(
            lambda lengths: pack_padded_sequence(torch.ones(STEPS, SAMPLES, WIDTH), lengths), id="pack_padded_sequence"
        ),
    ],
)
def test_lengths_that_nobody_knows_are_refused_by_name(step: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(CaptureError, match=r"_(loss|sequence)` reads lengths that are not known.*`batch` give"):
        on_fakes(lambda: step((torch.rand(SAMPLES) * STEPS).long()))


class Speech(nn.Module):
    """Layers, a recurrent layer over packed sequences, scores of symbols."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)]
        )
        self.recurrent = nn.LSTM(8, 8, bidirectional=True, batch_first=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        x, _ = pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)
        return self.head(x).log_softmax(-1).transpose(0, 1)


def utterances(samples: int, length: int | None) -> tuple[torch.Tensor, ...]:
    mask = torch.arange(length or 0) < torch.tensor([12, 7, 9, 12])[:samples, None]
    return torch.randn(samples, length or 0, 8), mask, torch.randint(1, CLASSES, (samples, 3))


def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    x, mask, targets = batch
    lengths = mask.sum(-1)
    return F.ctc_loss(model(x, lengths), targets, lengths, torch.full((len(x),), 3), zero_infinity=True)


SPEECH = Workload("speech", Speech, utterances, loss, batch_size=4, seq_len=12)


@pytest.mark.exhaustive
@pytest.mark.nightly
def test_a_model_of_speech_trains_alike_under_a_plan_and_at_the_predicted_peak() -> None:
    graph = graph_of(SPEECH)
    report = validate(SPEECH, plan_by_hand(graph, every_block(graph)), device=CPU)
    assert report.passed and graph.forward_end


def test_a_packed_layer_is_refused_by_name_as_one_that_is_not() -> None:
    """Between two graphs it would run the CPU's kernels."""

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(8, 8, batch_first=True)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0].square().mean()

    workload = Workload(
        "packed", Packed, lambda n, _: (torch.randn(n, 5, 8), torch.full((n,), 5)), lambda m, b: m(*b), 4
    )
    with pytest.raises(CaptureError, match="`lstm` cannot be planned for a CUDA device from here"):
        estimate(workload, target="h100-80gb")


@pytest.mark.exhaustive
def test_lengths_that_the_batch_draws_are_named_by_the_plan() -> None:
    """Another draw needs another peak; a mask that is drawn, or tokens that are, are no lengths."""

    def drawn(samples: int, length: int | None) -> tuple[torch.Tensor, ...]:
        x, _, targets = utterances(samples, length)
        longest = (torch.rand(samples) * 6).long() + 6
        return x, torch.arange(length or 0) < longest[:, None], targets

    graphs = [graph_of(SPEECH), graph_of(dataclasses.replace(SPEECH, batch=drawn))]
    said = [str(plan_by_hand(graph, ())) for graph in graphs]
    assert ["lengths of sequences depend on random numbers" in text for text in said] == [False, True]


class LossInside(nn.Module):
    """Its forward ends in the loss, of lengths that it computes: a trace meets the loss, and breaks there."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)])
        self.head, self.criterion = nn.Linear(8, CLASSES), nn.CTCLoss(zero_infinity=True)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        halved = (mask.sum(-1) + 1) // 2
        for layer in self.layers:
            x = x + layer(x)
        scores = self.head(x[:, ::2]).log_softmax(-1).transpose(0, 1)
        found: torch.Tensor = self.criterion(scores, targets, halved, torch.full((len(x),), 3))
        return found


@pytest.mark.exhaustive
def test_a_loss_inside_of_the_forward_is_planned() -> None:
    inside = Workload("inside", LossInside, utterances, lambda model, batch: model(*batch), batch_size=4, seq_len=12)
    graph = graph_of(inside)
    assert validate(inside, plan_by_hand(graph, every_block(graph)), device=CPU).passed


class Masked(nn.Module):
    """Hides spans of time that numpy draws, as SpecAugment does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tensor(_spans(x.shape[0], x.shape[1]))
        x = x.masked_fill(hidden.unsqueeze(-1), 0.0)
        for layer in self.layers:
            x = x + layer(x).relu()
        return x


def _spans(samples: int, length: int) -> np.ndarray[Any, Any]:
    count = int(length * 0.3 + np.random.rand(1).item())
    hidden = np.zeros((samples, length), dtype=bool)
    for row in hidden:
        row[np.random.choice(np.arange(length), count, replace=False)] = True
    return hidden


def test_numpy_draws_its_own_random_numbers_under_a_plan_and_nothing_is_traced_anew() -> None:
    workload = Workload("masked", Masked, lambda n, _: torch.randn(n, 12, 8), lambda m, x: m(x).square().mean(), 4)
    torch.manual_seed(0)
    expected, model = Masked(), Masked()
    model.load_state_dict(expected.state_dict())
    graph = graph_of(workload)
    apply(model, plan_by_hand(graph, every_block(graph)))
    batch, losses = torch.randn(4, 12, 8), {}
    for each in (expected, model):
        np.random.seed(0)
        losses[each] = [each(batch).square().mean().item() for _ in range(3)]
    assert losses[model] == losses[expected] and len(set(losses[model])) == 3


def test_a_function_that_draws_with_numpy_is_left_whole() -> None:
    graphs: list[Any] = []

    def execute(call: int, graph_module: Any, args: tuple[Any, ...]) -> Any:
        graphs.append(call)
        return graph_module(*args)

    calls = GraphCalls(Masked().forward, execute)
    calls(torch.randn(4, 12, 8))
    assert graphs == [0]
