"""A build into a store: a local folder that empties.

The driver keeps plan and accounts in a folder of its own, which may be lost at any time: a build that is resumed on
another machine begins with one listing. A worker writes its shards on its own disk, uploads them, compares what came
to be there, and then creates the receipt, which must not exist. The manifest is last. What has no receipt, or belongs
to no manifest, is nothing, and the next build removes it.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import shutil
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chatmill.core.cache_folders import chatmill_cache
from chatmill.core.canonical import canonical_json
from chatmill.core.publish import lock, storing
from chatmill.errors import ConfigError
from chatmill.files import cache, remote, stores
from chatmill.files.stores import NoSuchObject, RemoteError, join, shown

WORK = ".build"
"""Below the URL: what a build keeps until its manifest is there, as in a local folder."""
STATE = f"{WORK}/state.json"
RECEIPTS = f"{WORK}/receipts"
SPOOL = f"{WORK}/spool"
LOCKS = f"{WORK}/locks"
BUILD_LOCK = f"{LOCKS}/build.json"
MANIFEST = remote.MANIFESTS[0]
BEAT_SECONDS = 10.0
"""How often the owner of a lock says that it is alive."""
STALE_SECONDS = 120.0
"""A lock whose owner was silent for so long is taken for that of a dead build."""
READ_ONLY = ("hf", "http", "https")
"""Stores that datasets are read from, and that no build writes to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteBuild:
    """A build into a store, as its driver and all its workers know it; small and picklable."""

    url: str
    single_writer: bool = False
    """The recipe promises that no other build writes there, so locks and exclusive creation are not needed."""
    access: stores.StoreAccess = field(default_factory=stores.StoreAccess)
    """How the driver reaches the store."""

    def at(self, name: str) -> str:
        """Return the URL of an object of the build."""
        return join(self.url, name)

    def check_reach(self, fingerprint: str) -> None:
        """Refuse a worker that does not see the build that the driver has begun."""
        if (self.url, fingerprint) in _reached:
            return
        self.access.use()
        try:
            state = json.loads(stores.read_object(self.at(STATE)))
        except (NoSuchObject, ValueError):
            state = {}
        if state.get("fingerprint") != fingerprint:
            raise ConfigError(
                f"a worker on {platform.node()} does not find this build at {shown(self.at(STATE))}: another build has "
                "taken its place, or this machine reaches another store under this name"
            )
        _reached.add((self.url, fingerprint))

    # What workers do.

    def put_chunk(self, shards: Mapping[str, Path], receipt: bytes, number: int, rejected: Path | None) -> None:
        """Upload the shards of a chunk, then what was rejected, then create the receipt."""
        files = [(path, f"{place}/{path.name}") for place, folder in shards.items() for path in folder.iterdir()]
        if rejected is not None:
            files.append((rejected, f"{RECEIPTS}/{number:06d}.rejected"))
        self.put_files(files)
        name = f"{RECEIPTS}/{number:06d}.json"
        if self.single_writer:
            stores.write_object(self.at(name), receipt)
        elif not stores.create_object(self.at(name), receipt):
            raise RemoteError(
                self.at(name),
                "create the receipt",
                "there is another one, of a build that makes other bytes",
                "Let one build at a time write there, or choose another address",
            )

    def put_files(self, files: Sequence[tuple[Path, str]]) -> None:
        """Upload files, and compare what the store has then; one that differs is uploaded once more."""
        stores.in_parallel(lambda file: stores.upload(file[0], self.at(file[1])), files, stores.STREAMS)
        wrong = self._differing(files)
        if wrong:
            stores.in_parallel(lambda file: stores.upload(file[0], self.at(file[1])), wrong, stores.STREAMS)
            wrong = self._differing(wrong)
        if wrong:
            raise RemoteError(
                self.at(wrong[0][1]),
                "write",
                "what the store has afterwards are other bytes",
                "Check the store, and whether something else writes there",
                2,
            )

    def _differing(self, files: Sequence[tuple[Path, str]]) -> list[tuple[Path, str]]:
        """Return the files that a store does not have with the size and digest of the local ones."""
        counts = Counter(name.rpartition("/")[0] for _, name in files)
        there: dict[str, stores.StoredObject] = {}
        for folder, count in counts.items():
            # One request for all files of a shard; but the folder of receipts may hold thousands of others.
            listed = stores.list_objects(self.at(folder)) if folder and count > 1 else {}
            there |= {f"{folder}/{name}": found for name, found in listed.items()}
        return [(path, name) for path, name in files if not self._is_there(path, name, there.get(name))]

    def _is_there(self, path: Path, name: str, found: stores.StoredObject | None) -> bool:
        if found is None:
            found = stores.object_info(self.at(name))
        return remote.is_stored(path, self.at(name), found)


_reached: set[tuple[str, str]] = set()
"""The builds that this process has found at their URLs."""


@contextlib.contextmanager
def chunk_folder() -> Iterator[Path]:
    """Make a folder on this machine's disk for what one job writes, and remove it after the block."""
    root = chatmill_cache().absolute() / "builds"
    with storing(root, "create the folder"):
        root.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{_own_chunks()}{os.getpid()}-", dir=root))
    try:
        with storing(folder, "write a shard in"):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _own_chunks() -> str:
    """Return how the names of such folders of this machine begin: others may share the cache."""
    return f"chunk-{platform.node()}-"


# What the driver does.


class BuildDriver:
    """The driver's side of a remote build: its local folder, its lock, and what moves between folder and store."""

    def __init__(self, build: RemoteBuild, folder: Path, *, is_task: bool) -> None:
        self.build = build
        self.folder = folder
        self.is_task = is_task
        self.listing: dict[str, stores.StoredObject] = {}
        self.beat: Heartbeat | None = None
        """That of the lock; None for the only writer."""
        self._shares_spools = False

    def check_lock(self) -> None:
        """Refuse to go on where another build has taken over."""
        if self.beat is not None and self.beat.is_lost():
            raise ConfigError(
                f"{shown(self.build.url)}: another build has taken over the lock of this one, which ends here"
            )

    def pull(self) -> None:
        """Fetch what the store has of this build: its manifest, or state and receipts; begins with one listing."""
        self.listing = stores.list_objects(self.build.url)
        names = [MANIFEST] if MANIFEST in self.listing else [name for name in self.listing if _is_account(name)]
        stores.in_parallel(self._fetch, names)
        if MANIFEST not in self.listing:
            self._drop_broken()
        else:  # the build that published it may have died before it took this away
            rest = [name for name in self.listing if name.startswith(f"{WORK}/") and not name.startswith(LOCKS)]
            stores.remove_objects([self.build.at(name) for name in rest])

    def _fetch(self, name: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(stores.read_object(self.build.at(name)))

    def _drop_broken(self) -> None:
        """Forget receipts whose files are not there with their sizes; remove what no receipt names."""
        named: set[str] = set()
        broken: list[str] = []
        for name in [name for name in self.listing if name.startswith(f"{RECEIPTS}/") and name.endswith(".json")]:
            files = _receipt_files(self.folder / name, self.listing)
            if all(file in self.listing and self.listing[file].size == size for file, size in files.items()):
                named |= {*files, name, name.removesuffix(".json") + ".rejected"}
            else:
                broken.append(name)
                (self.folder / name).unlink()
        if self.is_task:  # other tasks may be uploading now
            stores.remove_objects([self.build.at(name) for name in broken])
            return
        rest = [name for name in self.listing if name not in named and not name.startswith((LOCKS, STATE))]
        foreign = [name for name in rest if not name.startswith(f"{WORK}/")]
        if foreign and not (self.folder / STATE).exists():
            found = ", ".join(sorted(foreign)[:5])
            raise ConfigError(
                f"{shown(self.build.url)} is not empty ({found}) and holds no build; choose an address where nothing is"
            )
        left = [name for name in rest if not name.startswith(f"{SPOOL}/")]
        if left:
            warnings.warn(
                f"{shown(self.build.url)}: removes {len(left):,} objects without a receipt, which a build that was "
                "stopped has left",
                stacklevel=2,
            )
        stores.remove_objects([self.build.at(name) for name in rest])

    def spool_url(self) -> str:
        """Return where spools go for workers of other machines; empty where a finished build is."""
        if MANIFEST in self.listing:
            return ""
        self._shares_spools = True
        return self.build.at(SPOOL)

    def drop_spools(self) -> None:
        """Remove the spools of this build; those of a task may be needed by others, and stay until the end."""
        if self._shares_spools and not self.is_task:
            with contextlib.suppress(RemoteError):
                spools = stores.list_objects(self.build.at(SPOOL))
                stores.remove_objects([self.build.at(f"{SPOOL}/{name}") for name in spools])

    def forget(self) -> None:
        """Remove all that another build has left at the URL, which published nothing."""
        stores.remove_objects([self.build.at(name) for name in self.listing if not name.startswith(LOCKS)])

    def put_state(self) -> None:
        """Write what the local folder says of the build."""
        stores.write_object(self.build.at(STATE), (self.folder / STATE).read_bytes())

    @contextlib.contextmanager
    def state_noted(self) -> Iterator[None]:
        """Write the state again where the block has changed it, as after a mistake."""
        before = (self.folder / STATE).read_bytes()
        try:
            yield
        finally:
            with contextlib.suppress(OSError, RemoteError):
                if (self.folder / STATE).read_bytes() != before:
                    self.put_state()

    def gather(self, receipts: Mapping[int, Mapping[str, Any]], indexes: Sequence[str]) -> None:
        """Bring together in the local folder what the manifest is made of: receipts, rejected records, indexes."""
        (self.folder / RECEIPTS).mkdir(parents=True, exist_ok=True)
        for number, receipt in receipts.items():
            (self.folder / RECEIPTS / f"{number:06d}.json").write_bytes(canonical_json(receipt) + b"\n")
        names = [f"{RECEIPTS}/{number:06d}.rejected" for number, receipt in receipts.items() if receipt["rejected"]]
        names += indexes
        stores.in_parallel(self._fetch, [name for name in names if not (self.folder / name).exists()])

    def publish(self, files: Mapping[str, Mapping[str, Any]]) -> None:
        """Upload what the driver has made, compare all files with the manifest, and create the manifest last."""
        self.check_lock()
        self._put_joined(files)
        own = [name for name in files if not name.endswith(f"/{remote.INDEX}") and (self.folder / name).exists()]
        self.build.put_files([(self.folder / name, name) for name in own])
        there = stores.list_objects(self.build.url)
        for name, record in files.items():
            if name not in there or there[name].size != record["bytes"]:
                raise RemoteError(
                    self.build.at(name),
                    "finish the build",
                    "this object was there and is gone, or has another size",
                    "Something else writes there; when it does not any more, continue with --resume",
                )
        self.check_lock()
        manifest = (self.folder / MANIFEST).read_bytes()
        if self.build.single_writer:
            stores.write_object(self.build.at(MANIFEST), manifest)
        elif not stores.create_object(self.build.at(MANIFEST), manifest):
            raise ConfigError(f"{shown(self.build.url)}: another build has published its manifest there meanwhile")
        rest = [name for name in there if name not in (*files, MANIFEST, remote.JOINED) and not name.startswith(LOCKS)]
        stores.remove_objects([self.build.at(name) for name in rest])

    def _put_joined(self, files: Mapping[str, Mapping[str, Any]]) -> None:
        """Write all indexes as one object, so that opening many shards takes one request for them."""
        indexes = sorted(name for name in files if name.endswith(f"/{remote.INDEX}"))
        if len(indexes) > remote.WITHOUT_JOINED:
            data = b"".join((self.folder / name).read_bytes() for name in indexes)
            stores.write_object(self.build.at(remote.JOINED), data)


def _is_account(name: str) -> bool:
    return name == STATE or name.startswith(f"{RECEIPTS}/")


def _receipt_files(path: Path, listing: Collection[str]) -> dict[str, int]:
    """Return the files that a receipt names, below the URL, with their sizes."""
    files: dict[str, int] = {}
    try:
        receipt = json.loads(path.read_bytes())
        for split, shard in receipt["splits"].items():
            numbered = f"{split}/shard_{int(path.stem):05d}"
            home = numbered if f"{numbered}/{remote.INDEX}" in listing else split
            files |= {f"{home}/{name}": int(file["bytes"]) for name, file in shard["files"].items()}
        if receipt["rejected"]:
            files[f"{RECEIPTS}/{path.stem}.rejected"] = int(receipt["rejected"]["bytes"])
    except (OSError, ValueError, KeyError, TypeError):
        return {"no receipt": -1}
    return files


@contextlib.contextmanager
def new_folder_at(url: str, last: str) -> Iterator[Path]:
    """Give a folder of this machine, whose files are uploaded after the block, `last` at the end and exclusively.

    Raises:
        ConfigError: Something is at the URL already.
    """
    build = _build_at(url)
    if stores.list_objects(build.url):
        raise ConfigError(f"{shown(url)}: is there already; choose an address where nothing is")
    with chunk_folder() as home:
        folder = home / build.url.rpartition("/")[2]
        folder.mkdir()
        remote.name_folder(folder, build.url)
        yield folder
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        names = [path.relative_to(folder).as_posix() for path in paths]
        build.put_files([(path, name) for path, name in zip(paths, names, strict=True) if name != last])
        if not stores.create_object(build.at(last), (folder / last).read_bytes()):
            raise ConfigError(f"{shown(url)}: another process has written there meanwhile")


def _build_at(url: str, **options: Any) -> RemoteBuild:
    """Return a build at a URL, which must be one that can be written to."""
    kind = stores.kind_of(url)
    if kind in READ_ONLY:
        raise ConfigError(f"{shown(url)}: datasets are read from {kind}:// and not written there; build into a bucket")
    stores.refuse_keys(url)
    build = RemoteBuild(url=url.rstrip("/"), **options)
    build.access.use()
    return build


@contextlib.contextmanager
def driving(
    url: str, options: Mapping[str, Any], *, task: str, take_over: bool, single_writer: bool
) -> Iterator[BuildDriver]:
    """Drive a build into a store: lock it, make a local folder for the block, and take both away at the end.

    Args:
        url: Where the dataset will be.
        options: Time-out and retries, as the recipe has them.
        task: Which task of the build this process does; empty for the build itself.
        take_over: Whether a lock that is there is that of a dead build.
        single_writer: Whether the recipe promises that no other build writes there.
    """
    build = _build_at(url, single_writer=single_writer, access=stores.StoreAccess(options=options))
    folder, descriptor = _driver_folder(chatmill_cache().absolute() / "builds")
    try:
        remote.name_folder(folder, build.url)
        driver = BuildDriver(build, folder, is_task=bool(task))
        with contextlib.ExitStack() as stack:
            if not single_writer:
                driver.beat = stack.enter_context(build_lock(build, task, take_over=take_over))
            try:
                yield driver
            finally:
                driver.drop_spools()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.unlink(f"{folder}.lock")
        os.close(descriptor)


def _driver_folder(root: Path) -> tuple[Path, int]:
    """Make a folder for a driver, with a lock that is held until the descriptor is closed.

    One driver at a time does it: another would sweep a folder that is not locked yet.
    """
    with storing(root, "create the folder"):
        root.mkdir(parents=True, exist_ok=True)
        with cache.locked(root.parent / "locks" / "builds"):
            _sweep(root)
            folder = Path(tempfile.mkdtemp(prefix="driver-", dir=root))
            descriptor = os.open(f"{folder}.lock", os.O_RDWR | os.O_CREAT)
            lock(descriptor, f"{folder} is in use")
    return folder, descriptor


def _sweep(root: Path) -> None:
    """Remove what killed builds have left on this machine's disk: nobody holds the locks of their folders."""
    for held in root.glob("driver-*.lock"):
        with contextlib.suppress(OSError, ConfigError):
            descriptor = os.open(held, os.O_RDWR)
            try:
                lock(descriptor, "in use")
                shutil.rmtree(held.with_suffix(""), ignore_errors=True)
                held.unlink()
            finally:
                os.close(descriptor)
    for folder in root.glob(f"{_own_chunks()}*-*"):
        pid = folder.name.removeprefix(_own_chunks()).partition("-")[0]
        if pid.isdigit() and not _is_alive(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


# Locks.


@contextlib.contextmanager
def build_lock(build: RemoteBuild, task: str, *, take_over: bool) -> Iterator[Heartbeat]:
    """Hold the lock of a build, or of one task of it, for the block; another holder is an error that names it."""
    name = f"{LOCKS}/task-{task.replace('/', '-of-')}.json" if task else BUILD_LOCK
    url = build.at(name)
    content = json.dumps(
        {
            "owner": f"{platform.node()}, process {os.getpid()}",
            "node": platform.node(),
            "pid": os.getpid(),
            "token": secrets.token_hex(8),
            "task": task,
        }
    ).encode()
    if not stores.create_object(url, content):
        _refuse_or_take(build, name, take_over=take_over)
        if not stores.create_object(url, content):
            raise ConfigError(f"{shown(build.url)}: another build has taken its lock at the same moment")
    try:
        if not stores.creates_exclusively(url, content):
            raise ConfigError(
                f"{shown(build.url)}: this store cannot create an object exclusively, so two builds could not be told "
                "apart. If no other build writes there, set single_writer: true in the recipe's store"
            )
        for other in stores.list_objects(build.at(LOCKS)):
            if f"{LOCKS}/{other}" != name and (not task or other == BUILD_LOCK.rpartition("/")[2]):
                _refuse_or_take(build, f"{LOCKS}/{other}", take_over=take_over)
        beat = Heartbeat(url, content)
        try:
            yield beat
        finally:
            beat.stop()
    finally:
        with contextlib.suppress(RemoteError):
            if stores.read_object(url) == content:
                stores.remove_objects([url])


def _refuse_or_take(build: RemoteBuild, name: str, *, take_over: bool) -> None:
    """Remove the lock of a dead build; refuse that of one that may be alive."""
    url = build.at(name)
    try:
        held = json.loads(stores.read_object(url))
    except (NoSuchObject, ValueError):
        return
    silent = _seconds_silent(build, url)
    if take_over:
        stores.remove_objects([url])
        return
    which = f"task {held['task']} of a build" if held.get("task") else "another build"
    state = f"last heard of {silent:,.0f} seconds ago"
    if held.get("node") == platform.node() and not _is_alive(int(held.get("pid", 0))):
        state += "; this machine has no such process any more, so it is dead, unless it was in a container"
    elif silent > STALE_SECONDS:
        state += ": it is stale"
    raise ConfigError(
        f"{shown(build.url)}: {which} is at work there ({held.get('owner')}, {state}). Wait until it ends; if it is "
        f"dead, continue it with: chatmill build ... --out {shown(build.url)} --take-over"
    )


def _seconds_silent(build: RemoteBuild, url: str) -> float:
    """Return how long the owner of a lock was silent, by the clock of the store."""
    now = build.at(f"{WORK}/clock-{secrets.token_hex(4)}")
    stores.write_object(now, b"{}")
    try:
        return max(0.0, stores.object_info(now).changed - stores.object_info(url).changed)
    finally:
        stores.remove_objects([now])


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


class Heartbeat:
    """A thread that writes a lock again and again, as long as it is still ours."""

    def __init__(self, url: str, content: bytes) -> None:
        self._url = url
        self._content = content
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="chatmill-lock", daemon=True)
        self._thread.start()

    def is_lost(self) -> bool:
        """Return whether another build has taken the lock."""
        try:
            return stores.read_object(self._url) != self._content
        except NoSuchObject:
            return True

    def _beat(self) -> None:
        while not self._stopped.wait(BEAT_SECONDS):
            with contextlib.suppress(RemoteError):  # the next one may succeed
                if self.is_lost():
                    return
                stores.write_object(self._url, self._content)

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join()
