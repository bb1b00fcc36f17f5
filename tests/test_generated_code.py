"""Inductor's allocations are known without compiling a kernel."""

from __future__ import annotations

import dataclasses
import pickle
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from remat.costing.device_allocator import measure_peak
from remat.errors import RematError, UsageError
from remat.evaluation.graph import Graph
from remat.evaluation.plan import Plan
from remat.execution.apply import apply
from remat.execution.compiled import compiling, partitioning
from remat.execution.compiled import replay as replay_compiled
from remat.execution.compiled.compiling import AOT_EAGER, INDUCTOR
from remat.recording.fake_step import FakeStep
from remat.recording.tracker import Tracker
from remat.workload.workload import Workload
from tests.cached import cached
from tests.test_applying import batch_of, built, gradients, loss_of
from tests.toys import CHOICES, CPU, every_block, plan_by_hand, recorded

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo", "one_thread"),
    pytest.mark.filterwarnings("ignore"),  # of Inductor's own
]

WIDTH = 512


class Halves(nn.Module):
    """Two layers whose inside is large, with a dropout each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, WIDTH), nn.GELU(), nn.Dropout(0.5), nn.Linear(WIDTH, 8)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class Stem(nn.Module):
    """How convolutional networks begin: few channels of a large image, pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
                nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU()),
            ]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


COMPILER = shutil.which("g++") or shutil.which("clang++")
SAMPLES, SIDE = 16, 32
HALVES = Workload("halves", Halves, lambda size, length: (torch.randn(size, 8),), lambda m, b: m(*b), batch_size=256)
STEM = Workload(
    "stem", Stem, lambda size, length: (torch.randn(size, 3, SIDE, SIDE),), lambda m, b: m(*b), batch_size=SAMPLES
)
IMAGES = 4 * SAMPLES * 3 * SIDE**2
AFTER_POOL = SAMPLES * 8 * SIDE**2 // 4  # elements

Seen = list[Tracker]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """The trackers of a replay, which compiles under the first."""
    found: Seen = []
    made = replay_compiled._CompiledTracker.__init__

    def noting(self: Tracker, *args: int) -> None:
        made(self, *args)
        found.append(self)

    monkeypatch.setattr(replay_compiled._CompiledTracker, "__init__", noting)
    yield found


@cached
def planned(workload: Workload, choose: Callable[[Graph], object] = every_block) -> tuple[FakeStep, Plan]:
    fake, graph = recorded(workload)
    return fake, plan_by_hand(graph, choose(graph))  # type: ignore[arg-type]


def peak(fake: FakeStep, plan: Plan | None = None, compiler: str = INDUCTOR) -> int:
    return int(replay_compiled.replay_compiled(fake, plan.regions if plan else (), compiler=compiler).max())


def made(tracker: Tracker, size_bytes: int) -> int:
    return sum(storage.size_bytes == size_bytes for storage in tracker.storages)


def test_regions_need_less_under_inductor_too_and_inductor_less_than_aot_eager() -> None:
    fake, plan = planned(HALVES)
    without, with_regions = peak(fake), peak(fake, plan)
    assert with_regions < 0.8 * without
    assert with_regions <= peak(fake, plan, AOT_EAGER)


@pytest.mark.exhaustive
def test_a_replay_is_the_same_the_second_time() -> None:
    fake, plan = planned(HALVES, CHOICES["half-saved"])
    first = replay_compiled.replay_compiled(fake, plan.regions, compiler=INDUCTOR)
    second = replay_compiled.replay_compiled(fake, plan.regions, compiler=INDUCTOR)
    assert first.tolist() == second.tolist()


@pytest.mark.parametrize("fallback", [False, True], ids=["seeds", "generator"])
def test_random_numbers_of_either_kind_are_replayed(fallback: bool, seen: Seen) -> None:
    fake, plan = planned(HALVES)
    with torch._inductor.config.patch(fallback_random=fallback):
        peak(fake, plan)
    assert any("native_dropout" in kind.name for kind in seen[-1].kinds.values()) == fallback


def test_no_kernel_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.codecache import CppCodeCache

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a kernel is compiled")

    fake, plan = planned(HALVES)
    peak(fake)  # asks once what vectors this machine has, by compiling
    monkeypatch.setattr(CppCodeCache, "load_async", refuse)
    peak(fake, plan)


@pytest.mark.exhaustive
def test_a_graph_input_is_not_saved_twice(monkeypatch: pytest.MonkeyPatch, seen: Seen) -> None:
    fake, plan = planned(dataclasses.replace(STEM, autocast=torch.bfloat16))
    ours = peak(fake, plan)
    assert made(seen[-1], IMAGES) == 0  # only its cast to 16 bits, which no region keeps
    monkeypatch.setattr(partitioning, "keep_input_layouts", lambda forward: None)
    assert peak(fake, plan) >= ours
    assert made(seen[-1], IMAGES) == 1


@pytest.mark.exhaustive
def test_the_gradient_of_max_pooling_needs_no_indices(monkeypatch: pytest.MonkeyPatch, seen: Seen) -> None:
    fake, plan = planned(STEM)
    with torch._inductor.config.patch({"cpp.threads": 2}):  # one thread adds in place, and needs no indices either
        ours = peak(fake, plan)
        assert made(seen[-1], 8 * AFTER_POOL) == 0
        monkeypatch.setattr(compiling, "_WASTEFUL", ())
        assert peak(fake, plan) > ours
    assert made(seen[-1], 8 * AFTER_POOL) > 0


def test_a_torch_that_cannot_be_replayed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import codecache

    fake, plan = planned(HALVES)
    monkeypatch.delattr(codecache.PyCodeCache, "load_by_key_path")
    with pytest.raises(RematError, match=r"has no PyCodeCache.load_by_key_path: what its Inductor allocates"):
        peak(fake, plan)


def test_generated_code_of_another_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import codecache

    fake, plan = planned(HALVES)
    monkeypatch.setattr(codecache.PyCodeCache, "write", _without("reinterpret_tensor = ", codecache.PyCodeCache.write))
    with pytest.raises(RematError, match="generates modules of another form"):
        peak(fake, plan)


def _without(text: str, write: Callable[..., tuple[str, str]]) -> Callable[..., tuple[str, str]]:
    return lambda source, *args: write(source.replace(text, "renamed = "), *args)


def test_a_compiler_of_another_name_is_refused() -> None:
    fake, plan = planned(HALVES)
    with pytest.raises(UsageError, match="kept by the compilers inductor and aot_eager, not by 'eager'"):
        peak(fake, plan, "eager")


def test_kernels_own_bytes_are_counted_where_they_are_known(seen: Seen) -> None:
    fake, plan = planned(STEM)
    replay = replay_compiled.replay_compiled
    alive = replay(fake, plan.regions, compiler=AOT_EAGER)
    kind = next(kind for kind in seen[-1].kinds.values() if kind.name == "aten.convolution_backward.default")
    own = {kind.key: 7}
    again = replay(fake, plan.regions, compiler=AOT_EAGER, workspace_of=own)
    assert sorted(set((again - alive).tolist())) == [0, 7]


def test_the_decompositions_are_found_again_by_the_cache_of_kernels() -> None:
    from torch._inductor import compile_fx

    with compiling._inductor_settings():
        assert pickle.loads(pickle.dumps(compile_fx.select_decomp_table)) is compiling._decompositions
    assert compile_fx.select_decomp_table is not compiling._decompositions


@pytest.mark.exhaustive  # `test_compiling.py` says the same of a transformer
@pytest.mark.skipif(COMPILER is None, reason="Inductor needs a C++ compiler")
def test_a_planned_stem_is_right_and_needs_what_its_replay_says() -> None:
    fake, graph = recorded(STEM)
    plan = plan_by_hand(graph, every_block(graph))
    replayed = int(replay_compiled.replay_compiled(fake, plan.regions, compiler=INDUCTOR, device=CPU).max())
    untouched, model = built(STEM), apply(built(STEM), plan)
    run: Any = torch.compile(model)
    batch = batch_of(STEM)
    for each in (untouched, run):
        loss_of(STEM, each, batch).backward()
    for got, expected in zip(gradients(model), gradients(untouched), strict=True):
        torch.testing.assert_close(got, expected)
    model.zero_grad()
    measured = graph.fixed_total + measure_peak(lambda: loss_of(STEM, run, batch).backward(), CPU)
    assert measured == replayed + graph.unseen_bytes
