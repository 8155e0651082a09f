"""`verify` and `inspect` know a distillation dataset when they see one."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from chatmill.cli import app
from chatmill.distill.run import build_synth_kd
from tests.cli.run import here
from tests.conftest import DATA


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("kd") / "root"
    build_synth_kd(DATA / "synth_harmony", out, workers=0, max_rows=40)
    return out


def test_verify_checks_it_and_derives_it_again(root: Path) -> None:
    sound = here("verify", str(root))
    assert sound.returncode == 0, sound.stderr
    assert "nothing wrong" in sound.stdout
    deep = here("verify", str(root), "--deep")
    assert deep.returncode == 0, deep.stderr
    assert "0 differences" in deep.stdout
    victim = next(root.glob("train/*_lossmask.bin"))
    data = bytearray(victim.read_bytes())
    data[0] ^= 1
    victim.write_bytes(data)
    assert here("verify", str(root)).returncode == 1
    data[0] ^= 1
    victim.write_bytes(data)


def test_items_are_shown_with_the_alignment(root: Path) -> None:
    shown = CliRunner().invoke(app, ["inspect", str(root), "-n", "1"])
    assert shown.exit_code == 0, shown.stderr
    assert "each is predicted at the position before it" in " ".join(shown.stdout.split())
    assert "1 of " in shown.stdout
