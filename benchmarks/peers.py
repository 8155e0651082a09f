"""What users would run instead: the peers' own ways to tokens and labels, nothing left out and nothing added."""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from chatmill.core.conversation import Conversation
from chatmill.read.conversations import ConversationFile
from tests.data.tokenizer_files import unpacked
from tests.render.reference import as_dicts, hf_tokenizer, trl_training_template

TOKENIZERS_ONE = Path(os.environ.get("CHATMILL_TOKENIZERS_ONE", ".tokenizers-1"))
"""Where `make bench` puts `tokenizers` 1.0."""
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


@cache
def tokenizers_one() -> Any:
    """The tokenizers of Qwen3 in `tokenizers` 1.0, from a folder of its own; None if it is not there (`make bench`).

    transformers needs the 0.23 that is installed: 1.0 has neither the classes that it imports nor the offsets of which
    it makes assistant masks. So both are loaded, one after the other.
    """
    if not (TOKENIZERS_ONE / "tokenizers").is_dir():
        return None
    hf_tokenizer("qwen3"), trl_training_template()
    names = [name for name in sys.modules if name.partition(".")[0] == "tokenizers"]
    kept = {name: sys.modules.pop(name) for name in names}
    sys.path.insert(0, str(TOKENIZERS_ONE))
    try:
        tokenizers = importlib.import_module("tokenizers")
    finally:
        sys.path.remove(str(TOKENIZERS_ONE))
        for name in [name for name in sys.modules if name.partition(".")[0] == "tokenizers"]:
            del sys.modules[name]
        sys.modules.update(kept)
    assert tokenizers.__version__.startswith("1."), tokenizers.__version__
    return tokenizers.Tokenizer.from_file(str(unpacked("qwen3") / "tokenizer.json"))


def _ids(row: dict[str, str]) -> dict[str, Any]:
    text = hf_tokenizer("qwen3").apply_chat_template(
        json.loads(row["messages"]), tools=json.loads(row["tools"]), chat_template=trl_training_template(),
        tokenize=False,
    )  # fmt: skip
    return {"input_ids": tokenizers_one().encode(text, add_special_tokens=False).ids_array}


def ids_map(table: Any, processes: int) -> Any:
    """What TRL's path would be with `tokenizers` 1.0, at its best: the same Jinja and `datasets.map`, no masks."""
    return table.map(
        _ids, remove_columns=table.column_names, num_proc=processes, load_from_cache_file=False,
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
