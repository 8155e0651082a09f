"""One background pass over the labels of a split: what each item trains, whose words it has, and sums per kind."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.kinds import KINDS, PLAIN, REPEATED, RoleCode, roles_of
from chatmill.label.policy import Policy, Scope
from chatmill.label.presets import PRESETS
from chatmill.look.counting import TokenCounts
from chatmill.look.items import Ints, LookSplit, TokenBatch
from chatmill.look.viewer.background import Background

_LAST_TURN = Policy(name="after_last_user", weights=PRESETS["all"].weights, scope=Scope.LAST_TURN)


class SplitScan:
    """Columns and sums that the files do not hold. Memory: nine bytes an item, whatever the number of tokens."""

    def __init__(self, split: LookSplit) -> None:
        self._split = split
        self._work = Background(self._run, f"scan-{split.name}")
        self.tokens_done = 0
        self.done = split.stored_trained is not None and not (split.has_kinds or split.has_spans)
        self.roles: NDArray[np.uint8] = np.zeros(len(split) if split.has_kinds else 0, dtype=np.uint8)
        """Bit `r` of an item is set when it has tokens of role `r`."""
        self.counts = TokenCounts(len(split))
        self.trainable: Ints = np.zeros(KINDS, dtype=np.int64)
        """Tokens of each kind that a policy may train: not answers that are trained in another row."""
        self.last_turn: Ints = np.zeros(KINDS, dtype=np.int64)
        """Those that come after the last user message of their document."""

    def start(self) -> None:
        """Begin, once; nothing happens where the files hold everything."""
        if not self.done:
            self._work.start()

    def wait(self) -> None:
        """Until the pass is over."""
        if not self.done:
            self._work.wait()

    @property
    def problem(self) -> str:
        """Why the pass could not be finished."""
        return self._work.problem

    def as_json(self) -> dict[str, Any]:
        """How far it is."""
        total = self._split.total_tokens
        share = 1.0 if self.done else self.tokens_done / total if total else 1.0
        return {"done": self.done, "share": share, "problem": self.problem}

    def _run(self) -> None:
        for batch in self._split.batches():
            self._add(batch)
            self.tokens_done += int(batch.offsets[-1])
            del batch
        self.done = True

    def _add(self, batch: TokenBatch) -> None:
        self.counts.add(batch)
        if batch.kinds is None or not len(batch.kinds):
            return
        full = np.diff(batch.offsets) > 0
        bits = np.left_shift(np.uint8(1), roles_of(batch.kinds))
        np.bitwise_or.at(self.roles, batch.items[full], np.bitwise_or.reduceat(bits, batch.offsets[:-1][full]))
        plain = batch.kinds & PLAIN
        self.trainable += np.bincount(plain[(batch.kinds & REPEATED) == 0], minlength=KINDS)
        after = _LAST_TURN.token_weights(batch.kinds, batch.offsets) > 0
        self.last_turn += np.bincount(plain[after], minlength=KINDS)

    def role_names(self) -> list[str]:
        """Roles that some item has, as far as the pass has come."""
        tokens = self.counts.kinds[:, 0].reshape(len(RoleCode), -1).sum(axis=1)
        return [role.name.lower() for role in RoleCode if role is not RoleCode.NONE and tokens[role]]
