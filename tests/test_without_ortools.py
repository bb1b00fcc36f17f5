"""Without OR-tools: profile, plan, apply and validate work, and a plan comes with the chain's bound.

Each test is a process of its own in which `import ortools` fails, as on a training machine that lacks it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from remat.solvers import EXACT, HEURISTICS, NEED_ORTOOLS

ROOT = Path(__file__).parent.parent

WITHOUT = "import sys; sys.modules['ortools'] = None\n"

PLANS = """
import json
from remat.errors import Infeasible
from remat.formulation.solution import Limits
from remat.planning.budget import Budget
from tests.studies import plan_profile
from remat.costing.planning_device import find_planning_device
from remat.planning.profiling import fake_step, profile_step
from remat.planning.advice import least_peak_of
from remat.evaluation.evaluator import Memory
from tests.graphs import TOYS

place = find_planning_device("h100-80gb")
step = fake_step(TOYS["skip"].sized(1 << 18), place)  # what crosses all layers keeps the chain from closing
profile = profile_step(step, place)
most = Memory(profile.graph, profile.costs.workspace_per_op(profile.graph)).peak_without_checkpointing
least = least_peak_of(profile.graph, profile.costs)
said = []
for share in map(float, sys.argv[1:]):
    budget = round(least + share * (most - least))
    said.append(plan_profile(profile, Budget(budget, budget), step=step, limits=Limits(time_s=4)).solver)
try:
    plan_profile(profile, Budget(least // 2, least // 2), step=step, exact=True)
except Infeasible as error:
    refusal = [str(error), error.minimum_budget_bytes]
print(json.dumps({"solvers": said, "refusal": refusal, "least": least, "ortools": bool(sys.modules.get("ortools"))}))
"""


def run(code: str, *arguments: str, without: bool = True) -> str:
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error::ImportWarning",
            "-c",
            (WITHOUT if without else "import sys\n") + code,
            *arguments,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def plans() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(PLANS, "0.02", "0.6").splitlines()[-1])
    return found


@pytest.mark.exhaustive
@pytest.mark.nightly
def test_plans_come_with_the_bound_of_the_chain(plans: dict[str, Any]) -> None:
    assert not plans["ortools"]
    for solver in plans["solvers"]:
        assert solver["status"] in ("optimal", "feasible")
        assert 0 <= solver["bound_us"] <= solver["objective_us"]
        assert solver["status"] == "feasible" or solver["gap"] <= 0.001
    assert {solver["name"] for solver in plans["solvers"]} == {"chain-dp"}


@pytest.mark.exhaustive
@pytest.mark.nightly
def test_plans_are_within_what_ortools_proves() -> None:
    shares = ("0.02", "0.3", "0.6", "0.9")
    plans, found = (json.loads(run(PLANS, *shares, without=each).splitlines()[-1]) for each in (True, False))
    assert found["ortools"] and found["least"] == plans["least"]
    for better, solver in zip(found["solvers"], plans["solvers"], strict=True):
        assert solver["bound_us"] <= better["objective_us"] * 1.001 <= solver["objective_us"] * 1.002


@pytest.mark.exhaustive
def test_a_refusal_names_the_least_budget(plans: dict[str, Any]) -> None:
    text, least_bytes = plans["refusal"]
    assert least_bytes == plans["least"]
    assert "is below the least possible peak" in text


def test_only_what_is_named_needs_ortools() -> None:
    code = f"""
import json
from remat.errors import UsageError
from remat.solvers import load
said = {{}}
for name in {(*HEURISTICS, *EXACT)!r}:
    try:
        load(name)
    except UsageError as error:
        said[name] = str(error)
print(json.dumps(said))
"""
    said = json.loads(run(code))
    assert set(said) == set(NEED_ORTOOLS)
    assert all("needs OR-tools: `pip install ortools`" in text for text in said.values())


STEPS = """
import dataclasses, functools, torch, remat
from tests import toys
TRANSFORMER = dataclasses.replace(toys.TRANSFORMER, build=functools.partial(toys.Transformer, layers=2))
torch.set_num_threads(1)
place = sys.argv[1]
profile = remat.profile(TRANSFORMER, target="cpu")
profile.save(place + "/profile.json")
try:
    remat.plan(TRANSFORMER, budget=1000, target="cpu", exact=True)
except remat.errors.Infeasible as error:
    least_bytes = error.minimum_budget_bytes
plan = remat.plan(TRANSFORMER, budget=round(1.02 * least_bytes), target="cpu", exact=True)
plan.save(place + "/plan.json")
model = remat.apply(TRANSFORMER.build(), place + "/plan.json")
model(*TRANSFORMER.batch(4, 8)).backward()
report = remat.validate(TRANSFORMER, place + "/plan.json", device="cpu", repeats=1)
print(report.passed, plan.solver["status"], len(plan.regions))
"""


@pytest.mark.exhaustive
def test_profile_plan_apply_and_validate(tmp_path: Path) -> None:
    passed, status, regions = run(STEPS, str(tmp_path)).split()[-3:]
    assert passed == "True" and status in ("optimal", "feasible") and int(regions) > 0
    assert (tmp_path / "profile.json").exists()
