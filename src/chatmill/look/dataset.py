"""Opens anything that can be looked at: episodes, packed rows of files and KD sets, by one function."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from chatmill.core.ledger import Ledger
from chatmill.core.trainer_columns import IDS
from chatmill.errors import ConfigError, FormatError, UnknownNameError, as_named
from chatmill.look.decoder import Decoder, decoder_for
from chatmill.look.items import Item
from chatmill.look.packed_rows import is_list, packed_files, packed_parts, schema_of
from chatmill.look.packed_split import PackedSplit
from chatmill.look.preference_rows import preference_columns
from chatmill.look.splits import LookLayout, LookSplit
from chatmill.read.folders import holds_records
from chatmill.store.documents import open_dataset
from chatmill.store.episode_layout import MANIFEST, is_episode_split
from chatmill.store.kd import is_kd, shard_prefixes
from chatmill.store.receipts import EXPORT_MANIFEST, export_target, mask_shift_of, read_export

CAN_BE_OPENED = (
    "give the folder that chatmill build, chatmill export or chatmill synth-kd wrote, a split of it, or "
    ".parquet and .arrow files with input_ids"
)


class LookDataset:
    """A dataset to look at: its splits, what its manifest says, and the decoder for its ids."""

    def __init__(self, path: Path, splits: dict[str, LookSplit], about: dict[str, Any], tokenizer: Any = None) -> None:
        """`tokenizer` (anything `load_tokenizer` takes) wins over the one that `about` names."""
        self.path = path
        self.splits = splits
        self.about = about
        """The manifest of the build, or of the build that an export came from; empty if there is none."""
        self._tokenizer = tokenizer

    @property
    def layout(self) -> LookLayout:
        """What the items are; all splits have the same layout."""
        return next(iter(self.splits.values())).layout

    @cached_property
    def ledger(self) -> Ledger | None:
        """Where every token of the build went; None if no manifest has one."""
        ledger = self.about.get("ledger")
        return Ledger.from_json(ledger) if isinstance(ledger, dict) else None

    @property
    def decoder(self) -> Decoder | None:
        """Turns ids into text; None if no tokenizer is known or it does not load. Loaded when first asked for."""
        return self._decoder[0]

    @property
    def decoder_problem(self) -> str:
        """Why there is no decoder, or why it may be the wrong one; empty when all is well."""
        return self._decoder[1]

    @cached_property
    def _decoder(self) -> tuple[Decoder | None, str]:
        return decoder_for(self.about, self._tokenizer, self.path)

    @property
    def address(self) -> str:
        """Its path, or its URL."""
        return as_named(str(self.path))

    @property
    def name(self) -> str:
        """The name of its folder or file."""
        return self.path.resolve().name

    def split(self, name: str | None = None) -> LookSplit:
        """Find a split by name; by default the first."""
        if name is not None and name not in self.splits:
            raise UnknownNameError("split", name, list(self.splits))
        return self.splits[name or next(iter(self.splits))]

    def find(self, record_id: str, splits: Sequence[LookSplit] | None = None) -> list[tuple[LookSplit, int]]:
        """Find the items of a record in some splits (default: all); an unknown id is an error that lists close ones."""
        where = list(self.splits.values()) if splits is None else list(splits)
        items = [(split, number) for split in where for number in split.find(record_id)]
        if items:
            return items
        if not any(split.has_record_ids for split in where):
            raise ConfigError(
                f"{self.path}: its {self.layout.item}s are stored without record ids: choose by number, with "
                f"{'--row' if self.layout.packed else '--episode'}"
            )
        close = list(dict.fromkeys(text for split in where for text in split.similar_ids(record_id)))[:3]
        hint = f"; close ones: {', '.join(map(repr, close))}" if close else ""
        names = ", ".join(split.name for split in where)
        raise ConfigError(f"{self.path}: no record {record_id!r} in {names}{hint}")

    def choose(
        self,
        split_name: str | None = None,
        *,
        episode: int | None = None,
        row: int | None = None,
        record_id: str | None = None,
        random: int | None = None,
        start: int = 0,
        examples: int = 5,
    ) -> tuple[LookSplit, Iterator[Item]]:
        """Choose items, read one at a time, and the split they belong to.

        They are one episode, one row, all of a record, some drawn with the seed `random`, or those from `start` on.
        """
        choices = {"--episode": episode, "--row": row, "--id": record_id, "--random": random}
        if len(chosen := [name for name, value in choices.items() if value is not None]) > 1:
            raise ConfigError(f"{' and '.join(chosen)} are mutually exclusive: give one of them")
        split = self.split(split_name)
        if record_id is not None:
            where = [candidate.alone for candidate in ([split] if split_name else self.splits.values())]
            items = self.find(record_id, where)
            return items[0][0], (owner.item(number) for owner, number in items)
        if row is not None and not self.layout.packed:
            raise ConfigError(f"{self.path} holds {self.layout.item}s that are not packed into rows: use --episode")
        if random is not None:
            return split, map(split.item, np.random.RandomState(random).permutation(len(split))[:examples].tolist())
        split = split.alone if episode is not None else split
        number = next((value for value in (episode, row) if value is not None), None)
        first = split.check_number(start if number is None else number)
        return split, map(split.item, range(first, min(first + (examples if number is None else 1), len(split))))


def is_dataset(location: str) -> bool:
    """Return whether a path holds tokens already: a built dataset, a distillation set, or rows of token ids."""
    path = Path(location)
    if location == "-" or "://" in location:
        return False
    if is_kd(path):
        return True
    if parts := packed_parts(path):
        schema = schema_of(packed_files(path, next(iter(parts)) or None)[0])
        has_ids = any(field.name in IDS and is_list(field.type) for field in schema)
        return has_ids or preference_columns(schema.names) is not None
    if (path / EXPORT_MANIFEST).is_file():
        return True
    return path.is_dir() and not holds_records(path)


def open_for_looking(path: str | Path, splits: Sequence[str] | None = None, *, tokenizer: Any = None) -> LookDataset:
    """Open a dataset folder, one split of it, packed files, or a KD root; no tokens are read.

    `splits` chooses some. `tokenizer` decodes in place of the one that the manifest names.
    """
    folder = Path(path)
    if not folder.exists():
        raise ConfigError(f"{folder} does not exist: {CAN_BE_OPENED}")
    if folder.is_dir() and (shard_prefixes(folder) or (is_episode_split(folder) and not (folder / MANIFEST).is_file())):
        return _open_stored(folder.resolve().parent, [folder.resolve().name], folder, tokenizer)
    if not is_kd(folder) and (parts := packed_parts(folder)):
        return _open_packed(folder, splits or list(parts), tokenizer)
    if not folder.is_dir():
        raise FormatError(f"{folder} is not a dataset: {CAN_BE_OPENED}")
    if (export := read_export(folder)) is not None and export["to"] != "megatron":
        raise not_shown(folder, export)
    return _open_stored(folder, splits, folder, tokenizer)


def not_shown(folder: Path, export: Mapping[str, Any]) -> FormatError:
    """Make the error about an export in files that are not read back."""
    return FormatError(
        f"{folder} is an export for {export['to']}, in files that are not shown: look at the dataset that it was made "
        f"of, {export['source']['name']}; chatmill verify {folder} checks the files"
    )


def _open_stored(folder: Path, splits: Sequence[str] | None, shown: Path, tokenizer: Any) -> LookDataset:
    dataset = open_dataset(folder, splits)
    packed = all(stored.plan is not None for stored in dataset.splits.values())
    opened = {name: LookSplit(stored, name, rows=packed) for name, stored in dataset.splits.items()}
    return LookDataset(shown, opened, dataset.about, tokenizer)


def _open_packed(path: Path, splits: Sequence[str], tokenizer: Any) -> LookDataset:
    alone = path.stem if path.is_file() else path.resolve().name
    folder = path if path.is_dir() else path.parent
    mask_shift = mask_shift_of(export_target(folder))
    opened: dict[str, LookSplit] = {}
    for name in splits:
        files = packed_files(path, name or None)
        opened[name or alone] = PackedSplit(files, name or alone, mask_shift=mask_shift)
    if tokenizer is None and (folder / "tokenizer.json").is_file():
        tokenizer = folder
    return LookDataset(path, opened, _about_export(folder), tokenizer)


def _about_export(folder: Path) -> dict[str, Any]:
    """Read what the export.json next to packed files says about their source; empty if there is none."""
    export = read_export(folder)
    if export is None:
        try:
            export = read_export(folder.parent)
        except FormatError:  # not about these files, perhaps
            return {}
    return {} if export is None else dict(export["source"]["about"])
