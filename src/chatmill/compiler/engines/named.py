"""The engine of a name, as commands and functions take it."""

from __future__ import annotations

from chatmill.compiler.engines.jobs import Executor
from chatmill.errors import ConfigError, UnknownNameError

ENGINES = ("local", "ray")


def named_executor(engine: str, workers: int | None = None, address: str | None = None) -> Executor | None:
    """The engine of a name; None for the local one, which every build makes for itself."""
    if engine not in ENGINES:
        raise UnknownNameError("engine", engine, list(ENGINES))
    if engine == "local":
        if address is not None:
            raise ConfigError(f"the Ray cluster {address} would not be used: choose the engine ray (--engine ray) too")
        return None
    from chatmill.compiler.engines.ray_engine import RayExecutor

    return RayExecutor(address, workers=workers)
