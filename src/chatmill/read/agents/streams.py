"""Join streamed answers of three APIs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from chatmill.errors import RecordError
from chatmill.json_values import decoded_text

DONE = "[DONE]"
JOINED_TEXTS = ("content", "refusal", "reasoning_content", "reasoning")
FINAL_EVENTS = ("response.completed", "response.incomplete", "response.failed")


def stream_events(stream: object) -> list[Any]:
    """Decode the events of a stream.

    A stream is a text of server-sent events, or a list of events or texts.

    Raises:
        RecordError: An event is no JSON.
    """
    if isinstance(stream, str):
        return list(_text_events(stream))
    events: list[Any] = []
    for event in stream if isinstance(stream, list) else ():
        if isinstance(event, str):
            events += _text_events(event)
        elif isinstance(event, Mapping) and isinstance(event.get("data"), str | Mapping) and "type" not in event:
            data = event["data"]
            events += _text_events(f"data: {data}") if isinstance(data, str) else [data]
        else:
            events.append(event)
    return events


def is_stream(value: object) -> bool:
    """Check for a stream."""
    if isinstance(value, str):
        return value.lstrip().startswith(("data:", "event:", ":"))
    return isinstance(value, list)


def join_stream(events: Sequence[Any]) -> tuple[dict[str, Any], bool]:
    """Join the events of a stream into a response.

    The second value tells whether the stream came to its proper end.

    Raises:
        RecordError: The stream is none of the three APIs, or an event has a field of a wrong type.
    """
    try:
        return _join(events)
    except RecordError:
        raise
    except (TypeError, ValueError) as error:
        raise RecordError(f"an event of the stream has a field of a wrong type: {error}", code="bad_stream") from None


def _join(events: Sequence[Any]) -> tuple[dict[str, Any], bool]:
    for event in events:
        if not isinstance(event, Mapping):
            continue
        if event.get("type") == "message_start":
            return _join_anthropic(events)
        if str(event.get("type", "")).startswith("response."):
            return _join_responses(events)
        if "choices" in event:
            return _join_chat(events)
    raise RecordError("the stream is none of chat completions, Responses or Messages", code="bad_stream")


def _text_events(text: str) -> Iterator[Any]:
    if text.lstrip().startswith("{"):
        yield decoded_text(text)
        return
    if text == DONE:
        yield DONE
        return
    if text.strip() and not text.lstrip().startswith(("data:", "event:", "id:", "retry:", ":")):
        raise RecordError(f"an event of the stream is no JSON: {text[:40]!r}", code="bad_stream")
    # An event may have several lines of data; a blank line ends it.
    for block in text.replace("\r\n", "\n").split("\n\n"):
        lines = [line[5:].removeprefix(" ") for line in block.split("\n") if line.startswith("data:")]
        data = "\n".join(lines)
        if data == DONE:
            yield DONE
        elif data:
            yield decoded_text(data)


def _join_chat(events: Sequence[Any]) -> tuple[dict[str, Any], bool]:
    response: dict[str, Any] = {"choices": []}
    choices: dict[int, dict[str, Any]] = {}
    for chunk in events:
        if not isinstance(chunk, Mapping):
            continue
        for name in ("id", "model", "prompt_token_ids"):
            if chunk.get(name) is not None:
                response.setdefault(name, chunk[name])
        if chunk.get("usage") is not None:
            response["usage"] = chunk["usage"]
        for delta in _objects(chunk.get("choices")):
            _add_chat_delta(choices.setdefault(int(delta.get("index") or 0), _empty_choice()), delta)
    for index, choice in sorted(choices.items()):
        calls = choice.pop("_calls")
        if calls:
            choice["message"]["tool_calls"] = [calls[number] for number in sorted(calls)]
        response["choices"].append({"index": index, **choice})
    ended = all(choice["finish_reason"] is not None for choice in choices.values())
    return response, bool(choices) and ended


def _empty_choice() -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": None}, "finish_reason": None, "_calls": {}}


def _add_chat_delta(choice: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Add a chunk of one choice."""
    delta = part.get("delta")
    delta = delta if isinstance(delta, Mapping) else {}
    message = choice["message"]
    for name in JOINED_TEXTS:
        if isinstance(delta.get(name), str):
            message[name] = (message.get(name) or "") + delta[name]
    for call in _objects(delta.get("tool_calls")):
        _add_call_delta(choice["_calls"], call)
    if part.get("finish_reason") is not None:
        choice["finish_reason"] = part["finish_reason"]
    for name in ("token_ids", "prompt_token_ids"):
        if isinstance(part.get(name), list):
            choice.setdefault(name, []).extend(part[name])
    logprobs = part.get("logprobs")
    if isinstance(logprobs, Mapping) and isinstance(logprobs.get("content"), list):
        choice.setdefault("logprobs", {"content": []})["content"] += logprobs["content"]


def _add_call_delta(calls: dict[int, dict[str, Any]], delta: Mapping[str, Any]) -> None:
    """Add a fragment of a tool call, found by its index."""
    index = int(delta.get("index") or 0)
    call = calls.setdefault(index, {"id": None, "type": "function", "function": {"name": None, "arguments": ""}})
    function = delta.get("function")
    function = function if isinstance(function, Mapping) else {}
    # Some servers repeat id and name in each fragment, so the first one counts.
    call["id"] = call["id"] or delta.get("id")
    call["function"]["name"] = call["function"]["name"] or function.get("name")
    call["function"]["arguments"] += function.get("arguments") or ""


def _join_responses(events: Sequence[Any]) -> tuple[dict[str, Any], bool]:
    items: dict[int, Any] = {}
    response: dict[str, Any] = {}
    for event in _objects(list(events)):
        kind = event.get("type")
        if kind == "response.output_item.done":
            items[int(event.get("output_index") or 0)] = event.get("item")
        elif kind in ("response.created", *FINAL_EVENTS) and isinstance(event.get("response"), Mapping):
            response = dict(event["response"])
        if kind in FINAL_EVENTS:
            response["output"] = response.get("output") or [items[index] for index in sorted(items)]
            return response, True
    response["output"] = [items[index] for index in sorted(items)]
    return response, False


def _join_anthropic(events: Sequence[Any]) -> tuple[dict[str, Any], bool]:
    response: dict[str, Any] = {"content": []}
    blocks: dict[int, dict[str, Any]] = {}
    is_ended = False
    for event in _objects(list(events)):
        match event.get("type"):
            case "message_start":
                response = {**_object(event.get("message")), "content": []}
            case "content_block_start":
                blocks[int(event.get("index") or 0)] = dict(_object(event.get("content_block")))
            case "content_block_delta":
                _add_block_delta(blocks.setdefault(int(event.get("index") or 0), {}), _object(event.get("delta")))
            case "message_delta":
                response |= _object(event.get("delta"))
                response["usage"] = {**_object(response.get("usage")), **_object(event.get("usage"))}
                if event.get("context_management"):
                    response["context_management"] = event["context_management"]
            case "message_stop":
                is_ended = True
    for index in sorted(blocks):
        block = blocks[index]
        # The text of the arguments is what the model wrote; parsing it would lose that.
        text = block.pop("_json", None)
        if text is not None:
            block["input"] = text or "{}"
        response["content"].append(block)
    return response, is_ended


def _add_block_delta(block: dict[str, Any], delta: Mapping[str, Any]) -> None:
    """Add a delta to its content block."""
    match delta.get("type"):
        case "text_delta":
            block["text"] = (block.get("text") or "") + str(delta.get("text") or "")
        case "thinking_delta":
            block["thinking"] = (block.get("thinking") or "") + str(delta.get("thinking") or "")
        case "signature_delta":
            block["signature"] = delta.get("signature")
        case "input_json_delta":
            block["_json"] = (block.get("_json") or "") + str(delta.get("partial_json") or "")


def _objects(values: object) -> list[Mapping[str, Any]]:
    return [value for value in values if isinstance(value, Mapping)] if isinstance(values, list) else []


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
