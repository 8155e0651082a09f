"""One item to look at: an episode, a row of several, a document of a distillation set, or what was just rendered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.kinds import Part, parts_of, roles_of
from chatmill.core.tokens import Tokens
from chatmill.core.trees import Branches, rows_of_tree
from chatmill.errors import ConfigError
from chatmill.images.column import StoredPicture, picture_columns, stored_pictures
from chatmill.images.expand import NO_PICTURES, PictureRuns

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One item; padding is not among its tokens. Arrays have one value per token and are not to be written to."""

    split: str
    number: int
    """Counted from 0 in its split."""
    ids: NDArray[np.integer]
    weights: NDArray[Any] | None
    """Token-aligned: how much each token counts as a target; None where none are stored: every token counts."""
    kinds: NDArray[np.uint8] | None
    """What each token is (`chatmill.core.kinds`); None where kinds are not stored."""
    spans: NDArray[np.uint8] | None = None
    """Token-aligned, of KD sets: 1 analysis, 2 final, 0 neither."""
    messages: NDArray[np.integer] | None = None
    """The message of each token in its record, -1 for none; only of what was just rendered."""
    starts: Ints
    """Where each document starts; the first is 0 (none for an item without tokens)."""
    branches: tuple[tuple[int, int], ...] = ()
    """Of trees: the first token of each branch, and its position in its tree; it is a copy of the token before."""
    has_starts: bool = True
    """False where the files say nothing about documents: the item is then taken as one."""
    documents: Ints | None = None
    """The numbers of a row's documents in the order of the build; None where none are stored."""
    document_ids: tuple[str, ...] | None = None
    """The record of each document of a packed row; None where that is not stored."""
    capacity: int | None = None
    """Positions of the row, padding included; None where rows have no fixed size."""
    record_id: str | None = None
    source: str | None = None
    turns: int | None = None
    side: str | None = None
    """Which answer of a pair it is, or whether people liked it; None where nobody compared it."""
    pictures: tuple[StoredPicture, ...] = ()
    """Its pictures, with their places in it."""
    features: tuple[str, ...] = ()
    """Names of what is stored for it."""
    problem: str | None = None
    """What is wrong with the stored boundaries, in words."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def padding(self) -> int:
        """Positions after the tokens."""
        return 0 if self.capacity is None else self.capacity - len(self.ids)

    @property
    def is_trained(self) -> NDArray[np.bool_]:
        """Which tokens are targets."""
        return np.ones(len(self.ids), dtype=np.bool_) if self.weights is None else np.asarray(self.weights > 0)

    @property
    def trained(self) -> int:
        """How many tokens are targets."""
        return int(np.count_nonzero(self.is_trained))

    @property
    def borders(self) -> list[tuple[int, int]]:
        """First token and end of every document."""
        ends = [*self.starts[1:].tolist(), len(self.ids)]
        return list(zip(self.starts.tolist(), ends, strict=False))

    @property
    def message_starts(self) -> Ints:
        """Where each message starts; each document where kinds are not stored."""
        if self.messages is not None:
            return np.flatnonzero(np.diff(self.messages, prepend=-2))
        texts = np.union1d(self.starts, np.array([start for start, _ in self.branches], dtype=np.int64))
        return texts if self.kinds is None else message_starts(self.kinds, texts)

    def row(self, branch: int) -> Item:
        """Make the row of one branch of a tree, 0 for the trunk: what a model would read up to its end.

        What is trained in an earlier row is not trained here.
        """
        if len(self.starts) != 1 or not 0 <= branch <= len(self.branches):
            raise ConfigError(
                f"there is no branch {branch}: this {'item' if len(self.starts) != 1 else 'tree'} has "
                f"{len(self.branches)}, and 0 is the trunk"
            )
        places = np.array(self.branches, dtype=np.int64).reshape(-1, 2)
        of_tree = Branches(offsets=np.array([0, len(places)]), starts=places[:, 0], depths=places[:, 1])
        ends = of_tree.positions_and_ends(np.array([len(self.ids)]))[1]
        path, older = list(rows_of_tree(ends, places[:, 0]))[branch]
        weights = None if self.weights is None else np.where(np.arange(len(path)) < older, 0, self.weights[path])
        kinds = None if self.kinds is None else self.kinds[path]
        return replace(self, ids=self.ids[path], weights=weights, kinds=kinds, branches=())

    def run_starts(self) -> Ints:
        """Find where runs start: neighbouring tokens of one document, message, kind, span and weight."""
        begins = np.zeros(len(self.ids), dtype=np.bool_)
        begins[self.message_starts] = True
        for column in (self.kinds, self.weights, self.spans):
            if column is not None and len(column):
                begins[1:] |= column[1:] != column[:-1]
        return np.flatnonzero(begins)


def pictures_of(lines: Sequence[str | None] | None, offsets: Ints) -> tuple[StoredPicture, ...]:
    """Read the pictures of documents from their lines of the column; `offsets` are the starts of the documents."""
    return tuple(
        picture._replace(start=picture.start + at, stop=picture.stop + at)
        for line, at in zip(lines or (), offsets.tolist(), strict=False)
        for picture in stored_pictures(line)
    )


def item_of_tokens(
    tokens: Tokens, number: int, weights: NDArray[np.float32], pictures: PictureRuns = NO_PICTURES
) -> Item:
    """Make an item of one conversation of a rendered batch; `weights` are those of the batch's runs."""
    first, last = tokens.document_runs[number : number + 2]
    conversation = tokens.conversation(number)
    return Item(
        split="",
        number=number,
        ids=conversation.ids,
        weights=conversation.per_token(weights[first:last]),
        kinds=conversation.kinds,
        messages=conversation.messages,
        starts=np.zeros(min(1, len(conversation.ids)), dtype=np.int64),
        pictures=pictures_of([picture_columns(tokens, pictures)[0][number]], np.zeros(1, dtype=np.int64)),
    )


def message_starts(kinds: NDArray[np.uint8], starts: Ints) -> Ints:
    """Find where messages start in flat kinds; `starts` are those of the documents.

    A message starts with its document, with another role, and with a header after an ended message. Several that a
    template writes into one (tool results in Qwen3) count as one.
    """
    begins = np.zeros(len(kinds), dtype=np.bool_)
    begins[starts[starts < len(kinds)]] = True
    if len(kinds):
        roles, parts = roles_of(kinds), parts_of(kinds)
        ended = (parts == Part.TERMINATOR) | (parts == Part.SEPARATOR)
        begins[1:] |= (roles[1:] != roles[:-1]) | ((parts[1:] == Part.HEADER) & ended[:-1])
    return np.flatnonzero(begins)
