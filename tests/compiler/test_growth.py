"""A build, its check and its summary cost what the input weighs, however many sources and fields it has."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import chatmill
from chatmill.compiler.chunk_job import ChunkJob, compile_chunk
from chatmill.compiler.run import run_build
from chatmill.console import plain_console
from chatmill.core.ledger import LOST_REASONING, Ledger
from chatmill.look.dataset import open_for_looking
from chatmill.look.ledger import SHOWN_SOURCES, accounts_table, build_lines, losses, source_rows
from chatmill.look.stats import dataset_stats
from chatmill.prove.verify import verify
from tests.compiler.builds import plain_recipe, talk, write_jsonl

PACKAGE = str(Path(chatmill.__file__).parent)


def lines_run(work: Callable[[], object]) -> int:
    """Count the lines of the package that run in this thread: a measure of work that knows no clock."""
    count = 0

    def count_line(frame: FrameType, event: str, value: object) -> Any:
        nonlocal count
        count += event == "line"
        return count_line

    def begin(frame: FrameType, event: str, value: object) -> Any:
        return count_line if frame.f_code.co_filename.startswith(PACKAGE) else None

    before = sys.gettrace()
    sys.settrace(begin)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def in_one_file(folder: Path, records: list[dict[str, Any]]) -> dict[str, Any]:
    folder.mkdir()
    return plain_recipe(write_jsonl(folder / "chats.jsonl", records))


def sources(folder: Path, count: int) -> dict[str, Any]:
    """Records of a source each."""
    return in_one_file(folder, [{"messages": talk("q", "a"), "source": f"s{at}"} for at in range(count)])


def fields(folder: Path, count: int) -> dict[str, Any]:
    """Records of a source each, with a field each that nothing reads."""
    records = [{"messages": talk("q", "a"), "source": f"s{at}", f"field{at}": 1} for at in range(count)]
    return in_one_file(folder, records)


def entries(folder: Path, count: int) -> dict[str, Any]:
    """Files of one record, each named by a source of the recipe."""
    folder.mkdir()
    paths = [write_jsonl(folder / f"{at}.jsonl", [{"messages": talk("q", "a")}]) for at in range(count)]
    return {**plain_recipe(folder), "sources": [{"path": str(path)} for path in paths]}


def whole_way(recipe: dict[str, Any], out: Path) -> None:
    """Build, verify and show a dataset."""
    manifest = run_build(recipe, out, workers=0).manifest
    assert not verify(out).findings
    console = plain_console(file=io.StringIO(), width=120)
    console.print(accounts_table(Ledger.from_json(manifest["ledger"])))
    list(build_lines(manifest, str(out)))
    repr(dataset_stats(open_for_looking(out)))


@pytest.mark.parametrize("shape", [sources, fields])
def test_the_work_grows_with_the_input_and_no_faster(fast: Path, shape: Callable[[Path, int], dict[str, Any]]) -> None:
    """Between 200 and 800 records lie six times as many as between 100 and 200; so do the steps that they take."""
    steps = {
        count: lines_run(lambda count=count: whole_way(shape(fast / f"in{count}", count), fast / f"out{count}"))
        for count in (2, 100, 200, 800)  # what is loaded once is loaded with the first
    }
    assert steps[800] - steps[200] < 1.2 * 6 * (steps[200] - steps[100])


def test_what_a_worker_reads_of_its_build_does_not_grow_with_the_recipe(fast: Path) -> None:
    sizes: dict[int, set[int]] = {}
    for count in (2, 20):
        seen = sizes.setdefault(count, set())

        def job(job: ChunkJob, seen: set[int] = seen) -> dict[str, Any]:
            seen.add((job.work / "state.json").stat().st_size)
            return compile_chunk(job)

        result = run_build(entries(fast / f"in{count}", count), fast / f"out{count}", workers=0, job=job)
        assert result.chunks == count
    assert sizes[2] == sizes[20]


def many_sources(count: int) -> Ledger:
    ledger = Ledger()
    for at in range(count):
        ledger.tokens[f"s{at:03}", "assistant", "rendered"] = 10 + at
        ledger.tokens[f"s{at:03}", "assistant", "trained"] = 10 + at
        ledger.records[f"s{at:03}", "read", ""] = ledger.records[f"s{at:03}", "built", ""] = 1
        ledger.notes[f"s{at:03}", LOST_REASONING] = 1 + at
    return ledger


def test_a_few_sources_have_a_row_each_by_name_and_many_the_largest_alone() -> None:
    few = source_rows(many_sources(SHOWN_SOURCES))
    assert [name for name, _ in few] == [*(f"s{at:03}" for at in range(SHOWN_SOURCES)), "all"]
    ledger = many_sources(SHOWN_SOURCES + 30)
    rows = source_rows(ledger)
    largest = [f"s{at:03}" for at in reversed(range(30, SHOWN_SOURCES + 30))]
    assert [name for name, _ in rows] == [*largest, "30 other sources", "all"]
    whole = rows[-1][1]
    assert whole is ledger
    assert sum(part.total("trained") for _, part in rows[:-1]) == whole.total("trained")
    assert sum(part.total_records("built") for _, part in rows[:-1]) == whole.total_records("built")
    assert source_rows(many_sources(1))[-1][0] == "s000", "one source is all of them"


def test_a_sentence_about_many_sources_names_the_largest_alone() -> None:
    (few,) = (loss.words for loss in losses(many_sources(3)))
    assert few.endswith("(s000 1, s001 2, s002 3)")
    (many,) = (loss.words for loss in losses(many_sources(SHOWN_SOURCES + 30)))
    assert many.endswith("s030 31, 30 more sources)")
    assert many.count(" s") < SHOWN_SOURCES + 10
