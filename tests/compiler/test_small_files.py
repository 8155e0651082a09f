"""Many small files: few chunks and few batches, with the bytes that each file by itself gives."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from chatmill.compiler import chunk_job
from chatmill.compiler.pipeline import Pipeline
from chatmill.compiler.run import run_build
from chatmill.prove.verify import verify
from tests.compiler.builds import chats, digest, plain_recipe, write_jsonl


def odd_files(folder: Path, seed: int) -> Path:
    """Small files with everything that lines may be, and now and then one of another shape or format."""
    rng = random.Random(seed)
    folder.mkdir()
    lines = [json.dumps(chat, ensure_ascii=False) for chat in chats(60, seed)]
    lines += [json.dumps({**chat, "source": f"own{n % 3}", "more": n}) for n, chat in enumerate(chats(20, seed + 1))]
    lines += [json.dumps({"messages": chat["messages"], "id": n}) for n, chat in enumerate(chats(9, seed + 2))]
    lines += ["", "  ", "{broken", "{broken", '{"id": "pope", "messages": [{"role": "pope", "content": "x"}]}'] * 3
    rng.shuffle(lines)
    for number in range(40):
        own = [rng.choice(lines) for _ in range(rng.choice([0, 1, 1, 2, 5]))]
        data = rng.choice(["\n", "\n", "\r\n"]).join(own).encode() + rng.choice([b"", b"\n"])
        (folder / f"{number:02d}.jsonl").write_bytes(rng.choice([b"", b"", b"\xef\xbb\xbf"]) + data)
        if number % 9 == 8:
            (folder / f"{number:02d}b.jsonl").write_text(json.dumps({"prompt": "q", "completion": f"a{number}"}) + "\n")
        if number % 9 == 4:
            (folder / f"{number:02d}c.json").write_text(json.dumps(chats(3, number), indent=1))
    return folder


@pytest.mark.parametrize("options", [{}, {"name": "one"}, {"weight": 2.5, "max_records": 90}, {"where": "more >= 3"}])
def test_small_files_that_are_read_together_give_what_each_gives_alone(fast: Path, options: dict[str, Any]) -> None:
    for seed in range(3):
        folder = odd_files(fast / f"in{seed}", seed)
        recipe = plain_recipe(folder, on_error="quarantine", split={"val_fraction": 0.3})
        recipe["sources"] = [{"path": str(folder), **options}]
        found = []
        for joined in (0, 3000, 1 << 20):
            out = fast / f"{seed} {joined}"
            with mock.patch.object(chunk_job, "JOINED_BYTES", joined):
                run_build(recipe, out, workers=0)
            found.append(digest(out))
        assert found[0] == found[1] == found[2]
        assert "rejected.jsonl" in found[0]
        assert verify(out, deep=True, workers=0).passed


def test_small_files_are_few_chunks_and_few_batches(fast: Path) -> None:
    (fast / "in").mkdir()
    for number, chat in enumerate(chats(300, 1)):
        write_jsonl(fast / "in" / f"{number:03d}.jsonl", [chat])
    compiled, compile_batch = [], Pipeline.compile

    def noted(self: Pipeline, batch: Any, *given: Any) -> Any:
        compiled.append(len(batch))
        return compile_batch(self, batch, *given)

    with mock.patch.object(Pipeline, "compile", noted):
        result = run_build(plain_recipe(fast / "in"), fast / "out", workers=0)
    assert (result.chunks, sum(compiled)) == (1, 300)
    assert len(compiled) <= 8
