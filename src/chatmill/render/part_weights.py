"""Weights of parts of a message's text, brought to the tokens: they follow characters, as kinds do.

A token has the smallest weight of the characters that it covers: that of a part, or else that of the message. Only
texts next to such parts are looked at; in a batch without them nothing here runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversations import Conversations
from chatmill.core.kinds import REPEATED, RoleCode, roles_of
from chatmill.core.native.document_layout import Layout, Origin
from chatmill.core.native.gather import Pieces
from chatmill.core.part_training import part_error
from chatmill.core.texts import Texts
from chatmill.core.tokens import Tokens, ranges
from chatmill.core.weight_spans import ARGUMENTS, CONTENT, REASONING, WeightSpan
from chatmill.errors import RecordError
from chatmill.render.jinja.expressions import root
from chatmill.render.stretch_table import StretchTable
from chatmill.tokenizer.backends import Encoded
from chatmill.tokenizer.tokenizer import Tokenizer

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Key = tuple[int, str, int]
"""A message, counted in the batch; one of its fields; and the call whose arguments these are."""

FIELDS = {int(Origin.CONTENT): CONTENT, int(Origin.REASONING): REASONING, int(Origin.CALL_ARGUMENTS): ARGUMENTS}
VERBATIM = frozenset({"strip", "lstrip", "rstrip", "removeprefix", "removesuffix", "part", "between", "cut"})
"""Operations that leave of a text one part of it."""


class PartWeights(NamedTuple):
    """Weights of the tokens of a batch."""

    weights: NDArray[np.float32]
    """NaN where no part is near: the message's weight holds."""
    is_mixed: NDArray[np.bool_]
    """Whether a token covers characters of different weights."""
    failed: Mapping[int, RecordError]
    """Conversations whose template does not show a text as it is of which a part has a weight."""


class TextItems(NamedTuple):
    """The texts of a layout, one entry each."""

    lines: Ints
    """Their lines in the table."""
    conversations: Ints
    bases: Ints
    """The message that their stretch counts from."""
    starts: Ints
    """Their first tokens in the batch."""


class _Region(NamedTuple):
    """Neighbouring characters of one weight, from a byte of a piece on up to the next region."""

    text: int
    byte: int
    weight: float


def weigh_parts(
    layout: Layout,
    stretch_table: StretchTable,
    items: TextItems,
    batch: Conversations,
    pieces: Pieces,
    texts: Texts,
    encoded: Encoded,
    tokenizer: Tokenizer,
    count: int,
) -> PartWeights:
    """Return the weights of `count` tokens.

    Args:
        layout: The documents; `items` are its texts.
        stretch_table: What the lines of the items say.
        items: Where each text is.
        batch: The conversations, some of whose messages have spans.
        pieces: The texts as they were put together to be encoded.
        texts: The same as texts.
        encoded: Their tokens.
        tokenizer: The tokenizer that made them.
        count: Tokens of the batch.
    """
    search = _Search(layout, stretch_table, items, batch)
    search.find()
    instances = np.cumsum(layout.opens)  # texts that were encoded together have the same number
    is_near = np.isin(instances, instances[list(search.places)])
    regions = [
        region for text in np.flatnonzero(is_near).tolist() for region in search.regions(text, int(pieces.before[text]))
    ]
    low = np.full(count, np.inf)
    high = np.full(count, -np.inf)
    if regions:
        at = np.array([region.text for region in regions], dtype=np.int64)
        bytes_ = np.array([region.byte for region in regions], dtype=np.int64)
        weights = np.array([region.weight for region in regions], dtype=np.float64)
        numbers = pieces.numbers[at]
        points = tokenizer.byte_points(encoded, numbers, bytes_, texts)
        is_inside = tokenizer.inside_tokens(encoded, numbers, bytes_, points, texts)
        is_last = np.append(np.diff(instances[at]) != 0, True)
        ends = np.where(is_last, encoded[1][numbers + 1], np.append(points[1:], 0))
        # Equal pieces are encoded once: their tokens are counted from where this one begins in the batch.
        opening = np.flatnonzero(np.append(True, layout.opens[1:])[: len(instances)])
        first = opening[np.searchsorted(opening, at, side="right") - 1]
        shift = items.starts[first] - encoded[1][numbers]
        own = ranges(points + shift, ends - points)
        before = (points + shift - 1)[is_inside]
        which = np.concatenate([own, before])
        values = np.concatenate([np.repeat(weights, ends - points), weights[is_inside]])
        np.minimum.at(low, which, values)
        np.maximum.at(high, which, values)
    found = np.where(np.isfinite(low), low, np.nan).astype(np.float32)
    return PartWeights(found, high > low, search.failed)


class _Search:
    """Looks for the texts of which a part has a weight."""

    def __init__(self, layout: Layout, stretch_table: StretchTable, items: TextItems, batch: Conversations) -> None:
        self._layout, self._table, self._items, self._batch = layout, stretch_table, items, batch
        lines = stretch_table.table.items[items.lines]
        self._origins, self._operations = lines["origin"], lines["operations"]
        self._messages = batch.offsets[items.conversations] + items.bases + lines["message"]
        self._calls, self._expressions = lines["call"], lines["expression"]
        self._owners = np.where(lines["owner"] < -(1 << 29), -1, batch.offsets[items.conversations] + items.bases)
        self._owners = np.where(self._owners < 0, -1, self._owners + lines["owner"])
        self._spans: dict[Key, list[WeightSpan]] = {}
        for message in batch.messages.with_spans.tolist():
            if batch.messages.weights[message] != 0:
                for span in batch.messages.spans[message]:
                    self._spans.setdefault((message, span.field, span.call), []).append(span)
        self.places: dict[int, tuple[Key, int, str]] = {}
        """For each text with weights its field, where it begins in that, and the text."""
        self.failed: dict[int, RecordError] = {}
        self._shown: dict[Key, list[tuple[int, int]]] = {}

    def find(self) -> None:
        """Find all of them; a record whose text is shown in another way has an error."""
        messages = np.unique(np.array([message for message, _, _ in self._spans], dtype=np.int64))
        is_near = np.isin(self._messages, messages) | (self._origins == Origin.COMPUTED)
        for text in np.flatnonzero(is_near).tolist():
            key = self._key(text)
            if key in self._spans:
                self._locate(text, key)
        for key, spans in self._spans.items():
            self._check_shown(key, spans)

    def _key(self, text: int) -> Key | None:
        """Return the field that a text is from."""
        origin, message = int(self._origins[text]), int(self._messages[text])
        if origin in FIELDS:
            return message, FIELDS[origin], int(self._calls[text]) if origin == Origin.CALL_ARGUMENTS else 0
        if origin != Origin.COMPUTED:
            return None
        path = root(self._table.expressions[int(self._expressions[text])])
        if isinstance(path[0], str) or path[1:2] != ("call",) or path[3:4] != ("arguments",):
            return None
        return message + int(path[0]), ARGUMENTS, int(path[2])

    def _locate(self, text: int, key: Key) -> None:
        """Find where a text begins in its field, which must have it once."""
        layout, field = self._layout, self._field(key)
        start = int(layout.text_starts[text])
        raw = layout.buffers[int(layout.which[text])][start : start + int(layout.text_sizes[text])]
        shown = raw.tobytes().decode()
        if not shown:
            return
        operations = self._table.operations[int(self._operations[text])]
        is_verbatim = self._origins[text] != Origin.COMPUTED and all(name in VERBATIM for name, _ in operations)
        place = field.find(shown) if is_verbatim else -1
        if place < 0 or field.find(shown, place + 1) >= 0:
            self._refuse(key, "the template does not show it as it is")
            return
        self.places[text] = key, place, shown
        self._shown.setdefault(key, []).append((place, place + len(shown)))

    def _field(self, key: Key) -> str:
        message, name, call = key
        messages = self._batch.messages
        if name == ARGUMENTS:
            first, end = messages.call_offsets[message : message + 2].tolist()
            return messages.call_arguments[first + call] if first + call < end else ""
        return messages.contents[message] if name == CONTENT else messages.reasoning[message]

    def _check_shown(self, key: Key, spans: Sequence[WeightSpan]) -> None:
        """Refuse a record of which no document shows a text that has a weight, white space apart."""
        field, shown = self._field(key), sorted(self._shown.get(key, ()))
        for span in spans:
            if span.end > len(field):
                self._refuse(key, "a repair or a history rule has changed it")
                continue
            at = span.begin
            for begin, end in [*shown, (len(field), len(field))]:
                if field[at : min(begin, span.end)].strip():
                    self._refuse(key, "the template leaves a part of it out")
                at = max(at, end)

    def _refuse(self, key: Key, reason: str) -> None:
        message, name, call = key
        conversation = int(self._batch.owners(np.array([message]))[0])
        where = f"tool_calls[{call}].function.arguments" if name == ARGUMENTS else name
        path = f"messages[{message - int(self._batch.offsets[conversation])}].{where}"
        sentence = (
            f"parts of this text have weights, and {reason}: weights follow characters. Choose a template that shows "
            "it, put the parts into messages of their own, or take their 'train' and 'weight' away"
        )
        self.failed.setdefault(conversation, part_error(sentence, path))

    def regions(self, text: int, before: int) -> list[_Region]:
        """Return the regions of a text, which has so many bytes of its piece before it."""
        own = self._message_weight(int(self._owners[text]))
        if text not in self.places:
            return [_Region(text, before, own)]
        key, place, shown = self.places[text]
        regions: list[_Region] = []
        at = 0
        for span in self._spans[key]:
            begin, end = (min(max(edge - place, 0), len(shown)) for edge in (span.begin, span.end))
            if begin >= end:
                continue
            if at < begin:
                regions.append(_Region(text, at, own))
            regions.append(_Region(text, begin, span.weight))
            at = end
        if at < len(shown):
            regions.append(_Region(text, at, own))
        return [region._replace(byte=before + len(shown[: region.byte].encode())) for region in regions]

    def _message_weight(self, message: int) -> float:
        """Return what text around parts weighs: as its message says, else 1."""
        weight = float(self._batch.messages.weights[message]) if message >= 0 else 1.0
        return 1.0 if weight != weight else weight


def split_runs(tokens: Tokens) -> Tokens:
    """Cut runs where the weights of parts change."""
    weights = tokens.part_weights
    if weights is None:
        return tokens
    is_same = (weights[1:] == weights[:-1]) | (np.isnan(weights[1:]) & np.isnan(weights[:-1]))
    cuts = np.setdiff1d(np.flatnonzero(~is_same) + 1, tokens.run_offsets)
    cut_runs = np.searchsorted(tokens.run_offsets, cuts, side="right") - 1
    starts = np.concatenate([tokens.run_offsets[:-1], cuts])
    order = np.argsort(starts, kind="stable")
    runs = np.concatenate([np.arange(len(tokens.run_kinds)), cut_runs])[order]
    run_offsets = np.append(starts[order], tokens.run_offsets[-1])
    return replace(
        tokens,
        run_offsets=run_offsets,
        run_kinds=tokens.run_kinds[runs],
        run_messages=tokens.run_messages[runs],
        document_runs=tokens.document_runs + np.searchsorted(cut_runs, tokens.document_runs, side="left"),
    )


def flag_context(tokens: Tokens) -> Tokens:
    """Flag parts of answers that have weight 0 as context.

    A policy that is chosen when a dataset is loaded knows the kinds alone.
    """
    weights = tokens.part_weights
    if weights is None:
        return tokens
    is_filled = tokens.run_lengths > 0
    is_context = np.zeros(len(is_filled), dtype=np.bool_)
    is_context[is_filled] = weights[tokens.run_offsets[:-1][is_filled]] == 0
    is_context &= roles_of(tokens.run_kinds) == RoleCode.ASSISTANT
    kinds = np.where(is_context, tokens.run_kinds | np.uint8(REPEATED), tokens.run_kinds)
    return replace(tokens, run_kinds=kinds)
