"""Large inputs from the real conversations: tiled, with changes in every copy, so that caches do not flatter."""

from __future__ import annotations

import gzip
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CONVERSATION_FILES = sorted((Path(__file__).parents[1] / "tests" / "data" / "conversations").glob("*.jsonl.gz"))
"""The bundled real conversations."""
SYLLABLES = ("ba", "co", "di", "fu", "ga", "he", "ji", "ko", "lu", "ma", "ne", "po", "qua", "ri", "so", "tu", "va")
SYLLABLES += ("we", "xi", "yo", "zu", "tra", "ster", "ing", "ment", "ly", "pre", "con", "dis")
WORD = re.compile(r"\b[a-zA-Z]{4,}\b")
SHARE_CHANGED = 0.08
"""Share of the words (of four letters and more) that are replaced in every copy."""
SHARD = 33_000_000
"""Bytes of one file of a large input: two chunks of a build."""
FOLDER_VARIABLE = "CHATMILL_BENCH_INPUTS"
"""Names a folder in which inputs are kept and found again; a temporary one without it."""


def records() -> list[dict[str, Any]]:
    """The bundled real conversations, decoded."""
    return [json.loads(line) for path in CONVERSATION_FILES for line in gzip.open(path)]


def without_control_text(originals: Sequence[dict[str, Any]], control: Sequence[str]) -> list[dict[str, Any]]:
    """The records that spell none of these control tokens: in the others a peer lets text become control."""
    texts = (json.dumps([record["messages"], record.get("tools")], ensure_ascii=False) for record in originals)
    return [record for record, text in zip(originals, texts, strict=True) if not any(name in text for name in control)]


def plain_records() -> list[dict[str, Any]]:
    """The bundled conversations that spell no control token of Qwen3."""
    from chatmill.tokenizer.load import load_tokenizer
    from tests.data.tokenizer_files import unpacked

    return without_control_text(records(), list(load_tokenizer(unpacked("qwen3")).control_ids))


def _changed(text: str, rng: random.Random) -> str:
    def replace(found: re.Match[str]) -> str:
        if rng.random() >= SHARE_CHANGED:
            return found.group()
        return "".join(rng.choices(SYLLABLES, k=rng.randint(2, 4)))

    return WORD.sub(replace, text)


def copies(originals: Sequence[dict[str, Any]], seed: int = 0) -> Iterator[dict[str, Any]]:
    """Endless changed copies of the records; copy k of a record is always the same."""
    number = 0
    while True:
        rng = random.Random(f"{seed}-{number}")
        for record in originals:
            messages = []
            for message in record["messages"]:
                changed = dict(message)
                for key in ("content", "reasoning_content"):
                    if isinstance(changed.get(key), str):
                        changed[key] = _changed(changed[key], rng)
                messages.append(changed)
            name = f"{record['id']}-{number}" if seed == 0 else f"{record['id']}-{seed}-{number}"
            yield {**record, "id": name, "messages": messages}
        number += 1


def write_tiled(path: Path, size: int, *, originals: Sequence[dict[str, Any]] | None = None, seed: int = 0) -> Path:
    """A JSONL file of at least `size` bytes; a file that is there with that size is kept."""
    if path.exists() and path.stat().st_size >= size:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    written = 0
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for record in copies(originals or records(), seed):
            line = json.dumps(record, ensure_ascii=False) + "\n"
            file.write(line)
            written += len(line.encode())
            if written >= size:
                break
    temporary.rename(path)
    return path


_originals: list[dict[str, Any]] = []


def _keep_originals(originals: list[dict[str, Any]]) -> None:
    _originals[:] = originals


def _write_shard(job: tuple[Path, int, int]) -> Path:
    path, size, seed = job
    return write_tiled(path, size, originals=_originals, seed=seed)


def write_shards(folder: Path, size: int, *, originals: list[dict[str, Any]], shard_bytes: int = SHARD) -> list[Path]:
    """Files of about `shard_bytes` that hold at least `size` bytes together, written on all cores.

    Shard k has changes of its own, so a larger input begins with the files of a smaller one.
    """
    count = -(-size // shard_bytes)
    each = min(size, shard_bytes)
    jobs = [(folder / f"chats-{each}-{number:03d}.jsonl", each, number) for number in range(count)]
    if all(path.exists() for path, _, _ in jobs):
        return [path for path, _, _ in jobs]
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(count, os.cpu_count() or 1), _keep_originals, (originals,)) as pool:
        return pool.map(_write_shard, jobs, chunksize=1)


def again(paths: Sequence[Path], times: int) -> list[Path]:
    """The same files under new names (hard links), so that they are read `times` times in one build."""
    found = list(paths)
    for number in range(1, times):
        for path in paths:
            link = path.with_name(f"{path.stem}-again{number}.jsonl")
            if not link.exists():
                os.link(path, link)
            found.append(link)
    return found


def joined(paths: Sequence[Path], target: Path) -> Path:
    """One file with the bytes of several; a file that is there is kept."""
    if not target.exists():
        temporary = target.with_suffix(".tmp")
        with temporary.open("wb") as out:
            for path in paths:
                with path.open("rb") as file:
                    shutil.copyfileobj(file, out, 1 << 20)
        temporary.rename(target)
    return target


def exchanges(originals: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Real (user, assistant) pairs that stand next to each other and are nothing but text."""
    found: list[tuple[str, str]] = []
    for record in originals:
        messages = record["messages"]
        for asked, answered in itertools.pairwise(messages):
            texts = asked.get("content"), answered.get("content")
            plain = set(asked) | set(answered) <= {"role", "content"} and all(isinstance(t, str) and t for t in texts)
            if plain and (asked["role"], answered["role"]) == ("user", "assistant"):
                found.append((str(texts[0]), str(texts[1])))
    return found


def write_chats(path: Path, pairs: Sequence[tuple[str, str]], turns: int) -> Path:
    """Chats of `turns` exchanges (a user message and its answer), in the order of the pairs, all of them used."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(0, len(pairs) - turns + 1, turns):
            messages = []
            for asked, answered in pairs[number : number + turns]:
                messages.append({"role": "user", "content": asked})
                messages.append({"role": "assistant", "content": answered})
            file.write(json.dumps({"id": f"{turns}-{number}", "messages": messages}, ensure_ascii=False) + "\n")
    return path


def changed_pairs(pairs: Sequence[tuple[str, str]], count: int) -> list[tuple[str, str]]:
    """`count` pairs, in random order and with changed words in every copy."""
    rng = random.Random(0)
    found: list[tuple[str, str]] = []
    while len(found) < count:
        for asked, answered in rng.sample(list(pairs), k=min(len(pairs), count - len(found))):
            found.append((_changed(asked, rng), _changed(answered, rng)))
    return found


@contextmanager
def work_folder() -> Iterator[Path]:
    """A folder for what a benchmark builds, which goes with it."""
    with tempfile.TemporaryDirectory(prefix="chatmill-bench-", ignore_cleanup_errors=True) as temporary:
        yield Path(temporary)


@contextmanager
def inputs_folder() -> Iterator[Path]:
    """Where inputs are written: the folder named in the environment, which stays, or a temporary one."""
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        folder = Path(named)
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with work_folder() as folder:
        yield folder
