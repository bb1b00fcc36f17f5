"""A model that is sharded or summed over ranks in another way than planned says so where the budget may break."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from remat.evaluation.plan import Plan
from remat.execution.apply import apply
from remat.execution.modules.shards import shards_unlike_planned
from remat.workload.optimizers import MasterWeights
from tests.toys import TRANSFORMER, Transformer, plan_by_hand, recorded

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    distributed.destroy_process_group()


@functools.cache
def planned(kind: str | None, **about: Any) -> Plan:
    """A plan whose budget is its peak."""
    plan = plan_by_hand(recorded(TRANSFORMER)[1], ())
    loop = {"shard": kind, "ranks": 2} if kind else {}
    return dataclasses.replace(plan, about=plan.about | loop | about)


def sharded(change: Callable[[Any], None] = lambda model: None, **options: Any) -> nn.Module:
    model = Transformer()
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh)
    change(model)
    return model


def layers_alone() -> nn.Module:
    model = Transformer()
    for layer in model.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    return model


def waits(model: FSDPModule) -> None:
    model.set_requires_gradient_sync(False)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (sharded, []),
        (functools.partial(sharded, reshard_after_forward=False), ["gathered"]),
        (layers_alone, ["gathered"]),
        (functools.partial(sharded, waits), ["whole gradients"]),
        (functools.partial(sharded, mp_policy=BF16), ["policy"]),
    ],
)
def test_what_fully_shard_does_otherwise_is_told(model: Callable[[], nn.Module], told: list[str]) -> None:
    of_bf16 = planned("zero3", parameter_dtypes=("bfloat16",)) if "policy" in told else planned("zero3")
    assert [name for name, _ in shards_unlike_planned(of_bf16, model())] == told
    roomy = dataclasses.replace(of_bf16, budget_bytes=1 << 40)
    assert not list(shards_unlike_planned(roomy, model()))
    assert not list(shards_unlike_planned(planned(None), model()))


def test_a_plan_with_fp32_copies_holds_for_shards_in_fp32() -> None:
    plan = planned("zero3", parameter_dtypes=("bfloat16",), optimizer=MasterWeights.__name__)
    assert not list(shards_unlike_planned(plan, sharded(mp_policy=BF16)))


def test_buckets_that_no_plan_counts_are_told() -> None:
    batch = TRANSFORMER.batch(TRANSFORMER.batch_size, None)
    DistributedDataParallel(apply(Transformer(), planned(None)), gradient_as_bucket_view=True)(*batch)
    DistributedDataParallel(apply(Transformer(), planned(None, ddp=True)))(*batch)
    with pytest.warns(UserWarning, match=r"has .* of gradient buckets, and the plan is for a loop without"):
        DistributedDataParallel(apply(Transformer(), planned(None)))(*batch)
