"""The texts that people read: messages of the source, docstrings, sentences of pages."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file, which nobody changes: parsed once for all tests of a process."""
    return ast.parse(path.read_text(encoding="utf-8"))


def sources(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    """(path, syntax tree) of every file of Python in these folders."""
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        yield str(path.relative_to(ROOT)), tree_of(path)


PACKAGE = ("remat", "solvers", "models")


@functools.cache
def templates() -> frozenset[str]:
    """Every string of the package that is no docstring, an ellipsis for each value that is put in."""
    return frozenset(text for _, tree in sources(*PACKAGE) for text in _strings(tree))


def _strings(tree: ast.Module) -> Iterator[str]:
    docstrings = {id(node.body[0].value) for node in ast.walk(tree) if _has_docstring(node)}  # type: ignore[attr-defined]
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if id(node) in docstrings | parts:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)


def _has_docstring(node: ast.AST) -> bool:
    return isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None


def docstrings(*folders: str) -> Iterator[tuple[str, str]]:
    """(place, docstring) of every module, class and function in these folders."""
    for path, tree in sources(*folders):
        for node in ast.walk(tree):
            if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
                yield f"{path}:{getattr(node, 'name', 'module')}", text


NO_VERB = re.compile(
    r"a|all|an|another|any|as|at|by|each|every|for|how|in|its?|least|less|memory|more|most|no|none|not|of|on|one|only|"
    r"other|part|peak|row|rule|some|that|the|these|this|those|time|wh(at|en|ere|ether|ich|ile|o|y)|with(out)?|.*[^s]s",
    re.IGNORECASE,
)


def functions(*folders: str) -> Iterator[tuple[str, str]]:
    """(place, docstring) of every function in these folders; a property's is a noun phrase, like an attribute's."""
    for path, tree in sources(*folders):
        for node in ast.walk(tree):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            is_property = any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
            if not is_property and (text := ast.get_docstring(node)):
                yield f"{path}:{node.lineno} {node.name}", text


def begins_with_verb(text: str) -> bool:
    """Return whether the first word may be an imperative: no plural, no third person, no article or the like."""
    word = text.split()[0].rstrip(",.:")
    return word.isalpha() and NO_VERB.fullmatch(word) is None


def sentences(page: Path) -> Iterator[str]:
    """Sentences of a page of Markdown, without code, tables, headings and the targets of links."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^ *(\||#|>|!\[).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        yield from filter(None, re.split(r"(?<=[.!?:;])\s+| · ", " ".join(paragraph.split())))
