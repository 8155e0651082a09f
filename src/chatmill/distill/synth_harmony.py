"""Turn SYNTH-like rows (query, reasoning, answer) into Harmony conversations: `synth_harmony_v1` Parquet shards.

Every conversation is system, developer, user, assistant/analysis and assistant/final; the JSON of a row is spelled as
in the published shards. A worker writes a whole shard, of input files that follow each other. The same input and
options give the same bytes for any number of workers; the folder appears whole or not at all.
"""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from chatmill import __version__
from chatmill.compiler.chunk_output import REJECTED
from chatmill.compiler.engines.local import LocalExecutor
from chatmill.compiler.paths import local_paths
from chatmill.compiler.recipe import OnError
from chatmill.core.checksums import FileRecord, Hash
from chatmill.core.message_parser import checked_text, json_type
from chatmill.core.publish import join_files, storing, whole_folder
from chatmill.distill.input_shards import GLOB, INPUT_SCHEMA
from chatmill.errors import ConfigError, DataError, RecordError, UnknownNameError, member
from chatmill.read.field_maps import guessed_map
from chatmill.read.files import read_records
from chatmill.store.episode_layout import MANIFEST

COLUMNS: dict[str, tuple[str, ...]] = {
    "query": ("query",),
    "reasoning": ("reasoning", "synthetic_reasoning"),
    "answer": ("answer", "synthetic_answer"),
    "synth_id": ("synth_id", "id"),
    "language": ("language",),
    "exercise": ("exercise",),
}
"""What is read of a row, and the names it is looked for under; the first that a row has counts."""
TEXTS = ("query", "answer", "reasoning", "language", "exercise")
"""The texts of a row, in the order in which they are looked for."""
SYSTEM_FIELDS = (
    "model_identity", "reasoning_effort", "conversation_start_date", "knowledge_cutoff", "channel_config", "tools",
)  # fmt: skip
"""What a Harmony system message is made of, in the order it is written."""
DEFAULT_OPENING: Mapping[str, Any] = {
    "system": {
        "model_identity": "You are a large language model.",
        "reasoning_effort": "High",
        "knowledge_cutoff": "2024-06",
        "channel_config": {"valid_channels": ["analysis", "commentary", "final"], "channel_required": True},
    },
    "developer": "Answer the user. Reason in the analysis channel first, then give the answer in the final channel.",
}
OUTPUT_COLUMNS = ("messages_json", "metadata_json", "synth_id", "language", "exercise")
ROW_GROUP = 4096
"""Rows in memory at a time, and rows of a row group."""
SHARDS = 4
"""Each shard becomes one prefix for Megatron, which is served best by a few large ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthHarmonyResult:
    """What was written."""

    directory: Path
    rows: int
    rejected: int
    manifest: Mapping[str, Any]
    """What is in manifest.json."""


def write_synth_harmony(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    opening: Mapping[str, Any] = DEFAULT_OPENING,
    columns: Mapping[str, str] | None = None,
    allow_no_reasoning: bool = False,
    number_rows: bool = False,
    shards: int = SHARDS,
    on_error: str = OnError.FAIL,
    workers: int | None = None,
) -> SynthHarmonyResult:
    """Write `out/synth_harmony_shard_NN.parquet` and `out/manifest.json`; rows keep the order of the input.

    - `inputs`: files (Parquet, JSONL also packed, JSON), globs, or folders of such files, read in this order.
    - `opening`: the `system` message, by its fields, and the text of the `developer` message; one may be missing.
    - `columns`: names of the input's columns if they are not those of `COLUMNS`, as {"answer": "response"}.
    - `allow_no_reasoning`: a row without reasoning becomes a conversation without an analysis message.
    - `number_rows`: a row without `synth_id` or `id` has its file and number as its id.
    - `shards`: Parquet files, at most one for each input file; so many workers can be busy.
    - `on_error`: a row that cannot be used ends the run (`fail`), or goes to `rejected.jsonl` (`quarantine`).
    """
    policy = member(OnError, "on_error", on_error)
    theirs = columns or {}
    _check_names("column", theirs, COLUMNS, "Give THIS=YOURS, as answer=response.")
    names = {name: [theirs[name]] if name in theirs else list(ours) for name, ours in COLUMNS.items()}
    config: dict[str, Any] = {"columns": names, "allow_no_reasoning": allow_no_reasoning}
    if number_rows:
        config["number_rows"] = True
    rows = HarmonyRows(opening=opening_messages(opening), **config)
    sources = [inputs] if isinstance(inputs, str | os.PathLike) else inputs
    files = [str(path) for path in local_paths([os.fspath(path) for path in sources])]
    if shards < 1:
        raise ConfigError(f"shards is {shards}; it must be 1 or more")
    final = Path(out)
    if final.exists():
        raise ConfigError(f"{final}: is there already and is not overwritten; choose another --out")
    with storing(final, "write the shards"), whole_folder(final) as folder, LocalExecutor(workers) as executor:
        jobs = [
            ShardJob(folder / GLOB.replace("*", f"{number:02d}"), paths, rows, policy)
            for number, paths in enumerate(_shares(files, shards))
        ]
        receipts = dict(executor.map(write_shard, jobs))
        manifest = _manifest(
            files, [receipts[number] for number in range(len(jobs))], {"opening": dict(opening), **config}
        )
        if manifest["rejected"]:
            join_files([job.rejected for job in jobs], folder / REJECTED)
        for job in jobs:
            job.rejected.unlink()
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    rejected = sum(manifest["rejected"].values())
    return SynthHarmonyResult(directory=final, rows=manifest["total_rows"], rejected=rejected, manifest=manifest)


def opening_messages(opening: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the messages before the query of every conversation: the `system` and `developer` messages that are given.

    They must be ones that openai-harmony renders; it is asked once.
    """
    from chatmill.render.official_harmony import encoding, render_message

    _check_names("message of the opening", opening, DEFAULT_OPENING)
    contents: dict[str, dict[str, Any]] = {}
    if (system := opening.get("system")) is not None:
        _check_names("field of a system message", system, SYSTEM_FIELDS)
        fields = {name: system[name] for name in SYSTEM_FIELDS if system.get(name) is not None}
        contents["system"] = {"type": "system_content", **fields}
    if (developer := opening.get("developer")) is not None:
        contents["developer"] = {"type": "developer_content", "instructions": checked_text(developer, "developer")}
    encoding()
    messages = tuple({"role": role, "content": [content]} for role, content in contents.items())
    for message in messages:
        try:
            render_message(message)
        except RecordError as error:
            raise ConfigError(f"the {message['role']} message cannot be used: {error}") from None
    return messages


def _check_names(kind: str, names: Iterable[str], allowed: Iterable[str], hint: str = "") -> None:
    for name in names:
        if name not in allowed:
            raise UnknownNameError(kind, name, list(allowed), hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class HarmonyRows:
    """Where the values of a row are found, what a row must have, and what it becomes."""

    opening: tuple[dict[str, Any], ...]
    """As `opening_messages` gives it."""
    columns: Mapping[str, Sequence[str]]
    """The names of each of `COLUMNS`."""
    allow_no_reasoning: bool = False
    number_rows: bool = False
    """Whether a row without an id has its file and number as its id."""

    def row(self, record: object, where: str = "") -> tuple[str, ...]:
        """Return the five values of one output row; a `RecordError` without a place if it cannot be used.

        Args:
            record: The row as it was read.
            where: Its file and number.
        """
        if not isinstance(record, Mapping):
            raise RecordError(f"a row must be an object, found {json_type(record)}", code="not_an_object")
        has_id = any(name in record for name in self.columns["synth_id"])
        synth_id = self._text(record, "synth_id") if has_id else where
        try:
            self._refuse_missing(record)
            texts = {name: self._text(record, name) for name in TEXTS}
        except RecordError as error:
            error.record_id = synth_id if has_id else ""
            raise
        messages = [*self.opening, {"role": "user", "content": [{"type": "text", "text": texts["query"]}]}]
        for channel, text in (("analysis", texts["reasoning"]), ("final", texts["answer"])):
            if text:
                content = [{"type": "text", "text": text}]
                messages.append({"role": "assistant", "content": content, "channel": channel})
        written = json.dumps({"messages": messages}, ensure_ascii=False)
        about = json.dumps({"synth_id": synth_id}, ensure_ascii=False)
        return written, about, synth_id, texts["language"], texts["exercise"]

    def _refuse_missing(self, record: Mapping[str, Any]) -> None:
        """Raise a `RecordError` that names all columns which the row lacks, with the likely one for each."""
        optional = ["language", "exercise"]
        if self.allow_no_reasoning:
            optional.append("reasoning")
        if self.number_rows:
            optional.append("synth_id")
        missing: list[str] = []
        for name, names in self.columns.items():
            if name not in optional and not any(column in record for column in names):
                missing.append(name)
        if not missing:
            return

        guess = guessed_map(record) or {}
        likely = {"query": guess.get("user"), "answer": guess.get("assistant")}
        lacks = ", ".join(f"no {' or '.join(map(repr, self.columns[name]))}" for name in missing)
        keys = ", ".join(map(str, list(record)[:12])) or "no fields"
        ways = " ".join(f"--column {name}={likely.get(name) or 'YOURS'}" for name in missing)
        more = ""
        if "synth_id" in missing:
            more += "; number_rows=true (--set) takes the file and number of a row as its id"
        if "reasoning" in missing:
            more += "; allow_no_reasoning=true (--set) writes rows without analysis"
        first = missing[0]
        raise RecordError(
            f"the row has {lacks}; it has {keys}. Use {ways}{more}", code=f"no_{first}", path=self.columns[first][0]
        )

    def _text(self, record: Mapping[str, Any], name: str) -> str:
        is_id, names = name == "synth_id", self.columns[name]
        column = next((one for one in names if one in record), names[0])
        value = record.get(column)
        if is_id and type(value) is int:
            return str(value)
        if isinstance(value, str) and value:
            return checked_text(value, column)
        if value not in (None, "") and not is_id:
            raise RecordError(f"{column!r} must be a string, found {json_type(value)}", code="field_type", path=column)
        if name in ("language", "exercise") or (name == "reasoning" and self.allow_no_reasoning):
            return ""
        hint = "; allow_no_reasoning=true (--set) writes such rows without analysis" if name == "reasoning" else ""
        message = f"{column!r} is {'empty' if value == '' else json_type(value)}; every row needs one{hint}"
        raise RecordError(message, code=f"no_{name}", path=column)


class ShardJob(NamedTuple):
    """The order to write one shard; small and picklable."""

    path: Path
    files: Sequence[str]
    """Its input."""
    rows: HarmonyRows
    on_error: OnError

    @property
    def label(self) -> str:
        """The job in words."""
        return f"writing {self.path.name}"

    @property
    def rejected(self) -> Path:
        """The rows that cannot be used."""
        return self.path.with_suffix(".rejected")


def _shares(files: Sequence[str], most: int) -> list[list[str]]:
    """Files that follow each other for each shard, of about the same size together."""
    sizes = [os.path.getsize(path) for path in files]
    ends, total = itertools.accumulate(sizes), max(sum(sizes), 1)
    numbers = [min((end - size // 2) * most // total, most - 1) for end, size in zip(ends, sizes, strict=True)]
    shares = itertools.groupby(zip(numbers, files, strict=True), key=lambda numbered: numbered[0])
    return [[path for _, path in share] for _, share in shares]


def write_shard(job: ShardJob) -> dict[str, Any]:
    """Write one shard in even row groups, in a worker, and return what the manifest says of it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([(name, pa.string()) for name in OUTPUT_COLUMNS])
    receipt: dict[str, Any] = {"rows": 0, "rejected": Counter(), "first_error": "", "inputs": []}
    with (
        storing(job.path),
        job.rejected.open("w", encoding="utf-8") as rejected,
        pq.ParquetWriter(job.path, schema, compression="zstd", write_page_checksum=True) as writer,
    ):
        rows = _rows(job, rejected, receipt)
        while batch := list(itertools.islice(rows, ROW_GROUP)):
            columns = [pa.array(column, type=pa.string()) for column in zip(*batch, strict=True)]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema), row_group_size=ROW_GROUP)
            receipt["rows"] += len(batch)
    return {"path": job.path.name, **FileRecord.of_file(job.path, Hash.SHA256).to_json(), **receipt}


def _rows(job: ShardJob, rejected: Any, receipt: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of all files; those that cannot be used go to `rejected`, or end the run."""
    for path in job.files:
        for raw in read_records(path):
            try:
                if raw.error is not None:
                    raise raw.error
                yield job.rows.row(raw.value, raw.where)
            except RecordError as error:
                error.where = raw.where
                if job.on_error is OnError.FAIL:
                    raise
                entry = {"where": error.where, "id": error.record_id, "field": error.path, "reason": error.code}
                rejected.write(json.dumps({**entry, "message": error.message}) + "\n")
                receipt["rejected"][error.code] += 1
                receipt["first_error"] = receipt["first_error"] or str(error)
        receipt["inputs"].append({"path": path, **FileRecord.of_file(Path(path), Hash.SHA256).to_json()})


def _manifest(files: Sequence[str], receipts: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the shards hold; an error if that is nothing."""
    rows, rejected = sum(receipt["rows"] for receipt in receipts), Counter[str]()
    for receipt in receipts:
        rejected.update(receipt["rejected"])
    if not rows:
        why = next((receipt["first_error"] for receipt in receipts if receipt["first_error"]), "")
        bad = f"none of the {rejected.total():,} rows could be used; the first: {why}"
        raise DataError(bad if why else f"there is no row in {', '.join(files)}")
    return {
        "schema_version": INPUT_SCHEMA,
        "columns": list(OUTPUT_COLUMNS),
        "glob": GLOB,
        "total_rows": rows,
        "shards": [{name: receipt[name] for name in ("path", "rows", "bytes", "sha256")} for receipt in receipts],
        "rejected": dict(sorted(rejected.items())),
        "config": dict(config),
        "inputs": [entry for receipt in receipts for entry in receipt["inputs"]],
        "package_version": __version__,
    }
