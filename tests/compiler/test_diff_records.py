"""How two datasets are compared, against slow references: which records are pairs, and what differs in a pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.tokens import offsets_of
from chatmill.prove.compare.changes import changed_lines
from chatmill.prove.compare.diff import compare_documents
from chatmill.prove.compare.records import Pairs, pair_records
from chatmill.store.split import Documents

Record = dict[str, Any]


# --- pairing ------------------------------------------------------------------------------------------------------


def paired(a: Sequence[Record], b: Sequence[Record]) -> Pairs:
    ids = [[bytes([3, r["id"]]) if r["named"] else b"" for r in side] for side in (a, b)]
    contents = [lambda numbers, side=side: [bytes([side[n]["content"]]) for n in numbers.tolist()] for side in (a, b)]
    return pair_records(ids[0], ids[1], contents[0], contents[1])


def slow_partners(a: Sequence[Record], b: Sequence[Record]) -> list[int]:
    """The same rules, one record at a time."""
    partner, taken = [-1] * len(a), set[int]()

    def level(key: Callable[[Record], Any], who: Callable[[Record], bool]) -> None:
        for i, one in enumerate(a):
            if partner[i] >= 0 or not who(one):
                continue
            for j, other in enumerate(b):
                if j not in taken and who(other) and key(one) == key(other):
                    partner[i] = j
                    taken.add(j)
                    break

    level(lambda r: r["id"], lambda r: r["named"])
    level(lambda r: r["content"], lambda r: True)
    return partner


records = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.integers(0, 4),
            "named": st.booleans(),
            "content": st.integers(0, 5),
        }
    ).map(dict),
    max_size=12,
)


@settings(max_examples=150)
@given(a=records, b=records, all_named=st.sampled_from([None, (True, True), (False, True), (False, False)]))
def test_pairing_is_that_of_the_slow_rules(
    a: list[Record], b: list[Record], all_named: tuple[bool, bool] | None
) -> None:
    if all_named is not None:
        a, b = ([{**r, "named": flag} for r in side] for side, flag in zip((a, b), all_named, strict=True))
    pairs = paired(a, b)
    assert pairs.partner.tolist() == slow_partners(a, b)
    found = [j for j in pairs.partner.tolist() if j >= 0]
    assert len(found) == len(set(found)) == sum(pairs.matched.values())
    assert sorted([*found, *pairs.only_in_b.tolist()]) == list(range(len(b)))


# --- comparing ----------------------------------------------------------------------------------------------------


def batch(rows: Sequence[tuple[list[int], list[float], list[int]]], *, weights: bool, kinds: bool) -> Documents:
    ids, values, codes = ([v for row in rows for v in row[i]] for i in range(3))
    return Documents(
        ids=np.array(ids, dtype=np.uint32),
        offsets=offsets_of(np.array([len(row[0]) for row in rows], dtype=np.int64)),
        weights=np.array(values, dtype=np.float32) if weights else None,
        kinds=np.array(codes, dtype=np.uint8) if kinds else None,
    )


@st.composite
def row(draw: st.DrawFn) -> tuple[list[int], list[float], list[int]]:
    length = draw(st.integers(1, 4))
    return (
        draw(st.lists(st.integers(0, 1), min_size=length, max_size=length)),
        draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=length, max_size=length)),
        draw(st.lists(st.sampled_from([26, 34]), min_size=length, max_size=length)),
    )


@settings(max_examples=150)
@given(pairs=st.lists(st.tuples(row(), row(), st.integers(0, 4)), max_size=8), flags=st.tuples(*[st.booleans()] * 3))
def test_comparison_is_that_of_a_loop(pairs: list[Any], flags: tuple[bool, bool, bool]) -> None:
    weights_a, kinds_a, kinds_b = flags
    made, wanted = [], []
    for one, other, like in pairs:
        # Half of the pairs share a part, so that every answer comes up.
        new = tuple(one[i] if len(one[i]) == len(other[i]) and like > i else other[i] for i in range(3))
        new = one if like == 4 else new
        made.append((one, new))
        old_weights = one[1] if weights_a else [1.0] * len(one[0])
        if one[0] != new[0]:
            wanted.append(3)
        elif old_weights != new[1]:
            wanted.append(2)
        else:
            wanted.append(int(kinds_a and kinds_b and one[2] != new[2]))
    a = batch([one for one, _ in made], weights=weights_a, kinds=kinds_a)
    b = batch([other for _, other in made], weights=True, kinds=kinds_b)
    assert compare_documents(a, b).tolist() == wanted


def replayed(lines: Sequence[Any], old: list[int], sign: str) -> list[int]:
    """The tokens of one side, put together again from the lines and the other side's equal stretches."""
    out: list[int] = []
    for line in lines:
        if line.sign == " ":
            out += old[len(out) : len(out) + line.tokens]
        elif line.sign == sign:
            out += line.ids.tolist()
    return out


@settings(max_examples=150)
@given(one=row(), other=row(), shared=st.lists(st.integers(0, 9), max_size=40))
def test_lines_hold_every_token_of_both_sides(one: Any, other: Any, shared: list[int]) -> None:
    def around(r: Any) -> Any:
        extra = len(shared)
        return shared + r[0] + shared, [0.0] * extra + r[1] + [1.0] * extra, [26] * extra + r[2] + [34] * extra

    a, b = around(one), around(other)
    lines = changed_lines(batch([a], weights=True, kinds=True), batch([b], weights=True, kinds=True))
    assert replayed(lines, a[0], "-") == a[0]
    assert replayed(lines, b[0], "+") == b[0]
    assert all(line.tokens for line in lines)
    if a == b:
        assert [line.sign for line in lines] == [" "]
    else:
        assert any(line.sign in "-+" for line in lines)
