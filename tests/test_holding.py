"""Loops that hold the outputs of their model: what they take is planned where they say so, and noticed where not.

`Pair` returns (logits, loss), as nanoGPT's model does; `loop_of_nanogpt` trains it as nanoGPT's script does.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import remat
from remat.costing.device_allocator import measure_peak
from remat.costing.planning_device import find_planning_device
from remat.costing.profile import Profile
from remat.errors import PlanMismatch, UsageError
from remat.evaluation import breakdown
from remat.evaluation.evaluator import Memory
from remat.evaluation.graph import Graph
from remat.evaluation.plan import Plan, to_refs
from remat.execution.apply import apply
from remat.execution.eager.replay import replay
from remat.planning.budget import Budget
from remat.planning.profiling import fake_step, profile_step
from remat.planning.timeline import save_snapshot
from remat.recording.fake_step import FakeStep
from remat.recording.tracker import Tracker
from remat.units import gib
from remat.validation.training import Training, alive_over_step, undisturbed
from remat.validation.validating import validate
from remat.workload.training_loop import Holds, TrainingLoop
from remat.workload.workload import Workload
from tests.cached import cached
from tests.command_line import Remat
from tests.studies import micro_batches, plan_profile
from tests.toys import CHOICES, CPU, TRANSFORMER, VOCAB, Choose, Transformer

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")

SAMPLES, LENGTH = 16, 64
LOGITS = SAMPLES * LENGTH * VOCAB * 4  # bytes
BATCH = 2 * SAMPLES * LENGTH * 8


class Pair(Transformer):
    """Token ids and labels to logits and loss; `wrap` makes of the two what the forward returns."""

    wrap: Callable[[torch.Tensor, torch.Tensor], Any] = staticmethod(lambda logits, loss: (logits, loss))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten() if labels is None else labels.flatten())
        return self.wrap(logits, loss)


PAIR = dataclasses.replace(
    TRANSFORMER,
    name="pair",
    build=functools.partial(Pair, layers=3),
    step=lambda model, batch: model(*batch)[1],
    batch_size=SAMPLES,
    seq_len=LENGTH,
)


@cached
def profiled(holds: Holds, accumulation: int = 1, clip: bool = False) -> tuple[Profile, FakeStep]:
    place, loop = find_planning_device("cpu"), TrainingLoop(accumulation=accumulation, clip_grad_norm=clip, holds=holds)
    step = fake_step(PAIR, place, loop=loop)
    return profile_step(step, place), step


def graph_of(holds: Holds, accumulation: int = 1) -> Graph:
    return profiled(holds, accumulation)[0].graph


@cached
def planned(holds: Holds, accumulation: int = 1, clip: bool = False, execution: str = "eager") -> Plan:
    """At four fifths of what the loop takes that holds nothing, and room for the batch that is fetched ahead."""
    graph, (profile, step) = graph_of("loss", accumulation), profiled(holds, accumulation, clip)
    budget = 4 * Memory(graph).peak_without_checkpointing // 5
    return plan_profile(profile, Budget(budget + BATCH, budget), step=step, execution=execution)


def built() -> Any:
    torch.manual_seed(0)
    return PAIR.build()


def batches(seed: int = 0) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
        taken = torch.randint(VOCAB, (SAMPLES, LENGTH + 1), generator=generator)
        return taken[:, :-1].contiguous(), taken[:, 1:].contiguous()

    return get_batch


# nanoGPT's loop


def loop_of_nanogpt(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, micro_steps: int) -> None:
    get_batch = batches()
    X, Y = get_batch()
    for _ in range(steps):
        for _ in range(micro_steps):
            _logits, loss = model(X, Y)  # which the name goes on holding
            loss = loss / micro_steps
            X, Y = get_batch()  # the next one, while this one is not yet done with
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def peak_of_nanogpt(plan: Plan, micro_steps: int, steps: int = 3) -> int:
    """Most bytes alive in that loop, from its second optimizer step on; the first one makes the optimizer's state."""
    model = apply(built(), plan)
    optimizer = torch.optim.AdamW(model.parameters())
    loop_of_nanogpt(model, optimizer, 1, micro_steps)
    there = Tracker().fix(list(model.parameters()), list(model.buffers()), dict(optimizer.state))
    gc.collect()
    return there + measure_peak(lambda: loop_of_nanogpt(model, optimizer, steps, micro_steps), CPU)


@pytest.mark.exhaustive
@pytest.mark.often("4")
@pytest.mark.parametrize("micro_steps", [4, 1])
def test_nanogpts_loop_keeps_the_budget_where_it_says_that_it_holds_outputs(micro_steps: int) -> None:
    plan = planned("outputs", micro_steps, clip=True)
    assert plan.regions
    peak = peak_of_nanogpt(plan, micro_steps)
    assert peak <= plan.predicted["peak_bytes"] + BATCH <= plan.budget_bytes + BATCH
    assert peak >= 0.999 * plan.predicted["peak_bytes"]


@pytest.mark.exhaustive
@pytest.mark.often("4")
@pytest.mark.parametrize("micro_steps", [1, 4])
def test_where_it_does_not_it_is_told_so_at_its_second_forward(micro_steps: int) -> None:
    plan = planned("loss", micro_steps, clip=True)
    model = apply(built(), plan)
    forwards = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    model.register_forward_hook(count)
    optimizer = torch.optim.AdamW(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning) as caught:
            loop_of_nanogpt(model, optimizer, 3, micro_steps)
    assert forwards == 1
    text = str(caught.value)
    assert f"{gib(LOGITS)} of outputs of the last forward are still held" in text and "`[0]`" in text
    assert '`holds="outputs"`' in text and gib(plan.budget_bytes) in text
    with pytest.warns(UserWarning, match="still held|held until the last backward had ended") as seen:
        over = peak_of_nanogpt(plan, micro_steps)
    assert len(seen) == 1 and seen[0].filename == __file__
    assert over > plan.budget_bytes + BATCH  # the promise that it would have broken in silence


# Records, replays and measurements


@pytest.mark.fast("half-saved")
@pytest.mark.often("half-saved", "nested", "saved-matmuls")
@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
def test_the_evaluator_equals_the_replay(choose: Choose) -> None:
    assert_replayed(choose, accumulation=1)


@pytest.mark.exhaustive
@pytest.mark.often("half-saved", "nested-with-rest", "nothing")
@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
def test_so_it_does_whatever_is_chosen(choose: Choose) -> None:
    assert_replayed(choose, accumulation=4)


def assert_replayed(choose: Choose, accumulation: int) -> None:
    profile, step = profiled("outputs", accumulation)
    graph, regions = profile.graph, choose(profile.graph)
    memory = Memory(graph)
    curve = memory.curve(regions)
    alive = replay(step, to_refs(graph, tuple(regions))) + graph.unseen_bytes
    assert alive.tolist() == curve.alive_bytes[curve.executed].tolist()
    assert sum(size for size, _ in graph.held_outputs) == LOGITS + 4  # and the loss
    assert sum(breakdown.at(memory, regions, 3).values()) == curve.alive_bytes[3]
    stack = breakdown.over_time(memory, regions)
    assert sum(stack.parts.values()).tolist() == curve.alive_bytes.tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("accumulation", [4, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_the_loop_without_a_plan_takes_what_is_predicted(accumulation: int) -> None:
    profile, _ = profiled("outputs", accumulation)
    with undisturbed(CPU):
        training = Training(PAIR, CPU, 0, TrainingLoop(accumulation=accumulation, holds="outputs"))
        training.begin_again()
        training.step()
        _, measured = training.measure_steady_step(1, 1)
        training.begin_again()
        training.update()
        updated = training.peak_of_update(1)
    predicted = Memory(profile.graph, profile.costs.workspace_per_op(profile.graph)).peak_without_checkpointing
    assert updated <= measured <= predicted <= 1.001 * measured


@pytest.mark.exhaustive
@pytest.mark.parametrize("execution", ["eager", "modules"])
def test_a_plan_for_it_validates(execution: str) -> None:
    plan = planned("outputs", execution=execution)
    assert plan.regions and plan.about["holds"] == "outputs"
    report = validate(PAIR, plan, device="cpu", repeats=1)
    assert report.passed and 0 <= plan.predicted["peak_bytes"] - report.measured["peak_bytes"] <= 1024


# The graph of the last loss


def penalized(critic: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The loss of a critic with a penalty on its slope at points that the step makes itself."""
    real, fake = batch
    points = (real / 3 + fake / 3).requires_grad_()
    (slope,) = torch.autograd.grad(critic(points).sum(), points, create_graph=True)
    return critic(fake).mean() - critic(real).mean() + (slope.norm(dim=1) - 1).square().mean()


def critic() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 64), nn.LeakyReLU(), nn.Linear(64, 64), nn.LeakyReLU(), nn.Linear(64, 1))


CRITIC = Workload("critic", critic, lambda n, _: (torch.randn(n, 256), torch.randn(n, 256)), penalized, batch_size=256)
POINTS = 256 * 256 * 4  # bytes


def loop_of_critic(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, micro_steps: int = 1) -> None:
    batch = CRITIC.batch(256, None)
    for _ in range(steps):
        for _ in range(micro_steps):
            loss = penalized(model, batch)  # the name holds the last one until now
            (loss / micro_steps if micro_steps > 1 else loss).backward()
        optimizer.step()
        optimizer.zero_grad()


def peak_of_critic(model: nn.Module, micro_steps: int = 1) -> int:
    optimizer = torch.optim.AdamW(model.parameters())
    loop_of_critic(model, optimizer, 1)
    there = Tracker().fix(list(model.parameters()), dict(optimizer.state))
    gc.collect()
    return there + measure_peak(lambda: loop_of_critic(model, optimizer, 3, micro_steps), CPU)


@pytest.mark.parametrize("micro_steps", [1, 3])
def test_leaves_that_a_step_makes_are_there_until_the_next_forward_ends(micro_steps: int) -> None:
    place = find_planning_device("cpu")
    step = fake_step(CRITIC, place, loop=TrainingLoop(accumulation=micro_steps))
    profile = profile_step(step, place)
    graph = profile.graph
    memory = Memory(graph, profile.costs.workspace_per_op(graph))
    assert graph.held_outputs == ((2 * POINTS, graph.forward_end),)  # the points and their gradient
    measured = peak_of_critic(critic(), micro_steps)
    assert measured - 1024 <= memory.peak_without_checkpointing <= 1.001 * measured
    regions = CHOICES["half-saved"](graph)
    curve = Memory(graph).curve(regions)
    assert regions and curve.peak_at < graph.forward_end
    alive = replay(step, to_refs(graph, tuple(regions))) + graph.unseen_bytes
    assert alive.tolist() == curve.alive_bytes[curve.executed].tolist()


def test_a_plan_of_a_step_that_makes_leaves_keeps_its_budget_and_validates() -> None:
    plan = remat.plan(CRITIC, budget="90%step", target="cpu")
    assert plan.regions
    measured = peak_of_critic(apply(critic(), plan, verify_first_step=False))
    assert 0.999 * plan.predicted["peak_bytes"] <= measured <= plan.budget_bytes
    report = validate(CRITIC, plan, device="cpu", repeats=1)
    assert report.passed and 0 <= plan.predicted["peak_bytes"] - report.measured["peak_bytes"] <= 1024
    assert 0 <= plan.without_checkpointing["peak_bytes"] - report.untouched["peak_bytes"] <= 1024


# The storage of the last loss


class Frozen(nn.Module):
    """A wide part that is not trained, at whose end the peak is, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)).requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.frozen(x)
        return self.head(x).sigmoid()


def regression(loss: Callable[..., torch.Tensor]) -> Workload:
    return Workload(
        "regression",
        Frozen,
        lambda n, _: (torch.randn(n, 64), torch.rand(n, 64)),
        lambda model, batch: loss(model(batch[0]), batch[1]),
        batch_size=512,
    )


def peak_of_regression(workload: Workload, model: nn.Module) -> int:
    optimizer = torch.optim.AdamW(parameter for parameter in model.parameters() if parameter.requires_grad)
    batch = workload.batch(512, None)

    def loop(steps: int) -> None:
        for _ in range(steps):
            loss = workload.step(model, batch)  # the name holds the last one until now
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    loop(1)
    there = Tracker().fix(list(model.parameters()), dict(optimizer.state), list(batch))
    return there + measure_peak(lambda: loop(3), CPU)


@pytest.mark.parametrize(
    ("loss", "keeps"),
    [
        pytest.param(F.mse_loss, True, id="mse"),
        pytest.param(F.smooth_l1_loss, True, id="smooth-l1"),
        pytest.param(F.binary_cross_entropy, True, id="bce"),
        pytest.param(F.soft_margin_loss, True, id="soft-margin"),
        pytest.param(F.l1_loss, False, id="l1"),
        pytest.param(lambda x, y: F.mse_loss(x, y) / 2, False, id="divided"),
    ],
)
def test_a_loss_with_the_storage_of_an_output_counts_until_the_next_forward_ends(
    loss: Callable[..., torch.Tensor], keeps: bool
) -> None:
    workload, place = regression(loss), find_planning_device("cpu")
    profile = profile_step(step := fake_step(workload, place), place)
    graph = profile.graph
    assert graph.held_outputs == (((512 * 64 * 4, graph.forward_end),) if keeps else ())
    memory = Memory(graph, profile.costs.workspace_per_op(graph))
    measured = peak_of_regression(workload, workload.build())
    assert abs(measured - memory.peak_without_checkpointing) <= 16, "a loss that is a number, and no more"
    regions = CHOICES["half-saved"](graph)
    curve = Memory(graph).curve(regions)
    alive = replay(step, to_refs(graph, tuple(regions))) + graph.unseen_bytes
    assert alive.tolist() == curve.alive_bytes[curve.executed].tolist()


def test_a_step_whose_loss_has_the_storage_of_an_output_is_measured() -> None:
    plan = remat.plan(workload := regression(F.mse_loss), budget="100%step", target="cpu")
    _, alive = alive_over_step(workload, None, plan.about)
    assert len(alive) and int(alive.max()) == plan.without_checkpointing["peak_bytes"]


class Late(torch.autograd.Function):
    """A loss whose forward and backward run in backward, half by half."""

    @staticmethod
    def forward(ctx: Any, handle: torch.Tensor, model: nn.Module, *given: torch.Tensor) -> torch.Tensor:
        ctx.model, ctx.given = model, given
        return given[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        with torch.enable_grad():
            for x, y in zip(*(each.chunk(2) for each in ctx.given), strict=True):
                F.mse_loss(ctx.model(x), y).backward()
        return torch.zeros(()), None, None, None


def test_the_loss_of_a_pass_within_backward_is_held_by_no_loop() -> None:
    workload, place = regression(F.mse_loss), find_planning_device("cpu")
    late = dataclasses.replace(
        workload, step=lambda model, batch: Late.apply(torch.zeros((), requires_grad=True), model, *batch)
    )
    profile = profile_step(fake_step(late, place), place)
    memory = Memory(profile.graph, profile.costs.workspace_per_op(profile.graph))
    assert not profile.graph.held_outputs
    assert abs(peak_of_regression(late, late.build()) - memory.peak_without_checkpointing) <= 64


def test_a_step_whose_loss_has_the_storage_of_an_output_is_scaled_from_two_records() -> None:
    look = micro_batches(regression(F.mse_loss), find_planning_device("cpu"), Budget(1 << 30, 1 << 30))
    assert look._family(False) is not None, "else each size would have a record of its own"
    assert look.profile(256, False).graph.held_outputs[-1][0] == 256 * 64 * 4


def test_a_plan_of_a_step_whose_loss_has_the_storage_of_an_output_keeps_its_budget_and_validates() -> None:
    workload = regression(F.mse_loss)
    plan = remat.plan(workload, budget="100%step", target="cpu")
    model = apply(workload.build(), plan, verify_first_step=False)
    assert peak_of_regression(workload, model) == plan.predicted["peak_bytes"] <= plan.budget_bytes
    report = validate(workload, plan, device="cpu", repeats=1)
    assert report.passed and report.measured["peak_bytes"] == plan.predicted["peak_bytes"]


def test_files_and_pictures_tell_of_it(tmp_path: Path) -> None:
    profile, _ = profiled("outputs")
    profile.save(tmp_path / "pair.json")
    assert Profile.load(tmp_path / "pair.json").graph.held_outputs == profile.graph.held_outputs
    save_snapshot(profile, (), tmp_path / "pair.pickle")
    level = peak = 0
    for event in pickle.loads((tmp_path / "pair.pickle").read_bytes())["device_traces"][0]:
        level += event["size"] if event["action"] == "alloc" else -event["size"]
        peak = max(peak, level)
    assert peak == Memory(profile.graph).curve(()).peak_bytes


@pytest.mark.exhaustive
def test_at_any_batch_size_it_is_what_a_record_finds() -> None:
    place = find_planning_device("h100-80gb")
    sizes = micro_batches(PAIR, place, Budget(1, 1), TrainingLoop(holds="outputs"))
    found = sizes.profile(8, False).graph.held_outputs
    assert found == sizes.recorded(8, 1)[0].graph.held_outputs and found[0][0] >= LOGITS // 2


@pytest.mark.exhaustive
def test_what_loops_hold_is_loss_or_outputs(remat: Remat) -> None:
    with pytest.raises(UsageError, match="`holds=` is 'loss' or 'outputs', not 'all'"):
        TrainingLoop(holds="all")  # type: ignore[arg-type]
    common = ("--model", "model.py:stack", "--target", "h100-80gb", "--json")
    peaks = [remat("estimate", *common, "--holds", holds).data["peaks"]["peak_bytes"] for holds in ("loss", "outputs")]
    assert peaks[0] <= peaks[1]
    made = remat("plan", *common, "--budget", "90%", "--holds", "outputs", "--out", "held.json")
    assert made.exit_code == 0 and Plan.load("held.json").about["holds"] == "outputs"
    assert remat("plan", *common, "--budget", "90%", "--holds", "none").exit_code == 2


# What a forward returns, and who keeps it

Named = collections.namedtuple("Named", ["logits", "loss"])


@dataclasses.dataclass
class Fields:
    logits: torch.Tensor
    loss: torch.Tensor


def of_transformers(logits: torch.Tensor, loss: torch.Tensor) -> Any:
    from transformers.modeling_outputs import CausalLMOutput

    return CausalLMOutput(loss=loss, logits=logits)


WRAPS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], str]] = {
    "tuple": (lambda logits, loss: (logits, loss), "`[0]`"),
    "namedtuple": (Named, "`logits`"),
    "dict": (lambda logits, loss: {"logits": logits, "loss": loss}, "`logits`"),
    "dataclass": (Fields, "`logits`"),
    "transformers": (of_transformers, "`logits`"),
    "nested": (lambda logits, loss: {"all": [loss, {"scores": logits}]}, "`all[1].scores`"),
}


def wrapped(wrap: Callable[[torch.Tensor, torch.Tensor], Any]) -> Any:
    model = built()
    model.wrap = wrap
    return apply(model, planned("loss"))


def forward(model: Any, seed: int = 0) -> Any:
    return model(*batches(seed)())


def loss_of(outputs: Any) -> torch.Tensor:
    found = [leaf for _, leaf in _leaves(outputs) if leaf.dim() == 0]
    return found[0]


def _leaves(outputs: Any) -> list[tuple[str, torch.Tensor]]:
    from remat.workload.held_outputs import output_tensors

    return list(output_tensors(outputs))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", WRAPS)
def test_held_outputs_are_named(name: str) -> None:
    wrap, said = WRAPS[name]
    model = wrapped(wrap)
    outputs = forward(model)
    loss_of(outputs).backward()
    with pytest.warns(UserWarning, match=r"still held") as seen:
        outputs = forward(model)
    assert said in str(seen[0].message) and gib(LOGITS) in str(seen[0].message)
    loss_of(outputs).backward()
    forward(model)  # once is enough: warnings are errors here


def test_a_part_of_an_output_keeps_all_of_it() -> None:
    model = wrapped(lambda logits, loss: (logits, loss))
    outputs = forward(model)
    outputs[1].backward()
    first = outputs[0][:1].detach()
    del outputs
    with pytest.warns(UserWarning, match="still held"):
        forward(model)
    assert len(first) == 1


def nothing_held(model: Any) -> None:
    for seed in range(3):
        loss_of(forward(model, seed)).backward()


def the_loss_is_held(model: Any) -> None:
    losses = []
    for seed in range(3):
        losses.append(loss_of(forward(model, seed)))
        losses[-1].backward()


def let_go_before_backward(model: Any) -> None:
    for seed in range(3):
        outputs = forward(model, seed)
        loss = loss_of(outputs)
        del outputs
        loss.backward()


def an_evaluation_in_between(model: Any) -> None:
    for seed in range(3):
        loss_of(forward(model, seed)).backward()
        with torch.no_grad():
            kept = forward(model, seed)
        model.eval()
        kept = forward(model, seed)
        model.train()
        del kept


@pytest.mark.fast("the_loss_is_held", "an_evaluation_in_between")
@pytest.mark.parametrize("trains", [nothing_held, the_loss_is_held, let_go_before_backward, an_evaluation_in_between])
def test_nobody_is_warned_who_holds_nothing_that_matters(trains: Callable[[Any], None]) -> None:
    trains(wrapped(lambda logits, loss: (logits, loss)))


def test_outputs_that_a_function_holds_through_backward_are_told_with_the_peak_that_they_make() -> None:
    model = wrapped(lambda logits, loss: (logits, loss))
    optimizer = torch.optim.AdamW(model.parameters())

    def train(seed: int) -> None:
        outputs = forward(model, seed)
        outputs[1].backward()
        optimizer.step()
        optimizer.zero_grad()

    train(0)
    with pytest.warns(UserWarning, match="outputs were held until the last backward had ended") as seen:
        train(1)
    train(2)
    there = Tracker().fix(list(model.parameters()), list(model.buffers()), dict(optimizer.state))
    gc.collect()
    over = there + measure_peak(lambda: train(3), CPU)
    assert over == planned("loss").predicted["backward_peak_bytes"] + LOGITS > planned("loss").budget_bytes
    assert f"the peak may reach {gib(over)}," in str(seen[0].message)


def test_outputs_that_a_loss_outside_of_the_model_needs_anyway_are_not_counted_twice() -> None:
    workload = Workload(
        "mse",
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)), nn.Linear(64, 1024)),
        lambda samples, _: torch.randn(samples, 64),
        lambda model, batch: model(batch).square().mean(),
        batch_size=64,
    )
    plan = remat.plan(workload, budget="1GiB", target="cpu")
    assert plan.predicted["backward_peak_bytes"] < plan.predicted["peak_bytes"]
    tight = dataclasses.replace(plan, budget_bytes=plan.predicted["peak_bytes"])
    model = apply(workload.build(), tight, verify_first_step=False)

    def train() -> None:
        outputs = model(torch.randn(64, 64))
        outputs.square().mean().backward()  # which saves its input, so the outputs are there at the peak
        model.zero_grad()

    for _ in range(3):
        train()


def test_an_evaluation_between_two_steps_hides_nothing() -> None:
    model = wrapped(lambda logits, loss: (logits, loss))
    outputs = forward(model)
    outputs[1].backward()
    with torch.no_grad():
        forward(model)
    with pytest.warns(UserWarning, match="still held"):
        forward(model)


@pytest.mark.exhaustive
def test_inputs_parameters_and_buffers_that_come_back_are_not_the_models_outputs() -> None:
    large = torch.zeros(1 << 20)

    class Handing(Pair):
        def __init__(self, layers: int):
            super().__init__(layers)
            self.register_buffer("table", large.clone())

        def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            return {
                "loss": super().forward(ids, labels)[1],
                "ids": ids,
                "weight": self.embed.weight,
                "table": self.table,
            }

    workload = dataclasses.replace(PAIR, build=functools.partial(Handing, 3), step=lambda m, batch: m(*batch)["loss"])
    place = find_planning_device("h100-80gb")
    profile = profile_step(fake_step(workload, place), place)
    plan = plan_profile(profile, Budget(1 << 40, 1 << 40))
    tight = dataclasses.replace(plan, budget_bytes=plan.predicted["peak_bytes"])
    model = apply(Handing(3), tight)
    given = batches()()
    for _ in range(2):
        outputs = model(*given)
        outputs["loss"].backward()


@pytest.mark.exhaustive
def test_a_loop_that_says_so_may_hold_the_last_outputs_and_no_older_ones() -> None:
    model = apply(built(), planned("outputs"))
    for seed in range(3):
        outputs = forward(model, seed)
        outputs[1].backward()
    older = [outputs]
    outputs = forward(model)
    outputs[1].backward()
    with pytest.warns(UserWarning, match="outputs of forwards before the last are still held") as seen:
        outputs = forward(model)
    assert older and "`holds=" not in str(seen[0].message)


def test_it_is_refused_where_more_than_planned_is_refused() -> None:
    model = apply(built(), planned("loss"), on_larger="refuse")
    outputs = forward(model)
    outputs[1].backward()
    with pytest.raises(PlanMismatch, match="still held"):
        forward(model)
    del outputs
    forward(model)


def test_a_budget_that_has_room_for_them_is_not_spoken_of() -> None:
    plan = planned("loss")
    roomy = dataclasses.replace(plan, budget_bytes=plan.predicted["peak_bytes"] + LOGITS)
    model = apply(built(), roomy)
    outputs = forward(model)
    outputs[1].backward()
    outputs = forward(model)


def _ones(samples: int, length: int | None) -> torch.Tensor:
    return torch.ones(samples, 64)


class Pulled(nn.Sequential):
    """One layer and its loss, which on a CPU has the storage of a whole output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(super().forward(x), x)


def test_a_loss_that_any_loop_holds_is_not_spoken_of() -> None:
    workload = Workload("pulled", lambda: Pulled(nn.Linear(64, 64)), _ones, lambda model, x: model(x), batch_size=64)
    place = find_planning_device("cpu")
    plan = plan_profile(profile_step(fake_step(workload, place), place), Budget(1 << 40, 1 << 40))
    tight = dataclasses.replace(plan, budget_bytes=plan.predicted["peak_bytes"])
    model = apply(workload.build(), tight, verify_first_step=False)
    for _ in range(3):
        loss = model(torch.ones(64, 64))
        assert loss.untyped_storage().nbytes() == 4 * 64 * 64
        loss.backward()
        model.zero_grad()
    older = [loss]
    loss = model(torch.ones(64, 64))
    loss.backward()
    with pytest.warns(UserWarning, match="still held"):
        model(torch.ones(64, 64))
    del older


def test_plans_of_modules_look_too() -> None:
    plan = planned("loss", execution="modules")
    model = apply(built(), dataclasses.replace(plan, budget_bytes=plan.predicted["peak_bytes"]))
    outputs = forward(model)
    outputs[1].backward()
    with pytest.warns(UserWarning, match="still held"):
        outputs = forward(model)


def test_watching_keeps_nothing_alive() -> None:
    model = apply(built(), dataclasses.replace(planned("loss"), budget_bytes=1 << 40))
    for _ in range(2):
        outputs = forward(model)
        logits = StorageWeakRef(outputs[0].untyped_storage())
        outputs[1].backward()
        assert not logits.expired()
        del outputs
        assert logits.expired()
