"""Modules and tensors that a Trainer's loss uses beside the model: a frozen teacher, a criterion, weights of classes.

They are attributes of the Trainer, also in containers, or globals that its `compute_loss` names, or methods that this
calls. They stay the program's own and are a part of the planned step, as those of any Workload's step are
(`model_state.py`). A reference model and modules around the model are not among them: copies take their places.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from remat.capture.code_names import attributes_in, globals_in
from remat.capture.holders import FUNCTIONS as CALLED
from remat.capture.holders import is_left_alone, is_looked_into
from remat.capture.model_state import ModelState
from remat.errors import UsageError
from remat.integrations.modules_around import around_names, settings_of
from remat.integrations.trainer_step import is_notes
from remat.units import first_few
from remat.workload.reference import call_reference

Beside = dict[str, Any]

ATTRIBUTES, FUNCTIONS = "attributes", "functions"  # of a Beside: attributes of the Trainer, and the code of its loss

_NEVER = {
    *("model", "model_wrapped", "deepspeed", "ref_model", "reward_funcs", "accelerator", "args", "state", "control"),
    *("train_dataset", "eval_dataset", "data_collator", "processing_class", "tokenizer", "callback_handler"),
    *("optimizer", "lr_scheduler", "label_smoother"),
}


def beside(trainer: Any) -> Beside:
    """Return what the loss of `trainer` may use beside its model."""
    functions = list(_functions_of(type(trainer)))
    named = {"compute_loss_func"}.union(*(attributes_in(each.__code__) for each in functions))
    apart = _NEVER.union(around_names(trainer))
    found = {name: value for name, value in vars(trainer).items() if name not in apart and not is_notes(value)}
    attributes = {n: v for n, v in found.items() if any(_modules_in(v)) or (n in named and _may_be_state(n, v))}
    return {ATTRIBUTES: attributes, FUNCTIONS: [each for each in functions if is_looked_into(each, ())]}


@contextlib.contextmanager
def as_references(beside: Beside, copies: dict[str, Any]) -> Iterator[None]:
    """Run forwards of frozen modules beside the model, or of `copies` of such, as references' while this is open."""
    with contextlib.ExitStack() as stack:
        for module in {id(each): each for each in (*_references_in(beside), *_frozen_in(copies))}.values():
            own = vars(module).get("forward")
            module.forward = functools.wraps(module.forward)(functools.partial(call_reference, module.forward))
            stack.callback(_forward_back, module, own)
        yield


def _forward_back(module: nn.Module, own: Any) -> None:
    if own is None:
        del vars(module)["forward"]
    else:
        module.forward = own


@contextlib.contextmanager
def refusing_others(name: str, beside: Beside) -> Iterator[None]:
    """Raise UsageError where the loss of the Trainer of this name uses a tensor that no plan knows."""
    try:
        yield
    except Exception as error:  # of torch, where an operator is given a tensor that is no fake
        from remat.recording.remedies import line_of, uses_foreign  # nothing of planning is loaded to train

        if not uses_foreign(error):
            raise
        trained = [
            f"`self.{key}`" for key, value in beside[ATTRIBUTES].items() if any(map(_trains, _modules_in(value)))
        ]
        raise UsageError(
            f"the loss of this {name} uses a tensor{line_of(error)} that is neither of its model nor of its batch. "
            "Beside the model count frozen modules and small tensors that are attributes of the Trainer, or globals "
            f"that its loss names. Freeze a teacher by `requires_grad_(False)`"
            f"{f' (weights may train in {first_few(trained)})' if trained else ''}; a module that trains has to be a "
            "part of the Trainer's model."
        ) from error


def described_beside(step: Any, beside: Beside) -> list[Any]:
    """Describe what the loss of a Trainer uses beside the model, to tell it from that of another Trainer."""
    tensors = ModelState(nn.Module(), data=False, step=step).unregistered
    modules = [each for module in _references_in(beside) for each in module.modules()]
    return [
        sorted(f"{tensor.dtype} {tuple(tensor.shape)} {tensor.device.type}" for tensor in tensors),
        [[f"{type(each).__module__}.{type(each).__qualname__}", each.training, settings_of(each)] for each in modules],
    ]


def _functions_of(kind: type) -> Iterator[types.FunctionType]:
    """Yield `compute_loss` of a class of Trainers, and the methods that it may call, without those of transformers."""
    seen, waiting = {"compute_loss"}, ["compute_loss"]
    while waiting:
        name = waiting.pop()
        for each in kind.__mro__:
            function = _function_of(vars(each).get(name))
            if function is not None and not is_left_alone(function):
                yield function
                new = attributes_in(function.__code__) - seen
                seen |= new
                waiting += sorted(new)


def _function_of(attribute: Any) -> types.FunctionType | None:
    attribute = getattr(attribute, "__func__", getattr(attribute, "fget", attribute))
    attribute = inspect.unwrap(attribute) if callable(attribute) else attribute
    return attribute if isinstance(attribute, types.FunctionType) else None


def _may_be_state(name: str, value: Any) -> bool:
    if name == "compute_loss_func":
        return value is not None
    if isinstance(value, (torch.Tensor, dict, list, tuple)):
        return True
    return is_looked_into(value if isinstance(value, CALLED) else type(value), ())


def _modules_in(value: Any) -> Iterator[nn.Module]:
    """Yield the modules that `value` is or holds in containers."""
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _modules_in(each)


def _references_in(beside: Beside) -> Iterator[nn.Module]:
    """Yield frozen modules: the attributes, those that objects hold, and what functions name or close over."""
    values = [*beside[ATTRIBUTES].values(), *beside[FUNCTIONS]]
    objects = [getattr(value, "__self__", value) for value in values]
    values += [each for value in objects if is_looked_into(type(value), ()) for each in _attributes_of(value)]
    for value in list(values):
        function = _function_of(value)
        if function is not None:
            values += [function.__globals__.get(name) for name in sorted(globals_in(function.__code__))]
            values += [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        if isinstance(value, functools.partial):
            values += [*value.args, *value.keywords.values()]
    yield from _frozen_in(values)


def _attributes_of(value: Any) -> list[Any]:
    return [] if isinstance(value, nn.Module) else list(getattr(value, "__dict__", {}).values())


def _frozen_in(values: Any) -> Iterator[nn.Module]:
    return (each for each in _modules_in(values) if not _trains(each))


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
