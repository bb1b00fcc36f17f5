"""Remedies: add a remedy to torch's errors about steps that fake tensors cannot run."""

from __future__ import annotations

import os
import re
import traceback
from pathlib import Path, PurePath

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

_TRANSFORMS = (
    ". It uses transforms of torch.func (grad, vjp, jvp, vmap, jacrev, hessian), which no checkpoint of torch works "
    "with. Write it with torch.autograd.grad(..., create_graph=True), or keep it out of the planned step"
)
_ATTENTION = (
    ", with or without a plan. Run the model under "
    "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), whose attention has second derivatives"
)
_OWN_BACKWARD = (
    ". The backward of the loss is run for the step: return the loss, and leave `loss.backward()` to the loop"
)
_DATA = ". It reads a value of a tensor, and no tensor has data while planning: make the value without one"
_ON_HOST = (
    "it reads the values of a tensor on the host (`numpy()`){}, and no tensor has data while planning. Plan with a "
    "`step` that has a stand-in for what is computed there, of the same shapes: for a matching, fixed indices"
)
_SIZES = (
    ". The size of its result depends on data, and a plan is for sizes that do not: keep all rows, and multiply by a "
    "mask or choose with torch.where"
)
_HIGHER_ORDER = "the model calls {operator}, which no traced graph looks into: leave it out of a planned step{instead}"
_COMPILED = ", or train a compiled model within a budget (`remat.compile(model, budget=...)`)"
_OF_DATA = ("cond", "while_loop")  # whose bytes no compiled budget knows either
_NESTED_TENSORS = ". Nested tensors are not supported: pad to one length"
_STREAMS = ". A forward that enters CUDA streams cannot be planned: run it on the current stream"
_RELATIVE = (
    ". The file is run as a script, which is in no package: import by the package's full name, in a file outside of it"
)
_SPARSE = ". Tensors of a sparse layout are not supported: give dense ones"


def describe(error: BaseException, where: str = "") -> str:
    """Describe an error: kind, first line of the message, `where` it happened, and a known remedy.

    A line that opens a bracket ends with the one that closes it: messages begin with a module or a tensor over lines.
    """
    if called := re.search(r"no rule registered for HigherOrderOperator (\w+)", str(error)):
        instead = "" if called[1] in _OF_DATA else _COMPILED
        return _HIGHER_ORDER.format(operator=called[1], instead=instead) + where
    if ".numpy() is not supported for tensor subclasses" in str(error):
        return _ON_HOST.format(where)
    if uses_foreign(error):
        return f"it uses a tensor{where} that is neither of the model nor of the batch{_FOREIGN_TENSOR}"
    first = _first_line(str(error))
    said = f"{type(error).__name__}: {first}" if first else type(error).__name__
    remedy = _remedy(error, said)
    return f"{said.rstrip('.')}{where}{remedy}" if where or remedy else said


def uses_foreign(error: BaseException) -> bool:
    """Return whether an operator was given a tensor that is no fake."""
    return "convert all Tensors to FakeTensors first" in str(error)


def _first_line(text: str) -> str:
    """Return the first line of `text`, and lines to the end of its brackets, shortened in the middle."""
    first, *others = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    said = first
    for line in others:
        if sum(map(said.count, "([{")) <= sum(map(said.count, ")]}")):
            break
        said = f"{said} {line}"
    if said == first or len(said) <= MOST_LETTERS:
        return said
    return f"{said[: MOST_LETTERS // 2]}...{said[-MOST_LETTERS // 2 :]}"


OWN_BATCH = (
    "that it did not make. Let `batch` make its tensors itself, by torch.zeros or torch.randint: their shapes and "
    "dtypes are all that counts."
)
MOST_LETTERS = 160  # of a message whose first line goes on over others

_FOREIGN_TENSOR = (
    ". Return a module that trains from `build`, as a part of the model, and a tensor from `batch`. A module that does "
    "not train, such as a target network, may stay outside: say so with `module.requires_grad_(False)`"
)


def not_a_loss(found: object) -> str:
    """Say why a step's result is no loss; empty if it is one."""
    if not isinstance(found, torch.Tensor):
        return "nothing" if found is None else f"a {type(found).__name__}"
    if found.numel() != 1:
        return f"a tensor of shape {tuple(found.shape)}: take its mean or its sum"
    return "" if found.requires_grad else "one without a gradient: it was detached, or made under torch.no_grad()"


def line_of(error: BaseException) -> str:
    """Return the last line of the traceback outside torch, Python's library and this package, as ` at file:line`.

    It is followed by the last function of a layer of torch's, if there is one.
    """
    torchs, ours, pythons = (str(Path(path).parent) for path in (torch.__file__, Path(__file__).parent, os.__file__))
    codes = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    others = [at for at in codes if not at[0].co_filename.startswith(("<", torchs, ours))]
    users = [at for at in others if "-packages" in at[0].co_filename or not at[0].co_filename.startswith(pythons)]
    layers = [code for code, _ in codes if code.co_filename.startswith((f"{torchs}/nn/modules/", f"{torchs}/ao/"))]
    called = [code.co_qualname for code in layers if not code.co_name.startswith("_")]
    within = f" (in `{called[-1]}` of torch)" if called else ""
    return f" at {users[-1][0].co_filename}:{users[-1][1]}{within}" if users else ""


def _guarded_in(error: BaseException) -> str:
    """Return the file of torch's that compared the size that a guard is for, if `error` is of making one; else "".

    The ragged size of a nested tensor that a forward makes comes from no input, which torch's guards look for.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    guard = frames[-1].f_locals.get("guard") if frames and frames[-1].f_code.co_name == "issue_guard" else None
    found = re.search(r"\((\S+):\d+ in ", str(getattr(guard, "sloc", "")))
    return found[1] if found else ""


def _remedy(error: BaseException, said: str) -> str:
    if "backward through the graph a second time" in said:
        return _OWN_BACKWARD
    if "derivative for aten::_scaled_dot_product" in said:
        return _ATTENTION
    if isinstance(error, DataDependentOutputException) or "FakeTensor.__format__" in said:
        return _DATA
    if isinstance(error, DynamicOutputShapeException):
        return _SIZES
    if "attempted relative import" in said:
        return _RELATIVE
    if "SparseTensorImpl" in said:
        return _SPARSE
    if said.startswith("AssertionError: User object is no longer alive"):  # Dynamo's, which knows streams by number
        return _STREAMS
    files = [PurePath(frame.filename).parts for frame in traceback.extract_tb(error.__traceback__)]
    if "nested_tensor" in said or "NestedInt" in said or any("nested" in file for file in files):
        return _NESTED_TENSORS
    if isinstance(error, IndexError) and "nested" in PurePath(_guarded_in(error)).parts:
        return _NESTED_TENSORS
    said_so = "invalid python storage" in said or "torch.func." in said  # the first: jvp
    transforms = said_so or any("_functorch" in file for file in files)
    return _TRANSFORMS if transforms else ""
