"""The slow, obvious path of a record: one conversation, a reference tokenizer, and loops over single tokens.

It shares templates, policies and the spans of overflow with the fast path, and none of its columns: texts are encoded
one at a time by another library, every token gets its kind and weight by itself, and documents are copied token by
token. `verify --deep` compares the two.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from chatmill.compiler.pipeline import template_options
from chatmill.compiler.recipe import Recipe
from chatmill.core.conversation import Conversation, Role
from chatmill.core.kinds import REPEATED, Part, RoleCode, part_of, role_name, role_of
from chatmill.core.ledger import (
    AS_SAMPLED,
    EMPTY_ANSWERS,
    HIDDEN_REASONING,
    LOGPROBS_LEFT,
    LOST_CONTENT,
    LOST_REASONING,
    MIXED,
    REASONING,
    TRIMMED,
    Ledger,
)
from chatmill.core.tokens import Tokens
from chatmill.errors import NoReferenceError, RecordError
from chatmill.images.column import StoredPicture
from chatmill.images.files import Shown
from chatmill.label.presets import find_policy
from chatmill.pack.overflow import kept_spans
from chatmill.pack.windows import KeptSpan
from chatmill.prove.answer_check import Row
from chatmill.prove.part_weights import CharacterWeights, flag_context, mixed_tokens
from chatmill.prove.pictures import expanded, shown_in
from chatmill.prove.rows import PlainRow, plain_row, token_weights
from chatmill.prove.samples import PlainSamples
from chatmill.render.document_items import Ids, TextPart, items_of
from chatmill.render.documents import TextDocument
from chatmill.render.jinja.expressions import Notes, Path, root
from chatmill.render.registry import bind, find_template
from chatmill.render.sampled_context import WRONG, as_last_answer
from chatmill.tokenizer.backends import Engine
from chatmill.tokenizer.load import load_tokenizer, with_control_tokens
from chatmill.tokenizer.tokenizer import Tokenizer


def reference_tokenizer(recipe: Recipe) -> Tokenizer:
    """The tokenizer of a recipe on its reference engine; on the fast one where no other can encode the vocabulary."""
    try:
        tokenizer = load_tokenizer(recipe.tokenizer, engine=Engine.REFERENCE, strict_text=recipe.strict_text)
    except NoReferenceError:
        tokenizer = load_tokenizer(recipe.tokenizer, strict_text=recipe.strict_text)
    if recipe.add_control_tokens:
        tokenizer = with_control_tokens(tokenizer, find_template(recipe.template).control_tokens)
    return tokenizer


def hash_share(key: str) -> Fraction:
    """Return where the hash of a key lies between 0 and 1."""
    return Fraction(int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big"), 2**64)


@dataclass(slots=True, kw_only=True)
class DerivedDocument(PlainRow):
    """What a stored document must hold."""

    injected: list[bool]
    """Tokens that belong to another document, and are not trained."""
    later: list[bool]
    """Tokens before which something of the row is left out."""
    turns: int
    """Assistant messages."""
    unended: int = 0
    """Assistant messages that are trained, and their terminator is not; the fast path enters them in its ledger."""
    branches: list[tuple[int, int]] | None = None
    """Those of a tree, each with its first token and the position of that; None for a row."""
    images: list[StoredPicture] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class DerivedRow(PlainRow):
    """One rendering of a conversation, labelled, and the documents that overflow makes of it."""

    images: list[tuple[int, int, Shown]] = field(default_factory=list)
    """First token and end of each picture."""
    spans: list[list[KeptSpan]] = field(default_factory=list)
    """The spans of tokens of each document."""
    documents: list[DerivedDocument] = field(default_factory=list)

    def trains(self, start: int, end: int) -> bool:
        """Return whether a span of tokens holds one that is trained."""
        return any(weight > 0 for weight in self.weights[start:end])


class Claim(NamedTuple):
    """A conversation as its template wrote it, for the proof of its answers and pictures."""

    conversation: Conversation
    options: Mapping[str, object]
    """Options that the template was given for this record."""
    rows: list[Row]
    """The documents as the template has them."""
    derived: list[DerivedRow]
    """The same with sampled tokens and pictures in their places."""
    shown: Sequence[Shown]


@dataclass(slots=True)
class DerivedRecord:
    """All documents of a conversation."""

    rows: list[DerivedRow] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    """What the ledger notes of it."""
    claims: list[Claim] = field(default_factory=list)
    """One; none for a record of whole calls."""


class Reference:
    """A recipe bound to its reference tokenizer."""

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer) -> None:
        """`tokenizer` comes from `reference_tokenizer`."""
        self.recipe = recipe
        self.policy = find_policy(recipe.policy or find_template(recipe.template).default_policy)
        self.template = bind(recipe.template, tokenizer, template_options(recipe, self.policy))
        self.tokenizer = self.template.tokenizer
        self._samples = PlainSamples(self.template)
        self._known: dict[str, list[int]] = {}

    def derive(self, conversation: Conversation) -> DerivedRecord:
        """Return the tokens and documents of a record; a `RecordError` where the template refuses it."""
        self._known.clear()
        record, messages = DerivedRecord(), conversation.messages
        record.notes[REASONING] += sum(len(one.reasoning or "") for one in messages if one.weight != 0)
        if any(message.logprobs is not None for message in messages) and not self.recipe.logprobs:
            record.notes[LOGPROBS_LEFT] += 1
        if self._samples.is_calls(conversation):
            rows, notes = self._samples.call_rows(conversation)
            record.rows = [self._derived(conversation, row, is_last=row is rows[-1]) for row in rows]
            record.notes.update(notes)
        else:
            for message in messages:
                is_empty = not (message.content or message.reasoning or message.tool_calls or message.token_ids)
                record.notes[EMPTY_ANSWERS] += is_empty and message.role is Role.ASSISTANT
            claim = self._claim(conversation, record.notes)
            record.rows += claim.derived
            record.claims.append(claim)
        record.notes["rows_added"] += len(record.rows) - 1
        return record

    def _claim(self, conversation: Conversation, notes: Counter[str]) -> Claim:
        """Write a conversation, and note what becomes of its text."""
        written, rules = self.template.text_documents(conversation), self.template.rules
        items = [items_of(before.spans, rules, Notes(), rules.first, ends=True)[0] for before in written.documents]
        parts = CharacterWeights(conversation)
        plain = [self._row(conversation, document, parts) for document in items]
        parts.check_shown()
        notes[MIXED] += mixed_tokens(plain)
        resampled, sampled = self._samples.put(plain, conversation)
        for k in self._samples.doubtful(plain, conversation):
            sampled["sampled_differ"] += self._differs(as_last_answer(conversation, k))
        shown = shown_in(self.template, conversation)
        derived = [self._derived(conversation, before, shown, is_last=before is resampled[-1]) for before in resampled]
        if max((len(row.images) for row in derived), default=0) != len(shown):
            raise RecordError("the template does not write all pictures", code="images_differ")
        rows = []
        for before, row, document in zip(plain, derived, written.documents, strict=True):
            weights = row.weights  # those of the template's own row are the same, where it was not changed
            if before.ids != row.ids or before.kinds != row.kinds:
                weights = token_weights(self.policy, before, conversation.messages, is_last=before is plain[-1])
            rows.append(Row(before.ids, weights, trained_in(document)))
        for more in (sampled, _lost(conversation, items)):
            notes.update(more)
        notes["turns_that_later_messages_change"] += written.counts.unstable
        notes["turns_without_proof"] += written.counts.untrained
        notes["stops_appended"] += written.counts.appended
        notes[AS_SAMPLED] += written.counts.as_sampled
        return Claim(conversation, dict(written.options), rows, derived, shown)

    def _differs(self, conversation: Conversation) -> bool:
        """Return whether the tokens of the last answer say something else than the template writes, or nobody can tell.

        A `RecordError` where that refuses the record.
        """
        try:
            documents, rules = self.template.text_documents(conversation).documents, self.template.rules
            items = [items_of(before.spans, rules, Notes(), rules.first, ends=True)[0] for before in documents]
            parts = CharacterWeights(conversation)
            rows = [self._row(conversation, document, parts) for document in items]
            _, notes = self._samples.put(rows, conversation)
        except RecordError as error:
            if error.code in WRONG:
                raise
            return True
        return notes["sampled_differ"] > 0 or bool(self._samples.doubtful(rows, conversation))

    def _row(self, conversation: Conversation, items: Sequence[Ids | TextPart], parts: CharacterWeights) -> PlainRow:
        """Return one document as the template writes it."""
        out = plain_row(items, self.tokenizer, self._known, None if parts.is_empty else parts.of_piece)
        for place, (code, message) in enumerate(zip(out.kinds, out.messages, strict=True)):
            if message >= 0 and role_of(code) is RoleCode.ASSISTANT and conversation.messages[message].weight == 0:
                out.kinds[place] = code | REPEATED
        return out

    def _derived(
        self, conversation: Conversation, plain: PlainRow, shown: Sequence[Shown] = (), *, is_last: bool
    ) -> DerivedRow:
        """Return a rendering with its pictures and weights, and its documents."""
        row, images = expanded(self.template, plain, shown)
        flag_context(row)
        weights = token_weights(self.policy, row, conversation.messages, is_last=is_last)
        derived = DerivedRow(row.ids, row.kinds, row.messages, row.logprobs, weights, images=images)
        length, capacity = len(row.ids), self.recipe.packing.max_length
        if capacity is None or length <= capacity:
            derived.spans = [[KeptSpan(0, length)]]
        else:
            overflow = self.recipe.packing.overflow
            derived.spans = kept_spans(_single_runs(derived), 0, capacity, overflow, derived.trains)
        derived.documents = [_document(derived, pieces) for pieces in derived.spans]
        return derived


def trained_in(document: TextDocument) -> dict[int, int]:
    """Return the messages that a document is said to train, and the characters where their answers begin."""
    starts = [0, *accumulate(len(span.text) for span in document.spans)]
    begins: dict[int, int] = {}
    for span, start in zip(document.spans, starts, strict=False):
        if span.breaks:
            begins.setdefault(span.message, start)
    return {index: begins.get(index, 0) for index in document.trained}


def _single_runs(row: PlainRow) -> Tokens:
    """Return the conversation as a batch of one, in which every token is a run."""
    count, messages = len(row.ids), max(row.messages, default=-1) + 1
    return Tokens(
        ids=np.array(row.ids, dtype=np.int32),
        offsets=np.array([0, count], dtype=np.int64),
        run_offsets=np.arange(count + 1, dtype=np.int64),
        run_kinds=np.array(row.kinds, dtype=np.uint8),
        run_messages=np.array(row.messages, dtype=np.int32),
        document_runs=np.array([0, count], dtype=np.int64),
        message_offsets=np.array([0, messages], dtype=np.int64),
        message_weights=np.full(messages, np.nan, dtype=np.float32),
    )


def _document(row: DerivedRow, pieces: Sequence[KeptSpan]) -> DerivedDocument:
    """Copy the spans of one document; what is injected is not trained."""
    places = [(place, piece.injected) for piece in pieces for place in range(piece.start, piece.end)]
    whole = 0  # the first so many tokens are those of the row
    while whole < len(places) and places[whole][0] == whole:
        whole += 1
    document = DerivedDocument(
        ids=[row.ids[place] for place, _ in places],
        kinds=[row.kinds[place] for place, _ in places],
        messages=[row.messages[place] for place, _ in places],
        logprobs=[row.logprobs[place] for place, _ in places],
        weights=[0.0 if injected else row.weights[place] for place, injected in places],
        injected=[injected for _, injected in places],
        later=[number >= whole for number in range(len(places))],
        turns=0,
    )
    turns: list[tuple[bool, bool]] = []  # of each assistant message: is it trained; is its end, or does it go on
    message = role_before = None
    for owner, weight, code in zip(document.messages, document.weights, document.kinds, strict=True):
        role = role_of(code)
        if role == RoleCode.ASSISTANT:
            if owner != message:
                message = owner
                if turns and role_before == RoleCode.ASSISTANT:
                    turns[-1] = turns[-1][0], True
                turns.append((False, False))
            trained, ended = turns[-1]
            turns[-1] = trained or weight > 0, ended or (weight > 0 and part_of(code) == Part.TERMINATOR)
        role_before = role
    document.turns = len(turns)
    document.unended = sum(trained and not ended for trained, ended in turns)
    for at, (place, _) in enumerate(places) if row.images else ():
        shown = [(stop - start, picture) for start, stop, picture in row.images if place == start]
        document.images += [StoredPicture(at, at + size, *picture[:-1]) for size, picture in shown]
    return document


def _lost(conversation: Conversation, documents: Sequence[Sequence[Ids | TextPart]]) -> Counter[str]:
    """Characters that no document shows: of each text, what its best showing lacks, white space around it apart."""
    best: dict[Path, int] = {}
    for document in documents:
        here: Counter[Path] = Counter()
        for item in document:
            path = root(item.expression) if isinstance(item, TextPart) and item.expression else None
            if path is not None:
                here[path] += len(item.text)  # type: ignore[union-attr]
        best |= {path: max(size, best.get(path, 0)) for path, size in here.items()}
    losses: Counter[str] = Counter()
    for k, message in enumerate(conversation.messages):
        reasoning_note = HIDDEN_REASONING if message.weight == 0 else LOST_REASONING
        texts = (("content", message.content, LOST_CONTENT), ("reasoning", message.reasoning or "", reasoning_note))
        for name, text, note in texts:
            missing = max(0, len(text) - best.get((k, name), 0))
            around = min(missing, len(text) - len(text.strip()))
            losses[TRIMMED] += around
            losses[note] += missing - around
    return losses


def account(ledger: Ledger, source: str, record: Sequence[DerivedRecord], overflow: str) -> None:
    """Enter one built or dropped record, a pair of two conversations or one, as the ledger of a build has it."""
    rows = [row for side in record for row in side.rows]
    documents = [document for row in rows for document in row.documents]
    for row in rows:
        kept = [False] * len(row.ids)
        injected: Counter[int] = Counter()
        for piece in (piece for pieces in row.spans for piece in pieces):
            if piece.injected:
                injected.update(row.kinds[piece.start : piece.end])
            else:
                kept[piece.start : piece.end] = [True] * (piece.end - piece.start)
        trained = [weight > 0 for weight in row.weights]
        for (code, is_trained, is_kept), count in Counter(zip(row.kinds, trained, kept, strict=True)).items():
            role, name = role_name(role_of(code)), "trained" if is_trained else "context"
            ledger.tokens[source, role, "rendered"] += count
            lost = "cut" if row.documents else "dropped"
            ledger.tokens[source, role, name if is_kept else f"{lost}_{name}"] += count
        for code, count in injected.items():
            ledger.tokens[source, role_name(role_of(code)), "injected"] += count
    ledger.records[source, *(("built", "") if documents else ("skipped", f"overflow_{overflow}"))] += 1
    added = [document for side in record for row in side.rows[:-1] for document in row.documents]
    notes = Counter(episodes=len(documents), tokens_in_added_rows=sum(len(document.ids) for document in added))
    for side in record:
        notes.update(side.notes)
    notes["untrained_terminators"] += sum(document.unended for document in documents)
    has_trained = any(weight > 0 for document in documents for weight in document.weights)
    notes["records_without_trained_tokens"] += bool(documents) and not has_trained
    for name, count in notes.items():
        ledger.notes[source, name] += count
