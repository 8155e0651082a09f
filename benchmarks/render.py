"""Rendering with `qwen3_training` against transformers' `apply_chat_template` with TRL's training template.

    python -m benchmarks.render [--quick] [--json]

One process, one core, the bundled real conversations. Both sides start from decoded records and end with ids and what
is trained; ids and trained tokens are compared before anything is timed.
"""

from __future__ import annotations

import os

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["RAYON_NUM_THREADS"] = "1"

import json

from benchmarks.harness import alternate, dump, options, print_timings
from chatmill.core.conversation import Conversation
from chatmill.label.presets import find_policy
from chatmill.read.conversations import ConversationFile
from chatmill.render.registry import bind
from chatmill.render.render import render
from chatmill.tokenizer.load import load_tokenizer
from tests.conftest import CONVERSATION_FILES
from tests.data.tokenizer_files import unpacked
from tests.render.reference import as_dicts, hf_tokenizer, reference_ids_and_mask, trl_training_template


def conversations_without_control_text(limit: int | None) -> list[Conversation]:
    """The bundled conversations that spell no control token (where TRL would let text become control)."""
    control = list(load_tokenizer(unpacked("qwen3")).control_ids)
    taken: list[Conversation] = []
    for path in CONVERSATION_FILES:
        for number, conversation in enumerate(ConversationFile(path)):
            if limit is not None and number >= limit:
                break
            text = json.dumps([conversation.messages, conversation.tools], ensure_ascii=False)
            if not any(name in text for name in control):
                taken.append(conversation)
    return taken


def main() -> None:
    """Check, then time."""
    arguments = options(str(__doc__)).parse_args()
    conversations = conversations_without_control_text(40 if arguments.quick else None)
    tokenizer = load_tokenizer(unpacked("qwen3"))
    template = bind("qwen3_training", tokenizer)
    policy = find_policy("trl")
    theirs, their_template = hf_tokenizer("qwen3"), trl_training_template()

    def ours_run() -> tuple[object, object]:
        tokens = render(conversations, template).tokens
        return tokens, tokens.per_token(policy.run_weights(tokens))

    tokens = render(conversations, template).tokens
    weights = tokens.per_token(policy.run_weights(tokens))
    step = max(1, len(conversations) // 1500)
    for index in range(0, len(conversations), step):
        ids, mask = reference_ids_and_mask(conversations[index], their_template, theirs)
        first, last = tokens.offsets[index : index + 2]
        assert tokens.ids[first:last].tolist() == ids, conversations[index].where
        assert weights[first:last].tolist() == mask, conversations[index].where
    compared = len(range(0, len(conversations), step))

    sample = conversations[::4] if not arguments.quick else conversations[::2]
    prepared = [(as_dicts(c), list(c.tools) or None) for c in sample]
    sample_tokens = sum(len(reference_ids_and_mask(c, their_template, theirs)[0]) for c in sample)

    def theirs_run() -> None:
        for messages, tools in prepared:
            theirs.apply_chat_template(
                messages, tools=tools, chat_template=their_template, tokenize=True, return_dict=True,
                return_assistant_tokens_mask=True,
            )  # fmt: skip

    ours_run()
    timings = alternate(
        {"chatmill": (ours_run, len(tokens.ids)), "apply_chat_template + mask": (theirs_run, sample_tokens)},
        rounds=3 if arguments.quick else 5,
    )
    ratio = timings["chatmill"].rate / timings["apply_chat_template + mask"].rate
    if arguments.json:
        figures = {name: timing.as_json() for name, timing in timings.items()}
        dump("render", ratio=ratio, conversations=len(conversations), compared=compared, timings=figures)
        return
    print_timings(
        f"Rendering {len(conversations):,} real conversations ({len(tokens.ids):,} tokens), one core; ids and trained "
        f"tokens equal on {compared:,} of them",
        timings, unit="tokens", ours="chatmill",
    )  # fmt: skip


if __name__ == "__main__":
    main()
