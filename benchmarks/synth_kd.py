"""The distillation build, one process, against the straightforward build: official renderer and Megatron's builder.

    python -m benchmarks.synth_kd [--quick] [--json] [--rows N]

Input: 2 shards of N rows (20,000) made of the bundled real ones, with changed words in every copy, so that no cache
flatters. Chatmill builds all rows with its default audit, which compares 0.8% of so few rows (the first 64 of a shard
always) and 0.5% of many. The straightforward build takes 400 rows of each shard: it needs as long for any other row.
Before anything is timed, a Chatmill build of these 800 rows must have the same bytes in all files; afterwards the
files of the whole build must begin with them. Imports and loading of vocabularies are printed, not counted.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import Report, WorkDiffersError, compare, run_one
from benchmarks.inputs import SHARE_CHANGED, SYLLABLES, WORD, inputs_folder, work_folder

ROWS, QUICK_ROWS = 20_000, 2_500
PEER_ROWS, QUICK_PEER_ROWS = 400, 250
"""Of each shard."""
GROUP = 10_000
"""Rows of a row group."""
VALID_FRACTION = 0.02
FILES = 24
"""Of 2 shards in 2 splits: tokens, loss mask and span, each with its index."""
REAL_ROWS = 75_958_895
"""Of the dataset that the build is made for."""
OURS, PEER = "chatmill", "straightforward"


def write_input(folder: Path, rows: int) -> Path:
    """Two shards of changed copies of the real rows; kept when they are there."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from tests.distill.inputs import SCHEMA

    home = folder / f"synth-harmony-{rows}"
    if (home / "manifest.json").exists():
        return home
    home.mkdir(parents=True, exist_ok=True)
    for shard in range(2):
        path = home / f"synth_harmony_shard_{shard:02d}.parquet"
        with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
            batch: list[dict[str, Any]] = []
            for number, row in enumerate(_copies(shard, rows), 1):
                batch.append(row)
                if len(batch) == GROUP or number == rows:
                    writer.write_batch(pa.RecordBatch.from_pylist(batch, schema=SCHEMA))
                    batch = []
    (home / "manifest.json").write_text(json.dumps({"schema_version": "synth_harmony_v1"}))
    return home


def _copies(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Real rows in turn, with new ids and a share of their longer words replaced by made-up ones."""
    from tests.distill.inputs import real_rows

    originals = []
    for row in real_rows():
        messages = json.loads(row["messages_json"])["messages"]
        pieces = [_pieces(m["content"][0]["text"]) if "text" in m["content"][0] else None for m in messages]
        originals.append((row, messages, pieces))
    rng = random.Random(seed)
    for number in range(count):
        row, messages, pieces = originals[number % len(originals)]
        changed = []
        for message, parts in zip(messages, pieces, strict=True):
            if parts is None:
                changed.append(message)
                continue
            words = list(parts)
            places = range(1, len(words), 2)  # every other piece is a word
            for place in rng.sample(places, int(len(places) * SHARE_CHANGED)):
                words[place] = "".join(rng.choices(SYLLABLES, k=rng.randint(2, 4)))
            changed.append({**message, "content": [{"type": "text", "text": "".join(words)}]})
        text = json.dumps({"messages": changed}, ensure_ascii=False)
        yield {**row, "messages_json": text, "synth_id": f"{row['synth_id']}-{seed}-{number}"}


def _pieces(text: str) -> list[str]:
    """What stands between the words of four letters and more, and these words, by turns."""
    pieces, at = [], 0
    for found in WORD.finditer(text):
        pieces += [text[at : found.start()], found.group()]
        at = found.end()
    return [*pieces, text[at:]]


class Contest:
    """Both builds over the same input, each run into a new folder."""

    def __init__(self, source: Path, work: Path, peer_rows: int) -> None:
        self.source, self.work, self.peer_rows = source, work, peer_rows
        self.cpu: dict[str, list[float]] = {OURS: [], PEER: []}
        self.tokens = dict.fromkeys(self.cpu, 0)
        self.rows = dict.fromkeys(self.cpu, 0)
        self.audited = 0
        self._runs = 0

    def ours(self, rows: int | None = None, out: Path | None = None) -> Path:
        """A build in this process; `rows` caps each shard."""
        from chatmill.distill.run import build_synth_kd

        root, start = out or self._new(), time.process_time()
        result = build_synth_kd(self.source, root, valid_fraction=VALID_FRACTION, max_rows_per_shard=rows, workers=0)
        self.cpu[OURS].append(time.process_time() - start)
        splits = result.manifest["splits"].values()
        self.tokens[OURS], self.rows[OURS] = (sum(split[key] for split in splits) for key in ("tokens", "rows"))
        self.audited = result.audited
        return root

    def peer(self, out: Path | None = None) -> Path:
        """The straightforward build."""
        from tests.distill import straightforward

        root, start = out or self._new(), time.process_time()
        counts = straightforward.build(self.source, root, valid_fraction=VALID_FRACTION, rows=self.peer_rows)
        self.cpu[PEER].append(time.process_time() - start)
        self.tokens[PEER], self.rows[PEER] = counts["tokens"], counts["rows"]
        return root

    def _new(self) -> Path:
        """A folder for one run; that of the run before goes, so that the disk does not fill."""
        shutil.rmtree(self.work / f"run{self._runs}", ignore_errors=True)
        self._runs += 1
        return self.work / f"run{self._runs}"

    def check(self) -> str:
        """All files of both builds of the first rows have the same bytes, and the whole build begins with them."""
        theirs, mine = self.peer(self.work / "peer"), self.ours(self.peer_rows, self.work / "ours")
        whole = self.ours(None, self.work / "whole")
        names = sorted(path.relative_to(theirs).as_posix() for path in theirs.rglob("*.*"))
        for name in names:
            expected = (theirs / name).read_bytes()
            if (mine / name).read_bytes() != expected:
                raise WorkDiffersError(f"{name} has other bytes than the straightforward build's")
            if name.endswith(".bin") and not _begins_with(whole / name, expected):
                raise WorkDiffersError(f"{name} of the whole build does not begin with the straightforward build's")
        if len(names) != FILES:
            raise WorkDiffersError(f"only {len(names)} files were compared")
        for folder in (theirs, mine, whole):
            shutil.rmtree(folder)
        self.cpu = {OURS: [], PEER: []}
        return f"{len(names)} files of {2 * self.peer_rows:,} rows byte for byte equal"


def _begins_with(path: Path, content: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(content)) == content


def load(report: Report, source: Path) -> None:
    """Import and load everything that both sides need, and say how long that took."""
    start = time.perf_counter()
    from chatmill.compiler.chunk_job import pipeline_of, recipe_json
    from chatmill.compiler.run import driver_pipeline
    from chatmill.distill.input_shards import read_input
    from chatmill.distill.manifest import KDConfig
    from chatmill.distill.run import kd_recipe

    imported = time.perf_counter() - start
    start = time.perf_counter()
    recipe = kd_recipe(KDConfig(valid_fraction=VALID_FRACTION), read_input(source))
    driver_pipeline(recipe)
    pipeline_of(recipe_json(recipe))
    loaded = time.perf_counter() - start
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron.core.datasets.indexed_dataset  # noqa: F401
    peer = time.perf_counter() - start
    report.figures["imports"] = {"chatmill_s": imported, "vocabularies_s": loaded, "megatron_and_torch_s": peer}
    report.notes.append(
        f"synth_kd: not counted: imports of Chatmill's build {imported:.1f} s, its vocabularies {loaded:.1f} s; of the "
        f"straightforward build, Megatron Core and torch {peer:.1f} s"
    )


def measure(*, quick: bool, rows: int | None = None) -> Report:
    """Check, then take turns."""
    report = Report()
    count = rows or (QUICK_ROWS if quick else ROWS)
    with work_folder() as work, inputs_folder() as folder:
        source = write_input(folder, count)
        load(report, source)
        contest = Contest(source, work, QUICK_PEER_ROWS if quick else PEER_ROWS)
        checked = contest.check()
        contestants = {OURS: (contest.ours, contest.tokens[OURS]), PEER: (contest.peer, contest.tokens[PEER])}
        found = compare(contestants, ours=OURS, check=lambda: checked, rounds=1 if quick else 3)[PEER]
    cpu = {side: sorted(times)[len(times) // 2] for side, times in contest.cpu.items()}
    cpu_ratio = cpu[PEER] / contest.tokens[PEER] / (cpu[OURS] / contest.tokens[OURS])
    hours = {side: cpu[side] / contest.rows[side] * REAL_ROWS / 3600 for side in cpu}
    report.compared(
        "synth-kd, 1 process",
        found,
        unit="tokens",
        target=">= 60",
        note=f"{contest.rows[OURS]:,} rows, {contest.audited:,} of them audited; by CPU time alone {cpu_ratio:.1f}x",
    )
    report.figures["cpu"] = {"seconds": cpu, "rows": contest.rows, "tokens": contest.tokens, "ratio": cpu_ratio}
    report.figures["core_hours_of_76M_rows"] = hours
    report.notes.append(
        f"synth_kd: {REAL_ROWS:,} rows on paper: {hours[OURS]:.1f} core-hours, and {hours[PEER]:.0f} with the "
        "straightforward build (CPU seconds a row, times the rows)"
    )
    return report


if __name__ == "__main__":
    sys.exit(run_one("synth_kd", str(__doc__), measure, sizes={"rows": (ROWS, "rows of each of the 2 shards")}))
