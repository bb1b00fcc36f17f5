"""Chunks: which losses of a step run in slices, as profiles and plans name them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

CHUNKS = "chunks"  # key of `Graph.about` and `Plan.about`
WHOLE: Final = "whole_loss_overhead"  # key of `Plan.predicted`


@dataclasses.dataclass(frozen=True)
class Chunk:
    """One loss head in slices.

    call    the graph call that it is in        head    its number among the heads of that graph, see `find_heads`
    slices  into how many its rows are cut      module  path of what makes its logits, for a person to read
    """

    call: int
    head: int
    slices: int
    module: str = ""

    def __str__(self) -> str:
        return f"{self.module or 'the loss'} in {self.slices} slice{'s' if self.slices > 1 else ''}"


def chunks_of(about: Mapping[str, Any]) -> tuple[Chunk, ...]:
    """The chunks of a recorded step or a plan, out of its `about`."""
    return tuple(Chunk(**row) for row in about.get(CHUNKS, ()))


def to_json(chunks: Sequence[Chunk]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(chunk) for chunk in chunks]


def slices_in(chunks: Sequence[Chunk], call: int) -> dict[int, int]:
    """Of one graph call: number of a head -> its slices."""
    return {chunk.head: chunk.slices for chunk in chunks if chunk.call == call}
