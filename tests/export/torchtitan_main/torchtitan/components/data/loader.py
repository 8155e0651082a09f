"""The base of data loaders."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torchtitan.config import Configurable


class BaseDataLoader(ABC, Configurable):
    """What the trainer reads batches from, and whose state is in its checkpoints."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Base of the configs of data loaders."""

    @abstractmethod
    def __iter__(self) -> Iterator[Any]: ...

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    @abstractmethod
    def close(self) -> None: ...
