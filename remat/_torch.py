"""torch's internals, behind one door."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class UnseenMode(TorchDispatchMode):
    """A dispatch mode that Dynamo must not take for a reason to fall back to eager code."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True
