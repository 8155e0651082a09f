"""What installed packages add: templates, shapes, policies and export targets, each named by an entry point.

No package can change what a name of Chatmill means, and nothing of a package is imported before its name is used.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chatmill.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")


@dataclass(frozen=True, slots=True)
class Addition:
    """One thing that a package adds."""

    name: str
    what: str
    """Such as `template`."""
    entry: EntryPoint

    @property
    def origin(self) -> str:
        """The package, in words."""
        dist = self.entry.dist
        return f"the package {self.entry.value if dist is None else dist.name}"

    def load(self) -> Any:
        """What the entry point names; whatever fails there is one error that names the package."""
        try:
            return self.entry.load()
        except Exception as error:
            raise ConfigError(
                f"{self.origin}: its {self.what} {self.name!r} ({self.entry.value}) cannot be loaded: "
                f"{type(error).__name__}: {error}"
            ) from error

    def refused(self, reason: str) -> ConfigError:
        """The error about what the package gave."""
        return ConfigError(f"{self.origin}: its {self.what} {self.name!r} {reason}")


def additions(group: str, what: str, own: Collection[str]) -> dict[str, Addition]:
    """What packages add under an entry-point group, by name; `own` are the names of Chatmill, which are taken."""
    from importlib.metadata import entry_points  # takes its time

    found: dict[str, Addition] = {}
    for entry in sorted(entry_points(group=group), key=lambda entry: entry.name):
        addition = Addition(entry.name, what, entry)
        if not NAME.fullmatch(entry.name):
            raise addition.refused("has a name that is not made of small letters, digits, - and _")
        if entry.name in own:
            raise addition.refused("has the name of one of Chatmill: rename it")
        if entry.name in found and found[entry.name].entry.value != entry.value:
            raise addition.refused(f"has the name of one of {found[entry.name].origin}: remove one of the packages")
        found[entry.name] = addition
    return found
