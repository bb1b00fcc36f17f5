"""Attention masks: let transformers choose, while traced, the mask that it chooses in eager mode.

In eager mode transformers looks at the data: where nothing is padded or packed it passes no mask, which is what lets
attention use its flash kernel. While traced, and on fake tensors, it cannot look, and builds an explicit mask: another
kernel, and other bytes. So remat looks before the trace, at the batch that the forward is given, and answers in its
place. On a GPU that waits for the device once per forward, as transformers does in eager mode. The answers are given
to Dynamo as it traces for us (`TracedMasks`); transformers itself stays as it is, for every thread and every compiler.

Rule 1  What is known of a batch is part of what a trace was made for: the graph of a batch without padding would be
        wrong for one with it, and no guard of Dynamo's sees the difference. `GraphCalls` keeps one for each `Masks`.
Rule 2  Only a mask that the forward was given is answered for, or one that its graph makes with `torch.ones`. Another
        that the model makes by itself is marked in the graph (`_known_ones`) and found there by `foreign_mask`: its
        data is not known.
Rule 3  On fake tensors there is nothing to look at. While planning, `OnesSeen` watches the workload make its batch: a
        mask that `torch.ones` made, and that was not written into, is one of ones. Any other counts as padded.

Rejected: functions of ours put into transformers' module while a forward runs. Other threads saw them, and Dynamo's
guards asked for them at every forward. Planning still does so, for a model's own, untraced forward on fake tensors.

Rejected: leaving a mask of ones out of the call. Some models use it for more than attention (the load balancing loss
of mixtures of experts, positions counted from it), and would run other kernels.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from remat._torch.dynamo import FirstNode

IsOnes = Callable[[torch.Tensor], bool]

PADDED_BATCH = (
    "this batch has padding, and the plan is for batches without: attention takes an explicit mask, which needs "
    "another kernel and other bytes. Plan with --padded, or with a workload whose batch has an attention mask with "
    "zeros"
)
_MAKE_ONES = {"ones", "ones_like", "new_ones"}
_MAKE_FULL = {"full": 1, "full_like": 1, "new_full": 2}  # where they take their value
_PASS_ON = {"_to_copy", "clone", "detach", "alias", "view", "expand", "unsqueeze"}
_ONES = {torch.ones, torch.ones_like, "new_ones"}
_SAME_DATA = {"to", "view", "bool", "contiguous"}  # methods after which a mask of ones is one still
_SAME_VALUES = _SAME_DATA - {"view"}  # which may read the bytes as another type
_DATA = "_get_data_attr"  # as a trace calls `tensor.data`


@dataclasses.dataclass(frozen=True)
class Masks:
    """The properties of a batch that decide its attention masks.

    ones    attention masks were given, and all are known to be of ones only
    padded  one was given that is not             packed  position ids were, and are not known to count up by one
    """

    ones: bool = False
    padded: bool = False
    packed: bool = False

    def as_planned(self, planned: Masks) -> Masks:
        """Add an explicit mask if the plan has one; it is right for a batch without padding too."""
        padded = self.padded or (self.ones and planned.padded)
        return Masks(self.ones and not padded, padded, self.packed or planned.packed)

    def with_explicit_masks(self) -> Masks:
        return dataclasses.replace(self, padded=True)


def given_masks(given: Iterable[tuple[str, torch.Tensor]]) -> list[torch.Tensor]:
    """List the attention masks among the named tensors of a forward."""
    return [tensor for name, tensor in given if name.endswith("attention_mask")]


def masks_of(given: Sequence[tuple[str, torch.Tensor]], is_ones: IsOnes) -> Masks:
    """Derive `Masks` from the named tensors of a forward; `is_ones` checks a mask."""
    masks = given_masks(given)
    ones = all(mask.ndim == 2 and is_ones(mask) for mask in masks)
    positions = [tensor for name, tensor in given if name == "position_ids"]
    return Masks(bool(masks) and ones, not ones, not all(p.ndim == 2 and _counts_up(p) for p in positions))


def all_ones(mask: torch.Tensor) -> bool:
    """Return whether a mask with data consists of ones only."""
    return not _without_data(mask) and bool((mask == 1).all())


def _counts_up(positions: torch.Tensor) -> bool:
    return not _without_data(positions) and bool((positions.diff(dim=-1) == 1).all())


def _without_data(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or tensor.is_meta


class OnesSeen(TorchDispatchMode):
    """Watches tensors being made, and knows afterwards which are all ones. (Rule 3)"""

    def __init__(self) -> None:
        super().__init__()
        self._ones: dict[int, torch.UntypedStorage] = {}  # kept, so that an id stays its own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if func._schema.is_mutable:
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, torch.Tensor):
                    self._ones.pop(id(tensor.untyped_storage()), None)
        elif isinstance(out, torch.Tensor) and (
            name in _MAKE_ONES
            or (name in _MAKE_FULL and args[_MAKE_FULL[name]] == 1)
            or (name in _PASS_ON and isinstance(args[0], torch.Tensor) and self.hold(args[0]))
        ):
            self._ones[id(out.untyped_storage())] = out.untyped_storage()
        return out

    def hold(self, tensor: torch.Tensor) -> bool:
        return id(tensor.untyped_storage()) in self._ones


# While traced

_MASKING, _EXPORTING = "transformers.masking_utils", "is_torchdynamo_exporting"
_SKIPPING = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")  # decide whether a mask can be skipped


def _answers_for(masks: Masks) -> dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """Return replacements for functions that transformers' mask makers call, by name; each wraps the original."""
    found: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {_EXPORTING: lambda original: _not_exporting}
    if not masks.packed:
        found["find_packed_sequence_indices"] = lambda original: _nothing_packed
    if masks.ones:
        found |= dict.fromkeys(_SKIPPING, _for_a_mask_of_ones)
    return found


class TracedMasks:
    """Lets transformers choose its masks as in eager mode while a forward is traced for batches of `masks`.

    missing  functions to replace that this version of transformers lacks; known once a mask maker has called anything
    """

    def __init__(self, masks: Masks):
        self._answers = _answers_for(masks)
        self.missing: tuple[str, ...] = ()

    def instead(self, asker: str, function: Callable[..., Any], first: FirstNode) -> Callable[..., Any] | None:
        """Return the function to trace in place of `function`, called by module `asker`; None to trace it itself."""
        if asker != _MASKING:
            return None
        masking = sys.modules[_MASKING]
        # Some versions ask in another module whether they are exported, where Dynamo's own answer is replaced.
        self.missing = tuple(name for name in self._answers if name != _EXPORTING and not hasattr(masking, name))
        if function.__name__ in _SKIPPING and (mask := first()) is not None and _made_of_ones(mask):
            return _without_mask(function)
        answer = self._answers.get(function.__name__)
        return None if answer is None else answer(function)


@contextlib.contextmanager
def eager_attention_masks(masks: Masks) -> Iterator[None]:
    """Let transformers choose its masks as in eager mode in an untraced forward on fakes, for a batch of `masks`."""
    masking = sys.modules.get(_MASKING)
    if masking is None:
        yield
        return
    answers = {name: answer for name, answer in _answers_for(masks).items() if hasattr(masking, name)}
    originals = {name: getattr(masking, name) for name in answers}
    for name, answer in answers.items():
        setattr(masking, name, answer(originals[name]))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(masking, name, original)


def _for_a_mask_of_ones(original: Callable[..., bool]) -> Callable[..., bool]:
    """Wrap `original`, which decides whether a mask can be skipped, so that it skips masks of ones."""

    def ignore(padding_mask: Any, *args: Any, **kwargs: Any) -> bool:
        if padding_mask is None:
            return original(None, *args, **kwargs)
        if ignored := original(None, *args, **kwargs):
            _known_ones(padding_mask)
        return ignored

    return ignore


def _without_mask(original: Callable[..., bool]) -> Callable[..., bool]:
    """Wrap `original` for a mask of ones that the model made in the same graph."""

    def ignore(padding_mask: Any, *args: Any, **kwargs: Any) -> bool:
        return original(None, *args, **kwargs)

    return ignore


def _made_of_ones(mask: fx.Node) -> bool:
    """Return whether a mask is one of ones because of how the graph makes it, and is not written into. (Rule 2)"""
    while _is_unwritten(mask) and mask.op == "call_method" and mask.target in _SAME_VALUES:
        mask = mask.args[0]  # type: ignore[assignment]
    return _is_unwritten(mask) and mask.target in _ONES


def _is_unwritten(node: fx.Node) -> bool:
    """Return whether a node computes a tensor that nothing has written into, nor can through `.data`."""
    made = node.meta.get("example_value")
    if not (node.op in ("call_function", "call_method") and isinstance(made, torch.Tensor)):
        return False
    return made._version == 0 and _DATA not in (getattr(user.target, "__name__", "") for user in node.users)


@torch.compiler.allow_in_graph
def _known_ones(mask: torch.Tensor) -> torch.Tensor:
    """Mark in a traced graph that `mask` was treated as all ones. (Rule 2)"""
    return mask


def foreign_mask(graph_module: fx.GraphModule, example_inputs: Sequence[Any], given: Sequence[torch.Tensor]) -> bool:
    """Return whether a mask beside the `given` ones was treated as all ones; remove the marks. (Rule 2)"""
    graph = graph_module.graph
    inputs = dict(zip(graph.find_nodes(op="placeholder"), example_inputs, strict=True))
    found = False
    for node in graph.find_nodes(op="call_function", target=_known_ones):
        mask = node.args[0]
        while mask.op == "call_method" and mask.target in _SAME_DATA and len(mask.all_input_nodes) == 1:
            mask = mask.all_input_nodes[0]
        found = found or not any(inputs.get(mask) is tensor for tensor in given)
        unused: fx.Node | None = node
        while unused is not None and unused.op != "placeholder" and not unused.users:
            before = unused.all_input_nodes
            graph.erase_node(unused)
            unused = before[0] if len(before) == 1 and before[0].target in _SAME_DATA else None
    graph_module.recompile()
    return found


def takes_mask(graph_module: fx.GraphModule) -> bool:
    """Return whether the graph computes anything from an attention mask."""
    return any("attention_mask" in node.name and node.users for node in graph_module.graph.find_nodes(op="placeholder"))


def _nothing_packed(position_ids: Any) -> None:
    return None


def _not_exporting() -> bool:
    return False
