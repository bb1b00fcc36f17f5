"""Frozen weights on the host: numbers are bitwise those without, and two layers are on the device at any time."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import remat
from remat.costing.planning_device import PlanningDevice
from remat.costing.profile import Profile
from remat.errors import Infeasible, PlanMismatch, UsageError
from remat.evaluation.graph import Graph
from remat.evaluation.plan import Plan, Region
from remat.execution.apply import planned_forward
from remat.host import weights as module
from remat.host.copies import Copies, InstantCopies
from remat.host.weights import AT_ONCE, HostWeights, Layer, bring_weights_back, layers_of, spread, weights_on_host
from remat.models.adapters import Lora, with_lora
from remat.models.quantized import quantized
from remat.planning import layers_on_host
from remat.planning.advice import advise, least_peak_of
from remat.planning.layers_on_host import with_layers, with_layers_on_host
from remat.planning.profiling import fake_step, profile_step
from remat.planning.request import PlanRequest
from remat.recording.fake_step import FakeStep
from remat.workload.target import TARGETS
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload
from tests.devices import DEVICE, WHERE_LATE
from tests.examples import examples
from tests.fuzzing import sensible
from tests.offloads import Fault, LateCopies, late_copies
from tests.random_models import regions
from tests.small_models import TEST_SIZES
from tests.toys import (
    CHOICES,
    TRANSFORMER,
    TRANSFORMER_BF16,
    WIDTH,
    Choose,
    Transformer,
    graph_of,
    plan_by_hand,
    plan_for,
    tokens,
)

LAYERS = 3


def frozen(layers: int = LAYERS) -> Any:
    """A transformer of which norms, embedding and head are trained; the linear layers between are not."""
    torch.manual_seed(0)
    model = Transformer(layers=layers)
    for each in model.layers.modules():
        if isinstance(each, nn.Linear):
            each.requires_grad_(False)
    return model


FROZEN = dataclasses.replace(TRANSFORMER, name="toy-frozen", build=frozen)
FROZEN_BF16 = dataclasses.replace(TRANSFORMER_BF16, name="toy-frozen-amp", build=frozen)
BATCHES = [tuple(each.to(DEVICE) for each in tokens(4, 8)) for _ in range(3)]


def on_host(
    model: nn.Module, plan: Plan, copies: Copies | None = None, layers: int = LAYERS, **options: Any
) -> nn.Module:
    """`model` under `plan`, with so many layers on the host, the others on the device."""
    module._on_host[model] = HostWeights(model, layers, DEVICE, copies)
    about = {**plan.about, "weights_on_host": layers}
    return remat.apply(model, dataclasses.replace(plan, about=about), **options)


def here(model: nn.Module) -> int:
    """How many layers have their weights on the device."""
    layers: Any = model.layers
    weights = weights_on_host(model)
    assert weights is not None and len(layers) == len(weights.layers)
    return sum(memory.untyped_storage().nbytes() > 0 for moved in weights._moved for memory in moved._memory[:1])


def gradients(model: nn.Module, autocast: torch.dtype | None = None) -> list[torch.Tensor]:
    """Of three micro-batches, the number of layers on the device held to what it may be."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    for batch in BATCHES:
        with torch.autocast(DEVICE.type, autocast, enabled=autocast is not None):
            loss = model(*batch)
        loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.any_device
@pytest.mark.fast("fp32-nested", "fp32-half-saved", "amp-pairs-of-segments")
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("workload", [FROZEN, FROZEN_BF16], ids=["fp32", "amp"])
def test_gradients_are_bitwise_however_late_copies_are_and_whatever_is_recomputed(
    workload: Workload, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    most: list[int] = []
    use = HostWeights.use

    def watched(self: HostWeights, number: int) -> None:
        use(self, number)
        most.append(here(model))

    monkeypatch.setattr(HostWeights, "use", watched)
    plain = frozen().to(DEVICE)
    model = on_host(copy.deepcopy(plain), plan_for(workload, CHOICES[choice]), late_copies(shares_host=False))
    for _ in range(2):
        pairs = zip(gradients(plain, workload.autocast), gradients(model, workload.autocast), strict=True)
        assert all(torch.equal(left, right) for left, right in pairs)
    assert max(most) == AT_ONCE


@pytest.mark.exhaustive
@pytest.mark.parametrize("workload", [FROZEN, FROZEN_BF16], ids=["fp32", "amp"])
def test_gradients_are_bitwise_under_many_random_plans(workload: Workload) -> None:
    graph, plain = graph_of(workload), frozen()
    model = on_host(copy.deepcopy(plain), plan_by_hand(graph, ()), LateCopies())
    expected, planned = gradients(plain, workload.autocast), planned_forward(model)
    draw = random.Random(0)
    for number in range(examples(20, 1000)):
        made = plan_by_hand(graph, sensible(graph, regions(draw, graph)))
        planned.plan = dataclasses.replace(made, about={**made.about, "weights_on_host": LAYERS})
        planned.watch(observe=False)
        pairs = zip(expected, gradients(model, workload.autocast), strict=True)
        assert all(torch.equal(left, right) for left, right in pairs), f"plan {number}"


def around_layers(graph: Graph) -> list[Region]:
    inside = [i for i, node in enumerate(graph.nodes) if node.module.startswith("layers.")]
    return [Region(inside[0], inside[-1] + 1)]


class Detached(Transformer):
    """Backward goes through the first layer alone; a recomputation of all goes on to the last save."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        layers: Any = self.layers
        first, *others = layers
        x = side = first(self.embed(ids))
        for layer in others:
            side = layer(side)
        logits = self.head(x + side.detach())
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def detached() -> Any:
    torch.manual_seed(0)
    model = Detached(layers=LAYERS, dropout=0.0)  # so that products are the first to ask
    model.layers.requires_grad_(False)
    return model


@pytest.mark.exhaustive
@pytest.mark.any_device
def test_a_recomputation_in_the_middle_of_a_backward_that_ends_in_another_layer_changes_nothing() -> None:
    graph = graph_of(dataclasses.replace(FROZEN, name="toy-detached", build=detached))
    (region,) = around_layers(graph)
    (down,) = [i for i, node in enumerate(graph.nodes) if node.module == "layers.0.down"]
    for begin in (region.first, down):
        plain = detached().to(DEVICE)
        made = plan_by_hand(graph, [Region(begin, region.end)])
        model = on_host(copy.deepcopy(plain), made, late_copies(shares_host=False))
        assert all(torch.equal(left, right) for left, right in zip(gradients(plain), gradients(model), strict=True))


def failing_at(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose call `number` finds no memory."""
    calls = itertools.count()

    def call(*args: Any) -> Any:
        if next(calls) == number:
            raise torch.OutOfMemoryError("no memory")
        return function(*args)

    return call


@pytest.mark.exhaustive
@pytest.mark.any_device
def test_after_an_error_for_want_of_memory_a_step_is_right_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = frozen().to(DEVICE)
    copies: Any = late_copies(shares_host=False)
    model, kind = on_host(copy.deepcopy(plain), plan_for(FROZEN), copies), type(copies)
    gradients(model)
    for failing in range(1, 12):
        with monkeypatch.context() as patch:
            patch.setattr(kind, "back", failing_at(failing, kind.back))
            with pytest.raises(torch.OutOfMemoryError):
                gradients(model)
        assert all(torch.equal(left, right) for left, right in zip(gradients(plain), gradients(model), strict=True))


@WHERE_LATE
@pytest.mark.any_device
@pytest.mark.parametrize("choice", ["nothing", "every-block"])
def test_an_executor_that_forgets_to_wait_is_caught(choice: str) -> None:
    fault: Fault = "uses before the copy back"
    plain = frozen().to(DEVICE)
    copies = late_copies(fault, shares_host=False)
    model = on_host(copy.deepcopy(plain), plan_for(FROZEN, CHOICES[choice]), copies, verify_first_step=False)
    assert any(not torch.equal(left, right) for left, right in zip(gradients(plain), gradients(model), strict=True))


@pytest.mark.parametrize("choice", ["nothing", "every-block", "pairs-of-segments"])
def test_from_the_second_step_on_every_layer_is_on_its_way_before_it_is_asked_for(choice: str) -> None:
    model = on_host(frozen(), plan_for(FROZEN, CHOICES[choice]))
    weights = weights_on_host(model)
    assert weights is not None
    fetched = []
    for _ in range(3):
        before = weights.fetched
        model(*BATCHES[0]).backward()
        fetched.append(weights.fetched - before)
    assert fetched[1:] == [2 * (LAYERS - AT_ONCE)] * 2  # there and back; at both turns two are there already


def test_evaluation_brings_weights_too_and_a_backward_through_it_is_refused() -> None:
    plain = frozen()
    model = on_host(copy.deepcopy(plain), plan_for(FROZEN))
    gradients(model)
    with torch.no_grad():
        assert torch.equal(model.eval()(BATCHES[0][0]), plain.eval()(BATCHES[0][0]))
    with pytest.raises(UsageError, match="come back in backward only where a plan runs"):
        model(*BATCHES[0])
    model.train()
    plain.train()
    assert all(torch.equal(left, right) for left, right in zip(gradients(plain), gradients(model), strict=True))


def test_a_state_dict_has_the_weights_and_bringing_back_gives_the_model_as_it_was() -> None:
    plain = frozen()
    model = on_host(copy.deepcopy(plain), plan_for(FROZEN))
    gradients(model)
    for _ in range(2):
        state = model.state_dict()
        assert all(torch.equal(value, state[name]) for name, value in plain.state_dict().items())
        bring_weights_back(remat.remove(model))
    assert all(torch.equal(left, right) for left, right in zip(gradients(plain), gradients(model), strict=True))


@pytest.mark.parametrize("device", [None, "cpu:0"])  # where they are computed with, and elsewhere
def test_weights_that_are_brought_back_may_be_changed(device: str | None) -> None:
    plain, model = frozen(), remat.offload_weights(frozen(), LAYERS)
    assert bring_weights_back(model, device) is model and weights_on_host(model) is None
    for changed in (plain, model):
        for weight in changed.parameters():
            weight.data.add_(1.0)
    assert all(torch.equal(left, right) for left, right in zip(plain.parameters(), model.parameters(), strict=True))
    assert all(torch.equal(left, right) for left, right in zip(gradients(plain), gradients(model), strict=True))


def test_weights_for_which_there_is_no_room_stay_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = frozen(), remat.offload_weights(frozen(), LAYERS)
    with pytest.raises(RuntimeError, match="nonsense"):
        bring_weights_back(model, "nonsense")
    monkeypatch.setattr(module._LayerWeights, "fetch", failing_at(LAYERS - 1, module._LayerWeights.fetch))
    with pytest.raises(torch.OutOfMemoryError):
        bring_weights_back(model)
    assert here(model) == 0
    with torch.no_grad():
        assert torch.equal(model.eval()(BATCHES[0][0]), plain.eval()(BATCHES[0][0]))
    bring_weights_back(model, "cpu:0")
    assert all(torch.equal(left, right) for left, right in zip(plain.parameters(), model.parameters(), strict=True))


def test_weights_brought_back_under_a_plan_are_there_and_the_plan_says_so() -> None:
    plain, model = frozen(), on_host(frozen(), plan_for(FROZEN))
    gradients(model)
    loss = model(*BATCHES[0])
    bring_weights_back(model)
    loss.backward()
    with pytest.raises(UsageError, match=r"brought back: take the plan out \(`remat.remove`\)"):
        model(*BATCHES[0])
    remat.remove(model)
    assert all(torch.equal(left, right) for left, right in zip(plain.parameters(), model.parameters(), strict=True))
    assert all(torch.equal(left, right) for left, right in zip(gradients(plain), gradients(model), strict=True))


def test_a_module_in_the_model_brings_all_of_its_weights_back() -> None:
    plain: Any = frozen()
    model: Any = remat.offload_weights(frozen(), LAYERS)
    bring_weights_back(model.layers[0])
    assert all(torch.equal(left, right) for left, right in zip(plain.parameters(), model.parameters(), strict=True))


def test_without_a_plan_layers_bring_what_they_use_and_have_no_backward() -> None:
    model = remat.offload_weights(frozen(), LAYERS)
    with pytest.raises(UsageError, match=r"weights of layers\.0 are on the host, and come back in backward only where"):
        model(*BATCHES[0])
    with torch.no_grad():
        assert torch.equal(model.eval()(BATCHES[0][0]), frozen().eval()(BATCHES[0][0]))


def test_who_reads_a_weight_outside_of_a_step_gets_no_number_and_who_writes_an_error() -> None:
    model: Any = on_host(frozen(), plan_for(FROZEN))
    for _ in range(2):
        weight = model.layers[0].up.weight
        assert weight.isnan().all() and weight.shape == (64, 16)
        with pytest.raises(RuntimeError):
            weight.data.add_(1)
        gradients(model)


def test_weights_whose_change_was_told_come_and_go_once_it_is_undone() -> None:
    model: Any = on_host(frozen(), plan_for(FROZEN))
    expected = gradients(model)
    weight = model.layers[1].up.weight.requires_grad_(True)
    with warnings.catch_warnings(), pytest.raises(UsageError, match="set it back to False"):
        warnings.simplefilter("ignore")
        gradients(model)
    weight.requires_grad_(False)
    with torch.no_grad():
        assert torch.equal(model.eval()(BATCHES[0][0]), frozen().to(DEVICE).eval()(BATCHES[0][0]))
    assert all(map(torch.equal, gradients(model.train()), expected))


@pytest.mark.parametrize("made", [copy.deepcopy, pickle.dumps])
def test_no_copy_of_a_model_has_weights_that_are_no_numbers(made: Callable[[Any], Any]) -> None:
    with pytest.raises(UsageError, match=r"neither copied nor pickled: save its `state_dict\(\)`"):
        made(on_host(frozen(), plan_for(FROZEN)))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda model: setattr(model.layers[1].up.weight, "data", torch.ones(64, 16)),
            r"layers\.1\.up\.weight was .*data",
        ),
        (lambda model: model.bfloat16(), r"weight was changed while it is on the host, by .* a conversion"),
        (lambda model: model.requires_grad_(True), r"weight was changed while it is on the host, by `requires_grad_"),
    ],
    ids=["data", "converted", "unfrozen"],
)
def test_a_weight_that_is_changed_on_the_host_is_told_in_the_next_step(
    change: Callable[[Any], Any], match: str
) -> None:
    model: Any = on_host(frozen(), plan_for(FROZEN))
    gradients(model)
    change(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of more parameters that require gradients
        with pytest.raises(UsageError, match=match):
            gradients(model)
    bring_weights_back(remat.remove(model))
    assert not any(weight.isnan().any() for weight in model.parameters())


@pytest.mark.any_device
def test_a_checkpoint_of_this_training_is_loaded_and_other_weights_are_refused() -> None:
    plain = frozen().to(DEVICE)
    model = on_host(frozen(), plan_for(FROZEN)).to(DEVICE)
    gradients(model)
    for state in (plain.state_dict(), {name: value.cpu() for name, value in plain.state_dict().items()}):
        model.load_state_dict(state)
    other = copy.deepcopy(plain)
    with torch.no_grad():
        other.layers[0].up.weight.add_(1)
    with pytest.raises(UsageError, match=r"layers\.0\.up\.weight is on the host and cannot be loaded"):
        model.load_state_dict(other.state_dict())
    assert all(torch.equal(left, right) for left, right in zip(gradients(plain), gradients(model), strict=True))


class Between(Transformer):
    """A layer that runs between two graphs, as no plan sees it."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        layers: Any = self.layers
        x = self.embed(ids)
        for i, layer in enumerate(layers):
            x = torch.compiler.disable(layer)(x) if i == 1 else layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())  # type: ignore[union-attr]


@pytest.mark.exhaustive
def test_a_layer_between_two_graphs_is_told_of_and_a_graph_that_does_not_fit_is_a_mismatch() -> None:
    def built() -> Any:
        torch.manual_seed(0)
        model = Between(layers=LAYERS)
        model.layers.requires_grad_(False)
        return model

    workload = dataclasses.replace(FROZEN, name="toy-between", build=built)
    with pytest.raises(UsageError, match="read outside of captured graphs"):
        on_host(built(), plan_for(workload, CHOICES["nothing"]))(*BATCHES[0])
    with pytest.raises(PlanMismatch):
        on_host(frozen(), plan_for(workload, CHOICES["nothing"]))(*BATCHES[0])


def test_second_derivatives_are_refused_by_name() -> None:
    loss = on_host(frozen(), plan_for(FROZEN))(*BATCHES[0])
    with pytest.raises(UsageError, match="no second derivatives"):
        loss.backward(create_graph=True)


class Helped(Transformer):
    """Some loss comes from the middle, and what a product returns is changed in place."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        layers: Any = self.layers
        x = self.embed(ids)
        for i, layer in enumerate(layers):
            x = layer(x)
            h = layer.up(x)
            x = x + F.gelu(h.mul_(0.5).add_(1))[..., :WIDTH]
            if i == 1:
                middle = x.pow(2).mean()
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()), middle  # type: ignore[union-attr]


def both(model: nn.Module, batch: Any) -> torch.Tensor:
    loss, middle = model(*batch)
    return loss + middle


BACKWARDS: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    "both": lambda loss, middle: (loss + middle).backward(),
    "a part": lambda loss, middle: middle.backward(),
    "a part, and then all": lambda loss, middle: (middle.backward(retain_graph=True), loss.backward())[0],
    "all, and then a part": lambda loss, middle: (loss.backward(retain_graph=True), middle.backward())[0],
}


@pytest.mark.any_device
@pytest.mark.exhaustive
@pytest.mark.often(
    "both-nothing", "a part-all-in-one", "a part, and then all-all-in-one", "all, and then a part-nothing"
)
@pytest.mark.parametrize("choose", [CHOICES["nothing"], around_layers], ids=["nothing", "all-in-one"])
@pytest.mark.filterwarnings("ignore:the last backward kept its graph")
@pytest.mark.parametrize("name", BACKWARDS)
def test_any_part_of_a_backward_finds_its_weights(name: str, choose: Choose) -> None:
    def built() -> Any:
        torch.manual_seed(0)
        model = Helped(layers=LAYERS)
        model.layers.requires_grad_(False)
        return model

    workload = dataclasses.replace(FROZEN, name="toy-helped", build=built, step=both)
    plain = built().to(DEVICE)
    model = on_host(copy.deepcopy(plain), plan_for(workload, choose), late_copies(shares_host=False))
    for _ in range(2):
        for each in (plain, model):
            each.zero_grad(set_to_none=True)
            torch.manual_seed(3)
            BACKWARDS[name](*each(*BATCHES[0]))
        pairs = zip(plain.parameters(), model.parameters(), strict=True)
        grads = [(a.grad, b.grad) for a, b in pairs if a.grad is not None]
        assert grads and all(b is not None and torch.equal(a, b) for a, b in grads)


class Ordered(Transformer):
    """Layers in an order that changes from step to step, each a graph of its own."""

    order: tuple[int, ...] = tuple(range(LAYERS))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        layers: Any = self.layers
        x = self.embed(ids)
        for i in self.order:
            torch._dynamo.graph_break()
            x = layers[i](x)
        torch._dynamo.graph_break()
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())  # type: ignore[union-attr]


def test_a_graph_that_several_layers_share_brings_those_of_the_layer_that_it_is_called_for() -> None:
    def built() -> Any:
        torch.manual_seed(0)
        model = Ordered(layers=LAYERS, dropout=0.0)
        model.layers.requires_grad_(False)
        return model

    plain = built()
    workload = dataclasses.replace(FROZEN, name="toy-ordered", build=built)
    model: Any = on_host(copy.deepcopy(plain), plan_for(workload, CHOICES["nothing"]))
    for order in [(0, 1, 2), (1, 0, 2), (2, 1, 0)]:
        plain.order = model.order = order
        assert all(torch.equal(left, right) for left, right in zip(gradients(plain), gradients(model), strict=True))


def test_a_plan_and_a_model_that_disagree_about_weights_are_told() -> None:
    knows = dataclasses.replace(plan_for(FROZEN), about={**plan_for(FROZEN).about, "weights_on_host": 3})
    with pytest.raises(PlanMismatch, match=r"say `remat.offload_weights\(model, 3\)`"):
        remat.apply(frozen(), knows)(*BATCHES[0])
    with pytest.raises(PlanMismatch, match="the plan does not know"):
        remat.apply(remat.offload_weights(frozen(), 3), plan_for(FROZEN))(*BATCHES[0])
    with pytest.raises(UsageError, match="4 layers of this model are on the host already"):
        remat.offload_weights(remat.offload_weights(frozen(4), 4), 3)


class Reading(Transformer):
    """A model whose forward takes a view of a weight, as DoRA does."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        layers: Any = self.layers
        loss: torch.Tensor = super().forward(ids, labels) + layers[1].up.weight.t()[0, 0]
        return loss


@pytest.mark.exhaustive
def test_a_weight_that_something_else_than_a_product_reads_is_refused_by_name() -> None:
    def build() -> nn.Module:
        model = Reading(layers=LAYERS)
        model.layers.requires_grad_(False)
        return model

    workload = dataclasses.replace(FROZEN, name="toy-reading", build=build)
    with pytest.raises(UsageError, match=r"uses a weight of layers\.1, and only what linear products"):
        on_host(build(), plan_for(workload))(*BATCHES[0])


# Which layers


def test_layers_are_the_largest_list_and_its_commonest_kind_with_frozen_weights_of_their_own() -> None:
    model = frozen(5)
    assert [layer.path for layer in layers_of(model)] == [f"layers.{i}" for i in range(5)]
    model.layers[2].qkv = nn.Linear(16, 48, bias=False).requires_grad_(False)  # another kind
    model.layers[1].up.weight = model.layers[3].up.weight  # shared
    assert [layer.path for layer in layers_of(model)] == ["layers.0", "layers.4"]
    assert layers_of(Transformer()) == []


@pytest.mark.parametrize(("layers", "count"), [(32, 3), (32, 11), (40, 40), (7, 5)])
def test_layers_on_the_host_are_spread(layers: int, count: int) -> None:
    every = [Layer(str(i), nn.Identity(), ()) for i in range(layers)]
    chosen = [int(layer.path) for layer in spread(every, count)]
    gaps = {b - a for a, b in itertools.pairwise(chosen)}
    assert len(chosen) == len(set(chosen)) == count and max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("count", [1, 2, LAYERS + 1])
def test_too_few_or_too_many_layers_are_refused(count: int) -> None:
    with pytest.raises(UsageError, match=f"this model has {LAYERS} layers alike with frozen weights"):
        remat.offload_weights(frozen(), count)


# Plans


LORA = with_lora(TEST_SIZES["llama-1b"](), Lora(4))
LARGER = dataclasses.replace(FROZEN, batch_size=64)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("workload", "budget", "layers"),
    [
        (LARGER, "1500KiB", {f"layers.{i}" for i in range(LAYERS)}),
        (LORA, "50MiB", {f"base_model.model.model.layers.{i}" for i in range(6)}),
    ],
    ids=["toy", "lora"],
)
@pytest.mark.often("toy")
def test_a_plan_with_layers_on_the_host_is_measured_as_predicted_and_bitwise(
    workload: Workload, budget: str, layers: set[str]
) -> None:
    plan = remat.plan(workload, budget=budget, target="cpu", loop=TrainingLoop(weights_on_host=len(layers)))
    assert plan.regions and plan.about["layers_on_host"].keys() == layers
    report = remat.validate(workload, plan, device="cpu", repeats=1)
    assert report.passed, str(report)


DEEP = 5


def deep() -> nn.Module:
    model = Transformer(layers=DEEP, width=64)
    model.layers.requires_grad_(False)
    return model


def profiled(bytes_per_us: float, loop: TrainingLoop | None = None) -> tuple[FakeStep, Profile]:
    """A deep model, all of whose layers are frozen, on a card whose link is so fast."""
    place = PlanningDevice(dataclasses.replace(TARGETS["rtx4090"], host_bytes_per_us=bytes_per_us), None)
    workload = dataclasses.replace(FROZEN, name="toy-deep", build=deep, batch_size=64)
    step = fake_step(workload, place, loop=loop)
    return step, profile_step(step, place)


def layers_in_plan(bytes_per_us: float, share: float, host_bytes: int = 1 << 40) -> int:
    """How many layers are on the host within a budget of such a share of what the step takes."""
    step, profile = profiled(bytes_per_us)
    budget = int(share * profile.peak_without_checkpointing)
    found = with_layers_on_host(profile, step, PlanRequest(), budget, host_bytes)
    assert step.loop.weights_on_host == found.graph.about.get("weights_on_host", 0)
    return step.loop.weights_on_host


@pytest.mark.exhaustive
def test_layers_go_to_the_host_where_that_is_cheaper_than_recomputing() -> None:
    assert layers_in_plan(1e9, 0.85) > AT_ONCE  # a link that hides everything
    assert layers_in_plan(1e-3, 0.85) == 0  # one that hides nothing
    assert layers_in_plan(1e9, 2.0) == 0  # everything fits


@pytest.mark.exhaustive
def test_where_nothing_fits_without_the_most_layers_are_on_the_host_however_slow_the_link() -> None:
    assert layers_in_plan(1.0, 1e-6) == DEEP


@pytest.mark.exhaustive
def test_a_host_without_room_for_the_fewest_layers_is_refused() -> None:
    with pytest.raises(UsageError, match="give more with `host_budget`"):
        layers_in_plan(1e3, 0.5, host_bytes=1)


@pytest.mark.exhaustive
def test_a_profile_with_layers_put_on_the_host_is_that_of_a_step_recorded_so() -> None:
    loop = TrainingLoop(weights_on_host=DEEP - 1)
    _, recorded = profiled(1e3, loop)
    step, profile = profiled(1e3)
    found = with_layers(profile, step, DEEP - 1)
    for field in ("fixed_bytes", "first_step_bytes", "peak_bytes"):
        assert getattr(found.graph, field, None) == getattr(recorded.graph, field, None)
    assert np.array_equal(found.graph.untraced_bytes, recorded.graph.untraced_bytes)
    assert found.graph.about == recorded.graph.about
    assert found.peak_without_checkpointing == recorded.peak_without_checkpointing


class Clocked(InstantCopies):
    """Copies over a link that takes a time for each, and compute that waits for them."""

    def __init__(self) -> None:
        self.now_us = self.free_us = self.waited_us = 0.0
        self.copy_us = 1.0

    def back(self, host: object, offset: int, flat: torch.Tensor) -> float:
        super().back(host, offset, flat)
        self.free_us = max(self.free_us, self.now_us) + self.copy_us
        return self.free_us

    def wait(self, copy: float) -> None:
        late_us = max(copy - self.now_us, 0.0)
        self.now_us, self.waited_us = self.now_us + late_us, self.waited_us + late_us


@given(st.lists(st.tuples(st.floats(0.1, 3.0), st.integers(0, 3)), min_size=2, max_size=12))
@settings(max_examples=examples(30, 300), deadline=None)
def test_the_predicted_wait_is_that_of_an_executor_that_knows_what_follows(uses: list[tuple[float, int]]) -> None:
    uses = [use for i, use in enumerate(uses) if use[1] != uses[i - 1][1]]  # one layer after another, around
    if len({layer for _, layer in uses}) < 2:
        return
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1, 1, bias=False)) for _ in range(4))).requires_grad_(False)
    clock = Clocked()
    weights = HostWeights(model, 4, copies=clock)
    order = [layer for _, layer in uses]
    weights._following = Following(order)
    waited = []
    for _ in range(3):
        before = clock.waited_us
        for computes_us, layer in uses:
            weights.use(layer)
            clock.now_us += computes_us
        waited.append(clock.waited_us - before)
    starts = list(itertools.accumulate((computes_us for computes_us, _ in uses), initial=0.0))
    found = layers_on_host._waited_us([*zip(starts, order, strict=False)], starts[-1], [1.0] * 4)
    assert waited[1] == pytest.approx(found, abs=1e-9)


class Following(dict[tuple[int, ...], int]):
    """A table of known followers."""

    def __init__(self, order: list[int]):
        self._order, self._at = order, -1

    def __setitem__(self, used: tuple[int, ...], number: int) -> None:
        self._at += 1

    def get(self, used: tuple[int, ...], default: int = 0) -> int:  # type: ignore[override]
        return self._order[(self._at + 1) % len(self._order)]


@pytest.mark.exhaustive
def test_an_infeasible_budget_fits_with_weights_on_the_host_and_the_plan_says_what_it_waits() -> None:
    workload = dataclasses.replace(FROZEN, name="toy-deep", build=deep)
    with pytest.raises(Infeasible) as refused:
        remat.plan(workload, budget=1, target="rtx4090")
    least = refused.value.minimum_budget_bytes
    assert least is not None
    plan = remat.plan(workload, budget=least - 1, target="rtx4090", offload="weights")
    assert plan.predicted["peak_bytes"] < least
    assert plan.about["weights_on_host"] > AT_ONCE and "weights_wait_us" in plan.predicted
    assert Plan.from_json(plan.to_json()).about == plan.about


@pytest.mark.exhaustive
def test_weights_on_the_host_are_advised_where_nothing_fits_without() -> None:
    step, profile = profiled(1e3)
    place, loop = PlanningDevice(profile.target, None), TrainingLoop()
    levers = advise(step.workload, place, loop, profile.graph, least_peak_of)
    (lever,) = [each for each in levers if "--offload weights" in each.what]
    assert lever.frees_bytes == sum(layer.size_bytes for layer in layers_of(step.model)[AT_ONCE:])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"offload": "weights,activations"}, "cannot be offloaded together"),
        ({"offload": "weights", "execution": "modules"}, "no weights are on the host under"),
        ({"offload": "weights", "loop": TrainingLoop(ddp=True, ranks=2)}, "these need all of them at once"),
        ({"offload": "weights", "loop": TrainingLoop(ema=True)}, "these need all of them at once"),
    ],
)
def test_what_weights_on_the_host_do_not_go_with_is_said(options: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        remat.plan(FROZEN, budget="1GiB", target="rtx4090", **options)  # type: ignore[arg-type]


def test_a_model_whose_weights_are_all_trained_or_quantised_has_none_to_bring_there() -> None:
    for workload in (TRANSFORMER, with_lora(quantized(TEST_SIZES["llama-1b"](), "nf4"), Lora(4), None)):
        with pytest.raises(UsageError, match="has 0 layers alike with frozen weights"):
            remat.plan(workload, budget="1GiB", target="rtx4090", offload="weights")
