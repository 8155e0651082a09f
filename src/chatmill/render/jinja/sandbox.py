"""The environment chat templates run in: it renders as transformers does, in a sandbox, with limits.

Templates are untrusted code. They see plain data only, change nothing, and stop at a number of steps and characters
that no honest template reaches. The limits count steps, not seconds, so that a template ends the same way everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import date
from functools import lru_cache
from types import CodeType, GeneratorType
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context, LoopContext, Macro

from chatmill.errors import ChatmillError, ConfigError
from chatmill.render.jinja.counting import CALL_STEPS, CountingSandbox, refuse_address
from chatmill.render.jinja.limits import (
    MADE_ITEM_BYTES,
    MAX_MADE,
    MESSAGE_BYTES,
    MESSAGE_STEPS,
    SCALARS,
    Budget,
    LimitError,
    length_of,
)
from chatmill.render.jinja.operations import FILTERS, OF_OTHERS, OF_TEXTS, charge
from chatmill.render.jinja.template_code import compute_plain_constants_alone, refuse_long_source
from chatmill.render.official_harmony import tools_text

MAX_STEPS = 1_000_000
"""Steps of one rendering, without those that each message adds. Real templates take about a hundred for a message."""
OF_CONSTANTS = (100_000, 1 << 20)
"""Steps and bytes for constants when a template is compiled; what takes more is computed when it runs."""
OF_PYTHON = (bytes, int, float, list, tuple, dict, range, set, frozenset, type, GeneratorType)
"""Whose methods have to be in the table of operations."""
WEIGHING_TESTS = frozenset(
    {"eq", "==", "equalto", "ne", "!=", "gt", ">", "greaterthan", "ge", ">=", "lt", "<", "lessthan", "le", "<="}
    | {"upper", "lower", "sameas", "filter", "test"}
)
"""Tests that look into what they are given."""
MAX_DATE_FORM = 1_000
"""Characters of what says how a date is written."""
MAX_SAID = 10_000
"""Characters of what a template says when it refuses a conversation."""
FAILURES = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, NameError)
"""How a template fails on a conversation; a name that Python lacks is `inf`, which Jinja writes for 1e999."""
OF_MAPPINGS = frozenset(dir(dict))
"""Names that mean an attribute of a mapping, not one of its keys."""
PLAIN_METHODS = frozenset({"strip", "lstrip", "rstrip", "startswith", "endswith", "split", "lower", "upper", "replace"})
"""Methods of texts that are safe."""


class MissingDateError(ConfigError):
    """A template asks for the date, and the recipe has none."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`: accepted, and without effect on the text."""

    tags = {"generation"}  # noqa: RUF012 (the base class has a plain set)
    environment: PlainSandbox

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _dict(*arguments: Any, **named: Any) -> dict[Any, Any]:
    """`dict(...)` without the attributes of the type."""
    return dict(*arguments, **named)


class _Namespace(jinja2.utils.Namespace):
    """A namespace that refuses names which begin with an underscore."""

    def __init__(*arguments: Any, **named: Any) -> None:
        self, rest = arguments[0], arguments[1:]
        attributes = dict(*rest, **named)
        for name in attributes:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


MISSING = object()
OF_JINJA = frozenset({"_block_vars", "_loop_vars"})


def is_holder(callable_: object) -> bool:
    """Return whether a callable only keeps what it is given, or hands it to the template."""
    return callable_ is _Namespace or callable_ is _dict or isinstance(callable_, Macro)


def own_of(named: dict[str, Any]) -> dict[str, Any]:
    """Return what a template itself gives a call by name; Jinja adds the variables around it."""
    if named.keys() <= OF_JINJA:
        return {}
    return {name: value for name, value in named.items() if name not in OF_JINJA}


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no names with an underscore in front: {name!r}")


class PlainSandbox(CountingSandbox):
    """Renders templates on plain values, as transformers does, within limits: the reference of all proofs."""

    mappings: tuple[Any, ...] = (dict,)
    objects: tuple[Any, ...] = (LoopContext, _Namespace)
    """What a template may read every attribute of that does not begin with an underscore."""

    def __init__(self, today: date | None = None) -> None:
        """`today` is the date a template gets; asking without one is an error."""
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols], cache_size=0
        )
        self.budget = Budget(*OF_CONSTANTS)
        self._today = today
        self.asked_for_date = False
        self.globals.pop("lipsum")
        self.globals |= {
            "raise_exception": self._raise_exception,
            "strftime_now": self._strftime_now,
            "dict": _dict,
            "namespace": _Namespace,
        }
        filters = self._all_filters()
        self.filters = {
            name: self.limited(filters[name], operation) for name, operation in FILTERS.items() if name in filters
        }
        tests: dict[str, Any] = dict(self.tests)
        self.tests |= {name: self._weighing(tests[name]) for name in WEIGHING_TESTS & tests.keys()}
        self.tests["in"] = self.is_in

    def _all_filters(self) -> dict[str, Callable[..., Any]]:
        """Return all filters, without limits."""
        own = {"tojson": self._tojson, "harmony_tools": tools_text, "join": self._join}
        as_texts = {name: _of_texts(dict[str, Any](self.filters)[name]) for name in ("string", "safe")}
        return {**self.filters, **own, **as_texts}

    def template(self, source: str) -> jinja2.Template:
        """Return a template that runs here."""
        code = _code_of(type(self), source)  # type: ignore[arg-type]  # mypy takes no class for hashable
        return self.template_class.from_code(self, code, self.make_globals(None), None)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Do as Jinja does, with a text that is not too long."""
        refuse_long_source(source, self.lexer.tokeniter(source, name))
        return super()._parse(source, name, filename)

    def begin(self, count: int) -> None:
        """Begin to count what a rendering of so many messages takes."""
        self.budget = Budget(MAX_STEPS + MESSAGE_STEPS * count, MAX_MADE + MESSAGE_BYTES * count)

    def render(self, template: jinja2.Template, values: dict[str, Any]) -> str:
        """Return the text of a template; every failure of it is a `jinja2.TemplateError`."""
        self.begin(_count_of(values.get("messages")))
        failure: jinja2.TemplateError
        try:
            return self.concat(template.root_render_func(template.new_context(values)))
        except RecursionError:
            failure = LimitError("it calls itself, or puts lists into lists, without end")
        except MemoryError:
            failure = LimitError("it takes more memory than there is")
        except ChatmillError:  # the recipe lacks a date: no fault of this conversation
            raise
        except (*FAILURES, RuntimeError, AssertionError) as error:
            failure = _failure(template, error)
            failure.__context__ = None
        try:
            raise failure.with_traceback(None)  # without the frames, which hold all that was made
        finally:
            del failure  # the error has this frame, which must not have the error

    # ---- the template's language

    def getattr(self, obj: Any, attribute: str) -> Any:  # noqa: D102
        if type(obj) in self.mappings and attribute not in OF_MAPPINGS:  # what Jinja comes to in the end, at once
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if type(obj) in self.objects and not attribute.startswith("_"):
            value = getattr(obj, attribute, MISSING)
            return self.undefined(obj=obj, name=attribute) if value is MISSING else value
        if type(obj) is str and attribute in PLAIN_METHODS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call(self, context: Context, callable_: Any, *arguments: Any, **named: Any) -> Any:  # noqa: D102
        budget = self.budget
        budget.steps_left -= CALL_STEPS + len(arguments)
        if budget.steps_left < 0:
            budget.refuse()
        owner = getattr(callable_, "__self__", None)
        if isinstance(owner, str):
            operation = OF_TEXTS.get(callable_.__name__)
        elif isinstance(owner, OF_PYTHON):
            operation = OF_OTHERS.get(callable_.__name__)
        else:
            self._weigh_call(callable_, arguments, named)
            return self.called(context, callable_, owner, arguments, named)
        if operation is None:
            raise SecurityError(f"the method {callable_.__name__!r} is not supported: no chat template needs it")
        if operation.gathers and arguments and hasattr(type(arguments[0]), "__next__"):
            arguments = (list(arguments[0]), *arguments[1:])
        growth = charge(operation, owner, (*arguments, *own_of(named).values()) if named else arguments, budget)
        return self.finished(self.called(context, callable_, owner, arguments, named), owner, growth)

    def called(
        self, context: Context, callable_: Any, owner: Any, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """Return what a callable gives, after it was counted."""
        if type(owner) is str and callable_.__name__ in PLAIN_METHODS:
            return callable_(*arguments, **own_of(named)) if named else callable_(*arguments)
        return super().call(context, callable_, *arguments, **named)

    def _weigh_call(self, callable_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Count what a function of ours, or of Jinja, is given and looks into; macros only hand it on."""
        if isinstance(callable_, Macro):
            return
        is_keeping = callable_ is _dict or callable_ == self.globals["namespace"]
        for argument in arguments if is_keeping else (*arguments, *own_of(named).values()):
            if is_keeping and isinstance(argument, dict):
                self.budget.step(length_of(argument) // 10)
                self.budget.make(2 * MADE_ITEM_BYTES * length_of(argument))
            elif type(argument) not in SCALARS:
                self.weighed(argument)

    def _weighing(self, test: Callable[..., Any]) -> Callable[..., Any]:
        """Return a test that looks into what it is given, and counts it."""

        def weighing(*values: Any) -> Any:
            self.budget.step(sum(str.__len__(value) for value in values if isinstance(value, str)) // 100)
            return test(*map(self.weighed, values))

        return weighing

    def _raise_exception(self, message: object = "") -> str:
        said = self.text_of(message)
        raise jinja2.TemplateError(said if len(said) <= MAX_SAID else said[:MAX_SAID] + "…")

    def _strftime_now(self, form: str) -> str:
        self.asked_for_date = True
        if self._today is None:
            raise MissingDateError(
                "the template asks for today's date; set `date` in the recipe (--set date=YYYY-MM-DD), so that the "
                "build gives the same bytes on any day"
            )
        if isinstance(form, str) and str.__len__(form) > MAX_DATE_FORM:
            raise LimitError(f"a form of a date with more than {MAX_DATE_FORM:,} characters")
        self.budget.step(2 * len(form))
        return self.counted_text(self._today.strftime(form))

    @staticmethod
    def _tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        options = {"indent": indent, "separators": separators and tuple(separators), "sort_keys": sort_keys}
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    def _join(self, value: Iterable[Any], d: Any = "", attribute: str | int | None = None) -> str:
        if attribute is not None:
            value = map(make_attrgetter(self, attribute), value)
        separator = self.text_of(d)
        return separator.join(self.counted_texts(map(self.text_of, value), separator))


def _of_texts(filter_: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a filter that writes a value, but none that has no text."""

    def of_texts(value: Any) -> Any:
        refuse_address(value)
        return filter_(value)

    return of_texts


def _count_of(messages: Any) -> int:
    """Return the number of messages, of which nothing is asked."""
    return messages.size() if hasattr(messages, "size") else length_of(messages)


@lru_cache(maxsize=128)
def _code_of(kind: type[PlainSandbox], source: str) -> CodeType:
    """A template's code, which takes long to write and depends on nothing but its text and the kind of the sandbox."""
    environment = kind()
    compute_plain_constants_alone(environment)
    return environment.compile(source)


def _failure(template: jinja2.Template, error: Exception) -> jinja2.TemplateError:
    """Return how a template failed, with its line that an error comes from."""
    is_said = isinstance(error, jinja2.TemplateError)
    failure: Any = error if is_said else jinja2.TemplateError(f"{type(error).__name__}: {error}")
    failure.lineno, step = None, error.__traceback__
    while step is not None:
        if step.tb_frame.f_globals.get("environment") is template.environment:
            failure.lineno = template.get_corresponding_lineno(step.tb_lineno)
        step = step.tb_next
    return failure  # type: ignore[no-any-return]
