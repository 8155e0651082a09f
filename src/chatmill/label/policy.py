"""Policies: which kinds of token are trained, and with what weight; a small table next to the templates."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from chatmill.core.canonical import canonical_json
from chatmill.core.hashed_fields import hashed_fields
from chatmill.core.kinds import KINDS, MARK, REPEATED, Part, RoleCode, kind, parts_of, roles_of
from chatmill.core.message_parser import MAX_WEIGHT, MIN_WEIGHT, fits_float32
from chatmill.core.tokens import Tokens
from chatmill.errors import ConfigError, DataError
from chatmill.label.errors import ErrorRule

ANSWER = frozenset({Part.CONTENT, Part.REASONING, Part.TOOL_CALL, Part.TERMINATOR})
"""The parts of an assistant message that are its answer."""

NOT_HASHED = {
    "name": "it decides no weight",
    "weights": "hashed as the table that they make",
}
"""Fields of a policy that are not hashed as they are, with the reason; all others are."""


class Scope(StrEnum):
    """Which turns of a conversation a policy's table speaks of."""

    EVERY_TURN = "every_turn"
    LAST_TURN = "last_turn"
    """Only what comes after the last user message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A table from kind to weight. Weights are token-aligned: they say how much a token counts *as a target*.

    A message's own weight (`weight`, or 0 for `train: false`) multiplies the table's.
    """

    name: str
    weights: Mapping[tuple[RoleCode, Part], float]
    """Weight of each (role, part) that is trained; what is not named has weight 0."""
    scope: Scope = Scope.EVERY_TURN
    only_weighted_messages: bool = False
    """Train only messages that carry a weight of their own, whatever their role."""
    errors: ErrorRule | None = None
    """Do not train messages with a call whose result is an error by this rule."""

    def __post_init__(self) -> None:
        """Take a scope by its name, too; what is compared later is the member itself."""
        if self.scope not in list(Scope):
            raise ConfigError(f"policy {self.name!r}: scope {self.scope!r} is not one of {', '.join(Scope)}")
        object.__setattr__(self, "scope", Scope(self.scope))

    @property
    def fingerprint(self) -> str:
        """sha256 of all that decides weights: the table, as the numbers that it holds, and every other field."""
        table = self.table()
        weights = {
            f"{role.name}.{part.name}".lower(): float(table[kind(role, part)])
            for role, part in self.weights
            if table[kind(role, part)]
        }
        content = {**hashed_fields(self, NOT_HASHED), "weights": weights}
        return hashlib.sha256(canonical_json(content)).hexdigest()

    @property
    def trains_assistant_only(self) -> bool:
        """Whether no token of another role has a weight."""
        return not any(weight for (role, _), weight in self.weights.items() if role is not RoleCode.ASSISTANT)

    @property
    def trains_answers_only(self) -> bool:
        """Whether nothing but answers has a weight: no headers, no separators, no other roles."""
        trained = [key for key, weight in self.weights.items() if weight]
        return all(role is RoleCode.ASSISTANT and part in ANSWER for role, part in trained)

    @property
    def needs_messages(self) -> bool:
        """Whether kinds of tokens alone do not decide their weights."""
        return self.only_weighted_messages or self.errors is not None

    @property
    def is_local(self) -> bool:
        """Whether nothing but its kind and its message decides the weight of a token."""
        return self.trains_answers_only and self.scope is Scope.EVERY_TURN

    def table(self) -> NDArray[np.float32]:
        """Return one weight per kind code, flags included; index it with an array of kinds.

        Marks that a template writes count like the part they belong to. An answer that is context in its document is
        never trained.
        """
        table = np.zeros(256, dtype=np.float32)
        for (role, part), weight in self.weights.items():
            named = f"policy {self.name!r}: the weight of {role.name.lower()}.{part.name.lower()} is {weight!r}"
            if not (weight >= 0 and fits_float32(weight)):
                limits = f"from 0 to {MAX_WEIGHT:g}, above 0 from {MIN_WEIGHT:g} on"
                raise ConfigError(f"{named}; weights are numbers {limits}")
            if (part is Part.PAD or role is RoleCode.IMAGE) and weight:
                subject = "padding is" if part is Part.PAD else "pictures are"
                raise ConfigError(f"{named}; {subject} never trained")
            table[kind(role, part)] = weight
        table[MARK : MARK + KINDS] = table[:KINDS]
        return table

    def run_weights(self, tokens: Tokens) -> NDArray[np.float32]:
        """Return one weight per run of `tokens`; `tokens.per_token(...)` spreads them over the tokens.

        A message without a weight of its own counts as 1, or as 0 under `only_weighted_messages`.
        """
        weights = self.table()[tokens.run_kinds]
        if self.scope is Scope.LAST_TURN:
            weights = weights * _after_last_user(tokens.run_kinds, tokens.document_runs)
        default = np.float32(not self.only_weighted_messages)
        if np.isnan(tokens.message_weights).all():
            return weights * default
        message_weights = _own_weights(tokens)
        message_weights = np.where(np.isnan(message_weights), default, message_weights)
        if tokens.part_weights is not None:
            message_weights = _part_weights(tokens, tokens.part_weights, message_weights)
        with np.errstate(over="ignore", under="ignore"):
            products = weights * message_weights
        is_lost = (products == 0) & (weights > 0) & (message_weights > 0)
        if is_lost.any() or np.isinf(products).any():
            raise DataError(
                f"a message's weight times that of policy {self.name!r} is beyond what float32 holds: choose weights "
                "nearer to 1"
            )
        return products

    def document_weights(self, tokens: Tokens, records: NDArray[np.int64]) -> NDArray[np.float32]:
        """`run_weights` of documents, of which a record may have several; `records` has the record of each document.

        An answer is trained in one document, which its kinds say. The rest is not trained twice either: header and
        separator of an answer are trained where it is, and what is no assistant's in the last document of a record,
        which has it all, as are those of a message without an answer. No document depends on other records.
        """
        weights = self.run_weights(tokens)
        if self.trains_answers_only:
            return weights
        is_repeated = (tokens.run_kinds & REPEATED) != 0
        # Without answers as context, and with one document a record, nothing could be trained twice.
        if not is_repeated.any() and not added_documents(records).any():
            return weights
        documents = np.repeat(np.arange(len(tokens)), np.diff(tokens.document_runs))
        is_added, messages = (
            added_documents(records)[documents],
            tokens.message_offsets[documents] + tokens.run_messages,
        )
        is_assistant, of_message = roles_of(tokens.run_kinds) == RoleCode.ASSISTANT, tokens.run_messages >= 0
        in_answer = is_assistant & np.isin(parts_of(tokens.run_kinds), list(ANSWER))
        said = in_answer & of_message & (tokens.run_lengths > 0)
        trained, repeated = messages[said & ~is_repeated], messages[said & is_repeated]
        is_elsewhere = ~np.isin(messages, trained) & (np.isin(messages, repeated) | is_added)
        is_context = np.where(is_assistant, ~in_answer & of_message & is_elsewhere, is_added)
        return np.where(is_context, np.float32(0), weights)

    def token_weights(self, kinds: NDArray[np.uint8], offsets: NDArray[np.int64] | None = None) -> NDArray[np.float32]:
        """One weight per token, from stored kinds alone; `offsets` cut them into conversations (default: one)."""
        if self.needs_messages:
            raise ConfigError(f"policy {self.name!r} needs the messages, and kinds do not hold them")
        weights = self.table()[kinds]
        if self.scope is Scope.LAST_TURN:
            bounds = np.array([0, len(kinds)], dtype=np.int64) if offsets is None else offsets
            weights = weights * _after_last_user(kinds, bounds)
        return weights


def added_documents(records: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which documents another document of the same record comes after; `records` has the record of each."""
    return np.append(records[1:] == records[:-1], False)[: len(records)]


def _after_last_user(kinds: NDArray[np.uint8], offsets: NDArray[np.int64]) -> NDArray[np.float32]:
    """1 for each element after the last user element of its segment; a segment without a user is all 1."""
    positions = np.arange(len(kinds), dtype=np.int64)
    users = np.flatnonzero(roles_of(kinds) == RoleCode.USER)
    before = np.searchsorted(users, offsets[1:]) - 1
    last = np.where(before >= 0, users[before] if len(users) else -1, -1)
    return (positions > np.repeat(last, np.diff(offsets))).astype(np.float32)


def _part_weights(
    tokens: Tokens, part_weights: NDArray[np.float32], message_weights: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return the weight of each run's text: that of a part of its message where the part has one.

    A token of a message without a weight may cover a part of the next one: it has no more than its own message's.
    """
    is_filled = tokens.run_lengths > 0
    weights = np.full(len(message_weights), np.nan, dtype=np.float32)
    weights[is_filled] = part_weights[tokens.run_offsets[:-1][is_filled]]
    has_own = ~np.isnan(_own_weights(tokens))
    weights = np.where(has_own, weights, np.minimum(weights, message_weights))
    return np.where(np.isnan(weights), message_weights, weights)


def _own_weights(tokens: Tokens) -> NDArray[np.float32]:
    """Look up the weight of each run's message; NaN if it has none."""
    firsts = np.repeat(tokens.message_offsets[:-1], np.diff(tokens.document_runs))
    weights = tokens.message_weights[np.maximum(firsts + tokens.run_messages, 0)]
    return np.where(tokens.run_messages < 0, np.float32(np.nan), weights)
