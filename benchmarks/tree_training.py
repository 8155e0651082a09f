"""Trains on trees and on rows per turn on a GPU, with FlexAttention: the same loss and gradients, and the time of both.

    python -m benchmarks.tree_training prepare FOLDER      builds the tau dialogues three ways; needs all of Chatmill
    python -m benchmarks.tree_training measure FOLDER      needs numpy, torch, transformers and a GPU alone

`measure` prints one JSON object: losses and gradients in float32 and bfloat16 of trees against those of rows per turn,
seconds of a pass (forward and backward) over all of each, and how often FlexAttention was compiled.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

WIDTH = 16_384
DIALOGUES = 40
ROOT = Path(__file__).parents[1]
WAYS = {"rows": "turns", "trees": "tree", "plain": "none"}


def prepare(folder: Path, dialogues: int) -> None:
    """Build the first dialogues with rows per turn, as trees, and as plain conversations, under Qwen3's template."""
    from chatmill.compiler.run import run_build
    from tests.data.tokenizer_files import unpacked

    folder.mkdir(parents=True, exist_ok=True)
    chats = folder / "tau.jsonl"
    with gzip.open(ROOT / "tests" / "data" / "conversations" / "tau_airline.jsonl.gz", "rt", encoding="utf-8") as file:
        chats.write_text("".join(line for line, _ in zip(file, range(dialogues), strict=False)), encoding="utf-8")
    template = ROOT / "tests" / "data" / "tokenizers" / "chat_templates" / "qwen3.jinja"
    for name, expand in WAYS.items():
        recipe = {"sources": [{"path": str(chats)}], "tokenizer": str(unpacked("qwen3")), "template": str(template)}
        recipe |= {"expand": expand, "gates": {"records_without_trained_tokens": None, "max_lost_reasoning": None}}
        manifest = run_build(recipe, folder / name).manifest
        print(name, manifest["splits"]["train"])


def model_of(attention: str, dtype: Any, *, layers: int, hidden: int, vocabulary: int) -> Any:
    """A Qwen3 with random weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=max(1, hidden // 128), head_dim=128,
        max_position_embeddings=2 * WIDTH, attn_implementation=attention,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config).to(dtype)


def batches(folder: Path, width: int) -> list[Any]:
    """The packed rows of a dataset, one a batch."""
    from chatmill.load.episodes import GPTEpisodeDataLoader

    config = {"batch_size": 1, "block_size": width, "dataset_mode": "sft_episode", "epoch_drop_last": False}
    config |= {"epoch_shuffle": False, "pad_token_id": 0, "use_loss_mask": True}
    loader = GPTEpisodeDataLoader(config, dataset_dir=folder, pack=True)
    return [loader.get_batch() for _ in range(loader.steps_per_epoch())]


def loss_of(model: Any, batch: Any) -> Any:
    """The sum of the losses over the targets; logits of other tokens are not made."""
    import torch

    inputs = batch.inputs(model)
    hidden = model.model(**inputs).last_hidden_state.flatten(0, 1)
    wanted = batch.mask.flatten() > 0
    logits = model.lm_head(hidden[wanted]).float()
    return torch.nn.functional.cross_entropy(logits, batch.y.flatten()[wanted], reduction="sum")


def one_pass(model: Any, rows: list[Any], device: str) -> tuple[float, int, float]:
    """Loss and targets of all rows, with their gradients in the model, and the seconds that it took."""
    import torch

    model.zero_grad()
    total, targets = 0.0, 0
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for row in rows:
        batch = row.to(device)
        loss = loss_of(model, batch)
        loss.backward()
        total, targets = total + loss.detach(), targets + int((row.mask > 0).sum())
    value = float(total)
    if device == "cuda":
        torch.cuda.synchronize()
    return value, targets, time.perf_counter() - began


def gradients(model: Any) -> Any:
    """All gradients, flat."""
    import torch

    return torch.cat([one.grad.flatten().float().cpu() for one in model.parameters() if one.grad is not None])


def compiled() -> int:
    """Graphs that torch has compiled so far."""
    from torch._dynamo.utils import counters

    return int(counters["stats"].get("unique_graphs", 0))


def measure(folder: Path, *, layers: int, hidden: int, vocabulary: int, width: int, repeats: int) -> dict[str, Any]:
    """The figures."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    attention = "flex_attention" if device == "cuda" else "sdpa"
    sets = {name: batches(folder / name, width) for name in WAYS}
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(0) if device == "cuda" else "cpu"}
    found |= {"torch": torch.__version__, "attention": attention, "width": width, "layers": layers, "hidden": hidden}
    found["tokens"] = {name: int(sum(row.tokens.sum() for row in rows)) for name, rows in sets.items()}
    found["rows"] = {name: len(rows) for name, rows in sets.items()}
    for dtype in (torch.float32, torch.bfloat16):
        model = model_of(attention, dtype, layers=layers, hidden=hidden, vocabulary=vocabulary).to(device)
        name = str(dtype).removeprefix("torch.")
        seen: dict[str, Any] = {}
        flat: dict[str, Any] = {}
        for way in ("trees", "rows"):
            _say(name, way)
            seen[way] = dict(zip(("loss", "targets", "first_seconds"), one_pass(model, sets[way], device), strict=True))
            flat[way] = gradients(model)
        apart = (flat["trees"] - flat["rows"]).norm() / flat["rows"].norm()
        loss = abs(seen["trees"]["loss"] - seen["rows"]["loss"]) / seen["rows"]["loss"]
        seen |= {"loss_difference": loss, "gradient_difference": float(apart)}
        del flat
        if dtype is torch.bfloat16:
            for way in WAYS:
                _say(name, way, "timed")
                one_pass(model, sets[way], device)
                before = compiled()
                times = [one_pass(model, sets[way], device)[2] for _ in range(repeats)]
                seen[f"seconds_{way}"], seen[f"compiled_again_{way}"] = statistics.median(times), compiled() - before
            seen["trees_are_quicker"] = seen["seconds_rows"] / seen["seconds_trees"]
            per_token = {way: seen[f"seconds_{way}"] / found["tokens"][way] for way in WAYS}
            seen["trees_against_plain_per_token"] = per_token["trees"] / per_token["plain"]
        found[name] = seen
        del model
    return found


def _say(*words: str) -> None:
    """Where a long measurement is."""
    print(f"{time.perf_counter():.0f} s:", *words, file=sys.stderr, flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["prepare", "measure"])
    parser.add_argument("folder", type=Path)
    for name, default in (
        ("dialogues", DIALOGUES), ("layers", 6), ("hidden", 1024), ("vocabulary", 151_936), ("width", WIDTH),
        ("repeats", 2),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    if given.what == "prepare":
        prepare(given.folder, given.dialogues)
        return
    sizes = {name: getattr(given, name) for name in ("layers", "hidden", "vocabulary", "width", "repeats")}
    print(json.dumps(measure(given.folder, **sizes), indent=1))


if __name__ == "__main__":
    main()
