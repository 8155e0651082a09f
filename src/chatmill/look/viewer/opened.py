"""A dataset as the viewer holds it: its splits with their columns, the pass over their labels, and filters."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import numpy as np
from numpy.typing import NDArray

from chatmill.core.kinds import RoleCode
from chatmill.errors import ConfigError, UnknownNameError
from chatmill.label.policy import Policy
from chatmill.label.presets import PRESETS
from chatmill.look.counting import LabelCounts, count_tokens, is_counted
from chatmill.look.dataset import LookDataset, open_for_looking
from chatmill.look.items import Item
from chatmill.look.splits import LookSplit


class Sort(StrEnum):
    """Orders of a list."""

    STORED = "stored"
    """As the files have them."""
    LONGEST = "longest"
    SHORTEST = "shortest"
    MOST_TRAINED = "most_trained"
    """Highest trained share first."""
    LEAST_TRAINED = "least_trained"


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which items are listed, and in which order; what is None is not asked."""

    source: str | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    min_share: float | None = None
    """Trained tokens in percent of all, at least."""
    max_share: float | None = None
    role: str | None = None
    """Items with tokens of this role."""
    sort: Sort = Sort.STORED

    @property
    def keeps_all(self) -> bool:
        """Whether no item is left out."""
        wanted = (self.source, self.min_tokens, self.max_tokens, self.min_share, self.max_share, self.role)
        return all(value is None for value in wanted)


class OpenedSplit:
    """One split: its columns, and the pass over its labels. Requests share it: splits are safe for threads."""

    def __init__(self, look: LookDataset, key: str, split: LookSplit, siblings: Opened) -> None:
        """`siblings` are all splits of the dataset, this one among them."""
        self.look, self.key, self.split, self.siblings, self.name = look, key, split, siblings, split.name
        self.counts = LabelCounts(split)
        """Filled by a thread that the first request starts; complete when `done`."""
        self.done = is_counted(split)
        self.problem = ""
        """Why the pass could not be finished."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        if self.done:
            count_tokens(split, counts=self.counts)
        split.release()

    def start(self) -> None:
        """Begin to count, once; nothing happens if the files hold everything."""
        with self._lock:
            if self._thread is None and not self.done:
                self._thread = threading.Thread(target=self._count, name=f"count-{self.name}", daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Until everything is counted."""
        self.start()
        if self._thread is not None:
            self._thread.join()

    def _count(self) -> None:
        try:
            count_tokens(self.split, counts=self.counts)
            self.done = True
        except Exception as error:
            # any failure, that of a damaged file too, is reported: a page must not wait for ever
            self.problem = str(error) or type(error).__name__

    @property
    def share(self) -> float:
        """How far the pass is."""
        return 1.0 if self.done else self.counts.tokens / max(1, self.split.total_tokens)

    def url(self, part: str | int = "", **params: Any) -> str:
        """The address of a page: the overview, `browse`, `random`, or an item by its number."""
        place = "" if part in ("", "overview") else f"/{part}"
        asked = urlencode({name: value for name, value in params.items() if value not in (None, "")})
        return f"/{self.key}/{quote(self.name, safe='')}{place}{'?' if asked else ''}{asked}"

    @property
    def next(self) -> OpenedSplit:
        """The split after this one, or the first."""
        names = list(self.siblings)
        return self.siblings[names[(names.index(self.name) + 1) % len(names)]]

    @staticmethod
    def pairs(names: Iterable[str]) -> list[tuple[str, str]]:
        """Choices whose values are their names."""
        return [(name, name) for name in names]

    def item(self, number: int) -> Item:
        """One item; a number that is not there is an error with the nearest one."""
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
        found: dict[tuple[Any, ...], Policy] = {}
        for policy in PRESETS.values():
            if not policy.only_weighted_messages:
                found.setdefault((policy.scope, policy.table().tobytes()), policy)
        return tuple(found.values())

    def policy(self, name: str | None) -> Policy | None:
        """The policy to try; None for what is stored."""
        if not name:
            return None
        known = {policy.name: policy for policy in self.policies}
        if not known:
            raise ConfigError(f"{self.name}: no kinds are stored, so no other policy can be tried")
        if name not in known:
            raise UnknownNameError("policy", name, list(known))
        return known[name]

    def select(self, wanted: Filter) -> NDArray[np.int32] | None:
        """The items that pass, in the order asked for; None for all of them in stored order."""
        if wanted.keeps_all and wanted.sort is Sort.STORED:
            return None
        chosen = np.flatnonzero(self.chosen(wanted)).astype(np.int32)
        return self._sorted(chosen, wanted.sort)

    def chosen(self, wanted: Filter) -> NDArray[np.bool_]:
        """Which items pass."""
        tokens = self.split.tokens
        passes = np.ones(len(self.split), dtype=np.bool_)
        if wanted.source is not None:
            passes &= self._sources() == self._source_code(wanted.source)
        if wanted.min_tokens is not None:
            passes &= tokens >= wanted.min_tokens
        if wanted.max_tokens is not None:
            passes &= tokens <= wanted.max_tokens
        if wanted.min_share is not None:
            passes &= self._share() >= np.float32(wanted.min_share)
        if wanted.max_share is not None:
            passes &= self._share() <= np.float32(wanted.max_share)
        if wanted.role is not None:
            passes &= (self._roles() & np.uint8(1 << self._role(wanted.role))) > 0
        return passes

    def _sorted(self, chosen: NDArray[np.int32], sort: Sort) -> NDArray[np.int32]:
        if sort is Sort.STORED:
            return chosen
        by_length = sort in (Sort.LONGEST, Sort.SHORTEST)
        key: NDArray[Any] = self.split.tokens[chosen] if by_length else self._share()[chosen]
        if sort in (Sort.LONGEST, Sort.MOST_TRAINED):
            key = key.max(initial=0) - key
        if by_length and len(key) and int(key.max()) < 1 << 16:
            key = key.astype(np.uint16)  # numbers of 16 bits are sorted by counting, ten times as fast
        return chosen[np.argsort(key, kind="stable")]

    def _share(self) -> NDArray[np.float32]:
        """Trained tokens of every item in percent; 0 for an empty item."""
        trained = self.trained
        if trained is None:
            raise ConfigError("the trained tokens are still being counted; try again in a moment")
        return (trained * np.float32(100) / np.maximum(self.split.tokens, 1)).astype(np.float32)

    def _sources(self) -> NDArray[np.integer]:
        if self.split.sources is None:
            raise ConfigError(f"{self.name}: no sources are stored, so items cannot be chosen by source")
        return self.split.sources

    def _source_code(self, name: str) -> int:
        names = list(self.split.source_names)
        if name not in names:
            raise UnknownNameError("source", name, names)
        return names.index(name)

    def _roles(self) -> NDArray[np.uint8]:
        if not self.split.has_kinds:
            raise ConfigError(f"{self.name}: no kinds are stored, so items cannot be chosen by role")
        if not self.done:
            raise ConfigError("the roles are still being read; try again in a moment")
        return self.counts.roles

    @staticmethod
    def _role(name: str) -> int:
        if name.upper() not in RoleCode.__members__:
            raise UnknownNameError("role", name, [role.name.lower() for role in RoleCode])
        return int(RoleCode[name.upper()])


Opened = Mapping[str, OpenedSplit]
"""The splits of one dataset, by name."""


def open_splits(look: LookDataset, key: str = "a") -> Opened:
    """The splits of a dataset for pages; `key` is the dataset's name in addresses: `a` or `b`."""
    splits: dict[str, OpenedSplit] = {}
    for name, split in look.splits.items():
        splits[name] = OpenedSplit(look, key, split, splits)
    return splits


def open_viewed(paths: Sequence[Path], *, split: str | None = None, tokenizer: Any = None) -> dict[str, Opened]:
    """Open one or two datasets for the viewer, under the keys `a` and `b`; no tokens are read.

    `tokenizer` decodes in place of those that the manifests name.
    """
    looks = [open_for_looking(path, [split] if split else None, tokenizer=tokenizer) for path in paths]
    for later in looks[1:]:
        later.share_decoder(looks[0])
    return {key: open_splits(look, key) for key, look in zip("ab", looks, strict=False)}
