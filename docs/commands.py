"""The reference of the command line, written from its options."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from remat.cli.main import app
from remat.workload.target import TARGETS


def reference() -> Iterator[str]:
    """Lines of Markdown: a section for each command, a line for each option."""
    group: Any = typer.main.get_command(app)
    context = typer.Context(group, info_name="remat")
    yield f"Cards by name (`--target`): {', '.join(f'`{name}`' for name in TARGETS)}.\n"
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        yield f"\n## remat {name}\n"
        yield command.help or ""
        yield ""
        shown = [each for each in command.params if not getattr(each, "hidden", False) and each.name != "help"]
        for panel in dict.fromkeys(getattr(each, "rich_help_panel", None) for each in shown):
            yield f"\n**{panel or 'Options'}**\n"
            yield from (_line(each) for each in shown if getattr(each, "rich_help_panel", None) == panel)


def _line(parameter: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    if parameter.param_type_name == "argument":
        names = f"`{parameter.metavar or parameter.name}`"
    shown = getattr(parameter, "show_default", None)
    default = f" Default: {shown}." if isinstance(shown, str) else ""
    return f"- {names}: {parameter.help or ''}{default}"
