"""Shown: how a value presents itself, as lines in a terminal and as a small static table in a notebook."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

Rows = Sequence[Sequence[str]]
_CELL = "text-align:right;padding:.15em .9em .15em 0;font-variant-numeric:tabular-nums"
_NAME = "text-align:left;padding:.15em .9em .15em 0"


class Shown:
    """A value that shows itself as one table, its columns headed or not."""

    _header: ClassVar[Sequence[str]] = ()

    @property
    def _title(self) -> str:
        raise NotImplementedError

    @property
    def _shown(self) -> Rows:
        raise NotImplementedError

    def __str__(self) -> str:
        return as_text(self._title, self._shown, self._header)

    def _repr_html_(self) -> str:
        return as_html(self._title, self._shown, self._header)


def step_text(about: Mapping[str, Any]) -> str:
    """Describe the sizes and the precision of a step, and its optimizer."""
    size = f"batch {about['batch_size']}" + (f" x {about['seq_len']}" if about.get("seq_len") is not None else "")
    over = f", accumulated over {about['accumulation']}" if about.get("accumulation", 1) > 1 else ""
    weights = " and ".join(about.get("parameter_dtypes", ())) + " weights"
    precision = f", {about['autocast']} autocast" if about.get("autocast") else ""
    return f"{size}{over}, {weights}{precision}, {about.get('optimizer') or 'no optimizer'}"


def as_text(title: str, rows: Rows, header: Sequence[str] = (), notes: Sequence[str] = ()) -> str:
    """Format `title`, and below it `rows` in columns: the first aligned left, the others right."""
    table = [*([header] if header else []), *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    sides = ["<", *">" * (len(widths) - 1)]
    lines = [
        "  " + "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True))
        for row in table
    ]
    return "\n".join([title, *(line.rstrip() for line in lines), *(f"  {note}" for note in notes)])


def as_html(title: str, rows: Rows, header: Sequence[str] = (), notes: Sequence[str] = ()) -> str:
    """Format the same as HTML, without script or style sheet, in the colours of the surroundings."""
    parts = [f"<div><strong>{html.escape(title)}</strong><table>"]
    if header:
        parts.append(f"<thead>{_row(header, 'th')}</thead>")
    parts.append(f"<tbody>{''.join(_row(row, 'td') for row in rows)}</tbody></table>")
    parts += [f"<div>{html.escape(note)}</div>" for note in notes]
    return "".join([*parts, "</div>"])


def _row(cells: Sequence[str], kind: str) -> str:
    first, *others = (html.escape(cell) for cell in cells)
    scope = ' scope="row"' if kind == "td" else ""
    rest = "".join(f'<{kind} style="{_CELL}">{cell}</{kind}>' for cell in others)
    return f'<tr><th{scope} style="{_NAME}">{first}</th>{rest}</tr>'
