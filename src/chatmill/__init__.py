"""Chatmill compiles chat conversations into the exact token data a trainer reads.

    records --read--> Conversation --render--> Tokens (ids + kinds) --label--> weights --pack--> rows --store--> disk
                                                                                                   |
                                                loss <--train-- batch (torch) <--feed----- rows <--load

Every public name is importable from here and loaded on first use: importing this package loads no numpy, torch or
transformers.
"""

from chatmill._facade import PUBLIC

TYPE_CHECKING = False
if TYPE_CHECKING:  # nothing else is imported, so that the command line can catch Ctrl-C during all of its imports
    from typing import Any

__version__ = "0.4.0.dev0"
__all__ = ["__version__", *PUBLIC]  # noqa: PLE0604 - the names are strings in a table


def __getattr__(name: str) -> "Any":
    import gc
    import importlib

    module = PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'chatmill' has no attribute {name!r}")
    path, _, attribute = module.partition(":")
    is_collecting = gc.isenabled()
    gc.disable()  # modules make no cycles that are worth looking for, which takes a tenth of the time
    try:
        value = getattr(importlib.import_module(f"chatmill.{path}"), attribute or name)
    except ImportError as error:
        from chatmill.errors import missing_extra

        raise missing_extra(error, f"chatmill.{name}") or error from None
    finally:
        if is_collecting:
            gc.enable()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
