"""Checks on values that pass: what only an error hangs on is no branch of a step.

A model asserts that its activations are finite, `F.gaussian_nll_loss` raises if a variance is negative: they read a
flag off a tensor, and no tensor has data while planning. Whatever it says, the step goes on or training ends. So a flag
is answered such that nothing is raised, where an `assert` reads it, or an `if` whose body is a `raise`, perhaps after
assignments and calls. All operators that make the flag run, and count. Numbers are not answered: another one may be as
good. Nor is a flag

- by which the rest of its condition would be skipped: of `assert a or b` and of `if a and b: raise`, only `b` is.
- in a `try` with handlers or a `with` of `suppress` or `raises`, in a method of `_ASKED`, before a `raise` of `_HEARD`.
  An error that any other `with` or a caller catches is taken as the end all the same.
- compared by other than one of `<`, `<=`, `>`, `>=`, `==`; read by a call other than of `_READERS`; in a condition with
  a conditional expression, a lambda or a comprehension.

What reads is looked up in the source at its position (`co_positions`). Python 3.11 gives a jump that of its statement
or of a comparison: there it is the instruction before, which made the flag. Code that Dynamo writes may have lines
alone: there no call is answered, no line with another statement, and no condition whose parts want several answers.
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
_ASKED = {"__next__", "__getitem__", "__getattr__"}  # their errors say how to go on
_TRUTHS = {"TO_BOOL", "UNARY_NOT", *(["COMPARE_OP"] if sys.version_info >= (3, 13) else [])}  # and jumps
_READERS = {"bool", "item", "equal", "allclose"}
_HEARD = {"StopIteration", "StopAsyncIteration", "GeneratorExit", "IndexError", "KeyError", "AttributeError"}
_BRANCHES = (ast.IfExp, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_PASSED_ON = (  # by whose frames a read goes from the code that reads to a dispatch mode
    *("remat.", "torch._subclasses", "torch._ops", "torch._compile", "torch._dynamo", "torch.utils._python_dispatch"),
    *("torch.overrides", "torch._prims_common", "torch.fx._", "contextlib"),
)


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
    name, positions = dis.opname[code.co_code[instruction]], list(code.co_positions())
    made = here = positions[instruction // 2]
    is_call = "CALL" in name
    if not is_call and "JUMP" not in name and name not in _TRUTHS:
        return None
    if "JUMP" in name and sys.version_info < (3, 12):
        made = next((each for each in reversed(positions[: instruction // 2]) if each != here), here)
    found: set[bool | None] = set()
    for check in _checks(source):
        flags = list(_flags(check.test, isinstance(check, ast.Assert)))
        if None not in (*here, *made):
            if made is here or here in map(_span, (check, *(flag for flag, _ in flags))):
                ends = [each for each in flags if _span(each[0])[1::2] == made[1::2]]  # it may begin at a method's name
                found.update(a for flag, a in ends if not is_call or _name(getattr(flag, "func", flag)) in _READERS)
        elif check.lineno <= line <= (check.test.end_lineno or 0):
            lines = source.split("\n")[check.lineno - 1 : check.test.end_lineno]
            is_alone = not lines[0][: check.col_offset].strip() and ";" not in "".join(lines)
            found.update(answer if is_alone and not is_call else None for _, answer in flags)
    return found.pop() if len(found) == 1 else None


@functools.lru_cache(maxsize=16)
def _checks(source: str) -> list[ast.Assert | ast.If]:
    """List the statements that do nothing but raise if their condition says so, and end the step by it."""
    try:
        todo: list[tuple[ast.AST, bool]] = [(ast.parse(source), False)]
    except SyntaxError:
        return []
    found: list[ast.Assert | ast.If] = []
    while todo:
        node, goes_on = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            goes_on = node.name in _ASKED
        elif isinstance(node, ast.With | ast.AsyncWith):
            names = " ".join(ast.unparse(each.context_expr) for each in node.items).lower()
            goes_on |= "suppress" in names or "raises" in names
        elif getattr(node, "handlers", None):
            goes_on = True
        elif not goes_on and (isinstance(node, ast.Assert) or (isinstance(node, ast.If) and _only_raises(node.body))):
            found += [] if any(isinstance(each, _BRANCHES) for each in ast.walk(node.test)) else [node]
        todo.extend((each, goes_on) for each in ast.iter_child_nodes(node))
    return found


def _only_raises(body: list[ast.stmt]) -> bool:
    are_plain = all(isinstance(each, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr) for each in body[:-1])
    within = [each for statement in body for each in ast.walk(statement)]
    goes_on = any(isinstance(each, ast.Yield | ast.YieldFrom) or _name(each) in _HEARD for each in within)
    return isinstance(body[-1], ast.Raise) and are_plain and not goes_on


def _flags(condition: ast.expr, wanted: bool, is_last: bool = True) -> Iterator[tuple[ast.expr, bool | None]]:
    """Yield the parts of a condition that may be flags, with the answer by which it is as `wanted`, if one is given."""
    if isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not):
        yield from _flags(condition.operand, not wanted, is_last)
    elif isinstance(condition, ast.BoolOp):
        for value in condition.values:
            is_seen = isinstance(condition.op, ast.And) == wanted or value is condition.values[-1]
            yield from _flags(value, wanted, is_last and is_seen)
    else:
        ops = condition.ops if isinstance(condition, ast.Compare) else []
        is_plain = len(ops) < 2 and all(isinstance(each, ast.Lt | ast.LtE | ast.Gt | ast.GtE | ast.Eq) for each in ops)
        is_plain &= not any(isinstance(each, ast.BoolOp | ast.Not) for each in ast.walk(condition))
        yield condition, wanted if is_plain and is_last else None


def _name(node: ast.AST) -> str | None:
    return getattr(node, "attr", getattr(node, "id", None))


def _span(node: ast.stmt | ast.expr) -> tuple[int | None, ...]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset
