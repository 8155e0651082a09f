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

import numpy as np
from numpy.typing import NDArray

from chatmill.build.ledger import Ledger, role_name
from chatmill.build.recipe import Recipe
from chatmill.core.conversation import Conversation, Message, Role
from chatmill.core.kinds import PARTS, Part, RoleCode, kind
from chatmill.core.tokens import Tokens
from chatmill.errors import DataError, TokenizerError
from chatmill.label.policy import Policy, Scope
from chatmill.label.presets import find_policy
from chatmill.pack.overflow import Overflow
from chatmill.pack.turns import outline
from chatmill.pack.windows import Piece, newest_turns, windows
from chatmill.render.emitter import Emitter
from chatmill.render.frames import KIND_BITS, KIND_MASK, Frame, FrameTable
from chatmill.render.registry import find_template
from chatmill.tokenizer.backends import Engine
from chatmill.tokenizer.load import load_tokenizer, with_control_tokens
from chatmill.tokenizer.protocol import Tokenizer


def reference_tokenizer(recipe: Recipe, control_tokens: Sequence[str] | None = None) -> tuple[Tokenizer, str]:
    """The tokenizer of a recipe on its reference engine, and the engine's name.

    Where no reference engine can encode the vocabulary it is the fast engine, and the name says so. `control_tokens`
    are added where the recipe adds some; by default those of its template, which is then loaded.
    """
    try:
        tokenizer = load_tokenizer(recipe.tokenizer, pattern=recipe.pattern, engine=Engine.REFERENCE)
    except TokenizerError as error:
        if "no reference engine" not in str(error):
            raise
        tokenizer = load_tokenizer(recipe.tokenizer, pattern=recipe.pattern)
    if recipe.add_control_tokens:
        names = find_template(recipe.template).control_tokens if control_tokens is None else control_tokens
        tokenizer = with_control_tokens(tokenizer, names)
    backend = getattr(tokenizer, "backend", None)
    return tokenizer, "UTF-8" if backend is None else str(backend.name)


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


class PlainEmitter(Emitter):
    """Takes what a template writes for one conversation, and makes tokens of it at once."""

    def __init__(self, table: FrameTable, tokenizer: Tokenizer, known: dict[str, list[int]]) -> None:
        """`known` keeps the ids of texts, so that the beginnings of one conversation are encoded once."""
        super().__init__(table)
        self.ids: list[int] = []
        self.kinds: list[int] = []
        self.messages: list[int] = []
        """Index of the message each token belongs to; -1 for none."""
        self._message = -1
        self._tokenizer, self._known = tokenizer, known

    def message(self, index: int) -> None:
        """What follows belongs to this message."""
        self._message = index

    def put(self, literal: int, kind: int) -> None:
        """The ids of a literal."""
        self._add(self._table.literals[literal], kind)

    def text(self, text: str, kind: int) -> None:
        """The ids of a text."""
        self.joined([(text, kind)])

    def fixed(self, frame: Frame) -> None:
        """Literals alone."""
        for run in self._table.frames[frame.number]:
            self.put(~(run >> KIND_BITS), run & KIND_MASK)

    def framed(self, frame: Frame, text: str) -> None:
        """Literals, the text with its head, literals."""
        runs = self._table.frames[frame.number]
        kinds = [run for run in runs if run >= 0]
        texts = [*([frame.head] if frame.head else []), text, *([frame.tail] if frame.tail else [])]
        written = False
        for run in runs:
            if run < 0:
                self.put(~(run >> KIND_BITS), run & KIND_MASK)
            elif not written:
                self.joined(list(zip(texts, kinds, strict=True)))
                written = True

    def framed_messages(self, messages: Sequence[Message], frames: Mapping[Role, Frame]) -> None:
        """One message after another."""
        for index, message in enumerate(messages):
            self.message(index)
            self.framed(frames[message.role], message.content)

    def joined(self, parts: Sequence[tuple[str, int]]) -> None:
        """The parts as one text; a token has the kind of the part its first byte lies in."""
        text = "".join(part for part, _ in parts)
        if text not in self._known:
            self._known[text] = self._tokenizer.encode(text)
        ids = self._known[text]
        ends = [self._tokens_before(prefix, text, ids) for prefix in accumulate(part for part, _ in parts[:-1])]
        for start, end, part in zip([0, *ends], [*ends, len(ids)], parts, strict=True):
            self._add(ids[start:end], part[1])

    def _tokens_before(self, prefix: str, text: str, ids: list[int]) -> int:
        """How many tokens of a text begin inside its prefix."""
        if not getattr(self._tokenizer, "bytes_add_up", True):
            encoded = np.array(ids, dtype=np.int32), np.array([0, len(ids)], dtype=np.int64)
            points = self._tokenizer.split_points(encoded, np.zeros(1, dtype=np.int64), [prefix], [text])
            return int(points[0])
        size, at = len(self._tokenizer.normalize(prefix).encode()), 0
        for count, token in enumerate(ids):
            if at >= size:
                return count
            at += len(self._tokenizer.token_bytes(token))
        return len(ids)

    def _add(self, ids: Sequence[int], kind: int) -> None:
        self.ids += ids
        self.kinds += [kind] * len(ids)
        self.messages += [self._message] * len(ids)

    def reopen(self) -> None:
        """Take the end of the document back: a conversation that goes on has none yet."""
        while self.kinds and self.messages[-1] < 0 and self.kinds[-1] % PARTS == Part.DOCUMENT:
            del self.ids[-1], self.kinds[-1], self.messages[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedEpisode:
    """What an episode must hold; one value per token."""

    ids: NDArray[np.uint32]
    weights: NDArray[np.float32]
    kinds: NDArray[np.uint8]
    turns: int
    """Assistant messages."""
    unended: int
    """Assistant messages that are trained, and their terminator is not."""

    @property
    def trained(self) -> int:
        """Tokens with a weight above 0."""
        return int(np.count_nonzero(self.weights))


@dataclass(slots=True, kw_only=True)
class Derived:
    """One conversation, rendered and labelled, and the episodes that overflow makes of it."""

    ids: list[int]
    kinds: list[int]
    messages: list[int]
    weights: list[float]
    stripped: int
    spans: list[list[Piece]] = field(default_factory=list)
    """The spans of tokens of each episode."""
    episodes: list[DerivedEpisode] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Whether the record stands in one episode, uncut."""
        return self.spans == [[Piece(0, len(self.ids))]]


class Reference:
    """A recipe bound to its reference tokenizer."""

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer) -> None:
        """`tokenizer` comes from `reference_tokenizer`."""
        self.recipe, self.tokenizer = recipe, tokenizer
        self.template = find_template(recipe.template)(tokenizer)
        self.policy = find_policy(recipe.policy or self.template.default_policy)
        self._known: dict[str, list[int]] = {}

    def derive(self, conversation: Conversation) -> Derived:
        """The tokens and episodes of a record; a `RecordError` where the template refuses it."""
        self._known.clear()
        self.template.check(conversation)
        out = self._emitter()
        self.template.emit(conversation, out)
        derived = Derived(
            ids=out.ids,
            kinds=out.kinds,
            messages=out.messages,
            weights=token_weights(self.policy, out.kinds, out.messages, conversation.messages),
            stripped=out.stripped,
        )
        derived.spans = self._spans(derived)
        derived.episodes = [_episode(derived, pieces) for pieces in derived.spans]
        return derived

    def prompt(self, conversation: Conversation, index: int) -> list[int]:
        """The generation prompt of a message that is not the first: all before it, and what opens an answer."""
        out = self._emitter()
        before = conversation._replace(messages=conversation.messages[:index])
        self.template.emit(before, out)
        out.reopen()
        self.template.emit_generation_prompt(before, out)
        return out.ids

    def opening(self, conversation: Conversation, index: int) -> list[int]:
        """The last part of the generation prompt: what opens an answer."""
        out = self._emitter()
        before = conversation._replace(messages=conversation.messages[:index])
        self.template.emit_generation_prompt(before, out)
        return out.ids

    def _emitter(self) -> PlainEmitter:
        return PlainEmitter(self.template.table, self.tokenizer, self._known)

    def _spans(self, derived: Derived) -> list[list[Piece]]:
        """What of the conversation stands in which episode, by the overflow policy."""
        length, capacity = len(derived.ids), self.recipe.packing.max_length
        if capacity is None or length <= capacity:
            return [[Piece(0, length)]]
        match self.recipe.packing.overflow:
            case Overflow.DROP:
                return []
            case Overflow.CUT:
                return [[Piece(0, capacity)]]
            case Overflow.DROP_OLDEST_TURNS:
                return [newest_turns(outline(_single_runs(derived), 0), capacity)]
            case Overflow.WINDOWS:
                return windows(
                    outline(_single_runs(derived), 0),
                    capacity,
                    lambda start, end: any(weight > 0 for weight in derived.weights[start:end]),
                )
        raise DataError(f"the record has {length:,} tokens, the limit is {capacity:,}, and overflow is an error")


def token_weights(
    policy: Policy, kinds: Sequence[int], messages: Sequence[int], sources: Sequence[Message]
) -> list[float]:
    """The weight of every token: the policy's table, its scope, and the weight of the token's own message."""
    table = {kind(role, part): weight for (role, part), weight in policy.weights.items()}
    last_user = max((place for place, code in enumerate(kinds) if code // PARTS == RoleCode.USER), default=-1)
    default = 0.0 if policy.only_weighted_messages else 1.0
    weights: list[float] = []
    for place, (code, message) in enumerate(zip(kinds, messages, strict=True)):
        weight = table.get(code, 0.0)
        if weight == 0 or (policy.scope is Scope.LAST_TURN and place <= last_user):
            weights.append(0.0)
            continue
        own = sources[message].weight if message >= 0 else None
        weights.append(float(np.float32(weight) * np.float32(default if own is None else own)))  # as it is stored
    return weights


def _single_runs(derived: Derived) -> Tokens:
    """The conversation as a batch of one, in which every token is a run."""
    count = len(derived.ids)
    return Tokens(
        ids=np.array(derived.ids, dtype=np.int32),
        offsets=np.array([0, count], dtype=np.int64),
        run_offsets=np.arange(count + 1, dtype=np.int64),
        run_kinds=np.array(derived.kinds, dtype=np.uint8),
        run_messages=np.array(derived.messages, dtype=np.int32),
        conversation_runs=np.array([0, count], dtype=np.int64),
        message_offsets=np.array([0, max(derived.messages, default=-1) + 1], dtype=np.int64),
        message_weights=np.full(max(derived.messages, default=-1) + 1, np.nan, dtype=np.float32),
    )


def _episode(derived: Derived, pieces: Sequence[Piece]) -> DerivedEpisode:
    """Copy the spans of one episode; what is injected is not trained."""
    places = [(place, piece.injected) for piece in pieces for place in range(piece.start, piece.end)]
    weights = [0.0 if injected else derived.weights[place] for place, injected in places]
    kinds = [derived.kinds[place] for place, _ in places]
    turns: list[tuple[bool, bool]] = []  # of each assistant message: is it trained; is its end, or does it go on
    message = role_before = None
    for (place, _), weight, code in zip(places, weights, kinds, strict=True):
        role, part = divmod(code, PARTS)
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
        unended=sum(trained and not ended for trained, ended in turns),
    )


def account(ledger: Ledger, conversation: Conversation, derived: Derived, overflow: str) -> None:
    """Enter one built or dropped record, as the ledger of a build has it."""
    source, dropped = conversation.source, not derived.episodes
    kept = [False] * len(derived.ids)
    injected: Counter[int] = Counter()
    for piece in (piece for pieces in derived.spans for piece in pieces):
        if piece.injected:
            injected.update(derived.kinds[piece.start : piece.end])
        else:
            kept[piece.start : piece.end] = [True] * (piece.end - piece.start)
    trained = [weight > 0 for weight in derived.weights]
    for (code, is_trained, is_kept), count in Counter(zip(derived.kinds, trained, kept, strict=True)).items():
        name = "trained" if is_trained else "context"
        fate = name if is_kept else f"{'dropped' if dropped else 'cut'}_{name}"
        ledger.tokens[source, role_name(code // PARTS), "rendered"] += count
        ledger.tokens[source, role_name(code // PARTS), fate] += count
    for code, count in injected.items():
        ledger.tokens[source, role_name(code // PARTS), "injected"] += count
    outcome = ("skipped", f"overflow_{overflow}") if dropped else ("built", "")
    ledger.records[source, *outcome] += 1
    ledger.notes[source, "stripped_characters"] += derived.stripped
    ledger.notes[source, "episodes"] += len(derived.episodes)
    ledger.notes[source, "untrained_terminators"] += sum(episode.unended for episode in derived.episodes)
    without = not dropped and not any(episode.trained for episode in derived.episodes)
    ledger.notes[source, "records_without_trained_tokens"] += without
