"""Deferred forwards: a step whose forwards run in its backward, one mini-batch after another (GradCache).

A loss over all pairs of a large batch needs the embeddings of all of it, and not their activations. So they are made
without gradients, the loss is differentiated as far as the embeddings, and a hook on the loss runs each mini-batch
again, with gradients, and its backward at once (Gao et al. 2021; the cached losses of sentence-transformers). Only one
mini-batch is alive at a time, and each is a pass of its own: a forward and its backward.

What is recorded of such a step is all that it computes before its backward, and the largest of its passes, in place of
a loss and its backward. Before that pass the gradients of parameters are made, which are there from the second pass on.
Of all other forwards one is run for every shape. Later ones get tensors of those shapes: a batch of thousands would
take minutes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from remat.errors import CaptureError

Run = Callable[[], Any]


class _BackwardReached(Exception):
    """The recorded pass has run its forwards, and calls its backward."""


class DeferredPasses:
    """The passes of a step that runs its forwards in its backward.

    count    number of passes
    largest  number of the pass that is recorded; None: not known yet
    padded   whether any pass was given padding
    """

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self._parameters = parameters
        self.count, self.padded = 0, False
        self.largest: int | None = None
        self._shapes: dict[Any, _Shapes | None] = {}  # of outputs, by the arguments of a forward
        self._elements: list[int] = []  # of each pass
        self._here = self._waiting = 0  # the present pass, and the elements that its forwards were given so far
        self._reached: _BackwardReached | None = None  # it keeps everything that the interrupted backward keeps
        self._go_on: Callable[[], None] | None = None

    def find(self, loss: torch.Tensor) -> None:
        """Run the backward of a step, and find its passes."""
        self._here = self._waiting = 0
        with self._watching():
            loss.backward()
        self.count = len(self._elements)
        most = max(self._elements, default=0)
        self.largest = max((number for number, size in enumerate(self._elements) if size == most), default=None)

    def reach(self, loss: torch.Tensor) -> torch.Tensor:
        """Run backward until the backward of its largest pass; return the tensor that it is called on."""
        self._here = self._waiting = 0
        try:
            with self._watching():
                loss.backward()
        except _BackwardReached as reached:
            self._reached = reached
            root: torch.Tensor = reached.args[0]
            return root
        raise CaptureError("the step runs backward in other passes each time, so no record of it holds for the next.")

    def go_on(self) -> None:
        """Run the backward of the pass that was reached."""
        assert self._go_on is not None
        self._go_on()

    def let_go(self) -> None:
        """Note that the step is over."""
        self._reached = self._go_on = None

    def forward(self, given: Any, elements: int, run: Run) -> Any:
        """Return the output of a forward with arguments `given` of `elements` elements; `run` runs it."""
        if not torch.is_grad_enabled():
            return self._once((given, False), run)
        self._waiting += elements
        if not self.is_at_largest:
            return self._once((given, True), run)
        if self.count > 1:
            self._make_gradients()
        return run()

    def _make_gradients(self) -> None:
        """Allocate the gradients of parameters, as an earlier pass has."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter, requires_grad=False)

    @property
    def is_at_largest(self) -> bool:
        """Whether a forward with gradients is of the pass that is recorded."""
        return self._here == self.largest

    def _once(self, key: tuple[Any, bool], run: Run) -> Any:
        if key not in self._shapes:
            made = run()
            self._shapes[key] = _Shapes.of(made)
            if not key[1]:
                return made
        shapes = self._shapes[key]
        return run() if shapes is None else shapes.made(requires_grad=key[1])

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """End a pass at each backward call that follows a forward, while the context is open."""
        original = torch.autograd.backward

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if self._waiting:
                elements, self._waiting = self._waiting, 0
                here, self._here = self._here, self._here + 1
                if here == self.largest:
                    self._go_on = functools.partial(original, tensors, *args, **kwargs)
                    raise _BackwardReached(tensors if isinstance(tensors, torch.Tensor) else tensors[0])
                if self.largest is None:
                    self._elements.append(elements)
            original(tensors, *args, **kwargs)

        with mock.patch.object(torch.autograd, "backward", backward):
            yield


@contextlib.contextmanager
def states_counted() -> Iterator[None]:
    """Make the CPU generator's states tensors that trackers see; each mini-batch keeps one."""
    size, restore = torch.get_rng_state().numel(), torch.set_rng_state

    def state() -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def set_state(state: torch.Tensor) -> None:
        if not isinstance(state, FakeTensor):
            restore(state)

    with mock.patch.object(torch, "get_rng_state", state), mock.patch.object(torch, "set_rng_state", set_state):
        yield


class _Shapes:
    """The shapes of a forward's output tensors: the sizes of their storages, and their layouts in them."""

    def __init__(self, flat: list[Any], spec: Any):
        self._flat, self._spec = flat, spec

    @staticmethod
    def of(outputs: Any) -> _Shapes | None:
        """Return the shapes in `outputs`; None if these hold objects that may contain tensors."""
        leaves, spec = tree_flatten(outputs)
        if not all(isinstance(leaf, (torch.Tensor, bool, int, float, str, type(None))) for leaf in leaves):
            return None
        return _Shapes([_WholeTensor(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)

    def made(self, *, requires_grad: bool) -> Any:
        """Make tensors of these shapes in new storages."""
        storages: dict[int, torch.Tensor] = {}
        leaves = [leaf.made(storages, requires_grad) if isinstance(leaf, _WholeTensor) else leaf for leaf in self._flat]
        return tree_unflatten(leaves, self._spec)


class _EndOfBackward(torch.autograd.Function):
    """A stand-in for a forward's output: backward ends here, and no gradient is kept."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None


class _WholeTensor:
    def __init__(self, tensor: torch.Tensor):
        storage = tensor.untyped_storage()
        self._storage, self._elements = id(storage), storage.nbytes() // tensor.element_size()
        self._lies = tensor.shape, tensor.stride(), tensor.storage_offset()
        self._dtype, self._device = tensor.dtype, tensor.device
        self._learns = tensor.requires_grad
        self._end = torch.empty((), requires_grad=True)

    def made(self, storages: dict[int, torch.Tensor], requires_grad: bool) -> torch.Tensor:
        if self._storage not in storages:
            storages[self._storage] = torch.empty(self._elements, dtype=self._dtype, device=self._device)
        view = storages[self._storage].view(self._dtype).as_strided(*self._lies)
        return _EndOfBackward.apply(view, self._end) if requires_grad and self._learns else view
