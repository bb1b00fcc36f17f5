"""Code that Dynamo does not trace: the lines whose values fill the memory are named."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import remat
from remat.cli.screen import plan_text
from remat.errors import Infeasible
from remat.evaluation.caveats import caveats
from remat.evaluation.evaluator import Memory
from remat.evaluation.graph import KEPT_OUTSIDE
from remat.execution.eager.replay import replay
from tests.carrying import ROWS, WIDTH, Stack, workload
from tests.toys import CHOICES, plan_by_hand, recorded

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")


@torch.compiler.disable
def waves(x: torch.Tensor, count: int) -> torch.Tensor:
    for _ in range(count):
        x = torch.sin(x)
    return x


class Waving(Stack):
    count = 200

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        y: torch.Tensor = self.head(waves(x, self.count))
        return y


class Ripple(Waving):
    count = 1


class RunAgain(torch.autograd.Function):
    """Keep the input of a layer alone, and run the layer again in backward, as reversible layers do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: torch.nn.Module) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        y: torch.Tensor = layer(x)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            y = ctx.layer(x)
        torch.autograd.backward(y, gradient)
        return x.grad, None


run_again = torch.compiler.disable(RunAgain.apply)


class Reversible(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = run_again(self.layers[0](x), self.layers[1])
        y: torch.Tensor = self.head(x).logsumexp(-1).mean()
        return y


@pytest.mark.exhaustive
def test_lines_between_graphs_that_keep_much_are_named_with_their_bytes() -> None:
    work = workload(Waving)
    said = r"utograd keeps .* of values .*\(`x = torch.sin\(x\)` at .*test_outside_graphs.py:2\d.* in code that Dynamo"
    plan = remat.plan(work, target="cpu", budget="1GiB")
    assert re.search(said, str(plan)) and re.search(said, plan_text(plan))
    with pytest.raises(Infeasible, match=said):
        remat.plan(work, target="cpu", budget="1KiB")


def test_lines_between_graphs_that_keep_little_are_not_named() -> None:
    assert KEPT_OUTSIDE not in recorded(workload(Ripple))[1].about


def test_values_that_the_step_makes_of_outputs_are_named_until_the_step_is_planned() -> None:
    def step(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return waves(model(batch[0]), 200).mean()

    work = workload(Ripple, step=step)
    planned = work.with_planned_step()
    for of, advises_it in ((work, True), (planned, False)):
        (said, *_) = caveats(recorded(of)[1].about)
        assert "made outside of the captured graphs" in said and ("with_planned_step" in said) == advises_it


def test_a_layer_that_its_own_backward_runs_again_is_in_no_region_and_counted() -> None:
    step, graph = recorded(workload(Reversible, step=lambda model, batch: model(batch[0])))
    assert graph.saved_tensors.at.max() < graph.forward_end
    for choice in ("nothing", "every-block"):
        regions = tuple(CHOICES[choice](graph))
        alive = replay(step, plan_by_hand(graph, regions).regions) + graph.unseen_bytes
        assert Memory(graph).curve(regions).peak_bytes == alive.max(), choice


def test_a_compiled_loss_of_the_step_is_planned_uncompiled() -> None:
    def step(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return waves(model(batch[0]), 3).logsumexp(-1).mean()

    def compiling(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        raise AssertionError("generated kernels have no memory to read while planning")

    def compiled(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.compile(loss, backend=compiling)(model(batch[0]))

    def loss(y: torch.Tensor) -> torch.Tensor:
        return waves(y, 3).logsumexp(-1).mean()

    peaks = [Memory(recorded(workload(Stack, step=each))[1]).curve(()).peak_bytes for each in (step, compiled)]
    assert peaks[0] == peaks[1]


class Residual(Stack):
    """A loop over blocks, one of which may have a backward hook: Dynamo then leaves the whole loop alone."""

    @staticmethod
    def layer() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(WIDTH, 64), torch.nn.GELU(), torch.nn.Linear(64, WIDTH))

    def __init__(self, *, hooked: bool) -> None:
        super().__init__(4)
        if hooked:
            self.layers[1].register_full_backward_hook(lambda module, of_inputs, of_outputs: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        y: torch.Tensor = self.head(x).logsumexp(-1).mean()
        return y


def test_backward_hooks_that_end_a_graph_are_named() -> None:
    def residual(*, hooked: bool) -> remat.Workload:
        return workload(lambda: Residual(hooked=hooked), step=lambda model, batch: model(batch[0]))

    about = recorded(residual(hooked=True))[1].about
    assert any(
        "backward hook on a module ends a graph (there are hooks on layers.1)" in said for said in caveats(about)
    )

    plan = remat.plan(residual(hooked=False), target="cpu", budget="1GiB")
    model = remat.apply(Residual(hooked=True), plan)
    with pytest.raises(
        remat.PlanMismatch, match=r"hooks that it had not when planned \(on layers.1\): a backward hook"
    ):
        model(torch.zeros(ROWS, WIDTH))
