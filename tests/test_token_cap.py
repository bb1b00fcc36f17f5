"""Token caps: no batch within the cap of a plan exceeds the budget, whatever its lengths, and one row more does."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import remat
from remat.cli.model_spec import ModelSpec
from remat.costing.device_allocator import measure_peak
from remat.errors import UsageError
from remat.evaluation.plan import TOKEN_CAP, Plan
from remat.formulation.solution import Limits
from remat.integrations.token_batches import TokenBatches, TokenCap
from remat.planning.estimate import estimate
from remat.planning.token_cap import CLOSE_SHARE, BatchShape, _PaddedCap, edge, most_tokens
from remat.planning.windows import MOST_SAMPLES, Window
from tests.cached import cached
from tests.graphs import recorded
from tests.test_fitting import CONVNET, TARGET, WIDE, at, search
from tests.toys import CPU, plan_by_hand

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")

LIMITS = Limits(time_s=20)
LONGEST, ROWS = 16, 5
TEXT = WIDE.sized(seq_len=LONGEST)


@cached
def budget_for(rows: int) -> int:
    """A little more than the least that `rows` rows of the longest length need."""
    return search(1 << 40, TEXT).least_bytes(Window(rows, rows)) * 101 // 100


@cached
def planned(rows: int = ROWS) -> Plan:
    return most_tokens(TEXT, budget=budget_for(rows), target=TARGET, limits=LIMITS)


def shapes(cap: TokenCap, count: int) -> list[tuple[int, int]]:
    """Shapes of batches within a cap, each with as many rows as it allows: the ends, and random lengths."""
    drawn = random.Random(0)
    lengths = [2, LONGEST, LONGEST - 1, *(drawn.randint(2, LONGEST) for _ in range(count - 3))]
    return [(min(cap.tokens // length, cap.rows), length) for length in lengths]


# The cap


@pytest.mark.exhaustive
def test_no_batch_within_the_cap_exceeds_the_budget() -> None:
    plan = planned()
    for rows, length in shapes(TokenCap.of(plan), 5):
        found = estimate(TEXT.sized(rows, length), plan=plan, target=TARGET)
        assert found.peaks.peak_bytes <= budget_for(ROWS)


@pytest.mark.exhaustive
def test_one_row_more_than_the_cap_has_no_plan() -> None:
    rows = TokenCap.of(planned()).tokens // LONGEST + 1
    assert not search(budget_for(ROWS), TEXT).feasible(rows, accumulates=False)


@pytest.mark.exhaustive
@pytest.mark.nightly
def test_batches_within_the_cap_are_measured_within_the_budget() -> None:
    budget = budget_for(ROWS) - (63 << 20)  # the CPU has no library workspaces
    plan = most_tokens(TEXT, budget=budget, target="cpu", limits=LIMITS)
    torch.manual_seed(0)
    model = remat.apply(TEXT.build(), plan)
    assert TEXT.optimizer is not None
    optimizer: Any = TEXT.optimizer(model.parameters())

    def step() -> None:
        TEXT.step(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    for rows, length in shapes(TokenCap.of(plan), 12):
        batch = TEXT.batch(rows, length)
        step()
        state = [tensor for each in optimizer.state.values() for tensor in each.values()]
        fixed = sum(tensor.nbytes for tensor in [*model.parameters(), *state, *batch])
        assert fixed + measure_peak(step, CPU, requested=True) <= budget


@pytest.mark.exhaustive
def test_the_plan_is_for_the_longest_rows_and_is_saved_with_its_cap(tmp_path: Any) -> None:
    plan = planned()
    assert plan.about["seq_len"] == LONGEST
    assert plan.budget_bytes == budget_for(ROWS)
    plan.save(tmp_path / "p.json")
    assert Plan.load(tmp_path / "p.json").about[TOKEN_CAP] == plan.about[TOKEN_CAP]


@pytest.mark.exhaustive
@pytest.mark.nightly
def test_a_packed_row_is_as_long_as_the_budget_allows() -> None:
    plan = most_tokens(TEXT, packed=True, budget=budget_for(ROWS), target=TARGET, limits=LIMITS)
    cap = TokenCap.of(plan)
    assert (cap.rows, cap.longest, cap.packed) == (1, cap.tokens, True)
    assert plan.about["seq_len"] == cap.tokens
    longer = search(budget_for(ROWS), TEXT.sized(seq_len=cap.tokens + 2 + int(CLOSE_SHARE * cap.tokens)))
    assert not longer.feasible(1, accumulates=False)


class Rounded(_PaddedCap):
    """A cap whose batches need bytes for each token, for each row, and for lengths rounded up by a kernel."""

    def __init__(self, longest: int, limit: int, of_row: int, of_kernel: int, multiple: int):
        super().__init__(SimpleNamespace(workload=TEXT.sized(seq_len=longest)))  # type: ignore[arg-type]
        self.limit, self.of_row, self.of_kernel, self.multiple = limit, of_row, of_kernel, multiple

    def _excess(self, plan: Any, shape: BatchShape) -> int:
        up = -(-shape.length // self.multiple) * self.multiple
        return shape.rows * (10 * shape.length + self.of_kernel * up + self.of_row) - self.limit


@given(st.integers(128, 500), st.integers(1, 40), st.integers(0, 50), st.integers(0, 1), st.sampled_from([1, 8, 32]))
def test_the_limit_on_rows_holds_for_every_length(
    longest: int, rows: int, of_row: int, of_kernel: int, multiple: int
) -> None:
    tokens = rows * longest
    full = Rounded(longest, 0, of_row, of_kernel, multiple)._excess(None, BatchShape(rows, longest))
    search = Rounded(longest, full * 105 // 100, of_row, of_kernel, multiple)
    most = search._most_rows(None, tokens)  # type: ignore[arg-type]
    assert rows <= most <= tokens // 2
    for length in range(2, longest + 1):
        assert search._excess(None, BatchShape(min(most, tokens // length), length)) <= 0


def test_images_have_no_token_cap() -> None:
    with pytest.raises(UsageError, match="has no sequences"):
        most_tokens(CONVNET, target=TARGET, budget=1 << 30)


@given(st.integers(0, 10**6), st.integers(0, 1000), st.integers(0, 3), st.integers(2, 2000), st.integers(1, 10**9))
def test_the_edge_is_the_most_tokens_that_fit(fixed: int, slope: int, square: int, start: int, limit: int) -> None:
    def need(tokens: int) -> float:
        asked.append(tokens)
        return fixed + slope * tokens + square * tokens**2

    asked: list[int] = []
    found = edge(need, limit, start)
    if found is None:
        assert need(3) > limit
        return
    if found >= MOST_SAMPLES:
        assert need(found) <= limit
        return
    assert need(found) <= limit < need(found + max(int(CLOSE_SHARE * found), 1) + 1)
    assert max(asked) <= max(2 * found, start) + 2


# Batches within it

CAP = {"tokens": 100, "rows": 12, "longest": 40, "packed": False}


def capped(**changed: Any) -> Plan:
    graph = at(2)
    plan = plan_by_hand(graph, ())
    return dataclasses.replace(plan, about={**plan.about, TOKEN_CAP: CAP | changed})


@pytest.mark.exhaustive
@given(st.lists(st.integers(1, 40), max_size=300), st.booleans(), st.booleans())
def test_batches_hold_every_row_once_and_keep_the_cap(lengths: list[int], packed: bool, shuffle: bool) -> None:
    plan = capped(packed=packed)
    batches = TokenBatches(lengths, plan, shuffle=shuffle)
    count, found = len(batches), list(batches)
    assert len(found) == count
    assert sorted(row for batch in found for row in batch) == list(range(len(lengths)))
    for batch in found:
        of = [lengths[row] for row in batch]
        assert TokenCap.of(plan).holds(len(of), max(of), sum(of))


def test_each_epoch_has_an_order_of_its_own_and_a_seed_repeats_them() -> None:
    lengths = [1 + i % 40 for i in range(200)]
    first, second = (TokenBatches(lengths, capped()) for _ in range(2))
    epochs = [list(first), list(first)]
    assert epochs == [list(second), list(second)]
    assert epochs[0] != epochs[1]


def test_a_row_above_the_longest_is_named() -> None:
    with pytest.raises(UsageError, match=r"row 1 has 41 tokens, and the plan is for at most 40"):
        TokenBatches([3, 41], capped())


def test_rows_of_one_token_alone_are_no_more_than_the_longest_that_fit() -> None:
    """No plan knows them: a size of one is traced by itself."""
    cap = TokenCap(tokens=64, rows=32, longest=16, packed=False)
    assert cap.holds(4, 1, 4) and not cap.holds(5, 1, 5)
    assert cap.holds(32, 2, 33)


class Pair(nn.Module):
    """Takes tokens and targets."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.table(tokens).sum() + self.table(targets).square().sum()


def pair_of(rows: int, length: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    assert length is not None
    return torch.zeros(rows, length, dtype=torch.long), torch.zeros(rows, -(-length // 4), dtype=torch.long)


def capped_pair() -> nn.Module:
    graph = recorded(remat.Workload("pair", Pair, pair_of, lambda model, given: model(*given), 4, seq_len=8)).graph
    plan = plan_by_hand(graph, ())
    cap = {"tokens": 32, "rows": 16, "longest": 8, "packed": False}
    return remat.apply(Pair(), dataclasses.replace(plan, about={**plan.about, TOKEN_CAP: cap}))


def test_targets_rounded_up_in_short_rows_do_not_make_a_batch_too_large() -> None:
    model = capped_pair()
    model(*pair_of(16, 2))  # as many tokens, twice the targets: a warning would be an error here
    with pytest.warns(UserWarning, match="33 elements, the plan was made for 32"):
        model(*pair_of(11, 3))


def test_targets_longer_than_planned_make_a_batch_too_large() -> None:
    tokens, targets = torch.zeros(4, 8, dtype=torch.long), torch.zeros(4, 6, dtype=torch.long)
    with pytest.warns(UserWarning, match="24 elements, the plan was made for 8"):
        capped_pair()(tokens, targets)


def test_a_plan_without_a_cap_says_how_to_make_one() -> None:
    with pytest.raises(UsageError, match=r"remat fit --max-tokens"):
        TokenBatches([3], plan_by_hand(at(2), ()))


# --packed


def test_packed_rows_count_positions_anew_in_each_sequence() -> None:
    pytest.importorskip("transformers")
    batch = ModelSpec("gpt2", batch_size=2, seq_len=2500, packed=True).workload().batch(2, 2500)
    assert all(tensor.shape == (2, 2500) for tensor in batch.values())
    assert batch["position_ids"][0].tolist() == [i % 1024 for i in range(2500)]


def test_packed_and_padded_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="give one of them"):
        ModelSpec("gpt2", packed=True, padded=True).workload()
