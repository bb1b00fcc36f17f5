"""Optimizers by name: `adamw`, `sgd:fused`, `adamw8bit`; and the one that keeps fp32 copies of 16-bit weights.

What an optimizer takes is never looked up: its class is stepped for real (`record.py`, `optimizer_states.py`). So a
name here is nothing but a class and the form in which it runs:

    NAME          a class of torch.optim in any case, in the form that it chooses itself (foreach on a GPU)
    NAME:FORM     the same, `fused` (least memory), `foreach` (its temporaries are a copy of the parameters) or `single`
    NAME8bit      a class of bitsandbytes, where that is installed: state in 8 bits
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from remat.errors import UsageError

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Any]  # see `any_optimizer.py`

# Optimizers of torch.optim that remat's step cannot run, with the missing requirement.
REFUSED = {"LBFGS": "a closure that repeats the step", "SparseAdam": "sparse gradients"}
FORMS: dict[str, dict[str, bool]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "single": {"foreach": False},
}
EIGHT_BIT = "8bit"


def optimizers() -> dict[str, type[torch.optim.Optimizer]]:
    """Return the classes of `torch.optim` that a step can use, by name."""
    return {
        name: value
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }


def optimizer_named(name: str) -> MakeOptimizer | None:
    """Return the function that makes the optimizer called `name`; None for `none`.

    Raises UsageError for an optimizer that is not available.
    """
    if name.lower() == "none":
        return None
    base, _, form = name.partition(":")
    found: Any = _eight_bit(base) if base.lower().endswith(EIGHT_BIT) else _of_torch(base)
    if not form:
        return found
    if form not in FORMS:
        raise UsageError(f"optimizer {name!r}: the form {form!r} is not known; choose one of {', '.join(FORMS)}.")
    _require_form(found, form, name)
    return functools.partial(found, **FORMS[form])


def _of_torch(name: str) -> type[torch.optim.Optimizer]:
    by_lower_name = {known.lower(): known for known in optimizers()}
    found = by_lower_name.get(name.lower())
    if found is None:
        usable = sorted(known.lower() for known in optimizers() if known not in REFUSED)
        raise UsageError(
            f"optimizer {name!r} is not in torch.optim; choose none, {', '.join(usable)}, or adamw8bit of bitsandbytes."
        )
    if found in REFUSED:
        raise UsageError(f"optimizer {found} needs {REFUSED[found]}, which remat does not plan for.")
    return optimizers()[found]


def _eight_bit(name: str) -> type[torch.optim.Optimizer]:
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of kernels that training does not need
    try:
        library: Any = importlib.import_module("bitsandbytes.optim")
    except ModuleNotFoundError as error:
        raise UsageError(
            f"optimizer {name!r} is one of bitsandbytes, which is not installed. Run `pip install bitsandbytes`."
        ) from error
    by_lower_name = {known.lower(): value for known, value in vars(library).items() if isinstance(value, type)}
    if (found := by_lower_name.get(name.lower())) is None:
        known = sorted(known for known in by_lower_name if known.endswith(EIGHT_BIT))
        raise UsageError(f"optimizer {name!r} is not in bitsandbytes; choose one of {', '.join(known)}.")
    return found


def _require_form(make: Callable[..., torch.optim.Optimizer], form: str, name: str) -> None:
    """Raise UsageError for a class without this form when the name is read, not in the middle of a step."""
    try:
        make([nn.Parameter(torch.empty(1))], **FORMS[form])
    except (TypeError, RuntimeError) as error:
        raise UsageError(f"optimizer {name!r} is not available: {str(error).splitlines()[0]}.") from error


class MasterWeights(torch.optim.Optimizer):
    """`make` run on fp32 copies of 16-bit parameters, as mixed-precision training does (Micikevicius et al. 2018).

    It stands for the optimizers of Apex (O2), Megatron and DeepSpeed when memory is planned; its `state_dict` is not
    theirs.

    gradients  also keep fp32 copies of the gradients, as where micro-batches are summed in fp32
    """

    def __init__(self, parameters: Iterable[nn.Parameter], make: MakeOptimizer, gradients: bool = False):
        super().__init__(list(parameters), {})
        self._make, self._gradients = make, gradients
        self._inner: torch.optim.Optimizer | None = None
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step the inner optimizer; the parameters become copies of its results."""
        inner = self._inner or self._begin()
        for parameter, master in self._pairs:
            if parameter.grad is None:
                master.grad = None
            elif master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad.copy_(parameter.grad)
        inner.step()
        for parameter, master in self._pairs:
            parameter.copy_(master)
            self.state[parameter].update(inner.state.get(master, {}))
            if self._gradients and master.grad is not None:
                self.state[parameter]["fp32 gradients"] = master.grad
            else:
                master.grad = None

    def _begin(self) -> torch.optim.Optimizer:
        """Copy the parameters: the copies begin when the first step does, like all other state."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        self._pairs = [(p, nn.Parameter(p.detach().float().clone())) for p in parameters]
        for parameter, master in self._pairs:
            self.state[parameter]["master weights"] = master
        self._inner = self._make([master for _, master in self._pairs])
        return self._inner
