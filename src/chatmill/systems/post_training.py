"""Marker transcripts: written from conversations, encoded to records of ids, packed into the stream.

A transcript is spans of `<|SYSTEM|>`, `<|USER|>` or `<|ASSISTANT|>`, text and `<|END|>`; `<|EOS|>` ends a
conversation. Each marker is one id; the text of a span is verbatim and never becomes a control token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import compress, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversation import Conversation, Message, Role
from chatmill.core.message_parser import parse_messages
from chatmill.core.tokens import offsets_of
from chatmill.errors import ConfigError, DataError, RecordError
from chatmill.pack.stream import PackedStream, pack_post_training_stream
from chatmill.tokenizer.foreign import AnyTokenizer
from chatmill.tokenizer.load import with_control_tokens

SYSTEM, USER, ASSISTANT, END, EOS = "<|SYSTEM|>", "<|USER|>", "<|ASSISTANT|>", "<|END|>", "<|EOS|>"
MARKERS = (SYSTEM, USER, ASSISTANT, END, EOS)
"""All control tokens of the format, in the order in which a tokenizer that lacks them gets them."""
_KEYWORDS = ("system_id", "user_id", "assistant_id", "end_id", "eos_id")
"""What functions call their ids, in the same order."""

_NAMES = dict(zip(MARKERS, MARKERS, strict=True))
_PATTERN = re.compile("(" + "|".join(map(re.escape, MARKERS)) + ")")
_OPENING: Mapping[Role, str] = {
    Role.SYSTEM: SYSTEM,
    Role.USER: USER,
    Role.ASSISTANT: ASSISTANT,
}
_MARKERS_OF_A_SPAN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedTranscripts:
    """Token ids of R transcripts in one flat array; an eos is only where a transcript spells it."""

    ids: NDArray[np.int64]
    offsets: NDArray[np.int64]
    """R + 1 offsets into `ids`."""
    markers: dict[str, int]
    """The five ids under the names that the mask and the packer take: `post_training_loss_mask(ids, **markers)`."""
    tokenizer: Any
    """The tokenizer given or, where that lacked markers, the one they were added to."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def records(self) -> list[NDArray[np.int64]]:
        """One array (a view) per transcript, for `pack_post_training_stream`."""
        return np.split(self.ids, self.offsets[1:-1]) if len(self) else []


def _with_markers(tokenizer: Any) -> tuple[AnyTokenizer, dict[str, int]]:
    """The tokenizer and its ids by marker; a Chatmill tokenizer that lacks some is replaced by one that has them."""
    encoder = AnyTokenizer(tokenizer)
    if not encoder.is_foreign:
        encoder = AnyTokenizer(with_control_tokens(tokenizer, MARKERS))
    return encoder, encoder.marker_ids(_NAMES)


def encode_transcripts(transcripts: Iterable[str], *, tokenizer: Any, places: Sequence[str] = ()) -> EncodedTranscripts:
    """Encode transcripts: markers to their ids, spans as text, white space between spans dropped.

    A Chatmill tokenizer that lacks markers gets them above its vocabulary; any other object must have them.
    `places` names the transcripts in errors (file and line, say); without it they are counted from 0.
    """
    encoder, ids_of = _with_markers(tokenizer)
    split = [_PATTERN.split(transcript) for transcript in transcripts]
    names = [name for parts in split for name in parts[1::2]]
    behind = [text for parts in split for text in parts[2::2]]
    marker_ids = np.fromiter(map(ids_of.__getitem__, names), dtype=np.int64, count=len(names))
    is_opening = np.isin(marker_ids, [ids_of[name] for name in _OPENING.values()])
    outside = compress(behind, (~is_opening).tolist())
    if any(map(str.strip, outside)) or any(parts[0].strip() for parts in split):
        raise _outside_error(split, places)
    firsts = offsets_of(np.array([len(parts) // 2 for parts in split], dtype=np.int64))
    owners = np.flatnonzero(is_opening)
    text_ids, text_offsets = encoder.encode(list(compress(behind, is_opening.tolist())))
    control = encoder.first_control(text_ids, text_offsets, _NAMES)
    if control is not None:
        number = int(np.searchsorted(firsts, owners[control[0]], side="right")) - 1
        span = int(is_opening[firsts[number] : owners[control[0]]].sum())
        raise DataError(f"{_place(places, number)}, message {span}: {control[1]}")
    widths = np.ones(len(marker_ids), dtype=np.int64)
    widths[owners] += np.diff(text_offsets)
    starts = offsets_of(widths)
    ids = np.empty(starts[-1], dtype=np.int64)
    is_text = np.ones(len(ids), dtype=bool)
    is_text[starts[:-1]] = False
    ids[starts[:-1]] = marker_ids
    ids[is_text] = text_ids
    markers = {keyword: ids_of[name] for keyword, name in zip(_KEYWORDS, MARKERS, strict=True)}
    return EncodedTranscripts(ids=ids, offsets=starts[firsts], markers=markers, tokenizer=encoder.tokenizer)


def _outside_error(split: Sequence[Sequence[str]], places: Sequence[str]) -> DataError:
    """What to say about the first text outside a span: before the first marker, or after an end or eos marker."""
    number, parts, index = next(
        (number, parts, index)
        for number, parts in enumerate(split)
        for index in range(0, len(parts), 2)
        if parts[index].strip() and (index == 0 or parts[index - 1] in (END, EOS))
    )
    text = parts[index]
    position = sum(map(len, parts[:index])) + len(text) - len(text.lstrip())
    return DataError(
        f"{_place(places, number)}, character {position}: text outside a span: {text.strip()[:40]!r}. Put it "
        f"between an opening marker ({', '.join(_OPENING.values())}) and {END}, or remove it"
    )


def _place(places: Sequence[str], number: int) -> str:
    return places[number] if places else f"record {number}"


def pack_transcripts(
    transcripts: Iterable[str],
    *,
    tokenizer: Any,
    block_size: int,
    drop_last: bool = False,
    places: Sequence[str] = (),
) -> PackedStream:
    """Encode transcripts and pack them into blocks of the post-training stream, in one call."""
    encoded = encode_transcripts(transcripts, tokenizer=tokenizer, places=places)
    return pack_post_training_stream(
        encoded.records,
        block_size=block_size,
        drop_last=drop_last,
        **encoded.markers,
    )


class TranscriptOutcome(StrEnum):
    """What became of a conversation on its way to a transcript."""

    WHOLE = "whole"
    """Every message is in the transcript."""
    CUT_TOO_LONG = "cut_too_long"
    """A later pair does not fit the context; the pairs before it are kept."""
    CUT_UNPAIRED = "cut_unpaired"
    """A message makes no pair; the pairs before it are kept."""
    SKIPPED_TOO_LONG = "skipped_too_long"
    """The first pair, with the system span, does not fit the context."""
    SKIPPED_NO_PAIR = "skipped_no_pair"
    """There is no pair to begin with."""
    UNWRITABLE = "unwritable"
    """A message that would be written spells a marker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcription:
    """One conversation as a transcript, or why there is none."""

    outcome: TranscriptOutcome
    messages: int = 0
    """How many messages of the conversation are in the transcript, from the first on."""
    tokens: int = 0
    """Tokens of the transcript with all markers, without eos."""
    text: str | None = None
    error: RecordError | None = None
    """What is wrong, where the outcome is `unwritable`."""


def conversation_to_transcript(
    conversation: Conversation | Mapping[str, Any], *, tokenizer: Any, context_length: int
) -> str | None:
    """Return the transcript of a conversation cut to the pairs that fit, or None where not even the first pair does.

    A pair is a user message and the assistant message right after it. Tokens are counted with all markers,
    without eos. The first pair must fit into `context_length` together with the system span, each later pair
    by itself.
    """
    (result,) = transcribe([conversation], tokenizer=tokenizer, context_length=context_length)
    if result.error is not None:
        raise result.error
    return result.text


def transcribe(
    conversations: Iterable[Conversation | Mapping[str, Any]], *, tokenizer: Any, context_length: int
) -> list[Transcription]:
    """`conversation_to_transcript` of many conversations, all their texts encoded in one call."""
    if context_length < 1:
        raise ConfigError(f"context_length is {context_length}; it must be at least 1")
    encoder = AnyTokenizer(tokenizer)
    checked = [_as_conversation(conversation) for conversation in conversations]
    paired = [_paired_messages(conversation.messages) for conversation in checked]
    texts = [message.content for c, count in zip(checked, paired, strict=True) for message in c.messages[:count]]
    ids, offsets = encoder.encode(texts)
    firsts = offsets_of(np.array(paired, dtype=np.int64))
    control = encoder.first_control(ids, offsets, _NAMES)
    if control is not None:
        number = int(np.searchsorted(firsts, control[0], side="right")) - 1
        path = f"messages[{control[0] - int(firsts[number])}].content"
        raise _record_error(checked[number], control[1], code="control_token", path=path)
    lengths = (np.diff(offsets) + _MARKERS_OF_A_SPAN).tolist()
    return [
        _transcription(conversation, lengths[first:last], context_length)
        for conversation, (first, last) in zip(checked, pairwise(firsts.tolist()), strict=True)
    ]


def _transcription(conversation: Conversation, lengths: Sequence[int], context_length: int) -> Transcription:
    """Choose the pairs and write them; `lengths` has the span tokens of the system message and all pairs."""
    messages = conversation.messages
    if not lengths:
        return Transcription(outcome=TranscriptOutcome.SKIPPED_NO_PAIR)
    first = used = len(lengths) % 2  # pairs are even: an odd one is the system message
    while used < len(lengths):
        together = lengths[used] + lengths[used + 1] + (sum(lengths[:first]) if used == first else 0)
        if together > context_length:
            break
        used += 2
    if used == first:
        return Transcription(outcome=TranscriptOutcome.SKIPPED_TOO_LONG)
    for index, message in enumerate(messages[:used]):
        marker = _PATTERN.search(message.content)
        if marker:
            text = f"the content spells {marker[0]} at character {marker.start()}, so no transcript can hold it"
            error = _record_error(conversation, text, code="spells_marker", path=f"messages[{index}].content")
            return Transcription(outcome=TranscriptOutcome.UNWRITABLE, error=error)
    if used < len(lengths):
        outcome = TranscriptOutcome.CUT_TOO_LONG
    else:
        outcome = TranscriptOutcome.WHOLE if used == len(messages) else TranscriptOutcome.CUT_UNPAIRED
    spans = [f"{_OPENING[message.role]}{message.content}{END}" for message in messages[:used]]
    return Transcription(outcome=outcome, messages=used, tokens=sum(lengths[:used]), text="".join(spans))


def _paired_messages(messages: Sequence[Message]) -> int:
    """Return how many messages, from the first on, are a system message (or none) and pairs; 0 without a pair."""
    first = int(bool(messages) and _is_span(messages[0], Role.SYSTEM))
    end = first
    while (
        end + 1 < len(messages) and _is_span(messages[end], Role.USER) and _is_span(messages[end + 1], Role.ASSISTANT)
    ):
        end += 2
    return end if end > first else 0


def _is_span(message: Message, role: Role) -> bool:
    """Return a message of the role that is text alone: a transcript has no form for tool calls."""
    is_text = message.structured is None and not message.parts
    return message.role is role and not message.tool_calls and message.recipient is None and is_text


def _as_conversation(record: Conversation | Mapping[str, Any]) -> Conversation:
    if isinstance(record, Conversation):
        return record
    name = "" if record.get("id") is None else str(record["id"])
    items = record.get("messages")
    if items == []:
        return Conversation((), id=name)
    try:
        return Conversation(parse_messages(items), id=name)
    except RecordError as error:
        raise RecordError(error.message, code=error.code, path=error.path, record_id=name) from None


def _record_error(conversation: Conversation, message: str, *, code: str, path: str) -> RecordError:
    return RecordError(message, code=code, path=path, where=conversation.where, record_id=conversation.id)
