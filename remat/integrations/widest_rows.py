"""The rows of a data set whose batch is largest, by the lengths of their columns.

A collator pads a batch to its longest row; which row that is, a column does not always say: preference rows are padded
to a prompt with its longer answer, texts and their translations apart. So a few orders are tried: by all that a row
holds, by each column, by each sum of two, and first the longest in each. Where their batches differ, the collator makes
them, and the largest is taken.
"""

from __future__ import annotations

import collections
import copy
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

PAGE = 10_000  # rows whose lengths are read at once
MOST_COLUMNS = 6  # whose lengths differ from each other


def widest_first(rows: Sequence[Any], count: int, collate: Callable[[list[Any]], Any]) -> list[Any]:
    """Sort `rows` so that, of the orders tried, the first `count` of them make the largest batch.

    Tokens count before all other elements. An order whose batch the collator rejects is left out.
    """
    by_size = sorted(range(len(rows)), key=lambda i: (-(length_of(rows[i]) or 0), -size_of(rows[i])))
    columns = _columns(rows)
    sums = [*columns, *(tuple(map(operator.add, *pair)) for pair in itertools.combinations(columns, 2))]
    orders = [by_size, *(sorted(by_size, key=lambda i: -lengths[i]) for lengths in sums)]
    orders.append(list(dict.fromkeys([*(order[0] for order in orders if order), *by_size])))
    batches: dict[frozenset[int], list[int]] = {}
    for order in orders:
        batches.setdefault(frozenset(order[:count]), order)
    if len(batches) > 1:
        by_size = max(batches.values(), key=lambda order: _elements([rows[i] for i in order[:count]], collate))
    return [rows[i] for i in by_size]


def longest_of_all(data: Any, count: int) -> list[int]:
    """Return the numbers of the rows that are longest in a column, or in two together, `count` of each.

    data  a `datasets.Dataset`, whose table knows the lengths of its rows; of other data sets nothing is known

    Text counts by its characters.
    """
    if not (hasattr(data, "with_format") and hasattr(data, "iter")):
        return []
    import pyarrow as pa
    import pyarrow.compute as pc

    found = collections.defaultdict[str, list[np.ndarray]](list)
    for table in data.with_format("arrow").iter(batch_size=PAGE):
        for name, column in zip(table.column_names, table.columns, strict=True):
            is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
            if is_text or pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
                lengths = pc.utf8_length(column) if is_text else pc.list_value_length(column)
                found[name].append(pc.fill_null(lengths, 0).to_numpy())
    columns = [lengths for each in found.values() if np.ptp(lengths := np.concatenate(each))][:MOST_COLUMNS]
    sums = [*columns, *(one + other for one, other in itertools.combinations(columns, 2))]
    return list(dict.fromkeys(int(i) for lengths in sums for i in np.argsort(-lengths, kind="stable")[:count]))


def length_of(row: Any) -> int | None:
    """Return the number of tokens of a row, or of the rows that are packed into one; None if it is no text."""
    if isinstance(row, list) and row and all(isinstance(each, Mapping) for each in row):
        return sum(length_of(each) or 0 for each in row)
    return _len(row["input_ids"]) if isinstance(row, Mapping) and hasattr(row.get("input_ids"), "__len__") else None


def size_of(row: Any) -> int:
    """Return the number of tokens in a row, in any columns."""
    if isinstance(row, list):
        return sum(map(size_of, row))
    return sum(map(_len, row.values())) if isinstance(row, Mapping) else 0


def _columns(rows: Iterable[Any]) -> list[tuple[int, ...]]:
    """List the lengths that rows have in each column, where they differ; each once."""
    rows = [row if isinstance(row, Mapping) else {} for row in rows]
    names = dict.fromkeys(name for row in rows for name in row)
    found = dict.fromkeys(tuple(_len(row.get(name)) for row in rows) for name in names)
    return [lengths for lengths in found if len(set(lengths)) > 1][:MOST_COLUMNS]


def _elements(rows: list[Any], collate: Callable[[list[Any]], Any]) -> tuple[int, int]:
    """Return the number of tokens in a batch, and of all its elements; (-1, -1) if the collator rejects the rows."""
    try:
        made = dict(collate([copy.copy(row) for row in rows]))
    except Exception:  # any error of a collator
        return -1, -1
    sizes = {str(name): value.numel() for name, value in made.items() if isinstance(value, torch.Tensor)}
    return sum(size for name, size in sizes.items() if name.endswith("input_ids")), sum(sizes.values())


def _len(value: Any) -> int:
    """Return the length of a column's value; 0 for text and for what has none."""
    if isinstance(value, (str, bytes)):
        return 0
    try:
        return len(value)
    except TypeError:
        return 0
