"""Small model folders of every family that takes pictures, and transformers' own processors made of the same values."""

from __future__ import annotations

import importlib
import io
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TEMPLATES = Path(__file__).parent.parent / "data" / "templates"
CHATML = """{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}{%- else %}{%- for part in message.content %}
{%- if part.type == 'image' %}{{- 'PICTURE' }}{%- else %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}
{{- '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""A template with a picture's placeholder in the place of PICTURE."""
SIZES = [
    *[(1, 1), (28, 28), (31, 17), (200, 201), (640, 480), (480, 640), (333, 1000), (1000, 333), (64, 800), (8000, 200)],
    *[(97, 1), (2, 150), (336, 336), (337, 1009), (512, 512), (1023, 511), (700, 1400), (1536, 1537), (29, 900)],
    *[(13, 13), (50, 51), (77, 1203), (90, 160), (112, 113), (127, 255), (224, 224), (223, 449), (256, 1), (3, 590)],
    *[(300, 299), (360, 1080), (384, 385), (448, 896), (601, 401), (768, 769), (900, 29), (911, 1117), (1080, 1920)],
    *[(1200, 75), (200, 8000)],
]

TILES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))


@dataclass(frozen=True)
class Family:
    """A family of models, as its published files describe it."""

    processor: str
    tokens: tuple[str, ...]
    image: Mapping[str, Any]
    """preprocessor_config.json."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """processor_config.json."""
    named: Mapping[str, str] = field(default_factory=dict)
    """Tokens that the tokenizer names."""
    template: str = CHATML
    picture: str = "<image>"
    image_processor: str = ""
    absent: tuple[str, ...] = ()
    """Arguments of the processor for what is neither text nor picture."""
    module: str = ""
    """Where the class is, if it is not given out without torchvision."""
    sizes: Callable[[int, int], bool] = lambda height, width: True
    """Which sizes the family takes."""


def image(kind: str, **values: Any) -> dict[str, Any]:
    return {"image_processor_type": kind, **values}


def named(**tokens: str) -> dict[str, str]:
    return {f"{name}_token": token for name, token in tokens.items()}


def pixels(least: int, most: int) -> dict[str, int]:
    return {"shortest_edge": least, "longest_edge": most}


def square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


LLAMA4_TOKENS = ("<|image|>", "<|image_start|>", "<|image_end|>")
PATCHES = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
PINPOINTS = [[384 * row, 384 * column] for row in range(1, 7) for column in range(1, 7)]

FAMILIES: dict[str, Family] = {
    "qwen3_vl": Family(
        processor="Qwen3VLProcessor",
        tokens=("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
        image=image("Qwen2VLImageProcessorFast", **{**PATCHES, "patch_size": 16}, size=pixels(65536, 16777216)),
        image_processor="Qwen2VLImageProcessorPil",
        template=(TEMPLATES / "trl" / "qwen3_vl.jinja").read_text(),
        sizes=lambda height, width: max(height, width) <= 200 * min(height, width),
    ),
    "gemma3": Family(
        processor="Gemma3Processor",
        tokens=("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
        image=image("Gemma3ImageProcessor", do_pan_and_scan=None, image_seq_length=256, size=square(896)),
        more={"image_seq_length": 256},
        named=named(boi="<start_of_image>", eoi="<end_of_image>", image="<image_soft_token>"),
        image_processor="Gemma3ImageProcessorPil",
        picture="<start_of_image>",
    ),
    "pixtral": Family(
        processor="PixtralProcessor",
        tokens=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        image=image("PixtralImageProcessor", patch_size=square(16), size={"longest_edge": 1024}),
        more={"patch_size": 16, "image_token": "[IMG]", "image_break_token": "[IMG_BREAK]"},
        image_processor="PixtralImageProcessorPil",
        module="pixtral.processing_pixtral",
        picture="[IMG]",
    ),
    "gemma4": Family(
        processor="Gemma4Processor",
        tokens=("<|image|>", "<|image>", "<image|>", "<|video|>", "<|audio|>", "<|audio>", "<audio|>"),
        image=image("Gemma4ImageProcessor", patch_size=16, pooling_kernel_size=3, max_soft_tokens=280),
        named=named(image="<|image|>", boi="<|image>", eoi="<image|>", video="<|video|>")
        | named(audio="<|audio|>", boa="<|audio>", eoa="<audio|>"),
        image_processor="Gemma4ImageProcessorPil",
        absent=("feature_extractor", "video_processor"),
        picture="<|image|>",
    ),
    "internvl": Family(
        processor="InternVLProcessor",
        tokens=("<IMG_CONTEXT>", "<img>", "</img>", "<video>"),
        image=image(
            "GotOcr2ImageProcessorFast", crop_to_patches=False, min_patches=1, max_patches=12, size=square(448)
        ),
        more={"image_seq_length": 256},
        named=named(start_image="<img>", end_image="</img>", context_image="<IMG_CONTEXT>", video="<video>"),
        image_processor="GotOcr2ImageProcessorPil",
        picture="<IMG_CONTEXT>",
    ),
    "idefics3": Family(
        processor="Idefics3Processor",
        tokens=("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *TILES),
        image=image(
            "Idefics3ImageProcessor",
            do_image_splitting=True,
            max_image_size={"longest_edge": 364},
            size={"longest_edge": 1456},
        ),
        more={"image_seq_len": 169},
        image_processor="Idefics3ImageProcessorPil",
    ),
    "llava_onevision": Family(
        processor="LlavaOnevisionProcessor",
        tokens=("<image>", "<video>"),
        image=image("LlavaOnevisionImageProcessor", size=square(384), image_grid_pinpoints=PINPOINTS),
        more={"num_image_tokens": 729, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_9"}
        | named(image="<image>"),
        image_processor="LlavaOnevisionImageProcessorPil",
    ),
    "glm4v": Family(
        processor="Glm4vProcessor",
        tokens=("<|image|>", "<|begin_of_image|>", "<|end_of_image|>", "<|video|>"),
        image=image("Glm4vImageProcessor", **PATCHES, size=pixels(12544, 9633792)),
        named=named(image="<|image|>", video="<|video|>"),
        image_processor="Glm4vImageProcessorPil",
        picture="<|begin_of_image|><|image|><|end_of_image|>",
        sizes=lambda height, width: max(height, width) <= 200 * min(height, width),
    ),
    "llama4": Family(
        processor="Llama4Processor",
        tokens=(*LLAMA4_TOKENS, "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
        image=image("Llama4ImageProcessorFast", max_patches=16, resize_to_max_canvas=False),
        more={"patch_size": 14, "pixel_shuffle_ratio": 0.5},
        module="llama4.processing_llama4",
        picture="<|image|>",
    ),
}
FAMILIES["qwen2_5_vl"] = replace(
    FAMILIES["qwen3_vl"],
    processor="Qwen2_5_VLProcessor",
    image=image("Qwen2VLImageProcessor", **PATCHES, min_pixels=3136, max_pixels=501760),
    template=(TEMPLATES / "trl" / "qwen2_5_vl.jinja").read_text(),
)
FAMILIES["mistral3"] = replace(
    FAMILIES["pixtral"],
    image=image("PixtralImageProcessor", patch_size=14, size={"longest_edge": 1540}),
    more={"patch_size": 14, "spatial_merge_size": 2},
)
FAMILIES["glm46v"] = replace(FAMILIES["glm4v"], processor="Glm46VProcessor", image_processor="Glm46VImageProcessorPil")


def tokenizer_json(tokens: tuple[str, ...]) -> str:
    """A vocabulary of bytes in which lines and some words are joined, and these control tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), ("ĊĊ", "Ċ"), ("ĊĊ", "ĊĊ"), ("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("e", "r")]
    words = [*letters, *("".join(pair) for pair in merges)]
    made = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.decoder = decoders.ByteLevel()
    names = ["<|im_start|>", "<|im_end|>", "<|pad|>", *tokens]
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return made.to_str()


def write_model(folder: Path, name: str) -> Path:
    """The files of a model, without weights."""
    family = FAMILIES[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json(family.tokens))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "processor_class": family.processor}
    config |= named(eos="<|im_end|>", pad="<|pad|>") | ({"extra_special_tokens": family.named} if family.named else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(family.template.replace("PICTURE", family.picture))
    (folder / "preprocessor_config.json").write_text(json.dumps({**family.image, "processor_class": family.processor}))
    if family.more:
        more = {**family.more, "processor_class": family.processor}
        (folder / "processor_config.json").write_text(json.dumps(more))
    return folder


def _module(name: str) -> Any:
    """A module of a processor; what it only imports of torchvision, which has no wheel for CPUs, is not there."""
    absent = {name: MagicMock() for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")}
    sys.modules.update(absent)
    try:
        return importlib.import_module(f"transformers.models.{name}")
    finally:
        for one in absent:
            del sys.modules[one]


class Llama4Canvases:
    """Llama 4's image processor without its pixels, which only torchvision makes: its own choice of a canvas."""

    model_input_names = ("pixel_values",)

    def __init__(self, max_patches: int, resize_to_max_canvas: bool) -> None:
        self.fills, self.module = resize_to_max_canvas, _module("llama4.image_processing_llama4")
        size = transformers.image_utils.SizeDict(height=336, width=336)
        self.canvases = torch.tensor(self.module.find_supported_resolutions(max_patches, size))

    def fetch_images(self, images: Any) -> Any:
        if isinstance(images, list):
            return [self.fetch_images(one) for one in images]
        return transformers.image_utils.load_image(images)

    def __call__(self, images: list[Any], **options: Any) -> transformers.BatchFeature:
        sizes = [(one.height, one.width) for one in images]
        best = [self.module.get_best_fit(size, self.canvases, self.fills) // 336 for size in sizes]
        return transformers.BatchFeature({"pixel_values": torch.zeros(1, 3, 336, 336), "aspect_ratios": best})


def processor_of(folder: Path, name: str) -> Any:
    """transformers' own processor, of the same files."""
    family = FAMILIES[name]
    values = {key: value for key, value in family.image.items() if key != "image_processor_type"}
    made = getattr(transformers, family.image_processor) if family.image_processor else Llama4Canvases
    kind = getattr(_module(family.module) if family.module else transformers, family.processor)
    unchecked = type(
        family.processor, (kind,), {"check_argument_for_proper_class": lambda self, name, argument: type(argument)}
    )  # videos need torchvision
    return unchecked(
        image_processor=made(**values),
        tokenizer=transformers.PreTrainedTokenizerFast.from_pretrained(folder),
        chat_template=(folder / "chat_template.jinja").read_text(),
        **{**family.more, **dict.fromkeys(family.absent)},
    )


def picture(height: int, width: int, form: str = "PNG", orientation: int | None = None) -> bytes:
    """The bytes of a picture."""
    out, exif = io.BytesIO(), Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
    more = {"exif": exif} if orientation is not None else {}
    Image.radial_gradient("L").resize((width, height)).convert("RGB").save(out, form, **more)
    return out.getvalue()
