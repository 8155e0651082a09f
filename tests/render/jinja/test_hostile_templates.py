"""Templates are untrusted code: each of these ends in one clear error, soon and in little memory."""

# ruff: noqa: E501 (a template is one line)

from __future__ import annotations

import tracemalloc

import pytest

from chatmill.core.conversation import Conversation, Message, Role
from chatmill.errors import ChatmillError, ConfigError, RecordError
from chatmill.render.jinja import sandbox
from chatmill.render.render import render
from tests.render.jinja.at_hand import of_text

CONVERSATION = Conversation((Message(Role.USER, "Hello, you."), Message(Role.ASSISTANT, "Hello.")))
DOUBLING = (
    "{% set ns = namespace(t='xxxxxxxxxx') %}{% for i in range(40) %}{% set ns.t = DOUBLE %}{% endfor %}{{ ns.t }}"
)
ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "nested loops over record text": "{% for a in messages[0].content * 9000 %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "a macro that calls itself": "{% macro f(x) %}{{ f(x + 1) }}{% endmacro %}{{ f(0) }}",
    "two macros that call each other": "{% macro f() %}{{ g() }}{% endmacro %}{% macro g() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a recursive loop": "{% for m in [messages] recursive %}{{ loop([m]) }}{% endfor %}",
    "a huge range": "{{ range(999999999999) | list }}",
    "a cycler in a loop": "{% set c = cycler(1, 2) %}{% for a in range(99999) %}{% for b in range(99999) %}{{ c.next() }}"
    "{% endfor %}{% endfor %}",
}
HUGE = {
    "doubling by +": DOUBLING.replace("DOUBLE", "ns.t + ns.t"),
    "doubling by ~": DOUBLING.replace("DOUBLE", "ns.t ~ ns.t"),
    "doubling of record text": DOUBLING.replace("DOUBLE", "ns.t + ns.t").replace("'xxxxxxxxxx'", "messages[0].content"),
    "doubling by join": DOUBLING.replace("DOUBLE", "[ns.t, ns.t] | join"),
    "doubling by the method join": DOUBLING.replace("DOUBLE", "''.join([ns.t, ns.t])"),
    "doubling by replace": DOUBLING.replace("DOUBLE", "ns.t.replace('x', 'xxxxxxxx')"),
    "doubling by the filter replace": DOUBLING.replace("DOUBLE", "ns.t | replace('x', 'xxxxxxxx')"),
    "doubling by format": DOUBLING.replace("DOUBLE", "'%s%s' % (ns.t, ns.t)"),
    "doubling by the filter format": DOUBLING.replace("DOUBLE", "'%s%s' | format(ns.t, ns.t)"),
    "doubling by the method format": DOUBLING.replace("DOUBLE", "'{0}{0}'.format(ns.t)"),
    "doubling by tojson": DOUBLING.replace("DOUBLE", "[ns.t, ns.t] | tojson"),
    "doubling by a set block": "{% set ns = namespace(t='xxxxxxxxxx') %}{% for i in range(40) %}{% set t %}{{ ns.t }}{{ ns.t }}"
    "{% endset %}{% set ns.t = t %}{% endfor %}{{ ns.t }}",
    "times": "{{ 'x' * 9999999999 }}",
    "times a number of many": "{{ 'x' * 99999 * 99999 }}",
    "a list times": "{{ [1] * 9999999999 }}",
    "times record text": "{{ messages[0].content * 9999999999 }}",
    "ljust": "{{ 'x'.ljust(9999999999) }}",
    "center": "{{ 'x' | center(9999999999) }}",
    "indent": "{{ 'x\ny' | indent(9999999999) }}",
    "a width in %": "{{ '%9999999999d' % 1 }}",
    "a starred width": "{{ '%*d' % (9999999999, 1) }}",
    "a width in format": "{{ '{:9999999999}'.format(1) }}",
    "a width in a nested format": "{{ '{:{w}}'.format(1, w=9999999999) }}",
    "a precision in %": "{{ '%.9999999999f' % 1.0 }}",
    "a width of a key in %": "{{ '%(a)9999999999s' % {'a': 1} }}",
    "a width after flags in %": "{{ '%-+ 09999999999d' % 1 }}",
    "a width in % that is an argument": "{{ '%*d' % (9999999999, 1) }}",
    "a power": "{{ 10 ** 10 ** 10 }}",
    "powers of powers": "{% set ns = namespace(n=10) %}{% for i in range(40) %}{% set ns.n = ns.n * ns.n %}{% endfor %}{{ ns.n }}",
    "expandtabs": "{{ '\t\t'.expandtabs(9999999999) }}",
    "zfill": "{{ 'x'.zfill(9999999999) }}",
    "tojson with an indent": "{{ [1] | tojson(indent=9999999999) }}",
    "a filling batch": "{{ [1] | batch(9999999999, 0) | list }}",
    "many slices": "{{ [1] | slice(9999999999) | list }}",
}
TRICKS = {
    "the class of a text": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "the class by attr": "{{ ''|attr('__class__') }}",
    "the class by map": "{{ ['']|map(attribute='__class__')|list }}",
    "the class of record text": "{{ messages[0].content.__class__ }}",
    "the class by format": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "the class by format_map": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "inner things of traced text": "{{ messages[0].content._atoms }}{{ messages[0].content._notes.replies }}",
    "globals of a function": "{{ raise_exception.__globals__ }}",
    "globals of a macro": "{% macro f() %}{% endmacro %}{{ f.__globals__ }}{{ f._func.__globals__ }}",
    "globals of a namespace": "{{ namespace.__init__.__globals__ }}",
    "globals of cycler": "{{ cycler.__init__.__globals__ }}",
    "globals of joiner": "{{ joiner.__init__.__globals__ }}",
    "lipsum": "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "lipsum as text": "{{ lipsum(5) }}",
    "a changed list": "{{ messages.append(messages[0]) }}",
    "a changed message": "{{ messages[0].update(role='system') }}",
    "a popped field": "{{ messages[0].pop('content') }}",
    "a cleared list": "{{ messages.clear() }}",
    "self": "{{ self.__init__.__globals__ }}{{ self._TemplateReference__context }}",
    "the environment": "{{ self.__class__ }}{{ environment.globals }}",
    "a file": "{% include '/etc/passwd' %}",
    "an import": "{% import '/etc/passwd' as x %}{{ x }}",
    "a parent": "{% extends '/etc/passwd' %}",
    "open": "{{ open('/etc/passwd').read() }}",
    "a namespace with inner names": "{% set n = namespace(__class__=1) %}{{ n.__class__ }}",
    "a generator's frame": "{{ (messages | map('upper')).gi_frame.f_globals }}",
}
DEEP = "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}"


def failure(source: str) -> ChatmillError:
    """The one error of a template, bound and run in every way."""
    with pytest.raises(ChatmillError) as caught:
        of_text(source + "{{ messages[1].content }}<|e|>", ("<|e|>",)).write(CONVERSATION)
    return caught.value


def is_one_clear_line(error: ChatmillError) -> bool:
    return isinstance(error, RecordError | ConfigError) and "\n" not in str(error).strip() and len(str(error)) < 1000


@pytest.mark.parametrize("name", ENDLESS)
def test_no_template_runs_forever(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer steps than there are, which is quicker; `test_a_hostile_template_is_one_error_in_bulk` takes all."""
    monkeypatch.setattr(sandbox, "MAX_STEPS", 200_000)
    assert is_one_clear_line(failure(ENDLESS[name]))


@pytest.mark.parametrize("name", HUGE)
def test_no_template_takes_all_memory(name: str) -> None:
    tracemalloc.start()
    try:
        error = failure(HUGE[name])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert is_one_clear_line(error)
    assert peak < 1 << 30, f"{peak >> 20} MiB"


@pytest.mark.parametrize(
    "text", ["'**%s**' % 'bold'", "'**{}**'.format('bold')", "'id 1234567: **{}**'.format('bold')"]
)
def test_stars_and_numbers_beside_a_format_are_text(text: str) -> None:
    opens = "{{ " + text + " }}"
    bound = of_text("{% for m in messages %}" + opens + "{{ m.content }}<|e|>{% endfor %}" + opens, ("<|e|>",))
    written = render([CONVERSATION], bound, add_generation_prompt=True)
    assert bound.tokenizer.decode(written.tokens.ids).endswith("**bold**")


@pytest.mark.parametrize("name", TRICKS)
def test_no_template_reaches_beyond_its_data(name: str) -> None:
    before = repr(CONVERSATION)
    try:
        template = of_text(TRICKS[name] + "|{{ messages[1].content }}<|e|>", ("<|e|>",))
        template.write(CONVERSATION)
        text = template.plain(CONVERSATION, {}, 2, prompt=False)
    except (RecordError, ConfigError):
        text = "|"
    # what is undefined prints as nothing, as everywhere in Jinja
    assert text.removesuffix("Hello.<|e|>") in ("|", "||"), text[:200]
    assert repr(CONVERSATION) == before


def test_a_deep_template_is_one_error() -> None:
    error = failure(DEEP)
    assert isinstance(error, RecordError | ConfigError)


@pytest.mark.parametrize("name", ["nested loops", "a macro that calls itself"])
def test_a_hostile_template_is_one_error_in_bulk(name: str) -> None:
    text = "{% if 'you.' in messages[0].content %}" + ENDLESS[name] + "{% endif %}{{ messages[1].content }}<|eos|>"
    rendered = render([CONVERSATION], of_text(text, ("<|eos|>",)), collect_failures=True)
    assert [error.code for _, error in rendered.failed] == ["template_refused"]
    assert "stopped" in str(rendered.failed[0][1])
