"""The request: all that a caller can ask of planning, in one frozen value.

The library's functions take its fields as keywords, the command line's options become one, and every search reads it.
What it may not ask for is refused by `require`, before anything is recorded.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, TypedDict, Unpack

from remat.costing.planning_device import PlanningDevice
from remat.errors import UsageError, require_argument
from remat.execution import executions
from remat.execution.base import Execution
from remat.execution.executions import EAGER
from remat.formulation.search_space import DEPTH
from remat.formulation.solution import Limits
from remat.offloading.link import Link
from remat.planning.budget import Budget, is_share_of_step, parse_budget, usable_bytes
from remat.planning.links import (
    ACTIVATIONS,
    WEIGHTS,
    host_bytes_of,
    link_of,
    loop_with,
    offloads_named,
    require_layers,
    require_offloads,
)
from remat.solvers import Solver, load
from remat.units import require_unit
from remat.workload.training_loop import TrainingLoop, require_loop

Numerics = Literal["bitwise", "sums", "rounding"]
BITWISE: Numerics = "bitwise"
SUMS: Numerics = "sums"
ROUNDING: Numerics = "rounding"
NUMERICS: tuple[Numerics, ...] = (BITWISE, SUMS, ROUNDING)


@dataclasses.dataclass(frozen=True)
class FormChoice:
    """Limits on the forms of a step that are tried, and the gain for which another form is used.

    Attributes:
        slices: Numbers of chunks of a loss, in the order in which they are tried.
        beside_rows: Numbers of chunks of a loss that are tried beside chunked MLPs.
        row_numbers: Numbers in the widest value of one chunk of an MLP.
        most_row_slices: Most chunks of an MLP; 0 or 1 never chunks MLPs.
        large: Share of the peak; a loss with smaller logits is not chunked.
        worth: Share of the step; another form is used if it saves as much or if nothing else fits.
        most_again: Forms beside the best one that are searched a second time.
        open: Share of the best price; a form whose bound is lower by as much is searched a second time.

    Example:
        >>> remat.plan(workload, budget="20GiB", forms=remat.FormChoice(slices=(4, 8)))
    """

    slices: tuple[int, ...] = (8, 16, 4, 2, 1)
    beside_rows: tuple[int, ...] = (4, 16)
    row_numbers: int = 1 << 25
    most_row_slices: int = 32
    large: float = 0.01
    worth: float = 0.01
    most_again: int = 3
    open: float = 0.01

    @classmethod
    def default(cls) -> FormChoice:
        """Return the default choice."""
        return cls()


class RequestKeywords(TypedDict, total=False):
    """The keywords that become a `PlanRequest`, which describes them.

    `time_limit` is that of `limits`, in seconds. `exact=True` is `numerics="bitwise"`, and `fuse=True` is
    `numerics="rounding"`.
    """

    budget: str | int | None
    headroom: str | int | None
    execution: str
    depth: int | None
    numerics: Numerics | None
    exact: bool
    fuse: bool
    offload: str | None
    host_budget: str | int | None
    allocator: str | None
    limits: Limits | None
    time_limit: float | None
    solver: Solver | None
    forms: FormChoice | None


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """The options of a plan that do not depend on the step.

    budget, headroom  see `parse_budget`; None if the caller tries budgets itself
    execution    how the step will run: "eager", or "modules" for regions that are whole modules, as FSDP2 needs them
    depth        maximum nesting of regions, by default the execution's
    numerics     allowed changes of numbers. "bitwise": nothing; losses and MLPs stay whole.
                 "sums": losses and MLPs may run in slices; gradients of weights in them are summed in another order.
                 "rounding": groups of pointwise and reducing nodes are compiled by themselves too (`fusion/`), which
                 round elsewhere, nearer to float64
    offload      "activations", "optimizer", "weights", or two of them with a comma, which may be on the host. The
                 training script calls `remat.offload_optimizer` or `remat.offload_weights` for the last two
    host_budget  host memory for it, in bytes or as "64GiB"; by default half of this host's free memory, or as much as
                 the device's memory for a target elsewhere
    allocator    settings of PYTORCH_CUDA_ALLOC_CONF to predict for; those of the environment by default
    limits       of the search; its `clock` limits each part
    solver       any function of `remat.solvers`; the exact one by default
    forms        the forms of the step to try
    """

    budget: str | int | None = None
    headroom: str | int | None = None
    execution: str = EAGER
    depth: int | None = None
    numerics: Numerics = SUMS
    offload: str | None = None
    host_budget: str | int | None = None
    allocator: str | None = None
    limits: Limits = Limits()
    solver: Solver | None = None
    forms: FormChoice = dataclasses.field(default_factory=lambda: FormChoice.default())

    @property
    def how(self) -> Execution:
        """The execution. Raises UsageError if the name is unknown."""
        return executions.load(self.execution)

    @property
    def solve(self) -> Solver:
        return self.solver or load("exact")

    @property
    def cuts(self) -> bool:
        """Whether losses and MLPs may be chunked."""
        return self.numerics != BITWISE

    @property
    def fuses(self) -> bool:
        """Whether groups are fused."""
        return self.numerics == ROUNDING

    @property
    def wants_layers(self) -> bool:
        """Whether frozen weights may be on the host."""
        return WEIGHTS in offloads_named(self.offload)

    def loop(self, own: TrainingLoop | None) -> TrainingLoop | None:
        """Return the training loop `own` with the optimizer's state where `offload` says."""
        require_loop(own)
        return loop_with(own, self.offload)

    def require(self, place: PlanningDevice, loop: TrainingLoop | None, *, has_model: bool = True) -> None:
        """Raise UsageError for options that a step on `place` in `loop` cannot have.

        loop       as `self.loop` returned it
        has_model  whether there is a model, not a profile alone
        """
        require_loop(loop)
        self.limit(place)
        self.link(place, loop)
        self.require_of(loop, has_model=has_model)
        if self.wants_layers and self.budget is None:
            raise UsageError(
                "how many layers have their weights on the host is chosen for one budget, and none is given; leave "
                "weights out of `offload` (--offload)."
            )

    def require_of(self, loop: TrainingLoop | None, *, has_model: bool) -> None:
        """Raise UsageError where offloads or fused groups contradict the execution, the loop or each other."""
        how = self.how
        if self.wants_layers:
            require_layers(how, loop)
        if ACTIVATIONS in offloads_named(self.offload):
            require_offloads(how, loop)
        if self.fuses:
            require_fusible(how, loop, has_model=has_model)

    def limit(self, place: PlanningDevice, step_bytes: int | None = None) -> Budget | None:
        """Return the budget in bytes on `place`; None if the request has none. Raises UsageError.

        step_bytes  peak of the step without checkpointing; before it is recorded, a share of the step is read as a
                    share of the device, which checks it
        """
        if self.budget is None:
            return None
        target = place.target
        shares_of = step_bytes if step_bytes is not None else target.memory_bytes
        simulated = usable_bytes(place) if self.budget == "auto" else None
        of_step = shares_of if is_share_of_step(self.budget) else None
        return parse_budget(self.budget, self.headroom, target.memory_bytes, simulated, of_step)

    def link(self, place: PlanningDevice, loop: TrainingLoop | None) -> Link | None:
        """Return the link for activations; None if none are offloaded. Raises UsageError."""
        has_state = loop is not None and loop.offload_optimizer
        return link_of(place, self.offload, self.host_budget, has_state=has_state)

    def host_bytes(self, place: PlanningDevice) -> int:
        """Return the host memory that may be used on `place`."""
        return host_bytes_of(place, self.host_budget)

    @classmethod
    def of(cls, **wanted: Unpack[RequestKeywords]) -> PlanRequest:
        """Make a request from keywords."""
        for name, (kinds, takes) in _KINDS.items():
            require_argument(name, wanted.get(name), kinds, takes)
        if (host_budget := wanted.get("host_budget")) is not None:
            require_unit("host_budget", host_budget)
        time_limit, limits = wanted.pop("time_limit", None), wanted.pop("limits", None) or Limits()
        if time_limit is not None:
            if not isinstance(time_limit, (int, float)) or not 0 < time_limit < math.inf:
                raise UsageError(f"`time_limit={time_limit!r}` is not a positive number of seconds.")
            limits = limits.in_wall_time(time_limit)
        if (depth := wanted.get("depth")) not in (None, *range(1, DEPTH + 1)):
            raise UsageError(f"`depth={depth!r}` is no nesting of regions; choose one from 1 to {DEPTH}.")
        if wanted.get("forms") is None:
            wanted.pop("forms", None)
        numerics = numerics_of(
            wanted.pop("numerics", None), exact=wanted.pop("exact", False), fuse=wanted.pop("fuse", False)
        )
        return cls(**{**wanted, "numerics": numerics, "limits": limits})  # type: ignore[arg-type]


_KINDS: dict[str, tuple[Any, str]] = {
    "execution": (str | None, "a name, such as eager"),
    "offload": (str | None, "a name, or two with a comma"),
    "allocator": (str | None, "settings of PYTORCH_CUDA_ALLOC_CONF as text"),
    "limits": (Limits | None, "a remat.Limits"),
    "solver": (Callable | None, "a function of remat.solvers"),
    "forms": (FormChoice | None, "a remat.FormChoice"),
}


def numerics_of(numerics: str | None, *, exact: bool = False, fuse: bool = False) -> Numerics:
    """Return the numerics asked for, by name or by the older flags `exact` and `fuse`.

    Raises UsageError if they contradict each other, and for an unknown name.
    """
    if exact and fuse:
        raise UsageError("`fuse=True` and `exact=True` exclude each other: fused kernels round differently.")
    asked = BITWISE if exact else ROUNDING if fuse else None
    if numerics is None:
        return asked or SUMS
    if numerics not in NUMERICS:
        raise UsageError(f"numerics is {', '.join(NUMERICS[:-1])} or {NUMERICS[-1]}, not {numerics!r}.")
    if asked not in (None, numerics):
        raise UsageError(f"`numerics={numerics!r}` and `{'exact' if exact else 'fuse'}=True` say two things; use one.")
    return numerics


def require_fusible(execution: Execution, loop: TrainingLoop | None, *, has_model: bool) -> None:
    """Raise UsageError where groups cannot be fused."""
    if not execution.runs_forms:
        raise UsageError(f'groups are fused in eager execution, not under `execution="{execution}"`.')
    if not has_model:
        raise UsageError("a profile from a file holds the step without fused kernels; to fuse, plan from the model.")
    if loop is not None and loop.shard is not None:
        raise UsageError("groups are not fused where states are sharded; leave `fuse` or `shard` out.")
