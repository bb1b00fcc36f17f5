"""A pytest fixture that holds training to a memory budget: `fits`.

Put `pytest_plugins = ["remat.integrations.pytest_plugin"]` into conftest.py.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from remat.errors import Infeasible, NoPlanInTime, UsageError

if TYPE_CHECKING:
    from remat.evaluation.plan import Plan
    from remat.planning.checking import Verdict
    from remat.workload.workload import Workload

OWN = " The Trainer's own checkpointing is not counted. With RematCallback(budget=...), it is judged under a plan."
UNDER_PLAN = " That is under the plan of the Trainer's RematCallback: lower its budget."


@pytest.fixture
def fits() -> Callable[..., Verdict]:
    """Return `require_fits`, as in `fits(trainer, "24GiB", target="rtx4090")`."""
    return require_fits


def require_fits(training: Any, budget: str | int = "auto", **options: Any) -> Verdict:
    """Fail the test if a training step does not fit a budget.

    training  a `remat.Workload`, or a Trainer: under the plan of its RematCallback, which needs no margin, else without
              checkpointing
    budget, options  as in `remat.check`

    Returns the verdict. Raises UsageError for anything else.
    """
    import remat
    from remat.integrations.trainer_model import own_checkpointing
    from remat.integrations.trainer_workload import is_trainer

    own = ""
    with _without_traces():
        if is_trainer(training):
            trainer, training = training, remat.workload_of(training)
            options = {"loop": remat.loop_of(trainer), **options}
            if "plan" not in options and (plan := _plan_of(trainer, training, options)) is not None:
                options, own = {"plan": plan, "headroom": 0, **options}, UNDER_PLAN
            elif own_checkpointing(trainer.args, trainer.model):
                own = OWN
        elif not isinstance(training, remat.Workload):
            raise UsageError(f"fits takes a Trainer or a remat.Workload, not {training!r}.")
        verdict = remat.check(training, budget=budget, **options)
    if not verdict.fits:
        pytest.fail(f"{verdict}{own}", pytrace=False)
    return verdict


def _plan_of(trainer: Any, workload: Workload, options: dict[str, Any]) -> Plan | None:
    """Return the plan of a Trainer's RematCallback, None if it has none; fail the test if there is no such plan."""
    from remat.integrations.transformers import RematCallback

    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, RematCallback):
            try:
                return callback.planned(workload, target=options.get("target", "auto"), loop=options["loop"])
            except (Infeasible, NoPlanInTime) as refusal:
                pytest.fail(f"RematCallback has no plan: {refusal}", pytrace=False)
    return None


@contextlib.contextmanager
def _without_traces() -> Iterator[None]:
    """Keep torch's traces of fake tensors out of the logs that pytest shows of a test that fails."""
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith("torch.")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(max(logger.getEffectiveLevel(), logging.INFO))
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
