"""The placeholder for logits that never exist at once."""

from __future__ import annotations

from typing import Any, NoReturn

from torch.utils._pytree import tree_leaves

from remat.errors import RematError


class LogitsWithheld(RematError, AttributeError):
    """The caller reads logits that do not exist.

    An AttributeError too: a check for a dtype finds none.
    """


class WithheldLogits:
    """Stands in for the logits of a chunked head. Reading it raises `LogitsWithheld`.

    remedy  names what leaves them whole
    """

    def __init__(self, slices: int, remedy: str = "make a plan that does not chunk the loss (exact=True, --exact)"):
        self.slices, self.remedy = slices, remedy

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise LogitsWithheld(
            f"the logits do not exist in training: the plan computes the loss in {self.slices} chunks. Do not read "
            f"them, or {self.remedy}. They exist in evaluation."
        )

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        next(value for value in tree_leaves((args, kwargs)) if isinstance(value, cls))._refuse()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # names that copying, pickling and type checks look up
            raise AttributeError(name)
        self._refuse()

    __getitem__ = __iter__ = __len__ = __bool__ = __float__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __matmul__ = _refuse

    def __repr__(self) -> str:
        return f"<logits withheld: the loss ran slice by slice ({self.slices})>"
