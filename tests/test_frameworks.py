"""Plans in the frameworks that people train with: applied at the right moment, or refused in the framework's words."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from remat.costing.device_allocator import measure_peak
from remat.errors import PlanMismatch, UsageError
from remat.evaluation.plan import Plan
from remat.execution.apply import apply, counts_of, has_plan, planned_forward, remove
from remat.execution.reports import OnLarger
from remat.models import gpt2
from remat.validation.training import Training, release_libraries
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import Workload
from tests.devices import DEVICE
from tests.test_modules import plan_of
from tests.toys import TRANSFORMER, TRANSFORMER_BF16, Transformer, every_block, graph_of, plan_by_hand, tokens

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
REFUSED: OnLarger = "refuse" if DEVICE.type == "cpu" else "warn"  # elsewhere plans for a CPU are larger than planned
pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo", "one_thread"),
    pytest.mark.filterwarnings(  # of the frameworks themselves, about what this project cannot change
        "ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning",
        "ignore:.*isinstance.treespec, LeafSpec.*:DeprecationWarning",
        "ignore:.*does not have many workers.*",
        "ignore:The number of training batches",
        "ignore:GPU available but not used",
        "ignore:.*gradient_checkpointing.*:FutureWarning",
    ),
]


# Examples


@pytest.fixture(scope="module")
def costs_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where the examples keep measured costs: two of them plan the same step."""
    return str(tmp_path_factory.mktemp("costs"))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("plain_loop", "transformers"),
        pytest.param("accelerate_loop", "accelerate", marks=pytest.mark.exhaustive),
        pytest.param("hf_trainer", "accelerate", marks=pytest.mark.exhaustive),
        ("lightning_trainer", "lightning"),
        pytest.param("lora", "peft", marks=pytest.mark.exhaustive),
        # test_trainers.py has packed rows with LoRA and accumulation every day, and GRPO
        pytest.param("trl_sft", "trl", marks=[pytest.mark.exhaustive, pytest.mark.nightly]),
        pytest.param(
            *("trl_grpo", "trl"),
            marks=[
                *(pytest.mark.exhaustive, pytest.mark.nightly),
                pytest.mark.filterwarnings("ignore:the first step under the plan is not"),
            ],
        ),
        pytest.param("axolotl_yaml", "axolotl", marks=pytest.mark.exhaustive),
        pytest.param("llama_factory", "llamafactory", marks=pytest.mark.exhaustive),
    ],
)
def test_an_example_trains_alike_in_less_memory(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch, costs_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for needed in ("transformers", package):
        pytest.importorskip(needed)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("XDG_CACHE_HOME", costs_folder)
    without, planned = importlib.import_module(name).main(["--steps", "3"])
    assert len(planned.losses) == 3 and planned.losses == without.losses
    assert planned.peak_bytes < 0.8 * without.peak_bytes
    assert "losses the same to the last bit" in capsys.readouterr().out


# What frameworks ask a forward


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    graph, graph_bf16 = graph_of(TRANSFORMER), graph_of(TRANSFORMER_BF16)
    return {
        "nodes": plan_by_hand(graph, every_block(graph)),
        "modules": plan_of(graph),
        "bf16": plan_by_hand(graph_bf16, every_block(graph_bf16)),
        "bf16 modules": plan_of(graph_bf16),
    }


@pytest.mark.parametrize("kind", ["nodes", "modules"])
def test_a_planned_forward_has_the_signature_of_the_models(kind: str, plans: dict[str, Plan]) -> None:
    """The Trainer drops columns of a data set that a forward does not name, and asks whether it takes **kwargs."""
    model = apply(Transformer(), plans[kind])
    assert list(inspect.signature(model.forward).parameters) == ["ids", "labels"]
    assert list(inspect.signature(model.layers[0].forward).parameters) == ["x"]


# accelerate


def accelerator(**options: Any) -> Any:
    return pytest.importorskip("accelerate").Accelerator(cpu=DEVICE.type == "cpu", **options)


@pytest.fixture(autouse=True)
def forgotten_accelerators() -> Iterator[None]:
    """Tests of other files leave a precision too."""

    def forget() -> None:
        if "accelerate" in sys.modules:
            sys.modules["accelerate"].state.AcceleratorState._reset_state(True)

    forget()
    yield
    forget()


@pytest.mark.any_device
@pytest.mark.parametrize("kind", ["bf16", "bf16 modules"])
def test_mixed_precision_of_accelerate_goes_around_the_plan(kind: str, plans: dict[str, Plan]) -> None:
    from_accelerate = accelerator(mixed_precision="bf16")
    from remat.integrations.accelerate import prepare

    model = prepare(from_accelerate, Transformer(), plan=plans[kind])
    batch = [each.to(DEVICE) for each in tokens(2, None)]
    model(*batch).backward()
    assert counts_of(model).regions == 4
    assert planned_forward(model).plan is plans[kind]
    bare = from_accelerate.unwrap_model(model, keep_fp32_wrapper=False)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        bare(*batch).backward()
    assert counts_of(bare).regions == 8


def seeded(forward: Callable[..., torch.Tensor], batch: list[torch.Tensor]) -> torch.Tensor:
    torch.manual_seed(5)
    return forward(*batch)


@pytest.mark.any_device
def test_a_plan_is_taken_out_from_under_accelerates_autocast(plans: dict[str, Plan]) -> None:
    from remat.integrations.accelerate import prepare

    model = prepare(accelerator(mixed_precision="bf16"), Transformer(), plan=plans["bf16"])
    batch = [each.to(DEVICE) for each in tokens(2, None)]
    planned = seeded(model, batch)
    assert not has_plan(remove(model))
    assert planned.dtype == torch.float32 and torch.equal(seeded(model, batch), planned)
    in_fp32 = functools.partial(Transformer.forward, model)
    assert not torch.equal(seeded(in_fp32, batch), planned)


def test_a_plan_is_not_taken_out_from_under_another_wrapper(plans: dict[str, Plan]) -> None:
    model = apply(Transformer(), plans["bf16"])
    wrapped = functools.update_wrapper(functools.partial(model.forward), model.forward, assigned=())
    vars(model)["forward"] = wrapped
    with pytest.raises(UsageError, match="wrapped after a plan was applied"):
        remove(model)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="of the CPU, where accelerate puts no autocast around fp16")
def test_accelerates_fp16_on_a_cpu_goes_with_a_plan_without_autocast(plans: dict[str, Plan]) -> None:
    model, from_accelerate = Transformer(), accelerator(mixed_precision="fp16")
    from remat.integrations.accelerate import prepare

    prepare(from_accelerate, model, plan=plans["nodes"])
    model(*tokens(2, None)).backward()
    assert counts_of(model).regions > 0


def test_what_accelerate_cannot_do_with_a_plan_is_refused(plans: dict[str, Plan]) -> None:
    plain = accelerator()
    from remat.integrations.accelerate import prepare

    with pytest.raises(PlanMismatch, match=r"for autocast to bfloat16, and Accelerator\(mixed_precision='no'\) on"):
        prepare(plain, Transformer(), plan=plans["bf16"])
    prepared = plain.prepare(Transformer())
    with pytest.raises(UsageError, match=r"went through accelerator\.prepare already"):
        prepare(plain, prepared, plan=plans["nodes"])


def test_accumulation_that_a_plan_does_not_know_warns(plans: dict[str, Plan]) -> None:
    accumulating = accelerator(gradient_accumulation_steps=4)
    from remat.integrations.accelerate import prepare

    with pytest.warns(UserWarning, match="accumulates gradients over 4 micro-batches.*`accumulation=4`"):
        prepare(accumulating, Transformer(), plan=plans["nodes"])


# transformers


class Named(nn.Module):
    """A model as the Trainer expects it: named tensors in, a loss by name out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Transformer()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.inner(ids, labels)}


NAMED = Workload("named", Named, tokens, lambda m, b: m(ids=b[0], labels=b[1])["loss"], batch_size=4, seq_len=8)


@pytest.fixture(scope="module")
def named_plan() -> Plan:
    graph = graph_of(NAMED)
    return plan_by_hand(graph, every_block(graph))


def trainer(folder: Path, plan: Plan, model: nn.Module | None = None, **options: Any) -> Any:
    library = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from remat.integrations.transformers import RematCallback

    ids, labels = tokens(8, None)
    making = {name: options.pop(name) for name in ("model_init",) if name in options}
    arguments = library.TrainingArguments(
        str(folder),
        max_steps=2,
        per_device_train_batch_size=4,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=DEVICE.type == "cpu",
        dataloader_pin_memory=False,
        **options,
    )
    rows = [{"ids": a, "labels": b} for a, b in zip(ids, labels, strict=True)]
    model = None if making else model or Named()
    return library.Trainer(model, arguments, train_dataset=rows, callbacks=[RematCallback(plan)], **making)


@pytest.mark.any_device
def test_the_trainer_trains_with_the_plan(tmp_path: Path, named_plan: Plan) -> None:
    made = trainer(tmp_path, named_plan)
    made.train()
    assert counts_of(made.model).regions == 2 * 4


def test_another_precision_of_the_trainer_is_refused(tmp_path: Path, named_plan: Plan) -> None:
    with pytest.raises(PlanMismatch, match=r"for no autocast, and TrainingArguments\(bf16=True, fp16=False\)"):
        trainer(tmp_path, named_plan, bf16=True)


@pytest.mark.exhaustive
def test_a_model_made_anew_gets_its_plan_or_may_bring_it(tmp_path: Path, named_plan: Plan) -> None:
    made = trainer(tmp_path, named_plan, model_init=Named)
    made.train()
    assert counts_of(made.model).regions == 2 * 4
    graph = graph_of(Workload(**{**vars(NAMED), "name": "named-bf16", "autocast": torch.bfloat16}))
    mixed = plan_by_hand(graph, every_block(graph))
    for model_init in (Named, lambda: apply(Named(), mixed)):
        made = trainer(tmp_path, mixed, model_init=model_init, bf16=True)
        made.train()
        assert counts_of(made.model).regions == 2 * 4


@pytest.fixture(scope="module")
def by_name() -> Plan:
    """A plan for what `--model gpt2` names, at a small size."""
    graph = graph_of(small_gpt2())
    return plan_by_hand(graph, every_block(graph))


def small_gpt2() -> Workload:
    pytest.importorskip("transformers")
    made = gpt2.workload("gpt2", n_embd=64, n_layer=2, n_head=4, batch_size=8, n_positions=64, vocab_size=512)
    return made.with_dtype("amp")


@pytest.mark.any_device
@pytest.mark.exhaustive
@pytest.mark.parametrize("mask", [False, True])
def test_a_plan_by_name_is_for_the_step_of_the_trainer_as_it_stands(tmp_path: Path, by_name: Plan, mask: bool) -> None:
    """The Trainer turns the cache off, counts labels for the loss, and clips; collators add a mask of ones."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from remat.integrations.transformers import RematCallback

    assert by_name.regions
    torch.manual_seed(0)
    columns = dict.fromkeys(("input_ids", "labels"), torch.randint(511, (16, 64)))
    columns |= {"attention_mask": torch.ones(16, 64, dtype=torch.long)} if mask else {}
    rows = [{name: column[i] for name, column in columns.items()} for i in range(16)]
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=8,
        bf16=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=DEVICE.type == "cpu",
        dataloader_pin_memory=False,
    )

    def train(*callbacks: RematCallback) -> list[float]:
        torch.manual_seed(0)
        made = transformers.Trainer(small_gpt2().build(), arguments, train_dataset=rows, callbacks=list(callbacks))
        made.train()
        return [entry["loss"] for entry in made.state.log_history if "loss" in entry]

    expected, losses = train(), []
    release_libraries(DEVICE)  # their workspaces are part of the step
    peak = measure_peak(lambda: losses.extend(train(RematCallback(by_name))), DEVICE, requested=True)
    assert losses == expected and len(losses) == 2
    assert peak == pytest.approx(peak_in_a_loop(small_gpt2(), by_name), rel=0.005)


def peak_in_a_loop(workload: Workload, plan: Plan) -> int:
    """Of the planned step in a loop of our own, which the prediction is held against elsewhere."""
    training = Training(workload, DEVICE, 0, TrainingLoop())
    training.begin_again()
    apply(training.model, plan)
    training.update()
    return training.peak_of_update(1)


# Lightning


def lightning_fit(
    plan: Plan | None, path: str = "net", late: bool = False, own: tuple[type, ...] = (), **options: Any
) -> nn.Module:
    lightning = pytest.importorskip("lightning")
    from remat.integrations.lightning import RematCallback

    class Module(*own, lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net: Any = None if late else Transformer()

        def configure_model(self) -> None:
            self.net = self.net or Transformer()

        def training_step(self, batch: Any) -> torch.Tensor:
            return self.net(*batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            assert late or plan is None or path != "net" or has_plan(self.net)  # before the optimizer
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    made = lightning.Trainer(
        max_steps=2,
        accelerator=DEVICE.type,
        devices=1,
        callbacks=[] if plan is None else [RematCallback(plan, module=path, on_larger=REFUSED)],
        enable_model_summary=False,
        **quiet,
        **options,
    )
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*tokens(8, None)), 4)
    made.fit(module, loader)
    net: nn.Module = module.net
    return net


def test_gradients_of_a_step_are_gone_as_lightning_begins_the_next(plans: dict[str, Plan]) -> None:
    tight = dataclasses.replace(plans["nodes"], budget_bytes=plans["nodes"].predicted["peak_bytes"])
    torch.manual_seed(0)
    planned = lightning_fit(tight)
    torch.manual_seed(0)
    untouched = lightning_fit(None)
    assert all(map(torch.equal, planned.parameters(), untouched.parameters()))


def test_gradients_of_a_module_that_clears_them_itself_stay(plans: dict[str, Plan]) -> None:
    """Every second batch steps, and the others add to its gradients."""

    class Own:
        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            if batch_idx % 2 == 0:
                optimizer.zero_grad()

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
            closure() if batch_idx % 2 == 0 else optimizer.step(closure)

    torch.manual_seed(0)
    planned = lightning_fit(dataclasses.replace(plans["nodes"], budget_bytes=1 << 40), own=(Own,), max_epochs=2)
    torch.manual_seed(0)
    untouched = lightning_fit(None, own=(Own,), max_epochs=2)
    assert all(map(torch.equal, planned.parameters(), untouched.parameters()))


def test_gradients_that_lightning_accumulates_stay(plans: dict[str, Plan]) -> None:
    plan = dataclasses.replace(plans["nodes"], about=plans["nodes"].about | {"accumulation": 2})
    torch.manual_seed(0)
    planned = lightning_fit(plan, accumulate_grad_batches=2, max_epochs=2)
    torch.manual_seed(0)
    untouched = lightning_fit(None, accumulate_grad_batches=2, max_epochs=2)
    assert all(map(torch.equal, planned.parameters(), untouched.parameters()))


@pytest.mark.any_device
@pytest.mark.parametrize("kind", ["nodes", "modules"])
def test_lightning_trains_with_the_plan(kind: str, plans: dict[str, Plan]) -> None:
    assert counts_of(lightning_fit(plans[kind])).regions == 2 * 4


@pytest.mark.any_device
def test_a_module_that_lightning_configures_late_gets_its_plan(plans: dict[str, Plan]) -> None:
    assert counts_of(lightning_fit(plans["nodes"], late=True)).regions == 2 * 4


@pytest.mark.any_device
def test_mixed_precision_of_lightning_goes_around_the_plan(plans: dict[str, Plan]) -> None:
    assert counts_of(lightning_fit(plans["bf16"], precision="bf16-mixed")).regions == 2 * 4
    with pytest.raises(PlanMismatch, match=r"for autocast to bfloat16, and Trainer\(precision='32-true'\)"):
        lightning_fit(plans["bf16"])


def test_a_module_that_is_not_there_is_named(plans: dict[str, Plan]) -> None:
    with pytest.raises(UsageError, match="Module has no module 'model' to apply the plan to"):
        lightning_fit(plans["nodes"], path="model")


def test_what_others_put_around_a_planned_forward_stays() -> None:
    """A logger of the script, and accelerate's wrapper for outputs alone, which is around no autocast."""
    transformers = pytest.importorskip("remat.integrations.transformers")
    operations = pytest.importorskip("accelerate.utils.operations")
    plan = plan_by_hand(graph_of(TRANSFORMER), ())
    for put_around in (lambda forward: lambda *given: forward(*given), operations.convert_outputs_to_fp32):
        model = apply(TRANSFORMER.build(), plan)
        model.forward = functools.wraps(model.forward)(put_around(model.forward))
        before = model.forward
        transformers.remove_earlier_plans(model)
        assert model.forward is before and has_plan(model)
        with pytest.raises(UsageError, match="was wrapped after a plan was applied"):
            remove(model)
