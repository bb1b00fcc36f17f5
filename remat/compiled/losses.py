"""Losses in chunks under a compiler: the head of a captured graph, unrolled chunk by chunk.

As in eager plans (`chunking.chunked_loss`), each chunk makes its logits, their loss and at once their gradients, and
nothing is recomputed. The compiler sees operators: it fuses what lies between the products of a chunk, and the
partitioner chooses among their values as among all others. `heads.py` says what a head is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from remat._torch.symbols import hinted
from remat.chunking.chunk import WITHHELD, chunk
from remat.chunking.chunked_loss import ChunkedLoss, HeadInputs, RunningSum, Sums, slices_of
from remat.chunking.heads import Head, find_heads, linear_arguments
from remat.chunking.withheld import WithheldLogits

PARTS = 16  # logits of a chunk take this part of the bytes that a plan has to give away
MOST_CHUNKS = 16  # chunks: each adds some fifteen operators to compile
USUALLY_SAVED = 1 / 3  # of the bytes that forward makes; PyTorch saves 38 to 97 % (llama, gpt2, t5, bert)


@dataclasses.dataclass(frozen=True)
class ChunkedGraph:
    """A captured graph whose losses run in chunks.

    module     the graph, without the logits that it gave out
    withheld   positions of those among its results, and what a caller gets in their place
    is_likely  whether PyTorch's own choice with the whole loss most likely exceeds the budget
    """

    module: fx.GraphModule
    withheld: Sequence[tuple[int, WithheldLogits]]
    is_likely: bool

    def completing(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return the compiled graph, giving as many results as the graph before."""
        if not self.withheld:
            return run

        def completed(*inputs: Any) -> list[Any]:
            results = list(run(*inputs))
            for position, stand_in in self.withheld:
                results.insert(position, stand_in)
            return results

        return completed


def in_chunks(graph_module: fx.GraphModule, room_bytes: int) -> ChunkedGraph | None:
    """Return a graph with its large losses in chunks; None where it has none that may be.

    room_bytes  of the budget, for what the graph makes
    """
    heads = {i: head for i, head in enumerate(find_heads(graph_module)) if _may_be_chunked(head)}
    counts = {i: -(-PARTS * head.logits_bytes // max(room_bytes, 1)) for i, head in heads.items()}
    counts = {i: min(count, MOST_CHUNKS) for i, count in counts.items() if count > 1}
    if not counts:
        return None
    is_likely = room_bytes < USUALLY_SAVED * _made_bytes(graph_module.graph)
    module = chunk(graph_module, counts, loss=UnrolledLoss)
    (output,) = module.graph.find_nodes(op="output")
    results = list(output.args[0])
    positions = [i for i, each in enumerate(results) if isinstance(each, fx.Node) and each.target == WITHHELD]
    output.args = (tuple(each for i, each in enumerate(results) if i not in positions),)
    for node in module.graph.find_nodes(op="get_attr", target=WITHHELD):
        module.graph.erase_node(node)
    module.recompile()
    stand_in = WithheldLogits(max(counts.values()), 'compile with numerics="bitwise", which keeps the loss whole')
    return ChunkedGraph(module, [(i, stand_in) for i in positions], is_likely)


def _made_bytes(graph: fx.Graph) -> int:
    """Return the bytes of all values that a captured forward makes."""
    values = [node.meta.get("example_value") for node in graph.nodes if node.op != "placeholder"]
    tensors = [each for each in values if isinstance(each, Tensor) and each.layout == torch.strided]
    return sum({id(each.untyped_storage()): hinted(each.untyped_storage().nbytes()) for each in tensors}.values())


def _may_be_chunked(head: Head) -> bool:
    """Return whether the dtype holds unscaled gradients, and chunks take less than the whole.

    A whole loss has logits and their gradient at once. Chunks have the sum of the weight's gradient, which a whole loss
    comes to only later and in the weight's dtype, and one addend beside it.
    """
    if head.linear.meta["example_value"].dtype == torch.float16:
        return False
    weight: Tensor = linear_arguments(head.linear)[1].meta["example_value"]
    return not weight.requires_grad or head.logits_bytes > 2 * weight.numel()


@torch.library.custom_op("remat::add_to", mutates_args=("total",), tags=[torch.Tag.flexible_layout])
def _add_to(total: Tensor, part: Tensor) -> None:
    """Add in a separate kernel: fused additions would keep the parts of all chunks until the last."""
    total.add_(part)


@torch.library.custom_op("remat::rows_after", mutates_args=(), tags=[torch.Tag.flexible_layout])
def _rows_after(rows: Tensor, first: int, end: int, made: Sequence[Tensor]) -> Tensor:
    """Copy rows once the chunk before is done. Otherwise a compiler may make the logits of all chunks first.

    Its losses are among what is made: computed later, they would keep its logits until then.
    """
    return rows[first:end].clone(memory_format=torch.contiguous_format)  # a compiler may lay rows out in any order


@_rows_after.register_fake
def _(rows: Tensor, first: int, end: int, made: Sequence[Tensor]) -> Tensor:
    return rows.new_empty((end - first, *rows.shape[1:]))


class _Sum(RunningSum):
    def add(self, part: Tensor) -> None:
        if self.total is None:
            self.total = part.to(self.dtype, copy=True)
        else:
            _add_to(self.total, part)


def _cuts(rows: int | torch.SymInt, slices: int) -> Iterable[slice]:
    """Cut rows into chunks: an open number of them into as many as at present, equal ones and a rest."""
    if isinstance(rows, int):
        return slices_of(rows, slices)
    count = len(list(slices_of(hinted(rows), slices)))
    borders = [i * (rows // count) for i in range(count)]
    return map(slice, borders, [*borders[1:], rows])


class UnrolledLoss(ChunkedLoss):
    """A chunked loss for a compiler to trace: a chunk is not cut into pieces, since its kernels fuse."""

    def run(self, given: HeadInputs, wanted: tuple[bool, bool, bool]) -> tuple[Tensor, Tensor | None, Sums]:
        """Compute the loss of every row, and gradients where they are wanted, as `ChunkedLoss.run` does."""
        for_rows, for_weight, for_bias = wanted
        rows, labels = given.rows, given.labels
        weight, bias = self.cast(given.weight), None if given.bias is None else self.cast(given.bias)
        losses, of_rows, by_row = list[Tensor](), list[Tensor](), None
        of_weight, of_bias = _Sum(given.weight.dtype), _Sum(given.weight.dtype)
        for cut in _cuts(rows.shape[0], self.slices):
            made = [each for each in (*losses[-1:], *of_rows[-1:], of_weight.total, of_bias.total) if each is not None]
            here = _rows_after(rows, cut.start, cut.stop, made)
            logits = F.linear(here, weight, bias)
            opened = self.opened(logits.detach()).requires_grad_()
            with torch.enable_grad():
                found = self.row_losses(opened, labels[cut], *given.constants)
            if by_row is None:
                by_row = self.derivatives(found.new_empty(rows.shape[0]), labels, given.numbers)
            (of_opened,) = torch.autograd.grad(found, opened, by_row[cut])
            of_logits = of_opened.to(logits.dtype)
            losses.append(found.detach())
            if for_rows:
                of_rows.append(torch.mm(of_logits, weight))
            if for_weight:
                of_weight.add_product(of_logits.t(), here)
            if for_bias:
                of_bias.add(of_logits.sum(0))
        sums = Sums(of_weight.total, of_bias.total)
        return torch.cat(losses), torch.cat(of_rows) if for_rows else None, sums
