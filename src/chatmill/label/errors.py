"""Calls whose result is an error, by a field or the beginning of its text: a policy may leave them untrained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversations import Conversations
from chatmill.core.kinds import RoleCode
from chatmill.core.texts import Texts


class ErrorRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which results of tools are errors."""

    fields: dict[str, Any] = {}
    """Fields of a result and the value that each has in an error."""
    begins: tuple[Annotated[str, msgspec.Meta(min_length=1)], ...] = ()
    """What the text of an error begins with."""

    def without_failed(self, batch: Conversations) -> tuple[Conversations, NDArray[np.int64]]:
        """Return conversations in which no answer is trained that made a call with an error, and how many each has."""
        places = {self._caller(batch, place) for place in self._errors(batch)}
        callers = np.array([place for place in places if place >= 0 and batch.messages.weights[place] != 0], np.int64)
        counts = np.bincount(batch.owners(callers), minlength=len(batch))
        if not len(callers):
            return batch, counts
        weights = batch.messages.weights.copy()
        weights[callers] = 0.0
        return replace(batch, messages=replace(batch.messages, weights=weights)), counts

    def _errors(self, batch: Conversations) -> list[int]:
        """Return the places of results that are errors."""
        messages = batch.messages
        results = np.flatnonzero(messages.roles == RoleCode.TOOL)
        starts = tuple(text.encode() for text in self.begins)
        longest = max(map(len, starts), default=0)
        texts = messages.contents.take(results)
        beginnings = Texts(texts.data, texts.starts, np.minimum(texts.lengths, longest)).raw(np.arange(len(results)))
        return [
            place
            for place, text in zip(results.tolist(), beginnings, strict=True)
            if (starts and text.startswith(starts)) or self._says_so(messages.extra[place])
        ]

    def _says_so(self, result: Mapping[str, object]) -> bool:
        """Return whether the fields of a result say that it is an error; true is not 1."""
        pairs = [(result[name], value) for name, value in self.fields.items() if name in result]
        return any(stated == value and isinstance(stated, bool) == isinstance(value, bool) for stated, value in pairs)

    def _caller(self, batch: Conversations, place: int) -> int:
        """The message with the call that a result is of: by its id, else the last one with calls; -1 for none."""
        messages = batch.messages
        first = int(batch.offsets[batch.owners(np.array([place]))[0]])
        wanted = messages.tool_call_ids[place]
        callers = [at for at in range(place - 1, first - 1, -1) if messages.call_counts[at]]
        for at in callers:
            if wanted is None or wanted in messages.call_ids[slice(*messages.call_offsets[at : at + 2].tolist())]:
                return at
        return callers[0] if callers else -1
