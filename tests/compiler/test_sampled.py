"""Records that carry tokens: sampled answers are trained as they were sampled, and whole calls as they were made."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatmill.cli.raw_files import drift_lines
from chatmill.compiler.run import run_build
from chatmill.core.conversation import Conversation, Message, Role
from chatmill.core.conversations import Conversations
from chatmill.core.kinds import REPEATED, kind_name
from chatmill.core.ledger import Ledger
from chatmill.core.native.scan import scan_lines
from chatmill.export.export import export_dataset
from chatmill.export.hf_rows import to_hf_dataset
from chatmill.prove.rows import PlainRow
from chatmill.read.columns import scanner_names
from chatmill.read.conversations import ConversationFile
from chatmill.read.record_shape import conversation_of
from chatmill.read.shapes import detect_shape, find_shape
from chatmill.render.jinja.options import TemplateOptions, Trust
from chatmill.render.model_template import ModelTemplate
from chatmill.render.registry import bind
from chatmill.render.render import render
from chatmill.render.sampled import NOTES
from chatmill.store.episodes import EpisodeDataset
from tests.compiler.builds import OPEN_GATES, apart, proved, thinking_chats, write_jsonl
from tests.compiler.scanned import both_ways
from tests.data.tokenizer_files import loaded, unpacked

QWEN = str(unpacked("qwen3"))


def template(**options: Any) -> ModelTemplate:
    return bind("qwen3", loaded("qwen3"), TemplateOptions(**options))


def recut(ids: list[int], rng: random.Random) -> list[int]:
    """Other tokens for the same text, control tokens as they are."""
    tokenizer = loaded("qwen3")
    special = {tokenizer.control_ids[name] for name in tokenizer.special_tokens}
    out: list[int] = []
    for number in ids:
        text = tokenizer.decode([number])
        if number in special or "\ufffd" in text or number in tokenizer.control_ids.values() or rng.random() < 0.5:
            out.append(number)
        else:
            out += [one for letter in text for one in tokenizer.encode(letter)]
    return out


def calls_of(record: dict[str, Any]) -> dict[int, tuple[list[int], list[int]]]:
    """The ids of the prompt and of the answer, as they are rendered, for each message that is trained."""
    conversation = conversation_of(record, find_shape("openai"))
    tokens = render([conversation], template()).tokens
    found: dict[int, tuple[list[int], list[int]]] = {}
    for one in map(tokens.conversation, range(len(tokens))):
        row = PlainRow(one.ids.tolist(), one.kinds.tolist(), one.messages.tolist())
        for k in range(len(conversation.messages)):
            place = row.answer_of(k)
            if place is not None and not row.kinds[place[0]] & REPEATED:
                found[k] = row.ids[: place[0]], row.ids[place[0] : place[2]]
    return found


def sampled_chats(count: int, seed: int = 3) -> list[dict[str, Any]]:
    """Chats whose answers carry other tokens than the tokenizer gives; some lack their stop, some have none at all."""
    rng = random.Random(seed)
    records = thinking_chats(count, seed)
    for record in records:
        for k, (_, ids) in calls_of(record).items():
            if rng.random() < 0.2:
                continue
            message = record["messages"][k]
            message["token_ids"] = recut(ids[:-1] if rng.random() < 0.3 else ids, rng)
            if rng.random() < 0.5:
                message["logprobs"] = [-rng.random() if rng.random() < 0.9 else None for _ in message["token_ids"]]
    return records


def recipe_of(path: Path, **changes: Any) -> dict[str, Any]:
    return {"sources": [{"path": str(path)}], "tokenizer": QWEN, "template": "qwen3", "gates": OPEN_GATES, **changes}


def trained_parts(built: Path) -> Counter[tuple[str, tuple[int, ...]]]:
    """The stretches of trained tokens of each record."""
    found: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for episode in EpisodeDataset(built):
        for ids, weights, older in apart(episode):
            own = (weights > 0) & (np.arange(len(ids)) >= older)
            for part in np.split(np.arange(len(ids)), np.flatnonzero(np.diff(own)) + 1):
                if own[part[0]]:
                    found[str(episode.record_id), tuple(ids[part].tolist())] += 1
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"expand": "tree", "logprobs": True},
        {"expand": "last", "policy": "all"},
        {"packing": {"max_length": 60, "overflow": "windows"}, "logprobs": True},
        {"packing": {"max_length": 60, "overflow": "last_turns"}},
        {"expand": "none", "not_shown": "drop", "trust": "tokens"},
    ],
    ids=str,
)
def test_sampled_answers_are_trained_as_they_are_and_proved(tmp_path: Path, changes: dict[str, Any]) -> None:
    records = sampled_chats(8)
    path = write_jsonl(tmp_path / "chats.jsonl", records)
    ledger = proved(recipe_of(path, **changes), tmp_path / "built")
    wanted = [(record["id"], m["token_ids"]) for record in records for m in record["messages"] if "token_ids" in m]
    otherwise = ledger.total_notes("sampled_otherwise")
    assert ledger.total_notes("sampled_messages") == len(wanted) > 8
    assert otherwise > 2
    if changes.get("expand") in (None, "tree") and "packing" not in changes:
        parts = trained_parts(tmp_path / "built")
        assert all(parts[name, tuple(ids)] for name, ids in wanted)
        lines = drift_lines(Conversations.of(list(ConversationFile(path))), template(only_drift=True))
        assert lines[0].startswith(f"{otherwise:,} of {len(wanted):,} sampled answers have other tokens")
        assert len(lines) - 1 == min(otherwise, 5)


def test_logprobs_are_stored_beside_their_tokens_and_exported(tmp_path: Path) -> None:
    records = sampled_chats(12)
    messages = [message for record in records for message in record["messages"]]
    for message in messages:
        message.pop("weight", None)
    path = write_jsonl(tmp_path / "chats.jsonl", records)
    left = Ledger.from_json(run_build(recipe_of(path), tmp_path / "without", workers=0).manifest["ledger"])
    having = [r["id"] for r in records if any("logprobs" in m for m in r["messages"])]
    assert left.total_notes("records_whose_logprobs_are_not_stored") == len(having) > 3
    run_build(recipe_of(path, logprobs=True), tmp_path / "built", workers=0)
    stored: Counter[tuple[int, float]] = Counter()
    for episode in EpisodeDataset(tmp_path / "built"):
        assert episode.logprobs is not None
        there = ~np.isnan(episode.logprobs) & (np.asarray(episode.weights) > 0)
        stored.update(zip(episode.ids[there].tolist(), episode.logprobs[there].tolist(), strict=True))
    having = [m for m in messages if "logprobs" in m]
    given = [pair for m in having for pair in zip(m["token_ids"], m["logprobs"], strict=True) if pair[1] is not None]
    assert stored == Counter((number, float(np.float32(logprob))) for number, logprob in given)
    export_dataset(tmp_path / "built", "parquet", tmp_path / "parquet")
    flat = pq.read_table(tmp_path / "parquet" / "train")["logprobs"].combine_chunks().flatten()
    rows = to_hf_dataset(tmp_path / "built")
    both = np.concatenate([np.asarray(row, dtype=np.float32) for row in rows.with_format("numpy")["logprobs"]])
    np.testing.assert_array_equal(flat.to_numpy(zero_copy_only=False).astype(np.float32), both)
    assert np.isnan(both).any()
    assert (~np.isnan(both)).sum() >= len(given)


def test_the_drift_report_compares_answers_and_prompts_and_trains_the_text(tmp_path: Path) -> None:
    rng = random.Random(5)
    records, plain, calls = thinking_chats(7, 8), thinking_chats(7, 8), []
    for record in records:
        for k, (prompt, ids) in calls_of(record).items():
            record["messages"][k] |= {"prompt_token_ids": prompt, "token_ids": ids}
            calls.append(record["messages"][k])
    for call in calls[::3]:
        call["token_ids"] = [one for i in call["token_ids"] for one in recut([i], rng)]
    for call in calls[::4]:
        call["prompt_token_ids"] = call["prompt_token_ids"][1:]
    path = write_jsonl(tmp_path / "chats.jsonl", records)
    notes = proved(recipe_of(path, drift="report"), tmp_path / "report").all_notes()
    assert notes["sampled_messages"] == notes["prompts_compared"] == len(calls)
    assert notes["prompts_differ"] == len(calls[::4])
    assert 0 < notes["sampled_otherwise"] <= len(calls[::3])
    assert not notes["sampled_differ"]
    run_build(recipe_of(write_jsonl(tmp_path / "plain.jsonl", plain)), tmp_path / "plain", workers=0)
    one, other = ((tmp_path / name / "train" / "tokens.bin").read_bytes() for name in ("report", "plain"))
    assert one == other


def kinds_of(message: Message, **options: Any) -> list[tuple[str, str]]:
    """The runs of an answer, after its header."""
    tokens = render([Conversation((HI, message))], template(**options)).tokens.conversation(0)
    runs = zip(tokens.run_kinds.tolist(), tokens.run_offsets[:-1], tokens.run_offsets[1:], strict=True)
    found = [(kind_name(code), loaded("qwen3").decode(tokens.ids[a:b])) for code, a, b in runs if a < b]
    return found[found.index(("assistant.header", "assistant\n")) + 1 :]


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(loaded("qwen3").encode_documents([text])[0].tolist())


THINK = "<think>\n\n</think>\n\n"
HI = Message(Role.USER, "Hi")


def test_stops_and_kinds() -> None:
    whole = Message(Role.ASSISTANT, "yes", token_ids=ids_of(f"{THINK}y") + ids_of("es<|im_end|>"))
    stop, end = ("assistant.terminator", "<|im_end|>"), ("assistant.separator", "\n")
    head = ("assistant.reasoning+mark", THINK)
    assert kinds_of(whole) == [head, ("assistant.content", "yes"), stop, end]
    cut = whole._replace(token_ids=ids_of(f"{THINK}y") + ids_of("es"))
    for one in (cut, cut._replace(finish_reason="length"), Message(Role.ASSISTANT, "yes", finish_reason="length")):
        assert kinds_of(one) == [head, ("assistant.content", "yes")]
    other = Message(Role.ASSISTANT, "yes", token_ids=ids_of("no<|im_end|>"))
    assert kinds_of(other, trust=Trust.TOKENS) == [("assistant.content", "no"), stop, end]
    some = [whole._replace(token_ids=ids_of(f"{THINK}{said}<|im_end|>")) for said in ("yes", "no", "yes", "so")]
    rows = render([Conversation((HI, one)) for one in some], template(trust=Trust.TOKENS)).tokens
    for number, one in enumerate(some):  # as many tokens each, and the second and the last are others
        assert tuple(rows.conversation(number).ids[-len(one.token_ids or ()) - 1 : -1].tolist()) == one.token_ids
    again = (Message(Role.USER, "and"), Message(Role.ASSISTANT, "so"))
    chatml = bind("chatml", loaded("qwen3"), TemplateOptions())
    row = render([Conversation((HI, cut._replace(token_ids=ids_of("yes")), *again))], chatml).tokens
    ends = [kind_name(code) for code in row.run_kinds.tolist() if "assistant.terminator" in kind_name(code)]
    assert ends == ["assistant.terminator+repeated", "assistant.terminator"]


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"token_ids": ids_of("no<|im_end|>")}, "tokens_differ", "trust: tokens"),
    ({"token_ids": [*ids_of(THINK + "yes"), *loaded("qwen3").encode("<|im_end|>")]}, "tokens_differ", "from character"),
    ({"token_ids": [10**7]}, "bad_token_ids", "10000000"),
    ({"token_ids": ids_of(f"{THINK}yes<|im_end|>"), "finish_reason": "length"}, "bad_token_ids", "stop"),
    ({"token_ids": []}, "bad_token_ids", "not empty"),
    ({"token_ids": [1, -1]}, "bad_token_ids", "token_ids[1]"),
    ({"token_ids": [1.5]}, "bad_token_ids", "1.5"),
    ({"token_ids": [1], "logprobs": [-1, -2]}, "bad_token_ids", "2 for 1"),
    ({"token_ids": [1], "logprobs": ["x"]}, "bad_token_ids", "logprobs[0]"),
    ({"token_ids": [1], "logprobs": {}}, "bad_token_ids", "a list of numbers"),
    ({"prompt_token_ids": [1]}, "bad_token_ids", "give both"),
    ({"token_ids": [1], "finish_reason": 3}, "bad_token_ids", "string"),
    ({"role": "user", "token_ids": [1]}, "bad_token_ids", "only the assistant's"),
]


def test_tokens_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    cases = [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "yes", **message}]}
        for message in (*(message for message, _, _ in REFUSED), {})
    ]
    path = write_jsonl(tmp_path / "chats.jsonl", cases)
    ledger = proved(recipe_of(path, on_error="quarantine"), tmp_path / "built")
    assert ledger.reasons("quarantined") == Counter(code for _, code, _ in REFUSED)
    rejected = [json.loads(line) for line in (tmp_path / "built" / "rejected.jsonl").read_text().splitlines()]
    for entry, (message, code, words) in zip(rejected, REFUSED, strict=True):
        assert entry["reason"] == code, message
        assert words in f"{entry['field']} {entry['message']}", message


NUMBERS = st.none() | st.lists(st.integers(0, 2**31 - 1) | st.integers(), max_size=4)
LOGPROBS = st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), max_size=4)
SAMPLED = st.fixed_dictionaries(
    {
        "token_ids": NUMBERS,
        "prompt_token_ids": NUMBERS,
        "logprobs": st.none() | LOGPROBS | st.just({}),
        "finish_reason": st.sampled_from([None, "stop", 1]),
    }
)


@given(st.sampled_from(["user", "assistant"]), SAMPLED)
def test_the_scanner_reads_what_the_full_reader_reads(role: str, fields: dict[str, Any]) -> None:
    given_fields = {name: value for name, value in fields.items() if value is not None}
    plain = {"prompt_token_ids": [1, 2], "token_ids": [3]}
    records = [
        *({"calls": [plain, one, plain]} for one in (fields, given_fields, {**plain, "role": role})),
        *({"calls": [given_fields, plain], name: value} for name, value in fields.items()),
        *({"id": "a", "calls": one} for one in ([], [1], None, {})),
        *({"id": "a", **one} for one in (fields, given_fields)),
        *({"calls": None, "choices": [given_fields, plain], name: fields[name]} for name in fields),
        {**given_fields, "choices": [{"index": 0, "message": {"content": "\\u00e9"}, "token_ids": [7]}]},
    ]
    for record in ({"messages": [{"role": role, "content": "x", **fields}]}, *records):
        fast, slow, _ = both_ways([record], "openai" if "messages" in record else "calls")
        assert list(Conversations.joined([fast, slow])) == [*slow, *fast]


def test_calls_as_servers_and_harnesses_write_them_are_read_by_the_scanner() -> None:
    """None of them is left to the full reader, which gives the same."""
    listed = {"content": [{"token": "a", "bytes": [97], "logprob": -0.5, "top_logprobs": []}, {"logprob": None}]}
    message = {"role": "assistant", "content": 'a"'}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "token_ids": [3, 4]}
    sent = {"prompt_token_ids": [1, 2]}
    records = [
        {"id": "one", **sent, "token_ids": [3], "logprobs": [-0.25], "finish_reason": "length"},
        {"token_ids": [3], **sent, "calls": None, "reward": 1.0},
        {"object": "chat.completion", "choices": [{**choice, "logprobs": listed}, choice], **sent, "usage": {"n": 1}},
        {"calls": [{**sent, "token_ids": [3], "latency": 0.5}, {"token_ids": [5]}], "prompt_token_ids": [9]},
    ]
    data = b"".join(json.dumps(record).encode() + b"\n" for record in records)
    shape = find_shape("calls")
    (names,) = scanner_names(shape)
    assert scan_lines(data, 0, len(data), names).read.all()
    assert not both_ways(records, "calls")[2]
    for damaged in (b'"logprob": ""', b'"logprob": -1, "logprob": -0.5', b'"logprob" : true', b'"lo\\u0067prob": 1'):
        line = data.splitlines()[2].replace(b'"logprob": -0.5', damaged)
        assert not scan_lines(line, 0, len(line), names).read.any()


IDS = st.lists(st.integers(1, 3), min_size=1, max_size=4)


@st.composite
def episodes(draw: st.DrawFn) -> list[dict[str, list[int]]]:
    """Calls that go on with what some earlier one ended with, or begin anew."""
    calls: list[dict[str, list[int]]] = []
    for _ in range(draw(st.integers(1, 6))):
        before = draw(st.sampled_from([[], *(one["prompt_token_ids"] + one["token_ids"] for one in calls)]))
        more = draw(st.lists(st.integers(1, 3), min_size=0 if before else 1, max_size=3))
        calls.append({"prompt_token_ids": [*before, *more], "token_ids": draw(IDS)})
    return calls


@given(episodes())
def test_every_call_is_trained_once_after_its_prompt(calls: list[dict[str, list[int]]]) -> None:
    conversation = conversation_of({"calls": calls}, find_shape("calls"))
    made = render([conversation, conversation], template())
    joined, apart_ = (int(made.sampled[:, NOTES.index(name)].sum()) // 2 for name in ("calls_joined", "calls_apart"))
    ends: list[list[int]] = []
    for one in calls:
        sent = one["prompt_token_ids"]
        place = max((n for n, end in enumerate(ends) if sent[: len(end)] == end), default=len(ends))
        ends[place : place + 1] = [sent + one["token_ids"]]
    assert (joined, apart_) == (len(calls) - len(ends), len(ends) - 1)
    assert len(made.tokens) == 2 * len(ends)
    trained: Counter[int] = Counter()
    for number in range(len(ends), len(made.tokens)):
        row = made.tokens.conversation(number)
        ids, messages = row.ids.tolist(), row.messages.tolist()
        for k in {k for k in messages if k >= 0}:
            begin, sent, own = messages.index(k), calls[k]["prompt_token_ids"], calls[k]["token_ids"]
            assert ids[:begin] == sent
            assert ids[begin : begin + len(own)] == own
            assert messages[begin : begin + len(own)] == [k] * len(own)
            trained[k] += 1
    assert trained == dict.fromkeys(range(len(calls)), 1)


@pytest.mark.parametrize("expand", ["turns", "tree", "last"])
def test_calls_become_documents_or_trees_and_are_proved(tmp_path: Path, expand: str) -> None:
    first, second = ids_of("<|im_start|>user\nHi"), ids_of("hello<|im_end|>")
    goes_on = {"prompt_token_ids": [*first, *second, *ids_of("\nmore")], "token_ids": ids_of("so")}
    summary = {"prompt_token_ids": [*first, *ids_of("summary")], "token_ids": ids_of("yes<|im_end|>")}
    one = {"prompt_token_ids": first, "token_ids": second, "logprobs": [-0.5, -0.25], "finish_reason": "stop"}
    response = {"object": "chat.completion", "choices": [{"index": 0, "token_ids": second}, {"token_ids": [9]}]}
    records = [
        {"id": "one", **one},
        {"id": "both", "calls": [one, goes_on]},
        {"id": "three", "calls": [one, goes_on, {**summary, "logprobs": [-1, -2]}]},
        {"id": "served", "prompt_token_ids": first, **response},
    ]
    assert detect_shape(records, "here").name == "calls"
    path = write_jsonl(tmp_path / "calls.jsonl", records)
    ledger = proved(recipe_of(path, expand=expand, logprobs=True), tmp_path / "built")
    assert (ledger.total_notes("calls_joined"), ledger.total_notes("calls_apart")) == (2, 2)
    built = EpisodeDataset(tmp_path / "built")
    documents = 1 if expand == "tree" else 2
    wanted = {"one": 1, "both": 1, "three": documents, "served": documents}
    assert Counter(str(episode.record_id) for episode in built) == wanted
    episode: Any = built[0]
    assert episode.ids.tolist() == [*first, *second]
    assert episode.weights.tolist() == [0] * len(first) + [1] * len(second)
    assert episode.logprobs[len(first) :].tolist() == [-0.5, -0.25]
    assert np.isnan(episode.logprobs[: len(first)]).all()


def test_an_answer_beside_calls_without_its_own_prompt_is_refused() -> None:
    call = Message(Role.ASSISTANT, "a", token_ids=(1,), prompt_token_ids=(2,))
    mixed = Conversation((call, Message(Role.USER, "and"), Message(Role.ASSISTANT, "b")))
    failed = render([mixed], template(), collect_failures=True).failed
    assert [error.code for _, error in failed] == ["bad_token_ids"]
    both = [Conversation((call,)), Conversation((HI, Message(Role.ASSISTANT, "yes")))]
    assert render(both, template()).kept.tolist() == [0, 1]


CHECKED: list[tuple[dict[str, Any], str]] = [
    ({"token_ids": ids_of(f"{THINK}ok<|im_end|>")}, ""),
    ({"token_ids": ids_of(f"{THINK}o") + ids_of("k<|im_end|>")}, ""),
    ({"token_ids": ids_of("no<|im_end|>")}, "tokens_differ"),
    ({"token_ids": ids_of(f"{THINK}no<|im_end|>")}, "tokens_differ"),
    ({"token_ids": [10**7]}, "bad_token_ids"),
    ({"token_ids": ids_of(f"{THINK}ok<|im_end|>"), "finish_reason": "length"}, "bad_token_ids"),
]
"""An earlier answer, "ok", which Qwen3 writes as history without the empty reasoning that its prompt opens."""


@pytest.mark.parametrize("untrained", [{"weight": 0}, {"train": False}])
@pytest.mark.parametrize("is_last", [False, True])
def test_sampled_tokens_of_a_message_that_is_not_trained_are_checked_too(
    tmp_path: Path, untrained: dict[str, Any], is_last: bool
) -> None:
    asked, said = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "ok", **untrained}
    end = [] if is_last else [asked, {"role": "assistant", "content": "trained"}]
    begin = [asked, {"role": "assistant", "content": "trained"}] if is_last else []
    records = [
        {"id": f"{n}", "messages": [*begin, asked, {**said, **more}, *end]} for n, (more, _) in enumerate(CHECKED)
    ]
    path = write_jsonl(tmp_path / "chats.jsonl", records)
    for expand in ("turns", "tree", "none", "last"):
        options: dict[str, Any] = {"on_error": "quarantine", "expand": expand}
        ledger = proved(recipe_of(path, **options), tmp_path / expand)
        rejected = [json.loads(line) for line in (tmp_path / expand / "rejected.jsonl").read_text().splitlines()]
        wanted = {f"{n}": code for n, (_, code) in enumerate(CHECKED) if code}
        assert {entry["id"]: entry["reason"] for entry in rejected} == wanted
        place = len(begin) + 1
        assert all(entry["field"].startswith(f"messages[{place}]") for entry in rejected)
        assert ledger.total_notes("sampled_differ") == 0
    trusted = proved(recipe_of(path, on_error="quarantine", trust="tokens"), tmp_path / "trusted")
    assert trusted.reasons("quarantined") == {"bad_token_ids": 2}
    assert trusted.total_notes("sampled_differ") == 2


def test_sampled_tokens_that_nobody_can_check_are_counted(tmp_path: Path) -> None:
    """Without a prompt there is no text that the tokens could be held against."""
    (tmp_path / "asks.jinja").write_text(
        "{#-\nchatmill: template\ntokens: <|im_start|> <|im_end|>\nstops: <|im_end|>\n-#}"
        "{%- if messages[0].role != 'user' and messages|length == 1 %}{{ raise_exception('no') }}{% endif -%}"
        "{%- for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor -%}"
        "{%- if add_generation_prompt %}<|im_start|>assistant: {% endif -%}"
    )
    said = {"role": "assistant", "content": "ok", "weight": 0, "token_ids": ids_of("no<|im_end|>")}
    talk = [said, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "yes"}]
    path = write_jsonl(tmp_path / "chats.jsonl", [{"messages": talk}])
    ledger = proved(recipe_of(path, template=str(tmp_path / "asks.jinja")), tmp_path / "built")
    assert ledger.total_notes("sampled_differ") == 1
