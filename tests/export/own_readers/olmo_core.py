"""Reads an export with OLMo-core's own dataset, which packs the documents, and its function for labels."""

import sys
from tempfile import TemporaryDirectory

from olmo_core.data import NumpyPackedFSLDatasetConfig, TokenizerConfig
from olmo_core.data.utils import get_labels

from tests.export.sets import aligned, cut, written

PAD, END = 258, 0
found = []
with TemporaryDirectory() as work:
    dataset = NumpyPackedFSLDatasetConfig(
        tokenizer=TokenizerConfig(vocab_size=261, eos_token_id=END, pad_token_id=PAD),
        paths=[f"{sys.argv[1]}/token_ids_part_*.npy"],
        label_mask_paths=[f"{sys.argv[1]}/labels_mask_part_*.npy"],
        expand_glob=True,
        generate_doc_lengths=True,
        sequence_length=8192,
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
assert all(ids[-1] == END for ids, _ in found)
written([(ids[:-1], places) for ids, places in found])
