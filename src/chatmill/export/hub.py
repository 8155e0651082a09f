"""The export to hf in the layout of a dataset repository on the Hugging Face Hub: Parquet files and a dataset card."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from chatmill.export.targets import Columns
from chatmill.store.parquet import parquet_file

if TYPE_CHECKING:
    from chatmill.export.targets import Export

CARD = "README.md"
SHARD_TOKENS = 50_000_000
"""Tokens of a file, at most, where none are asked for: the Hub serves files of some hundred megabytes best."""


def to_hub(export: Export) -> None:
    """`data/SPLIT-00000-of-00003.parquet`, ... and `README.md`: what `datasets.load_dataset` opens.

    The columns are those of the export to hf.
    """
    columns = Columns(export, labels=True)
    data = export.folder / "data"
    data.mkdir()
    for split in export.source.splits:
        rows = export.rows(split)
        schema = columns.schema(rows, about=True)
        shards = export.shards(split, rows, most=min(export.shard_tokens, SHARD_TOKENS))
        for number, shard in enumerate(shards):
            with parquet_file(data / f"{split}-{number:05d}-of-{len(shards):05d}.parquet", schema) as file:
                for batch in shard:
                    file.write_batch(columns.record_batch(split, rows, batch, schema))
    columns.say_what_labels_lose()
    (export.folder / CARD).write_text(_card(export), encoding="utf-8")
    export.config += ["hf upload USER/NAME {out} --repo-type dataset"]


def _card(export: Export) -> str:
    """The dataset card: which files are which split, what the rows are, and how they were made."""
    filled = [split for split, counts in export.counts.items() if counts["rows"]]
    files = [f"  - split: {split}\n    path: data/{split}-*.parquet" for split in filled]
    counts = [
        f"| {split} | {found['rows']:,} | {found['documents']:,} | {found['tokens']:,} | {found['trained']:,} |"
        for split, found in export.counts.items()
    ]
    about: dict[str, Any] = {"fingerprint": export.source.fingerprint, **export.source.about}
    kept = ("fingerprint", "package_version", "recipe", "inputs", "tokenizer", "template", "policy")
    manifest = json.dumps({name: about[name] for name in kept if name in about}, indent=1, sort_keys=True)
    made = [
        f"- {what}: `{about[what]['name']}` (sha256 {about[what]['fingerprint']})"
        for what in ("tokenizer", "template", "policy")
        if what in about
    ]
    return "\n".join(
        [
            "---",
            "tags:",
            "- chatmill",
            "- tokenized",
            "configs:",
            "- config_name: default",
            "  data_files:",
            *files,
            "---",
            "",
            "# Chat conversations as tokens",
            "",
            "Rows of token ids with labels, compiled by Chatmill. `labels` are the ids of trained tokens and -100",
            "elsewhere, not shifted.",
            "",
            "| split | rows | documents | tokens | trained |",
            "|---|---|---|---|---|",
            *counts,
            "",
            *made,
            "",
            *(f"- Not held: {sentence}" for sentence in export.not_held),
            "",
            "How it was made (`export.json` has the hash of every file):",
            "",
            "```json",
            manifest,
            "```",
            "",
        ]
    )
