"""The rule of a model: which family its processor is of, by the files of its folder."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from chatmill.core.json_files import read_object
from chatmill.errors import ConfigError, RecordError
from chatmill.images.rule import PictureRule

FILES = ("preprocessor_config.json", "processor_config.json", "tokenizer_config.json")
"""The files that say how pictures are processed; the third only names the processor."""
RULES: Mapping[str, str] = {
    **dict.fromkeys(("Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor"), "qwen.QwenRule"),
    **dict.fromkeys(("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast"), "qwen.QwenRule"),
    "Gemma3Processor": "gemma3.Gemma3Rule",
    "Gemma4Processor": "gemma4.Gemma4Rule",
    "PixtralProcessor": "pixtral.PixtralRule",
    "LlavaOnevisionProcessor": "llava_onevision.LlavaOnevisionRule",
    "InternVLProcessor": "internvl.InternVLRule",
    "Llama4Processor": "llama4.Llama4Rule",
    **dict.fromkeys(("Idefics3Processor", "SmolVLMProcessor"), "idefics3.Idefics3Rule"),
    **dict.fromkeys(("Glm4vProcessor", "Glm46VProcessor"), "glm.GlmRule"),
}
"""The rule of each class of processor and image processor."""


def find_rule(folder: Path) -> PictureRule | str:
    """Find the rule of the model in a folder; else say why pictures cannot be compiled."""
    image, processor, tokenizer = (_read(folder / name) for name in FILES)
    image = processor.get("image_processor") or image
    if not image and not processor:
        return f"{folder} has no {FILES[0]} or {FILES[1]}, so its model takes no pictures"
    named = [processor.get("processor_class"), image.get("processor_class"), tokenizer.get("processor_class")]
    classes = [name for name in (*named, image.get("image_processor_type")) if isinstance(name, str)]
    target = next((RULES[name] for name in classes if name in RULES), None)
    if target is None:
        supported = sorted({name for name in RULES if name.endswith("Processor") and "Image" not in name})
        return f"the processor {', '.join(classes) or 'without a name'} is not known; known: {', '.join(supported)}"
    if image.get("do_resize") is False:
        return "the processor does not resize pictures (do_resize: false), and no rule is known for that"
    module, _, name = target.partition(".")
    family = getattr(import_module(f"chatmill.images.families.{module}"), name)
    try:
        rule: PictureRule = family.of(image, processor)
    except ConfigError as error:
        return str(error)
    except (TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{folder}: {FILES[0]} is not as {name} reads it: {error}") from None
    return rule


def _read(path: Path) -> dict[str, Any]:
    return read_object(path, ConfigError) if path.is_file() else {}


def no_rule(why: str) -> RecordError:
    """Make the error of a record with pictures without a rule."""
    return RecordError(
        f"the record has pictures, and they cannot be compiled: {why}. Leave such records out (on_error: quarantine), "
        "or take the pictures away",
        code="non_text_part",
    )
