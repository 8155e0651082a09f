"""Runs templates on traced values: the text is the same, and knows where it came from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import date
from types import BuiltinFunctionType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import Frame
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context

from chatmill.render.jinja.formats import by_braces, by_percent
from chatmill.render.jinja.limits import refuse_growth, refuse_wide
from chatmill.render.jinja.markup import SafeText, escaped, made_of_safe, method_of, safe, unmarked
from chatmill.render.jinja.sandbox import PASSED, PlainSandbox, is_holder, own_of
from chatmill.render.jinja.traced import (
    Measure,
    RecordValue,
    Traced,
    joined,
    lost,
    made_of,
    note_exact,
    only_texts,
    plain_text,
    watched,
)
from chatmill.render.jinja.traced_values import (
    length_of,
    settled,
    settled_length,
    text_of,
    without_origin,
    written_as_json,
)
from chatmill.render.official_harmony import tools_text

TEXT_FILTERS = frozenset({"trim", "replace", "upper", "lower", "capitalize"})
"""Filters that make texts of what they are given, and call a method of the first."""
PASSING_FILTERS = frozenset(
    {"default", "d", "first", "last", "list", "map", "select", "reject", "selectattr", "rejectattr", "items", "attr"}
    | {"batch", "slice", "dictsort", "sort", "unique", "groupby", "reverse", "min", "max", "random", "sum", "join"}
)
"""Filters that hand values on, or compare them by their own operators; texts keep their origin in them."""
TEXTS = frozenset({str, Traced})


class _TracingGenerator(PlainSandbox.code_generator_class):  # type: ignore[valid-type, misc]
    """Writes templates that make texts of values with their origins."""

    written = "environment.text_of"

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write(f"{self.written}(")


class TracingSandbox(PlainSandbox):
    """Renders templates on traced values: the text is the same, and knows where it came from."""

    code_generator_class = _TracingGenerator
    text_of = staticmethod(text_of)

    def __init__(self, today: date | None = None) -> None:
        """`today` as for `PlainSandbox`."""
        super().__init__(today)
        self.filters |= {name: _tracing(filter_, name) for name, filter_ in self.filters.items()}
        self.filters |= {
            "tojson": self._tojson,
            "join": _join_filter,
            "harmony_tools": _harmony_tools,
            "length": length_of,
            "count": length_of,
            "string": lambda value: value if isinstance(value, SafeText) else text_of(value),
            "safe": safe,
            "e": escaped,
            "escape": escaped,
        }
        self.tests |= {"sameas": _is_same, "divisibleby": _is_divisible}
        self.globals["raise_exception"] = _raise_exception

    def concat(self, texts: Iterable[str]) -> str:
        """Texts one behind the other, with their origins."""
        return self.checked(joined(texts))

    def is_in(self, value: Any, container: Any) -> bool:
        """The operator `in`, also for a traced text in a plain one."""
        if isinstance(value, str) and isinstance(container, str | dict):
            note_exact(value)
        return value in container

    def call(self, context: Context, callable_: Any, *arguments: Any, **named: Any) -> Any:  # noqa: D102
        owner = getattr(callable_, "__self__", None)
        if not isinstance(owner, str):
            return self._called(context, callable_, owner, arguments, named)
        try:
            return self._called(context, callable_, owner, arguments, named)
        except Exception:  # it depends on the text that there is an error
            note_exact([owner, arguments, own_of(named)])
            raise

    def _called(
        self, context: Context, callable_: Any, owner: Any, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        if not is_holder(callable_):
            plain = settled if isinstance(owner, str) else settled_length
            arguments, named = tuple(map(plain, arguments)), {name: plain(one) for name, one in named.items()}
        if isinstance(owner, SafeText):
            if callable_.__name__ == "encode" and note_exact(owner):
                raise ValueError("the bytes of a text are not followed")
            method = method_of(owner, callable_.__name__)
            return made_of_safe(super().call(context, method, *arguments, **named), [owner, *arguments, own_of(named)])
        if isinstance(owner, str):  # its methods take a safe text as any other
            arguments = tuple(str(one) if isinstance(one, SafeText) else one for one in arguments)
        if type(owner) is str and any(map(_may_be_traced, (*arguments, *own_of(named).values()))):
            return self._of_plain_text(context, callable_, arguments, own_of(named))
        if isinstance(callable_, BuiltinFunctionType) and not isinstance(owner, str | dict | list | tuple):
            return self._of_python(context, callable_, arguments, own_of(named))
        return super().call(context, callable_, *arguments, **named)

    def _of_plain_text(self, context: Context, method: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """A method of a text of the template, given texts of the record."""
        if method.__name__ == "join" and not named:
            return self.checked(joined(only_texts(*arguments), method.__self__))
        if method.__name__ == "replace" and not named:
            refuse_growth("replace", [method.__self__, *arguments])
            return self.checked(_replaced(method.__self__, *arguments))
        return self._checked_value(lost_result(super().call(context, method, *arguments, **named), [arguments, named]))

    def _of_python(self, context: Context, function: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """A function of Python that takes texts without asking them."""
        if note_exact([arguments, named]) and function.__name__ == "maketrans":
            raise ValueError("a table of characters is not followed")
        return super().call(context, function, *arguments, **named)

    def wrap_str_format(self, value: Any) -> Any:
        """The method `format` of a text, with the origins of what it puts in."""
        if not isinstance(getattr(value, "__self__", None), str):
            return None
        limited = super().wrap_str_format(method_of(value.__self__, value.__name__))
        if limited is None:
            return None
        form, is_map = value.__self__, value.__name__ == "format_map"

        def traced(*arguments: Any, **named: Any) -> Any:
            refuse_growth("format", [form, *arguments, *named.values()])
            note_exact(form)
            if isinstance(form, SafeText):
                return made_of_safe(watched(limited, *arguments, **named), [form, *arguments, named])
            made = by_braces(form, arguments, named) if type(form) is str and not is_map else None
            if made is None:
                note_exact([arguments, named])
                return lost_result(watched(limited, *arguments, **named), [form, *arguments, named])
            return self.checked(made)

        return traced

    def getattr(self, obj: Any, attribute: str) -> Any:  # noqa: D102
        if isinstance(obj, Traced) and not hasattr(str, attribute):
            obj = plain_text(obj)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:  # noqa: D102
        if isinstance(argument, str) and note_exact(argument):
            argument = plain_text(argument)
        return super().getitem(obj, settled(argument))

    def border(self, value: Any) -> Any:
        """A border of a slice."""
        return settled(value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: D102
        if operator == "+" and type(left) in TEXTS and type(right) in TEXTS:  # what templates do most, at once
            return self.checked(left + right)
        if isinstance(left, SafeText) or isinstance(right, SafeText):
            if operator == "+" and isinstance(left, str) and isinstance(right, str):
                return self.checked(SafeText.added(left, right))
            note_exact([left, right])
            return made_of_safe(super().call_binop(context, operator, unmarked(left), unmarked(right)), [left, right])
        if operator == "%" and isinstance(left, str):
            return self._formatted(context, left, right)
        return super().call_binop(context, operator, left, right)

    def _formatted(self, context: Context, form: str, values: Any) -> Any:
        """The operator `%` of a text."""
        refuse_growth("format", [form, values])
        made = by_percent(form, values) if type(form) is str else None
        if made is None:
            return lost_result(watched(super().call_binop, context, "%", form, values), [form, values])
        return self.checked(made)

    def _checked_value(self, value: Any) -> Any:
        return self.checked(value) if isinstance(value, str) else value

    def _strftime_now(self, form: str) -> str:
        return lost(super()._strftime_now(plain_text(form)), form)

    @staticmethod
    def _tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        indent = settled(indent)
        refuse_wide([indent] if isinstance(indent, int) else ())
        options: dict[str, Any] = {"ensure_ascii": ensure_ascii}
        if indent is not None:
            options["indent"] = indent
        if separators is not None:
            options["separators"] = tuple(separators)
        if sort_keys:
            options["sort_keys"] = True
        return written_as_json(value, options)


def lost_result(result: Any, sources: Iterable[Any]) -> Any:
    """What an operation that cannot be followed made of traced values."""
    sources = list(sources)
    if isinstance(result, str):
        return lost(result, *sources)
    note_exact(sources)
    return result


def _may_be_traced(value: Any) -> bool:
    return isinstance(value, Traced | list | tuple | dict) or hasattr(value, "__next__") or hasattr(value, "mapping")


def _tracing(filter_: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A filter that keeps origins by itself, or one whose result has lost them."""

    def traced(*arguments: Any, **named: Any) -> Any:
        arguments = (*arguments[:1], *map(settled_length, arguments[1:]))
        named = {key: settled_length(one) for key, one in named.items()}
        if name in PASSING_FILTERS:
            if name == "attr":
                note_exact([arguments[2:], named])
            return filter_(*arguments, **named)
        if any(isinstance(one, SafeText) for one in (*arguments, *named.values())):
            note_exact([one for one in (*arguments, *named.values()) if not isinstance(one, PASSED)])
            result = filter_(*map(unmarked, arguments), **{key: unmarked(one) for key, one in named.items()})
            return made_of_safe(result, [one for one in (*arguments, *named.values()) if isinstance(one, str)])
        if name == "format" and not named and type(arguments[0]) is str:
            refuse_growth(name, list(arguments))
            made = by_percent(arguments[0], arguments[1:])
            if made is not None:
                return made
        if name in TEXT_FILTERS:
            return _text_filter(name, filter_, arguments, named)
        values = [one for one in arguments if not isinstance(one, PASSED)]
        note_exact([values, named])
        plain = [one if isinstance(one, PASSED) else without_origin(one) for one in arguments]
        result = watched(filter_, *plain, **without_origin(named))
        kept = [one for one, given in zip(arguments, plain, strict=True) if given is result]
        return kept[0] if kept else lost_result(result, [values, named])

    if hasattr(filter_, "jinja_pass_arg"):
        traced.jinja_pass_arg = filter_.jinja_pass_arg  # type: ignore[attr-defined]
    return traced


def _text_filter(name: str, filter_: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    passed = [one for one in arguments if isinstance(one, PASSED)]
    values = [one if one is None or isinstance(one, int) else text_of(one) for one in arguments[len(passed) :]]
    named = {key: one if one is None or isinstance(one, int) else text_of(one) for key, one in named.items()}
    if name == "replace" and not named and len(values) > 2:
        refuse_growth(name, values)
        count = values[3] if len(values) > 3 and values[3] is not None else -1
        return _replaced(text_of(values[0]), text_of(values[1]), text_of(values[2]), count)
    if type(values[0]) is Traced:
        return filter_(*passed, *values, **named)
    return lost_result(filter_(*passed, *values, **named), [values, named])


def _replaced(text: str, old: str, new: str, count: Any = -1) -> str:
    """As `str.replace`, of any texts."""
    if type(text) is not str or type(old) is not str or not old:
        made = text.replace(old, new, count)
        return made if isinstance(text, Traced) else lost(made, old, new)
    return joined(text.split(old, count), new)


def _harmony_tools(tools: Any) -> str:
    if not isinstance(tools, RecordValue):
        return tools_text(tools)
    note_exact(tools)  # what the official renderer makes of them cannot be followed
    text = tools_text(tools._raw)
    return made_of(text, ("const", text, tools._path), tools._notes)


@jinja2.pass_environment
def _join_filter(
    environment: jinja2.Environment, values: Iterable[Any], d: Any = "", attribute: str | int | None = None
) -> str:
    if attribute is not None:
        values = map(make_attrgetter(environment, attribute), values)
    return joined(map(text_of, values), text_of(d))


def _raise_exception(message: object = "") -> str:
    raise jinja2.TemplateError(text_of(message))


def _is_same(value: Any, other: Any) -> bool:
    """The test `sameas`: every look at a value of the record makes a new traced one."""
    note_exact([value, other])
    ours, theirs = (one._raw if isinstance(one, RecordValue | Measure) else one for one in (value, other))
    return ours is theirs


def _is_divisible(value: Any, number: Any) -> bool:
    """The test `divisibleby`, which makes a format of a text."""
    note_exact([value, number])
    return bool(unmarked(without_origin(value)) % without_origin(number) == 0)
