"""LoRA through peft: the frozen model's regions train the adapters as without a plan, and keep what was predicted.

Nothing before the first adapter needs a gradient: it keeps nothing, and a region there is not recomputed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from remat.costing.costs import estimated_costs
from remat.costing.planning_device import find_planning_device
from remat.costing.profile import Profile
from remat.errors import PlanMismatch
from remat.evaluation.evaluator import Memory
from remat.evaluation.graph import Graph
from remat.evaluation.plan import Plan
from remat.execution.apply import apply, counts_of, has_plan, remove
from remat.execution.executions import load
from remat.execution.modules.regions import ModuleCounts
from remat.planning.budget import Budget
from remat.recording.fake_step import FakeStep
from remat.validation.training import Training
from remat.workload.target import TARGETS
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload
from tests.studies import plan_profile
from tests.test_modules import plan_of
from tests.toys import CPU, every_block, half_saved, nested, plan_by_hand, recorded

pytest.importorskip("transformers")
with warnings.catch_warnings():  # of peft's own
    warnings.simplefilter("ignore")
    peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo", "one_thread"),
    pytest.mark.filterwarnings(
        "ignore:.*gradient_checkpointing.*:FutureWarning",
        "ignore:fan_in_fan_out is set to",
        "ignore:.*Merge lora module.*",
    ),
]

LAYERS, SAMPLES, LENGTH, VOCAB = 3, 8, 32, 64
ADAPTED = {"gpt2": ["c_attn", "c_fc"], "llama": ["q_proj", "v_proj", "down_proj"]}
LAYER = {"gpt2": "base_model.model.transformer.h.{}", "llama": "base_model.model.model.layers.{}"}


def base(family: str, layers: int = LAYERS) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    tokens: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    model: Any
    if family == "gpt2":
        small: dict[str, Any] = {"n_positions": LENGTH, "n_embd": 32, "n_layer": layers, "n_head": 2}
        model = GPT2LMHeadModel(GPT2Config(**small, **tokens, use_cache=False))
    else:
        small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(**small, **tokens, max_position_embeddings=LENGTH, use_cache=False))
    model.loss_type = "ForCausalLM"
    return model.train()


def adapters(family: str, **options: Any) -> Any:
    rates = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1}
    return peft.LoraConfig(**rates, task_type="CAUSAL_LM", **{"target_modules": ADAPTED[family], **options})


def text(samples: int, length: int | None) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCAB, (samples, length or LENGTH))
    return {"input_ids": ids, "labels": ids.clone()}


def workload(family: str, layers: int = LAYERS, **options: Any) -> Workload:
    return Workload(
        name=f"lora-{family}",
        build=lambda: peft.get_peft_model(base(family, layers), adapters(family, **options)).train(),
        batch=text,
        step=lambda model, batch: model(**batch).loss,
        batch_size=SAMPLES,
        seq_len=LENGTH,
    )


WORKLOADS = {
    "gpt2": workload("gpt2"),
    "llama": workload("llama"),
    "last layers": workload("gpt2", layers_to_transform=[LAYERS - 2, LAYERS - 1]),
}


class Recordings(dict[str, tuple[FakeStep, Graph]]):
    """Of those that are asked for."""

    def __missing__(self, name: str) -> tuple[FakeStep, Graph]:
        return self.setdefault(name, recorded(WORKLOADS[name]))


@pytest.fixture(scope="module")
def recordings() -> dict[str, tuple[FakeStep, Graph]]:
    return Recordings()


CHOICES: dict[str, Callable[[Graph], Plan]] = {
    "every-block": lambda graph: plan_by_hand(graph, every_block(graph)),
    "half-saved": lambda graph: plan_by_hand(graph, half_saved(graph)),
    "nested": lambda graph: plan_by_hand(graph, nested(graph)),
    "layers": plan_of,
    "innermost modules": lambda graph: plan_of(graph, "innermost"),
}
KINDS = ["half-saved", "layers"]  # of nodes, of modules


def every_pair(choices: Iterable[str], quick: Iterable[tuple[str, str]]) -> list[Any]:
    """Every workload under every choice; `make test` runs those in `quick`."""
    quick = set(quick)
    pairs = [(name, choice) for name in WORKLOADS for choice in choices]
    return [pytest.param(*pair, marks=() if pair in quick else pytest.mark.exhaustive) for pair in pairs]


def built(of: Workload) -> Any:
    torch.manual_seed(0)
    return of.build()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def trained(model: Any, steps: int = 1) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and the gradients of the last step."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses, found = [], {}
    for seed in range(steps):
        torch.manual_seed(100 + seed)
        batch = text(SAMPLES, LENGTH)
        torch.manual_seed(seed)
        loss = model(**batch).loss
        loss.backward()
        found = gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, found


def alike(left: Any, right: Any, steps: int = 1) -> bool:
    """Whether two models train to the same losses and gradients, bit for bit."""
    expected, got = trained(left, steps), trained(right, steps)
    same = expected[1].keys() == got[1].keys() and all(torch.equal(expected[1][name], got[1][name]) for name in got[1])
    return expected[0] == got[0] and same


# Training


@pytest.mark.fast("llama-layers")
@pytest.mark.parametrize(
    ("name", "choice"),
    every_pair(
        CHOICES,
        [
            *(("llama", choice) for choice in ("half-saved", "nested", "layers")),
            ("gpt2", "layers"),
            ("last layers", "half-saved"),
        ],
    ),
)
def test_adapters_train_bitwise_as_without_a_plan_and_the_rest_stays_frozen(
    name: str, choice: str, recordings: Any
) -> None:
    plan = CHOICES[choice](recordings[name][1])
    untouched, model = built(WORKLOADS[name]), apply(built(WORKLOADS[name]), plan)
    assert plan.regions
    assert alike(untouched, model, steps=3)
    assert counts_of(model).regions == 3 * len(plan.regions)
    assert all("lora_" in name for name in trained(model)[1])


@pytest.mark.exhaustive
@pytest.mark.often("llama-half-saved", "gpt2-layers", "last layers-half-saved")
@pytest.mark.parametrize(("name", "choice"), every_pair(KINDS, [("llama", "half-saved"), ("gpt2", "layers")]))
def test_the_measured_peak_is_the_replayed_one(name: str, choice: str, recordings: Any) -> None:
    step, graph = recordings[name]
    plan = CHOICES[choice](graph)
    options: Any = {"alignment_bytes": 1, "workspace_of": {}}
    replayed = int(load(plan.execution).replay(step, graph, plan.regions, **options).max())
    if plan.execution == "eager":
        assert plan.predicted["peak_bytes"] == replayed
    training = Training(WORKLOADS[name], CPU, 0, TrainingLoop())
    training.begin_again()
    apply(training.model, plan)
    training.step()
    assert training.peak_of_update(1) == pytest.approx(replayed, rel=0.005)


@pytest.mark.exhaustive
@pytest.mark.parametrize("execution", ["eager", "modules"])
def test_a_plan_that_is_solved_for_keeps_its_budget(execution: str, recordings: Any) -> None:
    step, graph = recordings["llama"]
    profile = Profile(graph, estimated_costs(graph, TARGETS["h100-80gb"]), find_planning_device("cpu").target)
    budget = int(0.7 * Memory(graph).peak_without_checkpointing)
    plan = plan_profile(profile, Budget(budget, budget), step=step, execution=execution)
    assert plan.solver["status"] in ("optimal", "feasible")
    training = Training(WORKLOADS["llama"], CPU, 0, TrainingLoop())
    training.begin_again()
    apply(training.model, plan)
    training.step()
    measured = training.peak_of_update(1)
    assert measured <= budget
    assert measured == pytest.approx(plan.predicted["peak_bytes"], rel=0.005)


# What is before the first adapter


@pytest.mark.exhaustive
def test_a_region_before_the_first_adapter_keeps_nothing_and_is_not_recomputed(recordings: Any) -> None:
    graph = recordings["last layers"][1]
    regions, memory = every_block(graph), Memory(graph)
    frozen, adapted = regions[:-2], regions[-2:]
    assert memory.recomputed_nodes(frozen) == 0 < memory.recomputed_nodes(adapted)
    assert memory.curve(regions).peak_bytes == memory.curve(adapted).peak_bytes
    model = apply(built(WORKLOADS["last layers"]), plan_by_hand(graph, regions), observe=True)
    trained(model)
    assert counts_of(model).recomputed_nodes == memory.recomputed_nodes(adapted)


@pytest.mark.exhaustive
def test_a_module_before_the_first_adapter_is_not_recomputed(recordings: Any) -> None:
    model = apply(built(WORKLOADS["last layers"]), plan_of(recordings["last layers"][1]))
    trained(model)
    counts = counts_of(model)
    assert isinstance(counts, ModuleCounts)
    assert counts.recomputed == {LAYER["gpt2"].format(i): 1 for i in (LAYERS - 2, LAYERS - 1)}


# Modules are known by the paths that `named_modules` gives


@pytest.mark.fast("llama")
@pytest.mark.parametrize("family", LAYER)
def test_layers_behind_a_class_with_attributes_of_its_own_have_their_paths(family: str, recordings: Any) -> None:
    """peft's wrappers hand on what they lack to the model inside, and Dynamo spells the way to their children out."""
    plan = plan_of(recordings[family][1])
    assert [region.module for region in plan.regions] == [LAYER[family].format(i) for i in range(LAYERS)]


# What peft offers around training


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, recordings: Any) -> tuple[Any, Any]:
    """An untouched model, and one with a plan that has trained a step, as the other has."""
    untouched = built(WORKLOADS["llama"])
    planned = apply(built(WORKLOADS["llama"]), CHOICES[request.param](recordings["llama"][1]))
    assert alike(untouched, planned)
    return untouched, planned


@pytest.mark.fast("layers-False")
@pytest.mark.parametrize("gradients_on", [True, False])
def test_adapters_can_be_turned_off_for_a_while(gradients_on: bool, pair: tuple[Any, Any]) -> None:
    """As for the reference model of preference tuning."""
    losses = []
    for model in pair:
        torch.manual_seed(3)
        with model.disable_adapter(), contextlib.nullcontext() if gradients_on else torch.no_grad():
            losses.append(model(**text(2, 8)).loss)
    assert torch.equal(*losses)
    assert alike(*pair)


@pytest.mark.exhaustive
def test_text_is_generated_between_two_steps(pair: tuple[Any, Any]) -> None:
    texts = []
    for model in pair:
        model.eval()
        ids = torch.randint(3, VOCAB, (2, 5), generator=torch.Generator().manual_seed(3))
        texts.append(model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6))
        model.train()
    assert torch.equal(*texts)
    assert alike(*pair)


@pytest.mark.fast("half-saved")
def test_adapters_are_saved_and_loaded(pair: tuple[Any, Any], tmp_path: Path) -> None:
    untouched, planned = pair
    planned.save_pretrained(tmp_path)
    torch.manual_seed(0)
    loaded = peft.PeftModel.from_pretrained(base("llama"), tmp_path, is_trainable=True).train()
    assert list(loaded.state_dict()) == list(planned.state_dict()) == list(untouched.state_dict())
    assert alike(loaded, planned)


@pytest.mark.fast("layers")
def test_adapters_are_merged_with_and_without_the_plan_taken_out(pair: tuple[Any, Any], recordings: Any) -> None:
    untouched, planned = (model.merge_and_unload() for model in pair)
    for model in (untouched, planned):
        model.eval()
    ids = text(2, 8)["input_ids"]
    assert torch.equal(untouched(ids).logits, planned(ids).logits)


@pytest.mark.fast("layers")
def test_a_model_whose_plan_was_removed_has_nothing_left_of_it_when_merged(pair: tuple[Any, Any]) -> None:
    merged = remove(pair[1]).merge_and_unload()
    assert not has_plan(merged)
    assert not any("forward" in module.__dict__ for module in merged.modules())


# What does not fit


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("choice", "order"),
    [
        ("half-saved", "plan first"),
        ("layers", "adapters first"),
        pytest.param("half-saved", "adapters first", marks=pytest.mark.nightly),
        pytest.param("layers", "plan first", marks=pytest.mark.nightly),
    ],
)
def test_a_plan_from_before_there_were_adapters_is_refused_by_name(choice: str, order: str) -> None:
    without = dataclasses.replace(WORKLOADS["llama"], name="llama", build=lambda: base("llama"))
    plan = CHOICES[choice](recorded(without)[1])
    with pytest.raises(PlanMismatch, match=r"'llama', .*returns the model as it is trained, adapters \(LoRA\) incl"):
        if order == "adapters first":
            model = apply(built(WORKLOADS["llama"]), plan)
        else:
            model = peft.get_peft_model(apply(base("llama"), plan), adapters("llama")).train()
        trained(model)


@pytest.mark.exhaustive
def test_a_model_of_many_small_graphs_trains_alike_though_one_of_them_has_no_nodes() -> None:
    """DoRA asks of what class a weight is, where a graph ends."""
    dora = workload("gpt2", layers=1, use_dora=True, target_modules=["c_attn"])
    graph = recorded(dora)[1]
    assert () in graph.call_nodes
    assert alike(built(dora), apply(built(dora), CHOICES["half-saved"](graph)))


@pytest.mark.exhaustive
def test_more_layers_that_learn_than_planned_are_told_of(recordings: Any) -> None:
    for choice in KINDS:
        model = apply(built(WORKLOADS["gpt2"]), CHOICES[choice](recordings["gpt2"][1]))
        model.get_submodule(LAYER["gpt2"].format(0)).requires_grad_(True)
        with pytest.warns(UserWarning, match="parameters require gradients") as caught:
            model(**text(2, 8))
        assert [warning.filename for warning in caught] == [__file__]


# The model's own checkpointing


def checkpointing(model: Any) -> Any:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


@pytest.mark.exhaustive
@pytest.mark.nightly
def test_a_plan_of_nodes_takes_the_place_of_checkpointing_that_it_was_made_with() -> None:
    """peft's hook, which lets the embeddings' output require a gradient, makes several graphs."""
    short = workload("gpt2", layers=1)
    checkpointed = dataclasses.replace(short, build=lambda: checkpointing(short.build()))
    plan = CHOICES["half-saved"](recorded(checkpointed)[1])
    assert len(plan.fingerprints) > 1
    assert alike(built(checkpointed), apply(built(checkpointed), plan))


@pytest.mark.exhaustive
@pytest.mark.nightly
def test_checkpointing_that_a_plan_of_nodes_does_not_know_is_refused_by_name() -> None:
    short = workload("gpt2", layers=1)
    model = checkpointing(apply(built(short), CHOICES["half-saved"](recorded(short)[1])))
    with pytest.raises(PlanMismatch, match="turn gradient_checkpointing off in this model"):
        trained(model)


@pytest.mark.exhaustive
def test_checkpointing_beside_a_plan_of_modules_is_warned_of(recordings: Any) -> None:
    untouched = checkpointing(built(WORKLOADS["gpt2"]))
    model = checkpointing(apply(built(WORKLOADS["gpt2"]), CHOICES["layers"](recordings["gpt2"][1])))
    with pytest.warns(UserWarning, match="gradient_checkpointing is on in this model") as caught:
        assert alike(untouched, model)
    assert [warning.filename for warning in caught] == [__file__]
