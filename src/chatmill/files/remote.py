"""The one module that knows that a dataset may be remote: a local folder that fills on demand.

The folder of a remote dataset is made in the cache from its manifest. Each file is a link to where the cache keeps, or
will keep, the bytes with the digest in the manifest; the name of that place also says the size. So a file that was not
fetched yet is a link to nothing: whoever opens it fails, and never reads wrong bytes. `fill` fetches it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from chatmill.core.cache_folders import CACHE_VARIABLE, chatmill_cache
from chatmill.core.checksums import FileRecord, Hash
from chatmill.core.publish import storing, temporary_beside
from chatmill.errors import ADDRESSES, ConfigError, FormatError, as_named
from chatmill.files import cache, stores
from chatmill.files.stores import NoSuchObject, RemoteError, StoredObject, join, shown

MANIFESTS = ("manifest.json", "export.json")
"""Of a dataset and of an export; one of them is written last, and names all files."""
DATASETS, ORIGIN = "datasets", ".origin"
"""The folder of the cache with the folders of datasets, and the file in each that has its URL."""
INDEX = "episodes.idx"
JOINED = ".indexes"
"""An object beside the manifest: all indexes one after the other, so that opening many shards takes one request."""
WITHOUT_JOINED = 32
"""Up to so many indexes are fetched one by one."""
URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(//?)(?!/)")
_DIGEST = re.compile(r"[0-9a-f]{32}|[0-9a-f]{64}")
_LINK = re.compile(rf"(?:\.\./)+{cache.FILES}/[0-9a-f]{{2}}/([0-9a-f]{{32}}|[0-9a-f]{{64}})-(\d+)")


class Remote(NamedTuple):
    """A file of a remote dataset, as its link says it."""

    url: str
    record: FileRecord
    target: Path
    """Where the cache keeps its bytes."""


# Addresses.


def address(path: str | os.PathLike[str]) -> str | None:
    """Return the URL that a path is; None for a path of this machine.

    A `Path` made of a URL has lost one of its slashes, which is put back.

    Raises:
        ConfigError: The URL names a store and nothing in it.
    """
    text = os.fspath(path)
    match = URL.match(text)
    if match is None or match[1] == "file":
        return None
    if match[2] == "/":
        if not isinstance(path, Path) or os.path.lexists(path):
            return None
        text = text.replace(":/", "://", 1)
    if not text.partition("://")[2].strip("/"):
        raise ConfigError(f"{text}: name the bucket, and where in it")
    return text


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return a path of this machine; a `file://` URL is one."""
    text = os.fspath(path)
    return Path(unquote(urlsplit(text).path)) if text.startswith("file://") else Path(path)


def name_folder(folder: Path, url: str) -> None:
    """Let messages have a URL in place of a folder."""
    ADDRESSES[str(folder)] = url.rstrip("/")


class _NamedStream:
    """A stream of texts in which the folders of remote datasets have their URLs."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text."""
        return int(self._stream.write(as_named(text)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def named_output() -> Iterator[None]:
    """Print URLs in place of folders of the cache, on standard output and standard error."""
    with (
        contextlib.redirect_stdout(_NamedStream(sys.stdout)),
        contextlib.redirect_stderr(_NamedStream(sys.stderr)),
    ):
        yield


# Reading: a folder that fills.


def local_folder(path: str | os.PathLike[str], *, whole: bool = False) -> Path:
    """Return the folder of a dataset or of one split; that of a URL fills on demand, or at once with `whole`.

    Raises:
        RemoteError: The store cannot be reached, or has no finished dataset there.
        ConfigError: The cache may not hold a whole dataset.
    """
    url = address(path)
    if url is None:
        return local_path(path)
    stores.refuse_keys(url)
    try:
        name, data = _manifest(url)
    except NoManifest:
        return _folder_of_split(url, whole=whole)
    folder = _folder_of(url, data)
    name_folder(folder, url)
    files = _listed(name, data, url)
    if not folder.is_dir():
        _make_folder(folder, url, name, data, files)
    _fill_heads(folder, url, files)
    if whole:
        _fill_whole(folder, url, files)
    return folder


def _folder_of_split(url: str, *, whole: bool) -> Path:
    """Return the folder of a split of the dataset that has the manifest; the same error if there is none."""
    parent, _, split = url.rstrip("/").rpartition("/")
    try:
        name, data = _manifest(parent)
    except RemoteError:
        raise _no_manifest(url) from None
    if not any(path.startswith(f"{split}/") for path in _listed(name, data, parent)):
        raise _no_manifest(url)
    return local_folder(parent, whole=whole) / split


def _folder_of(url: str, manifest: bytes) -> Path:
    """Return where the cache has the folder of a dataset: one for each URL and manifest, named as at the URL."""
    home = sha256(url.rstrip("/").encode()).hexdigest()[:16]
    name = PurePosixPath(url.partition("://")[2]).name
    return chatmill_cache().absolute() / DATASETS / f"{home}-{sha256(manifest).hexdigest()[:16]}" / name


def _manifest(url: str) -> tuple[str, bytes]:
    """Return the name and bytes of the manifest of a dataset or an export."""
    for name in MANIFESTS:
        with contextlib.suppress(NoSuchObject):
            return name, stores.read_object(join(url, name))
    stores.refuse_missing_bucket(url, "open the dataset")
    raise _no_manifest(url)


class NoManifest(RemoteError):  # noqa: N818 - it says what was found
    """There is no dataset, or none that is finished."""


def _no_manifest(url: str) -> NoManifest:
    return NoManifest(
        url,
        "open the dataset",
        f"it has no {MANIFESTS[0]}, which a build writes last",
        "Check the address, or finish the build (--resume)",
    )


def _listed(name: str, data: bytes, url: str) -> dict[str, FileRecord]:
    """Return the files that a manifest lists, with their sizes and digests."""
    where = join(url, name)
    try:
        content = json.loads(data)
        if isinstance(content.get("files"), Mapping):
            files = {path: FileRecord.from_json(record) for path, record in content["files"].items()}
        else:
            files = {file["path"]: FileRecord.from_json(file) for file in _distillation_files(content)}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{shown(where)} is not the manifest of a dataset: {error!r}") from None
    for path, record in files.items():
        is_own = path in (*MANIFESTS, ORIGIN)
        is_inside = path and not path.startswith("/") and not {"", ".", ".."} & set(path.split("/"))
        if is_own or not is_inside or not _DIGEST.fullmatch(record.digest):
            raise FormatError(f"{shown(where)} names {path!r} with the digest {record.digest!r}: it was edited")
    return files


def _distillation_files(content: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the files in the manifest of a distillation dataset."""
    for split in content["splits"].values():
        for shard in split["shards"]:
            yield from shard["files"]
    if content["failed"]["file"] is not None:
        yield content["failed"]["file"]


def _make_folder(folder: Path, url: str, name: str, data: bytes, files: Mapping[str, FileRecord]) -> None:
    """Make the folder of a dataset: its manifest, and a link for every other file."""
    temporary = temporary_beside(folder.parent)
    inner = temporary / folder.name
    with storing(folder, "create the folder of a remote dataset in the cache"):
        inner.mkdir(parents=True)
        try:
            made = {""}
            for path, record in files.items():
                below = path.rpartition("/")[0]
                if below not in made:
                    (inner / below).mkdir(parents=True, exist_ok=True)
                    made.add(below)
                up = "../" * (path.count("/") + 3)
                os.symlink(up + cache.name_of(record), f"{inner}/{path}")
            (inner / name).write_bytes(data)
            (temporary / ORIGIN).write_text(url.rstrip("/"))
            with contextlib.suppress(OSError):  # another process was first
                os.rename(temporary, folder.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    if not folder.is_dir():
        raise ConfigError(f"{folder} cannot be made: remove what is there")


def _fill_heads(folder: Path, url: str, files: Mapping[str, FileRecord]) -> None:
    """Fetch what every reader needs: indexes, and the files beside the manifests."""
    root = chatmill_cache().absolute()
    heads = [path for path in files if path.count("/") < 2 and not path.endswith(".bin")]
    indexes = [path for path in files if path.endswith(f"/{INDEX}")]
    wanted = list(dict.fromkeys([*heads, *indexes]))
    missing = [path for path in wanted if not cache.touch(f"{root}/{cache.name_of(files[path])}")]
    if missing:
        refuse_larger(url, sum({files[path].digest: files[path].bytes for path in wanted}.values()))
    if sum(path.endswith(f"/{INDEX}") for path in missing) > WITHOUT_JOINED:
        _fill_joined(url, {path: files[path] for path in sorted(indexes)}, root)
        missing = [path for path in missing if not os.path.exists(f"{root}/{cache.name_of(files[path])}")]
    fill_all([folder / path for path in missing], stores.MANY)


def _fill_joined(url: str, indexes: Mapping[str, FileRecord], root: Path) -> None:
    """Fetch all indexes with one request, if the build has left them together; each is compared with its digest."""
    try:
        data = memoryview(stores.read_parts(join(url, JOINED), sum(record.bytes for record in indexes.values())))
    except RemoteError:
        return  # there is none, or another one: each index is fetched by itself
    start = 0
    found: dict[str, bytes | memoryview] = {}
    for record in indexes.values():
        part = data[start : start + record.bytes]
        start += record.bytes
        digest = record.hash.begin()
        digest.update(part)
        name = cache.name_of(record)
        if digest.hexdigest() == record.digest and not os.path.exists(f"{root}/{name}"):
            found[name] = part
    cache.keep_small(root, found)


def _fill_whole(folder: Path, url: str, files: Mapping[str, FileRecord]) -> None:
    """Fetch all files of a dataset; refuse one that the cache may not hold at once."""
    refuse_larger(url, sum({record.digest: record.bytes for record in files.values()}.values()))
    fill_all([folder / path for path in files])


def refuse_larger(url: str, size: int, more: str = "") -> None:
    """Refuse what needs more bytes in the cache at once than its limit allows."""
    limit = cache.cache_limit()
    if size > limit:
        raise ConfigError(
            f"{shown(url)}: this needs {size:,} bytes in the cache at once, and {chatmill_cache()} may hold {limit:,}: "
            f"raise {cache.LIMIT_VARIABLE}, choose a larger disk ({CACHE_VARIABLE}){more}"
        )


def remote_file(path: str | os.PathLike[str]) -> Remote | None:
    """Return what the link of a remote dataset's file says; None for all other paths."""
    text = os.path.abspath(path)
    stated = _stated(text)
    if stated is None:
        return None
    link, record = stated
    root = os.path.normpath(os.path.join(os.path.dirname(text), link.partition(f"{cache.FILES}/")[0]))
    home, _, below = os.path.relpath(text, f"{root}/{DATASETS}").partition("/")
    try:
        url = _url_of(f"{root}/{DATASETS}/{home}/{ORIGIN}")
    except OSError:
        return None
    return Remote(join(url, below.partition("/")[2]), record, Path(root) / cache.name_of(record))


def _stated(path: str) -> tuple[str, FileRecord] | None:
    """Return the link at a path, and the size and digest in it; None for what is no link to a file of the cache."""
    try:
        link = os.readlink(path)
    except OSError:
        return None
    match = _LINK.fullmatch(link)
    if match is None:
        return None
    hash = Hash.XXH128 if len(match[1]) == 32 else Hash.SHA256
    return link, FileRecord(bytes=int(match[2]), digest=match[1], hash=hash)


@lru_cache(maxsize=64)
def _url_of(path: str) -> str:
    """Return the URL in the file that the folder of a remote dataset has beside it."""
    return Path(path).read_text()


def stored_record(path: str | os.PathLike[str]) -> FileRecord | None:
    """Return the size and digest of a remote dataset's file; None for what is no file of one."""
    stated = _stated(os.fspath(path))
    return None if stated is None else stated[1]


def stored_size(path: str | os.PathLike[str]) -> int | None:
    """Return the size of a file that was not fetched yet; None for what is no file of a remote dataset."""
    record = stored_record(path)
    return None if record is None else record.bytes


def origin(folder: str | os.PathLike[str]) -> str | None:
    """Return the URL that a folder of the cache belongs to; None for all other folders."""
    return ADDRESSES.get(os.path.abspath(folder))


def fill(path: str | os.PathLike[str]) -> bool:
    """Fetch a file of a remote dataset into the cache; return whether the path is one of these."""
    remote = remote_file(path)
    if remote is None:
        return False
    if not cache.touch(remote.target):
        cache.keep(remote.target, remote.record.bytes, partial(_download, remote))
    return True


def read_part(path: str | os.PathLike[str], start: int, stop: int) -> bytes:
    """Return some bytes of a file of a remote dataset, without fetching the others; nothing compares them."""
    remote = remote_file(path)
    if remote is None or remote.target.exists():
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(stop - start)
    return stores.read_range(remote.url, start, stop)


def fill_again(path: str | os.PathLike[str]) -> bool:
    """Fetch a file of a remote dataset although it is in the cache; return whether the path is one of these."""
    remote = remote_file(path)
    if remote is None:
        return False
    remote.target.unlink(missing_ok=True)
    return fill(path)


def is_stored(path: Path, url: str, found: StoredObject) -> bool:
    """Return whether an object has the size and bytes of a file of this machine."""
    if found.size != path.stat().st_size:
        return False
    if stores.has_digest_of(found, path):
        return True
    # The store gives no digest, or that of something else, as of encrypted bytes: read it again.
    record = FileRecord.of_file(path)
    digest = record.hash.begin()
    for start in range(0, record.bytes, stores.BLOCK):
        digest.update(stores.read_range(url, start, min(start + stores.BLOCK, record.bytes)))
    return digest.hexdigest() == record.digest


def stored_problems(folder: Path, within: Sequence[str]) -> dict[str, str]:
    """Compare the files of a remote dataset, all of them fetched, with what its store has now.

    Args:
        folder: The folder of the dataset in the cache.
        within: Folders in which nothing may be added; "." for all.

    Returns:
        For each object that is gone, differs or was added: what is wrong. Empty for a folder of this machine.
    """
    url = origin(folder)
    if url is None:
        return {}
    there = stores.list_objects(url)
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_symlink()]

    def find_problem(name: str) -> str:
        found = there.get(name)
        if found is None:
            return "is gone from the store"
        if not is_stored(folder / name, join(url, name), found):
            return "was changed in the store after the build"
        return ""

    problems = dict(zip(names, stores.in_parallel(find_problem, names, stores.STREAMS), strict=True))
    known = {*names, *MANIFESTS, JOINED}
    for name in there:
        if name not in known and ("." in within or name.partition("/")[0] in within):
            problems[name] = "is no part of the dataset: it was added in the store"
    return {name: problem for name, problem in problems.items() if problem}


def fill_all(paths: Sequence[Path], threads: int = stores.STREAMS) -> None:
    """Fetch several files of remote datasets at once."""
    stores.in_parallel(fill, paths, threads)


def _download(remote: Remote, temporary: Path) -> None:
    """Fetch an object and compare it with its digest; another one is asked for twice."""
    for _ in range(2):
        digest = remote.record.hash.begin()
        with temporary.open("wb", buffering=0) as out:
            for start in range(0, remote.record.bytes, stores.BLOCK):
                block = _block(remote, start)
                digest.update(block)
                out.write(block)
        if digest.hexdigest() == remote.record.digest:
            return
    raise RemoteError(
        remote.url,
        "read",
        f"its bytes have the {remote.record.hash} {digest.hexdigest()}, and the manifest says {remote.record.digest}",
        "It was changed or damaged after it was written: build the dataset again, or restore the object",
        2,
    )


def _block(remote: Remote, start: int) -> bytes:
    stop = min(start + stores.BLOCK, remote.record.bytes)
    try:
        return stores.read_range(remote.url, start, stop)
    except NoSuchObject as error:
        raise RemoteError(
            remote.url,
            "read",
            "the manifest names this object, and it is gone",
            "Somebody has removed it: restore it, or build the dataset again",
            error.tries,
        ) from None


class Prefetch:
    """Fetches files before they are needed, in the order in which they will be, up to a number of bytes ahead."""

    def __init__(self, most: int) -> None:
        """`most` is in bytes; a window of files is never more than is asked for at once."""
        self.most = most
        self._threads: ThreadPoolExecutor | None = None
        self._running: dict[str, Future[bool]] = {}
        self._lock = threading.Lock()
        self._process = os.getpid()

    def want(self, paths: Sequence[Path]) -> None:
        """Begin to fetch files; an error shows when the file is read, which fetches it once more."""
        if self._process != os.getpid():  # a forked process has none of the threads
            self.__init__(self.most)  # type: ignore[misc]
        with self._lock:
            self._running = {name: future for name, future in self._running.items() if not future.done()}
            room = self.most
            for path in paths:
                remote = remote_file(path)
                if remote is None:
                    continue
                room -= remote.record.bytes
                if room < 0:
                    break
                if remote.target.exists():
                    cache.touch(remote.target)
                elif str(path) not in self._running:
                    if self._threads is None:
                        self._threads = ThreadPoolExecutor(stores.STREAMS // 2, thread_name_prefix="chatmill-prefetch")
                    self._running[str(path)] = self._threads.submit(fill, path)

    def __reduce__(self) -> tuple[type[Prefetch], tuple[int]]:
        """Another process fetches by itself."""
        return Prefetch, (self.most,)
