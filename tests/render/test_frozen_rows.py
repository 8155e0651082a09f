"""Rows of all published templates stay what they are: hashes of ids, kinds and runs, in frozen_rows.json.

With CHATMILL_FROZEN=write in the environment the hashes are written anew. A change of them is a change of what is
trained, or of the kinds around it: say in the commit which one.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from chatmill.core.conversation import Conversation
from chatmill.render.jinja.options import Expand, TemplateOptions, Unproved
from chatmill.render.render import Rendered, render
from tests.render.jinja.at_hand import bundled, of_trl, text_of
from tests.render.named_sets import records_164
from tools.template_survey import TODAY, bind_bytes

FROZEN = Path(__file__).with_name("frozen_rows.json")
WRITES = os.environ.get("CHATMILL_FROZEN") == "write"
EVERY = [*bundled(), *of_trl()]
MODES = {
    "turns": TemplateOptions(today=TODAY, expand=Expand.TURNS),
    "none": TemplateOptions(today=TODAY, expand=Expand.NONE),
    "untrained": TemplateOptions(today=TODAY, expand=Expand.TURNS, unproved=Unproved.UNTRAINED, whole_document=True),
}
"""A tree stores the rows of `turns`."""
EACH = 9
"""One in so many of the 164 records is in the set that is compared each time."""


@cache
def few_records() -> tuple[Conversation, ...]:
    short = [record for record in records_164() if len(record.messages) < 40]
    return tuple(short[::EACH])


def hash_rows(rendered: Rendered) -> str:
    """Hash all that is decided about the rows of a batch."""
    hashed = hashlib.sha256()
    tokens = rendered.tokens
    content, reasoning, of_context = rendered.lost.T
    lost = np.stack([content, reasoning + of_context], axis=1)
    counts = (rendered.kept, rendered.turns, rendered.unstable, rendered.untrained, rendered.appended, lost)
    columns = (tokens.ids, tokens.offsets, tokens.run_offsets, tokens.run_kinds, tokens.run_messages)
    for column in (*columns, *counts):
        hashed.update(np.ascontiguousarray(column).tobytes())
    failures = [(index, error.code, str(error)) for index, error in rendered.failed]
    hashed.update(repr(failures).encode())
    return hashed.hexdigest()[:20]


def compare_rows(name: str, records: Sequence[Conversation], set_name: str) -> None:
    """Compare the rows of a template with the frozen ones, or freeze them."""
    found: dict[str, str] = {}
    for mode, given in MODES.items():
        template = bind_bytes(name, text_of(name), given)
        found[f"{set_name} {mode}"] = hash_rows(render(records, template, collect_failures=True))

    frozen = json.loads(FROZEN.read_text()) if FROZEN.exists() else {}
    if WRITES:
        frozen[name] = frozen.get(name, {}) | found
        FROZEN.write_text(json.dumps(frozen, indent=0, sort_keys=True) + "\n")
        return
    assert {key: value for key, value in frozen[name].items() if key in found} == found


QUICK = EVERY[:: len(EVERY) // 12]
FEW = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in EVERY]


@pytest.mark.parametrize("name", FEW)
def test_rows_of_few_records_are_the_frozen_ones(name: str) -> None:
    compare_rows(name, few_records(), "few")


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_rows_of_all_164_records_are_the_frozen_ones(name: str) -> None:
    compare_rows(name, records_164(), "all")


ORDERED = ["llamacpp/Qwen3.5-4B.jinja", "trl/qwen3.jinja", "vllm/tool_chat_template_granite.jinja"]


def rows_by_record(parts: Sequence[tuple[Sequence[Conversation], Rendered]]) -> dict[str, list[object]]:
    """Rows and refusals of records by their ids."""
    found: dict[str, list[object]] = {}
    for records, rendered in parts:
        for index, error in rendered.failed:
            found.setdefault(str(records[index].id), []).append(error.code)
        for row, index in enumerate(rendered.kept.tolist()):
            tokens = rendered.tokens.conversation(row)
            columns = (tokens.ids.tobytes(), tokens.kinds.tobytes(), tokens.messages.tobytes())
            found.setdefault(str(records[index].id), []).append(columns)
    return found


@pytest.mark.parametrize("name", ORDERED)
def test_rows_do_not_depend_on_the_order_nor_on_the_company_of_records(name: str) -> None:
    """Whatever is remembered of a template holds for the records that it is used for."""
    records = [record for record in records_164() if len(record.messages) < 30][::2]
    given = MODES["untrained"]
    together = bind_bytes(name, text_of(name), given)
    wanted = rows_by_record([(records, render(records, together, collect_failures=True))])
    assert rows_by_record([(records, render(records, together, collect_failures=True))]) == wanted

    shuffled = list(records)
    random.Random(7).shuffle(shuffled)
    middle = len(shuffled) // 3
    other = bind_bytes(name, text_of(name), given)
    halves = (shuffled[:middle], shuffled[middle:])
    assert rows_by_record([(half, render(half, other, collect_failures=True)) for half in halves]) == wanted
