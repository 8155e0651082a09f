"""Text that spells control tokens is found, and control tokens themselves are not taken for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from chatmill.look.dataset import open_for_looking
from chatmill.look.decoder import Decoder
from chatmill.look.spelled_controls import NEVER_IN_UTF8, spelled_controls, spelled_pattern
from chatmill.look.token_bytes import TokenBytes
from chatmill.store import split as split_module
from chatmill.store.episode_writer import EpisodeWriter
from tests.look.sets import folder, tokenizer_once


@pytest.mark.parametrize("name", ["episodes", "rows"])
@pytest.mark.parametrize("batch", [50, 1 << 20])
def test_what_users_typed_is_counted(name: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_module, "BATCH_TOKENS", batch)
    dataset = open_for_looking(folder() / name)
    assert dataset.decoder is not None
    found = [spelled_controls(split, dataset.decoder) for split in dataset.splits.values()]
    together: dict[str, int] = {}
    for one in found:
        for spelling, count in one.spellings.items():
            together[spelling] = together.get(spelling, 0) + count
    # the user and the assistant say the same: each names both tokens once
    assert together == {"<|im_end|>": 2, "<|im_start|>": 2}
    assert [one.documents for one in found] in ([1, 0], [0, 1])
    place, split = next(
        (one, split) for one, split in zip(found, dataset.splits.values(), strict=True) if one.documents
    )
    item = split.item(place.first_items[0])
    assert "what does <|im_end|> mean?" in dataset.decoder.text(item.ids)


def test_text_does_not_reach_across_documents_or_control_tokens(tmp_path: Path) -> None:
    from chatmill.tokenizer.byte_level import byte_tokenizer

    tokenizer = byte_tokenizer(("<|a|>", "<|b|>"))
    with EpisodeWriter(tmp_path / "set", "train") as writer:
        for ids in (list(b"<|"), list(b"a|>"), [*b"<|", 257, *b"a|>"], [256, 257], list(b"x<|b|><|b|>")):
            writer.append(ids)
    found = spelled_controls(open_for_looking(tmp_path / "set").split(), Decoder(tokenizer))
    assert (found.documents, found.spellings, found.first_items) == (1, {"<|b|>": 2}, [4])


def test_bytes_of_many_ids_at_once() -> None:
    tokenizer = tokenizer_once("o200k", pattern=None)
    text = "Gr\u00fc\u00dfe, \u6c34\u8eca \U0001f642 <|end|>"
    ids = np.array([*tokenizer.encode(text), tokenizer.control("<|end|>"), 10_000_000])
    table = TokenBytes(tokenizer, control=NEVER_IN_UTF8)
    data, starts = table.joined(ids)
    assert data == text.encode() + NEVER_IN_UTF8
    assert table.has(ids).tolist() == [True] * (len(ids) - 1) + [False]
    assert TokenBytes(tokenizer).joined(ids[-2:])[0] == b"<|end|>"
    assert len(starts) == len(ids) + 1
    assert starts[-1] == len(data)


def test_the_longest_spelling_counts() -> None:
    pattern = spelled_pattern(["<|a", "<|a|>", "x"])
    assert pattern is not None
    assert pattern.findall(b"<|a|> <|a x") == [b"<|a|>", b"<|a"]
    assert spelled_pattern(["x"]) is None
