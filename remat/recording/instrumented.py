"""Instrumented graphs: a captured graph that tells a recorder where each of its nodes begins and ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from remat.capture.anchors import is_operator_of_statistics, module_path, module_paths, updates_statistics
from remat.capture.nodes import (
    around_regions,
    as_function,
    bracket_of,
    called,
    captured_nodes,
    is_captured,
    replace_target,
)
from remat.chunking.chunk import CHUNKED
from remat.errors import CaptureError, RematError
from remat.recording.recorder import Recorder
from remat.recording.remedies import describe


def execute_call(recorder: Recorder, call: int, graph_module: fx.GraphModule, args: tuple[Any, ...]) -> Any:
    """Run a graph call, and record its nodes."""
    recorder.modules.update((path, None) for node in captured_nodes(graph_module) for path in module_paths(node))
    return _instrumented(graph_module, recorder, call)(*args)


def _instrumented(graph_module: fx.GraphModule, recorder: Recorder, call: int) -> fx.GraphModule:
    """Copy `graph_module` so that it tells `recorder` where each node begins and ends.

    Only targets change, so that the generated code frees its values where the original does.
    """
    graph = fx.Graph()
    environment: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(graph_module.graph, environment))
    nodes = captured_nodes(graph_module)
    around = around_regions(nodes)
    for node in nodes:
        copy = environment[node]
        replace_target(copy, _recorded(node, as_function(copy), recorder, call, node in around))
    return fx.GraphModule(graph_module, graph)


def _recorded(
    node: fx.Node, function: Callable[..., Any], recorder: Recorder, call: int, is_around: bool
) -> Callable[..., Any]:
    """Return `function` with notes of where it begins and ends; `is_around` as in `around_regions`."""
    is_plain = is_around or CHUNKED in node.meta or is_operator_of_statistics(node)
    effect = "batch_norm" if updates_statistics(node) else "other" if is_plain else ""
    bracket, text, module, known = bracket_of(node), called(node), module_path(node), node.meta["identity"]
    names = [argument.name for argument in node.all_input_nodes if is_captured(argument)]
    wiring = tree_leaves((node.args, node.kwargs))

    def recorded(*args: Any, **kwargs: Any) -> Any:
        graph_inputs = {recorder.index[call, name] for name in names}
        given = {
            recorder.take(value)  # from an earlier graph call, or from before the step
            for argument, value in zip(wiring, tree_leaves((args, kwargs)), strict=False)
            if isinstance(argument, fx.Node) and argument.op == "placeholder" and isinstance(value, torch.Tensor)
        }
        recorder.begin(call, node.name, text, module, effect, graph_inputs, given, known)
        recorder.note_given((args, kwargs))
        if effect == "batch_norm":
            recorder.note_statistics([*args[1:3], kwargs.get("running_mean"), kwargs.get("running_var")])
        head = node.meta.get(CHUNKED)
        try:
            with contextlib.nullcontext() if head is None else recorder.running(head, args):
                value = function(*args, **kwargs)
        except RematError:
            raise
        except Exception as error:
            raise CaptureError(
                f"operator {text} (node {node.name!r}, module {module or 'the model'!r}) "
                f"cannot run on fake tensors: {describe(error)}"
            ) from error
        recorder.finish(value, bracket, is_around)
        return value

    return recorded
