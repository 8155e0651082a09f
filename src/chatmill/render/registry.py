"""Finds templates: bundled ones by name, a model's own by its folder, a user's by the path of a file."""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import json
import os
import re
import sys
import traceback
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from chatmill.core.packages import Addition, additions
from chatmill.errors import ChatmillError, ConfigError, UnknownNameError
from chatmill.render.bound import BoundTemplate
from chatmill.render.jinja.options import Expand, TemplateOptions, Unproved
from chatmill.render.model_template import TOKEN_NAMES, JinjaSource, ModelTemplate
from chatmill.render.template import Template
from chatmill.tokenizer.hub_cache import cached_model, is_hub_name, model_folder, not_cached
from chatmill.tokenizer.load import JSON_FILES
from chatmill.tokenizer.tokenizer import Tokenizer

GROUP = "chatmill.templates"
"""The entry-point group in which a package names its templates."""
USER_MODULE = "chatmill_user_template_"
"""What the modules of users' template files are called, before the name of the file."""
BUNDLED = Path(__file__).parent / "templates"
"""Holds the bundled templates, one file each: Jinja, or a Python module with a class named `TEMPLATE`."""
PYTHON_TEMPLATES = ("token_native", "markers", "harmony")
HEADER = re.compile(r"\A\{#-(.*?)-#\}", re.DOTALL)
"""The comment that a bundled Jinja template begins with: `key: value` lines about its origin."""
OWN_HEADER = "chatmill"
"""The line (`chatmill: template`) by which the comment of a user's own file is known as such a header."""
CONFIG, GENERATION_CONFIG = "tokenizer_config.json", "generation_config.json"
JINJA_FILE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"


TemplateSource = JinjaSource | type[Template]


@cache
def bundled_names() -> tuple[str, ...]:
    """Names of the templates that come with the package."""
    return (*PYTHON_TEMPLATES, *sorted(path.stem for path in BUNDLED.glob("*.jinja")))


def packaged_templates() -> dict[str, Addition]:
    """The templates of installed packages.

    Each entry point is a `Template` class, or the path of a .jinja or .py file or of a model folder.
    """
    return additions(GROUP, "template", bundled_names())


def template_names() -> tuple[str, ...]:
    """Names of all templates: bundled ones, then those of installed packages."""
    return (*bundled_names(), *packaged_templates())


def is_python_file(name: str) -> bool:
    """Whether using the template of this name runs a file; `render.trust` asks before data may do that."""
    return name.endswith(".py")


def find_template(name: str | os.PathLike[str] | TemplateSource) -> TemplateSource:
    """A template: by bundled name, by the path of a .jinja or .py file or of a model folder, by the
    name of a model in the local Hugging Face cache, or itself.

    `folder#name` is one of several templates in a folder.
    """
    if isinstance(name, JinjaSource) or (isinstance(name, type) and issubclass(name, Template)):
        return name
    if not isinstance(name, str | os.PathLike) and getattr(name, "chat_template", None):
        return template_of_object(name)
    text = os.fspath(name) if isinstance(name, str | os.PathLike) else repr(name)[:100]
    if text in PYTHON_TEMPLATES:
        module = importlib.import_module(f"chatmill.render.templates.{text}")
        found: type[Template] = module.TEMPLATE
        return found
    if text in bundled_names():
        return _from_jinja(BUNDLED / f"{text}.jinja", name=text)
    if is_python_file(text):
        return _from_python(Path(text))
    if text.endswith(".jinja"):
        return _from_jinja(Path(text))
    folder, _, wanted = text.partition("#")
    if Path(folder).is_dir():
        return template_of_folder(Path(folder), wanted)
    if (cached := cached_model(folder)) is not None:
        return replace(template_of_folder(cached, wanted), name=text.rpartition("/")[2])
    packaged = packaged_templates()
    if text in packaged:
        return _from_package(packaged[text])
    if is_hub_name(folder):
        raise ConfigError(f"no template {text!r}: there is no such folder, and {not_cached(folder)}")
    raise UnknownNameError(
        "template",
        text,
        [*bundled_names(), *packaged],
        "A template of your own is the folder of a model, or the path of a .jinja or .py file.",
    )


def _from_package(addition: Addition) -> TemplateSource:
    value = addition.load()
    if isinstance(value, JinjaSource) or (isinstance(value, type) and issubclass(value, Template)):
        return value
    if not isinstance(value, str | os.PathLike):
        raise addition.refused(f"is {type(value).__name__}, not a Template class or the path of a file or folder")
    path = Path(value)
    if path.suffix == ".jinja":
        return replace(_from_jinja(path, name=addition.name), path=str(path))
    if path.is_dir() or is_python_file(path.name):
        return find_template(path)
    raise addition.refused(f"is {path}, which is neither a .jinja or .py file nor a model folder")


def bind(
    template: str | os.PathLike[str] | TemplateSource,
    tokenizer: Tokenizer | None,
    given: TemplateOptions | None = None,
) -> BoundTemplate:
    """Look a template up and bind it to a tokenizer."""
    if tokenizer is None:
        raise ConfigError("a template given by name needs a tokenizer: render(conversations, template, tokenizer)")
    found = find_template(template)
    if isinstance(found, JinjaSource):
        return ModelTemplate(found, tokenizer, given)
    options = {} if given is None else dict(given.options)
    known_options = getattr(found, "text_options", ())
    for name, value in options.items():
        if name not in known_options:
            known = f"it has: {', '.join(known_options)}" if known_options else "it has none"
            raise ConfigError(f"the template {found.name!r} has no options: {name} ({known})")
        if not isinstance(value, str):
            raise ConfigError(f"the option {name} of the template {found.name!r} is {value!r}; a text is needed")
    try:
        made = found(tokenizer, **options)
    except Exception as error:
        raise template_mistake(error) or error from None
    made.last_answer_only = given is not None and given.expand is Expand.LAST
    return made


def given_options(
    options: Mapping[str, Any] | None = None,
    today: str | None = None,
    expand: str | None = None,
    unproved: str | None = None,
) -> TemplateOptions:
    """Options of a template from words, as a command line has them."""
    try:
        day = None if today is None else datetime.date.fromisoformat(today)
    except ValueError:
        raise ConfigError(f"a date is YYYY-MM-DD, not {today!r}") from None
    for what, value, known in (("expand", expand, Expand), ("unproved", unproved, Unproved)):
        if value is not None and value not in list(known):
            raise UnknownNameError(what, value, [str(one) for one in known])
    return TemplateOptions(
        options=options or {},
        today=day,
        expand=Expand(expand or Expand.TURNS),
        unproved=Unproved(unproved or Unproved.REFUSE),
    )


def has_template(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a chat template."""
    path = model_folder(folder)
    return path.is_dir() and bool(_templates_in(path))


def own_template(tokenizer: str | os.PathLike[str]) -> str | None:
    """The folder whose chat template belongs to a tokenizer: the one that is given, or that of the given file."""
    path = Path(tokenizer)
    folder = path.parent if path.is_file() else path
    return str(folder) if has_template(folder) else None


def files_read(name: str | os.PathLike[str]) -> list[Path]:
    """Which files a tokenizer or a template of this name is read from: of a folder, or a file and those beside it."""
    path = model_folder(os.fspath(name).partition("#")[0])
    folder = path.parent if path.is_file() else path
    beside = [folder / file for file in (*JSON_FILES, CONFIG, GENERATION_CONFIG, JINJA_FILE)]
    more = sorted((folder / MORE_TEMPLATES).glob("*.jinja"))
    return [file for file in dict.fromkeys((path, *beside, *more)) if file.is_file()]


def template_of_folder(folder: Path, wanted: str = "") -> JinjaSource:
    """The chat template of a model or tokenizer folder."""
    found = _templates_in(folder)
    if not found:
        raise ConfigError(
            f"{folder} holds no chat template: neither {JINJA_FILE} nor a 'chat_template' in {CONFIG}. Name one with "
            "--template"
        )
    name = wanted or ("default" if "default" in found or len(found) > 1 else next(iter(found)))
    if name not in found:
        raise UnknownNameError(f"template in {folder}", name, list(found), f"Name one as {folder}#name.")
    return JinjaSource(
        name=folder.resolve().name + (f"#{wanted}" if wanted else ""),
        text=found[name],
        path=str(folder),
        origin=str(folder),
        named_tokens=_named_tokens(_json(folder / CONFIG)),
        stop_ids=_stop_ids(_json(folder / GENERATION_CONFIG)),
    )


def template_of_object(tokenizer: Any) -> JinjaSource:
    """The chat template of a loaded transformers tokenizer."""
    given = tokenizer.chat_template
    text = given.get("default") if isinstance(given, dict) else given
    if not isinstance(text, str):
        raise ConfigError(f"the tokenizer has several chat templates and none is the default: {', '.join(given)}")
    named = {key: value for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    name = Path(getattr(tokenizer, "name_or_path", "") or "tokenizer").name
    return JinjaSource(name=name, text=text, path="", origin="a loaded tokenizer", named_tokens=named)


def _templates_in(folder: Path) -> dict[str, str]:
    """The templates of a folder by name; a file goes before an entry of the config."""
    found: dict[str, str] = {}
    given = _json(folder / CONFIG).get("chat_template")
    if isinstance(given, str):
        found["default"] = given
    elif isinstance(given, list):
        for one in given:
            if not isinstance(one, dict) or not {"name", "template"} <= one.keys():
                raise ConfigError(
                    f"{folder / CONFIG}: 'chat_template' is a list, and {str(one)[:60]} in it is no object with a name "
                    "and a template"
                )
            found[str(one["name"])] = str(one["template"])
    if (folder / JINJA_FILE).is_file():
        found["default"] = _text_of(folder / JINJA_FILE)
    for path in sorted((folder / MORE_TEMPLATES).glob("*.jinja")):
        found[path.stem] = _text_of(path)
    return found


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
        default_policy=about.get("policy", "assistant"),
        named_tokens=said if name else {**_named_tokens(_json(beside / CONFIG)), **said},
        stop_ids=() if name else _stop_ids(_json(beside / GENERATION_CONFIG)),
    )


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}") from None


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    return found if isinstance(found, dict) else {}


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    named = {}
    for key in TOKEN_NAMES:
        token = config.get(key)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            named[key] = content
    return named


def _stop_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    given = config.get("eos_token_id")
    listed = given if isinstance(given, list) else [given]
    return tuple(one for one in listed if isinstance(one, int))


def template_mistake(error: Exception) -> ConfigError | None:
    """The error about a user's own template that ended with an exception of Python; None where it was not the template.

    The innermost line of the file is named: what it calls may be anything.
    """
    found = [
        (frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__", "")).startswith(USER_MODULE)
    ]
    if not found or isinstance(error, ChatmillError):
        return None
    file, line, function = found[-1]
    place = "" if function == "<module>" else f", in {function}"
    return ConfigError(
        f"template file {file}, line {line}{place}: {type(error).__name__}: {error}. Correct the template there; to "
        "refuse a conversation it raises chatmill.RecordError"
    )


def _from_python(path: Path) -> type[Template]:
    if not path.is_file():
        raise ConfigError(f"no template file {path}")
    name = f"{USER_MODULE}{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        # Not by the loader: it would run a compiled file beside this one, and the text is what was hashed and trusted.
        exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), vars(module))
    except ChatmillError:
        raise
    except SyntaxError as error:
        raise ConfigError(
            f"template file {path} cannot be imported: line {error.lineno}: {error.msg}. Correct it there"
        ) from None
    except Exception as error:
        raise template_mistake(error) or ConfigError(f"template file {path} cannot be imported: {error}") from None
    named = getattr(module, "TEMPLATE", None)
    if isinstance(named, type) and issubclass(named, Template):
        return named
    own = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Template) and value.__module__ == name
    ]
    if len(own) != 1:
        raise ConfigError(
            f"{path} defines {len(own)} Template classes; define one, or set TEMPLATE to the one that is meant"
        )
    return own[0]
