"""The part of the sandbox that counts: steps are taken from a budget, and what is made, before it is done."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from markupsafe import Markup

from chatmill.render.jinja.limits import (
    ITEM_BYTES,
    MAX_BITS,
    MAX_WIDTH,
    SCALARS,
    TEXT_BYTES,
    Budget,
    LimitError,
    length_of,
    measured,
    refuse_length,
    text_size,
    values_inside,
)
from chatmill.render.jinja.operations import OPERATORS, SMALL, Operation, charge, search_steps
from chatmill.render.jinja.template_code import CountingGenerator

CALL_STEPS, FILTER_STEPS, ITEM_STEPS, TURN_STEPS = 12, 6, 6, 4
"""Steps of a call, of a filter, of an item that is taken from a filter which gives one after another, and of a turn."""
PASSED = (jinja2.Environment, Context, nodes.EvalContext)
"""What a filter is given besides the values of the template."""
NUMBERS = (int, float)
BUILT_IN = frozenset({str, list, tuple, dict})
DIGITS = re.compile(r"\d+")
_OF_ADDRESSES: tuple[Any, ...] = (object, FunctionType, BuiltinFunctionType, MethodType, GeneratorType)
ADDRESSES = frozenset(kind.__repr__ for kind in _OF_ADDRESSES)
"""What writes a value as its place in memory, which is another one at every run."""


class _CountedFields(SandboxedFormatter):
    """Writes the fields of a format one by one, each of them counted."""

    _env: CountingSandbox

    def convert_field(self, value: Any, conversion: Any) -> Any:
        self._env.write_value(value)
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        widths = [int(digits[:10]) for digits in DIGITS.findall(format_spec)]
        if max(widths, default=0) > MAX_WIDTH:
            raise LimitError("a format string with a width of that size")
        self._env.write_value(value)
        self._env.budget.step(CALL_STEPS + sum(widths) // SMALL)
        return self._env.counted_text(super().format_field(value, format_spec), sum(widths))


class _EscapedFields(_CountedFields, SandboxedEscapeFormatter):
    """The same, into a text that is called safe."""


def refuse_address(value: Any) -> None:
    """Refuse to write what Python writes as its place in memory."""
    kind: Any = type(value)
    if kind.__repr__ in ADDRESSES and kind.__str__ is object.__str__:
        raise SecurityError(f"a value of the type {kind.__name__} has no text that is the same at every run")


def _compared_with(text: str, container: Any) -> int:
    """Return the characters that a text is compared with in a list: texts of another length are told by that."""
    size = str.__len__(text)
    if size <= SMALL or not isinstance(container, list | tuple):
        return 0
    items = list.__iter__(container) if isinstance(container, list) else tuple.__iter__(container)
    return size * sum(1 for item in items if isinstance(item, str) and str.__len__(item) == size)


class CountingSandbox(ImmutableSandboxedEnvironment):
    """A sandbox in which every operation is counted."""

    code_generator_class = CountingGenerator
    intercepted_binops = frozenset({"+", "-", "*", "**", "%"})
    budget: Budget
    texts: frozenset[type[str]] = frozenset({str})
    """Types of texts that are added as they are."""

    # ---- what the code of a template calls

    def turned(self, steps: int, made: int) -> str:
        """Count a turn of a loop, or of a macro."""
        budget = self.budget
        budget.steps_left -= TURN_STEPS + steps
        budget.made_left -= made
        if budget.steps_left < 0 or budget.made_left < 0:
            budget.refuse()
        return ""

    def counted(self, values: Iterable[Any], test: int) -> Any:
        """Return what a loop goes over; `test` is what its test takes for each item. Turns count themselves."""
        self.budget.step(1 + test * length_of(values))
        return self._tested(values, test) if test and hasattr(type(values), "__next__") else values

    def _tested(self, values: Iterable[Any], steps: int) -> Iterator[Any]:
        for value in values:
            self.budget.step(steps)
            yield value

    def weighed(self, value: Any) -> Any:
        """Return a value that is compared or hashed, after counting all that is in it."""
        if type(value) in SCALARS or isinstance(value, jinja2.Undefined):
            return value
        if isinstance(value, str):
            self.budget.step(str.__len__(value) // SMALL)
        else:
            whole = measured((value,), self.budget)
            self.budget.step(whole.items + whole.size // SMALL)
        return value

    def text_of(self, value: Any) -> str:
        """Return a value as it is written."""
        if type(value) is str:
            return value
        self.write_value(value)
        return str(value)

    def write_value(self, value: Any) -> None:
        """Count a value that is written."""
        if type(value) in SCALARS or isinstance(value, (str, jinja2.Undefined)):
            return
        whole = measured((value,), self.budget)
        for inner in values_inside(value):
            refuse_address(inner)
        self.budget.step(4 + 2 * whole.items + whole.size // 50)
        self.budget.make(TEXT_BYTES + whole.written)

    def concat(self, texts: Iterable[str]) -> str:
        """Texts one after another."""
        return "".join(self.counted_texts(texts))

    def counted_texts(self, texts: Iterable[str], separator: str = "") -> Sequence[str]:
        """Return texts that are joined, after counting them."""
        pieces = texts if type(texts) is tuple else list(texts)
        characters = sum(map(str.__len__, pieces)) + str.__len__(separator) * len(pieces)
        if characters > SMALL:
            refuse_length(characters)
            self.budget.step(characters // SMALL)
            if not (str.isascii(separator) and all(map(str.isascii, pieces))):
                characters *= 2
        self.budget.step(len(pieces) // 2)
        self.budget.make(TEXT_BYTES + characters)
        return pieces

    def is_in(self, value: Any, container: Any) -> bool:
        """Return the operator `in`."""
        is_short = type(container) in BUILT_IN and len(container) <= SMALL
        if is_short and isinstance(value, str) and str.__len__(value) <= SMALL:
            return value in container
        if isinstance(container, str) and isinstance(value, str):
            if str.__len__(container) > SMALL:
                self.budget.step(search_steps(str.__len__(container), str.__len__(value)))
        elif isinstance(value, str):
            self.budget.step(length_of(container) // 10 + _compared_with(value, container) // SMALL)
        elif type(value) in SCALARS:
            self.budget.step(length_of(container) // 10)
        else:
            whole = measured((value,), self.budget)
            self.budget.step((1 + whole.items + whole.size // SMALL) * (1 + length_of(container)) // 10)
        return value in container

    def sliced(self, obj: Any, start: Any, stop: Any, step: Any) -> Any:
        """Return the operator `[start:stop:step]`."""
        borders = slice(start, stop, step)
        size = length_of(obj)
        if size <= SMALL:
            return self.finished(obj[borders], obj, ITEM_BYTES * size)
        count = len(range(*borders.indices(size)))
        growth = count * (2 if isinstance(obj, str) else ITEM_BYTES)
        self.budget.step(count // SMALL)
        self.budget.refuse_above(growth)
        return self.finished(obj[borders], obj, growth)

    # ---- operations

    def finished(self, made: Any, of: Any, growth: int) -> Any:
        """Return what an operation has made of a value, after counting it; `growth` is what it was expected to be."""
        kind = type(made)
        if made is of or kind in SCALARS:
            return made
        if kind is str or isinstance(made, str):
            return self.counted_text(made)
        if hasattr(type(made), "__next__"):
            return self._walked(made)
        self.budget.make(growth)
        return made

    def counted_text(self, text: str, more: int = 0) -> str:
        """Return a text, after counting it; `more` is counted too."""
        size = str.__len__(text)
        if size > SMALL or type(text) is not str:
            refuse_length(size)
            size = text_size(text)
        budget = self.budget
        budget.made_left -= TEXT_BYTES + size + more
        if budget.made_left < 0:
            budget.refuse()
        return text

    def _walked(self, values: Iterator[Any]) -> Iterator[Any]:
        for value in values:
            self.budget.step(ITEM_STEPS)
            yield value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: D102
        if operator == "+" and type(left) is str and type(right) is str and len(left) + len(right) <= SMALL:
            return self.counted_text(left + right)
        if operator == "+" and type(left) in self.texts and type(right) in self.texts:
            characters = str.__len__(left) + str.__len__(right)
            if characters > SMALL:
                refuse_length(characters)
                self.budget.step(characters // SMALL)
                self.budget.refuse_above(text_size(left) + text_size(right))
            return self.counted_text(left + right)
        if operator == "+" and type(left) is list and type(right) is list:
            count = len(left) + len(right)
            self.budget.step(count // 100)
            self.budget.make(TEXT_BYTES + ITEM_BYTES * count)
            return self.operated(context, operator, left, right)
        if isinstance(left, NUMBERS) and isinstance(right, NUMBERS) and operator not in ("*", "**"):
            result = self.operated(context, operator, left, right)
            if type(result) is int and result.bit_length() > MAX_BITS:
                raise LimitError("a number of that size")
            return result
        growth = charge(OPERATORS[operator], left, (right,), self.budget)
        made = self.operated(context, operator, left, right)
        if isinstance(made, set):  # of keys of objects
            raise SecurityError("a set has no order that is the same at every run")
        return self.finished(made, None, growth)

    def operated(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Return what an operator gives, after it was counted."""
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Any:
        """Return the methods `format` and `format_map` of a text, within limits."""
        if super().wrap_str_format(value) is None:
            return None
        form, is_map = value.__self__, value.__name__ == "format_map"
        formatter = _EscapedFields(self, escape=form.escape) if isinstance(form, Markup) else _CountedFields(self)

        def formatted(*arguments: Any, **named: Any) -> str:
            for argument in (*arguments, *named.values()):
                self.weighed(argument)
            self.budget.step(str.__len__(form) // 20)
            if is_map and (named or len(arguments) != 1):
                raise TypeError("format_map() takes exactly one argument, which is an object")
            return self.counted_text(self.formatted(formatter, form, arguments, named, is_map))

        return formatted

    def formatted(
        self, formatter: SandboxedFormatter, form: str, arguments: tuple[Any, ...], named: dict[str, Any], is_map: bool
    ) -> str:
        """Return a text with its fields, each of which the formatter counts."""
        text = formatter.vformat(form, () if is_map else arguments, arguments[0] if is_map else named)
        return type(form)(text)

    def limited(self, filter_: Callable[..., Any], operation: Operation) -> Callable[..., Any]:
        """Return a filter that is counted."""
        place = 1 if hasattr(filter_, "jinja_pass_arg") else 0

        def counted(*arguments: Any, **named: Any) -> Any:
            budget = self.budget
            budget.steps_left -= FILTER_STEPS
            if budget.steps_left < 0:
                budget.refuse()
            if operation.is_free() or len(arguments) <= place:
                made = filter_(*arguments, **named)
                return self._walked(made) if hasattr(type(made), "__next__") else made
            first = arguments[place]
            if operation.gathers and hasattr(type(first), "__next__"):
                first = list(first)
                arguments = (*arguments[:place], first, *arguments[place + 1 :])
            rest = (*arguments[place + 1 :], *named.values())
            is_short = type(first) is str and not rest and len(first) <= SMALL and not operation.looks_always
            growth = 0 if is_short else charge(operation, first, rest, budget)
            return self.finished(filter_(*arguments, **named), first, growth)

        if place:
            counted.jinja_pass_arg = filter_.jinja_pass_arg  # type: ignore[attr-defined]
        return counted
