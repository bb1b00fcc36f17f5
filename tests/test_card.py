"""The card (tests/card) is a CUDA device: numbers are the CPU's, generators and the allocator are CUDA's.

`make test-cuda` runs this on PyTorch's CUDA build, without a GPU. Each claim about numbers fails with
CARD_ARITHMETIC=off.
"""

from __future__ import annotations

import ast
import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tests.devices import ON_CARD

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not ON_CARD, reason="is about the card, see tests/card")]

WIDTH, HEADS = 64, 4


class Block(nn.Module):
    """Attention with dropout, and a feed-forward half."""

    def __init__(self, dropout: float):
        super().__init__()
        self.dropout = dropout
        self.norm, self.enter, self.leave = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, _ = x.shape
        shape = (samples, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = self.enter(self.norm(x)).view(shape).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        return x + F.dropout(F.gelu(self.leave(y.transpose(1, 2).reshape(x.shape))), self.dropout)


Run = Callable[[nn.Module, torch.Tensor], torch.Tensor]
RUNS: dict[str, Run] = {
    "plain": lambda block, x: block(x),
    "checkpointed": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "generator not restored": lambda block, x: checkpoint(block, x, use_reentrant=False, preserve_rng_state=False),
}


def gradients(run: Run, kernel: SDPBackend, autocast: bool) -> list[torch.Tensor]:
    torch.manual_seed(3)
    blocks = nn.ModuleList(Block(1 / 8) for _ in range(2)).cuda()  # cuDNN drops multiples of 1/16 only
    x = torch.randn(4, 32, WIDTH, device="cuda")
    with sdpa_kernel(kernel), torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        for block in blocks:
            x = run(block, x)
        x.float().pow(2).mean().backward()
    return [p.grad for p in blocks.parameters() if p.grad is not None]


@pytest.mark.parametrize("schedule", ["now", "late-copies", "late-compute", "shuffled:1"])
@pytest.mark.parametrize(
    ("kernel", "autocast"),
    [
        (SDPBackend.FLASH_ATTENTION, True),
        (SDPBackend.EFFICIENT_ATTENTION, False),
        (SDPBackend.CUDNN_ATTENTION, True),
        (SDPBackend.MATH, True),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_recomputation_draws_the_same_numbers_if_and_only_if_the_generator_is_restored(
    kernel: SDPBackend, autocast: bool, schedule: str
) -> None:
    torch.ops.card.streams(schedule)
    try:
        plain, again, lost = (gradients(run, kernel, autocast) for run in RUNS.values())
    finally:
        torch.ops.card.streams("now")
    assert all(map(torch.equal, plain, again))
    assert not all(map(torch.equal, plain, lost))


def test_backward_of_fused_attention_has_the_dropout_of_its_forward() -> None:
    torch.manual_seed(0)
    q, weight = torch.randn(1, 2, 4, 8).cuda().requires_grad_(), torch.randn(1, 2, 4, 8).cuda()

    def value(at: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(5)
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return (F.scaled_dot_product_attention(at, at, at, dropout_p=0.3) * weight).sum()

    (found,) = torch.autograd.grad(value(q), q)
    step = 1e-2
    for i in range(0, q.numel(), 7):
        moved = torch.zeros(q.numel(), device="cuda")
        moved[i] = step
        with torch.no_grad():
            numeric = (value(q + moved.view_as(q)) - value(q - moved.view_as(q))) / (2 * step)
        assert torch.isclose(found.reshape(-1)[i], numeric, atol=1e-3)


def convolutional() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, groups=2), nn.GroupNorm(4, 16), nn.GELU(), nn.ConvTranspose2d(16, 8, 2, stride=2)),
        *(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 10)),
    )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.LSTMCell(8, 16), nn.GRUCell(16, 16), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, hidden = None, None
        for each in x.unbind(1):
            state = self.first(each, state)
            hidden = self.second(state[0], hidden)
        return self.head(hidden)


def transformer() -> nn.Module:
    return nn.Sequential(nn.Embedding(50, WIDTH), Block(0.0), Block(0.0), nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "transformer": (transformer, lambda: torch.randint(50, (4, 16))),
    "convolutional": (convolutional, lambda: torch.randn(4, 3, 16, 16)),
    "recurrent": (Recurrent, lambda: torch.randn(4, 3, 8)),
}


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_on_the_cpu(name: str, fused: bool) -> None:
    build, batch = MODELS[name]
    torch.manual_seed(0)
    model, x = build(), batch()
    target = torch.randint(10, x.shape if name == "transformer" else (4,))

    def losses(device: str) -> list[float]:
        here, optimized = copy.deepcopy(model).to(device), list[float]()
        optimizer = torch.optim.AdamW(here.parameters(), lr=3e-3, fused=fused or None)
        for _ in range(4):
            logits = here(x.to(device))
            loss = F.cross_entropy(logits.flatten(0, -2), target.to(device).flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(here.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            optimized.append(loss.item())
        return optimized

    on_cpu, on_card = losses("cpu"), losses("cuda")
    assert on_card == pytest.approx(on_cpu, rel=1e-5) and on_card[-1] < on_card[0]


def test_a_batch_norm_of_given_statistics_keeps_them_for_its_backward() -> None:
    mean, variance = torch.rand(6, device="cuda"), torch.rand(6, device="cuda") + 0.5
    x = torch.rand(16, 6, device="cuda", requires_grad=True)
    made: Any = F.batch_norm(x, mean, variance).grad_fn
    assert torch.equal(made._saved_result1, mean)
    assert torch.allclose(made._saved_result2, (variance + 1e-5).rsqrt())


@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_are_those_of_the_cpu(mode: str, padding: int | None) -> None:
    bags = nn.EmbeddingBag(16, WIDTH, mode=mode, padding_idx=padding)
    indices, offsets = torch.randint(16, (40,)), torch.tensor([0, 5, 5, 17])  # one is empty

    def found(device: str) -> list[torch.Tensor]:
        here = copy.deepcopy(bags).to(device)
        out = here(indices.to(device), offsets.to(device))
        out.square().sum().backward()
        assert here.weight.grad is not None
        return [out.detach().cpu(), here.weight.grad.cpu()]

    torch.testing.assert_close(found("cuda"), found("cpu"))


def test_bytes_are_those_of_the_allocator() -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    kept = torch.empty(700, dtype=torch.uint8, device="cuda")
    large = torch.empty((24 << 20) + 512, dtype=torch.uint8, device="cuda")
    after = torch.cuda.memory_stats()
    assert after["requested_bytes.all.current"] - before["requested_bytes.all.current"] == kept.nbytes + large.nbytes
    assert after["allocated_bytes.all.current"] - before["allocated_bytes.all.current"] == 1024 + large.nbytes
    assert after["reserved_bytes.all.current"] - before["reserved_bytes.all.current"] in (
        26 << 20,
        28 << 20,
    )  # and a new segment of small blocks


def test_the_card_refuses_more_than_it_has() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(81 << 30, dtype=torch.uint8, device="cuda")


def test_autocast_has_the_lists_of_cuda() -> None:
    x = torch.randn(4, 8, device="cuda", dtype=torch.bfloat16)
    with torch.autocast("cuda", torch.bfloat16):
        assert x.pow(2).dtype is torch.float32 and F.layer_norm(x, (8,)).dtype is torch.float32
        assert (x.float() @ x.float().T).dtype is torch.bfloat16


def test_a_compiled_kernel_computes_in_a_process_that_finds_it_in_a_cache(tmp_path: Path) -> None:
    call = "torch.compile(lambda x: (x.sin() + 1).cos())(torch.arange(8., device='cuda'))"
    program = f"import torch; print({call}.tolist())"
    folder = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    runs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=folder)
        for _ in range(2)
    ]
    assert [run.returncode for run in runs] == [0, 0], runs[1].stderr
    expected = (torch.arange(8.0).sin() + 1).cos()
    for run in runs:
        torch.testing.assert_close(torch.tensor(ast.literal_eval(run.stdout)), expected)
