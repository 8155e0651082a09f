"""Mutants that count what the tests protect are whole Python, each differing from the source."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tools.mutants import chosen, controls, mutants_of

ROOT = Path(__file__).parents[1]


def test_a_mutant_changes_one_thing_inside_a_function() -> None:
    source = '''
LIMIT = 3

def near(a: int, b: int = 4) -> bool:
    """Say 5."""
    if a < b and "é" in "é":
        print(f"{a + 1}")
        raise ValueError(a + b)
    return a + 1 == b
'''.encode()
    found = {(one.kind, one.line, one.text) for one in mutants_of(source, "a.py", "core")}
    assert found == {
        ("and/or", 6, "(a < b or 'é' in 'é')"),
        ("comparison", 6, "(a <= b)"),
        ("comparison", 6, "('é' not in 'é')"),
        ("dropped statement", 7, "pass"),
        ("dropped statement", 8, "pass"),
        ("comparison", 9, "(a + 1 != b)"),
        ("plus/minus", 9, "(a - 1)"),
        ("off by one", 9, "(2)"),
    }
    for one in mutants_of(source, "a.py", "core"):
        assert ast.dump(ast.parse(one.applied(source))) != ast.dump(ast.parse(source))


def test_mutants_are_chosen_by_the_seed_and_controls_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    once = cache(lambda *given: [*mutants_of(*given)])  # all files are read for each seed
    monkeypatch.setattr("tools.mutants.mutants_of", once)
    mutants = chosen(ROOT, 70, seed=1)
    assert mutants == chosen(ROOT, 70, seed=1) != chosen(ROOT, 70, seed=2)
    for mutant, control in zip(mutants, controls(ROOT, mutants), strict=True):
        source = (ROOT / mutant.path).read_bytes()
        compile(mutant.applied(source), mutant.path, "exec")
        assert control.applied(source) == source
