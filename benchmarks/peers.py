"""What users would run instead: the peers' own ways to tokens and labels, nothing left out and nothing added."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from chatmill.core.conversation import Conversation
from chatmill.read.conversations import ConversationFile
from tests.render.reference import as_dicts, hf_tokenizer, trl_training_template

logging.getLogger("torchao").setLevel(logging.ERROR)  # it warns of a torch that it has no kernels for; none are used


def conversations_of(paths: Sequence[Path]) -> list[Conversation]:
    """The conversations of files, read by Chatmill: a peer is not charged for reading."""
    return [conversation for path in paths for conversation in ConversationFile(path)]


Prepared = tuple[list[dict[str, Any]], list[Any] | None]
"""Messages and tools, as transformers and `renderers` take them."""


def prepared(conversations: Sequence[Conversation]) -> list[Prepared]:
    """Conversations in the form that peers take, made before anything is timed."""
    return [(as_dicts(conversation), list(conversation.tools) or None) for conversation in conversations]


def trl_table(given: Sequence[Prepared], folder: str = "") -> Any:
    """The records as a dataset in memory; messages as JSON text, because Arrow would add null fields to them.

    `folder` is that of the model, which is loaded here; default: Qwen3.
    """
    import datasets

    datasets.disable_progress_bars()
    _trl_model(folder)
    return datasets.Dataset.from_list(
        [{"messages": json.dumps(messages), "tools": json.dumps(tools), "folder": folder} for messages, tools in given]
    )


@cache
def _trl_model(folder: str) -> tuple[Any, str]:
    """A model's tokenizer in transformers, and TRL's training template for its template."""
    import transformers
    from trl.chat_template_utils import get_training_chat_template

    if not folder:
        return hf_tokenizer("qwen3"), trl_training_template()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer, get_training_chat_template(tokenizer)


def _tokenize(row: dict[str, str]) -> dict[str, Any]:
    tokenizer, template = _trl_model(row["folder"])
    encoded = tokenizer.apply_chat_template(
        json.loads(row["messages"]), tools=json.loads(row["tools"]), chat_template=template,
        tokenize=True, return_dict=True, return_assistant_tokens_mask=True,
    )  # fmt: skip
    return {"input_ids": encoded["input_ids"], "assistant_masks": encoded["assistant_masks"]}


def trl_map(table: Any, processes: int) -> Any:
    """TRL's path: `datasets.map` with `apply_chat_template`, TRL's own training template, and its assistant mask.

    The seconds that `datasets` spends on hashing the tokenizer and on sending it to every process are spared: the
    fingerprint is given, and processes find the tokenizer where this one has loaded it.
    """
    return table.map(
        _tokenize, remove_columns=table.column_names, num_proc=processes, load_from_cache_file=False,
        new_fingerprint=f"{time.time_ns():016x}",
    )  # fmt: skip


def renderers_rows(conversations: Sequence[Prepared]) -> list[tuple[list[int], list[bool]]]:
    """PrimeIntellect's `renderers`: ids and what the model would have sampled, one conversation at a time."""
    from renderers.qwen3 import Qwen3Renderer

    renderer = Qwen3Renderer(hf_tokenizer("qwen3"))
    rows = []
    for messages, tools in conversations:
        rendered = renderer.render(messages, tools=tools)
        rows.append((rendered.token_ids, rendered.sampled_mask))
    return rows


def torchtune_packs(documents: Any, width: int) -> list[dict[str, Any]]:
    """torchtune's `PackedDataset`: rows of whole documents in input order, with labels and positions."""
    from torchtune.datasets import PackedDataset

    return list(PackedDataset(documents, max_seq_len=width).packs)
