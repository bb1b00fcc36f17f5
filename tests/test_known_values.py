"""Integers of a batch keep their values while planning: what decides shapes is answered, and nothing else is known."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.ao.quantization import (
    FusedMovingAvgObsFakeQuantize,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
)
from torch.utils._pytree import tree_leaves

from remat._torch.dynamo import handlers
from remat._torch.training import without_modes
from remat.capture.eager_answers import traced_as
from remat.errors import CaptureError
from remat.evaluation.graph import STATE
from remat.evaluation.plan import Region
from remat.execution.apply import apply, counts_of
from remat.models import REGISTRY, build
from remat.recording.fake_step import FakeStep
from remat.recording.known_values import KnownValues
from remat.validation.validating import validate
from remat.workload.workload import Workload
from tests.toys import CPU, every_block, graph_of, plan_by_hand, recorded

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")


@pytest.fixture
def known() -> Iterator[KnownValues]:
    found = KnownValues()
    with FakeTensorMode(), found.followed():
        yield found


def ends() -> torch.Tensor:
    """Where sequences end, of a batch of images of 2 x 3 and 4 x 1 patches."""
    grid = torch.tensor([[2, 3], [4, 1]])
    return F.pad(grid.prod(-1).cumsum(0), (1, 0))


@pytest.mark.cuda
def test_a_constant_on_the_gpu_is_known(known: KnownValues) -> None:
    counts = torch.tensor([2, 3], device="cuda")  # plain, until it is lifted
    assert torch.arange(2, device="cuda").repeat_interleave(counts).shape == (5,)


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        pytest.param(lambda e: e.tolist(), [0, 6, 10], id="numbers"),
        pytest.param(lambda e: int(e[1]), 6, id="a-number"),
        pytest.param(lambda e: bool((e.diff() > 0).all()), True, id="a-branch"),
        pytest.param(lambda e: torch.arange(2).repeat_interleave(e.diff()).shape, (10,), id="repeated"),
        pytest.param(lambda e: (e == 6).nonzero().shape, (1, 1), id="found"),
        pytest.param(lambda e: torch.empty(3, 5)[e > 0].shape, (2, 5), id="picked-from-what-is-unknown"),
        pytest.param(lambda e: torch.tensor([e[1], e[2]]).tolist(), [6, 10], id="made-of-a-list"),
        pytest.param(lambda e: (e / 2).round().long().tolist(), [0, 3, 5], id="by-way-of-floats"),
        pytest.param(
            lambda e: torch.ones_like(torch.empty(2, 5), dtype=torch.long).sum(-1).tolist(), [5, 5], id="shape"
        ),
        pytest.param(lambda e: torch.empty(3).new_full((2,), 7, dtype=torch.int).tolist(), [7, 7], id="filled"),
        pytest.param(lambda e: e.to("meta").tolist(), [0, 6, 10], id="on-another-device"),
    ],
)
def test_what_is_computed_out_of_known_values_is_known(
    known: KnownValues, ask: Callable[[torch.Tensor], Any], answer: Any
) -> None:
    assert ask(ends()) == answer


@pytest.mark.parametrize(
    ("make", "error"),
    [
        pytest.param(lambda: torch.randint(5, (3,)).sum().item(), DataDependentOutputException, id="random"),
        pytest.param(lambda: (torch.empty(3) > 0).nonzero(), DynamicOutputShapeException, id="uninitialised"),
        pytest.param(lambda: (ends() + torch.empty(3).long()).nonzero(), DynamicOutputShapeException, id="mixed"),
        pytest.param(lambda: ends().add_(torch.empty(3).long()).nonzero(), DynamicOutputShapeException, id="written"),
    ],
)
def test_nothing_else_is_known(known: KnownValues, make: Callable[[], Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        make()


def test_a_mask_of_many_positions_takes_no_memory(known: KnownValues) -> None:
    positions = torch.arange(1 << 20)
    mask = positions[:, None] >= positions[None]  # a TiB
    assert known.of(mask) is None


def test_writing_something_unknown_into_a_view_makes_its_base_unknown(known: KnownValues) -> None:
    base, other = ends(), ends()
    base[1:].copy_(torch.empty(2).long())
    assert known.of(base) is None and known.of(other) is not None
    other[1:] = 7
    assert other.tolist() == [0, 7, 7]


def test_writing_into_an_empty_tensor_leaves_other_empty_ones_known(known: KnownValues) -> None:
    one, other = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    one.add_(torch.randint(3, (0,)))
    assert known.of(one) is None and known.of(other) is not None


def test_what_is_overwritten_as_a_whole_is_known_until_a_view_from_before_is_written_into(known: KnownValues) -> None:
    base = torch.empty(3).long()
    part = base[1:]
    part.copy_(torch.arange(2))
    assert known.of(base) is None
    base.copy_(torch.arange(3))
    assert base.tolist() == [0, 1, 2]
    part.zero_()
    assert known.of(base) is None


def test_a_table_of_positions_of_a_model_takes_no_memory_and_what_has_data_is_written_once() -> None:
    found = KnownValues()
    with torch.device("meta"), found.of_model():
        positions, few, real = torch.arange(1024), torch.arange(4), torch.zeros(1, device="cpu")
        few[0] = real.add_(1)
    value = found.of(few)
    assert found.of(positions) is None and value is not None and value.tolist() == [1, 1, 2, 3] and real == 1


def test_random_integers_of_a_batch_are_known_and_what_a_generator_gives_elsewhere_stays() -> None:
    state = torch.get_rng_state()
    found = KnownValues()
    with FakeTensorMode(), found.of_batch():
        ids = torch.randint(1, 9, (4, 8))
        ids[:, 2:4] = 50
        assert (ids == 50).sum() == 8 and ids[ids != 50].shape == (24,)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda ids: ids.masked_fill(torch.rand(ids.shape) < 0.5, -100), id="rand"),
        pytest.param(lambda ids: ids.masked_fill(torch.bernoulli(torch.full(ids.shape, 0.5)).bool(), -100), id="coin"),
        pytest.param(lambda ids: ids.masked_fill(torch.randn_like(ids.float()) > 0, -100), id="like"),
        pytest.param(lambda ids: ids.masked_fill(torch.zeros(ids.shape).uniform_() < 0.5, -100), id="in-place"),
        pytest.param(
            lambda ids: ids.masked_fill(torch.rand(ids.shape, generator=torch.Generator()) < 0.5, -100), id="generator"
        ),
    ],
)
def test_integers_that_random_floats_of_a_batch_steer_are_known_and_the_floats_are_not(
    make: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    state = torch.get_rng_state()
    found = KnownValues()
    with FakeTensorMode(), found.of_batch():
        labels, noise = make(torch.arange(32)), torch.rand(4)
        scaled = 2 * noise[1:]
    kept = found.of(labels)
    assert kept is not None and 0 < int((kept == -100).sum()) < 32
    assert found.of(noise) is None and found.of(scaled) is None
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", REGISTRY)
def test_the_integers_of_every_ready_made_batch_are_known_at_full_size(name: str) -> None:
    """A vocabulary is no size of a tensor: 4,096 ids below 151,936 are few."""
    found, workload = KnownValues(), build(name)
    with FakeTensorMode(), found.of_batch():
        batch = workload.batch(workload.batch_size, workload.seq_len)
        given = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        integers = [leaf for leaf in given if not leaf.is_floating_point()]
        assert integers and all(found.of(leaf) is not None for leaf in integers)


def test_a_default_device_that_a_step_was_first_to_enter_is_that_of_later_tensors() -> None:
    """torch lists functions that make tensors once, at the first call under `with torch.device(...)`."""
    torch.utils._device._device_constructors.cache_clear()
    with KnownValues().followed(), torch.device("meta"):
        torch.empty(0)
    with torch.device("meta"):
        assert torch.tensor(1).is_meta


def test_dynamo_knows_the_function_that_is_stood_in_for_and_not_what_stands_in() -> None:
    """It registers its handlers once in a process, by the functions that it finds then."""
    with KnownValues().followed():
        instead = torch.tensor
    assert instead is not torch.tensor
    assert torch.tensor in handlers() and instead not in handlers()


def test_it_knows_the_function_too_where_a_process_group_began_since() -> None:
    """Then it looks for the functions of torch again."""
    rules = importlib.import_module("torch._dynamo.trace_rules")
    rules.clear_lru_cache()  # as `torch.distributed.init_process_group` does
    with KnownValues().followed():
        assert torch.tensor not in rules.get_torch_obj_rule_map()
    assert torch.tensor in rules.get_torch_obj_rule_map()


def test_a_stand_in_for_a_function_is_followed_as_the_function() -> None:
    @traced_as(torch.sin)
    def other(x: torch.Tensor) -> torch.Tensor:
        return torch.cos(x)

    def fingerprints(function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        class Model(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return function(super().forward(x))

        def batch(samples: int, length: int | None) -> torch.Tensor:
            return torch.randn(samples, 4)

        return graph_of(Workload("", lambda: Model(4, 4), batch, lambda model, x: model(x).sum(), 2)).fingerprints

    assert fingerprints(other) == fingerprints(torch.sin) != fingerprints(torch.cos)


# A model of images of different sizes

IMAGE, VOCAB, WIDTH = 15, 16, 8


class Images(nn.Module):
    """Patches of images attend within each image; what comes out takes the places of tokens that stand for it."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.qkv = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)])

    def forward(self, ids: torch.Tensor, pixels: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.patch(pixels)).chunk(3, -1)
        lengths = grid.prod(-1).tolist()
        parts = [torch.split(each, lengths) for each in (q, k, v)]
        seen = torch.cat(
            [F.scaled_dot_product_attention(*(p[None] for p in part))[0] for part in zip(*parts, strict=True)]
        )
        x = self.embed(ids)
        x = x.masked_scatter((ids == IMAGE).unsqueeze(-1), seen)
        x[ids == IMAGE, :] = x[ids == IMAGE, :] * 2
        for layer in self.layers:
            x = x + layer(x)
        return x


class Turned(Images):
    """Each image is laid out by height and width, which are tensors that no number was read off."""

    def forward(self, ids: torch.Tensor, pixels: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        sizes = [(height, width) for height, width in grid]
        turned = []
        for (height, width), image in zip(sizes, pixels.split([h * w for h, w in sizes]), strict=True):
            turned.append(image.view(height, width, 3).flip(0).reshape(-1, 3))
        return super().forward(ids, torch.cat(turned), grid)


def images(samples: int, length: int | None) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, IMAGE, (samples, 12))
    ids[:, 2:8] = IMAGE
    grid = torch.tensor([[2, 3], [1, 6]])[torch.arange(samples) % 2]
    return {"ids": ids, "pixels": torch.randn(samples * 6, 3), "grid": grid}


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    value: torch.Tensor = model(**batch).square().mean()
    return value


WORKLOAD = Workload("images", Images, images, loss, 4)


@pytest.mark.parametrize("build", [Images, Turned])
def test_a_model_whose_shapes_depend_on_its_batch_trains_alike_under_a_plan(build: type[Images]) -> None:
    graph = graph_of(dataclasses.replace(WORKLOAD, build=build))
    assert len(graph.fingerprints) > 1
    plan = plan_by_hand(graph, every_block(graph))
    torch.manual_seed(0)
    expected, model = build(), build()
    model.load_state_dict(expected.state_dict())
    apply(model, plan)
    for seed in range(2):
        torch.manual_seed(seed)
        batch = images(4, None)
        for each in (expected, model):
            each.zero_grad()
            loss(each, batch).backward()
        for p, q in zip(expected.parameters(), model.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)
    assert counts_of(model).regions == 2 * len(plan.regions) > 0


@pytest.mark.exhaustive
def test_the_plan_of_such_a_model_validates() -> None:
    graph = graph_of(WORKLOAD)
    assert validate(WORKLOAD, plan_by_hand(graph, every_block(graph)), device=CPU).passed


def test_a_size_that_depends_on_a_weight_is_refused() -> None:
    class Routed(Images):
        def forward(self, ids: torch.Tensor, pixels: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
            x = super().forward(ids, pixels, grid)
            return x[x.sum(-1) > 0]

    workload = Workload("routed", Routed, images, loss, 4)
    with pytest.raises(CaptureError, match=r"fails on fake tensors: DynamicOutputShapeException"):
        recorded(workload)


# A model that asks a flag among its buffers

FLAGS: dict[str, Callable[[bool], torch.Tensor]] = {
    "a tensor of its own": lambda is_set: torch.Tensor([is_set]),
    "made where the model is": lambda is_set: torch.tensor(is_set),
    "a byte": lambda is_set: torch.tensor(int(is_set), dtype=torch.uint8),
    "filled": lambda is_set: torch.zeros(1).fill_(is_set),
    "filled out of sight of versions": lambda is_set: filled(torch.tensor(0), is_set),
    "computed": lambda is_set: torch.tensor(False) | is_set,
    "copied": lambda is_set: torch.empty(1).copy_(torch.Tensor([is_set])),
    "loaded": lambda is_set: loaded(torch.tensor(is_set, device="cpu")),
    "of several": lambda is_set: torch.tensor([False, True])[torch.tensor([int(is_set)])],
}


def filled(flag: torch.Tensor, is_set: bool) -> torch.Tensor:
    flag.data.fill_(is_set)
    return flag


def loaded(flag: torch.Tensor) -> torch.Tensor:
    holder = nn.Module()
    holder.register_buffer("flag", torch.tensor(False))
    holder.load_state_dict({"flag": flag})
    return holder.get_buffer("flag")


class Flagged(nn.Module):
    """Quantizes by a table, which the first forward fills unless the flag is set, as in libraries of such layers."""

    filled: torch.Tensor
    table: torch.Tensor

    def __init__(self, flag: Callable[[bool], torch.Tensor], *, is_set: bool, asks_last: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.asks_last = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), asks_last
        self.register_buffer("filled", flag(is_set))
        self.register_buffer("table", torch.ones(4, WIDTH))

    def fill(self, x: torch.Tensor) -> torch.Tensor:
        if self.filled:
            return x
        self.table.copy_(x[:4].detach())
        self.filled.fill_(1)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(F.gelu(self.up(x)))
        if self.asks_last:
            return self.fill(x)
        x = self.fill(x)
        nearest = torch.cdist(x.detach(), self.table).argmin(-1)
        return x + (self.table[nearest] - x).detach()


def flagged(name: str, **options: bool) -> Workload:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return Flagged(FLAGS[name], **options)

    return Workload("flagged", build, lambda n, _: torch.randn(n, WIDTH), lambda m, x: m(x).square().mean(), 64)


@pytest.mark.fast("False-computed", "True-loaded", "False-filled out of sight of versions", "True-of several")
@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("asks_last", [False, True])
def test_a_flag_that_no_forward_sets_is_known_and_its_graph_call_may_have_no_nodes(name: str, asks_last: bool) -> None:
    workload = flagged(name, is_set=True, asks_last=asks_last)
    graph = graph_of(workload)
    assert [len(nodes) for nodes in graph.call_nodes].count(0) == 1
    plan = plan_by_hand(graph, [Region(0, 2)])
    plain, planned = workload.build(), apply(workload.build(), plan)
    for seed in range(2):
        for each in (plain, planned):
            torch.manual_seed(seed)
            workload.step(each, workload.batch(64, None)).backward()
    assert counts_of(planned).regions == 2
    for p, q in zip(plain.parameters(), planned.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)


class SetInAList(Flagged):
    def fill(self, x: torch.Tensor) -> torch.Tensor:
        torch._foreach_add_([self.filled], 1.0)
        return super().fill(x)


class SetThroughItsBase(Flagged):
    def fill(self, x: torch.Tensor) -> torch.Tensor:
        self.state.add_(1.0)
        return super().fill(x)

    def __init__(self, flag: Callable[[bool], torch.Tensor], **options: bool) -> None:
        super().__init__(flag, **options)
        self.state = torch.Tensor([1.0, 1.0])
        self.filled = self.state[:1]


class SetUnderAnotherName(Flagged):
    def fill(self, x: torch.Tensor) -> torch.Tensor:
        self.state.add_(1.0)
        return super().fill(x)

    def __init__(self, flag: Callable[[bool], torch.Tensor], **options: bool) -> None:
        super().__init__(flag, **options)
        self.state = self.filled.detach()


class SetByTheBatch(Flagged):
    def fill(self, x: torch.Tensor) -> torch.Tensor:
        self.filled.copy_(x.detach().mean() > 0)
        return super().fill(x)


@pytest.mark.parametrize("kind", [SetThroughItsBase, SetUnderAnotherName, SetByTheBatch])
def test_a_flag_that_is_written_out_of_sight_or_with_what_is_unknown_is_not_known(kind: type[Flagged]) -> None:
    workload = dataclasses.replace(
        flagged("a byte", is_set=True), build=lambda: kind(FLAGS["a tensor of its own"], is_set=True)
    )
    with pytest.raises(CaptureError, match="reads a number off a tensor"):
        graph_of(workload)


def test_a_flag_that_is_written_in_a_list_of_tensors_is_followed() -> None:
    workload = dataclasses.replace(
        flagged("a byte", is_set=True), build=lambda: SetInAList(FLAGS["a tensor of its own"], is_set=True)
    )
    report = validate(workload, plan_by_hand(graph_of(workload), [Region(0, 2)]), device=CPU)
    assert report.passed and report.recomputed_nodes["observed"], report


class Lengths(nn.Module):
    """Has few integers and a mask among its buffers, which decide shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(48, WIDTH)
        self.register_buffer("lengths", torch.zeros(2, dtype=torch.long))
        self.register_buffer("chosen", torch.zeros(64, dtype=torch.bool))
        self.get_buffer("lengths")[0] = 16
        self.get_buffer("lengths")[1:] += 48
        self.get_buffer("chosen")[:48] = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.up(x))
        first, second = x.split(self.get_buffer("lengths").tolist(), -1)
        return self.down(x[:, self.get_buffer("chosen")]) + first.sum() * second.sum()


def test_few_integers_of_a_model_are_known() -> None:
    workload = Workload("lengths", Lengths, lambda n, _: torch.randn(n, WIDTH), lambda m, x: m(x).square().mean(), 64)
    report = validate(workload, plan_by_hand(graph_of(workload), [Region(0, 2)]), device=CPU)
    assert report.passed, report


class Helped(nn.Linear):
    """Names a helper for each mode, with a table each, of which training touches one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return helped(super().forward(x)) if self.training else evaluated(super().forward(x))


def helped(x: torch.Tensor) -> torch.Tensor:
    return x * TOUCHED


def evaluated(x: torch.Tensor) -> torch.Tensor:
    return x * UNTOUCHED


TOUCHED, UNTOUCHED = torch.ones(WIDTH), torch.ones(1000, WIDTH)


def test_of_tensors_that_helpers_name_those_count_that_the_step_touches() -> None:
    workload = Workload("helped", lambda: Helped(WIDTH, WIDTH), lambda n, _: torch.ones(n, WIDTH), total, batch_size=4)
    assert graph_of(workload).fixed_bytes[STATE] == TOUCHED.nbytes


def total(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).sum()
    return loss


@pytest.mark.fast("computed", "a byte")
@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_that_the_first_forward_sets_is_followed(name: str) -> None:
    workload = flagged(name, is_set=False)
    graph = graph_of(workload)
    assert graph.about["early_forwards"] == 1
    plan = plan_by_hand(graph, [Region(0, 2)])
    plain, planned = workload.build(), apply(workload.build(), plan)
    with pytest.warns(UserWarning, match="this forward has another graph than later ones"):
        for seed in range(3):
            for each in (plain, planned):
                torch.manual_seed(seed)
                workload.step(each, workload.batch(64, None)).backward()
    assert counts_of(planned).regions >= 3
    for p, q in zip(plain.parameters(), planned.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)
    assert all(map(torch.equal, plain.buffers(), planned.buffers()))


def test_flags_are_put_back_with_the_rest_of_a_model_and_changes_name_those_that_code_reads() -> None:
    torch.manual_seed(0)
    step = FakeStep(dataclasses.replace(flagged("a byte", is_set=False), build=SetTwice), device=CPU)
    untouched = step.state()
    step.warm_up()
    changes = untouched.changes(statistics=False)
    assert changes["filled"] == "number" and "calls" not in changes
    untouched.put_back()
    assert step.flags == {"filled": [0]}


class SetTwice(Flagged):
    """Has a second flag, a counter, that no code reads."""

    def __init__(self) -> None:
        super().__init__(FLAGS["a byte"], is_set=False)
        self.register_buffer("calls", torch.tensor(0))

    def fill(self, x: torch.Tensor) -> torch.Tensor:
        self.get_buffer("calls").add_(1)
        return super().fill(x)


class Observed(nn.Linear):
    """Rounds its weight as quantization would; an observer of channels has buffers that grow as it first runs."""

    def __init__(self, *, by_channel: bool) -> None:
        super().__init__(WIDTH, 3 * WIDTH)
        observer = MovingAveragePerChannelMinMaxObserver if by_channel else MovingAverageMinMaxObserver
        limits: dict[str, Any] = {"quant_min": -128, "quant_max": 127, "dtype": torch.qint8}
        self.rounded = FusedMovingAvgObsFakeQuantize(
            observer, qscheme=torch.per_channel_symmetric if by_channel else torch.per_tensor_symmetric, **limits
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.rounded(self.weight), self.bias).tanh()


@pytest.mark.parametrize("by_channel", [True, False])
def test_buffers_of_an_observer_are_counted_as_large_as_its_first_forward_makes_them(by_channel: bool) -> None:
    def observed() -> nn.Module:
        return Observed(by_channel=by_channel)

    workload = Workload("observed", observed, lambda n, _: torch.ones(n, WIDTH), total, batch_size=4)
    model, graph = observed(), graph_of(workload)
    began = sum(buffer.nbytes for buffer in model.buffers())
    total(model, torch.ones(4, WIDTH))
    ran = sum(buffer.nbytes for buffer in model.buffers())
    assert graph.fixed_bytes["buffers"] == ran
    assert (ran > began) == by_channel


def test_an_observer_keeps_what_it_sees_of_real_tensors() -> None:
    torch.manual_seed(0)
    model, x = Observed(by_channel=True), torch.ones(4, WIDTH)
    with KnownValues().followed():
        total(model, x)
    assert torch.equal(model.rounded.activation_post_process.min_val, model.weight.amin(1))


@pytest.mark.parametrize(
    "shaped",
    [
        lambda mask: mask.nonzero(),
        lambda mask: torch.ones(8)[mask],
        lambda mask: torch.arange(8).repeat_interleave(mask.long()),
    ],
    ids=["nonzero", "index", "repeats"],
)
def test_a_buffer_that_decides_a_shape_is_asked_for(
    known: KnownValues, shaped: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    with without_modes():
        kept = torch.arange(8) < 3
    mask = torch.empty(8, dtype=torch.bool)
    known.note_buffer(mask, kept)
    assert not known.is_asked(mask)
    assert shaped(mask).shape[0] == 3
    assert known.is_asked(mask)
