"""A plan of whole modules trains bit for bit as without, leaves hooks outside its regions, and keeps its peak."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from remat.cli import main as cli
from remat.costing.costs import estimated_costs
from remat.costing.planning_device import find_planning_device as place_named
from remat.costing.profile import Profile
from remat.errors import Infeasible, PlanMismatch, UsageError
from remat.evaluation.evaluator import Memory
from remat.evaluation.graph import Graph
from remat.evaluation.plan import Plan, Region, to_refs
from remat.execution import executions
from remat.execution.apply import apply, counts_of, planned_forward, remove
from remat.execution.modules.regions import ModuleCounts, PlannedModules
from remat.execution.modules.replay import replay_modules
from remat.execution.modules.search_space import Module, find_module_space
from remat.planning.budget import Budget
from remat.planning.profiling import fake_step
from remat.recording.fake_step import FakeStep
from remat.recording.record import record
from remat.recording.step_contexts import autocast_context
from remat.validation.validating import validate
from remat.workload.target import TARGETS
from remat.workload.workload import Workload
from tests.graphs import DYNAMO_LOOKS_AT_GRAD
from tests.small_models import TEST_SIZES
from tests.studies import plan_profile
from tests.toys import (
    CONVNET,
    CPU,
    LENGTH,
    TRANSFORMER,
    VOCAB,
    WORKLOADS,
    ConvNet,
    Transformer,
    every_block,
    graph_of,
    plan_by_hand,
    recorded,
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")

AMPLE = 1 << 60


@pytest.fixture(scope="module")
def graphs() -> dict[str, tuple[FakeStep, Graph]]:
    return {name: recorded(workload) for name, workload in WORKLOADS.items()}


def outermost(modules: tuple[Module, ...]) -> list[Module]:
    """The largest layers: no two overlap."""
    found: list[Module] = []
    for module in modules:
        if any(part.isdigit() for part in module[2].split(".")) and (not found or module[0] >= found[-1][1]):
            found.append(module)
    return found


def innermost(modules: tuple[Module, ...]) -> list[Module]:
    return [a for a in modules if not any(a[0] <= b[0] and b[1] <= a[1] and a != b for b in modules)]


CHOICES = {"nothing": lambda modules: [], "outermost": outermost, "innermost": innermost}


def plan_of(graph: Graph, choice: str = "outermost") -> Plan:
    """Some modules, each a region."""
    space = find_module_space(graph)
    assert space.modules is not None
    regions = tuple(Region(first, end) for first, end, _ in CHOICES[choice](space.modules))
    refs = to_refs(graph, regions, space.modules)
    return dataclasses.replace(plan_by_hand(graph, regions), regions=refs, execution="modules")


def built(workload: Workload) -> nn.Module:
    torch.manual_seed(0)
    return workload.build()


def trained(workload: Workload, model: nn.Module, micro_batches: int = 1) -> tuple[list[float], list[torch.Tensor]]:
    losses = []
    for seed in range(micro_batches):
        torch.manual_seed(100)
        batch = workload.batch(workload.batch_size, workload.seq_len)
        torch.manual_seed(seed)
        with autocast_context(CPU, workload.autocast):
            loss = workload.step(model, batch)
        loss.backward()
        losses.append(loss.item())
    return losses, [p.grad for p in model.parameters() if p.grad is not None]


def same(left: Any, right: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# Training


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", WORKLOADS)
def test_two_micro_batches_are_bitwise_those_of_the_untouched_model(name: str, choice: str, graphs: Any) -> None:
    workload, plan = WORKLOADS[name], plan_of(graphs[name][1], choice)
    untouched, model = built(workload), apply(built(workload), plan)
    expected, next_number = trained(workload, untouched, 2), torch.rand(1)
    got = trained(workload, model, 2)
    assert torch.rand(1) == next_number  # the stream of random numbers goes on as without
    assert got[0] == expected[0]
    assert same(got[1], expected[1])
    assert same(model.buffers(), untouched.buffers())  # running statistics and counters advance once
    counts = counts_of(model)
    assert isinstance(counts, ModuleCounts)
    assert counts.regions == 2 * len(plan.regions)
    assert counts.recomputed == {region.module: 2 for region in plan.regions}


def test_a_region_that_is_a_normalisation_updates_its_state_once(graphs: Any) -> None:
    """No solver makes it a region: it is a single operator and a counter."""
    graph = graphs["convnet"][1]
    inside = [i for i, node in enumerate(graph.nodes) if node.module == "layers.1.norms.0"]
    region = Region(inside[0], inside[-1] + 1)
    refs = to_refs(graph, (region,), ((region.first, region.end, "layers.1.norms.0"),))
    plan = dataclasses.replace(plan_by_hand(graph, (region,)), regions=refs, execution="modules")
    untouched, model = built(CONVNET), apply(built(CONVNET), plan)
    expected, got = trained(CONVNET, untouched), trained(CONVNET, model)
    assert got[0] == expected[0] and same(got[1], expected[1])
    assert same(model.buffers(), untouched.buffers())


def test_hooks_of_a_module_stay_outside_its_region(graphs: Any) -> None:
    """`fully_shard` relies on it: hooks run once in forward, and not in the recomputation."""
    model = apply(built(TRANSFORMER), plan_of(graphs["transformer"][1]))
    events: list[str] = []
    for layer in model.layers:  # type: ignore[union-attr]
        layer.register_forward_pre_hook(lambda *_: events.append("before"))
        layer.register_forward_hook(lambda *_: events.append("after"))
    trained(TRANSFORMER, model)
    assert events == ["before", "after"] * 4


def test_evaluation_runs_the_original_forward(graphs: Any) -> None:
    untouched, model = built(TRANSFORMER), apply(built(TRANSFORMER), plan_of(graphs["transformer"][1]))
    ids = torch.randint(VOCAB, (2, LENGTH))
    assert torch.equal(model.eval()(ids), untouched.eval()(ids))
    with torch.no_grad():
        model.train()(ids)
    assert counts_of(model).regions == 0


def test_names_and_class_stay_and_remove_restores(graphs: Any) -> None:
    untouched, model = built(CONVNET), apply(built(CONVNET), plan_of(graphs["convnet"][1], "innermost"))
    assert list(model.state_dict()) == list(untouched.state_dict())
    assert [n for n, _ in model.named_modules()] == [n for n, _ in untouched.named_modules()]
    assert type(model) is ConvNet
    remove(model)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_second_plan_of_another_kind_replaces_the_first(graphs: Any) -> None:
    graph = graphs["transformer"][1]
    model = apply(apply(built(TRANSFORMER), plan_of(graph)), plan_by_hand(graph, every_block(graph)))
    assert [path for path, module in model.named_modules() if "forward" in module.__dict__] == [""]
    found, expected = trained(TRANSFORMER, apply(model, plan_of(graph))), trained(TRANSFORMER, built(TRANSFORMER))
    assert found[0] == expected[0] and same(found[1], expected[1])


def test_a_second_backward_of_one_forward_recomputes_again(graphs: Any) -> None:
    untouched, model = built(TRANSFORMER), apply(built(TRANSFORMER), plan_of(graphs["transformer"][1]))
    for each in (untouched, model):
        torch.manual_seed(1)
        loss = each(*TRANSFORMER.batch(2, LENGTH))
        loss.backward(retain_graph=True)
        loss.backward()
    assert same([p.grad for p in model.parameters()], [p.grad for p in untouched.parameters()])


@pytest.mark.parametrize("frozen_in", ["forward", "backward"])
@pytest.mark.parametrize("execution", ["modules", "eager"])
def test_layers_that_are_frozen_in_one_pass_alone_give_the_same_gradients(
    execution: str, frozen_in: str, graphs: Any
) -> None:
    """As the critic of a generator's loss, which its step unfreezes before backward."""
    graph = graphs["transformer"][1]
    made = plan_of(graph) if execution == "modules" else plan_by_hand(graph, every_block(graph))
    found = []
    for model in (built(TRANSFORMER), apply(built(TRANSFORMER), made)):
        torch.manual_seed(1)
        model.layers.requires_grad_(frozen_in != "forward")
        loss = model(*TRANSFORMER.batch(2, LENGTH))
        model.layers.requires_grad_(frozen_in == "forward")
        loss.backward()
        assert all(p.requires_grad is (frozen_in == "forward") for p in model.layers.parameters())  # type: ignore[union-attr]
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert same(found[0].values(), found[1].values())
    assert counts_of(model).regions == len(made.regions)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_trains_its_own_parameters_with_the_plan(copied: Any, graphs: Any) -> None:
    model = apply(built(CONVNET), plan_of(graphs["convnet"][1]))
    trained(CONVNET, model)
    for parameter in model.parameters():
        parameter.grad = None
    twin = copied(model)
    twin.load_state_dict(built(CONVNET).state_dict())
    losses, found = trained(CONVNET, twin)
    expected = trained(CONVNET, built(CONVNET))
    assert (losses, counts_of(twin).regions) == (expected[0], 3)
    assert same(found, expected[1])
    assert all(p.grad is None for p in model.parameters())
    remove(twin)
    assert counts_of(model).regions == 3  # the original keeps its plan


def test_an_exception_in_a_region_leaves_the_model_fit_for_the_next_step(graphs: Any) -> None:
    model = apply(built(TRANSFORMER), plan_of(graphs["transformer"][1]))
    hook = model.layers[2].down.register_forward_pre_hook(lambda *_: 1 / 0)  # type: ignore[union-attr,index]
    with pytest.raises(ZeroDivisionError):
        trained(TRANSFORMER, model)
    hook.remove()
    found, expected = trained(TRANSFORMER, model), trained(TRANSFORMER, built(TRANSFORMER))
    assert found[0] == expected[0]
    assert same(found[1], expected[1])


# What does not fit


def test_a_plan_for_another_model_is_refused_when_applied(graphs: Any) -> None:
    plan = plan_of(graphs["transformer"][1])
    with pytest.raises(PlanMismatch, match=r"it has \d+ parameters, and had \d+ when planned"):
        apply(Transformer(layers=5), plan)
    with pytest.raises(PlanMismatch, match=r"has a region 'layers\.0', and this model has no such module"):
        about = {name: value for name, value in plan.about.items() if name != "parameter_count"}
        apply(nn.Linear(2, 2), dataclasses.replace(plan, about=about))


def test_a_region_that_does_not_run_once_is_an_error(graphs: Any) -> None:
    model = apply(built(TRANSFORMER), plan_of(graphs["transformer"][1]))
    model.layers[3] = built(TRANSFORMER).layers[3]  # type: ignore[operator,index]
    with pytest.raises(PlanMismatch, match=r"region 'layers\.3' ran 0 times in this forward"):
        trained(TRANSFORMER, model)


def test_autocast_and_dtypes_are_compared(graphs: Any) -> None:
    model = apply(built(TRANSFORMER), plan_of(graphs["transformer-amp"][1]))
    with pytest.raises(PlanMismatch, match="for autocast to bfloat16, this forward runs no autocast"):
        trained(TRANSFORMER, model)
    model = apply(built(TRANSFORMER), plan_of(graphs["transformer"][1])).to(torch.bfloat16)
    with pytest.raises(PlanMismatch, match=r"parameters of \['float32'\], a region of this model has \['bfloat16'\]"):
        trained(TRANSFORMER, model)


def test_a_larger_batch_warns_once(graphs: Any) -> None:
    model = apply(built(TRANSFORMER), plan_of(graphs["transformer"][1]))
    batch = TRANSFORMER.batch(TRANSFORMER.batch_size + 1, LENGTH)
    with pytest.warns(UserWarning, match="80 elements, the plan was made for 64") as caught:
        model(*batch)
    assert [warning.filename for warning in caught] == [__file__]
    model(*batch)  # a second warning would be an error here


@pytest.mark.filterwarnings(DYNAMO_LOOKS_AT_GRAD)
@pytest.mark.parametrize("part", ["whole", "layer"])
def test_a_compiler_is_refused_by_name(part: str, graphs: Any) -> None:
    """It would drop the regions without a word."""
    model = apply(built(TRANSFORMER), plan_of(graphs["transformer"][1]))
    whole = part == "whole"
    (model if whole else model.layers[2]).compile(backend="aot_eager")  # type: ignore[index,union-attr]
    with pytest.raises(UsageError, match=r"runs in eager mode only: leave torch\.compile out.*remat\.compile\("):
        trained(TRANSFORMER, model)
    ids = torch.randint(VOCAB, (2, LENGTH))
    assert torch.equal(model.eval()(ids), built(TRANSFORMER).eval()(ids))


# The space


class Listed(nn.Module):
    """The second layer is in a list that the model does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.others = [nn.Sequential(nn.Tanh(), nn.GELU())]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, *self.others):
            x = layer(x)
        return x.sum()


class Shared(nn.Module):
    """One block called twice, and a counter of its own that must advance once."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.once = (nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.counting = Counting()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.counting(self.twice(self.once(self.twice(x)))).sum()


class Counting(nn.Module):
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x.sin().exp()


def test_what_runs_twice_or_must_happen_once_is_no_region() -> None:
    shared = Workload("shared", Shared, lambda n, _: torch.randn(n, 4), lambda m, x: m(x), batch_size=2)
    space = find_module_space(graph_of(shared))
    assert [path for _, _, path in space.modules or ()] == ["once"]


def test_a_module_that_no_path_leads_to_is_no_region() -> None:
    listed = Workload("listed", Listed, lambda n, _: torch.randn(n, 4), lambda m, x: m(x), batch_size=2)
    space = find_module_space(graph_of(listed))
    assert [path for _, _, path in space.modules or ()] == ["first"]


def test_a_profile_that_names_no_modules_is_refused() -> None:
    graph = dataclasses.replace(graph_of(CONVNET), about={})
    with pytest.raises(UsageError, match="make it again with `remat profile`"):
        find_module_space(graph)


def test_modules_within_modules_are_all_candidates() -> None:
    graph = graph_of(CONVNET)
    paths = [path for _, _, path in find_module_space(graph).modules or ()]
    assert paths == ["layers.0", "layers.1", "layers.2"]  # convolutions and normalisations are single operators
    profile = Profile(graph, estimated_costs(graph, TARGETS["h100-80gb"]), TARGETS["h100-80gb"])
    runs = executions.load("modules").pose(profile, find_module_space(graph), AMPLE).runs
    assert {run.region for run in runs} - {None} == {Region(a, b) for a, b, _ in find_module_space(graph).modules or ()}


# Evaluator, replay, measurement


@pytest.mark.exhaustive
@pytest.mark.often("gpt2-h100-80gb", "resnet50-cpu")
@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("gpt2", "h100-80gb"),
        *((name, "cpu") for name in ("gpt2", "resnet50")),
    ],
)
def test_evaluator_and_untraced_replay_need_the_same_memory(name: str, target: str) -> None:
    """To the byte for layers. The smallest modules hold on to arguments of which their graph takes a view."""
    pytest.importorskip("transformers")
    where = place_named(target)
    step = fake_step(TEST_SIZES[name]().sized(batch_size=2), where)
    graph = record(step, alignment_bytes=where.target.alignment_bytes)
    modules = find_module_space(graph).modules
    numbers = graph.unseen_bytes
    for choice, choose in CHOICES.items():
        regions = tuple(Region(first, end) for first, end, _ in choose(modules or ()))
        found = replay_modules(
            step, to_refs(graph, regions, modules), alignment_bytes=where.target.alignment_bytes
        ).max()
        expected = Memory(graph).curve(regions).peak_bytes - numbers
        assert 0 <= found / expected - 1 <= (0.01 if choice == "innermost" else 0)


class Hoarder(nn.Module):
    """A local variable that lives longer than the traced graph needs it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        large = x.detach().repeat(32, 1)
        scale = large.sum()
        return (x * scale).repeat(64, 1).exp().sum()


class Hoarding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.SiLU()) for _ in range(4)])
        self.last = Hoarder()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


HOARDING = Workload("hoarding", Hoarding, lambda n, _: torch.randn(n, 64), lambda m, x: m(x), 64, optimizer=None)


def profile_of(workload: Workload) -> tuple[Profile, FakeStep]:
    where = place_named("cpu")
    step = fake_step(workload, where)
    graph = record(step)
    return Profile(graph, estimated_costs(graph, TARGETS["h100-80gb"]), where.target), step


@pytest.mark.exhaustive
def test_a_plan_keeps_its_budget_untraced_and_its_predicted_peak_is_the_replays() -> None:
    profile, step = profile_of(TRANSFORMER)
    without, least = (
        Memory(profile.graph).curve(()).peak_bytes,
        Memory(profile.graph)
        .curve(tuple(Region(a, b) for a, b, _ in find_module_space(profile.graph).modules or ()))
        .peak_bytes,
    )
    budget = (without + least) // 2
    plan = plan_profile(profile, Budget(budget, budget), step=step, execution="modules")
    assert plan.execution == "modules" and plan.predicted["judged_by"] == "replay"
    assert plan.solver["status"] == "optimal"
    assert 0 < len(plan.regions) < 4 and all(region.module for region in plan.regions)
    assert plan.predicted["peak_bytes"] <= budget
    with pytest.raises(Infeasible):
        plan_profile(profile, Budget(least - 1, least - 1), step=step, execution="modules")


def test_what_local_variables_hold_is_in_the_prediction() -> None:
    profile, step = profile_of(HOARDING)
    graph_peak = Memory(profile.graph).peak_without_checkpointing
    untraced = int(replay_modules(step, ()).max())
    assert untraced > graph_peak  # the traced graph lets go earlier
    plan = plan_profile(profile, Budget(untraced, untraced), step=step, execution="modules")
    assert plan.regions == () and plan.predicted["peak_bytes"] <= untraced
    tight = untraced - 1
    plan = plan_profile(profile, Budget(tight, tight), step=step, execution="modules")
    assert plan.regions and plan.predicted["peak_bytes"] <= tight


@pytest.mark.exhaustive
def test_a_plan_of_modules_passes_its_validation() -> None:
    plan = dataclasses.replace(plan_of(graph_of(CONVNET)), target="elsewhere")  # so it is predicted anew
    report = validate(CONVNET, plan, device="cpu", repeats=1)
    assert report.passed, str(report)
    assert report.recomputed_nodes["observed"]


# Files and the command line


def test_a_plan_file_says_what_its_regions_are(tmp_path: Path, graphs: Any) -> None:
    plan = plan_of(graphs["transformer"][1])
    plan.save(tmp_path / "modules.json")
    assert Plan.load(tmp_path / "modules.json") == plan
    model = apply(built(TRANSFORMER), tmp_path / "modules.json")
    assert isinstance(planned_forward(model), PlannedModules)


def test_a_file_from_before_there_was_a_choice_loads(graphs: Any) -> None:
    data = plan_by_hand(graphs["transformer"][1], ()).to_json()
    del data["execution"]
    assert Plan.from_json(data).execution == "eager"
    assert Plan.from_json({**data, "regions_are": "modules"}).execution == "modules"
    compiled = Plan.from_json({**data, "about": {**data["about"], "compiler": "inductor"}})
    assert compiled.execution == "inductor" and "compiler" not in compiled.about
    with pytest.raises(UsageError, match="regions are 'layers'"):
        Plan.from_json({**data, "regions_are": "layers"})


def test_a_plan_for_an_execution_of_tomorrow_is_refused_by_name(graphs: Any) -> None:
    plan = dataclasses.replace(plan_by_hand(graphs["transformer"][1], ()), execution="cudagraphs")
    with pytest.raises(UsageError, match="execution 'cudagraphs' is not known"):
        apply(built(TRANSFORMER), plan)


@pytest.mark.exhaustive
def test_the_command_line_plans_and_shows_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("toy.py").write_text("from tests.toys import TRANSFORMER\n\n\ndef toy():\n    return TRANSFORMER\n")
    budget = "66034KiB"  # 65,664 of them workspaces, of cuBLAS and of attention's backward
    arguments = ["plan", "--model", "toy.py:toy", "--target", "h100-80gb", "--budget", budget]
    assert cli.main([*arguments, "--execution", "modules", "--out", "toy.plan.json"]) == 0
    assert "whole modules" in capfd.readouterr().out
    assert cli.main(["show", "toy.plan.json"]) == 0
    assert "(module)   20 nodes, 3 random" in capfd.readouterr().out
