"""What configures itself: every class has a nested Config, whose `build` makes it."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar


class Configurable:
    """Base of all classes that are built from a config."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config:
        """Base of all configs."""

        _owner: ClassVar[Any] = None

        def build(self, **given: Any) -> Any:
            """Make what it configures."""
            return self._owner(dataclasses.replace(self), **given)

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "Config" in vars(cls):
            assert "__slots__" in vars(cls.Config), "a Config is a dataclass(kw_only=True, slots=True)"
            assert all(field.kw_only for field in dataclasses.fields(cls.Config))
            cls.Config._owner = cls
