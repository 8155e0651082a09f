"""The exception tree: every mistake in data, options or files is one `ChatmillError` with a way out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import StrEnum
from typing import ParamSpec, TypeVar

MemberT = TypeVar("MemberT", bound=StrEnum)
Params = ParamSpec("Params")
Result = TypeVar("Result")


ADDRESSES: dict[str, str] = {}
"""The URLs of datasets by the folders of the cache that stand for them here; people read the URLs."""


def as_named(text: str) -> str:
    """Put the URLs of datasets in place of their folders in the cache."""
    for folder, url in ADDRESSES.items():
        text = text.replace(folder, url)
    return text


class ChatmillError(Exception):
    """Base of all errors that Chatmill raises on purpose; the CLI prints them without a traceback."""

    def __str__(self) -> str:
        """Return the message, with URLs as they were given."""
        return as_named(super().__str__())

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle an error as its arguments and attributes; `__init__` may take others."""
        return (_rebuilt, (type(self), self.args, self.__dict__))


def _rebuilt(kind: type[ChatmillError], args: tuple[object, ...], state: dict[str, object]) -> ChatmillError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def short_errors(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """Hide the package's frames from errors about a user's mistakes, for functions that users call."""

    @functools.wraps(function)
    def called(*args: Params.args, **options: Params.kwargs) -> Result:
        try:
            return function(*args, **options)
        except ChatmillError as error:
            raise error.with_traceback(None) from None

    return called


class DataError(ChatmillError, ValueError):
    """A record, message or value that does not fit what it should be."""


class RecordError(DataError):
    """One record cannot be used; knows the reason code and, once a reader has caught it, the place."""

    def __init__(self, message: str, *, code: str, path: str = "", where: str = "", record_id: str = "") -> None:
        """`code` is a short stable reason; `path` a field path such as `messages[2].content`."""
        self.message, self.code, self.path, self.where, self.record_id = message, code, path, where, record_id
        super().__init__(message)

    def __str__(self) -> str:
        parts = (self.where, self.record_id and f"record {self.record_id!r}", self.path and f"field {self.path}")
        place = ", ".join(filter(None, parts))
        return f"{place}: {self.message}" if place else self.message


INTERNAL_ERROR = "internal_error"
"""The reason of a record that Chatmill itself fails on."""
are_faults_raised = False
"""Whether a fault of Chatmill itself is raised as it is, as tests want it."""


def fault_of(error: Exception) -> RecordError:
    """Return the error of a record that was being written when Chatmill failed in a way that it does not know.

    What is an error on purpose, or the machine's (no memory, no disk), is raised again: it is no record's.
    """
    if are_faults_raised or isinstance(error, (ChatmillError, MemoryError, OSError)):
        raise error
    step, place = error.__traceback__, ""
    while step is not None:
        name = step.tb_frame.f_globals.get("__name__", "")
        if name.startswith("chatmill."):
            place = f", in {name}, line {step.tb_lineno}"
        step = step.tb_next
    return RecordError(
        f"a fault of Chatmill, not of the record ({type(error).__name__}: {error}{place}). Please report these words, "
        "with the record and the template",
        code=INTERNAL_ERROR,
    )


class ConfigError(ChatmillError, ValueError):
    """An option, recipe or config file that asks for something that does not exist or does not fit."""


class UnknownNameError(ConfigError, KeyError):
    """An unknown name of a template, policy, strategy, ...; lists the known ones."""

    def __init__(self, kind: str, name: object, names: list[str], hint: str = "") -> None:
        """`kind` is what was looked up, e.g. "template"; a close name is suggested."""
        import difflib

        close = difflib.get_close_matches(str(name), names, n=1)
        suggestion = f" Did you mean {close[0]!r}?" if close else ""
        text = f"unknown {kind} {name!r}.{suggestion} Known: {', '.join(names)}."
        self.text = f"{text} {hint}".rstrip()
        super().__init__(self.text)

    def __str__(self) -> str:
        return self.text


def member(members: type[MemberT], kind: str, name: object, hint: str = "") -> MemberT:
    """Find the member of an enumeration by name; an unknown name is an error that lists the known ones."""
    if name not in list(members):
        raise UnknownNameError(kind, name, list(members), hint)
    return members(name)  # type: ignore[arg-type]


class TokenizerError(ChatmillError, ValueError):
    """A tokenizer cannot be loaded, lacks a token, or disagrees with its reference."""


class NoReferenceError(TokenizerError):
    """A reference engine was asked for, and there is none for this vocabulary."""


class FormatError(ChatmillError, ValueError):
    """A file on disk is not what its format says: wrong size, index out of range, wrong version."""


class OutOfMemoryError(ChatmillError, MemoryError):
    """The machine, or the limit of a shell or container, has no more memory."""


class MissingExtraError(ChatmillError, ImportError):
    """An optional package is needed; the message names the extra that installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        """For example `MissingExtraError("torch", "torch", "collating batches")`."""
        super().__init__(f"{purpose} needs the package {package!r}: pip install 'chatmill[{extra}]'")


EXTRAS = {
    "torch": "train",
    "torchdata": "torch",
    "PIL": "images",
    "openai_harmony": "harmony",
    "tiktoken": "harmony",
    "megatron": "megatron",
    "ray": "ray",
    "transformers": "hf",
    "datasets": "hf",
}
"""Optional packages, as they are imported, and the extra that installs each."""


def missing_extra(error: BaseException, purpose: str = "this") -> MissingExtraError | None:
    """Turn a failed import of an optional package into an error with the pip line; None for any other error."""
    package = (getattr(error, "name", None) or "").partition(".")[0] if isinstance(error, ImportError) else ""
    if isinstance(error, MissingExtraError) or package not in EXTRAS:
        return None
    return MissingExtraError(package, EXTRAS[package], purpose)


def need(package: str, purpose: str, extra: str | None = None) -> None:
    """Raise `MissingExtraError` if an optional package is not installed, without importing it.

    `extra`: a smaller one than that of `EXTRAS`, if it suffices.
    """
    import importlib.util

    try:
        there = importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        there = False
    if not there:
        raise MissingExtraError(package, extra or EXTRAS[package], purpose)


class SlowEngineWarning(UserWarning):
    """The fast tokenizer engine is missing; the reference does its work, with the same result and more slowly."""
