"""Convert requests and responses of three APIs to turns.

The APIs are chat completions, Responses and Anthropic Messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from chatmill.errors import RecordError
from chatmill.read.agents.answer_parts import AnswerParts
from chatmill.read.agents.anthropic_content import add_answer_blocks, result_content, user_messages
from chatmill.read.agents.branches import AgentTurn, Lacking, PlainMessage
from chatmill.read.agents.responses_items import add_answer_item, is_answer_item, other_message, plain_tools
from chatmill.read.part_shapes import plain_tool

CHAT_FIELDS = ("role", "content", "name", "tool_calls", "function_call", "tool_call_id")
REASONING = ("reasoning_content", "reasoning")
TOKEN_MARK = "token_id:"
ITEM_TOKENS = {
    "prompt_token_ids": "prompt_token_ids",
    "generation_token_ids": "token_ids",
    "generation_log_probs": "logprobs",
}
"""Fields of items in NeMo Gym's rollouts, and of messages here."""
CUT_REASONS = ("length", "max_tokens", "max_output_tokens", "model_context_window_exceeded")


@dataclass(slots=True)
class LoggedAnswer:
    """One answer to a request."""

    message: PlainMessage
    model: str = ""
    response_id: str = ""
    index: int = 0
    unknown: str = ""
    """Why the prompt that the model saw was another one than the request, or the answer cannot be written."""
    is_refusal: bool = False
    has_object_arguments: bool = False
    """Whether later requests hold the arguments of its calls as objects, so that their text makes no difference."""


def read_request(request: Mapping[str, Any], lacks: Lacking) -> tuple[list[AgentTurn], list[Any], str]:
    """Read the messages and tools of a request.

    The third value is the reason why these are not the whole prompt, or "".
    """
    if "input" in request:
        return _responses_request(request, lacks)
    messages = request.get("messages")
    if isinstance(request.get("prompt"), str) and messages is None:
        return [AgentTurn({"role": "user", "content": request["prompt"]})], [], "a prompt without messages"
    if not isinstance(messages, list):
        raise RecordError("the request has no list of messages and no input", code="missing_field", path="request")
    if is_anthropic_request(request):
        return _anthropic_request(request, messages, lacks)
    turns = [AgentTurn(chat_message(message, lacks)) for message in messages]
    return turns, _chat_tools(request), ""


def read_answers(response: Mapping[str, Any], lacks: Lacking) -> list[LoggedAnswer]:
    """Read the answers of a response."""
    if isinstance(response.get("choices"), list):
        return _chat_answers(response, lacks)
    if isinstance(response.get("output"), list):
        return _responses_answer(response, lacks)
    if isinstance(response.get("content"), list):
        return _anthropic_answer(response, lacks)
    raise RecordError("the response has no choices, output or content", code="missing_field", path="response")


def chat_message(message: Any, lacks: Lacking) -> PlainMessage:
    """Reduce a chat message to the fields of templates."""
    if not isinstance(message, Mapping):
        raise RecordError("a message must be an object", code="message_type", path="request.messages")
    plain = {name: message[name] for name in CHAT_FIELDS if message.get(name) is not None}
    for name in REASONING:
        if isinstance(message.get(name), str) and message[name]:
            plain["reasoning_content"] = message[name]
            break
    if "content" not in plain:
        plain["content"] = None if plain.get("tool_calls") or plain.get("function_call") else ""
    if isinstance(plain["content"], list):
        plain["content"] = result_content(plain["content"], lacks) if _is_text(plain["content"]) else plain["content"]
    return plain


def is_anthropic_request(request: Mapping[str, Any]) -> bool:
    """Check for a request of Anthropic's API."""
    if "system" in request or "anthropic_version" in request:
        return True
    tools = request.get("tools")
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, Mapping) and "input_schema" in tool:
            return True
    for message in request["messages"]:
        content = message.get("content") if isinstance(message, Mapping) else None
        for block in content if isinstance(content, list) else ():
            if isinstance(block, Mapping) and block.get("type") in ("tool_use", "tool_result", "thinking"):
                return True
    return False


def _is_text(parts: list[Any]) -> bool:
    return all(isinstance(part, Mapping) and part.get("type") == "text" for part in parts)


def _chat_tools(request: Mapping[str, Any]) -> list[Any]:
    tools = request.get("tools")
    if not tools and isinstance(request.get("functions"), list):
        return [{"type": "function", "function": function} for function in request["functions"]]
    return tools if isinstance(tools, list) else []


def _chat_answers(response: Mapping[str, Any], lacks: Lacking) -> list[LoggedAnswer]:
    answers: list[LoggedAnswer] = []
    for position, choice in enumerate(response["choices"]):
        if not isinstance(choice, Mapping) or not isinstance(choice.get("message"), Mapping):
            raise RecordError("a choice has no message", code="missing_field", path=f"response.choices[{position}]")
        said = choice["message"]
        message = chat_message({**said, "role": "assistant"}, lacks)
        refusal = said.get("refusal")
        if refusal and not message.get("content"):
            message["content"] = refusal
        reason = choice.get("finish_reason")
        if reason in CUT_REASONS:
            message["finish_reason"] = "length"
        message |= _tokens(response, choice, lacks)
        index = choice.get("index")
        answers.append(
            LoggedAnswer(
                message=message,
                model=str(response.get("model") or ""),
                response_id=str(response.get("id") or ""),
                index=index if isinstance(index, int) else position,
                is_refusal=bool(refusal) or reason == "content_filter",
            )
        )
    return answers


def _tokens(response: Mapping[str, Any], choice: Mapping[str, Any], lacks: Lacking) -> dict[str, Any]:
    """Read the ids and log-probabilities of an answer.

    The names are those of vLLM, SGLang and LiteLLM.
    """
    more = choice.get("provider_specific_fields")
    sources = [choice, more if isinstance(more, Mapping) else {}]
    ids = None
    prompt_ids = response.get("prompt_token_ids")
    for source in sources:
        ids = ids or source.get("token_ids") or source.get("response_token_ids")
        prompt_ids = prompt_ids or source.get("prompt_token_ids")
    logprobs = choice.get("logprobs")
    entries = logprobs.get("content") if isinstance(logprobs, Mapping) else None
    entries = entries if isinstance(entries, list) else []
    if not ids and entries:
        ids = _marked_ids(entries)
    lacks.see("token ids", is_missing=not ids)
    if not ids:
        return {}
    for name, found_ids in (("token_ids", ids), ("prompt_token_ids", prompt_ids or [])):
        if not isinstance(found_ids, list):
            raise RecordError(f"{name} must be a list", code="bad_token_ids", path=f"response.{name}")
    _check_usage(response, ids)
    found: dict[str, Any] = {"token_ids": ids}
    if prompt_ids:
        found["prompt_token_ids"] = prompt_ids
    if entries and len(entries) == len(ids):
        found["logprobs"] = [entry.get("logprob") if isinstance(entry, Mapping) else None for entry in entries]
    return found


def _marked_ids(entries: list[Any]) -> list[int] | None:
    """Read ids written as texts of tokens (`token_id:123`), by vLLM."""
    ids: list[int] = []
    for entry in entries:
        token = entry.get("token") if isinstance(entry, Mapping) else None
        if not isinstance(token, str) or not token.startswith(TOKEN_MARK):
            return None
        digits = token.removeprefix(TOKEN_MARK)
        if not digits.isdecimal():
            return None
        ids.append(int(digits))
    return ids


def _check_usage(response: Mapping[str, Any], ids: list[Any]) -> None:
    """Refuse incomplete ids.

    Older servers lost some in streams with calls.
    """
    usage = response.get("usage")
    counted = usage.get("completion_tokens") if isinstance(usage, Mapping) else None
    is_only = len(response["choices"]) == 1
    if is_only and isinstance(counted, int) and counted != len(ids):
        raise RecordError(
            f"the response has {len(ids)} token ids, and its usage counts {counted} tokens: some ids are lost",
            code="bad_token_ids",
            path="response.choices[0].token_ids",
        )


def _anthropic_request(
    request: Mapping[str, Any], messages: list[Any], lacks: Lacking
) -> tuple[list[AgentTurn], list[Any], str]:
    turns: list[AgentTurn] = []
    if request.get("system"):
        turns.append(AgentTurn({"role": "system", "content": result_content(request["system"], lacks)}))
    for message in messages:
        if not isinstance(message, Mapping):
            raise RecordError("a message must be an object", code="message_type", path="request.messages")
        role = message.get("role")
        if role == "assistant":
            parts = AnswerParts(Lacking())
            add_answer_blocks(parts, message.get("content"))
            turns.append(AgentTurn(parts.message()))
        elif role == "user":
            turns += map(AgentTurn, user_messages(message.get("content"), lacks))
        else:
            turns.append(AgentTurn({"role": role, "content": result_content(message.get("content"), lacks)}))
    tools = request.get("tools")
    return turns, [plain_tool(tool) for tool in tools] if isinstance(tools, list) else [], ""


def _anthropic_answer(response: Mapping[str, Any], lacks: Lacking) -> list[LoggedAnswer]:
    parts = AnswerParts(lacks)
    add_answer_blocks(parts, response["content"])
    message = parts.message()
    reason = response.get("stop_reason")
    if reason in CUT_REASONS:
        message["finish_reason"] = "length"
    unknown = parts.doubt
    edits = response.get("context_management")
    if isinstance(edits, Mapping) and edits.get("applied_edits"):
        unknown = "the server edited the prompt (context_management)"
    if reason == "pause_turn":
        unknown = unknown or "a paused turn"
    return [
        LoggedAnswer(
            message=message,
            model=str(response.get("model") or ""),
            response_id=str(response.get("id") or ""),
            unknown=unknown,
            is_refusal=reason == "refusal",
            has_object_arguments=True,
        )
    ]


def _responses_request(request: Mapping[str, Any], lacks: Lacking) -> tuple[list[AgentTurn], list[Any], str]:
    turns: list[AgentTurn] = []
    if isinstance(request.get("instructions"), str) and request["instructions"]:
        turns.append(AgentTurn({"role": "system", "content": request["instructions"]}))
    given = request["input"]
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise RecordError("the input must be a text or a list of items", code="messages_type", path="request.input")
    turns += item_turns(given, lacks)
    unknown = ""
    if request.get("conversation"):
        unknown = "the server holds the history (conversation)"
    elif request.get("truncation") == "auto":
        unknown = "the server may have cut the prompt (truncation: auto)"
    elif request.get("context_management"):
        unknown = "the server may have edited the prompt (context_management)"
    return turns, plain_tools(request.get("tools")) or [], unknown


def item_turns(items: list[Any], lacks: Lacking) -> list[AgentTurn]:
    """Group items into turns.

    Neighbouring items of the model are one answer.
    """
    turns: list[AgentTurn] = []
    parts = AnswerParts(Lacking())
    for item in items:
        if not isinstance(item, Mapping):
            raise RecordError("an item must be an object", code="message_type", path="request.input")
        if is_answer_item(item):
            add_answer_item(parts, item)
            continue
        if parts:
            turns.append(AgentTurn(parts.message()))
            parts = AnswerParts(Lacking())
        message = other_message(item, lacks)
        if message is not None:
            turns.append(AgentTurn(message))
    if parts:
        turns.append(AgentTurn(parts.message()))
    return turns


def is_rollout(response: Mapping[str, Any]) -> bool:
    """Check whether a response holds several answers of one run.

    NeMo Gym writes such responses: results of tools between the answers, ids at the end of each answer, or one list of
    items for each step.
    """
    output = response.get("output")
    if not isinstance(output, list):
        return False
    if sum(_has_tokens(item) for item in output) > 1:
        return True
    return any(isinstance(item, list) or (isinstance(item, Mapping) and not is_answer_item(item)) for item in output)


def rollout_histories(response: Mapping[str, Any], lacks: Lacking, place: str) -> list[list[AgentTurn]]:
    """List the histories of a rollout, after its request.

    A rollout of transitions has a history for each step, of which only the last answer is new.
    """
    output = response["output"]
    model = str(response.get("model") or "")
    if any(isinstance(item, list) for item in output):
        histories = _transition_histories(output, lacks, place, model)
    else:
        histories = [_rollout_turns(output, lacks, place, model)]
    if response.get("status") == "incomplete":
        answers = [turn for turn in histories[-1] if turn.message.get("role") == "assistant"]
        for turn in answers[-1:]:
            turn.message["finish_reason"] = "length"
    return histories


def _transition_histories(output: list[Any], lacks: Lacking, place: str, model: str) -> list[list[AgentTurn]]:
    """List the histories of transitions: lists of all items up to and after each answer."""
    histories: list[list[AgentTurn]] = []
    for step, items in enumerate(output):
        if not isinstance(items, list):
            raise RecordError("a transition must be a list of items", code="message_type", path="response.output")
        # The last transition repeats the answers of all others, so it alone is counted.
        step_lacks = lacks if step == len(output) - 1 else Lacking()
        turns = _rollout_turns(items, step_lacks, f"{place}.{step}", model)
        answers = [turn for turn in turns if turn.key is not None]
        for turn in answers[:-1]:
            turn.key = None
        if histories and _messages(turns[: len(histories[-1])]) == _messages(histories[-1]):
            # The step continues the one before, so both are one history.
            histories[-1] += turns[len(histories[-1]) :]
        else:
            histories.append(turns)
    return histories


def _messages(turns: list[AgentTurn]) -> list[PlainMessage]:
    return [turn.message for turn in turns]


def _has_tokens(item: object) -> bool:
    return isinstance(item, Mapping) and bool(item.get("generation_token_ids"))


def _rollout_turns(items: list[Any], lacks: Lacking, place: str, model: str) -> list[AgentTurn]:
    """Group items into turns.

    Neighbouring items of the model are one answer, up to the item with the ids of the answer.
    """
    turns: list[AgentTurn] = []
    group: list[Mapping[str, Any]] = []
    for item in [*items, None]:
        if item is not None and not isinstance(item, Mapping):
            raise RecordError("an item must be an object", code="message_type", path="response.output")
        is_answer = item is not None and is_answer_item(item)
        if item is not None and is_answer:
            group.append(item)
        if group and (not is_answer or _has_tokens(item)):
            turns.append(_group_turn(group, lacks, (place, len(turns)), model))
            group = []
        message = None if item is None or is_answer else other_message(item, lacks)
        if message is not None:
            turns.append(AgentTurn(message))
    if any("token_ids" in turn.message for turn in turns):
        for turn in turns:
            if "token_ids" not in turn.message:
                # The text of an answer has no place in a record of ids, so it is only context there.
                turn.key = None
    return turns


def _item_tokens(items: Iterable[Any]) -> dict[str, Any]:
    """Find the ids and log-probabilities that one of the items carries."""
    tokens: dict[str, Any] = {}
    for item in items:
        for name, field in ITEM_TOKENS.items():
            if isinstance(item, Mapping) and item.get(name):
                tokens[field] = item[name]
    return tokens


def _group_turn(group: list[Mapping[str, Any]], lacks: Lacking, key: tuple[str, int], model: str) -> AgentTurn:
    """Make one answer of items."""
    parts = AnswerParts(lacks)
    for item in group:
        add_answer_item(parts, item)
    tokens = _item_tokens(group)
    lacks.see("token ids", is_missing="token_ids" not in tokens)
    return AgentTurn({**parts.message(), **tokens}, key, model, parts.doubt)


def _responses_answer(response: Mapping[str, Any], lacks: Lacking) -> list[LoggedAnswer]:
    """Return the one answer of a response."""
    if response.get("status") not in (None, "completed", "incomplete"):
        return []
    parts = AnswerParts(lacks)
    for item in response["output"]:
        if not isinstance(item, Mapping):
            raise RecordError("an item must be an object", code="message_type", path="response.output")
        add_answer_item(parts, item)
    message = parts.message() | _item_tokens(response["output"])
    details = response.get("incomplete_details")
    if response.get("status") == "incomplete":
        message["finish_reason"] = "length"
    is_filtered = isinstance(details, Mapping) and details.get("reason") == "content_filter"
    unknown = parts.doubt
    if response.get("input_transformations"):
        unknown = "the server took parts out of the prompt (input_transformations)"
    return [
        LoggedAnswer(
            message=message,
            model=str(response.get("model") or ""),
            response_id=str(response.get("id") or ""),
            unknown=unknown,
            is_refusal=is_filtered,
        )
    ]
