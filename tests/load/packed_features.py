"""Packed rows for the tests of the collator."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from chatmill.load.collate import (
    DataCollatorForCausalLM,
)

EOS = 2


class Special:
    """As many base tokenizers: one id ends documents and pads rows."""

    eos_token_id = pad_token_id = EOS


PACKED = [
    {"input_ids": [5, 6, EOS, 7, EOS], "document_starts": [0, 3]},
    {"input_ids": [9, 8, EOS], "document_starts": [0]},
]


def collate(features: list[dict[str, Any]], tokenizer: Any = None, **options: Any) -> Any:
    return DataCollatorForCausalLM(tokenizer or Special(), **options)(features)


def lists(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch as lists; `use_cache`, which comes with position ids and nowhere else, is looked at and left out."""
    assert batch.get("use_cache") is (False if "position_ids" in batch else None)
    return {name: value.tolist() for name, value in batch.items() if name != "use_cache"}


@st.composite
def feature_lists(draw: st.DrawFn) -> list[dict[str, Any]]:
    features = []
    for lengths in draw(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4)):
        ids = draw(st.lists(st.integers(0, 4), min_size=sum(lengths), max_size=sum(lengths)))
        starts = [sum(lengths[:d]) for d in range(len(lengths))]
        mask = draw(st.lists(st.integers(0, 1), min_size=len(ids), max_size=len(ids)))
        features.append({"input_ids": ids, "document_starts": starts, "loss_mask": mask})
    return features


# ---- packed_sequences


def without_starts(features: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in feature.items() if k != "document_starts"} for feature in features]
