"""Training on a distillation set with Megatron Core: `SynthKDDataset`, its GPTDataset with two aligned sidecars.

Importing this module imports Megatron Core (seconds) and torch; `chatmill` itself never does. Where the shards are,
as Megatron's config takes it, comes from `chatmill.synth_kd_blends`, which needs neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from chatmill.core.tokens import ranges
from chatmill.errors import ConfigError, FormatError, MissingExtraError
from chatmill.store.kd import local_prefix, synth_kd_blend, synth_kd_blends
from chatmill.store.kd_shard import LOSSMASK, SPAN, KDShard, token_prefix
from chatmill.store.mapped import fetch_file

try:
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.object_storage_utils import is_object_storage_path
except ImportError as error:
    if error.name and not error.name.startswith("megatron"):  # newer versions ask for triton, also on CPUs
        raise ConfigError(f"megatron-core needs {error.name!r} to be imported: pip install {error.name}") from error
    raise MissingExtraError("megatron.core", "megatron", "SynthKDDataset") from error

__all__ = ["SynthKDDataset", "synth_kd_blend", "synth_kd_blends"]

FINGERPRINT = "synth_kd_fingerprint"
"""The attribute of the config that tells one build from another in the key of Megatron's index cache."""


class SynthKDDataset(GPTDataset):  # type: ignore[misc]
    """A `GPTDataset` over `PREFIX_tokens` whose samples have `loss_mask` and `span_id` from the sidecars next to it.

    Sampling, shuffling and index caching are those of `GPTDataset`. `loss_mask` (float32, 0 or 1) and `span_id`
    (int64: 1 analysis, 2 final, 0 neither) are aligned with `labels` and 0 on padding; the mask of the base class is
    not used. Opening refuses shards whose files do not fit together, and an index cache of another build is never
    used: its key holds a fingerprint of the six files.

    A subclass with `sidecars = ("teacher_logprob",)` also serves `PREFIX_teacher_logprob` under that name, aligned
    with `labels` and 0 on padding: floats in their dtype, integers as int64.
    """

    sidecars: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        indexed_dataset: IndexedDataset,
        dataset_path: str | None,
        indexed_indices: NDArray[np.integer],
        num_samples: int | None,
        index_split: Any,
        config: GPTDatasetConfig,
    ) -> None:
        """Take what Megatron's builder gives; `indexed_dataset` is that of the tokens."""
        self._shard = _open_shard(indexed_dataset.path_prefix, self.sidecars)
        if self._shard.few_tokens and not config.path_to_cache:
            raise ConfigError(f"{indexed_dataset.path_prefix}: tokens in object storage need a path_to_cache")
        # A copy: the config is shared by all shards of a blend, and the fingerprint is that of one.
        config = copy(config)
        setattr(config, FINGERPRINT, self._shard.fingerprint())
        super().__init__(indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config)

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> IndexedDataset:
        """The token dataset, once all three are known to be whole and aligned (Megatron maps whatever there is).

        Tokens at a URL are streamed by Megatron where its config has an `object_storage_cache_path`; else they are
        fetched into the cache, as sidecars always are.
        """
        cache = getattr(config, "object_storage_cache_path", None)
        if cache and is_object_storage_path(dataset_path):
            if config.mmap_bin_files:
                raise ConfigError(f"{dataset_path}: Megatron streams object storage with mmap_bin_files=False")
            _open_shard(dataset_path)
            return GPTDataset.build_low_level_dataset(dataset_path, config)
        prefix = local_prefix(dataset_path)
        shard = KDShard.open(prefix)
        for path in (shard.tokens.idx, shard.tokens.bin):
            fetch_file(path)
        return GPTDataset.build_low_level_dataset(prefix, config)

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [*GPTDataset._key_config_attributes(), FINGERPRINT]

    def __getitem__(self, idx: int | None) -> dict[str, Any]:
        """One sample: the keys of `GPTDataset` and `span_id`. `None` is Megatron's filler: nothing is trained."""
        sample = dict(super().__getitem__(idx))
        columns, real = self._sidecar_slices(0 if idx is None else int(idx))
        if self._pad_token_id >= 0:
            self._restore_tokens(sample, 0 if idx is None else int(idx), real)
        for name, values in columns.items():
            if idx is None:
                values[:] = 0
            if self.config.add_extra_token_to_sequence:
                values = values[:-1]
            else:
                values[-1] = 0  # the token that this position predicts is not in the sample
            served = {LOSSMASK: "loss_mask", SPAN: "span_id"}.get(name, name)
            dtype = np.float32 if name == LOSSMASK else values.dtype if values.dtype.kind == "f" else np.int64
            sample[served] = torch.from_numpy(values.astype(dtype))
        return sample

    def _sidecar_slices(self, idx: int) -> tuple[dict[str, NDArray[Any]], int]:
        """Read the sidecars for the tokens of a sample, padded with 0; and the number of tokens.

        Walk over shuffle, sample and document index as the base class does; all values are label-aligned.
        """
        number = int(self.shuffle_index[idx])
        first, begin = (int(value) for value in self.sample_index[number])
        last, end = (int(value) for value in self.sample_index[number + 1])
        extra = int(self.config.add_extra_token_to_sequence)
        documents = np.array(self.document_index[first : last + 1], dtype=np.int64)
        starts = np.zeros(len(documents), dtype=np.int64)
        stops = self.dataset.sequence_lengths[documents].astype(np.int64)
        starts[0], stops[-1] = begin, end + extra
        places = ranges(self._shard.tokens.starts(documents) + starts, stops - starts)
        columns = {}
        for name in (LOSSMASK, SPAN, *self.sidecars):
            values = self._shard.values(name)
            columns[name] = np.zeros(self.config.sequence_length + extra, dtype=values.dtype)
            columns[name][: len(places)] = values[places]
        return columns, len(places)

    def _restore_tokens(self, sample: dict[str, Any], idx: int, real: int) -> None:
        """Put back real tokens that have the pad id: the base class takes them for padding and makes them id 0."""
        # The query gives two or three values, by Megatron's version; the first is the text.
        text = torch.from_numpy(np.array(self._query_document_sample_shuffle_indices(idx)[0][:real])).long()
        sample["tokens"][: min(real, len(sample["tokens"]))] = text[: len(sample["tokens"])]
        sample["labels"][: real - 1] = text[1:]

    def __getstate__(self) -> dict[str, Any]:
        """Everything but open files and cached masks: those are opened and made again on the other side."""
        state = self.__dict__.copy()
        del state["_shard"]
        for name in ("cached_attention_mask", "cached_loss_mask", "cached_position_ids"):
            state[name] = None
        state["masks_and_position_ids_are_cached"] = False
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._shard = _open_shard(self.dataset.path_prefix, self.sidecars)
        expected, actual = getattr(self.config, FINGERPRINT), self._shard.fingerprint()
        if actual != expected:
            raise FormatError(
                f"{self._shard.prefix}: had the fingerprint {expected[:16]} when the dataset was pickled and has "
                f"{actual[:16]} now: something wrote to the shard; build datasets anew after a new build"
            )


def _open_shard(prefix: str, sidecars: Sequence[str] = ()) -> KDShard:
    """Open a shard; the tokens of one that still has a URL are Megatron's to read."""
    token_prefix(prefix)
    return KDShard.open(local_prefix(prefix), sidecars, few_tokens=is_object_storage_path(prefix))
