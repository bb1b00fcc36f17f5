"""Replace calls by those that a CUDA device would dispatch to, and run them on fake CPU tensors.

Fake tensors on device "cuda" need a CUDA build of torch, and a step on fake CPU tensors dispatches the CPU's
kernels: another attention, another dropout mask, another autocast list, other bytes. So the *calls* of a
captured graph are replaced: each becomes the same call as CUDA makes it under `torch.autocast("cuda")`, with
the kernels that CUDA selects. Those run forward and backward on fakes of any device, and save what they save
on a GPU. The CPU's own autocast must be off while such a graph runs.

The one table is `RULES` (`rules.py`): name of a dispatcher entry -> rule. Python functions of torch
(`F.normalize`, `F.multi_head_attention_forward`, `Tensor.norm`) have no row of their own: they are run as they
are, and the entries that they call are looked up. Composite C++ functions hide their inner calls, so those that
matter have a rule each. Rules are numbered:

  Rule 1   lower_precision  casts all floating tensors to the autocast dtype
  Rule 2   float32          casts them to float32
  Rule 3   float32_result   asks for a float32 result, unless a dtype was asked for
  Rule 4   promote          casts them to the widest among them
  Rule 5   softmax          rule 3; float16 -> float32 is one kernel on CUDA, without a copy of the input
  Rule 6   dropout          keeps a bool mask, fused, where 0 < p < 1
  Rule 7   attention        flash, memory-efficient, cuDNN or unfused, in the order that CUDA tries them
  Rule 8   linear           rule 1; adds the bias in place where the input cannot be flattened
  Rule 9   batch_norm       cuDNN's, if it takes these dtypes
  Rule 10  layer_norm       rule 2; statistics are float32, also for 16-bit inputs
  Rule 11  rms_norm         rule 2 from torch 2.12 on; one fused kernel, which saves the input and one number a row
  Rule 12  cross_entropy    log-softmax in the dtype of the logits, then rules 2 and 3 for the loss (`cross_entropy.py`)
  Rule 13  refuse           what is not modelled, by name
  Rule 14  histc            counts integers too, which the CPU refuses
  Rule 15  lstm, gru cells  rule 1; one fused kernel after two products without biases, which saves all it takes
  Rule 16  divide           rule 2 for a number by a tensor: torch takes the reciprocal
  Rule 17  one_hot          looks for no smallest and largest class, as the CPU does to check them

The dispatcher's own lists are in `ATen/autocast_mode.h`, the choice of attention in `sdp_utils.cpp`; both are
followed as of torch 2.13. A `TorchDispatchMode` was rejected: casts must be seen by autograd. So were
overriding kernels of the AutocastCPU key, which is global to the process.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from remat._torch.dynamo import autocast_marks, not_begun_at
from remat._torch.recording import builtin_functions
from remat.capture import nodes
from remat.chunking.chunk import CHUNKED, ROWS
from remat.chunking.chunked_loss import ChunkedLoss, as_given
from remat.chunking.chunked_rows import ChunkedRows
from remat.cuda_kernels.autocast import (
    Call,
    CudnnAttention,
    Device,
    Tensor,
    cast_one,
    dtype_of_region,
    enter_autocast,
    exit_autocast,
)
from remat.cuda_kernels.rules import ALIKE_NAMES, CASTS, PYTHON_METHODS, RULES, name_of
from remat.errors import CaptureError
from remat.fusion.fuse import FUSED


def substitute(
    graph_module: torch.fx.GraphModule, autocast: torch.dtype | None, *, cudnn_attention: CudnnAttention | None = None
) -> None:
    """Replace, in place, the functions that nodes call by those that CUDA calls; nodes keep number, order and names.

    autocast         dtype of the `torch.autocast` around the step, None without
    cudnn_attention  limits of cuDNN's attention, if the device prefers it to flash attention
    """
    regions = [autocast]
    enter, leave = autocast_marks()
    for node in graph_module.graph.nodes:
        if node.target is enter:
            regions.append(dtype_of_region(autocast, *node.args, **node.kwargs))
            node.target = enter_autocast
        elif node.target is leave:
            regions.pop()
            node.target = exit_autocast
        elif node.target is nodes.autocast:
            _retarget(node, _on_cuda(nodes.autocast, Device(regions[-1], cudnn_attention)))
        elif FUSED in node.meta:
            substitute(node.meta[FUSED].module, regions[-1], cudnn_attention=cudnn_attention)
        elif CHUNKED in node.meta:
            _chunked_on_cuda(node.meta[CHUNKED], Device(regions[-1], cudnn_attention))
        elif ROWS in node.meta:
            _rows_on_cuda(node.meta[ROWS], Device(regions[-1], cudnn_attention))
        else:
            function = _called(node)
            if function is not None and _differs(function, regions[-1]):
                _retarget(node, _on_cuda(function, Device(regions[-1], cudnn_attention)))
    graph_module.recompile()


def _chunked_on_cuda(head: ChunkedLoss, device: Device) -> None:
    """Substitute the kernels inside a chunked head."""
    for part in (head.opened, head.row_losses):
        substitute(part, device.autocast)
    head.cast = _cast_on(device)


def _rows_on_cuda(rows: ChunkedRows, device: Device) -> None:
    """Substitute the kernels inside a chunked run of nodes."""
    for part in (rows.body, rows.again):
        substitute(part, device.autocast)
    rows.cast = _cast_on(device)


def _cast_on(device: Device) -> Callable[[Tensor], Tensor]:
    return functools.partial(cast_one, dtype=device.autocast) if device.autocast else as_given


@dataclasses.dataclass(frozen=True)
class OnCuda:
    """A function of torch as CUDA would run it: the target of a substituted node."""

    function: Call
    device: Device

    @property
    def __name__(self) -> str:  # fx writes it into the code of the graph
        return f"cuda_{name_of(self.function)}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run(self.function, self.device, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_path, (*_path(self.function), self.device)


def run(function: Call, device: Device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch as CUDA would."""
    if _is_python(function):
        with _Inside(device):
            return _without_overrides(function)(*args, **kwargs)
    rule = RULES.get(name_of(function))
    return rule(device, function, *args, **kwargs) if rule else function(*args, **kwargs)


class _Inside(TorchFunctionMode):
    """Applies the table to whatever a Python function of torch calls."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Call, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, self.device, args, kwargs or {})


class UntracedForward(TorchFunctionMode):
    """Applies the table to untraced code, whose autocast is what `torch.autocast("cpu", ...)` says.

    is_paused  set while a captured graph runs: its nodes have the table's functions
    """

    is_untraced = True  # by Dynamo, which would follow into it
    is_paused = False

    def __init__(self, *, cudnn_attention: CudnnAttention | None = None) -> None:
        super().__init__()
        self.cudnn_attention = cudnn_attention

    @functools.partial(not_begun_at, nor_within=True)
    def __torch_function__(self, func: Call, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_paused:
            return func(*args, **(kwargs or {}))
        if func in _BACKWARDS:
            with self:
                return _without_overrides(func)(*args, **(kwargs or {}))
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        if not _differs(func, autocast):
            return func(*args, **(kwargs or {}))
        with torch.autocast("cpu", enabled=False):
            return run(func, Device(autocast, self.cudnn_attention), args, kwargs or {})


_BACKWARDS = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)  # which run code of the step

# Finding and replacing calls


def _is_python(function: Call) -> bool:
    if not isinstance(function, types.FunctionType) or function.__name__ in ALIKE_NAMES:
        return False
    # Where its body was written: `max_pool2d` is a wrapper from elsewhere, and calls nothing of the table.
    home = function.__globals__.get("__name__")
    return function in PYTHON_METHODS or home in ("torch.nn.functional", "torch.functional")


def _is_torch(function: Call) -> bool:
    module = getattr(function, "__module__", None) or ""
    return isinstance(function, types.MethodDescriptorType) or module.split(".")[0] in ("torch", "_operator")


def _differs(function: Call, autocast: torch.dtype | None) -> bool:
    """Return whether CUDA may run this function differently from the CPU."""
    if not hasattr(function, "__name__") or not _is_torch(function):
        return False
    if _is_python(function):
        return True
    rule = RULES.get(name_of(function))
    return rule is not None and (autocast is not None or rule not in CASTS)


def _called(node: torch.fx.Node) -> Call | None:
    if node.op == "call_function" and callable(node.target):
        return node.target
    if node.op == "call_method":
        return getattr(Tensor, str(node.target), None)
    return None


@functools.cache
def _on_cuda(function: Call, device: Device) -> OnCuda:
    """Return one object for equal targets, so that the code of a graph names it once."""
    return OnCuda(function, device)


def _retarget(node: torch.fx.Node, target: OnCuda) -> None:
    """Make `node` call a function; the graph finds nodes by operation and target: both change at once."""
    table = node.graph._find_nodes_lookup_table
    table.remove(node)
    node.op = "call_function"
    node.target = target
    if node not in table:
        table.insert(node)


@functools.cache
def _without_overrides(function: types.FunctionType) -> Call:
    """Copy a Python function of torch so that it runs its own body, whatever `__torch_function__` is active."""
    never = dict.fromkeys(("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), _never)
    copy = types.FunctionType(
        function.__code__, {**function.__globals__, **never}, function.__name__, None, function.__closure__
    )
    copy.__defaults__, copy.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return copy


def _never(*args: Any) -> bool:
    return False


_HOMES: dict[str, Any] = {
    "torch.nn.functional": torch.nn.functional,
    "torch.Tensor": Tensor,
    "torch": torch,
    "torch._C._nn": builtin_functions(),
    "torch.linalg": torch.linalg,
    "torch.special": torch.special,
    "torch.functional": torch.functional,
    "remat.capture.nodes": nodes,
    "operator": operator,
}


def _path(function: Call) -> tuple[str, str]:
    """Return the path of a function of torch: builtin ones do not pickle by themselves."""
    for home, owner in _HOMES.items():
        for name in (function.__name__, name_of(function)):
            if getattr(owner, name, None) is function or getattr(owner, name, None) == function:
                return home, name
    raise CaptureError(f"`{function!r}` is a function of torch that has no public name.")


def _from_path(home: str, name: str, device: Device) -> OnCuda:
    return _on_cuda(getattr(_HOMES[home], name), device)
