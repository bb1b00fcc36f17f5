"""Recurrent layers: what a library keeps of their forward is recorded at its size, or refused by name."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from remat.costing.kernel_calls import _AFTER_FORWARD, overload
from remat.costing.operator_timing import time_operators
from remat.errors import CaptureError
from remat.recording.tracker import Tracker
from remat.validation.validating import validate
from remat.workload.workload import Workload
from tests.toys import CPU, every_block, graph_of, plan_by_hand

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")

SAMPLES, STEPS, WIDTH, LSTM = 3, 10, 8, 2
ONEDNN, CUDNN = torch.ops.aten.mkldnn_rnn_layer.default, torch.ops.aten._cudnn_rnn.default


def layer_of_onednn() -> Any:
    """One layer of an LSTM."""
    weight, bias, state = torch.zeros(4 * WIDTH, WIDTH), torch.zeros(4 * WIDTH), torch.zeros(SAMPLES, WIDTH)
    x = torch.zeros(STEPS, SAMPLES, WIDTH)
    return ONEDNN(x, weight, weight, bias, bias, state, state, False, [], LSTM, WIDTH, 1, True, False, False, True)


@pytest.mark.parametrize("learns", [True, False])
def test_a_record_has_the_bytes_that_onednn_keeps_for_backward(learns: bool) -> None:
    with torch.set_grad_enabled(learns):
        kept = layer_of_onednn()[3]
        with FakeTensorMode(), Tracker() as tracker:
            recorded = tracker.bytes_of(layer_of_onednn()[3])
    assert recorded == (0 if kept is None else kept.nbytes)
    gates = 4 * STEPS * SAMPLES * WIDTH * 4  # of every step, in fp32
    assert recorded > gates if learns else recorded == 0


def test_a_library_that_is_not_at_hand_is_refused_by_name() -> None:
    with FakeTensorMode(), Tracker(), pytest.raises(CaptureError, match=r"_cudnn_rnn\.default keeps memory"):
        x, state, weights = torch.zeros(STEPS, SAMPLES, WIDTH), torch.zeros(1, SAMPLES, WIDTH), [torch.zeros(32, 8)] * 4
        CUDNN(x, weights, 4, None, state, state, LSTM, WIDTH, 0, 1, False, 0.0, True, False, [], None)


@pytest.mark.parametrize("backward", _AFTER_FORWARD)
def test_a_backward_is_given_all_that_its_forward_takes(backward: str) -> None:
    forward, kept, renamed = _AFTER_FORWARD[backward]
    given = {argument.name: str(argument.type) for argument in overload(backward)._schema.arguments}
    for argument in overload(forward)._schema.arguments:
        assert str(argument.type) in (given[renamed.get(argument.name, argument.name)], "Optional[Tensor]")
    assert given[kept] == "Tensor"


class Model(nn.Module):
    """A recurrent layer among others."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))]
        )
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        x = self.recurrent(x)[0]
        return x.float().square().mean()


def workload_of(autocast: torch.dtype | None = None, **options: Any) -> Workload:
    return Workload(
        "recurrent",
        functools.partial(Model, **options),
        lambda samples, _: torch.randn(samples, STEPS, WIDTH),
        lambda model, x: model(x),
        batch_size=SAMPLES,
        autocast=autocast,
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "workload",
    [
        pytest.param(workload_of(num_layers=3, dropout=0.2), id="dropout"),
        pytest.param(workload_of(bidirectional=True, bias=False), id="bidirectional"),
        pytest.param(workload_of(torch.bfloat16), id="bf16"),
    ],
)
def test_an_lstm_trains_alike_under_a_plan_and_at_the_predicted_peak(workload: Workload) -> None:
    graph = graph_of(workload)
    costs = time_operators(graph.kinds, CPU)
    assert costs.about["not_measured"] == []
    report = validate(workload, plan_by_hand(graph, every_block(graph), costs), device=CPU, repeats=1)
    assert report.passed, report
    assert report.measured["peak_bytes"] == report.predicted["peak_bytes"]
