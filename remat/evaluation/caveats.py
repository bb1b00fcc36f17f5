"""Caveats: sentences on a recorded step for its plan's reader, from `Graph.about` alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remat.evaluation.graph import DRAWN_LENGTHS, DRAWN_OUTSIDE, KEPT_OUTSIDE, WITH_STEP
from remat.evaluation.refused import refused_sizes
from remat.units import first_few, gib


def caveats(about: Mapping[str, Any]) -> list[str]:
    """List sentences about random numbers, code that a plan does not reach, and sizes that its search left out."""
    return [*drawn_lengths(about), *outside_graphs(about), *refused_sizes(about)]


def outside_graphs(about: Mapping[str, Any]) -> list[str]:
    """List sentences about code where a graph ends, which no region reaches."""
    return [*drawn_outside(about), *kept_outside(about)]


def kept_outside(about: Mapping[str, Any]) -> list[str]:
    """Say which lines outside of the captured graphs keep much for backward; empty if none does."""
    if not (kept := about.get(KEPT_OUTSIDE)):
        return []
    lines = first_few(line for line, _ in kept)
    hooks = about.get("hooked")
    by_hooks = f". A backward hook on a module ends a graph (there are hooks on {first_few(hooks)})" if hooks else ""
    or_planned = "" if about.get(WITH_STEP) else ", or plan the whole step (`workload.with_planned_step()`)"
    return [
        f"autograd keeps {gib(sum(size for _, size in kept))} of values that are made outside of the captured graphs "
        f"({lines}), and no plan drops them: compute them in the model's forward, in code that Dynamo traces"
        f"{or_planned}{by_hooks}"
    ]


def drawn_lengths(about: Mapping[str, Any]) -> list[str]:
    """List a sentence if the peak depends on lengths that the batch drew while planning."""
    if not about.get(DRAWN_LENGTHS):
        return []
    return [
        "lengths of sequences depend on random numbers that `batch` draws, and longer ones need more memory: "
        "let `batch` give the longest that training has"
    ]


def traced_branches(about: Mapping[str, Any]) -> list[str]:
    """List a sentence for each branch of eager mode that could not be captured."""
    return [
        f"{asker} asks {predicate}, and its eager branch cannot be traced: kernels and roundings may differ"
        for asker, predicate in (about.get("traced_branches") or {}).items()
    ]


def drawn_outside(about: Mapping[str, Any]) -> list[str]:
    """Say where a forward draws numbers outside torch, the cost, and the remedy; empty if it does not."""
    if not (lines := about.get(DRAWN_OUTSIDE)):
        return []
    return [
        f"the graph ends where the forward draws numbers outside of torch ({', '.join(lines)}), and no region goes "
        "past that: draw them with torch, or before the step and pass them in the batch"
    ]
