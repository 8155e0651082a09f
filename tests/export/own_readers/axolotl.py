"""Reads an export with Axolotl's own loader, checks and filters."""

from pathlib import Path

from axolotl.utils.data.shared import load_dataset_with_config
from axolotl.utils.data.utils import handle_long_seq_in_dataset
from axolotl.utils.data.wrappers import get_dataset_wrapper
from axolotl.utils.dict import DictDefault
from axolotl.utils.trainer import process_datasets_for_packing

from tests.export.sets import Document, cut, report


def read(folder: Path, length: int) -> tuple[list[Document], dict[str, float]]:
    """Documents of a split, as they are before Axolotl packs them."""
    config = DictDefault({"path": str(folder), "type": None})
    cfg = DictDefault({"sequence_len": length, "sample_packing": True, "dataset_num_proc": 1, "min_sample_len": 2})
    loaded = load_dataset_with_config(config, use_auth_token=False)
    rows, _ = get_dataset_wrapper(config, None, cfg, None, loaded)
    rows = handle_long_seq_in_dataset(rows, cfg.sequence_len, cfg)
    rows, _ = process_datasets_for_packing(cfg, rows, None)
    return [one for row in rows for one in cut(row["input_ids"], row["labels"], [0])], {}


report(read)
