"""A model with a plan trains bit for bit as without, and is in every other respect the model that it was."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import pickle
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import remat
from remat.errors import CaptureError, PlanMismatch, UsageError
from remat.evaluation.evaluator import Memory
from remat.evaluation.plan import Plan, Region, to_refs
from remat.execution.apply import apply, counts_of, remove
from remat.execution.eager.planned_graphs import MANY_SURROUNDINGS
from remat.execution.eager.replay import replay
from remat.execution.eager.rewritten_calls import RewrittenCalls
from remat.execution.surroundings import Surroundings
from remat.formulation.search_space import blocks, find_space
from remat.recording.fake_step import FakeStep
from remat.recording.record import record
from remat.recording.step_contexts import autocast_context
from remat.recording.tracker import Tracker
from remat.units import gib
from remat.workload.workload import Workload
from tests.small_models import TEST_SIZES
from tests.toys import (
    CHOICES,
    CONVNET,
    CPU,
    SHORT,
    TRANSFORMER,
    TRANSFORMER_BF16,
    VOCAB,
    WORKLOADS,
    ConvNet,
    Transformer,
    every_block,
    nested,
    plan_by_hand,
    planned_graphs,
    recorded,
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")


def built(workload: Workload) -> nn.Module:
    torch.manual_seed(0)
    return workload.build()


def loss_of(workload: Workload, model: nn.Module, batch: Any, seed: int = 1) -> torch.Tensor:
    torch.manual_seed(seed)
    with autocast_context(CPU, workload.autocast):
        return workload.step(model, batch)


def batch_of(workload: Workload, samples: int | None = None) -> Any:
    torch.manual_seed(100)
    return workload.batch(samples or workload.batch_size, workload.seq_len)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def same(left: Iterator[torch.Tensor] | list[torch.Tensor], right: Iterator[torch.Tensor] | list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def trained(workload: Workload, model: nn.Module, micro_batches: int = 1) -> tuple[list[float], list[torch.Tensor]]:
    """Losses, and the gradients summed over `micro_batches`."""
    losses = []
    for seed in range(micro_batches):
        loss = loss_of(workload, model, batch_of(workload), seed)
        loss.backward()
        losses.append(loss.item())
    return losses, gradients(model)


@pytest.fixture(scope="module")
def graphs() -> dict[str, tuple[FakeStep, Any]]:
    return {name: recorded(workload) for name, workload in (WORKLOADS | {"short": SHORT}).items()}


@pytest.fixture(scope="module")
def plans(graphs: Any) -> dict[str, Plan]:
    """Every block of each toy a region."""
    return {name: plan_by_hand(graph, every_block(graph)) for name, (_, graph) in graphs.items()}


@pytest.fixture
def planned(plans: dict[str, Plan]) -> nn.Module:
    return apply(built(SHORT), plans["short"], observe=True)


# Training


@pytest.mark.fast(
    "transformer-nested-with-rest",
    "transformer-amp-first-dropout-saved",
    "convnet-half-saved",
)
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", WORKLOADS)
def test_two_micro_batches_are_bitwise_those_of_the_untouched_model(name: str, choice: str, graphs: Any) -> None:
    workload, graph = WORKLOADS[name], graphs[name][1]
    regions = tuple(CHOICES[choice](graph))
    untouched, model = built(workload), built(workload)
    apply(model, plan_by_hand(graph, regions), observe=True)
    expected, next_number = trained(workload, untouched, 2), torch.rand(1)
    got = trained(workload, model, 2)
    assert torch.rand(1) == next_number  # the stream of random numbers goes on as without
    assert got[0] == expected[0]
    assert same(got[1], expected[1])
    assert same(model.buffers(), untouched.buffers())
    assert counts_of(model).regions == 2 * len(regions)
    assert counts_of(model).recomputed_nodes == 2 * Memory(graph).recomputed_nodes(regions)


def test_batch_norm_advances_once_for_every_forward(plans: dict[str, Plan]) -> None:
    model = apply(built(CONVNET), plans["convnet"])
    trained(CONVNET, model, 3)
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert {int(norm.num_batches_tracked) for norm in norms if norm.num_batches_tracked is not None} == {3}


def test_batch_norm_advances_once_in_nested_regions(graphs: Any) -> None:
    graph = graphs["convnet"][1]
    model = apply(built(CONVNET), plan_by_hand(graph, nested(graph)))
    trained(CONVNET, model)
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert {int(norm.num_batches_tracked) for norm in norms if norm.num_batches_tracked is not None} == {1}


def test_several_steps_with_an_optimizer_stay_equal(plans: dict[str, Plan]) -> None:
    untouched, model = built(SHORT), apply(built(SHORT), plans["short"])
    for each in (untouched, model):
        optimizer = torch.optim.AdamW(each.parameters())
        for seed in range(3):
            loss_of(SHORT, each, batch_of(SHORT), seed).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert same(model.parameters(), untouched.parameters())


@pytest.mark.fast("nested")
@pytest.mark.parametrize("choice", ["every-block", "nested"])
def test_a_second_backward_of_one_forward_recomputes_again(choice: str, graphs: Any) -> None:
    graph = graphs["transformer"][1]
    untouched, model = built(TRANSFORMER), built(TRANSFORMER)
    apply(model, plan_by_hand(graph, CHOICES[choice](graph)))
    for each in (untouched, model):
        loss = loss_of(TRANSFORMER, each, batch_of(TRANSFORMER))
        loss.backward(retain_graph=True)
        loss.backward()
    assert same(gradients(model), gradients(untouched))


def test_an_exception_in_forward_leaves_the_model_fit_for_the_next_step(planned: nn.Module) -> None:
    ids, labels = batch_of(SHORT)
    with pytest.raises(IndexError):
        planned(ids, labels + VOCAB)  # found by the loss, after all regions have run
    planned.zero_grad()
    losses, found = trained(SHORT, planned)
    expected = trained(SHORT, built(SHORT))
    assert losses == expected[0]
    assert same(found, expected[1])


def test_a_batch_that_the_model_refuses_raises_the_models_own_error(plans: dict[str, Plan]) -> None:
    model, (images, labels) = apply(built(CONVNET), plans["convnet"]), batch_of(CONVNET)
    for _ in range(2):  # before the first step, and after it
        with pytest.raises(RuntimeError, match=r"expected input.* to have 3 channels, but got 2"):
            model(images[:, :2], labels)
        loss_of(CONVNET, model, (images, labels)).backward()
    assert counts_of(model).regions


# Batches of another size


def test_what_tracing_leaves_behind_is_gone_before_backward(
    planned: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cycles of Dynamo's may hold activations: a forward that was traced ends with their collection, no other does."""
    collected: list[int] = []
    monkeypatch.setattr(
        "remat.execution.eager.planned_graphs.gc", types.SimpleNamespace(collect=lambda: collected.append(1))
    )
    batch = batch_of(SHORT)
    loss = planned(*batch)
    assert collected == [1]
    loss.backward()
    planned(*batch).backward()
    assert collected == [1]


def test_a_smaller_last_batch_trains_with_the_plan(planned: nn.Module) -> None:
    trained(SHORT, planned)
    entered = counts_of(planned).regions
    planned.zero_grad()
    loss_of(SHORT, planned, batch_of(SHORT, 1)).backward()
    assert counts_of(planned).regions == entered + 2
    untouched = built(SHORT)
    loss_of(SHORT, untouched, batch_of(SHORT, 1)).backward()
    assert same(gradients(planned), gradients(untouched))


def test_a_larger_batch_warns_once_and_again_if_it_is_much_larger_still(plans: dict[str, Plan]) -> None:
    model = apply(built(SHORT), plans["short"])
    batch = batch_of(SHORT, SHORT.batch_size + 1)
    with pytest.warns(UserWarning, match="80 elements, the plan was made for 64 .batch size 4") as caught:
        model(*batch)
    assert [warning.filename for warning in caught] == [__file__]
    model(*batch)  # a second warning would be an error here
    with pytest.warns(UserWarning, match="128 elements, the plan was made for 64"):
        model(*batch_of(SHORT, 2 * SHORT.batch_size))


def test_a_larger_batch_is_refused_where_asked(plans: dict[str, Plan]) -> None:
    model = apply(built(SHORT), plans["short"], on_larger="refuse")
    model(*batch_of(SHORT))
    with pytest.raises(PlanMismatch, match="its peak will exceed the planned"):
        model(*batch_of(SHORT, SHORT.batch_size + 1))


def test_a_larger_batch_has_the_same_workspaces_of_libraries(plans: dict[str, Plan]) -> None:
    predicted: Any = {**plans["short"].predicted, "peak_bytes": 64 << 20}
    predicted["breakdown"] = {"library workspaces": 32 << 20}
    plan = dataclasses.replace(plans["short"], predicted=predicted)
    with pytest.raises(PlanMismatch, match=r"about 96\.00 MiB"):
        apply(built(SHORT), plan, on_larger="refuse")(*batch_of(SHORT, 2 * SHORT.batch_size))


# What is not training


def test_keys_values_and_names_stay(plans: dict[str, Plan]) -> None:
    untouched, model = built(CONVNET), apply(built(CONVNET), plans["convnet"])
    for each in (untouched, model):
        trained(CONVNET, each)
    assert list(model.state_dict()) == list(untouched.state_dict())
    assert same(list(model.state_dict().values()), list(untouched.state_dict().values()))
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in untouched.named_parameters()]
    assert [n for n, _ in model.named_modules()] == [n for n, _ in untouched.named_modules()]
    assert type(model) is ConvNet
    model.load_state_dict(built(CONVNET).state_dict())


@pytest.mark.fast("eval", "inference_mode")
@pytest.mark.parametrize("mode", ["eval", "no_grad", "inference_mode"])
def test_what_is_not_training_runs_the_original_forward(mode: str, planned: nn.Module) -> None:
    untouched = built(SHORT)
    contexts: dict[str, Callable[[], Any]] = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    for each in (untouched, planned):
        each.train(mode != "eval")
    ids, _ = batch_of(SHORT)
    with contexts.get(mode, torch.enable_grad)():
        torch.manual_seed(3)
        expected = untouched(ids)
        torch.manual_seed(3)
        assert torch.equal(planned(ids), expected)
    assert counts_of(planned).regions == 0
    planned.train()
    trained(SHORT, planned)
    assert counts_of(planned).regions == 2


def test_training_in_evaluation_mode_is_told_and_evaluating_is_not(planned: nn.Module) -> None:
    planned.eval()
    loss_of(SHORT, planned, batch_of(SHORT))  # no backward: nobody trains
    with pytest.warns(UserWarning, match=r"in evaluation mode .* call model\.train\(\) before training"):
        loss_of(SHORT, planned, batch_of(SHORT)).backward()
    loss_of(SHORT, planned, batch_of(SHORT)).backward()  # once


@pytest.mark.exhaustive
def test_a_hook_that_breaks_the_graph_is_refused_and_leaves_nothing_behind(planned: nn.Module) -> None:
    for path in ("layers.1", "layers.1.up"):
        place = planned.get_submodule(path)
        handle = place.register_forward_hook(lambda module, given, output: print(float(output.detach().sum())))
        with pytest.raises(PlanMismatch, match=r"hooks on layers\.1.* let it keep the tensor, detached"):
            trained(SHORT, planned)
        handle.remove()
        trained(SHORT, planned)


def _hook(monkeypatch: pytest.MonkeyPatch) -> Any:
    return nn.modules.module.register_module_forward_hook(
        lambda module, given, output: 1.01 * output if isinstance(module, nn.LayerNorm) else None
    ).remove


def _another_method(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(nn.LayerNorm, "forward", lambda norm, x: x * norm.weight)
    return monkeypatch.undo


@pytest.mark.parametrize(
    ("change", "told"), [(_hook, "hooks on all modules"), (_another_method, r"LayerNorm\.forward was replaced")]
)
def test_changes_that_no_guard_sees_are_refused_while_they_last(
    planned: nn.Module, change: Any, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(SHORT, planned)
    undo = change(monkeypatch)
    with pytest.raises(PlanMismatch, match=told):
        trained(SHORT, planned)
    undo()
    trained(SHORT, planned)


class Table(dict):
    """Callable, and not hashable."""

    def __call__(self) -> None: ...


class Made(nn.Linear):
    """With methods that are made anew whenever the class is asked for them."""

    table = Table()
    halved = functools.partialmethod(nn.Linear.forward)

    @classmethod
    def made(cls) -> nn.Module:
        return cls(1, 1)

    @property
    def width(self) -> int:
        raise RuntimeError


def test_surroundings_stay_as_long_as_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    surroundings = Surroundings(nn.Sequential(Made(1, 1)))
    before = surroundings.now()
    assert surroundings.now() == before
    assert surroundings.changes() == []
    with monkeypatch.context() as patched:
        patched.setattr(Made, "forward", lambda self, x: x)  # which it inherits
        assert surroundings.now() != before
        assert surroundings.changes() == ["Made.forward was replaced since the first forward"]
    assert surroundings.now() == before


@pytest.mark.exhaustive
def test_surroundings_that_change_in_every_step_are_told_and_let_go(
    planned: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = nn.LayerNorm.forward

    def step() -> None:
        monkeypatch.setattr(nn.LayerNorm, "forward", lambda self, x: own(self, x))
        trained(SHORT, planned)

    for _ in range(MANY_SURROUNDINGS):
        step()
    with pytest.warns(UserWarning, match=r"has changed in more than 4 ways, and each is traced by itself"):
        step()
    for _ in range(MANY_SURROUNDINGS):
        step()
    assert len(planned_graphs(planned)._graphs) <= MANY_SURROUNDINGS
    assert len(planned_graphs(planned)._fitting) <= MANY_SURROUNDINGS


@pytest.mark.exhaustive
def test_other_kernels_of_attention_are_held_against_the_plan() -> None:
    workload = dataclasses.replace(SHORT, build=functools.partial(Transformer, dropout=0.0))
    plan = plan_by_hand(recorded(workload)[1], ())

    def train(budget_bytes: int) -> None:
        model = apply(built(workload), dataclasses.replace(plan, budget_bytes=budget_bytes))
        trained(workload, model)
        with sdpa_kernel(SDPBackend.MATH):
            trained(workload, model)

    train(1 << 40)
    with pytest.raises(PlanMismatch, match=r"more than when planned .* other kernels of attention"):
        train(plan.predicted["peak_bytes"])


def test_a_step_that_calls_modules_and_never_the_planned_model_is_told(
    planned: nn.Module, plans: dict[str, Plan]
) -> None:
    ids, _ = batch_of(SHORT)

    def by_modules(model: Any) -> torch.Tensor:
        x = model.embed(ids)
        for layer in model.layers:
            x = layer(x)
        return x.square().mean()

    with pytest.warns(UserWarning, match=r"no forward has run under the plan, .* calls of the model itself"):
        by_modules(planned).backward()
    by_modules(planned).backward()  # once
    other = apply(built(SHORT), plans["short"])
    loss_of(SHORT, other, batch_of(SHORT)).backward()
    by_modules(other).backward()


def test_gradients_that_are_there_as_a_forward_begins_are_told_where_they_may_break_the_budget(
    planned: nn.Module, plans: dict[str, Plan]
) -> None:
    roomy = dataclasses.replace(plans["short"], budget_bytes=1 << 40)
    trained(SHORT, apply(built(SHORT), roomy), micro_batches=2)
    loop = {**plans["short"].about, "accumulation": 2}
    trained(SHORT, apply(built(SHORT), dataclasses.replace(plans["short"], about=loop)), 2)
    tight = dataclasses.replace(plans["short"], budget_bytes=plans["short"].predicted["peak_bytes"])
    with pytest.warns(UserWarning, match=r"of gradients are there as a forward begins, .* \(`accumulation=`\)"):
        trained(SHORT, apply(built(SHORT), tight), micro_batches=2)


def test_gradients_that_a_backward_leaves_that_fails_are_told(plans: dict[str, Plan]) -> None:
    tight = dataclasses.replace(plans["short"], budget_bytes=plans["short"].predicted["peak_bytes"])
    model = apply(built(SHORT), tight)

    def fails(gradient: torch.Tensor) -> None:
        raise RuntimeError("of the user's own")

    *_, middle, _ = model.parameters()
    handle = middle.register_hook(fails)
    with pytest.raises(RuntimeError, match="of the user's own"):
        loss_of(SHORT, model, batch_of(SHORT)).backward()
    assert next(model.parameters()).grad is None
    handle.remove()
    with pytest.warns(UserWarning, match="of gradients are there as a forward begins"):
        loss_of(SHORT, model, batch_of(SHORT)).backward()


@pytest.mark.exhaustive
def test_a_look_between_a_forward_and_its_backward_is_told_where_the_plan_does_not_know(
    plans: dict[str, Plan],
) -> None:
    def look(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = loss_of(SHORT, model, batch)
        with torch.no_grad():
            model(batch[0])
        return loss

    def train(plan: Plan) -> None:
        look(apply(built(SHORT), plan), batch_of(SHORT)).backward()

    train(dataclasses.replace(plans["short"], budget_bytes=1 << 40))
    with pytest.warns(UserWarning, match="a forward without gradients runs between a forward and its backward"):
        train(dataclasses.replace(plans["short"], budget_bytes=plans["short"].predicted["peak_bytes"]))
    workload = dataclasses.replace(SHORT, step=look)
    known = remat.plan(workload, budget="70%step", target=plans["short"].target)
    train(dataclasses.replace(known, budget_bytes=known.predicted["peak_bytes"]))
    model = apply(built(SHORT), plans["short"])
    for _ in range(2):  # before a forward, and after its backward, it is an evaluation
        with torch.no_grad():
            model(batch_of(SHORT)[0])
        loss_of(SHORT, model, batch_of(SHORT)).backward()
        model.zero_grad()


def test_a_batch_without_rows_is_refused_and_the_next_one_trains(plans: dict[str, Plan]) -> None:
    model = apply(built(SHORT), plans["short"])
    for rows, refused in ((8, False), (0, True), (8, False)):
        ids, labels = (each[:rows] for each in batch_of(SHORT))
        with pytest.raises(PlanMismatch, match="this batch has no rows") if refused else contextlib.nullcontext():
            model(ids, labels).backward()
        model.zero_grad()


def test_own_hooks_on_saved_tensors_are_told_whatever_the_step_and_those_of_torch_are_not(
    plans: dict[str, Plan],
) -> None:
    model = apply(built(SHORT), plans["short"])

    def train(around: Any) -> None:
        with around:
            loss = loss_of(SHORT, model, batch_of(SHORT))
        loss.backward()

    train(torch.autograd.graph.save_on_cpu())

    def to_bfloat16(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.bfloat16() if tensor.dtype == torch.float32 else tensor

    def to_float32(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.dtype == torch.bfloat16 else tensor

    with pytest.warns(UserWarning, match=r"hooks on saved tensors \(`.*to_bfloat16`\) are on around this forward"):
        train(torch.autograd.graph.saved_tensors_hooks(to_bfloat16, to_float32))


def test_two_backwards_through_one_forward_are_told_where_they_may_break_the_budget(plans: dict[str, Plan]) -> None:
    def train(budget_bytes: int) -> None:
        model = apply(built(SHORT), dataclasses.replace(plans["short"], budget_bytes=budget_bytes))
        for _ in range(2):
            loss = loss_of(SHORT, model, batch_of(SHORT))
            loss.backward(retain_graph=True)
            (2 * loss).backward()
            model.zero_grad()

    train(1 << 40)
    with pytest.warns(UserWarning, match=r"kept its graph for another one \(retain_graph=True\)") as seen:
        train(plans["short"].predicted["peak_bytes"])
    gradients = sum(p.nbytes for p in built(SHORT).parameters())
    most = gib(plans["short"].without_checkpointing["peak_bytes"] + gradients)
    assert f"all that it recomputed, which stays for the next, up to about {most}" in str(seen[0].message)


def test_a_gradient_that_is_differentiated_is_told_where_it_may_break_the_budget(plans: dict[str, Plan]) -> None:
    def train(budget_bytes: int) -> None:
        model = apply(built(SHORT), dataclasses.replace(plans["short"], budget_bytes=budget_bytes))
        for _ in range(2):
            loss = loss_of(SHORT, model, batch_of(SHORT))
            (slope,) = torch.autograd.grad(loss, model.get_parameter("head.weight"), create_graph=True)
            (loss + slope.square().sum()).backward()
            model.zero_grad()

    train(1 << 40)
    with pytest.warns(UserWarning, match=r"differentiated a gradient \(create_graph=True\)"):
        train(plans["short"].predicted["peak_bytes"])


class Pair:
    """A batch whose sizes no description of a forward's arguments has."""

    def __init__(self, ids: torch.Tensor, labels: torch.Tensor):
        self.ids, self.labels = ids, labels


class OfPairs(Transformer):
    def forward(self, pair: Pair) -> torch.Tensor:  # type: ignore[override]
        return Transformer.forward(self, pair.ids, pair.labels)


@pytest.mark.exhaustive
def test_a_larger_batch_within_an_object_is_told_and_not_taken_for_another_model() -> None:
    pairs = dataclasses.replace(
        SHORT,
        build=OfPairs,
        batch=lambda samples, length: Pair(*SHORT.batch(samples, length)),
        step=lambda model, pair: model(pair),
    )
    plan = plan_by_hand(recorded(pairs)[1], ())
    trained(pairs, apply(built(pairs), plan, on_larger="refuse"))
    with pytest.warns(UserWarning, match=r"makes up to .* more than when planned .* and a batch of this size"):
        apply(built(pairs), plan)(batch_of(pairs, 16)).backward()


@pytest.mark.exhaustive
def test_a_backward_inside_of_autocast_is_told_where_it_may_break_the_budget(plans: dict[str, Plan]) -> None:
    """Autocast keeps its casts of the weights as long as it is open."""
    plan = plans["transformer-amp"]

    def train(budget_bytes: int, *, inside: bool, cache_enabled: bool = True) -> None:
        model = apply(built(TRANSFORMER_BF16), dataclasses.replace(plan, budget_bytes=budget_bytes))
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache_enabled):
                loss = TRANSFORMER_BF16.step(model, batch_of(TRANSFORMER_BF16))
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
            model.zero_grad()

    train(plan.predicted["peak_bytes"], inside=False)
    train(1 << 40, inside=True)
    train(plan.predicted["peak_bytes"], inside=True, cache_enabled=False)
    with pytest.warns(UserWarning, match=r"backward ran inside of torch.autocast"):
        train(plan.predicted["peak_bytes"], inside=True)


def test_a_copy_trains_its_own_parameters_with_the_plan(planned: nn.Module) -> None:
    trained(SHORT, planned)
    planned.zero_grad()
    twin = copy.deepcopy(planned)
    losses, found = trained(SHORT, twin)
    assert counts_of(twin).regions == 2
    assert gradients(planned) == []
    expected = trained(SHORT, built(SHORT))
    assert losses == expected[0]
    assert same(found, expected[1])
    assert remove(twin).__dict__.get("forward") is None
    assert counts_of(planned).regions == 2  # the original keeps its plan


def test_a_pickled_model_comes_back_with_its_plan(planned: nn.Module) -> None:
    twin = pickle.loads(pickle.dumps(planned))
    losses, found = trained(SHORT, twin)
    assert counts_of(twin).regions == 2
    expected = trained(SHORT, built(SHORT))
    assert losses == expected[0]
    assert same(found, expected[1])


# Applying and removing


def test_a_plan_is_applied_from_its_file(tmp_path: Path, plans: dict[str, Plan]) -> None:
    plans["short"].save(tmp_path / "toy.plan.json")
    model = built(SHORT)
    assert apply(model, tmp_path / "toy.plan.json") is model
    trained(SHORT, model)
    assert counts_of(model).regions == 2


@pytest.mark.parametrize("removed", [False, True])
def test_a_model_that_is_dropped_is_freed_with_its_weights(removed: bool, plans: dict[str, Plan]) -> None:
    """Dynamo keeps what it traced until the process ends; a search over settings makes one model after another."""
    model = apply(built(SHORT), plans["short"])
    model(*batch_of(SHORT)).backward()
    if removed:
        remove(model)
    alive = weakref.ref(model), weakref.ref(model.get_parameter("embed.weight"))
    del model
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


@pytest.mark.exhaustive
def test_a_second_plan_replaces_the_first(planned: nn.Module, graphs: Any) -> None:
    trained(SHORT, planned)
    graph = graphs["short"][1]
    apply(planned, plan_by_hand(graph, CHOICES["all-in-one"](graph)))
    planned.zero_grad()
    losses, found = trained(SHORT, planned)
    assert counts_of(planned).regions == 1
    expected = trained(SHORT, built(SHORT))
    assert losses == expected[0]
    assert same(found, expected[1])
    assert remove(planned).__dict__.get("forward") is None


def test_remove_restores_the_model(planned: nn.Module) -> None:
    assert remove(planned) is planned
    assert "forward" not in planned.__dict__
    assert remove(planned) is planned  # nothing to do
    with pytest.raises(UsageError, match="no plan is applied"):
        counts_of(planned)


def test_a_forward_of_the_users_own_is_kept_under_the_plan(plans: dict[str, Plan]) -> None:
    model = built(SHORT)
    own = model.forward = types.MethodType(patched_forward, model)
    apply(model, plans["short"])
    trained(SHORT, model)
    assert counts_of(model).regions == 2
    assert remove(model).forward is own


def patched_forward(self: Transformer, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A forward that a library has put in place of the model's own."""
    return Transformer.forward(self, ids, labels)


def test_a_plan_holds_where_the_compiler_is_told_to_stay_away(planned: nn.Module) -> None:
    with torch.compiler.set_stance("force_eager"):
        trained(SHORT, planned)
    assert counts_of(planned).regions == 2


@pytest.mark.exhaustive
def test_a_trained_model_is_exported_for_evaluation(planned: nn.Module) -> None:
    ids, labels = batch_of(SHORT)
    planned(ids, labels).backward()
    exported = torch.export.export(planned.eval(), (ids,)).module()
    assert torch.equal(exported(ids), planned(ids))


# What does not fit


@pytest.mark.exhaustive
def test_a_plan_for_another_model_is_refused_at_the_first_forward(plans: dict[str, Plan]) -> None:
    deeper = apply(Transformer(layers=5), plans["short"])
    with pytest.raises(PlanMismatch, match="made for 'toy-transformer', whose graph differs"):
        deeper(*batch_of(SHORT))


def test_a_plan_under_autocast_is_refused_without(plans: dict[str, Plan]) -> None:
    model = apply(built(TRANSFORMER_BF16), plans["transformer-amp"])
    with pytest.raises(PlanMismatch, match="for autocast to bfloat16, this forward runs no autocast"):
        model(*batch_of(TRANSFORMER_BF16))
    trained(TRANSFORMER_BF16, model)  # as planned it works
    assert counts_of(model).regions == 4


def test_a_plan_without_autocast_is_refused_under_it(planned: nn.Module) -> None:
    with pytest.raises(PlanMismatch, match="for no autocast, this forward runs autocast to bfloat16"):
        loss_of(TRANSFORMER_BF16, planned, batch_of(SHORT))


def test_parameters_of_another_dtype_are_refused(planned: nn.Module) -> None:
    planned.to(torch.bfloat16)
    with pytest.raises(PlanMismatch, match=r"parameters of \['float32'\], this model has \['bfloat16'\]"):
        planned(*batch_of(SHORT))


@pytest.mark.parametrize("inner_first", [False, True])
def test_a_plan_within_a_planned_model_is_refused(inner_first: bool, plans: dict[str, Plan]) -> None:
    model = built(SHORT)
    parts = [model, model.get_submodule("layers.1")]
    for part in reversed(parts) if inner_first else parts:
        apply(part, plans["short"])
    with pytest.raises(PlanMismatch, match=r"other plans are applied inside of this model \(on layers.1\)"):
        model(*batch_of(SHORT))


def test_a_model_with_a_plan_is_not_planned(planned: nn.Module) -> None:
    around = nn.Sequential(planned)
    with pytest.raises(CaptureError, match="a model that a plan is applied to"):
        FakeStep(dataclasses.replace(SHORT, build=lambda: around), device=CPU)


def test_a_scripted_module_is_refused_by_name() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch: deprecated
        model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.ReLU()))
    with pytest.raises(CaptureError, match=r"a module of TorchScript \(1\), which cannot be traced"):
        FakeStep(dataclasses.replace(SHORT, build=lambda: model), device=CPU)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_a_program_of_torch_export_is_refused_by_name() -> None:
    def build() -> nn.Module:
        return torch.export.export(nn.Linear(8, 8), (torch.zeros(2, 8),)).module()

    with pytest.raises(CaptureError, match=r"without a training mode .*: a program of torch.export has none"):
        FakeStep(dataclasses.replace(SHORT, build=build), device=CPU)


def test_a_model_of_dtensors_is_refused_by_name(planned: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed.tensor, "DTensor", nn.Parameter)
    with pytest.raises(PlanMismatch, match="parameters of this model are DTensors"):
        planned(*batch_of(SHORT))


def test_lazy_parameters_are_refused_by_name(plans: dict[str, Plan]) -> None:
    lazy = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(CaptureError, match=r"0.weight, 0.bias get a shape in its first forward. Let `build` run"):
        FakeStep(dataclasses.replace(SHORT, build=lambda: lazy), device=CPU)
    with pytest.raises(PlanMismatch, match=r"0.weight, 0.bias get theirs in the first forward of a lazy module"):
        apply(lazy, plans["short"])(torch.ones(2, 2))


def test_a_step_under_a_dispatch_mode_is_refused_with_a_remedy(planned: nn.Module) -> None:
    with FlopCounterMode(display=False), pytest.raises(PlanMismatch, match=r"FlopCounterMode is one.*without the plan"):
        planned(*batch_of(SHORT))


def test_what_is_no_plan_or_no_answer_is_refused(plans: dict[str, Plan]) -> None:
    with pytest.raises(UsageError, match=r"a remat.Plan or the path of its file is needed, not int"):
        apply(TRANSFORMER.build(), 3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="`on_larger=` is 'warn' or 'refuse', not 'refused'"):
        apply(TRANSFORMER.build(), next(iter(plans.values())), on_larger="refused")  # type: ignore[arg-type]


def test_what_is_no_module_is_refused(plans: dict[str, Plan]) -> None:
    with pytest.raises(UsageError, match=r"a torch.nn.Module is needed, not function"):
        apply(lambda: None, plans["short"])  # type: ignore[type-var]
    with pytest.raises(UsageError, match=r"a torch.nn.Module is needed, not int"):
        remove(3)  # type: ignore[type-var]


# The evaluator and the executor count alike, on the families of the registry


def assorted(graph: Any) -> dict[str, tuple[Region, ...]]:
    """Regions of every sort that the graph has room for; none that holds what must stay plain."""
    space = find_space(graph)
    stretches = list(space.stretches())
    longest = max(stretches, key=lambda ab: ab[1] - ab[0])
    cuts = [space.segments[i].first for i in range(*longest)] + [space.segments[longest[1] - 1].end]
    inner = [Region(a, b) for a, b in zip(cuts[:-1:2], cuts[1::2], strict=False)]
    saving = tuple(
        Region(first, end, tuple(v for v in space.saveable[::3] if first <= v < end)) for first, end in blocks(graph)
    )
    return {
        "every-block": tuple(every_block(graph)),
        "saving": saving,
        "halves": (Region(cuts[0], cuts[len(cuts) // 2]), Region(cuts[len(cuts) // 2], cuts[-1])),
        "nested": (Region(cuts[0], cuts[-1], inner=tuple(inner)),),
    }


@pytest.mark.exhaustive
@pytest.mark.often("resnet50")
@pytest.mark.parametrize(  # benchmarks validate all
    "name",
    ["gpt2", "t5-base", "resnet50", "qwen3-moe"],
)
def test_evaluator_and_executor_count_the_same_recomputed_nodes(name: str) -> None:
    pytest.importorskip("transformers")
    workload = TEST_SIZES[name]().sized(batch_size=2)
    fake = FakeStep(workload, device=CPU)
    graph = record(fake)
    memory = Memory(graph)
    for choice, regions in assorted(graph).items():
        calls = RewrittenCalls(to_refs(graph, regions), observe=True)
        with fake.executing(calls):
            fake.execute(Tracker(), lambda: None, lambda: None)
        assert calls.counts.recomputed_nodes == memory.recomputed_nodes(regions), choice


@pytest.mark.fast("transformer-nested-with-rest", "transformer-half-saved")
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", ["transformer", pytest.param("transformer-amp", marks=pytest.mark.exhaustive)])
def test_evaluator_and_executor_need_the_same_memory(name: str, choice: str, graphs: Any) -> None:
    fake, graph = graphs[name]
    regions = tuple(CHOICES[choice](graph))
    assert Memory(graph).curve(regions).peak_bytes == replay(fake, to_refs(graph, regions)).max()


@pytest.mark.exhaustive
def test_evaluator_and_executor_need_the_same_memory_under_autocast(graphs: Any) -> None:
    fake, graph = graphs["transformer-amp"]
    for choice in ("half-saved", "nested"):
        regions = tuple(CHOICES[choice](graph))
        assert Memory(graph).curve(regions).peak_bytes == replay(fake, to_refs(graph, regions)).max()


@pytest.mark.cuda
@pytest.mark.parametrize("execution", ["eager", "modules"])
def test_a_plan_for_a_cpu_is_told_on_another_device(execution: str) -> None:
    plan = remat.plan(TRANSFORMER, budget="1GiB", target="cpu", execution=execution)
    ids, labels = (each.cuda() for each in batch_of(TRANSFORMER))
    with pytest.warns(UserWarning, match="the plan is for a CPU, and this model is on cuda") as seen:
        apply(built(TRANSFORMER).cuda(), plan)(ids, labels).backward()
    assert seen[0].filename == __file__
    with pytest.raises(PlanMismatch, match=r"Make a plan there, or for the card by name"):
        apply(built(TRANSFORMER).cuda(), plan, on_larger="refuse")(ids, labels)
