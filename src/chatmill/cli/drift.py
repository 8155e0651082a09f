"""Where sampled tokens, and prompts that were sent, part from what the template and the tokenizer give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from chatmill.compiler.histories import History, render_after
from chatmill.core.conversations import Conversations
from chatmill.core.kinds import REPEATED
from chatmill.core.tokens import common_length
from chatmill.prove.rows import PlainRow
from chatmill.render.model_template import ModelTemplate
from chatmill.render.registry import bind

SHOWN = 6
"""Tokens that are shown from the first difference on."""
MOST = 5
"""Examples that are shown."""


def drift_lines(batch: Conversations, bound: ModelTemplate, history: History | None) -> list[str]:
    """Return counts and examples; nothing for conversations without sampled tokens."""
    if not batch.messages.token_ids.present.any():
        return []
    chat = bind(bound.source, bound.tokenizer, replace(bound.given, only_drift=True))
    rendering, _ = render_after(batch, chat, history)
    counts: Counter[str] = Counter()
    examples: list[str] = []
    for number, index in enumerate(rendering.kept.tolist()):
        tokens, conversation = rendering.tokens.conversation(number), batch[index]
        row = PlainRow(tokens.ids.tolist(), tokens.kinds.tolist(), tokens.messages.tolist())
        for k, message in enumerate(conversation.messages):
            place = row.answer_of(k) if message.token_ids is not None else None
            if message.token_ids is None or place is None or row.kinds[place[0]] & REPEATED:
                continue
            sent, begin = message.prompt_token_ids, place[0]
            pairs = [("sampled answers", "sampled", list(message.token_ids), row.ids[begin : place[2]])]
            if sent is not None:
                pairs.append(("prompts that were sent", "sent", list(sent), row.ids[:begin]))
            for kind, verb, actual, rendered in pairs:
                counts[kind] += 1
                if actual not in (rendered, rendered[: place[1] - begin] if verb == "sampled" else rendered):
                    counts[f"{kind} differ"] += 1
                    where = f"{conversation.where}, messages[{k}]"
                    examples.append(f"{where}: {_difference(actual, rendered, verb, chat)}")
    heads = [
        f"{counts[f'{kind} differ']:,} of {counts[kind]:,} {kind} have other tokens than are rendered"
        for kind in ("sampled answers", "prompts that were sent")
        if counts[kind]
    ]
    return [*heads, *examples[:MOST]]


def _difference(actual: Sequence[int], rendered: Sequence[int], verb: str, chat: ModelTemplate) -> str:
    at = common_length(np.array(actual), np.array(rendered))
    left, right = (_pieces(ids[at : at + SHOWN], chat) for ids in (actual, rendered))
    return f"from token {at:,} on {verb} {left}, rendered {right}"


def _pieces(ids: Sequence[int], chat: ModelTemplate) -> str:
    return "|".join(chat.tokenizer.decode([number]).replace("\n", "\u23ce") for number in ids) or "nothing"
