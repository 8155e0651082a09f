"""Loads a Hugging Face tokenizer.json: text rules to an engine, added tokens to the control map."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from chatmill.core.machine_limits import refuse_out_of_memory
from chatmill.errors import TokenizerError
from chatmill.tokenizer.backends import (
    ENGINE_FAILURES,
    NORMAL_FORMS,
    Engine,
    FastEngineMissing,
    GigatokenBackend,
    HuggingFaceBackend,
    warn_of_fallback,
)
from chatmill.tokenizer.json_file import MAX_IDS, TokenizerJson, is_added_token, spelled_tokens
from chatmill.tokenizer.prefix import Prefix, rule_steps, split_prefix
from chatmill.tokenizer.probe import answers_of, disagreement
from chatmill.tokenizer.tokenizer import Tokenizer

_ID = re.compile("[0-9]{1,9}")


def tokenizer_from_json(
    raw: bytes,
    name: str,
    config: Mapping[str, Any] | None = None,
    engine: Engine = Engine.FAST,
    strict_text: bool = False,
    *,
    for_documents: bool = False,
) -> Tokenizer:
    """Make a tokenizer from the bytes of a tokenizer.json and the decoded tokenizer_config.json, if there is one.

    With `strict_text` no text spells any added token; without it text may spell those that are not special, as it does
    where the model is served. With `for_documents` the engine puts no prefix before text: documents have their own.
    """
    origin = partial(tokenizer_from_json, raw, name, config, engine, strict_text, for_documents=for_documents)
    whole = file = TokenizerJson(raw, name)
    if engine is not Engine.UNCHECKED:
        file.check()
    controls = _control_ids(file.added_tokens, config or {}, name)
    # Added tokens that are not special are part of the vocabulary like any other: text that spells one gets its id.
    ordinary = frozenset(t["content"] for t in file.added_tokens if not (strict_text or t.get("special")))
    rule = split_prefix(file.rules("normalizer"), file.rules("pre_tokenizer"))
    if for_documents and rule is not None:
        prefix, normalizer, pre_tokenizer = rule
        _refuse_inner_prefix(prefix, file, ordinary, name)
        file = TokenizerJson(file.changed(normalizer=normalizer, pre_tokenizer=pre_tokenizer), name)
        if engine is Engine.UNCHECKED:  # a driver's answers are of the whole vocabulary
            engine = Engine.FAST
    hidden = {token_id for token, token_id in controls.items() if token not in ordinary}
    reference, fast = _engines(file, file.stripped(hidden, ordinary), ordinary, name, engine)
    named = named_tokens_of(config or {})
    forms = [step.get("type") for step in rule_steps(file.rules("normalizer"), "normalizers")]
    form = "" if not forms else forms[0] if len(forms) == 1 and forms[0] in NORMAL_FORMS else None
    tokenizer = Tokenizer(
        name=name,
        backend=fast or reference,
        text_tokens=fast.vocabulary() if fast else spelled_tokens(file, {name: controls[name] for name in ordinary}),
        control_ids=controls,
        rules_fingerprint=whole.fingerprint,
        bos_id=controls.get(named.get("bos_token", "")),
        eos_id=controls.get(named.get("eos_token", "")),
        pad_id=controls.get(named.get("pad_token", "")),
        reference=reference,
        normal_form=form,
        unknown_id=file.unknown_id,
        ordinary=ordinary,
        document_backend=HuggingFaceBackend(finished) if (finished := file.whole()) else None,
        named_tokens=named,
        stripping={
            token["content"]: (bool(token.get("lstrip")), bool(token.get("rstrip")))
            for token in file.added_tokens
            if token.get("lstrip") or token.get("rstrip")
        },
        single_words=frozenset(token["content"] for token in file.added_tokens if token.get("single_word")),
        engine_prefixes=rule is not None and not for_documents,
        prefix=rule[0] if rule is not None and for_documents else None,
        origin=origin,
    )
    if engine is Engine.UNCHECKED:
        return tokenizer
    return replace(tokenizer, bytes_add_up=answers_of(tokenizer).bytes_add_up(tokenizer))


def _refuse_inner_prefix(prefix: Prefix, file: TokenizerJson, ordinary: frozenset[str], name: str) -> None:
    """Refuse a prefix after tokens that are found inside of texts: documents know only where texts begin."""
    if prefix.everywhere and ordinary:
        first = next(token["content"] for token in file.added_tokens if token["content"] in ordinary)
        raise TokenizerError(
            f"{name} puts a space in front of text after every added token, and {first!r} is one that text may "
            "spell: documents cannot follow that inside of texts. Set strict_text: true, so that text stays text"
        )


def _engines(
    file: TokenizerJson, stripped: bytes, ordinary: frozenset[str], name: str, engine: Engine
) -> tuple[HuggingFaceBackend, GigatokenBackend | None]:
    """Load the reference engine and, if it is wanted, loads and agrees on the probe, the fast one.

    Args:
        file: The tokenizer.json.
        stripped: The same for a text engine.
        ordinary: The added tokens that text may spell.
        name: What errors call the tokenizer.
        engine: Which engines are wanted.
    """
    if engine is Engine.UNCHECKED:
        return HuggingFaceBackend(stripped), GigatokenBackend.from_json(stripped)
    try:
        reference = HuggingFaceBackend.from_json(stripped, file)
    except Exception as error:  # the library raises bare Exception
        refuse_out_of_memory(error, f"{name} cannot be loaded")
        raise TokenizerError(f"{name} cannot be loaded: {error}") from None
    _refuse_other_ids(file, reference, ordinary, name)
    if engine is Engine.REFERENCE:
        return reference, None
    try:
        fast = GigatokenBackend.from_json(stripped)
        agrees = disagreement(fast, reference) is None
    except FastEngineMissing as missing:
        warn_of_fallback(str(missing))
        return reference, None
    except ENGINE_FAILURES:
        return reference, None
    return reference, fast if agrees else None


def _refuse_other_ids(file: TokenizerJson, reference: HuggingFaceBackend, ordinary: frozenset[str], name: str) -> None:
    """Refuse a file whose ids of added tokens are not those that `tokenizers` counts: engines would differ."""
    for token in file.added_tokens:
        content = token["content"]
        counted = reference.id_of(content) if content in ordinary else token["id"]
        if counted != token["id"]:
            raise TokenizerError(
                f"{name}: {content!r} is id {token['id']} in tokenizer.json, but `tokenizers`, which counts, gives it "
                f"{counted}: write the file again with the library that made it"
            )


def _control_ids(added: list[dict[str, Any]], config: Mapping[str, Any], name: str) -> dict[str, int]:
    """List all added tokens of both files, flagged special or not."""
    controls = {str(token["content"]): int(token["id"]) for token in added}
    decoder = config.get("added_tokens_decoder") or {}
    for token_id, token in decoder.items() if isinstance(decoder, dict) else [("", decoder)]:
        if not (_ID.fullmatch(token_id) and int(token_id) < MAX_IDS and is_added_token(token)):
            raise TokenizerError(
                f"{name}: 'added_tokens_decoder' in tokenizer_config.json has {token_id!r}: {str(token)[:60]}; an id "
                "and an object with the token's content are needed"
            )
        content = token["content"]
        if controls.setdefault(content, int(token_id)) != int(token_id):
            raise TokenizerError(
                f"{name}: {content!r} is id {controls[content]} in tokenizer.json and id {token_id} in "
                "tokenizer_config.json"
            )
    return dict(sorted(controls.items(), key=lambda item: (item[1], item[0])))


def named_tokens_of(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like, as templates ask for them."""
    named = {}
    for key, token in config.items():
        content = token.get("content") if isinstance(token, dict) else token
        if key.endswith("_token") and isinstance(content, str):
            named[key] = content
    return named
