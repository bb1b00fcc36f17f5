"""Causal masks: whether the mask of `nn.TransformerEncoder` or `nn.TransformerDecoder` is a causal one.

Where `is_causal=` is not given, these modules compare their mask with a causal one, and choose a kernel by the answer.
Dynamo breaks its graph there, in code of torch, and the whole stack would run outside of every graph.

Rule 1  In a capture the answer is a constant of the graph, for a mask that the forward makes of constants, that is a
        buffer of the model or a part of one, or an argument of the forward. For others the graph breaks as ever: also
        where the forward writes to a mask, or draws it, since the values of such a one are not what its node computes.
Rule 2  A buffer that was written to, and an argument of the other kind, are traced anew.
Rule 3  While planning no mask has values. One that `batch` makes is made once more, for one sample; any other is taken
        for a causal one. The numbers of training are right for any mask, but another kernel may take other bytes.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import transformer
from torch.utils.weak import WeakIdKeyDictionary

from remat._torch.dynamo import FirstNode, as_constant, compares_masks, input_of
from remat._torch.training import without_modes
from remat.capture.anchors import writes
from remat.capture.generators import generators_kept
from remat.capture.nodes import may_draw
from remat.capture.writing import storages
from remat.shared import Shared

_compared = compares_masks()  # before another stands in its place

_made = WeakIdKeyDictionary()  # fake square tensor of a batch -> how to make it for real, or None

Named = Mapping[str, torch.Tensor]  # the tensors among a forward's arguments
Holds = Callable[[Named], bool]  # whether an answer holds for another call


def note_batch(fakes: Sequence[torch.Tensor], make: Callable[[], Sequence[torch.Tensor]]) -> None:
    """Note the fake tensors of a batch, and how to make them for real with one sample. (Rule 3)"""

    @functools.cache
    def made() -> Sequence[torch.Tensor]:
        try:
            with without_modes(), generators_kept():
                found = make()
        except Exception:  # of a batch that is never of one sample, say
            found = ()
        return found if len(found) == len(fakes) else ()

    for place, fake in enumerate(fakes):
        if fake.dim() == 2 and fake.shape[0] == fake.shape[1]:
            _made[fake] = lambda place=place: made()[place] if made() else None


def _taken(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Compare as torch does, seen by no mode; a mask without values is causal if its shape allows. (Rule 3)"""
    if is_causal is None and isinstance(mask, FakeTensor):
        length, made = mask.size(-2) if size is None else size, _made.get(mask)
        real = None if made is None else made()
        if real is None or real.size() != mask.size():
            return tuple(mask.size()) == (length, length)
        mask = real
    with without_modes():
        return _compared(mask, is_causal, size)


_answered = as_constant(lambda *args, **kwargs: _taken(*args, **kwargs))  # apart from `_taken`, which stays as it is


@contextlib.contextmanager
def _taken_instead() -> Iterator[None]:
    with mock.patch.object(transformer, _compared.__name__, _taken):
        yield


causal_masks = Shared(_taken_instead)  # for untraced code on fakes, and where kernels are compared


def instead(
    function: Callable[..., Any], first: FirstNode, given: Named, note: Callable[[Holds], None]
) -> Callable[..., Any] | None:
    """Return the function to trace in place of `function`; None to trace it itself. (Rule 1)

    given  the arguments of the forward that is traced        note  takes a check that the answer holds for another call
    """
    if function not in (_compared, _taken):
        return None
    node = first()
    if node is None:
        return _compared
    behind = _behind(node)
    if any(map(may_draw, behind)) or not storages(behind).isdisjoint(_written(node.graph)):
        return _compared
    for source, tensor in (input_of(each) for each in behind if each.op == "placeholder"):
        if "._buffers[" in source:
            note(_unwritten(tensor))
        elif node.op == "placeholder" and (name := next((k for k, each in given.items() if each is tensor), None)):
            note(_as_before(name, tensor))
        else:
            return _compared
    return _answered


def _behind(node: fx.Node) -> list[fx.Node]:
    """Return `node` and all that it is computed of."""
    found = {node: None}
    waiting = [node]
    while waiting:
        new = [each for each in waiting.pop().all_input_nodes if each not in found]
        found.update(dict.fromkeys(new))
        waiting += new
    return list(found)


def _written(graph: fx.Graph) -> set[int]:
    """Return the storages that nodes of a graph write to by what they say, or by `out=`."""
    writers = (node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output"))
    return storages([(node.args, node.kwargs) for node in writers if writes(node) or "out" in node.kwargs])


def _unwritten(buffer: torch.Tensor) -> Holds:
    weakly, version = weakref.ref(buffer), buffer._version
    return lambda given: (tensor := weakly()) is not None and tensor._version == version


def _as_before(name: str, mask: torch.Tensor) -> Holds:
    was = _taken(mask)
    return lambda given: name in given and _taken(given[name]) is was
