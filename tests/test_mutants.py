"""Mutants that count what the tests protect are whole Python, each differing from the source."""

from __future__ import annotations

import ast

from tools.mutants import mutants_of


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
