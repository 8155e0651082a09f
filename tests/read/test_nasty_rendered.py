"""The nasty records through every bundled template: each renders, or fails with the code that the docs describe."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest

from chatmill.core.conversation import Conversation, Role
from chatmill.core.kinds import REPEATED, Part, RoleCode, kind
from chatmill.core.tokens import Tokens
from chatmill.errors import RecordError
from chatmill.label.presets import find_policy
from chatmill.render.jinja.options import Expand, TemplateOptions
from chatmill.render.jinja.renderer import Renderer
from chatmill.render.registry import bind, bundled_names, find_template
from chatmill.render.render import Rendered, render
from chatmill.tokenizer.byte_level import byte_tokenizer
from tests.data.tokenizer_files import loaded
from tests.oracles import in_each_way
from tests.read.nasty import CASES, CONVERSATIONS, DAY, LONG, QUICK, RENDER_ERRORS
from tests.render.test_bulk import assert_same


class Nasty(NamedTuple):
    """All readable cases through one template, failures collected."""

    template: str
    tokenizer: Any
    names: list[str]
    talks: list[Conversation]
    rendered: Rendered


@pytest.fixture(scope="module", params=bundled_names())
def nasty(request: pytest.FixtureRequest) -> Nasty:
    template = request.param
    tokenizer = loaded("o200k") if template == "harmony" else byte_tokenizer(find_template(template).control_tokens)
    names = list(CONVERSATIONS)
    talks = [CONVERSATIONS[name] for name in names]
    if template not in QUICK:
        talks = [talk._replace(messages=talk.messages[:LONG]) for talk in talks]
    bound = bound_in_place(template, tokenizer)
    if template in QUICK:
        taught_by_beginnings(bound)
    rendered, other = in_each_way(lambda: render(talks, bound, collect_failures=True))
    assert_same(rendered, other)
    return Nasty(template, tokenizer, names, talks, rendered)


def taught_by_beginnings(bound: Any) -> None:
    """Let a template see beginnings of the thousand turns, which it then puts together from what it has learned.

    Without them it would render every one of a thousand beginnings; the other templates do that for a shorter chat.
    """
    longest = max(CONVERSATIONS.values(), key=lambda talk: len(talk.messages))
    assert len(longest.messages) == 1000
    render([longest._replace(messages=longest.messages[:count]) for count in (8, 10, 12)], bound)
    with patch.object(Renderer, "_run", side_effect=AssertionError("it is put together, message by message")):
        render([longest], bound)


def bound_in_place(template: str, tokenizer: Any) -> Any:
    """In place: each case is one row."""
    in_place = TemplateOptions(today=DAY, expand=Expand.NONE)
    return bind(template, tokenizer, in_place)


PATHLESS = {("template_refused", ""), ("not_shown", "tools"), ("non_text_part", "")}
"""Refusals that no single message is the reason of."""


def test_each_case_renders_or_is_refused_with_its_code(nasty: Nasty) -> None:
    names, rendered = nasty.names, nasty.rendered
    failed = {names[index]: error for index, error in rendered.failed}
    assert {name: error.code for name, error in failed.items()} == RENDER_ERRORS[nasty.template]
    assert [names[index] for index in rendered.kept] == [name for name in names if name not in failed]
    for name, error in failed.items():
        assert error.where == CASES[name].where
        assert error.path.startswith("messages[") or (error.code, error.path) in PATHLESS
    assert (rendered.tokens.lengths > 0).all()
    assert len(rendered.tokens.kinds) == len(rendered.tokens.ids)
    assert (rendered.tokens.kinds > 0).all(), "every token has a kind, and none is padding"


def test_without_collecting_the_first_failure_is_raised() -> None:
    bound = bound_in_place("chatml", byte_tokenizer(find_template("chatml").control_tokens))
    with pytest.raises(RecordError, match="channel") as caught:
        render([CONVERSATIONS["empty_user"], CONVERSATIONS["harmony_channels"]], bound)
    assert caught.value.where == CASES["harmony_channels"].where


def content_of(tokens: Tokens, message: int, role: Role) -> bytes:
    """The bytes that stand as the content of one message."""
    code = kind(RoleCode[role.name], Part.CONTENT)
    return bytes(tokens.ids[(tokens.messages == message) & (tokens.kinds & ~np.uint8(REPEATED) == code)].tolist())


@pytest.mark.parametrize("nasty", ["token_native", "markers", "chatml", "llama3"], indirect=True)
def test_contents_stay_text_to_the_last_byte(nasty: Nasty) -> None:
    """Control look-alikes, NULs, bidi marks, a megabyte: what is written is what the record says."""
    checked = 0
    for number, index in enumerate(nasty.rendered.kept):
        tokens = nasty.rendered.tokens.conversation(number)
        for at, message in enumerate(nasty.talks[index].messages):
            expected = message.content.strip() if nasty.template == "llama3" else message.content
            assert content_of(tokens, at, message.role) == expected.encode(), nasty.names[index]
            checked += 1
    assert checked > (1100 if nasty.template in QUICK else 170)


def without_texts(talk: Conversation) -> Conversation:
    """The same messages, with nothing in them that spells anything."""
    return Conversation(
        tuple(
            m._replace(
                content="x" if m.content or not m.tool_calls else "", reasoning="x" if m.reasoning else m.reasoning
            )
            for m in talk.messages
        )
    )


def test_no_text_ever_becomes_a_control_token(nasty: Nasty) -> None:
    """There are as many as without the texts, which a template writes that has never seen any of them."""
    compared = [
        (number, nasty.talks[index])
        for number, index in enumerate(nasty.rendered.kept.tolist())
        # Other control tokens by design: tool definitions, reasoning taken out of the content.
        if not nasty.talks[index].tools and "<think>" not in "".join(m.content for m in nasty.talks[index].messages)
        # Its texts spell nothing: a thousand turns are for the quickest templates.
        if len(nasty.talks[index].messages) <= LONG
    ]
    plain = render([without_texts(talk) for _, talk in compared], bound_in_place(nasty.template, nasty.tokenizer))
    assert len(plain.tokens) == len(compared) > 55
    control = np.array(sorted(set(nasty.tokenizer.control_ids.values())))
    for place, (number, talk) in enumerate(compared):
        own, expected = (r.tokens.conversation(at).ids for r, at in ((nasty.rendered, number), (plain, place)))
        assert np.isin(own, control).sum() == np.isin(expected, control).sum(), talk.where


def test_weights_of_messages_switch_training_off() -> None:
    tokenizer = byte_tokenizer(find_template("chatml").control_tokens)
    for case, trains in (("weights_all_zero", False), ("extra_fields", False), ("two_assistants_in_a_row", True)):
        tokens = render([CONVERSATIONS[case]], "chatml", tokenizer).tokens
        assert bool(find_policy("assistant").run_weights(tokens).any()) is trains, case
