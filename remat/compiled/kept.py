"""Results of planning compiled graphs, kept on disk: a script that is started again does not search again.

Files lie in `compiled/` of the cache folder (`$XDG_CACHE_HOME/remat`, or `~/.cache/remat`). The name of each is a
digest of all that its content depends on: the graph with shapes and options, Inductor's settings, torch's version,
remat's source, the device, and what was asked. Nothing is kept where AOTAutograd's own cache, in whose place this one
is, has been turned off (`TORCHINDUCTOR_AUTOGRAD_CACHE=0`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx

import remat
from remat._torch.inductor import settings_of_inductor
from remat._torch.symbols import hinted
from remat.costing.timing_cache import device_name, workspace_settings
from remat.errors import UsageError
from remat.files import default_cache, write_atomically


class ResultCache:
    """Results for one graph. It is a convenience and never an error."""

    def __init__(self, graph_module: fx.GraphModule, device: torch.device, *of: Any, is_on: bool):
        root, self.of = default_cache() if is_on else None, ""
        self.folder = root and root / "compiled"
        if self.folder:
            around = device_name(device), workspace_settings(device), _versions()
            self.of = _digest(_text_of(graph_module), *around, *of)

    def get(self, make: Callable[[], Any], *of: Any) -> Any:
        """Return what `make` returns, or returned for the same `of`: lists, numbers and text, as JSON gives them."""
        if self.folder is None:
            return make()
        path = self.folder / f"{_digest(self.of, *of)}.json"
        with contextlib.suppress(OSError, ValueError):
            return json.loads(path.read_text())
        made = make()
        with contextlib.suppress(OSError, UsageError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(made))
        return made


def _digest(*of: Any) -> str:
    return hashlib.sha256(repr(of).encode()).hexdigest()[:32]


def _text_of(graph_module: fx.GraphModule) -> str:
    """Return a graph as text, with the sizes, types and devices of its values, and the marks of its nodes."""
    marks = [(node.name, node.meta.get("recompute"), _sizes(node)) for node in graph_module.graph.nodes]
    return graph_module.print_readable(print_output=False, include_stride=True, include_device=True) + repr(marks)


def _sizes(node: fx.Node) -> list[Any]:
    """Return the sizes of an input that are open, as the first batch had them."""
    value = node.meta.get("val") if node.op == "placeholder" else None
    of = value.shape if isinstance(value, torch.Tensor) else (value,)
    return [hinted(size) for size in of if isinstance(size, torch.SymInt)]


def _versions() -> str:
    return _digest(torch.__version__, torch.version.git_version, settings_of_inductor(), _source())


@functools.cache
def _source() -> str:
    """Digest remat's own source."""
    root = Path(remat.__file__).parent
    return _digest(*((path.name, path.read_bytes()) for path in sorted(root.rglob("*.py"))))
