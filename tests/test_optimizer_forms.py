"""Optimizers and clipping take on fake tensors the form that torch gives them on the device that is stood for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import optimizer as torch_optimizers
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode

from remat.capture.elsewhere import CaptureDevice
from remat.costing.planning_device import find_planning_device
from remat.evaluation.evaluator import Memory
from remat.planning.profiling import fake_step
from remat.recording.fake_step import FakeStep
from remat.recording.optimizer_forms import forms_of
from remat.recording.record import record
from remat.recording.tracker import Tracker
from remat.workload.optimizers import REFUSED, MakeOptimizer, MasterWeights, optimizers
from tests.toys import SHORT

SHAPES = ((8, 4), (4, 4), (4, 2))  # matrices: Muon takes nothing else
LOOPS = {"Adafactor", "Muon"}  # torch.optim's documentation: these never default to foreach
USABLE = {name: make for name, make in optimizers().items() if name not in REFUSED}
AdamW = torch.optim.AdamW
aten = torch.ops.aten
UNSEEN = {aten._local_scalar_dense.default, aten.lift_fresh.default, aten.detach.default}  # of Python's numbers


class Names(TorchDispatchMode):
    """The operators that are dispatched, numbers read and made left out."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not str(func).startswith("prim.") and func not in UNSEEN:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def names_on_fakes(after_backward: Callable[[list[nn.Parameter]], Any], device: str, kernels_of: str) -> list[str]:
    """List the operators that `after_backward` dispatches for fake parameters with gradients."""
    with FakeTensorMode(), Tracker() as tracker, tracker.answering(), forms_of(kernels_of, device):
        parameters = with_gradients(device)
        with Names() as names:
            after_backward(parameters)
    return names.found


def with_gradients(device: str) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.ones(shape, device=device)) for shape in SHAPES]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return parameters


def stepped(make: MakeOptimizer) -> Callable[[list[nn.Parameter]], Any]:
    return lambda parameters: make(parameters).step()


def form(names: Iterable[str]) -> str:
    names = list(names)
    if any("_fused_" in name for name in names):
        return "fused"
    return "foreach" if any("_foreach_" in name for name in names) else "loop"


PLACES = [  # where fake tensors say that they are, and what they stand for
    pytest.param("cuda", "cuda", id="fakes on the GPU"),
    pytest.param("cpu", "cuda", id="fakes on the CPU for a GPU"),
]


@pytest.mark.parametrize(("device", "kernels_of"), PLACES)
@pytest.mark.parametrize("name", sorted(USABLE))
def test_every_optimizer_takes_on_a_gpu_the_form_that_it_defaults_to(name: str, device: str, kernels_of: str) -> None:
    if (name, device) == ("Rprop", "cuda") and not torch.backends.cuda.is_built():
        pytest.skip("it assigns to a part of a tensor, which fakes on a GPU cannot do in a torch without CUDA")
    found = form(names_on_fakes(stepped(USABLE[name]), device, kernels_of))
    assert found == ("loop" if name in LOOPS else "foreach")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(functools.partial(AdamW, foreach=False), "loop", id="a loop was asked for"),
        pytest.param(functools.partial(AdamW, fused=True), "fused", id="fused"),
        pytest.param(functools.partial(AdamW, capturable=True), "foreach", id="capturable"),
        pytest.param(functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), "foreach", id="momentum"),
        pytest.param(functools.partial(MasterWeights, make=AdamW), "foreach", id="master weights"),
        pytest.param(
            functools.partial(MasterWeights, make=functools.partial(AdamW, foreach=False)), "loop", id="theirs a loop"
        ),
    ],
)
def test_what_was_asked_for_is_respected(make: MakeOptimizer, expected: str) -> None:
    assert form(names_on_fakes(stepped(make), "cpu", "cuda")) == expected


@pytest.mark.parametrize("differentiable", [False, True])
def test_a_differentiable_optimizer_takes_a_loop(differentiable: bool) -> None:
    with FakeTensorMode(), forms_of("cuda", "cuda"):
        choice = torch_optimizers._default_to_fused_or_foreach([*with_gradients("cuda")], differentiable)
    assert choice == (False, not differentiable)


def test_a_learning_rate_that_is_a_tensor_rules_foreach_out() -> None:
    """Unless the optimizer is capturable: torch/optim/adam.py."""

    def make(parameters: Any, **options: Any) -> torch.optim.Optimizer:
        return AdamW(parameters, lr=torch.tensor(1e-3), **options)

    assert form(names_on_fakes(stepped(make), "cuda", "cuda")) == "loop"
    assert form(names_on_fakes(stepped(functools.partial(make, capturable=True)), "cuda", "cuda")) == "foreach"


CLIPPING = {
    "norm": lambda parameters: nn.utils.clip_grad_norm_(parameters, 1.0),
    "value": lambda parameters: nn.utils.clip_grad_value_(parameters, 1.0),
}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("clip", CLIPPING.values(), ids=CLIPPING)
def test_gradients_are_clipped_together(clip: Callable[[list[nn.Parameter]], Any], device: str) -> None:
    assert form(names_on_fakes(clip, device, device)) == "foreach"


AFTER_BACKWARD = {**{name: stepped(make) for name, make in USABLE.items()}, **CLIPPING}


@pytest.mark.parametrize("name", sorted(AFTER_BACKWARD))
def test_fakes_of_a_cpu_run_what_real_tensors_run_there(name: str) -> None:
    real = with_gradients("cpu")
    with Names() as names:
        AFTER_BACKWARD[name](real)
    assert names_on_fakes(AFTER_BACKWARD[name], "cpu", "cpu") == names.found


def test_torch_is_as_before_afterwards() -> None:
    def what_torch_says() -> list[Any]:
        lists = torch_optimizers._foreach_supported_types, _foreach_utils._foreach_supported_types
        return [list(lists[0]), list(lists[1]), _foreach_utils._get_foreach_kernels_supported_devices()]

    before = what_torch_says()
    with pytest.raises(ZeroDivisionError), forms_of("cuda", "cpu"):
        assert what_torch_says() != before
        raise ZeroDivisionError
    assert what_torch_says() == before


def optimizer_rise(kernels_of: str, make: MakeOptimizer) -> int:
    """Bytes of the optimizer's own temporaries, at their most."""
    workload = dataclasses.replace(SHORT, optimizer=make)
    graph = record(FakeStep(workload, device=torch.device("cpu"), elsewhere=CaptureDevice(torch.device(kernels_of))))
    curve = Memory(graph).curve(())
    after = curve.alive_bytes[curve.op >= graph.backward_end]
    return int(after.max()) - graph.fixed_total - sum(parameter.gradient_bytes for parameter in graph.parameters)


@pytest.mark.exhaustive
def test_a_step_for_a_gpu_needs_a_copy_of_the_parameters_for_its_optimizer() -> None:
    parameters = sum(p.nbytes for p in SHORT.build().parameters())
    largest = max(p.nbytes for p in SHORT.build().parameters())
    asked_for = optimizer_rise("cpu", functools.partial(AdamW, foreach=True))
    assert optimizer_rise("cuda", AdamW) == asked_for >= parameters
    assert optimizer_rise("cuda", functools.partial(AdamW, foreach=False)) < 3 * largest < parameters
    assert optimizer_rise("cpu", AdamW) < 3 * largest


def test_a_step_on_a_gpu_runs_the_form_of_a_gpu() -> None:
    """Only what comes after backward: without a CUDA build of torch, autograd cannot run for fakes on a GPU."""
    step = FakeStep(SHORT, device=torch.device("cuda"))
    with step.mode, Tracker() as tracker:
        for parameter in step.model.parameters():
            parameter.grad = torch.empty_like(parameter)
        with Names() as names, step._after_backward(tracker):
            step.finish()
    assert form(names.found) == "foreach"


def test_a_step_for_a_target_runs_the_form_of_the_target() -> None:
    graph = record(fake_step(SHORT, find_planning_device("h100-80gb")))
    after = {graph.kinds[kind].name for kind in graph.op_kind[graph.backward_end :]}
    assert form(after) == "foreach"
