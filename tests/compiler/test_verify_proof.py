"""The proof of trained answers: a wrong mask, stop or context is found by `verify --deep`, though hashes are right."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatmill.compiler.recipe import recipe_of
from chatmill.core.conversation import Conversation, Message, Role
from chatmill.core.kinds import Part, RoleCode, parts_of, roles_of
from chatmill.prove.reference import Reference, reference_tokenizer
from chatmill.prove.report import VerifyReport
from chatmill.prove.spans import SpanCheck
from chatmill.prove.verify import verify
from chatmill.render.jinja.turn_sequences import TextSequence
from chatmill.store.episodes import EpisodeDataset
from tests.compiler.verify_sets import build_into, records, rehash, small_recipe, write_lines
from tests.damage import flip


@pytest.fixture(scope="module")
def sound(fast_module: Path) -> Path:
    """Several turns a record, under a template that changes earlier turns: rows with answers that are context."""
    path = fast_module / "chats.jsonl"
    write_lines(path, [r for r in records("oasst_en100", 40) if len(r["messages"]) > 2][:6])
    folder = build_into(fast_module / "sound", small_recipe(path, template="qwen3"))
    report = verify(folder, deep=True)
    assert report.passed
    assert report.counts["answers_proved"] == report.counts["trained_messages"] > 6
    return folder


@pytest.fixture
def damaged(sound: Path, fast: Path) -> Path:
    return Path(shutil.copytree(sound, fast / "damaged"))


def mask_shifted(shard: Any) -> None:
    path = shard.folder / "mask.bin"
    path.write_bytes(np.roll(np.fromfile(path, dtype=np.uint8), 1).tobytes())


def stop_untrained(shard: Any) -> None:
    mask, kinds = (np.fromfile(shard.folder / name, dtype=np.uint8) for name in ("mask.bin", "kinds.u8"))
    stops = (mask > 0) & (parts_of(kinds) == Part.TERMINATOR) & (roles_of(kinds) == RoleCode.ASSISTANT)
    flip(shard.folder / "mask.bin", int(np.flatnonzero(stops)[0]), 0)


def repeated_answer_trained(shard: Any) -> None:
    kinds = np.fromfile(shard.folder / "kinds.u8", dtype=np.uint8)
    flip(shard.folder / "mask.bin", int(np.flatnonzero(kinds & 128)[0]), 1)


def context_altered(shard: Any) -> None:
    mask = np.fromfile(shard.folder / "mask.bin", dtype=np.uint8)
    size = (shard.folder / "tokens.bin").stat().st_size // len(mask)
    flip(shard.folder / "tokens.bin", (int(np.flatnonzero(mask)[0]) - 20) * size)


@pytest.mark.parametrize(
    ("damage", "column"),
    [(mask_shifted, "mask"), (stop_untrained, "mask"), (repeated_answer_trained, "mask"), (context_altered, "tokens")],
)
def test_damage_with_right_hashes_is_found(damage: Callable[[Any], None], column: str, damaged: Path) -> None:
    damage(EpisodeDataset(damaged).shards[0])
    rehash(damaged)
    report = verify(damaged, deep=True)
    assert not report.passed
    assert any(Path(finding.file).name == f"{column}.bin" and finding.record for finding in report.findings)


CHAT = Conversation(
    (
        Message(Role.USER, "One?"),
        Message(Role.ASSISTANT, "First."),
        Message(Role.USER, "Two?"),
        Message(Role.ASSISTANT, "Second."),
    ),
    id="x",
)


def found(change: Callable[[TextSequence], TextSequence]) -> list[str]:
    """What the proof says about the last sequence of a record after a change to its spans."""
    recipe = recipe_of(small_recipe(Path("-"), template="qwen3"))
    reference = Reference(recipe, reference_tokenizer(recipe))
    derived = reference.derive(CHAT)
    changed = dataclasses.replace(derived, spans=(*derived.spans[:-1], change(derived.spans[-1])))
    return [
        mismatch.message for mismatch in SpanCheck(reference, VerifyReport(directory=Path())).mismatches(CHAT, changed)
    ]


def test_a_sound_record_is_proved() -> None:
    assert found(lambda sequence: sequence) == []


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("One?", "Won?", "message 3: its context is not the prompt that plain Jinja gives"),
        ("Second.", "Sekond.", "message 3: its text is not the answer that plain Jinja gives"),
        ("<|im_end|>", "", "message 3: its stop is"),
    ],
)
def test_a_row_that_plain_jinja_does_not_write_is_named(old: str, new: str, says: str) -> None:
    def change(sequence: TextSequence) -> TextSequence:
        spans = list(sequence.spans)
        last = max(number for number, span in enumerate(spans) if old in span.text and span.message in (0, 3))
        spans[last] = spans[last]._replace(text=spans[last].text.replace(old, new))
        return sequence._replace(spans=type(sequence.spans)(spans))

    messages = found(change)
    assert len(messages) == 1
    assert messages[0].startswith(says)


def test_answers_that_later_messages_change_are_sound_where_the_recipe_asks_for_them(fast: Path) -> None:
    """`expand: none` trains in place, which is no damage; a stored answer that is not in the whole is one."""
    path = fast / "chats.jsonl"
    messages = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "1", "reasoning_content": "Count."},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "2", "reasoning_content": "Count on."},
    ]
    write_lines(path, [{"messages": messages}])
    folder = build_into(fast / "in_place", small_recipe(path, template="qwen3", expand="none"))
    report = verify(folder, deep=True)
    assert report.passed
    assert (report.counts["answers_proved"], report.counts["answers_trained_as_changed"]) == (1, 1)
    assert any("`expand: none` trains them so" in line for line in report.unchecked)
    flip(EpisodeDataset(folder).shards[0].folder / "tokens.bin", 4 * 20)
    rehash(folder)
    assert not verify(folder, deep=True).passed
