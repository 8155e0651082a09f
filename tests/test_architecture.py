"""The floors of the house: which room may import which, and where torch may be imported."""

from __future__ import annotations

import ast
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import chatmill

ROOT = Path(chatmill.__file__).parent

FLOORS = (
    {"errors", "_facade"},
    {"__init__", "structs", "yaml_files", "core"},
    {"console", "json_values"},
    {"files", "tokenizer", "label", "pack", "images"},
    {"read", "store"},
    {"render"},
    {"load"},
    {"systems"},
    {"look", "train", "torchtitan", "rollouts", "capture"},
    {"megatron"},
    {"compiler"},
    {"prove"},
    {"auditor", "export"},
    {"dataset", "distill", "trainers"},
    {"cli"},
    {"__main__"},
)
"""From the ground up: a room imports from the floors below its own, and nothing from its own floor or from above."""
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
TORCH_ROOMS = {"train", "trainers", "megatron", "torchtitan"}
TORCH_FILES = {"load/collate.py", "load/reference_kernels.py"}
CORE_ONLY = {"numpy", "xxhash"}


def room_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return relative.parts[0].removesuffix(".py")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imported_modules(path: Path) -> list[tuple[str, bool]]:
    """(module, at import time) of every import in a file; `if TYPE_CHECKING` and functions are not import time."""
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, top: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend((alias.name, top) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: imports are absolute"
                names = [f"{child.module}.{a.name}" for a in child.names] if child.module == "chatmill" else []
                found.extend((name, top) for name in names or [child.module or ""])
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                visit(child, False)
            else:
                visit(child, top and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    visit(tree_of(path), True)
    return found


FILES = sorted(ROOT.rglob("*.py"))


def test_a_room_imports_only_the_floors_below() -> None:
    for path in FILES:
        room = room_of(path)
        for module, _ in imported_modules(path):
            if module.split(".")[0] == "chatmill" and module != "chatmill":
                target = module.split(".")[1]
                target = target if target in FLOOR_OF else "__init__"
                words = f"{path.relative_to(ROOT)} imports {module}, which is not on a floor below {room}: see FLOORS"
                assert target == room or FLOOR_OF[target] < FLOOR_OF[room], words


def test_torch_stays_below_the_collator() -> None:
    for path in FILES:
        relative = str(path.relative_to(ROOT))
        if room_of(path) not in TORCH_ROOMS and relative not in TORCH_FILES:
            tops = {module.split(".")[0] for module, at_import in imported_modules(path) if at_import}
            assert not tops & {"torch", "torchdata"}, f"{relative} imports torch at import time"


def test_core_needs_numpy_hashes_and_the_standard_library_alone() -> None:
    for path in (path for path in FILES if room_of(path) == "core"):
        tops = {module.split(".")[0] for module, _ in imported_modules(path)}
        assert tops <= sys.stdlib_module_names | CORE_ONLY | {"chatmill"}, f"{path.name} imports {tops}"


def test_files_of_a_room_import_each_other_in_no_circle() -> None:
    graph: dict[str, set[str]] = {}
    for path in FILES:
        name = ".".join(("chatmill", *path.relative_to(ROOT).with_suffix("").parts))
        own = f"chatmill.{room_of(path)}."
        graph[name] = {module for module, _ in imported_modules(path) if module.startswith(own)}
    TopologicalSorter(graph).prepare()


def test_no_class_has_the_name_of_one_in_another_room() -> None:
    rooms: dict[str, set[str]] = {}
    for path in FILES:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                rooms.setdefault(node.name, set()).add(room_of(path))
    # spec 10 fixes the name of what sampled ids say; render has the place of an answer in a rendering
    shared = {"Answer": {"render", "rollouts"}}
    assert [(name, where) for name, where in rooms.items() if len(where) > 1 and where != shared.get(name)] == []


KNOW_OF_REMOTE_DATASETS = {
    "cli/options.py": "commands print URLs in place of folders of the cache",
    "compiler/chunk_shards.py": "a worker uploads its shards",
    "compiler/finish.py": "what the driver knows of a build is handed to its chunks",
    "compiler/run.py": "the output of a build is a folder or a URL",
    "compiler/scan_jobs.py": "workers that share no folder write spools in one of their own",
    "load/windows.py": "shards are fetched before their rows are needed",
    "store/episode_layout.py": "the address of a dataset is a folder or a URL",
    "store/mapped.py": "a file is fetched before it is mapped",
}
"""Outside of `files`: each with its reason. Ten at most."""


def names_remote_datasets(path: Path) -> bool:
    """Return whether a file imports a module that knows of them."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom):
            modules = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            if modules & {"chatmill.files.remote", "chatmill.files.builds", "chatmill.files.cache"}:
                return True
    return False


def test_few_places_know_that_a_dataset_may_be_remote() -> None:
    found = {
        path.relative_to(ROOT).as_posix() for path in FILES if room_of(path) != "files" and names_remote_datasets(path)
    }
    assert found == set(KNOW_OF_REMOTE_DATASETS)
    assert len(found) <= 10
