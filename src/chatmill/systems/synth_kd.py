"""The rules of the Harmony distillation dataset (SYNTH KD v1), and its slow, exact reference: one row at a time.

A row is a JSON text with a `messages` list of Harmony message dicts. It becomes the ids of the official training render
with one EOD after them, and a *token-aligned* span id for each: 1 for assistant tokens of the analysis channel with
their wrappers, 2 for those of the final channel, 0 for all else. A token is trained where its span is not 0.
"""

from __future__ import annotations

import os
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.harmony_ids import EOD, START
from chatmill.core.hash_shares import hash_limit, hash_of
from chatmill.errors import ConfigError, RecordError, need
from chatmill.read.synth_rows import SPANS, checked_messages
from chatmill.render.official_harmony import encoding, render_training
from chatmill.tokenizer.assets import O200K_FILE, PROJECT_COPY, find_o200k

FLAGS = {"encoding": "HARMONY_GPT_OSS", "render": "training", "auto_drop_analysis": False}
"""How the official library renders."""
SPLIT_RULE = (
    'valid if int.from_bytes(blake2b(synth_id utf-8, digest_size=8), "big") '
    "< int(Decimal(str(valid_fraction)) * 2**64), else train"
)
BUNDLED = f"chatmill:{O200K_FILE}"
"""What a manifest says for the vocabulary file that comes with the package."""


class KDSplit(StrEnum):
    """The two parts of the dataset."""

    TRAIN = "train"
    VALID = "valid"


class RenderedRow(NamedTuple):
    """One row: ids with their EOD, and a token-aligned span id for each."""

    ids: NDArray[np.int32]
    spans: NDArray[np.uint8]


def valid_threshold(valid_fraction: float) -> int:
    """Return the number below which the hash of a `synth_id` puts its row into `valid`: 0 to 2**64."""
    fraction = Decimal(str(valid_fraction))
    if fraction.is_nan() or not 0 <= fraction <= 1:
        raise ConfigError(f"valid_fraction is {valid_fraction}; it must be from 0 to 1")
    return hash_limit(valid_fraction)


def synth_kd_split(synth_id: str, valid_fraction: float = 0.001) -> KDSplit:
    """Return the split of a row: a pure function of its id."""
    return KDSplit.VALID if is_valid(synth_id.encode(), valid_threshold(valid_fraction)) else KDSplit.TRAIN


def is_valid(synth_id: bytes, threshold: int) -> bool:
    """Return whether the row with this id, in UTF-8, is in `valid`."""
    return hash_of(synth_id) < threshold


def vocabulary_file(path: str | os.PathLike[str] | None = None) -> tuple[Path, str]:
    """Find the checked o200k file, and its name as the caller, the environment, the project or the package gave it."""
    file = find_o200k(path)
    named = path or os.environ.get("O200K_HARMONY_VOCAB_PATH") or os.environ.get("TIKTOKEN_ENCODINGS_BASE")
    return file, str(file) if named or file == PROJECT_COPY else BUNDLED


class OfficialRows:
    """Renders rows with openai-harmony, one at a time: the reference, the audit, and the way for unusual rows."""

    def __init__(self, vocabulary: Path) -> None:
        """`vocabulary` is a checked o200k file."""
        need("openai_harmony", "the official render of Harmony")
        self._vocabulary = vocabulary
        encoding(vocabulary)

    def render(self, row: str | None) -> RenderedRow:
        """Return one row; what the rules or the renderer refuse is a `RecordError` without a place."""
        messages = checked_messages(row)
        ids = np.array([*render_training(messages, self._vocabulary), EOD], dtype=np.int32)
        starts = np.flatnonzero(ids == START)  # text never becomes a control id, so there is one for each message
        if len(starts) != len(messages) or starts[0] != 0:
            message = f"{len(messages)} messages, but {len(starts)} <|start|> tokens in their render"
            raise RecordError(message, code="harmony_refused")
        lengths = np.diff(np.append(starts, len(ids) - 1))
        spans = np.zeros(len(ids), dtype=np.uint8)
        numbers = [SPANS[m["channel"]] if m["role"] == "assistant" else 0 for m in messages]
        spans[:-1] = np.repeat(np.array(numbers, dtype=np.uint8), lengths)
        return RenderedRow(ids, spans)
