"""Looks templates up by name, by the path of a user's Python file, or takes the class itself."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path

from chatmill.errors import ConfigError, UnknownNameError
from chatmill.render.template import Template
from chatmill.tokenizer.protocol import Tokenizer

TEMPLATES = ("token_native", "markers", "harmony", "chatml", "qwen3", "qwen3_training", "llama3")
"""Built-in templates; each is a module of `chatmill.render.templates` with a class named by `TEMPLATE`."""


def is_python_file(name: str) -> bool:
    """Whether using the template of this name runs a file; `render.trust` asks before data may do that."""
    return name.endswith(".py")


def find_template(name: str | os.PathLike[str] | type[Template]) -> type[Template]:
    """The class of a template: by built-in name, by the path of a .py file, or the class itself."""
    if isinstance(name, type) and issubclass(name, Template):
        return name
    text = os.fspath(name) if isinstance(name, str | os.PathLike) else repr(name)
    if text in TEMPLATES:
        module = importlib.import_module(f"chatmill.render.templates.{text}")
        found: type[Template] = module.TEMPLATE
        return found
    if is_python_file(text):
        return _from_file(Path(text))
    raise UnknownNameError("template", text, list(TEMPLATES), "A template of your own is the path of a .py file.")


def bind(template: str | os.PathLike[str] | type[Template], tokenizer: Tokenizer | None) -> Template:
    """Look a template up and bind it to a tokenizer."""
    if tokenizer is None:
        raise ConfigError("a template given by name needs a tokenizer: render(conversations, template, tokenizer)")
    return find_template(template)(tokenizer)


def _from_file(path: Path) -> type[Template]:
    if not path.is_file():
        raise ConfigError(f"no template file {path}")
    name = f"chatmill_user_template_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (SyntaxError, ImportError, NameError) as error:
        raise ConfigError(f"template file {path} cannot be imported: {error}") from None
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
