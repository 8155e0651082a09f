"""Runs templates on traced values: the text is the same, and knows where it came from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import date
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.runtime import Context

from chatmill.render.jinja.formats import by_braces, by_percent
from chatmill.render.jinja.limits import refuse_growth, refuse_wide
from chatmill.render.jinja.markup import SafeText, escaped, made_of_safe, method_of, safe, unmarked
from chatmill.render.jinja.sandbox import PlainSandbox, is_holder
from chatmill.render.jinja.traced import Traced, joined, lost, note_exact, plain_text
from chatmill.render.jinja.traced_values import (
    TracedDict,
    TracedFloat,
    TracedInt,
    TracedList,
    length_of,
    settled,
    settled_length,
    written_as_json,
)

TEXT_FILTERS = frozenset({"trim", "replace", "upper", "lower", "capitalize", "string", "safe"})
PASSING_FILTERS = frozenset(
    {"default", "d", "first", "last", "list", "map", "select", "reject", "selectattr", "rejectattr", "items", "attr"}
    | {"batch", "slice", "dictsort", "sort", "unique", "groupby", "reverse", "min", "max", "random", "sum", "join"}
)
"""Filters that hand values on, or compare them by their own operators; texts keep their origin in them."""
TEXTS = frozenset({str, Traced})


class TracingSandbox(PlainSandbox):
    """Renders templates on traced values: the text is the same, and knows where it came from."""

    def __init__(self, today: date | None = None) -> None:
        """`today` as for `PlainSandbox`."""
        super().__init__(today)
        self.filters |= {name: _tracing(filter_, name) for name, filter_ in self.filters.items()}
        self.filters |= {
            "tojson": self._tojson,
            "join": _join_filter,
            "length": length_of,
            "count": length_of,
            "string": lambda value: value if isinstance(value, SafeText) else str(value),
            "safe": safe,
            "e": escaped,
            "escape": escaped,
        }
        self.finalize = _final

    def concat(self, texts: Iterable[str]) -> str:
        """Texts one behind the other, with their origins."""
        return self.checked(joined(texts))

    def is_in(self, value: Any, container: Any) -> bool:
        """The operator `in`, also for a traced text in a plain one."""
        if isinstance(value, Traced) and type(container) is str:
            note_exact(value)
        if isinstance(value, Traced) and isinstance(container, dict):
            note_exact(value)
        return value in container

    def call(self, context: Context, callable_: Any, *arguments: Any, **named: Any) -> Any:  # noqa: D102
        owner = getattr(callable_, "__self__", None)
        if not is_holder(callable_):
            plain = settled if isinstance(owner, str) else settled_length
            arguments, named = tuple(map(plain, arguments)), {name: plain(one) for name, one in named.items()}
        if type(owner) is str and any(map(_may_be_traced, arguments)):
            if callable_.__name__ == "join":
                return self.checked(joined(arguments[0], owner))
            return self._checked_value(lost_result(super().call(context, callable_, *arguments, **named), arguments))
        if isinstance(owner, SafeText):
            plain = method_of(owner, callable_.__name__)
            return made_of_safe(super().call(context, plain, *arguments, **named), [owner, *arguments, named])
        return super().call(context, callable_, *arguments, **named)

    def wrap_str_format(self, value: Any) -> Any:
        """The method `format` of a text, with the origins of what it puts in."""
        limited = super().wrap_str_format(value)
        if limited is None or isinstance(value.__self__, SafeText):
            return limited
        form, is_map = value.__self__, value.__name__ == "format_map"

        def traced(*arguments: Any, **named: Any) -> Any:
            refuse_growth("format", [form, *arguments, *named.values()])
            made = by_braces(form, arguments, named) if type(form) is str and not is_map else None
            if made is None:
                return lost_result(limited(*arguments, **named), [form, *arguments, named])
            return self.checked(made)

        return traced

    def getitem(self, obj: Any, argument: Any) -> Any:  # noqa: D102
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
            return made_of_safe(super().call_binop(context, operator, unmarked(left), unmarked(right)), [left, right])
        if operator == "%" and isinstance(left, str):
            return self._formatted(context, left, right)
        return super().call_binop(context, operator, left, right)

    def _formatted(self, context: Context, form: str, values: Any) -> Any:
        """The operator `%` of a text."""
        refuse_growth("format", [form, values])
        made = by_percent(form, values) if type(form) is str else None
        if made is None:
            return lost_result(super().call_binop(context, "%", form, values), [form, values])
        return self.checked(made)

    def _checked_value(self, value: Any) -> Any:
        return self.checked(value) if isinstance(value, str) else value

    def _strftime_now(self, form: str) -> str:
        return super()._strftime_now(plain_text(form))

    @staticmethod
    def _tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
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
    return isinstance(value, Traced | list | tuple | dict) or hasattr(value, "__next__")


def _tracing(filter_: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A filter that keeps origins by itself, or one whose result has lost them."""

    def traced(*arguments: Any, **named: Any) -> Any:
        arguments = (*arguments[:1], *map(settled_length, arguments[1:]))
        named = {key: settled_length(one) for key, one in named.items()}
        if name in PASSING_FILTERS:
            return filter_(*arguments, **named)
        if any(isinstance(one, SafeText) for one in arguments):
            result = filter_(*map(unmarked, arguments), **{key: unmarked(one) for key, one in named.items()})
            return made_of_safe(result, [one for one in (*arguments, *named.values()) if isinstance(one, str)])
        if name == "format" and not named and type(arguments[0]) is str:
            refuse_growth(name, list(arguments))
            made = by_percent(arguments[0], arguments[1:])
            if made is not None:
                return made
        if name in TEXT_FILTERS:
            return filter_(*arguments, **named)
        values = [one for one in arguments if not isinstance(one, jinja2.Environment | Context | nodes.EvalContext)]
        if not note_exact([values, named]):
            return filter_(*arguments, **named)
        return lost_result(filter_(*arguments, **named), [values, named])

    if hasattr(filter_, "jinja_pass_arg"):
        traced.jinja_pass_arg = filter_.jinja_pass_arg  # type: ignore[attr-defined]
    return traced


def _join_filter(values: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        values = [one[attribute] if isinstance(one, dict) else getattr(one, str(attribute)) for one in values]
    return joined(map(str, values), d)


def _final(value: Any) -> Any:
    """What a template prints: texts as they are, containers and safe texts with their origins lost."""
    if isinstance(value, SafeText):
        return str(value)
    if isinstance(value, str | TracedInt | TracedFloat):
        return value
    if isinstance(value, dict | list | tuple | TracedDict | TracedList):
        return lost(str(value), value)
    return value
