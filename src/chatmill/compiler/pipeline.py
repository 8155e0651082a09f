"""The path of one batch: conversations to rendered, labelled and fitted episodes, with every token accounted for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

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
from chatmill.compiler.pairs import KeptOfPair, margins_of, refuse_pictures, sides_of, whole_pairs
from chatmill.compiler.repairs import render_repaired
from chatmill.core.checksums import Hash
from chatmill.core.conversation import Conversation
from chatmill.core.conversations import Conversations
from chatmill.core.hash_shares import hash_limit, hash_of
from chatmill.core.ledger import (
    AS_SAMPLED,
    CALLS_FAILED,
    EMPTY_ANSWERS,
    IN_ADDED_ROWS,
    LOGPROBS_LEFT,
    LOST_CONTENT,
    LOST_REASONING,
    MIXED,
    REASONING,
    TRIMMED,
    Ledger,
)
from chatmill.core.model_vocabulary import model_vocabulary, refuse_beyond
from chatmill.core.native.gather import gathered
from chatmill.core.shared_rows import SharedRows
from chatmill.core.tokens import Tokens, segment_sums
from chatmill.core.trees import Branches
from chatmill.errors import ConfigError, RecordError
from chatmill.images.expand import PictureRuns
from chatmill.images.files import Pictures, picture_folder
from chatmill.label.policy import Policy, Scope, added_documents
from chatmill.label.presets import find_policy, policy_files
from chatmill.pack.overflow import OverflowResult, apply_overflow
from chatmill.pack.trees import Trees, put_into_trees
from chatmill.render.jinja.options import Expand, TemplateOptions
from chatmill.render.model_template import ModelTemplate
from chatmill.render.registry import bind, files_read, find_template
from chatmill.render.sampled import NOTES as SAMPLED
from chatmill.store.shard_writer import as_bytes
from chatmill.tokenizer.backends import Engine
from chatmill.tokenizer.load import load_tokenizer, with_control_tokens
from chatmill.tokenizer.probe import ProbeAnswers, answers_of
from chatmill.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from chatmill.compiler.recipe import Recipe

ScalarT = TypeVar("ScalarT", bound=np.generic)
BATCH_BYTES = 16 << 20
"""Bytes of lines that are rendered together; bounds the memory of a worker. Every batch costs some milliseconds."""
NAMED = 5
"""Records that a failed gate names."""
NO_LIMIT = np.iinfo(np.int64).max
GROWN = (
    "Choose the model's own template (leave --template and --add-control-tokens out); if the model is to grow, say its "
    "new size with vocab_size (--set vocab_size=N)"
)


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


class Pipeline:
    """A recipe bound to its tokenizer, template and policy; made once per process."""

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer | None = None, engine: Engine = Engine.FAST) -> None:
        """Load tokenizer, template and policy; `tokenizer` replaces that of the recipe (for `verify`'s reference)."""
        self.recipe = recipe
        self.files = files_of(recipe)
        """What the files that are loaded here hold."""
        template = find_template(recipe.template)
        loaded = tokenizer or load_tokenizer(recipe.tokenizer, engine=engine, strict_text=recipe.strict_text)
        if recipe.add_control_tokens:
            loaded = with_control_tokens(loaded, template.control_tokens)
        self.policy: Policy = find_policy(recipe.policy or template.default_policy)
        self.template: ModelTemplate = bind(template, loaded, template_options(recipe, self.policy))
        self.batch_sizes = growing_sizes()
        """Bytes of the batches of lines that this process compiles."""
        model = model_vocabulary(recipe.vocab_size or recipe.tokenizer)
        self.vocabulary = model if model is not None and model.size < self.template.tokenizer.vocab_size else None
        """What the model has embeddings for, where the tokenizer has more ids than that."""
        if self.vocabulary is not None and recipe.add_control_tokens:
            ids = [self.template.tokenizer.control_ids[name] for name in template.control_tokens]
            refuse_beyond(max(ids, default=0), self.vocabulary, f"the template {template.name} adds", GROWN)

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """What decides the tokens besides the input, each as a sha256."""
        fingerprints = {
            "tokenizer": self.template.tokenizer.fingerprint,
            "template": self.template.fingerprint,
            "policy": self.policy.fingerprint,
        }
        if self.template.expander is not None:
            fingerprints["images"] = self.template.expander.rule.fingerprint
        return fingerprints

    @cached_property
    def answers(self) -> ProbeAnswers:
        """What the engine, which was checked here, makes of the probe."""
        return answers_of(self.template.tokenizer)

    def compile(
        self,
        conversations: Sequence[Conversation],
        groups: NDArray[np.int64] | None = None,
    ) -> Compiled:
        """Render, label and fit a batch; with `expand: tree` put its rows into trees.

        `groups` has a number for each conversation: neighbours with the same one share a tree (default: none do).
        """
        batch = conversations if isinstance(conversations, Conversations) else Conversations.of(conversations)
        recipe = self.recipe
        failed_calls = np.zeros(len(batch), dtype=np.int64)
        if self.policy.errors is not None:
            batch, failed_calls = self.policy.errors.without_failed(batch)
        batch, rendered, notes = render_repaired(batch, self.template, recipe.repairs, recipe.not_shown)
        if batch.sides is not None or recipe.expand is Expand.TREE:
            rendered = refuse_pictures(batch, rendered)
        if batch.sides is not None:
            rendered = whole_pairs(batch, rendered, KeptOfPair.by(recipe))
        conversations_of, packing = rendered.kept, self.recipe.packing
        rendered = replace(rendered, kept=batch.records[rendered.kept])  # the two rows of a pair are of one record
        rows, run_weights, sums = self._labelled(rendered.rows, conversations_of)
        tokens = rows.merged
        if self.vocabulary is not None:
            refuse_beyond(int(tokens.ids.max(initial=0)), self.vocabulary, "the conversations have", GROWN)
        fitted = apply_overflow(
            tokens,
            run_weights,
            packing.max_length or NO_LIMIT,
            packing.overflow,
            rendered.kept if batch.sides is not None else None,
            name_of=lambda document: batch.keys[int(rendered.kept[document])],
        )
        names, codes = batch.sources.names, batch.sources.codes[rendered.kept]
        ledger = Ledger()
        records = _Records(rendered.kept, conversations_of, fitted)
        accounted = account(ledger, names, codes, rows, run_weights, fitted)
        dropped = f"overflow_{packing.overflow}"
        account_records(ledger, names, codes[records.firsts], records.is_dropped, dropped)
        is_cut = fitted.tokens is not tokens
        trained, turns, unended, _ = sum_turns(fitted.tokens, fitted.run_weights) if is_cut else sums
        built = np.bincount(records.of_document[fitted.source_index], weights=trained, minlength=len(records.firsts))
        untrained = (built == 0) & ~records.is_dropped
        episodes, weights, branches, source = fitted.tokens, fitted.run_weights, None, fitted.source_index
        in_rows = fitted.tokens.lengths if is_cut else rows.lengths
        note(ledger, names, codes[source], IN_ADDED_ROWS, np.where(records.is_added[source], in_rows, 0))
        if self.recipe.expand is Expand.TREE:
            left = SharedRows.apart(fitted.tokens) if is_cut else rows
            trees = _planted(rendered.kept, left, fitted, groups, packing.max_length)
            episodes, weights, branches = trees.tokens, trees.run_weights, trees.branches
            source, turns = fitted.source_index[trees.first_row], trees.turns
            account_trees(ledger, names, codes[source], accounted, trees)
            note_saved_by_trees(ledger, names, codes, fitted, in_rows, trees)
            trained = segment_sums(np.where(weights > 0, episodes.run_lengths, 0), episodes.document_runs)
            if batch.sides is not None and len(episodes) != np.count_nonzero(~records.is_dropped):
                raise ConfigError(
                    f"a pair of answers as one tree is longer than packing.max_length, {packing.max_length:,} tokens: "
                    "choose a larger one, or expand: turns"
                )
        elif self.recipe.expand is Expand.TURNS and records.is_added.any():
            whole = SharedRows.apart(fitted.tokens)
            trees = _planted(rendered.kept, whole, fitted, None, packing.max_length)
            note_saved_by_trees(ledger, names, codes, fitted, in_rows, trees)
        compiled = Compiled(
            tokens=episodes,
            weights=episodes.per_token(as_bytes(weights)),
            source_index=rendered.kept[source],
            source_names=names,
            source_codes=codes[source],
            turns=turns,
            trained=trained,
            branches=branches,
            failed=rendered.failed,
            ledger=ledger,
            pictures=rendered.pictures.taken(fitted.source_runs),
            stopped_by={
                "records_without_trained_tokens": rendered.kept[records.firsts[np.flatnonzero(untrained)[:NAMED]]],
                "untrained_terminators": rendered.kept[fitted.source_index[np.flatnonzero(unended)[:NAMED]]],
                "trained_tokens_lost": rendered.kept[_losers(tokens, run_weights, fitted)],
            },
            left_out={dropped: int(rendered.kept[records.firsts[records.is_dropped][0]])}
            if records.is_dropped.any()
            else {},
            sides=sides_of(batch, conversations_of[source], is_tree=branches is not None),
            margins=margins_of(batch, conversations_of[source]),
        )
        opens = np.diff(conversations_of, prepend=-1) > 0
        for name, counts in (
            (TRIMMED, rendered.stripped - rendered.lost.sum(axis=1)),
            (LOST_CONTENT, rendered.lost[:, 0]),
            (LOST_REASONING, rendered.lost[:, 1]),
            (REASONING, np.where(opens, reasoning_of(batch)[conversations_of], 0)),
            (EMPTY_ANSWERS, np.where(opens, empty_answers(batch)[conversations_of], 0)),
            (CALLS_FAILED, np.where(opens, failed_calls[conversations_of], 0)),
            ("turns_that_later_messages_change", rendered.unstable),
            ("turns_without_proof", rendered.untrained),
            ("stops_appended", rendered.appended),
            (AS_SAMPLED, rendered.as_sampled),
            (MIXED, rendered.mixed),
            ("rows_added", records.is_added.astype(np.int64)),
            *zip(SAMPLED, rendered.sampled.T, strict=True),
        ):
            note(ledger, names, codes, name, counts)
        if not self.recipe.logprobs and len(batch.messages.logprobs.data):
            has_some = np.zeros(len(batch), dtype=np.int64)
            has_some[batch.records[batch.owners(np.flatnonzero(batch.messages.logprobs.present))]] = 1
            note(ledger, names, codes, LOGPROBS_LEFT, np.where(records.is_first, has_some[rendered.kept], 0))
        for place, record_notes in notes.items():
            for name, count in record_notes.items():
                ledger.notes[batch.sources[place], name] += count
        note(ledger, names, codes[fitted.source_index], "untrained_terminators", unended)
        note(ledger, names, codes[source], "episodes", np.ones(len(episodes), dtype=np.int64))
        note(ledger, names, codes[records.firsts], "records_without_trained_tokens", untrained.astype(np.int64))
        return compiled

    def _labelled(
        self, rows: SharedRows, conversations: NDArray[np.int64]
    ) -> tuple[SharedRows, NDArray[np.float32], TurnSums]:
        """Rows, the weights of their runs, and the sums of these.

        Trees take rows as what they share, unless one is too long, has an answer without an end, or is trained by more
        than its kinds.
        """
        policy, longest = self.policy, self.recipe.packing.max_length or NO_LIMIT
        if self.recipe.expand is Expand.TREE and policy.is_local and rows.lengths.max(initial=0) <= longest:
            weights = policy.document_weights(rows.merged, conversations)
            sums = sum_turns(rows.merged, weights)
            if not sums.endless.any():
                return rows, weights, sums
        whole = SharedRows.apart(rows.whole)
        weights = policy.document_weights(whole.own, conversations)
        return whole, weights, sum_turns(whole.own, weights)


def _losers(tokens: Tokens, run_weights: NDArray[np.float32], fitted: OverflowResult) -> NDArray[np.int64]:
    """Return the first documents that lose trained tokens."""
    runs = np.flatnonzero((run_weights > 0) & (fitted.kept_of_run < tokens.run_lengths))
    return np.unique(np.searchsorted(tokens.document_runs, runs, side="right") - 1)[:NAMED]


class _Records:
    """Which documents are of the same record, and what became of the records."""

    def __init__(self, kept: NDArray[np.int64], conversations: NDArray[np.int64], fitted: OverflowResult) -> None:
        opens = np.append(True, kept[1:] != kept[:-1])[: len(kept)]
        self.is_first: NDArray[np.bool_] = opens
        self.firsts: NDArray[np.int64] = np.flatnonzero(opens)
        """First document of each record."""
        self.of_document: NDArray[np.int64] = np.cumsum(opens) - 1
        self.is_added: NDArray[np.bool_] = added_documents(conversations)
        """Documents besides the last one of their conversation, which renders the whole conversation as a rule."""
        lost = np.zeros(len(kept), dtype=np.bool_)
        lost[fitted.dropped] = True
        self.is_dropped: NDArray[np.bool_] = np.ones(len(self.firsts), dtype=np.bool_)
        """Records of which overflow left no document."""
        self.is_dropped[self.of_document[~lost]] = False


def growing_sizes() -> Iterator[int]:
    """Small batches first, while a process learns how the template writes.

    The bytes of a dataset do not depend on them: only the time does, as every batch takes some milliseconds.
    """
    yield from (BATCH_BYTES >> power for power in range(7, 0, -1))
    while True:
        yield BATCH_BYTES


def files_of(recipe: Recipe) -> str:
    """Fingerprint the files that decide ids and weights, those of tokenizer, template and policy, in one line."""
    names = dict.fromkeys((recipe.tokenizer, recipe.template))
    paths = [path for name in names for path in files_read(name)] + policy_files(recipe.policy)
    contents = [f"{path.name} {Hash.XXH128.of_file(path)}" for path in paths]
    vocabulary = model_vocabulary(recipe.vocab_size or recipe.tokenizer)
    ids = "of any size" if vocabulary is None else f"of {vocabulary.size} ids, says {vocabulary.found_in}"
    return ", ".join((*contents, f"a vocabulary {ids}"))


def template_options(recipe: Recipe, policy: Policy) -> TemplateOptions:
    """Return what a recipe says about its template; a policy for the last turn needs no documents for the others."""
    folder = picture_folder(recipe.images, (path for source in recipe.sources for path in source.patterns))
    return TemplateOptions(
        options=recipe.template_options,
        today=recipe.date,
        expand=Expand.TURNS if recipe.expand is Expand.TREE else recipe.expand,
        unproved=recipe.unproved,
        thinking=recipe.thinking,
        answers=recipe.answers,
        no_reasoning=recipe.no_reasoning,
        thinking_close=recipe.thinking_close,
        trust=recipe.trust,
        only_drift=recipe.drift is not None,
        last_turn_only=policy.scope is Scope.LAST_TURN,
        whole_document=not policy.trains_assistant_only,
        pictures=Pictures.of(recipe.tokenizer, folder, recipe.store_images),
    )


def copies_of(key: str, weight: float) -> int:
    """Return how often a record is used at a weight: the whole part, and once more by the hash of the key."""
    whole = int(weight)
    rest = weight - whole
    return whole + int(rest > 0 and hash_of(f"weight\0{key}".encode()) < hash_limit(rest))


def _planted(
    kept: NDArray[np.int64],
    rows: SharedRows,
    fitted: OverflowResult,
    groups: NDArray[np.int64] | None,
    max_length: int | None,
) -> Trees:
    """Return the rows that overflow left, as trees: those of a record in one, or those of a group of records."""
    records = kept[fitted.source_index]
    owners = records if groups is None else groups[records]
    flags = (fitted.injected_runs, fitted.later_runs)
    return put_into_trees(rows, fitted.run_weights, *flags, records, owners, max_length or NO_LIMIT)
