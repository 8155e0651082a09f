"""The package's face: every public name is importable, and importing is free."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import chatmill
from chatmill._facade import PUBLIC

HEAVY = ("torch", "transformers", "megatron", "ray", "datasets", "numpy", "gigatoken", "pyarrow", "pydantic")


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_names_are_importable(name: str) -> None:
    assert getattr(chatmill, name) is not None
    assert name in dir(chatmill)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        chatmill.no_such_name  # noqa: B018


def test_no_public_name_is_a_room_of_the_house() -> None:
    """`chatmill.render` is a package: a function of that name would be hidden by importing it."""
    rooms = {path.name.removesuffix(".py") for path in Path(chatmill.__file__).parent.iterdir()}
    assert not rooms & set(PUBLIC)


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert run_python(f"import chatmill, sys; print([m for m in {HEAVY!r} if m in sys.modules])") == "[]"


def test_the_help_of_the_command_line_loads_nothing_heavy() -> None:
    code = f"""
import sys
from chatmill.cli import app
try:
    app(["preview", "--help"], standalone_mode=False)
except SystemExit:
    pass
print([m for m in {HEAVY!r} if m in sys.modules and m != "pydantic"])  # typer itself looks for pydantic
"""
    assert run_python(code).splitlines()[-1] == "[]"


def test_the_whole_face_without_torch_works() -> None:
    """What needs no tensors is importable where torch is not installed."""
    names = sorted(name for name, module in PUBLIC.items() if not module.startswith(("load.", "train.", "megatron")))
    code = f"""
import sys
sys.modules["torch"] = None
import chatmill
for name in {names!r}:
    getattr(chatmill, name)
print("ok")
"""
    assert run_python(code) == "ok"


def test_version_is_the_one_of_the_project() -> None:
    pyproject = Path(__file__).parents[1] / "pyproject.toml"
    assert f'version = "{chatmill.__version__}"' in pyproject.read_text()


def test_types_are_checked_strictly_where_it_was_promised() -> None:
    settings = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    strict = settings[settings.index("[[tool.mypy.overrides]]") :].split("strict = true")[0]
    listed = ast.literal_eval(strict[strict.index("[", strict.index("module")) : strict.rindex("]") + 1])
    assert {f"chatmill.{room}.*" for room in ("core", "render", "label", "pack", "store")} <= set(listed)
