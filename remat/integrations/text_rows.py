"""Rows of text: the longest of a data set whose collator tokenizes, as those of sentence-transformers do.

How long a text is, in tokens, only its collator knows. Each row is collated by itself and measured, column by column,
and the longest texts of every column come first together: a batch of them is as large as a batch can get.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Row = Mapping[str, Any]
Collate = Callable[[list[Any]], Any]
DATA_SET = "dataset_name"  # the column in which sentence-transformers says which of several a row is from


def longest_first(rows: Sequence[Any], collate: Collate) -> list[Any]:
    """Sort each column of one data set's `rows` by length, the longest first; of several sets, take the largest."""
    kinds: dict[Any, list[Row]] = {}
    for row in rows:
        kinds.setdefault((tuple(row), row.get(DATA_SET)), []).append(row)
    sorted_kinds = [_sorted(of_kind, collate) for of_kind in kinds.values()]
    return max(sorted_kinds, key=lambda found: sum(_sizes(found[0], collate).values()))


def hold_text(rows: Sequence[Any]) -> bool:
    """Return whether `rows` contain text that their collator has to tokenize."""
    if not rows or not all(isinstance(row, Mapping) for row in rows) or "input_ids" in rows[0]:
        return False
    return any(_text_columns(row) for row in rows)


def _text_columns(row: Row) -> list[str]:
    return [name for name, value in row.items() if _is_text(value) and name != DATA_SET]


def _sorted(rows: list[Row], collate: Collate) -> list[Row]:
    columns = _text_columns(rows[0])
    sizes = [_sizes(row, collate) for row in rows]
    orders = {}
    for column in columns:
        lengths = [_length_of(column, row, found) for row, found in zip(rows, sizes, strict=True)]
        orders[column] = sorted(range(len(rows)), key=lengths.__getitem__, reverse=True)
    return [{**row, **{c: rows[orders[c][i]][c] for c in columns}} for i, row in enumerate(rows)]


def _sizes(row: Row, collate: Collate) -> dict[str, int]:
    """Return the elements of the tensors in a batch of `row` alone; empty if the collator rejects it."""
    try:
        made = dict(collate([dict(row)]))
    except Exception:  # any error of a collator
        return {}
    return {name: value.numel() for name, value in made.items() if isinstance(value, torch.Tensor)}


def _length_of(column: str, row: Row, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Return the length of a column's text in tokens (0 if no tensor is named after it), and in characters."""
    tokens = sum(size for name, size in sizes.items() if name.startswith(f"{column}_"))
    return tokens, len(row[column])


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and bool(value) and all(map(_is_text, value)))
