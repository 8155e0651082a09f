"""The gate for Python templates that data names: opening data never runs code from it.

The manifest of a dataset, the state of an unfinished build and the notes of a checkpoint name the template that they
were made with. Where that is a Python file, using it means running it. It is run only when the user names it again.
Built-in templates and those of installed packages pass.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatmill.errors import ChatmillError, ConfigError
from chatmill.render.registry import find_template, is_python_file
from chatmill.tokenizer.load import load_tokenizer, with_control_tokens
from chatmill.tokenizer.tokenizer import Tokenizer


class UntrustedTemplateError(ConfigError):
    """Data names a Python file as its template, and the user has not said that it may be run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateTrust:
    """What the user says about the template of some data; by default nothing, and no code of it is run."""

    template: str | os.PathLike[str] | None = None
    """A name or path to use in place of the one that the data names; a path given here may be run."""
    sha256: str | None = None
    """The sha256 of the Python file that the data names; the file is run when it has this hash."""


NO_TRUST = TemplateTrust()


def allowed_template(named: str, trust: TemplateTrust, owner: str) -> str:
    """The template to use for data of `owner`, which names `named`: safe to be handed to `find_template`.

    Raises `UntrustedTemplateError` where that would run a Python file that the user has not named.
    """
    if trust.template is not None:
        return os.fspath(trust.template)
    if not is_python_file(named):
        return named
    path = Path(named)
    if not path.is_file():
        raise UntrustedTemplateError(
            f"{owner} was made with the template {named}, a Python file that is not here: name it with --template PATH"
        )
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if trust.sha256 is None:
        raise UntrustedTemplateError(
            f"{owner} names the Python file {named} as its template, and opening data never runs code. Read the file; "
            f"to run it, name it with --template {named}, or say --trust-template {found}"
        )
    if trust.sha256.strip().lower() != found:
        raise UntrustedTemplateError(
            f"{owner} names the Python file {named} as its template; its sha256 is {found}, not {trust.sha256}: it is "
            "not the file that you trust, and it was not run"
        )
    return named


def added_control_tokens(about: Mapping[str, Any]) -> tuple[str, ...]:
    """The control tokens that the build of some data added to its tokenizer, without running its template.

    The manifest lists them; one that does not was written by an older version, and a built-in template knows them.
    """
    recipe, tokenizer = about.get("recipe") or {}, about.get("tokenizer") or {}
    if not recipe.get("add_control_tokens"):
        return ()
    if "control_tokens" in tokenizer:
        return tuple(tokenizer["control_tokens"])
    return tuple(find_template(allowed_template(recipe["template"], NO_TRUST, "it")).control_tokens)


def manifest_tokenizer(about: Mapping[str, Any], given: Any = None) -> tuple[Tokenizer | None, str]:
    """The tokenizer of the build that a manifest is about, and why there is none, or why it may be the wrong one.

    `given` (anything `load_tokenizer` takes) wins over the one that is named, and must load. Control tokens that the
    build added are added; no template is run for that.
    """
    named = about["tokenizer"] if isinstance(about.get("tokenizer"), dict) else {}
    if given is None and not named:
        return None, "no manifest names the tokenizer"
    recipe = about.get("recipe") or {}
    name = named.get("given_as") if given is None else given
    try:
        tokenizer = load_tokenizer(name, pattern=recipe.get("pattern") if given is None else None)
        try:
            added = added_control_tokens(about)
        except UntrustedTemplateError:
            return tokenizer, (
                f"the template {recipe['template']!r} of the manifest is a Python file, which opening data never runs: "
                "control tokens that it added are shown as ids"
            )
        tokenizer = with_control_tokens(tokenizer, added) if added else tokenizer
    except (ChatmillError, OSError) as error:
        if given is not None:
            raise
        return None, f"the tokenizer {name!r} of the manifest does not load ({error})"
    expected = named.get("fingerprint")
    if not expected or tokenizer.fingerprint == expected:
        return tokenizer, ""
    return tokenizer, (
        f"the tokenizer {tokenizer.name!r} is not the one of the build (fingerprint {tokenizer.fingerprint[:12]}, the "
        f"manifest says {expected[:12]}): the text may be wrong"
    )
