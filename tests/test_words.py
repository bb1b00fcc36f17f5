"""Texts that people read use plain words: pages, messages, docstrings.

A phrase enters WORN when its kind was found in a text; an allowance for a single place does not exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import typer

from remat.cli.main import app
from tests import words
from tests.words import ROOT

LONGEST_SENTENCE = 40  # words
LONGEST_HELP = 155  # characters of an option: two lines of a terminal of 120 columns

WORN = (
    *("nobody", "somebody", "anybody", "whoever", "likewise"),
    *("is told", "are told", "told of", "is had", "be had", "lies on", "lie on", "lies there", "lie there", "may lie"),
    *("as captured", "the untouched step", "untouched step"),
    *("is never there", "never there at once", "too little less", "round otherwise", "rounds otherwise"),
    *("of no use", "as it stands", "of them all", "there are the least", "there is to try"),
)
SPELLINGS = {
    "activation check-pointing": "activation checkpointing",
    "cross entropy": "cross-entropy",
    "microbatch": "micro-batch",
    "optimiser": "optimizer",
    "rematerialisation": "rematerialization",
    "tokens/sec": "tokens/s",
    "HuggingFace": "Hugging Face",
    "Huggingface": "Hugging Face",
    "Pytorch": "PyTorch",
    "pytorch ": "PyTorch",
    "off-load": "offload",
    "back-ward": "backward",
}
PHRASES = re.compile(rf"(?<![\w`])({'|'.join(map(re.escape, sorted(WORN, key=len, reverse=True)))})(?![\w`])", re.I)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
READ = [page for page in PAGES if page.parent.name != "decisions"]  # those are dated notes


def worn(texts: Iterable[tuple[str, str]]) -> Iterator[str]:
    for place, text in texts:
        yield from (f"{place}: {match[0]}: {text[:120]}" for match in PHRASES.finditer(" ".join(text.split())))


@pytest.mark.parametrize("page", READ, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_no_worn_phrase(page: Path) -> None:
    assert list(worn([(page.name, page.read_text(encoding="utf-8"))])) == []


@pytest.mark.parametrize("page", READ, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_sentences_of_a_page_are_short(page: Path) -> None:
    lengths = {sentence: len(sentence.split()) for sentence in words.sentences(page)}
    assert {sentence[:80]: count for sentence, count in lengths.items() if count > LONGEST_SENTENCE} == {}


def test_messages_have_no_worn_phrase() -> None:
    assert list(worn(("message", template) for template in words.templates() if len(template.split()) > 2)) == []


def test_docstrings_have_no_worn_phrase() -> None:
    assert list(worn(words.docstrings(*words.PACKAGE))) == []


@pytest.mark.exhaustive
def test_no_docstring_begins_with_what() -> None:
    everywhere = words.docstrings(*words.PACKAGE, "tests", "benchmarks", "examples", "docs")
    assert [place for place, text in everywhere if re.match(r"What\b", text)] == []


def test_the_docstring_of_a_function_begins_with_a_verb() -> None:
    wrong = [place for place, text in words.functions(*words.PACKAGE) if not words.begins_with_verb(text)]
    assert wrong == []


@pytest.mark.parametrize("text", ["Bytes of a plan.", "Returns the bytes.", "Whether it fits.", "(rows, width) of it."])
def test_a_noun_phrase_begins_with_no_verb(text: str) -> None:
    assert not words.begins_with_verb(text)


def test_words_are_spelled_as_in_the_glossary() -> None:
    texts = [(page.name, text) for page in READ for text in words.sentences(page)]
    texts += [("message", template) for template in words.templates()]
    wrong = [(place, spelling) for place, text in texts for spelling in SPELLINGS if re.search(rf"\b{spelling}", text)]
    assert wrong == []


def test_help_of_an_option_fits_two_lines() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    helps = {f"{name} {each.name}": len(each.help or "") for name in commands for each in commands[name].params}
    assert {option: length for option, length in helps.items() if length > LONGEST_HELP} == {}
