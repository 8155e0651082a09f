"""Finds templates: bundled ones by name, a model's own by its folder, a user's by the path of a file."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from chatmill.core.json_files import read_object
from chatmill.errors import ConfigError, UnknownNameError
from chatmill.images.find_rule import FILES as PICTURE_FILES
from chatmill.render.jinja.options import AnswerText, NoReasoning, TemplateOptions
from chatmill.render.model_template import JinjaSource, ModelTemplate
from chatmill.tokenizer.hf_json import named_tokens_of
from chatmill.tokenizer.hub_cache import cached_model, is_hub_name, missing_model, model_folder
from chatmill.tokenizer.load import JSON_FILES
from chatmill.tokenizer.tokenizer import Tokenizer

BUNDLED = Path(__file__).parent / "templates"
"""Holds the bundled templates, one file each."""
HEADER = re.compile(r"\A\{#-(.*?)-#\}", re.DOTALL)
"""The comment that a bundled template begins with: `key: value` lines about its origin."""
OWN_HEADER = "chatmill"
"""The line (`chatmill: template`) by which the comment of a user's own file is known as such a header."""
CONFIG, GENERATION_CONFIG = "tokenizer_config.json", "generation_config.json"
JINJA_FILE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
Choice = TypeVar("Choice", bound=StrEnum)


@cache
def bundled_names() -> tuple[str, ...]:
    """Names of the templates that come with the package."""
    return tuple(sorted(path.stem for path in BUNDLED.glob("*.jinja")))


def find_template(name: str | os.PathLike[str] | JinjaSource) -> JinjaSource:
    """A template: by bundled name, by the path of a .jinja file or of a model folder, by the name of a model in the
    local Hugging Face cache, or itself.

    `folder#name` is one of several templates in a folder.
    """
    if isinstance(name, JinjaSource):
        return name
    if not isinstance(name, str | os.PathLike) and getattr(name, "chat_template", None):
        return template_of_object(name)
    text = os.fspath(name) if isinstance(name, str | os.PathLike) else repr(name)[:100]
    if text in bundled_names():
        return _from_jinja(BUNDLED / f"{text}.jinja", name=text)
    if text.endswith(".jinja"):
        return _from_jinja(Path(text))
    folder, _, wanted = text.partition("#")
    if Path(folder).is_dir():
        return template_of_folder(Path(folder), wanted)
    if (cached := cached_model(folder)) is not None:
        return replace(template_of_folder(cached, wanted), name=text.rpartition("/")[2])
    if is_hub_name(folder) or folder.startswith((".", "/", "~")):
        raise ConfigError(f"no template {text!r}: {missing_model(folder)}")
    raise UnknownNameError(
        "template",
        text,
        list(bundled_names()),
        "A template of your own is the folder of a model, or the path of a .jinja file.",
    )


def bind(
    template: str | os.PathLike[str] | JinjaSource,
    tokenizer: Tokenizer | None,
    given: TemplateOptions | None = None,
) -> ModelTemplate:
    """Look a template up and bind it to a tokenizer."""
    if tokenizer is None:
        raise ConfigError("a template given by name needs a tokenizer: render(conversations, template, tokenizer)")
    return ModelTemplate(find_template(template), tokenizer, given)


def given_options(
    options: Mapping[str, Any] | None = None,
    today: str | None = None,
    *,
    answers: str | None = None,
    no_reasoning: str | None = None,
    thinking_close: str | None = None,
) -> TemplateOptions:
    """Options of a template from words, as a command line has them; the last three as a recipe has them."""
    try:
        day = None if today is None else datetime.date.fromisoformat(today)
    except ValueError:
        raise ConfigError(f"a date is YYYY-MM-DD, not {today!r}") from None
    return TemplateOptions(
        options=options or {},
        today=day,
        answers=_chosen(AnswerText, "answers", answers, AnswerText.AUTO),
        no_reasoning=_chosen(NoReasoning, "no_reasoning", no_reasoning, NoReasoning.REFUSE),
        thinking_close=thinking_close,
    )


def _chosen(choices: type[Choice], key: str, word: str | None, default: Choice) -> Choice:
    """Return the choice that a word names."""
    if word is None:
        return default
    try:
        return choices(word)
    except ValueError:
        raise UnknownNameError(key, word, [str(choice) for choice in choices]) from None


def has_template(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder holds a chat template."""
    path = model_folder(folder)
    return path.is_dir() and bool(_templates_in(path))


def own_template(tokenizer: str | os.PathLike[str]) -> str | None:
    """The folder whose chat template belongs to a tokenizer: the one that is given, or that of the given file."""
    path = Path(tokenizer)
    folder = path.parent if path.is_file() else path
    return str(folder) if has_template(folder) else None


def files_read(name: str | os.PathLike[str]) -> list[Path]:
    """Which files a tokenizer or a template of this name is read from: of a folder, or a file and those next to it."""
    path = model_folder(os.fspath(name).partition("#")[0])
    folder = path.parent if path.is_file() else path
    beside = [folder / file for file in (*JSON_FILES, CONFIG, GENERATION_CONFIG, JINJA_FILE, *PICTURE_FILES)]
    more = sorted((folder / MORE_TEMPLATES).glob("*.jinja"))
    return [file for file in dict.fromkeys((path, *beside, *more)) if file.is_file()]


def template_of_folder(folder: Path, wanted: str = "") -> JinjaSource:
    """Return the chat template of a model or tokenizer folder."""
    templates = _templates_in(folder)
    if not templates:
        raise ConfigError(
            f"{folder} holds no chat template: neither {JINJA_FILE} nor a 'chat_template' in {CONFIG}. Name one with "
            "--template"
        )
    name = wanted or ("default" if "default" in templates or len(templates) > 1 else next(iter(templates)))
    if name not in templates:
        raise UnknownNameError(f"template in {folder}", name, list(templates), f"Name one as {folder}#name.")
    return JinjaSource(
        name=folder.resolve().name + (f"#{wanted}" if wanted else ""),
        text=templates[name],
        path=str(folder),
        origin=str(folder),
        named_tokens=named_tokens_of(_json(folder / CONFIG)),
        stop_ids=_stop_ids(_json(folder / GENERATION_CONFIG)),
    )


def template_of_object(tokenizer: Any) -> JinjaSource:
    """Return the chat template of a loaded transformers tokenizer, or processor."""
    templates = tokenizer.chat_template
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    text = templates.get("default") if isinstance(templates, dict) else templates
    if not isinstance(text, str):
        raise ConfigError(f"the tokenizer has several chat templates and none is the default: {', '.join(templates)}")
    name = Path(getattr(tokenizer, "name_or_path", "") or "tokenizer").name
    return JinjaSource(
        name=name,
        text=text,
        path="",
        origin="a loaded tokenizer",
        named_tokens=named_tokens_of(tokenizer.special_tokens_map),
    )


def _templates_in(folder: Path) -> dict[str, str]:
    """Return the templates of a folder by name; a file goes before an entry of the config."""
    templates: dict[str, str] = {}
    listed = _json(folder / CONFIG).get("chat_template")
    if isinstance(listed, str):
        templates["default"] = listed
    elif isinstance(listed, list):
        for entry in listed:
            if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("name", "template")):
                raise ConfigError(
                    f"{folder / CONFIG}: 'chat_template' is a list, and {str(entry)[:60]} in it is no object with a "
                    "name and a template"
                )
            templates[entry["name"]] = entry["template"]
    if (folder / JINJA_FILE).is_file():
        templates["default"] = _text_of(folder / JINJA_FILE)
    for path in sorted((folder / MORE_TEMPLATES).glob("*.jinja")):
        templates[path.stem] = _text_of(path)
    return templates


def _from_jinja(path: Path, name: str = "") -> JinjaSource:
    if not path.is_file():
        raise ConfigError(f"no template file {path}")
    text = _text_of(path)
    header = HEADER.match(text)
    about = dict(re.findall(r"^\s*([a-z]+):\s*(.+?)\s*$", header.group(1), re.MULTILINE)) if header else {}
    if not name and OWN_HEADER not in about:  # a comment that somebody wrote for people
        about = {}
    beside = path.parent
    said = {f"{key}_token": about[key] for key in ("bos", "eos") if key in about}
    return JinjaSource(
        name=name or path.name,
        text=text,
        path=str(path),
        origin=about.get("origin", str(path)),
        licence=about.get("licence", ""),
        control_tokens=tuple(about.get("tokens", "").split()),
        stop_tokens=tuple(about.get("stops", "").split()),
        document_end=about.get("end"),
        default_policy=about.get("policy", "assistant"),
        named_tokens=said if name else {**named_tokens_of(_json(beside / CONFIG)), **said},
        stop_ids=() if name else _stop_ids(_json(beside / GENERATION_CONFIG)),
    )


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}") from None


def _json(path: Path) -> dict[str, Any]:
    return read_object(path, ConfigError) if path.is_file() else {}


def _stop_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    ids = config.get("eos_token_id")
    listed = ids if isinstance(ids, list) else [ids]
    return tuple(stop_id for stop_id in listed if isinstance(stop_id, int))
