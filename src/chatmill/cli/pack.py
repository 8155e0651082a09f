"""Pack plain texts into rows of tokens with the starts of their documents.

FILES are JSONL with a text in one field of each line. The result is a Parquet file that chatmill inspect shows.
How to pack is said by a YAML file or by --set, which wins: max_length (512), packed
(false), packing_strategy (greedy, best_fit, first_fit), overflow (true), stride (0), min_len (1), max_len, add_bos and
add_eos (true), truncate_at (a regular expression), shuffle_output (false), seed (42).

Examples:
    chatmill pack texts.jsonl -t bytes --set max_length=4096 -o rows.parquet
    chatmill pack texts.jsonl -t ./Qwen3-0.6B --config pack.yaml -o rows.parquet
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from chatmill.cli import options
from chatmill.cli.options import argument, option
from chatmill.errors import ConfigError, DataError


def command(
    inputs: Annotated[list[Path], argument("FILES", "JSONL files of texts (.gz, .zst).")],
    tokenizer: Annotated[str, options.TOKENIZER],
    out: Annotated[Path, option("--out -o", "FILE", "The Parquet file to write.")],
    config: Annotated[Path | None, option("--config", "YAML", "A file that says how to pack.")] = None,
    settings: Annotated[list[str] | None, option("--set", "KEY=VALUE", "How to pack, such as packed=true.")] = None,
    field: Annotated[str, option("--field", "NAME", "The field that holds the text.")] = "text",
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Read, pack, write, and say what was left out."""
    from chatmill.compiler.paths import local_paths
    from chatmill.read.transcripts import read_texts
    from chatmill.systems.document_boundaries import PackOptions, tokenize_blocks
    from chatmill.systems.packed_files import packing_options, write_rows
    from chatmill.tokenizer.load import load_tokenizer
    from chatmill.yaml_files import read_mapping

    chosen: dict[str, Any] = {}
    if config is not None:
        chosen = packing_options(read_mapping(config, "config file", "packing options"), str(config))
    chosen |= packing_options(options.settings(settings), "--set")
    if not out.parent.is_dir():
        raise ConfigError(f"the folder of --out does not exist: {out.parent}")
    loaded = load_tokenizer(tokenizer)
    texts = list(read_texts(local_paths([str(path) for path in inputs]), field=field))
    blocks = tokenize_blocks({field: texts}, loaded, field, PackOptions(**chosen))
    report = asdict(blocks.report)
    if not blocks.input_ids:
        raise DataError(f"no rows to write: {packing_line(report)}")
    about = {"tokenizer": loaded.fingerprint, "given_as": tokenizer, "options": chosen, "report": report}
    write_rows(out, blocks, about)
    if as_json:
        typer.echo(json.dumps(report | {"out": str(out)}))
        return
    typer.echo(f"{packing_line(report)}\n-> {out}")


def packing_line(report: dict[str, Any]) -> str:
    """Describe what packing did and left out."""
    said = f"{report['documents']:,} documents, {report['tokens']:,} tokens -> {report['blocks']:,} rows"
    reasons = {"too_short": "documents under min_len", "too_long": "documents over max_len", "cut": "documents cut",
               "blocks_too_short": "rows under min_len"}  # fmt: skip
    lost = [
        f"{report[name]:,} {words} ({report[name + '_tokens']:,} tokens)"
        for name, words in reasons.items()
        if report[name]
    ]
    lost += [f"{report['truncated']:,} texts ended by truncate_at"] if report["truncated"] else []
    return said + (f"; left out: {', '.join(lost)}" if lost else "; nothing left out")
