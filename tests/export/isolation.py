"""Whether documents of a row see each other: one is changed, and the logits of the others are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Bounds = list[tuple[int, int, int]]
"""Where documents are in a batch: row, first token, and one more than the last."""
Logits = Callable[[torch.Tensor], torch.Tensor]
"""Gives the logits (rows, tokens, vocabulary) of ids (rows, tokens)."""


def moved(logits: Logits, ids: torch.Tensor, bounds: Bounds, *, most: int = 3) -> dict[str, float]:
    """How far logits move, at most, when one document changes: in the others (`moved`), and in itself (`seen`).

    Documents that are followed by another one in their row are changed, `most` of them.
    """
    rows = [row for row, _, _ in bounds]
    followed = [n for n in range(len(bounds) - 1) if rows[n + 1] == rows[n] and bounds[n][2] - bounds[n][1] > 4]
    assert followed, "no row has two documents, so nothing could be seen to leak"
    found = {"moved": 0.0, "seen": 0.0}
    with torch.no_grad():
        before = logits(ids)
        for number in followed[:: max(1, len(followed) // most)][:most]:
            row, first, last = bounds[number]
            changed = ids.clone()
            changed[row, first:last] = (changed[row, first:last] + 7) % 250
            difference = (logits(changed) - before).abs().amax(-1)
            found["seen"] = max(found["seen"], float(difference[row, first:last].min()))
            for other, (other_row, begin, end) in enumerate(bounds):
                if other != number:
                    found["moved"] = max(found["moved"], float(difference[other_row, begin:end].max()))
    return found


def bounds_of(rows: list[list[int]], documents: set[tuple[int, ...]]) -> Bounds:
    """Where the documents of a dataset are in rows of ids; whatever follows the last one of a row is padding."""
    by_length = sorted({len(document) for document in documents}, reverse=True)
    found: Bounds = []
    for number, row in enumerate(rows):
        at = 0
        while at < len(row):
            sizes = (size for size in by_length if size <= len(row) - at and tuple(row[at : at + size]) in documents)
            size = next(sizes, 0)
            if not size:
                break
            found.append((number, at, at + size))
            at += size
    return found


def model_of(kind: str, **sizes: Any) -> Any:
    """A small model with random weights for 320 ids, the same every time: `qwen3`, `qwen3_vl`, `qwen3_5`, `gemma3`."""
    import transformers as hf

    text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text |= {"num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 16384, "vocab_size": 320}
    text |= {"initializer_range": 0.3, "pad_token_id": 258, **sizes}
    torch.manual_seed(0)
    if kind == "qwen3_vl":
        rope = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True, "rope_theta": 10000.0}
        sight = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "depth": 1, "out_hidden_size": 32}
        sight |= {"patch_size": 16, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
        marks = {"image_token_id": 300, "video_token_id": 301, "vision_start_token_id": 302, "vision_end_token_id": 303}
        text |= {"rope_scaling": rope, "rope_parameters": rope}
        config = hf.Qwen3VLConfig(text_config=text, vision_config=sight, **marks)
        model = hf.Qwen3VLForConditionalGeneration(config)
    else:
        config = {"qwen3": hf.Qwen3Config}[kind](**text)
        model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


def padding_tokenizer() -> Any:
    """A tokenizer that only pads, as those of datasets of bytes do."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 258, "<eos>": 260}, unk_token="<pad>"))
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "padding_side": "right"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def measured(model: Any, ids: torch.Tensor, sees: torch.Tensor, positions: torch.Tensor, bounds: Bounds) -> Any:
    """How far documents move each other in a model that is given a trainer's masks, and its loss on the batch.

    `sees` is (rows, tokens, tokens): True where a token may look.
    """
    mask = torch.where(sees, 0.0, torch.finfo(torch.float32).min)[:, None]

    def logits(changed: torch.Tensor) -> torch.Tensor:
        given = {"attention_mask": mask, "position_ids": positions.long(), "use_cache": False}
        found: torch.Tensor = model(input_ids=changed, **given).logits
        return found

    return moved(logits, ids, bounds)


def within(segments: torch.Tensor) -> torch.Tensor:
    """What tokens see: those of their own segment up to themselves; `segments` is (rows, tokens)."""
    width = segments.shape[-1]
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    return (segments[:, :, None] == segments[:, None, :]) & causal


def segments_of(lengths: list[int], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The number of the document of each token of a row, and its position in it; what is left is one more."""
    sizes = [*lengths, width - sum(lengths)]
    numbers = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    positions = torch.cat([torch.arange(size) for size in sizes])
    return numbers, positions


def spans(lengths: list[int], row: int = 0) -> Bounds:
    """Where documents of these lengths are in a row."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [(row, end - length, end) for length, end in zip(lengths, ends, strict=True)]


def padded_and_alone(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """How far padding moves the logits of rows of one document, with a mask of padding, from those of each alone."""
    found = {"moved by padding": 0.0, "seen": 1.0}
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        padded = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        for row, used in enumerate(mask.bool()):
            alone = model(input_ids=ids[row][used][None], use_cache=False).logits[0]
            found["moved by padding"] = max(found["moved by padding"], float((padded[row][used] - alone).abs().max()))
    assert not mask.all(), "no row has padding"
    return found


LOSS_ONLY = {"labels", "shift_labels", "logits_to_keep", "fused_lm_head", "num_items_in_batch", "return_outputs"}


class FirstForward:
    """Keeps what arrives at the model in the first step of a transformers Trainer, or of one made of it."""

    def __init__(self) -> None:
        import transformers

        self.model: Any = None
        self.given: dict[str, Any] = {}
        self.losses: list[float] = []
        """Of all steps."""
        step = transformers.Trainer.training_step

        def noted(trainer: Any, model: Any, *more: Any, **named: Any) -> Any:
            def note(_: Any, args: Any, given: dict[str, Any]) -> None:
                if not self.losses:
                    self.model, self.given = model, given

            hook = model.register_forward_pre_hook(note, with_kwargs=True)
            loss = step(trainer, model, *more, **named)
            hook.remove()
            self.losses.append(float(loss))
            return loss

        transformers.Trainer.training_step = noted

    def moved(self, documents: set[tuple[int, ...]]) -> dict[str, float]:
        """How far documents of this batch move each other's logits in the model that was trained."""
        kept = {name: value for name, value in self.given.items() if name not in LOSS_ONLY | {"input_ids"}}
        ids = self.given["input_ids"]
        model = self.model.eval()

        def logits(changed: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = model(input_ids=changed, **{**kept, "use_cache": False}).logits
            return found

        return moved(logits, ids, bounds_of(ids.tolist(), documents))
