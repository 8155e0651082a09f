"""What an audit can find: one name, one sentence and one way out for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Rule(NamedTuple):
    """A kind of finding."""

    title: str
    unit: Literal["tokens", "answers", "rows", "documents"]
    """What it counts."""
    says: str
    """What it means, in one sentence."""
    fix: str
    """The way out, in one sentence."""
    is_note: bool = False
    """Worth knowing, and not a fault."""


NOTE = True
RULES: Mapping[str, Rule] = {
    "mask_full": Rule("everything trained", "documents",
        "Every token is a target, those of questions included; a set without labels or a mask is trained so.",
        "TRL: set assistant_only_loss=True; axolotl: train_on_inputs: false; else write labels with -100."),
    "mask_empty": Rule("nothing trained", "documents",
        "No token is a target: the document costs time and teaches nothing.",
        "Look for a template without {% generation %} tags, a marker that was not found, or a cut before the answer."),
    "mask_shifted": Rule("mask shifted", "answers",
        "The mask has the size of the answer and is next to it.",
        "Move the mask back; a mask for labels must be shifted with the labels, and only once."),
    "labels_shifted": Rule("labels shifted", "rows",
        "labels[t] is the id at another place than the trainer wants it: transformers, TRL and axolotl shift labels "
        "themselves, and take them at t.",
        "Give labels in the places of their ids; for a trainer that does not shift, at t + 1 (and audit --shifted)."),
    "labels_differ": Rule("labels are other ids", "tokens",
        "A label is neither -100 nor the id at its place.",
        "Make labels of a copy of input_ids, and write -100 where nothing is trained."),
    "prompt_trained": Rule("prompt trained", "answers",
        "Tokens that the generation prompt gives the model are targets.",
        "Begin the mask after the generation prompt; with TRL, check the {% generation %} tags of the template."),
    "context_trained": Rule("context trained", "tokens",
        "Tokens of system, user or tool messages are targets.",
        "Mask everything but answers: train_on_inputs: false, assistant_only_loss=True, train_on_responses_only."),
    "after_stop_trained": Rule("text after the stop trained", "answers",
        "What the template writes after the stop is a target, and generation has ended there.",
        "Costs little, and teaches nothing; in TRL's templates the tag must close before the newline.", NOTE),
    "stop_untrained": Rule("stop not trained", "answers",
        "The answer is trained and the token that ends it is not: the model does not learn to stop.",
        "Include the stop in the mask; axolotl: train_on_eos: turn. Look for pad = eos in the collator."),
    "stop_twice": Rule("stop trained twice", "answers",
        "Another stop token after the stop is a target.",
        "Do not append an eos to a text that the template has ended."),
    "stop_missing": Rule("answer without a stop", "answers",
        "No stop token ends the answer: the model does not learn to stop.",
        "Use the template to the end of the answer, or append its stop; GLM's template leaves it to the next message."),
    "answer_untrained": Rule("answer not trained", "answers",
        "The record wants the answer trained, and no token of it is a target, nor of a later one in the document.",
        "Check how the tool finds answers; a marker that merges with the text next to it is not found."),
    "some_untrained": Rule("answers left untrained", "answers",
        "No token of the answer, or of its reasoning, is a target: an earlier answer of a document, a last one, or one "
        "whose reasoning is left out.",
        "Fine if intended: where each turn has a row of its own, earlier answers are context. Whether last ones were "
        "left out on purpose, --source shows; a model that is served with thinking has to write its reasoning.", NOTE),
    "unwanted_trained": Rule("trained against the record", "answers",
        "The record says that the answer is not trained (train: false, or a weight of 0), and it is.",
        "Name the field to the tool (axolotl: message_field_training); where it reads none, cut such answers out."),
    "answer_partly_trained": Rule("answer partly trained", "answers",
        "Some tokens of the answer are targets and others are not.",
        "Check where the mask begins and ends; masks by characters lose tokens of characters with several bytes."),
    "changed_trained": Rule("changed turns trained", "answers",
        "The answer is trained as later messages have changed it, and a served model never gives it so.",
        "Train each answer after its own prompt, one row per turn, or the last answer only."),
    "bos_wrong": Rule("bos wrong", "documents",
        "The token that begins a document is a target, is there twice, or is missing.",
        "Write -100 for it, since the document before would have to predict it. Tokenise what the template wrote with "
        "add_special_tokens=False, and the whole rendering."),
    "padding_trained": Rule("padding trained", "tokens",
        "Padding is a target.",
        "Write -100 for padding by position, not by the pad id."),
    "hidden_tokens": Rule("tokens hidden from the model", "tokens",
        "attention_mask is 0 inside of documents: the model does not see these tokens, and what follows is trained "
        "after another prompt.",
        "A mask made as ids != pad hides every real stop where pad = eos: make it from lengths, or give the tokenizer "
        "a pad token of its own."),
    "special_from_text": Rule("special tokens from text", "documents",
        "A special token is where the template writes none: a text that spells it was encoded as the token, or the "
        "template was another one.",
        "Encode contents with split_special_tokens=True, or take such records out."),
    "other_ids": Rule("ids that no text gives", "documents",
        "The tokenizer gives other ids for this text: it was tokenised in pieces, by another tokenizer, or with the "
        "end of a prompt in the first token of its answer.",
        "Render the conversation, and tokenise the text once; where the end of a prompt merges with the answer, "
        "tokenise both apart, and join the ids."),
    "truncated": Rule("cut", "documents",
        "The document ends in the middle, at the length of the longest rows.",
        "Raise the maximum length, or leave such records out: a cut answer teaches to stop anywhere."),
    "unbounded": Rule("documents without boundaries", "rows",
        "A row holds several documents, and no column says where they begin: they see each other.",
        "Keep seq_lengths or position_ids, and a trainer and attention that use them."),
    "wrong_boundaries": Rule("boundaries that do not fit", "rows",
        "The boundaries of the row do not add up to its length, or a document begins in the middle of a conversation.",
        "Write boundaries and rows in one step, and pack whole documents."),
    "outside_vocabulary": Rule("ids outside the vocabulary", "documents",
        "The tokenizer of the model has no such id.",
        "Audit with the model that the set was made for."),
    "template_differs": Rule("template text differs", "documents",
        "What is written around messages is not what the model's template writes: another one wrote it, or none.",
        "Use the template of the model that is served; TRL puts in its own training template for some models."),
    "record_differs": Rule("record differs", "documents",
        "Text of the record is missing, other text is in its place, or no record of the source gives this document.",
        "Look for trimming, a dropped system message, and fields that the tool does not read; and audit with the files "
        "that the set was made of."),
}  # fmt: skip
"""Code -> what it means. Codes are stable."""


class RawFinding(NamedTuple):
    """Places of a finding, as stretches of tokens."""

    code: str
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    total: int
    """How many there are of what is counted."""
    detail: str = ""
    counted: int | None = None
    """How many were found; None: as many as there are places."""
    what: str = ""
    """Which fault it is, in words, where a code has several."""

    @property
    def number(self) -> int:
        """How many were found."""
        return len(self.starts) if self.counted is None else self.counted
