"""Fixtures of the distillation build: a quick folder, the renderers, and the whole build of the real rows."""

from __future__ import annotations

import pytest

from chatmill.compiler.chunk_job import pipeline_of, recipe_json
from chatmill.compiler.pipeline import Pipeline
from chatmill.distill.input_shards import read_input
from chatmill.distill.manifest import KDConfig
from chatmill.distill.run import kd_recipe
from chatmill.systems.synth_kd import OfficialRows, vocabulary_file
from tests.compiler.conftest import fast, fast_module

__all__ = ["fast", "fast_module"]


@pytest.fixture(scope="session")
def pipeline() -> Pipeline:
    """What builds render rows with."""
    from tests.distill.inputs import REAL

    return pipeline_of(recipe_json(kd_recipe(KDConfig(), read_input(REAL))))


@pytest.fixture(scope="session")
def official() -> OfficialRows:
    """The reference: rows rendered by openai-harmony."""
    return OfficialRows(vocabulary_file()[0])
