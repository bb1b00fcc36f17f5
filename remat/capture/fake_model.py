"""Fake models: what `build` returns, with a fake tensor in the place of every tensor."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from remat.capture.beside_parameters import carry_over
from remat.capture.circumstances import without_shapes
from remat.capture.copies import copied
from remat.capture.dynamo import first_line
from remat.capture.generators import generators_kept
from remat.capture.kept_tensors import strided_parts, with_parts
from remat.capture.model_state import ModelState, SharedState
from remat.errors import CaptureError, RematError
from remat.units import first_few


def fake_model(
    build: Callable[[], nn.Module],
    mode: Any,
    device: torch.device,
    step: Callable[..., Any] | None = None,
    note: Callable[[torch.Tensor, torch.Tensor], None] = lambda fake, tensor: None,
    followed: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> tuple[nn.Module, SharedState]:
    """Call `build()` on the meta device, and replace every tensor of the model by a fake tensor on `device`.

    Return the model, and the state that it and a `step` that calls it share with the rest of the program. `note` is
    given each fake, and the tensor that it stands for. `followed` is the context of a `build` without data.

    Tied parameters stay tied. A model that has data is copied: it may be the caller's own. A `build` that reads values
    of its tensors, as `torch.linspace(0, 0.1, depth).tolist()`, makes its model in host memory, and so does one with an
    operator that the meta device lacks, also where code goes on without it. Raises `CaptureError` if the model cannot
    be built.
    """
    try:
        with followed():
            model = _built(build, "meta")
    except Exception as error:
        if not _reads_data(error):
            raise _not_built(error, " on the meta device") from error
        try:
            with generators_kept():
                model = _built(build, "cpu")
        except Exception as error:
            raise _not_built(error) from error
    if not isinstance(model, nn.Module):
        raise CaptureError(f"`build` returned {type(model).__name__}, not a torch.nn.Module.")
    if scripted := [path for path, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]:
        raise CaptureError(
            f"`build` returned a model with a module of TorchScript ({scripted[0] or 'the model itself'}), which "
            "cannot be traced: let it return Python modules, without torch.jit.script or torch.jit.trace."
        )
    if unknown := without_shapes(model):
        raise CaptureError(
            f"`build` returned a model of lazy modules: {first_few(unknown)} get a shape in its first forward. Let "
            "`build` run the model once, on a batch of one sample."
        )
    fakes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the original is kept: its id must stay its own
    of_storages: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def beside(tensor: torch.Tensor) -> torch.Tensor:
        """Make a fake of an attribute of a tensor, on the same storage if the attribute is."""
        if id(tensor) in fakes or tensor.layout is not torch.strided:
            return fake(tensor)
        base, made = of_storages.get(tensor.untyped_storage()._cdata, (None, None))
        if base is None or made is None or base.storage_offset() or base.nbytes != tensor.untyped_storage().nbytes():
            return fake(tensor)
        with mode:
            view = made.detach().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        fakes[id(tensor)] = (tensor, view)
        return view

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in fakes:
            fakes[id(tensor)] = (tensor, made := _fake_like(tensor, mode, device))
            if tensor.layout is torch.strided:
                of_storages.setdefault(tensor.untyped_storage()._cdata, fakes[id(tensor)])
            carry_over(tensor, made, beside)
            note(made, tensor)
        return fakes[id(tensor)][1]

    if any(parameter.device.type != "meta" for parameter in model.parameters()):
        model = _copied(model, fake)
    try:
        model.train()
    except NotImplementedError as error:
        raise CaptureError(
            f"`build` returned a model without a training mode ({error}): a program of torch.export has none. Return "
            "the module that it was exported from."
        ) from error
    return model, SharedState(model, fake, step)


class _Building(TorchFunctionMode):
    """Notes what an operator said that has no kernel on the meta device: `unknown`."""

    unknown: NotImplementedError | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except NotImplementedError as error:
            self.unknown = error
            raise


def _built(build: Callable[[], nn.Module], device: str) -> nn.Module:
    with torch.device(device), _Building() as building, warnings.catch_warnings():
        # of each parameter of a checkpoint, whose values planning leaves out
        warnings.filterwarnings("ignore", message=r"for .*: copying from a non-meta parameter")
        model = build()
    unknown = building.unknown
    if device == "meta" and unknown is not None and _reads_data(unknown):  # which torch's parametrizations pass over
        raise unknown
    return model


def _not_built(error: Exception, where: str = "") -> RematError:
    """Return the refusal of a `build` that raised `error`; one that says who raised what stands."""
    said = str(error) if isinstance(error, RematError) else f"{type(error).__name__}: {first_line(error)}"
    return CaptureError(f"the model cannot be built{where}: {said.rstrip('.')}.")


_META = re.compile(r"(?<![\w/-])meta(?![\w/-]|\.\w)")  # the device, and not meta-llama/Llama-3.1-8B or metadata.json


def _reads_data(error: BaseException | None) -> bool:
    """Return whether an error or its cause is a read of data on the meta device."""
    said = str(error).lower()
    if _META.search(said) or "tensor.__format__" in said:
        return True
    return error is not None and _reads_data(error.__cause__)


def _copied(model: nn.Module, fake: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    tensors = (*model.parameters(), *model.buffers(), *ModelState(model, data=False).tensors)
    try:
        return copied(model, {id(tensor): fake(tensor) for tensor in tensors})
    except Exception as error:
        raise CaptureError(
            f"`build` returned a model with data, and planning cannot copy it ({first_line(error)}): let `build` make "
            "a new model, with torch's own functions, which make no data while planning."
        ) from error


def _fake_like(tensor: torch.Tensor, mode: Any, device: torch.device) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        with mode:
            sparse = torch.empty(tensor.shape, dtype=tensor.dtype, device=device, layout=tensor.layout)
        return with_parts(sparse, [_fake_like(part, mode, device) for part in strided_parts(tensor)])
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake
