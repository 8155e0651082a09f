"""The environment chat templates run in: it renders as transformers does, in a sandbox, with limits.

Templates are untrusted code. They see plain data only, change nothing, and stop at a number of steps and characters
that no honest template reaches. The limits count steps, not seconds, so that a template ends the same way everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sized
from datetime import date
from functools import lru_cache
from types import CodeType
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from chatmill.errors import ChatmillError, ConfigError
from chatmill.render.jinja.limits import MAX_CHARACTERS, LimitError, refuse_excess
from chatmill.render.official_harmony import tools_text

MAX_STEPS = 2_000_000
"""Turns of loops and calls in one rendering. The longest real conversations need a few thousand."""
CALL_STEPS = 10
"""Steps that a call counts for; it takes about as long as that many turns of a loop."""
FAILURES = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""How a template fails on a conversation."""
PASSED = (jinja2.Environment, Context, nodes.EvalContext)
"""What a filter is given besides the values of the template."""
OF_MAPPINGS = frozenset(dir(dict))
"""Names that mean an attribute of a mapping, not one of its keys."""
PLAIN_METHODS = frozenset({"strip", "lstrip", "rstrip", "startswith", "endswith", "split", "lower", "upper", "replace"})
"""Methods of texts that are safe."""


class MissingDateError(ConfigError):
    """A template asks for the date, and the recipe has none."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`: accepted, and without effect on the text but for the marks of the environment."""

    tags = {"generation"}  # noqa: RUF012 (the base class has a plain set)
    environment: PlainSandbox

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        first, last = (nodes.Output([nodes.TemplateData(mark)]) for mark in self.environment.generation_marks)
        return nodes.Scope([first, *body, last], lineno=line)


class _CountingGenerator(CodeGenerator):
    """Writes loops that count their turns, and operators that keep origins."""

    written = "str"
    """What makes a text of any value."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802 (names of the base class)
        counted = nodes.Call(nodes.EnvironmentAttribute("counted"), [node.iter], [], None, None)
        node.iter = counted.set_lineno(node.lineno).set_environment(self.environment)
        super().visit_For(node, frame)

    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:  # noqa: N802
        if isinstance(node.node, nodes.EnvironmentAttribute):  # our own: no call of the template
            self.write(f"environment.{node.node.name}(")
            for argument in node.args:
                self.visit(argument, frame)
                self.write(", ")
            self.write(")")
            return
        super().visit_Call(node, frame, forward_caller=forward_caller)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.concat((")
        for part in node.nodes:
            self.write(f"{self.written}(")
            self.visit(part, frame)
            self.write("), ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802
        if not any(step.op in ("in", "notin") for step in node.ops):
            super().visit_Compare(node, frame)
            return
        if len(node.ops) > 1:
            self.fail("a chain of comparisons with 'in' is not supported: join them with 'and'", node.lineno)
        self.write("(not " if node.ops[0].op == "notin" else "(")
        self.write("environment.is_in(")
        self.visit(node.expr, frame)
        self.write(", ")
        self.visit(node.ops[0].expr, frame)
        self.write("))")

    def visit_ScopedEvalContextModifier(self, node: nodes.ScopedEvalContextModifier, frame: Frame) -> None:  # noqa: N802
        self.fail("{% autoescape %} is not supported: a chat template writes text, not HTML", node.lineno)


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


def is_holder(callable_: object) -> bool:
    """Return whether a callable only keeps what it is given, or hands it to the template."""
    return callable_ is _Namespace or callable_ is _dict or isinstance(callable_, Macro)


def own_of(named: dict[str, Any]) -> dict[str, Any]:
    """Return what a template itself gives a call by name; Jinja adds the variables around it."""
    return {name: value for name, value in named.items() if name not in ("_block_vars", "_loop_vars")}


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no names with an underscore in front: {name!r}")


def _raise_exception(message: object = "") -> str:
    raise jinja2.TemplateError(str(message))


class PlainSandbox(ImmutableSandboxedEnvironment):
    """Renders templates on plain values, as transformers does, within limits: the reference of all proofs."""

    code_generator_class = _CountingGenerator
    generation_marks = ("", "")
    """What is written before and after the text of a `{% generation %}` block."""
    mappings: tuple[Any, ...] = (dict,)
    objects: tuple[Any, ...] = (LoopContext, _Namespace)
    """What a template may read every attribute of that does not begin with an underscore."""
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, today: date | None = None) -> None:
        """`today` is the date a template gets; asking without one is an error."""
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols], cache_size=0
        )
        self._today, self.steps = today, 0
        self.asked_for_date = False
        self.globals.pop("lipsum")
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": self._strftime_now,
            "dict": _dict,
            "namespace": _Namespace,
        }
        self.filters |= {"tojson": self._tojson, "harmony_tools": tools_text}
        self.filters = {name: self._limited(filter_, name) for name, filter_ in self.filters.items()}
        self.tests["in"] = self.is_in

    def template(self, source: str) -> jinja2.Template:
        """Return a template that runs here."""
        code = _code_of(type(self), source)  # type: ignore[arg-type]  # mypy takes no class for hashable
        return self.template_class.from_code(self, code, self.make_globals(None), None)

    def render(self, template: jinja2.Template, values: dict[str, Any]) -> str:
        """Return the text of a template; every failure of it is a `jinja2.TemplateError`."""
        self.steps = 0
        try:
            return self.concat(template.root_render_func(template.new_context(values)))
        except RecursionError:
            raise LimitError("its macros call each other without end") from None
        except ChatmillError:  # the recipe lacks a date: no fault of this conversation
            raise
        except (*FAILURES, RuntimeError, AssertionError) as error:
            raise _failure(template, error) from None

    def concat(self, texts: Iterable[str]) -> str:
        """Texts one after another."""
        return self.checked("".join(texts))

    def is_in(self, value: Any, container: Any) -> bool:
        """Return the operator `in`."""
        return value in container

    def counted(self, values: Iterable[Any]) -> Any:
        """Return what a loop goes over; its turns are counted."""
        self._step(1 + (len(values) if isinstance(values, Sized) else 0))
        return values

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
        self._step(CALL_STEPS)
        owner = getattr(callable_, "__self__", None)
        if isinstance(owner, str):
            refuse_excess(callable_.__name__, [owner, *arguments, *own_of(named).values()])
            if type(owner) is str and callable_.__name__ in PLAIN_METHODS:
                made = callable_(*arguments, **own_of(named))
                return self.checked(made) if isinstance(made, str) else made
        result = super().call(context, callable_, *arguments, **named)
        return self.checked(result) if isinstance(result, str) else result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: D102
        if operator == "+" and type(left) is str and type(right) is str:
            return self.checked(left + right)
        refuse_excess(operator, [left, right])
        result = super().call_binop(context, operator, left, right)
        return self.checked(result) if isinstance(result, str) else result

    def wrap_str_format(self, value: Any) -> Any:
        """Return the method `format` of a text, within limits; Jinja hands out its own function for it."""
        wrapped: Any = super().wrap_str_format(value)

        def limited(*arguments: Any, **named: Any) -> str:
            refuse_excess("format", [value.__self__, *arguments, *named.values()])
            return self.checked(wrapped(*arguments, **named))

        return None if wrapped is None else limited

    def _step(self, count: int) -> None:
        self.steps += count
        if self.steps > MAX_STEPS:
            raise LimitError(f"it takes more than {MAX_STEPS:,} steps for one conversation")

    def checked(self, text: str) -> str:
        """Return the text itself, if it is not too long."""
        if str.__len__(text) > MAX_CHARACTERS:
            raise LimitError(f"it makes a text of more than {MAX_CHARACTERS:,} characters")
        return text

    def _strftime_now(self, form: str) -> str:
        self.asked_for_date = True
        if self._today is None:
            raise MissingDateError(
                "the template asks for today's date; set `date` in the recipe (--set date=YYYY-MM-DD), so that the "
                "build gives the same bytes on any day"
            )
        return self._today.strftime(form)

    @staticmethod
    def _tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        refuse_excess("indent", [None, indent])
        options = {"indent": indent, "separators": separators and tuple(separators), "sort_keys": sort_keys}
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    @staticmethod
    def _limited(filter_: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return a filter that refuses what would make too much."""

        def limited(*arguments: Any, **named: Any) -> Any:
            values = [value for value in arguments if not isinstance(value, PASSED)]
            refuse_excess("%" if name == "format" else name, [*values, *named.values()])
            return filter_(*arguments, **named)

        if hasattr(filter_, "jinja_pass_arg"):
            limited.jinja_pass_arg = filter_.jinja_pass_arg  # type: ignore[attr-defined]
        return limited


@lru_cache(maxsize=128)
def _code_of(kind: type[PlainSandbox], source: str) -> CodeType:
    """A template's code, which takes long to write and depends on nothing but its text and the kind of the sandbox."""
    return kind().compile(source)


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
