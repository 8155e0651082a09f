"""The token-native SFT format, item by item: serialization, mask, truncation, padding and collation."""

from __future__ import annotations

import ast
import datetime
import importlib
import json
import os
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import chatmill
from chatmill.compiler.run import run_build
from chatmill.core.conversation import Conversation, Message, Role
from chatmill.core.kinds import Part, RoleCode, kind, parts_of
from chatmill.errors import ConfigError, RecordError
from chatmill.prove.verify import verify
from chatmill.render.jinja.options import TemplateOptions
from chatmill.render.registry import bind, bundled_names, find_template
from chatmill.render.render import render
from chatmill.store.episodes import EpisodeDataset
from chatmill.systems.token_native_sft import (
    DEFAULT_SYSTEM_TEXT,
    MARKERS,
    ChatExample,
    ChatMsg,
    collate_sft_batch,
    pack_sft_ids_and_mask,
    sft_batch,
    sft_loss_mask_for_ids,
)
from chatmill.tokenizer.byte_level import byte_tokenizer
from chatmill.tokenizer.load import load_tokenizer
from tests.chats import chat_record as chat
from tests.systems.sft_words import ASST, EOT, SYS, USR, serialize

ROLE_IDS = {"sys_id": SYS, "usr_id": USR, "asst_id": ASST, "eot_id": EOT}
ALIKE = ROLE_IDS | {"usr_id": ASST}
DEFAULT = [SYS, 10, 11, 12, 13, 14, EOT]
TURN = [USR, 17, EOT, ASST, 18, EOT]


def mask_of(ids: list[int]) -> list[bool]:
    return sft_loss_mask_for_ids(ids, **ROLE_IDS)


def pack(ids: list[int], mask: list[bool], S: int, pad_id: int = EOT) -> tuple[list[int], list[bool]]:
    return pack_sft_ids_and_mask(ids, mask, S=S, pad_id=pad_id, **ROLE_IDS)


def test_control_tokens_and_types_are_those_of_the_format() -> None:
    """That the signatures are, too, is shown by test_facade.py."""
    suffix = "84a5023f67d74cf29cc4001becde983c"
    assert {name: f"<|ngpt_{name}_{suffix}|>" for name in ("sys", "usr", "asst", "eot")} == MARKERS
    assert set(find_template("token_native").control_tokens) == set(MARKERS.values())
    assert DEFAULT_SYSTEM_TEXT == "you are a helpful assistant."
    assert typing.is_typeddict(ChatMsg)
    assert typing.is_typeddict(ChatExample)
    assert (ChatExample.__required_keys__, ChatExample.__optional_keys__) == ({"messages"}, {"id"})


# --- serialization -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("turns", "default", "expected"),
    [
        ("system be brief,user hi,assistant hello", None, [SYS, 15, 16, EOT, *TURN]),
        ("SYSTEM be brief,User hi,aSSISTANT hello", None, [SYS, 15, 16, EOT, *TURN]),
        (
            "system be brief,user what is it,assistant it is a,user bye,assistant ",
            None,
            [SYS, 15, 16, EOT, USR, 20, 21, 22, EOT, ASST, 22, 21, 12, EOT, USR, 19, EOT, ASST, EOT],
        ),
        ("user hi,assistant hello", None, [*DEFAULT, *TURN]),
        ("user hi,assistant hello", "be brief", [SYS, 15, 16, EOT, *TURN]),
        ("user hi,assistant hello", "", [SYS, EOT, *TURN]),
        ("user hi,user hi,assistant hello", None, [*DEFAULT, USR, 17, EOT, *TURN]),
        ("assistant hi,user hi", None, [*DEFAULT, ASST, 17, EOT, USR, 17, EOT]),
        ("user hi,assistant hello,user hi", None, [*DEFAULT, *TURN, USR, 17, EOT]),
    ],
)
def test_golden_ids(turns: str, default: str | None, expected: list[int]) -> None:
    ex = chat(*[(role, text) for role, _, text in (turn.partition(" ") for turn in turns.split(","))])
    assert serialize(ex, default_system_text=DEFAULT_SYSTEM_TEXT if default is None else default) == expected


HI = {"role": "user", "content": "hi"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": "{}"}]}


@pytest.mark.parametrize(
    ("messages", "code", "path"),
    [
        ([HI, HI | {"role": "system"}], "late_system", "messages[1].role"),
        ([HI | {"role": "system"}] * 2, "late_system", "messages[1].role"),
        ([HI | {"role": "tool"}], "role_not_in_template", "messages[0].role"),
        ([HI | {"content": None}], "null_content", "messages[0].content"),
        ([], "no_messages", "messages"),
        ([CALL], "tool_calls_not_in_template", "messages[0].tool_calls"),
        ([HI | {"role": "assistant", "channel": "analysis"}], "channel_not_in_template", "messages[0]"),
        ([HI, HI | {"role": "assistant", "train": False}], "bad_weight", "messages[1]"),
        ([HI | {"role": "assistant", "weight": 0.5}], "bad_weight", "messages[0]"),
    ],
)
def test_bad_chats_are_errors_with_their_name(messages: Any, code: str, path: str) -> None:
    with pytest.raises(RecordError) as caught:
        serialize({"id": "chat-7", "messages": messages})
    assert (caught.value.code, caught.value.path) == (code, path)
    assert str(caught.value).startswith(f"record 'chat-7', field {path}: ")
    with pytest.raises(RecordError, match=r"^record '0', "):
        serialize({"id": 0, "messages": messages})


def test_the_default_system_text_comes_from_a_recipe(tmp_path: Path) -> None:
    ex = chat(("user", "hi"), ("assistant", "no"))
    (tmp_path / "c.jsonl").write_text(json.dumps(ex) + "\n")
    recipe = {"sources": [{"path": str(tmp_path / "c.jsonl")}], "tokenizer": "bytes", "template": "token_native"}
    recipe |= {"add_control_tokens": True}
    run_build(recipe | {"template_options": {"default_system_text": "be brief"}}, tmp_path / "built", workers=0)
    wanted = serialize(ex, load_tokenizer("bytes", control_tokens=[*MARKERS.values()]), "be brief")
    assert EpisodeDataset(tmp_path / "built", "train")[0].ids.tolist() == wanted
    assert verify(tmp_path / "built").passed
    for options, says in (
        ({"default_system": "x"}, "It reads: default_system_text"),
        ({"default_system_text": f"say {MARKERS['eot']}"}, "spells the control token"),
    ):
        with pytest.raises(ConfigError, match=says):
            run_build(recipe | {"template_options": options}, tmp_path / "no", workers=0)


# --- mask ----------------------------------------------------------------------------------------------------------


def test_the_mask_is_on_assistant_content_and_its_eot_only() -> None:
    turns = ("user", "hi"), ("assistant", "hello bye"), ("user", "what"), ("assistant", ""), ("user", "it")
    ids = serialize(chat(*turns))
    trained = [(i, token) for i, (token, on) in enumerate(zip(ids, mask_of(ids), strict=True)) if on]
    assert trained == [(11, 18), (12, 19), (13, EOT), (18, EOT)]
    assert [type(value) for value in mask_of(ids)] == [bool] * len(ids)
    # A role id closes a span whose eot is missing.
    assert mask_of([ASST, 18, USR, 17, EOT]) == mask_of([ASST, 18, SYS, 17, EOT]) == [False, True, False, False, False]
    assert mask_of([ASST, 18, ASST, 17, EOT]) == [False, True, False, True, True]
    assert mask_of([17, EOT, EOT]) == [False] * 3


# --- truncate and pad ----------------------------------------------------------------------------------------------


def u(*content: int) -> list[int]:
    return [USR, *content, EOT]


def a(*content: int) -> list[int]:
    return [ASST, *content, EOT]


HEAD = [SYS, 100, EOT]
PAIRS = [*u(200), *a(201, 202), *u(210), *a(211), *u(220), *a(221)]
AFTER = [*HEAD, *u(200), *a(201), *u(300), *u(301)]
UNANSWERED = [*HEAD, *u(200), *u(201), *u(202)]


@pytest.mark.parametrize(
    ("ids", "S", "kept"),
    [
        # the oldest pairs go first, and the last assistant turn stays
        ([*HEAD, *PAIRS], 22, [*HEAD, *PAIRS]),
        ([*HEAD, *PAIRS], 21, [*HEAD, *PAIRS[7:]]),
        ([*HEAD, *PAIRS], 14, [*HEAD, *PAIRS[13:]]),
        # the final pair alone is too long
        ([*HEAD, *PAIRS], 8, [100, EOT, *PAIRS[13:]]),
        # an assistant first, two users in a row, two assistants in a row: one turn at a time
        ([*HEAD, *a(301), *u(302), *a(303)], 10, [*HEAD, *u(302), *a(303)]),
        ([*HEAD, *u(301), *u(302), *a(303)], 9, [*HEAD, *u(302), *a(303)]),
        ([*HEAD, *u(301), *a(302), *a(303)], 6, [*HEAD, *a(303)]),
        # turns after the final assistant stay while others can be dropped, and go before anything is cut
        ([*HEAD, *u(301), *a(302), *u(303), *a(304), *u(305)], 12, [*HEAD, *u(303), *a(304), *u(305)]),
        (AFTER, 14, AFTER[:9]),
        (AFTER, 4, [EOT, ASST, 201, EOT]),
        # no assistant turn: the last turn stays
        (UNANSWERED, 8, [*HEAD, *u(202)]),
        (UNANSWERED, 5, [100, EOT, *u(202)]),
        (u(*range(200, 210)), 4, [207, 208, 209, EOT]),
        # padding that is there already does not push the final eot out
        ([*HEAD, *u(200), *a(201), *[EOT] * 20], 4, [EOT, ASST, 201, EOT]),
        ([], 3, []),
    ],
)
def test_whole_turns_are_dropped_before_anything_is_cut(ids: list[int], S: int, kept: list[int]) -> None:
    packed, mask = pack(ids, mask_of(ids), S, pad_id=0)
    assert packed == kept + [0] * (S - len(kept))
    assert len(mask) == S


def test_a_giant_assistant_turn_keeps_its_end_and_padding_with_the_eot_is_not_trained() -> None:
    ids = [*HEAD, *u(200), *a(*range(300, 400))]
    assert pack(ids, mask_of(ids), 10) == ([*range(391, 400), EOT], [True] * 10)
    assert pack(ids, mask_of(ids), len(ids) + 5, pad_id=EOT) == (ids + [EOT] * 5, mask_of(ids) + [False] * 5)


def slow_turns(ids: list[int]) -> list[tuple[int | None, list[int]]]:
    """Turns from a role id to its eot, with the places of their tokens; None for what is outside of turns."""
    turns: list[tuple[int | None, list[int]]] = [(None, [])]
    for place, token in enumerate(ids):
        if token in (SYS, USR, ASST):
            turns.append((token, []))
        turns[-1][1].append(place)
        if token == EOT and turns[-1][0] is not None:
            turns.append((None, []))
    return [turn for turn in turns if turn[1]]


def slow_places(ids: list[int], size: int) -> list[int]:
    """The places of the tokens that a row of `size` keeps: the rules of the page, one turn after the other."""
    turns = slow_turns(ids)
    system = turns[:1] if turns and turns[0][0] == SYS else []
    rest = turns[len(system) :]
    answers = [number for number, (role, _) in enumerate(rest) if role == ASST]
    stays = answers[-1] if answers else len(rest) - 1
    if answers and stays > 0 and rest[stays - 1][0] == USR:
        stays -= 1

    def tokens() -> int:
        return sum(len(places) for _, places in system + rest)

    while tokens() > size and stays > 0:
        is_pair = stays > 1 and (rest[0][0], rest[1][0]) == (USR, ASST)
        del rest[: 1 + is_pair]
        stays -= 1 + is_pair
    if tokens() > size and answers:
        rest = rest[: max(number for number, (role, _) in enumerate(rest) if role == ASST) + 1]
    return [place for _, places in system + rest for place in places][-size:]


@settings(max_examples=300)
@given(st.lists(st.sampled_from([SYS, USR, ASST, EOT, *[99] * 4]), max_size=24), st.integers(2, 26))
def test_turns_are_dropped_as_the_slow_rules_say(ids: list[int], size: int) -> None:
    mask = [place % 3 == 0 for place in range(len(ids))]
    places = slow_places(ids, size)
    padding = size - len(places)
    assert pack(ids, mask, size, pad_id=0) == (
        [ids[place] for place in places] + [0] * padding,
        [mask[place] for place in places] + [False] * padding,
    )


# --- collate -------------------------------------------------------------------------------------------------------


def test_collate_shifts_and_ignores_what_is_not_trained() -> None:
    ids = [*u(17), *a(18)]
    packed = [pack(ids, mask_of(ids), 8, pad_id=EOT), pack([ASST, 20, 21, EOT], [False, True, True, True], 8)]
    x, y, loss_mask = collate_sft_batch(packed, T=7, device="cpu")
    assert x.tolist() == [[USR, 17, EOT, ASST, 18, EOT, EOT], [ASST, 20, 21, EOT, EOT, EOT, EOT]]
    assert y.tolist() == [[-100, -100, -100, 18, EOT, -100, -100], [20, 21, EOT, -100, -100, -100, -100]]
    assert loss_mask.tolist() == [[False] * 3 + [True] * 2 + [False] * 2, [True] * 3 + [False] * 4]
    assert (x.dtype, y.dtype, loss_mask.dtype) == (torch.int64, torch.int64, torch.bool)
    assert {tensor.device.type for tensor in (x, y, loss_mask)} == {"cpu"}
    x, _, _ = collate_sft_batch([(torch.tensor([1, 2]), [True, True])], T=1, device="cpu")  # type: ignore[list-item]
    assert x.tolist() == [[1]]


def test_chats_to_a_batch_in_one_call() -> None:
    tokenizer = byte_tokenizer(tuple(MARKERS.values()))
    long = chat(("user", "hi"), ("assistant", "no"), ("user", "more"), ("assistant", "yes"))
    short = chat(("assistant", "ok"))
    x, y, mask = sft_batch([long, short], tokenizer=tokenizer, T=64)  # type: ignore[list-item]
    ids = serialize(long, tokenizer)
    assert x[0].tolist() == ids + [tokenizer.control(MARKERS["eot"])] * (64 - len(ids))
    assert mask.sum(1).tolist() == [7, 3]
    assert ((y == -100) == ~mask).all()
    named, _, _ = sft_batch([short], tokenizer=tokenizer, T=16, default_system_text="be", pad_id=0)  # type: ignore[list-item]
    assert named[0].tolist() == serialize(short, tokenizer, "be") + [0] * 8


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: pack([1, 2, 3], [True, False], 8), "3 ids and 2 mask values"),
        (lambda: pack([1], [True], 1), "S is 1;"),
        (lambda: collate_sft_batch([], T=4, device="cpu"), "empty"),
        (
            lambda: collate_sft_batch([([1] * 5, [True] * 5), ([1] * 3, [True] * 3)], T=4, device="cpu"),
            r"row 1 has 3 ids and 3 mask values; with T = 4 each row has T \+ 1 = 5",
        ),
        (lambda: collate_sft_batch([([1] * 5, [True] * 4)], T=4, device="cpu"), "row 0 has 5 ids and 4 mask values"),
        (lambda: collate_sft_batch([([1], [True])], T=0, device="cpu"), "T is 0;"),
        (lambda: collate_sft_batch([([1, 2], [True, True])], T=1, device="tpu"), "device is 'tpu'"),
        (lambda: sft_loss_mask_for_ids([1, 2], **ALIKE), "four different ids.*usr_id=3"),
        (lambda: pack_sft_ids_and_mask([1, 2], [True] * 2, S=4, pad_id=0, **ALIKE), "four different ids.*usr_id=3"),
    ],
)
def test_wrong_numbers_are_value_errors_that_name_them(call: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()


SCRIPT = """
from chatmill.systems.token_native_sft import *
from chatmill.tokenizer.byte_level import byte_tokenizer
from chatmill.tokenizer.load import load_tokenizer
tokenizer = byte_tokenizer(tuple(MARKERS.values()))
ids = sft_token_ids(tokenizer)
turns = [("user", "old"), ("assistant", "x"), ("user", "h\\u00e9"), ("assistant", "yo")]
ex = {"messages": [{"role": role, "content": content} for role, content in turns]}
chat = serialize_chat_to_ids(ex, tokenizer=tokenizer, default_system_text=DEFAULT_SYSTEM_TEXT)
print(pack_sft_ids_and_mask(chat, sft_loss_mask_for_ids(chat, **ids), S=40, pad_id=ids["eot_id"], **ids))
"""


def test_the_same_result_on_every_run() -> None:
    one, other = (
        subprocess.check_output([sys.executable, "-c", SCRIPT], env={**os.environ, "PYTHONHASHSEED": seed}, text=True)
        for seed in ("1", "2")
    )
    assert one == other
    assert one.startswith("([")


# --- no stop by substring ------------------------------------------------------------------------------------------

SEARCHING = frozenset(
    {"find", "rfind", "index", "rindex", "split", "rsplit", "partition", "rpartition", "count", "replace"}
    | {"startswith", "endswith", "removesuffix", "search", "match", "fullmatch", "finditer", "findall", "sub"}
)
STOP_TOKENS = frozenset(
    {MARKERS["eot"], "<|END|>", "<|EOS|>", "<|im_end|>", "<|eot_id|>", "<|end|>", "<|return|>", "<|call|>"}
    | {"<|endoftext|>", "<|end_of_text|>"}
)
TEXT_FORMATS = {"read/transcripts.py", "systems/post_training.py"}
"""Spec 2 reads transcripts that are text with markers by definition; that is parsing of a file, not a stop."""
SPELLED = (*STOP_TOKENS, "EOT", "END", "EOS", "RETURN")
SLOW_IMPORTS = {"megatron"}
"""Seen for string constants only, without the names that its imports bring."""


def strings_in(expression: ast.expr, module: Any) -> Iterator[object]:
    """The constants in an expression, and the values of names of the module."""
    for node in ast.walk(expression):
        if isinstance(node, ast.Constant):
            yield node.value
        elif isinstance(node, ast.Name | ast.Attribute):
            value = module
            for name in ast.unparse(node).split("."):
                value = getattr(value, name, None)
            yield value if isinstance(value, str) else None


def substring_searches(source: str, module: Any) -> list[str]:
    """Every place where a text is searched for a stop token."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.expr):
            continue
        searched: list[ast.expr] = []
        if isinstance(node, ast.Compare) and any(isinstance(op, ast.In | ast.NotIn) for op in node.ops):
            searched = [node.left]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SEARCHING:
            searched = list(node.args)
        if any(text in STOP_TOKENS for one in searched for text in strings_in(one, module)):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_no_module_decides_a_stop_by_looking_for_a_substring() -> None:
    root = Path(chatmill.__file__).parent
    checked = 0
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root).as_posix()
        source = path.read_text()
        if relative in TEXT_FORMATS or not any(stop in source for stop in SPELLED):
            continue
        name = relative.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        module = SimpleNamespace() if name in SLOW_IMPORTS else importlib.import_module(f"chatmill.{name}")
        assert substring_searches(source, module) == [], relative
        checked += 1
    assert checked >= 6


@pytest.mark.parametrize("name", sorted(set(bundled_names()) - {"harmony"}))  # which needs its own vocabulary
def test_a_template_marks_terminators_by_kind(name: str) -> None:
    """What a model must learn to emit is known from the kind; the spelling of a stop in a text changes nothing."""
    control_tokens = find_template(name).control_tokens
    bound = bind(name, byte_tokenizer(control_tokens), TemplateOptions(today=datetime.date(2026, 1, 2)))
    batch = [
        Conversation(tuple(Message(role, text) for role in (Role.USER, Role.ASSISTANT, Role.USER)))
        for text in ("plain", "".join(control_tokens))
    ]
    tokens = render(batch, bound).tokens
    kinds = [tokens.conversation(i).kinds for i in range(2)]
    plain, spelled = (np.count_nonzero(parts_of(codes) == Part.TERMINATOR) for codes in kinds)
    assert plain == spelled
    # In some formats (GLM) the opening of the next message ends an answer, and nothing ends a user's message.
    answer_ends = kind(RoleCode.ASSISTANT, Part.TERMINATOR)
    assert [np.count_nonzero(codes == answer_ends) for codes in kinds] == [1, 1]
