"""Steps that differentiate inside: forces, residuals, penalties. A region is recomputed for every backward."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from remat._torch.training import clear_cublas_workspaces
from remat.costing.costs import estimated_costs
from remat.errors import CaptureError, Infeasible, UsageError
from remat.evaluation.evaluator import Memory
from remat.evaluation.forwards import DIFFERENTIATES
from remat.evaluation.graph import OPTIMIZER_STATE, Graph
from remat.execution.eager.replay import replay
from remat.formulation import check
from remat.formulation.problem import Problem
from remat.formulation.search_space import Segment, blocks, find_space
from remat.formulation.solution import Limits
from remat.offloading.link import Link
from remat.planning.estimate import estimate
from remat.planning.planner import plan
from remat.solvers import exact, load
from remat.solvers.least_peak import least_peak
from remat.validation.validating import validate
from remat.workload.target import TARGETS
from remat.workload.workload import Workload
from tests.oracle import Oracle
from tests.toys import CHOICES, CPU, every_block, graph_of, plan_by_hand, recorded

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")


class Network(nn.Module):
    """Layers of which each is a residual sum; `activation` has a second derivative."""

    def __init__(self, inputs: int, outputs: int, activation: type[nn.Module] = nn.Tanh, layers: int = 3):
        super().__init__()
        self.first, self.last = nn.Linear(inputs, 16), nn.Linear(16, outputs)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), activation()) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)


class Atoms(nn.Module):
    """Messages between atoms along edges, summed where they arrive: an energy."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(4, 16), nn.Linear(16, 1)
        self.layers = nn.ModuleList([nn.ModuleList([nn.Linear(1, 16), nn.Linear(16, 16)]) for _ in range(2)])

    def forward(self, kinds: torch.Tensor, places: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        distance = (places[edges[0]] - places[edges[1]]).square().sum(-1, keepdim=True)
        x = self.embed(kinds)
        for layer in self.layers:
            filters, mix = layer.children()
            messages = mix(x)[edges[0]] * torch.exp(-F.silu(filters(distance)))
            x = x + F.silu(torch.zeros_like(x).index_add(0, edges[1], messages))
        energy: torch.Tensor = self.out(x).sum()
        return energy


def derivative(value: torch.Tensor, of: torch.Tensor, **options: Any) -> torch.Tensor:
    found: torch.Tensor = torch.autograd.grad(value.sum(), of, **{"create_graph": True, **options})[0]
    return found


def forces(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    kinds, places, edges = batch
    places = places.detach().requires_grad_(True)
    energy = model(kinds, places, edges)
    return energy.square() * 1e-3 + derivative(energy, places).square().mean()


def residual(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Of Burgers' equation: two derivatives, one within the other."""
    at = batch.detach().requires_grad_(True)
    u = model(at)
    first = derivative(u, at)
    second = derivative(first[:, 0], at)[:, 0]
    return (first[:, 1] + u[:, 0] * first[:, 0] - 0.01 * second).square().mean()


def penalty(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Of a Wasserstein critic, which sees all it is asked about in one call."""
    real, fake = batch
    between = (0.3 * real + 0.7 * fake).requires_grad_(True)
    scores = model(torch.cat([real, fake, between])).squeeze(1).unflatten(0, (3, -1))
    slope = derivative(scores[2], between).norm(dim=1)
    return scores[1].mean() - scores[0].mean() + 10 * (slope - 1).square().mean()


def first_order(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A gradient that nothing is derived of: its backward keeps nothing."""
    at = batch.detach().requires_grad_(True)
    u = model(at)
    scale = derivative(u, at, create_graph=False, retain_graph=True).abs().mean()
    return u.square().mean() * scale


class Equilibrium(nn.Module):
    """A fixed point of a layer. A hook solves for its gradient, by backwards within the step's own backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        self.given = nn.Linear(8, 8)

    def once(self, z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layers(z) * 0.3 + x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.given(x)
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(3):
                z = self.once(z, x)
        z = self.once(z, x)
        if z.requires_grad:
            start = z.clone().detach().requires_grad_()
            following = self.once(start, x)

            def solve(gradient: torch.Tensor) -> torch.Tensor:
                found = gradient
                for _ in range(4):
                    found = torch.autograd.grad(following, start, found, retain_graph=True)[0] + gradient
                return found

            z.register_hook(solve)
        return z


def molecule(samples: int, length: int | None) -> tuple[torch.Tensor, ...]:
    edges = torch.stack([torch.arange(samples), torch.arange(samples).roll(1)]).repeat(1, 3)
    return torch.randint(4, (samples,)), torch.randn(samples, 3), edges


WORKLOADS = {
    "forces": Workload("forces", Atoms, molecule, forces, 64),
    "residual": Workload("residual", lambda: Network(2, 1), lambda n, _: torch.rand(n, 2), residual, 128),
    "penalty": Workload(
        "penalty",
        lambda: Network(8, 1, nn.Softplus),
        lambda n, _: (torch.randn(n, 8), torch.randn(n, 8)),
        penalty,
        64,
    ),
    "first-order": Workload("first-order", lambda: Network(4, 1), lambda n, _: torch.rand(n, 4), first_order, 128),
}
BACKWARDS = {"forces": 2, "residual": 3, "penalty": 2, "first-order": 2}
IN_A_HOOK = Workload(
    "equilibrium", Equilibrium, lambda n, _: torch.randn(n, 8), lambda model, x: model(x).square().mean(), 256
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", WORKLOADS)
def test_the_evaluators_peak_is_the_replays(name: str) -> None:
    step, graph = recorded(WORKLOADS[name])
    assert graph.inner.backwards == BACKWARDS[name]
    memory = Memory(graph)
    for choice in ("nothing", "every-block", "all-in-one", "half-saved"):
        regions = tuple(CHOICES[choice](graph))
        alive = replay(step, plan_by_hand(graph, regions).regions) + graph.unseen_bytes
        assert memory.curve(regions).peak_bytes == alive.max(), choice


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_plan_trains_alike_at_the_predicted_peak_and_recomputes_for_every_backward(name: str) -> None:
    workload = WORKLOADS[name]
    graph = graph_of(workload)
    regions = every_block(graph)
    report = validate(workload, plan_by_hand(graph, regions), device=CPU)
    assert report.passed, report
    assert report.gradients_equal and not report.gradients_near
    once = Memory(dataclasses.replace(graph, inner=type(graph.inner)())).recomputed_nodes(regions)
    assert once < Memory(graph).recomputed_nodes(regions) <= BACKWARDS[name] * once  # not every one asks every region


def test_backwards_in_a_hook_of_the_steps_own_recompute_as_often_as_they_ask() -> None:
    """The loss keeps the graph that the hook retained until the next forward ends; a replay sees that, no curve."""
    step, graph = recorded(IN_A_HOOK)
    assert graph.inner.backwards == 4 and not graph.inner.within(graph.forward_end)
    assert not graph.about.get(DIFFERENTIATES)
    for choice in ("nothing", "every-block", "half-saved"):
        regions = tuple(CHOICES[choice](graph))
        curve, alive = Memory(graph).curve(regions), replay(step, plan_by_hand(graph, regions).regions)
        in_backward = (curve.op >= graph.forward_end) & (curve.op < graph.backward_end)
        assert np.array_equal(curve.alive_bytes[in_backward], (alive + graph.unseen_bytes)[in_backward]), choice


@pytest.mark.parametrize("budget", ["90%step", "75%step"])
def test_a_plan_for_backwards_in_a_hook_is_validated(budget: str) -> None:
    made = plan(IN_A_HOOK, budget=budget, target="cpu")
    report = validate(IN_A_HOOK, made, device=CPU, repeats=1)
    assert report.passed and report.max_gradient_error == 0.0, report
    assert report.recomputed_nodes["planned"] == report.recomputed_nodes["observed"]
    assert report.measured["peak_bytes"] == pytest.approx(report.predicted["peak_bytes"], rel=1e-3)
    assert report.measured["peak_bytes"] <= made.budget_bytes


class Learner(nn.Module):
    """Parameters that an inner loop trains in the forward, by a rate that is learned too (MAML)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        self.rate = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held: dict[str, torch.Tensor] = dict(self.net.named_parameters())
        for _ in range(2):
            loss = (functional_call(self.net, held, (x,)) - 1).square().mean()
            gradients = torch.autograd.grad(loss, list(held.values()), create_graph=True)
            held = {name: p - self.rate * g for (name, p), g in zip(held.items(), gradients, strict=True)}
        last: torch.Tensor = functional_call(self.net, held, (x,))
        return last


def refined(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """An inner loop around the model, whose every loss is gone before the next one."""
    at = batch.detach().requires_grad_(True)
    for _ in range(2):
        at = at - 0.1 * derivative(model(at).square(), at)
    return model(at).square().mean()


def mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


@pytest.mark.parametrize(
    ("build", "step"),
    [pytest.param(Learner, mean_square, id="of-parameters"), pytest.param(lambda: Network(4, 1), refined, id="of-x")],
)
def test_an_inner_loop_keeps_what_losses_saved_that_are_gone(build: Any, step: Any) -> None:
    fake, graph = recorded(Workload("inner loop", build, lambda n, _: torch.rand(n, 4), step, 128))
    assert graph.inner.backwards == 3
    for choice in ("nothing", "every-block"):
        regions = tuple(CHOICES[choice](graph))
        alive = replay(fake, plan_by_hand(graph, regions).regions) + graph.unseen_bytes
        assert np.array_equal(Memory(graph).curve(regions).alive_bytes, alive), choice


def wide_penalty(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    at = batch.detach().requires_grad_()
    out = model(at)
    return out.square().mean() + derivative(out, at).norm(dim=1).square().mean()


@pytest.mark.cuda
@pytest.mark.parametrize("target", ["h100-80gb", "cuda"])
def test_the_order_of_a_devices_own_thread_is_predicted(target: str) -> None:
    def layer() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    workload = Workload(
        "wide", lambda: nn.Sequential(*[layer() for _ in range(4)]), lambda n, _: torch.randn(n, 64), wide_penalty, 2048
    )
    predicted = estimate(workload, target=target).peaks.peak_bytes
    clear_cublas_workspaces()
    gc.collect()
    torch.cuda.init()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    model, batch = workload.build().to("cuda"), workload.batch(2048, None).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())

    for _ in range(6):  # the numbers of the main thread leave those of the device's behind
        torch.cuda.reset_peak_memory_stats()
        wide_penalty(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    measured = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    assert predicted == pytest.approx(measured, rel=1e-3)


def small(graph: Graph) -> Problem:
    """The layers of a graph and what is around them, of which two nodes may be saved: all plans can be looked at."""
    costs, space = estimated_costs(graph, TARGETS["a100-80gb"]), find_space(graph)
    cuts = sorted({0, len(graph.nodes), *(cut for block in blocks(graph) for cut in block)})
    found = [segment for segment in space.segments if segment.plain]
    plain = {node for segment in found for node in range(segment.first, segment.end)}
    cuts = sorted({*cuts, *(cut for segment in found for cut in (segment.first, segment.end))})
    segments = tuple(Segment(a, b, bool(plain.intersection(range(a, b)))) for a, b in itertools.pairwise(cuts))
    saved = space.saveable[:: max(len(space.saveable) // 2, 1)][:2]
    return Problem(graph, costs, dataclasses.replace(space, segments=segments, saveable=saved), 1 << 60)


@functools.cache
def searched(name: str) -> tuple[Problem, Oracle]:
    """A problem and all its plans, which are the same for every solver."""
    problem = small(graph_of({**WORKLOADS, "equilibrium": IN_A_HOOK}[name]))
    return problem, Oracle(problem)


@pytest.mark.often("milp-first-order", "chain-dp-first-order")
@pytest.mark.parametrize("name", [*WORKLOADS, "equilibrium"])
@pytest.mark.fast("chain-dp-penalty")
@pytest.mark.parametrize("solver", ["chain-dp", "milp"])
def test_no_bound_exceeds_the_best_of_all_plans(name: str, solver: str) -> None:
    """At budgets that bite, from below the least peak of all plans up to the untouched step's."""
    problem, oracle = searched(name)
    peaks = sorted(set(oracle.peaks))
    within = [peak for peak in peaks if peak < problem.memory.peak_without_regions]
    for budget in [peaks[0] - 1, peaks[0], *within[:: max(len(within) // 3, 1)]]:
        expected = oracle.least_time_us(budget)
        found = load(solver)(problem.with_budget(budget), Limits(time_s=5))
        if expected is None:
            assert found.status in ("infeasible", "unknown")
            continue
        assert found.status != "infeasible"
        assert found.bound_us <= expected + 1e-6
        if found.fits:
            assert check.check(problem.with_budget(budget), found) == []


@pytest.mark.exhaustive
def test_a_budget_below_the_least_peak_is_refused_with_the_reason() -> None:
    with pytest.raises(Infeasible, match=r"differentiates inside .*second derivatives, whatever regions drop"):
        plan(WORKLOADS["residual"], target="cpu", budget="50%step", time_limit=10)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [[nn.Conv2d(8 if i else 3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()] for i in range(8)]
        self.layers, self.head = nn.Sequential(*itertools.chain.from_iterable(layers)), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).mean((2, 3)))


def attacked(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Train on what an adversary makes of the batch, step by step."""
    noise = torch.zeros_like(batch).requires_grad_()
    for _ in range(3):
        model(batch + noise).square().mean().backward()
        assert noise.grad is not None
        noise.data = (noise + 0.01 * noise.grad.sign()).detach()
        noise.grad = None
    model.zero_grad()
    return model(batch + noise.detach()).square().mean()


def test_an_adversarys_passes_have_a_plan_within_two_thirds_of_their_peak() -> None:
    workload = Workload("attacked", Blocks, lambda n, _: torch.zeros(n, 3, 16, 16), attacked, 8)
    graph = graph_of(workload)
    problem = Problem(graph, estimated_costs(graph, TARGETS["a100-80gb"]), find_space(graph), 1 << 60)
    budget = int(0.65 * problem.memory.peak_without_regions)
    found = exact.solve(problem.with_budget(budget), Limits(time_s=5))
    assert found.fits and check.check(problem.with_budget(budget), found) == []
    assert least_peak(problem, Limits(time_s=1)).peak_bytes <= budget


class Adversaries(nn.Module):
    """A generator, and a judge that the step trains first and freezes then."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.judge = Network(16, 16), Network(16, 1)


def judged(model: Any, batch: torch.Tensor) -> torch.Tensor:
    made = model.generator(batch)
    model.judge.requires_grad_(True)
    (F.softplus(model.judge(made.detach())) + F.softplus(-model.judge(batch))).mean().backward()
    model.judge.requires_grad_(False)
    loss: torch.Tensor = F.softplus(-model.judge(made)).mean()
    return loss


def unfrozen(model: Any, batch: torch.Tensor) -> torch.Tensor:
    model.judge.requires_grad_(True)
    loss: torch.Tensor = F.softplus(-model.judge(model.generator(batch))).mean()
    return loss


def with_a_frozen_judge() -> Adversaries:
    model = Adversaries()
    model.judge.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("build", "step", "is_planned"),
    [
        pytest.param(Adversaries, judged, False, id="frozen-at-its-end"),
        pytest.param(Adversaries, judged, True, id="frozen-at-its-end-planned-step"),
        pytest.param(with_a_frozen_judge, unfrozen, False, id="frozen-as-built"),
    ],
)
def test_parameters_that_a_step_freezes_or_unfreezes_are_stepped(build: Any, step: Any, is_planned: bool) -> None:
    workload = Workload("adversaries", build, lambda n, _: torch.randn(n, 16), step, 64)
    workload = workload.with_planned_step() if is_planned else workload
    graph = graph_of(workload)
    count = sum(parameter.numel() for parameter in Adversaries().parameters())
    assert graph.about["trainable_count"] == count and graph.fixed_bytes[OPTIMIZER_STATE] > 8 * count
    report = validate(workload, plan_by_hand(graph, []), device=CPU)
    assert report.passed, str(report)
    assert report.measured["peak_bytes"] == Memory(graph).curve(()).peak_bytes


def test_a_profile_keeps_what_inner_backwards_ask_for() -> None:
    graph = graph_of(WORKLOADS["residual"])
    again = Graph.from_json(graph.to_json())
    for column in ("row", "task", "unpack", "used", "kept"):
        assert np.array_equal(getattr(again.inner, column), getattr(graph.inner, column))
    regions = every_block(graph)
    assert Memory(again).curve(regions).peak_bytes == Memory(graph).curve(regions).peak_bytes
    assert "inner" not in graph_of(PLAIN).to_json()


PLAIN = dataclasses.replace(WORKLOADS["residual"], step=lambda model, batch: model(batch).square().mean())


@pytest.mark.exhaustive
def test_groups_are_not_fused_and_nothing_is_offloaded_by_name() -> None:
    with pytest.raises(CaptureError, match="first derivatives only"):
        plan(WORKLOADS["penalty"], target="cpu", budget="95%step", fuse=True, time_limit=10)
    graph = graph_of(WORKLOADS["penalty"])
    target = TARGETS["a100-80gb"]
    link = Link(target.host_bytes_per_us, 1 << 40)
    with pytest.raises(UsageError, match="nothing is offloaded where a step differentiates inside"):
        Problem(graph, estimated_costs(graph, target), find_space(graph), 1 << 60, link)
