"""The ways in which a model can be called on packed rows: which of them isolate, and the fewest keys that do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from chatmill.load.boundary_keys import WAYS, Key, Needs
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


def try_ways(model: Any, features: Features, *, max_length: int, max_probes: int = 8) -> Ways:
    """Call `model` on the same packed rows with every set of keys."""
    tried: dict[str, IsolationReport | str] = {}
    isolating: list[tuple[Needs, IsolationReport]] = []
    for keys in WAYS:
        needs, name = Needs.of_recurrent(keys), _name(*(key for key in Key if key in keys))
        try:
            report = check_isolation(model, collated(model, features, needs, max_length), max_probes=max_probes)
        except (TypeError, ValueError, RuntimeError) as error:
            if name == POSITIONS:
                raise
            tried[name] = f"{type(error).__name__}: {error}"
        else:
            tried[name] = report
            isolating += [(needs, report)] * report.passed
    smallest, shown = min(isolating, key=lambda way: len(way[0].keys), default=(None, tried[POSITIONS]))
    assert isinstance(shown, IsolationReport)
    return Ways(tried=tried, smallest=smallest, report=shown)


def collated(model: Any, features: Features, needs: Needs, max_length: int) -> dict[str, Any]:
    """Collate rows into a batch with these keys, without labels."""
    config = model.config.get_text_config()
    eos = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
    special = SimpleNamespace(pad_token_id=config.pad_token_id, eos_token_id=eos)
    collator = DataCollatorForCausalLM(special, truncation=True, max_length=max_length, model=needs)
    batch: dict[str, Any] = collator(features)
    del batch["labels"]
    if "attention_mask" in batch:
        floor = torch.finfo(model.dtype).min
        batch["attention_mask"] = batch["attention_mask"].to(model.dtype).clamp(min=floor)
    return batch


def _name(*keys: Key) -> str:
    """Name a way by its keys besides the positions."""
    spoken = {Key.MASK: "4D float mask", Key.CU_SEQ_LENS: "cu_seq_lens_q/k"}
    return "+ " + ", ".join(spoken.get(key, key.value) for key in keys) if keys else POSITIONS
