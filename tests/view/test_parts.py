"""The parts after the pages, each against a slow and obvious form of itself."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.kinds import KINDS, RoleCode, roles_of
from chatmill.errors import ConfigError
from chatmill.label.presets import PRESETS
from chatmill.look.dataset import open_for_looking
from chatmill.look.decoder import Decoder, TextPiece, pieces_of
from chatmill.look.item_view import view_item
from chatmill.look.viewer.opened import Filter, OpenedSplit, Sort, open_splits
from chatmill.look.viewer.overview import overview_values
from chatmill.look.viewer.search import Hit, search
from chatmill.store.episode_writer import EpisodeWriter
from chatmill.store.episodes import EpisodeDataset
from chatmill.tokenizer.byte_level import byte_tokenizer
from tests.load.sets import state_rows

BYTES = Decoder(byte_tokenizer())
SOURCES = ("wiki", "forum", "code")


def write_episodes(folder: Path, *, stored: bool = True) -> list[Any]:
    """Random episodes of bytes; with `stored=False` three plain files, as other programs write them."""
    rng = np.random.RandomState(0)
    with EpisodeWriter(folder, "train", shard_tokens=900) as writer:
        for number in range(60):
            length = int(rng.randint(1, 70))
            kinds = np.repeat(rng.randint(1, KINDS, length // 4 + 1), 4)[:length].astype(np.uint8)
            weights = (rng.rand(length) < 0.4) * (0.5 if number % 9 == 0 else 1.0)
            ids = rng.choice(np.frombuffer(b"abc \xc3\xa9", dtype=np.uint8), length).astype(np.uint32)
            about: dict[str, Any] = {"source": SOURCES[number % 3], "turns": number % 4, "record_id": f"r{number}"}
            writer.append(ids, weights, **({"kinds": kinds, **about} if stored else {}))
    if not stored:
        (folder / "train" / "episodes.json").unlink()
    found = list(EpisodeDataset(folder, "train"))
    assert len(found) == 60
    return found


def opened_split(folder: Path, tokenizer: Any = "bytes") -> OpenedSplit:
    return open_splits(open_for_looking(folder, tokenizer=tokenizer))["train"]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> OpenedSplit:
    folder = tmp_path_factory.mktemp("episodes")
    write_episodes(folder)
    found = opened_split(folder)
    found.wait()
    assert found.done
    return found


@pytest.fixture(scope="module")
def episodes(opened: OpenedSplit) -> list[Any]:
    return list(EpisodeDataset(opened.look.path, "train"))


def hits_of(split: Any, decoder: Decoder | None, words: str, **how: Any) -> list[Hit]:
    return [found for found in search(split, decoder, words, **how) if isinstance(found, Hit)]


@settings(max_examples=300)
@given(st.lists(st.integers(0, 260), max_size=60))
def test_pieces_hold_every_id_once_and_spell_the_text(ids: list[int]) -> None:
    pieces = pieces_of(np.array(ids, dtype=np.uint32), BYTES)
    assert [i for piece in pieces for i in piece.ids] == ids
    for piece in pieces:
        raw = b"".join(BYTES.known_bytes(i) or b"" for i in piece.ids)
        if piece.flag == "raw":
            assert bytes.fromhex(piece.raw) == raw
            with pytest.raises(UnicodeDecodeError):
                raw.decode()
        elif piece.flag == "unknown":
            assert piece.text == str(piece.ids[0])
        else:
            assert piece.text.encode() == raw
            if len(piece.ids) > 1:
                assert bytes.fromhex(piece.raw.replace("|", "")) == raw
                assert len(piece.text) == 1
    if not any(piece.flag for piece in pieces):  # where nothing is broken, the pieces are the text
        assert "".join(piece.text for piece in pieces) == bytes(ids).decode()


def test_without_a_tokenizer_ids_are_shown_and_nothing_is_searched(opened: OpenedSplit) -> None:
    assert pieces_of(np.array([5, 70000]), None) == [TextPiece("5", (5,), "id"), TextPiece("70000", (70000,), "id")]
    with pytest.raises(ConfigError, match="--tokenizer"):
        list(search(opened.split, None, "abc"))


@settings(max_examples=150)
@given(words=st.text(alphabet="abcABC é", min_size=1, max_size=5).filter(str.strip), even=st.booleans())
def test_search_finds_what_reading_everything_finds(
    opened: OpenedSplit, episodes: list[Any], words: str, even: bool
) -> None:
    chosen = np.arange(60) % 2 == 0 if even else np.ones(60, dtype=bool)
    texts = [bytes(e.ids.tolist()).lower() for e in episodes]
    found = hits_of(opened.split, BYTES, words, chosen=chosen if even else None)
    assert [hit.number for hit in found] == [i for i in range(60) if chosen[i] and words.encode().lower() in texts[i]]
    for hit in found:
        assert texts[hit.number][hit.at : hit.at + hit.tokens] == words.encode().lower()


def test_search_crosses_tokens_but_never_episodes(tmp_path: Path, gpt2: Any) -> None:
    texts = ["the mill", "ing wheel", "milling wheels", "MILLING", "a mill", "", "wheel milling"]
    with EpisodeWriter(tmp_path, "train") as writer:
        for text in texts:
            writer.append(gpt2.encode(text) or [gpt2.eos_id])
    split = opened_split(tmp_path, gpt2).split
    for words in ("milling", "ll", "eel m", "milling wheel", "MiLL", "g", " mill", "wheels", "nothing"):
        found = [hit.number for hit in hits_of(split, Decoder(gpt2), words)]
        assert found == [i for i, one in enumerate(texts) if words.lower() in one.lower()], words


FILTERS = st.builds(
    Filter,
    source=st.none() | st.sampled_from(SOURCES),
    min_tokens=st.none() | st.integers(1, 70),
    max_tokens=st.none() | st.integers(0, 70),
    min_share=st.none() | st.integers(0, 100).map(float),
    max_share=st.none() | st.integers(0, 100).map(float),
    role=st.none() | st.sampled_from([role.name.lower() for role in RoleCode]),
    sort=st.sampled_from(Sort),
)


@settings(max_examples=200)
@given(wanted=FILTERS)
def test_filters_keep_what_a_loop_keeps(opened: OpenedSplit, episodes: list[Any], wanted: Filter) -> None:
    def share(e: Any) -> np.float32:
        return np.float32(np.count_nonzero(e.weights) * np.float32(100) / max(len(e), 1))

    def passes(e: Any) -> bool:
        return bool(
            (wanted.source is None or e.source == wanted.source)
            and (wanted.min_tokens is None or len(e) >= wanted.min_tokens)
            and (wanted.max_tokens is None or len(e) <= wanted.max_tokens)
            and (wanted.min_share is None or share(e) >= wanted.min_share)
            and (wanted.max_share is None or share(e) <= wanted.max_share)
            and (wanted.role is None or bool((roles_of(e.kinds) == RoleCode[wanted.role.upper()]).any()))
        )

    found = opened.select(wanted)
    kept = [i for i, e in enumerate(episodes) if passes(e)]
    keys = {
        Sort.STORED: lambda i: i,
        Sort.LONGEST: lambda i: (-len(episodes[i]), i),
        Sort.SHORTEST: lambda i: (len(episodes[i]), i),
        Sort.MOST_TRAINED: lambda i: (-share(episodes[i]), i),
        Sort.LEAST_TRAINED: lambda i: (share(episodes[i]), i),
    }
    assert (list(range(60)) if found is None else found.tolist()) == sorted(kept, key=keys[wanted.sort])


def test_plain_files_without_a_manifest_are_counted_in_the_background(tmp_path: Path) -> None:
    dataset = write_episodes(tmp_path, stored=False)
    opened = opened_split(tmp_path)
    assert opened.split.stored_trained is None
    assert opened.trained is None
    assert overview_values(opened)["stats"] is None
    with pytest.raises(ConfigError, match="still being counted"):
        opened.select(Filter(min_share=10.0))
    opened.wait()
    assert opened.trained is not None
    assert opened.trained.tolist() == [int((e.weights > 0).sum()) for e in dataset]
    with pytest.raises(ConfigError, match="unknown source"):
        opened.select(Filter(source="wiki"))
    with pytest.raises(ConfigError, match="unknown role"):
        opened.select(Filter(role="user"))
    with pytest.raises(ConfigError, match="No kinds are stored"):
        opened.policy("all")
    damaged = opened_split(tmp_path)
    next((tmp_path / "train").glob("shard_*/tokens.bin")).write_bytes(b"\0" * 8)
    damaged.wait()
    assert not damaged.done
    assert "tokens.bin" in damaged.problem


@pytest.mark.parametrize("policy", ["", "last_turn", "all"])
def test_windows_of_an_item_join_to_the_item(opened: OpenedSplit, episodes: list[Any], policy: str) -> None:
    number = int(np.argmax([len(e) for e in episodes]))
    episode = episodes[number]
    weights = PRESETS[policy].token_weights(episode.kinds) if policy else episode.weights
    view = view_item(opened.item(number), BYTES, "episode", opened.policy(policy))
    found = []
    for first in range(0, len(episode), 9):
        for run in (run for _, _, said in view.window(first, first + 9) for one in said for run in one.runs):
            assert run.start == len(found)
            ids = [i for piece in view.pieces(run) for i in piece.ids]
            found += [(token_id, run.weight, run.stored, run.change) for token_id in ids]
    changes = {(True, False): "gained", (False, True): "lost"}
    columns = (episode.ids.tolist(), weights.tolist(), episode.weights.tolist())
    assert found == [(i, w, s, changes.get((w > 0, s > 0), "")) for i, w, s in zip(*columns, strict=True)]
    assert len(found) > 20
    assert view.trained == int((weights > 0).sum())
    assert sum(end - first for first, end in view.trained_stretches) == view.trained
    assert sum(message.tokens for document in view.documents for message in document.messages) == len(episode)


def test_items_are_right_while_mappings_are_let_go(opened: OpenedSplit, episodes: list[Any]) -> None:
    """Many threads ask for items; every second answer unmaps the files, and searches run next to them."""

    def read(seed: int) -> int:
        for number in np.random.RandomState(seed).randint(0, len(episodes), 150).tolist():
            item = opened.item(number)
            if number % 2:
                opened.split.release()
            assert item.ids.tolist() == episodes[number].ids.tolist()
            assert item.record_id == episodes[number].record_id == opened.split.record_id(number) == f"r{number}"
        return len(hits_of(opened.split, BYTES, "ab"))

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(read, range(12)))
    assert len(set(found)) == 1
    assert found[0] > 0


def test_an_empty_episode_and_a_split_folder_can_be_shown(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    folder.mkdir()
    for name, kind, values in (("tokens.bin", "<u4", [104, 105]), ("episodes.idx", "<u8", [[0, 0], [0, 2]]),
                               ("mask.bin", "u1", [0, 1])):  # fmt: skip
        np.array(values, dtype=kind).tofile(folder / name)
    split = opened_split(folder)
    split.wait()
    assert split.done
    assert view_item(split.item(0), BYTES, "episode").runs == []
    assert view_item(split.item(1), BYTES, "episode").trained == 1
    assert overview_values(split)["stats"].items == 2


def test_rows_have_trained_stretches(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path, "train") as writer:
        for ids, mask in (([5, 6], [0, 1]), ([3, 4], [0, 1]), ([7, 8, 9], [0, 1, 1])):
            writer.append(ids, mask)
    state_rows(tmp_path / "train", 4)
    split = opened_split(tmp_path)
    split.wait()
    first, second = (view_item(split.item(number), BYTES, "row") for number in (0, 1))
    assert (first.trained_stretches, first.item.padding, len(first.documents)) == ([(1, 3)], 1, 1)
    assert second.trained_stretches == [(1, 2), (3, 4)]
    assert [(d.number, d.start, len(d.ids), d.trained) for d in second.documents] == [(0, 0, 2, 1), (1, 2, 2, 1)]
    found = overview_values(split)["stats"]
    assert (found.padding, found.documents, found.trained) == (1, 3, 4)
