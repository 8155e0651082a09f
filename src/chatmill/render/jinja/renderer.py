"""Renderings of one template under fixed options: remembered turn by turn, run where something is new."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import jinja2
import numpy as np
from numpy.typing import NDArray

from chatmill.core.native.replayer import Ended, Renderings, TooLongError
from chatmill.errors import RecordError
from chatmill.render.jinja.answer_branches import FragmentColumns
from chatmill.render.jinja.expressions import Notes, Question
from chatmill.render.jinja.kept_values import parts_of
from chatmill.render.jinja.limits import LimitError
from chatmill.render.jinja.questions import Unfollowed
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.jinja.rendering import Rendering
from chatmill.render.jinja.replay import Classes, Replay, Request
from chatmill.render.jinja.sandbox import FAILURES, MAX_STEPS, PlainSandbox
from chatmill.render.jinja.traced import OriginLost, plain_text
from chatmill.render.jinja.traced_values import fixed, wrapped
from chatmill.render.jinja.tracing_sandbox import TracingSandbox
from chatmill.render.jinja.tries import Output, UnnotedError
from chatmill.render.jinja.turn import ROOT
from chatmill.render.jinja.turn_run import NeedsRootError, TurnRun
from chatmill.render.jinja.views import MessagesView

if TYPE_CHECKING:
    from chatmill.render.record_keys import RecordKeys

FEW_NEW = 8
"""Renderings in which something is new, of those that are asked for together, that are learned one by one."""
COMPARED = 64
"""One in so many renderings in which nothing is new is compared with plain Jinja."""


MAX_STEPS_OF_RECORD = 20 * MAX_STEPS
"""Steps of the template in all renderings of a conversation that cannot be followed, each counted as the longest one.

They take about a minute.
"""
MAX_RENDERED = 1 << 33
"""Messages in all prompts and answers of one conversation, of which each has those before it."""


class NotFollowedError(RecordError):
    """What was derived from traces is not what the template writes: the record cannot be written."""


REFUSALS = frozenset(
    {"late_system", "role_not_in_template", "tools_not_in_template", "tool_calls_not_in_template", "bad_tool_call"}
    | {"unknown_channel", "tool_without_name", "origin_lost"}
)
"""Codes that a template may give its refusal: `raise_exception('late_system messages[2].role: takes ...')`."""
CODED = re.compile(r"(?P<code>[a-z_]+) (?P<path>\S+): (?P<said>.*)", re.DOTALL)


class Refusal(NamedTuple):
    """What a template said when it refused a conversation."""

    message: str
    line: int | None


class Sandboxes(NamedTuple):
    """The two ways in which a template runs."""

    tracing: TracingSandbox
    plain: PlainSandbox


class AnswerCache:
    """What rules have found for one template, by branches and by the classes of messages (`AnswerLookup`)."""

    def __init__(self) -> None:
        """Begin without any."""
        self._found: dict[tuple[Any, ...], Any] = {}
        self._version = -1

    def __len__(self) -> int:
        return len(self._found)

    def found_by_key(self, version: int) -> dict[tuple[Any, ...], Any]:
        """Return what is known for classes of a version; classes of another one have other numbers."""
        if version != self._version:
            self._found = {}
            self._version = version
        return self._found


class TemplateRunner:
    """Runs one template under fixed options."""

    def __init__(
        self,
        source: str,
        sandboxes: Sandboxes,
        variables: Mapping[str, Any],
        name: str,
        keys: RecordKeys | None,
        given_by_record: Iterable[str] = (),
    ) -> None:
        """Bind the special tokens and options of the template; those options that a record gives are its text.

        `keys` know what the keys of records are made of; None as long as nobody does.
        """
        self._source = source
        self._given_by_record = tuple(given_by_record)
        self._sandboxes, self._keys = sandboxes, keys
        self._hooked_template = sandboxes.tracing.hooked_template(source)
        self._plain_template = sandboxes.plain.template(source)
        self._reads_prompt = "add_generation_prompt" in source  # else P(i) is A(i - 1)
        self.variables = dict(variables)
        self.name = name
        self.runs = 0
        """Renderings that were made by running the template."""
        self.is_followed = True
        """Whether loops are followed turn by turn: until one reads something that was not noted."""
        self.needs_next = False
        """Whether the stop of an answer was found in what the template writes for a next message."""
        self._learned: list[tuple[int, RecordView, int, bool, list[Output]]] = []
        """Renderings that something was learned of, and how much, until one of them is compared."""
        self.tries = Replay(self.is_keyed, self.classes, reads_prompt=self._reads_prompt)
        """All that was learned."""
        self.segments = self.tries.segments
        self.fragment_columns = FragmentColumns(self.segments)
        self.answer_cache = AnswerCache()

    def many(self, view: RecordView, requests: Sequence[Request]) -> list[list[Output] | Refusal]:
        """Return what the template writes for some numbers of messages, with or without the generation prompt."""
        needed = [(count, prompt and self._reads_prompt, probe) for count, prompt, probe in requests]
        different = list(dict.fromkeys(needed))
        outputs = dict(zip(different, self._many(view, different), strict=True)) if different else {}
        return [outputs[request] for request in needed]

    def _many(self, view: RecordView, requests: Sequence[Request]) -> list[list[Output] | Refusal]:
        runs = self.runs
        outputs: list[list[Output] | Refusal] = []
        self._learned = []
        replayed = self._replayed(view, requests) if self.is_followed else None
        for number, request in enumerate(requests):
            if not self.is_followed:
                break
            ended = Ended.UNKNOWN if replayed is None else replayed.ended(number)
            if replayed is not None and ended == Ended.KNOWN:
                outputs.append(replayed.outputs(number))
                continue
            write = self._run if ended == Ended.UNKNOWN else self._refusal_or_whole
            outputs.append(self._probed(write, view, request))
            if _is_stopped(outputs[-1]):  # it would be stopped again, and take as long
                return [*outputs, *[outputs[-1]] * (len(requests) - len(outputs))]
        if not self._compare_learned():
            self._give_up()
        if not self.is_followed:
            return self._all_as_a_whole(view, requests)
        count, prompt, probe = requests[-1]
        if self.runs == runs and probe < 0:
            self._spot_check(view, count, prompt, outputs[-1])
        return outputs

    def _all_as_a_whole(self, view: RecordView, requests: Sequence[Request]) -> list[list[Output] | Refusal]:
        """Return what the template writes, each time for the conversation as a whole."""
        outputs: list[list[Output] | Refusal] = []
        for request in requests:
            is_over = bool(outputs) and _is_stopped(outputs[-1])
            outputs.append(outputs[-1] if is_over else self._probed(self._as_a_whole, view, request))
        return outputs

    @staticmethod
    def _probed(
        write: Callable[[RecordView, int, bool], list[Output] | Refusal], view: RecordView, request: Request
    ) -> list[Output] | Refusal:
        """Return what is written for a request, the last message of which may be a probe."""
        count, prompt, probe = request
        if probe < 0:
            return write(view, count, prompt)
        probed = view.probed(count, probe)
        outputs = write(probed, count, prompt)
        view.is_keyed = view.is_keyed and probed.is_keyed
        return outputs

    def known(self, view: RecordView, requests: NDArray[np.int64]) -> Renderings | None:
        """Return renderings, as `list_renderings` lists them; None where something is new, or is refused."""
        replayed = self._replayed(view, requests) if self.is_followed else None
        if replayed is None or not replayed.are_known:
            return None
        if self.is_compared(view):
            self._spot_check(view, int(requests[-1, 0]), False, replayed.whole)
        return replayed

    def learned(self, view: RecordView, requests: NDArray[np.int64]) -> Renderings | None:
        """Return what `known` does, after learning what is new in a few of them: in most others it is the same."""
        for _ in range(FEW_NEW):
            replayed = self._replayed(view, requests) if self.is_followed else None
            if replayed is None or replayed.are_known:
                return replayed
            new = replayed.first_unknown
            if new is None:
                return None
            count, prompt, probe = requests[new].tolist()
            self.many(view, [(count, bool(prompt), probe)])
        return None

    def _spot_check(self, view: RecordView, count: int, prompt: bool, outputs: list[Output] | Refusal) -> None:
        """Compare one in so many conversations in which nothing is new with plain Jinja."""
        if not isinstance(outputs, Refusal) and self.is_compared(view):
            try:
                self._compare(view, count, prompt, outputs)
            except LimitError:  # plain Jinja is stopped: there is nothing to compare with
                return
            except NotFollowedError:  # records before it may have been written from the same turns: this one says so
                self._give_up()
                raise

    def is_keyed(self, questions: Sequence[Question]) -> bool:
        """Return whether the replies to questions are part of a record's key; those that can be will be from now on."""
        return self._keys is not None and self._keys.learn(questions)

    @property
    def keys_version(self) -> int:
        """The version of the classes of messages, as keys are made now."""
        return -1 if self._keys is None else self._keys.version

    def record_key(self, view: RecordView) -> Any:
        """Return what stands for the tools and options of a record where its class is known."""
        assert self._keys is not None
        return self._keys.record_key(view)

    def classes(self, view: RecordView) -> Classes | None:
        """Return the classes of a conversation's messages."""
        if self._keys is None:
            return None
        if view.probe_of is None:
            return self._keys.classes_of(view)
        of, index = view.probe_of
        assert of.probes is not None
        probes = self._keys.classes_of(of.probes.alone)
        classes = self._keys.classes_of(of)
        if probes is None or classes is None or probes.version != classes.version:
            return self._keys.classes_of(view)
        before = classes.numbers[: len(view.roles) - 1]
        return Classes(np.append(before, probes.numbers[index]), classes.version)

    def classes_with_probes(self, view: RecordView) -> Classes | None:
        """Return the classes of a conversation's messages, and those of its probes after them."""
        classes = self.classes(view)
        if classes is None or view.probes is None:
            return classes
        probes = self.classes(view.probes.alone)
        classes = self.classes(view)  # those of the probes may be too many, and begin anew
        if classes is None or probes is None or probes.version != classes.version:
            return None
        return Classes(np.append(classes.numbers, probes.numbers), classes.version)

    def _replayed(self, view: RecordView, requests: Sequence[Request] | NDArray[np.int64]) -> Renderings | None:
        classes = self.classes_with_probes(view)
        if classes is None:
            return None
        try:
            return self.tries.renderings(view, classes, requests)
        except TooLongError:
            raise _too_long(
                view, "have too many parts together, or go through the template's loops too often"
            ) from None

    @staticmethod
    def is_compared(view: RecordView) -> bool:
        """Return whether a conversation in which nothing is new is one of those that are compared."""
        return crc32(f"{view.named} {len(view.roles)}".encode()) % COMPARED == 0

    def _run(self, view: RecordView, count: int, prompt: bool) -> list[Output] | Refusal:
        """Run what is new of a rendering: turns of loops by themselves, or the template from its beginning."""
        key = (prompt and self._reads_prompt, view.has_tools)
        size = self.tries.size
        try:
            outputs = self._run_turns(view, count, key)
            self.runs += outputs is None or self.tries.size > size
            if outputs is None:
                outputs = self._run_template(view, count, prompt, key)
        except (jinja2.TemplateError, Unfollowed):
            return self._refusal_or_whole(view, count, prompt)
        except UnnotedError:
            self._give_up()
            return self._as_a_whole(view, count, prompt)
        self._learned.append((self.tries.size - size, view, count, prompt, outputs))
        return outputs

    def _run_turns(self, view: RecordView, count: int, key: Any) -> list[Output] | None:
        """Run the turns that are new; None where the template must run from its beginning."""
        sandbox = self._sandboxes.tracing
        run = sandbox.run = TurnRun(view, count, self.tries, sandbox)
        run.controls = sandbox.controls
        sandbox.begin(count)
        try:
            run.learn_new_turns(key)
        except (NeedsRootError, Unfollowed, *FAILURES, RuntimeError, AssertionError, MemoryError):
            return None
        finally:
            sandbox.run = None
            vars(run).clear()
        replayed = self._replayed(view, [(count, key[0], -1)])
        is_known = replayed is not None and replayed.ended(0) == Ended.KNOWN
        return replayed.outputs(0) if replayed is not None and is_known else None

    def _run_template(self, view: RecordView, count: int, prompt: bool, key: Any) -> list[Output]:
        """Run the template from its beginning."""
        sandbox = self._sandboxes.tracing
        run = sandbox.run = TurnRun(view, count, self.tries, sandbox)
        run.controls = sandbox.controls

        def code() -> str:
            tools = list(view.conversation.tools) or None
            tools_shown = None if tools is None else wrapped(tools, ("tools",), run)
            return sandbox.render(self._hooked_template, self._values(MessagesView(run), tools_shown, prompt, run))

        try:
            return self.segments.located(run.hooked(key, code), count)
        finally:
            sandbox.run = None

    def _compare_learned(self) -> bool:
        """Compare the rendering that most was learned of with plain Jinja; return whether it is the same."""
        learned = self._learned
        self._learned = []
        if not learned:
            return True
        _, view, count, prompt, outputs = max(learned, key=itemgetter(0))
        try:
            self._compare(view, count, prompt, outputs)
        except LimitError:  # plain Jinja is stopped: there is nothing to compare with
            return True
        except NotFollowedError:
            return False
        return True

    @staticmethod
    def _refuse_many_steps(view: RecordView, steps: int) -> None:
        """Refuse a record whose renderings would take too long, each like one with so many steps.

        Every rendering is made again: what one takes decides it, not what else is known of the template.
        """
        if 2 * len(view.trained) * steps > MAX_STEPS_OF_RECORD:
            raise _too_long(view, f"take more than {MAX_STEPS_OF_RECORD:,} steps of the template together")

    def _refusal_or_whole(self, view: RecordView, count: int, prompt: bool) -> list[Output] | Refusal:
        """Return the template's refusal; what it writes if it fails on views of messages alone, or is not followed."""
        refusal = self._refusal(view, count, prompt)
        return self._as_a_whole(view, count, prompt) if refusal.message == FAILS_TRACED else refusal

    def _give_up(self) -> None:
        """Something was read that was not noted: nothing learned is worth anything. Segments keep their numbers."""
        self.tries.tables.clear()
        self.is_followed = False

    def _as_a_whole(self, view: RecordView, count: int, prompt: bool) -> list[Output] | Refusal:
        """Return what the template writes, the conversation being one turn that is remembered for no other record."""
        view.is_keyed = False
        sandbox = self._sandboxes.tracing
        notes = Notes(sandbox.controls)
        messages, tools = view.values(count, notes)
        sandbox.run = None
        try:
            text = sandbox.render(self._whole_template, self._values(messages, tools, prompt, notes))
            parts = parts_of(text, ROOT)
            outputs = [(self.segments.number(parts), ROOT)] if parts else []
            self._compare(view, count, prompt, outputs)
        except jinja2.TemplateError as error:
            refusal = self._refusal(view, count, prompt)
            if refusal.message != FAILS_TRACED:
                return refusal
            if isinstance(error, LimitError):  # origins take memory and time too
                return _stopped(error)
            return _lost(error) if isinstance(error, OriginLost) else refusal
        self._refuse_many_steps(view, sandbox.budget.steps_taken)
        return outputs

    @cached_property
    def _whole_template(self) -> jinja2.Template:
        """The template with its loops as they are: a macro that a turn keeps reads what the next turn has."""
        return self._sandboxes.tracing.template(self._source)

    def render(self, view: RecordView, count: int, prompt: bool) -> Rendering | Refusal:
        """Return the rendering of the first messages, with or without the generation prompt."""
        (outputs,) = self.many(view, [(count, prompt, -1)])
        return outputs if isinstance(outputs, Refusal) else self.segments.window(outputs, 0, view).rendering

    def _compare(self, view: RecordView, count: int, prompt: bool, outputs: list[Output]) -> None:
        """Compare what was derived with plain Jinja."""
        if self.plain_if_any(view, count, prompt) != self.segments.window(outputs, 0, view).rendering.text:
            named = view.conversation.id or view.conversation.where
            raise NotFollowedError(
                f"the template {self.name!r} writes record {named!r} in a way that cannot be followed: a fault of "
                "Chatmill. Please report it with the template",
                code="not_followed",
            )

    def _refusal(self, view: RecordView, count: int, prompt: bool) -> Refusal:
        """Return what the template says on plain values, in the words its author chose."""
        try:
            self.plain(view, count, prompt)
        except jinja2.TemplateError as error:
            if isinstance(error, LimitError):
                return _stopped(error)
            return Refusal(plain_text(str(error.message or error)), getattr(error, "lineno", None))
        return Refusal(FAILS_TRACED, None)

    def plain(self, view: RecordView, count: int, prompt: bool) -> str:
        """Return the text of the first messages by plain Jinja, without any tracing."""
        messages, tools = view.values(count, None)
        return self._sandboxes.plain.render(self._plain_template, self._values(messages, tools, prompt))

    def plain_if_any(self, view: RecordView, count: int, prompt: bool) -> str | None:
        """Return the same; None where the template refuses the messages, but not where it is stopped."""
        try:
            return self.plain(view, count, prompt)
        except LimitError:
            raise
        except jinja2.TemplateError:
            return None

    def _values(self, messages: Any, tools: Any, prompt: bool, notes: Notes | None = None) -> dict[str, Any]:
        names = self._given_by_record if notes is not None else ()
        return {
            **self.variables,
            **{name: fixed(self.variables[name], ("options", name), notes) for name in names if notes is not None},
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": prompt,
        }

    def refused(self, refusal: Refusal) -> RecordError:
        """Return the error of a record that the template refuses."""
        place = f" (line {refusal.line})" if refusal.line else ""
        said, code, path = f"refuses the conversation: {refusal.message}", "template_refused", ""
        coded = CODED.fullmatch(refusal.message)
        if coded and coded["code"] in REFUSALS:
            said, code, path = coded["said"], coded["code"], coded["path"]
        return RecordError(f"the template {self.name!r}{place} {said}", code=code, path=path)


FAILS_TRACED = (
    "origin_lost messages: changes a text of the record by a filter, a method or a format that cannot be followed. "
    "Another template may prove it"
)

STOPPED = "the template was stopped: "


def _stopped(error: LimitError) -> Refusal:
    """Return the refusal of a record on which the template takes too much."""
    return Refusal(f"{STOPPED}{error.message}", getattr(error, "lineno", None))


def _is_stopped(outputs: list[Output] | Refusal) -> bool:
    return isinstance(outputs, Refusal) and outputs.message.startswith(STOPPED)


def refuse_too_long(view: RecordView) -> None:
    """Raise a `RecordError` for a conversation whose prompts and answers are too long together for any memory."""
    if 3 * sum(view.trained) > MAX_RENDERED:
        raise _too_long(view, f"have more than {MAX_RENDERED:,} messages together")


def _too_long(view: RecordView, why: str) -> RecordError:
    return RecordError(
        f"the prompts and answers of its {len(view.roles):,} messages {why}: split the conversation, or use a template "
        "that does not go over all messages for each of them",
        code="conversation_too_long",
    )


def _lost(error: OriginLost) -> Refusal:
    """Return the refusal of a record whose texts were lost, which says by what and where."""
    said = f"makes something of the record's texts that cannot be followed: {error.message}"
    return Refusal(f"origin_lost messages: {said}. Another template may prove it", getattr(error, "lineno", None))
