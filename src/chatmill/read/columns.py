"""Reads records straight into columns: by the compiled scanner, and what it declines one by one.

The scanner reads a record only where its meaning is certain. Anything else (another spelling of a role, any mistake)
is for `read.files` and `read.record_shape`, with their checks and their errors. Where the scanner does not decline,
both give the same conversation, but for fields that mean nothing here: those of records (the metadata) are counted and
not kept, and those of messages are kept where somebody asks for them by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversation import Conversation, Role
from chatmill.core.conversations import Conversations, Sources, unused_by_source, unused_in_columns
from chatmill.core.kinds import RoleCode
from chatmill.core.message_parser import MAX_CHARACTERS, MEDIA_FIELDS, REASONING_FIELDS
from chatmill.core.messages import CODES, TEXT_FIELDS, MessageColumns, sparse_objects
from chatmill.core.native.scan import (
    MAX_JOINED,
    MAX_NAMES,
    MAX_TURNS,
    MessageField,
    RecordField,
    Scanned,
    ShapeNames,
    count_lines,
    scan_lines,
)
from chatmill.core.native.text_ranges import distinct
from chatmill.core.sampled import NUMBER_FIELDS, SAMPLED_FIELDS
from chatmill.core.texts import OptionalTexts, Texts
from chatmill.errors import RecordError
from chatmill.read.calls import CALL_LISTS
from chatmill.read.files import Raw, decode_line
from chatmill.read.pair_columns import PairPart, margins, paired
from chatmill.read.preferences import ASKED, CHOSEN, JOINED, LABEL, LISTS, MARGIN_FIELDS, REJECTED, SYSTEM
from chatmill.read.record_shape import Shape, conversation_or_error, tools_text
from chatmill.read.shapes import find_shape
from chatmill.read.unknown_fields import kept_fields, message_field_ids, message_fields, record_fields

Ints = NDArray[np.int64]
Read = tuple[Conversations, list[RecordError]]
"""The conversations of some records, and the errors of those that hold none."""

Raws = Callable[[list[int]], Iterable[tuple[int, Raw]]]
"""Gives the records with these numbers in their batch; blank lines are none."""

MESSAGE_MEANINGS: Mapping[str, MessageField] = {
    **dict.fromkeys(REASONING_FIELDS, MessageField.REASONING),
    "tool_calls": MessageField.TOOL_CALLS,
    "weight": MessageField.WEIGHT,
    "train": MessageField.TRAIN,
    "function_call": MessageField.ONLY_NULL,
    **dict.fromkeys(MEDIA_FIELDS, MessageField.EMPTY),
    **{name: MessageField[name.upper()] for name in (*TEXT_FIELDS, *NUMBER_FIELDS)},
}
"""Fields of messages with a meaning, besides role and content, which shapes name."""
PASSED_FIELDS = ("role", "content")
"""Fields of messages that mean nothing where a shape has other names for them, and are not counted."""


class Lines(NamedTuple):
    """A range of whole lines."""

    start: int
    stop: int
    number: int
    """Of the first line."""
    total: int
    """How many lines."""


def line_groups(data: bytes, sizes: Iterator[int], first: int = 1, max_lines: int | None = None) -> Iterator[Lines]:
    """Ranges of whole lines with at most as many bytes as `sizes` gives for each, or one line that is longer.

    `first` is the number of the first line; at most `max_lines` lines are given.
    """
    end = len(data)
    if max_lines is not None:
        feeds = np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == ord("\n"))
        end = 0 if max_lines == 0 else int(feeds[max_lines - 1]) + 1 if max_lines <= len(feeds) else end
    start = 0
    while start < end:
        stop, max_bytes = end, next(sizes)
        if end - start > max_bytes:
            stop = data.rfind(b"\n", start, start + max_bytes) + 1 or data.find(b"\n", start, end) + 1 or end
        count = count_lines(data, start, stop)
        yield Lines(start, stop, first, count)
        start, first = stop, first + count


class FileLines(NamedTuple):
    """Lines of one file, in data that may have lines of several files of one shape, one after the other."""

    number: int
    """The number of its first line in the data."""
    first: int
    """The number of this line in the file."""
    before: str
    """What places have before their numbers."""
    source: str
    """Names the records that do not name theirs."""


def read_lines(
    data: bytes, lines: Lines, *, before: str, source: str, shape: Shape, kept: Collection[str] = frozenset()
) -> Read:
    """Return the conversations of some lines of one file; see `FileLines` for `before` and `source`.

    Of the fields of messages that mean nothing here, the scanner keeps those with a name in `kept`.
    """
    return read_files(data, lines, [FileLines(lines.number, lines.number, before, source)], shape, kept)


def read_files(
    data: bytes, lines: Lines, files: Sequence[FileLines], shape: Shape, kept: Collection[str] = frozenset()
) -> Read:
    """Return the conversations of some lines of these files, which all have one shape; blank lines are passed over."""
    if shape.choose is not None and not shape.nulls_are_absent:
        return _read_mixed(data, lines, files, shape, kept)
    names, (start, stop, first, total) = scanner_names(shape), lines
    if not names or (total == 1 and stop - start > MAX_CHARACTERS):  # columns for it would take a multiple of its bytes
        texts = data[start:stop].split(b"\n")
        wheres, owners = _places(first + np.arange(len(texts)), files)
        filled = [number for number, line in enumerate(texts) if line and not line.isspace()]
        decoded = [decode_line(texts[number], wheres[number]) for number in filled]
        return _read_each(decoded, shape, lambda number: files[owners[filled[number]]].source)
    # Of pairs both sides are scanned, one after the other, and then their prompts.
    sides = [scan_lines(data, start, stop, one, total) for one in names]
    scanned = sides[0]
    wheres, owners = _places(first + np.arange(len(scanned.read)), files)
    refused, tools = _tools(scanned)

    def raws(numbers: list[int]) -> Iterator[tuple[int, Raw]]:
        for number in numbers:
            line = data[scanned.line_starts[number] : scanned.line_stops[number]]
            if line and not line.isspace():
                yield number, decode_line(line, wheres[number])

    batch = Conversations(
        messages=with_kept_fields(scanned, data, kept),
        offsets=scanned.offsets,
        ids=scanned.ids.texts,
        sources=_sources(scanned.sources, files, owners),
        tools=tools,
        options=scanned.options.texts,
        wheres=wheres,
        metadata=sparse_objects(len(wheres), {}),
    )
    sure = np.all([side.read for side in sides], axis=0) & ~refused
    unused = [(name, records) for name, records in record_fields(scanned, data) if name not in shape.fields]
    unused += message_fields([scanned, *sides[2:]], data, shape.content)  # the rejected answers are not counted
    if len(sides) > 1:
        scores = _scores(scanned)
        unused += [(name, np.flatnonzero(~np.isnan(scores[:, k]))) for k, name in enumerate(MARGIN_FIELDS)]
        given, are_sure = margins(scores)
        ids = message_field_ids(sides, data)
        parts = [
            PairPart(with_kept_fields(side, data, kept), side.offsets, own)
            for side, own in zip(sides, ids, strict=True)
        ]
        batch, parts_at_answers = paired(replace(batch, margins=given), *parts)
        sure &= are_sure & parts_at_answers
    return completed(batch, sure, raws, unused, shape, lambda number: files[owners[number]].source)


def _read_mixed(data: bytes, lines: Lines, files: Sequence[FileLines], shape: Shape, kept: Collection[str]) -> Read:
    """Return the same for lines whose records have different formats: the lines of each format are read together."""
    texts = data[lines.start : lines.stop].split(b"\n")
    wheres, owners = _places(lines.number + np.arange(len(texts)), files)
    indexes_of: dict[Shape, list[int]] = {}
    for index, text in enumerate(texts):
        if text and not text.isspace():
            raw = decode_line(text, wheres[index])
            indexes_of.setdefault(_chosen(raw, shape), []).append(index)

    batches: list[Conversations] = []
    errors: list[RecordError] = []
    unused: Counter[tuple[str, str]] = Counter()
    for own, indexes in indexes_of.items():
        if own is shape:
            # These records cannot be decoded, or no format fits: each is an error.
            raws = [decode_line(texts[index], wheres[index]) for index in indexes]
            batch, refused = read_one_by_one(raws, shape, "")
        else:
            joined = b"".join(texts[index] + b"\n" for index in indexes)
            spans = _line_spans(indexes, lines.number, owners, files)
            batch, refused = read_files(joined, Lines(0, len(joined), 1, len(indexes)), spans, own, kept)
        batches.append(batch)
        errors += refused
        unused.update(batch.unused)

    index_of = {where: index for index, where in enumerate(wheres)}
    errors.sort(key=lambda error: index_of[error.where])
    if not batches:
        return Conversations.of([]), errors
    together = Conversations.joined(batches)
    order = np.argsort([index_of[where] for where in together.wheres], kind="stable")
    return replace(together.take(order), unused=unused), errors


def _chosen(raw: Raw, shape: Shape) -> Shape:
    """Return the format of one record of a file that mixes them; the mixed one where there is none."""
    if raw.error is not None or not isinstance(raw.value, Mapping) or shape.choose is None:
        return shape
    try:
        return shape.choose(raw.value)
    except RecordError:
        return shape


def _line_spans(indexes: Sequence[int], first: int, owners: Ints, files: Sequence[FileLines]) -> list[FileLines]:
    """Describe chosen lines that are put together, one span for each run of neighbours.

    Args:
        indexes: Index of each chosen line among all lines.
        first: Number of the first of all lines in the data.
        owners: Index of the file of each line.
        files: The files of all lines.

    Returns:
        The spans, whose numbers count the chosen lines from 1.
    """
    spans: list[FileLines] = []
    previous = -2
    for number, index in enumerate(indexes, 1):
        file = files[owners[index]]
        if index != previous + 1 or owners[index] != owners[previous]:
            spans.append(FileLines(number, file.first + first + index - file.number, file.before, file.source))
        previous = index
    return spans


def with_kept_fields(scanned: Scanned, data: bytes | NDArray[np.uint8], kept: Collection[str]) -> MessageColumns:
    """Return the scanned messages with the unknown fields of these names."""
    return replace(scanned.messages, extra=kept_fields(scanned, data, kept))


def _scores(scanned: Scanned) -> NDArray[np.float64]:
    """Put the scores of records into a table with a column for each of `MARGIN_FIELDS`, NaN for none."""
    scores = np.full((len(scanned.read), len(MARGIN_FIELDS)), np.nan)
    scores[scanned.scores["record"], scanned.scores["which"]] = scanned.scores["value"]
    return scores


def _places(numbers: Ints, files: Sequence[FileLines]) -> tuple[list[str], Ints]:
    """Return the place of each of some lines of the data, and which of the files it is of; numbers never fall."""
    wheres: list[str] = []
    borders = np.searchsorted(numbers, [file.number for file in files[1:]]).tolist()
    for file, begin, end in zip(files, [0, *borders], [*borders, len(numbers)], strict=True):
        shift = file.first - file.number
        wheres += [f"{file.before}{number}" for number in (numbers[begin:end] + shift).tolist()]
    owners = np.repeat(np.arange(len(files)), np.diff([0, *borders, len(numbers)]))
    return wheres, owners


def completed(
    batch: Conversations,
    sure: NDArray[np.bool_],
    raws: Raws,
    unused: Iterable[tuple[str, Ints]],
    shape: Shape,
    source_of: Callable[[int], str],
) -> Read:
    """Return a batch of columns in which the records that are not sure are read one by one, from what `raws` gives.

    `unused` are the fields that mean nothing, with the records that have something in them. `source_of` gives the
    source of a record that does not name its own.
    """
    if shape.lists and shape.system:
        sure = sure & ~_two_systems(batch.messages.roles, batch.offsets)
    sure = sure & ~_has_long_text(batch)
    slow, errors = _read_declined(raws(np.flatnonzero(~sure).tolist()), shape, source_of)
    sure_ones = ((name, records[sure[records]]) for name, records in unused)
    counts = unused_in_columns(sure_ones, batch.sources.take(batch.heads))
    return replace(merged(batch, sure, slow), unused=counts + unused_by_source(one for _, one in slow)), errors


def _two_systems(roles: NDArray[np.uint8], offsets: Ints) -> NDArray[np.bool_]:
    """Return which records begin with two system messages: one of them may be the field `system`."""
    two = np.zeros(len(offsets) - 1, dtype=np.bool_)
    long = np.flatnonzero(np.diff(offsets) > 1)
    first = offsets[long]
    two[long] = (roles[first] == RoleCode.SYSTEM) & (roles[first + 1] == RoleCode.SYSTEM)
    return two


def _has_long_text(batch: Conversations) -> NDArray[np.bool_]:
    """Return which records have a content or reasoning that may be longer than any text may be.

    A text has at least as many bytes as characters: the full reader counts these.
    """
    records = np.cumsum(np.diff(batch.records, prepend=-1) > 0) - 1
    long = np.zeros(len(batch.heads), dtype=np.bool_)
    for column in (batch.messages.contents, batch.messages.reasoning):
        messages = np.flatnonzero(column.lengths > MAX_CHARACTERS)
        long[records[np.searchsorted(batch.offsets, messages, side="right") - 1]] = True
    return long


def _read_declined(
    raws: Iterable[tuple[int, Raw]], shape: Shape, source_of: Callable[[int], str]
) -> tuple[list[tuple[int, Conversation]], list[RecordError]]:
    """Parse records with the full reader, which knows all forms and all errors; each comes with its number.

    So do the conversations, of which a record may hold several.
    """
    slow: list[tuple[int, Conversation]] = []
    errors: list[RecordError] = []
    for number, raw in raws:
        for one in shape.embedded(raw):
            found = conversation_or_error(one, shape, source_of(number))
            if isinstance(found, RecordError):
                errors.append(found)
            else:
                slow.append((number, found))
    return slow, errors


def read_one_by_one(raws: Iterable[Raw], shape: Shape, source: str) -> Read:
    """Return the same for all records of a batch."""
    return _read_each(raws, shape, lambda number: source)


def _read_each(raws: Iterable[Raw], shape: Shape, source_of: Callable[[int], str]) -> Read:
    """Return the same where records may have different sources."""
    slow, errors = _read_declined(enumerate(raws), shape, source_of)
    found = [one for _, one in slow]
    conversations = [side for one in found for side in one.sides]
    return replace(Conversations.of(conversations), unused=unused_by_source(found)), errors


def merged(batch: Conversations, read: NDArray[np.bool_], slow: Sequence[tuple[int, Conversation]]) -> Conversations:
    """Return the conversations of the records that were read, and in their places those that were read one by one."""
    records = np.cumsum(np.diff(batch.records, prepend=-1) > 0) - 1
    if not slow:
        return batch if read.all() else batch.take(np.flatnonzero(read[records]))
    sides = [(number, side) for number, found in slow for side in found.sides]
    others = Conversations.of([side for _, side in sides])
    numbers = np.append(np.where(read[records], records, -1), [number for number, _ in sides])
    order = np.argsort(numbers, kind="stable")
    return Conversations.joined([batch, others]).take(order[numbers[order] >= 0])


def _tools(scanned: Scanned) -> tuple[NDArray[np.bool_], Texts]:
    """Return which records have tools that are no list of objects; and the definitions of the others as lines."""
    refused = np.zeros(len(scanned.read), dtype=np.bool_)
    places = np.flatnonzero(scanned.tools.present & ~scanned.listed.present)  # which Python must decode
    if not len(places):
        return refused, scanned.listed.texts
    listed = [_listed_tools(scanned.tools[number] or "") for number in places.tolist()]
    refused[places] = [lines is None for lines in listed]
    return refused, scanned.listed.texts.replaced(places, Texts.of([lines or "" for lines in listed]))


_listed_tools = lru_cache(maxsize=256)(tools_text)  # records of one source mostly have the same tools


def _sources(given: OptionalTexts, files: Sequence[FileLines], owners: Ints) -> Sources:
    """Return the source of every record: its own, or that of its file; each name is decoded once."""
    texts = given.texts
    which, firsts = distinct(texts.data, texts.starts, texts.lengths)
    names = [texts[first] or files[0].source for first in firsts.tolist()]
    numbers = np.where(texts.lengths > 0, which, len(names) + owners)
    return Sources.of([*names, *(file.source for file in files)], numbers)


@cache
def record_meanings(shape: Shape) -> Mapping[str, int]:
    """Return what the fields of records mean to those who read them into columns."""
    record: dict[str, int] = {}
    record |= dict.fromkeys(shape.lists, RecordField.LIST)
    record |= {shape.id: RecordField.ID, shape.source: RecordField.SOURCE}
    record |= {shape.tools: RecordField.TOOLS, shape.options: RecordField.OPTIONS}
    if shape.typed_parts:  # whose tools may be written otherwise
        record[shape.tools] = RecordField.EMPTY
    for number, (_, fields) in enumerate(shape.turns):
        record |= {name: RecordField.TURN + MAX_JOINED * number + place for place, name in enumerate(fields)}
    record |= dict.fromkeys(shape.reasoning, RecordField.ONLY_NULL)
    for name in (shape.functions, shape.nested, shape.history, *MEDIA_FIELDS, LABEL):
        if name:
            record.setdefault(name, RecordField.EMPTY)
    return record | dict.fromkeys(shape.system, RecordField.SYSTEM)


@cache
def scanner_names(shape: Shape) -> tuple[ShapeNames, ...]:
    """What the scanner has to know of a shape; of pairs for each side and for prompts. Empty where it reads none."""
    if shape is find_shape("pairs"):
        chosen: dict[str, int] = {**record_meanings(shape), **dict.fromkeys(JOINED, RecordField.ONLY_NULL)}
        chosen |= dict.fromkeys(LISTS, RecordField.REPEATED)
        chosen |= {name: RecordField.SCORE + which for which, name in enumerate(MARGIN_FIELDS)}
        prompts = {**dict.fromkeys(ASKED, RecordField.QUESTION), SYSTEM: RecordField.SYSTEM}
        parts = ({**chosen, CHOSEN: RecordField.ANSWER}, {REJECTED: RecordField.ANSWER}, prompts)
        return tuple(_names(part, find_shape("openai")) for part in parts)
    if shape is find_shape("calls"):
        own = {name: RecordField[name.upper()] for name in sorted(SAMPLED_FIELDS)}
        record = {**record_meanings(shape), **own, **dict.fromkeys(CALL_LISTS, RecordField.CALLS)}
        fields = {name: MESSAGE_MEANINGS[name] for name in own}
        return (ShapeNames(record, fields, {"assistant": RoleCode.ASSISTANT}),)
    if has_plain_turns(shape):
        roles = {f"turn {number}": RoleCode(CODES[role]) for number, (role, _) in enumerate(shape.turns)}
        return (ShapeNames(record_meanings(shape), {shape.role: MessageField.ROLE}, roles),)
    return (_names(record_meanings(shape), shape),) if shape.is_plain and shape.lists else ()


def has_plain_turns(shape: Shape) -> bool:
    """Return whether messages are fields of their records, and no more of them than columns are made of."""
    are_few = len(shape.turns) <= MAX_TURNS and len(shape.system) <= 1 and len(record_meanings(shape)) <= MAX_NAMES
    longest = max((len(fields) for _, fields in shape.turns), default=0)
    return shape.is_plain and not shape.lists and are_few and 0 < longest <= MAX_JOINED


@cache
def nested_names() -> ShapeNames:
    """Return what the scanner has to know of an object with `messages` that is a text of its own."""
    return _names({"messages": RecordField.LIST}, find_shape("openai"))


def _names(record: Mapping[str, int], shape: Shape) -> ShapeNames:
    message = {shape.role: MessageField.ROLE, shape.content: MessageField.CONTENT, **MESSAGE_MEANINGS}
    for name in PASSED_FIELDS:
        message.setdefault(name, MessageField.PASSED)
    spelled = [(name, role) for name, role in shape.roles.items() if name != shape.calls_role]
    spelled.sort(key=lambda pair: pair[1] not in (Role.USER, Role.ASSISTANT))  # these are looked for most often
    return ShapeNames(record, message, {name: RoleCode(CODES[role]) for name, role in spelled[:MAX_NAMES]})
