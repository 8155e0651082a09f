"""Checks of sets for models with recurrent layers: what batches must hold beside positions, and padding on the left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from chatmill.auditor.findings import Found
from chatmill.auditor.tokenized import TokenizedSet
from chatmill.core.json_files import read_object
from chatmill.errors import ConfigError
from chatmill.load.boundary_keys import HYBRIDS, Needs, is_hybrid
from chatmill.tokenizer.hub_cache import model_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridModel:
    """A model whose layers carry a state from token to token, by its config.json."""

    kind: str
    needs: Needs | None
    """What its batches hold; None: nothing keeps documents apart, or it is not known what does."""

    def check(self, data: TokenizedSet) -> Iterator[Found]:
        """Batches without the keys that the model reads, rows that nothing keeps apart, and padding on the left."""
        filled = np.unique(data.row_of(np.flatnonzero(~data.padding)))
        left = filled[data.padding[data.offsets[filled]]]
        yield Found("padding_left", data.offsets[:-1][left], data.offsets[:-1][left] + 1, len(data))
        rows = data.packed_rows
        missing = self.missing(data)
        if self.kind in HYBRIDS and self.needs is None:
            detail = f"Nothing keeps documents apart in {self.kind}: one document a row (--pack alone)"
        elif missing and data.batch_keys is not None:
            detail = f"{self.kind} reads {', '.join(missing)} too, and the batches do not have it"
        else:
            return
        yield Found("keys_missing", data.offsets[:-1][rows], data.offsets[1:][rows], len(data), detail)

    def missing(self, data: TokenizedSet) -> list[str]:
        """The keys that the model reads and the set does not have."""
        return [] if self.needs is None else [name for name in self.needs.names if name not in (data.batch_keys or ())]

    def unknown(self, data: TokenizedSet) -> str:
        """What is to be known of packed rows that are stored, and so have no keys yet."""
        if self.needs is not None and data.batch_keys is None:
            return (
                f"Whether the trainer gives {self.kind}, which has recurrent layers, all it reads beside position_ids: "
                f"{', '.join(self.missing(data))}. DataCollatorForCausalLM(tokenizer, model=model) does"
            )
        if self.kind not in HYBRIDS:
            return (
                f"What keeps documents apart in the recurrent layers of {self.kind}: `chatmill isolate MODEL` shows it"
            )
        return ""


def hybrid_model(model: Any) -> HybridModel | None:
    """The model of a folder, where its config.json says that it has recurrent layers."""
    path = model_folder(model) / "config.json" if isinstance(model, str | Path) else None
    if path is None or not path.is_file():
        return None
    said = read_object(path, ConfigError)
    config = SimpleNamespace(**{**said, **(said.get("text_config") or {})})
    if not is_hybrid(config):
        return None
    kind = str(getattr(config, "model_type", "the model"))
    keys = HYBRIDS.get(kind)
    return HybridModel(kind=kind, needs=None if keys is None else Needs.of_recurrent(keys))
