"""Asks a teacher for the distributions of a dataset: writes requests with exact ids, reads answers, adds the column."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from enum import StrEnum
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from chatmill.core.publish import lock, storing, sweep_orphans, whole_folder
from chatmill.errors import ConfigError, DataError, member, short_errors
from chatmill.read.files import read_records
from chatmill.store.documents import open_dataset
from chatmill.store.episode_layout import dataset_url
from chatmill.store.episodes import EpisodeDataset
from chatmill.store.split import Documents, StoredDataset
from chatmill.store.teacher import FOLDER, PartWriter, TeacherAnswer, ids_hash, targets_of, wrong_numbers

FILE_REQUESTS = 10_000
"""Requests of a file."""
MOST_ENTRIES = 2000
"""The largest k: a batch of a million targets must fit into the 32 bits of an Arrow list."""


class RequestForm(StrEnum):
    """What a line of a request file is."""

    BATCH = "batch"
    """A line of an OpenAI batch: POST /v1/completions, with `prompt_logprobs` of vLLM in its body."""
    OFFLINE = "offline"
    """`prompt_token_ids` for `LLM.generate` of vLLM, or a model of your own."""
    SGLANG = "sglang"
    """Arguments of SGLang's `Engine.generate`, which are also the body for its /generate."""


@short_errors
def teacher_request(
    dataset: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    form: str = RequestForm.BATCH,
    top_k: int = 64,
    max_length: int | None = None,
    model: str = "teacher",
    split: str | None = None,
) -> dict[str, int]:
    """Write requests for all documents that have targets and no distributions yet, as JSON lines in a new folder.

    A request has the ids of a document up to its last target, and at most `max_length - 1` of them: the context of the
    teacher, in which servers want room for a token. `model` is the name that a server knows the teacher by. Returns
    counts of what was written.
    """
    chosen = member(RequestForm, "form of requests", form)
    opened = _opened(Path(dataset), split)
    k = min(top_k, _vocab_size(opened))
    if not 1 <= top_k <= MOST_ENTRIES or (max_length is not None and max_length < 3):
        raise ConfigError(
            f"top_k is {top_k} and max_length {max_length}; 1 to {MOST_ENTRIES}, and 3 or more, are needed"
        )
    counts: Counter[str] = Counter(requests=0, tokens=0, targets=0, targets_cut=0)
    with whole_folder(out) as folder, storing(out):
        for name, documents in _episodes(opened).items():
            lines = _requests(documents, chosen, k, max_length, model, counts)
            for number, first in enumerate(lines):
                with (folder / f"{name}-{number:05d}.jsonl").open("wb") as file:
                    file.writelines(chain([first], islice(lines, FILE_REQUESTS - 1)))
    return dict(counts)


def _requests(
    dataset: EpisodeDataset, form: RequestForm, k: int, max_length: int | None, model: str, counts: Counter[str]
) -> Iterator[bytes]:
    for numbers, documents in dataset.teacher.unanswered():
        for number, ids, places in _each(numbers, documents):
            size = int(places[-1]) + 1
            if max_length is not None:
                size = min(size, max_length - 1)
            read = int(np.count_nonzero(places < size))
            counts.update(requests=1, tokens=size, targets=read, targets_cut=len(places) - read)
            name = f"{dataset.split}:{number}:{size}:{k}:{ids_hash(ids[:size]):016x}"
            start = min(int(places[0]), size - 1) - 1
            yield msgspec.json.encode(_request(form, name, ids[:size].tolist(), k, start, model)) + b"\n"


def _each(
    numbers: NDArray[np.int64], documents: Documents
) -> Iterator[tuple[int, NDArray[np.uint32], NDArray[np.int64]]]:
    """Number, ids and places of targets of each document."""
    targets = targets_of(documents)
    for number, (first, last) in zip(numbers.tolist(), pairwise(documents.offsets.tolist()), strict=True):
        yield number, documents.ids[first:last], np.flatnonzero(targets[first:last])


def _request(form: RequestForm, name: str, ids: list[int], k: int, start: int, model: str) -> dict[str, Any]:
    if form is RequestForm.OFFLINE:
        return {"custom_id": name, "prompt_token_ids": ids}
    if form is RequestForm.SGLANG:
        options = {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": k}
        return {"rid": name, "input_ids": ids, "sampling_params": {"max_new_tokens": 1}, **options}
    body = {"model": model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": k}
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}


@short_errors
def teacher_add(
    dataset: str | os.PathLike[str], answers: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
) -> dict[str, int]:
    """Add the answers in JSONL or Parquet files, or in folders of them, to the teacher column of a dataset.

    Each answer is compared with the stored ids: the hash in its id, and the tokens that it speaks of. One that does not
    fit is an error, and nothing is added. Documents that have distributions already, and requests that failed, are left
    out. Returns counts of these.
    """
    if (url := dataset_url(dataset)) is not None:
        raise ConfigError(
            f"{url}: answers are added to a dataset in a folder, whose files nobody else has: build it there, add "
            "them, and train from the folder"
        )
    opened = _opened(Path(dataset), None)
    files = [answers] if isinstance(answers, str | os.PathLike) else list(answers)
    counts: Counter[str] = Counter(added=0, distributions=0, there_already=0, failed=0)
    with ExitStack() as stack:
        with storing(opened.directory, "open the folder"):
            descriptor = os.open(opened.directory, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        lock(descriptor, f"{opened.directory}: another process adds answers to it: wait until it has ended")
        sweep_orphans(opened.directory / FOLDER)
        added = _Added(opened, stack)
        for raw in chain.from_iterable(map(read_records, files)):
            try:
                if raw.error is not None:
                    raise raw.error
                counts.update(added.take(raw.value))
            except (DataError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
                said = error if isinstance(error, DataError) else f"not an answer ({type(error).__name__}: {error})"
                raise DataError(f"{raw.where}: {said}. Nothing was added") from None
        for writer in added.writers.values():
            writer.publish()
    return dict(counts)


class _Added:
    """The answers that were taken so far, in parts that are not published yet."""

    def __init__(self, opened: StoredDataset, stack: ExitStack) -> None:
        self._splits, self._stack, self._vocab_size = _episodes(opened), stack, _vocab_size(opened)
        self._taken: set[tuple[str, int]] = set()
        self.writers: dict[tuple[str, int], PartWriter] = {}

    def take(self, answer: Mapping[str, Any]) -> dict[str, int]:
        """Check an answer and write it; what it counts as."""
        response = answer.get("response") or {}
        if answer.get("error") is not None or response.get("status_code", 200) != 200:
            return {"failed": 1}
        split, number, size, k, digest = _name(answer)
        if split not in self._splits:
            raise DataError(f"it is about the split {split!r}; there is {', '.join(self._splits)}")
        dataset = self._splits[split]
        if not 0 <= number < len(dataset) or not 1 <= k <= MOST_ENTRIES:
            raise DataError(f"it is about document {number} of {split}, which has {len(dataset):,}, and {k} entries")
        if dataset.teacher.has(np.array([number]))[0] or (split, number) in self._taken:
            return {"there_already": 1}
        document = dataset.gather(np.array([number]))
        ids = document.ids[:size]
        if len(ids) != size or ids_hash(ids) != digest:
            raise DataError(f"document {number} of {split} has other ids than those of the request: ask for it again")
        targets = np.flatnonzero(targets_of(document)[:size])
        distributions = _distributions(answer, response, ids, targets, k)
        rest = (
            np.maximum(0.0, 1.0 - np.exp(distributions[1]).sum(axis=1))
            if k < self._vocab_size
            else np.zeros(len(targets))
        )
        if problem := wrong_numbers(*distributions, rest, self._vocab_size):
            raise DataError(f"document {number} of {split}, token {targets[problem[0]]}: {problem[1]}")
        if (split, k) not in self.writers:
            self.writers[split, k] = PartWriter(dataset, dataset.teacher.folder, k, self._vocab_size)
            self._stack.callback(self.writers[split, k].discard)
        self.writers[split, k].add(
            TeacherAnswer(
                document=number,
                tokens=size,
                hash=digest,
                ids=distributions[0].astype(np.uint32),
                logprobs=distributions[1].astype(np.float32),
                rest=rest.astype(np.float32),
            )
        )
        self._taken.add((split, number))
        return {"added": 1, "distributions": len(targets)}


def _name(answer: Mapping[str, Any]) -> tuple[str, int, int, int, int]:
    """Return what the id of an answer, which is that of its request, says: split, document, tokens, k, hash."""
    name = answer.get("custom_id") or answer.get("rid") or answer.get("meta_info", {}).get("id")
    parts = str(name).rsplit(":", 4)
    try:
        split, number, size, k = parts[0], *map(int, parts[1:4])
        return split, number, size, k, int(parts[4], 16)
    except (ValueError, IndexError):
        raise DataError(
            f"its id is {name!r}, and not that of a request (custom_id, rid or meta_info.id): keep them together"
        ) from None


def _distributions(
    answer: Mapping[str, Any],
    response: Mapping[str, Any],
    ids: NDArray[np.uint32],
    targets: NDArray[np.int64],
    k: int,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the k most likely ids of each target, the most likely first, and their log-probabilities."""
    choice = (response.get("body") or answer).get("choices", [answer])[0]
    tokens = np.full((len(targets), k + 1), -1, dtype=np.int64)
    logprobs = np.full((len(targets), k + 1), -np.inf)
    entries = _entries(choice, ids, targets)
    for row, (place, (own_ids, values)) in enumerate(zip(targets.tolist(), entries, strict=True)):
        if not k <= len(own_ids) == len(values) <= k + 1:
            raise DataError(f"token {place} has {len(own_ids)} entries, and {k} were asked for")
        tokens[row, : len(own_ids)], logprobs[row, : len(own_ids)] = own_ids, values
    order = np.lexsort((tokens, -logprobs), axis=1)[:, :k]
    return np.take_along_axis(tokens, order, 1), np.take_along_axis(logprobs, order, 1)


def _entries(
    choice: Mapping[str, Any], ids: NDArray[np.uint32], targets: NDArray[np.int64]
) -> Iterator[tuple[list[int], list[float]]]:
    """Ids and log-probabilities of each target, as vLLM, SGLang or you give them; they speak of the ids of the request.

    Servers add the token of the prompt to the k most likely ones, or have a list of the prompt next to them.
    """
    if "prompt_logprobs" in choice:
        listed = choice["prompt_logprobs"]
        _check_size(listed, len(ids))
        for place in targets.tolist():
            entries = {int(token): value for token, value in dict(listed[place]).items()}
            if int(ids[place]) not in entries:
                raise DataError(f"token {place} is {ids[place]}, which its prompt_logprobs do not have: another prompt")
            yield list(entries), [entry["logprob"] if isinstance(entry, dict) else entry for entry in entries.values()]
    elif "meta_info" in choice:
        about = choice["meta_info"]
        prompt, listed = about["input_token_logprobs"], about["input_top_logprobs"]
        first = len(ids) - len(prompt)
        if [entry[1] for entry in prompt] != ids[max(first, 0) :].tolist() or len(listed) != len(prompt):
            raise DataError("the tokens of input_token_logprobs are not those of the request: another prompt")
        for place in targets.tolist():
            values, token_ids, *_ = zip(*listed[place - first], strict=True)
            yield list(token_ids), list(values)
    elif "teacher_ids" not in choice:
        raise DataError("it has neither prompt_logprobs nor meta_info nor teacher_ids")
    else:
        _check_size(choice["teacher_ids"], len(ids))
        _check_size(choice["teacher_logprobs"], len(ids))
        for place in targets.tolist():
            yield choice["teacher_ids"][place], choice["teacher_logprobs"][place]


def _check_size(listed: Sequence[Any], tokens: int) -> None:
    if len(listed) != tokens:
        raise DataError(f"it is about {len(listed):,} tokens, and the request had {tokens:,}: another prompt")


def _opened(directory: Path, split: str | None) -> StoredDataset:
    """Return a dataset whose documents a teacher can read."""
    opened = open_dataset(directory, None if split is None else [split])
    for documents in opened.splits.values():
        if not isinstance(documents, EpisodeDataset):
            raise ConfigError(f"{directory} is a distillation set of Megatron: its sidecars hold what a teacher says")
        for is_so, problem, way in (
            (documents.has_trees, "trees", "build rows with expand: turns"),
            (documents.has_pictures, "pictures", "there is no way yet"),
        ):
            if is_so:
                raise ConfigError(f"{documents.folder} holds {problem}, which a request of token ids cannot say: {way}")
    return opened


def _episodes(opened: StoredDataset) -> dict[str, EpisodeDataset]:
    return {name: split for name, split in opened.splits.items() if isinstance(split, EpisodeDataset)}


def _vocab_size(opened: StoredDataset) -> int:
    """Ids of the tokenizer; where none is known, all that can be stored."""
    return int(opened.about.get("tokenizer", {}).get("vocab_size", 2**32))
