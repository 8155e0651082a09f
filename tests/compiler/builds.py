"""Small inputs of several kinds, recipes over them, the rows of built trees, and the comparison of built folders."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from numpy.typing import NDArray

from chatmill.compiler.run import run_build
from chatmill.core.ledger import Ledger
from chatmill.core.trees import rows_of_tree
from chatmill.prove.verify import verify
from chatmill.store.episodes import Episode
from tests.hashes import file_entry

WORDS = ["the", "mill", "grinds", "what", "is", "put", "into", "it.", "löwe", "水車", "🙂", "a", "long;", "short\n"]


OPEN_GATES = {"records_without_trained_tokens": None, "records_left_out": None, "max_lost_reasoning": None}
"""No limit on what a small set may lose."""


CHATML: dict[str, Any] = {"tokenizer": "bytes", "template": "chatml", "add_control_tokens": True}


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, words)))


def random_chat(rng: random.Random, name: str | None, turns: int = 3, words: int = 30) -> dict[str, Any]:
    """A record in the shape openai; some have no id, some a fractional weight, some a source of their own."""
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": text(rng, 8)})
    for _ in range(rng.randint(1, turns)):
        messages.append({"role": "user", "content": text(rng, words)})
        messages.append({"role": "assistant", "content": text(rng, words)})
    if rng.random() < 0.1:
        messages[-1]["weight"] = 0.25
    record: dict[str, Any] = {"messages": messages}
    if name is not None:
        record["id"] = name
    if rng.random() < 0.2:
        record["source"] = rng.choice(["wiki", "forum"])
    return record


def chats(count: int, seed: int = 0, *, ids: bool = True, **options: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [random_chat(rng, f"r{i}" if ids else None, **options) for i in range(count)]


def thinking_chat(rng: random.Random, name: str, turns: int) -> dict[str, Any]:
    """A chat whose earlier answers lose their reasoning under Qwen3's template; some have tools at work."""
    messages: list[dict[str, Any]] = []
    for turn in range(rng.randint(1, turns)):
        messages.append({"role": "user", "content": f"{name} asks {turn} " + "why " * rng.randint(0, 5)})
        if rng.random() < 0.4:
            call = {"type": "function", "function": {"name": "look", "arguments": {"at": turn}}}
            messages.append({"role": "assistant", "content": "", "reasoning_content": "look", "tool_calls": [call]})
            messages.append({"role": "tool", "content": "seen " * rng.randint(1, 4)})
        answer: dict[str, Any] = {"role": "assistant", "content": f"says {turn} " + "so " * rng.randint(0, 6)}
        if rng.random() < 0.8:
            answer["reasoning_content"] = "since " * rng.randint(1, 6)
        if rng.random() < 0.1:
            answer["weight"] = 0.5
        messages.append(answer)
    return {"id": name, "messages": messages}


def thinking_chats(count: int, seed: int = 0, turns: int = 5) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [thinking_chat(rng, f"r{number}", turns) for number in range(count)]


def write_jsonl(path: Path, records: list[Any]) -> Path:
    lines = "".join(r + "\n" if isinstance(r, str) else json.dumps(r, ensure_ascii=False) + "\n" for r in records)
    data = lines.encode()
    packed = {".gz": lambda: gzip.compress(data, mtime=0), ".zst": lambda: zstandard.compress(data)}
    path.write_bytes(packed.get(path.suffix, lambda: data)())
    return path


def write_inputs(folder: Path, size: int = 40) -> Path:
    """Files of every format in a folder, with records that cannot be used among them."""
    folder.mkdir(parents=True, exist_ok=True)
    plain: list[Any] = chats(size, 1)
    plain.insert(size // 2, "{broken")
    plain.insert(size // 3, {"id": "pope", "messages": [{"role": "pope", "content": "x"}]})
    write_jsonl(folder / "plain.jsonl", plain)
    write_jsonl(folder / "packed.jsonl.gz", chats(size, 2, ids=False))
    rng = random.Random(3)
    rows = {
        "id": [f"row{i}" for i in range(size)],
        "instruction": [text(rng, 20) for _ in range(size)],
        "output": [text(rng, 20) for _ in range(size)],
    }
    pq.write_table(pa.table(rows), folder / "rows.parquet", row_group_size=max(size // 3, 1))
    pairs = [{"prompt": text(rng, 9), "completion": text(rng, 9)} for _ in range(size)]
    (folder / "list.json").write_text(json.dumps(pairs, indent=1))
    return folder


def mixed_recipe(folder: Path, **changes: Any) -> dict[str, Any]:
    """Everything that a recipe can do, over the files of `write_inputs`."""
    recipe: dict[str, Any] = {
        "sources": [
            {"path": str(folder / "plain.jsonl"), "weight": 1.6},
            {"path": str(folder / "packed.jsonl.gz"), "name": "packed", "max_records": 30},
            {"path": [str(folder / "rows.parquet"), str(folder / "list.json")], "weight": 0.7},
        ],
        **CHATML,
        "packing": {"max_length": 400, "overflow": "windows"},
        "pack": {"strategy": "best_fit"},
        "split": {"val_fraction": 0.25},
        "shard_bytes": 8000,
        "on_error": "quarantine",
        "gates": OPEN_GATES,
    }
    return {**recipe, **changes}


def plain_recipe(path: Path, **changes: Any) -> dict[str, Any]:
    """One file of chats, whole conversations, nothing else."""
    gates = {**OPEN_GATES, "records_without_trained_tokens": 0}
    return {"sources": [{"path": str(path)}], **CHATML, "gates": gates, **changes}


def talk(*texts: str) -> list[dict[str, Any]]:
    """Messages of a user and an assistant in turn."""
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


def proved(recipe: dict[str, Any], out: Path) -> Ledger:
    """Build, and let the slow path derive all that was built; the ledger."""
    manifest = run_build(recipe, out, workers=0).manifest
    report = verify(out, deep=True, workers=0)
    assert report.passed, report.findings[:3]
    return Ledger.from_json(manifest["ledger"])


def digest(folder: Path) -> dict[str, str]:
    """sha256 of every file of a dataset, found on disk; the manifest by key, without times, checkout and hash."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != folder / "manifest.json":
            found[path.relative_to(folder).as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest = json.loads((folder / "manifest.json").read_bytes())
    for key in manifest.keys() - {"created_unix_s", "git_sha", "contents_sha256", "scanned"}:
        found[f"manifest.json {key}"] = hashlib.sha256(json.dumps(manifest[key], sort_keys=True).encode()).hexdigest()
    return found


def leftovers(folder: Path) -> list[str]:
    """What lies in a finished dataset and does not belong there: temporary, hidden or unnamed files and folders."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    named = {"manifest.json", *manifest["files"]}
    folders = {parent.as_posix() for name in named for parent in Path(name).parents}
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    return sorted(there - named - folders)


def files_of(folder: Path) -> dict[str, Any]:
    """The manifest's table of files, checked against the disk."""
    files: dict[str, Any] = json.loads((folder / "manifest.json").read_bytes())["files"]
    assert files, "a manifest without files"
    there = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    assert files == {name: file_entry(path.read_bytes()) for name, path in there.items() if name != "manifest.json"}
    return files


def apart(episode: Episode) -> list[tuple[NDArray[Any], NDArray[Any], int]]:
    """Ids and weights of the rows of an episode, and how many tokens of each are of an older row."""
    assert episode.weights is not None
    _, ends = episode.branches.positions_and_ends(np.array([len(episode)]))
    rows = rows_of_tree(ends, episode.branches.starts)
    return [(episode.ids[path], episode.weights[path], older) for path, older in rows]
