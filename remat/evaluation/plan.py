"""A Plan: which runs of nodes are regions, and what each region saves.

Inside the planner nodes are numbers (`Graph.nodes`). In the plan file a node is a call and an ordinal within it, with
the name and the module path beside it for a person to read. What stands at that ordinal is in the file too
(`Plan.identities`), so that `apply` finds it again in a graph that is spelled in another way (`placing.py`).

File version 1 has no identities; such a plan applies to a graph of the same names and wiring. Versions 1 and 2 say in
two fields how a plan executes (`regions_are`, and `compiler` in `about`), version 3 in one. Version 4 has offloads, or
counts on the optimizer's state being on the host; version 5 lets go of offloads between slices of a loss. A plan is
written as the oldest version from 3 on that can say it. Plans for shorter batches can be in any of these: an earlier
remat runs the one for the longest. `plan.schema.json` beside this file is the reference of all.
"""

from __future__ import annotations

import dataclasses
import json
import os
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

import remat
from remat import shown
from remat.errors import UsageError
from remat.evaluation.alternative import Alternative, alternatives_of
from remat.evaluation.caveats import caveats, traced_branches
from remat.evaluation.form import CAPTURED_FORM, form_of
from remat.evaluation.forwards import PASSES
from remat.evaluation.graph import OUTSIDE, Graph
from remat.evaluation.identity import Identity, from_lines, to_lines
from remat.files import read_json, write_atomically
from remat.units import gib, ms

FORMAT = "remat-plan"
VERSION = 5
WITHOUT_SLICES = 4  # the version of a plan that lets go of nothing between slices
WITHOUT_OFFLOADS = 3  # ... that has nothing on the host
TOKEN_CAP = "token_cap"  # key of `Plan.about`: the batches of many lengths that the plan fits
SHORTEST = 2  # tokens of their longest row, at least: a row of one is traced by itself, and has nothing to predict

Status = Literal["optimal", "feasible", "infeasible", "unknown"]


@dataclasses.dataclass(frozen=True, order=True)
class Region:
    """Nodes first..end-1, wrapped in one `torch.utils.checkpoint` call.

    saved  nodes whose outputs are kept from forward to the recomputation, beside those that decide (`saved_nodes`)
    inner  regions inside this one, disjoint and in order; a region with inner ones saves nothing itself
    """

    first: int
    end: int
    saved: tuple[int, ...] = ()
    inner: tuple[Region, ...] = ()

    def __contains__(self, node: object) -> bool:
        return isinstance(node, int) and self.first <= node < self.end


@dataclasses.dataclass(frozen=True, order=True)
class Offload:
    """A storage that is kept from forward to backward, and on the host meanwhile.

    storage  index in the graph
    release  node of forward after which compute waits for the copy, and the device's memory is freed
    fetch    node before whose recomputation or backward memory is allocated, and the copy back begins. If it is the
             first of a region: when the region is recomputed. If it is in no region: when any of its saves is unpacked.
             A storage that is needed earlier is fetched then.
    after_slices  if `release` is a chunked loss, the number of slices after which it is freed; 0: all
    """

    storage: int
    release: int
    fetch: int
    after_slices: int = 0


@dataclasses.dataclass(frozen=True)
class NodeRef:
    """A node as the plan file names it: graph call, ordinal in that call; name and module are for reading."""

    call: int
    ordinal: int
    name: str
    module: str


@dataclasses.dataclass(frozen=True)
class RegionRef:
    """A region by reference: nodes `first`..`last` inclusive of one call.

    saved   nodes whose outputs are kept
    random  nodes that draw random numbers: recomputed with the generator state that they had in forward
    once    nodes that update module state: not done again when recomputed
    module  path of the module whose forward the region is, "" for a run of nodes
    """

    first: NodeRef
    last: NodeRef
    saved: tuple[NodeRef, ...] = ()
    random: tuple[NodeRef, ...] = ()
    once: tuple[NodeRef, ...] = ()
    inner: tuple[RegionRef, ...] = ()
    module: str = ""

    @property
    def call(self) -> int:
        return self.first.call

    def count_nodes(self) -> int:
        return self.last.ordinal - self.first.ordinal + 1


@dataclasses.dataclass(frozen=True)
class OffloadRef:
    """An `Offload` by reference.

    node         the node whose value it is, or during which autograd saves it
    save         None: the value of `node`; else the number of tensors that autograd saves before it during `node`
    size_bytes   of the storage
    host_offset  its place in the host's memory, in bytes, in the order of use
    after_slices  see `Offload`
    """

    node: NodeRef
    save: int | None
    release: NodeRef
    fetch: NodeRef
    size_bytes: int
    host_offset: int
    after_slices: int = 0


class AllocatorPeaks(TypedDict, total=False):
    """Bytes of CUDA's caching allocator for a step, simulated under `settings` over `steps` steps."""

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    settings: str
    steps: int


class Prediction(TypedDict, total=False):
    """The predicted peak and time of the whole step. A file of an older version may lack some keys.

    peak_bytes            of the replay, or of the evaluator if it was not replayed: `judged_by` says which
    evaluator_peak_bytes  the evaluator's peak if it differs, as for modules
    peak_at               the operator, for a person
    backward_peak_bytes   the most from the first operator on that goes back through the model
    kept_before_bytes     made by the step and alive as each of its forwards begins, if there are several
    step_time_us          including recomputation: the device's or the host's time, whichever is longer
    recompute_time_us     the device's time for recomputation, a part of it
    overhead              time that the plan adds, over the step without one
    breakdown             bytes at the peak, by category
    unmeasured_kernels    number of kinds of operators with estimated times in a measured profile
    allocator             under the settings assumed, and with or without expandable segments
    form_time_us          time of another form beyond the captured step's, in `overhead` too; fused groups save time
    stall_us              time that the step waits for copies, in `overhead` too
    offloaded_bytes       activations that go to the host and come back
    state_host_bytes      optimizer's state that is on the host between its steps
    state_wait_us         time that an optimizer step waits for it; in `step_time_us` with and without a plan
    weights_host_bytes    frozen weights on the host, where two layers at a time are on the device
    weights_wait_us       time that the step waits for them, in `overhead` too
    whole_loss_overhead   of the plan for the captured step, if one fits
    sliced_overhead       of the best plan with chunks, if it gains too little to be taken
    host_us               time to launch the step without a plan, if the host takes longer than the device with a plan
                          or without; `host_again_us` is the time that the plan adds
    device_us             time to run it on the device; `device_again_us` is the time that the plan adds
    """

    peak_bytes: int
    evaluator_peak_bytes: int
    peak_at: str
    backward_peak_bytes: int
    kept_before_bytes: list[int]
    judged_by: Literal["replay", "evaluator"]
    step_time_us: float
    recompute_time_us: float
    overhead: float
    recomputed_nodes: int
    breakdown: dict[str, int]
    unmeasured_kernels: int
    allocator: list[AllocatorPeaks]
    form_time_us: float
    stall_us: float
    offloaded_bytes: int
    state_host_bytes: int
    state_wait_us: float
    weights_host_bytes: int
    weights_wait_us: float
    whole_loss_overhead: float
    sliced_overhead: float
    host_us: float
    host_again_us: float
    device_us: float
    device_again_us: float


class Proof(TypedDict, total=False):
    """The solver's verdict on its plan: status, objective, lower bound and gap.

    objective_us  recompute time of the plan    bound_us  lower bound for all plans of the space
    gap           (objective - bound) / max(objective, 1 us); in other forms of the step than the captured one, both
                  counted from the cheapest form
    interrupted   True if the user pressed Ctrl-C before it was done; else absent
    cut_short     True if there was no time to search every form of the step; else absent
    """

    name: str
    status: Status
    objective_us: float
    bound_us: float
    gap: float
    wall_s: float
    interrupted: bool
    cut_short: bool


class SpaceSize(TypedDict, total=False):
    """The size of the space of plans that "optimal" refers to."""

    modules: int
    segments: int
    saveable_nodes: int
    nesting_depth: int
    longest_region_segments: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """The regions of a step for one graph and budget, with the predicted peak and time.

    Attributes:
        regions: The regions, each with its saved nodes.
        fingerprints: Of the graph, one for each call.
        about: Workload, batch size, sequence length, dtype policy, versions, and facts from captures and executions;
            open, so that a plan of a younger version can be read and told apart.
        target: The planned device.
        costs: "measured" or "estimated".
        budget_bytes: Limit on the peak of the step.
        predicted: Peak and time, with their parts.
        without_checkpointing: Peak and time of the step without a plan.
        solver: The solver, its status, lower bound and gap.
        space: Size of the space that "optimal" refers to.
        execution: "eager" or "modules"; "inductor" or "aot_eager" in files of earlier versions.
        identities: Identity of each graph call's nodes; empty in plans of file version 1.
        offloads: Storages that are on the host between forward and backward.
        shorter: Plans for shorter batches, shortest first: a batch runs under the first one that holds it.

    Raises:
        UsageError: `load` finds no complete plan file.

    Example:
        >>> plan = remat.Plan.load("gpt2.plan.json")
        >>> plan.predicted["peak_bytes"], plan.solver["gap"]
    """

    regions: tuple[RegionRef, ...]
    fingerprints: tuple[str, ...]
    about: dict[str, Any]
    target: str
    costs: str
    budget_bytes: int
    predicted: Prediction
    without_checkpointing: dict[str, Any]
    solver: Proof
    space: SpaceSize
    execution: str = "eager"
    identities: tuple[Identity, ...] = dataclasses.field(default=(), repr=False)
    offloads: tuple[OffloadRef, ...] = ()
    shorter: tuple[Plan, ...] = dataclasses.field(default=(), repr=False)

    @property
    def alternatives(self) -> tuple[Alternative, ...]:
        """Other answers to the budget, beside this one; none if the plan was made without `menu=True`."""
        return alternatives_of(self.about)

    def at_length(self, seq_len: int | None) -> Plan:
        """Return the plan, without others, that batches of `seq_len` tokens run under."""
        holding = (each for each in self.shorter if seq_len is not None and seq_len <= each.about["seq_len"])
        return dataclasses.replace(next(holding, self), shorter=())

    @property
    def host_bytes(self) -> int:
        """The bytes of host memory that offloads take."""
        return max((each.host_offset + each.size_bytes for each in self.offloads), default=0)

    @property
    def is_of_modules(self) -> bool:
        """Whether its regions are the forwards of whole modules."""
        return any(region.module for region in self.regions)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan file atomically: a reader sees the old file or the new one."""
        write_atomically(Path(path), json.dumps(self.to_json(), indent=1) + "\n")

    @staticmethod
    def of(plan: Plan | str | os.PathLike[str]) -> Plan:
        """Return `plan`, or the one in the file at that path. Raises UsageError for other things."""
        if isinstance(plan, Plan):
            return plan
        if not isinstance(plan, str | os.PathLike):
            raise UsageError(f"a remat.Plan or the path of its file is needed, not {type(plan).__name__}.")
        return Plan.load(plan)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a plan file. Raises `UsageError` if it is missing, corrupt or of a newer version."""
        return Plan.from_json(read_json(Path(path), FORMAT, VERSION, "plan"), str(path))

    def to_json(self) -> dict[str, Any]:
        data = dataclasses.asdict(dataclasses.replace(self, identities=(), shorter=()))
        del data["shorter"]
        if self.shorter:
            data["shorter"] = [plan.to_json() for plan in self.shorter]
        if not self.offloads:
            del data["offloads"]
        for row in data.get("offloads", ()):
            if not row["after_slices"]:
                del row["after_slices"]
        head = {"format": FORMAT, "version": self._file_version, "remat": remat.__version__}
        return {**head, **data, "identities": _identities_to_json(self.identities)}

    @property
    def _file_version(self) -> int:
        if any(each.after_slices for each in self.offloads):
            return VERSION
        on_host = self.offloads or self.about.get("offload_optimizer") or self.about.get("weights_on_host")
        return WITHOUT_SLICES if on_host else WITHOUT_OFFLOADS

    @staticmethod
    def from_json(data: dict[str, Any], where: str = "plan") -> Plan:
        try:
            younger = ("execution", "identities", "offloads", "shorter")
            fields = {field.name: data[field.name] for field in dataclasses.fields(Plan) if field.name not in younger}
            fields["identities"] = () if data.get("version") == 1 else _identities_from_json(data["identities"])
            fields["execution"], fields["about"] = _execution_from_json(data)
            fields["regions"] = tuple(_region_from_json(row) for row in fields["regions"])
            fields["fingerprints"] = tuple(fields["fingerprints"])
            fields["offloads"] = tuple(map(_offload_from_json, data.get("offloads", ())))
            fields["shorter"] = tuple(Plan.from_json(each, where) for each in data.get("shorter", ()))
            made = Plan(**fields)
            _require_whole(made)
            return made
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                f"{where} is not a complete plan file ({type(error).__name__}: {error}); "
                "write it again with `remat plan`."
            ) from error

    def __str__(self) -> str:
        predicted, plain = self.predicted, self.without_checkpointing
        saved = sum(len(region.saved) for region in self.regions)
        nested = sum(bool(region.inner) for region in self.regions)
        nodes = sum(region.count_nodes() for region in self.regions)
        form = form_of(self.about)
        of_one = f" of one of {passes} mini-batches" if (passes := self.about.get(PASSES, 1)) > 1 else ""
        return "\n".join(
            [
                f"Plan for {self.about.get('workload')} on {self.target} within {gib(self.budget_bytes)}",
                f"  regions    {len(self.regions):4d}   ({nested} nested, {nodes} nodes, {saved} saved)",
                *([f"  form       {form}"] if form != CAPTURED_FORM else []),
                *([f"  host       {len(self.offloads)} storages, {gib(self.host_bytes)}"] if self.offloads else []),
                f"  peak       {gib(predicted['peak_bytes'])} predicted, "
                f"{gib(plain['peak_bytes'])} without checkpointing",
                f"  step time  {ms(predicted['step_time_us'])}{of_one} predicted from {self.costs} costs, "
                f"{self._time_change()}",
                f"  solver     {self.solver['name']}: {self.solver['status']}, gap {100 * self.solver['gap']:.2f} %",
                *(f"  host       {sentence}" for sentence in bound_by_host(self)),
                *(f"  traced     {sentence}" for sentence in traced_branches(self.about)),
                *(f"  note       {sentence}" for sentence in caveats(self.about)),
            ]
        )

    def _time_change(self) -> str:
        """Format the change of the step's time, and the share of it that is recomputation."""
        plain_us = self.without_checkpointing["step_time_us"]
        recomputed = self.predicted.get("recompute_time_us", 0.0) / plain_us if plain_us else 0.0
        return f"{100 * self.predicted['overhead']:+.1f} % for the plan, {100 * recomputed:.1f} % recomputation"

    def _repr_html_(self) -> str:
        predicted, plain = self.predicted, self.without_checkpointing
        saved = sum(len(region.saved) for region in self.regions)
        rows = [
            ("peak", gib(predicted["peak_bytes"]), gib(plain["peak_bytes"])),
            ("step time", ms(predicted["step_time_us"]), ms(plain["step_time_us"])),
            ("added", self._time_change(), ""),
            *([("form", str(form), "")] if (form := form_of(self.about)) != CAPTURED_FORM else []),
            ("regions", f"{len(self.regions)}, {saved} outputs saved", ""),
            ("solver", f"{self.solver['status']}, gap {100 * self.solver['gap']:.2f} %", ""),
        ]
        title = f"Plan for {self.about.get('workload')} on {self.target} within {gib(self.budget_bytes)}"
        predicted_from = f"Peak and time are predicted, the time from {self.costs} costs."
        notes = [predicted_from, *bound_by_host(self), *traced_branches(self.about), *caveats(self.about)]
        return shown.as_html(title, rows, ("", "under the plan", "without"), notes)


def bound_by_host(plan: Plan) -> list[str]:
    """List a sentence if launching the step takes longer than running it, with both times."""
    predicted = plan.predicted
    if "device_us" not in predicted:
        return []
    host_us, device_us = predicted["host_us"], predicted["device_us"]
    again_us = predicted["host_again_us"]
    under = f"; under the plan {ms(host_us + again_us)}, {ms(device_us + predicted['device_again_us'])}"
    without = f"launching kernels takes {ms(host_us)}, running them {ms(device_us)}"
    return [f"bound by the host: {without}{under if again_us else ''}"]


def device_overhead(plan: Plan) -> float:
    """Return the overhead in the device's time, which bounds and curves use."""
    predicted = plan.predicted
    if "device_us" not in predicted:
        return predicted["overhead"]
    return predicted["device_again_us"] / predicted["device_us"] if predicted["device_us"] else 0.0


def node_refs(graph: Graph) -> list[NodeRef]:
    """List every node of a graph by reference."""
    ordinals: dict[int, int] = {}
    refs = []
    for node in graph.nodes:
        ordinal = ordinals.get(node.call, 0)
        ordinals[node.call] = ordinal + 1
        refs.append(NodeRef(node.call, ordinal, node.name, node.module))
    return refs


def saved_nodes(graph: Graph, region: Region) -> tuple[int, ...]:
    """Return the nodes that a region which is in no other saves: those it names, and those that decide."""
    decide = graph.deciding[bisect_left(graph.deciding, region.first) : bisect_left(graph.deciding, region.end)]
    if not decide or region.inner:
        return region.saved
    return tuple(sorted({*region.saved, *decide}))


def to_refs(
    graph: Graph, regions: tuple[Region, ...], modules: Sequence[tuple[int, int, str]] | None = None
) -> tuple[RegionRef, ...]:
    """Convert `regions` to references, as in the plan file; `modules` as in `Space`."""
    path_of = {(first, end): path for first, end, path in modules or ()}
    refs = node_refs(graph)

    def ref_of(region: Region, is_top: bool) -> RegionRef:
        first, last = refs[region.first], refs[region.end - 1]
        assert first.call == last.call != OUTSIDE
        inside = range(region.first, region.end)
        saved = saved_nodes(graph, region) if is_top else region.saved
        return RegionRef(
            first,
            last,
            saved=tuple(refs[v] for v in saved),
            random=tuple(refs[v] for v in inside if graph.nodes[v].random and v not in saved),
            once=tuple(refs[v] for v in inside if graph.nodes[v].effect),
            inner=tuple(ref_of(part, False) for part in region.inner),
            module=path_of.get((region.first, region.end), ""),
        )

    return tuple(ref_of(region, True) for region in regions)


def from_refs(graph: Graph, regions: tuple[RegionRef, ...]) -> tuple[Region, ...]:
    """Convert the references of `to_refs` to regions, on a graph with the same fingerprints."""
    decide = {*graph.deciding}
    index = {(ref.call, ref.ordinal): i for i, ref in enumerate(node_refs(graph))}

    def region_of(ref: RegionRef) -> Region:
        return Region(
            index[ref.call, ref.first.ordinal],
            index[ref.call, ref.last.ordinal] + 1,
            tuple(v for node in ref.saved if (v := index[node.call, node.ordinal]) not in decide),
            tuple(map(region_of, ref.inner)),
        )

    return tuple(map(region_of, regions))


def _require_whole(plan: Plan) -> None:
    """Raise ValueError or KeyError for a plan that was edited by hand into one that cannot be read further."""
    found, plain = plan.predicted, plan.without_checkpointing
    numbers: dict[str, Any] = {
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": found["peak_bytes"],
        "peak_bytes without a plan": plain["peak_bytes"],
        "step_time_us": found["step_time_us"],
        "overhead": found["overhead"] + 1,  # of the step without a plan; negative where kernels are fused
    }
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise ValueError(f"{name} is {value!r}, not a number of at least 0")
    sizes = [len(identity) for identity in plan.identities]
    for region in plan.regions:
        if region.first.ordinal > region.last.ordinal:
            raise ValueError(f"a region ends with node {region.last.ordinal}, before its first")
        for node in (region.first, region.last, *region.saved, *region.random, *region.once):
            if sizes and not (0 <= node.call < len(sizes) and 0 <= node.ordinal < sizes[node.call]):
                raise ValueError(f"a region has node {node.ordinal} of graph call {node.call}, which is not there")


def _region_from_json(row: dict[str, Any]) -> RegionRef:
    def refs(name: str) -> tuple[NodeRef, ...]:
        return tuple(NodeRef(**ref) for ref in row[name])

    return RegionRef(
        NodeRef(**row["first"]),
        NodeRef(**row["last"]),
        saved=refs("saved"),
        random=refs("random"),
        once=refs("once"),
        inner=tuple(_region_from_json(inner) for inner in row["inner"]),
        module=str(row.get("module", "")),
    )


def _offload_from_json(row: dict[str, Any]) -> OffloadRef:
    nodes = {name: NodeRef(**row[name]) for name in ("node", "release", "fetch")}
    return OffloadRef(**{**row, **nodes})


def _identities_to_json(identities: tuple[Identity, ...]) -> dict[str, Any]:
    """Write every distinct graph once, and the graph of each call: a loop over layers repeats one graph."""
    different = list(dict.fromkeys(identities))
    return {
        "calls": [different.index(identity) for identity in identities],
        "graphs": [to_lines(identity) for identity in different],
    }


def _identities_from_json(data: dict[str, Any]) -> tuple[Identity, ...]:
    graphs = [from_lines(lines) for lines in data["graphs"]]
    return tuple(graphs[i] for i in data["calls"])


def _execution_from_json(data: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return (execution, the rest of `about`); files before version 3 have two fields for it."""
    about = dict(data["about"])
    if "execution" in data:
        found = data["execution"]
        if not isinstance(found, str):
            raise ValueError(f"an execution is named {found!r}")
        return found, about
    compiler = about.pop("compiler", None)
    kind = data.get("regions_are", "nodes")
    if kind not in ("nodes", "modules"):
        raise ValueError(f"regions are {kind!r}")
    return "modules" if kind == "modules" else compiler or "eager", about
