"""How a node of a region is tagged for a partitioner."""

from __future__ import annotations

from torch.utils.checkpoint import CheckpointPolicy

SAVED, RECOMPUTED = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE
