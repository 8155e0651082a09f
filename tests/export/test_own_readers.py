"""Exports to trainers, read by the trainers' own classes: the same tokens and targets as in the dataset.

`make test-trainers` installs each trainer into a folder of its own, `.trainers/NAME`, from the pins in
`own_readers/NAME.txt`, and runs these tests. Each reader is a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from chatmill.export.export import export_dataset
from tests.export.sets import CAPACITY, built, documents_of

ROOT = Path(__file__).parents[2]
READERS = Path(__file__).parent / "own_readers"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "axolotl": ("train", {}),
    "llamafactory": ("", {"max_length": CAPACITY}),
    "llamafactory unpacked": ("", {}),
    "megatron-bridge": ("train", {"max_length": CAPACITY}),
    "olmo-core": ("train", {"eod_id": 0}),
    "skyrl": ("train", {}),
    "levanter": ("train", {"max_length": CAPACITY, "packing_strategy": "alone"}),
    "torchtitan": ("train", {"max_length": CAPACITY}),
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("built") / "episodes")


@pytest.mark.trainers
@pytest.mark.parametrize("case", CASES)
def test_the_trainer_itself_reads_the_dataset(dataset: Path, tmp_path: Path, case: str) -> None:
    folder, options = CASES[case]
    name = case.split()[0]
    package = ROOT / ".trainers" / name
    assert package.is_dir(), f"{package} is missing: run `make test-trainers`"
    export_dataset(dataset, name, tmp_path / "out", **options)
    environment = {
        **os.environ,
        "PYTHONPATH": str(package),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "home"),
        "JAX_PLATFORMS": "cpu",
        "AXOLOTL_DO_NOT_TRACK": "1",
    }
    module = f"tests.export.own_readers.{name.replace('-', '_')}"
    command = [sys.executable, "-W", "ignore", "-m", module, str(tmp_path / "out" / folder), str(tmp_path / "found")]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [(tuple(ids), tuple(places)) for ids, places in json.loads((tmp_path / "found").read_text())]
    wanted = documents_of(dataset)
    assert len(wanted) > 20
    assert Counter(found) == Counter(wanted)


def test_every_trainer_has_pins_and_a_reader() -> None:
    names = {case.split()[0] for case in CASES}
    for name in names:
        pins = (READERS / f"{name}.txt").read_text().split()
        assert all("==" in pin for pin in pins)
        assert (READERS / f"{name.replace('-', '_')}.py").is_file()
    listed = (ROOT / "Makefile").read_text().split("TRAINERS := ")[1].splitlines()[0].split()
    assert set(listed) == names
