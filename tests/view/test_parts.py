"""The parts behind the pages, each against a slow and obvious form of itself."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.compiler.pack_plan import write_pack_plan
from chatmill.core.kinds import KINDS, RoleCode, roles_of
from chatmill.errors import ConfigError
from chatmill.label.presets import PRESETS
from chatmill.look.decoder import Decoder
from chatmill.look.items import LookLayout
from chatmill.look.token_bytes import SpellingTable
from chatmill.look.viewer.item_page import item_json, pieces_of
from chatmill.look.viewer.opened import Filter, OpenedSplit, Sort, open_viewed
from chatmill.look.viewer.overview_page import overview_json, trained_under
from chatmill.look.viewer.search import search
from chatmill.store.episode_writer import EpisodeWriter
from chatmill.store.episodes import EpisodeDataset
from chatmill.tokenizer.byte_level import byte_tokenizer
from tests.look.sets import KD, tokenizer_once, write_kd

BYTES = Decoder(byte_tokenizer())
SOURCES = ("wiki", "forum", "code")


def write_episodes(folder: Path, count: int = 60, *, seed: int = 0, stored: bool = True) -> EpisodeDataset:
    """Random episodes of bytes; with `stored=False` three plain files, as other programs write them."""
    rng = np.random.RandomState(seed)
    with EpisodeWriter(folder, "train", shard_tokens=900) as writer:
        for number in range(count):
            length = int(rng.randint(1, 70))
            kinds = np.repeat(rng.randint(1, KINDS, length // 4 + 1), 4)[:length].astype(np.uint8)
            weights = (rng.rand(length) < 0.4) * (0.5 if number % 9 == 0 else 1.0)
            ids = rng.choice(np.frombuffer(b"abc \xc3\xa9", dtype=np.uint8), length).astype(np.uint32)
            if stored:
                source = SOURCES[number % 3]
                writer.append(ids, weights, kinds=kinds, source=source, turns=number % 4, record_id=f"r{number}")
            else:
                writer.append(ids, weights)
    if not stored:
        (folder / "train" / "episodes.json").unlink()
    return EpisodeDataset(folder, "train")


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> OpenedSplit:
    folder = tmp_path_factory.mktemp("episodes")
    write_episodes(folder)
    found = open_viewed([folder], tokenizer="bytes")[0].split("train")
    found.scan.wait()
    assert found.scan.done
    return found


@pytest.fixture(scope="module")
def episodes(opened: OpenedSplit) -> list[Any]:
    found = list(EpisodeDataset(opened.dataset.look.path, "train"))
    assert len(found) == 60
    return found


@settings(max_examples=300)
@given(st.lists(st.integers(0, 260), max_size=60))
def test_pieces_hold_every_id_once_and_spell_the_text(ids: list[int]) -> None:
    pieces = pieces_of(ids, BYTES)
    assert [i for piece in pieces for i in piece["i"]] == ids
    for piece in pieces:
        raw = b"".join(BYTES.known_bytes(i) or b"" for i in piece["i"])
        flag = piece.get("f")
        if flag == "raw":
            assert bytes.fromhex(piece["b"][0]) == raw
            with pytest.raises(UnicodeDecodeError):
                raw.decode()
        elif flag == "unknown":
            assert piece["t"] == str(piece["i"][0])
        else:
            assert piece["t"].encode() == raw
            if len(piece["i"]) > 1:
                assert bytes.fromhex("".join(piece["b"])) == raw
                assert len(piece["t"]) == 1
    # where nothing is broken, the pieces are the text
    if not any("f" in piece for piece in pieces):
        assert "".join(piece["t"] for piece in pieces) == bytes(ids).decode()


@settings(max_examples=100)
@given(st.text(max_size=40))
def test_pieces_of_text_are_that_text(gpt2_text: Decoder, text: str) -> None:
    ids = gpt2_text.tokenizer.encode(text.encode("utf-8", "ignore").decode())
    pieces = pieces_of(ids, gpt2_text)
    assert "".join(piece["t"] for piece in pieces) == text.encode("utf-8", "ignore").decode()
    assert not any("f" in piece for piece in pieces)


@pytest.fixture(scope="module")
def gpt2_text(gpt2: Any) -> Decoder:
    return Decoder(gpt2)


def test_without_a_tokenizer_ids_are_shown() -> None:
    assert pieces_of([5, 70000], None) == [
        {"t": "5", "i": [5], "f": "id"},
        {"t": "70000", "i": [70000], "f": "id"},
    ]


@settings(max_examples=150)
@given(words=st.text(alphabet="abcABC é", min_size=1, max_size=5), match_case=st.booleans())
def test_search_finds_what_reading_everything_finds(
    opened: OpenedSplit, episodes: list[Any], words: str, match_case: bool
) -> None:
    if not words.strip():
        with pytest.raises(ConfigError, match="nothing to search"):
            list(search(opened.split, BYTES, words))
        return
    fold = (lambda raw: raw) if match_case else bytes.lower
    wanted = [i for i, e in enumerate(episodes) if fold(words.encode()) in fold(bytes(e.ids.tolist()))]
    found = [hit for part in search(opened.split, BYTES, words, match_case=match_case) for hit in part.hits]
    assert [hit.number for hit in found] == wanted
    for hit in found:
        raw = bytes(episodes[hit.number].ids[hit.at : hit.at + hit.tokens_hit].tolist())
        assert fold(raw) == fold(words.encode())


def test_search_crosses_tokens_but_never_episodes(tmp_path: Path, gpt2: Any) -> None:
    texts = ["the mill", "ing wheel", "milling wheels", "MILLING", "a mill", "", "wheel milling"]
    with EpisodeWriter(tmp_path, "train") as writer:
        for text in texts:
            writer.append(gpt2.encode(text) or [gpt2.eos_id])
    split = open_viewed([tmp_path], tokenizer=gpt2)[0].split("train")
    text = Decoder(gpt2)
    for words in ("milling", "ll", "eel m", "milling wheel", "MiLL", "g", " mill", "wheels", "nothing"):
        found = [hit.number for part in search(split.split, text, words) for hit in part.hits]
        assert found == [i for i, one in enumerate(texts) if words.lower() in one.lower()], words


TOKENS = st.lists(st.binary(max_size=12).map(lambda raw: bytes(b % 3 + 97 for b in raw)), min_size=1, max_size=20)


@settings(max_examples=200)
@given(table=TOKENS, words=st.text(alphabet="abc", min_size=1, max_size=14).map(str.encode))
def test_the_spelling_of_words_is_what_each_token_can_do(table: list[bytes], words: bytes) -> None:
    found = SpellingTable(table).spelling(words)
    for raw, whole, begins, goes_on in zip(table, *(one.tolist() for one in found), strict=True):
        assert whole or words not in raw
        assert begins or not raw.endswith(tuple(words[:i] for i in range(1, len(words))))
        assert goes_on or not (raw in words or raw.startswith(tuple(words[i:] for i in range(1, len(words)))))
        if not {*raw} & {*words}:
            assert not whole
            assert not begins
            assert goes_on is not bool(raw)


def test_search_by_ids_without_a_tokenizer(opened: OpenedSplit, episodes: list[Any]) -> None:
    found = [hit.number for part in search(opened.split, None, "97, 98 99") for hit in part.hits]
    assert found == [i for i, e in enumerate(episodes) if b"abc" in bytes(e.ids.tolist())]
    assert found
    with pytest.raises(ConfigError, match="--tokenizer"):
        list(search(opened.split, None, "abc"))


def test_search_in_chosen_items_alone(opened: OpenedSplit, episodes: list[Any]) -> None:
    chosen = np.arange(60) % 2 == 0
    found = [hit.number for part in search(opened.split, BYTES, "ab", chosen=chosen) for hit in part.hits]
    assert found == [i for i, e in enumerate(episodes) if i % 2 == 0 and b"ab" in bytes(e.ids.tolist())]
    assert found


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
        return (
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


def test_the_pass_counts_what_a_loop_counts(opened: OpenedSplit, episodes: list[Any]) -> None:
    scan = opened.scan
    kinds = np.concatenate([e.kinds for e in episodes])
    trained = np.concatenate([e.weights for e in episodes]) > 0
    assert scan.counts.kinds[:, 0].tolist() == np.bincount(kinds, minlength=KINDS).tolist()
    assert scan.counts.kinds[:, 1].tolist() == np.bincount(kinds[trained], minlength=KINDS).tolist()
    assert len(kinds) > 1000
    for policy in opened.policies:
        wanted = sum(int((policy.token_weights(e.kinds) > 0).sum()) for e in episodes)
        assert trained_under(opened, policy) == wanted, policy.name
    assert {policy.name for policy in opened.policies} < set(PRESETS)


def test_plain_files_without_a_manifest_are_counted_in_the_background(tmp_path: Path) -> None:
    dataset = write_episodes(tmp_path, stored=False)
    opened = open_viewed([tmp_path], tokenizer="bytes")[0].split("train")
    assert opened.split.stored_trained is None
    assert opened.trained is None
    assert overview_json(opened)["trained"] is None
    with pytest.raises(ConfigError, match="still being counted"):
        opened.select(Filter(min_share=10.0))
    opened.scan.wait()
    assert opened.trained is not None
    assert opened.trained.tolist() == [int((e.weights > 0).sum()) for e in dataset]
    with pytest.raises(ConfigError, match="no sources are stored"):
        opened.select(Filter(source="wiki"))
    with pytest.raises(ConfigError, match="no kinds are stored"):
        opened.select(Filter(role="user"))
    with pytest.raises(ConfigError, match="no other policy"):
        item_json(opened, 0, policy="all")


def test_a_pass_over_damaged_files_ends_with_the_reason(tmp_path: Path) -> None:
    write_episodes(tmp_path, stored=False)
    opened = open_viewed([tmp_path], tokenizer="bytes")[0].split("train")
    shard = next((tmp_path / "train").glob("shard_*"))
    (shard / "tokens.bin").write_bytes(b"\0" * 8)
    opened.scan.wait()
    assert not opened.scan.done
    assert "tokens.bin" in opened.scan.as_json()["problem"]


def test_plots_of_the_overview_count_every_item_once(opened: OpenedSplit, episodes: list[Any]) -> None:
    found = overview_json(opened)
    for name, values in (
        ("lengths", [len(episode) for episode in episodes]),
        ("shares", [float((episode.weights > 0).mean()) for episode in episodes]),
    ):
        bins = found[name]["bins"]
        assert sum(one["count"] for one in bins) == len(episodes)
        for one in bins[:-1]:
            assert one["count"] == sum(one["low"] <= value < one["high"] for value in values)
        assert found[name]["100%"] == max(values)


@pytest.mark.parametrize("policy", [None, "last_turn", "all"])
def test_windows_of_an_item_join_to_the_item(opened: OpenedSplit, episodes: list[Any], policy: str | None) -> None:
    number = int(np.argmax([len(e) for e in episodes]))
    episode = episodes[number]
    weights = episode.weights if policy is None else PRESETS[policy].token_weights(episode.kinds)
    runs = [
        run
        for first in range(0, len(episode), 9)
        for run in item_json(opened, number, first=first, count=9, policy=policy)["runs"]
    ]
    at = 0
    for run in runs:
        assert run["start"] == at
        for piece in run["pieces"]:
            for token_id in piece["i"]:
                assert token_id == episode.ids[at]
                assert run["weight"] == np.float32(weights[at])
                assert run["stored"] == np.float32(episode.weights[at])
                at += 1
    assert at == len(episode) > 20
    whole = item_json(opened, number, policy=policy)
    assert whole["trained"] == int((weights > 0).sum())
    assert sum(message["tokens"] for message in whole["messages"].values()) == len(episode)


def test_items_are_right_while_mappings_are_let_go(opened: OpenedSplit, episodes: list[Any]) -> None:
    """Many threads ask for items; every second answer unmaps the files, and searches run beside them."""

    def read(seed: int) -> int:
        for number in np.random.RandomState(seed).randint(0, len(episodes), 150).tolist():
            item = opened.item(number)
            if number % 2:
                opened.split.release()
            assert item.ids.tolist() == episodes[number].ids.tolist()
            assert item.record_id == episodes[number].record_id
            assert opened.split.record_ids(np.array([number])) == [f"r{number}"]
        return sum(len(part.hits) for part in search(opened.split, BYTES, "ab"))

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(read, range(12)))
    assert len(set(found)) == 1
    assert found[0] > 0


def test_an_empty_episode_and_a_split_folder_can_be_shown(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    folder.mkdir()
    np.array([104, 105], dtype="<u4").tofile(folder / "tokens.bin")
    np.array([[0, 0], [0, 2]], dtype="<u8").tofile(folder / "episodes.idx")
    np.array([0, 1], dtype="u1").tofile(folder / "mask.bin")
    found = open_viewed([tmp_path / "train"], tokenizer="bytes")[0]
    assert found.look.layout is LookLayout.EPISODES
    split = found.split("train")
    split.scan.wait()
    assert split.scan.done
    assert item_json(split, 0)["runs"] == []
    assert item_json(split, 1)["trained"] == 1
    assert overview_json(split)["items"] == 2


def test_rows_have_a_map_of_trained_stretches(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path, "train") as writer:
        writer.append([5, 6], [0, 1])
        writer.append([3, 4], [0, 1])
        writer.append([7, 8, 9], [0, 1, 1])
    write_pack_plan(tmp_path / "train", EpisodeDataset(tmp_path).lengths, 4)
    split = open_viewed([tmp_path], tokenizer="bytes")[0].split("train")
    split.scan.wait()
    first, second = item_json(split, 0), item_json(split, 1)
    assert (first["map"], first["padding"], len(first["documents"])) == ([[1, 2]], 1, 1)
    assert second["map"] == [[1, 1], [3, 1]]
    assert [(d["number"], d["start"], d["tokens"], d["trained"]) for d in second["documents"]] == [
        (0, 0, 2, 1),
        (1, 2, 2, 1),
    ]
    found = overview_json(split)
    assert (found["padding"], found["documents"], found["trained"]) == (1, 3, 4)


def test_distillation_sets_show_their_spans(tmp_path: Path) -> None:
    write_kd(tmp_path)
    dataset = open_viewed([tmp_path], tokenizer=tokenizer_once("o200k"))[0]
    assert dataset.as_json()["layout"] == "kd"
    split = dataset.split("train")
    split.scan.wait()
    assert split.scan.done, split.scan.problem
    for number, parts in enumerate(KD["train"]):
        shown = item_json(split, number)
        texts: dict[str, str] = {}
        for run in shown["runs"]:
            text = "".join(piece["t"] for piece in run["pieces"] if piece.get("f") != "control")
            texts[run["span"]] = texts.get(run["span"], "") + text
            assert (run["weight"] > 0) == (run["span"] != "context")
        assert (texts["analysis"], texts["final"]) == parts[1:]
        assert texts["context"] == parts[0]
    found = overview_json(split)
    assert {row["name"] for row in found["by_span"]} == {"context", "analysis", "final"}
    assert sum(row["tokens"] for row in found["by_span"]) == found["tokens"]
    assert sum(row["trained"] for row in found["by_span"]) == found["trained"] > 0
    assert found["by_role"] is None


def test_packed_files_are_blocks_too(tmp_path: Path) -> None:
    rows = {
        "input_ids": [[104, 105, 106], [107, 108]],
        "document_starts": [[0, 2], [0]],
        "labels": [[-100, 105, -100], [107, -100]],
    }
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    dataset = open_viewed([tmp_path / "rows.parquet"], tokenizer="bytes")[0]
    split = next(iter(dataset.splits.values()))
    split.scan.wait()
    assert split.scan.done, split.scan.problem
    first = item_json(split, 0)
    assert [(d["start"], d["tokens"], d["trained"]) for d in first["documents"]] == [(0, 2, 1), (2, 1, 0)]
    assert split.trained is not None
    assert split.trained.tolist() == [1, 1]
    hits = [hit.number for part in search(split.split, dataset.decoder, "kl") for hit in part.hits]
    assert hits == [1]
