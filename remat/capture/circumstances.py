"""Circumstances of a capture: versions, batch, configuration, modes, hooks. An error of a plan lists their changes.

A graph is made by more than the model's class: the library's version, what the batch holds, the configuration, which
modules are in training mode, which have hooks. All of it is written into the plan when it is made. Nothing here decides
whether a plan fits, that is `identity.py`; here are the words for a person when it does not.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from remat._torch.training import hooks_on_all_modules

PACKAGES = ("transformers", "numpy", "peft", "accelerate", "ortools")  # beside torch, which knows its own build
MOST_LISTED = 5  # of one kind of difference

_ALL = "all modules"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# In configurations: keys of the file, not of the model, and keys without effect (`capture.without_cache`).
_NAMES = ("architectures", "name_or_path", "transformers_version", "use_cache")


def versions() -> dict[str, str]:
    """Return the installed versions of the packages that decide a graph and a plan."""
    found = {"torch": str(torch.__version__)}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def given_to(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Describe the arguments of a forward by name: dtype and shape of tensors, the values of numbers and text.

    Arguments that are None are left out.
    """
    try:
        bound = dict(inspect.signature(forward).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        bound = {**{str(i): value for i, value in enumerate(args)}, **kwargs}
    flat: dict[str, Any] = {}
    for name, value in bound.items():
        flat.update(value if isinstance(value, dict) else {name: value})
    return {str(name): _described(value) for name, value in flat.items() if value is not None}


def _described(value: Any) -> str:
    if isinstance(value, (bool, int, float, str)):
        return repr(value)
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    each = ", ".join(
        f"{str(t.dtype).removeprefix('torch.')} {'x'.join(map(str, t.shape)) or 'scalar'}" for t in tensors
    )
    return each if isinstance(value, torch.Tensor) else f"{type(value).__name__}({each})"


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return configuration, modules in evaluation mode and modules with hooks of `model`, as a plan stores them."""
    return {"config": _config_of(model), "evaluating": _evaluating(model), "hooked": hooked(model)}


def _config_of(model: nn.Module) -> dict[str, Any]:
    """Return numbers, text and flags of a transformers configuration; empty for other models."""
    config: Any = getattr(model, "config", None)
    if not callable(getattr(config, "to_dict", None)):
        return {}
    flat = dict(_flat(config.to_dict(), ""))
    if (attention := getattr(config, "_attn_implementation", None)) is not None:
        flat["attn_implementation"] = attention
    return flat


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if name.startswith("_") or name in _NAMES or name in ("id2label", "label2id"):
            continue
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, (bool, int, float, str)) or value is None:
            yield f"{prefix}{name}", value


def _evaluating(model: nn.Module) -> list[str]:
    """List the paths of the outermost modules in evaluation mode."""
    found: list[str] = []
    for path, module in model.named_modules():
        if not module.training and not any(path.startswith(f"{above}.") or not above for above in found):
            found.append(path)
    return found


def hooked(model: nn.Module) -> list[str]:
    """List the paths of the modules inside `model` that have hooks, and `_ALL` where every module has one."""
    found = [
        path for path, module in model.named_modules() if path and any(getattr(module, name, None) for name in _HOOKS)
    ]
    return [*found, _ALL] if hooks_on_all_modules() else found


def without_shapes(model: nn.Module) -> list[str]:
    """List the parameters and buffers of `model` that get a shape in its first forward (torch's lazy modules)."""
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return [name for name, tensor in named if is_lazy(tensor)]


def differences(planned: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """List the known differences between two `about`s in words; a missing value of `found` counts as planned."""
    said = [
        *_of_batch(planned.get("batch"), found.get("batch")),
        *_of_values(planned.get("config"), found.get("config"), "config."),
        *_of_paths("evaluation mode", planned.get("evaluating"), found.get("evaluating")),
        *_of_paths("hooks", planned.get("hooked"), found.get("hooked")),
    ]
    before = planned.get("versions") or ({"torch": planned["torch"]} if "torch" in planned else {})
    return said + _of_values(before, found.get("versions"), "", only=("torch", "transformers", "peft"))


def _of_batch(planned: Mapping[str, str] | None, found: Mapping[str, str] | None) -> list[str]:
    if planned is None or found is None:
        return []
    said = [f"{name} is given, and was not when planned" for name in found if name not in planned]
    said += [f"{name} is not given, and was when planned" for name in planned if name not in found]
    for name in found:
        one, other = planned.get(name, found[name]), found[name]
        if one.split(" ")[0] != other.split(" ")[0]:  # the dtype, or the value; shapes may differ
            said.append(f"{name} is {other}, planned {one}")
    return said


def _of_values(
    planned: Mapping[str, Any] | None, found: Mapping[str, Any] | None, prefix: str, only: tuple[str, ...] = ()
) -> list[str]:
    if not planned or not found:
        return []
    names = [name for name in found if name in planned and planned[name] != found[name] and (not only or name in only)]
    said = [f"{prefix}{name} {found[name]}, planned {planned[name]}" for name in names[:MOST_LISTED]]
    return said + ([f"{len(names) - MOST_LISTED} more in {prefix}*"] if len(names) > MOST_LISTED else [])


def _of_paths(what: str, planned: list[str] | None, found: list[str] | None) -> list[str]:
    if planned is None or found is None:
        return []
    new, gone = (
        [path or "the model" for path in one if path not in other]
        for one, other in ((found, planned), (planned, found))
    )
    return [
        f"{what} on {', '.join(paths[:MOST_LISTED])}{how}"
        for paths, how in ((new, ", not when planned"), (gone, " when planned, not now"))
        if paths
    ]
