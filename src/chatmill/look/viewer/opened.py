"""A split as the viewer holds it: the pass over its labels, which items are listed, and the addresses of its pages."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import msgspec
import numpy as np
from numpy.typing import NDArray

from chatmill.core.kinds import RoleCode
from chatmill.errors import ConfigError, UnknownNameError
from chatmill.label.policy import Policy
from chatmill.label.presets import PRESETS
from chatmill.look.counting import TokenCounts, count_tokens
from chatmill.look.dataset import LookDataset
from chatmill.look.items import Item
from chatmill.look.splits import LookSplit

SPLITS = "splits"
"""The first part of the address of every page about a split."""
STILL_COUNTING = "the labels are still being counted; try again in a moment"
Percent = Annotated[float, msgspec.Meta(ge=0, le=100)]


class Sort(StrEnum):
    """Orders of a list."""

    STORED = "stored"
    """As the files have them."""
    LONGEST = "longest"
    SHORTEST = "shortest"
    MOST_TRAINED = "most_trained"
    """Highest trained share first."""
    LEAST_TRAINED = "least_trained"


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """Which items are listed, and in which order; None means no limit."""

    source: str | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    min_share: Percent | None = None
    """Trained tokens in percent of all, at least."""
    max_share: Percent | None = None
    role: str | None = None
    """Items with tokens of this role."""
    sort: Sort = Sort.STORED

    @property
    def keeps_all(self) -> bool:
        """Whether no item is left out."""
        wanted = (self.source, self.min_tokens, self.max_tokens, self.min_share, self.max_share, self.role)
        return all(value is None for value in wanted)


class Background:
    """Work that the first request starts, once, in a thread; a page that waits for it always learns how it ends."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.done = False
        self.problem = ""
        """Why it could not be finished."""
        self._work, self._lock = work, threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the work, unless it has started."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Wait until it has ended."""
        self.start()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._work()
            self.done = True
        except Exception as error:  # any failure is reported, that of a damaged file too
            self.problem = str(error) or type(error).__name__


class OpenedSplit(Background):
    """One split and the pass over its labels. Requests share it: splits are safe for threads."""

    def __init__(self, look: LookDataset, split: LookSplit) -> None:
        super().__init__(lambda: count_tokens(split, counts=self.counts))
        self.look, self.split, self.name = look, split, split.name
        self.counts = TokenCounts(len(split), self.policies)
        """Complete when `done`."""
        split.release()

    @property
    def share(self) -> float:
        """The share of the pass that is done."""
        return 1.0 if self.done else self.counts.tokens / max(1, self.split.total_tokens)

    def url(self, part: str | int = "", **params: Any) -> str:
        """Make the address of a page: the overview, `browse`, `random`, or an item by its number."""
        place = "" if part in ("", "overview") else f"/{part}"
        query = urlencode({name: value for name, value in params.items() if value not in (None, "")})
        return f"/{SPLITS}/{quote(self.name, safe='')}{place}{'?' if query else ''}{query}"

    def item(self, number: int) -> Item:
        """Read an item; a number that does not exist is an error with the nearest one."""
        return self.split.item(self.split.check_number(number))

    @property
    def trained(self) -> NDArray[np.integer] | None:
        """Trained tokens of every item; None while they are being counted."""
        stored = self.split.stored_trained
        return stored if stored is not None else self.counts.trained if self.done else None

    @cached_property
    def policies(self) -> tuple[Policy, ...]:
        """Policies that can be tried on stored kinds; each table once."""
        if not self.split.has_kinds:
            return ()
        by_table: dict[tuple[Any, ...], Policy] = {}
        for policy in PRESETS.values():
            if not policy.needs_messages:
                by_table.setdefault((policy.scope, policy.table().tobytes()), policy)
        return tuple(by_table.values())

    def policy(self, name: str) -> Policy | None:
        """Find the policy to try; None for the stored weights."""
        policies = {policy.name: policy for policy in self.policies}
        if name and name not in policies:
            raise UnknownNameError("policy", name, list(policies), "" if policies else "No kinds are stored.")
        return policies.get(name)

    def select(self, wanted: Filter) -> NDArray[np.int32] | None:
        """Select the items that pass, in the wanted order; None for all of them in stored order."""
        if wanted.keeps_all and wanted.sort is Sort.STORED:
            return None
        chosen = np.flatnonzero(self.chosen(wanted)).astype(np.int32)
        return self._sorted(chosen, wanted.sort)

    def chosen(self, wanted: Filter) -> NDArray[np.bool_]:
        """Mark the items that pass."""
        passes = np.ones(len(self.split), dtype=np.bool_)
        if wanted.source is not None:
            names = list(self.split.source_names)
            if wanted.source not in names:
                raise UnknownNameError("source", wanted.source, names)
            passes &= self.split.sources == names.index(wanted.source)
        lengths: tuple[Any, ...] = (lambda: self.split.tokens, wanted.min_tokens, wanted.max_tokens)
        for values, least, most in (lengths, (self._share, wanted.min_share, wanted.max_share)):
            if least is not None:
                passes &= values() >= least
            if most is not None:
                passes &= values() <= most
        if wanted.role is not None:
            roles = [role.name.lower() for role in RoleCode] if self.split.has_kinds else []
            if wanted.role not in roles:
                raise UnknownNameError("role", wanted.role, roles)
            if not self.done:
                raise ConfigError(STILL_COUNTING)
            passes &= (self.counts.roles & np.uint8(1 << roles.index(wanted.role))) > 0
        return passes

    def _sorted(self, chosen: NDArray[np.int32], sort: Sort) -> NDArray[np.int32]:
        if sort is Sort.STORED:
            return chosen
        by_length = sort in (Sort.LONGEST, Sort.SHORTEST)
        key: NDArray[Any] = self.split.tokens[chosen] if by_length else self._share()[chosen]
        if sort in (Sort.LONGEST, Sort.MOST_TRAINED):
            key = key.max(initial=0) - key
        return chosen[np.argsort(key, kind="stable")]

    def _share(self) -> NDArray[np.float32]:
        """Trained tokens of every item in percent; 0 for an empty item."""
        if (trained := self.trained) is None:
            raise ConfigError(STILL_COUNTING)
        return (trained * np.float32(100) / np.maximum(self.split.tokens, 1)).astype(np.float32)


def open_splits(look: LookDataset) -> dict[str, OpenedSplit]:
    """Open the splits of a dataset for pages; no tokens are read."""
    return {name: OpenedSplit(look, split) for name, split in look.splits.items()}
