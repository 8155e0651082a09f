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
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chatmill.cli import options
from chatmill.cli.options import argument, option
from chatmill.errors import ConfigError, DataError, UnknownNameError

if TYPE_CHECKING:
    from chatmill.systems.document_boundaries import Blocks

ABOUT = b"chatmill_packed_rows"
"""Key of the description in a Parquet file's metadata."""


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
    from chatmill.tokenizer.load import load_tokenizer
    from chatmill.yaml_files import read_mapping

    chosen: dict[str, Any] = {}
    if config is not None:
        chosen = _packing_options(read_mapping(config, "config file", "packing options"), str(config))
    chosen |= _packing_options(options.settings(settings), "--set")
    if not out.parent.is_dir():
        raise ConfigError(f"the folder of --out does not exist: {out.parent}")
    loaded = load_tokenizer(tokenizer)
    texts = list(read_texts(local_paths([str(path) for path in inputs]), field=field))
    blocks = tokenize_blocks({field: texts}, loaded, field, PackOptions(**chosen))
    report = asdict(blocks.report)
    if not blocks.input_ids:
        raise DataError(f"no rows to write: {packing_line(report)}")
    about = {"tokenizer": loaded.fingerprint, "given_as": tokenizer, "options": chosen, "report": report}
    _write_rows(out, blocks, about)
    if as_json:
        typer.echo(json.dumps(report | {"out": str(out)}))
        return
    typer.echo(f"{packing_line(report)}\n-> {out}")


def _packing_options(options: dict[str, Any], where: str) -> dict[str, Any]:
    """Check packing options of a YAML file or the command line."""
    from chatmill.structs import typed
    from chatmill.systems.document_boundaries import PackOptions

    for name in options:
        if name not in PackOptions.__struct_fields__:
            raise UnknownNameError(f"option of {where}", name, list(PackOptions.__struct_fields__))
    typed(PackOptions, options, where)
    return options


def _write_rows(path: Path, blocks: Blocks, about: dict[str, Any]) -> None:
    """Write a Parquet file with `input_ids` and `document_starts`, whole or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from chatmill.core.publish import whole_file

    columns = {"input_ids": blocks.input_ids, "document_starts": blocks.document_starts}
    table = pa.table({name: pa.array(rows, pa.list_(pa.int32())) for name, rows in columns.items()})
    with whole_file(path) as partial:
        pq.write_table(table.replace_schema_metadata({ABOUT: json.dumps(about).encode()}), partial)


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
