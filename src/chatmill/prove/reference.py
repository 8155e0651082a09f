"""The slow, obvious path of a record: one conversation, a reference tokenizer, and loops over single tokens.

It shares templates, policies and the spans of overflow with the fast path, and none of its columns: texts are encoded
one at a time by another library, every token gets its kind and weight by itself, and episodes are copied token by
token. `verify --deep` compares the two.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.compiler.pipeline import template_options
from chatmill.compiler.recipe import Recipe
from chatmill.core.conversation import Conversation, Message, Role
from chatmill.core.kinds import MARK, REPEATED, Part, RoleCode, kind, part_of, role_of
from chatmill.core.ledger import (
    EMPTY_ANSWERS,
    LOGPROBS_LEFT,
    LOST_CONTENT,
    LOST_REASONING,
    REASONING,
    TRIMMED,
)
from chatmill.core.tokens import Tokens
from chatmill.core.trees import Branches
from chatmill.errors import DataError, NoReferenceError, RecordError
from chatmill.images.column import StoredPicture
from chatmill.images.files import Shown
from chatmill.label.policy import Policy, Scope
from chatmill.label.presets import find_policy
from chatmill.pack.overflow import Overflow
from chatmill.pack.pictures import without_cut_pictures
from chatmill.pack.turns import outline
from chatmill.pack.windows import KeptSpan, first_turns, last_turns, newest_turns, windows
from chatmill.prove.answer_check import Row
from chatmill.prove.pictures import expanded, shown_in, stored_in
from chatmill.prove.plain_row import PlainTokens, plain_row
from chatmill.prove.plain_samples import PlainSamples
from chatmill.render.jinja.expressions import Notes, Path, root
from chatmill.render.jinja.turn_sequences import Counts, TextSequence
from chatmill.render.registry import bind, find_template
from chatmill.render.sequence_items import Ids, TextPart, items_of
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
    """Where the hash of a key lies between 0 and 1."""
    return Fraction(int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big"), 2**64)


def split_of(key: str, val_fraction: float) -> str:
    """The split of a record, by the key it is known by."""
    return "val" if hash_share(key) < Fraction(str(val_fraction)) else "train"


def uses_of(key: str, weight: float) -> int:
    """How often a record is used at a weight: the whole part, and once more by another hash of its key."""
    whole, rest = divmod(Fraction(str(weight)), 1)
    return int(whole) + (hash_share(f"weight\0{key}") < rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedEpisode:
    """What an episode must hold; one value per token."""

    ids: NDArray[Any]
    weights: NDArray[Any]
    kinds: NDArray[np.uint8]
    turns: int
    """Assistant messages."""
    unended: int = 0
    """Assistant messages that are trained, and their terminator is not; the fast path enters them in its ledger."""
    branches: Branches | None = None
    """Those of a tree; None for a row."""
    logprobs: NDArray[np.float32] | None = None
    """NaN where none is known."""
    images: list[StoredPicture] = field(default_factory=list)

    @property
    def trained(self) -> int:
        """Tokens with a weight above 0."""
        return int(np.count_nonzero(self.weights))


@dataclass(slots=True, kw_only=True)
class Derived(PlainTokens):
    """One sequence of a conversation, rendered and labelled, and the episodes that overflow makes of it."""

    weights: list[float]
    images: list[tuple[int, int, Shown]] = field(default_factory=list)
    """First token and end of each picture."""
    spans: list[list[KeptSpan]] = field(default_factory=list)
    """The spans of tokens of each episode."""
    episodes: list[DerivedEpisode] = field(default_factory=list)

    def trains(self, start: int, end: int) -> bool:
        """Whether a span of tokens holds one that is trained."""
        return any(weight > 0 for weight in self.weights[start:end])

    @property
    def is_whole(self) -> bool:
        """Whether the record is one episode, uncut."""
        return self.spans == [[KeptSpan(0, len(self.ids))]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedRecord:
    """All sequences of a conversation."""

    sequences: list[Derived]
    lost: Mapping[str, int]
    """Characters of contents and reasoning that no sequence shows, by the name of their note."""
    counts: Counts
    rows: list[Row] = field(default_factory=list)
    """The sequences as the template has them, for the proof of their answers; none for records of whole calls."""
    shown: Sequence[Shown] = ()
    """Its pictures."""
    notes: Mapping[str, int] = field(default_factory=dict)
    """What the ledger notes of sampled tokens."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Options that the template was given for this record."""
    sides: int = 1
    """Conversations of the record: 2 for a pair."""
    variants: Sequence[tuple[Conversation, DerivedRecord]] = ()
    """What it was derived as, if its answers have histories of their own."""


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

    def derive(
        self, conversation: Conversation, *, counted: set[int] | None = None, is_last: bool = True
    ) -> DerivedRecord:
        """The tokens and episodes of a record; a `RecordError` where the template refuses it.

        Texts of the `counted` messages (default: all) are lost where they are not shown. `is_last`: the conversation
        has the last row of its record.
        """
        self._known.clear()
        if self.is_calls(conversation):
            return self._of_calls(conversation)
        written, rules = self.template.text_sequences(conversation), self.template.rules
        items = [items_of(one.spans, rules, Notes(), rules.first, ends=True)[0] for one in written.sequences]
        plain = [self._row(conversation, sequence) for sequence in items]
        made, notes = self._samples.put(plain, conversation)
        shown = shown_in(self.template, conversation)
        sequences = [self._sequence(conversation, one, shown, is_last=is_last and one is made[-1]) for one in made]
        if max((len(one.images) for one in sequences), default=0) != len(shown):
            raise RecordError("the template does not write all pictures", code="images_differ")
        rows = [
            Row(one.ids, self._weights(conversation, one, is_last=is_last and one is plain[-1]), trained_in(sequence))
            for one, sequence in zip(plain, written.sequences, strict=True)
        ]
        return DerivedRecord(
            sequences=sequences,
            lost=_lost(conversation, items, counted) + lacks_of(conversation),
            counts=written.counts,
            rows=rows,
            shown=shown,
            options=dict(written.options),
            notes=notes + self.logprobs_left(conversation),
        )

    def is_calls(self, conversation: Conversation) -> bool:
        """Whether a record is taken as its calls."""
        return self._samples.is_calls(conversation)

    def logprobs_left(self, conversation: Conversation) -> Counter[str]:
        """Whether a record has log-probabilities that are not stored."""
        has_some = any(message.logprobs is not None for message in conversation.messages)
        return Counter({LOGPROBS_LEFT: int(has_some and not self.recipe.logprobs)})

    def _of_calls(self, conversation: Conversation) -> DerivedRecord:
        """A record of whole calls."""
        rows, notes = self._samples.call_rows(conversation)
        thought = sum(len(message.reasoning or "") for message in conversation.messages)
        return DerivedRecord(
            sequences=[self._sequence(conversation, one, is_last=one is rows[-1]) for one in rows],
            lost=Counter({REASONING: thought}),
            counts=Counts(0, 0, 0, 0),
            notes=notes + self.logprobs_left(conversation),
        )

    def _row(self, conversation: Conversation, items: Sequence[Ids | TextPart]) -> PlainTokens:
        """One sequence as the template writes it."""
        out = plain_row(items, self.tokenizer, self._known)
        for place, (code, message) in enumerate(zip(out.kinds, out.messages, strict=True)):
            if message >= 0 and role_of(code) is RoleCode.ASSISTANT and conversation.messages[message].weight == 0:
                out.kinds[place] = code | REPEATED
        return out

    def _weights(self, conversation: Conversation, row: PlainTokens, *, is_last: bool) -> list[float]:
        return token_weights(self.policy, row.kinds, row.messages, conversation.messages, is_last=is_last)

    def _sequence(
        self, conversation: Conversation, one: PlainTokens, shown: Sequence[Shown] = (), *, is_last: bool
    ) -> Derived:
        row, images = expanded(self.template, one, shown)
        derived = Derived(
            ids=row.ids,
            kinds=row.kinds,
            messages=row.messages,
            logprobs=row.logprobs,
            weights=self._weights(conversation, row, is_last=is_last),
            images=images,
        )
        derived.spans = without_cut_pictures(_single_runs(derived), 0, self._spans(derived))
        derived.episodes = [_episode(derived, pieces) for pieces in derived.spans]
        return derived

    def _spans(self, derived: Derived) -> list[list[KeptSpan]]:
        """Which spans of the conversation are in which episode, by the overflow policy."""
        length, capacity = len(derived.ids), self.recipe.packing.max_length
        if capacity is None or length <= capacity:
            return [[KeptSpan(0, length)]]
        match self.recipe.packing.overflow:
            case Overflow.DROP:
                return []
            case Overflow.CUT:
                return [[KeptSpan(0, capacity)]]
            case Overflow.DROP_OLDEST_TURNS:
                return [newest_turns(outline(_single_runs(derived), 0), capacity)]
            case Overflow.WINDOWS:
                return windows(outline(_single_runs(derived), 0), capacity, derived.trains)
            case Overflow.TURNS | Overflow.LAST_TURNS as policy:
                chosen = first_turns if policy is Overflow.TURNS else last_turns
                kept = chosen(outline(_single_runs(derived), 0), capacity, derived.trains)
                return [kept] if kept else []
        raise DataError(f"the record has {length:,} tokens, the limit is {capacity:,}, and overflow is an error")


def trained_in(sequence: TextSequence) -> dict[int, int]:
    """The messages that a sequence is said to train, and the characters where their answers begin."""
    starts = [0, *accumulate(len(span.text) for span in sequence.spans)]
    begins: dict[int, int] = {}
    for span, start in zip(sequence.spans, starts, strict=False):
        if span.breaks:
            begins.setdefault(span.message, start)
    return {index: begins.get(index, 0) for index in sequence.trained}


def token_weights(
    policy: Policy,
    kinds: Sequence[int],
    messages: Sequence[int],
    sources: Sequence[Message],
    *,
    is_last: bool = True,
) -> list[float]:
    """The weight of every token: the policy's table, its scope, and the weight of the token's own message.

    What is around an answer has a weight where the answer is not repeated; what is no assistant's, and what is around
    no answer at all, in the last sequence.
    """
    table = {kind(role, part): weight for (role, part), weight in policy.weights.items()}
    last_user = max((place for place, code in enumerate(kinds) if role_of(code) is RoleCode.USER), default=-1)
    default = 0.0 if policy.only_weighted_messages else 1.0
    pairs = list(zip(kinds, messages, strict=True))
    answered = {k for code, k in pairs if _is_answer(code) and not code & REPEATED}
    repeated = {k for code, k in pairs if _is_answer(code) and code & REPEATED}
    weights: list[float] = []
    for place, (code, message) in enumerate(pairs):
        weight = 0.0 if code & REPEATED else table.get(code & ~MARK, 0.0)
        if role_of(code) is not RoleCode.ASSISTANT:
            weight = weight if is_last else 0.0
        elif not _is_answer(code) and message >= 0 and message not in answered:
            weight = weight if is_last and message not in repeated else 0.0
        if weight == 0 or (policy.scope is Scope.LAST_TURN and place <= last_user):
            weights.append(0.0)
            continue
        own = sources[message].weight if message >= 0 else None
        weights.append(float(np.float32(weight) * np.float32(default if own is None else own)))  # as it is stored
    return weights


def _is_answer(code: int) -> bool:
    """Whether a token is of what an assistant says, and not of what a template writes around it."""
    return role_of(code) is RoleCode.ASSISTANT and part_of(code) in (
        Part.CONTENT,
        Part.REASONING,
        Part.TOOL_CALL,
        Part.TERMINATOR,
    )


def _single_runs(derived: Derived) -> Tokens:
    """The conversation as a batch of one, in which every token is a run."""
    count = len(derived.ids)
    return Tokens(
        ids=np.array(derived.ids, dtype=np.int32),
        offsets=np.array([0, count], dtype=np.int64),
        run_offsets=np.arange(count + 1, dtype=np.int64),
        run_kinds=np.array(derived.kinds, dtype=np.uint8),
        run_messages=np.array(derived.messages, dtype=np.int32),
        sequence_runs=np.array([0, count], dtype=np.int64),
        message_offsets=np.array([0, max(derived.messages, default=-1) + 1], dtype=np.int64),
        message_weights=np.full(max(derived.messages, default=-1) + 1, np.nan, dtype=np.float32),
    )


def _episode(derived: Derived, pieces: Sequence[KeptSpan]) -> DerivedEpisode:
    """Copy the spans of one episode; what is injected is not trained."""
    places = [(place, piece.injected) for piece in pieces for place in range(piece.start, piece.end)]
    weights = [0.0 if injected else derived.weights[place] for place, injected in places]
    kinds = [derived.kinds[place] for place, _ in places]
    turns: list[tuple[bool, bool]] = []  # of each assistant message: is it trained; is its end, or does it go on
    message = role_before = None
    for (place, _), weight, code in zip(places, weights, kinds, strict=True):
        role, part = role_of(code), part_of(code)
        if role == RoleCode.ASSISTANT:
            if derived.messages[place] != message:
                message = derived.messages[place]
                if turns and role_before == RoleCode.ASSISTANT:
                    turns[-1] = turns[-1][0], True
                turns.append((False, False))
            trained, ended = turns[-1]
            turns[-1] = trained or weight > 0, ended or (weight > 0 and part == Part.TERMINATOR)
        role_before = role
    return DerivedEpisode(
        ids=np.array([derived.ids[place] for place, _ in places], dtype=np.uint32),
        weights=np.array(weights, dtype=np.float32),
        kinds=np.array(kinds, dtype=np.uint8),
        turns=len(turns),
        logprobs=np.array([derived.logprobs[place] for place, _ in places], dtype=np.float32),
        unended=sum(trained and not ended for trained, ended in turns),
        images=stored_in([place for place, _ in places], derived.images) if derived.images else [],
    )


def lacks_of(conversation: Conversation) -> Counter[str]:
    """Return the characters of reasoning of a record, and its answers that hold nothing."""
    found: Counter[str] = Counter()
    for message in conversation.messages:
        found[REASONING] += len(message.reasoning or "")
        is_empty = not (message.content or message.reasoning or message.tool_calls or message.token_ids)
        found[EMPTY_ANSWERS] += is_empty and message.role is Role.ASSISTANT
    return found


def _lost(
    conversation: Conversation, sequences: Sequence[Sequence[Ids | TextPart]], counted: set[int] | None
) -> Counter[str]:
    """Characters that no sequence shows: of each text, what its best showing lacks, white space around it apart."""
    best: dict[Path, int] = {}
    for sequence in sequences:
        here: Counter[Path] = Counter()
        for item in sequence:
            path = root(item.expression) if isinstance(item, TextPart) and item.expression else None
            if path is not None:
                here[path] += len(item.text)  # type: ignore[union-attr]
        best |= {path: max(size, best.get(path, 0)) for path, size in here.items()}
    found: Counter[str] = Counter()
    for k, message in enumerate(conversation.messages):
        if counted is not None and k not in counted:
            continue
        texts = (("content", message.content, LOST_CONTENT), ("reasoning", message.reasoning or "", LOST_REASONING))
        for name, text, note in texts:
            missing = max(0, len(text) - best.get((k, name), 0))
            around = min(missing, len(text) - len(text.strip()))
            found[TRIMMED] += around
            found[note] += missing - around
    return found
