"""One batch ahead: a thread prepares the next batch while the current one is used."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Prefetcher:
    """Keeps at most one prepared result per key. What is prepared counts for nothing until it is taken."""

    def __init__(self) -> None:
        """No thread is started before the first `start`."""
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0
        self._pending: dict[str, tuple[Hashable, Future[Any]]] = {}

    def start(self, key: str, place: Hashable, job: Callable[[], Any]) -> None:
        """Prepare the result of `job` for `key` at `place`."""
        if self._pool is None or self._process != os.getpid():  # threads do not live on in a forked process
            self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="chatmill-prefetch")
            self._process, self._pending = os.getpid(), {}
        self._pending[key] = (place, self._pool.submit(job))

    def take(self, key: str, place: Hashable) -> Future[Any] | None:
        """What was started for `key`, if it was for this place; anything else is thrown away."""
        if self._process != os.getpid():
            return None
        started = self._pending.pop(key, None)
        if started is None:
            return None
        if started[0] != place:
            started[1].cancel()
            return None
        return started[1]

    def close(self) -> None:
        """Wait for the thread and let it go."""
        if self._pool is not None and self._process == os.getpid():
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._pool, self._pending = None, {}

    def __getstate__(self) -> dict[str, Any]:
        """Another process starts empty."""
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
