"""Where records are read from: files on this machine, URLs that `fsspec` opens, and standard input."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import posixpath
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlsplit

from chatmill.core.checksums import Hash
from chatmill.core.publish import whole_file
from chatmill.core.scratch import Scratch
from chatmill.errors import ChatmillError, ConfigError, DataError, MissingExtraError

STDIN = "-"
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
NEEDS = {
    "s3": ("s3fs", "s3"), "s3a": ("s3fs", "s3"), "gs": ("gcsfs", "gs"), "gcs": ("gcsfs", "gs"),
    "http": ("aiohttp", "http"), "https": ("aiohttp", "http"), "hf": ("huggingface_hub", "hf"),
}  # fmt: skip
"""The package that a kind of URL needs besides fsspec, and the extra that installs both."""
BLOCK = 4 << 20
READ_AHEAD = 1 << 20
"""Bytes that are read from a store at once."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A file that is not on this machine's disk: behind a URL, or standard input."""

    url: str
    """As it was named; `-` for standard input."""

    def __str__(self) -> str:
        return self.url

    def __fspath__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part of the name; its ending says what the file holds."""
        if self.url == STDIN:
            return stdin_copy().name
        is_web = self.url.startswith("http")
        return posixpath.basename(unquote(urlsplit(self.url).path) if is_web else self.url)

    @property
    def suffix(self) -> str:
        """The last ending of the name."""
        return Path(self.name).suffix

    def open(self, mode: str = "rb") -> IO[bytes]:
        """Return the bytes of the file; they are fetched as they are read."""
        if self.url == STDIN:
            return stdin_copy().open("rb")
        with reaching(self.url):
            return io.BufferedReader(_RemoteStream(filesystem(self.url).open(self.url, mode), self.url), READ_AHEAD)

    def info(self) -> dict[str, Any]:
        """Return what the store says of the file."""
        with reaching(self.url):
            return dict(filesystem(self.url).info(self.url))

    def is_file(self) -> bool:
        """Return whether it is there; an error where the store cannot be reached."""
        if self.url == STDIN:
            return True
        with reaching(self.url):
            return bool(filesystem(self.url).isfile(self.url))

    @property
    def size(self) -> int:
        """In bytes."""
        return stdin_copy().stat().st_size if self.url == STDIN else int(self.info().get("size") or 0)


class _RemoteStream(io.RawIOBase):
    """A file of `fsspec`, whose errors are about its URL."""

    def __init__(self, file: Any, url: str) -> None:
        self._file, self._url = file, url

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Return whether the store can give out parts of a file."""
        return bool(self._file.seekable())

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a place in the file."""
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        """Return the place in the file."""
        return int(self._file.tell())

    def readinto(self, buffer: Any) -> int:
        """Return the next bytes."""
        with reaching(self._url):
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Close the file of the store as well."""
        if not self.closed:
            self._file.close()
        super().close()


Place = Path | Elsewhere


def place(path: str | os.PathLike[str]) -> Place:
    """Return a path or URL as something that can be opened."""
    if isinstance(path, Path | Elsewhere):
        return path
    text = os.fspath(path)
    if text.startswith("file://"):
        return Path(unquote(urlsplit(text).path))
    return Elsewhere(text) if is_elsewhere(text) else Path(text)


def is_elsewhere(path: str) -> bool:
    """Return whether a name is a URL or standard input."""
    return path == STDIN or (URL.match(path) is not None and not path.startswith("file://"))


def size_of(where: Place) -> int:
    """Bytes of a file."""
    return where.size if isinstance(where, Elsewhere) else where.stat().st_size


def filesystem(url: str) -> Any:
    """The file system of `fsspec` that a URL belongs to; a missing package is named with the line that installs it."""
    kind = url.partition("://")[0].lower()
    package, extra = NEEDS.get(kind, ("fsspec", "http"))
    purpose = f"reading and writing {kind}:// paths"
    try:
        import fsspec
    except ImportError:
        raise MissingExtraError("fsspec", extra, purpose) from None
    try:
        return fsspec.core.url_to_fs(url)[0]
    except ImportError as error:
        if kind in NEEDS:
            raise MissingExtraError(package, extra, purpose) from None
        raise ConfigError(f"{url}: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{url}: {error}. Known: {', '.join(f'{name}://' for name in NEEDS)}") from None


def store_settings(settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what fsspec is told about stores in this process; `settings` are those of another one, taken over here."""
    try:
        from fsspec.config import conf
    except ImportError:  # whatever needs it names the package
        return {}
    conf.update(settings or {})
    return dict(conf)


@contextlib.contextmanager
def reaching(url: str) -> Iterator[None]:
    """Turns what a store or a network reports into one `DataError` about the URL."""
    try:
        yield
    except ChatmillError:
        raise
    except FileNotFoundError:
        raise DataError(f"no such file: {url}") from None
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise DataError(
            f"cannot reach {url}: {reason}. Check the name, the network and the credentials, and try again"
        ) from error


def matches(pattern: str) -> list[str]:
    """Return the URLs that match a URL with `*`, sorted; a URL without one gives itself."""
    if pattern == STDIN or not any(sign in pattern for sign in "*["):
        return [pattern]
    with reaching(pattern):
        store = filesystem(pattern)
        return sorted(str(store.unstrip_protocol(match)) for match in store.glob(pattern))


def fetch(where: Elsewhere, folder: Path) -> Path:
    """Return a whole copy of a file in a folder, named after what the store says of it; made once."""
    info = {"size": where.size} if where.url == STDIN else where.info()
    state = Hash.XXH128.of_file(stdin_copy()) if where.url == STDIN else repr((where.url, sorted(info.items())))
    target = folder / f"{hashlib.sha256(state.encode()).hexdigest()[:32]}-{where.name}"
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(target) as partial:
        with partial.open("wb") as out, where.open() as source:
            shutil.copyfileobj(source, out, BLOCK)
        if info.get("size") not in (None, partial.stat().st_size):
            raise DataError(f"{where.url} has {info['size']} bytes, and {partial.stat().st_size} came: try again")
    return target


def stdin_copy() -> Path:
    """All of standard input, JSON lines or a list, in a temporary file, since records are read more than once."""
    scratch, name = _copied_stdin()
    return scratch.folder / name


@cache
def _copied_stdin() -> tuple[Scratch, str]:
    scratch = Scratch()
    copy = scratch.folder / "stdin"
    with copy.open("wb") as out:
        shutil.copyfileobj(sys.stdin.buffer, out, BLOCK)
    with copy.open("rb") as file:
        first = file.read(1 << 16).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    return scratch, copy.rename(scratch.folder / ("stdin.json" if first == b"[" else "stdin.jsonl")).name
