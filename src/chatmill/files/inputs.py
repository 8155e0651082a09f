"""Input files in stores: each is copied into the cache before it is read, and stays the one that was seen first."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from chatmill.core.cache_folders import chatmill_cache
from chatmill.errors import ConfigError, DataError
from chatmill.files import cache, stores
from chatmill.files.stores import NoSuchObject, RemoteError, StoreAccess, StoredObject, hidden

LONGEST_NAME = 80
"""Characters of a file's name that its copy keeps; its endings say what it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredInput:
    """An input file in a store, as a build has seen it; small and picklable."""

    url: str
    found: StoredObject
    is_checked: bool = True
    """The store says a version, so a file that was written again is noticed."""
    access: StoreAccess = field(default_factory=StoreAccess)

    @property
    def bytes(self) -> int:
        """Its size; that of the copy where the store does not say it."""
        return self.copy().stat().st_size if self.found.size is None else self.found.size

    @property
    def _target(self) -> Path:
        """Where the cache keeps its copy: named by all that tells it from others, and as the file is."""
        key = hashlib.sha256(f"{self.url}\0{self.found.version}\0{self.found.size}".encode()).hexdigest()
        name = input_name(self.url)[-LONGEST_NAME:]
        return chatmill_cache().absolute() / cache.FILES / key[:2] / f"{key}-{name}"

    def copy(self) -> Path:
        """Return the copy on this machine, which is fetched if it is not there.

        Raises:
            DataError: The file has changed in the store since it was seen first, or is gone.
            RemoteError: The store cannot be reached.
        """
        target = self._target
        if not cache.touch(target):
            self.access.use()
            cache.keep(target, self.found.size or 0, self._fetch)
        return target

    def _fetch(self, temporary: Path) -> None:
        """Fetch the file, as it was seen first."""
        self._refuse_changed()
        digests: list[str] = []
        while True:
            stores.download(self.url, self.found, temporary)
            if not self.found.md5:
                break
            digests.append(_md5_of(temporary))
            # A store that encrypts may give the MD5 of something else: then the same bytes come again.
            if digests[-1] == self.found.md5 or digests[:-1] == digests[-1:]:
                break
            if len(digests) > 1:
                raise RemoteError(
                    self.url, "read", "its bytes are other ones each time", "Check the store and the network", 2
                )
        self._refuse_changed()

    def _refuse_changed(self) -> None:
        """Refuse a file that was written again since it was seen first."""
        if self.is_checked and _look(self.url).version != self.found.version:
            raise DataError(
                f"{hidden(self.url)} has changed since the build began: it was written again. Leave the inputs alone, "
                "and build again"
            )


def find_input(url: str, access: StoreAccess | None = None) -> StoredInput:
    """Find an input file in its store.

    Raises:
        DataError: There is no such file.
    """
    chosen = access or StoreAccess()
    chosen.use()
    found = _look(url)
    if found.version:
        return StoredInput(url=url, found=found, access=chosen)
    once = StoredObject(size=found.size, version=f"once-{secrets.token_hex(8)}", has_ranges=found.has_ranges)
    return StoredInput(url=url, found=once, is_checked=False, access=chosen)


def _look(url: str) -> StoredObject:
    try:
        return stores.object_info(url)
    except NoSuchObject:
        raise DataError(f"no such file: {hidden(url)}") from None


def share_input(path: Path, url: str, access: StoreAccess | None) -> StoredInput:
    """Upload a file of this machine for others, which read it as an input; `url` must stand for these bytes."""
    chosen = access or StoreAccess()
    chosen.use()
    md5 = _md5_of(path)
    size = path.stat().st_size
    stores.upload(path, url)
    found = StoredObject(size=size, version=md5, md5=md5)
    shared = StoredInput(url=url, found=found, is_checked=False, access=chosen)
    cache.keep(shared._target, size, lambda temporary: _link(path, temporary))
    return shared


def _link(path: Path, target: Path) -> None:
    """Give a file a second name; where that cannot be, copy it."""
    try:
        os.link(path, target)
    except OSError:
        shutil.copyfile(path, target)


def fetch_inputs(inputs: Iterable[StoredInput | None]) -> None:
    """Fetch the files among some that are in stores, several at once."""
    wanted = {one.url: one for one in inputs if one is not None}
    stores.in_parallel(StoredInput.copy, list(wanted.values()), stores.STREAMS)


def input_name(url: str) -> str:
    """Return the last part of a URL, decoded; its ending says what the file holds."""
    is_web = stores.kind_of(url) in ("http", "https")
    return PurePosixPath(unquote(urlsplit(url).path) if is_web else url).name


def refuse_keys_in_input(url: str) -> None:
    """Refuse an address with a password or a signature for a build, which writes the addresses of its inputs."""
    if stores.holds_key(url):
        raise ConfigError(
            f"{hidden(url)}: the address of this input holds a key, and a build writes the addresses of its inputs: "
            "give credentials as the store's own tools take them (environment, profile, instance role), or copy the "
            "file first"
        )


def _md5_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()
