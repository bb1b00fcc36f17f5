"""A pytest fixture that holds training to a memory budget: `fits`.

Put `pytest_plugins = ["remat.integrations.pytest_plugin"]` into conftest.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from remat.planning.checking import Verdict


@pytest.fixture
def fits() -> Callable[..., Verdict]:
    """Return `require_fits`, as in `fits(trainer, "24GiB", target="rtx4090")`."""
    return require_fits


def require_fits(training: Any, budget: str | int = "auto", **options: Any) -> Verdict:
    """Fail the test if a training step does not fit a budget.

    training  a Trainer or a `remat.Workload`
    budget, options  as in `remat.check`

    Returns the verdict.
    """
    import remat

    if not isinstance(training, remat.Workload):
        options.setdefault("loop", remat.loop_of(training))
        training = remat.workload_of(training)
    verdict = remat.check(training, budget=budget, **options)
    if not verdict.fits:
        pytest.fail(str(verdict), pytrace=False)
    return verdict
