"""Every command and snippet of README and `docs/` is run as it is written, with GPT-2 at a small size under its name.

`20GiB` becomes a budget that bites at that size, "cuda" the device at hand. A snippet uses names that it does not
define (`model`, `loader`): here they are toys. What cannot be run here is listed in NOT_RUN, with the reason. The
tutorial is one program, which `test_docs.py` runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import nn

import remat
from remat import models
from remat.cli import main as cli
from remat.cli.main import app
from remat.evaluation.plan import Plan
from remat.execution.apply import counts_of, planned_forward
from remat.integrations.axolotl_settings import PLUGIN, RematArgs
from remat.integrations.pytest_plugin import require_fits
from remat.models import gpt2
from remat.planning import planner
from remat.units import MIB
from remat.workload.training_loop import TrainingLoop
from tests.snapshots import Run
from tests.test_weights_on_host import FROZEN, frozen
from tests.toys import plan_for, tokens

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")
pytestmark = [
    pytest.mark.usefixtures("one_thread", "fresh_dynamo"),
    pytest.mark.filterwarnings(
        "ignore:.*isinstance.treespec, LeafSpec.*",
        "ignore:.*does not have many workers.*",
        "ignore:The number of training batches",
        "ignore:.*torch.jit.*:DeprecationWarning",
    ),
]

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(set(DOCS.rglob("*.md")) - {DOCS / "tutorial.md"})]
SPHINX = re.compile(r"\{[\w-]+\}")  # a block that is a directive


def blocks_of(page: Path) -> list[tuple[str, str]]:
    """(kind, text) of every block that is fenced."""
    found = re.findall(r"^( *)```(\S*)[^\n]*\n(.*?)^\1```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [(kind, textwrap.dedent(text)) for _, kind, text in found]


def inline_of(page: Path) -> list[str]:
    """Code in sentences; a dated note tells of its day, and has none."""
    if page.parent.name == "decisions":
        return []
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text)]


BLOCKS = [block for page in PAGES for block in blocks_of(page) if not SPHINX.fullmatch(block[0])]
INLINE = [code for page in [*PAGES, DOCS / "tutorial.md"] for code in inline_of(page)]

VOCAB, LENGTH, SAMPLES = 512, 64, 24
FOUR_FROZEN = dataclasses.replace(FROZEN, build=functools.partial(frozen, 4))  # as many layers as pages say
BUDGET = "81MiB"  # 64 of them workspaces of cuBLAS; without checkpointing a step needs 92
ON_CPU = "24MiB"  # where one needs 34

_BIG = "remat plan --model llama-8b --dtype bf16"
_IN_BACKWARD = "--optimizer-step backward --budget 24GiB --target rtx4090"
_A_MINUTE = "takes a minute; see `python -m benchmarks step_in_backward:plans`"
NOT_RUN = {
    'python -m pip install ".[models]"': "installs packages; test_packaging.py installs",
    "make demo": "makes a virtual environment; then the first `remat plan` of those below",
    "make test": "runs this test",
    "make docs": "test_docs.py builds them",
    "make card": "downloads a CUDA build of torch",
    "make test-cuda": "needs the card",
    "build/card/python script.py": "needs the card, and a script",
    "python benchmarks/device.py --make-plans build/device": "takes minutes a plan",
    "python benchmarks/device.py build/device": "needs a GPU; see test_minutes_of_a_gpu.py",
    "python kernel_calls.py h100.csv": "needs the card; see test_kernel_table.py",
    "remat plan --model gpt2 --budget 20GiB --target h100-80gb --costs h100.csv": "needs that table",
    f"{_BIG} --optimizer adafactor {_IN_BACKWARD}": _A_MINUTE,
    f"{_BIG} --offload optimizer --host-budget 64GiB {_IN_BACKWARD}": _A_MINUTE,
}


WHOLE = re.compile(r"remat \w+ (--model|--trainer|\S+\.\w+ --)")  # a command in a sentence that says all it needs


def small() -> Any:
    return gpt2.workload(
        "gpt2", n_embd=64, n_layer=2, n_head=4, batch_size=SAMPLES, n_positions=LENGTH, vocab_size=VOCAB
    )


def commands() -> list[str]:
    """The command lines of all pages, each once, without comments, those in sentences too."""
    in_blocks = [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]
    lines = [line.split("  #")[0].strip() for line in in_blocks]
    return list(dict.fromkeys([*filter(None, lines), *(code for code in INLINE if WHOLE.match(code))]))


def snippets() -> list[str]:
    """Of all pages, each once: README shows some that a guide shows too."""
    return list(dict.fromkeys(text for kind, text in BLOCKS if kind == "python"))


@pytest.fixture(scope="module", autouse=True)
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for all of it."""
    folder = tmp_path_factory.mktemp("readme")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setattr(sys, "path", list(sys.path))
        patch.setitem(models.REGISTRY, "gpt2", small)
        yield folder


@pytest.fixture(autouse=True)
def forgotten_accelerators() -> Iterator[None]:
    """A Trainer and an Accelerator share what they agree on with those of earlier tests."""
    yield
    if "accelerate" in sys.modules:
        sys.modules["accelerate"].state.AcceleratorState._reset_state(True)


def run(command: str, budget: str = BUDGET) -> None:
    words = command.replace("20GiB", budget).replace("256,512,768", "16,32,48").split()
    assert words[0] == "remat"
    assert cli.main(words[1:]) == 0


@contextlib.contextmanager
def planned(*options: str) -> Iterator[Plan]:
    """`gpt2.plan.json`, made by the README's first command, with `options` where what uses it says so."""
    plan = made_once("gpt2.plan.json", *options)
    assert plan.regions
    plan.save("gpt2.plan.json")
    yield plan


@functools.cache
def made_once(name: str, *options: str) -> Plan:
    run(" ".join(("remat plan --model gpt2 --budget 20GiB --target cpu", *options)), ON_CPU)
    return Plan.load(name)


WRITTEN_BY = {
    "gpt2.plan.json": "remat plan --model gpt2 --budget 20GiB",
    "gpt2.curve.json": "remat sweep --model gpt2 --points 4 --out gpt2.curve.json",
}


def reads(command: str) -> list[str]:
    """The files of WRITTEN_BY that `command` is given: a test leans on no other, which may not be among those run."""
    words = command.split()
    return [word for before, word in itertools.pairwise(words) if word in WRITTEN_BY and before != "--out"]


@functools.cache
def written_once(name: str) -> bytes:
    """Made on the first call, and no other: commands between two that read it may write one of their own."""
    run(WRITTEN_BY[name])
    return Path(name).read_bytes()


def test_what_is_not_run_stands_on_a_page() -> None:
    assert set(NOT_RUN) <= set(commands())


SLOW_COMMANDS = {
    "remat fit --model gpt2 --budget 20GiB --max-tokens": "records a dozen shapes; test_token_cap.py",
    "remat plan --model gpt2 --budget 20GiB --offload activations": "test_offloading.py plans with it",
    "remat plan --model gpt2 --budget 20GiB --target h100-80gb --lengths 256,512,768": "test_lengths.py",
    "remat plan --model gpt2 --budget 20GiB --fuse": "test_fusion.py plans with it",
    "remat fit --model gpt2 --budget 20GiB --max-batch": "a fit; test_cli_memory.py asks for the largest batch too",
    "remat compare --model gpt2 --budget 20GiB": "test_cli.py compares",
    "remat plan --trainer train.py:make_trainer --budget 20GiB": "test_trainers.py plans for a Trainer",
    "remat sweep --model gpt2 --plot gpt2.png": "another sweep is run, and test_cli.py plots one",
    "remat fit --model gpt2 --budget 20GiB --global-batch 256": "a fit; `--max-batch` is another",
    "remat fit --model gpt2 --budget 12GiB --global-batch 32 --target h100-80gb --offload activations": "a fit",
    "remat plan --model gpt2 --budget 20GiB --menu": "test_menu.py",
    "remat doctor run.pickle --plan gpt2.plan.json": "test_doctor.py",
    "remat report gpt2.plan.json gpt2.curve.json --out report.html": "test_report.py, and a report of a plan alone",
    "remat validate gpt2.plan.json": "test_validating.py and test_cli.py",
    "remat estimate --model gpt2 --advice": "records every lever; test_estimating.py",
    "remat plan --model gpt2 --budget 20GiB --target h200 --dtype bf16 --batch-size 32": "the same, elsewhere",
    "remat plan --model gpt2 --budget 20GiB --execution modules": "test_modules.py plans with it on the command line",
    "remat profile --model gpt2 --costs h100.csv": "test_kernel_table.py writes a table on the command line",
    "remat estimate --model gpt2": "test_cli_memory.py estimates on the command line",
    "remat check --model gpt2 --target rtx4090": "test_checking.py checks on the command line",
    "remat timeline --plan gpt2.plan.json --snapshot gpt2.pickle": "test_cli_memory.py writes one",
}


OFTEN = (
    *(command for command in commands() if command not in {*SLOW_COMMANDS, *NOT_RUN}),
    *("remat plan --model gpt2 --budget 20GiB --offload activations", "remat plan --model gpt2 --budget 20GiB --fuse"),
    *("remat validate gpt2.plan.json", "remat compare --model gpt2 --budget 20GiB", "remat estimate --model gpt2"),
    *("remat check --model gpt2 --target rtx4090", "remat profile --model gpt2 --costs h100.csv"),
)


def test_the_slow_commands_are_in_the_readme() -> None:
    assert set(SLOW_COMMANDS) <= set(commands())


def test_what_writes_the_files_that_others_read_stands_on_a_page() -> None:
    assert set(WRITTEN_BY.values()) <= set(commands())
    assert {name for command in commands() for name in reads(command)} == set(WRITTEN_BY)


@pytest.mark.often(*OFTEN)
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=pytest.mark.exhaustive if command in SLOW_COMMANDS else ())
        for command in commands()
        if command not in NOT_RUN
    ],
)
def test_a_command_runs_as_written(command: str, here: Path) -> None:
    if "mine.py" in command:
        write_mine(here)
    if "run.pickle" in command:
        write_snapshot(here)
        made_once("gpt2.plan.json").save("gpt2.plan.json")
    else:
        for name in reads(command):
            (here / name).write_bytes(written_once(name))
    (here / "train.py").write_text(TRAIN)
    before = {path.name for path in here.iterdir()}
    run(command)
    for option in ("--out", "--plot", "--snapshot"):
        if option in (words := command.split()):
            written = here / words[words.index(option) + 1]
            assert written.stat().st_size > 0
    if command.startswith("remat plan"):
        assert {path.name for path in here.iterdir()} - before <= {
            "gpt2.plan.json",
            "mine.plan.json",
            "cache",
            *OF_TRAINER,
        }


TRAIN = """
import transformers
from tests import test_readme

def make_trainer():
    arguments = transformers.TrainingArguments("trainer", per_device_train_batch_size=test_readme.SAMPLES, use_cpu=True)
    data = test_readme.rows(test_readme.SAMPLES)
    return transformers.Trainer(test_readme.build_model(), arguments, train_dataset=data)
"""


def write_snapshot(here: Path) -> None:
    """Write a snapshot as torch does after a run; there is no device here to run on."""
    run = Run()
    for _ in range(3):
        run.malloc(40 * MIB)
    run.save(here / "run.pickle")


OF_TRAINER = {"Trainer-of-GPT2LMHeadModel.plan.json", "trainer", "train.py", "__pycache__"}


# Snippets


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return small().build()


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    made = small().batch(count, LENGTH)
    return [{name: tensor[i] for name, tensor in made.items()} for i in range(count)]


def loader() -> Any:
    return torch.utils.data.DataLoader(rows(2 * SAMPLES), SAMPLES)  # type: ignore[arg-type]


def execute(snippet: str, **names: Any) -> dict[str, Any]:
    """Run `snippet` with these names; returns all that it defined."""
    import remat

    names = {"remat": remat, "torch": torch, "__name__": "snippet", **names}
    exec(snippet.replace('"cuda"', repr("cuda" if torch.cuda.is_available() else "cpu")), names)
    return names


def entered(model: nn.Module, plan: Plan, steps: int) -> None:
    """Every step entered every region of the plan."""
    assert planned_forward(model).plan == plan
    assert counts_of(model).regions == steps * len(plan.regions)


def plain_loop(snippet: str, here: Path) -> None:
    with planned() as plan:
        model = execute(snippet, build_model=build_model, loader=loader())["model"]
        entered(model, plan, steps=2)


def trainer(snippet: str, here: Path) -> None:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        str(here / "trainer"),
        bf16=True,
        per_device_train_batch_size=SAMPLES,
        max_steps=2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=False,
    )
    with planned() as plan, pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "plan", lambda workload, **options: plan)  # test_trainers.py makes one
        for given in (snippet, snippet.replace('budget="20GiB"', '"gpt2.plan.json"')):
            names = {"Trainer": Trainer, "model": build_model(), "arguments": arguments, "data": rows(2 * SAMPLES)}
            made = execute(given, **names)["trainer"]
            made.train()
            entered(made.model, plan, steps=2)


def accelerated(snippet: str, here: Path) -> None:
    from accelerate import Accelerator

    with planned() as plan:
        model = build_model()
        optimizer = torch.optim.AdamW(model.parameters())
        names = execute(
            snippet,
            accelerator=Accelerator(cpu=not torch.cuda.is_available(), mixed_precision="bf16"),
            model=model,
            optimizer=optimizer,
            loader=loader(),
        )
        for batch in names["loader"]:
            names["accelerator"].backward(names["model"](**batch).loss)
            names["optimizer"].step()
            names["optimizer"].zero_grad()
        entered(names["model"], plan, steps=2)


def lightning(snippet: str, here: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = build_model()

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            loss: torch.Tensor = self.net(**batch).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    with planned() as plan:
        plan.save("net.plan.json")
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        settings = {"precision": "bf16-mixed", "max_epochs": 1, "enable_model_summary": False, **quiet}

        class Settled(lightning.Trainer):  # type: ignore[name-defined]
            """The snippet gives the callback alone."""

            def __init__(self, **options: Any) -> None:
                super().__init__(accelerator="auto", devices=1, **settings, **options)

        standing_in = type("lightning", (), {"Trainer": Settled})
        made = execute(snippet, lightning=standing_in)["trainer"]
        module = Module()
        made.fit(module, loader())
        entered(module.net, plan, steps=2)


MY_MODEL = """

class MyModel(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 10))
"""


def write_mine(here: Path) -> None:
    """Write the `mine.py` of the guide."""
    (snippet,) = [text for text in snippets() if "# mine.py" in text]
    (here / "mine.py").write_text(snippet)


def own_model(snippet: str, here: Path) -> None:
    write_mine(here)
    names = execute(snippet)
    calls = [code for code in INLINE if code.startswith("remat.plan(workload()")]
    assert calls
    for call in calls:
        plan = eval(call, names)
        assert plan.about["workload"] == "mine" and plan.about["autocast"] == "bfloat16"


def own_model_in_the_readme(snippet: str, here: Path) -> None:
    names: dict[str, Any] = {}
    exec("import torch" + MY_MODEL, names)

    def make_batch(batch_size: int, seq_len: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(batch_size, 64), torch.zeros(batch_size, dtype=torch.long)

    def step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    mine = names["MyModel"]
    found = execute(snippet, MyModel=mine, model=mine(), make_batch=make_batch, step=step)
    step(found["model"], make_batch(32, None)).backward()
    assert all(p.grad is not None for p in found["model"].parameters())


def coming_from_checkpoints(snippet: str, here: Path) -> None:
    with planned() as plan, torch.autocast("cpu", torch.bfloat16):
        model = execute(snippet, build_model=build_model)["model"]
        model(**next(iter(loader()))).loss.backward()
        entered(model, plan, steps=1)


def recording(snippet: str, here: Path) -> None:
    """Both functions are torch's, under these names; here there may be no device to record."""
    called: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_record_memory_history", "_dump_snapshot"):
            patch.setattr(torch.cuda.memory, name, lambda *arguments, name=name: called.append(name))
        execute(snippet)
    assert called == ["_record_memory_history", "_dump_snapshot"]


def on_the_host(snippet: str, here: Path) -> None:
    model = build_model()
    optimizer = execute(snippet, model=model)["optimizer"]
    before = [p.detach().clone() for p in model.parameters()]
    model(**next(iter(loader()))).loss.backward()
    optimizer.step()
    assert type(optimizer) is torch.optim.AdamW
    assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def weights_on_the_host(snippet: str, here: Path) -> None:
    with planned():  # where files go
        remat.plan(FOUR_FROZEN, budget="64GiB", target="cpu", loop=TrainingLoop(weights_on_host=4)).save(
            "lora.plan.json"
        )
    model = execute(snippet, model=frozen(4), device="cpu")["model"]
    model(*tokens(4, 8)).backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


def weights_back(snippet: str, here: Path) -> None:
    plan = plan_for(FOUR_FROZEN)
    planned = remat.apply(
        remat.offload_weights(frozen(4), 4), dataclasses.replace(plan, about={**plan.about, "weights_on_host": 4})
    )
    model = execute(snippet, model=planned)["model"]
    model(*tokens(4, 8)).backward()
    assert all(torch.equal(left, right) for left, right in zip(model.parameters(), frozen(4).parameters(), strict=True))


def whole_step(snippet: str, here: Path) -> None:
    workload = small().sized(SAMPLES, LENGTH)
    with planned():  # where files go
        remat.plan(workload.with_planned_step(), budget="64GiB", target="cpu").save("step.plan.json")
    with torch.autocast("cpu", torch.bfloat16, enabled=workload.autocast is not None):
        found = execute(snippet, step=workload.step, model=build_model(), batch=next(iter(loader())))
    found["loss"].backward()
    assert all(p.grad is not None for p in found["model"].parameters())


def token_capped(snippet: str, here: Path) -> None:
    workload = small().sized(seq_len=LENGTH)
    data = [torch.arange(1 + i % LENGTH) for i in range(20)]

    def pad(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return {"input_ids": ids, "labels": ids}

    given = {"DataLoader": torch.utils.data.DataLoader, "data": data, "pad": pad, "model": build_model()}
    limit = remat.estimate(workload).peaks.peak_bytes  # 20 GiB are thousands of such rows
    found = execute(snippet.replace('"20GiB"', str(limit)), workload=workload, **given)
    cap = found["plan"].about["token_cap"]
    for batch in found["loader"]:
        assert batch["input_ids"].numel() <= cap["tokens"]
    with torch.autocast("cpu", torch.bfloat16):
        workload.step(found["model"], batch).backward()


def budgeted(snippet: str, here: Path) -> None:
    for line in snippet.strip().splitlines():
        torch._dynamo.reset()
        model = build_model()
        compiled = execute(line, model=model, optimizer=torch.optim.AdamW(model.parameters()))["model"]
        compiled(**next(iter(loader()))).loss.backward()
        assert any(p.grad is not None for p in model.parameters())


def checked(snippet: str, here: Path) -> None:
    pytest.importorskip("fastjsonschema")
    with planned():
        execute(snippet)


def in_a_test(snippet: str, here: Path) -> None:
    with planned():
        found = execute(snippet, make_trainer=execute(TRAIN)["make_trainer"])
        found["test_it_fits"](require_fits)


HANDLERS: dict[str, Callable[[str, Path], None]] = {  # by what stands in the snippet
    "for batch in loader:": plain_loop,
    "remat.compile(": budgeted,
    "remat.integrations.transformers": trainer,
    "remat.integrations.accelerate": accelerated,
    "remat.integrations.lightning": lightning,
    "# mine.py": own_model,
    "_dump_snapshot": recording,
    "fastjsonschema": checked,
    "gradient_checkpointing_enable": coming_from_checkpoints,
    'Workload("mine", MyModel': own_model_in_the_readme,
    "remat.offload_optimizer(": on_the_host,
    "remat.step_in_backward(": on_the_host,
    "remat.planned_step(": whole_step,
    "def test_it_fits": in_a_test,
    "remat.offload_weights(": weights_on_the_host,
    "remat.most_tokens(": token_capped,
    "remat.bring_weights_back(": weights_back,
}


SLOW = {
    "for batch in loader:": "plans and trains; test_frameworks.py runs the same as an example",
    "remat.most_tokens(": "records a dozen shapes; test_token_cap.py holds the claim",
    "remat.compile(": "plans and compiles C++, twice",
    "remat.planned_step(": "plans and trains; test_planned_step.py and test_first_step.py do the same",
    "remat.offload_weights(": "plans and trains; test_weights_on_host.py holds the claim",
    "remat.integrations.transformers": "trains four steps; test_trainers.py makes and trains such a plan",
    "remat.integrations.lightning": "test_frameworks.py runs the same as an example",
    "remat.integrations.accelerate": "test_frameworks.py runs the same as an example",
}


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=pytest.mark.exhaustive if key in SLOW else ()) for key in HANDLERS]
)
def test_a_snippet_runs_as_written(key: str, here: Path) -> None:
    (snippet,) = [text for text in snippets() if key in text]
    HANDLERS[key](snippet, here)


def test_no_snippet_is_left_out() -> None:
    assert {kind for kind, _ in BLOCKS} <= {"sh", "python", "yaml", ""}
    (tree,) = [text for kind, text in BLOCKS if not kind]  # nothing to run
    assert tree.startswith("remat/ ")
    for text in snippets():
        assert sum(key in text for key in HANDLERS) == 1, text


def test_a_yaml_of_axolotl_names_the_plugin_and_its_keys() -> None:
    """test_axolotl.py reads such a file with axolotl, where that is installed."""
    found = [dict(line.split(": ") for line in text.strip().splitlines()) for kind, text in BLOCKS if kind == "yaml"]
    assert [keys.pop("plugins") for keys in found] == [f"[{PLUGIN}]"]
    assert all(RematArgs.model_validate(keys) and keys.keys() <= RematArgs.model_fields.keys() for keys in found)


# What sentences name


@functools.cache
def options_of(command: str) -> set[str]:
    found = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    return {name for parameter in found.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}


COMMANDS = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
OF_OTHERS = {"--no-deps": "pip's", "--no-node-snapshot": "node's"}


@pytest.mark.parametrize("code", sorted({code for code in INLINE if re.match(r"remat [a-z]", code)}))
def test_a_command_in_a_sentence_exists_with_its_options(code: str) -> None:
    _, command, *words = code.split()
    if command != "COMMAND":
        assert {word for word in words if word.startswith("--")} <= options_of(command)


@pytest.mark.parametrize("code", sorted({code for code in INLINE if code.startswith("--")}))
def test_an_option_in_a_sentence_is_one_of_some_command(code: str) -> None:
    known = set().union(*(options_of(command) for command in COMMANDS))
    assert {word for word in code.split() if word.startswith("--")} <= known | set(OF_OTHERS)


@pytest.mark.parametrize("code", sorted({code for code in INLINE if re.match(r"remat\.\w", code)}))
def test_a_name_in_a_sentence_is_there(code: str) -> None:
    found: Any = importlib.import_module("remat")
    for name in re.findall(r"\w+", code.partition("(")[0])[1:]:
        found = getattr(found, name, None) or importlib.import_module(f"{found.__name__}.{name}")
    keywords = re.findall(r"(\w+)=", code) if "remat.T" not in code else []
    assert set(keywords) <= set(inspect.signature(found).parameters) if keywords else found is not None
