"""A missing extra is one error with the pip line, in commands and in Python; a template's mistake names its line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from chatmill.errors import EXTRAS, missing_extra

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
from chatmill.cli import main

found = {}
for module, name in (("train.trainer", "fit"), ("", "DataCollatorForCausalLM"), ("", "SynthKDDataset")):
    try:
        getattr(importlib.import_module(f"chatmill.{module}") if module else chatmill, name)
    except MissingExtraError as error:
        found[name] = str(error)
try:
    chatmill.GPTEpisodeDataLoader({"batch_size": 1, "block_size": 4, "pad_token_id": 0}, None, sys.argv[2])
except MissingExtraError as error:
    found["loader"] = str(error)
try:
    chatmill.to_hf_dataset(sys.argv[2])
except MissingExtraError as error:
    found["to_hf_dataset"] = str(error)
for words in (["train", "r.yaml"], ["inspect", sys.argv[1], "-T", "harmony"],
              ["build", sys.argv[1], "-o", "out", "-T", "harmony", "-w", "0"],
              ["pack", "texts.jsonl", "-t", "bytes", "-o", "rows.parquet"]):
    said = io.StringIO()
    old, sys.argv = sys.argv, ["chatmill", *words]
    with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        try:
            main()
        except SystemExit as end:
            found[words[0] + "!"] = end.code
    sys.argv = old
    found[words[0]] = said.getvalue()
print(json.dumps(found))
"""


def test_every_missing_extra_has_its_pip_line(tmp_path: Path) -> None:
    from tests.load.sets import items, write_set

    write_set(tmp_path / "set", items(3))
    chats = tmp_path / "chats.jsonl"
    pair = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chats.write_text(json.dumps({"messages": pair}) + "\n")
    (tmp_path / "r.yaml").write_text("out: run\ndataset_dir: set\n")
    (tmp_path / "texts.jsonl").write_text('{"text": "some words"}\n')
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, str(chats), str(tmp_path / "set")],
        capture_output=True, text=True, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for name in ("fit", "DataCollatorForCausalLM", "SynthKDDataset", "loader", "to_hf_dataset"):
        assert "pip install 'chatmill[" in found[name], name
    assert (found["pack!"], found["pack"]) == (0, ""), "it needs none of them"
    for name in ("train", "inspect", "build"):
        assert found[f"{name}!"] == 2, (name, found[name])
        assert found[name].count("pip install 'chatmill[") == 1, (name, found[name])
        assert "Traceback" not in found[name], name
        assert "Bug" not in found[name], name


def test_only_optional_packages_are_extras() -> None:
    assert missing_extra(ModuleNotFoundError("x", name="torch.nn"), "training") is not None
    assert missing_extra(ModuleNotFoundError("x", name="json")) is None
    assert missing_extra(ValueError("torch")) is None
    assert set(EXTRAS.values()) == {"train", "torch", "harmony", "megatron", "ray", "hf", "images"}
