"""Form: in which of its forms a step runs, as profiles and plans name it.

A step has one form as it was captured. In others losses or MLPs run in slices (`chunking/`), or groups of nodes as
one kernel each (`fusion/`). Each form is a step of its own: recorded, costed, posed and replayed like any other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

CHUNKS = "chunks"  # key of `Graph.about` and `Plan.about`
ROWS = "rows"  # key of both, too
FUSED = "fused"  # key of both, too
LEFT_WHOLE = "whole_losses"  # key of `Plan.about`: why large losses do not run in slices, one reason each
WHOLE_LOSS_OVERHEAD: Final = "whole_loss_overhead"  # key of `Plan.predicted`: of the plan without changes of form
SLICED_OVERHEAD: Final = "sliced_overhead"  # of the best plan with slices, if its gain is too small


@dataclasses.dataclass(frozen=True)
class Chunk:
    """One loss head in slices.

    call    the graph call that it is in        head    its number among the heads of that graph, see `find_heads`
    slices  number of slices of its rows        module  path of the module that makes its logits, for a person
    """

    call: int
    head: int
    slices: int
    module: str = ""

    def __str__(self) -> str:
        return f"{self.module or 'the loss'} in {self.slices} chunk{'s' if self.slices > 1 else ''}"


def chunks_of(about: Mapping[str, Any]) -> tuple[Chunk, ...]:
    """Read the chunks of a recorded step or a plan from its `about`, where older ones may name one several times."""
    return tuple(dict.fromkeys(Chunk(**row) for row in about.get(CHUNKS, ())))


@dataclasses.dataclass(frozen=True)
class Form:
    """The changes to a captured step: chunked losses, chunked MLPs, fused groups.

    chunks  the chunked losses                 fused  whether groups run as kernels
    rows    number of slices of chunked rows (`chunking/rows.py`), such as MLPs; 0: they stay whole
    """

    chunks: tuple[Chunk, ...] = ()
    fused: bool = False
    rows: int = 0

    def __str__(self) -> str:
        rows = [f"MLPs in {self.rows} chunks"] if self.rows else []
        return ", ".join([*map(str, self.chunks[:1]), *rows, *(["groups fused"] if self.fused else [])]) or "unchanged"

    @property
    def slices(self) -> int:
        """Number of chunks of losses; 0 if they are whole."""
        return max((chunk.slices for chunk in self.chunks), default=0)

    @property
    def in_one_slice(self) -> Form:
        """The common part of forms that differ only in the number of slices of losses."""
        return dataclasses.replace(self, chunks=tuple(dataclasses.replace(each, slices=1) for each in self.chunks))

    def to_json(self) -> dict[str, Any]:
        """Return the entries of an `about`."""
        rows = {ROWS: self.rows} if self.rows else {}
        return {CHUNKS: [dataclasses.asdict(chunk) for chunk in self.chunks], FUSED: self.fused, **rows}


CAPTURED_FORM = Form()


def form_of(about: Mapping[str, Any]) -> Form:
    """Read the form of a recorded step or a plan from its `about`."""
    return Form(chunks_of(about), bool(about.get(FUSED)), int(about.get(ROWS, 0)))


def slices_in(chunks: Sequence[Chunk], call: int) -> dict[int, int]:
    """Return the number of slices for each head of one graph call."""
    return {chunk.head: chunk.slices for chunk in chunks if chunk.call == call}
