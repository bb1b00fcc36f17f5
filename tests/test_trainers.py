"""The step of a built Trainer, planned as it is: its loss, its largest batch, its optimizer; and TRL's, with a head."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import remat
from remat.capture import trl_head
from remat.capture.circumstances import hooked
from remat.costing.device_allocator import measure_peak
from remat.errors import DoesNotFit, UsageError
from remat.evaluation.alternative import in_two_lines
from remat.evaluation.plan import Plan
from remat.execution.apply import counts_of, has_plan, planned_forward
from remat.execution.model_as_planned import checkpoints_itself
from remat.host.weights import weights_on_host
from remat.planning import planner
from remat.planning.request import FormChoice
from remat.recording.record import record
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import trainable
from tests.command_line import Remat
from tests.devices import DEVICE
from tests.interpreted import interpreted
from tests.toys import CPU, every_block, plan_by_hand, recorded

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from remat.evaluation.form import Form  # noqa: E402
from remat.fusion import fused_group  # noqa: E402
from remat.integrations import generation_phases, planned_trainer, trainer_rows, trainer_step  # noqa: E402
from remat.integrations.pytest_plugin import OWN, require_fits  # noqa: E402
from remat.integrations.trainer_model import copy_of_model  # noqa: E402
from remat.integrations.trainer_workload import loop_of, workload_of  # noqa: E402
from remat.integrations.transformers import RematCallback  # noqa: E402
from remat.integrations.widest_rows import longest_of_all, widest_first  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo", "one_thread"),
    pytest.mark.filterwarnings(  # of the frameworks themselves
        "ignore:.*isinstance.treespec, LeafSpec.*",
        "ignore:.*gradient_checkpointing.*:FutureWarning",
        "ignore:.*torch.jit.*:DeprecationWarning",
        "ignore:.*Function.* should not be instantiated",
    ),
]

VOCAB, LENGTH = 64, 32


def llama(layers: int = 2) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.LlamaForCausalLM(config)


def rows(count: int = 32, length: Callable[[int], int] = lambda i: LENGTH) -> list[dict[str, Any]]:
    torch.manual_seed(1)
    made = [torch.randint(3, VOCAB, (length(i),)).tolist() for i in range(count)]
    return [{"input_ids": ids, "labels": ids, "attention_mask": [1] * len(ids)} for ids in made]


SETTINGS: dict[str, Any] = {
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": DEVICE.type == "cpu",
    "dataloader_pin_memory": False,
}


def trainer(
    folder: Path,
    *callbacks: Any,
    model: nn.Module | None = None,
    data: Any = None,
    collate: Any = None,
    evaluated: Any = None,
    kind: Any = transformers.Trainer,
    **options: Any,
) -> Any:
    arguments = transformers.TrainingArguments(str(folder), **{**SETTINGS, **options})
    datasets = {"train_dataset": data or rows(), "eval_dataset": evaluated}
    return kind(model or llama(), arguments, collate, **datasets, callbacks=list(callbacks))


def losses_of(made: Any) -> list[float]:
    torch.manual_seed(7)
    made.train()
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("costs"))


@pytest.fixture(autouse=True)
def kept_costs(monkeypatch: pytest.MonkeyPatch, costs: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", costs)


# The workload


def test_the_workload_is_the_trainers_step(tmp_path: Path) -> None:
    made = trainer(tmp_path, bf16=True, gradient_accumulation_steps=2, optim="sgd")
    workload = workload_of(made)
    assert (workload.batch_size, workload.seq_len, workload.autocast) == (4, LENGTH, torch.bfloat16)
    assert loop_of(made) == TrainingLoop(accumulation=2, clip_grad_norm=True)
    assert isinstance(workload.optimizer(trainable(made.model)), torch.optim.SGD)  # type: ignore[misc]

    batch = workload.batch(4, LENGTH)
    prepared = made.accelerator.prepare_model(made.model).train()
    expected = made.compute_loss(prepared, dict(batch["inputs"]), num_items_in_batch=batch["items"])
    loss = workload.step(workload.build(), batch)
    assert torch.equal(loss, expected) and loss.dtype is torch.float32
    assert batch["items"] == 4 * (LENGTH - 1) and len(batch["waiting"]) == 2


@pytest.mark.exhaustive
def test_a_trainer_is_left_as_it_is(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    parameters = {name: (id(p), p.clone()) for name, p in made.model.named_parameters()}
    graph = recorded(workload_of(made))[1]
    assert graph.about["masks"] == {"ones": True, "padded": False, "packed": False}
    assert len(graph.fingerprints) == 1
    found = dict(made.model.named_parameters())
    assert all(id(found[name]) == key and torch.equal(found[name], was) for name, (key, was) in parameters.items())
    assert "forward" not in made.model.__dict__


@pytest.mark.exhaustive
def test_the_batch_is_of_the_longest_rows(tmp_path: Path) -> None:
    data = rows(length=lambda i: 20 if i in (3, 17) else 8 if i % 2 else 12)
    workload = workload_of(trainer(tmp_path, data=data, collate=padded, per_device_train_batch_size=3))
    assert workload.seq_len == 20
    assert [int(n) for n in workload.batch(3, 20)["inputs"]["attention_mask"].sum(1)] == [20, 20, 12]
    assert workload.batch(2, 30)["inputs"]["input_ids"].shape == (2, 30)
    assert recorded(workload)[1].about["masks"]["padded"]


def padded(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(sample["input_ids"]) for sample in samples)
    return {
        name: torch.tensor([sample[name] + [0] * (longest - len(sample[name])) for sample in samples])
        for name in ("input_ids", "labels", "attention_mask")
    }


@pytest.mark.exhaustive
def test_a_batch_has_the_longest_row_of_a_large_data_set(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(rows(5000, length=lambda i: 20 if i == 4321 else 8))
    assert workload_of(trainer(tmp_path, data=data, collate=padded)).seq_len == 20


@pytest.mark.exhaustive
def test_a_trainer_is_judged_under_the_plan_of_its_callback(tmp_path: Path) -> None:
    whole = remat.check(workload_of(trainer(tmp_path)), budget="80GiB", target="cpu", loop=loop_of(trainer(tmp_path)))
    budget = whole.needed_bytes * 3 // 4
    verdict = require_fits(trainer(tmp_path, RematCallback(budget=budget)), budget, target="cpu")
    assert verdict.needed_bytes <= budget
    with pytest.raises(pytest.fail.Exception, match="does not fit") as failed:
        require_fits(trainer(tmp_path, gradient_checkpointing=True), budget, target="cpu")
    assert str(failed.value).endswith(OWN)
    with pytest.raises(pytest.fail.Exception, match="RematCallback has no plan"):
        require_fits(trainer(tmp_path, RematCallback(budget=1 << 16)), budget, target="cpu")


def padded_apart(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch each of whose columns is as wide as its longest row."""
    return {f"{name}": torch.zeros(len(samples), max(len(row[name]) for row in samples)) for name in samples[0]}


def paired(pairs: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch of prompts, with one answer and with the other."""
    widths = [len(pair["prompt"]) + max(len(pair["chosen"]), len(pair["rejected"])) for pair in pairs]
    return {"input_ids": torch.zeros(2 * len(pairs), max(widths))}


def columns(**lengths: Sequence[int]) -> list[dict[str, Any]]:
    return [dict(zip(lengths, ([0] * n for n in row), strict=True)) for row in zip(*lengths.values(), strict=True)]


def test_rows_of_pairs_are_as_wide_as_the_longer_answer_with_its_prompt() -> None:
    pairs = columns(prompt=(9, 1, 2), chosen=(6, 20, 2), rejected=(6, 1, 2))
    for count in (1, 2):
        assert pairs[1] in widest_first(pairs, count, paired)[:count]


def test_a_text_and_its_translation_are_each_the_longest() -> None:
    pairs = columns(input_ids=(5, 9, 8, 2), labels=(5, 2, 3, 7))
    assert widest_first(pairs, 2, padded_apart)[:2] == [pairs[1], pairs[3]]


def test_columns_that_make_no_batch_larger_change_nothing() -> None:
    """As the number of sequences that were packed into a row."""
    rows = columns(input_ids=(9, 7, 8), seq_lengths=(1, 5, 2))

    def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.zeros(1, sum(len(row["input_ids"]) for row in samples))}

    assert widest_first(rows, 2, collate) == [rows[0], rows[2], rows[1]]


def test_rows_of_one_size_are_not_collated_to_be_sorted() -> None:
    def collate(samples: Any) -> Any:
        raise AssertionError("collated")

    images = [{"pixel_values": torch.zeros(3, 8, 8), "labels": 0, "name": "cat"[: i % 4]} for i in range(5)]
    assert widest_first(images, 2, collate) == images
    texts = columns(input_ids=(3, 5, 4), attention_mask=(3, 5, 4))
    assert widest_first(texts, 2, collate) == [texts[1], texts[2], texts[0]]
    assert widest_first([(1, 2), (3, 4)], 2, collate) == [(1, 2), (3, 4)]
    assert widest_first([], 2, collate) == []


def test_the_longest_of_all_rows_of_a_table_are_found() -> None:
    datasets = pytest.importorskip("datasets")
    lengths = [7 + i % 5 for i in range(25_000)]
    lengths[12_345], lengths[20_001] = 40, 30
    data = datasets.Dataset.from_dict({"input_ids": [[0] * n for n in lengths], "label": [0] * len(lengths)})
    assert longest_of_all(data, 2) == [12_345, 20_001]
    assert longest_of_all(data.select(range(12_000, 25_000)), 2) == [345, 8_001]
    assert longest_of_all(data.select([]), 2) == longest_of_all([1, 2], 2) == []


def test_rows_that_a_collator_rejects_are_sorted_by_size() -> None:
    def collate(samples: Any) -> Any:
        raise KeyError("labels")

    pairs = columns(prompt=(9, 1, 2), chosen=(6, 20, 2), rejected=(6, 1, 2))
    assert widest_first(pairs, 2, collate) == [pairs[1], pairs[0], pairs[2]]


def test_rows_are_cut_and_repeated_with_the_lengths_packed_in_them() -> None:
    row = {"input_ids": [1, 2, 3, 4, 5], "labels": torch.arange(5), "seq_lengths": [2, 3], "text": "words"}
    longer = trainer_rows._resized(row, 9)
    assert longer["input_ids"] == [1, 2, 3, 4, 5, 1, 2, 3, 4] and longer["labels"].tolist() == [
        0,
        1,
        2,
        3,
        4,
        0,
        1,
        2,
        3,
    ]
    assert longer["seq_lengths"] == [2, 3, 2, 2] and longer["text"] == "words"
    assert trainer_rows._resized(row, 4)["seq_lengths"] == [2, 2]


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        original = self.forward

        def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return original(x) + 1

        self.forward = types.MethodType(forward, self)  # type: ignore[method-assign]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.inner(x)
        return value


def test_a_copy_calls_itself_and_not_the_model_that_it_is_of() -> None:
    model = Wrapped()
    twin = copy_of_model(model)
    with torch.no_grad():
        twin.inner.weight.zero_()  # type: ignore[operator, union-attr]
        twin.inner.bias.zero_()  # type: ignore[operator, union-attr]
    x = torch.randn(3, 2)
    assert torch.equal(twin(x), torch.ones(3, 2)) and not torch.equal(model(x), torch.ones(3, 2))
    with torch.device("meta"):
        assert {p.device.type for p in copy_of_model(model).parameters()} == {"meta"}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_copy_of_4_bit_weights_has_the_scales_of_its_own() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = pytest.importorskip("bitsandbytes")
    layer = library.nn.Linear4bit(64, 64, quant_type="nf4", compress_statistics=True)
    layer.to("cpu")
    with torch.device("meta"):
        twin: Any = copy_of_model(layer)
    assert twin.weight.quant_state.absmax.shape == layer.weight.quant_state.absmax.shape
    assert twin.quant_state is twin.weight.quant_state and twin.quant_state.state2.absmax.is_meta
    assert not layer.weight.quant_state.absmax.is_meta


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param({"train_dataset": None}, "has no train_dataset", id="no-data"),
        pytest.param({"train_dataset": []}, "train_dataset of this Trainer is empty", id="empty"),
        pytest.param({"is_fsdp_enabled": True}, "shards its states", id="sharded"),
    ],
)
def test_what_cannot_be_planned_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    made = trainer(tmp_path)
    vars(made).update(change)
    with pytest.raises(UsageError, match=said):
        workload_of(made)


def test_a_trainer_that_makes_its_batches_in_an_unknown_way_is_refused_by_name(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made.__class__ = type("Generating", (type(made),), {"_prepare_inputs": lambda self, inputs: inputs})
    with pytest.raises(UsageError, match=r"Generating makes the batches .* not as GRPOTrainer does: .* a Workload"):
        workload_of(made)


class OnPolicy(transformers.Trainer):  # type: ignore[name-defined]
    """Generates in its step, as TRL's GKDTrainer does."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        inputs["input_ids"] = model.generate(inputs["input_ids"])
        return super().training_step(model, inputs, num_items_in_batch)


def test_a_trainer_that_generates_in_its_step_is_refused_by_name(tmp_path: Path) -> None:
    made = trainer(tmp_path, kind=OnPolicy)
    with pytest.raises(UsageError, match=r"OnPolicy makes the batches .* not as GRPOTrainer does: .* a Workload"):
        workload_of(made)


def test_an_optimizer_made_of_the_model_is_refused_by_name(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made.optimizer_cls_and_kwargs = (torch.optim.SGD, {"params": []})
    with pytest.raises(UsageError, match="'SGD' of this Trainer is made out of the model itself"):
        workload_of(made)


def test_the_longest_rows_are_those_of_most_tokens_however_many_sequences_they_hold(tmp_path: Path) -> None:
    """Packed rows bring the lengths of what is in them, which count for nothing."""
    data = [{**row, "seq_lengths": [1] * len(row["input_ids"])} for row in rows(40, lambda i: 20 + i % 8)]
    data += [{**row, "seq_lengths": [LENGTH]} for row in rows(4)]
    assert workload_of(trainer(tmp_path, data=data)).seq_len == LENGTH


def test_a_batch_has_padding_where_batches_of_rows_of_several_lengths_have(tmp_path: Path) -> None:
    """The longest rows are often cut to one length, as most batches are not."""

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)
        return {
            name: torch.tensor([[*row[name], *[0] * (longest - len(row[name]))] for row in rows])
            for name in ("input_ids", "labels", "attention_mask")
        }

    def mask_of(data: list[dict[str, Any]], size: int = 4) -> torch.Tensor:
        made = trainer(tmp_path, data=data, collate=collate, per_device_train_batch_size=size)
        workload = workload_of(made)
        return workload.batch(workload.batch_size, workload.seq_len)["inputs"]["attention_mask"]

    several = rows(40, lambda i: LENGTH if i < 9 else 20)
    assert mask_of(rows(40)).all()
    assert mask_of(several, size=1).all()
    assert (mask_of(several) == 0).sum() == 1 and mask_of(several).shape == (4, LENGTH)


def collate_packed(rows: list[list[dict[str, Any]]]) -> dict[str, torch.Tensor]:
    """A row of each list of rows."""
    return {
        name: torch.tensor([[value for each in row for value in each[name]] for row in rows])
        for name in ("input_ids", "labels")
    }


def test_a_batch_is_what_a_sampler_packs_that_packs_as_it_samples(tmp_path: Path) -> None:
    """As axolotl's: a batch of it is a list of rows, each a list of indices."""

    class Packing(torch.utils.data.BatchSampler):
        def __init__(self) -> None:
            super().__init__(torch.utils.data.SequentialSampler(range(6)), 3, True)

        def __iter__(self) -> Any:
            torch.rand(1)  # shuffles
            return iter([[[0, 1], [2, 3]], [[4, 5, 0], [1, 2]]])

    made = trainer(tmp_path, data=rows(6, lambda i: 8 + i), collate=collate_packed)
    made.get_train_dataloader = lambda: torch.utils.data.DataLoader(
        made.train_dataset, batch_sampler=Packing(), collate_fn=collate_packed
    )
    before = torch.random.get_rng_state()
    workload = workload_of(made)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert (workload.batch_size, workload.seq_len) == (2, 12 + 13 + 8)
    assert workload.batch(1, 33)["inputs"]["input_ids"].shape == (1, 33)
    assert workload.batch(3, 20)["inputs"]["input_ids"].shape == (3, 20)
    assert workload.batch(1, 50)["inputs"]["input_ids"].shape == (1, 50)


@pytest.mark.exhaustive
def test_what_a_loss_notes_in_the_state_of_a_trainer_while_it_is_planned_is_not_there_afterwards(
    tmp_path: Path,
) -> None:
    """axolotl counts tokens there: shapes alone would meet numbers in the first step."""

    class Counting(transformers.Trainer):  # type: ignore[name-defined]
        def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self.state.seen = getattr(self.state, "seen", 0) + (inputs["labels"] != -100).sum()
            return super().compute_loss(model, inputs, *args, **kwargs)

    made = trainer(tmp_path)
    made.__class__ = Counting
    recorded(workload_of(made))
    assert not hasattr(made.state, "seen")


# What a loss has beside the model


def frozen(layers: int = 2) -> Any:
    return llama(layers).eval().requires_grad_(False)


TEACHER, CLASS_WEIGHTS = frozen(), torch.rand(VOCAB)


class Distils(transformers.Trainer):  # type: ignore[name-defined]
    """Compares its answers with those of the teachers that `taught_by` gives."""

    def taught_by(self) -> list[Any]:
        return []

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss
        for teacher in self.taught_by():
            with torch.no_grad():
                logits = teacher(**{name: inputs[name] for name in ("input_ids", "attention_mask")}).logits
            loss = loss + self.distance(outputs.logits, logits)
        return (loss, outputs) if return_outputs else loss

    def distance(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.kl_div(logits.log_softmax(-1), target.softmax(-1), reduction="batchmean")


class OfAttribute(Distils):
    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.teacher = frozen()

    def taught_by(self) -> list[Any]:
        return [self.teacher]


class OfReference(Distils):
    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.ref_model = frozen()

    def taught_by(self) -> list[Any]:
        return [self.ref_model]


class OfList(Distils):
    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.ensemble = [frozen(1), frozen(1)]

    def taught_by(self) -> list[Any]:
        return self.ensemble


class Ensemble:
    """An object that holds teachers."""

    def __init__(self) -> None:
        self.first, self.others = frozen(1), {"second": frozen(1)}

    def __call__(self) -> list[Any]:
        return [self.first, *self.others.values()]


class OfObject(Distils):
    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.taught_by = Ensemble()  # type: ignore[method-assign]


class OfGlobal(Distils):
    def taught_by(self) -> list[Any]:
        return [TEACHER]


class OfSharedWeights(OfAttribute):
    """Its teacher has the embeddings of the model, which count once."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.teacher.model.embed_tokens = self.model.model.embed_tokens.requires_grad_(False)


class OfWeightedClasses(Distils):
    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.criterion, self.weights = nn.CrossEntropyLoss(weight=torch.rand(VOCAB)), torch.rand(VOCAB)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        logits, labels = model(**inputs).logits.flatten(0, 1), inputs["labels"].flatten()
        by_weights = nn.functional.cross_entropy(logits, labels, weight=self.weights + CLASS_WEIGHTS)
        return self.criterion(logits, labels) + by_weights


def beside_bytes(made: Any) -> int:
    """Count what a Trainer of the above has beside its model, apart from parts of the model."""
    held = [getattr(made, name, None) for name in ("teacher", "ref_model", "criterion", "weights")]
    held += made.taught_by() if isinstance(made, OfObject) else []
    held += [*getattr(made, "ensemble", []), TEACHER if isinstance(made, OfGlobal) else None]
    held += [CLASS_WEIGHTS] if isinstance(made, OfWeightedClasses) else []
    modules = [each for each in held if isinstance(each, nn.Module)]
    tensors = [tensor for each in modules for tensor in (*each.parameters(), *each.buffers())]
    tensors += [each for each in held if isinstance(each, torch.Tensor)]
    models = {id(parameter) for parameter in made.model.parameters()}
    return sum(each.nbytes for each in tensors if id(each) not in models)


@pytest.mark.parametrize(
    "kind",
    [OfAttribute, OfReference, OfList, OfObject, OfGlobal, OfSharedWeights, OfWeightedClasses],
    ids=lambda kind: kind.__name__,
)
def test_what_a_loss_has_beside_the_model_counts_and_trains_alike(kind: Any, tmp_path: Path) -> None:
    settings = {"bf16": True, "gradient_accumulation_steps": 2}

    def make(*callbacks: Any) -> Any:
        return trainer(tmp_path, *callbacks, kind=kind, model=llama(), data=rows(length=lambda i: 64), **settings)

    plan = planned_trainer.plan_of(plain := make(), "80%step", tmp_path, time_limit=3)
    expected, losses = losses_of(plain), []
    planned = make(RematCallback(plan))
    fixed = beside_bytes(planned) + sum(each.nbytes for each in (*planned.model.parameters(), *planned.model.buffers()))
    peak = fixed + measure_peak(lambda: losses.extend(losses_of(planned)), CPU)
    assert losses == expected and plan.regions
    assert peak == pytest.approx(plan.predicted["peak_bytes"], rel=0.002)
    assert all(map(torch.equal, plain.model.state_dict().values(), planned.model.state_dict().values()))


def test_a_teacher_is_in_the_name_of_its_plan(tmp_path: Path) -> None:
    class OfLayers(OfAttribute):
        layers = 2

        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **options)
            self.teacher = frozen(self.layers)

    plans = tmp_path / "plans"
    for layers in (1, 2, 2):
        OfLayers.layers = layers
        planned_trainer.plan_of(trainer(tmp_path, kind=OfLayers), "90%step", plans, time_limit=1)
    assert len([*plans.iterdir()]) == 2


def test_planning_leaves_a_teacher_as_it_is(tmp_path: Path) -> None:
    made = trainer(tmp_path, kind=OfAttribute)
    before, attributes = dict(made.teacher.named_parameters()), set(vars(made.teacher))
    remat.plan(workload_of(made), budget="90%step", target="cpu", loop=loop_of(made), time_limit=1)
    assert set(vars(made.teacher)) == attributes
    assert all(before[name] is parameter for name, parameter in made.teacher.named_parameters())


def test_a_module_that_trains_beside_the_model_is_refused_by_name(tmp_path: Path) -> None:
    made = trainer(tmp_path, kind=OfAttribute)
    made.teacher.requires_grad_(True)
    with pytest.raises(UsageError, match=r"(?s)`requires_grad_\(False\)` \(weights may train in `self.teacher`\)"):
        remat.plan(workload_of(made), budget="90%step")


# The callback


@pytest.mark.exhaustive
def test_a_budget_is_planned_for_once_and_trains_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"bf16": True, "gradient_accumulation_steps": 2}
    expected = losses_of(trainer(tmp_path, **options))
    first = RematCallback(budget="800KiB", cache=tmp_path, exact=True)
    made = trainer(tmp_path, first, **options)
    assert losses_of(made) == expected
    assert isinstance(first.plan, Plan) and first.plan.regions
    assert counts_of(made.model).regions == 2 * 2 * len(first.plan.regions)
    (path,) = tmp_path.glob("trainer-of-llamaforcausallm-*.plan.json")
    assert str(path) in capsys.readouterr().err

    monkeypatch.setattr(planner, "plan", None)
    again, losses = RematCallback(budget="800KiB", cache=tmp_path, exact=True), []
    peak = measure_peak(lambda: losses.extend(losses_of(trainer(tmp_path, again, **options))), CPU)
    assert losses == expected and len(losses) == 2
    assert peak <= first.plan.budget_bytes
    assert peak == pytest.approx(first.plan.predicted["peak_bytes"], rel=0.005)


@pytest.mark.exhaustive
@pytest.mark.often("random")
@pytest.mark.parametrize("sampling", ["random", "group_by_length"])
@pytest.mark.filterwarnings("ignore:this batch has no padding")
def test_batches_of_several_lengths_run_under_their_own_plans(sampling: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"data": rows(length=lambda i: (20, 8, 12, 5)[i % 4]), "collate": padded, "max_steps": 8}
    options["train_sampling_strategy"] = sampling
    expected = losses_of(trainer(tmp_path, **options))
    forms = FormChoice(worth=-1.0)  # of measured times, which vary
    callback = RematCallback(budget="550KiB", cache=tmp_path, exact=True, lengths=(8, 12, 99), forms=forms)
    made = trainer(tmp_path, callback, **options)
    assert losses_of(made) == expected
    main = planned_forward(made.model)
    assert [len(each.plan.regions) > 0 for each in main.shorter] == [False, True]
    assert all(each.counts.regions for each in (main.shorter[1], main))


@pytest.mark.exhaustive
@pytest.mark.nightly
def test_other_answers_are_in_the_log_where_they_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses_of(trainer(tmp_path, callback := RematCallback(budget="800KiB", cache=tmp_path, menu=True)))
    assert isinstance(callback.plan, Plan)
    first, _ = in_two_lines(callback.plan.alternatives)
    assert f"remat: {first}" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_frozen_weights_go_to_the_host_where_the_plan_counts_on_it(tmp_path: Path) -> None:
    def frozen(*callbacks: Any) -> Any:
        made = trainer(tmp_path, *callbacks, model=llama(3), bf16=True)
        made.model.model.layers.requires_grad_(False)
        return made

    expected, planned = losses_of(frozen()), frozen()
    loop = dataclasses.replace(loop_of(planned), weights_on_host=3)
    plan = remat.plan(workload_of(planned), budget="1GiB", target="cpu", loop=loop)
    made = frozen(RematCallback(plan))
    assert losses_of(made) == expected
    weights = weights_on_host(made.model)
    assert weights is not None and weights.fetched > 3


@pytest.mark.exhaustive
def test_the_models_own_checkpointing_gives_way_to_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """TRL's Trainers have it on unless told otherwise, and make inputs need gradients for it."""
    expected = losses_of(trainer(tmp_path))
    monkeypatch.setattr(planner, "plan", by_hand)
    made = trainer(tmp_path, callback := RematCallback(budget="1MiB", cache=tmp_path), gradient_checkpointing=True)
    made.model.enable_input_require_grads()
    twin = workload_of(made).build()
    assert losses_of(made) == expected
    assert callback.plan is not None and counts_of(made.model).regions == 2 * len(callback.plan.regions) > 0
    for model in (made.model, twin):
        assert not checkpoints_itself(model) and not hooked(model)
    assert capsys.readouterr().err.count("gradient_checkpointing is off") == 1
    losses_of(made)  # a second training turns it on again
    assert not checkpoints_itself(made.model)


@pytest.mark.exhaustive
def test_checkpointing_that_a_loader_has_turned_on_gives_way_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """LLaMA-Factory's does, and the Trainer's arguments say nothing of it."""
    expected = losses_of(trainer(tmp_path))
    monkeypatch.setattr(planner, "plan", by_hand)
    made = trainer(tmp_path, callback := RematCallback(budget="1MiB", cache=tmp_path))
    made.model.gradient_checkpointing_enable()
    assert not checkpoints_itself(workload_of(made).build()) and checkpoints_itself(made.model)
    assert losses_of(made) == expected
    assert callback.plan is not None and counts_of(made.model).regions == 2 * len(callback.plan.regions) > 0
    assert not checkpoints_itself(made.model)
    assert capsys.readouterr().err.count("gradient_checkpointing is off") == 1


# Long runs


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where plans of several tests are kept."""
    return tmp_path_factory.mktemp("plans")


@pytest.fixture
def planned(tmp_path: Path, plans: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Trains without a plan and with one, by options of the Trainer; the Trainers."""
    monkeypatch.setattr(planner, "plan", by_hand)

    def train(*others: Callable[[], Any], **options: Any) -> list[Any]:
        callbacks = (), (RematCallback(budget="1MiB", cache=plans),)
        made = [
            trainer(tmp_path / str(bool(ours)), *ours, *(other() for other in others), bf16=True, **options)
            for ours in callbacks
        ]
        for each in made:
            losses_of(each)
        assert counts_of(made[1].model).regions > 0
        return made

    return train


def logged(made: Any, name: str = "loss") -> list[float]:
    return [entry[name] for entry in made.state.log_history if name in entry]


@pytest.mark.exhaustive
def test_a_run_resumes_from_a_checkpoint_of_the_planned_model_or_of_the_plain_one(
    planned: Callable[..., list[Any]], tmp_path: Path, plans: Path
) -> None:
    plain, ours = planned(max_steps=4, save_strategy="steps", save_steps=2)
    assert list(ours.model.state_dict()) == list(plain.model.state_dict())
    for other in ("False", "True"):
        callback = RematCallback(budget="1MiB", cache=plans)
        resumed = trainer(tmp_path / "resumed", callback, max_steps=4, bf16=True)
        torch.manual_seed(7)
        resumed.train(resume_from_checkpoint=str(tmp_path / other / "checkpoint-2"))
        assert logged(resumed) == logged(plain) == logged(ours)
        assert counts_of(resumed.model).regions > 0


class Generating(transformers.TrainerCallback):  # type: ignore[name-defined]
    """Generates after every step, as people do to see how a run goes."""

    def __init__(self) -> None:
        self.texts: list[Any] = []

    def on_step_end(self, *args: Any, model: Any, **kwargs: Any) -> None:
        model.eval()
        self.texts.append(model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=4, do_sample=False).tolist())
        model.train()


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*eos_token_id.*", "ignore:.*generation flags.*")
def test_evaluating_and_generating_between_steps_change_nothing(planned: Callable[..., list[Any]]) -> None:
    data = rows(8)
    plain, ours = planned(Generating, max_steps=3, eval_strategy="steps", eval_steps=1, evaluated=data)
    assert logged(ours) == logged(plain) and len(logged(ours, "eval_loss")) == 3
    assert logged(ours, "eval_loss") == logged(plain, "eval_loss")
    texts = [
        next(c for c in made.callback_handler.callbacks if isinstance(c, Generating)).texts for made in (plain, ours)
    ]
    assert texts[0] == texts[1] and len(texts[1]) == 3


@pytest.mark.exhaustive
def test_a_last_smaller_batch_and_a_last_shorter_accumulation_train_alike(planned: Callable[..., list[Any]]) -> None:
    """11 rows are batches of 4, 4 and 3: one accumulation of two, and one of one."""
    plain, ours = planned(data=rows(11), max_steps=-1, num_train_epochs=2, gradient_accumulation_steps=2)
    assert logged(ours) == logged(plain) and len(logged(ours)) == 4


@pytest.mark.exhaustive
def test_growing_lengths_train_alike_in_few_traces(planned: Callable[..., list[Any]]) -> None:
    data = rows(48, lambda i: 8 + i // 4)
    counters["stats"].clear()
    plain, ours = planned(data=data, max_steps=12, train_sampling_strategy="sequential")
    assert logged(ours) == logged(plain)
    assert counters["stats"]["unique_graphs"] <= 3  # the planned one, the first, and one for all other lengths


class Counting(transformers.TrainerCallback):  # type: ignore[name-defined]
    """How many groups have been lowered when each step ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lowered: list[int] = []
        self._count = 0
        for name in ("lower", "lower_open"):
            monkeypatch.setattr(fused_group, name, functools.partial(self._note, getattr(fused_group, name)))

    def _note(self, actual: Callable[..., Any], *args: Any) -> Any:
        self._count += 1
        return actual(*args)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.lowered.append(self._count)


@pytest.mark.exhaustive
@pytest.mark.nightly
def test_a_fused_plan_trains_on_through_other_lengths_evaluation_and_resuming(
    tmp_path: Path, plans: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of 4 rows, of which the fourth is another length, later ones too, and the last has 3 rows."""
    lengths = [16] * 12 + [12] * 4 + [9] * 4 + [14] * 4 + [11] * 3
    options: dict[str, Any] = {
        "max_steps": 7,
        "train_sampling_strategy": "sequential",
        "bf16": True,
        "evaluated": rows(8),
    }
    options |= {"data": rows(len(lengths), lengths.__getitem__), "eval_strategy": "steps", "eval_steps": 3}
    monkeypatch.setattr(planner, "plan", fused_by_hand)
    monkeypatch.setattr(fused_group, "_OPEN", {})
    with interpreted():
        saved: dict[str, Any] = {"save_strategy": "steps", "save_steps": 5}
        ours = trainer(
            tmp_path / "fused",
            callback := RematCallback(budget="2MiB", fuse=True, cache=plans),
            counting := Counting(monkeypatch),
            **options,
            **saved,
        )
        losses = losses_of(ours)
        assert callback.plan is not None and callback.plan.about["fused"]
        resumed = trainer(tmp_path / "resumed", RematCallback(budget="2MiB", fuse=True, cache=plans), **options)
        torch.manual_seed(7)
        resumed.train(resume_from_checkpoint=str(tmp_path / "fused" / "checkpoint-5"))
    plain = trainer(tmp_path / "plain", **options)
    assert losses == pytest.approx(losses_of(plain), rel=0.01) and len(losses) == 7
    assert logged(ours, "eval_loss") == pytest.approx(logged(plain, "eval_loss"), rel=0.01)
    assert logged(resumed) == losses and logged(resumed, "eval_loss") == logged(ours, "eval_loss")
    one, two, three, *others, last = counting.lowered
    assert one == two == three < others[0] and set(others) == {others[0]}, "a length that is new compiles nothing"
    assert last >= others[0], "a batch of other size may be a trace of its own"


@pytest.mark.exhaustive
def test_a_training_that_was_interrupted_leaves_a_model_to_train_on(
    planned: Callable[..., list[Any]], tmp_path: Path, plans: Path
) -> None:
    class Interrupting(transformers.TrainerCallback):  # type: ignore[name-defined]
        def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    plain, _ = planned()
    interrupted = trainer(
        tmp_path / "third",
        RematCallback(budget="1MiB", cache=plans),
        Interrupting(),
        bf16=True,
        gradient_accumulation_steps=2,
    )
    with pytest.raises(KeyboardInterrupt):
        losses_of(interrupted)
    interrupted.model.zero_grad()
    again = transformers.Trainer(interrupted.model, plain.args, train_dataset=rows())
    assert losses_of(again) == logged(plain)
    assert counts_of(again.model).regions > 0


# What is kept


def test_what_identifies_a_step_is_in_the_name_of_its_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def key(budget: str = "1MiB", ranks: int = 1, **options: Any) -> str:
        made = trainer(tmp_path, **options)
        monkeypatch.setattr(transformers.TrainingArguments, "world_size", ranks)
        return planned_trainer._key(made, workload_of(made), {"budget": budget, "target": "cpu"})

    same = key()
    assert same == key(learning_rate=1e-3, seed=3, max_steps=9, save_steps=7)
    others = [key("2MiB"), key(bf16=True), key(optim="sgd"), key(per_device_train_batch_size=2), key(max_grad_norm=0)]
    others += [key(ranks=4), key(data=rows(length=lambda i: LENGTH - i % 2), collate=padded)]
    assert len({same, *others}) == 8


@pytest.mark.exhaustive
def test_planning_draws_no_random_number_of_the_trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "plan", by_hand)
    made = trainer(tmp_path)
    before = torch.get_rng_state()
    planned_trainer.plan_of(made, "1MiB", tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def test_tables_of_tensors_methods_that_are_made_meanwhile_keep_no_trainer() -> None:
    """They would keep the hook in place of torch's, and with it a planned model for as long as the process lives."""
    for table in (torch.overrides._get_overridable_functions, torch.overrides._get_tensor_methods):
        table.cache_clear()
    with trainer_step.hooks_too(contextlib.nullcontext, trainer_step._Answers()):
        assert torch.overrides.is_tensor_method_or_property(torch.Tensor.add)
    assert torch.overrides.is_tensor_method_or_property(torch.Tensor.register_hook)


@pytest.mark.exhaustive
@pytest.mark.nightly
def test_a_model_under_a_plan_gets_the_one_that_the_next_trainer_asks_for(tmp_path: Path) -> None:
    model = llama()

    def budget_of(callback: RematCallback, **options: Any) -> int:
        losses_of(trainer(tmp_path, callback, model=model, **options))
        found: int = planned_forward(model).plan.budget_bytes
        return found

    first, second = RematCallback(budget="1MiB", exact=True), RematCallback(budget="800KiB", exact=True)
    assert budget_of(first) == 1 << 20
    assert budget_of(second) == budget_of(second, gradient_accumulation_steps=2) == 800 << 10
    assert planned_forward(model).plan == second.plan and TrainingLoop.of(second.plan.about).accumulation == 2
    assert budget_of(RematCallback(first.plan)) == 1 << 20
    losses_of(trainer(tmp_path, RematCallback(budget="1GiB", compile=True), model=model))
    assert not has_plan(model)


@pytest.mark.exhaustive
@pytest.mark.skipif(DEVICE.type != "cpu", reason="of the CPU, where accelerate puts no autocast around fp16")
def test_fp16_on_a_cpu_is_planned_as_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "plan", by_hand)
    expected = losses_of(trainer(tmp_path, fp16=True))
    callback = RematCallback(budget="1MiB", cache=tmp_path)
    assert losses_of(trainer(tmp_path, callback, fp16=True)) == expected
    assert callback.plan is not None and callback.plan.about["autocast"] is None
    assert losses_of(trainer(tmp_path, RematCallback(callback.plan), fp16=True)) == expected


@pytest.mark.exhaustive
@pytest.mark.nightly
def test_a_trainer_counts_labels_as_ever_after_one_that_was_compiled_and_nothing_keeps_an_optimizer(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=VOCAB, n_positions=LENGTH, n_embd=32, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    counts = trainer(tmp_path, model=model)._loss_shifts_labels
    made = trainer(tmp_path, RematCallback(budget="1GiB", compile=True), model=model)
    losses_of(made)
    assert trainer(tmp_path, model=model)._loss_shifts_labels == counts
    optimizer = weakref.ref(made.optimizer.optimizer)
    del made
    gc.collect()
    assert optimizer() is None


COMPILED: dict[str, Any] = {"budget": "1GiB", "compile": True}


@pytest.mark.exhaustive
def test_a_trainer_trains_compiled_within_a_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = trainer(tmp_path, RematCallback(budget="1.3MiB", compile=True), gradient_checkpointing=True)
    assert losses_of(made) == pytest.approx(losses_of(trainer(tmp_path)), rel=1e-4)
    assert "gradient_checkpointing is off" in capsys.readouterr().err
    assert made.model._compiled_call_impl is None


@pytest.mark.parametrize(
    ("asked", "arguments", "message"),
    [
        pytest.param({"compile": True}, {}, "exactly one of the two", id="no-budget"),
        pytest.param({"plan": "x.json", "compile": True}, {}, "compile=True goes with budget=", id="a-plan"),
        pytest.param({"budget": "1GiB", "compile": True, "exact": True}, {}, "does not take these", id="no-option"),
        pytest.param({"budget": "1GiB", "compile": True, "holds": "all"}, {}, "`holds=` is", id="no-value"),
        pytest.param({"budget": "1GiB"}, {"torch_compile": True}, "compile=True", id="compiled-by-the-trainer"),
        pytest.param({"budget": "1GiB", "loop": None}, {}, "takes loop from the Trainer", id="loop"),
        pytest.param(COMPILED, {"label_smoothing_factor": 0.1}, "outside=", id="loss-outside-of-the-model"),
    ],
)
def test_compiling_that_cannot_be_meant_is_refused(
    tmp_path: Path, asked: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        trainer(tmp_path, RematCallback(**asked), **arguments)


@pytest.mark.exhaustive
def test_a_callback_takes_a_plan_or_a_budget(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unexpected keyword argument 'numeric'; its options are those of"):
        trainer(tmp_path, RematCallback(budget="1GiB", numeric="sums")).train()
    with pytest.raises(UsageError, match="budget '80' is not a number in digits with a unit"):
        RematCallback(budget="80")
    with pytest.raises(UsageError, match="exactly one of the two"):
        RematCallback()
    with pytest.raises(UsageError, match="exactly one of the two"):
        RematCallback("a.plan.json", budget="1GiB")
    graph = recorded(workload_of(trainer(tmp_path)))[1]
    with pytest.raises(UsageError, match="exact, cache go with budget="):
        RematCallback(plan_by_hand(graph, ()), exact=True)


def by_hand(workload: Any, loop: TrainingLoop | None = None, **options: Any) -> Plan:
    torch.rand(3)
    graph = recorded(workload, loop=loop)[1]
    return plan_by_hand(graph, every_block(graph))


def fused_by_hand(workload: Any, **options: Any) -> Plan:
    fake = recorded(workload)[0]
    with fake.in_form(Form(fused=True)):
        graph = record(fake)
    return plan_by_hand(graph, every_block(graph))


# The command line

FILE = """\
import torch, transformers
from tests.test_trainers import trainer

def make_trainer():
    return trainer("out", gradient_accumulation_steps=2)

def nothing():
    return None
"""


@pytest.mark.exhaustive
def test_a_trainer_is_planned_for_on_the_command_line(remat: Remat) -> None:
    Path("train.py").write_text(FILE)
    chosen = ("--trainer", "train.py:make_trainer", "--target", "h100-80gb")
    ran = remat("plan", *chosen, "--budget", "1GiB", "--out", "t.plan.json", "--json")
    assert ran.exit_code == 0, ran.stderr
    assert ran.data["model"] == "Trainer of LlamaForCausalLM"
    about = Plan.load("t.plan.json").about
    assert (about["accumulation"], about["clip_grad_norm"], about["autocast"]) == (2, True, None)
    for options, said in (
        ((*chosen, "--dtype", "fp32"), "the Trainer says its own precision"),
        ((*chosen, "--model", "gpt2"), "both say what to plan for"),
        (("--trainer", "gpt2"), "no file.py:function that returns a Trainer"),
        (("--trainer", "train.py:nothing"), "must return a remat.Workload or a Trainer"),
    ):
        ran = remat("plan", *options, "--budget", "1GiB", "--json")
        assert ran.exit_code == 2 and said in ran.data["error"], ran.stdout


# TRL


Make = Callable[..., Any]


@pytest.fixture
def trl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Make:
    """Makes one of TRL's Trainers, by what its name begins with; its head has tiles that suit a small vocabulary."""
    monkeypatch.setenv("TRACKIO", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = pytest.importorskip("trl")
        pytest.importorskip("trl.trainer.dpo_trainer")
        pytest.importorskip("trl.trainer.kto_trainer")
        pytest.importorskip("trl.trainer.reward_trainer")
    datasets = pytest.importorskip("datasets")
    tokenizers = pytest.importorskip("tokenizers")
    datasets.disable_progress_bars()
    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", VOCAB // 2)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, VOCAB)}}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )

    def make(
        name: str, *callbacks: Any, data: list[dict[str, Any]], model: nn.Module | None = None, **options: Any
    ) -> Any:
        given = {"max_length": LENGTH, "gradient_checkpointing": False, **SETTINGS, **options}
        known = ("peft_config", "ref_model", "reward_funcs")
        beside = {key: given.pop(key) for key in known if key in given}
        given = {key: value for key, value in given.items() if value is not None}
        return getattr(library, f"{name}Trainer")(
            model=model or llama(),
            args=getattr(library, f"{name}Config")(str(tmp_path), **given),
            train_dataset=datasets.Dataset.from_list(data),
            processing_class=tokenizer,
            callbacks=list(callbacks),
            **beside,
        )

    return make


def lora(task: str) -> Any:
    return pytest.importorskip("peft").LoraConfig(task_type=task)


@pytest.mark.exhaustive
def test_trls_sft_trainer_with_lora_trains_alike_within_the_budget(trl: Make, tmp_path: Path) -> None:
    data = [{"input_ids": row["input_ids"][: LENGTH // 2]} for row in rows(64)]
    options = {"bf16": True, "packing": True, "gradient_accumulation_steps": 2, "peft_config": lora("CAUSAL_LM")}
    make = functools.partial(trl, "SFT", data=data, **options)
    expected = losses_of(make())
    losses_of(made := make(first := RematCallback(budget="440KiB", cache=tmp_path)))
    assert trl_head.is_on(made.model)
    assert first.plan is not None and first.plan.regions and len(first.plan.fingerprints) == 1
    assert first.plan.about["opaque_functions"] == ["trl.kernels.chunked_logprob:ChunkedLogProbFunction"]

    losses: list[float] = []
    peak = measure_peak(lambda: losses.extend(losses_of(make(RematCallback(budget="440KiB", cache=tmp_path)))), CPU)
    assert losses == expected and len(losses) == 2
    assert peak <= first.plan.budget_bytes
    assert peak == pytest.approx(first.plan.predicted["peak_bytes"], rel=0.005)


@pytest.mark.cuda
@pytest.mark.parametrize("optimizer", ["adamw_torch", "adamw_bnb_8bit"])
def test_on_cuda_trls_packed_rows_with_lora_train_alike_within_the_budget(
    optimizer: str, trl: Make, tmp_path: Path
) -> None:
    """Its head launches its kernels in Triton; bitsandbytes' own compute nothing on the card, the same for both."""
    data = [{"input_ids": row["input_ids"][: LENGTH // 2]} for row in rows()]
    options = {"bf16": True, "packing": True, "peft_config": lora("CAUSAL_LM"), "optim": optimizer}

    def make(*callbacks: Any) -> Any:
        return trl("SFT", *callbacks, data=data, model=llama(3), **options)

    expected = losses_of(make())
    losses_of(make(first := RematCallback(budget="64.6MiB", cache=tmp_path)))
    assert first.plan is not None and first.plan.regions
    trainer = make(RematCallback(budget="64.6MiB", cache=tmp_path))
    losses: list[float] = []
    peak = measure_peak(lambda: losses.extend(losses_of(trainer)), DEVICE, requested=True)
    assert losses == expected and len(losses) == 2
    assert peak <= first.plan.budget_bytes


class Kernel:
    """Stands for a kernel in Triton: it is launched over a grid, and asks its tensors for addresses."""

    def __init__(self, tile: Any):
        self.tile = tile

    def __getitem__(self, grid: Any) -> Any:
        return functools.partial(self.run, grid=grid)

    def run(self, *args: Any, grid: Any, **kwargs: Any) -> None:
        assert all(arg.data_ptr() for arg in args if isinstance(arg, torch.Tensor))
        self.tile(*args, **kwargs)


@pytest.fixture
def with_triton(trl: Make, monkeypatch: pytest.MonkeyPatch) -> Any:
    """TRL as it is where Triton runs: its head selects the rows that count, and launches kernels."""
    kernels, utils = (importlib.import_module(f"trl.{name}") for name in ("kernels.chunked_logprob", "trainer.utils"))

    def use_triton(device: Any) -> bool:
        return True

    for module in (kernels, utils):
        monkeypatch.setattr(module, "_use_triton", use_triton)
    monkeypatch.setattr(kernels, "triton", types.SimpleNamespace(cdiv=lambda a, b: -(-a // b)), raising=False)
    monkeypatch.setattr(kernels, "_forward_kernel", Kernel(kernels._forward_tile))
    monkeypatch.setattr(kernels, "_backward_kernel", Kernel(kernels._backward_tile))
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", types.SimpleNamespace(JITFunction=Kernel))
    return kernels


@pytest.mark.exhaustive
@pytest.mark.nightly
@pytest.mark.parametrize("options", [{}, {"bf16": True, "gradient_accumulation_steps": 2}], ids=["fp32", "bf16"])
def test_where_triton_runs_every_position_is_scored_and_losses_are_those_of_the_labelled_ones(
    options: dict[str, Any], trl: Make, with_triton: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of several lengths, whose prompts do not count."""
    data = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in preferences(prompt=True)]
    made = functools.partial(trl, "SFT", data=data, **options)
    rows: list[int] = []
    forward = with_triton.ChunkedLogProbFunction.forward

    def noted(ctx: Any, hidden: torch.Tensor, *args: Any) -> Any:
        rows.append(hidden.shape[0])
        return forward(ctx, hidden, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(with_triton.ChunkedLogProbFunction, "forward", staticmethod(noted))
        expected = losses_of(made())
        labelled, rows = max(rows), []
        losses = losses_of(made(first := RematCallback(budget="75%step", cache=tmp_path)))
    assert 0 < labelled < max(rows)
    assert capsys.readouterr().err.count("scores every position") == 1
    assert first.plan is not None and first.plan.regions and len(first.plan.fingerprints) == 1
    assert losses == pytest.approx(expected, rel=1e-5)
    for kernel in (with_triton._forward_kernel, with_triton._backward_kernel):
        kernel.tile = lambda *args, **kwargs: None  # what a kernel does, it does without allocating anything
    peak = measure_peak(lambda: losses_of(made(RematCallback(budget="75%step", cache=tmp_path))), CPU)
    assert peak <= first.plan.budget_bytes
    assert peak == pytest.approx(first.plan.predicted["peak_bytes"], rel=0.005)


def preferences(prompt: bool, words: int = 10) -> list[dict[str, str]]:
    torch.manual_seed(2)

    def text() -> str:
        return " ".join(f"w{i}" for i in torch.randint(3, VOCAB, (words,)).tolist())

    texts = [[text() for _ in range(3)] for _ in range(32)]
    if prompt:
        return [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in texts]
    return [{"chosen": f"{p} {c}", "rejected": f"{p} {r}"} for p, c, r in texts]


def judged(words: int = 10) -> list[dict[str, Any]]:
    return [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": i % 2 == 0}
        for i, row in enumerate(preferences(prompt=True, words=words))
    ]


@pytest.mark.exhaustive
@pytest.mark.nightly
@pytest.mark.parametrize(
    "chain", ["SFT SFT", "SFT plain SFT", "plain DPO SFT", "SFT KTO plain"], ids=lambda chain: chain.replace(" ", "-")
)
@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
def test_a_model_goes_from_one_of_trls_trainers_to_the_next_as_without_plans(
    bf16: bool, chain: str, trl: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each puts its head on the forward that it finds, under which accelerate's autocast does nothing any more."""
    monkeypatch.setattr(planner, "plan", by_hand)
    data = {"SFT": rows(), "DPO": preferences(True), "KTO": judged()}

    def trained(planned: bool) -> tuple[list[float], list[torch.Tensor]]:
        model, losses = llama(), []
        for each in chain.split():
            name = each.replace("plain", "SFT")
            callbacks = [RematCallback(budget="1MiB", cache=tmp_path)] if planned and each == name else []
            beside = {} if name == "SFT" else {"ref_model": llama()}
            made = trl(name, *callbacks, data=data[name], model=model, bf16=bf16, **beside)
            assert not has_plan(model)
            losses += losses_of(made)
            assert not callbacks or counts_of(model).regions > 0
        return losses, [p.detach() for p in model.parameters()]

    (expected, before), (losses, weights) = trained(planned=False), trained(planned=True)
    assert losses == expected
    torch.testing.assert_close(weights, before, rtol=0, atol=0)


@pytest.mark.exhaustive
def test_a_plan_taken_out_leaves_trls_model_to_another_trainer(
    trl: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(planner, "plan", by_hand)

    def losses(*callbacks: Any) -> list[float]:
        model = llama()
        first = losses_of(trl("SFT", *callbacks, data=rows(), model=model, bf16=True))
        return first + losses_of(trainer(tmp_path, model=remat.remove(model)))

    assert losses(RematCallback(budget="1MiB", cache=tmp_path)) == losses()


@pytest.mark.exhaustive
@pytest.mark.nightly
def test_a_precision_that_a_trainer_does_not_change_again_is_that_of_the_plan(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """accelerate prepares a model once: the second Trainer trains under the autocast of the first, or under none."""
    monkeypatch.setattr(planner, "plan", by_hand)

    def losses(callbacks: Callable[[], list[Any]], *precisions: bool) -> list[float]:
        model = llama()
        return [x for bf16 in precisions for x in losses_of(trainer(tmp_path, *callbacks(), model=model, bf16=bf16))]

    def planned() -> list[Any]:
        return [RematCallback(budget="1MiB", cache=tmp_path)]

    for precisions in [(True, False), (False, True)]:
        assert losses(planned, *precisions) == losses(list, *precisions)


@pytest.mark.any_device
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["DPO", "Reward", "KTO"])
def test_trainers_of_preferences_train_alike(
    name: str, trl: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DPO's reference is the model without its adapters, in a forward without gradients that a plan leaves alone."""
    monkeypatch.setattr(planner, "plan", by_hand)

    def make(*callbacks: Any) -> Any:
        model = llama()
        if name == "Reward":
            model = transformers.LlamaForSequenceClassification(
                type(model.config)(**{**model.config.to_dict(), "num_labels": 1})
            )
        adapters = None if name == "Reward" else lora("CAUSAL_LM")
        data = judged() if name == "KTO" else preferences(name == "DPO")
        return trl(name, *callbacks, data=data, model=model, bf16=True, peft_config=adapters)

    expected = losses_of(make())
    assert losses_of(made := make(callback := RematCallback(budget="1MiB", cache=tmp_path))) == expected
    assert callback.plan is not None and len(callback.plan.fingerprints) == 1
    assert counts_of(made.model).regions == 2 * len(callback.plan.regions) > 0


@pytest.mark.exhaustive
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["DPO", "KTO"])
def test_a_reference_model_of_its_own_is_counted_and_trains_alike(name: str, trl: Make, tmp_path: Path) -> None:
    """Without a mask, as in eager mode, and when what autocast kept of the model's own weights is gone."""
    data = preferences(True, words=32) if name == "DPO" else judged(words=32)
    make = functools.partial(trl, name, data=data, bf16=True, gradient_accumulation_steps=2, max_length=96)
    plan = planned_trainer.plan_of(plain := make(ref_model=llama()), "75%step", tmp_path, time_limit=3)
    expected, losses = losses_of(plain), []
    peak = measure_peak(lambda: losses.extend(losses_of(make(RematCallback(plan), ref_model=llama()))), CPU)
    assert losses == expected and plan.regions
    assert peak == pytest.approx(plan.predicted["peak_bytes"], rel=0.005)


def test_a_reference_model_in_4_bits_is_refused(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made.ref_model = llama()
    made.ref_model.lm_head.weight.quant_state = torch.empty(3)
    with pytest.raises(UsageError, match=r"reference model in 4 bits.*train adapters \(peft_config=\)"):
        workload_of(made)


# TRL's Trainers that generate what they train on


def odd(completions: list[str], **columns: Any) -> list[float]:
    """The reward: how many words have an odd number."""
    return [float(sum(int(word[1:]) % 2 for word in text.split())) for text in completions]


def no_reward(completions: list[str], **columns: Any) -> list[float]:
    raise AssertionError("planning calls no reward function")


PROMPT, COMPLETION = 11, 53


def prompts(longest: int = PROMPT) -> list[dict[str, Any]]:
    """Of 32, most of the longest."""
    torch.manual_seed(3)
    return [
        {"prompt": " ".join(f"w{n}" for n in torch.randint(3, VOCAB, (longest - (i % 4 == 3),)).tolist())}
        for i in range(32)
    ]


@pytest.fixture
def generating(trl: Make) -> Make:
    """Makes GRPO's Trainer, or RLOO's, with LoRA."""

    def make(*callbacks: Any, name: str = "GRPO", **options: Any) -> Any:
        given = {
            "data": prompts(),
            "reward_funcs": odd,
            "peft_config": lora("CAUSAL_LM"),
            "max_length": None,
            "max_completion_length": COMPLETION,
            "num_generations": 4,
            "beta": 0.0,
        }
        return trl(name, *callbacks, **{**given, **options})

    return make


def notes_of(made: Any) -> list[dict[str, float]]:
    """Return the log of a training, but for times."""
    torch.manual_seed(7)
    made.train()
    return [
        {name: value for name, value in entry.items() if not name.endswith(("time", "per_second"))}
        for entry in made.state.log_history[:-1]
    ]


TWICE = {"num_iterations": 2, "gradient_accumulation_steps": 2}


@pytest.mark.any_device
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options", [pytest.param({}, id="grpo"), pytest.param({"name": "RLOO", "steps_per_generation": 2}, id="rloo")]
)
@pytest.mark.filterwarnings("ignore:this batch has no padding")
def test_trainers_that_generate_train_alike(
    options: dict[str, Any], generating: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every generation has other lengths; generation and scoring run as without a plan."""
    monkeypatch.setattr(planner, "plan", by_hand)
    make = functools.partial(generating, max_steps=4, **options)
    plan = planned_trainer.plan_of(plain := make(), "1MiB", tmp_path)
    expected = notes_of(plain)
    assert notes_of(made := make(RematCallback(plan))) == expected
    assert counts_of(made.model).regions == 4 * len(plan.regions) > 0 and len(plan.fingerprints) == 1
    assert {"reward", "entropy"} <= set(expected[0]) and len({entry["loss"] for entry in expected}) > 1


REFERRING = {"beta": 0.1, "bf16": True, **TWICE}


@pytest.mark.exhaustive
@pytest.mark.often("reference")
@pytest.mark.parametrize(
    ("steps", "options"),
    [
        pytest.param(4, REFERRING, id="reference"),
        pytest.param(20, {}, id="20-updates"),
        pytest.param(20, REFERRING, id="reference-20-updates"),
        pytest.param(20, {**REFERRING, "name": "RLOO"}, id="rloo-20-updates"),
    ],
)
@pytest.mark.filterwarnings("ignore:this batch has no padding")
def test_trainers_that_generate_keep_the_budget(
    steps: int, options: dict[str, Any], generating: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make = functools.partial(generating, max_steps=steps, **options)
    expected: list[Any] = []
    notes: list[Any] = []
    untouched = measure_peak(lambda: expected.extend(notes_of(make())), CPU)
    plan = planned_trainer.plan_of(make(), "75%step", tmp_path, time_limit=3)
    assert "the highest peak is that of the training step" in capsys.readouterr().err
    peak = measure_peak(lambda: notes.extend(notes_of(make(RematCallback(plan)))), CPU)
    assert notes == expected and len(notes) == steps
    assert peak <= plan.budget_bytes < untouched
    assert peak == pytest.approx(plan.predicted["peak_bytes"], rel=0.005)


def test_the_batch_is_that_of_the_longest_prompt_and_completion(generating: Make) -> None:
    made = generating(reward_funcs=no_reward, beta=0.1, steps_per_generation=3, num_generations=6)
    workload = workload_of(made)
    assert (workload.batch_size, workload.seq_len) == (4, PROMPT + COMPLETION)
    batch = workload.batch(4, PROMPT + COMPLETION)
    shapes = {name: tuple(value.shape) for name, value in batch["inputs"].items()}
    assert shapes == {
        **dict.fromkeys(("prompt_ids", "prompt_mask"), (4, PROMPT)),
        **dict.fromkeys(("completion_ids", "completion_mask"), (4, COMPLETION)),
        **dict.fromkeys(("old_per_token_logps", "ref_per_token_logps"), (4, COMPLETION)),
        "advantages": (4,),
        "num_items_in_batch": (),
    }
    assert (batch["inputs"]["completion_mask"] == 0).sum() == 1
    assert len(batch["waiting"]) == 2
    assert workload.batch(2, 20)["inputs"]["completion_ids"].shape == (2, 20 - PROMPT)
    assert not made._logs["prompt"] and not made._metrics["train"] and made.state.num_input_tokens_seen == 0
    with pytest.raises(UsageError, match="no room for a completion"):
        workload.batch(4, PROMPT)


@pytest.mark.exhaustive
@pytest.mark.nightly
def test_a_generation_above_the_budget_is_refused_by_name(
    generating: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "plan", by_hand)
    made = generating(steps_per_generation=64, max_completion_length=64)
    with pytest.raises(DoesNotFit, match=r"generation peaks at .*, above the budget of .*: lower steps_per_generation"):
        planned_trainer.plan_of(made, "1MiB", tmp_path)


@pytest.mark.exhaustive
def test_generation_takes_what_is_said(generating: Make) -> None:
    made = generating(steps_per_generation=4, max_completion_length=64, generation_kwargs={"suppress_tokens": [2]})
    workload = workload_of(made)
    said = generation_phases._made(made, workload, "cpu")
    inputs = workload.batch(4, workload.seq_len)["inputs"]
    ids, mask = (inputs[name].repeat(4, 1) for name in ("prompt_ids", "prompt_mask"))

    def generate() -> None:
        with torch.no_grad():
            texts = made.model.generate(input_ids=ids, attention_mask=mask, generation_config=made.generation_config)
        assert texts.shape == (16, PROMPT + 64)

    generate()
    assert measure_peak(generate, CPU) == pytest.approx(said["generation"], rel=0.02)
    assert set(said) == {"generation", "scoring"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param({"rollout_func": len}, "rollout_func takes memory", id="rollout"),
        pytest.param({"tools": [len]}, "tools takes memory", id="tools"),
        pytest.param({"use_transformers_continuous_batching": True}, "continuous_batching takes memory", id="batching"),
        pytest.param({"use_vllm": True, "vllm_mode": "colocate"}, "vllm_mode='colocate' takes memory", id="vllm"),
    ],
)
def test_text_whose_size_is_not_known_is_refused_by_name(change: dict[str, Any], said: str, generating: Make) -> None:
    made = generating()
    for name, value in change.items():
        for holder in (made, made.args):
            setattr(holder, name, value)
    with pytest.raises(UsageError, match=said):
        workload_of(made)


def test_the_weights_of_reward_models_are_there_beside_the_step(generating: Make) -> None:
    made, judge = generating(), nn.Linear(2, 1)
    made.reward_funcs = [odd, judge]
    workload = workload_of(made)
    (weights,) = workload.batch(4, workload.seq_len)["judges"]
    assert set(weights) == {"weight", "bias"}
