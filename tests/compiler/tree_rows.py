"""The targets of a dataset, each with all that comes before it, whether its episodes are rows or trees."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.trees import rows_of_tree
from chatmill.store.episodes import Episode, EpisodeDataset

POWERS = np.random.RandomState(7).randint(1, 2**62, size=1 << 17).astype(np.uint64) | np.uint64(1)


def apart(episode: Episode) -> list[tuple[NDArray[Any], NDArray[Any], int]]:
    """Ids and weights of the rows of an episode, and how many tokens of each are of an older row."""
    assert episode.weights is not None
    _, ends = episode.branches.positions_and_ends(np.array([len(episode)]))
    rows = rows_of_tree(ends, episode.branches.starts)
    return [(episode.ids[path], episode.weights[path], older) for path, older in rows]


def targets(built: Path, split: str = "train") -> Counter[tuple[str, int, int, float]]:
    """Record, hash of a target and all before it, its id and its weight: how often each is trained."""
    found: Counter[tuple[str, int, int, float]] = Counter()
    for episode in EpisodeDataset(built, split):
        for ids, weights, older in apart(episode):
            hashes = np.cumsum(ids.astype(np.uint64) * POWERS[: len(ids)], dtype=np.uint64)
            for at in (np.flatnonzero(weights[older:]) + older).tolist():
                found[str(episode.record_id), int(hashes[at]), int(ids[at]), float(weights[at])] += 1
    return found


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
