"""Whatever decides bytes is in a fingerprint: every field of every value, but those that are left out with a reason."""

from __future__ import annotations

import ast
import datetime
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, make_dataclass, replace
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest

import chatmill
from chatmill.compiler import manifest
from chatmill.compiler.chunk_job import ChunkPiece
from chatmill.compiler.inputs import InputFile
from chatmill.compiler.manifest import build_fingerprint, chunk_fingerprints
from chatmill.compiler.recipe import Recipe, Source, recipe_of
from chatmill.compiler.run import run_build
from chatmill.core.hashed_fields import hashed_fields
from chatmill.core.kinds import Part, RoleCode
from chatmill.errors import ConfigError
from chatmill.images.families.qwen import QwenRule
from chatmill.images.find_rule import RULES
from chatmill.images.rule import PictureRule
from chatmill.label.errors import ErrorRule
from chatmill.label.policy import NOT_HASHED, Policy, Scope
from chatmill.label.presets import PRESETS, _PolicyFile
from chatmill.read.agents.branches import UnknownPrompt
from chatmill.read.picks import Pick
from chatmill.read.ranges import Chunk, ChunkKind
from chatmill.render import model_template
from chatmill.render.jinja.options import TemplateOptions
from chatmill.render.model_template import JinjaSource, ModelTemplate
from chatmill.tokenizer.byte_level import byte_tokenizer
from tests.compiler.builds import CHATML, chats, plain_recipe, write_jsonl

FILES = Path(chatmill.__file__).parent


class Pair(NamedTuple):
    one: int
    two: Any = None


@dataclass(frozen=True)
class Plain:
    one: int
    two: Any = None


class Strict(msgspec.Struct):
    one: int
    two: Any = None


@pytest.mark.parametrize("kind", [Pair, Plain, Strict])
def test_all_fields_are_hashed_but_those_that_are_left_out(kind: Any) -> None:
    value = kind(1, {"a": [Scope.LAST_TURN, kind(2, Path("b")), datetime.date(2026, 1, 2), True]})
    inner = {"a": ["last_turn", {"one": 2, "two": "b"}, "2026-01-02", True]}
    assert hashed_fields(value, {}) == {"one": 1, "two": inner}
    assert hashed_fields(value, {"two": "why"}) == {"one": 1}
    with pytest.raises(ValueError, match="has no field 'three' that could be left out"):
        hashed_fields(value, {"three": "why"})


@pytest.mark.parametrize("value", [object(), b"bytes", {1: "a"}, {"a", "b"}, print])
def test_what_has_no_plain_form_is_not_hashed_as_python_prints_it(value: object) -> None:
    with pytest.raises(TypeError, match="cannot be hashed: it has no plain form"):
        hashed_fields(Plain(1, value), {})


POLICY: dict[str, Any] = {
    "weights": {(RoleCode.ASSISTANT, Part.CONTENT): 0.5},
    "scope": Scope.LAST_TURN,
    "only_weighted_messages": True,
    "errors": ErrorRule(fields={"is_error": 1}),
}


def test_every_field_of_a_policy_but_its_name_is_in_its_fingerprint() -> None:
    policy = PRESETS["no_errors"]
    assert {field.name for field in fields(Policy)} == {*POLICY, "name"}
    prints = {policy.fingerprint, *(replace(policy, **{name: value}).fingerprint for name, value in POLICY.items())}
    assert len(prints) == 1 + len(POLICY)
    assert replace(policy, name="another").fingerprint == policy.fingerprint
    rules = [ErrorRule(fields={"is_error": True}), ErrorRule(fields={"is_error": True}, begins=("E",))]
    assert len({replace(policy, errors=rule).fingerprint for rule in (*rules, POLICY["errors"])}) == 3
    assert all(NOT_HASHED.values())


def test_a_field_that_a_policy_gets_later_is_in_its_fingerprint() -> None:
    later = make_dataclass("Later", [("more", int, 0)], bases=(Policy,), frozen=True, kw_only=True)
    policy = PRESETS["assistant"]
    given = {field.name: getattr(policy, field.name) for field in fields(Policy)}
    assert later(**given, more=1).fingerprint != later(**given, more=2).fingerprint


def test_policies_with_the_same_table_have_the_same_fingerprint() -> None:
    policy = PRESETS["final_only"]
    backwards = dict(reversed(policy.weights.items()))
    without = {**backwards, (RoleCode.USER, Part.CONTENT): 0.0}
    nearly = {key: weight + 1e-12 for key, weight in backwards.items()}
    assert {replace(policy, weights=weights).fingerprint for weights in (backwards, without, nearly)} == {
        policy.fingerprint
    }


def test_fingerprints_are_those_that_datasets_hold() -> None:
    """A class or a module that is renamed changes none of them."""
    assert PRESETS["assistant"].fingerprint[:16] == "256002a207672640"
    assert PRESETS["no_errors"].fingerprint[:16] == "06e2e758945c845d"
    assert byte_tokenizer().fingerprint[:16] == "3f3ed79be2bb3f81"


KEYS_OF_POLICY_FILES: dict[str, Any] = {
    "weights": {"assistant.content": 0.5},
    "scope": "last_turn",
    "only_weighted_messages": True,
    "errors": {"fields": {"is_error": True}},
}


@pytest.mark.parametrize("key", KEYS_OF_POLICY_FILES)
def test_a_build_under_another_policy_is_another_build(fast: Path, key: str) -> None:
    """Where it was taken for the same, a resumed build would have the masks of both."""
    assert {*KEYS_OF_POLICY_FILES, "name"} == set(_PolicyFile.__struct_fields__)
    path, policy = write_jsonl(fast / "chats.jsonl", chats(3)), fast / "policy.json"
    policy.write_text(json.dumps({"weights": {"assistant.content": 1.0}}))
    recipe = plain_recipe(path, policy=str(policy))
    run_build(recipe, fast / "out", workers=0)
    policy.write_text(json.dumps({"weights": {"assistant.content": 1.0}, key: KEYS_OF_POLICY_FILES[key]}))
    with pytest.raises(ConfigError, match="holds another dataset"):
        run_build(recipe, fast / "out", workers=0, resume=True)


def subclasses(kind: type[PictureRule]) -> Iterator[type[PictureRule]]:
    for below in kind.__subclasses__():
        yield below
        yield from subclasses(below)


def test_rules_of_pictures_are_told_apart_by_every_number_and_by_their_family() -> None:
    given = {"patch": 14, "merge": 2, "least_pixels": 4, "most_pixels": 9}
    rule = QwenRule(**given)
    changed: list[PictureRule] = []
    for field in fields(QwenRule):
        value = getattr(rule, field.name)
        other = value + 1 if isinstance(value, int) else (*value, "x") if isinstance(value, tuple) else f"{value}x"
        changed.append(replace(rule, **{field.name: other}))
    assert len({one.fingerprint for one in (rule, *changed)}) == 1 + len(changed)
    renamed: Any = type("Renamed", (QwenRule,), {})
    assert renamed(**given).fingerprint == rule.fingerprint
    for target in RULES.values():
        import_module(f"chatmill.images.families.{target.partition('.')[0]}")
    known = {f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}": kind for kind in subclasses(PictureRule)}
    families = [kind.family for name, kind in known.items() if name in RULES.values()]
    assert len(set(families)) == len(families) > 1


def other(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, Enum):
        return next(member for member in type(value) if member is not value)
    return not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else f"{value}x"


OPTIONS: dict[str, Any] = {"options": {"x": 1}, "today": datetime.date(2026, 1, 2)}
"""Values of options that `other` makes none for."""
SOURCES: dict[str, Any] = {
    "text": "{% for m in messages %}{{ x }}{{ m.content }}<|im_end|>.{% endfor %}",
    "stop_tokens": ("<|im_start|>",),
    "named_tokens": {"bos_token": "<|im_start|>"},
    "stop_ids": (256,),
}


def bound(**source: Any) -> ModelTemplate:
    text = "{% for m in messages %}{{ x }}{{ m.content }}<|im_end|>{% endfor %}"
    whole = replace(JinjaSource(name="t", text=text, path="", stop_tokens=("<|im_end|>",)), **source)
    return ModelTemplate(whole, byte_tokenizer(("<|im_start|>", "<|im_end|>")))


def test_every_option_of_a_template_is_in_its_fingerprint_or_left_out_with_a_reason() -> None:
    left_out = {name for name, why in model_template.NOT_HASHED.items() if why != model_template._IN_WORDS}
    template = bound()
    usual, plain = template.given, template.fingerprint
    for field in fields(TemplateOptions):
        value = OPTIONS.get(field.name) or other(getattr(usual, field.name))
        template.given = replace(usual, **{field.name: value})
        assert (template.fingerprint == plain) == (field.name in left_out), field.name
    assert left_out == {"trust", "only_drift", "pictures"}, "keys of the recipe, but the rule of pictures"
    assert {"trust", "drift", "images", "store_images"} <= set(Recipe.__struct_fields__)


def test_an_option_that_a_template_gets_later_is_in_its_fingerprint() -> None:
    later = make_dataclass("Later", [("more", int, 0)], bases=(TemplateOptions,), frozen=True, kw_only=True)
    template = bound()
    template.given = later(more=1)
    one = template.fingerprint
    template.given = later(more=2)
    assert one != template.fingerprint


NOT_OF_SOURCE = {
    "name": "what it is called writes nothing",
    "path": "where it lies writes nothing",
    "origin": "said of it",
    "licence": "said of it",
    "control_tokens": "the vocabulary has them",
    "document_end": "the text says so, at its top",
    "default_policy": "the policy has a fingerprint of its own",
}


def test_what_a_template_is_made_of_is_in_its_fingerprint_or_left_out_with_a_reason() -> None:
    assert {field.name for field in fields(JinjaSource)} == {*SOURCES, *NOT_OF_SOURCE}
    plain = bound().fingerprint
    for name, value in SOURCES.items():
        assert bound(**{name: value}).fingerprint != plain, name


RANGE = Chunk(
    path="a", source="a", shape="openai", kind=ChunkKind.LINES, data="/a", start=0, stop=9, first=1, count=1, bytes=9,
    file_bytes=9, file_mtime_ns=1, digest="0",
)  # fmt: skip
INPUT = InputFile(path="a", source="a", shape="openai", bytes=1, digest="0", lines=1, records=None, mtime_ns=1)
RULES_OF_SOURCE: dict[str, Any] = {
    "path": "b",
    "shape": "alpaca",
    "name": "b",
    "weight": 2.0,
    "where": "x > 1",
    "pick": Pick(group="g"),
    "max_records": 3,
    "tools_file": "tools.json",
    "system_file": "system.txt",
    "unknown_prompt": UnknownPrompt.CONTEXT,
}


def chunk_print(**changes: Any) -> str:
    recipe = recipe_of({"sources": [{"path": "a"}], **CHATML})
    piece = ChunkPiece(RANGE, Source(path="a"), None)._replace(**changes)
    (found,) = chunk_fingerprints(recipe, [[piece]], {})
    return found


def test_everything_about_a_chunk_is_in_its_fingerprint_or_left_out_with_a_reason() -> None:
    plain = chunk_print()
    for field in fields(Chunk):
        changed = replace(RANGE, **{field.name: other(getattr(RANGE, field.name))})
        assert (chunk_print(range=changed) == plain) == (field.name in manifest.OF_RANGE), field.name
    assert set(RULES_OF_SOURCE) == set(Source.__struct_fields__)
    for name, value in RULES_OF_SOURCE.items():
        rules = msgspec.structs.replace(Source(path="a"), **{name: value})
        assert (chunk_print(rules=rules) == plain) == (name in manifest.OF_PIECE_SOURCE), name
    assert set(ChunkPiece._fields) == {"range", "rules", "max_records", "skip"}
    assert len({plain, chunk_print(max_records=2), chunk_print(skip=1)}) == 3


def build_print(recipe: Any = None, file: InputFile = INPUT) -> str:
    return build_fingerprint(recipe or recipe_of({"sources": [{"path": "a"}], **CHATML}), [file], {})


def test_everything_about_a_build_is_in_its_fingerprint_or_left_out_with_a_reason() -> None:
    plain, recipe = build_print(), recipe_of({"sources": [{"path": "a"}], **CHATML}).as_json()
    assert set(recipe) == set(Recipe.__struct_fields__)
    for name in set(recipe) - {"sources"}:
        changed = SimpleNamespace(as_json=lambda name=name: recipe | {name: "another"})
        assert (build_print(changed) == plain) == (name in manifest.OF_RECIPE), name
    assert set(manifest.OF_RECIPE) <= set(recipe)
    assert set(manifest.OF_CHUNKS) <= set(recipe)
    for name, value in RULES_OF_SOURCE.items():
        rules = msgspec.to_builtins(msgspec.structs.replace(Source(path="a"), **{name: value}))
        changed = SimpleNamespace(as_json=lambda rules=rules: recipe | {"sources": [rules]})
        assert (build_print(changed) == plain) == (name in manifest.OF_SOURCE), name
    for field in fields(InputFile):
        file = replace(INPUT, **{field.name: other(getattr(INPUT, field.name))})
        assert (build_print(file=file) == plain) == (field.name in manifest.OF_INPUT), field.name


HASHES = {"sha256", "blake2b", "xxh3_128", "xxh3_64", "xxh128", "canonical_json", "update"}


def hashed_as_printed(tree: ast.AST) -> Iterator[int]:
    """Yield the lines in which a hash is given what `repr` makes of something."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        for part in ast.walk(call) if name in HASHES else ():
            is_repr = isinstance(part, ast.Call) and getattr(part.func, "id", "") == "repr"
            if is_repr or (isinstance(part, ast.FormattedValue) and part.conversion == ord("r")):
                yield call.lineno


def test_nothing_is_hashed_as_python_prints_it() -> None:
    assert list(hashed_as_printed(ast.parse("sha256(repr(x).encode())\nd.update(f'{x!r}'.encode())"))) == [1, 2]
    found = {path.name: list(hashed_as_printed(ast.parse(path.read_text()))) for path in FILES.rglob("*.py")}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_a_file_with_tools_that_changes_makes_another_build(tmp_path: Path) -> None:
    """Its name stays the same, and runs of agents without tools get what it holds."""
    tools = tmp_path / "tools.json"
    session = Path(__file__).parents[1] / "data" / "agents" / "claude_code" / "session_0.jsonl"
    source = {"path": str(session), "tools_file": str(tools), "unknown_prompt": "context"}
    gates = {"records_left_out": None, "records_without_trained_tokens": None}
    recipe = {"sources": [source], **CHATML, "template": "qwen3", "on_error": "quarantine", "gates": gates}
    tools.write_text('[{"type": "function", "function": {"name": "look", "parameters": {}}}]')
    run_build(recipe, tmp_path / "out", workers=0)
    tools.write_text('[{"type": "function", "function": {"name": "watch", "parameters": {}}}]')
    with pytest.raises(ConfigError, match="another"):
        run_build(recipe, tmp_path / "out", workers=0)
