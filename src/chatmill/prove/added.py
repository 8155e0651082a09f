"""Files in a folder of Megatron's datasets that its receipt does not name: the index cache, sidecars, or damage."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from chatmill.prove.report import Notebook
from chatmill.store.kd_sidecars import check_added


def check_others(folder: Path, names: Iterable[str], message: str, book: Notebook) -> None:
    """Megatron's index cache and sidecars that were added later are no damage; `message` is for all other files."""
    wrong, sidecars, cache = check_added(folder, sorted(names))
    for name, problem in wrong.items():
        book.wrong(name, problem or message)
    if cache:
        book.unchecked.append(f"{cache[0]}: Megatron's index cache ({len(cache):,} files), no part of the dataset")
    for name in sidecars:
        if name not in wrong:
            book.unchecked.append(f"{name}: a sidecar that was added later; it fits the tokens, its values are its own")
