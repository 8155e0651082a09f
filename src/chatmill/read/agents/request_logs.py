"""Read logs of requests and responses, one call per record.

Calls that continue an earlier one of the same log become one history; a rewritten history becomes another branch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from chatmill.errors import RecordError
from chatmill.json_values import decoded_text
from chatmill.read.agents.agent_file import AgentFile
from chatmill.read.agents.branches import AgentBranch, AgentRun, AgentTurn, PlainMessage
from chatmill.read.agents.dialects import LoggedAnswer, is_rollout, read_answers, read_request, rollout_histories
from chatmill.read.agents.streams import is_stream, join_stream, stream_events

SESSION_FIELDS = ("session_id", "run")
"""Not LiteLLM's `trace_id`, which is another one for each call."""
CALL_FIELDS = ("reward",)
CUT_MARK = "litellm_truncated"
REDACTED = "redacted-by-litellm"
KEY_MARK = "[key removed by chatmill capture]"
"""What `chatmill capture` writes in the place of a key that stands in a body."""


class CallOutcome(StrEnum):
    """Outcome of one logged call."""

    ROOT = "root"
    """It begins a history, of a task that is new in its run."""
    BRANCH = "branch"
    """It begins another history of a task that the run has already."""
    JOINED = "joined"
    """It continues a history."""
    REPEATED = "repeated"
    """It is the same response as an earlier one."""
    CUT = "cut"
    """Its answer did not come to its end."""
    FAILED = "failed"
    """It has no answer."""
    UNREADABLE = "unreadable"
    """It cannot be read, for a reason with a code."""


@dataclass(slots=True, kw_only=True)
class LoggedCall:
    """One record of a log."""

    run: str = ""
    outcome: CallOutcome = CallOutcome.UNREADABLE
    code: str = ""
    """Reason why it is unreadable."""
    sampled_tokens: int | None = None
    """Tokens of its answers, by their ids or by what the server counted."""
    has_ids: bool = False
    answers: list[AgentTurn] = field(default_factory=list)
    is_rollout: bool = False
    """Whether it was sampled for training, perhaps as one of a group with the same prompt."""
    lost_before: int = 0
    """Calls before it that were not recorded."""


def is_request_log(record: Mapping[str, Any]) -> bool:
    """Check for a request with its response."""
    has_response = any(key in record for key in ("response", "events"))
    if not has_response:
        return False
    if isinstance(record.get("request"), Mapping | str):
        return True
    if "responses_create_params" in record:
        return True
    # LiteLLM's payloads and its table of spend logs.
    return "messages" in record and any(key in record for key in ("call_type", "proxy_server_request"))


def read_request_log(file: AgentFile) -> Iterator[AgentRun]:
    """Yield the one run of a log, with its calls joined."""
    calls = CallJoiner(file.stem)
    for line in file.lines():
        if line.error is not None:
            calls.run.errors.append(line.error)
            continue
        calls.add_record(line.value, f"line {line.number}")
    yield calls.finish()


@dataclass(slots=True)
class _Chain:
    """A growing history of calls."""

    branch: AgentBranch


@dataclass(slots=True)
class _Tries:
    """Calls with the same request."""

    failures: int = 0
    """Failed and cut calls without a repeated one so far."""
    answers: list[AgentTurn] = field(default_factory=list)

    def take_failure(self) -> bool:
        """Use up a failed call as the reason for a repeated one."""
        if not self.failures:
            return False
        self.failures -= 1
        return True


class CallJoiner:
    """The calls of one log, in order."""

    def __init__(self, name: str) -> None:
        self.run = AgentRun(name, [])
        self._open: dict[str, list[_Chain]] = {}
        """Histories by the hash of all their messages, the last answer included."""
        self._answers: dict[tuple[str, str], str] = {}
        """Answers that were seen: request and answer, to the id of the response."""
        self._requests: dict[str, list[tuple[str, AgentTurn]]] = {}
        """Answers to each request, with their hashes."""
        self._histories: set[str] = set()
        """Hashes of everything that a request was seen to begin with."""
        self._roots: set[str] = set()
        """Tasks of histories, with their runs."""
        self.calls: list[LoggedCall] = []
        """All records, in order."""
        self._tries: dict[bytes, _Tries] = {}
        self.unused: set[int] = set()
        """Identities of turns that the client asked for again."""
        self._ends: dict[str, tuple[AgentBranch, int]] = {}
        """Where the history of each response ends, by its id."""

    def add_record(self, record: Any, place: str) -> None:
        """Add one record of the log.

        A fault is kept as an error.
        """
        call = LoggedCall()
        self.calls.append(call)
        try:
            self._add(record, place, call)
        except RecordError as error:
            call.outcome = CallOutcome.UNREADABLE
            call.code = error.code
            error.message = f"{place}: {error.message}"
            error.args = (error.message,)
            self.run.errors.append(error)

    def finish(self) -> AgentRun:
        """Return the run with all histories, in order."""
        repeated = sum(len(answers) - 1 for answers in self.unresolved())
        if repeated:
            self.run.lacks.add("mark which of several answers to one prompt was used", repeated)
        return self.run

    def unresolved(self) -> list[list[AgentTurn]]:
        """List groups of answers without a known choice.

        No later call contains one of a group's answers.
        """
        groups: list[list[AgentTurn]] = []
        for answers in self._requests.values():
            used = any(answer_hash in self._histories for answer_hash, _ in answers)
            if len(answers) > 1 and not used:
                groups.append([turn for _, turn in answers])
        return groups

    def _add(self, record: Any, place: str, call: LoggedCall) -> None:
        if not isinstance(record, Mapping):
            raise RecordError("a logged call must be an object", code="record_type")
        meta = _meta(record)
        call.run = meta.get("session", "")
        call.is_rollout = "responses_create_params" in record
        call.lost_before = _count(record.get("lost"))
        request, response, is_whole = _request_and_response(record)
        # Only captures know of repeated calls.
        tries = self._tries_of(request, call.run) if "complete" in record else _Tries()
        is_unexplained = _count(record.get("retry")) > 0 and not tries.take_failure()
        if request is None or response is None:
            tries.failures += 1
            call.outcome = CallOutcome.CUT if response is None and _is_cut(record) else CallOutcome.FAILED
            lacking = "end of cut streams" if call.outcome is CallOutcome.CUT else "answers of failed calls"
            self.run.lacks.add(lacking)
            return
        _refuse_redacted(request, response)
        turns, tools, unknown = read_request(request, self.run.lacks)
        if previous := request.get("previous_response_id"):
            if str(previous) not in self._ends:
                unknown = unknown or "the server holds the history (previous_response_id)"
            else:
                branch, end = self._ends[str(previous)]
                turns = _continue(branch.turns[:end], turns)
        call.sampled_tokens = _counted_tokens(response)
        if is_rollout(response):
            self._add_rollout(turns, tools, response, meta, place, call)
            return
        answers = read_answers(response, self.run.lacks)
        call.has_ids = bool(answers) and all("token_ids" in answer.message for answer in answers)
        if call.has_ids:
            call.sampled_tokens = sum(len(answer.message["token_ids"]) for answer in answers)
        is_whole = is_whole and bool(answers)
        if not is_whole:
            tries.failures += 1
            call.outcome = CallOutcome.CUT
            self.run.lacks.add("end of cut streams")
            return
        for answer in answers:
            answer.unknown = unknown or answer.unknown
            self._add_answer(turns, tools, answer, dict(meta), place, call)
        if is_unexplained:
            self._drop_earlier_try(tries)
        tries.answers += call.answers

    def _add_rollout(
        self,
        turns: list[AgentTurn],
        tools: list[Any],
        response: Mapping[str, Any],
        meta: dict[str, Any],
        place: str,
        call: LoggedCall,
    ) -> None:
        """Add the histories of a rollout."""
        histories = rollout_histories(response, self.run.lacks, place)
        # The task may stand in the response alone.
        opening = [*turns, *(histories[0] if histories else [])]
        session = meta.pop("session", None) or _first_words(opening, _hashes(opening, tools))
        call.outcome = CallOutcome.ROOT
        for history in histories:
            call.answers += [turn for turn in history if turn.key is not None]
            branch = AgentBranch([*turns, *history], tools=tools, fields={**meta, "session": session})
            self.run.branches.append(branch)
        call.has_ids = all("token_ids" in turn.message for turn in call.answers)

    def _add_answer(
        self,
        turns: list[AgentTurn],
        tools: list[Any],
        answer: LoggedAnswer,
        meta: dict[str, Any],
        place: str,
        call: LoggedCall,
    ) -> None:
        """Add one answer to a history.

        Its request continues the history, or begins another one.
        """
        hashes = _hashes(turns, tools, call.run)
        self._histories.update(hashes)
        request_hash = hashes[-1]
        answer_hash = _hash(request_hash, _as_history(answer))
        response_id = answer.response_id
        seen = self._answers.get((request_hash, answer_hash))
        # The same response twice is one answer; two responses with the same words are two.
        if seen is not None and (seen == response_id or not response_id):
            self.run.lacks.add("difference between repeats of a call")
            call.outcome = CallOutcome.REPEATED
            return
        self._answers[request_hash, answer_hash] = response_id

        key = None if answer.is_refusal else (place, answer.index)
        turn = AgentTurn(answer.message, key, answer.model, answer.unknown)
        call.answers.append(turn)
        # Several choices of one response, and several rollouts of one task, are no repeats of a call.
        if answer.index == 0 and not call.is_rollout:
            self._requests.setdefault(request_hash, []).append((answer_hash, turn))
        chain = self._continued(turns, hashes, answer.message.get("prompt_token_ids"))
        call.outcome = CallOutcome.JOINED
        if chain is None:
            chain = self._begin(turns, hashes, meta, call)
        known = len(chain.branch.turns)
        chain.branch.turns += [*turns[known:], turn]
        self._open.setdefault(answer_hash, []).append(chain)
        chain.branch.tools = tools
        if response_id:
            self._ends[response_id] = (chain.branch, len(chain.branch.turns))

    def _continued(self, turns: list[AgentTurn], hashes: list[str], prompt_ids: list[int] | None) -> _Chain | None:
        """Find the longest open history that a request continues."""
        for length in range(len(turns), 0, -1):
            for chain in self._open.get(hashes[length], ()):
                if _continues_ids(chain.branch.turns[-1].message, prompt_ids):
                    self._open[hashes[length]].remove(chain)
                    return chain
        return None

    def _begin(self, turns: list[AgentTurn], hashes: list[str], meta: dict[str, Any], call: LoggedCall) -> _Chain:
        """Begin a history with a request."""
        task = _first_words(turns, hashes)
        call.outcome = CallOutcome.BRANCH if task in self._roots else CallOutcome.ROOT
        self._roots.add(task)
        session = meta.pop("session", None) or task
        branch = AgentBranch([], fields={**meta, "session": session}, has_system=True)
        self.run.branches.append(branch)
        return _Chain(branch)

    def _tries_of(self, request: object, run: str) -> _Tries:
        """Find the earlier calls with the same request."""
        text = json.dumps([run, request], ensure_ascii=False, sort_keys=True, default=str)
        key = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
        return self._tries.setdefault(key, _Tries())

    def _drop_earlier_try(self, tries: _Tries) -> None:
        """Exclude an answer that the client asked for again."""
        candidates = [turn for turn in tries.answers if turn.key is not None]
        if len(candidates) > 1:
            # The same prompt may have been sampled several times on purpose.
            self.run.lacks.add("mark which of several answers was asked for again")
        elif candidates:
            candidates[0].key = None
            self.unused.add(id(candidates[0]))
            self.run.lacks.add("use of answers that were asked for again")


def _continues_ids(last: Mapping[str, Any], prompt_ids: list[int] | None) -> bool:
    """Check whether a prompt continues the ids before it.

    Histories without ids continue each other.
    """
    before = last.get("prompt_token_ids")
    if before is None or prompt_ids is None:
        return before is None and prompt_ids is None
    known = [*before, *last["token_ids"]]
    return prompt_ids[: len(known)] == known


def _is_cut(record: Mapping[str, Any]) -> bool:
    """Check for a cut answer."""
    status = record.get("status")
    return record.get("complete") is False and isinstance(status, int) and status < 400


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _counted_tokens(response: Mapping[str, Any]) -> int | None:
    """Return how many tokens the server says it sampled."""
    usage = response.get("usage")
    if not isinstance(usage, Mapping):
        return None
    for name in ("completion_tokens", "output_tokens"):
        count = usage.get(name)
        if isinstance(count, int):
            return count
    return None


def _request_and_response(record: Mapping[str, Any]) -> tuple[Any, Any, bool]:
    """Find request and response of a logged call.

    The response of a failed call is None. The third value tells whether the response is whole.
    """
    request = record.get("request", record.get("responses_create_params"))
    if request is None:
        request = record.get("proxy_server_request")
    request = _decoded(request)
    if isinstance(request, Mapping) and isinstance(_decoded(request.get("body")), Mapping):
        request = _decoded(request["body"])
    if not isinstance(request, Mapping) or not request:
        parameters = _decoded(record.get("model_parameters"))
        request = {
            **(parameters if isinstance(parameters, Mapping) else {}),
            "messages": _decoded(record.get("messages")),
        }
    status = record.get("status")
    is_failure = status == "failure" or (isinstance(status, int) and status >= 400)
    # What is left of an answer that was cut is no answer, and may end inside of an event.
    if is_failure or record.get("error") or record.get("complete") is False:
        return request, None, False
    response = record.get("response")
    if not response:
        response = record.get("events")
    _refuse_other_bytes(request, response)
    is_whole = True
    if isinstance(response, str) and not is_stream(response):
        response = _decoded(response)
    if is_stream(response):
        response, has_end = join_stream(stream_events(response))
        is_whole = is_whole and has_end
    if isinstance(response, Mapping) and isinstance(response.get("error"), Mapping):
        return request, None, False
    return request, response if isinstance(response, Mapping) else None, is_whole


def _decoded(value: Any) -> Any:
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        return decoded_text(value)
    return value


def _refuse_other_bytes(request: object, response: object) -> None:
    """Refuse bodies that are no JSON."""
    for name, body in (("request", request), ("response", response)):
        if isinstance(body, Mapping) and body.keys() == {"base64"}:
            raise RecordError(f"the {name} is no JSON", code="invalid_json", path=name)


def _refuse_redacted(request: Mapping[str, Any], response: Mapping[str, Any]) -> None:
    text = json.dumps([request, response], ensure_ascii=False, default=str)
    if CUT_MARK in text:
        raise RecordError("the log has cut texts in the middle (litellm_truncated)", code="text_cut")
    if KEY_MARK in text:
        raise RecordError("a key was taken out of the texts (chatmill capture)", code="text_cut")
    if REDACTED in text:
        raise RecordError("the texts were taken out of the log (redacted-by-litellm)", code="text_cut")


def _meta(record: Mapping[str, Any]) -> dict[str, Any]:
    """Collect the fields of a call for recipes."""
    meta = {name: record[name] for name in CALL_FIELDS if record.get(name) is not None}
    for name in SESSION_FIELDS:
        value = record.get(name)
        if isinstance(value, str) and value:
            meta["session"] = value
            break
    return meta


def _continue(earlier: list[AgentTurn], turns: list[AgentTurn]) -> list[AgentTurn]:
    """Put the stored history before new input.

    Servers do not take over instructions.
    """
    roles = ("system",)
    own = [turn for turn in turns if turn.message.get("role") in roles]
    rest = [turn for turn in turns if turn.message.get("role") not in roles]
    history = [AgentTurn(turn.message) for turn in earlier if turn.message.get("role") not in roles]
    return [*own, *history, *rest]


def _first_words(turns: list[AgentTurn], hashes: list[str]) -> str:
    """Name the task at the beginning of a call."""
    for position, turn in enumerate(turns):
        if turn.message.get("role") == "user":
            return hashes[position + 1][:16]
    return hashes[-1][:16]


def _hashes(turns: list[AgentTurn], tools: list[Any], run: str = "") -> list[str]:
    """Hash each beginning of a history, the empty one first.

    Histories of different runs have different hashes.
    """
    text = json.dumps([run, tools], ensure_ascii=False, sort_keys=True)
    hashes = [hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()]
    for turn in turns:
        hashes.append(_hash(hashes[-1], turn.message))
    return hashes


def _as_history(answer: LoggedAnswer) -> PlainMessage:
    """Return an answer as a later request holds it."""
    calls = answer.message.get("tool_calls")
    if not answer.has_object_arguments or not calls:
        return answer.message
    plain: list[Any] = []
    for call in calls:
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, str):
            # What is no JSON, no client can have parsed.
            with contextlib.suppress(RecordError):
                arguments = decoded_text(arguments)
        plain.append({**call, "function": {**function, "arguments": arguments}})
    return {**answer.message, "tool_calls": plain}


def _hash(before: str, message: Mapping[str, Any]) -> str:
    """Hash a history and one more message.

    Tokens and empty fields make no difference.
    """
    fields = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id")
    told = {name: message[name] for name in fields if message.get(name)}
    text = before + json.dumps(told, ensure_ascii=False, sort_keys=True)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()
