"""Formed: a captured graph in another form."""

from __future__ import annotations

import torch
from torch import fx

from remat.chunking.chunk import chunk, chunked_losses, chunked_rows
from remat.chunking.chunked_loss import ChunkedLoss, as_given
from remat.chunking.chunked_rows import ChunkedRows
from remat.evaluation.form import Form, slices_in
from remat.fusion.casts import with_casts
from remat.fusion.fuse import as_group, fuse, fused_groups
from remat.fusion.fused_group import FusedGroup


def formed(graph_module: fx.GraphModule, form: Form, call: int) -> fx.GraphModule:
    """Copy the graph of call `call` into `form`: chunk losses and MLPs, then fuse inside and outside of chunks."""
    chunked = chunk(graph_module, slices_in(form.chunks, call), form.rows)
    if not form.fused:
        return chunked
    for head in chunked_losses(chunked):
        _fuse_losses(head)
    for rows in chunked_rows(chunked):
        _fuse_rows(rows)
    return fuse(with_casts(chunked))


def _fuse_losses(head: ChunkedLoss) -> None:
    """Make a group of the nodes between the logits of a head and their gradients too."""
    graph = fx.Graph()
    logits, labels = graph.placeholder("logits"), graph.placeholder("labels")
    constants = [graph.placeholder(f"constant_{i}") for i in range(head.constants)]
    opened = graph.call_module("opened", (logits,))
    graph.output(graph.call_module("row_losses", (opened, labels, *constants)))
    parts = torch.nn.ModuleDict({"opened": head.opened, "row_losses": head.row_losses})
    by_row = [True, True, *(False for _ in constants)]
    head.row_losses = as_group(fx.symbolic_trace(fx.GraphModule(parts, graph)), "fused(row_losses)", by_row)
    head.opened = fx.symbolic_trace(as_given)


def _fuse_rows(rows: ChunkedRows) -> None:
    """Make groups of the nodes between the products of chunked rows."""
    rows.body, rows.again = (fuse(with_casts(part), are_rows=True) for part in (rows.body, rows.again))
    rows.is_fused = True


def groups_in(graph_module: fx.GraphModule) -> list[FusedGroup]:
    """List the groups of a graph call in a fused form, those of chunks among them."""
    inside = [head.row_losses for head in chunked_losses(graph_module)]
    inside += [part for rows in chunked_rows(graph_module) for part in (rows.body, rows.again)]
    return [group for part in (graph_module, *inside) for group in fused_groups(part)]
