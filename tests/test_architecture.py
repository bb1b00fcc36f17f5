"""The house: rooms in the pipeline's order, no arrow that runs back, no circle; and `import remat` stays light.

A room is a package. Its arrows are the imports of its modules, late ones too, read off the source; what is imported
for its types only is no arrow. Judging and solving need no torch, so a step recorded on one machine can be solved on
another. Training loads what executes a plan, and nothing that makes or judges one.
"""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx
import pytest

from tests.words import tree_of

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"remat": ROOT / "remat", "remat.solvers": ROOT / "solvers", "remat.models": ROOT / "models"}

# Which rooms a room may know, in the pipeline's order: each knows earlier ones only.
ROOMS = {
    "workload": (),
    "host": (),
    "models": ("workload",),
    "evaluation": ("workload",),
    "capture": ("evaluation", "workload"),
    "chunking": ("capture", "evaluation"),
    "fusion": ("capture", "chunking", "evaluation"),
    "recording": ("capture", "chunking", "evaluation", "fusion", "host", "workload"),
    "cuda_kernels": ("capture", "chunking", "fusion", "workload"),
    "costing": ("evaluation", "recording", "workload"),
    "offloading": ("evaluation",),
    "formulation": ("costing", "evaluation", "offloading"),
    "solvers": ("evaluation", "formulation"),
    "reservation": ("evaluation", "workload"),
    "execution": (
        *("capture", "chunking", "costing", "evaluation", "formulation", "fusion", "host", "offloading"),
        *("recording", "workload"),
    ),
    "compiled": ("capture", "chunking", "costing", "execution", "fusion", "recording", "workload"),
    "planning": (
        *("capture", "chunking", "costing", "cuda_kernels", "evaluation", "execution", "formulation", "host"),
        *("offloading", "recording", "reservation", "solvers", "workload"),
    ),
    "validation": (
        *("capture", "chunking", "costing", "evaluation", "execution", "fusion", "host", "offloading"),
        *("planning", "recording", "reservation", "solvers", "workload"),
    ),
    "integrations": (
        *(
            "capture",
            "compiled",
            "costing",
            "evaluation",
            "execution",
            "host",
            "planning",
            "recording",
            "validation",
            "workload",
        ),
    ),
    "diagnosis": ("costing", "evaluation", "reservation"),
    "report": ("costing", "evaluation", "offloading", "planning"),
    "cli": (
        *("costing", "diagnosis", "evaluation", "execution", "formulation", "integrations", "models"),
        *("planning", "recording", "report", "solvers", "validation", "workload"),
    ),
}
TORCH_FREE_ROOMS = ("diagnosis", "evaluation", "formulation", "offloading", "reservation", "solvers")
TORCH_FREE_MODULES = (
    "remat.costing.costs",
    "remat.costing.profile",
    "remat.costing.reductions",
    "remat.costing.roofline",
    "remat.costing.workspaces",
    "remat.errors",
    "remat.files",
    "remat.shown",
    "remat.streams",
    "remat.units",
    "remat.warn",
    "remat.workload.target",
    "remat.workload.training_loop",
)
DOOR = "remat._torch"
KNOWN_TO_ALL = {
    "remat",
    *(
        f"remat.{each}"
        for each in ("errors", "files", "garbage", "shared", "shown", "streams", "units", "warn", "work")
    ),
}

# Private names of torch that stand outside the door, and why.
TORCH_SAYS = {
    "torch.utils._pytree": "in torch's own documentation under this name, and in every library",
    "torch.ops": "operators are called what their schemas say",
    "torch.utils._python_dispatch.TorchDispatchMode": "in torch's own documentation under this name",
    "torch._subclasses.fake_tensor": "in torch's own documentation under this name",
    "torch._ops.OpOverload": "the type of torch.ops.aten.add.Tensor, which has no public name",
}

# What a user's training script imports, and what that must not cost it.
EVERYDAY = (
    "remat.execution.apply",
    "remat.compiled.backend",
    "remat.integrations.transformers",
)
NOT_FOR_TRAINING = ("recording", "costing", "formulation", "planning", "validation", "solvers", "models", "cli")
HEAVY = ("ortools", "rich", "typer")


@cache
def modules() -> dict[str, Path]:
    """Every module by its name."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


def module_of(name: str) -> str:
    """The module that an imported name is, or is in."""
    while name not in modules():
        name = name.rpartition(".")[0]
    return name


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def statements(node: ast.AST, *, types: bool = False) -> Iterator[ast.AST]:
    """Every node of a syntax tree that is run, and those for `types`."""
    for child in ast.iter_child_nodes(node):
        if types or not is_for_types(child):
            yield child
            yield from statements(child, types=types)


@cache
def imports(module: str, *, types: bool = False) -> frozenset[str]:
    """Modules of this project, and other packages, that a module imports when it is loaded or later, or for `types`."""
    found = set()
    for node in statements(tree_of(modules()[module]), types=types):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    ours = {module_of(name) for name in found if name.partition(".")[0] == "remat"}
    return frozenset(ours - {module}) | {name.partition(".")[0] for name in found} - {"remat"}


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def is_known_to_all(module: str) -> bool:
    return module in KNOWN_TO_ALL or module.startswith(DOOR)


def arrows() -> set[tuple[str, str]]:
    """Between rooms."""
    found = {
        (room_of(a), room_of(b)) for a in modules() for b in imports(a) if b in modules() and not is_known_to_all(b)
    }
    return {(a, b) for a, b in found if a != b and a in ROOMS}


def test_every_module_lives_in_a_room() -> None:
    assert {room_of(module) for module in modules() if not is_known_to_all(module)} == {*ROOMS, "__main__"}


def test_rooms_know_earlier_rooms_only_and_no_others_than_the_table_says() -> None:
    assert arrows() == {(room, known) for room, others in ROOMS.items() for known in others}
    order = list(ROOMS)
    assert all(order.index(known) < order.index(room) for room, others in ROOMS.items() for known in others)


def test_no_module_is_in_a_circle_of_imports_late_ones_and_those_for_types_included() -> None:
    graph = networkx.DiGraph(
        (a, b) for a in modules() for b in imports(a, types=True) if b in modules() and "remat" not in (a, b)
    )
    assert [sorted(found) for found in networkx.strongly_connected_components(graph) if len(found) > 1] == []


def test_no_two_classes_have_one_name() -> None:
    """But for the callbacks, which are called what their frameworks' users expect."""
    found = Counter(
        node.name for path in modules().values() for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)
    )
    assert {name for name, count in found.items() if count > 1} == {"RematCallback"}


@pytest.mark.parametrize("room", TORCH_FREE_ROOMS)
def test_what_judges_and_solves_is_free_of_torch(room: str) -> None:
    assert {module for module in modules() if room_of(module) == room and not is_free_of_torch(module)} == set()


def test_what_they_need_of_other_rooms_is_free_of_torch() -> None:
    assert [module for module in TORCH_FREE_MODULES if not is_free_of_torch(module)] == []


@cache
def is_free_of_torch(module: str) -> bool:
    return not imports(module) & {"torch", "transformers"} and all(
        is_free_of_torch(known) for known in imports(module) if known in modules() and known != "remat"
    )


def test_a_training_script_loads_what_executes_plans_and_nothing_that_makes_or_judges_them() -> None:
    refused = [*(f"remat.{room}" for room in NOT_FOR_TRAINING), *HEAVY]
    program = f"import sys, {', '.join(EVERYDAY)}; print(*[name for name in {refused} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout.split()) == (0, []), ran.stdout + ran.stderr


@pytest.mark.parametrize("room", ["commands", "plots"])
def test_only_the_command_line_knows_its_commands_and_plots(room: str) -> None:
    knows = {a for a in modules() for b in imports(a) if b.startswith(f"remat.cli.{room}.")}
    assert {a for a in knows if room_of(a) != "cli"} == set()


def test_every_package_is_installed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    packages = {name for name, path in modules().items() if path.name == "__init__.py"}
    assert sorted(settings["packages"]) == sorted(packages)


@pytest.mark.parametrize("function", ["plan", "profile", "apply", "validate", "remove"])
def test_no_package_hides_a_function_of_the_interface(function: str) -> None:
    assert f"remat.{function}" not in modules()


def test_private_names_stay_in_their_module() -> None:
    taken = [
        (module, f"{node.module}.{alias.name}")
        for module, path in modules().items()
        for node in statements(tree_of(path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("remat")
        for alias in node.names
        if alias.name.startswith("_") and alias.name not in ("_torch", "__version__")
    ]
    assert taken == []


@cache
def torchs_names(module: str) -> frozenset[str]:
    """Names below torch that a module imports or spells out, those that it imports for types only included."""
    tree = tree_of(modules()[module])
    homes, found = {"torch": "torch"}, set()  # what a name in this module stands for
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
            homes |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
            homes |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        path: list[str] = []
        while isinstance(node, ast.Attribute):
            path.insert(0, node.attr)
            node = node.value
        if path and isinstance(node, ast.Name) and node.id in homes:
            found.add(".".join((homes[node.id], *path)))
    return frozenset(name for name in found if name.partition(".")[0] == "torch")


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def is_said_by_torch(name: str) -> bool:
    return any(f"{name}.".startswith(f"{known}.") or known.startswith(f"{name}.") for known in TORCH_SAYS)


def test_torchs_private_names_are_behind_one_door() -> None:
    alone = "remat.costing.kernel_calls"  # runs by itself where this package is not, and asks a GPU to sleep
    taken = {
        (module, name)
        for module in modules()
        if not module.startswith((DOOR, alone))
        for name in torchs_names(module)
        if is_private(name) and not is_said_by_torch(name)
    }
    assert taken == set()


def test_the_door_leads_to_torch_alone() -> None:
    """Everybody may come through it, so it knows nobody."""
    knows = {known for module in modules() if module.startswith(DOOR) for known in imports(module)}
    others = {name for name in knows if name in modules() and not name.startswith(DOOR)}
    assert others == {"remat.errors", "remat.shared"}


def test_the_interface_is_one_list_of_names_that_all_load() -> None:
    import remat

    assert dir(remat) == sorted([*remat.__all__, "__version__"])
    for name in remat.__all__:
        assert getattr(remat, name).__module__ == remat._HOMES[name]  # where a checker of types finds it too
    assert remat.__version__ == importlib.metadata.version("remat")
