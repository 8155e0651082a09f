"""The blend arguments of Megatron-LM as files beside a root: its shards with their weights, by absolute paths.

They lie beside the root and not in it, because they name the place where it lies: two builds of the same input have the
same bytes wherever they are. After a move, `write_blend_arguments` writes them again.
"""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import NamedTuple

from chatmill.core.publish import whole_file
from chatmill.store.kd import synth_kd_blends

MEGATRON_SPLITS = ("train", "valid", "test")


class BlendFiles(NamedTuple):
    """Where the arguments are."""

    json: Path
    """For `--per-split-data-args-path`."""
    args: Path
    """`--train-data-path ... --valid-data-path ...`, a line each, quoted for a shell."""


def write_blend_arguments(root: str | os.PathLike[str]) -> BlendFiles:
    """Write `ROOT.blend.json` and `ROOT.blend.args`, in place of those that are there."""
    folder = Path(root).resolve()
    blends: dict[str, list[str] | None] = dict.fromkeys(MEGATRON_SPLITS)
    for split, blend in zip(MEGATRON_SPLITS, synth_kd_blends(folder), strict=True):
        if blend is not None:
            pairs = zip(blend.weights, blend.prefixes, strict=True)
            blends[split] = [text for weight, prefix in pairs for text in (f"{weight:.0f}", prefix)]
    lines = [f"--{split}-data-path {shlex.join(blend)}\n" for split, blend in blends.items() if blend is not None]
    files = BlendFiles(*(folder.with_name(f"{folder.name}.blend.{kind}") for kind in ("json", "args")))
    for path, text in ((files.json, json.dumps(blends, indent=1) + "\n"), (files.args, "".join(lines))):
        with whole_file(path) as partial:
            partial.write_text(text, encoding="utf-8")
    return files
