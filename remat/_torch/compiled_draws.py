"""Random numbers that a compiled backward draws again, bit for bit as the forward's kernels drew them.

Inductor draws from Philox, by a seed and an element's position. On CUDA its kernels do so in two ways: those in one
dimension take four numbers of one state, for four positions (`rand4x`); others take one number of a state for each
position (`tl.rand`). One seed gives other numbers in each. Which way a kernel has depends on what it is fused with, so
a draw of forward that is repeated in backward may give other numbers. Here the way is read from the generated code of
both halves. Where backward has the other, it computes the numbers of the forward's from integers, in whatever kernel:
several times the instructions of a draw, and no more traffic.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from remat._torch.door import internal
from remat._torch.symbols import hinted

RANDOM, LOOKUP = "prims::inductor_random", "prims::inductor_lookup_seed"
_KERNEL = re.compile(r"^def (triton_\w+)\(([^)]*)\):\n((?:.*\n)*?)''', device_str=", re.MULTILINE)
_SEED = re.compile(r"^ *(tmp\d+) = tl\.load\(\w+ \+ (load_seed_offset\d*)\)$", re.MULTILINE)
_ALONE = re.compile(r"tl\.rand\((tmp\d+), ")
_BY_FOUR = re.compile(r"triton_helpers\.rand4x\((tmp\d+), \((tmp\d+)\)\.to\(tl\.uint32\), XBLOCK\)")


def draws_alike(device: torch.device) -> bool:
    """Return whether all kernels of Inductor draw the same random numbers of a seed."""
    if device.type != "cuda":
        return True
    purpose = "tell whether kernels draw the same numbers"
    operators = internal("_inductor.codegen.triton.TritonOverrides", purpose)
    config = internal("_inductor.config", purpose)
    return not hasattr(operators, "_can_use_4x_random") or bool(getattr(config, "align_random_eager", False))


def ways_of_draws(source: str) -> dict[str, bool]:
    """Read from generated code how its kernels draw uniform numbers.

    Returns whether four at a time, by the seed's number. A seed whose kernels are not understood is not there.
    """
    found = defaultdict[str, set[bool]](set)
    for name, parameters, body in _KERNEL.findall(source):
        if not (by_kernel := _ways_in(body)):
            continue
        taken = [each.strip().partition(":")[0] for each in parameters.split(",")]
        for call in re.findall(rf"^ *{name}\.run\(([^()]*), stream=", source, re.MULTILINE):
            given = dict(zip(taken, call.split(", "), strict=False))
            for seed, way in by_kernel.items():
                if seed in given:
                    found[given[seed]].add(way)
    return {seed: way for seed, (way, *others) in found.items() if not others}


def _ways_in(body: str) -> dict[str, bool]:
    """Return whether a kernel draws four numbers at a time, by the parameter that says which seed."""
    seeds = dict(_SEED.findall(body))
    ways = {seeds[seed]: False for seed in _ALONE.findall(body) if seed in seeds}
    for seed, position in _BY_FOUR.findall(body):
        # A block's numbers follow each other, so its positions have to.
        index = re.search(rf"^ *{position} = \(?(x\d+)\)?(?:\.to\(tl\.int32\))?$", body, re.MULTILINE)
        if seed in seeds and index and re.search(rf"^ *{index[1]} = xindex$", body, re.MULTILINE):
            ways[seeds[seed]] = True
    return ways


def seed_of(node: fx.Node) -> str | None:
    """Return the number of the seed that a node draws uniform numbers of; None where backward cannot repeat that."""
    if not calls(node, RANDOM) or node.args[2] != "rand" or node.kwargs.get("offset") or _depends_on_timings():
        return None
    seed, lookup = node.args[1], torch.ops.prims.inductor_lookup_seed.default
    if len({each.args[0] for each in node.graph.find_nodes(op="call_function", target=lookup)}) > 1:
        return None  # seeds of several devices, each counted from 0
    return str(seed.args[1]) if isinstance(seed, fx.Node) and calls(seed, LOOKUP) else None


def _depends_on_timings() -> bool:
    """Return whether timings choose what fuses, or a block's size: compiled again, a forward may draw otherwise."""
    config = internal("_inductor.config", "draw random numbers again")
    by_time = "benchmark_fusion", "benchmark_combo_kernel", "max_autotune", "max_autotune_gemm"
    return any(getattr(config, name, False) for name in (*by_time, "coordinate_descent_tuning"))


def drawn_otherwise(
    backward: fx.GraphModule, ways: Mapping[str, bool], ways_of_backward: Mapping[str, bool]
) -> dict[str, bool] | None:
    """Return the forward's ways of draws that a backward would repeat in another; None if one has no known way."""
    drawn = {seed_of(node) for node in backward.graph.nodes if calls(node, RANDOM)}
    if not drawn <= ways.keys():
        return None
    return {seed: ways[seed] for seed in drawn if seed is not None and ways[seed] != ways_of_backward.get(seed)}


def draw_again(backward: fx.GraphModule, ways: Mapping[str, bool]) -> None:
    """Let a backward repeat the draws of these seeds in these `ways`, whatever its kernels are."""
    for node in [node for node in backward.graph.nodes if calls(node, RANDOM)]:
        if (seed := seed_of(node)) is None or seed not in ways:
            continue
        size, of = node.args[:2]
        by_four = ways[seed] and hinted(node.meta["val"].numel()) > 2  # a smaller kernel has blocks of less than four
        with backward.graph.inserting_before(node):
            again = backward.graph.call_function(_drawn_as(), (size, of, by_four))
        again.meta = dict(node.meta)
        node.replace_all_uses_with(again)
        backward.graph.erase_node(node)
    backward.recompile()


def calls(node: fx.Node, operator: str) -> bool:
    """Return whether a node calls an operator, by the name of its schema."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name == operator


# No generated code calls it.
torch.library.define("remat::drawn_as", "(SymInt[] size, Tensor seed, bool by_four) -> Tensor")
torch.library.register_fake(
    "remat::drawn_as", lambda size, seed, by_four: torch.empty(size, dtype=torch.float32, device=seed.device)
)


@functools.cache
def _drawn_as() -> Any:
    """Return the operator that draws uniform numbers in a given way, which Inductor knows then."""
    purpose = "draw random numbers again"
    lowers = internal("_inductor.lowering.register_lowering", purpose)
    ir = internal("_inductor.ir", purpose)
    drawn = torch.ops.remat.drawn_as.default

    @lowers(drawn, type_promotion_kind=None)
    def lower(size: Any, seed: Any, by_four: bool) -> Any:
        device, read = seed.get_device_or_error(), seed.make_loader()
        strides = ir.FlexibleLayout.contiguous_strides(size)
        position = ir.FixedLayout(device, torch.float32, size, strides).make_indexer()
        numbers = ir.Pointwise.create(
            device=device,
            dtype=torch.float32,
            inner_fn=lambda index: _uniform(read([]), position(index), by_four),
            ranges=[*size],
        )
        numbers.realize()
        return numbers

    return drawn


_LOW = 0xFFFFFFFF
_ROUNDS, _FACTORS, _KEY_STEPS = 10, (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
_SCALE = 4.6566127342e-10  # Triton's step between numbers, of 2**31


def _uniform(seed: Any, position: Any, by_four: bool) -> Any:
    """Return Philox4x32-10 as Triton has it, in 64-bit integers whose products wrap.

    Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
    """
    ops = internal("_inductor.virtualized.ops", "draw random numbers again")

    def number(value: int) -> Any:
        return ops.constant(value, torch.int64)

    def low(value: Any) -> Any:
        return ops.bitwise_and(value, number(_LOW))

    def high(value: Any) -> Any:
        return low(ops.bitwise_right_shift(value, number(32)))

    at = low(ops.index_expr(position, torch.int64))
    state = ops.bitwise_right_shift(at, number(2)) if by_four else at
    c0, c1, c2, c3 = state, number(0), number(0), number(0)
    k0, k1 = low(seed), high(seed)
    for _ in range(_ROUNDS):
        a, b = ops.mul(c0, number(_FACTORS[0])), ops.mul(c2, number(_FACTORS[1]))
        c0, c2 = ops.bitwise_xor(ops.bitwise_xor(high(b), c1), k0), ops.bitwise_xor(ops.bitwise_xor(high(a), c3), k1)
        c1, c3 = low(b), low(a)
        k0, k1 = (low(ops.add(key, number(step))) for key, step in zip((k0, k1), _KEY_STEPS, strict=True))
    bits = c0
    if by_four:
        lane = ops.bitwise_and(at, number(3))
        for i, each in ((1, c1), (2, c2), (3, c3)):
            bits = ops.where(ops.eq(lane, number(i)), each, bits)
    is_negative = ops.gt(bits, number(0x7FFFFFFF))  # as a signed integer of 32 bits
    bits = ops.where(is_negative, ops.sub(number(_LOW), bits), bits)
    return ops.mul(ops.to_dtype(bits, torch.float32), ops.constant(_SCALE, torch.float32))
