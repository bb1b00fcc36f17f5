"""Formed: a captured graph in another form."""

from __future__ import annotations

import torch
from torch import fx

from remat.chunking.chunk import chunk, chunked_losses
from remat.chunking.chunked_loss import ChunkedLoss, as_given
from remat.evaluation.form import Form, slices_in
from remat.fusion.casts import with_casts
from remat.fusion.fuse import as_group, fuse


def formed(graph_module: fx.GraphModule, form: Form, call: int) -> fx.GraphModule:
    """Copy the graph of call `call` into `form`: heads are chunked first, then the rest is fused."""
    chunked = chunk(graph_module, slices_in(form.chunks, call), form.rows)
    if not form.fused:
        return chunked
    for head in chunked_losses(chunked):
        _fuse_losses(head)
    return fuse(with_casts(chunked))


def _fuse_losses(head: ChunkedLoss) -> None:
    """Make a group of the nodes between the logits of a head and their gradients too."""
    graph = fx.Graph()
    logits, labels = graph.placeholder("logits"), graph.placeholder("labels")
    constants = [graph.placeholder(f"constant_{i}") for i in range(head.constants)]
    opened = graph.call_module("opened", (logits,))
    graph.output(graph.call_module("row_losses", (opened, labels, *constants)))
    parts = torch.nn.ModuleDict({"opened": head.opened, "row_losses": head.row_losses})
    head.row_losses = as_group(fx.symbolic_trace(fx.GraphModule(parts, graph)), "fused(row_losses)")
    head.opened = fx.symbolic_trace(as_given)
