"""Whether a model, its dtype policy and its batches are those of a plan."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from remat._torch.dynamo import is_compiled
from remat.capture.circumstances import without_shapes
from remat.capture.dynamo import element_counts
from remat.errors import PlanMismatch
from remat.evaluation.forwards import Forward
from remat.evaluation.graph import LIBRARY_WORKSPACES, OPTIMIZER_STATE
from remat.evaluation.plan import TOKEN_CAP, Plan
from remat.execution.reports import Reports
from remat.host.weights import HostWeights
from remat.units import first_few, gib
from remat.workload.replaced_forward import UnderPlan, modules_under_plans
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import trainable

MUCH_LARGER = 1.5  # of the largest batch that was reported: reported again


class ModelAsPlanned:
    """Compares `model` with `plan`: methods that `require` raise PlanMismatch, those that `compare` make reports."""

    def __init__(self, model: nn.Module, plan: Plan, reports: Reports):
        self._model, self._plan, self._reports = model, plan, reports
        self._largest = 0.0  # elements of the largest batch that was reported
        self._most_bytes = 0  # of sizes that were reported

    @property
    def device_type(self) -> str:
        return next((p.device.type for p in self._model.parameters()), "cpu")

    def require_regions_run(self, under: UnderPlan) -> None:
        """Require a model whose graphs, under the plan `under`, can have regions."""
        fsdp = sys.modules.get("torch.distributed.fsdp")
        if fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in self._model.modules()):
            raise PlanMismatch(
                "this model is sharded by fully_shard, whose hooks the regions of this plan would run past; "
                'plan with `execution="modules"`.'
            )
        tensors = sys.modules.get("torch.distributed.tensor")
        if tensors is not None and any(isinstance(p, tensors.DTensor) for p in self._model.parameters()):
            raise PlanMismatch(
                "parameters of this model are DTensors (tensor parallelism), whose operators no plan knows: plans are "
                "for models whose ranks share data alone."
            )
        if others := [path for path, other in modules_under_plans(self._model).items() if other is not under]:
            raise PlanMismatch(
                f"other plans are applied inside of this model (on {first_few(others)}), and no region holds them: "
                "take them out (`remat.remove(module)`), or take the plan of the whole model out."
            )
        self.require_shapes()
        self.require_dtypes()
        self.compare_device()
        self.compare_compiled()

    def require_on_host(self, weights: HostWeights | None) -> None:
        """Require that the `weights` on the host are those that the plan counts on."""
        planned = TrainingLoop.of(self._plan.about).weights_on_host
        if planned == (0 if weights is None else len(weights.layers)):
            return
        say = f"`remat.offload_weights(model, {planned})`, before the plan is applied"
        raise PlanMismatch(
            f"the plan counts on the frozen weights of {planned} layers being on the host: say {say}."
            if planned
            else "frozen weights of this model are on the host, and the plan does not know: plan with them "
            '(`offload="weights"`), or leave `remat.offload_weights` out.'
        )

    def require_shapes(self) -> None:
        if unknown := without_shapes(self._model):
            raise PlanMismatch(
                f"the plan is for a model whose parameters have shapes, and {first_few(unknown)} get theirs in the "
                "first forward of a lazy module: run the model once under torch.no_grad() before training."
            )

    def require_size(self) -> None:
        if (grown := self.grown()) is not None:
            raise PlanMismatch(f"the plan was made for {self._plan.about['workload']!r}, another model: {grown}.")

    def grown(self) -> str | None:
        """Suggest a remedy if the model has another number of parameters than planned; None if it has the same."""
        planned, found = self._plan.about.get("parameter_count"), sum(p.numel() for p in self._model.parameters())
        if planned in (None, found):
            return None
        return (
            f"it has {found} parameters, and had {planned} when planned: make a plan with a workload whose `build` "
            "returns the model as it is trained, adapters (LoRA) included"
        )

    def require_dtypes(self) -> None:
        found, planned = dtypes_of(self._model), self._plan.about["parameter_dtypes"]
        if found != planned:
            raise PlanMismatch(f"the plan is for parameters of {planned}, this model has {found}.")

    def require_autocast(self, planned: str | None) -> None:
        """Require that the present autocast is to the dtype `planned`, None without."""
        device = self.device_type
        autocast = _name(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
        if autocast != planned:
            raise PlanMismatch(
                f"the plan is for {_policy(planned)}, this forward runs {_policy(autocast)}; "
                "use the same torch.autocast context or plan for the other dtype."
            )

    def compare_device(self) -> None:
        if self._plan.target == "cpu" != (device := self.device_type):
            self._reports.excess(
                "device",
                f"the plan is for a CPU, and this model is on {device}, whose kernels allocate other bytes: the budget "
                f"of {gib(self._plan.budget_bytes)} may not be kept. Make a plan there, or for the card by name "
                "(`--target h100-80gb`).",
            )

    def compare_compiled(self) -> None:
        if names := [path for path, module in self._model.named_modules() if path and is_compiled(module)]:
            self._reports.warn(
                "compiled",
                f"modules of this model are compiled ({first_few(names)}), and under the plan they run uncompiled: "
                "numbers are those of the model without compilation. Compiled modules have other roundings, and other "
                "dropout masks.",
            )

    def compare_trainable(self) -> None:
        planned = self._plan.about.get("trainable_count")
        found = sum(p.numel() for p in trainable(self._model))
        if planned is not None and found > planned:
            self._reports.excess(
                "trainable",
                f"{found} parameters require gradients, {planned} did when the plan was made: the peak will exceed "
                f"the planned {gib(self._plan.predicted['peak_bytes'])}; make a plan for the model as it is now.",
            )

    def compare_batch(self, forward: Forward, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Report a batch of named `tensors` that is larger than that of the planned `forward`."""
        planned, found = self._elements(forward.elements, tensors)
        if not planned or found <= planned:
            return
        if found > MUCH_LARGER * self._largest:
            self._largest = found
            self._reports.made.discard("batch")
        self._reports.excess(
            "batch",
            f"this batch has {found} elements, the plan was made for {planned} "
            f"(batch size {self._plan.about['batch_size']}): its peak will exceed the planned "
            f"{gib(self._plan.predicted['peak_bytes'])} and be about {gib(self._peak_of(found / planned))}; "
            "reduce the batch or make a plan for this one.",
        )

    def is_larger(self, forward: Forward, tensors: Sequence[tuple[str, torch.Tensor]]) -> bool:
        """Return whether a batch of named `tensors` has more elements than that of the planned `forward`."""
        planned, found = self._elements(forward.elements, tensors)
        return bool(planned) and found > planned

    def report_sizes(self, more_bytes: int, text: str) -> None:
        """Report open sizes at which the forward makes `more_bytes` above the planned ones."""
        if more_bytes > MUCH_LARGER * self._most_bytes:
            self._most_bytes = more_bytes
            self._reports.made.discard("sizes")
        self._reports.excess("sizes", text)

    def _elements(self, inputs: Mapping[str, int], tensors: Sequence[tuple[str, torch.Tensor]]) -> tuple[float, float]:
        """Count the elements of the planned `inputs`, and those of `tensors`, that make a batch large."""
        elements = element_counts(tensors)
        names = [name for name in inputs if name in elements]
        if not names:
            return sum(inputs.values()) or self._plan.about.get("batch_elements", 0), sum(elements.values())
        if TOKEN_CAP in self._plan.about:
            tokens = max(names, key=lambda name: inputs[name])
            rows = {name: tensor.shape[0] for name, tensor in tensors if name != tokens and tensor.dim()}
            # A target whose length is a rounded share of the row's has up to one element more in each row.
            names = [name for name in names if elements[name] > inputs[name] + rows.get(name, 0)]
        planned, found = (sum(of[name] for name in names) for of in (inputs, elements))
        return planned, found  # other inputs, such as a mask, do not make it large

    def _peak_of(self, times: float) -> int:
        """Return the predicted peak of a batch `times` as large, if everything but the model's state grows with it."""
        peak, parts = self._plan.predicted["peak_bytes"], self._plan.predicted.get("breakdown", {})
        same = "parameters", "buffers", OPTIMIZER_STATE, "gradients", LIBRARY_WORKSPACES
        state = sum(parts.get(name, 0) for name in same)
        return int(state + (peak - state) * times)


def dtypes_of(model: nn.Module) -> list[str]:
    return sorted({_name(p.dtype) for p in model.parameters()})


def checkpoints_itself(model: nn.Module) -> bool:
    """Return whether a transformers model's own checkpointing is on."""
    return any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _policy(autocast: str | None) -> str:
    return f"autocast to {autocast}" if autocast else "no autocast"
