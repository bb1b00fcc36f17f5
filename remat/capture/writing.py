"""Writing: storages that a node of a captured graph may write to.

A name says little of it: `inplace` may be given by position, a custom operator may write to whatever it is given. So
the question is turned round: what is known to write nothing (`PURE`) writes nothing, and everything else may write to
all that it is given.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from remat.capture.anchors import storage_key
from remat.capture.nodes import asked, bracket_of, called
from remat.evaluation.identity import canonical

_PURE = """
    linear addmm matmul mm bmm baddbmm einsum outer dot mv conv1d conv2d conv3d conv_transpose1d conv_transpose2d
    scaled_dot_product_attention multi_head_attention_forward embedding dropout alpha_dropout feature_dropout bilinear
    eq ne lt gt le ge logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not invert isnan isinf any all
    argmax argmin topk sort argsort cumsum cumprod gather index_select take_along_dim masked_select one_hot nonzero max
    min arange ones zeros full empty ones_like zeros_like full_like empty_like rand randn rand_like randn_like tensor
    new_zeros new_ones new_full new_empty tril triu eye linspace detach roll pad interpolate repeat repeat_interleave
    tile unbind flip rot90 meshgrid broadcast_to broadcast_tensors unfold fold pixel_shuffle pixel_unshuffle
    max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_max_pool2d lp_pool2d glu prelu norm vector_norm linalg_vector_norm std std_mean var_mean size numel dim
    getattr item stride is_floating_point floordiv floor ceil round trunc sign remainder fmod mod bool long int
    chunked_loss chunked_rows cdist cosine_similarity kl_div huber_loss binary_cross_entropy nll_loss2d index scatter
    scatter_add index_add index_copy masked_scatter conj real imag polar view_as_real view_as_complex histc bincount
    diff diagonal diag trace prod logcumsumexp softmin log_softmax celu threshold log2 log10 sinh cosh tan atan atan2
"""
PURE = frozenset(_PURE.split())
_STATISTICS = ("running_mean", "running_var")  # buffers, which normalizations write


def written_storages(nodes: Sequence[fx.Node], known: frozenset[str]) -> set[int]:
    """Return the storages that some node may write to; `known` names functions beside `PURE` that write nothing."""
    return {key for node in nodes for key in storages(_written_by(node, PURE | known))}


def _written_by(node: fx.Node, pure: frozenset[str]) -> Any:
    name = canonical(called(node))
    if bracket_of(node):
        return ()
    if name in ("batch_norm", "instance_norm") and inspect.isfunction(node.target):
        return [asked(node, buffer) for buffer in _STATISTICS]
    everything = node.args, node.kwargs
    if name.partition("(")[0].partition(",")[0] not in pure or node.kwargs.get("out") is not None:
        return everything
    return everything if asked(node, "inplace") or asked(node, "max_norm") is not None else ()


def storages(nodes: Any) -> set[int]:
    """Return the storages of the values of nodes."""
    values = [node.meta.get("example_value") for node in tree_leaves(nodes) if isinstance(node, fx.Node)]
    return {storage_key(t) for t in tree_leaves(values) if isinstance(t, torch.Tensor)}
