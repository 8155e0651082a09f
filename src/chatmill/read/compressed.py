"""Opens plain, gzip and Zstandard files as streams of bytes; a damaged or cut-off archive is one clear error."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from chatmill.errors import FormatError

_CHUNK = 1 << 20


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """A file's bytes, unpacked when its name ends in .gz or .zst; `FormatError` where it is damaged or cut off."""
    import zstandard

    try:
        with path.open("rb") as packed:
            if path.suffix.lower() == ".gz":
                yield cast(IO[bytes], gzip.GzipFile(fileobj=packed))
            elif path.suffix.lower() == ".zst":
                yield io.BufferedReader(_Zstandard(packed))
            else:
                yield packed
    except (gzip.BadGzipFile, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise FormatError(f"{path} cannot be unpacked: {error}. The file is damaged or was cut off") from None
    except OSError as error:
        raise FormatError(f"cannot read {path}: {error.strerror or error}") from None


class _Zstandard(io.RawIOBase):
    """Unpacks all frames of a file; unlike the library's own reader it notices a last one that is cut off."""

    def __init__(self, packed: IO[bytes]) -> None:
        self._packed = packed
        self._frame: Any = None
        self._unread = self._unpacked = b""

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer as far as the next unpacked bytes go; 0 at the end."""
        import zstandard

        while not self._unpacked:
            data = self._unread or self._packed.read(_CHUNK)
            if not data:
                if self._frame is not None:
                    raise EOFError("the last frame is not complete")
                return 0
            self._frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
            self._unpacked, self._unread = self._frame.decompress(data), b""
            if self._frame.eof:
                self._unread, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._unpacked))
        buffer[:count], self._unpacked = self._unpacked[:count], self._unpacked[count:]
        return count
