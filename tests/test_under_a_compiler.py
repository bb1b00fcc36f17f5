"""A planned model under torch.compile trains as planned, uncompiled, and says so once."""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
from typing import Any

import pytest
import torch

from remat.errors import PlanMismatch
from remat.evaluation.plan import Plan
from remat.execution.apply import apply, counts_of
from tests import toys
from tests.graphs import DYNAMO_LOOKS_AT_GRAD
from tests.test_applying import batch_of, built, gradients, loss_of, same
from tests.toys import CHOICES, Transformer, graph_of, plan_by_hand

pytestmark = [pytest.mark.usefixtures("fresh_dynamo", "one_thread"), pytest.mark.filterwarnings(DYNAMO_LOOKS_AT_GRAD)]

LAYERS = 2
TRANSFORMER = dataclasses.replace(toys.TRANSFORMER, build=functools.partial(Transformer, layers=LAYERS))
DYNAMO_SAYS = r"\.grad attribute"
SAYS = r"runs uncompiled, within its budget.*remat\.compile\(model, budget=\.\.\.\)"


@pytest.fixture(scope="module")
def plan() -> Plan:
    graph = graph_of(TRANSFORMER)
    return plan_by_hand(graph, CHOICES["nested"](graph))


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="aot_eager")


def test_it_trains_as_planned_bitwise_and_says_once_that_it_is_not_compiled(plan: Plan) -> None:
    untouched, model = built(TRANSFORMER), apply(built(TRANSFORMER), plan)
    run = compiled(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for samples in (TRANSFORMER.batch_size, 2):
            for each, called in ((untouched, untouched), (model, run)):
                each.zero_grad()
                loss_of(TRANSFORMER, called, batch_of(TRANSFORMER, samples)).backward()
            assert same(gradients(model), gradients(untouched))
    (warned,) = (each for each in caught if not re.search(DYNAMO_SAYS, str(each.message)))
    assert re.search(SAYS, str(warned.message))
    assert counts_of(model).regions == 2 * len(plan.regions)


@pytest.mark.filterwarnings("ignore:a planned model runs uncompiled")
def test_a_model_compiled_in_place_and_a_compiled_function_around_it_keep_the_plan(plan: Plan) -> None:
    model = apply(built(TRANSFORMER), plan)
    compiled(lambda *batch: 2 * model(*batch))(*batch_of(TRANSFORMER)).backward()
    assert counts_of(model).regions == len(plan.regions)
    model.compile(backend="aot_eager")
    model(*batch_of(TRANSFORMER)).backward()
    assert counts_of(model).regions == 2 * len(plan.regions)


def test_evaluation_is_compiled_as_ever(plan: Plan) -> None:
    untouched, model = built(TRANSFORMER).eval(), apply(built(TRANSFORMER), plan).eval()
    ids, _ = batch_of(TRANSFORMER)
    with torch.no_grad():
        assert torch.equal(compiled(model)(ids), untouched(ids))
    assert counts_of(model).regions == 0


@pytest.mark.filterwarnings("ignore:a planned model runs uncompiled")
def test_a_plan_for_another_model_is_refused(plan: Plan) -> None:
    run = compiled(apply(Transformer(layers=LAYERS + 1), plan))
    with pytest.raises(PlanMismatch, match="whose graph differs from this model's"):
        run(*batch_of(TRANSFORMER))


def test_a_trace_in_one_piece_is_refused(plan: Plan) -> None:
    run = torch.compile(apply(built(TRANSFORMER), plan), backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=SAYS):
        run(*batch_of(TRANSFORMER))
