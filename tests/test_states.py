"""The states of training, read off real optimizers: the numbers that handbooks print, and those they get wrong."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from remat.errors import UsageError
from remat.recording.optimizer_states import States, states_of
from remat.units import GIB
from remat.workload.optimizers import MasterWeights, optimizer_named
from remat.workload.workload import weights_and_optimizer

GB = 10**9


def adam(parameters: int, dtype: str) -> States:
    return states_of([(parameters,)], *weights_and_optimizer(dtype, torch.optim.AdamW))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "split"),  # bytes a parameter: weights, gradients, what the optimizer keeps
    [
        ("fp32", (4, 4, {"exp_avg": 4, "exp_avg_sq": 4})),
        ("bf16", (2, 2, {"exp_avg": 2, "exp_avg_sq": 2})),
        ("bf16-master", (2, 2, {"master weights": 4, "exp_avg": 4, "exp_avg_sq": 4})),
        ("bf16-master-grads", (2, 2, {"master weights": 4, "exp_avg": 4, "exp_avg_sq": 4, "fp32 gradients": 4})),
    ],
)
def test_the_split_of_adams_states_has_names(dtype: str, split: tuple[int, int, dict[str, int]]) -> None:
    found, n = adam(10**6, dtype), 10**6
    weights, gradients, optimizer = split
    assert (found.parameters, found.gradients) == (weights * n, gradients * n)
    assert found.optimizer == {name: size * n for name, size in optimizer.items()}


@pytest.mark.parametrize(("billions", "plain", "fp32_gradients"), [(1, 16, 20), (7, 112, 140), (70, 1120, 1400)])
def test_sixteen_or_twenty_bytes_a_parameter(billions: int, plain: int, fp32_gradients: int) -> None:
    count = billions * GB
    assert adam(count, "fp32").total == adam(count, "bf16-master").total == plain * GB
    assert adam(count, "bf16-master-grads").total == fp32_gradients * GB


def test_405b() -> None:
    assert adam(405 * GB, "fp32").total == 6480 * GB
    assert adam(405 * GB, "bf16-master-grads").total == 8100 * GB


def test_llama_8b_in_fp32_does_not_fit_80_gib_without_a_single_sample() -> None:
    found = adam(8 * GB, "fp32")
    parts = [found.parameters, found.gradients, sum(found.optimizer.values()), found.total]
    assert [round(size / GIB, 1) for size in parts] == [29.8, 29.8, 59.6, 119.2]
    assert found.total > 80 * GIB


def test_a_weight_of_4096_by_4096() -> None:
    found = states_of([(4096, 4096)], torch.float32, torch.optim.AdamW)
    sizes = [found.parameters, found.gradients, sum(found.optimizer.values())]
    assert sizes == [64 << 20, 64 << 20, 128 << 20]


@pytest.mark.parametrize(
    ("shard", "gigabytes"), [(None, 112), ("zero1", 38.5), ("zero2", 26.25), ("zero3", 14)]
)  # 4N + 12N/8, 2N + 14N/8, 16N/8
def test_7b_over_eight_ranks(shard: str | None, gigabytes: float) -> None:
    assert adam(7 * GB, "bf16-master").per_rank(8, shard).total == gigabytes * GB  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("optimizer", "bytes_a_parameter"),
    [
        ("sgd", 0),
        ("adamw", 8),
        ("adamw:fused", 8),
        ("adamw:foreach", 8),
        ("adamw:single", 8),
        ("adagrad", 4),
        ("rmsprop", 4),
    ],
)
def test_state_is_what_the_class_keeps(optimizer: str, bytes_a_parameter: int) -> None:
    found = states_of([(1024, 1024)], torch.float32, optimizer_named(optimizer))
    assert sum(found.optimizer.values()) == bytes_a_parameter << 20


def test_momentum_is_one_copy() -> None:
    found = states_of([(1024, 1024)], torch.float32, functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    assert found.optimizer == {"momentum_buffer": 4 << 20}


def test_adam_in_eight_bits_keeps_two_bytes_a_parameter() -> None:
    pytest.importorskip("bitsandbytes")
    found = states_of([(4096, 4096)], torch.float32, optimizer_named("adamw8bit"))
    assert found.optimizer["state1"] == found.optimizer["state2"] == 16 << 20
    assert sum(found.optimizer.values()) < 2.04 * 4096**2  # besides, a scale for every 256 values


def test_adafactor_keeps_rows_and_columns_only() -> None:
    found = states_of([(1024, 512)], torch.float32, optimizer_named("adafactor"))
    assert found.optimizer == {"row_var": 4 * 1024, "col_var": 4 * 512}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lion", "is not in torch.optim"),
        ("adamw:quick", "the form 'quick' is not known; choose one of fused, foreach, single"),
        ("adamax:fused", "is not available"),
        ("lbfgs", "needs a closure"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        optimizer_named(name)


def test_an_optimizer_of_a_library_that_is_missing_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes.optim", None)
    with pytest.raises(UsageError, match="pip install bitsandbytes"):
        optimizer_named("adamw8bit")


def test_master_weights_move_as_the_inner_optimizer_moves_them() -> None:
    torch.manual_seed(0)
    half, full = nn.Linear(8, 8).bfloat16(), nn.Linear(8, 8)
    with torch.no_grad():
        for p, q in zip(half.parameters(), full.parameters(), strict=True):
            q.copy_(p)
    ours, theirs = MasterWeights(half.parameters(), torch.optim.AdamW), torch.optim.AdamW(full.parameters())
    for _ in range(3):
        for p, q in zip(half.parameters(), full.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.float()
        ours.step()
        theirs.step()
    for p, q in zip(half.parameters(), full.parameters(), strict=True):
        assert torch.equal(ours.state[p]["master weights"], q)
        assert torch.equal(p, q.bfloat16())
