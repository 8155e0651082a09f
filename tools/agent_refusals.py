"""How many real agent records each model's template refuses, and why.

    python -m tools.agent_refusals CONVERSATIONS TOKENIZERS [--set KEY=VALUE ...] [--records N] [--models NAME ...]

CONVERSATIONS holds files of records, of which those with tools or calls are taken. TOKENIZERS is as for
`tools.template_verification`. `--set` are keys of the recipe, for the choices that keep more records.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from chatmill.cli.options import settings
from chatmill.compiler.pipeline import Pipeline
from chatmill.compiler.recipe import recipe_of
from chatmill.core.conversation import Conversation
from chatmill.core.ledger import REPAIRED
from chatmill.read.conversations import ConversationFile
from tools.template_verification import DATE, MODELS, Model, model_folder

MODELS_HERE = (*(one for one in MODELS if "npm" not in one.vocabulary), Model("Llama-3.1", "qwen3", "llama3_1", True))
"""Templates whose vocabulary is in the folder of tokenizers, and Llama's with another one."""


class Row(NamedTuple):
    """What one model's template does with the records."""

    model: str
    refused: Counter[str]
    records: int
    seconds: float
    repaired: Counter[str]


def agent_records(folder: Path) -> Iterator[str]:
    """Lines of records that have tools or calls."""
    for path in sorted(folder.glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                record = json.loads(line)
                if record.get("tools") or any(message.get("tool_calls") for message in record["messages"]):
                    yield line


def row_of(model: Model, conversations: list[Conversation], folder: Path, keys: dict[str, Any], data: str) -> Row:
    """Compile the conversations with one model."""
    given = {"sources": [{"path": data}], "tokenizer": str(folder), "template": str(folder), "date": DATE}
    pipeline = Pipeline(recipe_of(given | keys))
    started = time.monotonic()
    compiled = pipeline.compile(conversations)
    seconds = time.monotonic() - started
    refused = Counter(f"{error.code} ({_kind(error.path)})" for _, error in compiled.failed)
    repaired = Counter(
        {name: n for name, n in compiled.ledger.all_notes().items() if name.startswith((REPAIRED, "lost"))}
    )
    return Row(model.name, refused, len(conversations), seconds, repaired)


def _kind(path: str) -> str:
    """A field path without its numbers."""
    return ".".join(part.partition("[")[0] for part in path.split("."))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("conversations", type=Path)
    parser.add_argument("tokenizers", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--records", type=int, default=None)
    parser.add_argument("--models", nargs="*", default=[model.name for model in MODELS_HERE])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        data = Path(temporary, "agents.jsonl")
        data.write_text("".join(list(agent_records(given.conversations))[: given.records]), encoding="utf-8")
        conversations = list(ConversationFile(str(data)))
        print(f"{len(conversations):,} records\n\n| model | refused | | why | seconds |\n|---|---|---|---|---|")
        for model in (one for one in MODELS_HERE if one.name in given.models):
            folder = model_folder(model, given.tokenizers, None, Path(temporary))
            row = row_of(model, conversations, folder, settings(given.set), str(data))
            why = ", ".join(f"{name} {count:,}" for name, count in row.refused.most_common())
            why += "".join(f"; {name} {count:,}" for name, count in row.repaired.most_common())
            total = row.refused.total()
            print(f"| {row.model} | {total:,} | {total / row.records:.1%} | {why} | {row.seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
