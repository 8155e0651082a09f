"""Rendering with `qwen3_training` against transformers' `apply_chat_template` with TRL's training template.

    python -m benchmarks.render [--quick] [--json]

One process, one core, the bundled real conversations that spell no control token. Both sides start from decoded records
and end with ids and what is trained; both are compared on every conversation that is timed. The published figure is
that of a first pass, where both sides have a tokenizer that has seen no text (a dataset is rendered once, and both keep
words); the same with tokenizers that have rendered these very conversations stands next to it. TRL trains the newline
after `<|im_end|>`: the policy `trl` does so too, and what it trains more than the policy `assistant` is checked to be
exactly that newline, once for each assistant turn.
"""

from __future__ import annotations

import os

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["RAYON_NUM_THREADS"] = "1"

import itertools
import json
import sys
from typing import Any

import numpy as np

from benchmarks.harness import Report, WorkDiffersError, compare, flat, require_equal, run_one
from benchmarks.inputs import CONVERSATION_FILES
from benchmarks.peers import prepared
from chatmill.core.conversation import Conversation
from chatmill.core.kinds import Part, parts_of
from chatmill.core.tokens import Tokens
from chatmill.label.presets import find_policy
from chatmill.read.conversations import ConversationFile
from chatmill.render.model_template import ModelTemplate
from chatmill.render.registry import bind
from chatmill.render.render import render
from chatmill.tokenizer.load import load_tokenizer
from tests.data.tokenizer_files import unpacked
from tests.render.reference import hf_tokenizer, trl_training_template

PEER = "apply_chat_template + mask"


def conversations_without_control_text(limit: int | None) -> list[Conversation]:
    """The bundled conversations that spell no control token (where TRL would let text become control)."""
    control = list(load_tokenizer(unpacked("qwen3")).control_ids)
    taken = [one for path in CONVERSATION_FILES for one in itertools.islice(ConversationFile(path), limit)]
    texts = (json.dumps([one.messages, one.tools], ensure_ascii=False) for one in taken)
    return [one for one, text in zip(taken, texts, strict=True) if not any(name in text for name in control)]


def newlines_more(tokens: Tokens, weights: Any) -> int:
    """How many tokens `trl` trains and `assistant` does not; each must be the newline after an assistant's turn."""
    more = (weights > 0) & ~(tokens.per_token(find_policy("assistant").run_weights(tokens)) > 0)
    end, newline = (load_tokenizer(unpacked("qwen3")).encode_documents([text])[0][0] for text in ("<|im_end|>", "\n"))
    at = np.flatnonzero(more)
    if not (tokens.ids[at] == newline).all() or not (tokens.ids[at - 1] == end).all():
        raise WorkDiffersError("`trl` trains more than `assistant` and the newline after <|im_end|>")
    trained_ends = int(((parts_of(tokens.kinds) == Part.TERMINATOR) & (weights > 0)).sum())
    if len(at) != trained_ends:
        raise WorkDiffersError(f"{trained_ends} assistant turns end, but {len(at)} newlines are trained after them")
    return len(at)


def measure(*, quick: bool) -> Report:
    """Check, then time."""
    report = Report()
    conversations = conversations_without_control_text(2 if quick else 150)
    policy = find_policy("trl")
    their_template, given = trl_training_template(), prepared(conversations)
    rounds = 2 if quick else 5

    def fresh_template() -> ModelTemplate:
        return bind("qwen3_training", load_tokenizer(unpacked("qwen3")))

    def fresh_theirs() -> Any:
        return hf_tokenizer.__wrapped__("qwen3")

    def ours_run(template: ModelTemplate) -> tuple[Tokens, Any]:
        tokens = render(conversations, template).tokens
        return tokens, tokens.per_token(policy.run_weights(tokens))

    def theirs_run(theirs: Any) -> list[Any]:
        return [
            theirs.apply_chat_template(
                messages, tools=tools, chat_template=their_template, tokenize=True, return_dict=True,
                return_assistant_tokens_mask=True,
            )
            for messages, tools in given
        ]  # fmt: skip

    template, theirs = fresh_template(), fresh_theirs()
    tokens, weights = ours_run(template)

    def check() -> str:
        rows = theirs_run(theirs)
        require_equal("tokens per conversation", tokens.lengths, [len(row["input_ids"]) for row in rows])
        require_equal("ids", tokens.ids, flat([row["input_ids"] for row in rows], np.int32))
        require_equal("trained tokens", weights, flat([row["assistant_masks"] for row in rows], np.float32))
        more = newlines_more(tokens, weights)
        report.notes.append(f"TRL trains {more:,} newlines after `<|im_end|>` that the policy `assistant` does not")
        return f"ids and trained tokens equal on all {len(rows):,} conversations"

    work = float(len(tokens.ids))
    new_templates, new_theirs = ([make() for _ in range(rounds)] for make in (fresh_template, fresh_theirs))
    first = {
        "chatmill": (lambda: ours_run(new_templates.pop()), work),
        PEER: (lambda: theirs_run(new_theirs.pop()), work),
    }
    again = {
        "chatmill": (lambda: ours_run(template), work),
        PEER: (lambda: theirs_run(theirs), work),
    }
    note, checked = f"{int(work):,} tokens, one core", check()
    for name, contestants in (("render", first), ("render again, words known", again)):
        found = compare(contestants, ours="chatmill", check=lambda: checked, rounds=rounds)[PEER]
        in_chart = contestants is first
        report.compared(f"{name} / apply_chat_template", found, unit="tokens", in_chart=in_chart, note=note)
    return report


if __name__ == "__main__":
    sys.exit(run_one("render", str(__doc__), measure))
