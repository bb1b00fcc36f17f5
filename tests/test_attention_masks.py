"""Attention masks of a batch: none, ones only, padding. A plan takes the kernels that eager mode takes.

The models are transformers' own, with an untouched twin beside each: loss and gradients bitwise, kernels one by one.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from remat.capture.attention_masks import Masks, OnesSeen, all_ones, masks_of
from remat.cli.model_spec import ModelSpec, text_workload_of
from remat.errors import CaptureError, PlanMismatch, UsageError
from remat.evaluation.plan import Plan
from remat.execution.apply import apply, counts_of, planned_forward
from remat.execution.eager.planned_graphs import PlannedGraphs
from remat.models.common import padded
from remat.validation.kernel_log import KernelLog, kernel_differences
from remat.validation.validating import validate
from remat.workload.workload import Workload
from tests.cached import cached
from tests.test_modules import plan_of
from tests.toys import every_block, plan_by_hand, recorded

library = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")

VOCAB, SAMPLES, LENGTH = 64, 4, 16
SPECIAL: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
Batch = dict[str, torch.Tensor]


def config_of(family: str) -> Any:
    if family == "gpt2":
        return library.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=LENGTH, **SPECIAL)
    if family == "bert":
        return library.BertConfig(max_position_embeddings=LENGTH, architectures=["BertForMaskedLM"], **SMALL, **SPECIAL)
    return library.LlamaConfig(max_position_embeddings=LENGTH, **SMALL, **SPECIAL)


FAMILIES = ["llama", "bert", pytest.param("gpt2", marks=pytest.mark.exhaustive)]


@functools.cache
def workload_of(family: str) -> Workload:
    made = text_workload_of(family, config_of(family)).sized(SAMPLES, LENGTH)
    return dataclasses.replace(made, autocast=None)


@cached
def plan_of_family(family: str, with_padding: bool = False) -> Plan:
    workload = padded(workload_of(family)) if with_padding else workload_of(family)
    graph = recorded(workload)[1]
    return plan_by_hand(graph, every_block(graph))


def built(family: str) -> nn.Module:
    torch.manual_seed(0)
    return workload_of(family).build()


def batch_of(family: str, mask: str | None = None) -> Batch:
    torch.manual_seed(1)
    batch: Batch = (padded(workload_of(family)) if mask == "padded" else workload_of(family)).batch(SAMPLES, LENGTH)
    return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])} if mask == "ones" else batch


def trained(model: nn.Module, batch: Batch) -> tuple[float, list[torch.Tensor], list[str]]:
    """Loss, gradients and kernels of a step, recomputation left out."""
    kernels = KernelLog()
    if "forward" in model.__dict__:
        planned_forward(model).watch(observe=False, recompute_context=kernels.paused)
    torch.manual_seed(2)
    model.zero_grad()
    with kernels:
        loss = model(**batch).loss
        loss.backward()
    return loss.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None], kernels.found


def require_alike(planned: nn.Module, untouched: nn.Module, batch: Batch) -> None:
    expected, found = trained(untouched, batch), trained(planned, batch)
    assert found[0] == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))
    assert kernel_differences(expected[2], found[2]) == ()


@pytest.mark.exhaustive
@pytest.mark.often("bert", "llama")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mask_of_ones_is_no_mask_as_in_eager_mode(family: str) -> None:
    untouched, planned = built(family), apply(built(family), plan_of_family(family), verify_first_step=False)
    for mask in ("ones", None, "ones"):
        require_alike(planned, untouched, batch_of(family, mask))
        assert counts_of(planned).regions == 2
    attention = [kernel for kernel in trained(planned, batch_of(family, "ones"))[2] if "attention" in kernel]
    assert all("flash" in kernel for kernel in attention)
    assert attention or family != "llama"  # on a CPU dropout is left to others


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_is_another_step_whatever_came_before(family: str) -> None:
    """The same shapes and dtypes as the batch before: no guard of Dynamo's would see that the data differ."""
    planned = apply(built(family), plan_of_family(family), verify_first_step=False)
    trained(planned, batch_of(family, "ones"))
    with pytest.raises(PlanMismatch, match=r"this batch has padding, and the plan is for batches without.* --padded"):
        trained(planned, batch_of(family, "padded"))
    require_alike(planned, built(family), batch_of(family, "ones"))  # fit for the next batch


@pytest.mark.exhaustive
@pytest.mark.often("bert", "llama")
@pytest.mark.parametrize("family", FAMILIES)
def test_batches_with_and_without_padding_alternate_under_a_plan_for_padding(family: str) -> None:
    """With padding the step is bitwise that of eager mode; without, the explicit mask stays, and a warning says so."""
    untouched, planned = (
        built(family),
        apply(built(family), plan_of_family(family, with_padding=True), verify_first_step=False),
    )
    for mask in ("padded", "ones", "padded"):
        batch = batch_of(family, mask)
        if mask == "padded":
            require_alike(planned, untouched, batch)
        else:
            expected = trained(untouched, batch)
            with pytest.warns(UserWarning, match="this batch has no padding, and the plan is for batches with padding"):
                found = trained(planned, batch)
            assert found[0] == pytest.approx(expected[0], rel=1e-6)
            assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found[1], expected[1], strict=True))
        assert counts_of(planned).regions == 2


@pytest.mark.exhaustive
def test_a_plan_of_modules_is_told_of_padding() -> None:
    graph = recorded(workload_of("llama"))[1]
    model = apply(built("llama"), plan_of(graph), on_larger="refuse", verify_first_step=False)
    require_alike(model, built("llama"), batch_of("llama", "ones"))
    model.zero_grad()
    with pytest.raises(PlanMismatch, match="this batch has padding, and the plan is for batches without"):
        model(**batch_of("llama", "padded"))


# Masks that the model makes


class OwnMask(nn.Module):
    """Takes a mask, and makes one of its own out of the ids."""

    def __init__(self) -> None:
        super().__init__()
        self.model = library.LlamaForCausalLM(config_of("llama"))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        own = (input_ids != 2).long()
        loss: torch.Tensor = self.model(input_ids=input_ids, labels=input_ids, attention_mask=own).loss
        return loss


@pytest.mark.filterwarnings("ignore:this is forward number")
@pytest.mark.exhaustive
@pytest.mark.parametrize("given", [False, True], ids=["beside-none", "beside-ones"])
@pytest.mark.filterwarnings("ignore:this batch has no padding")
def test_a_mask_of_the_models_own_is_never_taken_for_ones(given: bool) -> None:
    def batch(samples: int, length: int | None) -> Batch:
        ids = torch.randint(3, VOCAB, (samples, length or LENGTH))
        return {"input_ids": ids, **({"attention_mask": torch.ones_like(ids)} if given else {})}

    workload = Workload("own", OwnMask, batch, lambda m, b: m(**b), batch_size=SAMPLES, seq_len=LENGTH)
    graph = recorded(workload)[1]
    torch.manual_seed(0)
    untouched = OwnMask().train()
    torch.manual_seed(0)
    planned = apply(OwnMask().train(), plan_by_hand(graph, every_block(graph)))
    for masked in (0, 5, 0, 5):
        made = batch(SAMPLES, LENGTH)
        made["input_ids"][:, :masked] = 2
        losses = [model(**made) for model in (untouched, planned)]
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    assert counts_of(planned).regions == 8


class OwnOnes(nn.Module):
    """Makes a mask of ones where none is given, as BLIP-2 and BART do, and may write into a view or a copy of it."""

    def __init__(self, write: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.model, self.write = library.LlamaForCausalLM(config_of("llama")), write

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        own = self.write(torch.ones_like(input_ids))
        return self.model(input_ids=input_ids, labels=labels, attention_mask=own, use_cache=False)


def written(mask: torch.Tensor) -> torch.Tensor:
    mask[:, :3].zero_()
    return mask


@pytest.mark.fast("written")
@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda mask: mask, id="left-so"),
        pytest.param(written, id="written"),
        pytest.param(lambda mask: written(mask.bool()), id="copy-written"),
        pytest.param(lambda mask: (written(mask.data), mask)[1], id="data-written"),
    ],
)
def test_a_mask_of_ones_that_the_model_makes_is_no_mask_until_it_is_written(
    write: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return OwnOnes(write).train()

    made = {name: value for name, value in batch_of("llama").items() if name != "attention_mask"}
    workload = Workload(
        "own", build, lambda *_: batch_of("llama"), lambda m, b: m(**b).loss, batch_size=SAMPLES, seq_len=LENGTH
    )
    graph = recorded(workload)[1]
    plan = plan_by_hand(graph, every_block(graph))
    require_alike(apply(build(), plan, verify_first_step=False), build(), made)


@pytest.mark.exhaustive
def test_a_mask_that_the_model_uses_elsewhere_is_named() -> None:
    class Weighted(OwnMask):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
            hidden = self.model.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            if attention_mask is not None:
                hidden = self.model.model.norm(hidden * attention_mask[..., None])
            return hidden.sum()

    workload = Workload(
        "weighted",
        Weighted,
        lambda samples, length: {"input_ids": torch.randint(VOCAB, (samples, length or LENGTH))},
        lambda m, b: m(**b),
        batch_size=SAMPLES,
        seq_len=LENGTH,
    )
    graph = recorded(workload)[1]
    model = apply(Weighted().train(), plan_by_hand(graph, every_block(graph)))
    with pytest.raises(PlanMismatch, match="has an attention mask, and the plan is for batches without; this model"):
        model(**{name: batch_of("llama", "ones")[name] for name in ("input_ids", "attention_mask")})


# Position ids


@pytest.mark.exhaustive
def test_packed_rows_are_another_step_and_positions_that_count_up_are_not() -> None:
    positions = torch.arange(LENGTH).expand(SAMPLES, -1)
    assert not masks_of([("position_ids", positions)], all_ones).packed
    packed = torch.cat([positions[:, : LENGTH // 2], positions[:, : LENGTH // 2]], dim=1)
    assert masks_of([("position_ids", packed)], all_ones).packed
    model = apply(built("llama"), plan_of_family("llama"))
    with pytest.raises(PlanMismatch, match="several sequences are packed in a row"):
        model(**batch_of("llama"), position_ids=packed)


@pytest.mark.exhaustive
def test_rows_of_one_sequence_under_a_plan_for_packed_rows_are_right_and_said_not_to_be_bitwise() -> None:
    counting = torch.arange(LENGTH).expand(SAMPLES, -1)

    def batch(samples: int, length: int | None) -> dict[str, torch.Tensor]:
        half = torch.arange(LENGTH // 2).expand(samples, -1)
        return {**batch_of("llama"), "position_ids": torch.cat([half, half], dim=1)}

    workload = Workload("packed", lambda: built("llama"), batch, lambda model, each: model(**each).loss, SAMPLES)
    graph = recorded(workload)[1]
    model, plain = apply(built("llama"), plan_by_hand(graph, every_block(graph))), built("llama")
    given = {**batch_of("llama"), "position_ids": counting}
    with pytest.warns(UserWarning, match="each row of this batch holds one sequence, and the plan is for packed rows"):
        loss = model(**given).loss
    assert loss.item() == pytest.approx(plain(**given).loss.item(), rel=1e-4)
    loss.backward()
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        packed = batch(SAMPLES, None)
        assert torch.equal(model(**packed).loss, plain(**packed).loss)


# What planning knows of a mask


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("make", "ones"),
    [
        pytest.param(lambda ids: torch.ones_like(ids), True, id="ones_like"),
        pytest.param(lambda ids: torch.ones(ids.shape, dtype=torch.bool).long(), True, id="cast"),
        pytest.param(lambda ids: torch.full(ids.shape, 1), True, id="full"),
        pytest.param(lambda ids: ids.new_full(ids.shape, 1), True, id="new_full"),
        pytest.param(lambda ids: ids.new_ones(ids.shape[1]).unsqueeze(0).expand(ids.shape), True, id="expanded"),
        pytest.param(lambda ids: torch.zeros_like(ids), False, id="zeros"),
        pytest.param(lambda ids: torch.full(ids.shape, 2), False, id="full-of-two"),
        pytest.param(lambda ids: (ids != 2).long(), False, id="from-ids"),
        pytest.param(lambda ids: torch.ones_like(ids).index_fill_(1, torch.tensor([3]), 0), False, id="written"),
        pytest.param(lambda ids: torch.ones_like(ids).tril(), False, id="triangle"),
    ],
)
def test_planning_knows_a_mask_of_ones_by_how_it_was_made(make: Any, ones: bool) -> None:
    with OnesSeen() as seen:
        mask = make(torch.randint(3, VOCAB, (SAMPLES, LENGTH)))
    assert seen.hold(mask) is ones
    workload = workload_of("llama")
    with_mask = dataclasses.replace(
        workload,
        batch=lambda samples, length: (
            (made := workload.batch(samples, length)) | {"attention_mask": make(made["input_ids"])}
        ),
    )
    about = recorded(with_mask)[1].about
    assert about["masks"] == dataclasses.asdict(Masks(ones=ones, padded=not ones))


def test_a_mask_written_through_a_view_is_not_of_ones() -> None:
    with OnesSeen() as seen:
        mask = torch.ones(2, 4)
        mask[-1, 2:] = 0
    assert not seen.hold(mask)


# --padded


def test_padding_is_asked_for_by_an_option() -> None:
    plain, with_padding = (ModelSpec("gpt2", batch_size=2, seq_len=8, padded=p).workload() for p in (None, True))
    assert "attention_mask" not in plain.batch(2, 8)
    made = with_padding.batch(2, 8)
    assert made["attention_mask"].tolist() == [[1] * 8, [1] * 4 + [0] * 4]
    assert made["labels"][-1, 4:].eq(-100).all() and not made["labels"][0].eq(-100).any()
    with pytest.raises(UsageError, match="model resnet50 takes no text"):
        ModelSpec("resnet50", padded=True).workload().batch(2, None)


@pytest.mark.exhaustive
def test_an_extra_mask_does_not_make_a_batch_larger() -> None:
    model = apply(built("llama"), plan_of_family("llama"), on_larger="refuse")
    trained(model, batch_of("llama", "ones"))
    with pytest.raises(PlanMismatch, match="this batch has 160 elements, the plan was made for 128"):
        trained(model, {name: torch.cat([t, t[:1]]) for name, t in batch_of("llama", "ones").items()})


# transformers itself


def test_transformers_is_as_it_was_while_a_planned_forward_is_traced_and_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads, and other compilers, find its own functions."""
    masking = library.masking_utils
    before, seen = dict(vars(masking)), []

    def looked(original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        seen.append({name: value for name, value in vars(masking).items() if before.get(name) is not value})
        return original(*given, **named)

    model = apply(built("llama"), plan_of_family("llama"))
    planned = planned_forward(model)
    assert isinstance(planned, PlannedGraphs)
    for judge, method in ((planned._judge, "mismatch"), (planned.loop, "returned")):  # before a graph, after a forward
        monkeypatch.setattr(judge, method, functools.partial(looked, getattr(judge, method)))
    trained(model, batch_of("llama", "ones"))
    assert seen == [{}, {}]
    assert counts_of(model).regions == 2


@pytest.mark.exhaustive
def test_a_transformers_whose_mask_functions_are_called_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = {"_ignore_mask_of_old": lambda original: original}
    monkeypatch.setattr("remat.capture.attention_masks._answers_for", lambda masks: gone)
    with pytest.raises(CaptureError, match=r"masking_utils of the transformers at hand has no _ignore_mask_of_old,"):
        trained(apply(built("llama"), plan_of_family("llama")), batch_of("llama"))


# The cache, and what a first forward says


@pytest.mark.exhaustive
@pytest.mark.often("gpt2-nodes", "llama-modules")
@pytest.mark.parametrize("kind", ["nodes", "modules"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_planned_training_forward_builds_no_cache(family: str, kind: str) -> None:
    """Without a plan the library copies keys and values into it (`cat`): the gradients are the same bit for bit."""
    graph = recorded(workload_of(family))[1]
    plan = plan_by_hand(graph, every_block(graph)) if kind == "nodes" else plan_of(graph)
    torch.manual_seed(0)
    untouched = library.AutoModelForCausalLM.from_config(config_of(family)).train()
    torch.manual_seed(0)
    planned = apply(library.AutoModelForCausalLM.from_config(config_of(family)).train(), plan)
    assert planned.config.use_cache
    expected, found = (trained(model, batch_of(family)) for model in (untouched, planned))
    assert found[0] == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))
    assert planned(**batch_of(family)).past_key_values is None
    assert planned.config.use_cache and planned.eval()(**batch_of(family)).past_key_values is not None


@pytest.mark.exhaustive
@pytest.mark.nightly
def test_a_model_that_is_planned_with_its_cache_on_is_planned_without() -> None:
    """A workload of one's own, whose configuration has it on by default; the Trainer turns it off."""
    workload = dataclasses.replace(
        workload_of("llama"), build=lambda: library.LlamaForCausalLM(config_of("llama")).train()
    )
    graph = recorded(workload)[1]
    assert not any(node.op == "tensor" for node in graph.nodes)  # the empty one that a cache begins with
    model = library.LlamaForCausalLM(config_of("llama"))
    model.config.use_cache = False
    plan = plan_by_hand(graph, every_block(graph))
    trained(apply(model.train(), plan), batch_of("llama"))
    assert counts_of(model).regions == 2
    report = validate(workload, plan, repeats=1)
    assert report.gradients_equal and report.kernel_differences == ()
    assert sum("use_cache=False" in note for note in report.notes) == 1


@pytest.mark.exhaustive
def test_a_first_forward_that_logs_is_one_graph() -> None:
    """GPT-2's class name does not tell its loss: the library says so, once, in the middle of the first forward."""
    model = library.GPT2LMHeadModel(config_of("gpt2")).train()
    assert model.loss_type is None
    apply(model, plan_of_family("gpt2"))(**batch_of("gpt2")).loss.backward()
    assert counts_of(model).regions == 2
