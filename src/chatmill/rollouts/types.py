"""Values of rollouts: prompts, answers with their proof, extensions, and the reasons against a proof."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversation import Conversation
from chatmill.errors import ChatmillError


class _Explained(StrEnum):
    """A choice with a sentence for people."""

    sentence: str

    def __new__(cls, value: str, sentence: str) -> _Explained:
        """Make a member of a value and its sentence."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.sentence = sentence
        return member


class Proof(_Explained):
    """How far the template confirms a parsed message."""

    WRITTEN = "written", "The template writes the prompt and exactly this answer from the message."
    AMBIGUOUS = "ambiguous", "The template writes this answer from several different messages."
    NOT_WRITTEN = "not_written", "The template writes this answer from no message that was found."


class Reason(_Explained):
    """Why an answer or a call has no proof."""

    CUT_BY_LENGTH = "cut_by_length", "The answer was cut off before its stop token."
    NO_STOP = "no_stop", "The answer does not end with a stop token."
    MALFORMED_CALL = "malformed_call", "A tool call begins and does not go on in the template's form."
    UNKNOWN_TOOL = "unknown_tool", "A call names a tool that is not among the given tools."
    ARGUMENTS_NOT_JSON = "arguments_not_json", "The arguments of a call are no JSON object."
    STRIPPED_TEXT = "stripped_text", "The template would write this text in another way, mostly other white space."
    SPECIAL_IN_TEXT = "special_in_text", "A special token stands where the template writes none."
    INVALID_UTF8 = "invalid_utf8", "The bytes of the tokens are no valid UTF-8."
    FORM_NOT_DERIVED = "form_not_derived", "The answer has marks of a call, and the template shows no form of calls."
    TWO_READINGS = "two_readings", "Different messages are written as this answer, and the tools do not decide."


class CallStatus(_Explained):
    """What is known of one parsed call."""

    OK = "ok", "The call is complete."
    MALFORMED_CALL = "malformed_call", Reason.MALFORMED_CALL.sentence
    UNKNOWN_TOOL = "unknown_tool", Reason.UNKNOWN_TOOL.sentence
    ARGUMENTS_NOT_JSON = "arguments_not_json", Reason.ARGUMENTS_NOT_JSON.sentence
    TWO_READINGS = "two_readings", Reason.TWO_READINGS.sentence


class HistoryKind(_Explained):
    """What the next prompt holds of earlier answers."""

    SAMPLED = "sampled", "The ids that were sent and sampled, and then what the template adds."
    TEMPLATE = "template", "What the template writes for the whole conversation."


class ExtensionRefused(ChatmillError):  # noqa: N818
    """A next prompt that begins with the sampled ids cannot be proved."""

    def __init__(self, message: str, reason: str) -> None:
        """`reason` is a short stable code."""
        self.reason = reason
        super().__init__(message)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """The ids that a model is given.

    Attributes:
        ids: Token ids.
        kinds: Kind of each token (`chatmill.core.kinds`).
        messages: Index of the message of each token, -1 for none.
        conversation: The messages and tools behind the prompt.
        text: The template's own text of the prompt.
    """

    ids: list[int]
    kinds: NDArray[np.uint8] = field(repr=False)
    messages: NDArray[np.int32] = field(repr=False)
    conversation: Conversation = field(repr=False)
    text: str = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Extension(Prompt):
    """The prompt of the next call.

    Attributes:
        agrees_with_template: Whether the template writes the same text for the whole conversation.
        inserted_stop: The stop token that the sampled ids lacked, or None.
    """

    agrees_with_template: bool
    inserted_stop: int | None = None


@dataclass(frozen=True, kw_only=True)
class ParsedCall:
    """One tool call of an answer.

    Attributes:
        name: Name of the tool, or an empty text.
        arguments: Arguments as JSON text; verbatim if the answer has JSON.
        raw: The text of the call in the answer.
        start: Offset of its first token in the sampled ids.
        end: Offset after its last token.
        status: What is known of the call.
    """

    name: str
    arguments: str
    raw: str
    start: int
    end: int
    status: CallStatus


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What sampled ids say.

    Attributes:
        message: The message, in OpenAI's form. Without a proof its content is all of the text.
        proof: How far the template confirms the message.
        reason: Why there is no proof; None for a proof.
        calls: The tool calls, broken ones too.
        finished: Whether the ids end with a stop token.
        readings: All messages of an ambiguous answer; the best guess of one without proof.
    """

    message: dict[str, Any]
    proof: Proof
    reason: Reason | None
    calls: tuple[ParsedCall, ...]
    finished: bool
    readings: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """The calls of one episode.

    Attributes:
        prompts: Ids of each prompt that was sent.
        samples: Ids that were sampled after each prompt.
        logprobs: Log-probabilities of the sampled ids, one list per call, or None.
        messages: The messages of the whole episode.
        tools: Tool definitions.
    """

    prompts: Sequence[Sequence[int]]
    samples: Sequence[Sequence[int]]
    logprobs: Sequence[Sequence[float]] | None = None
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Any] = ()
