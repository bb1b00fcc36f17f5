"""Checks on values that pass: what only an error hangs on is no branch of a step.

A model asserts that its activations are finite, `F.gaussian_nll_loss` raises if a variance is negative: they read a
flag off a tensor, and no tensor has data while planning. Whatever it says, the step goes on or training ends. So a flag
is answered such that nothing is raised, where the statement that reads it is

  `assert flag`              or `assert not flag`, and so on through `and`, `or`, `not`, `bool()` and `.item()`
  `if flag: ... raise ...`   whose body ends by raising

All operators that make the flag run, and count. A statement is looked up in the source of the code that reads, at the
position of the instruction that does (`co_positions`). Of a jump, Python 3.11 gives the position of the statement:
then it is the instruction before, which made the flag. Code that Dynamo writes may have lines alone: there all parts of
the condition must want one answer. Numbers are not answered: another one may be as good.
"""

from __future__ import annotations

import ast
import dis
import functools
import linecache
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch

_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default}
_PASSED_ON = (  # by whose frames a read goes from the code that reads to a dispatch mode
    *("remat.", "torch._subclasses", "torch._ops", "torch._compile", "torch._dynamo", "torch.utils._python_dispatch"),
    *("torch.overrides", "torch._prims_common", "torch.fx._", "contextlib"),
)
_Span = tuple[int, int, int, int]  # first line, last line, first column, last column; from 1, and from 0


def answer_that_passes(func: Any, args: Any) -> bool | None:
    """Return the flag with which the check passes that now reads by `func`; None if what reads it is no check."""
    if func not in _READS or (func is not torch.ops.aten.equal.default and args[0].dtype != torch.bool):
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _passes_on(frame):
        frame = frame.f_back
    if frame is None:
        return None
    return _answer(frame.f_code, frame.f_lasti, frame.f_lineno, "".join(linecache.getlines(frame.f_code.co_filename)))


def _passes_on(frame: FrameType) -> bool:
    is_mode = frame.f_code.co_name in ("__torch_dispatch__", "__torch_function__")
    return is_mode or frame.f_globals.get("__name__", "").startswith(_PASSED_ON)


@functools.lru_cache(maxsize=256)
def _answer(code: CodeType, instruction: int, line: int, source: str) -> bool | None:
    """Find the one answer of the checks at an instruction, or at its line if its position is not known."""
    spans, is_jump = _read_by(code, instruction)
    found: set[bool] = set()
    for condition, wanted in _checks(source):
        if condition.lineno <= line <= (condition.end_lineno or 0):
            for flag, answer in _flags(condition, wanted):
                is_open = not spans and (is_jump or not isinstance(flag, ast.Compare))
                if is_open or not spans.isdisjoint(_spans(flag)):
                    found.add(answer)
    return found.pop() if len(found) == 1 else None


@functools.lru_cache(maxsize=16)
def _checks(source: str) -> list[tuple[ast.expr, bool]]:
    """List the conditions of checks, and whether each must be true to pass."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return []
    found: list[tuple[ast.expr, bool]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            found.append((node.test, True))
        elif isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise):
            found.append((node.test, False))
    return found


def _flags(condition: ast.expr, wanted: bool) -> Iterator[tuple[ast.expr, bool]]:
    """Yield the parts of a condition that may be flags, with the answer by which it is as `wanted`."""
    if isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not):
        flags = list(_flags(condition.operand, not wanted))
        yield from flags
        if len(flags) == 1:  # `not` itself may read it, where no jump does
            yield condition, not wanted
    elif isinstance(condition, ast.BoolOp):
        for value in condition.values:
            yield from _flags(value, wanted)
    else:
        yield condition, wanted


def _read_by(code: CodeType, instruction: int) -> tuple[set[_Span], bool]:
    """Return the spans that may be of the code whose value an instruction reads, if known, and whether it is a jump."""
    positions: list[Any] = list(code.co_positions())
    here, is_jump = positions[instruction // 2], "JUMP" in dis.opname[code.co_code[instruction]]
    spans = {here}
    if is_jump:  # the value was made by the instruction before
        spans.add(next((each for each in reversed(positions[: instruction // 2]) if each != here), here))
    return (set() if any(None in each for each in spans) else spans), is_jump


def _spans(flag: ast.expr) -> set[Any]:
    """Return the spans of a flag; that of a method on a line of its own begins with its name."""
    last, end = flag.end_lineno, flag.end_col_offset
    found: set[Any] = {(flag.lineno, last, flag.col_offset, end)}
    if isinstance(flag, ast.Call) and isinstance(called := flag.func, ast.Attribute):
        found.add((called.end_lineno, last, (called.end_col_offset or 0) - len(called.attr), end))
    return found
