"""Operations of an attention whose queries share keys and values, counted in every version of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import flop_registry

from remat.recording import tracker

FLASH = torch.ops.aten._scaled_dot_product_flash_attention
SIZES = (2, 8, 32, 16)  # samples, heads, length, width


def attended(kv_heads: int) -> tuple[Any, tuple[Any, ...], Any]:
    """Operator, arguments and result of an attention of eight heads of queries."""
    samples, heads, length, width = SIZES
    with FakeTensorMode():
        query = torch.empty(samples, heads, length, width, device="meta")
        key, value = (torch.empty(samples, kv_heads, length, width, device="meta") for _ in range(2))
        return FLASH.default, (query, key, value, 0.0, True), (torch.empty_like(query), None)


def asserting(count: Callable[..., int]) -> Callable[..., int]:
    """As torch 2.11 has it: all of one number of heads."""

    def checked(query: Any, key: Any, value: Any, *args: Any, out_val: Any, **kwargs: Any) -> int:
        shapes = [getattr(each, "shape", each) for each in (query, key, value)]
        assert len({shape[1] for shape in shapes}) == 1, "query/key/value shapes are incompatible"
        return count(query, key, value, *args, out_val=out_val, **kwargs)

    return checked


@pytest.mark.parametrize("strict", [False, True])
def test_shared_keys_and_values_are_multiplied_as_often(strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if strict:
        monkeypatch.setitem(flop_registry, FLASH, asserting(flop_registry[FLASH]))
    counts = []
    for kv_heads in (8, 2, 1):
        func, args, out = attended(kv_heads)
        counts.append(tracker._flops(func, args, {}, out))
    samples, heads, length, width = SIZES
    assert counts == [2 * 2 * samples * heads * length * length * width] * 3


def test_gradients_too(monkeypatch: pytest.MonkeyPatch) -> None:
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    counts = []
    for kv_heads in (8, 2):
        _, (query, key, value, *_), _ = attended(kv_heads)
        args = (torch.empty_like(query), query, key, value, query, None, None, None, 32, 32, 0.0, True, None, None)
        counts.append(tracker._flops(backward.default, args, {}, (query, key, value)))
    assert counts[0] == counts[1] > 0
