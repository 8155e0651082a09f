"""Small real data and small models for the tests of training."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from chatmill.core.conversation import Conversation, Role
from chatmill.label.presets import find_policy
from chatmill.read.conversations import ConversationFile
from chatmill.render.registry import bind
from chatmill.render.render import render
from chatmill.store.episode_writer import EpisodeWriter
from chatmill.tokenizer.load import with_control_tokens
from chatmill.train.gpt import GPT, GPTConfig
from tests.data.tokenizer_files import loaded

CONVERSATIONS = Path(__file__).parents[1] / "data" / "conversations"
SOURCES = ("fastchat_dummy", "cookbook_finetune", "oasst_realistic", "gpteacher_roleplay", "gpteacher_codegen")
LIMIT = 64


@cache
def gpt2_chatml() -> Any:
    """The real GPT-2 vocabulary with the two control tokens of ChatML above it."""
    return with_control_tokens(loaded("gpt2"), ["<|im_start|>", "<|im_end|>"])


@cache
def short_conversations(count: int = 50) -> tuple[Conversation, ...]:
    """Real conversations of at most 64 tokens in ChatML with the GPT-2 vocabulary, each with its own question."""
    found: dict[str, Conversation] = {}
    for source in SOURCES:
        kept = [c for c in ConversationFile(CONVERSATIONS / f"{source}.jsonl.gz") if _is_plain(c)]
        tokens = render(kept, bind("chatml", gpt2_chatml())).tokens
        for conversation, length in zip(kept, tokens.lengths.tolist(), strict=True):
            if length <= LIMIT:
                found.setdefault(prompt_of(conversation), conversation)
    assert len(found) >= count, len(found)
    return tuple(found.values())[:count]


def _is_plain(conversation: Conversation) -> bool:
    roles = [message.role for message in conversation.messages]
    if conversation.tools or any(message.tool_calls for message in conversation.messages):
        return False
    return roles in ([Role.USER, Role.ASSISTANT], [Role.SYSTEM, Role.USER, Role.ASSISTANT])


def prompt_of(conversation: Conversation) -> str:
    """What the user said."""
    return next(message.content for message in conversation.messages if message.role is Role.USER)


def write_episodes(directory: Path, conversations: Sequence[Conversation], split: str = "train") -> None:
    """A dataset with masks and kinds, as a build would write it."""
    tokens = render(list(conversations), bind("chatml", gpt2_chatml())).tokens
    weights = tokens.per_token(find_policy("assistant").run_weights(tokens))
    with EpisodeWriter(directory, split) as writer:
        writer.append_batch(tokens.ids, tokens.offsets, weights, tokens.kinds)


def tiny_gpt(vocab_size: int = 97, **sizes: Any) -> GPT:
    """A model of a few thousand weights, the same every time."""
    torch.manual_seed(0)
    options = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, **sizes}
    return GPT(GPTConfig(vocab_size=vocab_size, **options))


class StopAfter:
    """A loader that sends this process a signal while it hands out a batch."""

    def __init__(self, loader: Any, batches: int, number: int) -> None:
        self._loader, self._left, self._number = loader, batches, number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def get_batch(self, split: str = "train") -> Any:
        if split == "train":
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), self._number)
        return self._loader.get_batch(split)
