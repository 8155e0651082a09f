"""Megatron Core is imported once, when the first test of this folder runs; its own warnings are not ours."""

from __future__ import annotations

import warnings

import pytest


@pytest.fixture(scope="session", autouse=True)
def _megatron_core() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron.core.datasets.blended_megatron_dataset_builder
        import megatron.core.datasets.gpt_dataset  # noqa: F401
