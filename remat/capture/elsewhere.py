"""Elsewhere: a forward is captured on this machine as another device would run it.

Libraries ask where a tensor is and take another branch on a GPU: grouped experts count integers there and floats on the
CPU. Autocast widens other operators there, so code that reads a dtype bakes another one into its graph. A plan for a
device that is not at hand must be made from the graph that this device will trace. So while Dynamo traces for such a
capture, tensors say that they are on the device, and what a node makes has the dtype and the strides that its kernels
give. The tensors themselves stay where they are: fake tensors on CUDA need a build of torch for CUDA.

Code between two graphs, and the step's own around the model, is not traced. It runs with the device's kernels
(`kernels`), in forward and in backward, and hears where the tensors are. Tensors that it makes on the device are made
here (`recording/kept_here.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class CaptureDevice:
    """The device that a capture is for, if its tensors are on another.

    kernels     context of its kernels on fake tensors, for untraced forwards and the values of traced nodes
    capability  its compute capability        here  type of the device that holds the tensors
    """

    device: torch.device
    kernels: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    capability: tuple[int, int] = (0, 0)
    here: str = "cpu"

    def here_for(self, named: Any) -> Any:
        """Return the device at hand if `named` is the other device or its name; anything else unchanged."""
        name = self.device.type
        if isinstance(named, torch.device) and named.type == name:
            return torch.device(self.here)
        is_name = isinstance(named, str) and named.partition(":")[0] == name
        return self.here if is_name else named
