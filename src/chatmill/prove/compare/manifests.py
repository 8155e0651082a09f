"""What two manifests say differently, and the tokenizer that a manifest names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from chatmill.errors import ChatmillError
from chatmill.render.trust import added_control_tokens
from chatmill.tokenizer.load import load_tokenizer, with_control_tokens
from chatmill.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestDifference:
    """One thing that the manifests say differently; None where one of them does not say it."""

    what: str
    a: Any
    b: Any


def decoder_of(about: Mapping[str, Any]) -> tuple[Tokenizer | None, str]:
    """The tokenizer that a manifest names, when it loads and is still the same; else None and the reason."""
    if "tokenizer" not in about:
        return None, "there is no manifest that names the tokenizer"
    recipe, name = about["recipe"], about["tokenizer"]["given_as"]
    try:
        tokenizer = load_tokenizer(name, pattern=recipe["pattern"])
        added = added_control_tokens(about)
        tokenizer = with_control_tokens(tokenizer, added) if added else tokenizer
    except (ChatmillError, OSError) as error:
        return None, f"the tokenizer {name!r} does not load: {error}"
    if tokenizer.fingerprint != about["tokenizer"]["fingerprint"]:
        return None, (
            f"the tokenizer {name!r} is not the one of the build any more (fingerprint {tokenizer.fingerprint[:12]}, "
            f"the manifest says {about['tokenizer']['fingerprint'][:12]})"
        )
    return tokenizer, ""


def manifest_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[ManifestDifference]:
    """Everything that decides the bytes of a dataset and is not the same in two manifests; none without manifests."""
    if not a or not b:
        return
    said_a, said_b = _said(a), _said(b)
    for what in dict.fromkeys([*said_a, *said_b]):
        if said_a.get(what) != said_b.get(what):
            yield ManifestDifference(what=what, a=said_a.get(what), b=said_b.get(what))


def _said(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest's statements, flat: tokenizer, template, policy, input files, and every option of the recipe."""
    said: dict[str, Any] = {name: manifest.get(name) for name in ("package_version", "git_sha")}
    for name in ("tokenizer", "template", "policy"):
        said[name] = f"{manifest[name]['name']} ({manifest[name]['fingerprint'][:12]})"
    for file in manifest["inputs"]:
        said[f"input {file['path']}"] = f"sha256 {file['sha256'][:12]}, {file['bytes']:,} bytes"
    said.update(_flat(manifest["recipe"], "recipe"))
    return said


def _flat(value: Any, name: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return {key: item for part, inner in value.items() for key, item in _flat(inner, f"{name}.{part}").items()}
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return {key: item for i, inner in enumerate(value) for key, item in _flat(inner, f"{name}[{i}]").items()}
    return {name: value}
