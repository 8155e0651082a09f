"""A small model as a teacher: answers requests of every form with its full logits, as servers write them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.train.tiny import tiny_model


def requests(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.iterdir()):
        yield from map(json.loads, path.read_text().splitlines())


class Teacher:
    """Answers with the k most likely tokens of every position of a prompt."""

    def __init__(self, vocabulary: int) -> None:
        self.model = tiny_model(vocabulary).eval()

    @torch.no_grad()
    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """(tokens, vocabulary): row t is what is known of token t; nothing is known of the first."""
        logits = self.model(torch.tensor([ids])).logits[0].double() * 8  # random weights are nearly uniform
        return torch.cat([torch.zeros(1, logits.shape[1]), logits[:-1].log_softmax(-1)])

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if "input_ids" in request:
            return self._sglang(request)
        if "body" in request:
            return self._vllm(request)
        ids = request["prompt_token_ids"]
        k = int(request["custom_id"].split(":")[3])
        found, tokens = self.logprobs(ids).topk(k)
        return {"custom_id": request["custom_id"], "teacher_ids": tokens.tolist(), "teacher_logprobs": found.tolist()}

    def _vllm(self, request: dict[str, Any]) -> dict[str, Any]:
        """A line of a batch output with a `CompletionResponse`: k entries, and the token of the prompt."""
        ids, k = request["body"]["prompt"], request["body"]["prompt_logprobs"]
        known = self.logprobs(ids)
        entries: list[Any] = [None]
        for place in range(1, len(ids)):
            ranked = known[place].argsort(descending=True).tolist()
            named = dict.fromkeys([ids[place], *ranked[:k]])
            entries.append(
                {
                    str(one): {"logprob": float(known[place, one]), "rank": ranked.index(one) + 1, "decoded_token": "?"}
                    for one in named
                }
            )
        choice = {"index": 0, "text": "?", "logprobs": None, "finish_reason": "length", "prompt_logprobs": entries}
        body = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "teacher", "choices": [choice]}
        response = {"status_code": 200, "request_id": "vllm-batch-1", "body": body}
        return {"id": "vllm-1", "custom_id": request["custom_id"], "response": response, "error": None}

    def _sglang(self, request: dict[str, Any]) -> dict[str, Any]:
        """What `Engine.generate` gives back: triples from `logprob_start_len` on, nothing for the first."""
        ids, start, k = request["input_ids"], request["logprob_start_len"], request["top_logprobs_num"]
        known = self.logprobs(ids)
        values, tokens = (found.tolist() for found in known.topk(k))
        top = [[[v, t, None] for v, t in zip(values[p], tokens[p], strict=True)] for p in range(start + 1, len(ids))]
        own = [[float(known[place, ids[place]]), ids[place], None] for place in range(start + 1, len(ids))]
        about = {"input_token_logprobs": [[None, ids[start], None], *own], "input_top_logprobs": [None, *top]}
        return {"text": "?", "meta_info": {"id": request["rid"], "prompt_tokens": len(ids), **about}}
