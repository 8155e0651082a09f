"""The declared views of templates: they describe every token of a message, and refuse every other one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.build.proof.reference import Reference
from chatmill.build.proof.views import VIEWS, first_difference
from chatmill.build.recipe import Recipe
from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.core.kinds import PARTS, Part
from chatmill.render.registry import TEMPLATES, find_template
from chatmill.tokenizer.byte_level import ByteTokenizer
from chatmill.tokenizer.load import load_tokenizer

TEXTS = st.text(st.sampled_from("ab \n\r\té\u0301\u0338<|im_end|>中"), max_size=12)
THINKING = st.builds("{}<think>{}</think>{}".format, TEXTS, TEXTS, TEXTS) | TEXTS


@st.composite
def chats(draw: st.DrawFn) -> Conversation:
    messages = [Message(Role.USER, draw(TEXTS))]
    for _ in range(draw(st.integers(1, 4))):
        calls = draw(st.lists(st.builds(ToolCall, st.sampled_from(["f", "a.b"]), st.just('{"x": 1}')), max_size=2))
        reasoning = draw(st.none() | TEXTS)
        messages.append(Message(Role.ASSISTANT, draw(THINKING), reasoning, tuple(calls)))
        if draw(st.booleans()):
            messages.append(Message(Role.USER, draw(TEXTS)))
    return Conversation(tuple(messages), id="x")


def reference_of(template: str, tokenizer: Any) -> Reference:
    options = Recipe(sources=[{"path": "-"}], tokenizer="bytes", template=template)  # type: ignore[list-item]
    return Reference(options, tokenizer)


def plain(conversation: Conversation, template: str) -> Conversation:
    """The conversation without what a template cannot write."""
    if find_template(template).writes_tool_calls:
        return conversation
    return conversation._replace(messages=tuple(m._replace(tool_calls=()) for m in conversation.messages))


@pytest.fixture(scope="module")
def references() -> dict[str, Reference]:
    made = {}
    for name in TEMPLATES:
        added = ByteTokenizer().with_added(find_template(name).control_tokens)
        made[name] = reference_of(name, load_tokenizer("o200k") if name == "harmony" else added)
    return made


def test_every_built_in_template_has_a_view() -> None:
    assert set(VIEWS) == set(TEMPLATES)


@settings(max_examples=30)
@given(chats(), st.data())
def test_views_describe_every_answer_and_nothing_else(
    references: dict[str, Reference], conversation: Conversation, data: st.DataObject
) -> None:
    for name, reference in references.items():
        chat = plain(conversation, name)
        derived = reference.derive(chat)
        for index, message in enumerate(chat.messages):
            view = VIEWS[name](chat, index)
            if view is None:
                assert message.role is not Role.ASSISTANT
                continue
            places = [place for place, owner in enumerate(derived.messages) if owner == index]
            ids, kinds = ([column[place] for place in places] for column in (derived.ids, derived.kinds))
            assert first_difference(view, ids, kinds, reference.tokenizer) is None, (name, index)
            at = data.draw(st.integers(0, len(ids) - 1))
            changed = [*ids[:at], ids[at] ^ 1, *ids[at + 1 :]]
            assert first_difference(view, changed, kinds, reference.tokenizer) is not None
            other = (kinds[at] % PARTS) % Part.DOCUMENT + 1
            labelled = [*kinds[:at], kinds[at] // PARTS * PARTS + other, *kinds[at + 1 :]]
            assert first_difference(view, ids, labelled, reference.tokenizer) == (
                at,
                f"the token is labelled {Part(other).name.lower()}, and the text says "
                f"{Part(kinds[at] % PARTS).name.lower()}",
            )
            assert first_difference(view, ids[:-1], kinds[:-1], reference.tokenizer) is not None
            assert first_difference(view, [*ids, ids[-1]], [*kinds, kinds[-1]], reference.tokenizer) is not None
