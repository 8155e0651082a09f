"""Best or first of n: one record of each group is used, whatever the chunks."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from chatmill.read.picks import Pick
from chatmill.store.episodes import EpisodeDataset
from tests.compiler.builds import CHATML, OPEN_GATES, proved, talk, write_jsonl


def samples(seed: int) -> list[dict[str, Any]]:
    """Samples of prompts, those of a prompt next to each other; some have no group, no reward, or cannot be read."""
    rng, records = random.Random(seed), list[dict[str, Any]]()
    for prompt in range(25):
        count, is_alone = rng.randint(1, 5), rng.random() < 0.2
        for number in range(count + is_alone):
            said = talk(f"{prompt}?", "a" * rng.randint(1, 60))
            record = {"id": f"r{len(records)}", "messages": said, "info": {}, "done": rng.random() < 0.7}
            if number < count:
                record["prompt"] = prompt
            if rng.random() < 0.8:
                record["info"] = {"reward": rng.choice([-1, 0.5, 1, True])}
            if rng.random() < 0.05:
                record["messages"] = "none"
            records.append(record)
    return records


def by_hand(records: list[dict[str, Any]], best: bool, done: bool) -> list[str]:
    """The ids of the records that are used."""
    used: dict[Any, tuple[float, int]] = {}
    for number, record in enumerate(records):
        reward = record["info"].get("reward")
        score = reward if best and reward is not None and reward is not True else float("-inf")
        group = record.get("prompt", f"alone {number}")
        if (record["done"] or not done) and (group not in used or score > used[group][0]):
            used[group] = score, number
    numbers = sorted(number for _, number in used.values())
    return [records[number]["id"] for number in numbers if records[number]["messages"] != "none"]


def test_numbers_of_any_size_are_compared() -> None:
    scores = [
        Pick(group="g", best="r").score({"r": one}) for one in ("1", None, True, float("nan"), -1e308, 2, 10**400)
    ]
    assert scores[:4] == [-math.inf] * 4
    assert scores[3:] == sorted(scores[3:])
    assert scores[-1] > 1e308


@pytest.mark.parametrize("best", [True, False])
@pytest.mark.parametrize("done", [True, False])
def test_one_record_of_each_group_is_used(tmp_path: Path, best: bool, done: bool) -> None:
    records = samples(4)
    files = [write_jsonl(tmp_path / f"{name}.jsonl", part) for name, part in (("a", records[:40]), ("b", records[40:]))]
    pick = {"group": "prompt", **({"best": "info.reward"} if best else {})}
    source = {"path": [str(path) for path in files], "name": "x", "pick": pick}
    sources = [source | ({"where": "done == true"} if done else {})]
    for size in (200, 1 << 20):
        out = tmp_path / f"{size}"
        ledger = proved(
            {"sources": sources, **CHATML, "gates": OPEN_GATES, "on_error": "quarantine", "shard_bytes": size}, out
        )
        assert [one.record_id for one in EpisodeDataset(out)] == by_hand(records, best, done)
        assert ledger.reasons("skipped")["pick"] > 10
        assert not any("reward" in note or "prompt" in note for note in ledger.all_notes())
