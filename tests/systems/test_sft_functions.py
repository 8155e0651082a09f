"""The functions of the token-native format as users call them: altered content, weights, batches, wrong types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.compiler.run import run_build
from chatmill.errors import ConfigError, DataError, RecordError, TokenizerError
from chatmill.prove.verify import verify
from chatmill.store.episodes import EpisodeDataset
from chatmill.systems.document_boundaries import block_tokenize_fn
from chatmill.systems.post_training import encode_transcripts
from chatmill.systems.token_native_sft import (
    DEFAULT_SYSTEM_TEXT,
    MARKERS,
    collate_sft_batch,
    pack_sft_ids_and_mask,
    serialize_chat_to_ids,
    sft_batch,
    sft_loss_mask_for_ids,
    sft_token_ids,
)
from chatmill.tokenizer.load import load_tokenizer
from tests.cli.run import invoke

ROLES = {"sys_id": 1, "usr_id": 2, "asst_id": 3, "eot_id": 4}
CHAT: Any = {
    "messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "yes"},
    ]
}


def native() -> Any:
    return load_tokenizer("bytes", control_tokens=list(MARKERS.values()))


def raw(*special: str) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(list(special))
    return made


@pytest.mark.parametrize("setting", ["truncation", "padding"])
def test_a_tokenizer_that_cuts_or_pads_is_refused_everywhere(setting: str) -> None:
    chat: Any = {"messages": [{"role": "user", "content": "a b a b"}]}
    markers = ["<|SYSTEM|>", "<|USER|>", "<|ASSISTANT|>", "<|END|>", "<|EOS|>"]
    made = raw(*MARKERS.values(), *markers)
    made.enable_truncation(max_length=2) if setting == "truncation" else made.enable_padding(length=9)
    for call in (
        lambda: serialize_chat_to_ids(chat, tokenizer=made, default_system_text="a"),
        lambda: sft_token_ids(made),
        lambda: encode_transcripts(["<|USER|>a b<|END|>"], tokenizer=made),
        lambda: block_tokenize_fn({"text": ["a b a b"]}, made, "text"),
    ):
        with pytest.raises(TokenizerError, match=rf"{setting} on .*no_{setting}\(\)"):
            call()
    made.no_truncation()
    made.no_padding()
    ids = serialize_chat_to_ids(chat, tokenizer=made, default_system_text="a")
    assert len(ids) == 3 + 6
    with pytest.raises(TokenizerError, match="load_tokenizer"):
        block_tokenize_fn({"text": ["a b a b"]}, made, "text")


def test_weights_are_refused() -> None:
    for weights in ({"train": False}, {"weight": 0.5}):
        chat: Any = {"messages": [{"role": "assistant", "content": "no", **weights}]}
        with pytest.raises(RecordError, match=r"messages\[0\]: the token-native format has no weights"):
            serialize_chat_to_ids(chat, tokenizer=native(), default_system_text="")


def test_chats_to_a_batch_in_one_call() -> None:
    tokenizer = native()
    short: Any = {"messages": [{"role": "assistant", "content": "ok"}]}
    x, y, mask = sft_batch([CHAT, short], tokenizer=tokenizer, T=64)
    assert x.shape == y.shape == mask.shape == (2, 64)
    ids = serialize_chat_to_ids(CHAT, tokenizer=tokenizer, default_system_text=DEFAULT_SYSTEM_TEXT)
    assert x[0, : len(ids)].tolist() == list(ids)
    assert mask.sum(1).tolist() == [7, 3]
    assert ((y == -100) == ~mask).all()
    named, _, _ = sft_batch([short], tokenizer=tokenizer, T=16, default_system_text="be", pad_id=0)
    assert named[0].tolist()[:8] == [*serialize_chat_to_ids(short, tokenizer=tokenizer, default_system_text="be")]
    assert named[0].tolist()[8:] == [0] * 8


def test_the_default_system_text_comes_from_recipe_and_command(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text(json.dumps(CHAT) + "\n")
    common = {"sources": [{"path": str(tmp_path / "c.jsonl")}], "tokenizer": "bytes", "template": "token_native",
              "add_control_tokens": True}  # fmt: skip
    run_build(common | {"template_options": {"default_system_text": "be brief"}}, tmp_path / "recipe", workers=0)
    command = ["build", str(tmp_path / "c.jsonl"), "-t", "bytes", "-T", "token_native", "--add-control-tokens",
               "--set", "template_options.default_system_text=be brief", "-o", str(tmp_path / "command")]  # fmt: skip
    assert invoke(*command).exit_code == 0
    wanted = serialize_chat_to_ids(CHAT, tokenizer=native(), default_system_text="be brief")
    for name in ("recipe", "command"):
        assert EpisodeDataset(tmp_path / name, "train")[0].ids.tolist() == wanted
        assert verify(tmp_path / name).passed
    for options, says in (
        ({"default_system": "x"}, "It reads: default_system_text"),
        ({"default_system_text": f"say {MARKERS['eot']}"}, "spells the control token"),
    ):
        with pytest.raises(ConfigError, match=says):
            run_build(common | {"template_options": options}, tmp_path / "no", workers=0)


def test_equal_role_ids_are_refused() -> None:
    with pytest.raises(DataError, match=r"four different ids.*usr_id=3"):
        sft_loss_mask_for_ids([1, 2], **(ROLES | {"usr_id": 3}))
    assert pack_sft_ids_and_mask([3, 9, 4], [False, True, True], S=4, pad_id=4, **ROLES)[0] == [3, 9, 4, 4]


def test_devices_and_ids_that_are_none() -> None:
    with pytest.raises(ConfigError, match="device is 'tpu'"):
        collate_sft_batch([([1, 2], [True, True])], T=1, device="tpu")
    x, _, _ = collate_sft_batch([(torch.tensor([1, 2]), [True, True])], T=1, device="cpu")  # type: ignore[list-item]
    assert x.tolist() == [[1]]

    class Digits:
        def encode(self, text: str) -> list[int]:
            return []

        def special_token_ids(self) -> dict[str, Any]:
            return {"sys": "1", "usr": 2, "asst": 3, "eot": 4}

    with pytest.raises(TokenizerError, match="'sys': '1'"):
        sft_token_ids(Digits())


def slow_turns(ids: list[int]) -> list[tuple[int | None, list[int]]]:
    """Turns from a role id to its eot, with the places of their tokens; None for what is outside of turns."""
    turns: list[tuple[int | None, list[int]]] = [(None, [])]
    for place, token in enumerate(ids):
        if token in (ROLES["sys_id"], ROLES["usr_id"], ROLES["asst_id"]):
            turns.append((token, []))
        turns[-1][1].append(place)
        if token == ROLES["eot_id"] and turns[-1][0] is not None:
            turns.append((None, []))
    return [turn for turn in turns if turn[1]]


def slow_places(ids: list[int], size: int) -> list[int]:
    """The places of the tokens that a row of `size` keeps: the rules of the page, one turn after the other."""
    turns = slow_turns(ids)
    system = turns[:1] if turns and turns[0][0] == ROLES["sys_id"] else []
    rest = turns[len(system) :]
    answers = [number for number, (role, _) in enumerate(rest) if role == ROLES["asst_id"]]
    stays = answers[-1] if answers else len(rest) - 1
    if answers and stays > 0 and rest[stays - 1][0] == ROLES["usr_id"]:
        stays -= 1

    def tokens() -> int:
        return sum(len(places) for _, places in system + rest)

    while tokens() > size and stays > 0:
        is_pair = stays > 1 and (rest[0][0], rest[1][0]) == (ROLES["usr_id"], ROLES["asst_id"])
        del rest[: 1 + is_pair]
        stays -= 1 + is_pair
    if tokens() > size and answers:
        rest = rest[: max(number for number, (role, _) in enumerate(rest) if role == ROLES["asst_id"]) + 1]
    return [place for _, places in system + rest for place in places][-size:]


@settings(max_examples=300)
@given(st.lists(st.sampled_from([*ROLES.values(), *[99] * 4]), max_size=24), st.integers(2, 26))
def test_turns_are_dropped_as_the_slow_rules_say(ids: list[int], size: int) -> None:
    mask = [place % 3 == 0 for place in range(len(ids))]
    places = slow_places(ids, size)
    padding = size - len(places)
    assert pack_sft_ids_and_mask(ids, mask, S=size, pad_id=0, **ROLES) == (
        [ids[place] for place in places] + [0] * padding,
        [mask[place] for place in places] + [False] * padding,
    )
