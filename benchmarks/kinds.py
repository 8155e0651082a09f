"""Every kind of input, read alone and compiled: megabytes a second of one core, side by side with an older version.

    python -m benchmarks.kinds [--quick] [--json] [--size BYTES] [--rounds N] [--before FOLDER] [--only NAME ...]
                             [--what read|compiled]

The bundled conversations, tiled with changed words, are written as each kind of record, and some kinds in several
containers. *Read* gives columns: lines by `read_lines`, rows of Parquet and of tables by `read_rows`, with unpacking
what is packed. *Compiled* is all work on a chunk, with tokenizer and template loaded and learned, without the plan
of the build. Megabytes are those of the records as JSON lines, whatever the file has, so that all containers compare.

`--before`: the folder of a checkout of another version with its compiled part. Each version runs in a process of its
own, and they take turns with every single reading of a file, so that both meet the same other work on the machine. The
time is that of the processor, the least of all rounds: other work only adds to it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

SIZE, QUICK_SIZE = 8_000_000, 400_000
ROUNDS, QUICK_ROUNDS = 9, 1
WHATS = ("read", "compiled")
Record = dict[str, Any]
ROOT = Path(__file__).parents[1]
TOOLS = ("bfcl", "glaive_toolcall", "reason_tool_use", "gpteacher_toolformer")
TRAJECTORIES = ("swe_agent", "tau_airline")
"""What the ids of records begin with, or the files they are in."""


def with_unknown_fields(record: Record) -> Record:
    """The record as a chat platform exports it: an id, a time and an object next to every message."""
    messages = []
    for number, message in enumerate(record["messages"]):
        about = {"model": "m-1", "usage": {"input": number, "cached": [0, 1]}, "edited": False}
        messages.append(
            {"id": f"msg-{number:06d}", **message, "timestamp": f"2026-11-{number % 28:02d}T09:30:00Z", "about": about}
        )
    return {**record, "messages": messages, "exported": {"at": "2026-11-19", "by": ["a", "b"]}}


def question_and_answer(record: Record) -> tuple[str, str]:
    """The first question of a chat, and its last answer."""
    asked = [message["content"] for message in record["messages"] if message["role"] == "user"]
    return str(asked[0]), str(record["messages"][-1].get("content") or ".")


def pair(record: Record) -> Record:
    """Two whole conversations that end in different answers."""
    text = question_and_answer(record)[1]
    sides = [text, text[: len(text) // 2] + "?"]
    prompt = record["messages"][:-1]
    chosen, rejected = ([*prompt, {"role": "assistant", "content": side}] for side in sides)
    return {"id": record["id"], "chosen": chosen, "rejected": rejected}


def scored_pair(record: Record) -> Record:
    """The same as UltraFeedback has it: the prompt as a text next to them, and a score for each."""
    prompt = question_and_answer(record)[0]
    return {"prompt": prompt, "prompt_id": record["id"], **pair(record), "score_chosen": 8.0, "score_rejected": 3.5}


def pair_of_texts(record: Record) -> Record:
    """A question and two answers."""
    asked, said = question_and_answer(record)
    return {"id": record["id"], "prompt": asked, "chosen": said, "rejected": said[: len(said) // 2] + "?"}


def sampled_call(record: Record) -> Record:
    """A logged call with about as many ids as the chat has tokens."""
    number = len(json.dumps(record["messages"])) // 4
    ids = [(index * 7919) % 30_000 for index in range(number)]
    return {"id": record["id"], "prompt_token_ids": ids[: number // 2], "token_ids": ids[number // 2 :] or [1]}


def trajectory(record: Record) -> Record:
    """The chat in ATIF."""
    from benchmarks.tokens import trajectory as written

    return written(record, [], whole=False)


def flat(record: Record) -> Record:
    """A question and an answer as an instruction has them."""
    asked, said = question_and_answer(record)
    return {"id": record["id"], "instruction": asked, "output": said}


def same(record: Record) -> Record:
    """The record as it is."""
    return record


def is_chat(record: Record) -> bool:
    """Whether a record is a chat without tools that ends with an answer."""
    messages = record["messages"]
    roles = [message["role"] for message in messages]
    plain = all(set(message) == {"role", "content"} and message["content"] for message in messages)
    asked = next((role for role in roles if role != "system"), "")
    return plain and not record.get("tools") and roles[-1] == "assistant" and asked == "user"


def has_name(names: tuple[str, ...]) -> Callable[[Record], bool]:
    """Choose the records of some of the bundled sources."""
    return lambda record: str(record.get("source", record["id"])).startswith(names)


Kind = tuple[str, Callable[[Record], bool], Callable[[Record], Record], tuple[str, ...]]
KINDS: tuple[Kind, ...] = (
    ("chats", is_chat, same, ("jsonl", "parquet", "jsonl.zst")),
    ("questions and answers", is_chat, flat, ("jsonl", "parquet", "csv")),
    ("chats with unknown fields", is_chat, with_unknown_fields, ("jsonl", "parquet")),
    ("chats with tools", has_name(TOOLS), same, ("jsonl",)),
    ("trajectories", has_name(TRAJECTORIES), same, ("jsonl",)),
    ("pairs", is_chat, pair, ("jsonl", "parquet")),
    ("pairs with scores", is_chat, scored_pair, ("jsonl", "parquet")),
    ("pairs of texts", is_chat, pair_of_texts, ("jsonl", "parquet")),
    ("logged calls", is_chat, sampled_call, ("jsonl",)),
    ("ATIF", has_name(TRAJECTORIES), trajectory, ("jsonl",)),
)
"""Name, which of the bundled records, what each becomes, and the containers."""


def write_inputs(folder: Path, size: int, only: Sequence[str] = ()) -> dict[str, int]:
    """Write the files of these kinds, or of all; returns for each the bytes of its records as JSON lines."""
    import zstandard

    from benchmarks.inputs import CONVERSATION_FILES, copies
    from chatmill.read.files import read_records

    originals = [{**raw.value, "source": path.name} for path in CONVERSATION_FILES for raw in read_records(path)]
    sizes: dict[str, int] = {}
    for name, choose, make, containers in KINDS:
        if only and name not in only:
            continue
        chosen = [record for record in originals if choose(record)]
        records: list[Record] = []
        lines: list[str] = []
        written = 0
        for record in copies(chosen):
            made = make({key: value for key, value in record.items() if key != "source"})
            line = json.dumps(made, ensure_ascii=False) + "\n"
            records.append(made)
            lines.append(line)
            written += len(line.encode())
            if written >= size:
                break
        for container in containers:
            path = folder / f"{name.replace(' ', '_')}.{container}"
            if container.startswith("jsonl"):
                data = "".join(lines).encode()
                path.write_bytes(zstandard.compress(data) if container.endswith("zst") else data)
            else:
                _write_table(path, records)
            sizes[path.name] = written
    return sizes


def _write_table(path: Path, records: list[Record]) -> None:
    """Write rows of Parquet or CSV."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    table = pa.Table.from_pylist(records)
    if path.suffix == ".csv":
        pyarrow.csv.write_csv(table, path)
    else:
        pyarrow.parquet.write_table(table, path)


def shape_and_preferences(path: Path) -> tuple[str, str | None]:
    """How the records of a file are read."""
    if path.name.startswith("pairs"):
        return "pairs", "pairs"
    names = {"logged": "calls", "ATIF": "atif", "questions_and": "alpaca"}
    return next((shape for start, shape in names.items() if path.name.startswith(start)), "openai"), None


def read_alone(path: Path) -> int:
    """Read a file as a build does; returns how many conversations it gave."""
    import zstandard

    from chatmill.read.columns import line_groups, read_lines
    from chatmill.read.files import parquet_batches
    from chatmill.read.rows import read_rows
    from chatmill.read.shapes import find_shape
    from chatmill.read.tables import table_batches

    shape = find_shape(shape_and_preferences(path)[0])
    count = 0
    if path.suffix in (".parquet", ".csv"):
        batches: Iterator[Any] = parquet_batches(path) if path.suffix == ".parquet" else iter(table_batches(path))
        for batch in batches:
            found, errors = read_rows(batch, first=1, path="f", source="s", shape=shape)
            assert not errors, errors[0]
            count += len(found)
        return count
    data = path.read_bytes()
    if path.suffix == ".zst":
        data = zstandard.decompress(data)
    for lines in line_groups(data, itertools.repeat(16 << 20)):
        found, errors = read_lines(data, lines, before="f:", source="s", shape=shape)
        assert not errors, errors[0]
        count += len(found)
    return count


class Version:
    """A process that runs one version of Chatmill, and measures what it is told to."""

    def __init__(self, root: Path, folder: Path, work: Path) -> None:
        """`root` is the checkout, `folder` has the inputs."""
        environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}"}
        command = [sys.executable, str(Path(__file__)), "--child", str(folder), str(work)]
        self._process = subprocess.Popen(
            command, cwd=root, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def measure(self, what: str, file: str) -> dict[str, float]:
        """Measure one thing about a file."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([what, file]) + "\n")
        self._process.stdin.flush()
        answer: dict[str, float] = json.loads(self._process.stdout.readline())
        return answer

    def end(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve(folder: Path, work: Path) -> None:
    """Measure what the parent asks for, line by line, with the version of this process."""
    from benchmarks.builds import Bench

    benches: dict[str, Bench] = {}
    for line in sys.stdin:
        what, file = json.loads(line)
        path = folder / file
        if what == "compiled" and file not in benches:
            benches = {file: bench_of(path, work / file)}
            benches[file].compile_all()  # learns the template
        start = time.process_time()
        count = read_alone(path) if what == "read" else benches[file].compile_all()
        seconds = time.process_time() - start
        print(json.dumps({what: seconds, "conversations" if what == "read" else "tokens": count}), flush=True)


def bench_of(path: Path, work: Path) -> Any:
    """Plan the build of a file."""
    from msgspec import structs

    from benchmarks.builds import Bench, recipe_for

    shape, preferences = shape_and_preferences(path)
    recipe = recipe_for([path])
    source = structs.replace(recipe.sources[0], **{"shape": shape} if shape == "alpaca" else {})
    return Bench.of(structs.replace(recipe, preferences=preferences, sources=(source,), on_error="quarantine"), work)


def measure(
    size: int, before: Path | None, rounds: int, only: Sequence[str] = (), whats: Sequence[str] = WHATS
) -> dict[str, Any]:
    """Write the inputs and measure the versions in turns."""
    from benchmarks.inputs import work_folder

    roots = {"now": ROOT} if before is None else {"before": before, "now": ROOT}
    best: dict[str, dict[str, dict[str, float]]] = {name: {} for name in roots}
    with work_folder() as work:
        inputs = work / "inputs"
        inputs.mkdir()
        sizes = write_inputs(inputs, size, only)
        versions = {name: Version(root, inputs, work / name) for name, root in roots.items()}
        for file in sizes:
            for what in whats:
                for number in range(rounds):
                    for name in list(versions)[:: 1 if number % 2 else -1]:
                        values = versions[name].measure(what, file)
                        kept = best[name].setdefault(file, {})
                        best[name][file] = kept | {
                            key: min(kept.get(key, value), value) for key, value in values.items()
                        }
        for version in versions.values():
            version.end()
    return {"bytes": sizes, "seconds": best}


def table(result: dict[str, Any]) -> list[str]:
    """The lines of a Markdown table: megabytes a second."""
    sizes, seconds = result["bytes"], result["seconds"]
    lines = ["| input | read alone | before | compiled | before |", "|---|---:|---:|---:|---:|"]
    for file, size in sizes.items():
        cells = [file]
        for what in WHATS:
            for version in ("now", "before"):
                values = seconds.get(version, {}).get(file, {})
                cells.append(f"{size / 1e6 / values[what]:,.0f}" if what in values else "")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> int:
    """Run the command."""
    if sys.argv[1:2] == ["--child"]:
        serve(Path(sys.argv[2]), Path(sys.argv[3]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="less input and one round")
    parser.add_argument("--size", type=int, help=f"bytes of each kind [{SIZE:,}]")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"measurements of each figure [{ROUNDS}]")
    parser.add_argument("--only", nargs="+", choices=[kind[0] for kind in KINDS], default=(), help="some kinds alone")
    parser.add_argument("--what", nargs="+", choices=WHATS, default=WHATS, help="one of the two alone")
    parser.add_argument("--before", type=Path, help="checkout of another version")
    options = parser.parse_args()
    size = options.size or (QUICK_SIZE if options.quick else SIZE)
    rounds = QUICK_ROUNDS if options.quick else options.rounds
    result = measure(size, options.before, rounds, options.only, options.what)
    print(json.dumps(result) if options.json else "\n".join(table(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
