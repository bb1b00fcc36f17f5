"""Commands: one a file, each a function from its options to an Answer. `remat.cli.main` runs them under its rules.

Commands know nothing of the command line that calls them, and import what needs torch inside their functions.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from remat.errors import RematError

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclasses.dataclass(frozen=True)
class Answer:
    """The result of a command: data for a script, text for a person, and the failure if there was one."""

    data: dict[str, Any]
    text: RenderableType
    failure: RematError | None = None
