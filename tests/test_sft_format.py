"""The token-native SFT format, item by item: serialization, mask, truncation, padding and collation."""

from __future__ import annotations

import ast
import datetime
import importlib
import inspect
import os
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import chatmill
from chatmill.core.conversation import Conversation, Message, Role
from chatmill.errors import RecordError
from chatmill.render.registry import bind, bundled_names, find_template
from chatmill.render.render import render
from chatmill.systems.token_native_sft import (
    DEFAULT_SYSTEM_TEXT,
    MARKERS,
    ChatExample,
    ChatMsg,
    collate_sft_batch,
    pack_sft_ids_and_mask,
    serialize_chat_to_ids,
    sft_loss_mask_for_ids,
)
from chatmill.tokenizer.byte_level import byte_tokenizer
from tests.chats import chat_record as chat
from tests.systems.sft_words import ASST, EOT, SYS, USR, serialize

ROLE_IDS = {"sys_id": SYS, "usr_id": USR, "asst_id": ASST, "eot_id": EOT}
DEFAULT = [SYS, 10, 11, 12, 13, 14, EOT]


def mask_of(ids: list[int]) -> list[bool]:
    return sft_loss_mask_for_ids(ids, **ROLE_IDS)


def pack(ids: list[int], mask: list[bool], S: int, pad_id: int = EOT) -> tuple[list[int], list[bool]]:
    return pack_sft_ids_and_mask(ids, mask, S=S, pad_id=pad_id, **ROLE_IDS)


# --- names ---------------------------------------------------------------------------------------------------------


def test_control_tokens_are_the_four_of_the_format() -> None:
    suffix = "84a5023f67d74cf29cc4001becde983c"
    assert list(MARKERS) == ["sys", "usr", "asst", "eot"]
    assert all(spelling == f"<|ngpt_{name}_{suffix}|>" for name, spelling in MARKERS.items())
    assert set(find_template("token_native").control_tokens) == set(MARKERS.values())
    assert DEFAULT_SYSTEM_TEXT == "you are a helpful assistant."


def test_signatures_are_exact() -> None:
    def names(function: Any) -> list[tuple[str, str, Any]]:
        return [(p.name, p.kind.name, p.default) for p in inspect.signature(function).parameters.values()]

    word, keyword, none = "POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY", inspect.Parameter.empty
    ids = [(name, keyword, none) for name in ("sys_id", "usr_id", "asst_id", "eot_id")]
    assert names(serialize_chat_to_ids) == [
        ("ex", word, none), ("tokenizer", keyword, none), ("default_system_text", keyword, none),
    ]  # fmt: skip
    assert names(sft_loss_mask_for_ids) == [("ids", word, none), *ids]
    assert names(pack_sft_ids_and_mask) == [
        ("ids", word, none), ("mask", word, none), ("S", keyword, none), *ids, ("pad_id", keyword, none),
    ]  # fmt: skip
    assert names(collate_sft_batch) == [
        ("packed", word, none), ("T", keyword, none), ("device", keyword, none), ("ignore_index", keyword, -100),
    ]  # fmt: skip
    assert typing.is_typeddict(ChatMsg)
    assert typing.is_typeddict(ChatExample)
    assert ChatExample.__required_keys__ == {"messages"}
    assert ChatExample.__optional_keys__ == {"id"}


# --- serialization -------------------------------------------------------------------------------------------------


def test_golden_ids_of_one_turn() -> None:
    ids = serialize(chat(("system", "be brief"), ("user", "hi"), ("assistant", "hello")))
    assert ids == [SYS, 15, 16, EOT, USR, 17, EOT, ASST, 18, EOT]


def test_golden_ids_of_many_turns() -> None:
    ids = serialize(
        chat(
            ("system", "be brief"), ("user", "what is it"), ("assistant", "it is a"), ("user", "bye"), ("assistant", "")
        )
    )
    assert ids == [
        *[SYS, 15, 16, EOT],
        *[USR, 20, 21, 22, EOT],
        *[ASST, 22, 21, 12, EOT],
        *[USR, 19, EOT],
        *[ASST, EOT],
    ]


def test_without_a_system_message_the_default_text_is_written() -> None:
    ex = chat(("user", "hi"), ("assistant", "hello"))
    assert serialize(ex) == [*DEFAULT, USR, 17, EOT, ASST, 18, EOT]
    assert serialize(ex, default_system_text="be brief") == [SYS, 15, 16, EOT, USR, 17, EOT, ASST, 18, EOT]
    assert serialize(ex, default_system_text="") == [SYS, EOT, USR, 17, EOT, ASST, 18, EOT]


def test_roles_are_matched_without_case() -> None:
    loud = chat(("SYSTEM", "be brief"), ("User", "hi"), ("aSSISTANT", "hello"))
    assert serialize(loud) == serialize(chat(("system", "be brief"), ("user", "hi"), ("assistant", "hello")))


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        (("user", "user", "assistant"), [USR, 17, EOT, USR, 17, EOT, ASST, 17, EOT]),
        (("assistant", "user"), [ASST, 17, EOT, USR, 17, EOT]),
        (("user", "assistant", "user"), [USR, 17, EOT, ASST, 17, EOT, USR, 17, EOT]),
        (("user",), [USR, 17, EOT]),
    ],
)
def test_odd_orders_are_kept_as_they_are(roles: tuple[str, ...], expected: list[int]) -> None:
    assert serialize(chat(*[(role, "hi") for role in roles])) == DEFAULT + expected


@pytest.mark.parametrize(
    ("messages", "code", "path"),
    [
        ([{"role": "user", "content": "hi"}, {"role": "system", "content": "hi"}], "late_system", "messages[1].role"),
        ([{"role": "system", "content": "hi"}] * 2, "late_system", "messages[1].role"),
        ([{"role": "tool", "content": "hi"}], "role_not_in_template", "messages[0].role"),
        ([{"role": "judge", "content": "hi"}], "unknown_role", "messages[0].role"),
        ([{"role": "user", "content": None}], "null_content", "messages[0].content"),
        ([{"role": "user", "content": "a\ud800"}], "lone_surrogate", "messages[0].content"),
        ([], "no_messages", "messages"),
        (None, "messages_type", "messages"),
        (
            [{"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": "{}"}]}],
            "tool_calls_not_in_template",
            "messages[0].tool_calls",
        ),
        (
            [{"role": "assistant", "content": "hi", "channel": "analysis"}],
            "channel_not_in_template",
            "messages[0]",
        ),
    ],
)
def test_bad_chats_are_errors_with_their_name(messages: Any, code: str, path: str) -> None:
    with pytest.raises(RecordError) as caught:
        serialize({"id": "chat-7", "messages": messages})
    assert (caught.value.code, caught.value.path) == (code, path)
    assert str(caught.value).startswith(f"record 'chat-7', field {path}: ")
    with pytest.raises(RecordError, match=r"^record '0', "):
        serialize({"id": 0, "messages": messages})


# --- mask ----------------------------------------------------------------------------------------------------------


def test_the_mask_is_on_assistant_content_and_its_eot_only() -> None:
    ids = serialize(
        chat(("user", "hi"), ("assistant", "hello bye"), ("user", "what"), ("assistant", ""), ("user", "it"))
    )
    trained = [(i, token) for i, (token, on) in enumerate(zip(ids, mask_of(ids), strict=True)) if on]
    assert trained == [(11, 18), (12, 19), (13, EOT), (18, EOT)]
    assert [type(value) for value in mask_of(ids)] == [bool] * len(ids)


def test_a_role_id_closes_a_span_whose_eot_is_missing() -> None:
    assert mask_of([ASST, 18, USR, 17, EOT]) == [False, True, False, False, False]
    assert mask_of([ASST, 18, ASST, 17, EOT]) == [False, True, False, True, True]
    assert mask_of([17, EOT, EOT]) == [False] * 3
    assert mask_of([]) == []


# --- truncate and pad ----------------------------------------------------------------------------------------------


def turn(role_id: int, *content: int) -> list[int]:
    return [role_id, *content, EOT]


def packed_turns(turns: list[list[int]], S: int) -> list[int]:
    ids = [token for one in turns for token in one]
    packed, mask = pack(ids, mask_of(ids), S, pad_id=0)
    assert len(packed) == len(mask) == S
    return packed


HEAD = turn(SYS, 100)
PAIRS = [turn(USR, 200), turn(ASST, 201, 202), turn(USR, 210), turn(ASST, 211), turn(USR, 220), turn(ASST, 221)]


@pytest.mark.parametrize(
    ("S", "kept"),
    [
        (22, [HEAD, *PAIRS]),
        (21, [HEAD, *PAIRS[2:]]),
        (15, [HEAD, *PAIRS[2:]]),
        (14, [HEAD, *PAIRS[4:]]),
        (9, [HEAD, *PAIRS[4:]]),
    ],
)
def test_oldest_pairs_go_first_and_the_last_assistant_turn_stays(S: int, kept: list[list[int]]) -> None:
    flat = [token for one in kept for token in one]
    assert packed_turns([HEAD, *PAIRS], S) == flat + [0] * (S - len(flat))


def test_when_the_final_pair_alone_is_too_long_the_last_tokens_are_kept() -> None:
    assert packed_turns([HEAD, *PAIRS], 8) == [100, EOT, USR, 220, EOT, ASST, 221, EOT]
    assert packed_turns([HEAD, *PAIRS], 2) == [221, EOT]


def test_one_giant_assistant_turn_keeps_its_end_and_its_mask() -> None:
    ids = HEAD + turn(USR, 200) + turn(ASST, *range(300, 400))
    packed, mask = pack(ids, mask_of(ids), 10)
    assert packed == [*range(391, 400), EOT]
    assert mask == [True] * 10


@pytest.mark.parametrize(
    ("turns", "S", "kept"),
    [
        # an assistant first
        ([turn(ASST, 1001), turn(USR, 1002), turn(ASST, 1003)], 10, [turn(USR, 1002), turn(ASST, 1003)]),
        # two users in a row: one at a time
        (
            [turn(USR, 1001), turn(USR, 1002), turn(ASST, 1003), turn(USR, 1004), turn(ASST, 1005)],
            15,
            [turn(USR, 1002), turn(ASST, 1003), turn(USR, 1004), turn(ASST, 1005)],
        ),
        # the user before the final assistant belongs to it; the one before that does not
        ([turn(USR, 1001), turn(USR, 1002), turn(ASST, 1003)], 9, [turn(USR, 1002), turn(ASST, 1003)]),
        # two assistants in a row: the final one stands alone
        ([turn(USR, 1001), turn(ASST, 1002), turn(ASST, 1003)], 6, [turn(ASST, 1003)]),
        # what follows the final assistant stays while turns can be dropped
        (
            [turn(USR, 1001), turn(ASST, 1002), turn(USR, 1003), turn(ASST, 1004), turn(USR, 1005)],
            12,
            [turn(USR, 1003), turn(ASST, 1004), turn(USR, 1005)],
        ),
    ],
)
def test_imperfect_turns_are_dropped_one_at_a_time(turns: list[list[int]], S: int, kept: list[list[int]]) -> None:
    flat = [token for one in [HEAD, *kept] for token in one]
    assert packed_turns([HEAD, *turns], S) == flat + [0] * (S - len(flat))


def test_turns_after_the_final_assistant_are_removed_before_anything_is_cut() -> None:
    turns = [HEAD, turn(USR, 200), turn(ASST, 201), turn(USR, 300), turn(USR, 301)]
    assert packed_turns(turns, 15) == [token for one in turns for token in one]
    assert packed_turns(turns, 14) == [*HEAD, *turn(USR, 200), *turn(ASST, 201), 0, 0, 0, 0, 0]
    assert packed_turns(turns, 4) == [EOT, ASST, 201, EOT]


def test_without_an_assistant_turn_the_last_turn_stays() -> None:
    turns = [HEAD, turn(USR, 200), turn(USR, 201), turn(USR, 202)]
    assert packed_turns(turns, 9) == [*HEAD, *turn(USR, 201), *turn(USR, 202)]
    assert packed_turns(turns, 8) == [*HEAD, *turn(USR, 202), 0, 0]
    assert packed_turns(turns, 5) == [100, EOT, USR, 202, EOT]
    assert packed_turns([turn(USR, *range(200, 210))], 4) == [207, 208, 209, EOT]


def test_padding_with_the_eot_id_never_trains_padding_and_never_loses_the_real_eot() -> None:
    ids = serialize(chat(("user", "hi"), ("assistant", "hello")))
    packed, mask = pack(ids, mask_of(ids), len(ids) + 5, pad_id=EOT)
    assert packed == ids + [EOT] * 5
    assert mask == mask_of(ids) + [False] * 5
    assert mask[len(ids) - 1] is True
    assert pack([], [], 3) == ([EOT] * 3, [False] * 3)


def test_padding_that_is_already_there_does_not_push_the_final_eot_out() -> None:
    ids = HEAD + turn(USR, 200) + turn(ASST, 201) + [EOT] * 20
    mask = mask_of(ids)
    assert pack(ids, mask, 4)[0] == [EOT, ASST, 201, EOT]
    assert pack(ids, mask, 4)[1] == [False, False, True, True]


def test_wrong_numbers_are_value_errors_that_name_them() -> None:
    with pytest.raises(ValueError, match=r"3 ids and 2 mask values"):
        pack([1, 2, 3], [True, False], 8)
    with pytest.raises(ValueError, match=r"S is 1;"):
        pack([1], [True], 1)


# --- collate -------------------------------------------------------------------------------------------------------


def test_collate_shifts_and_ignores_what_is_not_trained() -> None:
    ids = [*turn(USR, 17), *turn(ASST, 18)]
    packed = [pack(ids, mask_of(ids), 8, pad_id=EOT), pack([ASST, 20, 21, EOT], [False, True, True, True], 8)]
    x, y, loss_mask = collate_sft_batch(packed, T=7, device="cpu")
    assert x.tolist() == [[USR, 17, EOT, ASST, 18, EOT, EOT], [ASST, 20, 21, EOT, EOT, EOT, EOT]]
    assert y.tolist() == [[-100, -100, -100, 18, EOT, -100, -100], [20, 21, EOT, -100, -100, -100, -100]]
    assert loss_mask.tolist() == [[False] * 3 + [True] * 2 + [False] * 2, [True] * 3 + [False] * 4]
    assert (x.dtype, y.dtype, loss_mask.dtype) == (torch.int64, torch.int64, torch.bool)
    assert x.shape == y.shape == loss_mask.shape == (2, 7)
    assert {tensor.device.type for tensor in (x, y, loss_mask)} == {"cpu"}
    assert torch.equal(y == -100, ~loss_mask)


def test_collate_refuses_an_empty_batch_and_wrong_lengths() -> None:
    with pytest.raises(ValueError, match="empty"):
        collate_sft_batch([], T=4, device="cpu")
    with pytest.raises(ValueError, match=r"row 1 has 3 ids and 3 mask values; with T = 4 each row has T \+ 1 = 5"):
        collate_sft_batch([([1] * 5, [True] * 5), ([1] * 3, [True] * 3)], T=4, device="cpu")
    with pytest.raises(ValueError, match=r"row 0 has 5 ids and 4 mask values"):
        collate_sft_batch([([1] * 5, [True] * 4)], T=4, device="cpu")


# --- the same result on every run -----------------------------------------------------------------------------------

SCRIPT = """
from chatmill.systems.token_native_sft import *
from chatmill.systems.token_native_sft import MARKERS
from chatmill.tokenizer.byte_level import byte_tokenizer
tokenizer = byte_tokenizer(tuple(MARKERS.values()))
marker = {f"{key}_id": tokenizer.control(name) for key, name in MARKERS.items()}
turns = [("user", "old"), ("assistant", "x"), ("user", "h\\u00e9"), ("assistant", "yo")]
ex = {"messages": [{"role": role, "content": content} for role, content in turns]}
ids = serialize_chat_to_ids(ex, tokenizer=tokenizer, default_system_text=DEFAULT_SYSTEM_TEXT)
mask = sft_loss_mask_for_ids(ids, **marker)
print(pack_sft_ids_and_mask(ids, mask, S=40, pad_id=marker["eot_id"], **marker))
"""


def test_the_same_result_on_every_run() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert outputs.pop().startswith("([")


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
SLOW_IMPORTS = {"megatron"}
"""Seen for string constants only, without the names that its imports bring."""


def resolved(node: ast.expr, module: Any) -> Iterator[str]:
    """The strings that an expression stands for: a constant, or a name of the module."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.Name) and isinstance(getattr(module, node.id, None), str):
        yield getattr(module, node.id)
    elif isinstance(node, ast.Attribute):
        value = getattr(getattr(module, getattr(node.value, "id", ""), None), node.attr, None)
        if isinstance(value, str):
            yield value
    elif isinstance(node, ast.Tuple | ast.JoinedStr | ast.Subscript):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                yield from resolved(child, module)


def substring_searches(source: str, module: Any) -> list[str]:
    """Every place where a text is searched for a stop token."""
    found = []
    for node in ast.walk(ast.parse(source)):
        searched: list[ast.expr] = []
        if isinstance(node, ast.Compare) and any(isinstance(op, ast.In | ast.NotIn) for op in node.ops):
            searched = [node.left]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SEARCHING:
            searched = list(node.args)
        if any(text in STOP_TOKENS for one in searched for text in resolved(one, module)):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_no_module_decides_a_stop_by_looking_for_a_substring() -> None:
    root = Path(chatmill.__file__).parent
    checked = 0
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root).as_posix()
        if relative in TEXT_FORMATS or path.name == "__main__.py":
            continue
        source = path.read_text()
        if not any(stop in source for stop in (*STOP_TOKENS, "EOT", "END", "EOS", "RETURN")):
            continue
        name = relative.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        module = SimpleNamespace() if name in SLOW_IMPORTS else importlib.import_module(f"chatmill.{name}")
        assert substring_searches(source, module) == [], relative
        checked += 1
    assert checked >= 6


def test_every_template_marks_terminators_by_kind() -> None:
    """What a model must learn to emit is known from the kind; the spelling of a stop in a text changes nothing."""
    from chatmill.core.kinds import Part, RoleCode, kind, parts_of
    from chatmill.render.jinja.options import TemplateOptions

    dated = TemplateOptions(today=datetime.date(2026, 1, 2))
    answer_ends = kind(RoleCode.ASSISTANT, Part.TERMINATOR)
    checked = 0
    for name in bundled_names():
        if name == "harmony":  # needs its own vocabulary; see the tests of the templates
            continue
        template = find_template(name)
        tokenizer = byte_tokenizer(template.control_tokens)
        spelled = "".join(template.control_tokens)
        batch = [
            Conversation((Message(Role.USER, text), Message(Role.ASSISTANT, text), Message(Role.USER, text)))
            for text in ("plain", spelled)
        ]
        tokens = render(batch, bind(name, tokenizer, dated)).tokens
        kinds = [tokens.conversation(i).kinds for i in range(len(batch))]
        plain, other = (np.count_nonzero(parts_of(codes) == Part.TERMINATOR) for codes in kinds)
        assert plain == other, name
        # In some formats (GLM) the opening of the next message ends an answer, and nothing ends a user's message.
        assert [np.count_nonzero(codes == answer_ends) for codes in kinds] == [1, 1], name
        checked += 1
    assert checked == len(bundled_names()) - 1
