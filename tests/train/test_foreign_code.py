"""Model folders that bring Python code of their own: nothing asks to run it, and nothing runs."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.images.model_folders import write_model

CODE = """
import pathlib
pathlib.Path({mark!r}).write_text("it ran")
from transformers import PretrainedConfig, PreTrainedModel
class C(PretrainedConfig): model_type = "foreign"
class M(PreTrainedModel): config_class = C
class P: pass
"""
CLASSES = {
    "AutoConfig": "foreign.C",
    "AutoModelForCausalLM": "foreign.M",
    "AutoModelForImageTextToText": "foreign.M",
    "AutoImageProcessor": "foreign.P",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "an unknown model": {"model_type": "foreign", "auto_map": CLASSES},
    "no model at all": {"auto_map": CLASSES},
    "a model of pictures alone": {"model_type": "vit", "auto_map": CLASSES},
    "code of another repository": {"model_type": "x", "auto_map": {"AutoConfig": "someone/somewhere--foreign.C"}},
    "no map": {"model_type": "foreign", "auto_map": 5},
}
CHILD = """
import json, os, sys
from chatmill.errors import ConfigError
from chatmill.load.pictures import made_grids
from chatmill.images.find_rule import find_rule
from chatmill.train.hf_model import load_hf_model
from pathlib import Path
found = []
def tried(name, run):
    try:
        run()
        found.append([name, "", ""])
    except BaseException as error:
        found.append([name, type(error).__name__, str(error)])
folders, seen, picture, result = sys.argv[1:]
for folder in sorted(Path(folders).iterdir()):
    for number in range(8):
        options = {"random_weights": number & 1, "reference_kernels": number & 2, "pictures": number & 4}
        tried(f"{folder.name} {options}", lambda: load_hf_model(folder, **options))
tried("processor", lambda: made_grids(find_rule(Path(seen)), seen, [Path(picture).read_bytes()]))
Path(result).write_text(json.dumps(found))
"""
"""Opens every folder in every way, and writes down how each ended."""


def on_a_terminal(command: list[str], cwd: Path) -> tuple[int, str]:
    """Run a command on a terminal on which somebody has typed many a `y`; its status and all that it said."""
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_HOME": str(cwd / "hf"), "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=cwd, env=environment) as process:
        os.close(theirs)
        os.write(ours, b"y\n" * 200)
        said = []
        while True:
            try:
                said.append(os.read(ours, 1 << 16))
            except OSError:  # nobody has the terminal any more
                break
        os.close(ours)
    return process.returncode, b"".join(said).decode(errors="replace")


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, list[list[str]]]:
    """How opening each folder ended: the mark that code of a folder leaves, what the terminal shows, and the errors."""
    folder = tmp_path_factory.mktemp("foreign")
    mark = folder / "mark"
    code = CODE.format(mark=str(mark))
    for name, config in CONFIGS.items():
        model = folder / "models" / name
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps(config))
        (model / "foreign.py").write_text(code)
    seen = write_model(folder / "seen", "qwen3_vl")
    processor = json.loads((seen / "preprocessor_config.json").read_text())
    processor |= {"auto_map": CLASSES, "image_processor_type": "Foreign"}
    (seen / "preprocessor_config.json").write_text(json.dumps(processor))
    (seen / "foreign.py").write_text(code)
    picture, result = folder / "picture.png", folder / "result.json"
    picture.write_bytes(_picture())
    command = [sys.executable, "-c", CHILD, *map(str, (folder / "models", seen, picture, result))]
    status, said = on_a_terminal(command, folder)
    assert status == 0, said
    return mark, said, json.loads(result.read_text())


def _picture() -> bytes:
    import io

    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (64, 64)).save(out, "PNG")
    return out.getvalue()


def test_code_of_a_model_folder_never_runs_and_nobody_is_asked(tried: tuple[Path, str, list[list[str]]]) -> None:
    mark, said, found = tried
    assert len(found) == 8 * len(CONFIGS) + 1
    assert not mark.exists(), "code of a folder ran"
    assert "[y/N]" not in said
    assert "wish to run" not in said


def test_a_folder_with_code_of_its_own_is_one_clear_error(tried: tuple[Path, str, list[list[str]]]) -> None:
    _, _, found = tried
    for name, kind, message in found:
        assert kind == "ConfigError", (name, kind, message)
        assert "pass the argument" not in message, "there is no such argument here"
    clear = [name for name, _, message in found if "Chatmill runs no code of a model" in message]
    assert "processor" in clear
    for asked in ("an unknown model", "no model at all", "a model of pictures alone", "code of another repository"):
        assert any(name.startswith(asked) for name in clear), asked
