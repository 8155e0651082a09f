"""Datasets that go to a store behind a URL: built in a folder of this machine, then copied, the manifest last.

A store has no renames and no locks, but it publishes each object whole. So a dataset is there when its manifest is, and
everything else is copied before. A mark says which build is being copied; the same build resumes from there.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from chatmill.compiler.faults import fault_point
from chatmill.compiler.publish import canonical_json, storing
from chatmill.compiler.work import folder_lock
from chatmill.core.cache_folders import chatmill_cache
from chatmill.errors import ChatmillError, ConfigError, DataError
from chatmill.read.places import filesystem, reaching
from chatmill.store.receipts import MANIFEST, read_manifest

STAGING_VARIABLE = "CHATMILL_STAGING"
"""Where datasets are built before they are copied; default: `staging` in the cache of Chatmill."""
MARK = ".chatmill-upload.json"
COPIES = 8
"""Files that are copied at a time."""
Built = TypeVar("Built")


def staging_folder(url: str) -> Path:
    """The folder of this machine in which the dataset of a URL is built."""
    home = Path(os.environ.get(STAGING_VARIABLE) or chatmill_cache() / "staging")
    name = posixpath.basename(url.rstrip("/"))
    return home.expanduser() / f"{hashlib.sha256(url.rstrip('/').encode()).hexdigest()[:16]}-{name}"


def build_elsewhere(url: str, build: Callable[[Path], Built]) -> Built:
    """Build into a folder of this machine by `build`, and copy what it made to a URL."""
    target, staging = RemoteFolder(url), staging_folder(url)
    finished = target.read(MANIFEST)
    with storing(staging, "create the folder"):
        staging.mkdir(parents=True, exist_ok=True)
        if finished is not None and not (staging / MANIFEST).exists():
            (staging / MANIFEST).write_bytes(finished)  # the build compares it with its own
    if finished is None:
        target.refuse_foreign()
    try:
        with _called(staging, url):
            result = build(staging)
            with folder_lock(staging, shared=False):
                manifest = read_manifest(staging)
                assert manifest is not None
                if finished is None:
                    target.upload(staging, manifest)
                else:
                    target.forget_mark()
    except ConfigError:
        if finished is not None:
            shutil.rmtree(staging, ignore_errors=True)
        raise
    shutil.rmtree(staging, ignore_errors=True)
    return result


@contextmanager
def _called(staging: Path, url: str) -> Iterator[None]:
    """Errors about the folder of this machine say the URL as well."""
    try:
        yield
    except ConfigError as error:
        if str(staging) not in str(error):
            raise
        said = str(error).replace(str(staging), url)
        raise ConfigError(f"{said} It was built in {staging}: remove that folder to start again.") from None


class RemoteFolder:
    """A folder of a store."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        if self.url.startswith(("http://", "https://")):
            raise ConfigError(f"{url}: files can be read from there, and not written; build into a folder or s3://")
        self._store = filesystem(self.url)

    def path(self, name: str) -> str:
        """The URL of a file in it."""
        return f"{self.url}/{name}"

    def read(self, name: str) -> bytes | None:
        """The bytes of a file; None where it is not there."""
        with reaching(self.path(name)):
            self._store.invalidate_cache()
            if not self._store.isfile(self.path(name)):
                return None
            return bytes(self._store.cat_file(self.path(name)))

    def sizes(self) -> dict[str, int]:
        """All files by their names in the folder."""
        with reaching(self.url):
            self._store.invalidate_cache()
            root = self._store._strip_protocol(self.url)
            found = self._store.find(self.url, detail=True)
            return {path.removeprefix(root).lstrip("/"): int(info["size"] or 0) for path, info in found.items()}

    def refuse_foreign(self) -> None:
        """A folder that holds something, but no dataset and no mark of one that is being copied, is left alone."""
        there = self.sizes()
        if there and MARK not in there:
            shown = ", ".join(sorted(there)[:5])
            raise ConfigError(f"{self.url} is not empty ({shown}) and holds no build; choose an empty folder")

    def upload(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Copy a finished dataset: the mark first, then all files that are not there yet, the manifest last."""
        fingerprint = manifest["fingerprint"]
        there = self._begun(fingerprint)
        wanted = {name: int(record["bytes"]) for name, record in manifest["files"].items()}
        missing = [name for name, size in wanted.items() if there.get(name) != size]
        with ThreadPoolExecutor(COPIES) as threads:
            for _ in threads.map(lambda name: self._put(folder / name, name), missing):
                fault_point("after_upload_file")
        sizes = self.sizes()
        lost = [name for name, size in wanted.items() if sizes.get(name) != size]
        if lost:
            raise DataError(f"{self.path(lost[0])} did not arrive whole: run the same command again")
        fault_point("before_remote_manifest")
        self._put(folder / MANIFEST, MANIFEST)
        fault_point("after_remote_manifest")
        self.forget_mark()

    def forget_mark(self) -> None:
        """Remove the mark of a dataset that is whole."""
        if self.read(MARK) is not None:
            with reaching(self.path(MARK)):
                self._store.rm_file(self.path(MARK))

    def _begun(self, fingerprint: str) -> dict[str, int]:
        """What an earlier run of the same build has copied; writes the mark of this one."""
        mark = self.read(MARK)
        if mark is not None:
            try:
                found = json.loads(mark)["fingerprint"]
            except (ValueError, KeyError, TypeError):
                found = "unknown"
            if found != fingerprint:
                raise ConfigError(
                    f"{self.url} holds an unfinished copy of another dataset (fingerprint {found[:12]}, this one is "
                    f"{fingerprint[:12]}): remove it there, or choose another place"
                )
            return self.sizes()
        self.refuse_foreign()
        with reaching(self.path(MARK)):
            self._store.pipe_file(self.path(MARK), canonical_json({"fingerprint": fingerprint}))
        return {}

    def _put(self, source: Path, name: str) -> None:
        try:
            with reaching(self.path(name)):
                self._store.put_file(str(source), self.path(name))
        except ChatmillError as error:
            raise DataError(f"{error}. The dataset is built, and the same command copies the rest of it") from error
