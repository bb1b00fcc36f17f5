"""Turn `--model` and its options into a Workload, from the first of four places that knows it.

1. a ready-made one, by its name (`remat.models`)
2. `path/to/file.py:function`: a function without arguments that returns a `remat.Workload`, or a Trainer of
   transformers or TRL, whose step it is then
3. an existing folder with the `config.json` of a Hugging Face language model, causal or for masked tokens; no network
   is used
4. the id of one on the Hugging Face hub; its configuration is fetched, its weights never

A `ModelSpec` holds what was asked for, so that a plan or profile file can say how to make the workload again. Paths
in a file are relative to the file's folder: a plan and a model that lie together may move together.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import os
import re
import socket
import sys
import traceback
import types
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from remat import models
from remat.errors import RematError, UsageError, is_out_of_memory
from remat.integrations.trainer_workload import is_trainer, loop_of, workload_of
from remat.models.adapters import Lora, with_lora
from remat.models.common import packed, padded, text_workload, transformers
from remat.models.quantized import quantized
from remat.recording.remedies import describe
from remat.recording.step_refusals import CodeRaises
from remat.workload.optimizers import optimizer_named
from remat.workload.training_loop import TrainingLoop
from remat.workload.workload import DTypePolicy, Workload

# What a causal language model from a configuration trains on, unless the options say otherwise.
CAUSAL_BATCH_SIZE = 8
CAUSAL_SEQ_LEN = 1024

_FILE = re.compile(r"(?P<path>.+\.py)(?::(?P<function>.*))?")
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """`--model` and the options that shape its workload; None leaves the workload's own."""

    model: str
    batch_size: int | None = None
    seq_len: int | None = None
    image_size: int | None = None
    dtype: str | None = None
    optimizer: str | None = None
    padded: bool | None = None
    packed: bool | None = None
    lora: str | None = None
    quantize: str | None = None

    def workload(self) -> Workload:
        """Return the workload asked for. Raises UsageError if there is none, or if it does not take an option."""
        workload, path = find(self.model, self.image_size)
        if self.seq_len is not None and workload.seq_len is None:
            raise UsageError(
                f"sequence length {self.seq_len} was given, but model {workload.name} has none. Leave it out."
            )
        if self.padded or self.packed:
            workload = self._masked(workload, path)
        workload = workload.sized(self.batch_size, self.seq_len)
        if self.optimizer is not None:
            workload = dataclasses.replace(workload, optimizer=optimizer_named(self.optimizer))
        if self.dtype is not None:
            if path is not None and is_trainer(call(path, self.model.rpartition(":")[2])):
                raise UsageError(
                    f"--dtype {self.dtype} was given, and the Trainer says its own precision. Leave it out."
                )
            workload = workload.with_dtype(cast(DTypePolicy, self.dtype))
        if self.lora is not None or self.quantize is not None:
            workload = self._adapted(workload, path)
        return guarded(workload, path)

    def _masked(self, workload: Workload, path: Path | None) -> Workload:
        """Return `workload` on padded or packed batches."""
        if self.padded and self.packed:
            raise UsageError("--padded and --packed both say what a batch holds; give one of them.")
        if path is not None:
            option, given = (
                ("--padded", "an attention mask with zeros") if self.padded else ("--packed", "position ids")
            )
            raise UsageError(f"{option} is for models by name; let the `batch` of {workload.name} return {given}.")
        return padded(workload) if self.padded else packed(workload)

    def _adapted(self, workload: Workload, path: Path | None) -> Workload:
        """Add 4-bit weights and adapters to `workload`, as asked for."""
        if path is not None:
            raise UsageError(
                f"--lora and --quantize are for models by name; let the `build` of {workload.name} do the same."
            )
        if self.quantize is not None:
            if self.lora is None or self.dtype is not None:
                raise UsageError(
                    "--quantize freezes the model's weights in 4 bits, all others in bf16: it goes with --lora, and "
                    "without --dtype."
                )
            workload = quantized(workload, self.quantize)
        assert self.lora is not None
        own = self.dtype is not None or self.quantize is not None
        return with_lora(workload, Lora.parsed(self.lora), **({"frozen": None} if own else {}))

    def loop(self) -> TrainingLoop:
        """Return the training loop of the Trainer if the model is one; else the plain loop."""
        match = None if self.model in models.REGISTRY else _FILE.fullmatch(self.model)
        if match is None or not match["function"]:
            return TrainingLoop()
        made = call(Path(match["path"]).expanduser(), match["function"])
        return loop_of(made) if is_trainer(made) else TrainingLoop()

    def changed(self, **options: Any) -> ModelSpec:
        """Return the spec with those `options` that are not None."""
        return dataclasses.replace(self, **{name: value for name, value in options.items() if value is not None})

    def to_json(self, folder: Path) -> dict[str, Any]:
        """Return the spec for a file in `folder`."""
        fields = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return {**fields, "model": _moved(self.model, lambda path: os.path.relpath(path, folder))}

    @staticmethod
    def from_json(data: Any, folder: Path) -> ModelSpec | None:
        """Read the spec in a file in `folder`; None if it is missing or invalid."""
        known = {field.name for field in dataclasses.fields(ModelSpec)}
        if not isinstance(data, dict) or not isinstance(data.get("model"), str) or not set(data) <= known:
            return None
        return ModelSpec(**{**data, "model": _moved(data["model"], lambda path: folder / path, folder)})


def _moved(model: str, move: Callable[[str], Any], folder: Path = Path()) -> str:
    """Apply `move` to `model` if it is a path; `folder` is where a relative path starts."""
    if model in models.REGISTRY:
        return model
    if match := _FILE.fullmatch(model):
        return f"{move(match['path'])}:{match['function']}"
    return str(move(model)) if (folder / model).is_dir() else model


def find(model: str, image_size: int | None = None) -> tuple[Workload, Path | None]:
    """Return the workload that `model` names, and its file if it is a user's."""
    if model in models.REGISTRY:
        return models.build(model, image_size), None
    if image_size is not None:
        raise UsageError(
            f"image size {image_size} was given, but only {', '.join(models.IMAGES)} take one; {model!r} does not."
        )
    if match := _FILE.fullmatch(model):
        path = Path(match["path"]).expanduser()
        return from_file(path, match["function"]), path
    folder = Path(model).expanduser()
    if folder.is_dir():
        return from_folder(folder), None
    return from_hub(model), None


# 2. A function in a file


def from_file(path: Path, function: str | None) -> Workload:
    """Call `function` in the Python file at `path` for a Workload, or for a Trainer whose step is one."""
    made = call(path, function)
    if is_trainer(made):
        with blaming(f"the Trainer of {path}:{function}", path):
            return workload_of(made)
    if not isinstance(made, Workload):
        raise UsageError(f"{path}:{function} returned {_a(made)}, and must return a remat.Workload or a Trainer.")
    return made


def call(path: Path, function: str | None) -> Any:
    """Call `function` in the Python file at `path`; a Trainer is made once, because its data takes long."""
    if not path.is_file():
        raise UsageError(f"there is no file {path}.")
    if not function:
        raise UsageError(f"{path} alone is not enough: name the function that returns the workload, {path}:function.")
    module = load(path)
    make = getattr(module, function, None)
    if isinstance(make, Workload) or is_trainer(make):
        raise UsageError(
            f"{function!r} of {path} is {_a(make)}, and must be a function that returns one: `def make(): return "
            f"{function}`, and {path}:make."
        )
    if not callable(make):
        raise UsageError(f"{path} has no function {function!r}{_functions_of(module, function)}")
    if make not in _TRAINERS:
        with blaming(f"{path}:{function}", path):
            made = make()
        if not is_trainer(made):
            return made
        _TRAINERS[make] = made
    return _TRAINERS[make]


_TRAINERS: dict[Callable[[], Any], Any] = {}


_LOADED_FILES: dict[Path, tuple[int, types.ModuleType]] = {}  # files executed by `load`, with their modification times


def load(path: Path) -> types.ModuleType:
    """Load the Python file at `path` as a module, able to import its neighbours, as if it were run.

    A file is executed once in a process, and again only after it was written: one that registers an operator would fail
    the second time. Importing it by its name gives the same module, so its classes can be pickled.
    """
    absolute = path.resolve()
    written = absolute.stat().st_mtime_ns
    if absolute in _LOADED_FILES and _LOADED_FILES[absolute][0] == written:
        return _LOADED_FILES[absolute][1]
    if str(absolute.parent) not in sys.path:
        sys.path.insert(0, str(absolute.parent))
    name = _module_name(absolute)
    if absolute not in _LOADED_FILES and name in sys.modules:  # the user's own program imported it
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, absolute, loader=_FromSource(name, str(absolute)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with blaming(f"{path}", path):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    _LOADED_FILES[absolute] = (written, module)
    return module


class _FromSource(importlib.machinery.SourceFileLoader):
    """Loads the file as it is: code that Python has kept of it may be that of an earlier text of the same second."""

    def path_stats(self, path: Any) -> Any:
        raise OSError("no code is kept of this file")


def _module_name(path: Path) -> str:
    """Return the name by which `import` finds the file, or an own name if that is another module's."""
    importlib.invalidate_caches()
    try:
        found = importlib.util.find_spec(path.stem)
    except (ImportError, ValueError):  # no name of a module; one that was made without a spec
        found = None
    if found is not None and found.origin is not None and Path(found.origin).resolve() == path:
        return path.stem
    return f"_remat_model_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"


def _functions_of(module: types.ModuleType, wanted: str) -> str:
    own = [
        name
        for name, value in vars(module).items()
        if isinstance(value, types.FunctionType) and value.__module__ == module.__name__ and not name.startswith("_")
    ]
    close = difflib.get_close_matches(wanted, own)
    if close:
        return f". Did you mean {' or '.join(close)}?"
    return f"; it has {', '.join(own)}." if own else "; it has none at all."


def _a(value: Any) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"


# 3. and 4. A Hugging Face configuration


def from_folder(folder: Path) -> Workload:
    """Return the language model whose `config.json` is in `folder`."""
    if not (folder / "config.json").is_file():
        raise UsageError(f"the folder {folder} has no config.json, so it is not a Hugging Face model.")
    try:
        config = _library().AutoConfig.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the library raises OSError, ValueError, KeyError, and its dependencies' own
        raise UsageError(f"{folder / 'config.json'} cannot be used: {describe(error)}") from error
    return text_workload_of(folder.resolve().name, config)


def from_hub(model: str) -> Workload:
    """Return the language model with id `model` on the Hugging Face hub, or in its cache on this machine."""
    close = difflib.get_close_matches(model, models.names())
    meant = f" (did you mean {' or '.join(close)}?)" if close else ""
    unknown = f"model {model!r} is not known: it is no ready-made model{meant}, no file.py:function, no folder"
    # A slip of the pen is not worth a question to the hub, where most ids have an owner.
    if not _HUB_ID.fullmatch(model) or (close and "/" not in model):
        raise UsageError(f"{unknown}, and no OWNER/NAME of the Hugging Face hub. `remat models` lists what is ready.")
    library, reachable = _library(), hub_answers()
    try:
        config = library.AutoConfig.from_pretrained(model, trust_remote_code=False, local_files_only=not reachable)
    except Exception as error:  # as above
        why = describe(error).rstrip(".")
        nor = "" if reachable else ", which cannot be reached, nor from its local cache"
        raise UsageError(f"{unknown}, and not available from the Hugging Face hub{nor}: {why}.") from error
    return text_workload_of(model.rpartition("/")[2], config)


def hub_answers() -> bool:
    """Return whether the hub can be reached: without a network its client retries for half a minute."""
    if urllib.request.getproxies():
        return True
    host = urllib.parse.urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True


def text_workload_of(name: str, config: Any) -> Workload:
    """Make a workload that trains the language model of `config`: random fp32 weights under bf16 autocast.

    The model is the causal one, unless the configuration names one for masked tokens (BERT) as its architecture.
    """
    make, loss_type = _language_model(name, config)

    def build() -> nn.Module:
        own = copy.deepcopy(config)  # a model writes into its configuration
        own.use_cache = False
        if hasattr(own, "num_experts_per_tok"):
            own._experts_implementation = "batched_mm"  # as in models/qwen3_moe.py
        model = make.from_config(own, dtype=torch.float32)
        if getattr(model, "loss_type", None) is None:
            model.loss_type = loss_type  # as in models/gpt2.py
        return cast(nn.Module, model.train())

    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    return text_workload(
        name,
        build,
        vocab=text.vocab_size,
        positions=positions,
        batch_size=CAUSAL_BATCH_SIZE,
        seq_len=min(CAUSAL_SEQ_LEN, positions or CAUSAL_SEQ_LEN),
    )


def _language_model(name: str, config: Any) -> tuple[Any, str]:
    """Return the class that builds the language model of `config`, and the name of the library's loss for it."""
    library = _library()
    masked = library.MODEL_FOR_MASKED_LM_MAPPING
    if type(config) in masked and masked[type(config)].__name__ in (config.architectures or ()):
        return library.AutoModelForMaskedLM, "ForMaskedLM"
    if type(config) in library.MODEL_FOR_CAUSAL_LM_MAPPING:
        return library.AutoModelForCausalLM, "ForCausalLM"
    raise UsageError(
        f"{name} is a configuration of type {config.model_type!r}, which is no causal language model, nor one for "
        "masked tokens. Write a function that returns a remat.Workload, and give it as file.py:function."
    )


def _library() -> Any:
    """Return `transformers`, which may not write progress and advice over our own lines."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    return transformers()


# Errors of other people's functions


def guarded(workload: Workload, path: Path | None) -> Workload:
    """Turn exceptions of the workload's functions into errors that say where; the recorder guards `step`."""

    def guard(name: str) -> Any:
        function = getattr(workload, name)

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            with blaming(f"`{name}` of {workload.name}", path):
                return function(*args)

        return call

    own = ("build", "batch", "optimizer") if workload.optimizer is not None else ("build", "batch")
    return dataclasses.replace(workload, **{name: guard(name) for name in own})


@contextlib.contextmanager
def blaming(what: str, path: Path | None) -> Iterator[None]:
    """Turn an exception into a CodeRaises that says what raised it, and in which line of the file at `path`."""
    try:
        yield
    except RematError:
        raise
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            raise
        said = f"{describe(error)}{_line_of(error, path)}"
        raise CodeRaises(f"{what} raises {said}.", said) from error


def _line_of(error: BaseException, path: Path | None) -> str:
    """Format the place in the user's file as ` (file.py:12)`; without one, the innermost line of any file."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    if path is None or not frames or isinstance(error, SyntaxError):  # whose text has it
        return ""
    own = [frame for frame in frames if frame.filename == str(path.resolve())]
    return f" ({path}:{own[-1].lineno})" if own else f" ({frames[-1].filename}:{frames[-1].lineno})"
