"""Builds: recipes, chunks, engines, the joined dataset and its receipt. The package itself is callable.

`chatmill.build(recipe, out, ...)` is `chatmill.build.run.run_build`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    """A package that can be called: the name of the room is also the name of its main job."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        from chatmill.build.run import run_build

        return run_build(*arguments, **options)


sys.modules[__name__].__class__ = _CallableModule
