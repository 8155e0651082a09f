"""The package's face: public names are importable, are what their page says, and need only what they use."""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, is_typeddict

import pytest

import chatmill
from chatmill._facade import PUBLIC
from chatmill.errors import EXTRAS, missing_extra
from tests.chats import chat_record
from tests.pages import DOCS, ROOT


def test_public_names_are_listed_and_none_is_a_room_of_the_house() -> None:
    """`chatmill.render` is a package: a function of that name would be hidden by importing it."""
    assert dir(chatmill) == sorted(chatmill.__all__)
    assert {"__version__", *PUBLIC} == set(chatmill.__all__)
    assert f'version = "{chatmill.__version__}"' in (ROOT / "pyproject.toml").read_text()
    with pytest.raises(AttributeError, match="no_such_name"):
        chatmill.no_such_name  # noqa: B018
    rooms = {path.name.removesuffix(".py") for path in Path(chatmill.__file__).parent.iterdir()}
    assert not rooms & set(PUBLIC)


# --- the page of Python names --------------------------------------------------------------------------------------

PAGE = (DOCS / "api.md").read_text(encoding="utf-8")
PARTS = re.split(r"^### (.+)\n", PAGE, flags=re.M)
ENTRIES = {name: re.split(r"^## ", text, flags=re.M)[0] for name, text in zip(PARTS[1::2], PARTS[2::2], strict=True)}


def test_the_page_has_every_public_name_once_and_further_names_where_they_are() -> None:
    assert sorted(PARTS[1::2]) == sorted(set(chatmill.__all__) - {"__version__"})
    found = re.findall(r"`(chatmill\.[\w.]+)\.(\w+)`", PAGE.partition("## Further names")[2])
    assert len(found) > 20
    for module, name in found:
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


def written(signature: str) -> dict[str, inspect.Parameter]:
    made: dict[str, Any] = {}
    exec(f"def written{signature}: ...", made)
    return dict(inspect.signature(made["written"]).parameters)


def parameters(value: Any) -> dict[str, inspect.Parameter]:
    if is_typeddict(value):
        return written(f"({', '.join(key for key in value.__annotations__ if key in value.__required_keys__)})")
    if inspect.isclass(value) and issubclass(value, enum.Enum):
        return written("(value)")
    return dict(inspect.signature(value).parameters)


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_every_name_has_its_signature_some_words_and_an_example(name: str) -> None:
    head, words, *_ = (part.strip() for part in ENTRIES[name].strip().split("\n\n"))
    assert re.fullmatch(rf"`{name}( = |\().*`", head)
    assert words.endswith((".", ")"))
    examples = re.findall(r"^```python\n(.*?)^```", ENTRIES[name], re.M | re.S)
    assert any(f"chatmill.{name}" in example for example in examples)
    head, value = head.strip("`"), getattr(chatmill, name)
    if " = " in head.partition("(")[0]:
        assert head == f"{name} = {value!r}".replace("'", '"')
    elif name != "ChatmillError":
        shown, real = written(head.removeprefix(name).replace(", ...)", ")")), parameters(value)
        assert [key for key in real if key in shown] == list(shown)
        for key, parameter in shown.items():
            assert (real[key].kind, real[key].default) == (parameter.kind, parameter.default)
        assert ", ...)" in head or set(real) == set(shown)


# --- what the specifications fix -----------------------------------------------------------------------------------

PARAMETERS = {
    "serialize_chat_to_ids": "ex, *, tokenizer, default_system_text",
    "sft_loss_mask_for_ids": "ids, *, sys_id, usr_id, asst_id, eot_id",
    "pack_sft_ids_and_mask": "ids, mask, *, S, sys_id, usr_id, asst_id, eot_id, pad_id",
    "collate_sft_batch": "packed, *, T, device, ignore_index=-100",
    "post_training_loss_mask": "ids, *, system_id, user_id, assistant_id, end_id, eos_id",
    "pack_post_training_stream": (
        "records, *, block_size, system_id, user_id, assistant_id, end_id, eos_id, drop_last=False"
    ),
    "post_training_targets": "input_ids, loss_mask, ignore_index=-100",
    "conversation_to_transcript": "conversation, *, tokenizer, context_length",
    "block_tokenize_fn": (
        "features, tokenizer, feature, max_length=512, overflow=True, packed=False, packing_strategy='greedy', "
        "shuffle_output=False, seed=42, stride=0, min_len=1, max_len=None, add_bos=True, add_eos=True, truncate_at=None"
    ),
    "DataCollatorForCausalLM": (
        "tokenizer, truncation=False, ignore_index=-100, input_name='input_ids', labels_name='labels', "
        "packed_sequences=None, mask_document_starts=True, return_flattened=False, return_cu_seqlens=False, "
        "cu_seqlens_size=None, return_seq_idx=False, return_document_mask=False, **pad_kwargs"
    ),
    "get_pos_ids_for_packed_sequence": "x, token_id=None, document_starts=None, eos=True",
    "load_training_config": "path",
    "make_loader": "config, dataset_dir, tokenizer=None",
    "GPTDataLoader": "config, tokenizer=None, dataset_dir=None, use_loss_mask=False, *, rank=None, world_size=None",
    "GPTEpisodeDataLoader": (
        "config, tokenizer=None, dataset_dir=None, *, use_loss_mask=None, batch_sampling_mode=None, "
        "epoch_shuffle=None, epoch_drop_last=None, epoch_seed=None, pad_token_id=None, episode_min_tokens=None, "
        "device=None, pack=False, rank=None, world_size=None"
    ),
    "EpisodeWriter": "dir, split, shard_tokens=None",
}
"""Parameters of the functions and classes that the specifications fix; further optional ones may be there."""


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_parameters_are_those_of_the_specification(name: str) -> None:
    wanted, given = written(f"({PARAMETERS[name]})"), parameters(getattr(chatmill, name))
    in_order = [p.name for p in given.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    first = [p.name for p in wanted.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert in_order[: len(first)] == first
    for parameter in wanted.values():
        own = given[parameter.name]
        assert own.kind is parameter.kind
        assert own.default == parameter.default or parameter.default is parameter.empty
    assert all(given[n].default is not inspect.Parameter.empty for n in given.keys() - wanted.keys() if n != "options")


def test_the_other_names_of_the_specifications_are_public() -> None:
    others = {"DEFAULT_SYSTEM_TEXT", "ChatMsg", "ChatExample", "PackedStream", "EpisodeDataset", "check_isolation"}
    assert others | set(PARAMETERS) <= set(PUBLIC)
    assert chatmill.IGNORE_INDEX == -100


# --- what is not installed -----------------------------------------------------------------------------------------


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "megatron", "ray", "datasets", "numpy", "gigatoken", "pyarrow", "pydantic")
    code = f"import chatmill, sys; print([m for m in {heavy!r} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


BLOCKED = r"""
import contextlib, importlib, io, json, sys
from importlib.abc import MetaPathFinder

class Blocker(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in EXTRAS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

from chatmill.errors import EXTRAS, MissingExtraError
sys.meta_path.insert(0, Blocker())
import chatmill
from chatmill._facade import PUBLIC
from chatmill.cli import main

for name, module in PUBLIC.items():
    if not module.startswith(("load.", "train.", "megatron")) and name != "AuditCallback":
        getattr(chatmill, name)

found = {}
for name, use in {
    "fit": lambda: importlib.import_module("chatmill.train.trainer").fit,
    "collator": lambda: chatmill.DataCollatorForCausalLM,
    "kd": lambda: chatmill.SynthKDDataset,
    "loader": lambda: chatmill.GPTEpisodeDataLoader({"batch_size": 1, "block_size": 4, "pad_token_id": 0}, None, "set"),
    "datasets": lambda: chatmill.to_hf_dataset("set"),
}.items():
    try:
        use()
    except MissingExtraError as error:
        found[name] = str(error)
for line in ("train r.yaml", "inspect chats.jsonl -T harmony", "build chats.jsonl -o out -m o200k -T harmony -w 0",
             "pack texts.jsonl -t bytes -o rows.parquet"):
    said, sys.argv = io.StringIO(), ["chatmill", *line.split()]
    with contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as end:
            found[sys.argv[1]] = end.code, said.getvalue()
print(json.dumps(found))
"""


def test_every_missing_extra_has_its_pip_line(tmp_path: Path) -> None:
    """What needs none is there without."""
    from tests.load.sets import items, write_set

    write_set(tmp_path / "set", items(3))
    (tmp_path / "chats.jsonl").write_text(json.dumps(chat_record(("user", "a"), ("assistant", "b"))) + "\n")
    (tmp_path / "r.yaml").write_text("out: run\ndataset_dir: set\n")
    (tmp_path / "texts.jsonl").write_text('{"text": "some words"}\n')
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("pack") == [0, ""], "it needs none of them"
    for name in ("train", "inspect", "build"):
        status, said = found.pop(name)
        assert (status, said.count("pip install 'chatmill[")) == (2, 1), said
        assert not re.search("Traceback|Bug", said), said
    assert sorted(found) == ["collator", "datasets", "fit", "kd", "loader"]
    assert all("pip install 'chatmill[" in said for said in found.values())


def test_only_optional_packages_are_extras() -> None:
    assert missing_extra(ModuleNotFoundError("x", name="torch.nn"), "training") is not None
    assert missing_extra(ModuleNotFoundError("x", name="json")) is None
    assert missing_extra(ValueError("torch")) is None
    assert set(EXTRAS.values()) == {"train", "torch", "harmony", "megatron", "ray", "hf", "images"}
