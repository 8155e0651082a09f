"""Object stores: the few requests that Chatmill makes of them, each with a time-out, retries and one clear error.

`fsspec` carries the bytes and knows the protocols. A request that fails is made again, unless the answer cannot change:
no such object, no access, no credentials. Keys and tokens are taken out of whatever is printed.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import inspect
import os
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit

from chatmill.errors import ChatmillError, ConfigError, MissingExtraError

Answer = TypeVar("Answer")
Item = TypeVar("Item")

NEEDS = {
    "s3": ("s3fs", "s3"), "s3a": ("s3fs", "s3"), "gs": ("gcsfs", "gs"), "gcs": ("gcsfs", "gs"),
    "az": ("adlfs", "az"), "abfs": ("adlfs", "az"), "abfss": ("adlfs", "az"),
    "http": ("aiohttp", "http"), "https": ("aiohttp", "http"), "hf": ("huggingface_hub", "hf"),
}  # fmt: skip
"""The package that a kind of URL needs besides fsspec, and the extra that installs both."""
TIMEOUT_VARIABLE, RETRIES_VARIABLE = "CHATMILL_STORE_TIMEOUT", "CHATMILL_STORE_RETRIES"
BLOCK = 16 << 20
"""Bytes of one request for a part of an object."""
MOST_BLOCKS = 256
"""As if so many blocks were on their way, where a web server does not say how long a file is."""
PART = 64 << 20
"""Bytes of a part of an object that is uploaded to S3 in parts: one of at least twice as many."""
STREAMS = 8
"""Requests that one process has under way at a time for large files."""
MANY = 64
"""The same for small files, where most of the time goes into waiting."""
FIRST_WAIT, LONGEST_WAIT = 0.2, 10.0
"""Seconds between two tries of a request; each wait is twice as long as the one before."""
_SECRET_NAMES = ("SECRET", "TOKEN", "PASSWORD", "ACCOUNT_KEY", "STORAGE_KEY", "CONNECTION_STRING", "SAS", "ACCESS_KEY")
_SECRET_OPTIONS = [
    "key",
    "secret",
    "token",
    "password",
    "account_key",
    "sas_token",
    "connection_string",
    "client_secret",
]
_SIGNED = re.compile(r"(?i)([?&;](?:sig|signature|x-amz-[a-z-]+|x-goog-[a-z-]+|token|se|sp|sv)=)[^&\s'\"]+")
_USER = re.compile(r"(?<=://)[^/@\s:]+:[^/@\s]+@")


class RemoteError(ChatmillError):
    """A store did not do what was asked: the URL, what was tried, how often, and what it said."""

    def __init__(self, url: str, action: str, reason: str, hint: str, tries: int = 1) -> None:
        """`action` is a verb for what was tried, e.g. "read"."""
        self.url = shown(url)
        self.tries = tries
        often = "tried once" if tries == 1 else f"tried {tries} times"
        super().__init__(f"{self.url}: cannot {action}: {hidden(reason)} ({often}). {hint}")


class NoSuchObject(RemoteError):  # noqa: N818 - it says what the store answered
    """The store has no object of this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """How long and how often a request is tried."""

    timeout: float = 60.0
    """Seconds for one request."""
    retries: int = 6
    """How often a request is made again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """What a store says of an object."""

    size: int | None
    """In bytes; None where a web server does not say it."""
    version: str
    """Differs after the object was written again: its ETag, hash or time of change. Empty where none is said."""
    md5: str = ""
    """Hexadecimal digits; empty where the store does not say it."""
    changed: float = 0.0
    """When it was written, in seconds, by the clock of the store."""
    has_ranges: bool = True
    """Whether a part of it can be asked for."""


_from_recipe: StoreSettings | None = None


def use_settings(settings: Mapping[str, Any] | None) -> None:
    """Take time-outs and retries from a recipe (its key `store`); the environment still wins."""
    global _from_recipe
    known = {name: value for name, value in (settings or {}).items() if name in ("timeout", "retries")}
    _from_recipe = StoreSettings(**known)


def store_settings() -> StoreSettings:
    """Return the time-out and retries of this process: environment, recipe, defaults."""
    settings = _from_recipe or StoreSettings()
    return StoreSettings(
        timeout=_number(TIMEOUT_VARIABLE, settings.timeout),
        retries=int(_number(RETRIES_VARIABLE, settings.retries)),
    )


def _number(variable: str, default: float) -> float:
    text = os.environ.get(variable)
    if not text:
        return default
    try:
        number = float(text)
    except ValueError:
        raise ConfigError(f"{variable} is {text!r}; it takes a number") from None
    if number < 0:
        raise ConfigError(f"{variable} is {text!r}; it takes a number that is not negative")
    return number


# Addresses.


def kind_of(url: str) -> str:
    """Return the protocol of a URL, such as `s3`."""
    return url.partition("://")[0].lower()


def shown(url: str) -> str:
    """Return a URL as it may be printed: without user, password and query."""
    return _USER.sub("", url).partition("?")[0]


def hidden(text: str) -> str:
    """Take keys, tokens and signatures out of a text."""
    text = _SIGNED.sub(r"\1...", _USER.sub("", text))
    for secret in _secrets():
        text = text.replace(secret, "...")
    return text


def _secrets() -> list[str]:
    """Collect the values of this process that are keys, the longest first."""
    found = {value for name, value in os.environ.items() if any(part in name.upper() for part in _SECRET_NAMES)}
    for options in fsspec_settings().values():
        if isinstance(options, Mapping):
            found |= {str(options[name]) for name in _SECRET_OPTIONS if options.get(name)}
    return sorted((value for value in found if len(value) >= 8), key=len, reverse=True)


def holds_key(url: str) -> bool:
    """Return whether an address has a password or a signature in it."""
    return _USER.search(url) is not None or _SIGNED.search(url) is not None


def refuse_keys(url: str) -> None:
    """Refuse an address with a password or signature in it: addresses are printed and written."""
    parts = urlsplit(url)
    if parts.password or (parts.username and kind_of(url) not in ("abfs", "abfss", "az", "hf")) or parts.query:
        raise ConfigError(
            f"{shown(url)}: the address of a dataset holds a key, a password or a query, and addresses are printed and "
            "written: give credentials as the store's own tools take them (environment, profile, instance role)"
        )


def join(url: str, name: str) -> str:
    """Return the URL of an object below another URL."""
    return f"{url.rstrip('/')}/{name}" if name else url.rstrip("/")


# The file systems of fsspec.


def fsspec_settings(settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what fsspec is told about stores in this process; `settings` are those of another one, taken over here."""
    try:
        from fsspec.config import conf
    except ImportError:  # whatever needs it names the package
        return {}
    conf.update(settings or {})
    return dict(conf)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAccess:
    """How a process reaches stores, for another one that is to reach the same ones; small and picklable."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Time-out and retries, as the recipe has them."""
    fsspec: Mapping[str, Any] = field(default_factory=fsspec_settings, repr=False)
    """The configuration of fsspec, in which there may be keys."""

    def use(self) -> None:
        """Let this process know the stores as the other one does."""
        fsspec_settings(self.fsspec)
        use_settings(self.options)


def filesystem(url: str) -> Any:
    """Return the file system of `fsspec` for a URL; a missing package is named with the line that installs it."""
    kind = kind_of(url)
    package, extra = NEEDS.get(kind, ("fsspec", "http"))
    purpose = f"reading and writing {kind}:// paths"
    try:
        import fsspec
    except ImportError:
        raise MissingExtraError("fsspec", extra, purpose) from None
    try:
        return fsspec.core.url_to_fs(url, **_own_options(kind))[0]
    except ImportError as error:
        if kind in NEEDS:
            raise MissingExtraError(package, extra, purpose) from None
        raise ConfigError(f"{shown(url)}: {hidden(str(error))}") from None
    except ValueError as error:
        known = ", ".join(f"{name}://" for name in NEEDS)
        raise ConfigError(f"{shown(url)}: {hidden(str(error))}. Known: {known}") from None


def _own_options(kind: str) -> dict[str, Any]:
    """Return options so that requests are tried again here alone, and listings are never old."""
    if kind not in ("s3", "s3a") or "config_kwargs" in fsspec_settings().get("s3", {}):
        return {}
    return {"config_kwargs": {"retries": {"total_max_attempts": 1}, "max_pool_connections": MANY}}


def _call(store: Any, name: str, *args: Any, carries: int | None = 0, **options: Any) -> Any:
    """Call a method of a file system; an asynchronous one is stopped at the time-out.

    `carries` says how many bytes are on their way, which may take as long as so many requests for blocks. None is for
    a number that nobody knows.
    """
    from fsspec.asyn import AsyncFileSystem, sync

    coroutine = getattr(store, f"_{name}", None)
    if isinstance(store, AsyncFileSystem) and store.async_impl and inspect.iscoroutinefunction(coroutine):
        if hasattr(store, "retries"):
            store.retries = 1
        timeout = store_settings().timeout * (MOST_BLOCKS if carries is None else 1 + carries / BLOCK)
        return sync(store.loop, coroutine, *args, timeout=timeout, **options)
    return getattr(store, name)(*args, **options)


def _ask(url: str, action: str, request: Callable[[Any], Answer]) -> Answer:
    """Make a request until it succeeds, cannot succeed, or has been tried too often."""
    store = filesystem(url)
    tries = 0
    wait = FIRST_WAIT
    while True:
        tries += 1
        try:
            return request(store)
        except (ChatmillError, FileExistsError):
            raise
        except Exception as error:
            final = _final_error(url, action, error, tries)
            if final is None and tries > store_settings().retries:
                reason = str(error) or type(error).__name__
                final = RemoteError(url, action, reason, "Check the name and the network, and try again", tries)
            if final is not None:
                raise final from None
        time.sleep(wait * (0.5 + random.random() / 2))
        wait = min(2 * wait, LONGEST_WAIT)


def _final_error(url: str, action: str, error: Exception, tries: int) -> RemoteError | None:
    """Return the error for an answer that trying again does not change; None for others."""
    text = str(error) or type(error).__name__
    name = type(error).__name__
    if "NoSuchBucket" in text or "bucket does not exist" in text or "ContainerNotFound" in text:
        return RemoteError(url, action, "there is no such bucket", "Check its name, or make it first", tries)
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and cause is not None and kind_of(url) in ("http", "https"):
        error = cause if isinstance(cause, Exception) else error  # which may be that the server is busy
        if getattr(error, "status", None) in (404, 410):
            return NoSuchObject(url, action, "there is no such object", "Check the name", tries)
    if isinstance(error, FileNotFoundError):
        return NoSuchObject(url, action, "there is no such object", "Check the name", tries)
    if name in ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "DefaultCredentialsError"):
        hint = "Set them as the store's own tools take them (environment, profile, instance role)"
        return RemoteError(url, action, "no credentials were found", hint, tries)
    status = getattr(error, "status", None)
    if isinstance(error, PermissionError) or status in (401, 403) or name == "ClientAuthenticationError":
        return RemoteError(url, action, f"forbidden: {text}", "Check the credentials and their rights", tries)
    return None


# Requests.


def object_info(url: str) -> StoredObject:
    """Return what the store says of an object."""
    info = _ask(url, "read", lambda store: _fresh_info(store, url))
    return _stored_object(info, kind_of(url))


def _fresh_info(store: Any, url: str) -> dict[str, Any]:
    store.invalidate_cache()
    return dict(_call(store, "info", store._strip_protocol(url)))


def _stored_object(info: Mapping[str, Any], kind: str) -> StoredObject:
    is_web = kind in ("http", "https")
    size = info.get("size")
    tag = str(info.get("ETag") or info.get("etag") or "").strip('"')
    changed = _time_of_change(info)
    version = tag or info.get("blob_id") or info.get("Content-MD5") or info.get("Digest") or changed or ""
    return StoredObject(
        size=None if is_web and size is None else int(size or 0),
        version=str(version),
        md5=_md5(info, tag, kind),
        changed=changed,
        has_ranges=not is_web or bool(info.get("partial")),
    )


def _time_of_change(info: Mapping[str, Any]) -> float:
    """Return when an object was written, in seconds; 0 where the store does not say it."""
    names = ("LastModified", "last_modified", "updated", "mtime", "created")
    changed = next((info[name] for name in names if info.get(name)), 0.0)
    if isinstance(changed, str):
        changed = datetime.fromisoformat(changed.replace("Z", "+00:00"))
    return changed.timestamp() if isinstance(changed, datetime) else float(changed)


def _md5(info: Mapping[str, Any], tag: str, kind: str) -> str:
    """Return the MD5 that a store says of an object; empty where it says none."""
    content = (info.get("content_settings") or {}).get("content_md5")
    if content:
        return bytes(content).hex()
    if info.get("md5Hash"):
        return base64.b64decode(info["md5Hash"]).hex()
    is_md5 = kind in ("s3", "s3a") and re.fullmatch(r"[0-9a-f]{32}", tag) is not None
    return tag if is_md5 else ""


def refuse_missing_bucket(url: str, action: str) -> None:
    """Raise the error for a bucket that is not there; some stores say no more than that an object is not."""

    def request(store: Any) -> None:
        bucket = store._strip_protocol(url).strip("/").partition("/")[0]
        if not _call(store, "exists", bucket):
            raise RemoteError(url, action, "there is no such bucket", "Check its name, or make it first")

    if kind_of(url) in ("az", "abfs", "abfss", "gs", "gcs"):
        _ask(url, action, request)


def read_object(url: str) -> bytes:
    """Return a whole object, a small one."""

    def request(store: Any) -> bytes:
        # New releases of s3fs ask for its size first, to fetch large ones in parts, unless one part is all they may.
        takes_parts = "max_concurrency" in inspect.signature(store.cat_file).parameters
        options = {"max_concurrency": 1} if takes_parts else {}
        return bytes(_call(store, "cat_file", store._strip_protocol(url), **options))

    return _ask(url, "read", request)


def read_range(url: str, start: int, stop: int) -> bytes:
    """Return the bytes of an object from `start` up to `stop`; fewer are an error of the store, and asked for again."""

    def request(store: Any) -> bytes:
        name = store._strip_protocol(url)
        data = bytes(_call(store, "cat_file", name, start=start, end=stop, carries=stop - start))
        if len(data) > stop - start:  # a server that knows no ranges sends all of it
            data = data[start:stop]
        if len(data) != stop - start:
            raise OSError(f"{stop - start:,} bytes were asked for and {len(data):,} came")
        return data

    return _ask(url, "read", request) if stop > start else b""


def read_parts(url: str, size: int) -> bytes:
    """Return an object of a known size, several parts at once."""
    starts = range(0, size, BLOCK)
    return b"".join(in_parallel(lambda start: read_range(url, start, min(start + BLOCK, size)), starts, STREAMS))


def write_object(url: str, data: bytes) -> None:
    """Write an object; an existing one is replaced."""
    _ask(url, "write", lambda store: _call(store, "pipe_file", store._strip_protocol(url), data))


def create_object(url: str, data: bytes) -> bool:
    """Create an object exclusively; return whether it holds these bytes now.

    After an answer that got lost, the object that is there may be our own, so what is there is compared.
    """
    try:
        _ask(url, "create", lambda store: _create(store, url, data))
        return True
    except FileExistsError:
        return read_object(url) == data


def _create(store: Any, url: str, data: bytes) -> None:
    try:
        _call(store, "pipe_file", store._strip_protocol(url), data, mode="create")
    except (ChatmillError, FileExistsError):
        raise
    except Exception as error:  # what stores answer where something is there already
        text = f"{type(error).__name__} {error}"
        if any(word in text for word in ("PreconditionFailed", "BlobAlreadyExists", "conditionNotMet", "412", "409")):
            raise FileExistsError(url) from None
        raise


def creates_exclusively(url: str, data: bytes) -> bool:
    """Return whether a store refuses to create an object that is there, with these bytes, a second time."""
    from fsspec import AbstractFileSystem

    store = filesystem(url)
    if not hasattr(store, "_pipe_file") and type(store).pipe_file is AbstractFileSystem.pipe_file:
        return False  # it looks first, and then writes
    try:
        _ask(url, "create", lambda store: _create(store, url, data))
    except FileExistsError:
        return True
    return False


def upload(path: os.PathLike[str], url: str) -> None:
    """Write a local file as an object."""
    size = os.path.getsize(path)

    parts = {"chunksize": PART} if kind_of(url) in ("s3", "s3a") else {}

    def request(store: Any) -> None:
        _call(store, "put_file", os.fspath(path), store._strip_protocol(url), carries=size, **parts)

    _ask(url, "write", request)


def has_digest_of(found: StoredObject, path: os.PathLike[str]) -> bool:
    """Return whether the digest that a store gives of an object is that of a file.

    S3 gives the MD5, or for an object in parts the MD5 of the parts' MD5s. False where a store gives none, or that of
    encrypted bytes.
    """
    if found.md5:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "md5").hexdigest() == found.md5
    digest, _, parts = found.version.partition("-")
    size = os.path.getsize(path)
    if not parts.isdigit() or int(parts) != -(-size // PART):
        return False
    together = hashlib.md5()
    with open(path, "rb") as file:
        while part := file.read(PART):
            together.update(hashlib.md5(part).digest())
    return together.hexdigest() == digest


def download(url: str, found: StoredObject, path: os.PathLike[str]) -> None:
    """Copy an object to a file, several parts at once where the store gives parts.

    Args:
        url: The object.
        found: What the store says of it.
        path: The file, which is written over.
    """
    size = found.size
    if size is None or not (found.has_ranges or size <= BLOCK):
        _ask(url, "read", lambda store: _whole_file(store, url, path, size))
        return
    with open(path, "wb", buffering=0) as file:
        file.truncate(size)

        def copy_block(start: int) -> None:
            data = read_range(url, start, min(start + BLOCK, size))
            written = os.pwrite(file.fileno(), data, start)
            if written != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(path))

        in_parallel(copy_block, range(0, size, BLOCK), STREAMS)


def _whole_file(store: Any, url: str, path: os.PathLike[str], size: int | None) -> None:
    """Copy an object to a file with one request."""
    _call(store, "get_file", store._strip_protocol(url), os.fspath(path), carries=size)
    came = os.path.getsize(path)
    if size is not None and came != size:
        raise ConnectionError(f"{size:,} bytes were asked for and {came:,} came")


def remove_objects(urls: Sequence[str]) -> None:
    """Remove objects; missing ones are fine."""
    in_parallel(_remove, urls)


def _remove(url: str) -> None:
    with contextlib.suppress(NoSuchObject):
        _ask(url, "remove", lambda store: _call(store, "rm_file", store._strip_protocol(url)))


def list_objects(url: str) -> dict[str, StoredObject]:
    """List all objects below a URL, by their names relative to it."""

    def request(store: Any) -> dict[str, StoredObject]:
        store.invalidate_cache()
        root = store._strip_protocol(url).rstrip("/")
        try:
            found = _call(store, "find", root, detail=True)
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error) or "bucket does not exist" in str(error):
                raise
            found = {}
        return {
            name.removeprefix(root).lstrip("/"): _stored_object(info, kind_of(url))
            for name, info in found.items()
            if info.get("type", "file") == "file" and name != root
        }

    return _ask(url, "list", request)


def matching_urls(pattern: str) -> list[str]:
    """List the URLs that match a URL with `*`, sorted."""

    def request(store: Any) -> list[str]:
        found = _call(store, "glob", store._strip_protocol(pattern))
        return sorted(str(store.unstrip_protocol(match)) for match in found)

    return _ask(pattern, "list", request)


def in_parallel(function: Callable[[Item], Answer], items: Sequence[Item], threads: int = MANY) -> list[Answer]:
    """Call a function for each item in threads, which wait for the network; the first error ends it."""
    if len(items) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(threads, len(items)), thread_name_prefix="chatmill-store") as pool:
        futures = [pool.submit(function, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            raise
