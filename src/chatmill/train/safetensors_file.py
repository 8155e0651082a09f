"""Reading and writing safetensors files with torch alone: a length, a JSON header, and the bytes of the tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from chatmill.errors import FormatError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
ALIGNMENT = 8


def write_tensors(file: IO[bytes], tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors in the order of their names, one at a time through the memory of the CPU."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for name in sorted(tensors):
        flat = tensors[name].detach().contiguous().cpu().reshape(-1)
        if flat.numel():
            file.write(flat.view(torch.uint8).numpy().data)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a file, each with memory of its own; a damaged file is one clear error."""
    try:
        data = np.memmap(path, dtype=np.uint8, mode="r")
        size = int.from_bytes(data[:8].tobytes(), "little")
        header = json.loads(data[8 : 8 + size].tobytes())
        header.pop("__metadata__", None)
        return {name: _tensor(data[8 + size :], entry) for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{path} is no whole safetensors file: {error}") from None


def _tensor(data: np.ndarray[Any, np.dtype[np.uint8]], entry: Mapping[str, Any]) -> torch.Tensor:
    begin, end = entry["data_offsets"]
    dtype, shape = DTYPES[entry["dtype"]], entry["shape"]
    if not 0 <= begin <= end <= len(data):
        raise ValueError(f"bytes {begin} to {end} are wanted, the file has {len(data)}")
    raw = torch.from_numpy(np.array(data[begin:end]))
    return raw.view(dtype).reshape(shape) if len(raw) else torch.empty(shape, dtype=dtype)
