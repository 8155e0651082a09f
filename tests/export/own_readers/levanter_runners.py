"""Stands in for the runners of cluster jobs that Levanter imports, and that its data classes do not use."""

import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any


class Anything:
    """Stands for whatever is imported from the runners of cluster jobs."""

    def __init__(self, *_: Any, **__: Any) -> None: ...


class Runners(MetaPathFinder, Loader):
    """Levanter imports the runners of its cluster jobs, which start servers; its reader does not use them."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in ("fray", "zephyr", "iris") else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return types.ModuleType(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__getattr__ = lambda name: type(name, (Anything,), {})  # type: ignore[method-assign]


def stand_in_for_runners() -> None:
    """Let Levanter be imported without them; transformers is to be imported before, which this confuses."""
    sys.meta_path.insert(0, Runners())
