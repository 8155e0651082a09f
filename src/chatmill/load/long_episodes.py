"""Stored episodes longer than a row: refused, cut or left out, with the trained tokens that are lost counted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from chatmill.core.tokens import offsets_of
from chatmill.errors import ConfigError
from chatmill.load.config import LongEpisodes
from chatmill.store.split import even_ranges

if TYPE_CHECKING:
    from chatmill.load.episode_rows import EpisodeRows

log = logging.getLogger(__name__)
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
TOKENS_AT_A_TIME = 1 << 22
MOST_COUNTED = 1 << 26
"""Tokens of long episodes that are read to count trained ones; of more, a sample is read: opening stays quick."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongEpisodesReport:
    """What rows lose of the episodes that are longer than they are."""

    episodes: int
    """All that are long enough to be read."""
    too_long: int
    longest: int
    tokens: int
    """Tokens that are lost."""
    counted: int
    """Episodes that were read to count trained tokens: all that are too long, or a part of them, evenly spread."""
    trained: int
    """Trained tokens among those that these lose."""
    trained_before: int
    """Trained tokens of these."""

    def words(self, width: int) -> str:
        """The facts in a sentence without its end."""
        share = f"{self.trained / self.trained_before:.0%}" if self.trained_before else ""
        if self.counted == self.too_long:
            trained = f"{self.trained:,} of the {self.trained_before:,} trained ones{share and f' ({share})'}"
        else:
            about = f"about {share}" if share else "perhaps none"
            trained = f"{about} of the trained ones (counted in {self.counted:,} of these episodes)"
        return (
            f"{self.too_long:,} of {self.episodes:,} episodes are longer than a row of {width:,} tokens (the longest "
            f"has {self.longest:,}): {self.tokens:,} of their tokens, and {trained}"
        )


def report_long_episodes(rows: EpisodeRows, *, exact: bool = True) -> LongEpisodesReport | None:
    """What is lost of episodes that are longer than a row; None where every one fits. Only those that do not are read.

    Of many, unless `exact`, trained tokens are counted in a sample.
    """
    dataset, width, min_tokens = rows.dataset, rows.width, rows.min_tokens
    lengths = dataset.lengths
    long = np.flatnonzero((lengths > width) & (lengths >= min_tokens))
    if not len(long):
        return None
    kept = 0 if rows.overflow is LongEpisodes.DROP else width
    counted = long if exact else long[:: -(-int(lengths[long].sum()) // MOST_COUNTED)]
    trained, before = _trained_lost(counted, lengths[counted], kept, rows.trains)
    return LongEpisodesReport(
        episodes=int(np.count_nonzero(lengths >= min_tokens)),
        too_long=len(long),
        longest=int(lengths.max()),
        tokens=int((lengths[long] - kept).sum()),
        counted=len(counted),
        trained=trained,
        trained_before=before,
    )


def _trained_lost(numbers: Ints, lengths: Ints, kept: int, trained_of: Callable[[Ints], Bools]) -> tuple[int, int]:
    """Trained tokens that some episodes lose where only their first `kept` tokens are read, and all that there were.

    `trained_of` says which tokens of episodes are trained, flat; it is asked for some of them at a time.
    """
    lost = trained = 0
    for first, last in even_ranges(lengths, TOKENS_AT_A_TIME):
        offsets = offsets_of(lengths[first:last])
        so_far = offsets_of(trained_of(numbers[first:last]))
        before = np.diff(so_far[offsets])
        left = so_far[offsets[:-1] + kept] - so_far[offsets[:-1]]
        lost += int((before - left).sum())
        trained += int(before.sum())
    return lost, trained


def check_long_episodes(rows: EpisodeRows, where: object, option: str, spare: int = 0) -> None:
    """Refuse episodes that are longer than a row, or log what is lost of them.

    `option` is the name of the length; a row holds `spare` tokens more than it says.
    """
    lost = report_long_episodes(rows, exact=False)
    if lost is None:
        return
    if rows.overflow is LongEpisodes.ERROR:
        raise ConfigError(
            f"{rows.dataset.folder}: {lost.words(rows.width)}, would be lost. Give {option}={lost.longest - spare} or "
            "more, build the dataset again with `--max-length` and an overflow policy, or choose the loss: "
            "overflow='cut' reads the first tokens of these episodes, overflow='drop' leaves them out"
        )
    done = "they are cut" if rows.overflow is LongEpisodes.CUT else "they are left out"
    log.warning("%s: %s, are lost: %s (overflow)", where, lost.words(rows.width), done)
