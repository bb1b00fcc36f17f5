"""Architectures: Hugging Face models beyond `models/`, at tiny sizes, planned, applied and compared bit by bit.

Causal and masked language models, encoder and decoder, mixtures of experts, state spaces, vision, speech, text with
images; each built from a configuration with random weights, fp32 on the CPU, dropout on. The budget is tight: a
tenth of the way from the least feasible peak to no checkpointing. Two steps with the plan and two without must agree
in loss, gradients, buffers and random state; regions must have been entered, and as many nodes recomputed as planned.
What cannot be planned stays in the table, with its reason.

Costs are estimates from a data sheet: nothing here depends on them but the choice among plans.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks import report
from remat.applying import apply, counts_of
from remat.costs import estimate
from remat.errors import RematError
from remat.memory import Memory
from remat.models.common import loss_of, token_ids, transformers
from remat.planning import Budget, plan_profile
from remat.plans import Plan
from remat.problem import Problem
from remat.profiling import Profile
from remat.record import FakeStep, record
from remat.solution import Limits
from remat.solvers.least_peak import least_peak
from remat.space import find_space
from remat.target import TARGETS
from remat.units import MIB
from remat.workload import Workload

CPU = torch.device("cpu")
SHARE = 0.1
STEPS = 2
VOCAB, WIDTH, LAYERS, HEADS, LENGTH, SAMPLES = 256, 64, 3, 4, 48, 4
COLUMNS = [
    "architecture",
    "kind",
    "graphs",
    "nodes",
    "without_mib",
    "budget_mib",
    "predicted_mib",
    "overhead_percent",
    "regions",
    "recomputed",
    "equal",
    "failure",
]


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A class of transformers, what makes its configuration tiny, and what it is given."""

    model: str
    config: str
    kind: str
    options: dict[str, Any]
    batch: Callable[[int], dict[str, torch.Tensor]]


def text(samples: int) -> dict[str, torch.Tensor]:
    return {"input_ids": token_ids(VOCAB, samples, LENGTH), "labels": token_ids(VOCAB, samples, LENGTH)}


def images(samples: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(samples, 3, 32, 32), "labels": torch.randint(0, 10, (samples,))}


def pixels(samples: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(samples, 3, 32, 32), "labels": torch.randint(0, 10, (samples, 8, 8))}


def sound(samples: int) -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(samples, 4000), "labels": torch.randint(0, 10, (samples,))}


def spectrogram(samples: int) -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(samples, 16, 2 * LENGTH), "labels": token_ids(VOCAB, samples, 16)}


def pairs(samples: int) -> dict[str, torch.Tensor]:
    return {"input_ids": token_ids(VOCAB, samples, 16), "pixel_values": torch.randn(samples, 3, 32, 32)}


_SIZES = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 128}
_TEXT = {**_SIZES, "vocab_size": VOCAB, "max_position_embeddings": LENGTH, "use_cache": False}
_ENDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ENCODER = {**_SIZES, "vocab_size": VOCAB, "max_position_embeddings": LENGTH + 2, "pad_token_id": 0}
_CLASSES = {"num_labels": 10, "problem_type": "single_label_classification"}
_SEQ2SEQ: dict[str, Any] = {
    "d_model": WIDTH,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "vocab_size": VOCAB,
    "max_position_embeddings": LENGTH,
    "use_cache": False,
    "dropout": 0.1,
    "decoder_start_token_id": 1,
    **_ENDS,
}
_SPEECH: dict[str, Any] = {
    **_SIZES,
    **_CLASSES,
    "conv_dim": (32, 32, 32),
    "conv_stride": (5, 4, 4),
    "conv_kernel": (10, 4, 4),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,  # draws its masks with numpy
    "layerdrop": 0.0,
    "classifier_proj_size": 32,
}
_CLIP: dict[str, Any] = {
    "text_config": {**_SIZES, "vocab_size": VOCAB, "max_position_embeddings": 16, "attention_dropout": 0.1, **_ENDS},
    "vision_config": {**_SIZES, "image_size": 32, "patch_size": 8, "attention_dropout": 0.1},
    "projection_dim": 32,
}
_SEGFORMER: dict[str, Any] = {
    "hidden_sizes": (16, 32, 64, 64),
    "depths": (1, 1, 1, 1),
    "num_attention_heads": (1, 2, 4, 4),
    "decoder_hidden_size": 32,
    "num_labels": 10,
    "drop_path_rate": 0.1,
    "hidden_dropout_prob": 0.1,
}
# Left to itself, Mamba runs one algorithm in eager mode and another, with other roundings, where it is traced.
_SCAN = {"state_size": 8, "use_associative_scan": False}
_DROPPED = {"attention_dropout": 0.1}
_EXPERTS = {
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "experts_implementation": "batched_mm",
}

ALL = (
    Architecture(
        "MistralForCausalLM", "MistralConfig", "causal", {**_TEXT, **_DROPPED, "num_key_value_heads": 2}, text
    ),
    Architecture(
        "GemmaForCausalLM",
        "GemmaConfig",
        "causal",
        {**_TEXT, **_DROPPED, "head_dim": 16, "num_key_value_heads": 2},
        text,
    ),
    Architecture(
        "PhiForCausalLM", "PhiConfig", "causal", {**_TEXT, "resid_pdrop": 0.1, "attention_dropout": 0.1}, text
    ),
    Architecture(
        "OPTForCausalLM",
        "OPTConfig",
        "causal",
        {**_TEXT, **_ENDS, "ffn_dim": 128, "word_embed_proj_dim": WIDTH, "dropout": 0.1},
        text,
    ),
    Architecture("GPTNeoXForCausalLM", "GPTNeoXConfig", "causal", {**_TEXT, **_DROPPED, "hidden_dropout": 0.1}, text),
    Architecture("BloomForCausalLM", "BloomConfig", "causal", {**_TEXT, "n_layer": LAYERS, "n_head": HEADS}, text),
    Architecture("MixtralForCausalLM", "MixtralConfig", "mixture of experts", {**_TEXT, **_DROPPED, **_EXPERTS}, text),
    Architecture("MambaForCausalLM", "MambaConfig", "state space", {**_TEXT, **_SCAN}, text),
    Architecture("RwkvForCausalLM", "RwkvConfig", "recurrent", {**_TEXT, "context_length": LENGTH}, text),
    Architecture("AlbertForMaskedLM", "AlbertConfig", "masked", {**_ENCODER, "embedding_size": 32}, text),
    Architecture(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        "masked",
        {"dim": WIDTH, "hidden_dim": 128, "n_layers": LAYERS, "n_heads": HEADS, "vocab_size": VOCAB, "pad_token_id": 0},
        text,
    ),
    Architecture("ElectraForMaskedLM", "ElectraConfig", "masked", {**_ENCODER, "embedding_size": 32}, text),
    Architecture(
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        "masked",
        {**_ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0},
        text,
    ),
    Architecture("BartForConditionalGeneration", "BartConfig", "encoder-decoder", _SEQ2SEQ, text),
    Architecture("MarianMTModel", "MarianConfig", "encoder-decoder", _SEQ2SEQ, text),
    Architecture(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        "speech",
        {**_SEQ2SEQ, "num_mel_bins": 16, "max_source_positions": LENGTH, "max_target_positions": LENGTH},
        spectrogram,
    ),
    Architecture("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", "speech", _SPEECH, sound),
    Architecture("HubertForSequenceClassification", "HubertConfig", "speech", _SPEECH, sound),
    Architecture(
        "Dinov2ForImageClassification",
        "Dinov2Config",
        "vision",
        {**_SIZES, **_CLASSES, "image_size": 32, "patch_size": 8, "drop_path_rate": 0.1, "hidden_dropout_prob": 0.1},
        images,
    ),
    Architecture("SegformerForSemanticSegmentation", "SegformerConfig", "vision", _SEGFORMER, pixels),
    Architecture("CLIPModel", "CLIPConfig", "text and images", _CLIP, pairs),
)


def main(*names: str) -> None:
    torch.set_num_threads(1)
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    chosen = [each for each in ALL if not names or each.model in names]
    rows: list[dict[str, Any]] = []
    for each in chosen:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows.append({"architecture": each.model, "kind": each.kind, **verdict(workload_of(each))})
        print(rows[-1], flush=True)
        path = report.stem("_".join(["architectures", *names]), CPU)
        report.write(path, report.provenance(CPU), rows, COLUMNS)  # so far


def workload_of(each: Architecture) -> Workload:
    library = transformers()

    def build() -> nn.Module:
        model = getattr(library, each.model)(getattr(library, each.config)(**each.options))
        if getattr(model, "loss_type", None) is None:
            with contextlib.suppress(AttributeError):
                model.loss_type = "ForMaskedLM" if "Masked" in each.model else "ForCausalLM"
        return model.train()

    def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(**batch, return_loss=True).loss if each.batch is pairs else loss_of(model, batch)

    sgd = functools.partial(torch.optim.SGD, lr=0.1)  # next to Adam's state, activations this small would not matter
    return Workload(each.model, build, lambda samples, length: each.batch(samples), step, SAMPLES, optimizer=sgd)


@dataclasses.dataclass(frozen=True)
class Planned:
    """A plan, and the evaluator that knows its graph."""

    plan: Plan
    memory: Memory


def planned_at(workload: Workload, share: float) -> Planned:
    """A plan for the CPU, with estimated costs, `share` of the way from the least feasible peak to none."""
    step = FakeStep(workload, device=CPU)
    graph = record(step)
    target = dataclasses.replace(TARGETS["h100-80gb"], name="cpu", device="cpu", alignment_bytes=1)
    profile = Profile(graph, estimate(graph, TARGETS["h100-80gb"]), target)
    space = find_space(graph)
    problem = Problem(graph, profile.costs, space, 1 << 62)
    most = problem.memory.peak_without_checkpointing
    least = least_peak(problem, Limits(time_s=20)).peak_bytes
    limit = int(least + share * (most - least))
    plan = plan_profile(profile, Budget(limit, limit), step=step, space=space, limits=Limits(time_s=20))
    return Planned(plan, problem.memory)


def verdict(workload: Workload) -> dict[str, Any]:
    """A row: what the plan is, and whether training under it is the untouched one."""
    started = time.monotonic()
    row: dict[str, Any] = {}
    try:
        found = planned_at(workload, SHARE)
        plan = found.plan
        row = {
            "graphs": len(plan.fingerprints),
            "nodes": len(found.memory.graph.nodes),
            "without_mib": round(plan.without_checkpointing["peak_bytes"] / MIB, 2),
            "budget_mib": round(plan.budget_bytes / MIB, 2),
            "predicted_mib": round(plan.predicted["peak_bytes"] / MIB, 2),
            "overhead_percent": round(100 * plan.predicted["overhead"], 1),
            "regions": len(plan.regions),
        }
        row |= compared(workload, plan)
    except (RematError, RuntimeError, ValueError, TypeError, AttributeError, ImportError) as error:
        row["failure"] = f"{type(error).__name__}: {str(error)[:400]}"
    finally:
        torch._dynamo.reset()
    return {**row, "wall_s": round(time.monotonic() - started, 1)}


def compared(workload: Workload, plan: Plan) -> dict[str, Any]:
    torch.manual_seed(0)
    untouched = workload.build()
    torch.manual_seed(0)
    model = apply(workload.build(), plan, observe=True)
    expected, found = trained(workload, untouched), trained(workload, model)
    differs = [name for name in expected if name not in found or not torch.equal(expected[name], found[name])]
    counts, planned = counts_of(model), plan.predicted["recomputed_nodes"]
    row = {"recomputed": f"{STEPS * planned}/{counts.recomputed_nodes}", "equal": not differs}
    failures = [f"{name} differs" for name in differs[:3]]
    if not plan.regions:
        failures.append("no plan needs less than no checkpointing")
    if counts.regions != STEPS * len(plan.regions) or counts.recomputed_nodes != STEPS * planned:
        failures.append(f"{counts.regions} regions entered, {counts.recomputed_nodes} nodes recomputed")
    return {**row, "failure": "; ".join(failures)}


def trained(workload: Workload, model: nn.Module) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for number in range(STEPS):
        torch.manual_seed(100 + number)
        batch = workload.batch(SAMPLES, None)
        torch.manual_seed(number)
        loss = workload.step(model, batch)
        loss.backward()
        found |= {f"loss {number}": loss.detach(), f"generator {number}": torch.get_rng_state()}
        found |= {
            f"gradient of {n} {number}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
        }
        found |= {f"{n} {number}": b.clone() for n, b in model.named_buffers()}
        model.zero_grad()
    return found
