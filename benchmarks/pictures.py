"""Compiling conversations with pictures, against the model's own processor: tokens and masks alone, one core each.

    python -m benchmarks.pictures [--pictures 200]

Pictures are JPEG files of usual sizes on the local disk, one in each conversation, made here. The other side is what
trainers do: `processor.apply_chat_template`, which decodes and resizes every picture to know how many tokens it takes.
Ids of both are compared first. A ratio of CPU time, with what it takes to bind the template left out on both sides.
"""

from __future__ import annotations

import argparse
import io
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SIZES = [(480, 640), (640, 480), (768, 1024), (1080, 1920), (1200, 1600), (2000, 3000)]
FAMILY = "qwen3_vl"
ROUNDS = 3


def write_pictures(folder: Path, count: int) -> None:
    """Photographs of a kind: smooth, with noise, so that a file is as large as one from a camera."""
    rng = np.random.RandomState(7)
    for number in range(count):
        height, width = SIZES[number % len(SIZES)]
        small = rng.randint(0, 255, (height // 16, width // 16, 3), dtype=np.uint8)
        image = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
        out = io.BytesIO()
        image.save(out, "JPEG", quality=88)
        (folder / f"{number}.jpg").write_bytes(out.getvalue())


def chats(folder: Path, count: int) -> list[list[dict[str, Any]]]:
    """One picture and a short answer each."""
    words = ["the", "in", "er", "a", "picture", "of", "one", "thing", "beside", "another"]
    chosen = random.Random(7)
    return [
        [
            {"role": "user", "content": [{"type": "image", "path": str(folder / f"{number}.jpg")},
                                         {"type": "text", "text": "What is this?"}]},
            {"role": "assistant", "content": " ".join(chosen.choices(words, k=40))},
        ]
        for number in range(count)
    ]  # fmt: skip


def seconds(work: Callable[[], Any]) -> float:
    """CPU time of one run."""
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> None:
    """Print both times and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=int, default=200)
    given = parser.parse_args()

    import torch

    from chatmill.core.conversation import Conversation
    from chatmill.core.message_parser import parse_messages
    from chatmill.images.files import Pictures
    from chatmill.render.jinja.options import TemplateOptions
    from chatmill.render.registry import bind
    from chatmill.render.render import render
    from chatmill.tokenizer.load import load_tokenizer
    from tests.images.model_folders import processor_of, write_model

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_pictures(folder, given.pictures)
        model = write_model(folder / "model", FAMILY)
        records = chats(folder, given.pictures)
        options = TemplateOptions(pictures=Pictures.of(model, str(folder)))
        template, processor = bind(str(model), load_tokenizer(str(model)), options), processor_of(model, FAMILY)

        def compiled() -> list[list[int]]:
            made = render([Conversation(parse_messages(one)) for one in records], template).tokens
            return [made.conversation(number).ids.tolist() for number in range(len(made))]

        def processed() -> list[list[int]]:
            ids = [
                processor.apply_chat_template([one], tokenize=True, return_dict=True)["input_ids"][0] for one in records
            ]
            return [np.asarray(one).tolist() for one in ids]

        if compiled() != processed():
            raise SystemExit("the two sides do not write the same ids")
        ours = [seconds(compiled) for _ in range(ROUNDS)]
        theirs = [seconds(processed) for _ in range(ROUNDS)]
    each = 1e3 / given.pictures
    mine, other = statistics.median(ours) * each, statistics.median(theirs) * each
    print(f"chatmill {mine:.3f} ms a conversation, the processor {other:.1f} ms: {other / mine:.0f}x")


if __name__ == "__main__":
    main()
