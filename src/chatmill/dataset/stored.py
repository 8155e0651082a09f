"""A dataset in a folder, as an object: it shows itself, and goes to torch, Hugging Face, another folder or format."""

from __future__ import annotations

import inspect
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from chatmill.compiler.chunk_output import REJECTED
from chatmill.compiler.recipe import Recipe, recorded_recipe
from chatmill.core.publish import storing
from chatmill.core.scratch import Scratch
from chatmill.dataset.objects import RecordFile
from chatmill.dataset.show import ShownEpisode, Summary
from chatmill.errors import ChatmillError, ConfigError, UnknownNameError, need
from chatmill.look.decoder import Decoder, decoder_for
from chatmill.look.splits import LookSplit
from chatmill.store.episode_layout import MANIFEST, dataset_folder, dataset_url, fetch_folder, new_folder
from chatmill.store.episodes import EpisodeDataset
from chatmill.store.receipts import read_manifest

if TYPE_CHECKING:
    from chatmill.export.export import ExportResult
    from chatmill.load.episodes import GPTEpisodeDataLoader
    from chatmill.look.stats import DatasetStats

TRAIN = "train"
OTHER_NAMES = {"pack": "packed", "max_length": "length", "block_size": "length"}
"""What other calls of this package name what `to_torch` and `to_hf` name otherwise."""


class Dataset:
    """The episodes of a compiled dataset; `chatmill.compile` gives one, and `Dataset("built")` opens a stored one.

    `len`, indices and iteration are about one split: `train`, or another one as `data["val"]`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        split: str | None = None,
        *,
        scratch: Scratch | None = None,
        records: RecordFile | None = None,
        decoder: Decoder | None = None,
    ) -> None:
        """Open a folder that `chatmill build` or `save` wrote.

        `scratch` is kept as long as the dataset is; `records` is the file of records that were given as objects;
        `decoder` saves loading the tokenizer that the manifest names.
        """
        self.directory = dataset_folder(directory)
        manifest = read_manifest(self.directory)
        if manifest is None:
            raise ConfigError(f"{self.directory} holds no dataset: give the folder that chatmill build wrote")
        self.manifest: dict[str, Any] = manifest
        """What went in and what came out, with hashes (docs/formats/dataset.md)."""
        self.split = split if split is not None else next(iter(self._names))
        if self.split not in self._names:
            raise UnknownNameError("split", self.split, self._names)
        self._scratch, self._records_file, self._given_decoder = scratch, records, decoder

    @property
    def _names(self) -> list[str]:
        return sorted(self.manifest["splits"], key=lambda name: (name != TRAIN, name))

    @property
    def recipe(self) -> Recipe:
        """Everything that decided the bytes; `chatmill.build(data.recipe, "built")` gives the same ones."""
        return recorded_recipe(self.manifest)

    @cached_property
    def _split(self) -> LookSplit:
        return LookSplit(self.episodes, self.split)

    @cached_property
    def _decoder(self) -> Decoder | None:
        return self._given_decoder or decoder_for(self.manifest, home=self.directory)[0]

    @cached_property
    def episodes(self) -> EpisodeDataset:
        """The stored columns of this split."""
        return EpisodeDataset(self.directory, self.split)

    def __len__(self) -> int:
        return int(self.manifest["splits"][self.split]["episodes"])

    @overload
    def __getitem__(self, index: int) -> ShownEpisode: ...
    @overload
    def __getitem__(self, index: slice) -> list[ShownEpisode]: ...
    @overload
    def __getitem__(self, index: str) -> Dataset: ...
    def __getitem__(self, index: int | slice | str) -> ShownEpisode | list[ShownEpisode] | Dataset:
        """Return one episode, several, or another split by its name."""
        if isinstance(index, str):
            options: dict[str, Any] = {"scratch": self._scratch, "records": self._records_file}
            return Dataset(self.directory, index, decoder=self._given_decoder, **options)
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(f"episode {index} of {len(self):,} in {self.split}")
        item = self._split.item(number)
        return ShownEpisode(item, self._decoder, self._in_python(item.record_id or ""))

    def __iter__(self) -> Iterator[ShownEpisode]:
        return (self[number] for number in range(len(self)))

    def _in_python(self, text: str) -> str:
        return self._records_file.in_python(text) if self._records_file else text

    @property
    def rejected(self) -> list[dict[str, Any]]:
        """List the records left out (`on_error="quarantine"`): place, id, field, reason and message of each.

        Records that were passed as objects also have their `index`.
        """
        try:
            lines = (self.directory / REJECTED).read_bytes().splitlines()
        except FileNotFoundError:
            return []
        entries = [json.loads(line) for line in lines]
        if self._records_file is not None:
            for entry in entries:
                entry["index"] = self._records_file.index(entry["where"])
        return entries

    @cached_property
    def _summary(self) -> Summary:
        trained = {name: int(EpisodeDataset(self.directory, name).column("trained").sum()) for name in self._names}
        return Summary(self.manifest, trained)

    def _first_rejected(self) -> str:
        first = next(iter(self.rejected), None)
        return "" if first is None else f"first left out: {self._in_python(first['where'])}: {first['message']}"

    def __repr__(self) -> str:
        first = self._first_rejected()
        return self._summary.text() + (f"\n  {first}" if first else "")

    def _repr_html_(self) -> str:
        first = self._first_rejected()
        return self._summary.html(*([first] if first else []))

    def stats(self) -> DatasetStats:
        """Lengths, what is trained by role, source and turn, and the ledger of the build."""
        from chatmill.look.dataset import open_for_looking
        from chatmill.look.stats import dataset_stats

        return dataset_stats(open_for_looking(self.directory))

    def to_torch(
        self,
        batch_size: int,
        *,
        packed: bool = False,
        length: int | None = None,
        shuffle: bool = True,
        seed: int = 1337,
        drop_last: bool = False,
        **options: Any,
    ) -> GPTEpisodeDataLoader:
        """Return a resumable loader of batches: `(x, y, mask)`, or with `packed` also where documents start.

        A row has `length` positions (default: `max_length`, else the longest episode). The last batch of an epoch is
        filled up with rows of padding, or left out with `drop_last`; an epoch of fewer rows than `batch_size` is one
        batch of the rows there are. `state_dict` and
        `load_state_dict` resume after any batch, with any number of ranks. `options` are those of
        `GPTEpisodeDataLoader`, such as `device`, `rank`, `world_size`, `policy` or `pin_memory`.
        """
        need("torch", "giving batches as tensors", "torch")
        from chatmill.load.episodes import GPTEpisodeDataLoader

        _refuse_unknown("to_torch", options, GPTEpisodeDataLoader.__init__)
        config = {"batch_size": batch_size, "block_size": self._length(length, spare=1), "dataset_mode": "sft_episode"}
        defaults: dict[str, Any] = {
            "pad_token_id": self.manifest["tokenizer"]["pad_id"],
            "epoch_shuffle": shuffle,
            "epoch_seed": seed,
            "epoch_drop_last": drop_last,
            "use_loss_mask": True,
        }
        loader = GPTEpisodeDataLoader(config, dataset_dir=self.directory, pack=packed, **(defaults | options))
        if (rows := loader.rows_per_epoch(self.split)) < batch_size and loader.world_size == 1:
            config["batch_size"] = rows
            loader = GPTEpisodeDataLoader(config, dataset_dir=self.directory, pack=packed, **(defaults | options))
        loader.keeps = self._scratch
        return loader

    def _length(self, length: int | None, spare: int) -> int:
        """Positions of a row, which holds `spare` tokens more; an episode that does not fit is an error."""
        longest = max(int(EpisodeDataset(self.directory, name).lengths.max(initial=1)) for name in self._names)
        stated = self.manifest["recipe"]["packing"]["max_length"]
        chosen = int(length if length is not None else stated or max(longest - spare, 1))
        if longest > chosen + spare:
            raise ConfigError(
                f"length is {chosen:,}, and the longest episode has {longest:,} tokens, so rows would cut it: compile "
                f'again with max_length={chosen} and overflow="windows" (or cut, drop, drop_oldest_turns), which '
                "counts what is lost"
            )
        return chosen

    def to_hf(self, *, packed: bool = False, length: int | None = None, **options: Any) -> Any:
        """Return a `datasets.Dataset` of this split for TRL and the Hugging Face Trainer: `input_ids` and `labels`.

        With `packed` several conversations share a row of `length` tokens (default: `max_length`), and `seq_lengths`
        says where they end. `options` are those of `chatmill.to_hf_dataset`.
        """
        from chatmill.export.hf_rows import to_hf_dataset

        _refuse_unknown("to_hf", options, to_hf_dataset)
        if packed or length is not None:
            length = self._length(length, spare=0)
        return to_hf_dataset(self.directory, self.split, max_length=length, packed=packed, **options)

    def export(self, to: str, out: str | os.PathLike[str], **options: Any) -> ExportResult:
        """Write it in the format of a trainer, as `chatmill export --to` does; `to` is the name of a format."""
        from chatmill.export.export import export_dataset

        return export_dataset(self.directory, to, dataset_url(out) or Path(out), **options)

    def save(self, out: str | os.PathLike[str], *, records: str | os.PathLike[str] | None = None) -> Path | str:
        """Keep the dataset in a new folder, or at a URL: the files of `chatmill build`. The same one is left alone.

        `records`: a folder to keep the records in that were given as objects, under the name that the manifest has;
        `chatmill verify --deep`, run in that folder, then derives every token again.
        """
        target = dataset_url(out) or Path(out)
        there = self._manifest_at(target)
        if there is None:
            self._copy(target)
        elif there["fingerprint"] != self.manifest["fingerprint"]:
            raise ConfigError(f"{target} holds another dataset: choose a new folder")
        if records is not None:
            self._keep_records(Path(records))
        return target

    @staticmethod
    def _manifest_at(target: Path | str) -> dict[str, Any] | None:
        """Return the manifest of a dataset; None where nothing is, or nothing but an empty folder."""
        if isinstance(target, str):
            try:
                return read_manifest(dataset_folder(target))
            except ChatmillError:
                return None  # what else is there is found when it is written to
        there = read_manifest(target) if target.is_dir() else None
        if there is None and target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ConfigError(f"{target} is there already and holds something else: choose a new folder")
        return there

    def _copy(self, target: Path | str) -> None:
        fetch_folder(self.directory)
        replaces = isinstance(target, Path) and target.is_dir()
        with storing(target), new_folder(target, MANIFEST, replace=replaces) as temporary:
            shutil.copytree(self.directory, temporary, dirs_exist_ok=True)

    def _keep_records(self, folder: Path) -> None:
        if self._records_file is None:
            raise ConfigError("the records of this dataset are in files of their own: there is nothing to keep")
        with storing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self._records_file.path, folder / self._records_file.name)

    @property
    def counts(self) -> Mapping[str, Any]:
        """The ledger: what became of every record and token, by source (docs/formats/dataset.md)."""
        ledger: Mapping[str, Any] = self.manifest["ledger"]
        return ledger


def _refuse_unknown(call: str, options: Mapping[str, Any], made_by: Callable[..., Any]) -> None:
    """Refuse options of `call` that `made_by`, which it hands them to, does not take, or that it fills itself."""
    filled = {"self", "config", "dataset", "dataset_dir", "split", *OTHER_NAMES, *OTHER_NAMES.values()}
    known = [name for name in inspect.signature(made_by).parameters if name not in filled]
    for name in options:
        if name in OTHER_NAMES:
            raise ConfigError(f"{call} has no option {name!r}: here it is called {OTHER_NAMES[name]!r}")
        if name not in known:
            raise UnknownNameError(f"option of {call}", name, ["packed", "length", *known])
