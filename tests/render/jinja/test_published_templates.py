"""Published chat templates: the text is that of plain Jinja and of transformers; what is trained is proved."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from chatmill.core.conversation import Conversation
from chatmill.render.render import render
from tests.pages import DOCS
from tests.render.jinja.at_hand import bound, bundled, by_transformers, of_trl, samples
from tools.template_survey import DOCUMENTED, NOT_WRITTEN, probes, survey, texts_of

EVERY = [*bundled(), *of_trl()]
FEW = [
    *("llamacpp/GLM-4.6.jinja", "llamacpp/openai-gpt-oss-120b.jinja", "llamacpp/Qwen3.5-4B.jinja"),
    *("trl/deepseekv3.jinja", "trl/phi3.jinja", "trl/qwen3.jinja", "trl/smolvlm.jinja", "trl/gemma4_v5.jinja"),
    *("trl/cohere2.jinja", "trl/llama3_1.jinja", "vllm/tool_chat_template_mistral3.jinja"),
    *("vllm/tool_chat_template_granite.jinja", "trl/nemotron_3_super.jinja", "axolotl/alpaca.jinja"),
]


def same_text_everywhere(name: str, conversations: Sequence[Conversation]) -> None:
    template = bound(name)
    written = 0
    for conversation in conversations:
        for options in template.choices({}):
            for prompt in (False, True):
                traced, plain = texts_of(template, conversation, options, prompt=prompt)
                assert traced == plain, f"{name}: {conversation.id}"
                assert plain == by_transformers(template, conversation, options, prompt=prompt), conversation.id
                written += plain is not None
    assert written, f"{name} writes none of them"


def proved_or_refused(name: str, conversations: Sequence[Conversation]) -> None:
    template = bound(name)
    found = survey(template, conversations)
    assert found.failures == []
    assert found.records == len(conversations) == found.proved + sum(found.reasons.values())
    assert set(found.reasons) <= DOCUMENTED
    rendered = render(conversations, template, collect_failures=True)
    assert len(rendered.failed) == sum(found.reasons.values())
    assert len(rendered.kept) == found.rows
    assert int(rendered.turns.sum()) == found.answers


SLOWLY = [pytest.param(name, 12, marks=pytest.mark.slow) for name in EVERY]


@pytest.mark.parametrize(("name", "count"), [*((name, 1) for name in FEW), *SLOWLY])
def test_a_template_has_the_text_of_transformers_and_proves_or_refuses_every_record(name: str, count: int) -> None:
    same_text_everywhere(name, [*probes(), *(samples(1)[::4] if count == 1 else samples(4))])
    proved_or_refused(name, [*probes(), *(samples(1)[FEW.index(name) % 4 :: 4] if count == 1 else samples(count))])


def test_there_are_many_of_them_and_every_reason_is_documented() -> None:
    assert len(bundled()) >= 60
    assert len(EVERY) >= 95
    page = (DOCS / "template-table.md").read_text()
    assert all(f"`{reason}`" in page for reason in DOCUMENTED)
    assert NOT_WRITTEN < DOCUMENTED
