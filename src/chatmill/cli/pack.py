"""Pack plain texts into rows of tokens with the starts of their documents.

FILES are JSONL with a text in one field of each line. The result is a Parquet file that chatmill inspect shows and
chatmill train reads (data.rows). Options may be in a YAML file under the same names; the command line wins.

Examples:
    chatmill pack texts.jsonl -t ./Qwen3-0.6B --max-length 4096 --packed --out rows.parquet
    chatmill pack texts.jsonl -t bytes --config pack.yaml --no-overflow --min-len 8 --out rows.parquet
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from chatmill.cli import options
from chatmill.cli.options import argument, flag, option
from chatmill.errors import ConfigError, DataError


def command(
    inputs: Annotated[list[Path], argument("FILES", "JSONL files of texts (.gz, .zst).")],
    tokenizer: Annotated[str, options.TOKENIZER],
    out: Annotated[Path, option("--out -o", "FILE", "The Parquet file to write.")],
    config: Annotated[Path | None, option("--config", "YAML", "A file of these options.")] = None,
    field: Annotated[str, option("--field", "NAME", "The field that holds the text.")] = "text",
    max_length: Annotated[int | None, option("--max-length", "N", "Tokens of a row (512).", min=1)] = None,
    packed: Annotated[bool | None, flag("--packed/--no-packed", "Documents share rows (no).")] = None,
    packing_strategy: Annotated[
        str | None, option("--packing-strategy", "NAME", "greedy, best_fit or first_fit (greedy).")
    ] = None,
    overflow: Annotated[
        bool | None, flag("--overflow/--no-overflow", "Long documents continue in another row (yes).")
    ] = None,
    stride: Annotated[int | None, option("--stride", "N", "Tokens a later piece repeats (0).", min=0)] = None,
    min_len: Annotated[int | None, option("--min-len", "N", "Leave out shorter documents (1).", min=0)] = None,
    max_len: Annotated[int | None, option("--max-len", "N", "Leave out longer documents.", min=1)] = None,
    add_bos: Annotated[bool | None, flag("--add-bos/--no-add-bos", "BOS before documents (yes).")] = None,
    add_eos: Annotated[bool | None, flag("--add-eos/--no-add-eos", "EOS after documents (yes).")] = None,
    truncate_at: Annotated[str | None, option("--truncate-at", "REGEX", "A text ends at its first match.")] = None,
    shuffle_output: Annotated[
        bool | None, flag("--shuffle-output/--no-shuffle-output", "Rows in random order (no).")
    ] = None,
    seed: Annotated[int | None, option("--seed", "N", "Seed of the order of rows (42).", min=0)] = None,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Read, pack, write, and say what was left out."""
    from chatmill.cli.train_rows import pack_texts, packing_options, write_rows
    from chatmill.compiler.paths import local_paths
    from chatmill.tokenizer.load import load_tokenizer
    from chatmill.yaml_files import read_mapping

    asked: dict[str, Any] = {
        "max_length": max_length, "packed": packed, "packing_strategy": packing_strategy, "overflow": overflow,
        "stride": stride, "min_len": min_len, "max_len": max_len, "add_bos": add_bos, "add_eos": add_eos,
        "truncate_at": truncate_at, "shuffle_output": shuffle_output, "seed": seed,
    }  # fmt: skip
    chosen: dict[str, Any] = {}
    if config is not None:
        chosen = packing_options(read_mapping(config, "config file", "packing options"), str(config))
    chosen |= {name: value for name, value in asked.items() if value is not None}
    if not out.parent.is_dir():
        raise ConfigError(f"the folder of --out does not exist: {out.parent}")
    loaded = load_tokenizer(tokenizer)
    rows, starts, report = pack_texts(local_paths([str(path) for path in inputs]), loaded, chosen, field)
    if not rows:
        raise DataError(f"there is no row to write: {packing_line(report)}")
    about = {"tokenizer": loaded.fingerprint, "given_as": tokenizer, "options": chosen, "report": report}
    write_rows(out, rows, starts, about)
    if as_json:
        typer.echo(json.dumps(report | {"out": str(out)}))
        return
    typer.echo(f"{packing_line(report)}\n-> {out}")


def packing_line(report: dict[str, Any]) -> str:
    """What packing did and left out, in words."""
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
