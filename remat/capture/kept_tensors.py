"""Tensors of a model's state, and the data that they held; bitwise equality of tensors of any layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from remat._torch.training import give_version


class KeptTensor:
    """A tensor, and the data that it held; for a parameter, also its storage."""

    def __init__(self, name: str, value: torch.Tensor, data: bool):
        self.name, self.value, self._version = name, value, _version_of(value)
        is_parameter = isinstance(value, nn.Parameter)
        has_storage = is_parameter and type(value) in (nn.Parameter, FakeTensor)
        self._storage = StorageWeakRef(value.untyped_storage()) if has_storage else None
        self._data = value.detach().to("cpu", copy=True) if data and not is_parameter else None
        self._alias = None if self._data is None or value.layout is not torch.strided else value.detach()

    @property
    def has_copy_beside(self) -> bool:
        """Whether its data has a copy on the same device: on a CPU."""
        return self._data is not None and self.value.device.type == "cpu"

    def has_changed(self) -> bool:
        if self._data is not None:
            return self._is_other
        return self._version != _version_of(self.value) or self._is_elsewhere

    def put_back(self) -> None:
        if self._data is None:
            return
        if self._is_other:
            with torch.no_grad():
                if self._alias is not None:  # it may have been resized, or given the storage of another tensor
                    self.value.data = self._alias
                self.value.copy_(self._data)  # not into `detach()`: that of a sparse tensor has other indices then
        if self._version >= 0:
            give_version(self.value, self._version)

    @property
    def _is_elsewhere(self) -> bool:
        """Whether it was given another storage (`parameter.data = ...`)."""
        known = self._storage
        return known is not None and (known.expired() or known.cdata != self.value.untyped_storage()._cdata)

    @property
    def _is_other(self) -> bool:
        """Whether the data differs bitwise, as far as bits are readable."""
        if self._data is None or not can_be_compared(self.value):
            return self._version != _version_of(self.value)
        return not are_bitwise_equal(self.value.detach().cpu(), self._data)


def are_bitwise_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are bitwise equal; False if that is unknown."""
    return can_be_compared(one) and _are_bitwise_equal(one, other)


def can_be_compared(tensor: torch.Tensor) -> bool:
    """Return whether the bits of `tensor` are readable."""
    return (tensor.layout is torch.strided or tensor.layout in _PARTS) and not (tensor.is_quantized or tensor.is_nested)


_COMPRESSED_PARTS = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_GIVEN_PARTS = "remat_parts"
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), _COMPRESSED_PARTS[0]),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), _COMPRESSED_PARTS[1]),
}


def strided_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """List the strided tensors that hold the data of `tensor`: itself, or the indices and values of a sparse one."""
    if tensor.layout not in _PARTS:
        return [tensor]
    return getattr(tensor, _GIVEN_PARTS, None) or [getattr(tensor, part)() for part in _PARTS[tensor.layout]]


def with_parts(sparse: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return `sparse`, a fake tensor, which has no parts of its own, with those of the tensor that it stands for."""
    setattr(sparse, _GIVEN_PARTS, list(parts))
    return sparse


def _are_bitwise_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.layout, one.dtype, one.shape) != (other.layout, other.dtype, other.shape):
        return False
    if one.layout in _PARTS:
        return all(map(_are_bitwise_equal, strided_parts(one), strided_parts(other)))
    return torch.equal(*map(_bytes_of, (one, other)))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)


def _version_of(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
