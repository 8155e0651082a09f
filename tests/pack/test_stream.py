"""Spec 2, packing: the fast code against a slow reference that reads one token at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.pack.stream import (
    pack_post_training_stream,
)
from tests.pack.streams import ASSISTANT, END, EOS, IDS, SYSTEM, USER, pack, slow_mask, soup

OPENING = (SYSTEM, USER, ASSISTANT)
text = st.lists(st.integers(20, 29), max_size=9)


def span(marker: int) -> st.SearchStrategy[list[int]]:
    return text.map(lambda body: [marker, *body, END])


# Well-formed conversations, sometimes with a second system span or two assistants in a row.
conversation = st.lists(st.sampled_from([SYSTEM, USER, ASSISTANT]).flatmap(span), min_size=1, max_size=8).map(
    lambda spans: [token for one in spans for token in one]
)
records = st.lists(st.one_of(soup, conversation, conversation), max_size=6)


def with_eos(raw: list[list[int]]) -> list[list[int]]:
    """One record per eos, each ending in it."""
    result: list[list[int]] = []
    for record in raw:
        closed = record if record and record[-1] == EOS else [*record, EOS]
        piece: list[int] = []
        for token in closed:
            piece.append(token)
            if token == EOS:
                result.append(piece)
                piece = []
    return result


def slow_pack(raw: list[list[int]], block_size: int, drop_last: bool) -> tuple[list[list[int]], dict[str, int]]:
    """The packer of the page, one token at a time: blocks and the report."""
    blocks: list[list[int]] = [[]]
    notes: list[dict[str, int]] = [{"injected": 0, "tokens": 0, "cut": 0, "crowded": 0}]
    left_out = 0
    record_list = with_eos(raw)
    for record in record_list:
        system: list[int] | None = None
        open_system: list[int] | None = None
        in_user = carried = False
        for at, token in enumerate(record):
            if len(blocks[-1]) == block_size:
                blocks.append([])
                notes.append({"injected": 0, "tokens": 0, "cut": 0, "crowded": 0})
                carried = False
            if not blocks[-1] and in_user and token not in (*OPENING, EOS):
                carried = True
                if system is not None and len(system) + 2 <= block_size:
                    blocks[-1] += system
                else:
                    notes[-1]["crowded"] = int(system is not None)
                blocks[-1].append(USER)
                notes[-1]["injected"] = len(blocks[-1])
            blocks[-1].append(token)
            notes[-1]["tokens"] += 1
            if token in (*OPENING, EOS, END):
                if token == END and open_system is not None:
                    system = [*open_system, END]
                in_user, carried = token == USER, False
                open_system = [SYSTEM] if token == SYSTEM else None
            elif open_system is not None:
                open_system.append(token)
            if carried and len(blocks[-1]) == block_size:
                notes[-1]["cut"] = 1
                left_out += len(record) - at - 1
                break
    padded = 0
    if len(blocks[-1]) < block_size:
        if drop_last or not blocks[-1]:
            left_out += notes[-1]["tokens"]
            blocks.pop()
            notes.pop()
        else:
            padded = block_size - len(blocks[-1])
            blocks[-1] += [EOS] * padded
    return blocks, {
        "records": len(record_list),
        "blocks": len(blocks),
        "injected": sum(note["injected"] for note in notes),
        "padded": padded,
        "left_out": left_out,
        "records_cut": sum(note["cut"] for note in notes),
        "system_not_injected": sum(note["crowded"] for note in notes),
    }


# ---- blocks


def test_example_one_the_record_ends_where_a_block_is_full_before_its_end_marker() -> None:
    packed = pack([[10, 101, 13, 11, 201, 202, 13, 12, 301, 13]], 5)
    assert packed.input_ids.tolist() == [[10, 101, 13, 11, 201], [10, 101, 13, 11, 202]]
    assert not packed.loss_mask.any()
    assert dict(packed.report) == {
        "records": 1,
        "blocks": 2,
        "injected": 4,
        "padded": 0,
        "left_out": 5,
        "records_cut": 1,
        "system_not_injected": 0,
    }


def test_example_two_the_end_marker_still_lies_inside() -> None:
    packed = pack([[10, 1, 13, 11, 2, 3, 4, 5, 6, 13, 12, 7, 13]], 9)
    assert packed.input_ids.tolist() == [[10, 1, 13, 11, 2, 3, 4, 5, 6], [10, 1, 13, 11, 13, 12, 7, 13, 0]]
    assert packed.loss_mask.tolist() == [[0] * 9, [0, 0, 0, 0, 0, 1, 1, 1, 0]]
    assert packed.report.left_out == 0
    assert packed.report.padded == 0
    assert packed.origin[1].tolist() == [-1, -1, -1, -1, 9, 10, 11, 12, 13]


def test_types_shapes_and_report_access() -> None:
    packed = pack([[11, 1, 13, 12, 2, 13]], 4)
    assert packed.input_ids.dtype == np.int64
    assert packed.loss_mask.dtype == np.uint8
    assert packed.input_ids.shape == packed.loss_mask.shape == (2, 4) == packed.origin.shape
    assert packed.report["padded"] == packed.report.padded == 1
    assert len(packed) == 2
    with pytest.raises(KeyError):
        packed.report["keys"]


def test_injection_without_a_system_span_is_the_user_marker_alone() -> None:
    packed = pack([[11, 1, 2, 3, 4, 13, 12, 5, 13]], 5)
    assert packed.input_ids.tolist() == [[11, 1, 2, 3, 4], [11, 13, 12, 5, 13], [0, 0, 0, 0, 0]]
    assert packed.loss_mask[1].tolist() == [0, 0, 1, 1, 1]
    assert packed.report == {**dict(packed.report), "injected": 1, "padded": 4, "system_not_injected": 0}


def test_the_latest_whole_system_span_is_injected() -> None:
    record = [10, 1, 13, 11, 2, 13, 12, 3, 13, 10, 4, 13, 10, 5, 11, 6, 7, 13, 12, 8, 13]
    packed = pack([record], 16)
    # The third system span is interrupted by the user marker: not whole. The second one is the latest.
    assert packed.input_ids[1].tolist()[:6] == [10, 4, 13, 11, 7, 13]
    assert packed.loss_mask[1].tolist()[:10] == [0] * 6 + [1] * 3 + [0]


def test_a_system_span_that_was_carried_over_a_block_border_is_injected_whole() -> None:
    packed = pack([[10, 1, 2, 3, 4, 5, 13, 11, 6, 7, 8, 9, 13, 12, 14, 13]], 11)
    assert packed.input_ids[0].tolist() == [10, 1, 2, 3, 4, 5, 13, 11, 6, 7, 8]
    assert packed.input_ids[1].tolist() == [10, 1, 2, 3, 4, 5, 13, 11, 9, 13, 12]
    packed = pack([[20], [10, 1, 2, 13, 11, 6, 7, 8, 9, 13]], 6)
    assert packed.input_ids.tolist() == [[20, 0, 10, 1, 2, 13], [11, 6, 7, 8, 9, 13], [0] * 6]


def test_a_system_span_that_leaves_no_room_is_not_injected_and_counted() -> None:
    record = [10, 1, 2, 13, 11, 3, 4, 13, 12, 5, 13]
    roomy, crowded = pack([record], 6), pack([record], 5)
    assert roomy.input_ids[1].tolist() == [10, 1, 2, 13, 11, 4]
    assert roomy.report.system_not_injected == 0
    assert crowded.input_ids[1].tolist() == [11, 3, 4, 13, 12]
    assert crowded.report.system_not_injected == 1


def test_eos_clears_the_history() -> None:
    packed = pack([[10, 1, 13, 11, 2, 13, 12, 3, 13], [11, 4, 5, 6, 13, 12, 7, 13]], 13)
    assert packed.input_ids[0].tolist()[-3:] == [11, 4, 5]
    assert packed.input_ids[1].tolist()[:3] == [11, 6, 13]
    one_record_with_eos_inside = pack([[10, 1, 13, 11, 2, 13, 12, 3, 13, 0, 11, 4, 5, 6, 13, 12, 7, 13]], 13)
    assert one_record_with_eos_inside.input_ids.tolist() == packed.input_ids.tolist()
    assert one_record_with_eos_inside.report.records == 2


@pytest.mark.parametrize("first", [SYSTEM, USER, ASSISTANT, EOS])
def test_a_block_that_begins_with_an_opening_marker_or_eos_gets_no_injection(first: int) -> None:
    """Even where the marker interrupts an open user span."""
    packed = pack([[11, 1, 2, first, 3, 13]], 3)
    assert packed.input_ids[1, 0] == first
    assert packed.report.injected == 0


def test_a_block_that_begins_inside_a_system_or_assistant_span_gets_no_injection() -> None:
    packed = pack([[10, 1, 2, 13, 11, 3, 13, 12, 4, 5, 13]], 3)
    assert packed.input_ids.tolist() == [[10, 1, 2], [13, 11, 3], [11, 13, 12], [4, 5, 13], [0, 0, 0]]
    assert packed.report.injected == 1


def test_the_rest_of_a_cut_record_is_left_out_and_others_are_not_affected() -> None:
    long = [11, 1, 2, 3, 4, 5, 6, 7, 8, 13, 12, 9, 13]
    packed = pack([[20], long, [11, 14, 13, 12, 15, 13]], 4)
    assert packed.input_ids.tolist() == [[20, 0, 11, 1], [11, 2, 3, 4], [11, 14, 13, 12], [15, 13, 0, 0]]
    assert packed.report.records_cut == 1
    assert packed.report.left_out == len([5, 6, 7, 8, 13, 12, 9, 13, 0])
    assert packed.starts.tolist() == [0, 4, 16, 20]


def test_an_end_marker_in_the_last_place_of_the_block_is_in_time() -> None:
    packed = pack([[11, 1, 2, 3, 13, 12, 4, 13]], 3)
    assert packed.input_ids.tolist() == [[11, 1, 2], [11, 3, 13], [12, 4, 13], [0, 0, 0]]
    assert packed.report.left_out == 0


def test_a_later_user_span_in_the_same_block_may_be_carried_on() -> None:
    packed = pack([[11, 1, 2, 13, 11, 3, 4, 13, 12, 5, 13]], 4)
    assert packed.input_ids.tolist() == [[11, 1, 2, 13], [11, 3, 4, 13], [12, 5, 13, 0]]
    packed = pack([[11, 1, 2, 13, 11, 3, 4, 13, 12, 5, 13]], 3)
    assert packed.input_ids.tolist() == [[11, 1, 2], [11, 13, 11], [11, 3, 4]]
    assert packed.report.records_cut == 1
    assert packed.report.left_out == len([13, 12, 5, 13, 0])


def test_an_interrupted_user_span_is_over_at_the_marker_that_interrupts_it() -> None:
    packed = pack([[11, 1, 2, 3, 12, 4, 5, 13]], 3)
    assert packed.input_ids.tolist() == [[11, 1, 2], [11, 3, 12], [4, 5, 13], [0, 0, 0]]
    assert not packed.loss_mask.any()
    assert packed.report.records_cut == 0


def test_eos_is_appended_once_and_records_are_cut_at_it() -> None:
    packed = pack([[1], [2, 0], [3, 0, 4], [0, 0], []], 20)
    assert packed.input_ids[0].tolist() == [1, 0, 2, 0, 3, 0, 4] + [0] * 13
    assert packed.report.records == 7
    assert packed.report.padded == 9


def test_the_last_block() -> None:
    raw = [[11, 1, 13, 12, 2, 13]]
    padded, dropped, exact = pack(raw, 4), pack(raw, 4, drop_last=True), pack(raw, 7, drop_last=True)
    assert padded.input_ids.tolist() == [[11, 1, 13, 12], [2, 13, 0, 0]]
    assert padded.loss_mask[1].tolist() == [0, 0, 0, 0]
    assert dropped.input_ids.tolist() == [[11, 1, 13, 12]]
    assert (dropped.report.padded, dropped.report.left_out, dropped.report.records_cut) == (0, 3, 0)
    assert exact.input_ids.tolist() == [[11, 1, 13, 12, 2, 13, 0]]


def test_nothing_in_nothing_out() -> None:
    packed = pack([], 8)
    assert packed.input_ids.shape == packed.loss_mask.shape == packed.origin.shape == (0, 8)
    assert sum(packed.report.values()) == 0
    assert pack([[11]], 8, drop_last=True).input_ids.shape == (0, 8)


@pytest.mark.parametrize("size", [1, 0, -3])
def test_a_block_size_below_two_is_an_error(size: int) -> None:
    with pytest.raises(ValueError, match=f"block_size is {size}"):
        pack([[11, 1, 13]], size)


def test_records_that_are_not_flat_integers_are_errors() -> None:
    with pytest.raises(ValueError, match="record 1 holds values of type float64"):
        pack([[1], [1.0]], 4)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="record 0 has 2 dimensions"):
        pack_post_training_stream([np.zeros((2, 2), dtype=int)], block_size=4, **IDS)


@settings(max_examples=600)
@given(records, st.integers(2, 24), st.booleans())
def test_packer_equals_the_slow_one(raw: list[list[int]], block_size: int, drop_last: bool) -> None:
    packed = pack(raw, block_size, drop_last)
    blocks, report = slow_pack(raw, block_size, drop_last)
    assert packed.input_ids.tolist() == blocks
    assert dict(packed.report) == report
    assert packed.loss_mask.tolist() == [slow_mask(block) for block in blocks]


@settings(max_examples=300)
@given(records, st.integers(2, 24), st.booleans())
def test_every_token_is_accounted_for(raw: list[list[int]], block_size: int, drop_last: bool) -> None:
    """Blocks minus injected and padded tokens are the records minus what the report says was left out."""
    packed = pack(raw, block_size, drop_last)
    stream = np.array([token for record in with_eos(raw) for token in record], dtype=np.int64)
    origin = packed.origin
    placed = origin >= 0
    assert np.array_equal(packed.input_ids[placed], stream[origin[placed]])
    assert (np.diff(origin[placed]) > 0).all()
    report = packed.report
    assert int(placed.sum()) == len(stream) - report.left_out
    assert int((origin == -1).sum()) == report.injected
    assert int((origin == -2).sum()) == report.padded
    assert not packed.loss_mask[~placed].any()
    # What is missing between two blocks is the rest of one record: it ends in eos and holds no other one.
    ends = packed.starts + packed.tokens
    gaps = [stream[a:b] for (a, b) in zip(ends[:-1], packed.starts[1:], strict=True) if a < b]
    last = stream[int(ends[-1]) :] if len(ends) else stream
    gaps += [last] if len(last) and not drop_last else []
    assert all(gap[-1] == EOS and (gap == EOS).sum() == 1 for gap in gaps)
    assert len(gaps) == report.records_cut or drop_last
    assert sum(map(len, gaps)) == report.left_out or drop_last


@settings(max_examples=100)
@given(st.lists(conversation, min_size=1, max_size=6))
def test_a_block_that_holds_everything_is_the_stream_itself(raw: list[list[int]]) -> None:
    total = sum(map(len, with_eos(raw)))
    packed = pack(raw, max(total, 2))
    assert packed.report == {**dict.fromkeys(packed.report, 0), "records": len(with_eos(raw)), "blocks": 1}
    assert packed.input_ids[0].tolist() == [token for record in with_eos(raw) for token in record]


def test_long_records_of_many_blocks_equal_the_slow_packer() -> None:
    rng = np.random.RandomState(7)
    raw = []
    for _ in range(60):
        record = [SYSTEM, *rng.randint(20, 99, rng.randint(0, 40)).tolist(), END]
        for _ in range(rng.randint(1, 6)):
            record += [USER, *rng.randint(20, 99, rng.randint(0, 300)).tolist(), END]
            record += [ASSISTANT, *rng.randint(20, 99, rng.randint(0, 200)).tolist(), END]
        raw.append(record)
    for block_size in (100, 150, 200):
        packed = pack(raw, block_size)
        blocks, report = slow_pack(raw, block_size, drop_last=False)
        assert packed.input_ids.tolist() == blocks
        assert dict(packed.report) == report
        assert report["records_cut"] > 0
        assert report["injected"] > 0
        assert packed.loss_mask.any()
