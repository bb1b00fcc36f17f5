"""The table of means that combine, asked of the product: what it refuses has a number, and the reason below.

`python docs/combinations.py` writes it into its page, and a test holds it to that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from remat.costing.planning_device import find_planning_device
from remat.errors import UsageError
from remat.planning.forms import why_whole_in
from remat.planning.request import PlanRequest
from remat.workload.training_loop import TrainingLoop

PAGE = Path(__file__).parent / "reference" / "combinations.md"
CHUNKS = "chunked losses and MLPs"
MEANS: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {  # what is asked for, and the loop
    CHUNKS: ({}, {}),
    "fused kernels": ({"numerics": "rounding"}, {}),
    "activations on the host": ({"offload": "activations"}, {}),
    "optimizer state on the host": ({"offload": "optimizer"}, {}),
    "frozen weights on the host": ({"offload": "weights"}, {}),
    "step in backward": ({}, {"step_in_backward": True}),
    "accumulation": ({}, {"accumulation": 4}),
    "clipping by norm": ({}, {"clip_grad_norm": True}),
    "EMA": ({}, {"ema": True}),
    "DDP": ({}, {"ddp": True, "ranks": 8}),
    "sharded states": ({}, {"shard": "zero3", "ranks": 8}),
    "regions of modules": ({"execution": "modules"}, {}),
}
LEFT_WHOLE = "Losses and MLPs are left whole: "


def reference() -> Iterator[str]:
    """Lines of Markdown: a table with a row and a column for each of the means, and the reasons of its numbers."""
    names, reasons = list(MEANS), dict[str, int]()
    yield f"| | {' | '.join(names[1:])} |\n|{'---|' * len(names)}"
    for row, name in enumerate(names[:-1], 1):
        cells = ["" for _ in range(1, row)]
        for other in names[row:]:
            why = why_not(name, other)
            cells.append("yes" if why is None else f"no ({reasons.setdefault(why, len(reasons) + 1)})")
        yield f"| {name} | {' | '.join(cells)} |"
    yield ""
    yield from (f"{number}. {why}" for why, number in reasons.items())


def wanted(*names: str) -> tuple[dict[str, Any], Callable[[], TrainingLoop]]:
    """Return the keywords of `remat.plan` for some means, and a function that makes their loop."""
    asked: dict[str, Any] = {}
    loop: dict[str, Any] = {}
    for request, around in (MEANS[name] for name in names):
        offloads = [each["offload"] for each in (asked, request) if "offload" in each]
        asked |= {**request, **({"offload": ",".join(offloads)} if offloads else {})}
        loop |= around
    return asked, lambda: TrainingLoop(**loop)


def why_not(*names: str) -> str | None:
    """Return why some means do not combine; None if they do."""
    asked, loop = wanted(*names)
    try:
        request = PlanRequest.of(budget="20GiB", **asked)
        around = request.loop(loop()) or TrainingLoop()
        request.require(find_planning_device("h100-80gb"), around)
    except UsageError as error:
        return str(error)
    why = why_whole_in(request.how, around) if CHUNKS in names else None
    return None if why is None else f"{LEFT_WHOLE}{why}."


def page() -> str:
    """Return the page: its own text, up to the first table, and the table."""
    text, _, _ = PAGE.read_text(encoding="utf-8").partition("\n| ")
    return "\n".join([text, *reference(), ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
