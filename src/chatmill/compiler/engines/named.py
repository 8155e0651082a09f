"""The engine of a name, as commands and functions take it."""

from __future__ import annotations

from chatmill.compiler.engines.jobs import Executor
from chatmill.errors import UnknownNameError

ENGINES = ("local", "ray")


def named_executor(engine: str, workers: int | None = None) -> Executor | None:
    """The engine of a name; None for the local one, which every build makes for itself."""
    if engine not in ENGINES:
        raise UnknownNameError("engine", engine, list(ENGINES))
    if engine == "local":
        return None
    from chatmill.compiler.engines.ray_engine import RayExecutor

    return RayExecutor(workers=workers)
