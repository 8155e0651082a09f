"""Building JSONL chats into episodes with `qwen3_training`, against TRL, `renderers` and gigatoken alone.

    python -m benchmarks.compile [--quick] [--json] [--size BYTES] [--trl-size BYTES]

- *gigatoken*, the limit: every chunk's work (read, render, label, write, hash, publish) against gigatoken's
  `encode_batch(parallel=False)` on all pieces of text in the same batches (handed over as ready flat arrays, its
  quickest way), chunk by chunk in one process, after one warm-up chunk, by CPU time: once while most texts are new
  (*compile*), and once more with the same texts (*compile again*). A piece that is repeated in its batch, such as
  a tool or a system prompt, is encoded once by Chatmill and every time by gigatoken alone. Each side has a tokenizer of
  its own, so that each meets new words once; loading it is not counted.
- *renderers*: a chunk's whole work against PrimeIntellect's `renderers`, which begins with decoded records and ends
  with ids and mask in memory; one process each. It writes the published template, so ours is `qwen3` there.
- *TRL*: `datasets.map` with `apply_chat_template` and its assistant mask, 2 processes, against a whole build with 2
  workers (start of the workers, tokenizer included). TRL takes slices of the input, one a round; Chatmill builds all
  slices in every round (*small*), and once more with the files of the first comparison, listed four times. TRL is not
  charged for reading the file.
- *tokenizers 1.0*: the same Jinja and `datasets.map`, with ids by `tokenizers` 1.0 (`.tokenizers-1`) and no mask:
  transformers does not run with it, and it has no offsets to make masks of. What TRL's path could be at its best.

Input: the bundled real conversations without the two that spell control tokens, tiled with changed words in every copy.
Ids and trained tokens are compared before any ratio is given.
"""

from __future__ import annotations

import os

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

import json
import shutil
import sys
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from benchmarks.builds import Bench, build, episodes, recipe_for, tokens_of
from benchmarks.harness import (
    Comparison,
    Report,
    Timing,
    WorkDiffersError,
    compare,
    flat,
    missing,
    require_equal,
    run_one,
)
from benchmarks.inputs import again, inputs_folder, plain_records, records, work_folder, write_shards, write_tiled
from benchmarks.peers import (
    Prepared,
    conversations_of,
    ids_map,
    prepared,
    renderers_rows,
    tokenizers_one,
    trl_map,
    trl_table,
)
from chatmill.compiler.recipe import SHARD_BYTES
from chatmill.core.native.gather import Pieces, gathered, joined_pieces
from chatmill.core.texts import Texts
from chatmill.render import fill as fill_module
from chatmill.render.registry import bind
from chatmill.render.render import render
from chatmill.tokenizer.backends import as_awkward
from chatmill.tokenizer.load import load_tokenizer
from tests.data.tokenizer_files import unpacked

SIZE, QUICK_SIZE = 520_000_000, 8_000_000
TRL_SIZE, QUICK_TRL_SIZE = 261_000_000, 800_000
TRL_SLICES, QUICK_SLICES = 3, 1
LISTED = 4
"""How often a large build against TRL lists the input."""


Parts = tuple[list[NDArray[np.uint8]], NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]
"""What pieces are put together of: buffers, and of each part its buffer, start, length and whether it opens a piece."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a text engine in a build."""

    texts: Any
    """What was encoded: every different piece once."""
    parts: Parts | None
    """The parts of all pieces of rows that were wanted; None where the texts themselves were."""
    number: NDArray[np.int64]
    """Which of the texts each part is in."""
    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]

    def firsts(self) -> NDArray[np.int64]:
        """The first part of every piece."""
        assert self.parts is not None
        return np.flatnonzero(np.append(True, self.parts[4][1:])[: len(self.number)])

    def pieces(self) -> Any:
        """The pieces that were wanted, as often as they occur."""
        if self.parts is None:
            return self.texts
        lengths = np.add.reduceat(self.parts[3], self.firsts()) if len(self.number) else self.parts[3]
        return Texts.packed_in(gathered(*self.parts[:4]), lengths)

    def wanted(self) -> NDArray[np.int32]:
        """The ids of all pieces."""
        if self.parts is None:
            return self.ids
        number, counts = self.number[self.firsts()], np.diff(self.offsets)
        return gathered([self.ids], np.zeros(len(number), dtype=np.uint8), self.offsets[number], counts[number])


class Recorder:
    """Stands in for a text engine: passes calls on, and keeps what was asked and what came out."""

    def __init__(self, backend: Any) -> None:
        """`backend` does the work."""
        self.backend, self.name = backend, backend.name
        self.calls: list[Call] = []
        self._asked: tuple[Parts | None, Any] = (None, None)

    def joined_pieces(self, *parts: Any) -> Pieces:
        """Stands in for the function that puts pieces together and leaves repeated ones out."""
        made = joined_pieces(*parts)
        self._asked = (parts, made.numbers)
        return made

    def encode_batch(self, texts: Any) -> Any:
        """Encode, and remember the pieces and ids."""
        made = self.backend.encode_batch(texts)
        self.calls.append(Call(texts, *self._asked, *made))
        self._asked = (None, None)
        return made

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)


@dataclass(slots=True)
class Work:
    """What both sides did in the chunks of one pass."""

    ours: list[float]
    """CPU seconds of every chunk."""
    theirs: list[float]
    pieces: int = 0
    tokens: int = 0
    text_tokens: int = 0
    encoded_tokens: int = 0


def one_pass(bench: Bench, recorder: Recorder, alone: Any, *, compares: bool) -> Work:
    """Compile every chunk, and encode its pieces with gigatoken alone; compare the ids if asked to."""
    work = Work([], [])
    for number, job in enumerate(bench.jobs):
        recorder.calls.clear()
        start = time.process_time()
        with patch.object(fill_module, "joined_pieces", recorder.joined_pieces):
            made = bench.compile(job)[1]
        compiled = time.process_time() - start
        wanted_pieces = [call.pieces() for call in recorder.calls]
        given = [as_awkward(texts) if isinstance(texts, Texts) else texts for texts in wanted_pieces]
        start = time.process_time()
        encoded = [alone.encode_batch(texts, parallel=False) for texts in given]
        seconds = time.process_time() - start
        wanted = [call.wanted() for call in recorder.calls]
        for own, other in zip(wanted, encoded, strict=True) if compares else ():
            first, last = other.layout.offsets.data[0], other.layout.offsets.data[-1]
            require_equal("ids of the pieces", own, np.asarray(other.layout.content.data)[first:last])
        if number:  # the first chunk warms both up
            work.ours.append(compiled)
            work.theirs.append(seconds)
            work.pieces += sum(map(len, wanted_pieces))
            work.text_tokens += sum(map(len, wanted))
            work.encoded_tokens += sum(len(call.ids) for call in recorder.calls)
            work.tokens += made
    return work


def against_gigatoken(report: Report, paths: list[Path], work: Path) -> None:
    """Chunk work against encoding alone, on the same pieces in the same calls.

    In a first pass most texts are new; in a second one both sides have met every text before.
    """
    size = sum(path.stat().st_size for path in paths)
    bench = Bench.of(recipe_for(paths), work, shard_bytes=min(SHARD_BYTES, size // 8))
    tokenizer: Any = bench.pipeline.template.tokenizer
    recorder = Recorder(tokenizer.backend)
    object.__setattr__(tokenizer, "backend", recorder)  # a tokenizer is frozen
    alone = load_tokenizer(unpacked("qwen3")).backend._tokenizer  # type: ignore[attr-defined]  # gigatoken itself
    fresh = one_pass(bench, recorder, alone, compares=True)
    again = one_pass(bench, recorder, alone, compares=False)
    object.__setattr__(tokenizer, "backend", recorder.backend)
    if not fresh.tokens / 2 < fresh.text_tokens < fresh.tokens:
        raise WorkDiffersError(
            f"{fresh.text_tokens:,} of {fresh.tokens:,} tokens came out of the recorded calls: not the whole text"
        )
    for name, found in (("", fresh), (" again", again)):
        comparison = Comparison(
            ours=Timing(seconds=(sum(found.ours),), work=found.tokens),
            peer=Timing(seconds=(sum(found.theirs),), work=found.tokens),
            checked=f"CPU time; ids of {fresh.pieces:,} pieces equal "
            f"({fresh.text_tokens / fresh.tokens:.0%} of all tokens; "
            f"{1 - fresh.encoded_tokens / fresh.text_tokens:.0%} are repeated in their batch)",
        )
        by_chunk = sorted(own / other for own, other in zip(found.ours, found.theirs, strict=True))
        report.compared(
            f"compile{name}, 1 worker / gigatoken", comparison, unit="tokens", target="" if name else "<= 1.8",
            as_cost=True,
            note=f"{size / 1e6:,.0f} MB in {len(found.ours)} chunks, and one to warm up; "
            f"{by_chunk[0]:.2f}x to {by_chunk[-1]:.2f}x by chunk; "
            f"tokenizer load {bench.load_seconds:.1f} s not counted",
        )  # fmt: skip
    report.figures["gigatoken"] = {
        "input_bytes": size,
        "bytes_timed": sum(job.bytes for job in bench.jobs[1:]),
        "tokenizer_load_s": bench.load_seconds,
        "compile_s_by_chunk": fresh.ours,
        "encode_s_by_chunk": fresh.theirs,
        "compile_again_s_by_chunk": again.ours,
        "encode_again_s_by_chunk": again.theirs,
    }
    if size < 500_000_000:
        report.notes.append("gigatoken: the target asks for 500 MB of input or more; this run had less")


def against_renderers(report: Report, originals: list[dict[str, Any]], work: Path, *, quick: bool) -> None:
    """A chunk's whole work against `renderers`, one process each, taking turns."""
    if missing("renderers"):
        report.notes.append("renderers is not installed: not compared")
        return
    path = write_tiled(work / "renderers.jsonl", 500_000 if quick else 8_000_000, originals=originals)
    given = prepared(conversations_of([path]))
    equal = equal_to_renderers(path, given, work / "built")
    bench = Bench.of(recipe_for([path], "qwen3"), work)
    tokens = bench.compile_all()  # both are warm now
    found = compare(
        {"chatmill": (bench.compile_all, tokens), "renderers": (lambda: renderers_rows(given), tokens)},
        ours="chatmill",
        check=lambda: equal,
        rounds=2 if quick else 3,
    )
    report.compared("compile, 1 worker / renderers", found["renderers"], unit="tokens")


def equal_to_renderers(path: Path, given: list[Prepared], out: Path) -> str:
    """What a build stored, against the rows of `renderers`."""
    rows = renderers_rows(given)
    build(recipe_for([path], "qwen3"), out, 1)
    stored = episodes(out, 0, len(rows))
    require_equal("tokens per record", stored.lengths, [len(ids) for ids, _ in rows])
    require_equal("ids", stored.ids, flat([ids for ids, _ in rows], np.int64))
    require_equal("trained tokens", stored.weights > 0, flat([sampled for _, sampled in rows], np.bool_))
    return f"ids and trained tokens equal on all {len(rows):,} records"


def against_trl(report: Report, slices: list[Path], more: list[Path], work: Path) -> None:
    """Whole builds with 2 workers against TRL's path in 2 processes; a slice a round, each compared in full.

    Starting up takes a build some seconds whatever it builds, so there are two: of the slices, and of `more` too.
    """
    inputs, out = {"": [*slices, *more], ", small": slices}, work / "two"
    first = trl_table(prepared(conversations_of(slices[:1])[:8]))
    trl_map(first, 2)  # imports and loads what the rounds need
    if tokenizers_one() is None:
        report.notes.append(
            "tokenizers 1.0 is not in .tokenizers-1: TRL's path is compared with the installed one alone"
        )
    else:
        ids_map(first, 2)
    ours: dict[str, list[float]] = {size: [] for size in inputs}
    built: dict[str, int] = {}
    theirs, checked, tokens = [], 0, 0
    newer: list[float] = []
    """Seconds of the same with `tokenizers` 1.0, where that is there; ids alone."""
    for path in slices:
        conversations = conversations_of([path])
        table = trl_table(prepared(conversations))
        start = time.perf_counter()
        mapped = trl_map(table, 2)
        theirs.append(time.perf_counter() - start)
        mapped_newer = None
        if tokenizers_one() is not None:
            start = time.perf_counter()
            mapped_newer = ids_map(table, 2)
            newer.append(time.perf_counter() - start)
        for size, paths in inputs.items():  # the small one is last, and compared
            shutil.rmtree(out, ignore_errors=True)
            os.sync()  # what the build before has left to write would be in the way of this one
            start = time.perf_counter()
            built[size] = tokens_of(build(recipe_for(paths), out, 2))
            ours[size].append(time.perf_counter() - start)
        stored = episodes(out, checked, len(conversations))
        for name, column, own in (("input_ids", "ids", stored.ids), ("assistant_masks", "trained", stored.weights)):
            values = mapped.with_format("arrow")[:][name].combine_chunks()
            require_equal("tokens per record", stored.lengths, np.diff(values.offsets.to_numpy()))
            require_equal(column, own, values.flatten().to_numpy())
        if mapped_newer is not None:
            values = mapped_newer.with_format("arrow")[:]["input_ids"].combine_chunks()
            require_equal("ids of tokenizers 1.0", stored.ids, values.flatten().to_numpy())
        checked += len(conversations)
        tokens += int(stored.lengths.sum())
    if tokens != built[", small"]:
        raise WorkDiffersError(f"TRL made {tokens:,} tokens, the build {built[', small']:,}")
    peers = {"TRL, 2 proc.": (theirs, "ids and trained tokens"), "ids by tokenizers 1.0, 2 proc.": (newer, "ids")}
    for (size, paths), (peer, (seconds, what)) in product(inputs.items(), peers.items()):
        if not seconds:
            continue
        comparison = Comparison(
            ours=Timing(seconds=tuple(ours[size]), work=built[size]),
            peer=Timing(seconds=tuple(seconds), work=tokens / len(slices)),
            checked=f"{what} equal on all {checked:,} records",
        )
        total = sum(path.stat().st_size for path in paths)
        report.compared(
            f"compile{size}, 2 workers / {peer}", comparison, unit="tokens",
            target=">= 70" if not size and seconds is theirs else "",
            in_chart=not size,
            note=f"builds of {total / 1e6:,.0f} MB, {built[size] / 1e6:.1f} M tokens; the peer has "
            f"{tokens / 1e6:.1f} M of them in {len(slices)} slices",
        )  # fmt: skip


def differs_by_design(report: Report, originals: list[dict[str, Any]], left: list[dict[str, Any]], work: Path) -> None:
    """The records that were left out: TRL's ids hold control tokens where the text only spells them, no other change.

    The same text comes out of both. Where the spelled name is a special token Chatmill's has more tokens: it is text.
    """
    kept = {record["id"] for record in left}
    spelled = [record for record in originals if record["id"] not in kept]
    if not spelled:
        return
    path = work / "spelled.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in spelled))
    conversations = conversations_of([path])
    tokenizer = load_tokenizer(unpacked("qwen3"))
    theirs = trl_map(trl_table(prepared(conversations)), 1)["input_ids"]
    tokens = render(conversations, bind("qwen3_training", tokenizer)).tokens
    for index, ids in enumerate(theirs):
        own = tokens.ids[tokens.offsets[index] : tokens.offsets[index + 1]]
        if tokenizer.decode(own) != tokenizer.decode(ids) or len(own) < len(ids):
            raise WorkDiffersError(
                f"{conversations[index].where}: differs from TRL in more than spelled control tokens"
            )
    report.notes.append(
        f"{len(spelled)} of {len(originals):,} real records spell a control token and are not in the input: TRL makes "
        f"control of that text, Chatmill not of special tokens; the decoded text of both is equal (checked)"
    )


def measure(*, quick: bool, size: int | None = None, trl_size: int | None = None) -> Report:
    """All three comparisons."""
    report = Report()
    size = size or (QUICK_SIZE if quick else SIZE)
    trl_size = trl_size or (QUICK_TRL_SIZE if quick else TRL_SIZE)
    originals = plain_records()
    with work_folder() as work, inputs_folder() as folder:
        paths = write_shards(folder, size, originals=originals)
        against_gigatoken(report, paths, work)
        against_renderers(report, originals, work, quick=quick)
        if missing("trl", "datasets", "transformers"):
            report.notes.append("trl, datasets or transformers is not installed: not compared")
        else:
            count = QUICK_SLICES if quick else TRL_SLICES
            slices = write_shards(folder, trl_size, originals=originals, shard_bytes=trl_size // count)[:count]
            against_trl(report, slices, again(paths, 1 if quick else LISTED), work)
            differs_by_design(report, records(), originals, work)
    return report


if __name__ == "__main__":
    sizes = {"size": (SIZE, "bytes of input"), "trl_size": (TRL_SIZE, "bytes of the input that TRL gets")}
    sys.exit(run_one("compile", str(__doc__), measure, sizes=sizes))
