"""`verify --deep` over real conversations with model templates: a small version of docs/template-verification.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from chatmill.compiler.recipe import recipe_of
from chatmill.compiler.run import run_build
from chatmill.prove.verify import verify
from tests.compiler.builds import OPEN_GATES
from tests.conftest import CONVERSATION_FILES, DATA
from tools.template_verification import DATE, MODELS, Model, model_folder

AT_HAND = {path.name for path in (DATA / "tokenizers").iterdir()}
TWELVE = [
    model if model.vocabulary in AT_HAND else model._replace(vocabulary="qwen3", adds_tokens=True) for model in MODELS
]
"""The models of that page; where a vocabulary is not in this repository, it is Qwen3's with the template's tokens."""


@pytest.mark.slow
@pytest.mark.parametrize("expand", ["turns", "none"])
@pytest.mark.parametrize("model", TWELVE, ids=[model.name for model in TWELVE])
def test_every_answer_of_a_model_template_is_proved(model: Model, expand: str, tmp_path: Path) -> None:
    folder = model_folder(model, DATA / "tokenizers", None, tmp_path)
    recipe = recipe_of(
        {
            "sources": [{"path": str(path), "max_records": 5} for path in CONVERSATION_FILES],
            "tokenizer": str(folder),
            "template": str(folder),
            "date": DATE,
            "expand": expand,
            "on_error": "quarantine",
            "gates": OPEN_GATES,
        }
    )
    run_build(recipe, tmp_path / "built", workers=1)
    found = verify(tmp_path / "built", deep=True)
    assert found.differences == 0, found.findings
    changed = found.counts.get("answers_trained_as_changed", 0)
    assert found.counts["answers_proved"] + changed == found.counts["trained_messages"] > 50
    assert expand == "none" or not changed
