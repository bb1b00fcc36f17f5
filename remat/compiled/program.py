"""The choice of saved values as an integer program over a joint graph (after Checkmate, Jain et al. 2020).

Data       values v in the order of the forward, stages t of backward
           w[v] bytes of a value; c[v] traffic if it is saved, p[v] time to make it again,
           h[v] more if it fuses and is held for a later stage
           first[v], last[v] stages that read it; b[t] what backward itself has
           f, g[t], e[v,t] what compiled code has beside: in forward, in a stage, where v is made again in a stage
Variables  s[v] = 1    v is saved
           r[v,t] = 1  v has been made again in stage t or before it
           x[v] = 1    v fuses, is made again, and is held
           a[v,t] = 1  v takes memory in stage t of backward
Minimise   sum c[v] s[v] + p[v] r[v, due[v]] + h[v] x[v]                                       (1)
s.t.       s[v] + r[v, first[v]] >= 1                     where backward reads v               (2)
           r[v,t] <= s[u] + r[u,t]                        for every input u of v               (3)
           r[v,t] <= r[v,t+1]                                                                  (4)
           k + sum w[v] s[v] + f <= M                           as forward ends                      (5)
           k + sum w[v] a[v,t] + b[t] + g[t] + sum e[v,t] (r[v,t] - r[v,t-1]) <= M             (6)
           r[v,t] <= sum r[u,t]     over u made of v, in stages before backward reads v        (7)
           x[v] >= r[v, last[v]-1]                        where backward reads v               (8)
           x[v] >= r[v,t] - r[u,t] + r[u, due[u]] - 1     for every u made of v                (9)
           a[v,t] >= s[v] + r[v,t]                        up to backward's last read of v      (10)
           a[v,t] >= s[v] + r[v,t] - r[u,t-1] + r[u, due[u]] - 1   after it, for every u       (11)
                     and the same for what is made of u, where u is inlined
           s[v] + r[v, due[v]] <= 1                                                            (12)
           a[v,t] >= s[v]                       until the first stage that may come to need v  (13)

k is what other runs of the graph have saved: (uses - 1) times the sum in (5).

A value that is made again is made once, when it is first needed, and stays until it was last needed: so does torch's
partitioner. One that fuses takes no memory in the stage that needs it last: (10) and (11) have r[v, t-1] there. due[v]
is the stage by which v is made if at all: first[v], or that of the values made of it.

With all of (11) the relaxation is weak and the program slow. `solve` therefore poses others of the same choices:

1. The *coarse* program has a[v,t] = s[v] + r[v,t] until the last stage in which any choice comes to need v. Its choices
   keep the budget too, so its answer is one to begin with.
2. The next program has (11) for no value. Its bound holds for every choice. Where its answer exceeds the budget, it is
   solved for twice as much less, which most often has an answer that fits. Then (11) is added for the values that take
   the memory, for what is inlined beside them and for all that are alike, since layers repeat; and the program is
   solved again. One that is like an earlier one begins with that one's values. An answer that exceeds need not be
   near the best: it only shows for which values (11) is missing (`LOOSE`).

`judged` is the same in plain words, for one choice: what is made again and when, its price and its peaks. Choices of
any origin are compared by it. r[v,t] is left out where t is long before due[v], so that there are `FAR` of them, `NEAR`
in the coarse program: values that far away are made again from something saved in between. The bound is for the other
choices.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from ortools.sat.python import cp_model

from remat.compiled.joint import Joint

FAR, NEAR = 30_000, 8_000  # the most of r, and in the coarse program
PROGRAM_EFFORT, COARSE_EFFORT = 25.0, 10.0  # effort: the most for one program, and for the coarse one
PROGRAMS = 9  # the most for one answer, the coarse one among them
LOOSE = 0.1  # gap: where answers of a program exceed, it is given up for the next
_LAST = 1 << 30  # a stage after all others
_UNITS = 1 << 40  # bytes are whole multiples of so small a part of the largest sum, rounded up: exact below a TiB
_PRICES = 1 << 24  # and prices of this one, rounded down: so the bound holds


@dataclasses.dataclass(frozen=True)
class Choice:
    """A set of saved values, judged.

    saved       the names of those that backward reads
    price_us    of saving them and of making the others again     remade_us  of the latter alone
    kept_bytes  as forward ends    alive_bytes  in each stage of backward, with its own
    made_again  values that are made again, by position, and the stages in which they are
    """

    saved: frozenset[str]
    price_us: float
    remade_us: float
    kept_bytes: int
    alive_bytes: tuple[int, ...]
    made_again: Mapping[int, int] = dataclasses.field(default_factory=dict)


def _needed(joint: Joint, saved: Collection[str]) -> Iterator[tuple[int, int, int, bool]]:
    """Yield what backward comes to need: position of the value, its first and last stage, whether it is saved."""
    values = joint.values
    need: list[int | None] = [value.first for value in values]
    last: list[int] = [-1 if value.last is None else value.last for value in values]
    for v in reversed(range(len(values))):
        value, first = values[v], need[v]
        if first is None:
            continue
        is_saved = value.can_save and (value.name in saved or not value.can_remake)
        for u in () if is_saved else value.inputs:
            need[u] = first if need[u] is None else min(need[u], first)  # type: ignore[type-var]
            last[u] = max(last[u], last[v] if value.inlines else first)
        yield v, first, last[v], is_saved


def judged(joint: Joint, saved: Collection[str]) -> Choice:
    """Judge a choice: the price and the bytes of saving `saved`, and of all else that cannot be made again."""
    stages = len(joint.own_bytes)
    change = [0] * (stages + 1)
    price = remade = 0.0
    kept, needed, made_again = 0, set[str](), dict[int, int]()
    for v, first, last, is_saved in _needed(joint, saved):
        value = joint.values[v]
        if is_saved:
            taken = value.size_bytes
            needed.add(value.name)
            kept += taken
            price += value.save_us
        else:
            is_held = not value.inlines and (not value.fuses or last > first)
            taken = value.size_bytes if is_held else 0
            remade += value.remake_us + (value.held_us if is_held else 0.0)
            made_again[v] = first
        change[0 if is_saved else first] += taken
        change[last + 1] -= taken
    alive = itertools.accumulate(change[:stages])
    others = (joint.uses - 1) * kept
    curve = tuple(others + each + own for each, own in zip(alive, joint.own_bytes, strict=True))
    return Choice(frozenset(needed), price + remade, remade, others + kept, curve, made_again)


@dataclasses.dataclass(frozen=True)
class CompiledBytes:
    """f, g and e: bytes that compiled code needs beside what the table counts.

    forward   in forward    backward  in each stage
    making    in a stage, where a value is made again in it; by the value's position and the stage
    """

    forward: int
    backward: tuple[int, ...]
    making: Mapping[tuple[int, int], int] = dataclasses.field(default_factory=dict)

    def in_stages(self, choice: Choice) -> list[int]:
        """Return the bytes that the code of a choice should need in each stage of backward."""
        found = list(map(operator.add, choice.alive_bytes, self.backward))
        for made in choice.made_again.items() & self.making.keys():
            found[made[1]] += self.making[made]
        return found

    def peak_bytes(self, choice: Choice) -> int:
        """Return the bytes that the code of a choice should need."""
        return max(choice.kept_bytes + self.forward, *self.in_stages(choice), 0)


@dataclasses.dataclass(frozen=True)
class Solved:
    """An answer of the program.

    choice    the best that was found, if there is one
    bound_us  below which there is none; inf if none fits
    counted   the values that (11) was added for, by position
    """

    choice: Choice | None
    bound_us: float
    counted: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class _Span:
    """The stages that may need a value (`earliest`, `last`), and that may recompute it (`begin` to `due`)."""

    earliest: int
    begin: int
    due: int
    last: int


def _spans(joint: Joint, most: int) -> list[_Span | None]:
    """List the span of each value among `most` stages; None if backward never needs it."""
    values = joint.values
    begin: list[float] = [math.inf if v.first is None else v.first for v in values]
    due: list[float] = list(begin)
    late: list[float] = [-1 if v.first is None else v.first for v in values]
    last: list[float] = [-1 if v.last is None else v.last for v in values]
    for v in reversed(range(len(values))):
        if math.isinf(begin[v]) or not values[v].can_remake:
            continue
        by = due[v] if values[v].first is not None else late[v]
        for u in values[v].inputs:
            begin[u] = min(begin[u], begin[v])
            late[u] = max(late[u], by)
            last[u] = max(last[u], last[v] if values[v].inlines else by)
            if values[u].first is None:
                due[u] = late[u]
    reach = max(most // max(len(values), 1), 2)
    return [
        None if math.isinf(b) else _Span(int(b), int(max(b, d - reach)), int(d), int(max(x, d)))
        for b, d, x in zip(begin, due, last, strict=True)
    ]


def solve(
    joint: Joint,
    most_bytes: int,
    more: CompiledBytes | None = None,
    *,
    start: Collection[str] = (),
    least: bool = False,
    quick: bool = False,
    counted: Collection[int] = (),
    gap: float = 0.003,
    effort: float = 30.0,
) -> Solved:
    """Find the cheapest choice whose forward and backward need at most `most_bytes`. Needs OR-tools.

    more         what compiled code needs beside what the program counts
    start        a choice to begin with; the coarse program is only solved where it does not fit
    least        find the choice that needs least instead, whatever it costs
    quick        be content with what the coarse program finds, if anything; there is no bound then
    counted      values to begin with that (11) is added for: those of a similar program
    gap          when to stop
    effort       when to stop, in the solver's own units of work, about two seconds of a CPU each
    """
    more = more or CompiledBytes(0, (0,) * len(joint.own_bytes))
    cost = more.peak_bytes if least else operator.attrgetter("price_us")
    begun = judged(joint, start)
    best = begun if more.peak_bytes(begun) <= most_bytes else None

    def ask(those: Collection[int] | None, limit: int) -> tuple[_Answer, Choice | None]:
        """Solve a program, and keep its answer if it is the best that fits."""
        nonlocal best, effort
        program = _Program(joint, those, limit, more, least=least)
        most = min(effort, COARSE_EFFORT if those is None else PROGRAM_EFFORT)
        may_stop = those is not None and not least and limit == most_bytes
        answer = program.solve(best.saved if best else start, gap, most, lacks_some if may_stop else None)
        effort -= answer.effort
        choice = None if answer.saved is None else judged(joint, answer.saved)
        if choice and more.peak_bytes(choice) <= most_bytes and (best is None or cost(choice) < cost(best)):
            best = choice
        return answer, choice

    def lacks_some(saved: frozenset[str]) -> bool:
        """Return whether an answer exceeds the budget by values that (11) is not added for."""
        return not _late(joint, judged(joint, saved), more, most_bytes) <= frozenset(counted)

    def is_over() -> bool:
        """Return whether the gap is closed, or too little effort is left for a program as large as the last."""
        is_closed = best is not None and not least and bound >= (1 - gap) * best.price_us
        return is_closed or effort < answer.effort

    counted = frozenset(counted)
    if best is None or least or quick:
        ask(None, most_bytes)
    bound = 0.0
    if best is not None and quick:
        return Solved(best, bound, counted)
    for _ in range(PROGRAMS):
        answer, choice = ask(counted, most_bytes)
        bound = max(bound, answer.bound_us)
        late = _late(joint, choice, more, answer.most_bytes if least else most_bytes) if choice else counted
        if late <= counted:
            break
        if choice and not (counted or least or is_over()):
            ask(counted, most_bytes - 2 * (more.peak_bytes(choice) - most_bytes))
        if is_over():
            break
        counted |= _alike(joint, late)
    return Solved(best, bound, counted)


def _late(joint: Joint, choice: Choice, more: CompiledBytes, most_bytes: int) -> frozenset[int]:
    """Return the values that take memory by (11) in stages that exceed `most_bytes`."""
    over = [t for t, needed in enumerate(more.in_stages(choice)) if needed > most_bytes]
    found = set[int]()
    for v, first, last, is_saved in _needed(joint, choice.saved) if over else ():
        value = joint.values[v]
        own = -1 if value.last is None else value.last
        if value.inlines and not is_saved:
            continue
        begin = own + 1 if is_saved or not value.fuses else own
        if not is_saved:
            begin = max(begin, first)
        if (is_saved or not value.fuses or first < last) and any(begin <= t <= last for t in over):
            found.add(v)
    return frozenset(found)


def _alike(joint: Joint, late: frozenset[int]) -> frozenset[int]:
    """Return `late`, what is inlined beside these values, and all values that are like one of them."""
    values = joint.values
    beside = {u for v in late for u in values[v].inputs if values[u].inlines}
    beside |= {v for v, value in enumerate(values) if value.inlines and not late.isdisjoint(value.inputs)}
    kinds = [(value.name.rstrip("_0123456789"), value.size_bytes, value.fuses, value.inlines) for value in values]
    found = {kinds[v] for v in beside.union(late)}
    return frozenset(v for v, kind in enumerate(kinds) if kind in found)


def _those(*variables: Any) -> list[Any]:
    """List the variables that there are."""
    return [each for each in variables if each is not None]


@dataclasses.dataclass(frozen=True)
class _Answer:
    """saved, bound_us  as in Choice and Solved    most_bytes  the value of M    effort  that it took"""

    saved: frozenset[str] | None
    bound_us: float
    most_bytes: int
    effort: float


class _Loosely(cp_model.CpSolverSolutionCallback):
    """Ends a search at an answer that lacks some of (11), by its variables' values, if its gap is `LOOSE` or less."""

    def __init__(self, lacks_some: Callable[[Callable[[Any], int]], bool]):
        super().__init__()
        self._lacks_some = lacks_some

    def on_solution_callback(self) -> None:
        if self.best_objective_bound >= (1 - LOOSE) * self.objective_value and self._lacks_some(self.value):
            self.stop_search()


class _Program:
    """Variables and constraints, numbered as above.

    counted  values that (11) is posed for; None for the coarse program
    """

    def __init__(
        self, joint: Joint, counted: Collection[int] | None, most_bytes: int, more: CompiledBytes, *, least: bool
    ):
        self.joint, self.counted, self.least = joint, counted, least
        self.spans = _spans(joint, NEAR if counted is None else FAR)
        self.model = cp_model.CpModel()
        new = self.model.new_bool_var
        pairs = list(zip(joint.values, self.spans, strict=True))
        self.s = [new("") if span and value.can_save else None for value, span in pairs]
        self.r = [
            {t: new("") for t in range(span.begin, span.due + 1)} if span and value.can_remake else {}
            for value, span in pairs
        ]
        self.made_of: list[list[int]] = [[] for _ in joint.values]
        for v, value in enumerate(joint.values):
            for u in value.inputs:
                self.made_of[u].append(v)
        for v, value in enumerate(joint.values):
            if value.first is not None:
                self.model.add_bool_or(self._there(v, value.first))  # (2)
            self.model.add_at_most_one(self._there(v, _LAST))  # (12)
            for t, made in self.r[v].items():
                for u in value.inputs:
                    self.model.add_bool_or([made.negated(), *self._there(u, t)])  # (3)
                if t + 1 in self.r[v]:
                    self.model.add_implication(made, self.r[v][t + 1])  # (4)
                if value.first is None or t < value.first:
                    self.model.add_bool_or(
                        [made.negated(), *_those(*(self._made(u, t) for u in self.made_of[v]))]
                    )  # (7)
        self.held: dict[int, Any] = {}
        self.a: dict[tuple[int, int], Any] = {}
        self.x = [self._held_at_all(v) if value.fuses else None for v, value in enumerate(joint.values)]
        self._limit_memory(most_bytes, more)
        self._minimize()

    def solve(
        self, start: Collection[str], gap: float, effort: float, lacks_some: Callable[[frozenset[str]], bool] | None
    ) -> _Answer:
        """Solve, from a choice to begin with, until the gap is closed or the effort spent.

        lacks_some  asked of answers on the way, if given: where one lacks some of (11), a gap of `LOOSE` is enough
        """
        if start:
            self._begin_with(start)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers, solver.parameters.linearization_level = 1, 2  # the bound is the relaxation's
        solver.parameters.relative_gap_limit, solver.parameters.max_deterministic_time = gap, effort
        loosely = lacks_some and _Loosely(lambda value: lacks_some(self._saved(value)))
        status = solver.solve(self.model, loosely)
        spent = solver.response_proto.deterministic_time
        if status == cp_model.INFEASIBLE:
            return _Answer(None, math.inf, 0, spent)
        bound = 0.0 if self.least else max(solver.best_objective_bound, 0.0) / self.scale
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return _Answer(None, bound, 0, spent)
        return _Answer(self._saved(solver.value), bound, self.unit * solver.value(self.most), spent)

    def _saved(self, value: Callable[[Any], int]) -> frozenset[str]:
        """Return the names of the values that are saved, by the values of the variables."""
        pairs = zip(self.s, self.joint.values, strict=True)
        return frozenset(each.name for variable, each in pairs if variable is not None and value(variable))

    def _held_at_all(self, v: int) -> Any:
        """Return the variable x[v], with (8) and (9); None if v is never held."""
        last = self.joint.values[v].last
        alone = None if last is None else self._made(v, last - 1)
        later = [
            [made.negated(), *unless]
            for t, made in self.r[v].items()
            if last is None or t >= last
            for unless in self._unless_needed(v, t + 1)
        ]
        if not later:
            return alone
        self.held[v] = held = self.model.new_bool_var("")
        if alone is not None:
            self.model.add_implication(alone, held)  # (8)
        for unless in later:
            self.model.add_bool_or([held, *unless])  # (9)
        return held

    def _begin_with(self, saved: Collection[str]) -> None:
        needed = {v: each for v, *each in _needed(self.joint, saved)}
        hint, none = self.model.add_hint, (_LAST, -1, False)
        for v, (each, made) in enumerate(zip(self.s, self.r, strict=True)):
            first, last, is_saved = needed.get(v, none)
            if each is not None:
                hint(each, is_saved)
            for t, again in made.items():
                hint(again, not is_saved and t >= first)
            if v in self.held:
                hint(self.held[v], not is_saved and first < last)
        for (v, t), alive in self.a.items():
            (first, last, is_saved), value = needed.get(v, none), self.joint.values[v]
            is_held = first <= t and not value.inlines and (first < last or not value.fuses)
            hint(alive, t <= last and (is_saved or is_held))

    def _there(self, u: int, t: int) -> list[Any]:
        """List variables of which one is true if value u can be read in stage t."""
        return _those(self.s[u], self._made(u, t))

    def _made(self, v: int, t: int) -> Any:
        span = self.spans[v]
        return None if span is None else self.r[v].get(min(t, span.due))

    def _alive(self, v: int, t: int) -> list[Any]:
        """List variables of which one at most is true: if one is, value v takes memory in stage t."""
        value, span = self.joint.values[v], self.spans[v]
        if span is None or t > span.last:
            return []
        saved, made, before = self.s[v], self._made(v, t), self._made(v, t - 1)
        if value.inlines:
            made = before = None
        if self.counted is None:
            return _those(saved, self._made(v, min(t, span.last - 1)) if value.fuses else made)
        last = -1 if value.last is None else value.last
        if t < last or (t == last and not value.fuses):
            return _those(saved, made)  # (10)
        if t < span.earliest or (t == span.earliest and v not in self.counted):
            return _those(saved)  # (13)
        if v not in self.counted:
            return _those(saved, before) if t == last else []
        # A value that fuses takes memory in a stage after which it is needed, or before which it was made.
        reasons = [(made, t + 1 if value.fuses else t)]
        if t > last:
            reasons += [(saved, t), (before if value.fuses else None, t)]
        clauses = [
            [there.negated(), *unless]
            for there, by in reasons
            if there is not None
            for unless in self._unless_needed(v, by)
        ]
        clauses += [[each.negated()] for each in _those(before) if t == last]
        certain = _those(saved) if t == last else []
        if not clauses:
            return certain
        self.a[v, t] = alive = self.model.new_bool_var("")
        for clause in clauses:
            self.model.add_bool_or([alive, *clause])  # (11)
        return [*certain, alive]

    def _unless_needed(self, v: int, t: int) -> Iterator[list[Any]]:
        """Yield clauses: all hold unless stage t or a later one computes something from value v."""
        for u in self.made_of[v]:
            if not self.r[u]:
                continue
            again, last = self._made(u, _LAST).negated(), self.joint.values[u].last
            if t <= self.spans[u].due:  # type: ignore[union-attr]
                yield self._unless_made(u, t)
            if not self.joint.values[u].inlines:
                continue
            if last is not None and t <= last:
                yield [again]
            else:
                yield from ([again, *unless] for unless in self._unless_needed(u, t))

    def _unless_made(self, u: int, t: int) -> list[Any]:
        """List literals of which one is true unless value u is made again in stage t or later."""
        return [self._made(u, _LAST).negated(), *_those(self._made(u, t - 1))]

    def _limit_memory(self, most_bytes: int, more: CompiledBytes) -> None:
        """Add (5) and (6), with the highest of all sums as a variable."""
        values = self.joint.values
        self.unit = unit = max(sum(value.size_bytes for value in values) // _UNITS, 1)
        total = self.joint.uses * sum(v.size_bytes + unit for v in values) + max(self.joint.own_bytes, default=0) + unit
        total += sum(more.making.values())
        most = min(most_bytes, total + max(more.forward, *more.backward, 0))
        self.most = self.model.new_int_var(min(most // unit, 0), most // unit, "M")
        kept = [(each, v.size_bytes) for each, v in zip(self.s, values, strict=True) if each is not None]
        others = [(each, (self.joint.uses - 1) * size) for each, size in kept if self.joint.uses > 1]
        self._limit([*others, *kept], more.forward, unit)
        for t, own_bytes in enumerate(map(operator.add, self.joint.own_bytes, more.backward)):
            alive = [(each, value.size_bytes) for v, value in enumerate(values) for each in self._alive(v, t)]
            making = [
                (each, sign * size)
                for (v, when), size in more.making.items()
                if when == t
                for sign, made in ((1, self._made(v, t)), (-1, self._made(v, t - 1)))
                for each in _those(made)
            ]
            self._limit([*others, *alive, *making], own_bytes, unit)

    def _limit(self, terms: Sequence[tuple[Any, int]], more: int, unit: int) -> None:
        weights = [-(-size // unit) for _, size in terms]
        total = cp_model.LinearExpr.weighted_sum([each for each, _ in terms], weights)
        self.model.add(total + -(-more // unit) <= self.most)

    def _minimize(self) -> None:
        """Set the objective (1), or the peak."""
        values = self.joint.values
        costs = [(each, v.save_us) for each, v in zip(self.s, values, strict=True) if each is not None]
        costs += [(made, v.remake_us) for i, v in enumerate(values) if (made := self._made(i, _LAST)) is not None]
        costs += [(held, v.held_us) for held, v in zip(self.x, values, strict=True) if held is not None]
        self.scale = _PRICES / max(sum(cost for _, cost in costs), 1e-9)
        terms = [each for each, _ in costs]
        price = cp_model.LinearExpr.weighted_sum(terms, [int(cost * self.scale) for _, cost in costs])
        self.model.minimize(self.most if self.least else price)
