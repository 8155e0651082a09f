"""The path of one batch: conversations to rendered, labelled and fitted episodes, with every token accounted for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from chatmill.compiler.accounts import (
    sum_turns,
)
from chatmill.compiler.batch_documents import NO_LIMIT, BatchDocuments, Compiled, Labelled, Outcome
from chatmill.compiler.pairs import KeptOfPair, refuse_pictures, whole_pairs
from chatmill.compiler.repairs import render_repaired
from chatmill.core.checksums import Hash
from chatmill.core.conversation import Conversation
from chatmill.core.conversations import Conversations
from chatmill.core.hash_shares import hash_limit, hash_of
from chatmill.core.ledger import (
    Ledger,
)
from chatmill.core.model_vocabulary import model_vocabulary, refuse_beyond
from chatmill.core.shared_rows import SharedRows
from chatmill.images.files import Pictures, picture_folder
from chatmill.label.policy import Policy, Scope
from chatmill.label.presets import find_policy, policy_files
from chatmill.pack.overflow import OverflowResult, apply_overflow
from chatmill.render.jinja.options import Expand, TemplateOptions
from chatmill.render.model_template import ModelTemplate
from chatmill.render.registry import bind, files_read, find_template
from chatmill.tokenizer.backends import Engine
from chatmill.tokenizer.load import load_tokenizer, with_control_tokens
from chatmill.tokenizer.probe import ProbeAnswers, answers_of
from chatmill.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from chatmill.compiler.recipe import Recipe

ScalarT = TypeVar("ScalarT", bound=np.generic)
BATCH_BYTES = 16 << 20
"""Bytes of lines that are rendered together; bounds the memory of a worker. Every batch costs some milliseconds."""
GROWN = (
    "Choose the model's own template (leave --template and --add-control-tokens out); if the model is to grow, say its "
    "new size with vocab_size (--set vocab_size=N)"
)


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
        documents = self._render(conversations)
        labelled = self._label(documents)
        fitted = self._fit(documents, labelled)
        ledger = Ledger()
        outcome = Outcome(self.recipe, documents, labelled, fitted)
        accounted = outcome.account(ledger)
        episodes = outcome.rows()
        if self.recipe.expand is Expand.TREE:
            episodes = outcome.trees(ledger, groups, accounted)
        elif self.recipe.expand is Expand.TURNS:
            outcome.note_trees(ledger)
        compiled = outcome.compiled(episodes, ledger)
        documents.note_all(ledger, keeps_logprobs=self.recipe.logprobs)
        outcome.note_episodes(ledger, episodes)
        return compiled

    def _render(self, conversations: Sequence[Conversation]) -> BatchDocuments:
        """Render the conversations that are used."""
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
        return BatchDocuments(batch, rendered, failed_calls, notes)

    def _label(self, documents: BatchDocuments) -> Labelled:
        """Say how much each run of the documents is trained; ids must be those of the model."""
        labelled = self._weigh(documents.rendered.rows, documents.conversations)
        if self.vocabulary is not None:
            largest = int(labelled.rows.merged.ids.max(initial=0))
            refuse_beyond(largest, self.vocabulary, "the conversations have", GROWN)
        return labelled

    def _fit(self, documents: BatchDocuments, labelled: Labelled) -> OverflowResult:
        """Make every document fit into a row."""
        batch, packing = documents.batch, self.recipe.packing
        return apply_overflow(
            labelled.rows.merged,
            labelled.run_weights,
            packing.max_length or NO_LIMIT,
            packing.overflow,
            documents.records if batch.sides is not None else None,
            name_of=lambda document: batch.keys[int(documents.records[document])],
        )

    def _weigh(self, rows: SharedRows, conversations: NDArray[np.int64]) -> Labelled:
        """Return rows, the weights of their runs, and the sums of these.

        Trees take rows as what they share, unless one is too long, has an answer without an end, or is trained by more
        than its kinds.
        """
        policy, longest = self.policy, self.recipe.packing.max_length or NO_LIMIT
        if self.recipe.expand is Expand.TREE and policy.is_local and rows.lengths.max(initial=0) <= longest:
            weights = policy.document_weights(rows.merged, conversations)
            sums = sum_turns(rows.merged, weights)
            if not sums.endless.any():
                return Labelled(rows, weights, sums)
        whole = SharedRows.apart(rows.whole)
        weights = policy.document_weights(whole.own, conversations)
        return Labelled(whole, weights, sum_turns(whole.own, weights))


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
