"""Damages files, as a bad disk or a stray editor would."""

from __future__ import annotations

from pathlib import Path


def flip(path: Path, offset: int, value: int | None = None) -> None:
    """Change one byte of a file: invert its lowest bit, or set it."""
    data = bytearray(path.read_bytes())
    data[offset] = data[offset] ^ 1 if value is None else value
    path.write_bytes(data)
