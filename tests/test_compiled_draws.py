"""Random numbers that a compiled backward draws again: how kernels draw, and the numbers themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._inductor import inductor_prims
from torch._inductor.virtualized import V

from remat._torch.compiled_draws import _uniform, seed_of, ways_of_draws

CPU = torch.device("cpu")

KERNELS = """
triton_per_fused_0 = async_compile.triton('triton_per_fused_0', '''
import triton
@triton.jit
def triton_per_fused_0(in_ptr0, out_ptr0, load_seed_offset, load_seed_offset1, xnumel, XBLOCK : tl.constexpr):
    tmp0 = tl.load(in_ptr0 + load_seed_offset)
    tmp1 = (r0_1 + 64*x0).to(tl.int32)
    tmp2 = tl.rand(tmp0, (tmp1).to(tl.uint32))
    tmp3 = tl.load(in_ptr0 + load_seed_offset1)
    tmp4 = tl.randn(tmp3, (tmp1).to(tl.uint32))
''', device_str='cuda')
triton_poi_fused_1 = async_compile.triton('triton_poi_fused_1', '''
import triton
@triton.jit
def triton_poi_fused_1(in_ptr0, out_ptr0, load_seed_offset, load_seed_offset1, xnumel, XBLOCK : tl.constexpr):
    x2 = xindex
    x0 = (xindex % 8)
    tmp0 = tl.load(in_ptr0 + load_seed_offset)
    tmp1 = (x2).to(tl.int32)
    tmp2 = triton_helpers.rand4x(tmp0, (tmp1).to(tl.uint32), XBLOCK)
    tmp3 = tl.load(in_ptr0 + load_seed_offset1)
    tmp4 = (x0).to(tl.int32)
    tmp5 = triton_helpers.rand4x(tmp3, (tmp4).to(tl.uint32), XBLOCK)
''', device_str='cuda')
        triton_per_fused_0.run(buf0, buf1, 0, 5, 4096, stream=raw_stream0)
        triton_poi_fused_1.run(buf0, buf2, 1, 6, 4096, stream=raw_stream0)
        triton_poi_fused_1.run(buf0, buf3, 2, 7, 4096, stream=raw_stream0)
"""


def test_each_call_of_a_kernel_says_which_seeds_it_draws_of_and_how() -> None:
    """A normal number, and a block whose positions do not follow each other, cannot be repeated."""
    assert ways_of_draws(KERNELS) == {"0": False, "1": True, "2": True}


def test_a_seed_that_kernels_draw_of_in_both_ways_is_not_understood() -> None:
    """Seeds of each device are counted from 0."""
    both = KERNELS.replace("triton_poi_fused_1.run(buf0, buf2, 1,", "triton_poi_fused_1.run(buf0, buf2, 0,")
    assert ways_of_draws(both) == {"2": True}


def test_seeds_of_several_devices_are_not_told_apart() -> None:
    graph = torch.fx.Graph()
    seeds = [graph.call_function(inductor_prims.seeds, (1, device)) for device in (CPU, torch.device("cuda"))]
    found = []
    for each in seeds:
        seed = graph.call_function(inductor_prims.lookup_seed, (each, 0))
        found.append(graph.call_function(inductor_prims.random, ([4], seed, "rand")))
        if len(found) == 1:
            assert seed_of(found[0]) == "0"
    assert [*map(seed_of, found)] == [None, None]


class WithTensors:
    """Inductor's operators on tensors."""

    def constant(self, value: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(value, dtype=dtype)

    def index_expr(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return value.to(dtype)

    def to_dtype(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return value.to(dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


KNOWN = {0: (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)}  # of key and counter 0, as its authors publish


def drawn(seed: int, positions: torch.Tensor, by_four: bool) -> torch.Tensor:
    with V.set_ops_handler(WithTensors()):  # type: ignore[arg-type]
        return _uniform(torch.tensor(seed), positions, by_four).value


def test_numbers_are_those_of_philox_in_either_way() -> None:
    def as_number(bits: int) -> float:
        magnitude = bits if bits < 1 << 31 else (1 << 32) - 1 - bits
        return float(torch.tensor(magnitude, dtype=torch.float32) * 4.6566127342e-10)

    four = [as_number(bits) for bits in KNOWN[0]]
    assert drawn(0, torch.arange(4), True).tolist() == four
    assert drawn(0, torch.arange(1), False).tolist() == four[:1]


@pytest.mark.parametrize("seed", [0, 1, -1, 1 << 62, -(1 << 63)])
def test_numbers_of_a_seed_are_uniform_and_differ_by_way(seed: int) -> None:
    positions = torch.arange(1 << 14)
    alone, by_four = drawn(seed, positions, False), drawn(seed, positions, True)
    for numbers in (alone, by_four):
        assert numbers.min() >= 0 and numbers.max() < 1
        assert torch.histc(numbers, 16, 0, 1).sub(1 << 10).abs().max() < 150  # five standard deviations
    assert torch.equal(by_four[::4], alone[: len(alone) // 4])
    assert (alone == by_four).double().mean() < 0.01
