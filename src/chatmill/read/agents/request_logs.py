"""Logs of requests and responses: one model call per record, of any of the three common APIs.

Calls that continue an earlier one of the same log become one history; a rewritten history becomes another branch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from chatmill.errors import RecordError
from chatmill.json_values import decoded_text
from chatmill.read.agents.agent_file import AgentFile
from chatmill.read.agents.branches import AgentBranch, AgentRun, AgentTurn
from chatmill.read.agents.dialects import LoggedAnswer, is_rollout, read_answers, read_request, rollout_turns
from chatmill.read.agents.streams import is_stream, join_stream, stream_events

SESSION_FIELDS = ("session_id", "run", "trace_id")
CALL_FIELDS = ("reward",)
CUT_MARK = "litellm_truncated"
REDACTED = "redacted-by-litellm"


def is_request_log(record: Mapping[str, Any]) -> bool:
    """Return whether a record holds a request and its response."""
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
    """Yield the one run of a log: its calls, joined where one continues another."""
    calls = CallJoiner(file.stem)
    for line in file.lines():
        if line.error is not None:
            calls.run.errors.append(line.error)
            continue
        calls.add_record(line.value, f"line {line.number}")
    yield calls.finish()


@dataclass(slots=True)
class _Chain:
    """A history that grows with each call that continues it."""

    branch: AgentBranch
    response_ids: set[str] = field(default_factory=set)


class CallJoiner:
    """The calls of one log, in order."""

    def __init__(self, name: str) -> None:
        self.run = AgentRun(name, [])
        self._open: dict[str, list[_Chain]] = {}
        """Histories by the hash of all their messages, the last answer included."""
        self._answers: dict[tuple[str, str], str] = {}
        """Answers that were seen: request and answer, to the id of the response."""
        self._requests: dict[str, int] = {}
        self._turns_of_response: dict[str, list[AgentTurn]] = {}

    def add_record(self, record: Any, place: str) -> None:
        """Add one record of the log; what is wrong with it is kept as an error."""
        try:
            self._add(record, place)
        except RecordError as error:
            error.message = f"{place}: {error.message}"
            error.args = (error.message,)
            self.run.errors.append(error)

    def finish(self) -> AgentRun:
        """Return the run with all histories, in the order of their first calls."""
        repeated = sum(count - 1 for count in self._requests.values())
        if repeated:
            self.run.lacks.add("mark which of several answers to one prompt was used", repeated)
        return self.run

    def _add(self, record: Any, place: str) -> None:
        if not isinstance(record, Mapping):
            raise RecordError("a logged call must be an object", code="record_type")
        request, response, is_whole = _request_and_response(record)
        if request is None or response is None:
            self.run.lacks.add("answers of failed calls")
            return
        _refuse_redacted(request, response)
        turns, tools, unknown = read_request(request, self.run.lacks)
        if previous := request.get("previous_response_id"):
            if str(previous) not in self._turns_of_response:
                unknown = unknown or "the server holds the history (previous_response_id)"
            else:
                turns = _continue(self._turns_of_response[str(previous)], turns)
        if is_rollout(response):
            self._add_rollout(turns, tools, response, _meta(record), place)
            return
        answers = read_answers(response, self.run.lacks)
        is_whole = is_whole and bool(answers)
        if not is_whole:
            self.run.lacks.add("end of cut streams")
            return
        for answer in answers:
            self._add_answer(turns, tools, answer, _meta(record), unknown or answer.unknown, place)

    def _add_rollout(
        self, turns: list[AgentTurn], tools: list[Any], response: Mapping[str, Any], meta: dict[str, Any], place: str
    ) -> None:
        """Add a history that is whole in one record."""
        session = meta.pop("session", None) or _first_words(turns, _hashes(turns, tools))
        answers = rollout_turns(response, self.run.lacks, place)
        branch = AgentBranch([*turns, *answers], tools=tools, fields={**meta, "session": session})
        self.run.branches.append(branch)

    def _add_answer(
        self,
        turns: list[AgentTurn],
        tools: list[Any],
        answer: LoggedAnswer,
        meta: dict[str, Any],
        unknown: str,
        place: str,
    ) -> None:
        """Add one answer to the history that its request continues, or begin another one."""
        hashes = _hashes(turns, tools)
        request_hash = hashes[-1]
        answer_hash = _hash(request_hash, answer.message)
        response_id = answer.response_id
        seen = self._answers.get((request_hash, answer_hash))
        # The same response twice is one answer; two responses with the same words are two.
        if seen is not None and (seen == response_id or not response_id):
            self.run.lacks.add("difference between repeats of a call")
            return
        self._answers[request_hash, answer_hash] = response_id
        self._requests[request_hash] = self._requests.get(request_hash, 0) + 1

        key = None if answer.is_refusal else (place, answer.index)
        turn = AgentTurn(answer.message, key, answer.model, unknown)
        chain = self._continued(turns, hashes, meta, "prompt_token_ids" in answer.message)
        known = len(chain.branch.turns)
        chain.branch.turns += [*turns[known:], turn]
        self._open.setdefault(answer_hash, []).append(chain)
        chain.branch.tools = tools
        if response_id:
            self._turns_of_response[response_id] = list(chain.branch.turns)

    def _continued(
        self, turns: list[AgentTurn], hashes: list[str], meta: dict[str, Any], has_prompt_ids: bool
    ) -> _Chain:
        """Return the longest history that these messages continue and that nothing else has continued, or a new one."""
        for length in range(len(turns), 0, -1):
            for chain in self._open.get(hashes[length], ()):
                last = chain.branch.turns[-1]
                # Answers of one record either all carry the ids of their prompts, or none does.
                if ("prompt_token_ids" in last.message) == has_prompt_ids:
                    self._open[hashes[length]].remove(chain)
                    return chain
        session = meta.pop("session", None) or _first_words(turns, hashes)
        branch = AgentBranch([], fields={**meta, "session": session}, has_system=True)
        self.run.branches.append(branch)
        return _Chain(branch)


def _request_and_response(record: Mapping[str, Any]) -> tuple[Any, Any, bool]:
    """Return request and response of a logged call, and whether the response is whole; None for a failed call."""
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
    if status == "failure" or (isinstance(status, int) and status >= 400) or record.get("error"):
        return request, None, False
    response = record.get("response")
    if not response:
        response = record.get("events")
    is_whole = record.get("complete") is not False
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


def _refuse_redacted(request: Mapping[str, Any], response: Mapping[str, Any]) -> None:
    text = json.dumps([request, response], ensure_ascii=False, default=str)
    if CUT_MARK in text:
        raise RecordError("the log has cut texts in the middle (litellm_truncated)", code="text_cut")
    if REDACTED in text:
        raise RecordError("the texts were taken out of the log (redacted-by-litellm)", code="text_cut")


def _meta(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the log says about a call that recipes may ask for."""
    meta = {name: record[name] for name in CALL_FIELDS if record.get(name) is not None}
    for name in SESSION_FIELDS:
        value = record.get(name)
        if isinstance(value, str) and value:
            meta["session"] = value
            break
    return meta


def _continue(earlier: list[AgentTurn], turns: list[AgentTurn]) -> list[AgentTurn]:
    """Return the history that the server puts before new input; instructions are not taken over."""
    roles = ("system",)
    own = [turn for turn in turns if turn.message.get("role") in roles]
    rest = [turn for turn in turns if turn.message.get("role") not in roles]
    history = [AgentTurn(turn.message) for turn in earlier if turn.message.get("role") not in roles]
    return [*own, *history, *rest]


def _first_words(turns: list[AgentTurn], hashes: list[str]) -> str:
    """Return a name for all calls that begin with the same task."""
    for position, turn in enumerate(turns):
        if turn.message.get("role") == "user":
            return hashes[position + 1][:16]
    return hashes[-1][:16]


def _hashes(turns: list[AgentTurn], tools: list[Any]) -> list[str]:
    """Return the hash of each beginning of a history, the empty one first."""
    text = json.dumps(tools, ensure_ascii=False, sort_keys=True)
    hashes = [hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()]
    for turn in turns:
        hashes.append(_hash(hashes[-1], turn.message))
    return hashes


def _hash(before: str, message: Mapping[str, Any]) -> str:
    """Return the hash of a history and one more message; tokens and empty fields make no difference."""
    fields = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id")
    told = {name: message[name] for name in fields if message.get(name)}
    text = before + json.dumps(told, ensure_ascii=False, sort_keys=True)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()
