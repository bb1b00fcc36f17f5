"""Lists, deques and dictionaries that a forward changes are traced as they run (`remat/_torch/containers.py`)."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from remat._torch.containers import containers_kept
from remat._torch.dynamo import frames_traced

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")

Change = Callable[[Any, torch.Tensor], Any]


@dataclasses.dataclass
class Log:
    losses: list[torch.Tensor] = dataclasses.field(default_factory=list)


class Keeping(nn.Module):
    """Changes what it keeps by `change`, which gives a factor of the result."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change, self.count = change, 0
        self.past: list[Any] = []
        self.alias, self.within = self.past, (self.past,)
        self.pair: list[list[Any]] = [[], []]
        self.table: dict[str, list[Any]] = {"a": []}
        self.log, self.by_name, self.counter = Log(), defaultdict[str, list[Any]](list), Counter[int]()
        self.last = deque[Any]([1.0, 2.0], maxlen=3)
        self.rates = {number: 0.2 * (number + 1) for number in range(4)}
        self.ordered = OrderedDict(self.rates)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x * self.change(self, x.mean())
        return y

    def kept(self) -> Any:
        deques = list(self.last), self.last.maxlen
        lists = self.past, self.pair, self.table, self.log.losses, dict(self.by_name)
        return lists, deques, [*self.rates.items()], [*self.ordered.items()], [*self.counter.items()]


def both(change: Change, forwards: int = 6) -> list[int]:
    """Run the change with and without a trace, and hold one to the other; return how often each forward was traced."""
    model, traces = Keeping(change), []
    other = copy.deepcopy(model)
    compiled = torch.compile(other, backend="eager")
    with containers_kept(lambda tx: True):
        for number in range(forwards):
            x, before = torch.full((4,), 1.0 + number), frames_traced()
            assert torch.equal(model(x), compiled(x))
            assert str(model.kept()) == str(other.kept())
            traces.append(frames_traced() - before)
    return traces


def _appends(model: Keeping, x: torch.Tensor) -> float:
    model.past.append(x)
    model.alias += [x, 1.0]
    model.pair[0].append(x)
    model.table["a"].extend(2 * each for each in (x, x + 1))
    model.log.losses.append(x)
    return 2.0


def test_a_list_that_is_only_appended_to_is_traced_once() -> None:
    first, *later = both(_appends)
    assert first == 1 and not any(later)


def _first(model: Keeping, x: torch.Tensor) -> Any:
    model.past.append(x)
    return model.past[0]


def test_an_item_by_its_place_from_the_beginning_is_read_without_a_trace_more() -> None:
    assert both(_first) == [1, 1, 0, 0, 0, 0]


def _first_and_another(model: Keeping, x: torch.Tensor) -> Any:
    model.past.append([x])
    model.count += 1
    first = model.past[0]
    if model.count == 3:
        model.past[0] = [x + 7]
    if model.count == 4:
        del model.past[1]
    if model.count == 5:
        model.past[:] = model.past[:1]
    return first[0] + model.past[0][0] + (model.past[1][0] if model.count in (3, 4) else 0)


def _named_otherwise(model: Keeping, x: torch.Tensor) -> Any:
    model.past.append(x)
    return model.alias[-1] + model.within[0][0]


def _length(model: Keeping, x: torch.Tensor) -> float:
    model.past += [x]
    return 0.5 if len(model.past) < 4 else 1.0


def _until_there_are_three(model: Keeping, x: torch.Tensor) -> float:
    if len(model.past) < 3:
        model.past.append(x)
        return 0.5
    return 1.0


def _counted(model: Keeping, x: torch.Tensor) -> float:
    model.past.append(1)
    return 2.0 if model.past.count(1) < 4 else 1.0


def _emptied(model: Keeping, x: torch.Tensor) -> Any:
    model.past.append(x)
    model.count += 1
    if model.count % 3 == 0:
        model.table["a"].append(torch.stack(model.past).mean())
        model.past.clear()
    return 1.0


def _doubled(model: Keeping, x: torch.Tensor) -> Any:
    model.past.append(x)
    model.past.extend(2 * each for each in model.past[-2:])
    model.past.extend(model.past[:1])
    return sum(model.past)


def _copied(model: Keeping, x: torch.Tensor) -> Any:
    model.past.append(x)
    past = model.past[-2:] + model.past.copy()
    past.append(x)
    return torch.stack(past).sum() * len(past)


def _inserted(model: Keeping, x: torch.Tensor) -> Any:
    model.past.insert(0, x)
    model.pair[1][len(model.pair[1]) :] = [x]
    return model.past[-1] + model.pair[1][0]


def _in_new_list(model: Keeping, x: torch.Tensor) -> Any:
    model.by_name["a"].append(x)
    model.table.setdefault("b", []).append([x])
    return model.by_name["a"][0] + model.table["b"][0][0]


def _itself(model: Keeping, x: torch.Tensor) -> Any:
    model.past.extend(model.past)
    model.past.append(x)
    return len(model.past)


def _compared(model: Keeping, x: torch.Tensor) -> float:
    model.past.append(1)
    return 2.0 if model.past == [1, 1] and model.past else 1.0


@pytest.mark.parametrize(
    "change",
    [
        *(_first_and_another, _named_otherwise, _length, _until_there_are_three, _counted, _emptied, _doubled, _copied),
        *(_inserted, _in_new_list, _itself, _compared),
    ],
)
def test_a_list_that_is_read_is_as_it_is_without_a_trace(change: Change) -> None:
    both(change)


def _appends_at_the_right(model: Keeping, x: torch.Tensor) -> Any:
    model.last.append(x)
    return model.last[0]


def _extends_at_the_left(model: Keeping, x: torch.Tensor) -> Any:
    model.last.extendleft([x, x + 1])
    model.last.appendleft(x)
    return model.last[-1] * len(model.last)


def _adds(model: Keeping, x: torch.Tensor) -> Any:
    model.last += [x, x + 1]
    last = model.last.copy()
    last.append(x)
    return sum(last) * len(last)


def _as_a_new_deque(model: Keeping, x: torch.Tensor) -> Any:
    last = model.last.copy()
    last.append(x)
    model.last = last
    return last[0]


def _at_another_bound(model: Keeping, x: torch.Tensor) -> Any:
    model.count += 1
    model.last.append(x)
    first = model.last[0]
    if model.count == 3:
        model.last = deque(model.last, maxlen=2)
    return first * len(model.last)


def _by_its_bound(model: Keeping, x: torch.Tensor) -> Any:
    bound = model.last.maxlen
    model.last.append(x)
    return 1.0 if bound is None or len(model.last) < bound else bound + sum([1.0, 2.0, 3.0, 4.0][:bound])


@pytest.mark.parametrize(
    "change", [_appends_at_the_right, _extends_at_the_left, _adds, _as_a_new_deque, _at_another_bound, _by_its_bound]
)
def test_a_deque_keeps_its_bound(change: Change) -> None:
    both(change)


def _moved_to_the_end(model: Keeping, x: torch.Tensor) -> Any:
    model.ordered.move_to_end(next(iter(model.ordered)))
    return next(iter(model.ordered.values()))


def _moved_to_the_beginning(model: Keeping, x: torch.Tensor) -> Any:
    model.ordered.move_to_end(next(reversed(model.ordered)), last=False)
    return {**model.ordered}.popitem()[1]


def _last_to_the_beginning(model: Keeping, x: torch.Tensor) -> Any:
    key, value = model.rates.popitem()
    model.rates = {key: value, **model.rates}
    return value


def _taken_and_put(model: Keeping, x: torch.Tensor) -> Any:
    key, value = model.ordered.popitem(last=False)
    model.ordered[key] = value * 0.9
    return value


def _deleted_and_put(model: Keeping, x: torch.Tensor) -> Any:
    model.count += 1
    key = model.count % 4
    value = model.rates[key]
    del model.rates[key]
    model.rates[key] = value
    model.rates[(key + 1) % 4] = model.rates.pop((key + 1) % 4)
    return next(iter({**model.rates}.values()))


def _counted_by_key(model: Keeping, x: torch.Tensor) -> Any:
    model.counter[model.count * 2 % 5] += 1
    model.count += 1
    return 1 + next(iter(model.counter))


@pytest.mark.parametrize(
    "change",
    [
        *(_moved_to_the_end, _moved_to_the_beginning, _last_to_the_beginning, _taken_and_put, _deleted_and_put),
        _counted_by_key,
    ],
)
def test_a_dictionary_keeps_its_order(change: Change) -> None:
    both(change)


def test_traces_of_others_are_left_as_they_are() -> None:
    def function(x: torch.Tensor, past: list[int]) -> torch.Tensor:
        past.append(1)
        return x + 1

    compiled, past = torch.compile(function, backend="eager"), [0]
    with containers_kept(lambda tx: False):
        before = frames_traced()
        compiled(torch.ones(2), past)
        compiled(torch.ones(2), past)
    assert frames_traced() - before == 2 and past == [0, 1, 1]
