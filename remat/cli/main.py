"""The command line: each command (`remat plan`, `remat compare`, ...) is a file of `remat.cli.commands`.

Rules that every command keeps:

1. stdout carries the answer and nothing else: text for a person, or with `--json` exactly one document, errors
   included. While a command works, file descriptor 1 itself leads to stderr, because C++ libraries print too.
2. Exit codes are those of `remat.errors`; 1 is output that cannot be written, or a bug in remat. No traceback, unless
   REMAT_DEBUG=1 asks for it.
3. An option that will be refused is refused before anything slow begins.
4. `remat --help` is quick: what needs torch is imported inside the commands.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import importlib.metadata
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from remat import __version__, garbage
from remat.cli.commands import (
    Answer,
    check,
    compare,
    doctor,
    estimate,
    fit,
    models,
    plan,
    profile,
    report,
    show,
    sweep,
    timeline,
    validate,
)
from remat.cli.commands.options import spread
from remat.cli.screen import DEBUG, as_options, put, quiet_libraries, tell
from remat.errors import Infeasible, NoPlanInTime, RematError, UsageError, is_out_of_memory
from remat.streams import stdout_to_stderr

INTERNAL_ERROR = UNWRITTEN = 1
# A write that fails by the device it goes to, such as a full disk.
WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
ERROR = "bold red"
PACKAGES = ("matplotlib", "numpy", "ortools", "torch", "transformers")

# The base of what typer raises for a bad command line; its module depends on typer's version.
CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="remat",
    add_completion=False,
    rich_markup_mode="rich",
    help="Fastest activation checkpointing for a PyTorch model within a memory budget.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` and return its exit code."""
    if argv is None:  # the process is ours
        gc.set_threshold(*garbage.THRESHOLDS)
        _open_closed_streams()
    arguments = sys.argv[1:] if argv is None else list(argv)
    as_json = "--json" in arguments
    if "--help" in arguments:
        _colour_help()
    try:
        command = typer.main.get_command(app)
        answer = command.main(args=arguments, prog_name="remat", standalone_mode=False)
        if not isinstance(answer, Answer):  # of --help and --version
            return int(answer or 0)
        put(json.dumps(answer.data, indent=2, allow_nan=False) if as_json else answer.text, whole=as_json)
        if answer.failure is None:
            return 0
        tell("error", as_options(str(answer.failure)), ERROR)
        return answer.failure.exit_code
    except BrokenPipeError:  # `remat show ... | head`
        _discard(sys.stdout.fileno())
        return UNWRITTEN
    except Exception as error:
        return _fail(error, as_json)


def _open_closed_streams() -> None:
    """Discard the output to a stream that the shell has closed (`>&-`), for which Python has None."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            _discard(descriptor)
            setattr(sys, name, os.fdopen(descriptor, "w", closefd=False))


def _discard(descriptor: int) -> None:
    """Let everything that is written to a file descriptor go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def _colour_help() -> None:
    """Replace typer's yellow, which a light terminal hides."""
    from typer import rich_utils

    rich_utils.STYLE_TYPES = rich_utils.STYLE_USAGE = "magenta"


def _fail(error: Exception, as_json: bool) -> int:
    """Report an error once for a person and with `--json` once for a script; return the exit code."""
    if os.environ.get(DEBUG):
        traceback.print_exception(error)
    exit_code, message = _explain(error)
    tell("error", message, ERROR)
    if as_json:
        report: dict[str, Any] = {"error": message, "exit_code": exit_code}
        if isinstance(error, Infeasible):
            report |= {"minimum_budget_bytes": error.minimum_budget_bytes, "breakdown": error.breakdown}
        with contextlib.suppress(OSError):
            put(json.dumps(report, indent=2), whole=True)
    try:
        sys.stdout.flush()
    except OSError:  # which the interpreter's last flush would report again
        _discard(sys.stdout.fileno())
    return exit_code


def _explain(error: Exception) -> tuple[int, str]:
    if isinstance(error, RematError):
        return error.exit_code, as_options(str(error))
    if isinstance(error, CommandLineError):
        context = getattr(error, "ctx", None)
        hint = f" Try `{context.command_path} --help`." if context else ""
        message: str = error.format_message().rstrip(".")  # type: ignore[attr-defined]
        return UsageError.exit_code, f"{message}{'' if message.endswith('?') else '.'}{hint}"
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in PACKAGES:
        package = (error.name or "").partition(".")[0]
        return UsageError.exit_code, f"this needs the package {package}, which is missing. Run `pip install {package}`."
    if isinstance(error, OSError) and error.errno in WRITE_ERRORS:
        path = f" to {error.filename}" if error.filename else ""
        return UNWRITTEN, f"the output cannot be written{path}: {error.strerror}."
    what = f"{type(error).__name__}: {error}".splitlines()[0]
    if is_out_of_memory(error):
        return UsageError.exit_code, f"out of memory, {what}. Free memory, reduce --batch-size, or use another device."
    where = traceback.extract_tb(error.__traceback__)[-1]
    return (
        INTERNAL_ERROR,
        f"internal error, {what} ({Path(where.filename).name}:{where.lineno}). This is a bug in remat; "
        f"{DEBUG}=1 shows the traceback to report.",
    )


# Around every command


def answering(command: Callable[..., Answer]) -> Callable[..., Answer]:
    """Run `command` under the rules above; an interrupt is an error that says so."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Answer:
        with stdout_to_stderr(), quiet_libraries():
            try:
                return command(*args, **kwargs)
            except KeyboardInterrupt:
                raise NoPlanInTime("interrupted before there was a result; nothing was written.") from None

    return run


def _show_version(wanted: bool) -> None:
    if wanted:
        put(f"remat {__version__} (torch {importlib.metadata.version('torch')})")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def remat(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


for module in (plan, estimate, check, fit, timeline, compare, sweep, profile, validate, report, doctor, show, models):
    name = module.__name__.rpartition(".")[2]
    app.command(name=name)(answering(spread(getattr(module, name))))


if __name__ == "__main__":
    sys.exit(main())
