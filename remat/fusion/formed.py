"""Formed: a captured graph in another form."""

from __future__ import annotations

from torch import fx

from remat.chunking.chunk import chunk
from remat.evaluation.form import Form, slices_in
from remat.fusion.casts import with_casts
from remat.fusion.fuse import fuse


def formed(graph_module: fx.GraphModule, form: Form, call: int) -> fx.GraphModule:
    """A copy of the graph of call `call` as it runs in `form`: heads are cut first, and the rest is fused."""
    chunked = chunk(graph_module, slices_in(form.chunks, call))
    return fuse(with_casts(chunked)) if form.fused else chunked
