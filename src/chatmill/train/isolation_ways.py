"""The ways in which a model can be called on packed rows: which of them isolate, and the fewest keys that do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from chatmill.load.boundary_keys import BY_TRL, WAYS, Key, Needs
from chatmill.load.collate import DataCollatorForCausalLM
from chatmill.train.isolation import IsolationReport, check_isolation

Features = Sequence[Mapping[str, Any]]
POSITIONS = "position_ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """What came of calling a model in every way."""

    tried: Mapping[str, IsolationReport | str]
    """The report of each way, or the error that it ends with, by its name."""
    smallest: Needs | None
    """The fewest keys besides `position_ids` that isolate; None: nothing does."""
    report: IsolationReport
    """That of the smallest set, or else that of the call with `position_ids`."""

    @property
    def failed(self) -> str:
        """The first error, which as a rule names a kernel that is not installed."""
        return next((outcome for outcome in self.tried.values() if isinstance(outcome, str)), "")

    @property
    def given_by(self) -> list[str]:
        """The collators, and their options, whose batches have the smallest set."""
        if self.smallest is None:
            return []
        keys = self.smallest.keys
        if not keys:
            return ["DataCollatorForCausalLM(tokenizer)"]
        collators = ["DataCollatorForCausalLM(tokenizer, model=model)"]
        if keys <= BY_TRL:
            collators.append("TRL: SFTConfig(padding_free=True), of rows with seq_lengths")
            options = ["return_flash_attn_kwargs=True"] * (Key.CU_SEQ_LENS in keys)
            options += ["return_seq_idx=True"] * (Key.SEQ_IDX in keys)
            collators.append(f"transformers: DataCollatorWithFlattening({', '.join(options)}), of one document a row")
        return collators


def try_ways(model: Any, features: Features, *, max_length: int, max_probes: int = 8) -> Ways:
    """Call `model` on the same packed rows with every set of keys."""
    batches: dict[str, dict[str, Any]] = {}
    needs_by_name: dict[str, Needs] = {}
    for keys in WAYS:
        needs = Needs.of_recurrent(keys)
        name = _name(*(key for key in Key if key in keys))
        batches[name], needs_by_name[name] = collated(model, features, needs, max_length), needs
    tried: dict[str, IsolationReport | str] = {}
    for name, batch in batches.items():
        try:
            tried[name] = check_isolation(model, batch, max_probes=max_probes)
        except (TypeError, ValueError, RuntimeError) as error:
            if name == POSITIONS:
                raise
            tried[name] = f"{type(error).__name__}: {error}"
    isolating = [n for n in needs_by_name if isinstance(outcome := tried[n], IsolationReport) and outcome.passed]
    best = min(isolating, key=lambda name: len(needs_by_name[name].keys), default=None)
    report = tried[best or POSITIONS]
    assert isinstance(report, IsolationReport)
    return Ways(tried=tried, smallest=None if best is None else needs_by_name[best], report=report)


def collated(model: Any, features: Features, needs: Needs, max_length: int) -> dict[str, Any]:
    """Collate rows into a batch with these keys, without labels."""
    config = model.config.get_text_config()
    eos = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
    special = SimpleNamespace(pad_token_id=config.pad_token_id, eos_token_id=eos)
    batch: dict[str, Any] = DataCollatorForCausalLM(special, truncation=True, max_length=max_length, model=needs)(
        features
    )
    del batch["labels"]
    if "attention_mask" in batch:
        floor = torch.finfo(model.dtype).min
        batch["attention_mask"] = batch["attention_mask"].to(model.dtype).clamp(min=floor)
    return batch


def _name(*keys: Key) -> str:
    """Name a way by its keys besides the positions."""
    spoken = {Key.MASK: "4D float mask", Key.CU_SEQ_LENS: "cu_seq_lens_q/k"}
    return "+ " + ", ".join(spoken.get(key, key.value) for key in keys) if keys else POSITIONS
