"""`data.to_parquet("out")`: every format of `chatmill export --to`, by its name."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chatmill.export.export import ExportResult


class Exports(ABC):
    """A dataset that can be written in the format of a trainer."""

    @abstractmethod
    def export(self, to: str, out: str | os.PathLike[str], **options: Any) -> ExportResult:
        """Write it as `to`, a name of `chatmill export --to`."""

    if not TYPE_CHECKING:  # else every attribute would seem to be there

        def __getattr__(self, name: str) -> Any:
            """`to_NAME(out, ...)` is `export("NAME", out, ...)`; a hyphen of the name is `_` here."""
            if name.startswith("to_"):
                from chatmill.export.registry import TARGETS

                for known in TARGETS:
                    if known.replace("-", "_") == name[3:]:
                        return partial(self.export, known)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
