"""What a model needs to keep packed documents apart, by its config: before it is loaded, too."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from chatmill.core.json_files import read_object
from chatmill.errors import ConfigError, UnknownNameError
from chatmill.load.boundary_keys import (
    BY_TRL,
    HYBRIDS,
    WINDOWS,
    Key,
    Needs,
    is_hybrid,
    layer_kinds,
    one_document_a_row,
    text_config,
)

NO_TREES = (
    "rows of trees need a mask that says what each token sees, and this model takes none from a batch: FlashAttention "
    "reads lengths of documents, layers with a window or with a state from token to token have rules of their own. "
    "Load it with attn_implementation='flex_attention' (or 'sdpa') if that is all, else build with --expand turns, or "
    "export with --trees expand"
)
ATTENTIONS = {"eager": Key.MASK, "sdpa": Key.MASK, "flex_attention": Key.BLOCK_MASK}


def needs_of(model: Any) -> Needs | None:
    """Find what a model needs; `model` is a transformers model, its config, or the name of an attention implementation.

    None if nothing keeps documents apart. An unknown model with recurrent layers is refused. `Needs` are returned
    unchanged.
    """
    if isinstance(model, Needs):
        return model
    config = getattr(model, "config", model)
    name = config if isinstance(config, str) else getattr(config, "_attn_implementation", None)
    key = Key.CU_SEQ_LENS if "flash" in str(name) else ATTENTIONS.get(str(name))
    if key is None:
        raise UnknownNameError("attention of the model", name, [*ATTENTIONS, "flash_attention_2", "flash_attention_3"])
    if not isinstance(config, str) and is_hybrid(model):
        needs = _hybrid_needs(model)
        if needs is None or key is Key.MASK:
            return needs
        read = {key} if key is Key.CU_SEQ_LENS or Key.MASK in needs.keys else set()
        return replace(needs, keys=needs.keys - {Key.MASK} | read)
    made_by_transformers = key is not Key.CU_SEQ_LENS and _has_windows(config)
    return Needs(keys=frozenset() if made_by_transformers else frozenset({key}))


def reads_trees(model: Any) -> bool:
    """Return whether a model can read rows of trees; `model` as for `needs_of`."""
    needs = None if is_hybrid(model) else needs_of(model)
    return needs is not None and needs.keys in (frozenset({Key.MASK}), frozenset({Key.BLOCK_MASK}))


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
    """Find the hybrid that a folder's config.json, a config or a model says it is; None: it says nothing of one."""
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


def _hybrid_needs(model: Any) -> Needs | None:
    kind = getattr(text_config(model), "model_type", None)
    if kind in HYBRIDS:
        keys = HYBRIDS[kind]
        return None if keys is None else Needs.of_recurrent(keys)
    raise ConfigError(
        f"{kind or type(model).__name__} has layers that may carry a state from one document to the next, and the keys "
        "that keep documents apart in it are not known here. chatmill isolate MODEL tries all sets of them "
        "(--reference-kernels where the fast kernels are not installed): pass the smallest as model=Needs(keys=...) of "
        "chatmill.load.boundary_keys. Or put one document into a row, and pass packed_sequences=False"
    )


def _has_windows(config: Any) -> bool:
    """Return whether some layers see a window only: one mask for all layers would undo it."""
    if isinstance(config, str):
        return False
    text = text_config(config)
    if layer_kinds(text):
        return bool(layer_kinds(text) & WINDOWS)
    return getattr(text, "sliding_window", None) is not None and getattr(text, "use_sliding_window", True)
