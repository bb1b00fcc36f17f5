"""Output fits the terminal, and a log file gets few and true lines."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.progress import Progress

from remat.cli.screen import LiveLine, fitted
from tests.command_line import MODEL, Remat

STEP = ("--model", "model.py:stack", "--target", "h100-80gb")
WIDTH = 80


def test_what_follows_is_set_below_the_last_column() -> None:
    line = "  loss      4 chunks   its logits are never there at once"
    assert fitted(line, 44) == "  loss      4 chunks   its logits are never\n                       there at once"
    assert fitted("short", 10) == "short"


def test_where_the_last_column_begins_late_a_line_hangs_by_two() -> None:
    assert fitted("  a long name of a thing   then five words more", 30) == (
        "  a long name of a thing\n    then five words more"
    )


@pytest.mark.parametrize("word", ["x" * 50, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"])
def test_no_word_is_broken(word: str) -> None:
    assert word in fitted(f"one two {word} three", 20)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def line_of(clock: Clock) -> LiveLine:
    return LiveLine(Progress(disable=True), logs=True, clock=clock)


def test_a_log_file_gets_a_line_every_half_minute_with_what_is_left(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    line = line_of(clock)
    for number in range(1, 11):
        line.say("exact, point", number, 10)
        clock.now += 12
    assert capsys.readouterr().err == (
        "36 s: exact, point, 4 of 10, about 84 s left\n"
        "72 s: exact, point, 7 of 10, about 48 s left\n"
        "108 s: exact, point, 10 of 10, about 12 s left\n"
    )


def test_what_is_left_of_measuring_is_counted_from_where_it_began(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    line = line_of(clock)
    line.say("recording")
    clock.now = 100.0
    line.measured(0, 40)
    clock.now = 130.0
    line.measured(10, 40)
    assert capsys.readouterr().err.splitlines()[-1] == "130 s: measuring operators, 10 of 40, about 90 s left"


def test_what_is_done_at_once_says_nothing_in_a_log_file(remat: Remat) -> None:
    ran = remat("plan", *STEP, "--budget", "72MiB")
    assert re.sub("noise from (Python|C)\n", "", ran.stderr) == ""


# Runs commands one after the other, and says where the next begins: a process for each would import torch as often.
COMMANDS = """
import json, sys
from remat.cli.main import main
for command in json.loads(sys.argv[1]):
    main(command)
    print("\\0", end="", flush=True)
"""


def on_terminal(*commands: tuple[str, ...], cwd: Path) -> list[str]:
    """Return the output of each `remat` command on a terminal of 80 columns, as it stands at the end of each line."""
    (cwd / "model.py").write_text(MODEL)
    primary, secondary = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(WIDTH), "TERM": "xterm", "XDG_CACHE_HOME": str(cwd / "cache")}
    program = [sys.executable, "-c", COMMANDS, json.dumps(commands)]
    with subprocess.Popen(
        program, cwd=cwd, env=environment, stdout=secondary, stderr=secondary, stdin=secondary
    ) as ran:
        os.close(secondary)
        said = b""
        while True:
            try:
                said += os.read(primary, 1 << 16)
            except OSError:  # the other end is closed
                break
        ran.wait()
    os.close(primary)
    *found, rest = said.decode().split("\0")
    assert len(found) == len(commands) and not rest, said
    return found


PLAN, COMPARE = ("plan", *STEP, "--budget", "72MiB"), ("compare", *STEP, "--budget", "72MiB")
SCREENS = (
    PLAN,
    ("plan", *STEP, "--budget", "10MiB", "--no-advice"),
    COMPARE,
    ("sweep", *STEP, "--points", "3"),
    ("estimate", *STEP),
    ("timeline", *STEP, "--budget", "72MiB"),
    ("models",),
)
ROOMY, QUIET = ("plan", *STEP, "--budget", "80GiB"), (*PLAN, "--quiet")


@pytest.fixture(scope="module")
def screens(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], str]:
    """Draw the screens of all commands, in one process."""
    commands = (*SCREENS, ROOMY, QUIET)
    return dict(zip(commands, on_terminal(*commands, cwd=tmp_path_factory.mktemp("screens")), strict=True))


def lines_of(said: str) -> list[str]:
    """Lines without colours; of what is drawn again and again, each as it was."""
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said)
    return [line for part in plain.split("\n") for line in part.split("\r")]


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", SCREENS, ids=lambda command: " ".join(command[:1] + command[-1:]))
def test_every_screen_fits_eighty_columns(command: tuple[str, ...], screens: dict[tuple[str, ...], str]) -> None:
    assert screens[command].strip()
    assert [line for line in lines_of(screens[command]) if len(line) > WIDTH] == []


@pytest.mark.exhaustive
def test_quiet_draws_no_progress_on_a_terminal(screens: dict[tuple[str, ...], str]) -> None:
    assert "recording" in screens[PLAN]
    assert "recording" not in screens[QUIET]


OF_ONE_BACKGROUND = {
    30,
    33,
    37,
    38,
    93,
    97,
    *range(40, 49),
    *range(100, 108),
}  # black, yellow, white, fixed, backgrounds


def colours_of(said: str) -> set[int]:
    return {int(code) for codes in re.findall(r"\x1b\[([0-9;]+)m", said) for code in codes.split(";")}


def test_no_colour_of_a_help_page_needs_a_dark_or_a_light_terminal(tmp_path: Path) -> None:
    (said,) = on_terminal(("plan", "--help"), cwd=tmp_path)
    assert colours_of(said) and not colours_of(said) & OF_ONE_BACKGROUND


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", [ROOMY, COMPARE], ids=lambda command: " ".join(command[:1] + command[-1:]))
def test_no_colour_needs_a_dark_or_a_light_terminal(
    command: tuple[str, ...], screens: dict[tuple[str, ...], str]
) -> None:
    colours = colours_of(screens[command])
    assert colours and not colours & OF_ONE_BACKGROUND
