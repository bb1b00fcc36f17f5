"""Rows: runs of nodes in a captured graph that act on every row by itself, and are wide inside.

A row is one token, or one sample. What a transformer does between two attentions is such a run: a norm, products that
make each row several times wider, an activation, a product that makes it narrow again, the residual added. Run slice by
slice, of what is wide only a slice ever exists. Rules for what a run is, by analysis of the graph:

Rule 1  All its nodes have a rule for acting by row: products with weights, what acts on every number by itself, norms
        and means over the last dimension, splits of it, changes of dtype, and views that leave it alone.
        What has no rule (attention, a dropout that is on, batch normalisation) ends it. So does a write in place, and a
        border of a context (autocast, no_grad).
Rule 2  It takes one value that has rows, contiguous. All else that it takes is given to the graph, and made by nothing
        that learns: weights of products, and values with one number a column. What it takes it keeps for backward: so
        the value is not written to later, nor does the graph give it out, and what is beside it is never written to.
Rule 3  It gives one value to the nodes after it, of the same leading dimensions as the value that it takes, contiguous.
Rule 4  It holds a product that widens, and all that reads what is wide. It begins as early as Rules 1 to 3 allow
        without another product, and ends as soon as they do, or behind what follows and need not be made again for
        backward: the residual's addition.
Rule 5  Where the value that it takes is read after it too, by whatever name, it reads it once: the gradients of three
        readings are added up in another order if two of them are inside.
Rule 6  What a product takes as its weight or bias, nothing else in it reads: under autocast it is cast for products.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from remat.capture.anchors import storage_key, writes
from remat.capture.nodes import bracket_of, captured_nodes, may_draw
from remat.chunking.heads import CASTS, COPIES, FLATTENINGS, kind_of, linear_arguments, size_hint, tensor_of
from remat.evaluation.graph import CHUNKED_ROWS

PRODUCTS = frozenset({"linear", "addmm"})
_POINTWISE = """
    add sub mul truediv div neg pow square sqrt rsqrt exp abs clamp tanh sigmoid silu gelu relu relu6 leaky_relu elu
    mish softplus hardswish
"""
POINTWISE = frozenset(_POINTWISE.split())
VALUE_FREE = frozenset({"add", "sub", "neg", *CASTS, *FLATTENINGS, *COPIES})  # their derivatives ask for no value
_NORMS = frozenset({"layer_norm", "rms_norm"})
SPLITS = frozenset({"chunk", "split"})


@dataclasses.dataclass(frozen=True)
class RowRun:
    """Consecutive nodes that act by row.

    nodes   in the graph's order; the last one makes the result        given  the input value with rows
    beside  its other inputs: weights and biases, each once
    """

    nodes: tuple[fx.Node, ...]
    given: fx.Node
    beside: tuple[fx.Node, ...]

    @property
    def result(self) -> fx.Node:
        return self.nodes[-1]

    @property
    def products(self) -> list[fx.Node]:
        return [node for node in self.nodes if kind_of(node) in PRODUCTS]

    @property
    def rows(self) -> int:
        """The number of rows; for open sizes, that of the trace."""
        return _rows_of(self.given)

    @property
    def widest(self) -> int:
        """Numbers in a row at its widest."""
        return max(map(_width, self.nodes))

    @property
    def operations(self) -> float:
        """Multiplications and additions of its products, forward and backward."""
        return sum(6.0 * self.rows * _width(node) * _width(_rows_argument(node)) for node in self.products)

    @property
    def signature(self) -> tuple[Any, ...]:
        """A key that runs share if they compute the same function of other numbers."""
        values = (node.meta["example_value"] for node in (self.given, *self.beside))
        return self.text, *((tuple(map(size_hint, value.shape)), value.dtype) for value in values)

    @property
    def text(self) -> str:
        """A text of the run's nodes, which tells runs apart."""
        return f"{CHUNKED_ROWS}{','.join(kind_of(node) for node in self.nodes if not is_view(node))})"

    @property
    def unmade(self) -> set[fx.Node]:
        """Products whose values no derivative needs: backward does not compute them again."""
        asked: set[fx.Node] = set()
        inside = set(self.nodes)
        for node in reversed(self.nodes):
            users = [user for user in node.users if user in inside]
            if any(user in asked or not _is_value_free(user) for user in users):
                asked.add(node)
        return {node for node in self.products if node not in asked}


def find_row_runs(graph_module: fx.GraphModule) -> list[RowRun]:
    """Find the runs of a captured graph, in order; no two share a node."""
    found, nodes = [], captured_nodes(graph_module)
    place = {node: i for i, node in enumerate(nodes)}
    for stretch in _stretches(nodes):
        end = 0
        while (run := _next_run(stretch, end, place)) is not None:
            found.append(run)
            end = stretch.index(run.result) + 1
    writers = [
        (i, {key for source in n.all_input_nodes for key in _storages(source)})
        for n, i in place.items()
        if _may_write(n)
    ]
    given_out = {key for source in graph_module.graph.output_node().all_input_nodes for key in _storages(source)}
    return [run for run in found if not _is_written_to(run, place[run.nodes[0]], writers, given_out)]


def is_view(node: fx.Node) -> bool:
    """Return whether `node` changes neither rows nor their width and order: a view, or a dropout that is off."""
    return kind_of(node) in FLATTENINGS or "dropout" in kind_of(node)


def product_weights(node: fx.Node) -> tuple[Any, Any]:
    """Return (weight, bias) of a product."""
    if kind_of(node) == "addmm":
        bias, _, weight = node.args
        return weight, bias
    _, weight, bias = linear_arguments(node)
    return weight, bias


def _stretches(nodes: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
    """Yield longest runs of nodes that all act by row, on equally many rows."""
    stretch: list[fx.Node] = []
    rows: Any = None
    for node in nodes:
        found = _rows_of(node) if _acts_by_row(node) else None
        if found is None or (stretch and found not in (rows, 0)):
            if stretch:
                yield stretch
            stretch, rows = [], None
        if found is not None:
            stretch.append(node)
            rows = found or rows
    if stretch:
        yield stretch


def _next_run(stretch: Sequence[fx.Node], begin: int, place: Mapping[fx.Node, int]) -> RowRun | None:
    """Find the first run of `stretch` from its node `begin` on. (Rules 2 to 6)"""
    for first in range(begin, len(stretch)):
        if kind_of(stretch[first]) not in PRODUCTS or (hull := _wide(stretch, first)) is None:
            continue
        low = first
        while low > begin and kind_of(stretch[low - 1]) not in PRODUCTS:
            low -= 1
        runs = (_shortest(stretch, a, hull, place) for a in range(low, first + 1))
        best = max((run for run in runs if run is not None), key=lambda run: len(run.nodes), default=None)
        if best is not None:
            return best
    return None


def _shortest(stretch: Sequence[fx.Node], begin: int, end: int, place: Mapping[fx.Node, int]) -> RowRun | None:
    """Return the shortest run from `begin` past `end`, with following nodes that backward need not compute again."""
    found: RowRun | None = None
    while end <= len(stretch) and (found is None or _is_value_free(stretch[end - 1])):
        if found is None or not _renames(stretch[end - 1]):
            found = _run(stretch[begin:end], place) or found
        end += 1
    return found


def _wide(stretch: Sequence[fx.Node], first: int) -> int | None:
    """Return the end of the readers of the wide values of product `first`; None if it does not widen."""
    width = _width(_rows_argument(stretch[first]))
    if _width(stretch[first]) <= width:
        return None
    where = {node: i for i, node in enumerate(stretch)}
    end, i = first + 1, first
    while i < end:
        node = stretch[i]
        if _width(node) > width:
            readers = [user for user in node.users if user.op != "output"]
            if any(user not in where for user in readers) or len(readers) < len(node.users):
                return None  # a wide value leaves the stretch
            end = max([end, *(where[user] + 1 for user in readers)])
        i += 1
    return end


def _run(nodes: Sequence[fx.Node], place: Mapping[fx.Node, int]) -> RowRun | None:
    """Make a run of `nodes`, if they are one. (Rules 2, 3, 5 and 6)"""
    inside = set(nodes)
    taken = dict.fromkeys(source for node in nodes for source in _sources(node) if source not in inside)
    products = [node for node in nodes if kind_of(node) in PRODUCTS]
    weights = {each for node in products for each in product_weights(node) if each is not None}
    beside = [source for source in taken if _is_beside(source, weights)]
    given = [source for source in taken if source not in beside]
    left = [node for node in nodes if any(user not in inside for user in node.users)]
    if len(given) != 1 or left != [nodes[-1]] or is_view(nodes[0]):
        return None
    value, result = tensor_of(given[0]), tensor_of(nodes[-1])
    if value is None or result is None or value.dim() < 2 or not value.is_floating_point():
        return None
    if _leading(value) != _leading(result) or not (_is_contiguous(value) and _is_contiguous(result)):
        return None
    if _is_read_later(given[0], inside, place) and _readings(given[0], inside) > 1:
        return None
    if any(_reads_otherwise(node, weights) for node in nodes):
        return None
    return RowRun(tuple(nodes), given[0], tuple(beside))


def _is_beside(source: fx.Node, weights: set[fx.Node]) -> bool:
    """Return whether an input has no rows: a product's weight, or one number per column, input to the graph."""
    value = tensor_of(source)
    return value is not None and _is_given(source) and (source in weights or value.dim() <= 1)


def _is_given(source: Any) -> bool:
    """Return whether a value enters the graph without a history that needs its gradient."""
    value = tensor_of(source)
    if value is None or source.op not in ("placeholder", "get_attr"):
        return False
    return value.is_leaf or not value.requires_grad


def _is_read_later(given: fx.Node, inside: set[fx.Node], place: Mapping[fx.Node, int]) -> bool:
    """Return whether the value of `given`, or a possible alias of it, is read after the nodes inside."""
    first = min(place[node] for node in inside)
    while given.args and isinstance(given.args[0], fx.Node) and _gives_on(given, given.args[0]):
        given = given.args[0]
    names, ahead = set[fx.Node](), [given]
    while ahead:
        names.add(name := ahead.pop())
        ahead += [user for user in name.users if user not in inside and _gives_on(user, name)]
    readers = {user for name in names for user in name.users} - inside - names
    return any(user.op == "output" or place.get(user, first) > first for user in readers)


def _readings(node: fx.Node, inside: set[fx.Node]) -> int:
    """Count the reads of the value of `node` by nodes `inside` that autograd sees; views do not count."""
    count = 0
    for user in inside.intersection(node.users):
        if _gives_on(user, node):
            count += _readings(user, inside)
        else:
            times = 2 if kind_of(user) == "rms_norm" else 1  # which on some devices is a square and a product
            count += times * sum(each is node for each in tree_leaves((user.args, user.kwargs)))
    return count


def _gives_on(user: fx.Node, node: fx.Node) -> bool:
    """Return whether `user` may return `node` itself: a cast to its own dtype, a dropout that is off."""
    given, found = tensor_of(node), tensor_of(user)
    may = kind_of(user) in CASTS | COPIES or "dropout" in kind_of(user)
    return may and given is not None and found is not None and found.dtype == given.dtype


def _reads_otherwise(node: fx.Node, weights: set[fx.Node]) -> bool:
    """Return whether `node` takes a product's weight or bias as anything else. (Rule 6)"""
    if kind_of(node) in PRODUCTS:
        return _rows_argument(node) in weights
    return not weights.isdisjoint(node.all_input_nodes)


def _is_written_to(run: RowRun, first: int, writers: Sequence[tuple[int, set[int]]], given_out: set[int]) -> bool:
    """Return whether tensors that the run keeps may change before its backward. (Rule 2)

    first      the place of its first node
    writers    (place, input storages) of every node that may write
    given_out  storages that the graph returns
    """
    rows, beside = _storages(run.given), {key for node in run.beside for key in _storages(node)}
    later = (taken for place, taken in writers if place >= first)
    return not rows.isdisjoint(given_out.union(*later)) or any(not beside.isdisjoint(taken) for _, taken in writers)


def _may_write(node: fx.Node) -> bool:
    """Return whether a node may write to one of its inputs in any way."""
    if writes(node) or node.kwargs.get("out") is not None or kind_of(node).endswith("_"):
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _storages(node: Any) -> set[int]:
    value = tensor_of(node)
    return set() if value is None else {storage_key(value)}


def _leading(value: torch.Tensor) -> list[str]:
    """Return all sizes but the last, open ones by their names."""
    return list(map(str, value.shape[:-1]))


def _is_contiguous(value: torch.Tensor) -> bool:
    """Return `Tensor.is_contiguous` without closing open sizes."""
    expected = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if size_hint(size) != 1 and size_hint(stride) != expected:
            return False
        expected *= size_hint(size)
    return True


def _sources(node: fx.Node) -> list[fx.Node]:
    """Return the inputs of a node, without the sizes of a view."""
    return [node.args[0]] if is_view(node) else node.all_input_nodes  # type: ignore[list-item]


def _acts_by_row(node: fx.Node) -> bool:
    """Return whether a node acts on every row by itself. (Rule 1)"""
    kind, value = kind_of(node), tensor_of(node, first=True)
    if value is None or not value.is_floating_point() or bracket_of(node) or writes(node) or may_draw(node):
        return False
    if kind in PRODUCTS:
        return _is_product(node)
    if not node.args or not all(map(_has_no_rows_or_all, node.all_input_nodes)):
        return False
    if kind not in POINTWISE and not isinstance(node.args[0], fx.Node):
        return False
    if any(isinstance(each, torch.memory_format) for each in (*node.args, *node.kwargs.values())):
        return False
    if kind in _NORMS:
        sizes = node.args[1] if len(node.args) > 1 else node.kwargs.get("normalized_shape")
        return isinstance(sizes, (tuple, list, torch.Size)) and len(sizes) == 1
    if kind == "mean":
        dims = node.args[1:2] or [node.kwargs.get("dim")]
        return dims[0] in (-1, [-1], (-1,)) and node.kwargs.get("keepdim") is True
    if is_view(node):
        return _width(node) == _width(node.args[0])
    if kind in SPLITS:
        dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
        given = tensor_of(node.args[0])
        return given is not None and dim in (-1, given.dim() - 1)
    if kind == "getitem":
        return _takes_part(node)
    if kind in CASTS:
        return all(not isinstance(each, fx.Node) for each in (*node.args[1:], *node.kwargs.values()))
    writes_or_mixes = node.kwargs.get("out") is not None or any(each is True for each in node.args[1:])  # inplace
    return kind in POINTWISE | COPIES and not writes_or_mixes


def _has_no_rows_or_all(source: fx.Node) -> bool:
    """Return whether an input of a node is one number for each column, or made by the graph.

    An embedding of positions is neither: it may have as many rows as a small batch has.
    """
    value = tensor_of(source, first=True)
    return value is None or value.dim() <= 1 or source.op not in ("placeholder", "get_attr")


def _is_product(node: fx.Node) -> bool:
    if kind_of(node) == "addmm" and (node.kwargs or len(node.args) != 3):
        return False
    (weight, bias), made = product_weights(node), tensor_of(_rows_argument(node))
    if not _is_given(weight) or not (bias is None or _is_given(bias)):
        return False
    dimensions = [0 if each is None else each.dim() for each in map(tensor_of, (weight, bias))]
    # Of rows with gaps between them, a product with a bias rounds otherwise in three dimensions than in two.
    return made is not None and made.dim() >= 2 and dimensions in ([2, 0], [2, 1]) and _is_contiguous(made)


def _rows_argument(product: fx.Node) -> Any:
    return product.args[1] if kind_of(product) == "addmm" else linear_arguments(product)[0]


def _takes_part(node: fx.Node) -> bool:
    """Return whether an indexing takes one of several parts, or a slice of the last dimension."""
    given, index = node.args
    if isinstance(given, fx.Node) and kind_of(given) in SPLITS:
        return isinstance(index, int)
    if not isinstance(index, tuple) or len(index) != 2 or index[0] is not Ellipsis or not isinstance(index[1], slice):
        return False
    return all(isinstance(each, int | None) for each in (index[1].start, index[1].stop, index[1].step))


def _renames(node: fx.Node) -> bool:
    """Return whether a node returns its input's numbers, in another shape or dtype: it belongs to what follows."""
    return is_view(node) or kind_of(node) in CASTS | COPIES


def _is_value_free(node: fx.Node) -> bool:
    """Return whether the derivative of a node needs no value of its inputs."""
    kind = kind_of(node)
    if kind in ("mul", "truediv", "div"):  # by a number; a number divided by a value is another matter
        numbers = [not isinstance(each, fx.Node) for each in node.args]
        return not node.kwargs and (numbers == [False, True] or (kind == "mul" and numbers == [True, False]))
    return kind in VALUE_FREE or "dropout" in kind


def _rows_of(node: fx.Node) -> int:
    """Return the number of rows in the value of a node; 0 if it is computed from weights alone."""
    found = tensor_of(node, first=True)
    return 0 if found is None or found.dim() < 2 else _count(found)


def _count(value: torch.Tensor) -> int:
    return math.prod(map(size_hint, value.shape[:-1]))


def _width(node: Any) -> int:
    found = tensor_of(node, first=True)
    return 0 if found is None or found.dim() == 0 else size_hint(found.shape[-1])
