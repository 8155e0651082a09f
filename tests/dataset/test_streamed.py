"""Data that is compiled while it is read: the shards of a build, in a fixed order, from any point on."""

from __future__ import annotations

import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

import chatmill
from chatmill.dataset.stream_loader import StreamFeed
from chatmill.dataset.streamed import StreamedDataset
from chatmill.errors import ConfigError, RecordError
from tests.compiler.builds import chats, digest, write_jsonl

OPTIONS: dict[str, Any] = {
    "template": "chatml",
    "add_control_tokens": True,
    "max_length": 300,
    "overflow": "windows",
    "shard_bytes": 4000,
    "gates": {"records_without_trained_tokens": None},
    "workers": 0,
}
RECORDS = chats(60, 3)


@pytest.fixture(scope="module")
def streamed() -> Any:
    return chatmill.compile(RECORDS, "bytes", stream=True, **OPTIONS)


@pytest.fixture(scope="module")
def whole() -> Any:
    return chatmill.compile(RECORDS, "bytes", **OPTIONS)


def rows_of(batch: Any) -> list[list[int]]:
    """The tokens of each row: its inputs and the last target, without the padding behind."""
    found = []
    for x, y in zip(batch[0], batch[1], strict=True):
        ids = [*x.tolist(), int(y[-1])]
        while ids and ids[-1] == 258:
            ids.pop()
        found.append(ids)
    return found


def documents_of(batch: Any) -> list[tuple[int, ...]]:
    """The documents of a batch, as ids."""
    if len(batch) == 3:
        return [tuple(row) for row in rows_of(batch)]
    found = []
    for row, starts in zip(rows_of(batch), batch.document_starts, strict=True):
        borders = [*(int(s) for s in starts if s >= 0), len(row)]
        found += [tuple(row[a:b]) for a, b in itertools.pairwise(borders)]
    return found


def batches(loader: Any, count: int) -> list[Any]:
    return [loader.get_batch() for _ in range(count)]


def same(one: Any, other: Any) -> bool:
    return all(a.shape == b.shape and bool((a == b).all()) for a, b in zip(one, other, strict=True))


def test_a_stream_has_the_episodes_of_a_build_in_order(streamed: Any, whole: Any) -> None:
    assert streamed.chunks > 5
    assert streamed.fingerprint == whole.manifest["fingerprint"]
    for one, other in zip(streamed, whole, strict=True):
        assert (one.index, one.ids.tolist(), list(one.weights)) == (
            other.index,
            other.ids.tolist(),
            list(other.weights),
        )
    assert repr(streamed[7]) == repr(whole[7])
    with pytest.raises(IndexError):
        streamed[10_000]


def test_saving_a_stream_gives_the_files_of_a_build(streamed: Any, whole: Any, tmp_path: Path) -> None:
    streamed.save(tmp_path / "streamed")
    whole.save(tmp_path / "whole")
    assert digest(tmp_path / "streamed") == digest(tmp_path / "whole")


@pytest.mark.parametrize("packed", [True, False])
def test_an_epoch_holds_every_episode_once_and_epochs_differ(streamed: Any, whole: Any, packed: bool) -> None:
    loader = streamed.to_torch(1, packed=packed, group_chunks=2)
    wanted = sorted(tuple(episode.ids.tolist()) for episode in whole)
    epochs: list[list[tuple[int, ...]]] = [[], []]
    for epoch in epochs:
        while len(epoch) < len(wanted):
            epoch += documents_of(loader.get_batch())
        assert sorted(epoch) == wanted
    assert epochs[0] != epochs[1]
    assert loader.epoch() == 1
    loader.close()


def test_a_step_may_take_rows_of_many_groups_and_each_is_made_once(
    streamed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    compiled = StreamFeed._compile
    monkeypatch.setattr(StreamFeed, "_compile", lambda feed, group: made.append(group) or compiled(feed, group))
    large = streamed.to_torch(40, group_chunks=1, prefetch=False)
    steps = [documents_of(large.get_batch()) for _ in range(2)]
    large.close()
    assert sorted(made) == list(range(len(made)))
    assert len(made) > 6
    small = streamed.to_torch(1, group_chunks=1)
    assert [row for batch in batches(small, 80) for row in documents_of(batch)] == [
        row for step in steps for row in step
    ]
    small.close()


def test_a_stream_goes_on_from_any_state(streamed: Any) -> None:
    loader = streamed.to_torch(3, packed=True, group_chunks=2)
    batches(loader, 4)
    state = json.loads(json.dumps(loader.state_dict()))
    ahead = batches(loader, 12)  # over the border of an epoch
    loader.close()
    again = streamed.to_torch(3, packed=True, group_chunks=2)
    again.load_state_dict(state)
    assert all(same(a, b) for a, b in zip(ahead, batches(again, 12), strict=True))
    again.close()
    other = streamed.to_torch(3, packed=True, group_chunks=3)
    with pytest.raises(ConfigError, match="group_chunks"):
        other.load_state_dict(state)


def test_ranks_share_the_batches_of_one(streamed: Any) -> None:
    alone = streamed.to_torch(4, packed=True)
    ranks = [streamed.to_torch(2, packed=True, rank=rank, world_size=2) for rank in range(2)]
    for _ in range(6):
        wanted = documents_of(alone.get_batch())
        assert [row for loader in ranks for row in documents_of(loader.get_batch())] == wanted
    for loader in (alone, *ranks):
        loader.close()


def test_another_process_makes_the_same_batches(streamed: Any) -> None:
    loader = streamed.to_torch(2, packed=True)
    copy = pickle.loads(pickle.dumps(loader))
    assert all(same(a, b) for a, b in zip(batches(loader, 5), batches(copy, 5), strict=True))
    copy.close()
    assert streamed[0] is not None  # a copy removes nothing that is not its own
    loader.close()


def test_workers_of_torch_take_turns(streamed: Any) -> None:
    alone = streamed.to_torch(2, packed=True)
    wanted = batches(alone, 2)
    second = pickle.loads(pickle.dumps(alone))
    second.load_state_dict(streamed.to_torch(2, packed=True).state_dict())
    second._enter_worker((1, 2))
    assert same(second.get_batch(), wanted[1])
    for loader in (alone, second):
        loader.close()


def test_a_worker_process_compiles(streamed: Any) -> None:
    here = streamed.to_torch(2, packed=True)
    options = {**OPTIONS, "workers": None}
    there = chatmill.compile(RECORDS, "bytes", stream=True, **options).to_torch(2, packed=True)
    assert all(same(a, b) for a, b in zip(batches(here, 3), batches(there, 3), strict=True))
    here.close()
    there.close()


def test_groups_are_removed_when_they_are_read(streamed: Any) -> None:
    loader = streamed.to_torch(2, group_chunks=1, prefetch=False)
    place = streamed._scratch.folder / "groups"
    before = set(place.iterdir())
    while loader.epoch() < 1:
        loader.get_batch()
    assert len(set(place.iterdir()) - before) <= 5  # three that are open, one ahead, one being made
    loader.close()


def test_the_order_of_chunks_depends_on_seed_and_epoch(streamed: Any) -> None:
    def feed(**options: Any) -> Any:
        return streamed.to_torch(2, **{"group_chunks": 2, "seed": 1, **options})._feeds["train"]

    one = feed()
    epochs = [[n for g in range(one.groups) for n in one._chunks_of(e * one.groups + g)] for e in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(streamed.chunks))] * 2
    assert epochs[0] != epochs[1]
    assert feed(seed=2)._chunks_of(0) != one._chunks_of(0)
    assert feed(shuffle=False)._chunks_of(0) == [0, 1]


def test_hugging_face_reads_a_stream_and_goes_on(whole: Any) -> None:
    plain = [{"messages": [{**m, "weight": None} for m in record["messages"]]} for record in RECORDS]
    rows = chatmill.compile(plain, "bytes", stream=True, **OPTIONS).to_hf()
    wanted = [{"input_ids": e.ids.tolist(), "labels": e.labels.tolist()} for e in whole]
    found, state = [], None
    for number, row in enumerate(rows):
        found.append(row)
        if number == 4:
            state = rows.state_dict()
    assert found == wanted
    rows.load_state_dict(state)
    assert list(rows) == wanted[5:]


def test_weights_that_labels_cannot_hold_are_told() -> None:
    half = [
        {
            "messages": [
                {**message, "weight": 0.5 if message["role"] == "assistant" else 0} for message in one["messages"]
            ]
        }
        for one in RECORDS[:3]
    ]
    rows = chatmill.compile(half, "bytes", stream=True, **OPTIONS).to_hf()
    with pytest.warns(UserWarning, match="these weights are lost"):
        assert any(label >= 0 for row in rows for label in row["labels"])


def test_a_stream_counts_what_it_has_seen_and_shows_it(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "chats.jsonl", [*RECORDS, {"messages": [{"role": "pope", "content": "x"}]}])
    options = {**OPTIONS, "on_error": "quarantine"}
    data = chatmill.compile(tmp_path / "chats.jsonl", "bytes", stream=True, **options)
    assert "compiled so far: 0" in repr(data)
    assert sum(1 for _ in data) > 0
    for shown in (repr(data), data._repr_html_()):
        assert "records left out" in shown
    assert f"compiled so far: {data.chunks}" in repr(data)
    assert data.stats().ledger is not None


def test_a_bad_record_and_a_gate_end_the_stream() -> None:
    bad = [*RECORDS[:5], {"messages": [{"role": "pope", "content": "x"}]}]
    loader = chatmill.compile(bad, "bytes", stream=True, **OPTIONS).to_torch(2)
    with pytest.raises(RecordError, match=r"records\[5\].*pope"):
        batches(loader, 20)
    loader.close()
    question = [{"messages": [{"role": "user", "content": "x"}]}, *RECORDS[:3]]
    data = chatmill.compile(question, "bytes", stream=True, **{**OPTIONS, "gates": {}})
    with pytest.raises(chatmill.GateError, match="1 records train nothing"):
        list(data)


def test_rows_of_a_stream_need_a_length_that_nothing_exceeds(streamed: Any) -> None:
    with pytest.raises(ConfigError, match="length is 100, and episodes have up to 300 tokens"):
        streamed.to_torch(2, length=100)
    endless = chatmill.compile(RECORDS, "bytes", stream=True, **{**OPTIONS, "max_length": None, "overflow": "error"})
    with pytest.raises(ConfigError, match="compile with max_length"):
        endless.to_torch(2)


def test_large_input_is_streamed_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chatmill.dataset.compile.STREAM_BYTES", 1000)
    assert isinstance(chatmill.compile(RECORDS, "bytes", **OPTIONS), StreamedDataset)
    assert isinstance(chatmill.compile(RECORDS, "bytes", stream=False, **OPTIONS), chatmill.Dataset)
