"""Sampled tokens of messages that are not trained: they too must say what the template writes for their message.

A row shows such a message as history, which the template may have changed. So it is written as the last answer of its
conversation, the way it would be trained, and its tokens are compared with that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversation import Conversation, Message, Role
from chatmill.core.conversations import Conversations
from chatmill.errors import RecordError
from chatmill.render.sampled import NOTES, Sampled

Ints = NDArray[np.int64]
DIFFER = NOTES.index("sampled_differ")
WRONG = ("tokens_differ", "bad_token_ids")
"""Codes of errors that are about the tokens of a message."""
TOGETHER = 256
"""Answers that are written in one batch."""


class LastAnswers(NamedTuple):
    """Conversations that end in one answer each, as the template writes them."""

    samples: Sampled
    kept: Ints
    """The conversation of each document."""
    failed: Mapping[int, RecordError]
    """Those that the template refuses."""


Write = Callable[[Conversations], LastAnswers]


def as_last_answer(conversation: Conversation, index: int) -> Conversation:
    """Return a conversation up to an answer, the only one that is trained and that has sampled tokens."""
    before = [_as_context(message) for message in conversation.messages[:index]]
    return conversation._replace(messages=(*before, conversation.messages[index]._replace(weight=None)))


def _as_context(message: Message) -> Message:
    weight = 0.0 if message.role is Role.ASSISTANT else message.weight
    return message._replace(weight=weight, finish_reason=None, token_ids=None, logprobs=None)


def check_context(samples: Sampled, kept: Ints, batch: Conversations, write: Write) -> Sampled:
    """Fail records with such a message whose tokens say something else, or count it, as for one that is trained.

    Where the template cannot write a message as an answer nobody can tell: it counts as one that differs.
    """
    failed, counts = dict(samples.failed), samples.counts.copy()
    for start in range(0, len(samples.doubtful), TOGETHER):
        places = samples.doubtful[start : start + TOGETHER]
        records = batch.owners(places)
        indices = places - batch.offsets[records]
        pairs = list(zip(records.tolist(), indices.tolist(), strict=True))
        conversations = Conversations.of([as_last_answer(batch[record], index) for record, index in pairs])
        answers = write(conversations)
        differ = set(answers.kept[answers.samples.counts[:, DIFFER] > 0].tolist())
        differ |= set(conversations.owners(answers.samples.doubtful).tolist())  # not trained even so
        for number, (record, _) in enumerate(pairs):
            error = answers.failed.get(number) or answers.samples.failed.get(number)
            if error is not None and error.code in WRONG:
                failed.setdefault(record, error)
            else:
                counts[np.searchsorted(kept, record), DIFFER] += error is not None or number in differ
    return samples._replace(failed=failed, counts=counts)
