"""Which texts of a template may become control tokens, whole or together with text around them."""

from __future__ import annotations

from collections.abc import Iterable


class ControlNames:
    """The control tokens of a vocabulary by their names, which a template may put into a text of the record."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        """Take all names."""
        self._names = tuple(filter(None, names))
        self._begins = {name[:size] for name in self._names for size in range(1, len(name))}
        self._ends = {name[size:] for name in self._names for size in range(1, len(name))}
        self._longest = max(map(len, self._names), default=0)
        self._known: dict[str, bool] = {}
        self._met: dict[tuple[str, str], bool] = {}

    def are_in(self, text: str) -> bool:
        """Return whether a text holds a whole control token."""
        return any(name in text for name in self._names)

    def may_be_made_of(self, text: str) -> bool:
        """Return whether a text holds a control token, or what may be one together with text around it."""
        known = self._known.get(text)
        if known is None:
            known = self._known[text] = self._may_be_made_of(text)
        return known

    def meet_in(self, before: str, after: str) -> bool:
        """Return whether two texts, one right after the other, make a control token that neither has alone."""
        before, after = before[-self._longest :], after[: self._longest]
        known = self._met.get((before, after))
        if known is None:
            known = self._met[before, after] = any(
                before.endswith(name[:size]) and after.startswith(name[size:])
                for name in self._names
                for size in range(1, len(name))
            )
        return known

    def __bool__(self) -> bool:
        return bool(self._names)

    def _may_be_made_of(self, text: str) -> bool:
        if not text:
            return False
        borders = range(1, min(len(text), self._longest) + 1)
        if any(text[-size:] in self._begins or text[:size] in self._ends for size in borders):
            return True
        return self.are_in(text) or any(text in name for name in self._names)


NO_CONTROLS = ControlNames()
