"""Modules as regions: run the forward of chosen modules under `torch.utils.checkpoint`, and nothing else.

The executor of plans whose regions are modules (`search_space.py`). Nothing is traced: the forward of each module
that is a region is replaced by a `ModuleRegion`, and that of the model by one that counts. Hooks (those of
`fully_shard` above all) belong to `Module.__call__`, outside; so parameters are gathered before a region runs, and
before it is recomputed, and freed after it.

Rule 1  A region's recomputation draws the random numbers of its forward, and leaves the generators as it found them.
Rule 2  Running statistics and counters of batch normalisation change in forward only; the recomputation works on
        copies, because autograd saves them.
Rule 3  A recomputation finds every parameter frozen, or not, as its forward did (the critic of a generator's loss).
Rule 4  Every region is entered exactly once in a training forward. Otherwise the plan is not this model's.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from remat._torch.training import fakes_are_on
from remat.capture.attention_masks import PADDED_BATCH, all_ones, masks_of
from remat.capture.dynamo import named_tensors, without_cache
from remat.errors import PlanMismatch, UsageError
from remat.evaluation.plan import Plan, RegionRef
from remat.execution.eager.region_tape import Counts, RegionWatch
from remat.execution.forwards import CurrentForward, ModuleForward
from remat.execution.kernel_settings import KernelSettings
from remat.execution.model_as_planned import checkpoints_itself, dtypes_of
from remat.execution.modules.shards import shards_unlike_planned
from remat.execution.planned_forward import PlannedForward
from remat.execution.random_states import Source, set_state, state_of
from remat.execution.recomputed import Recomputed
from remat.execution.reports import OnLarger

_STATISTICS, _COUNTER = ("running_mean", "running_var"), "num_batches_tracked"
Context = Callable[[], contextlib.AbstractContextManager[Any]]

SHARD_LOOKS = 16  # at how shards are kept: of the first forwards


@dataclasses.dataclass
class ModuleCounts(Counts):
    """Count regions entered, and recomputations of each by path."""

    recomputed: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


class ModuleRegions:
    """The regions of one model, as they are installed in it.

    entered  regions entered in this forward, by path
    compare  called with every module that is about to run, its parameters gathered if they were sharded
    watch    see `RegionWatch`
    """

    def __init__(self, model: nn.Module, regions: Sequence[RegionRef]):
        self.model, self.watch = model, RegionWatch()
        self.counts = ModuleCounts()
        self.entered: collections.Counter[str] = collections.Counter()
        self.recompute_context: Context = contextlib.nullcontext
        self.compare: Callable[[nn.Module], None] | None = None
        self.installed = [ModuleRegion(self, self._module(region), region) for region in regions]
        for region in self.installed:
            region.module.forward = region

    def _module(self, region: RegionRef) -> nn.Module:
        try:
            return self.model.get_submodule(region.module)
        except AttributeError:
            raise PlanMismatch(
                f"the plan has a region {region.module!r}, and this model has no such module; "
                "make a plan for this model."
            ) from None

    @property
    def active(self) -> bool:
        return torch.is_grad_enabled() and self.model.training

    def enter(self, region: ModuleRegion) -> None:
        self.counts.regions += 1
        self.entered[region.path] += 1
        if self.compare is not None:
            self.compare(region.module)

    def remove(self) -> None:
        for region in self.installed:
            if region.module.__dict__.get("forward") is region:
                if region.replaced is None:
                    del region.module.__dict__["forward"]
                else:
                    region.module.forward = region.replaced

    def require_all_entered(self) -> None:
        """Raise unless the forward that has just ended entered every region once. (Rule 4)"""
        for region in self.installed:
            if (count := self.entered[region.path]) != 1:
                raise PlanMismatch(
                    f"the plan's region {region.path!r} ran {count} times in this forward, not once; "
                    'make a plan for this model, or plan with `execution="eager"`.'
                )

    def __getstate__(self) -> dict[str, Any]:
        """Give copies counters of their own."""
        fresh = {
            "counts": ModuleCounts(),
            "entered": collections.Counter(),
            "recompute_context": contextlib.nullcontext,
            "watch": RegionWatch(),
        }
        return {**self.__dict__, **fresh}


class ModuleRegion:
    """The forward of a module that is a region."""

    def __init__(self, regions: ModuleRegions, module: nn.Module, ref: RegionRef):
        self.regions = regions
        self.module = module
        self.path = ref.module
        self.random = bool(ref.random)
        self.replaced = module.__dict__.get("forward")
        self.norms = [m for m in module.modules() if m._buffers.get("running_mean") is not None] if ref.once else []

    @property
    def original(self) -> Callable[..., Any]:
        """The forward without the plan."""
        return self.replaced or type(self.module).forward.__get__(self.module)

    @property
    def __wrapped__(self) -> Callable[..., Any]:  # for inspect.signature
        return self.original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.regions.active:
            return self.original(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            _refuse_trace()
        self.regions.enter(self)
        recomputation = _ModuleRecomputation(self, _random_states(self.module, args, kwargs) if self.random else {})
        recomputed = recomputation.recomputed = self.regions.watch.recomputed
        if recomputed is None:
            return self._checkpointed(args, kwargs, context_fn=recomputation.contexts)
        with recomputed.watching(self.text) as check:
            return self._checkpointed(args, kwargs, context_fn=recomputation.contexts, determinism_check=check)

    @property
    def text(self) -> str:
        """The region's name in messages."""
        return f"the region {self.path!r}"

    def _checkpointed(self, args: Any, kwargs: Any, **options: Any) -> Any:
        return checkpoint(
            self._run,
            tuple(kwargs),
            *args,
            *kwargs.values(),
            use_reentrant=False,
            preserve_rng_state=False,
            **options,
        )

    def _run(self, names: tuple[str, ...], *values: Any) -> Any:
        """Run the original forward; the last of `values` are keyword arguments.

        They are passed to `checkpoint` one by one: autograd notices changes only of tensors passed so.
        """
        positional = len(values) - len(names)
        return self.original(*values[:positional], **dict(zip(names, values[positional:], strict=True)))


@torch.compiler.disable
def _refuse_trace() -> None:
    """Refuse a compiler's trace: it would not see the regions, and nothing would be recomputed."""
    raise UsageError(
        "a plan of modules runs in eager mode only: leave torch.compile out. For a compiled step within a budget leave "
        "the plan out and use remat.compile(model, budget=...)."
    )


class _ModuleRecomputation:
    """The context in which one call of a region is recomputed; entered once for every backward through it."""

    def __init__(self, region: ModuleRegion, states: dict[Source, Any]):
        self._region = region
        self._states = states
        self._trainable = [(parameter, parameter.requires_grad) for parameter in region.module.parameters()]
        self._stack = contextlib.ExitStack()
        self.recomputed: Recomputed | None = None  # compares it with forward in a first step

    def contexts(self) -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
        self._settings = KernelSettings()
        return contextlib.nullcontext(), self

    def __enter__(self) -> None:
        regions = self._region.regions
        regions.counts.recomputed[self._region.path] += 1
        if self.recomputed is not None:
            self.recomputed.begins()
        self._stack.enter_context(self._settings.restored())
        self._stack.enter_context(regions.recompute_context())
        self._stack.enter_context(_drawing_from(self._states))
        self._stack.enter_context(_trainable_as(self._trainable))
        for norm in self._region.norms:
            self._stack.enter_context(_on_copies(norm))

    def __exit__(self, *error: Any) -> None:
        self._stack.close()
        if self.recomputed is not None:
            self.recomputed.ends()


# Random numbers (Rule 1)


def _random_states(module: nn.Module, args: Any, kwargs: Any) -> dict[Source, Any]:
    """Return the states of the CPU's and the module's generators, and of those among its attributes or arguments.

    Empty under fake tensors, which draw nothing.
    """
    if fakes_are_on():
        return {}
    leaves = [*tree_leaves((args, kwargs)), *(each for inside in module.modules() for each in vars(inside).values())]
    tensors = (leaf for leaf in (*leaves, *module.parameters()) if isinstance(leaf, torch.Tensor))
    sources = {torch.device("cpu"), next((tensor.device for tensor in tensors), torch.device("cpu"))}
    return {source: state_of(source) for source in sources.union(x for x in leaves if isinstance(x, torch.Generator))}


@contextlib.contextmanager
def _drawing_from(states: Mapping[Source, Any]) -> Iterator[None]:
    """Set generators to these states, and restore them afterwards."""
    before = {source: state_of(source) for source in states}
    try:
        for source, state in states.items():
            set_state(source, state)
        yield
    finally:
        for source, state in before.items():
            set_state(source, state)


# Batch normalisation (Rule 2)


@contextlib.contextmanager
def _on_copies(norm: nn.Module) -> Iterator[None]:
    """Give `norm` a forward that leaves its running statistics and its counter unchanged."""
    had = norm.__dict__.get("forward")
    if isinstance(had, ModuleRegion):  # the region is the normalisation itself
        replaced, had.replaced = had.replaced, _keeping_state(norm, had.original)
    else:
        norm.__dict__["forward"] = _keeping_state(norm, norm.forward)
    try:
        yield
    finally:
        if isinstance(had, ModuleRegion):
            had.replaced = replaced
        elif had is None:
            del norm.__dict__["forward"]
        else:
            norm.__dict__["forward"] = had


def _keeping_state(norm: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    state = norm._buffers

    def run(*args: Any, **kwargs: Any) -> Any:
        kept = {name: state[name] for name in (*_STATISTICS, _COUNTER) if name in state}
        try:
            for name in _STATISTICS:
                if (statistic := state.get(name)) is not None:
                    state[name] = statistic.clone()
            if _COUNTER in state:
                state[_COUNTER] = None
            return forward(*args, **kwargs)
        finally:
            state.update(kept)

    return run


# Frozen parameters (Rule 3)


@contextlib.contextmanager
def _trainable_as(forward: Sequence[tuple[nn.Parameter, bool]]) -> Iterator[None]:
    """Let parameters require gradients as in forward, and restore them afterwards."""
    changed = [parameter for parameter, was in forward if parameter.requires_grad != was]
    for parameter in changed:
        parameter.requires_grad_(not parameter.requires_grad)
    try:
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(not parameter.requires_grad)


# A model with such a plan


class PlannedModules(PlannedForward):
    """The original forward of a model whose plan has modules for regions, checked against the plan."""

    def __init__(self, model: nn.Module, plan: Plan, on_larger: OnLarger, observe: bool, verify_first_step: bool):
        super().__init__(model, plan, on_larger, observe, verify_first_step)
        self._prepare()

    def _prepare(self) -> None:
        super()._prepare()
        self._has_begun = False
        self._looks = itertools.count()

    def install(self) -> None:
        """Install the regions. Raises PlanMismatch for a plan of another model."""
        self._as_planned.require_size()
        self.regions = ModuleRegions(self.model, self.plan.regions)

    def take_out(self) -> None:
        self.regions.remove()

    @property
    def counts(self) -> ModuleCounts:
        return self.regions.counts

    def watch(self, *, observe: bool, recompute_context: Context | None = None) -> ModuleCounts:
        self.regions.counts = ModuleCounts()
        self.regions.recompute_context = recompute_context or contextlib.nullcontext
        return self.regions.counts

    def run(self, at: ModuleForward, args: Any, kwargs: Any) -> Any:
        if not self.regions.active:
            return self._run_unplanned(at, args, kwargs)
        if torch.compiler.is_dynamo_compiling():
            _refuse_trace()
        now = self.forwards.now(at.path)
        first, self._has_begun = not self._has_begun, True
        if first:
            self._compare_model(now)
        tensors = named_tensors(at.original, args, kwargs)
        self._as_planned.compare_batch(now.forward, tensors)
        self.loop.forward_begins(now)
        if not now.forward.masks["padded"] and masks_of(tensors, all_ones).padded:
            self.reports.excess("padding", f"{PADDED_BATCH}.")  # untraced, the model inspects its own masks
        for name, text in shards_unlike_planned(self.plan, self.model) if next(self._looks) < SHARD_LOOKS else ():
            self.reports.excess(name, text)
        self.regions.entered.clear()
        self.regions.watch = self.region_watch
        self.regions.compare = self._compare_region if first else None
        with without_cache(self.model), self.first_step.recomputing(now.number):
            result = at.original(*args, **kwargs)
        self.regions.require_all_entered()
        self.loop.returned(result, (args, kwargs))
        self.forwards.returned(now, result)
        return result

    def _compare_model(self, now: CurrentForward) -> None:
        self._as_planned.require_size()
        self._as_planned.compare_device()
        self._as_planned.require_autocast(now.forward.autocast)
        self._as_planned.compare_trainable()
        if checkpoints_itself(self.model):
            self.reports.warn(
                "checkpointing",
                "gradient_checkpointing is on in this model, and a plan of modules is applied too: what both "
                "checkpoint is recomputed twice. Turn it off; the plan decides what is recomputed.",
            )

    def _compare_region(self, module: nn.Module) -> None:
        """Check the dtypes that a region computes in: sharding may store parameters in others."""
        found, planned = dtypes_of(module), self.plan.about["parameter_dtypes"]
        if not set(found) <= set(planned):
            raise PlanMismatch(f"the plan is for parameters of {planned}, a region of this model has {found}.")

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "regions": self.regions}
