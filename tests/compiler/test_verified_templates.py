"""`verify --deep` over real conversations with model templates: a small version of docs/template-verification.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from chatmill.compiler.recipe import recipe_of
from chatmill.compiler.run import run_build
from chatmill.prove.verify import verify
from tests.conftest import CONVERSATION_FILES
from tests.data.tokenizer_files import unpacked

OWN = ("qwen3", "mistral_nemo", "deepseek_v3")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OWN, "qwen2_5", "qwen3_2507", "chatml", "llama3"])
def test_every_answer_of_a_model_template_is_proved(name: str, tmp_path: Path) -> None:
    folder = unpacked(name if name in OWN else "qwen3")
    recipe = recipe_of(
        {
            "sources": [{"path": str(path), "max_records": 5} for path in CONVERSATION_FILES],
            "tokenizer": str(folder),
            "template": str(folder) if name in OWN else name,
            "add_control_tokens": name not in OWN,
            "on_error": "quarantine",
            "gates": {"records_without_trained_tokens": None},
        }
    )
    run_build(recipe, tmp_path / "built", workers=1)
    found = verify(tmp_path / "built", deep=True)
    assert found.differences == 0, found.findings
    assert found.counts["answers_proved"] > 50
