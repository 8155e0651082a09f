"""False alarms of `chatmill audit`: clean sets of many templates, of which nothing may be reported.

    python -m tools.audit_clean                       # the bundled conversations
    python -m tools.audit_clean --folder FOLDER       # those of another folder
    python -m tools.audit_clean --most 200            # records of each file, at most

Sets are made in two ways: by Chatmill, and by transformers' `apply_chat_template` with `return_assistant_tokens_mask`
for training templates of TRL whose tags agree with the proof (docs/differences.md). Each is audited without its source
and with it. Exit status 1 when anything is found.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from chatmill.auditor.report import AuditReport
from chatmill.auditor.run import audit
from chatmill.core.conversation import Conversation, Role
from chatmill.errors import ChatmillError
from chatmill.label.presets import find_policy
from chatmill.look.template_probes import byte_vocabulary
from chatmill.read.conversations import read_conversations
from chatmill.render.model_template import ModelTemplate
from chatmill.render.registry import bind, find_template, given_options
from chatmill.render.render import render
from chatmill.tokenizer.load import load_tokenizer
from tools.mask_differences import ROOT, tagged, trl_templates, with_bytes

CONVERSATIONS = ROOT / "tests" / "data" / "conversations"
VOCABULARIES = {
    "chatml": "qwen3",
    "glm4_5": None,
    "gpt_oss": None,
    "granite": None,
    "llama3": None,
    "mistral_nemo": "mistral_nemo",
    "phi3": None,
    "phi4": None,
    "qwen2_5": "qwen3",
    "qwen3": "qwen3",
    "qwen3_2507": "qwen3",
    "qwen3_training": None,
}
"""Bundled templates, and the real vocabulary each is tried with; None for bytes and its special tokens."""
RIGHT_TAGS = ("cohere_training", "glm4moe_training", "llama3_training")
"""Training templates of TRL whose tags agree with the proof."""


def chats_of(folder: Path, most: int) -> dict[str, list[Conversation]]:
    """Conversations by file."""
    found = {}
    for path in sorted(folder.glob("*.jsonl.gz")):
        chats = list(read_conversations(path, on_error=lambda error: None))
        found[path.name.removesuffix(".jsonl.gz")] = chats[:most]
    return found


def bound_to(name: str, vocabulary: str | None) -> ModelTemplate:
    """A bundled template with a vocabulary."""
    found = find_template(name)
    if vocabulary is not None:
        tokenizer: Any = load_tokenizer(ROOT / "tests" / "data" / "tokenizers" / vocabulary)
    elif found.control_tokens:
        tokenizer = load_tokenizer("bytes", control_tokens=found.control_tokens)
    else:
        tokenizer = byte_vocabulary(found.text, "<|bos|>", "<|eos|>")
    return bind(found, tokenizer, given_options(None, "2026-01-01"))


def made_here(bound: ModelTemplate, chats: Sequence[Conversation]) -> list[dict[str, Any]]:
    """The rows that Chatmill trains."""
    tokens = render(chats, bound, collect_failures=True).tokens
    trained = tokens.per_token(find_policy("assistant").run_weights(tokens)) > 0
    labels = np.where(trained, tokens.ids, -100)
    bounds = zip(tokens.offsets[:-1].tolist(), tokens.offsets[1:].tolist(), strict=True)
    return [{"input_ids": tokens.ids[a:b], "labels": labels[a:b]} for a, b in bounds if trained[a:b].any()]


def made_by_transformers(
    peer: Any, bound: ModelTemplate, chats: Sequence[Conversation]
) -> tuple[list[dict[str, Any]], list[Conversation]]:
    """The rows that `apply_chat_template` gives, and their conversations.

    Conversations whose answers later messages change are left out: the tags train them as they are changed.
    """
    rendered = render(chats, bound, collect_failures=True)
    changed = set(rendered.kept[rendered.unstable > 0].tolist())
    ended = [one for n, one in enumerate(chats) if n not in changed and one.messages[-1].role is Role.ASSISTANT]
    made = list(tagged(peer, bound, ended, Counter()))
    rows = [{name: done[name] for name in ("input_ids", "assistant_masks")} for _, done in made]
    return rows, [conversation for conversation, _ in made]


def audits(chats: dict[str, list[Conversation]], only: str) -> Iterator[tuple[str, str, AuditReport]]:
    """Maker and template, file, and report of every audit."""
    for name, vocabulary in VOCABULARIES.items():
        if only not in f"chatmill {name}":
            continue
        bound = bound_to(name, vocabulary)
        for file, listed in chats.items():
            rows = made_here(bound, listed)
            if rows:
                yield f"chatmill {name}", file, audit(rows, bound)
                yield f"chatmill {name}, source", file, audit(rows, bound, source=listed)
    today = datetime.datetime.now().astimezone().date()  # transformers hands out the real date
    for path in trl_templates():
        if path.stem not in RIGHT_TAGS or only not in f"transformers {path.stem}":
            continue
        peer, model = with_bytes(path, today)
        for file, listed in chats.items():
            rows, used = made_by_transformers(peer, model, listed)
            if rows:
                yield f"transformers {path.stem}", file, audit(rows, model)
                yield f"transformers {path.stem}, source", file, audit(rows, model, source=used)


def main() -> None:
    """Audit all sets, and list what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, default=CONVERSATIONS)
    parser.add_argument("--most", type=int, default=60, help="records of each file, at most (default: 60)")
    parser.add_argument("--only", default="", help="makers whose names hold this")
    arguments = parser.parse_args()
    documents: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    alarms = 0
    try:
        for maker, file, report in audits(chats_of(arguments.folder, arguments.most), arguments.only):
            documents[maker] += report.documents
            tokens[maker] += report.tokens
            unknown[maker] += bool(report.unknown)
            for one in report.findings:
                alarms += 1
                print(f"ALARM {maker}, {file}: {one.code} {one.count:,} of {one.total:,}; row {one.examples[0].row}")
                print("   ", "".join(f"[{p[0]}]" if p[3] else p[0] for p in one.examples[0].parts)[:300].encode())
    except ChatmillError as error:
        sys.exit(f"stopped: {error}")
    for maker in documents:
        print(f"{maker}: {documents[maker]:,} documents, {tokens[maker]:,} tokens; {unknown[maker]} sets with unknowns")
    print(f"{alarms} alarms in {sum(documents.values()):,} documents, {sum(tokens.values()):,} tokens")
    sys.exit(alarms > 0)


if __name__ == "__main__":
    main()
