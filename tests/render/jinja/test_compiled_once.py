"""A template's text is compiled once in a process, whatever dates and options it then runs with."""

from __future__ import annotations

import datetime

import pytest

from chatmill.core.conversation import Conversation, Message, Role
from chatmill.render.jinja.options import TemplateOptions
from chatmill.render.jinja.sandbox import PlainSandbox, _code_of
from chatmill.render.jinja.tracing_sandbox import _hooked_code
from chatmill.render.model_template import JinjaSource, ModelTemplate, _names_read_by
from chatmill.tokenizer.byte_level import byte_tokenizer

TEXT = "{{ strftime_now('%Y') }} {{ who }}{% for m in messages %}<{{ m.content }}|compiled once>{% endfor %}"


def test_other_dates_and_options_parse_and_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    source = JinjaSource(name="t", text=TEXT, path="t", stop_tokens=("|compiled once>",))
    _code_of.cache_clear()
    _hooked_code.cache_clear()
    _names_read_by.cache_clear()
    parsed: list[str] = []
    parse = PlainSandbox.parse
    monkeypatch.setattr(PlainSandbox, "parse", lambda self, text: parsed.append(text) or parse(self, text))
    for who, year in (("x", 2025), ("y", 2026)):
        given = TemplateOptions(today=datetime.date(year, 1, 2), options={"who": who})
        talk = Conversation((Message(Role.USER, "q"), Message(Role.ASSISTANT, "a")))
        template = ModelTemplate(source, byte_tokenizer(["|compiled once>"]), given)
        assert template.plain(talk, {"who": who}, 2, prompt=False).startswith(f"{year} {who}<q|")
        assert "".join(span.text for span in template.text_documents(talk).documents[0].spans).startswith(
            f"{year} {who}<"
        )
    assert _code_of.cache_info().misses == _hooked_code.cache_info().misses == 1
    assert parsed == [TEXT, TEXT], "for the names that it reads, and for its loops"
