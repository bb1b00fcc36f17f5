"""Kept here: untraced code between graphs makes its tensors on the device at hand, not on the target.

In traced code the device at hand takes the place of the other one (`capture/elsewhere.py`). What a traced function
learned before a break (`device = x.device`), it passes to the untraced code behind it.
"""

from __future__ import annotations

from typing import Any

from remat._torch.training import UnseenMode
from remat.capture.elsewhere import CaptureDevice


class KeptHere(UnseenMode):
    """Makes and moves tensors on the device at hand in place of the other device; it belongs above fakes."""

    def __init__(self, elsewhere: CaptureDevice):
        super().__init__()
        self._elsewhere = elsewhere

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (device := kwargs.get("device")) is not None:
            kwargs = {**kwargs, "device": self._elsewhere.here_for(device)}
        return func(*args, **kwargs)
