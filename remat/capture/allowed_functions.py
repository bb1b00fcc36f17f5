"""Functions of `torch.compiler.allow_in_graph`: each is one node of a graph, and what it does beside is not seen.

Such a function runs again where its node is recomputed, and once more while its graph is traced. One that counts, or
draws from a generator of its own, would do so then too: it is refused, as a Function of autograd is
(`opaque_functions.py`). One that only reads such state, or makes a table when it is first called, is not. That is seen
by running it: all state that is reached from its code (`model_state.py`) is held to what it was before.

What it only sets, and never reads to do so (`LAST["x"] = x`), a recomputation sets to the same.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from typing import Any

from torch import fx, nn

from remat.capture.holders import FUNCTIONS, GROWN, NUMBER, is_module_looked_into
from remat.capture.model_state import ModelState
from remat.capture.opaque_functions import NOT_A_MODELS, only_sets
from remat.errors import CaptureError
from remat.units import first_few


def functions_in(graphs: Iterable[fx.GraphModule], homes: Collection[str]) -> list[Any]:
    """List the Python functions that nodes of `graphs` call, of the user's code and of the modules `homes`."""
    targets = (node.target for graph in graphs for node in graph.graph.nodes if node.op == "call_function")
    return list(dict.fromkeys(each for each in targets if isinstance(each, FUNCTIONS) and _is_users(each, homes)))


def _is_users(function: Any, homes: Collection[str]) -> bool:
    home = str(_plain(function).__module__)
    return home.partition(".")[0] not in NOT_A_MODELS and is_module_looked_into(home, homes)


def _plain(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


class FunctionsWatched:
    """Runs graphs and notes what the `functions` that their nodes call change; on fakes, once a model has settled."""

    def __init__(self, functions: Collection[Any]):
        self._functions = functions
        self._changed: dict[str, dict[str, None]] = {}  # names of state, by function

    def execute(self, call: int, graph_module: fx.GraphModule, args: tuple[Any, ...]) -> Any:
        return _CallsSeen(graph_module, self._run).run(*args)

    def _run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function not in self._functions:
            return function(*args, **kwargs)
        before = ModelState(nn.Module(), data=False, step=function)
        found = function(*args, **kwargs)
        changes = before.changes()
        if only_sets(_plain(function)):
            changes = {name: kind for name, kind in changes.items() if kind in (NUMBER, GROWN)}
        drawn = ["a generator of random numbers"] if before.have_generators_drawn else []
        names = [f"`{name}`" for name in changes] + drawn
        if names:
            self._changed.setdefault(_plain(function).__qualname__, {}).update(dict.fromkeys(names))
        return found

    def require_no_change(self) -> None:
        """Raise CaptureError if a function has changed something."""
        for name, changed in self._changed.items():
            raise CaptureError(
                f"`{name}` changes {first_few(changed)} each time that it runs. A graph calls it as a whole "
                "(torch.compiler.allow_in_graph): a trace and a recomputation would change that again. Change it where "
                f"`{name}` is called, and give it to `{name}` as an argument."
            )


class _CallsSeen(fx.Interpreter):
    """Runs a graph, and each function that it calls by `run`."""

    def __init__(self, graph_module: fx.GraphModule, run: Any):
        super().__init__(graph_module)
        self._run = run

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._run(target, args, kwargs)
