"""The documents of one batch as one table, and what becomes of them.

    conversation ──► document ──► episode
    (of the batch)   (rendered)   (what overflow leaves of a document, or a tree of several of these)

A conversation has one document or several. Documents are numbered as rendering gives them, and each has the number of
its conversation, of its record and of its source. The two answers of a pair are two conversations of one record. An
episode is known by the document that it begins with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from chatmill.compiler.accounts import (
    TurnSums,
    account,
    account_records,
    account_trees,
    empty_answers,
    note,
    note_saved_by_trees,
    reasoning_of,
    sum_turns,
)
from chatmill.compiler.pairs import margins_of, sides_of
from chatmill.core.conversations import Conversations
from chatmill.core.ledger import (
    AS_SAMPLED,
    CALLS_FAILED,
    EMPTY_ANSWERS,
    HIDDEN_REASONING,
    IN_ADDED_ROWS,
    LOGPROBS_LEFT,
    LOST_CONTENT,
    LOST_REASONING,
    MIXED,
    REASONING,
    TRIMMED,
    Ledger,
)
from chatmill.core.native.gather import gathered
from chatmill.core.shared_rows import SharedRows
from chatmill.core.tokens import Tokens, segment_sums
from chatmill.core.trees import Branches
from chatmill.errors import ConfigError, RecordError
from chatmill.images.expand import PictureRuns
from chatmill.label.policy import added_documents
from chatmill.pack.overflow import OverflowResult
from chatmill.pack.trees import Trees, put_into_trees
from chatmill.render.render import Rendered
from chatmill.render.sampled import NOTES as SAMPLED
from chatmill.store.shard_writer import as_bytes

if TYPE_CHECKING:
    from chatmill.compiler.recipe import Recipe

ScalarT = TypeVar("ScalarT", bound=np.generic)
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
NAMED = 5
"""Records that a failed gate names."""
NO_LIMIT = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """Episodes of one batch, as columns."""

    tokens: Tokens
    weights: NDArray[np.generic]
    """Token-aligned; uint8 where every weight is 0 or 1."""
    source_index: NDArray[np.int64]
    """Which conversation of the batch each episode comes from."""
    source_names: Sequence[str]
    source_codes: NDArray[np.int64]
    """The source of each episode, as a number among `source_names`."""
    turns: NDArray[np.int64]
    """Assistant messages of each episode."""
    trained: NDArray[np.int64]
    """Trained tokens of each episode."""
    branches: Branches | None
    """Those of each episode where episodes are trees; None where they are rows."""
    failed: tuple[tuple[int, RecordError], ...]
    """Conversations that the template refused."""
    ledger: Ledger
    pictures: PictureRuns
    """The runs of the tokens that are pictures."""
    stopped_by: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    """The first conversations that each gate is about."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """The first conversation that overflow dropped, by the reason in the ledger."""
    sides: NDArray[np.uint8] | None = None
    """The `Side` of each episode; None where all are ordinary ones."""
    margins: NDArray[np.float32] | None = None
    """The margin of the pair of each, NaN for none."""

    def picked(self, values: NDArray[ScalarT], episodes: NDArray[np.int64]) -> NDArray[ScalarT]:
        """Token-aligned values of some episodes, flat; those of all episodes without a copy."""
        tokens = self.tokens
        if len(episodes) == len(tokens):
            return values
        return gathered([values], np.zeros(len(episodes), np.uint8), tokens.offsets[episodes], tokens.lengths[episodes])

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """Log-probabilities of the tokens, NaN if there are none."""
        logprobs, count = self.tokens.logprobs, len(self.tokens.ids)
        return np.full(count, np.nan, dtype=np.float32) if logprobs is None else logprobs


class BatchDocuments:
    """All documents of a batch, one line for each."""

    def __init__(
        self,
        batch: Conversations,
        rendered: Rendered,
        failed_calls: Ints,
        notes: Mapping[int, Mapping[str, int]],
    ) -> None:
        """Take the documents as they are rendered.

        Args:
            batch: The conversations.
            rendered: Their documents, by the numbers of their conversations.
            failed_calls: For each conversation the failed calls that are not trained.
            notes: What was repaired, by conversation.
        """
        self.batch = batch
        self.rendered = rendered
        self.conversations: Ints = rendered.kept
        """The conversation of each document."""
        self.records: Ints = batch.records[rendered.kept]
        """Its record: the first conversation of a pair."""
        self.source_names: Sequence[str] = batch.sources.names
        self.sources: Ints = batch.sources.codes[self.records]
        """Its source, as a number among `source_names`."""
        self._failed_calls = failed_calls
        self._notes = notes

    @cached_property
    def is_first(self) -> Flags:
        """Whether a document is the first one of its record."""
        records = self.records
        return np.append(True, records[1:] != records[:-1])[: len(records)]

    @cached_property
    def firsts(self) -> Ints:
        """First document of each record."""
        return np.flatnonzero(self.is_first)

    @cached_property
    def record_numbers(self) -> Ints:
        """The record of each document, counted from 0."""
        return np.cumsum(self.is_first) - 1

    @cached_property
    def is_added(self) -> Flags:
        """Documents besides the last one of their conversation, which renders the whole conversation as a rule."""
        return added_documents(self.conversations)

    def note(self, ledger: Ledger, name: str, counts: Ints) -> None:
        """Note counts of all documents, by their sources."""
        note(ledger, self.source_names, self.sources, name, counts)

    def note_all(self, ledger: Ledger, *, keeps_logprobs: bool) -> None:
        """Note what rendering says of the documents, and what is not kept of their conversations."""
        rendered, batch = self.rendered, self.batch
        opens = np.diff(self.conversations, prepend=-1) > 0

        def of_conversations(counts: Ints) -> Ints:
            return np.where(opens, counts[self.conversations], 0)

        for name, counts in (
            (TRIMMED, rendered.stripped - rendered.lost.sum(axis=1)),
            (LOST_CONTENT, rendered.lost[:, 0]),
            (LOST_REASONING, rendered.lost[:, 1]),
            (HIDDEN_REASONING, rendered.lost[:, 2]),
            (REASONING, of_conversations(reasoning_of(batch))),
            (EMPTY_ANSWERS, of_conversations(empty_answers(batch))),
            (CALLS_FAILED, of_conversations(self._failed_calls)),
            ("turns_that_later_messages_change", rendered.unstable),
            ("turns_without_proof", rendered.untrained),
            ("stops_appended", rendered.appended),
            (AS_SAMPLED, rendered.as_sampled),
            (MIXED, rendered.mixed),
            ("rows_added", self.is_added.astype(np.int64)),
            *zip(SAMPLED, rendered.sampled.T, strict=True),
        ):
            self.note(ledger, name, counts)
        if not keeps_logprobs and len(batch.messages.logprobs.data):
            has_some = np.zeros(len(batch), dtype=np.int64)
            has_some[batch.records[batch.owners(np.flatnonzero(batch.messages.logprobs.present))]] = 1
            self.note(ledger, LOGPROBS_LEFT, np.where(self.is_first, has_some[self.records], 0))
        for conversation, counted in self._notes.items():
            for name, count in counted.items():
                ledger.notes[batch.sources[conversation], name] += count


class Labelled(NamedTuple):
    """Documents with the weights of their runs."""

    rows: SharedRows
    run_weights: NDArray[np.float32]
    sums: TurnSums


class Episodes(NamedTuple):
    """What is stored."""

    tokens: Tokens
    run_weights: NDArray[np.float32]
    branches: Branches | None
    """None where episodes are rows."""
    documents: Ints
    """The document that each begins with."""
    turns: Ints
    trained: Ints
    """Trained tokens of each."""


class Outcome:
    """What becomes of the documents of a batch."""

    def __init__(self, recipe: Recipe, documents: BatchDocuments, labelled: Labelled, fitted: OverflowResult) -> None:
        """`fitted` is what overflow has left of the documents, with the weights of `labelled`."""
        self._recipe = recipe
        self._documents = documents
        self._labelled = labelled
        self._fitted = fitted
        self._is_cut = fitted.tokens is not labelled.rows.merged
        sums = labelled.sums
        if self._is_cut:
            sums = sum_turns(fitted.tokens, fitted.run_weights)
        self._sums: TurnSums = sums
        self._lengths: Ints = fitted.tokens.lengths if self._is_cut else labelled.rows.lengths
        """Tokens of each document that is left."""

    @cached_property
    def _is_dropped(self) -> Flags:
        """Records of which overflow left no document."""
        documents = self._documents
        lost = np.zeros(len(documents.records), dtype=np.bool_)
        lost[self._fitted.dropped] = True
        is_dropped = np.ones(len(documents.firsts), dtype=np.bool_)
        is_dropped[documents.record_numbers[~lost]] = False
        return is_dropped

    @cached_property
    def _untrained_records(self) -> Flags:
        """Records that are built, and of which nothing is trained."""
        documents = self._documents
        owners = documents.record_numbers[self._fitted.source_index]
        built = np.bincount(owners, weights=self._sums.trained, minlength=len(documents.firsts))
        is_untrained: Flags = (built == 0) & ~self._is_dropped
        return is_untrained

    @property
    def _dropped_reason(self) -> str:
        return f"overflow_{self._recipe.packing.overflow}"

    def account(self, ledger: Ledger) -> tuple[Ints, Ints]:
        """Enter all tokens and records under what becomes of them; return the sums of tokens as `accounts.account`."""
        documents, labelled, fitted = self._documents, self._labelled, self._fitted
        names, sources = documents.source_names, documents.sources
        accounted = account(ledger, names, sources, labelled.rows, labelled.run_weights, fitted)
        account_records(ledger, names, sources[documents.firsts], self._is_dropped, self._dropped_reason)
        is_added = documents.is_added[fitted.source_index]
        note(ledger, names, sources[fitted.source_index], IN_ADDED_ROWS, np.where(is_added, self._lengths, 0))
        return accounted

    def rows(self) -> Episodes:
        """Return the documents that are left as they are."""
        fitted = self._fitted
        sums = self._sums
        return Episodes(fitted.tokens, fitted.run_weights, None, fitted.source_index, sums.turns, sums.trained)

    def trees(self, ledger: Ledger, groups: Ints | None, accounted: tuple[Ints, Ints]) -> Episodes:
        """Put the documents that are left into trees, and account for what these share."""
        documents, fitted = self._documents, self._fitted
        names, sources = documents.source_names, documents.sources
        left = SharedRows.apart(fitted.tokens) if self._is_cut else self._labelled.rows
        trees = self._planted(left, groups)
        first = fitted.source_index[trees.first_row]
        account_trees(ledger, names, sources[first], accounted, trees)
        note_saved_by_trees(ledger, names, sources, fitted, self._lengths, trees)
        tokens, weights = trees.tokens, trees.run_weights
        trained = segment_sums(np.where(weights > 0, tokens.run_lengths, 0), tokens.document_runs)
        if documents.batch.sides is not None and len(tokens) != np.count_nonzero(~self._is_dropped):
            raise ConfigError(
                "a pair of answers as one tree is longer than packing.max_length, "
                f"{self._recipe.packing.max_length:,} tokens: choose a larger one, or expand: turns"
            )
        return Episodes(tokens, weights, trees.branches, first, trees.turns, trained)

    def note_trees(self, ledger: Ledger) -> None:
        """Note how many tokens trees would save."""
        documents, fitted = self._documents, self._fitted
        if documents.is_added.any():
            trees = self._planted(SharedRows.apart(fitted.tokens), None)
            note_saved_by_trees(ledger, documents.source_names, documents.sources, fitted, self._lengths, trees)

    def _planted(self, rows: SharedRows, groups: Ints | None) -> Trees:
        """Put rows into trees: those of a record into one, or those of a group of records."""
        fitted = self._fitted
        records = self._documents.records[fitted.source_index]
        owners = records if groups is None else groups[records]
        flags = (fitted.injected_runs, fitted.later_runs)
        longest = self._recipe.packing.max_length or NO_LIMIT
        return put_into_trees(rows, fitted.run_weights, *flags, records, owners, longest)

    def compiled(self, episodes: Episodes, ledger: Ledger) -> Compiled:
        """Return episodes as columns."""
        documents, fitted = self._documents, self._fitted
        batch, records = documents.batch, documents.records
        conversations = documents.conversations[episodes.documents]
        return Compiled(
            tokens=episodes.tokens,
            weights=episodes.tokens.per_token(as_bytes(episodes.run_weights)),
            source_index=records[episodes.documents],
            source_names=documents.source_names,
            source_codes=documents.sources[episodes.documents],
            turns=episodes.turns,
            trained=episodes.trained,
            branches=episodes.branches,
            failed=documents.rendered.failed,
            ledger=ledger,
            pictures=documents.rendered.pictures.taken(fitted.source_runs),
            stopped_by=self._stopped_by(),
            left_out=self._left_out(),
            sides=sides_of(batch, conversations, is_tree=episodes.branches is not None),
            margins=margins_of(batch, conversations),
        )

    def _stopped_by(self) -> dict[str, Ints]:
        """Return the first records that each gate is about."""
        documents, fitted = self._documents, self._fitted
        untrained = documents.firsts[np.flatnonzero(self._untrained_records)[:NAMED]]
        unended = fitted.source_index[np.flatnonzero(self._sums.unended)[:NAMED]]
        return {
            "records_without_trained_tokens": documents.records[untrained],
            "untrained_terminators": documents.records[unended],
            "trained_tokens_lost": documents.records[self._losers()],
        }

    def _losers(self) -> Ints:
        """Return the first documents that lose trained tokens."""
        tokens = self._labelled.rows.merged
        is_lost = self._fitted.kept_of_run < tokens.run_lengths
        runs = np.flatnonzero((self._labelled.run_weights > 0) & is_lost)
        return np.unique(np.searchsorted(tokens.document_runs, runs, side="right") - 1)[:NAMED]

    def _left_out(self) -> dict[str, int]:
        """Return the first record that overflow dropped, by the reason in the ledger."""
        documents = self._documents
        if not self._is_dropped.any():
            return {}
        return {self._dropped_reason: int(documents.records[documents.firsts[self._is_dropped][0]])}

    def note_episodes(self, ledger: Ledger, episodes: Episodes) -> None:
        """Note how many episodes there are, and what is wrong with them."""
        documents = self._documents
        names, sources = documents.source_names, documents.sources
        note(ledger, names, sources[self._fitted.source_index], "untrained_terminators", self._sums.unended)
        counts = np.ones(len(episodes.tokens), dtype=np.int64)
        note(ledger, names, sources[episodes.documents], "episodes", counts)
        untrained = self._untrained_records.astype(np.int64)
        note(ledger, names, sources[documents.firsts], "records_without_trained_tokens", untrained)
