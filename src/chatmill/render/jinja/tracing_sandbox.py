"""Runs templates on traced values: the text is the same, and knows where it came from.

A `TurnRun` runs loops over messages, and remembers them turn by turn. What is done to a text of the record is followed,
or gives no text: a filter, a method or a format that makes a text in another way refuses the record (`OriginLost`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import date
from functools import lru_cache
from types import BuiltinFunctionType, CodeType
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import safe_range
from markupsafe import Markup

from chatmill.render.jinja.control_names import NO_CONTROLS, ControlNames
from chatmill.render.jinja.counting import CALL_STEPS, PASSED, refuse_address
from chatmill.render.jinja.empty_texts import without_empty
from chatmill.render.jinja.limits import MAX_DEPTH, LimitError
from chatmill.render.jinja.loops import hook_loops
from chatmill.render.jinja.message_fields import MessageFields
from chatmill.render.jinja.operations import FILTERS, SMALL, OriginEffect
from chatmill.render.jinja.outside_reads import OutsideReads
from chatmill.render.jinja.positions import Position
from chatmill.render.jinja.questions import Unfollowed
from chatmill.render.jinja.sandbox import (
    PlainSandbox,
    _Namespace,
    _refuse_underscore,
    is_holder,
    own_of,
)
from chatmill.render.jinja.template_code import CountingGenerator, compute_plain_constants_alone
from chatmill.render.jinja.traced import (
    SCALARS,
    Measure,
    OriginLost,
    RecordValue,
    Traced,
    joined,
    made_of,
    may_hold,
    note_exact,
    plain_text,
)
from chatmill.render.jinja.traced_values import (
    SafeText,
    length_of,
    settled,
    settled_length,
    text_of,
    without_origin,
    written_as_json,
)
from chatmill.render.jinja.views import LoopView, MessagesView, MessageView, PositionRange, Space
from chatmill.render.official_harmony import tools_text

if TYPE_CHECKING:
    from chatmill.render.jinja.turn_run import TurnRun

TEXTUAL = (Traced, RecordValue)
"""Types that are written as a text of the record."""
TEXTS = frozenset({str, Traced})
SINGLE = frozenset({bool, type(None)})
"""Types whose equal values are one object."""
PIECE_BYTES = 128
"""What an origin and its piece of a text take while texts are put together."""
TRACED_STEPS = 6
"""Steps of what is asked or made of a text of the record, beside those of a plain one."""


class _TracingGenerator(OutsideReads, CountingGenerator):
    """Writes templates that are counted, and say what macros read from around them."""


class TracingSandbox(PlainSandbox):
    """Renders templates on traced values, with messages that are views in a `TurnRun`, or lists."""

    code_generator_class = _TracingGenerator
    mappings = (*PlainSandbox.mappings, MessageView, MessageFields)
    objects = (*PlainSandbox.objects, LoopView, Space)
    texts = TEXTS
    run: TurnRun | None = None
    """Where loops over messages run; None where messages are lists."""

    def __init__(self, today: date | None = None, controls: ControlNames = NO_CONTROLS) -> None:
        """`today` as for `PlainSandbox`; `controls` are the tokens that templates may write."""
        super().__init__(today)
        self.controls = controls
        self.tests |= {"sameas": self._weighing(self._is_same), "sequence": _is_sequence}
        self.tests |= {
            name: _unless_safe(dict[str, Any](self.tests)[name]) for name in ("string", "escaped", "iterable")
        }
        self.globals |= {"namespace": self._space, "range": _range}

    def _all_filters(self) -> dict[str, Callable[..., Any]]:
        filters = super()._all_filters()
        own: dict[str, Callable[..., Any]] = {
            "tojson": self._tojson,
            "join": self._join,
            "harmony_tools": _harmony_tools,
            "length": _length,
            "count": _length,
            "string": _string,
            "safe": _safe,
        }
        return {name: own.get(name) or _tracing(filter_, name) for name, filter_ in filters.items()}

    def hooked_template(self, source: str) -> jinja2.Template:
        """Return a template whose loops over messages run in a `TurnRun`."""
        return self.template_class.from_code(self, _hooked_code(source), self.make_globals(None), None)

    # ---- loops over messages

    def run_loop(
        self, site: int, names: tuple[tuple[str, str], ...], iterable: Any, values: tuple[Any, ...], body: Any
    ) -> str:
        """Run a loop: over messages turn by turn, over anything else as Jinja does."""
        assert self.run is not None
        if type(iterable) in (MessagesView, PositionRange):
            return self.run.run_loop(site, names, iterable, values, body)
        written = []
        turn = self.run.turn
        for item, loop in LoopContext(self.counted(iterable, 0), self.undefined):
            written.append(body(item, loop, *values))
            if turn.breaks:
                turn.breaks = False
                break
        return joined(written)

    def outside(self, name: str, value: Any, variable: str) -> Any:
        """Return the value of a name that a macro or a block reads from around it: which variable it is, is told."""
        return value if self.run is None else self.run.outside(name, value, variable)

    def break_loop(self) -> str:
        """End the loop that runs after this turn."""
        assert self.run is not None
        self.run.turn.breaks = True
        return ""

    def _space(self, *arguments: Any, **named: Any) -> Any:
        if self.run is None:
            return _Namespace(*arguments, **named)
        values = dict(*arguments, **named)
        for name in values:
            _refuse_underscore(name)
        return self.run.make_space(values)

    def _is_same(self, value: Any, other: Any) -> bool:
        """Return the test `sameas`. Which equal values are one object is no part of what a turn remembers."""
        note_exact([value, other])
        ours, theirs = (side._raw if isinstance(side, RecordValue | Measure) else side for side in (value, other))
        is_decided = any(type(side) in SINGLE for side in (ours, theirs))
        if self.run is not None and not is_decided:
            raise Unfollowed("two values are compared by the test sameas")
        return ours is theirs

    # ---- operators

    def counted_text(self, text: str, more: int = 0) -> str:
        """Return a text, after counting it with its origins."""
        if type(text) is Traced:
            self.budget.step(TRACED_STEPS + len(text._atoms))
            _refuse_deep(text)
        return super().counted_text(text, more)

    def weighed(self, value: Any) -> Any:
        """Return a value that is compared or hashed, after counting all that is in it."""
        if type(value) is Traced:
            self.budget.step(TRACED_STEPS)
        return super().weighed(value)

    def text_of(self, value: Any) -> str:
        """Return a value as it is written, with its origin."""
        if type(value) not in TEXTS:
            self.write_value(value)
        return text_of(value)

    def concat(self, texts: Iterable[str]) -> str:
        """Texts one after another, with their origins."""
        pieces = self.counted_texts(texts)
        atoms = sum(len(text._atoms) for text in pieces if type(text) is Traced)
        if atoms > SMALL:
            self.budget.step(atoms)
            self.budget.refuse_above(PIECE_BYTES * atoms)
        return without_empty(joined(pieces))

    def is_in(self, value: Any, container: Any) -> bool:
        """Return the operator `in`, also for a traced text in a plain one."""
        if isinstance(value, str) and isinstance(container, str | dict):
            note_exact(value)
        if type(container) is Traced:
            self.budget.step(TRACED_STEPS)
        return super().is_in(value, container)

    def sliced(self, obj: Any, start: Any, stop: Any, step: Any) -> Any:
        """Return the operator `[start:stop:step]`."""
        borders = (start, stop, step)
        if type(obj) is MessagesView:
            return obj[slice(*(border if type(border) is Position else settled(border) for border in borders))]
        return super().sliced(obj, *map(settled, borders))

    def getattr(self, obj: Any, attribute: str) -> Any:  # noqa: D102
        if isinstance(obj, Traced) and not hasattr(str, attribute):
            obj = plain_text(obj)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:  # noqa: D102
        if type(obj) is MessagesView:
            try:
                return obj[argument]
            except (IndexError, TypeError):
                return self.undefined(obj=obj, name=argument)
        if isinstance(argument, str):
            note_exact(argument)
            argument = plain_text(argument)
        if type(obj) is not MessageView:
            return super().getitem(obj, settled(argument))
        return obj[argument] if argument in obj else self.undefined(name=argument)

    def operated(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: D102
        if (isinstance(left, Markup) or isinstance(right, Markup)) and may_hold([left, right]):
            raise OriginLost(f"the operator {operator} with texts of the record and a safe text")
        if operator == "%" and isinstance(left, str) and may_hold([left, right]):
            return _formatted(left, right if isinstance(right, tuple) else (right,))
        return super().operated(context, operator, left, right)

    # ---- calls

    def call(self, context: Context, callable_: Any, *arguments: Any, **named: Any) -> Any:  # noqa: D102
        is_range = callable_ is _range and any(type(argument) is Position for argument in arguments)
        if is_range or type(getattr(callable_, "__self__", None)) is MessageView or callable_ == self._space:
            self.budget.step(CALL_STEPS)
            self._weigh_call(callable_, arguments, named)
            return callable_(*arguments, **own_of(named))
        return super().call(context, callable_, *arguments, **named)

    def called(  # noqa: D102
        self, context: Context, callable_: Any, owner: Any, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        try:
            return self._traced(context, callable_, owner, arguments, named)
        except Exception:
            if isinstance(owner, str):  # it depends on the text that there is an error
                note_exact([owner, arguments, own_of(named)])
            raise

    def _traced(
        self, context: Context, callable_: Any, owner: Any, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        if not is_holder(callable_):
            plain = settled if isinstance(owner, str) else settled_length
            arguments, named = tuple(map(plain, arguments)), {name: plain(value) for name, value in named.items()}
        keywords = own_of(named)
        if isinstance(owner, str) and not isinstance(owner, Traced) and may_hold([arguments, keywords]):
            return _of_plain_text(callable_, arguments, keywords)
        if isinstance(callable_, BuiltinFunctionType) and not isinstance(owner, str | dict | list | tuple):
            return by_value(callable_, arguments, keywords)
        return super().called(context, callable_, owner, arguments, named)

    def formatted(  # noqa: D102
        self, formatter: Any, form: str, arguments: tuple[Any, ...], named: dict[str, Any], is_map: bool
    ) -> str:
        if may_hold([form, arguments, named]):
            raise OriginLost("texts of the record in a format")
        return super().formatted(formatter, form, arguments, named, is_map)

    def _strftime_now(self, form: str) -> str:
        text: str = by_value(super()._strftime_now, (form,), {})
        return text

    def _join(self, value: Iterable[Any], d: Any = "", attribute: str | int | None = None) -> str:
        if attribute is not None:
            value = map(make_attrgetter(self, attribute), value)
        separator = self.text_of(d)
        return joined(self.counted_texts(map(self.text_of, value), separator), separator)

    @staticmethod
    def _tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        if type(value) in (MessagesView, MessageView):
            raise Unfollowed("messages are written as JSON")
        indent = settled(indent)
        options: dict[str, Any] = {"ensure_ascii": bool(ensure_ascii)}
        if indent is not None:
            options["indent"] = indent
        if separators is not None:
            options["separators"] = tuple(separators)
        if may_hold(options):
            raise OriginLost("JSON with texts of the record between its values")
        if sort_keys:
            options["sort_keys"] = True
        return written_as_json(value, options)


@lru_cache(maxsize=128)
def _hooked_code(source: str) -> CodeType:
    """Return a template's code, which takes long to write and depends on nothing but its text."""
    environment = TracingSandbox()
    compute_plain_constants_alone(environment)
    tree = environment.parse(source)
    hook_loops(tree, environment)
    code = environment._generate(tree, None, None)
    return environment._compile(code, "<template>")


def by_value(make: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any], called: str = "") -> Any:
    """Return what an operation gives that is not followed: a number may depend on texts of the record, no text does.

    It is `called` so in a refusal, where that is not its own name.
    """
    values = [argument for argument in arguments if not isinstance(argument, PASSED)]
    if not may_hold([values, named]):
        return make(*arguments, **named)
    note_exact([values, named])
    plain = [argument if isinstance(argument, PASSED) else without_origin(argument) for argument in arguments]
    result = make(*plain, **without_origin(named))
    if type(result) in SCALARS:
        return result
    raise OriginLost(f"what {called or getattr(make, '__name__', 'a function')} makes of a text of the record")


def _tracing(filter_: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a filter that keeps origins by itself, or one that makes no text of the record's texts."""
    origin = FILTERS[name].origin if name in FILTERS else OriginEffect.LOST

    def traced(*arguments: Any, **named: Any) -> Any:
        values = [argument for argument in arguments if not isinstance(argument, PASSED)]
        if name == "replace" and len(values) > 2 and not named and not isinstance(values[0], SafeText | Markup):
            return _replaced(
                *map(text_of, values[:3]), *(settled(argument) for argument in values[3:] if argument is not None)
            )
        if name == "format" and may_hold(values) and not named:
            return _formatted(values[0], values[1:])
        is_of_method = origin is OriginEffect.OF_METHOD and isinstance(values[0], TEXTUAL)
        if origin is not OriginEffect.PASSED and not is_of_method:
            return by_value(filter_, arguments, named, f"the filter {name}")
        arguments = (*arguments[:1], *map(settled_length, arguments[1:]))
        named = {key: settled_length(argument) for key, argument in named.items()}
        if name == "attr":
            note_exact([arguments[2:], named])
        return filter_(*arguments, **named)

    if hasattr(filter_, "jinja_pass_arg"):
        traced.jinja_pass_arg = filter_.jinja_pass_arg  # type: ignore[attr-defined]
    return traced


def _refuse_deep(text: Traced) -> None:
    """Refuse a text that is made of one that is made of one, and so on: what it is made of is compared as a whole."""
    if len(text._atoms) > 1:
        return
    expression, depth = text._atoms[0][1], 0
    while expression is not None and expression[0] == "apply":
        expression, depth = expression[3], depth + 1
    if depth > MAX_DEPTH:
        raise LimitError(f"it changes a text of the record more than {MAX_DEPTH} times")


def _of_plain_text(method: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Return a method of a text of the template, given texts of the record."""
    name, text = method.__name__, method.__self__
    if type(text) is str and name == "join" and not named:
        texts: list[Any] = list(*arguments)
        if all(isinstance(one, str) for one in texts):
            return joined(texts, text)
    if type(text) is str and name == "replace" and not named:
        return _replaced(text, *arguments)
    return by_value(method, arguments, named)


def _replaced(text: str, old: str, new: str, count: Any = -1) -> str:
    """Do as `str.replace` does, with any texts."""
    if type(text) is Traced:
        replaced: str = text.replace(old, new, count)
        return replaced
    if not may_hold([old, new]):
        return text.replace(old, new, count)
    if not old or type(old) is not str:
        raise OriginLost("texts of the record replaced in a text")
    return joined(text.split(old, count), new)


def _formatted(form: Any, values: Sequence[Any]) -> str:
    """Do as `form % values` does, if it only puts texts into their places."""
    literals = form.split("%s") if type(form) is str else []
    if len(literals) != len(values) + 1 or "%" in "".join(literals):
        raise OriginLost("texts of the record in a format with more than %s")
    written = [joined([text_of(value), literal]) for value, literal in zip(values, literals[1:], strict=True)]
    return joined([literals[0], *written])


def _string(value: Any) -> Any:
    refuse_address(value)
    return value if isinstance(value, SafeText | Markup) else text_of(value)


def _safe(value: Any) -> Any:
    if isinstance(value, SafeText):
        return value
    refuse_address(value)
    text = text_of(value)
    return SafeText(text) if type(text) is Traced else Markup(text)


def _harmony_tools(tools: Any) -> str:
    if not isinstance(tools, RecordValue):
        return tools_text(tools)
    note_exact(tools)  # what the official renderer makes of them cannot be followed
    text = tools_text(tools._raw)
    return made_of(text, ("const", text, tools._path), tools._notes)


def _length(value: Any) -> int:
    return value.length() if type(value) is MessagesView else length_of(value)


def _range(*borders: Any) -> Any:
    if not any(type(border) is Position for border in borders):
        return safe_range(*borders)
    start, stop, step = (0, borders[0], 1) if len(borders) == 1 else (*borders, 1)[:3]
    return PositionRange(start, stop, int(step))


def _unless_safe(test: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a test that is not asked about a text that is called safe."""

    def asked(value: Any) -> Any:
        if isinstance(value, SafeText):
            raise OriginLost("a text of the record is called safe, and then tested")
        return test(value)

    return asked


def _is_sequence(value: Any) -> bool:
    """Return the test `sequence`, which does not depend on how long a text is."""
    return hasattr(value, "__len__") and hasattr(value, "__getitem__")
