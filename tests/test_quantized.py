"""4-bit weights: planned from the configuration alone, they are the tensors that bitsandbytes makes on a device."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from remat.capture import four_bit
from remat.capture.beside_parameters import tensors_beside
from remat.cli.model_spec import ModelSpec
from remat.errors import UsageError
from remat.evaluation.graph import Graph
from remat.execution.apply import apply, counts_of
from remat.models.adapters import Lora, with_lora
from remat.models.common import text_model
from remat.models.quantized import quantized
from remat.recording.fake_step import FakeStep
from remat.recording.tracker import Tracker
from remat.workload.workload import Workload
from tests.small_models import QWEN3
from tests.toys import every_block, plan_by_hand, recorded

pytest.importorskip("transformers")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("peft")
    library = pytest.importorskip("bitsandbytes")

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo", "one_thread"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]

SAMPLES, LENGTH, LAYERS = 2, 16, 2


def workload() -> Workload:
    shape = {**QWEN3, "num_hidden_layers": LAYERS, "tie_word_embeddings": True}
    made = text_model("tiny", "Qwen3", shape, batch_size=SAMPLES, seq_len=LENGTH)
    return with_lora(quantized(made, "nf4"), Lora(4), frozen=None)


def built(device: str) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        return workload().build()


def described(state: Any) -> dict[str, Any]:
    return {
        name: (value.shape, value.dtype)
        if isinstance(value, torch.Tensor)
        else described(value)
        if name == "state2" and value is not None
        else value
        for name, value in vars(state).items()
    }


def layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, library.nn.Linear4bit)]


def test_what_quantising_would_make_is_known_without_data() -> None:
    bare, real = layers(built("meta")), layers(built("cpu"))
    assert len(bare) == len(real) == LAYERS * 7
    for one, other in zip(bare, real, strict=True):
        assert (one.weight.shape, one.weight.dtype) == (other.weight.shape, other.weight.dtype)
        assert described(one.weight.quant_state) == described(other.weight.quant_state)


@functools.cache
def step_and_graph() -> tuple[FakeStep, Graph]:
    return recorded(workload())


@pytest.mark.exhaustive
def test_scales_are_counted_with_the_parameters() -> None:
    step, _ = step_and_graph()
    model = built("cpu")
    beside = [tensor for p in model.parameters() for tensor in tensors_beside(p)]
    expected = sum(t.numel() * t.element_size() for t in (*model.parameters(), *beside))
    assert len(beside) == LAYERS * 7 * 5  # scales, their table, their mean; the scales' own, and table
    assert step.fix_state(Tracker())["parameters"] == expected


@pytest.mark.exhaustive
def test_adapters_beside_4_bit_weights_train_alike_under_a_plan() -> None:
    made, graph = workload(), step_and_graph()[1]
    assert len(graph.fingerprints) == 1
    plan = plan_by_hand(graph, every_block(graph))
    expected, model = built("cpu"), apply(built("cpu"), plan)
    for seed in range(2):
        torch.manual_seed(seed)
        batch = made.batch(SAMPLES, LENGTH)
        for each in (expected, model):
            each.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = made.step(each, batch)
            loss.backward()
        for p, q in zip(expected.parameters(), model.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None) == (not p.requires_grad)
            assert p.grad is None or (q.grad is not None and torch.equal(p.grad, q.grad))
    assert counts_of(model).regions == 2 * len(plan.regions) > 0


@pytest.mark.exhaustive
@pytest.mark.nightly
def test_a_product_is_one_node_and_a_plan_made_before_finds_the_graph_that_it_was_made_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = step_and_graph()[1]
    assert [node.op for node in graph.nodes].count("matmul_4bit") == LAYERS * 7
    assert graph.about["opaque_functions"] == [four_bit.FUNCTION]
    with monkeypatch.context() as patch:
        patch.setattr(four_bit, "has_4_bit_layers", lambda model: False)
        before = recorded(workload())[1]
    assert [node.op for node in before.nodes].count("matmul_4bit") == 0 and before.about["opaque_functions"] == []
    made = workload()
    torch.manual_seed(0)
    batch = made.batch(SAMPLES, LENGTH)
    gradients = []
    for each in (graph, before):
        model = apply(built("cpu"), plan_by_hand(each, every_block(each)))
        with torch.autocast("cpu", torch.bfloat16):
            made.step(model, batch).backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
        assert counts_of(model).regions > 0
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param({"quantize": "nf4"}, "goes with --lora", id="alone"),
        pytest.param({"quantize": "nf4", "lora": "r=8", "dtype": "fp32"}, "without --dtype", id="with-dtype"),
        pytest.param({"quantize": "int3", "lora": "r=8"}, "cannot be quantised as 'int3'; choose nf4", id="unknown"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ModelSpec("llama-1b", **options).workload()  # type: ignore[arg-type]


def test_4_bit_weights_and_adapters_are_options_of_a_model_by_name() -> None:
    found = ModelSpec("llama-1b", lora="r=16", quantize="nf4").workload()
    with torch.device("meta"):
        model = found.build()
    assert found.name == "llama-1b nf4 lora r=16" and len(layers(model)) == 16 * 7
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
