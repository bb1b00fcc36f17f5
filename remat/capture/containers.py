"""Lists, deques and dictionaries of a model are traced as `_torch/containers.py` says, in every capture."""

from __future__ import annotations

import contextlib
from typing import Any

from remat._torch.containers import containers_kept
from remat.capture.eager_answers import capture_of
from remat.shared import Shared


def _change() -> contextlib.AbstractContextManager[None]:
    return containers_kept(_is_ours)


def _is_ours(tx: Any) -> bool:
    return capture_of(tx) is not None


kept_containers = Shared(_change)
