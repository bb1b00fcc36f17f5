"""Identity: whether a captured graph is the one that a plan was made for, whatever version spelled it.

Two versions of a library capture one model differently: an operator has another name, a view more or less stands
between two others, a table of angles is multiplied in another way. A plan is about bytes and time, and none of that
changes them. So the nodes of a graph call fall into two kinds.

*Anchors* are what costs and is kept: what is computed out of parameters, what changes the state of a module, what
draws random numbers. Two graphs are the same where their anchors are, one by one: operator, module, the anchors whose
values they take, and how many tensors they take. (An attention that is given a mask takes one more.)

All others are *loose*: views, sizes, scalars, brackets, and what is computed out of no parameter (masks, positions).
They need not be the same. Copies that depend on the strides of what they are given (`contiguous`,
`reshape`, `to`) are loose too, because at a batch of one they are views.

At the planned batch, what nodes allocate is compared as well: anchors one by one, loose nodes by module. Where this
graph's allocate more than the planned one's (twice the heads, another dtype), it is said by how many bytes.

What an anchor is must not depend on the batch, on what is frozen or on the mode: a plan may be applied at a smaller
batch, with fewer parameters trained, with a dropout turned off. Whether an anchor draws is compared one way: a plan
that was made without a dropout has no room for its mask.

Hashes of names and wiring were rejected: they say that two graphs differ and not where, and every release changes some.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from remat.errors import PlanMismatch

LOOSE_BYTES = 1024  # of loose nodes' results, those below are not counted: scalars, counters

# Names of one operator.
_SYNONYMS = {
    "radd": "add",
    "iadd": "add_",
    "subtract": "sub",
    "isub": "sub_",
    "multiply": "mul",
    "rmul": "mul",
    "imul": "mul_",
    "truediv": "div",
    "divide": "div",
    "true_divide": "div",
    "rtruediv": "rdiv",
    "itruediv": "div_",
    "negative": "neg",
    "absolute": "abs",
    "ipow": "pow_",
    "imatmul": "matmul_",
    "float": "to",
    "half": "to",
    "bfloat16": "to",
    "type": "to",
    "type_as": "to",
    "equal": "eq",
    "not_equal": "ne",
    "less": "lt",
    "greater": "gt",
    "less_equal": "le",
    "greater_equal": "ge",
    "concat": "cat",
    "concatenate": "cat",
    "clip": "clamp",
    "and": "bitwise_and",
    "and_": "bitwise_and",
    "iand": "bitwise_and_",
    "or": "bitwise_or",
    "or_": "bitwise_or",
    "ior": "bitwise_or_",
    "xor": "bitwise_xor",
    "ixor": "bitwise_xor_",
    "invert": "bitwise_not",
}


def canonical(called: str) -> str:
    """Return one spelling of the callee of a captured node, for function, method and operator alike."""
    name = called.removeprefix("call_method:").replace(" ", "_")
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
    return _SYNONYMS.get(name, name)


@dataclasses.dataclass(frozen=True)
class NodeId:
    """Identifies a node of a graph call.

    op      canonical operator             module   path of the module that it is in
    takes   ordinals of the nodes whose values it takes
    anchor  it costs or keeps something    tensors  number of its tensor inputs, parameters included
    draws   it may draw random numbers     made_bytes  bytes that it allocates (of anchors, 0 where not known)
    """

    op: str
    module: str
    takes: tuple[int, ...]
    anchor: bool
    tensors: int = 0
    draws: bool = False
    made_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.op} in {self.module or 'the model'}"


Identity = tuple[NodeId, ...]  # the nodes of one graph call, in order


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first anchor in which two graphs differ; None for a graph that has ended before it.

    position  number of equal anchors before it
    writes_state  whether what was found writes into the model's state, and is no anchor: `position` is its ordinal
    """

    position: int
    planned: NodeId | None
    found: NodeId | None
    writes_state: bool = False

    def __str__(self) -> str:
        if self.found is None:
            return f"it ends where {self.planned} was planned (operator {self.position})"
        if self.writes_state:
            return f"{self.found} (operator {self.position}) changes a number of the model, and did not when planned"
        if self.planned is None:
            return f"it goes on with {self.found} (operator {self.position}) where the planned one ends"
        before = f"operator {self.position} is {self.found}"
        if str(self.planned) != str(self.found):
            return f"{before}, and was {self.planned} when planned"
        if self.planned.tensors != self.found.tensors:
            return f"{before}, given {self.found.tensors} tensors, and was given {self.planned.tensors} when planned"
        if self.found.draws and not self.planned.draws:
            return f"{before}, which draws random numbers, and did not when planned"
        return f"{before}, and takes values of other operators than when planned"


@dataclasses.dataclass(frozen=True)
class Fit:
    """The places of a planned graph call's nodes in another graph: `to[i]`, or -1 if node i has no counterpart.

    more_bytes  upper bound on the bytes that nodes allocate and did not when planned
    more_of     the node that allocates most of that
    """

    to: tuple[int, ...]
    count: int
    more_bytes: int = 0
    more_of: NodeId | None = None

    @property
    def is_exact(self) -> bool:
        """Whether the two graphs are the same, node by node."""
        return self.to == tuple(range(self.count))

    def positions(self, planned: int) -> range:
        """Return the positions here that lie between nodes `planned`-1 and `planned`, nearest to the former first.

        There are several if nodes that only this graph has stand between the two.
        """
        before = next((self.to[i] for i in range(planned - 1, -1, -1) if self.to[i] >= 0), -1)
        after = next((self.to[i] for i in range(planned, len(self.to)) if self.to[i] >= 0), self.count)
        return range(before + 1, after + 1)


def compare(planned: Identity, found: Identity, *, same_shapes: bool = True) -> Fit | Difference:
    """Compare two graphs: return how `found` fits the graph `planned`, or their first difference.

    same_shapes  whether both are of one batch; otherwise loose nodes are compared by number, and nothing by bytes
    """
    ours, theirs = _anchors(planned), _anchors(found)
    for position, ((i, one), (j, other)) in enumerate(zip(ours, theirs, strict=False)):
        if one != other or (found[j].draws and not planned[i].draws):
            return Difference(position, planned[i], found[j])
    if len(ours) != len(theirs):
        position = min(len(ours), len(theirs))
        return Difference(
            position,
            planned[ours[position][0]] if len(ours) > position else None,
            found[theirs[position][0]] if len(theirs) > position else None,
        )
    to = _aligned(planned, [i for i, _ in ours], found, [j for j, _ in theirs])
    more = _more(planned, found, same_shapes)
    if same_shapes:
        more += [
            (found[j].made_bytes - planned[i].made_bytes, found[j])
            for (i, _), (j, _) in zip(ours, theirs, strict=True)
            if 0 < planned[i].made_bytes < found[j].made_bytes
        ]
    return Fit(to, len(found), sum(size for size, _ in more), max(more, default=(0, None), key=lambda m: m[0])[1])


def key_of(identity: Identity, written: Collection[int] = ()) -> str:
    """Return a name for a graph call, the same for every equal graph, however spelled.

    written  ordinals of loose nodes that count too, since they write into the state of a model
    """
    anchors = _anchors(identity)
    keys: list[Any] = [key for _, key in anchors]
    for i in written:
        keys.append((identity[i].op, identity[i].module, sum(j < i for j, _ in anchors)))
    return hashlib.sha256(repr(keys).encode()).hexdigest()[:16]


_Key = tuple[str, str, int, tuple[int, ...]]


def _anchors(identity: Identity) -> list[tuple[int, _Key]]:
    """Return (ordinal, compared properties) of every anchor; edges connect anchors, through any loose nodes between."""
    sources: list[frozenset[int]] = []
    found: list[tuple[int, _Key]] = []
    for i, node in enumerate(identity):
        taken = frozenset[int]().union(*(sources[j] for j in node.takes))
        if node.anchor:
            found.append((i, (node.op, node.module, node.tensors, tuple(sorted(taken)))))
            taken = frozenset((len(found) - 1,))
        sources.append(taken)
    return found


def _aligned(planned: Identity, ours: Sequence[int], found: Identity, theirs: Sequence[int]) -> tuple[int, ...]:
    """Align anchors by number, and loose nodes between the same two anchors by operator and module."""
    to = [-1] * len(planned)
    begin, start = 0, 0
    for i, j in zip((*ours, len(planned)), (*theirs, len(found)), strict=True):
        left = [(node.op, node.module) for node in planned[begin:i]]
        right = [(node.op, node.module) for node in found[start:j]]
        if left == right:
            to[begin:i] = range(start, j)
        else:
            for block in difflib.SequenceMatcher(None, left, right, autojunk=False).get_matching_blocks():
                to[begin + block.a : begin + block.a + block.size] = range(
                    start + block.b, start + block.b + block.size
                )
        if i < len(planned):
            to[i] = j
        begin, start = i + 1, j + 1
    return tuple(to)


def _more(planned: Identity, found: Identity, same_shapes: bool) -> list[tuple[int, NodeId]]:
    """List (bytes, node) of loose nodes in `found` that allocate more than those planned in the same module."""
    room: dict[str, list[int]] = {}
    for node in planned:
        if not node.anchor and node.made_bytes >= LOOSE_BYTES:
            room.setdefault(node.module, []).append(node.made_bytes)
    for sizes in room.values():
        sizes.sort()
    more = []
    for node in sorted((node for node in found if not node.anchor), key=lambda node: -node.made_bytes):
        if node.made_bytes < LOOSE_BYTES:
            break
        planned_bytes = room[node.module].pop() if room.get(node.module) else 0
        extra = node.made_bytes - planned_bytes if same_shapes or not planned_bytes else 0
        if extra > 0:
            more.append((extra, node))
    return more


# As text, a line a node, for the plan file


def to_lines(identity: Identity) -> list[str]:
    """Write `identity` as lines for people, which `from_lines` reads back."""
    return [
        f"{'~' if node.draws else '*' if node.anchor else '.'} {node.op} {','.join(map(str, node.takes)) or '-'} "
        f"{node.tensors} {node.made_bytes} {node.module}"
        for node in identity
    ]


def from_lines(lines: Sequence[str]) -> Identity:
    """Read the result of `to_lines`. Raises ValueError for anything else."""
    return tuple(map(_from_line, lines))


def _from_line(line: str) -> NodeId:
    mark, op, takes, tensors, made_bytes, module = line.split(" ", 5)
    if mark not in "~*.":
        raise ValueError(f"{line!r} is no node")
    ordinals = () if takes == "-" else tuple(map(int, takes.split(",")))
    return NodeId(op, module, ordinals, mark != ".", int(tensors), mark == "~", int(made_bytes))


@dataclasses.dataclass(frozen=True)
class GraphMismatch:
    """Why a graph is not that of a graph call of the plan; without `difference`, the place is not known."""

    call: int
    nodes: int
    difference: Difference | None = None

    def __str__(self) -> str:
        where = f"graph call {self.call}, {self.nodes} nodes"
        return f"({where})" if self.difference is None else f"({where}): {self.difference}"


def position_of(planned: int, fit: Fit, cuts: Collection[int] | None) -> int:
    """Return the position of a border here. (Rule 1) In the same graph, without `cuts`, it is unchanged."""
    candidates = fit.positions(planned)
    for position in candidates:
        if cuts is None or position in cuts:
            return position
    raise PlanMismatch(
        f"no region may begin or end at nodes {candidates.start} to {candidates.stop - 1} of this graph, where one of "
        "the plan does; make a plan for this model."
    )


@dataclasses.dataclass(frozen=True)
class Places:
    """The places of a plan's nodes in the graph calls at hand; by default, as planned.

    fits    fits of the known calls, by number
    cuts    positions of each call where regions may begin or end, None if that does not matter
    firsts  (call, ordinal) of nodes that begin a region: they represent a border
    """

    fits: Mapping[int, Fit] = dataclasses.field(default_factory=dict)
    cuts: Mapping[int, Collection[int] | None] = dataclasses.field(default_factory=dict)
    firsts: Collection[tuple[int, int]] = ()

    def node(self, call: int, ordinal: int) -> int:
        """Return the ordinal of a node.

        Raises PlanMismatch if it has no counterpart.
        """
        if call not in self.fits:
            return ordinal
        if (call, ordinal) in self.firsts:
            return position_of(ordinal, self.fits[call], self.cuts[call])
        found = self.fits[call].to[ordinal]
        if found < 0:
            raise PlanMismatch("a node whose value the plan brings to the host is not in this graph; plan again.")
        return found

    def border(self, call: int, ordinal: int) -> int:
        """Return the node before the border that is planned behind a node."""
        if call not in self.fits:
            return ordinal
        return position_of(ordinal + 1, self.fits[call], self.cuts[call]) - 1
