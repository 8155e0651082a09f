"""Reads an export with SkyRL's own loader for pretokenized datasets."""

import sys

from skyrl.train.dataset.pretokenized import load_from_pretokenized

from tests.export.sets import written

found = []
for row in load_from_pretokenized(sys.argv[1], max_length=6000):
    first = len(row["input_ids"]) - row["num_actions"]
    assert row["attention_mask"] == [1] * len(row["input_ids"])
    places = tuple(first + place for place, value in enumerate(row["loss_mask"]) if value)
    found.append((tuple(row["input_ids"]), places))
written(found)
