"""`remat models`."""

from __future__ import annotations

from remat.cli.commands import Answer
from remat.cli.commands.options import Json


def models(as_json: Json = False) -> Answer:
    """List the ready-made models with their sizes."""
    from remat import models
    from remat.cli.screen import aligned

    rows = [
        {
            "name": name,
            "batch_size": workload.batch_size,
            "seq_len": workload.seq_len,
            "autocast": str(workload.autocast).removeprefix("torch.") if workload.autocast else None,
            "optimizer": getattr(workload.optimizer, "__name__", None),
        }
        for name in models.names()
        for workload in [models.build(name)]
    ]
    cells = [tuple("-" if value is None else str(value) for value in row.values()) for row in rows]
    return Answer({"models": rows}, aligned([("model", "batch", "tokens", "autocast", "optimizer"), *cells], indent=""))
