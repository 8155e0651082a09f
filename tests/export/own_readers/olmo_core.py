"""Reads an export with OLMo-core's own dataset, which packs the documents, its collator and its function for labels."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from olmo_core.data import DataCollator, NumpyPackedFSLDatasetConfig, TokenizerConfig
from olmo_core.data.utils import get_labels

from tests.export.isolation import measured, model_of, segments_of, spans, within
from tests.export.sets import Document, aligned, cut, report

PAD, END = 258, 0


def read(folder: Path, length: int) -> tuple[list[Document], dict[str, float]]:
    """Documents of a split, in rows of the next power of 2, and how far those of a batch move each other's logits."""
    found: list[Document] = []
    items: list[Any] = []
    with TemporaryDirectory() as work:
        dataset = NumpyPackedFSLDatasetConfig(
            tokenizer=TokenizerConfig(vocab_size=261, eos_token_id=END, pad_token_id=PAD),
            paths=[f"{folder}/token_ids_part_*.npy"],
            label_mask_paths=[f"{folder}/labels_mask_part_*.npy"],
            expand_glob=True,
            generate_doc_lengths=True,
            sequence_length=1 << length.bit_length(),  # a power of 2, with room for the end token that was added
            work_dir=work,
        ).build()
        dataset.prepare()
        for number in range(len(dataset)):
            item = dataset[number]
            batch = {name: item[name][None] for name in ("input_ids", "label_mask")}
            labels = aligned(get_labels(batch)[0].tolist())
            ids, lengths = item["input_ids"].tolist(), item["doc_lens"].tolist()
            starts = [sum(lengths[:place]) for place in range(len(lengths))]
            found += [one for one in cut(ids, labels, starts) if set(one[0]) != {PAD}]
            items.append(item)
    assert all(ids[-1] == END for ids, _ in found)
    items.sort(key=lambda item: -len(item["doc_lens"]))
    batch = DataCollator(pad_token_id=PAD, vocab_size=261)(items[:2])
    ids, segments, positions, bounds = batch["input_ids"], [], [], []
    for row, padded in enumerate(batch["doc_lens"].tolist()):
        lengths = [length for length in padded if length]
        of_row, places = segments_of(lengths, ids.shape[1])
        segments.append(of_row)
        positions.append(places)
        bounds += spans(lengths, row)
    moves = measured(model_of("qwen3"), ids, within(torch.stack(segments)), torch.stack(positions), bounds)
    return [(ids[:-1], places) for ids, places in found], moves


report(read)
