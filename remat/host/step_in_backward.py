"""The optimizer's step inside backward: a gradient is used as soon as it is whole, and let go of.

    optimizer = remat.step_in_backward(torch.optim.AdamW(model.parameters()))

Rule 1  When autograd has summed the gradient of a parameter over all its uses, a hook steps that parameter and sets its
        gradient to None. So `optimizer.step()` and `zero_grad()` find no gradients and do nothing; `step()` still ends
        the step, for schedulers, hooks and Rule 3.
Rule 2  What steps a parameter is the optimizer itself, in the form that it chooses, with the settings of the
        parameter's group, as for `offload_optimizer`. So the numbers are bitwise those of the ordinary step.
Rule 3  One backward a step. A second one before `optimizer.step()` would step again where the script accumulates, or
        goes on after a backward that failed, so it is refused before it changes a weight.
Rule 4  Settings are read in backward. Where they are changed between backward and `step()`, that is refused: the
        ordinary step would have used the new ones.
Rule 5  State on the host (`offload_optimizer`) comes parameter by parameter, that of the next one while backward
        computes. The order is that of the backward before.
Rule 6  Gradients are for this step alone. DistributedDataParallel sums them over ranks, and a GradScaler divides
        them, after this step has used them. Neither leaves a trace on a parameter, so the first backward looks for
        both among the objects of the process. One that comes later is seen in `optimizer.step()`, when weights have
        changed: the first leaves gradients after backward, the second hands its scale to an optimizer that takes it.

LOMO (Lv et al. 2023) and torchtune do the same. Clipping to a global norm needs every gradient before the first step:
this is impossible here. `before` clips a single parameter's gradient.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel

from remat._torch.training import fakes_are_on, has_scaled
from remat.errors import UsageError
from remat.host.optimizer_state import OptimizerView, offloaded_state, require_steps_by_parameter

BeforeStep = Callable[[nn.Parameter], Any]
MakeContext = Callable[[nn.Parameter], contextlib.AbstractContextManager[Any]]
_Optimizer = TypeVar("_Optimizer", bound=torch.optim.Optimizer)
_stepping: weakref.WeakKeyDictionary[torch.optim.Optimizer, StepInBackward] = weakref.WeakKeyDictionary()
_TAKES_SCALED = "_step_supports_amp_scaling"  # of an optimizer: a GradScaler calls its step in any case
_SCALER_REFUSAL = (
    "a GradScaler scales gradients until all are checked, and an optimizer that steps in backward uses them before. "
    "Train in bfloat16, or leave `remat.step_in_backward` out."
)
_DDP_REFUSAL = (
    "DistributedDataParallel sums gradients over ranks, and an optimizer that steps in backward uses those of its own "
    "rank before: ranks would diverge. Leave `remat.step_in_backward` out."
)


def step_in_backward(optimizer: _Optimizer, before: BeforeStep | None = None) -> _Optimizer:
    """Step each parameter of `optimizer` as soon as its gradient is complete, and free the gradient.

    Call `optimizer.step()` after each backward as before: it only ends the step. After backward `p.grad` is None, so
    `torch.nn.utils.clip_grad_norm_` finds no gradients. A gradient that no backward made is left to
    `optimizer.step()`. A copy of the optimizer, and an unpickled one, steps after backward.

    Args:
        optimizer: An optimizer of `torch.optim`.
        before: Called with a parameter before it is stepped, to clip its gradient by value or by its own norm.

    Returns:
        The same optimizer.

    Raises:
        UsageError: The class is not one of `torch.optim`, or is LBFGS or SparseAdam; parameters are sharded, or
            `differentiable=True`. In the first backward, before a weight changes: DistributedDataParallel has a
            parameter, another optimizer steps one in backward, or a GradScaler of this process has scaled a loss. In a
            later backward: gradients are accumulated, or the backward before failed. In `step()`, when weights have
            changed: settings changed since backward, or a GradScaler or DistributedDataParallel came after the first
            backward.

    Example:
        >>> optimizer = remat.step_in_backward(torch.optim.AdamW(model.parameters()))
    """
    if (found := stepping_of(optimizer)) is None:
        StepInBackward(optimizer, before)
    elif before is not None and before is not found.before:
        raise UsageError("this optimizer steps in backward already, with another `before`.")
    return optimizer


def stepping_of(optimizer: Any) -> StepInBackward | None:
    """Return the stepping of `optimizer` in backward, if it has one."""
    return _stepping.get(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else None


def is_stepped_in_backward(parameter: nn.Parameter) -> bool:
    """Return whether some optimizer steps `parameter` in backward."""
    return any(id(parameter) in each.hooks for each in list(_stepping.values()))


def _nobody() -> None:
    return None


def _nothing_more(parameter: nn.Parameter) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()


class StepInBackward:
    """The stepping of an optimizer in backward, see `step_in_backward`.

    before    see there
    around    context in which a parameter is stepped; it is entered while the gradient exists
    hooks     of the parameters that can have a gradient, by id
    """

    def __init__(self, optimizer: torch.optim.Optimizer, before: BeforeStep | None = None):
        require_steps_by_parameter(optimizer, "step in backward")
        self.before = before
        self.around: MakeContext = _nothing_more
        self.hooks: dict[int, Any] = {}
        self._reference = weakref.ref(optimizer)
        self._function = inspect.unwrap(type(optimizer).step)
        self._stepped: dict[int, nn.Parameter] = {}  # in this backward, by id, in order
        # by id: the one that came next in the backward before; weakly, since a parameter's hook holds this object
        self._following: dict[int, weakref.ref[nn.Parameter]] = {}
        self._settings: dict[int, dict[str, Any]] = {}  # of the groups that this backward steps, by index
        self._is_alone = False  # Rule 6, once it is known
        self._took_scaled = getattr(optimizer, _TAKES_SCALED, False)
        setattr(optimizer, _TAKES_SCALED, True)
        self._pre_hook = optimizer.register_step_pre_hook(self._begin)
        self._group_of: dict[int, int] = {}  # as this backward began: a parameter's group by its id
        self._handles: list[Any] = [
            self._pre_hook,
            optimizer.register_step_post_hook(self._end),
            optimizer.register_load_state_dict_post_hook(self._forget),
        ]
        self._find_parameters(optimizer)
        for other in self._sharing():
            other._is_alone = False
        _stepping[optimizer] = self

    def let_go(self) -> None:
        """Let the optimizer step after backward again."""
        for handle in (*self._handles, *self.hooks.values()):
            handle.remove()
        if (optimizer := self._reference()) is not None:
            _stepping.pop(optimizer, None)
            setattr(optimizer, _TAKES_SCALED, self._took_scaled)

    @contextlib.contextmanager
    def noting(self, around: MakeContext) -> Iterator[None]:
        """Step parameters under `around` while the context is open."""
        before, self.around = self.around, around
        try:
            yield
        finally:
            self.around = before

    def _find_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Hook the parameters in the groups that can have a gradient; unhook those that were taken out."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and id(parameter) not in self.hooks:
                    self.hooks[id(parameter)] = parameter.register_post_accumulate_grad_hook(self._on_whole)
        for gone in self.hooks.keys() - _groups_of(optimizer).keys():
            self.hooks.pop(gone).remove()

    @torch.compiler.disable
    def _on_whole(self, parameter: nn.Parameter) -> None:
        """Step `parameter`, whose gradient is complete. (Rules 1, 2)"""
        optimizer = self._reference()
        if optimizer is None:
            return
        if not self._stepped:
            self._group_of = _groups_of(optimizer)
            # Hooks that came later run before ours, so that their changes are seen.
            hooks = optimizer._optimizer_step_pre_hooks
            hooks[self._pre_hook.id] = hooks.pop(self._pre_hook.id)
        if (index := self._group_of.get(id(parameter))) is None:
            return  # taken out of the optimizer, whose step would leave it alone too
        self._require_first(parameter)
        self._require_alone()
        group = optimizer.param_groups[index]
        self._settings.setdefault(index, _settings_of(group))
        alone = {**group, "params": [parameter]}
        state = offloaded_state(optimizer)
        following = self._following.get(id(parameter), _nobody)()
        with (
            self.around(parameter),
            torch.no_grad(),
            contextlib.nullcontext() if state is None else state.here(parameter, following),
        ):
            if self.before is not None:
                self.before(parameter)
            self._function(OptimizerView(optimizer, lambda: [alone]))
        parameter.grad = None
        self._stepped[id(parameter)] = parameter

    def _require_first(self, parameter: nn.Parameter) -> None:
        """Raise UsageError if `parameter` has stepped already. (Rule 3)"""
        if id(parameter) in self._stepped:
            parameter.grad = None  # or `optimizer.step()` would step with it
            raise UsageError(
                f"a second backward before `optimizer.step()`: {len(self._stepped)} of {len(self.hooks)} parameters "
                "have stepped already. An optimizer that steps in backward lets each gradient go at once, so gradients "
                "cannot be accumulated over micro-batches: call `optimizer.step()` after each backward, or leave "
                "`remat.step_in_backward` out. If the backward before failed, out of memory say, the other parameters "
                "have not stepped: load the last checkpoint, or call `optimizer.step()` where the script catches the "
                "error, to train on with the weights as they are."
            )
        if parameter.grad is None:
            raise UsageError("a hook has let a gradient go before the optimizer could step in backward.")

    def _require_alone(self) -> None:
        """Raise UsageError for a scaler, DDP or a second optimizer before the first weight changes. (Rule 6)"""
        if self._is_alone or fakes_are_on():
            return
        if self._sharing():
            gc.collect()  # an optimizer that the script has dropped may wait in a cycle
        if others := self._sharing():
            count = sum(len(self.hooks.keys() & other.hooks.keys()) for other in others)
            raise UsageError(
                f"{count} parameters of this optimizer are stepped in backward by another one too: drop all names of "
                "the one that is no longer used (`del`). No weight has changed."
            )
        for each in _alive(GradScaler, DistributedDataParallel):
            if isinstance(each, GradScaler):
                if each.is_enabled() and has_scaled(each):
                    raise UsageError(
                        f"{_SCALER_REFUSAL} No weight has changed. If it is another training's, delete it."
                    )
            elif any(id(parameter) in self.hooks for parameter in _summed_by(each)):
                raise UsageError(f"{_DDP_REFUSAL} No weight has changed.")
        self._is_alone = True

    def _sharing(self) -> list[StepInBackward]:
        """Return the steppings of other optimizers that have a parameter of this one."""
        return [each for each in list(_stepping.values()) if each is not self and each.hooks.keys() & self.hooks]

    def _begin(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Check the step in backward when `optimizer.step()` begins. (Rule 4)"""
        if getattr(optimizer, "found_inf", None) is not None:
            raise UsageError(f"{_SCALER_REFUSAL} Weights have changed: load the last checkpoint.")
        if any(parameter.grad is not None for parameter in self._stepped.values()):
            raise UsageError(
                "parameters that stepped in backward have gradients again, as DistributedDataParallel leaves them. "
                f"{_DDP_REFUSAL} Weights have changed: load the last checkpoint."
            )
        now = _groups_of(optimizer)
        for before, index in {(self._group_of[key], now.get(key)) for key in self._stepped}:
            if index is None:
                raise UsageError(
                    "parameters were taken out of the optimizer between backward and `optimizer.step()`, and were "
                    "stepped in backward; take them out before backward."
                )
            old, new = self._settings[before], _settings_of(optimizer.param_groups[index])
            if changed := sorted(name for name in new if new[name] != old.get(name)):
                raise UsageError(
                    f"{', '.join(changed)} of parameter group {index} changed between backward and `optimizer.step()`, "
                    "and the weights were stepped in backward; set it before backward."
                )

    def _end(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Prepare the next step when `optimizer.step()` is over."""
        if self._stepped:
            self._following = {id(p): weakref.ref(after) for p, after in itertools.pairwise(self._stepped.values())}
        self._forget(optimizer)
        self._find_parameters(optimizer)

    def _forget(self, _: torch.optim.Optimizer) -> None:
        """Forget the stepped parameters: `optimizer.step()` has come, or another state was loaded."""
        self._stepped, self._settings = {}, {}


def _groups_of(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """Return the index of the group that each parameter is in, by its id."""
    return {id(parameter): i for i, group in enumerate(optimizer.param_groups) for parameter in group["params"]}


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings in `group` that a step reads, in a comparable form: a tensor by its version."""
    return {
        name: (id(value), value._version) if isinstance(value, Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


def _alive(*kinds: type) -> list[Any]:
    """Return the objects of `kinds`, and of classes derived from them, that something refers to."""

    def found() -> list[Any]:
        objects = gc.get_objects()
        wanted = {kind for kind in set(map(type, objects)) if issubclass(kind, kinds)}
        return [each for each in objects if type(each) in wanted] if wanted else []

    if not found():
        return []
    gc.collect()
    return found()


def _summed_by(parallel: DistributedDataParallel) -> list[nn.Parameter]:
    """Return the parameters whose gradients `parallel` sums; none if its construction has failed."""
    if not hasattr(parallel, "reducer"):
        return []
    return [p for name, p in parallel.module.named_parameters() if name not in parallel.parameters_to_ignore]
