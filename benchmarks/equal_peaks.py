"""Equal peaks: tokens/s of what people train with, and of a plan that may take what that was measured to take.

Language models with a vocabulary that is large for their width, as real ones have, trained on the device at hand. The
peers: every block recomputed; that with the loss in as many slices as Liger-Kernel's head takes (its kernels need a
GPU: the slices are this package's own); TRL's fused head (`trl.trainer.utils.add_fused_lm_head`, where TRL is
installed; its tiles as small beside this vocabulary as beside Llama's), alone and with every block recomputed. The
measured peak of each is the budget of a plan.

`ratio` is the median, over pairs of steps run in turn, of the plan's tokens/s over the peer's: a machine that is busy
with something else slows both. `ratio_exact` is that of a plan that leaves the loss whole, where there is one.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks import report
from benchmarks.peers import checkpoint_blocks, trained
from remat.costing.device_allocator import time_once_us
from remat.costing.planning_device import find_planning_device
from remat.errors import Infeasible, RematError
from remat.evaluation.form import form_of
from remat.evaluation.plan import Plan
from remat.execution.apply import apply
from remat.formulation.solution import Limits
from remat.models import gpt2, llama
from remat.models.common import text_model
from remat.planning.assemble import assemble
from remat.planning.budget import Budget
from remat.planning.profiling import fake_step, profile_step
from remat.planning.study import FoundPlan, Study
from remat.solvers import load as load_solver
from remat.units import MIB
from remat.validation.training import Training
from remat.workload.workload import DTypePolicy, Workload
from tests.studies import plan_profile

WIDTH, LAYERS, VOCAB, SAMPLES, LENGTH = 256, 6, 16384, 8, 256
TILE = 256, VOCAB // 4  # tokens and classes of TRL's head, where it takes 4096 and 32768
PAIRS = 9  # of steps
POLICIES: tuple[DTypePolicy, ...] = ("fp32", "amp")
COLUMNS = ["workload", "dtype", "peer", "peak_mib", "tokens_per_s", "plan_peak_mib", "within", "form", "overhead"]
COLUMNS += ["plan_tokens_per_s", "ratio", "ratio_exact", "failure"]
Prepare = Callable[[nn.Module], object]


def main(*names: str) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path = report.stem("_".join(["equal_peaks", *names]), device)
    about = {**report.provenance(device), "trl": report.version("trl"), "pairs": PAIRS}
    rows: list[dict[str, Any]] = []
    for workload in (_gpt2(), _llama()):
        for dtype in POLICIES:
            if names and workload.name not in names:
                continue
            contest = Contest(workload.with_dtype(dtype), device)
            for peer, prepare in contest.peers().items():
                rows.append({"workload": workload.name, "dtype": dtype, "peer": peer, **contest.row(prepare)})
                print(rows[-1], file=sys.stderr, flush=True)
                report.write(path, about, rows, COLUMNS)  # so far


def _gpt2() -> Workload:
    shape = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4, "n_positions": LENGTH, "vocab_size": VOCAB}
    return gpt2.workload("gpt2", **shape, batch_size=SAMPLES)


def _llama() -> Workload:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "intermediate_size": 704, **heads}
    ends = {"max_position_embeddings": LENGTH, "vocab_size": VOCAB, "tie_word_embeddings": True}
    return text_model("llama", "Llama", {**llama.SHAPE, **sizes, **ends}, batch_size=SAMPLES, seq_len=LENGTH)


class Contest:
    """A workload on a device, its step recorded and priced."""

    def __init__(self, workload: Workload, device: torch.device):
        self._workload, self._device = workload, device
        self._place = find_planning_device(device.type)
        self._step = fake_step(workload, self._place)
        self._profile = profile_step(self._step, self._place)

    def peers(self) -> dict[str, Prepare]:
        found = {"every block": checkpoint_blocks, "liger-like": lambda model: apply(model, self._like_liger())}
        with contextlib.suppress(ImportError):
            import trl.kernels.chunked_logprob
            import trl.trainer.utils

            trl.kernels.chunked_logprob.TOKEN_CHUNK_SIZE, trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE = TILE

            def with_head(model: Any) -> None:
                trl.trainer.utils.add_fused_lm_head(model)
                model.forward = functools.partial(model.forward, fused_lm_head=True)

            def with_head_and_blocks(model: Any) -> None:
                checkpoint_blocks(model)
                with_head(model)

            found |= {"TRL's head": with_head, "TRL's head, every block": with_head_and_blocks}
        return found

    def _like_liger(self) -> Plan:
        study = Study(self._profile, step=self._step)
        assert study.forms is not None
        at, budget_bytes = study.forms.like_liger(), 1 << 62
        solution = load_solver("every-block")(study.problem(at, budget_bytes), Limits())
        return assemble(study, FoundPlan(at, solution, Limits()), budget_bytes)

    def row(self, prepare: Prepare) -> dict[str, Any]:
        peer = trained(self._workload, self._device, prepare)
        peak = peer.peak_of_update(self._place.target.alignment_bytes)
        row: dict[str, Any] = {"peak_mib": round(peak / MIB, 2)}
        try:
            plan = self._plan(peak)
            planned = trained(self._workload, self._device, lambda model: apply(model, plan))
            own = planned.peak_of_update(self._place.target.alignment_bytes)
            row |= {
                "plan_peak_mib": round(own / MIB, 2),
                "within": own <= peak,
                "form": str(form_of(plan.about)),
                "overhead": round(plan.predicted["overhead"], 4),
                **self._race(peer, planned),
            }
        except RematError as error:
            row["failure"] = f"{type(error).__name__}: {error}"
        with contextlib.suppress(Infeasible):
            exact = self._plan(peak, exact=True)
            whole = trained(self._workload, self._device, lambda model: apply(model, exact))
            row["ratio_exact"] = self._race(peer, whole)["ratio"]
        return row

    def _plan(self, peak: int, *, exact: bool = False) -> Plan:
        limits = Limits(time_s=30)
        return plan_profile(self._profile, Budget(peak, peak), step=self._step, limits=limits, exact=exact)

    def _race(self, peer: Training, planned: Training) -> dict[str, Any]:
        pairs = [
            (time_once_us(peer.step, self._device), time_once_us(planned.step, self._device)) for _ in range(PAIRS)
        ]
        tokens = 1e6 * SAMPLES * LENGTH
        return {
            "tokens_per_s": round(tokens / statistics.median(theirs for theirs, _ in pairs)),
            "plan_tokens_per_s": round(tokens / statistics.median(own for _, own in pairs)),
            "ratio": round(statistics.median(theirs / own for theirs, own in pairs), 3),
            "pairs_us": [[round(theirs), round(own)] for theirs, own in pairs],
        }
