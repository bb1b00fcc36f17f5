"""Private parts of torch for `fully_shard`: what each group of parameters does with its shards."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable

import torch
from torch import nn

from remat._torch.door import internal


@dataclasses.dataclass(frozen=True)
class ShardedGroup:
    """The parameters of a module under `fully_shard`.

    elements   of all ranks                   stored  their dtype as shards    computed  as they are gathered
    is_root    whether no other group is around theirs, so that they stay gathered
    stays      whether they stay gathered after forward
    reduces    whether their gradients are scattered after backward
    """

    elements: int
    stored: torch.dtype
    computed: torch.dtype
    is_root: bool
    stays: bool
    reduces: bool


def sharded_groups(model: nn.Module) -> list[ShardedGroup]:
    """List the groups of parameters of `model`; none where it is not sharded."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    units = {path: module for path, module in model.named_modules() if isinstance(module, fsdp.FSDPModule)}
    if units:
        internal("distributed.fsdp.FSDPModule._get_fsdp_state", "compare shards with a plan")
    found = []
    for path, unit in units.items():
        state = unit._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for group in filter(None, groups):
            shards = [each.sharded_param for each in group.fsdp_params]
            if shards:
                found.append(
                    ShardedGroup(
                        elements=sum(shard.numel() for shard in shards),
                        stored=shards[0].dtype,
                        computed=group.mp_policy.param_dtype or shards[0].dtype,
                        is_root=state._is_root if state._is_root is not None else not _is_inside(path, units),
                        stays=group.post_forward_mesh_info is None,
                        reduces=group.reduce_grads,
                    )
                )
    return found


def _is_inside(path: str, units: Iterable[str]) -> bool:
    return any(path != other and (not other or path.startswith(f"{other}.")) for other in units)
