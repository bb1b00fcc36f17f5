"""The graph calls of a forward, each run with its regions."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from remat.evaluation.plan import OffloadRef, RegionRef
from remat.execution.eager.offloading import CallOffloads, Offloader, offloads_in
from remat.execution.eager.products import require_products
from remat.execution.eager.region_tape import Counts, RegionWatch, RewriteOptions
from remat.execution.eager.rewrite import CallRegion, rewrite
from remat.host.copies import Copies
from remat.host.weights import HostWeights


def regions_by_call(regions: Sequence[RegionRef]) -> dict[int, tuple[CallRegion, ...]]:
    """Return the regions of each graph call, in ordinals of that call."""
    calls: dict[int, list[CallRegion]] = {}
    for region in regions:
        calls.setdefault(region.call, []).append(_call_region(region))
    return {call: tuple(found) for call, found in calls.items()}


def _call_region(region: RegionRef) -> CallRegion:
    return CallRegion(
        region.first.ordinal,
        region.last.ordinal,
        saved=frozenset(ref.ordinal for ref in region.saved),
        random=frozenset(ref.ordinal for ref in region.random),
        once=frozenset(ref.ordinal for ref in region.once),
        inner=tuple(map(_call_region, region.inner)),
    )


class RewrittenCalls:
    """Runs each graph call of a forward with its regions; rewritten graphs are made once.

    find           returns the regions of a call in its graph; by default those of `regions`
    find_offloads  the same for `offloads`
    copies         makes copies between device and host; chosen for the device at hand by default
    watch          see `RewriteOptions`
    """

    def __init__(
        self,
        regions: Sequence[RegionRef],
        *,
        observe: bool = False,
        recompute_context: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
        find: Callable[[int, fx.GraphModule], tuple[CallRegion, ...]] | None = None,
        offloads: Sequence[OffloadRef] = (),
        find_offloads: Callable[[int, fx.GraphModule], CallOffloads] | None = None,
        copies: Copies | None = None,
        watch: RegionWatch | None = None,
    ):
        by_call = regions_by_call(regions)
        self.counts = Counts()
        self.offloader = Offloader(offloads, copies) if offloads else None
        context = recompute_context or contextlib.nullcontext
        self._options = RewriteOptions(self.counts, observe, context, self.offloader, watch=watch or RegionWatch())
        self._find_offloads = find_offloads or (lambda call, graph_module: offloads_in(call, offloads))
        self._calls = frozenset(by_call)
        self._find = find or (lambda call, graph_module: by_call.get(call, ()))
        self._rewritten: dict[tuple[int, int], fx.GraphModule] = {}

    @property
    def weights(self) -> HostWeights | None:
        """The weights on the host that graphs bring to the device; None if there are none."""
        return self._options.weights

    def bring(self, weights: HostWeights | None) -> None:
        """Bring these weights to the device for the nodes that use them; call this before any graph call."""
        self._options = dataclasses.replace(self._options, weights=weights)

    def let_go(self) -> None:
        """Let go of rewritten graphs."""
        self._rewritten.clear()

    def __call__(self, call: int, graph_module: fx.GraphModule, args: tuple[Any, ...]) -> Any:
        weights = self.weights
        if self.offloader is None and weights is None and call not in self._calls:
            return graph_module.forward(*args)
        key = (call, id(graph_module))
        if key not in self._rewritten:
            regions, offloads = self._find(call, graph_module), self._find_offloads(call, graph_module)
            self._rewritten[key] = rewrite(graph_module, regions, self._options, offloads)
        if weights is not None:
            require_products(graph_module, args, weights)
        rewritten = self._rewritten[key]
        return rewritten.forward(*args) if self.offloader is None else self.offloader.run(call, rewritten, args)
