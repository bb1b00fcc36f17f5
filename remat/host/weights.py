"""Weights on the host: frozen weights of some of a model's layers, brought to the device when they are used.

Rule 1  A layer is an item of the model's longest list of alike modules. Of those that are on the host, no more than
        `AT_ONCE` have their weights on the device: the one that computes, and the one that is asked for next. So what
        they take is a constant of the step, whatever it recomputes and in whatever order.
Rule 2  A weight stays the parameter that it was, on the device and of its shape; only its memory comes and goes.
        What autograd saves of it, views too, is in that memory, and there again when the layer is used in backward.
Rule 3  A computation with a layer's weights announces itself (`use`): a node in forward and in recomputations, and
        before its backward. What followed on the last `CONTEXT` layers is expected to follow on them again, and its
        weights are on their way meanwhile. A wrong guess costs time, nothing else.
Rule 4  What is moved never changes, so nothing is copied back.
Rule 5  Outside of a planned step a weight is NaN in every element: a reader gets no wrong number, and
        who writes to it an error, at once or when it is used next. A layer that is called then brings its own, for a
        forward without a backward.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from remat._torch.recording import autograd_node, next_sequence_number
from remat._torch.training import is_wrapper, when_backward_ends
from remat.errors import UsageError
from remat.host.copies import Copies, Copy, copies_on, unseen

AT_ONCE = 2  # layers
CONTEXT = 4  # of uses: recomputations go back and forth between two layers
MOST_KNOWN = 4096  # uses whose successors are remembered
FEWEST = AT_ONCE + 1  # with fewer on the host nothing is gained
ALIGNMENT_BYTES = 512  # of weights in a layer's memory of the host

_READ_WHILE_AWAY = ("out of bounds for storage of size 0", "its data is not allocated yet")  # in errors of torch

_Model = TypeVar("_Model", bound=nn.Module)
_on_host: weakref.WeakKeyDictionary[nn.Module, HostWeights] = weakref.WeakKeyDictionary()


def offload_weights(model: _Model, layers: int, device: torch.device | str | None = None) -> _Model:
    """Keep the frozen weights of some layers of `model` in the host's memory.

    A planned forward fetches them (`remat.apply`), and so does any call of a layer under `torch.no_grad`. Otherwise
    they are NaN in every element and cannot be written to. `state_dict` has the host's copies.

    Args:
        model: The model, before its plan is applied.
        layers: Number of layers, `plan.about["weights_on_host"]`; they are spread over the model.
        device: Device of the computation, by default that of the weights. A model that does not fit there is loaded on
            the CPU and moved afterwards (`model.to(device)`).

    Returns:
        The same model.

    Raises:
        UsageError: The model has no such layers, or fewer.

    Example:
        >>> remat.offload_weights(model, plan.about["weights_on_host"], "cuda")
        >>> model = remat.apply(model.to("cuda"), plan)
    """
    if (found := weights_on_host(model)) is not None:
        if len(found.layers) == layers:
            return model
        raise UsageError(f"the weights of {len(found.layers)} layers of this model are on the host already.")
    _on_host[model] = HostWeights(model, layers, None if device is None else torch.device(device))
    return model


def bring_weights_back(model: _Model, device: torch.device | str | None = None) -> _Model:
    """Undo `offload_weights`, to merge adapters or change weights. Take the plan out first (`remat.remove`).

    Args:
        model: The model.
        device: Device of the weights afterwards, by default that of the computation. Use "cpu" if they do not fit.

    Returns:
        The same model.

    Raises:
        torch.OutOfMemoryError: The weights do not fit; they stay in the host's memory.

    Example:
        >>> model = remat.bring_weights_back(remat.remove(model), "cpu").to("cpu")
    """
    where, modules = None if device is None else torch.device(device), set(model.modules())
    for owner, found in list(_on_host.items()):
        if owner in modules or any(layer.module in modules for layer in found.layers):
            found.bring_back(where)
            del _on_host[owner]
    return model


def weights_on_host(model: nn.Module) -> HostWeights | None:
    """Return the weights on the host of `model`, or of a module in it."""
    return next((found for module in model.modules() if (found := _on_host.get(module)) is not None), None)


# Which they are (Rule 1)


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """A layer whose weights may be on the host: those of its linear modules that are frozen and not shared."""

    path: str
    module: nn.Module
    weights: tuple[nn.Parameter, ...]

    @property
    def size_bytes(self) -> int:
        return sum(map(_size_of, self.weights))


def layers_of(model: nn.Module) -> list[Layer]:
    """List all layers whose weights may be on the host, in order; if they differ, those of the commonest size."""
    uses = Counter(map(id, (p for module in model.modules() for p in module.parameters(recurse=False))))
    lists = [
        [_layer(f"{path}.{name}".strip("."), item, uses) for name, item in each.named_children()]
        for path, each in model.named_modules()
        if isinstance(each, (nn.ModuleList, nn.Sequential))
    ]
    largest = max(lists, key=lambda layers: sum(layer.size_bytes for layer in layers), default=[])
    sizes = Counter(layer.size_bytes for layer in largest if layer.weights)
    if not sizes:
        return []
    common = max(sizes, key=lambda size: size * sizes[size])
    return [layer for layer in largest if layer.size_bytes == common]


def _layer(path: str, module: nn.Module, uses: Counter[int]) -> Layer:
    weights = (p for each in module.modules() if type(each).forward is nn.Linear.forward for p in each.parameters())
    return Layer(path, module, tuple(p for p in weights if uses[id(p)] == 1 and _may_move(p)))


def _may_move(parameter: nn.Parameter) -> bool:
    whole = parameter.untyped_storage().nbytes() == parameter.nbytes
    return not parameter.requires_grad and parameter.is_floating_point() and not is_wrapper(parameter) and whole


def _size_of(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def spread(layers: list[Layer], count: int) -> list[Layer]:
    """Choose `count` of `layers`, as evenly spread as possible. Raises UsageError if there are too few."""
    if not FEWEST <= count <= len(layers):
        raise UsageError(
            f"this model has {len(layers)} layers alike with frozen weights of nn.Linear that are not quantised: from "
            f"{FEWEST} to all of them can have them on the host, {AT_ONCE} on the device at any time, and not {count}."
        )
    return [layers[(2 * i + 1) * len(layers) // (2 * count)] for i in range(count)]


# How they move (Rules 2 to 4)


class _LayerWeights:
    """The weights of a layer: on the host, and on the device for a while.

    _memory  for each a tensor of its shape in the device memory that is freed in between
    """

    def __init__(self, layer: Layer, device: torch.device | None, copies: Copies):
        self.layer, self._copies = layer, copies
        self._sizes = [weight.untyped_storage().nbytes() for weight in layer.weights]
        self._offsets = [0, *itertools.accumulate(map(_size_of, layer.weights))]
        self._host = copies.host(self._offsets[-1])
        self._arriving: list[Copy] | None = None
        self._hooks: list[Any] = []
        self._memory: list[Tensor] = []
        self.is_here = False
        for weight, offset in zip(layer.weights, self._offsets, strict=False):
            memory = weight.detach()
            with unseen():
                self._host[offset : offset + weight.nbytes].copy_(_flat(memory).view(torch.uint8))
                if device is not None and weight.device != device:
                    memory = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device=device)
            self._memory.append(memory)
        self.hide()
        self._resize([0] * len(self._memory))

    def _resize(self, sizes: Iterable[int]) -> None:
        for memory, size in zip(self._memory, sizes, strict=True):
            memory.untyped_storage().resize_(size)

    # Memory

    def fetch(self) -> None:
        """Allocate memory, and begin to copy."""
        if self.is_here:
            return
        self.is_here, self._arriving = True, []
        try:
            self._resize(self._sizes)
            for memory, offset in zip(self._memory, self._offsets, strict=False):
                self._arriving.append(self._copies.back(self._host, offset, _flat(memory)))
        except BaseException:
            self.let_go()
            raise

    def wait(self) -> None:
        """Let compute wait for the weights."""
        for copy in self._arriving or ():
            self._copies.wait(copy)
        self._arriving = None

    def let_go(self) -> None:
        """Free the device memory."""
        for copy in self._arriving or ():
            self._copies.abandon(copy)
        self._arriving, self.is_here = None, False
        for memory in self._memory:
            self._copies.let_go(_flat(memory))
        self._resize([0] * len(self._memory))

    # What the parameters are (Rule 5)

    def show(self) -> None:
        """Let the parameters refer to that memory."""
        self._set(self._memory)

    def hide(self) -> None:
        """Fill the parameters with NaN that cannot be written to."""
        self._set(_no_number(memory.dtype, memory.device).expand(memory.shape) for memory in self._memory)

    def require_hidden(self) -> None:
        """Raise UsageError where a user changed a weight since it was hidden."""
        for weight, memory in zip(self.layer.weights, self._memory, strict=True):
            is_hidden = weight.dtype == memory.dtype and weight.untyped_storage().nbytes() == memory.element_size()
            if is_hidden and not weight.requires_grad:
                continue
            names = {id(p): name for name, p in self.layer.module.named_parameters()}
            undo = "set it back to False, or take" if is_hidden else "that is lost. Take"
            by = "`requires_grad_()`" if is_hidden else "`weight.data = ...` or a conversion (`.to`, `.bfloat16()`)"
            raise UsageError(
                f"{self.layer.path}.{names.get(id(weight), 'a weight')} was changed while it is on the host, by {by}: "
                f"{undo} the plan out and bring the weights back before they are changed "
                "(`remat.bring_weights_back(remat.remove(model))`)."
            )

    def _set(self, tensors: Iterable[Tensor]) -> None:
        with unseen():
            for weight, tensor in zip(self.layer.weights, tensors, strict=True):
                weight.data = tensor

    def install(self) -> None:
        """Let `state_dict` return the host's copies."""
        places = {id(weight): place for weight, place in zip(self.layer.weights, self._places(), strict=True)}

        for module in self.layer.module.modules():
            if any(id(parameter) in places for parameter in module.parameters(recurse=False)):
                self._hooks.append(module.register_state_dict_post_hook(functools.partial(_hold, places)))
                taken = set[str]()
                self._hooks.append(module.register_load_state_dict_pre_hook(functools.partial(_load, places, taken)))
                self._hooks.append(module.register_load_state_dict_post_hook(functools.partial(_miss_none, taken)))

    def _places(self) -> Iterator[Tensor]:
        """Yield each weight as it is on the host."""
        for memory, size, offset in zip(self._memory, self._sizes, self._offsets, strict=False):
            flat = self._host[offset : offset + size].view(memory.dtype)
            yield flat.as_strided(memory.shape, memory.stride())

    def bring_back(self, device: torch.device | None) -> None:
        """Put the weights on `device` for good, by default where they are computed with."""
        if device is None or device == self._memory[0].device:
            self.fetch()
            self.wait()
            self.show()
        else:
            self._set([torch.empty_like(place, device=device).copy_(place) for place in self._places()])
            self.let_go()

    def uninstall(self) -> None:
        """Undo `install`."""
        while self._hooks:
            self._hooks.pop().remove()


def _hold(places: dict[int, Tensor], module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Put the host's copies into a state."""
    for name, weight in module.named_parameters(recurse=False, remove_duplicate=False):
        if (place := places.get(id(weight))) is not None and f"{prefix}{name}" in state:
            state[f"{prefix}{name}"] = place


def _load(
    places: dict[int, Tensor], taken: set[str], module: nn.Module, state: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Accept the values that are on the host already, as in a checkpoint of this training; else raise UsageError.

    They are `taken` out of `state`: torch refuses to copy anything to a weight without memory of its own.
    """
    taken.clear()
    for name, weight in module.named_parameters(recurse=False, remove_duplicate=False):
        given = state.get(f"{prefix}{name}")
        if (place := places.get(id(weight))) is None or given is None:
            continue
        if not torch.equal(given.to(place), place):
            raise UsageError(
                f"{prefix}{name} is on the host and cannot be loaded: load weights before `remat.offload_weights`."
            )
        del state[f"{prefix}{name}"]
        taken.add(f"{prefix}{name}")


def _miss_none(taken: set[str], module: nn.Module, incompatible: Any) -> None:
    incompatible.missing_keys[:] = [name for name in incompatible.missing_keys if name not in taken]


@functools.cache
def _no_number(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), torch.nan, dtype=dtype, device=device)


def _flat(memory: Tensor) -> Tensor:
    """Return a flat tensor of the whole storage."""
    storage = memory.untyped_storage()
    with unseen():
        flat = torch.empty(0, dtype=memory.dtype, device=memory.device)
        return flat.set_(storage, 0, (storage.nbytes() // memory.element_size(),), (1,))


def _nodes_behind(value: Any, numbers: range) -> Iterator[Any]:
    """Yield nodes of autograd's graph behind `value` whose number is in `numbers`."""
    ahead: list[Any] = [
        leaf.grad_fn for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.grad_fn is not None
    ]
    seen = set()
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen and node._sequence_nr() in numbers:
            seen.add(node)
            ahead.extend(before for before, _ in node.next_functions)
            yield node


class HostWeights:
    """The weights of a model that are on the host; see `offload_weights`.

    fetched  how often a layer's weights were copied to the device
    is_back  whether they were brought back for good
    """

    def __init__(self, model: nn.Module, layers: int, device: torch.device | None = None, copies: Copies | None = None):
        chosen = spread(layers_of(model), layers)
        at = device or chosen[0].weights[0].device
        copies = copies or copies_on(at, shares_host=False)
        self._number = {id(weight): i for i, layer in enumerate(chosen) for weight in layer.weights}
        self._moved = [_LayerWeights(layer, device, copies) for layer in chosen]
        self._here: list[int] = []
        self._shown: set[int] = set()
        self._used: tuple[int, ...] = ()  # the last layers, the one that computes at the end
        self._following: dict[tuple[int, ...], int] = {}
        self._in_backward = -1, range(0)  # the layer, and autograd's numbers of the nodes that use it
        self._ends_with_backward = False
        self._around: list[Any] = []
        self.fetched, self.is_back = 0, False
        for moved in self._moved:
            moved.install()
        self._bring_when_called()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "a model with weights on the host can be neither copied nor pickled: save its `state_dict()`, which has "
            "them, or copy the model before `remat.offload_weights`."
        )

    @property
    def layers(self) -> list[Layer]:
        return [moved.layer for moved in self._moved]

    @property
    def memory(self) -> list[Tensor]:
        """For each weight, a tensor in the device memory that is freed in between."""
        return [memory for moved in self._moved for memory in moved._memory]

    def layer_of(self, tensor: Any) -> int | None:
        """Return the number of the layer with the weight `tensor`, None for any other tensor."""
        return self._number.get(id(tensor))

    # Use (Rule 3)

    def use(self, number: int) -> None:
        """Have the weights of layer `number` on the device, until another layer's are needed."""
        if self.is_back:
            return
        if self._used[-1:] != (number,):
            self._bring(number)
        if number not in self._shown:
            self._moved[number].show()
            self._shown.add(number)

    def _bring(self, number: int) -> None:
        if len(self._following) > MOST_KNOWN:
            self._following.clear()
        self._following[self._used] = number
        used = (*self._used, number)[-CONTEXT:]
        following = self._following.get(used, used[-2:][0])  # or the one before, which is there
        self._used = ()  # in case there is no memory for the next layer
        for other in [each for each in self._here if each not in (number, following)]:
            self._moved[other].let_go()
            self._here.remove(other)
        self._fetch(number)
        self._moved[number].wait()
        self._fetch(following)
        self._used = used

    def _fetch(self, number: int) -> None:
        if number not in self._here:
            self._moved[number].fetch()
            self._here.append(number)
            self.fetched += 1

    def run(self, number: int, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a function that uses layer `number`, and have the layer on the device in its backward too."""
        self.use(number)
        first = next_sequence_number()
        value = function(*args, **kwargs)
        numbers = range(first, next_sequence_number())
        for node in _nodes_behind(value, numbers):
            node.register_prehook(functools.partial(self._use_in_backward, number, numbers))
        return value

    def _use_in_backward(self, number: int, numbers: range, gradients: Any) -> None:
        if torch.is_grad_enabled():
            raise UsageError("weights that are on the host have no second derivatives: leave `create_graph=True` out.")
        self.use(number)
        self._in_backward = number, numbers
        if not self._ends_with_backward:
            self._ends_with_backward = True
            when_backward_ends(self._end_of_backward)

    def _end_of_backward(self) -> None:
        self._ends_with_backward = False
        self._hide()

    @contextlib.contextmanager
    def recomputing(self) -> Iterator[None]:
        """Give the interrupted backward its layer back after a region was recomputed in its middle."""
        number, numbers = self._in_backward
        is_amid = (node := autograd_node()) is not None and node._sequence_nr() in numbers
        try:
            yield
        finally:  # an early stop is an exception
            if is_amid:
                self.use(number)

    # Outside of a planned step (Rule 5)

    @contextlib.contextmanager
    def planned(self) -> Iterator[None]:
        """Run a forward whose nodes fetch the weights that they use."""
        if self.is_back:
            raise UsageError(
                "weights that the plan of this model counts on being on the host were brought back: take the plan out "
                "(`remat.remove`), or bring them there and apply it again."
            )
        for number, moved in enumerate(self._moved):
            if number not in self._shown:
                moved.require_hidden()
        self._ends_with_backward = False
        while self._around:
            self._around.pop().remove()
        for number, moved in enumerate(self._moved):  # captured graphs check the parameters' shapes
            moved.show()
            self._shown.add(number)
        try:
            yield
        except RuntimeError as error:
            if not any(said in str(error) for said in _READ_WHILE_AWAY):
                raise
            raise UsageError(
                "a weight that is on the host was read outside of captured graphs, as adapters of DoRA do: leave "
                "`weights` out of `offload` for this model."
            ) from error
        finally:
            self._hide()
            self._bring_when_called()

    def _hide(self, numbers: Iterable[int] | None = None) -> None:
        """Hide weights: all that are shown, or those of layers `numbers`."""
        if self.is_back:
            return
        for number in self._shown if numbers is None else numbers:
            self._moved[number].hide()
        self._shown.clear()

    def _bring_when_called(self) -> None:
        for number, moved in enumerate(self._moved):
            before, after = functools.partial(self._before, number), functools.partial(self._after, number)
            self._around.append(moved.layer.module.register_forward_pre_hook(before))
            self._around.append(moved.layer.module.register_forward_hook(after, always_call=True))

    def _before(self, number: int, module: nn.Module, args: Any) -> None:
        given = (leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
        if torch.is_grad_enabled() and any(t.requires_grad for t in itertools.chain(given, module.parameters())):
            raise UsageError(
                f"the weights of {self.layers[number].path} are on the host, and come back in backward only where a "
                "plan runs: apply the plan, call model.train() before training, and evaluate under torch.no_grad()."
            )
        if number not in self._shown:
            self._moved[number].require_hidden()
        self.use(number)

    def _after(self, number: int, module: nn.Module, args: Any, value: Any) -> None:
        self._hide()

    def rest(self) -> None:
        """Free the weights on the device, until they are used again."""
        if self.is_back:
            return
        for number in self._here:
            self._moved[number].let_go()
        self._here, self._used = [], ()

    def bring_back(self, device: torch.device | None = None) -> None:
        """Put all weights on `device` for good, by default where they are computed with."""
        try:
            for moved in self._moved:
                moved.bring_back(device)
        except BaseException:
            self._hide(range(len(self._moved)))
            for moved in self._moved:
                moved.let_go()
            self._here, self._used = [], ()
            raise
        self.is_back = True
        while self._around:
            self._around.pop().remove()
        for moved in self._moved:
            moved.uninstall()
