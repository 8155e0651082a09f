"""Numbers that are kept as float32 (weights, margins, log-probabilities) are there as they were written, or refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chatmill.core.kinds import Part, RoleCode
from chatmill.core.messages import MessageColumns
from chatmill.errors import ConfigError, DataError, RecordError
from chatmill.label.policy import Policy
from chatmill.read.preferences import margin_of
from chatmill.read.record_shape import conversation_of
from chatmill.read.rows import read_rows
from chatmill.read.shapes import find_shape
from chatmill.render.jinja.options import TemplateOptions
from chatmill.render.registry import bind
from chatmill.render.render import render
from chatmill.tokenizer.byte_level import byte_tokenizer
from tests.read.three_ways import as_lines, batch_of

LIMITS = [0.0, 1e-300, 1e-46, 1e-45, 1e-38, 9e-31, 1e-30, 1e-20, 0.5, 1.0, 1e30, 1.1e30, 3.5e38, 1e300]
NUMBERS = st.sampled_from(LIMITS) | st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**400), 10**400)


def is_kept(number: float) -> bool:
    return number == 0 or 1e-30 <= abs(number) <= 1e30


def codes(record: dict[str, Any], name: str) -> list[set[str]]:
    """Why a record is refused, in each of three ways to read it."""
    shape = find_shape(name)
    try:
        conversation_of(record, shape)
        slow = []
    except RecordError as error:
        slow = [error]
    ways = [slow, as_lines([record], shape)[1]]
    try:
        ways.append(read_rows(batch_of([record]), first=1, path="f", source="s", shape=shape)[1])
    except (pa.ArrowInvalid, OverflowError):  # no type of Arrow holds such an integer
        ways.append(slow)
    return [{error.code for error in errors} for errors in ways]


def talk(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", **more}]}


@given(NUMBERS)
@example(1e-300)
@example(1e-30)
def test_a_weight_is_0_or_a_number_that_float32_keeps(weight: float) -> None:
    is_good = weight >= 0 and is_kept(weight)
    assert codes(talk(weight=weight), "openai") == [set() if is_good else {"bad_weight"}] * 3
    if is_good:
        (found,) = as_lines([talk(weight=weight)], find_shape("openai"))[0]
        columns = MessageColumns.of(found.messages)
        assert (np.float32(columns.weights[1]) > 0) == (weight > 0)


@given(NUMBERS)
@example(1e-9)
@example(1e-60)
def test_a_log_probability_is_not_above_0(logprob: float) -> None:
    wanted = set() if -1e30 <= logprob <= 0 else {"bad_token_ids"}
    record = talk(token_ids=[1, 2], logprobs=[None, logprob])
    assert codes(record, "openai") == [wanted] * 3
    listed = {"content": [{"logprob": -0.5}, {"logprob": logprob}]}
    assert codes(talk(token_ids=[1, 2], logprobs=listed), "openai")[:2] == [wanted] * 2
    call = {"prompt_token_ids": [1], "token_ids": [1, 2], "logprobs": [None, logprob]}
    assert codes({"calls": [call]}, "calls") == codes(call, "calls") == [wanted] * 3


PAIR = {"prompt": "q", "chosen": "a", "rejected": "b"}
SCORES = [("chosen_score", "rejected_score"), ("score_chosen", "score_rejected"), ("chosen_rating", "rejected_rating")]


@given(NUMBERS)
@example(1e300)
@example(-1e-300)
def test_a_margin_and_a_score_are_numbers_that_float32_keeps(number: float) -> None:
    wanted = set() if is_kept(number) else {"margin_type"}
    assert codes({**PAIR, "margin": number}, "pairs") == [wanted] * 3
    for chosen, rejected in SCORES:
        record = {**PAIR, chosen: 0.0, rejected: number}
        assert codes(record, "pairs") == [wanted] * 3
        if not wanted:
            assert margin_of(record) == float(np.float32(-float(number)))


def test_a_difference_of_scores_that_float32_does_not_keep_is_refused() -> None:
    assert codes({**PAIR, "chosen_score": 1e30, "rejected_score": -1e30}, "pairs") == [{"margin_type"}] * 3
    close = {"chosen_score": 1e-20, "rejected_score": 1e-20 - 1e-35}
    assert codes({**PAIR, **close}, "pairs") == [{"margin_type"}] * 3
    assert codes({**PAIR, "chosen_score": 2.5, "rejected_score": 2.5}, "pairs") == [set()] * 3


@pytest.mark.parametrize("names", SCORES)
@pytest.mark.parametrize("side", [0, 1])
def test_one_score_without_the_other_is_refused(names: tuple[str, str], side: int) -> None:
    for more in ({}, {names[1 - side]: None}, {"margin": 1.0}):
        assert codes({**PAIR, names[side]: 1.0, **more}, "pairs") == [{"margin_incomplete"}] * 3


def test_two_margins_that_differ_are_refused() -> None:
    scores = {"chosen_score": 4.5, "rejected_score": 3.0}
    for margin, wanted in ((1.5, set()), (1.5001, set()), (1.6, {"margins_differ"}), (-1.5, {"margins_differ"})):
        assert codes({**PAIR, **scores, "margin": margin}, "pairs") == [wanted] * 3
    other = {"chosen_rating": 5, "rejected_rating": 1}
    assert codes({**PAIR, **scores, **other}, "pairs") == [{"margins_differ"}] * 3


def test_a_weight_times_that_of_the_policy_is_kept_or_an_error() -> None:
    chatml = bind("chatml", byte_tokenizer(("<|im_start|>", "<|im_end|>")), TemplateOptions())
    content = (RoleCode.ASSISTANT, Part.CONTENT)
    for of_policy, of_message, is_good in ((1e30, 1e30, False), (1e-30, 1e-30, False), (1e-10, 1e10, True)):
        record = conversation_of(json.loads(json.dumps(talk(weight=of_message))), find_shape("openai"))
        tokens, policy = render([record], chatml).tokens, Policy(name="p", weights={content: of_policy})
        if is_good:
            assert np.isclose(policy.run_weights(tokens).max(), 1.0)
        else:
            with pytest.raises(DataError, match="beyond what float32 holds"):
                policy.run_weights(tokens)
    with pytest.raises(ConfigError, match="above 0 from 1e-30 on"):
        Policy(name="p", weights={content: 1e-300}).table()
