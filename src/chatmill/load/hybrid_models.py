"""Models with recurrent layers, by their config: what batches must hold for them, before the model is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from chatmill.core.json_files import read_object
from chatmill.errors import ConfigError
from chatmill.load.boundary_keys import BY_TRL, HYBRIDS, Needs, is_hybrid, one_document_a_row, text_config


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridModel:
    """A model whose layers carry a state from token to token."""

    kind: str
    """Its `model_type`."""
    needs: Needs | None
    """What its batches hold; None: nothing keeps documents apart, or it is not known what does."""

    @property
    def is_known(self) -> bool:
        """Whether what isolates it has been measured."""
        return self.kind in HYBRIDS

    @property
    def is_by_trl(self) -> bool:
        """Whether batches of TRL hold all that it reads."""
        return self.needs is not None and self.needs.keys <= BY_TRL

    def refuse_packed(self) -> None:
        """`ConfigError` if nothing keeps documents of a row apart in it."""
        if self.is_known and self.needs is None:
            raise ConfigError(one_document_a_row(SimpleNamespace(model_type=self.kind)))


def hybrid_model(model: Any) -> HybridModel | None:
    """The hybrid that a folder's config.json, a config or a loaded model says it is; None: it is none, or says nothing.

    Nothing is tried: see `needs_of` for that.
    """
    if isinstance(model, str | os.PathLike):
        path = Path(model) / "config.json"
        if not path.is_file():
            return None
        said = read_object(path, ConfigError)
        model = SimpleNamespace(**{**said, **(said.get("text_config") or {})})
    if not is_hybrid(model):
        return None
    kind = str(getattr(text_config(model), "model_type", "the model"))
    keys = HYBRIDS.get(kind)
    return HybridModel(kind=kind, needs=None if keys is None else Needs.of_recurrent(keys))
