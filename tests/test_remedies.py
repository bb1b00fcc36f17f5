"""A step that torch cannot run on fakes is refused with what to do; a penalty every few steps is planned as told."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

import remat
from remat.errors import CaptureError, Infeasible, UsageError
from remat.recording.fake_step import FakeStep
from remat.recording.record import record
from remat.recording.remedies import describe
from remat.workload.workload import Workload
from tests.toys import CPU, pairs_of_segments, plan_for

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")

WIDTH = 8
HERE = r" at \S*test_remedies\.py:\d+"


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, WIDTH))


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True)


def tangents(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y, change = torch.func.jvp(model, (x,), (torch.ones_like(x),))[:2]
    return (y - change).square().mean()


def each_sample(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    weights: dict[str, torch.Tensor] = dict(model.named_parameters())

    def one(row: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.func.functional_call(model, weights, (row,)).sum()
        return found

    gradients: torch.Tensor = torch.func.vmap(torch.func.grad(one))(x)
    return gradients.square().mean()


def matched(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    order = torch.from_numpy(y.detach().cpu().numpy().argsort(0))
    found: torch.Tensor = y.gather(0, order).square().mean()
    return found


def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].square().mean()


@pytest.mark.parametrize(
    ("build", "shape", "step", "remedy"),
    [
        pytest.param(mlp, (WIDTH,), tangents, r"torch\.func.*autograd\.grad\(\.\.\., create_graph=True\)", id="jvp"),
        pytest.param(
            mlp, (WIDTH,), each_sample, rf"{HERE}\. It uses.*torch\.func.*create_graph=True", id="vmap-of-grad"
        ),
        pytest.param(mlp, (WIDTH,), matched, rf"on the host \(`numpy\(\)`\){HERE},.*stand-in", id="values-on-the-host"),
        pytest.param(attention, (6, WIDTH), penalty, r"with or without a plan.*SDPBackend\.MATH", id="attention"),
    ],
)
def test_a_step_that_torch_cannot_run_is_refused_with_the_remedy(
    build: Callable[[], nn.Module], shape: tuple[int, ...], step: Any, remedy: str
) -> None:
    workload = Workload("step", build, lambda samples, _: torch.randn(samples, *shape), step, batch_size=4)
    with pytest.raises(CaptureError, match=remedy):
        record(FakeStep(workload, device=CPU))


class Forward(nn.Module):
    """A model whose forward is a function of its layers and its input."""

    def __init__(self, run: Callable[[nn.Module, Any], torch.Tensor]) -> None:
        super().__init__()
        self.layers, self.run = mlp(), run

    def forward(self, x: Any) -> torch.Tensor:
        return self.run(self.layers, x)


def chosen_rows(layers: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = layers(x[x.sum(-1) > 0])
    return found


def ragged(layers: nn.Module, x: torch.Tensor) -> torch.Tensor:
    rows: torch.Tensor = layers(torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged))
    return rows.to_padded_tensor(0.0)


def ragged_and_normalized(layers: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Compares the ragged size of a nested tensor, which no input has."""
    rows: torch.Tensor = layers(torch.nested.as_nested_tensor([x[:1], x[1:]], layout=torch.jagged))
    return torch.nn.functional.layer_norm(rows, rows.shape[-1:]).values()


def jacobian(layers: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(torch.func.jacrev(layers))(x).flatten(1) + x.sum(-1, keepdim=True)


@pytest.mark.parametrize(
    ("run", "remedy"),
    [
        pytest.param(jacobian, r"torch\.func.*create_graph=True", id="jacrev"),
        pytest.param(chosen_rows, r"nonzero\.default at .*test_remedies\.py:\d+\. The size.*torch\.where", id="rows"),
        pytest.param(ragged, "Nested tensors are not supported: pad", id="nested"),
        pytest.param(ragged_and_normalized, "Nested tensors are not supported: pad", id="nested-normalized"),
        pytest.param(tangents, r"torch\.func.*create_graph=True", id="jvp"),
    ],
)
def test_a_forward_that_no_plan_is_for_is_refused_with_the_remedy(run: Any, remedy: str) -> None:
    workload = Workload("forward", lambda: Forward(run), rows, squared, batch_size=4)
    with pytest.raises(CaptureError, match=remedy):
        record(FakeStep(workload, device=CPU))


def dual(layers: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        y = layers(forward_ad.make_dual(x, torch.ones_like(x)))
        torch._dynamo.graph_break()
        return sum(forward_ad.unpack_dual(y), torch.zeros(()))


def hessian(layers: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(torch.func.hessian(lambda row: layers(row).sum()))(x).sum(-1)


def failing(layers: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def one(row: torch.Tensor) -> torch.Tensor:
        raise ValueError(f"inside {layers(row).sum()}")

    found: torch.Tensor = torch.vmap(torch.func.grad(one))(x)
    return found


@pytest.mark.parametrize("run", [tangents, dual, jacobian, hessian, failing])
def test_a_refused_model_leaves_no_transform_of_torch_func_behind(run: Any) -> None:
    workload = Workload("forward", lambda: Forward(run), rows, squared, batch_size=4)
    refusals = []
    for _ in range(2):
        with pytest.raises(CaptureError) as refused:
            remat.plan(workload, budget="80%step", target="cpu")
        refusals.append(str(refused.value))
    assert refusals[0] == refusals[1]
    one = torch.ones(2)
    assert torch.equal(torch.func.jvp(torch.sin, (one,), (one,))[1], one.cos())
    assert torch.func.vmap(torch.func.hessian(lambda x: x.sin().sum()))(torch.ones(3, 2)).shape == (3, 2, 2)
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0
    with torch.autograd.graph.save_on_cpu():
        one.requires_grad_().sin().sum().backward()


def test_a_guard_that_cannot_be_made_is_not_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_LOGS", raising=False)
    monkeypatch.delenv("REMAT_DEBUG", raising=False)
    for name in ("torch._guards", "torch.fx.experimental.symbolic_shapes"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [caplog.handler])  # torch's may not propagate
    workload = Workload("forward", lambda: Forward(ragged_and_normalized), rows, squared, batch_size=4)
    with pytest.raises(CaptureError):
        record(FakeStep(workload, device=CPU))
    assert caplog.text == ""


def test_a_refused_transform_leaves_nothing_open_for_what_comes_next() -> None:
    with pytest.raises(CaptureError):
        record(FakeStep(Workload("forward", lambda: Forward(jacobian), rows, squared, batch_size=4), device=CPU))
    x = torch.ones(2, requires_grad=True)
    torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
    assert x.grad is not None and not torch._C._functorch.is_functorch_wrapped_tensor(torch.ones(2) + 1)
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0


def test_an_operator_of_higher_order_is_refused_with_the_remedy() -> None:
    said = describe(
        NotImplementedError("There was no rule registered for HigherOrderOperator flex_attention"), " at m.py:3"
    )
    assert said.startswith("the model calls flex_attention") and "remat.compile" in said and said.endswith("at m.py:3")
    assert "remat.compile" not in describe(NotImplementedError("no rule registered for HigherOrderOperator cond"))


def test_a_message_that_begins_with_a_module_is_told_to_its_end() -> None:
    said = describe(
        TypeError(f"{nn.Sequential(mlp(), mlp(), mlp())} argument after ** must be a mapping, not NoneType")
    )
    assert said.startswith("TypeError: Sequential( (0): ")
    assert said.endswith(") argument after ** must be a mapping, not NoneType") and len(said) < 200


def test_a_message_whose_first_line_is_whole_is_told_by_that_line() -> None:
    assert describe(ValueError("sizes (2, 3) differ\nfrom those before")) == "ValueError: sizes (2, 3) differ"


def test_streams_within_a_forward_are_refused_with_the_remedy() -> None:
    said = describe(AssertionError("User object is no longer alive"), " at model.py:3")
    assert said.endswith(
        "at model.py:3. A forward that enters CUDA streams cannot be planned: run it on the current stream"
    )


def rows(samples: int, _: int | None = None) -> torch.Tensor:
    return torch.randn(samples, WIDTH)


def squared(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    return loss


def printed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = squared(model, x)
    print(f"{loss:.3f}")
    return loss


def test_a_step_that_writes_a_value_as_text_is_refused_with_the_reason() -> None:
    with pytest.raises(CaptureError, match=r"__format__ at .*reads a value of a tensor, and no tensor has data"):
        record(FakeStep(Workload("printed", mlp, rows, printed, batch_size=4), device=CPU))


def loaded(samples: int, _: int | None) -> torch.Tensor:
    dataset = torch.utils.data.TensorDataset(torch.randn(64, WIDTH))
    loader = torch.utils.data.DataLoader(dataset, batch_size=samples, shuffle=True)
    batch: torch.Tensor = next(iter(loader))[0]
    return batch


def missing(samples: int, _: int | None) -> torch.Tensor:
    raise FileNotFoundError("no rows.pt here")


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        pytest.param(loaded, r"reads a value of a tensor.*make it with torch\.zeros or torch\.randint", id="shuffled"),
        pytest.param(missing, r"FileNotFoundError: no rows\.pt here at .*test_remedies\.py:\d+", id="own-error"),
        pytest.param(
            lambda samples, _: torch.nested.nested_tensor([*rows(samples).split([1, 3])], layout=torch.jagged),
            "Nested tensors are not supported: pad",
            id="nested",
        ),
        pytest.param(lambda samples, _: rows(samples).to_sparse(), "sparse layout are not supported", id="sparse"),
    ],
)
def test_a_batch_that_cannot_be_made_while_planning_is_refused_by_name(batch: Any, said: str) -> None:
    with pytest.raises(CaptureError, match=f"^`batch` of 'batch' fails on fake tensors: .*{said}"):
        FakeStep(Workload("batch", mlp, batch, squared, batch_size=4), device=CPU)


class Scaled(nn.Sequential):
    """Its layers are as many as a tensor has values, and two are orthogonal, which torch makes sure of."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(mlp(), nn.Dropout(rate)) for rate in torch.linspace(0.0, 0.2, 3).tolist()))
        self.last = nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))


def test_a_model_whose_build_reads_values_is_planned_as_if_it_did_not() -> None:
    workload = Workload("scaled", Scaled, rows, squared, batch_size=64)
    trained = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = Scaled()
        if planned:
            remat.apply(model, plan_for(workload, pairs_of_segments))
        loss = squared(model, rows(64))
        loss.backward()
        trained.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(map(torch.equal, *trained))


def test_a_model_is_the_same_where_its_build_goes_on_without_an_operator() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(8, 4), orthogonal_map="householder"))

    fake = FakeStep(Workload("householder", build, rows, squared, batch_size=4), device=CPU)
    assert [(name, b.shape) for name, b in fake.model.named_buffers()] == [
        (name, b.shape) for name, b in build().named_buffers()
    ]


def test_a_build_that_loads_a_checkpoint_warns_of_nothing(recwarn: pytest.WarningsRecorder) -> None:
    checkpoint = mlp().state_dict()

    def build() -> nn.Module:
        model = mlp()
        model.load_state_dict(checkpoint)
        return model

    FakeStep(Workload("loaded", build, rows, squared, batch_size=4), device=CPU)
    assert [str(each.message) for each in recwarn] == []


def test_a_step_with_a_distribution_is_planned_whether_dynamo_ran_before_or_not() -> None:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        of = torch.distributions.Categorical(logits=model(batch))
        return -of.log_prob(torch.zeros(len(batch), device=batch.device)).mean() - of.entropy().mean()

    torch.distributions.Distribution.set_default_validate_args(True)  # as in a new process
    record(FakeStep(Workload("policy", mlp, rows, step, batch_size=4), device=CPU))


def test_a_refused_step_leaves_gradients_on_and_names_what_to_return() -> None:
    beside = mlp()  # which trains, and is none of the model's

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            wanted = beside(batch)
        return nn.functional.mse_loss(model(batch), wanted)

    workload = Workload("beside", mlp, rows, step, batch_size=4)
    with pytest.raises(CaptureError, match=r"uses a tensor that is neither .* `module.requires_grad_\(False\)`"):
        remat.plan(workload.with_planned_step(), budget="90%step", target="cpu")
    assert torch.is_grad_enabled()


def test_an_error_of_build_itself_is_told_as_it_is() -> None:
    def build() -> nn.Module:
        raise ValueError("no such width")

    with pytest.raises(CaptureError, match=r"cannot be built on the meta device: ValueError: no such width\.$"):
        FakeStep(Workload("none", build, rows, squared, batch_size=4), device=CPU)


def test_a_build_that_cannot_reach_a_model_called_meta_runs_once() -> None:
    runs = []

    def build() -> nn.Module:
        runs.append(torch.empty(1).device.type)
        raise OSError("meta-llama/Llama-3.1-8B is a gated repo")

    with pytest.raises(CaptureError, match=r"meta-llama/Llama-3\.1-8B is a gated repo"):
        FakeStep(Workload("gated", build, rows, squared, batch_size=4), device=CPU)
    assert runs == ["meta"]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("autocast", "bf16", "`autocast` must be torch.bfloat16,"),
        ("optimizer", "adamw", "`optimizer` must be a function of"),
    ],
)
def test_a_name_where_torchs_own_object_belongs_is_refused(field: str, value: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Workload("named", nn.Identity, rows, squared, batch_size=4, **{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [True, 2.0, 0, "8"], ids=repr)
def test_what_is_no_number_of_samples_is_refused(size: Any) -> None:
    with pytest.raises(UsageError, match=f"`batch_size` must be a whole number of at least 1, not {size!r}"):
        Workload("sized", nn.Identity, rows, squared, batch_size=size)


def test_a_model_in_place_of_build_is_refused() -> None:
    with pytest.raises(UsageError, match="`build` must be a function that returns the model, not a model"):
        Workload("made", nn.Linear(2, 2), rows, squared, batch_size=4)


SAMPLES = torch.ones(8, WIDTH)  # of a data set


@pytest.mark.parametrize(
    ("batch", "does"),
    [
        pytest.param(lambda samples, _: SAMPLES[:samples], r"uses a tensor at .*test_remedies.py:\d+", id="sliced"),
        pytest.param(lambda samples, _: torch.zeros_like(SAMPLES), r"uses a tensor at .*.py:\d+", id="alike"),
        pytest.param(lambda samples, _: rows(samples) - SAMPLES.mean(), r"uses a tensor at .*.py:\d+", id="scaled"),
        pytest.param(lambda samples, _: SAMPLES, "returns a tensor", id="returned"),
        pytest.param(lambda samples, _: {"x": (SAMPLES,)}, "returns a tensor", id="in-a-container"),
    ],
)
def test_a_batch_of_tensors_that_it_did_not_make_is_told_to_make_them(batch: Any, does: str) -> None:
    def step(model: nn.Module, given: Any) -> torch.Tensor:
        return squared(model, given["x"][0] if isinstance(given, dict) else given)

    told = rf"^`batch` of 'taken' {does} that it did not make\. Let `batch` make its tensors itself, by torch\.zeros"
    with pytest.raises(CaptureError, match=told):
        FakeStep(Workload("taken", mlp, batch, step, batch_size=4), device=CPU).forward()


def test_a_batch_without_rows_is_refused() -> None:
    workload = Workload("empty", mlp, lambda samples, _: rows(samples)[:0], squared, batch_size=4)
    with pytest.raises(CaptureError, match="`batch` of 'empty' gives tensors without elements for a batch size of 4"):
        FakeStep(workload, device=CPU)


def accumulating(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    for part in x.chunk(4)[:-1]:
        model(part).square().mean().backward()
    return model(x.chunk(4)[-1]).square().mean()


def test_a_step_that_accumulates_by_itself_is_told_how_to_plan_accumulation() -> None:
    workload = Workload(
        "accumulating", mlp, lambda samples, _: torch.randn(samples, WIDTH), accumulating, batch_size=64
    )
    with pytest.raises(Infeasible, match=r"TrainingLoop\(accumulation=\.\.\.\)"):
        remat.plan(workload, target="cpu", budget="1KiB", exact=True)


def penalised(model: nn.Module, x: torch.Tensor, *, always: bool = True) -> torch.Tensor:
    """A critic whose gradient is penalised, lazily if not `always`."""
    x = x.detach().requires_grad_()
    judged = model(x)
    loss = F.softplus(-judged).mean()
    if not always:
        return loss
    return loss + torch.autograd.grad(judged.sum(), x, create_graph=True)[0].square().mean()


def test_a_penalty_every_few_steps_trains_alike_under_the_plan_that_always_has_it() -> None:
    workload = Workload("critic", mlp, lambda samples, _: torch.randn(samples, WIDTH), penalised, batch_size=64)
    counter = itertools.count()
    lazily = dataclasses.replace(workload, step=lambda model, x: penalised(model, x, always=next(counter) % 2 == 0))
    with pytest.raises(CaptureError, match="plan one whose `step` always adds it"):
        record(FakeStep(lazily, device=CPU))

    def trained(*, planned: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = mlp()
        if planned:
            remat.apply(model, plan_for(workload, pairs_of_segments))
        losses = []
        for number in range(4):
            loss = penalised(model, workload.batch(64, None), always=number % 2 == 0)
            loss.backward()
            losses.append(loss.detach())
        return losses + [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    pairs = zip(trained(planned=False), trained(planned=True), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
