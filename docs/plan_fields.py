"""The reference of the plan file, written from its schema."""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]
HEADINGS = {
    "node": "A node",
    "region": "A region",
    "offload": "An offload",
    "about": "`about`",
    "chunk": "A chunk, in `about`",
    "prediction": "`predicted`",
    "allocator": "A row of `allocator`, in `predicted`",
    "proof": "`solver`",
    "space": "`space`",
    "identities": "`identities`",
}


def reference() -> Iterator[str]:
    """Lines of Markdown: a section for the file and for each thing in it, a row for each field."""
    text = (importlib.resources.files("remat.evaluation") / "plan.schema.json").read_text(encoding="utf-8")
    schema = json.loads(text)
    yield from _section("The file", schema, schema)
    for name, heading in HEADINGS.items():
        yield from _section(heading, schema["definitions"][name], schema)


def _section(heading: str, part: Schema, schema: Schema) -> Iterator[str]:
    yield f"\n## {heading}\n"
    yield part["description"]
    yield "\n| field | type | meaning |\n|---|---|---|"
    for name, field in part["properties"].items():
        optional = "" if name in part["required"] else ", optional"
        yield f"| `{name}` | {_type(field)}{optional} | {_meaning(field, schema)} |"


def _meaning(field: Schema, schema: Schema) -> str:
    """Its own description, or that of what it refers to."""
    referred = schema["definitions"].get(_name(field), schema) if "$ref" in field else {}
    found: str = field.get("description") or referred.get("description", "")
    return found.replace("|", "\\|")


def _type(field: Schema) -> str:
    """Describe the type of a value in words."""
    if "const" in field:
        return f"`{json.dumps(field['const'])}`"
    if "enum" in field:
        return ", ".join(f"`{json.dumps(value)}`" for value in field["enum"])
    if "$ref" in field:
        return "a node" if _name(field) == "node" else "object"
    if field["type"] == "array":
        items = field["items"]
        return f"list of {_name(items)}s" if "$ref" in items else f"list of {_type(items)}s"
    kinds = field["type"] if isinstance(field["type"], list) else [field["type"]]
    return " or ".join(kinds)


def _name(field: Schema) -> str:
    """Name what a field refers to: a definition, or the whole file, which is a plan."""
    return "plan" if field["$ref"] == "#" else str(field["$ref"].rsplit("/", 1)[1])
