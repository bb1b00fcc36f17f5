"""How a compiler is steered: AOTAutograd's partitioner, Inductor's settings, and what Inductor generates."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import flop_registry

from remat._torch.door import internal
from remat._torch.symbols import hinted

Backend = Callable[..., Callable[..., Any]]
_NO_SETTINGS = ("custom_partitioner_fn", "enable_autograd_cache")  # of ours, while a graph is compiled

# Compilers


def inductor_with(mode: str | None, options: dict[str, Any]) -> Backend:
    """Inductor as `torch.compile` gives it for a mode and options."""
    found: Backend = internal("_TorchCompileInductorWrapper", "compile with Inductor's own options")(
        mode, options, None
    )
    return found


# The joint graph


def min_cut(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
    """Cut a joint graph into (forward, backward) by torch's own partitioner."""
    return internal(
        "_functorch.partitioners.min_cut_rematerialization_partition", "choose what a compiled forward saves"
    )(joint, inputs, **options)


def partitioner_class() -> Any:
    """Return the base class that Inductor requires of a partitioner."""
    return internal("_inductor.custom_graph_pass.CustomPartitionerFn", "choose what a compiled forward saves")


def hash_of(*files: str) -> Any:
    """Hash the source of a partitioner for the keys of Inductor's caches."""
    return internal("_inductor.custom_graph_pass.get_hash_for_files", "choose what a compiled forward saves")(files)


# Inductor


def chosen_decompositions() -> dict[Any, Any]:
    """Return the operators that Inductor decomposes under the current settings."""
    return dict(internal("_inductor.decomposition.select_decomp_table", "compile without wasteful decompositions")())


_REORDERS = "reorder_for_reducing_graph_partitions"  # where `mode="reduce-overhead"` turns CUDA graphs on


@contextlib.contextmanager
def compiling_with(
    partitioner: Any, decomposed: Callable[[], dict[Any, Any]], keeps_buffers: bool | None = None
) -> Iterator[None]:
    """Inductor with a partitioner and a table of decompositions of ours, and without a cache of joint graphs.

    Backward is compiled with forward, under the same settings, and not when it first runs. `keeps_buffers` says whether
    freed ones wait for others of their size, by default as Inductor is set. It is no option of the compiler, which
    would put it back. Kernels keep their order where CUDA graphs are on: fewer of these may take a tenth more memory.
    The partitioner may compile halves as AOTAutograd will, which then finds their code (`compiled_forward`).
    """
    purpose = "choose what a compiled forward saves"
    compiler, config = internal("_inductor.compile_fx", purpose), internal("_inductor.config", purpose)
    internal("_inductor.compile_fx.select_decomp_table", purpose)
    internal("_functorch.config.force_non_lazy_backward_lowering", purpose)
    keeps = config.allow_buffer_reuse if keeps_buffers is None else keeps_buffers
    with (
        internal("_functorch.config", purpose).patch(
            enable_autograd_cache=False, force_non_lazy_backward_lowering=True
        ),
        config.patch(custom_partitioner_fn=partitioner, allow_buffer_reuse=keeps),
        config.patch({f"triton.{_REORDERS}": False} if hasattr(config.triton, _REORDERS) else {}),
        mock.patch.object(compiler, "select_decomp_table", decomposed),
        _HalfCompilers().noted(),
    ):
        yield


class _HalfCompilers:
    """The compilers of forward and backward that AOTAutograd is given, and what they made while it had a graph cut.

    codes  what Inductor generated, by the keys of its cache, before a kernel is compiled
    key    that of the half which is being compiled, until its code is there
    """

    def __init__(self) -> None:
        purpose = "compile halves as AOTAutograd will"
        self._graphs, self._settings = internal("_inductor.graph", purpose), internal("compiler.config", purpose)
        self._cache = internal("_inductor.codecache.FxGraphCache", purpose)
        self._compiler = internal("_inductor.compile_fx", purpose)
        self._constants = internal("_inductor.output_code.CompiledFxGraphConstantsWithGm", purpose)
        self._tracing = internal("_guards.TracingContext", purpose)
        self._prepare_key, self._generate = self._cache.prepare_key, self._compiler.fx_codegen_and_compile
        self.of = dict[str, Any]()
        self.codes = dict[str, Any]()
        self.key: str | None = None

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note the compilers, and give them what they generated before, while the context is open."""
        aot_autograd = internal("_dynamo.backends.common.AotAutograd", "compile halves as AOTAutograd will")
        call = aot_autograd.__call__

        def noting(aot: Any, *given: Any, **named: Any) -> Any:
            if all(hasattr(aot.kwargs.get(name), "compiler_fn") for name in ("fw_compiler", "bw_compiler")):
                for name in ("fw_compiler", "bw_compiler"):
                    self.of[name] = aot.kwargs[name] = copy.copy(aot.kwargs[name])
                    self.of[name].compiler_fn = functools.partial(self._compile, self.of[name].compiler_fn, name)
            return call(aot, *given, **named)

        token = _COMPILERS.set(self)
        try:
            with (
                mock.patch.object(aot_autograd, "__call__", noting),
                mock.patch.object(self._cache, "prepare_key", self._note_key),
                mock.patch.object(self._compiler, "fx_codegen_and_compile", self._generated),
            ):
                yield
        finally:
            _COMPILERS.reset(token)
            self.codes.clear()

    def _compile(
        self, compile_half: Callable[..., Any], name: str, graph_module: fx.GraphModule, inputs: Sequence[Any]
    ) -> Any:
        """Compile a half; what its code depends on, and the key lacks, is added to the key."""
        mutated = getattr(self._tracing.get().fw_metadata, "num_mutated_inp_runtime_indices", 0)
        beside = self._graphs.get_donated_idxs() if name == "bw_compiler" else mutated
        for each in inputs if name == "fw_compiler" else ():
            if isinstance(each, torch.Tensor):
                each.__dict__.pop("_is_inductor_static", None)  # left by an earlier try
        with self._settings.patch(cache_key_tag=f"{self._settings.cache_key_tag} {beside}"):
            return compile_half(graph_module, inputs)

    def _note_key(self, *given: Any, **named: Any) -> Any:
        key_info, cache_info = self._prepare_key(*given, **named)
        self.key = None if key_info is None else key_info[0]
        return key_info, cache_info

    def keep(self, key: str, code: Any, *_: Any) -> None:
        """Keep what was generated, in place of Inductor's cache on disk: it has no kernels yet."""
        self.codes[key] = kept = copy.copy(code)
        kept.prepare_for_serialization()

    def _generated(self, graph_module: fx.GraphModule, *given: Any, **named: Any) -> Any:
        """Return what was generated before, with its kernels; generate it where nothing was."""
        key, self.key = self.key, None  # a compilation without a cache has none
        kept = None if key is None or self._compiler.config.force_disable_caches else self.codes.get(key)
        if kept is None:
            return self._generate(graph_module, *given, **named)
        found = copy.copy(kept)
        found.after_deserialization(self._constants(graph_module))
        return found

    def keeping(self) -> contextlib.AbstractContextManager[Any]:
        """Keep what is generated while the context is open."""
        found: contextlib.AbstractContextManager[Any] = mock.patch.object(self._cache, "_save_graph", self.keep)
        return found


_COMPILERS = contextvars.ContextVar[_HalfCompilers]("compilers of halves")


def free_at_once() -> bool:
    """Let code that is generated in `compiling_with` free buffers at once, not keep them for later ones of their size.

    Returns whether it kept them before.

    The device's allocator has them at hand. Kept, they may take memory through all of backward: Inductor asks of each
    alone whether the peak allows it.
    """
    config = internal("_inductor.config", "free buffers at once")
    kept, config.allow_buffer_reuse = config.allow_buffer_reuse, False
    return bool(kept)


def keeps_joint_graphs() -> bool:
    """Return whether AOTAutograd may keep joint graphs in its cache."""
    purpose = "know whether results may be kept"
    disabled = internal("_inductor.config", purpose).force_disable_caches
    return bool(internal("_functorch.config", purpose).enable_autograd_cache) and not disabled


def settings_of_inductor() -> str:
    """Return the settings of Inductor and AOTAutograd as text, less the partitioner."""
    purpose = "keep what planning found"
    of = internal("_inductor.config", purpose), internal("_functorch.config", purpose)
    found = [sorted(each.save_config_portable().items()) for each in of]
    return repr([(name, value) for each in found for name, value in each if name not in _NO_SETTINGS])


def hands_modules_over() -> bool:
    """Return whether this Inductor loads its modules where `loading_modules` takes them over."""
    return hasattr(internal("_inductor.codecache.PyCodeCache", "predict what Inductor allocates"), "load_by_key_path")


def keeps_code() -> bool:
    """Return whether the code that halves have is kept for AOTAutograd, while the partitioner of a graph compiles them.

    CUDA graphs are not asked for code that does not run.
    """
    purpose = "compile halves as AOTAutograd will"
    config, compilers = internal("_inductor.config", purpose), _COMPILERS.get(None)
    if compilers is None or not compilers.of or not config.fx_graph_cache or config.force_disable_caches:
        return False
    asks = getattr(internal("_guards.TracingContext", purpose).try_get(), "cudagraph_annotation", None)
    return not (config.triton.cudagraphs or config.cpp_wrapper or asks)


@contextlib.contextmanager
def loading_modules(load: Callable[..., Any], *, keeps: bool = False) -> Iterator[None]:
    """Let `load(key, path, linemap, attrs)` load the modules that Inductor generates.

    Modules of templates (FlexAttention's) are loaded as they are, while a graph is lowered: each is a kernel alone.
    Inductor's cache is not written; it is read where code, which must be whole then, is kept for AOTAutograd.
    """
    purpose = "predict what Inductor allocates"
    cache = internal("_inductor.codecache.PyCodeCache", purpose)
    virtual = internal("_inductor.virtualized.V", purpose)
    as_is = cache.load_by_key_path

    def load_generated(*given: Any, **named: Any) -> Any:
        is_template = getattr(virtual.graph, "scheduler", load) is None  # no graph is lowered for code that is known
        return (as_is if is_template else load)(*given, **named)

    off = {"force_disable_caches": True, "cpp_wrapper": False}
    with (
        _COMPILERS.get().keeping() if keeps else internal("_inductor.config", purpose).patch(off),
        mock.patch.object(cache, "load_by_key_path", load_generated),
    ):
        yield


def kernels_compiled_by(compiler: Any) -> contextlib.AbstractContextManager[Any]:
    """Let generated code hand its kernels to `compiler` in place of `AsyncCompile`."""
    module = internal("_inductor.async_compile", "predict what Inductor allocates")
    found: contextlib.AbstractContextManager[Any] = mock.patch.object(module, "AsyncCompile", compiler)
    return found


def all_aligned() -> contextlib.AbstractContextManager[Any]:
    """Keep compiled code from looking at the addresses of its inputs: fakes have none."""
    internal("_inductor.utils.copy_misaligned_inputs", "predict what Inductor allocates")
    module = internal("_inductor.utils", "predict what Inductor allocates")
    found: contextlib.AbstractContextManager[Any] = mock.patch.object(
        module, "copy_misaligned_inputs", lambda given, *_: ([], [])
    )
    return found


@contextlib.contextmanager
def random_operators_alone(device: torch.device) -> Iterator[None]:
    """Let generated code call random operators without the wrappers that keep a generator's state for a recomputation.

    A user's checkpoint brings these wrappers, and no dispatch mode of ours sees into one. The state that is kept takes
    memory of the device on a CPU only.
    """
    wrappers = torch.ops.higher_order
    state_bytes = torch.get_rng_state().numel() if device.type == "cpu" else 0

    def saving(random: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        return torch.empty(state_bytes, dtype=torch.uint8), random(*args, **kwargs)

    def with_state(state: Any, random: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return random(*args, **kwargs)

    def with_generator(random: Callable[..., Any], *args: Any, rng_state: Any = None, **kwargs: Any) -> Any:
        return random(*args, **kwargs)

    with (
        mock.patch.object(wrappers, "run_and_save_rng_state", saving),
        mock.patch.object(wrappers, "run_with_rng_state", with_state),
        mock.patch.object(wrappers, "graphsafe_run_with_rng_state", with_generator),
    ):
        yield


# Compiled training under a budget

_SAVE, _RECOMPUTE = (CheckpointPolicy.MUST_SAVE,), (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def partition_saving(choose: Callable[[fx.Graph, Any, Callable[[float], list[fx.Node]]], list[fx.Node]]) -> Any:
    """Return torch's partitioner with another choice of saved values: a function of joint graph, inputs and options.

    choose  of the joint graph, what the partitioner knows of its nodes, and what it would save itself at a ratio of its
            memory budget; it may ask that later too
    """
    purpose = "choose what a compiled forward saves"
    module = internal("_functorch.partitioners", purpose)
    own = internal("_functorch.partitioners.choose_saved_values_set", purpose)
    cut, cuts = internal("_functorch.partitioners.solve_min_cut", purpose), dict[Any, Any]()

    def cut_once(graph: fx.Graph, info: Any, options: Any, dont_ban: Any = ()) -> Any:
        """Cut once for all ratios, since a cut takes long."""
        key = (repr(options), frozenset(dont_ban or ()))
        if key not in cuts:
            cuts[key] = cut(graph, info, options, dont_ban or None)
        saved, banned = cuts[key]
        return list(saved), banned

    def chosen(graph: fx.Graph, info: Any, memory_budget: float = 1.0) -> list[fx.Node]:
        def own_choice(ratio: float) -> list[fx.Node]:
            with mock.patch.object(module, "solve_min_cut", cut_once):
                return list(own(graph, info, memory_budget=ratio))

        return choose(graph, info, own_choice)

    def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        with mock.patch.object(module, "choose_saved_values_set", chosen):
            forward, backward = min_cut(joint, inputs, **options)
        # As `_copied` makes them: the keys of Inductor's cache know lazy modules from others.
        return fx.GraphModule(forward, forward.graph), fx.GraphModule(backward, backward.graph)

    return partition


def keep_apart(half: fx.GraphModule, nodes: Sequence[fx.Node]) -> None:
    """Let Inductor make the values of `nodes` in kernels of their own, which it fuses with nothing."""
    for node in nodes:
        with half.graph.inserting_after(node):
            apart = half.graph.call_function(_apart(), (node,))
        apart.meta = dict(node.meta)
        for user in [user for user in node.users if user is not apart]:
            user.replace_input_with(node, apart)
    half.recompile()


def keep_layouts(forward: fx.GraphModule) -> bool:
    """Let backward have the images and weights that a forward is given, and no copies; return whether that changes it.

    Inductor gives convolutions all that they read in channels-last. Of an input that backward reads too, forward would
    give out the copy. Inputs that are read through `as_strided` keep their layout.
    """
    lays_out = internal("_inductor.graph.GraphLowering.decide_layout_opt", "tell which inputs are copied")
    if not lays_out(forward, is_inference=False):
        return False
    before = set[fx.Node]()  # nodes that lead to a convolution
    for node in reversed(forward.graph.nodes):
        if node.target is torch.ops.aten.convolution.default or not before.isdisjoint(node.users):
            before.add(node)
    (results,) = forward.graph.find_nodes(op="output")
    inputs = [node for node in forward.graph.find_nodes(op="placeholder") if node in before and results in node.users]
    copied = [node for node in inputs if _is_copied(node.meta["val"]) and not any(map(_writes, node.users))]
    for node in copied:
        readers = [user for user in node.users if user is not results]
        with forward.graph.inserting_after(node):
            view = forward.graph.call_function(
                torch.ops.aten.as_strided.default, (node, [*node.meta["val"].shape], [*node.meta["val"].stride()])
            )
        view.meta = dict(node.meta)
        for user in readers:
            user.replace_input_with(node, view)
    forward.recompile()
    return bool(copied)


def _is_copied(value: Any) -> bool:
    """Return whether an input is an image whose sizes are known and whose layout is not channels-last."""
    if not isinstance(value, torch.Tensor) or value.dim() != 4:
        return False
    is_known = all(isinstance(number, int) for number in (*value.shape, *value.stride()))
    return is_known and not value.is_contiguous(memory_format=torch.channels_last)


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


torch.library.define("remat::apart", "(Tensor x) -> Tensor")  # its argument; no generated code calls it
torch.library.register_fake("remat::apart", torch.empty_like)


@functools.cache
def _apart() -> Any:
    """Return the operator that keeps kernels apart, which Inductor knows then."""
    purpose = "keep kernels apart"
    lowers = internal("_inductor.lowering.register_lowering", purpose)
    virtual = internal("_inductor.virtualized.V", purpose)
    apart = torch.ops.remat.apart.default

    @lowers(apart, type_promotion_kind=None)
    def lower(x: Any) -> Any:
        x.realize()
        virtual.graph.no_fuse_buffer_names.add(x.get_name())
        return x

    return apart


def policy_of(node: fx.Node) -> str | None:
    """Return the decision of a user's checkpoint on a node of a joint graph: "save", "recompute", or None."""
    wanted = node.meta.get("recompute")
    return "save" if wanted in _SAVE else "recompute" if wanted in _RECOMPUTE else None


def calls_library(node: fx.Node) -> bool:
    """Return whether Inductor calls a kernel for a node rather than generate one."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    fallbacks = internal("_inductor.lowering.fallbacks", "tell which operators fuse")
    lowerings = internal("_inductor.lowering.lowerings", "tell which operators fuse")
    return counts_flops(node) or node.target in fallbacks or node.target not in lowerings


def counts_flops(node: fx.Node) -> bool:
    """Return whether a node is a product, a convolution or attention."""
    return getattr(node.target, "overloadpacket", None) in flop_registry


Strides = Mapping[str, tuple[Any, ...]]  # of what a compiled forward gives, by the name of its node


def compiled_forward(forward: fx.GraphModule, results: int, static: Sequence[int] = ()) -> tuple[Any, Strides]:
    """Compile a copy of the forward of a joint graph as AOTAutograd would.

    Where `keeps_code`, AOTAutograd finds the code, unless the graph gives changed inputs back to be written in place.

    results  how many of those that forward gives are seen by a user: the first
    static   positions of the inputs that stay where they are, such as parameters
    """
    purpose = "predict what Inductor allocates"
    compile_inner = internal("_inductor.compile_fx.compile_fx_inner", purpose)
    compile_half = _COMPILERS.get().of["fw_compiler"] if keeps_code() else compile_inner
    reporting = internal("_guards.TracingContext.report_output_strides", purpose)
    internal("_inductor.compile_fx.get_static_input_idxs", purpose)
    compiler = internal("_inductor.compile_fx", purpose)
    with reporting() as strides, mock.patch.object(compiler, "get_static_input_idxs", lambda fixed: [*static]):
        first = compile_half(_copied(forward, range(results)), _values(forward.graph.find_nodes(op="placeholder")))
    return first, {
        node.name: tuple(stride)
        for node, stride in zip(_results_of(forward), strides or (), strict=False)
        if isinstance(node, fx.Node) and stride is not None
    }


def compiled_backward(forward: fx.GraphModule, backward: fx.GraphModule, results: int, strides: Strides) -> Any:
    """Compile a copy of the backward to a compiled forward, which gives results of these `strides`.

    It may write over saved values that are no part of others.
    """
    purpose = "predict what Inductor allocates"
    compile_inner = functools.partial(internal("_inductor.compile_fx.compile_fx_inner", purpose), is_backward=True)
    compile_half = _COMPILERS.get().of["bw_compiler"] if keeps_code() else compile_inner
    graphs, donated = internal("_inductor.graph", purpose), _donated(forward, backward, results)
    internal("_inductor.graph.get_donated_idxs", purpose)
    given = [_with_stride(node, strides.get(node.name)) for node in backward.graph.find_nodes(op="placeholder")]
    with mock.patch.object(graphs, "get_donated_idxs", lambda: donated):
        return compile_half(_copied(backward, ()), given)


def _with_stride(node: fx.Node, stride: tuple[Any, ...] | None) -> Any:
    """Return the value of a node with the strides that Inductor gives it; strides that are open stay open."""
    value = node.meta.get("val")
    if stride is None or not isinstance(value, torch.Tensor):
        return value
    if [*map(hinted, value.stride())] == [*map(hinted, stride)]:
        return value
    return value.as_strided(value.size(), stride)


def _donated(forward: fx.GraphModule, backward: fx.GraphModule, results: int) -> list[int] | None:
    """Return the positions of the inputs that backward may write over."""
    purpose = "predict what Inductor allocates"
    found = internal("_functorch._aot_autograd.graph_compile.collect_fw_donated_buffer_idxs", purpose)
    if not internal("_functorch.config", purpose).donated_buffer:
        return None
    inputs, outputs = _values(forward.graph.find_nodes(op="placeholder")), _values(_results_of(forward))
    saved = [value for value in outputs[results:] if not isinstance(value, torch.SymInt)]
    sizes = len(outputs) - results - len(saved)
    return [sizes + i for i in found(inputs, outputs[:results], _values(_results_of(backward)), saved)]


def _results_of(half: fx.GraphModule) -> list[Any]:
    return list(half.graph.find_nodes(op="output")[0].args[0])


def _values(nodes: Sequence[Any]) -> list[Any]:
    return [node.meta.get("val") if isinstance(node, fx.Node) else None for node in nodes]


def _copied(half: fx.GraphModule, results: Sequence[int]) -> fx.GraphModule:
    """Copy a half for Inductor to change; a user sees `results` of it."""
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in half.graph.nodes:
        made[node] = graph.node_copy(node, made.__getitem__)
    graph.find_nodes(op="output")[0].meta["user_visible_output_idxs"] = list(results)
    return fx.GraphModule(half, graph)


# Groups


def joint_of(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """Forward and backward of `function` in one graph of what Inductor decomposes to.

    Raises RuntimeError where a result is an input or a view.
    """
    traced = internal("_functorch.aot_autograd.aot_export_joint_simple", "fuse groups of nodes")
    found: fx.GraphModule = traced(function, tuple(inputs), trace_joint=True, decompositions=chosen_decompositions())
    return found


def compiled(graph_module: fx.GraphModule, given: Sequence[torch.Tensor]) -> Callable[[list[torch.Tensor]], Any]:
    """Compile a graph of ATen operators for inputs like `given`; results keep the graph's strides.

    Nothing is benchmarked on the device: that would take a buffer of the size of its L2 cache in the first step, and
    another choice of kernel sums in another order.
    """
    compile_inner = internal("_inductor.compile_fx.compile_fx_inner", "compile fused groups")
    settings = {"deterministic": True, "triton.autotune_pointwise": False}
    graph_module = copy.deepcopy(graph_module)
    (output,) = graph_module.graph.find_nodes(op="output")
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
    with internal("_inductor.config", "compile fused groups").patch(settings):
        found: Callable[[list[torch.Tensor]], Any] = compile_inner(graph_module, list(given))
    return found


class PendingKernels:
    """Kernels that generated code has begun to compile, in other threads, and not waited for."""

    def __init__(self) -> None:
        self._scopes: list[tuple[Any, dict[str, Any]]] = []
        self._wait: Any = None

    @contextlib.contextmanager
    def instead(self) -> Iterator[None]:
        """Let generated code load without waiting for its kernels."""
        compiler = internal("_inductor.async_compile.AsyncCompile", "compile fused groups beside each other")
        self._wait = compiler.wait

        def note(began: Any, scope: dict[str, Any]) -> None:
            self._scopes.append((began, scope))

        with mock.patch.object(compiler, "wait", note):
            yield

    def end(self) -> None:
        """Wait now."""
        while self._scopes:
            self._wait(*self._scopes.pop())


def moved_by_loops() -> int:
    """Return the bytes that loops of the module being generated read and write; call it while the module is loaded."""
    virtual = internal("_inductor.virtualized.V", "know what fused groups read and write")
    return sum(node.get_read_write_buffers_sizes() for node in virtual.graph.scheduler.nodes)
