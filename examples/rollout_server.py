"""Rollouts with a tool against vLLM's and SGLang's own requests: ids in, ids out, and a row to train on.

    python examples/rollout_server.py

A small server stands in for both, with the fields that they document. Against a real one, only `url` changes: take
`sample_vllm` with `vllm serve`, `sample_sglang` with `python -m sglang.launch_server`.
"""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import chatmill
from chatmill.rollouts.episodes import AgentEpisode, Sample, run_episodes

TOKENS = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]
TOKENS += ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD = {"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": NUMBERS}}

tokenizer = chatmill.load_tokenizer("bytes", control_tokens=TOKENS)  # of your model: chatmill.Renderer("./MyModel")
renderer = chatmill.Renderer(tokenizer, "qwen3")


def post(url: str, request: dict[str, Any]) -> Any:
    """Send a request as JSON."""
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(request).encode(), headers)) as response:
        return json.load(response)


def sample_vllm(url: str, prompts: Sequence[list[int]]) -> list[Sample]:
    """Sample with vLLM: a completion of ids, which returns ids."""
    samples = []
    for ids in prompts:
        request = {
            "prompt": ids,
            "max_tokens": 256,
            "stop_token_ids": renderer.stops,
            "return_token_ids": True,
            "logprobs": 0,
        }
        (choice,) = post(f"{url}/v1/completions", request)["choices"]
        assert choice["prompt_token_ids"] == ids
        samples.append(Sample(choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]))
    return samples


def sample_sglang(url: str, prompts: Sequence[list[int]]) -> list[Sample]:
    """Sample with SGLang: `no_stop_trim` keeps the id of the stop token."""
    samples = []
    for ids in prompts:
        sampling = {"max_new_tokens": 256, "stop_token_ids": renderer.stops, "no_stop_trim": True}
        request = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
        found = post(f"{url}/generate", request)
        meta = found["meta_info"]
        logprobs = [logprob for logprob, *_ in meta["output_token_logprobs"]]
        samples.append(Sample(found["output_ids"], logprobs, meta["finish_reason"]["type"]))
    return samples


class StandIn(BaseHTTPRequestHandler):
    """Answers like both servers: with a call first, and with its result then."""

    def do_POST(self) -> None:
        """Answer one request."""
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        is_vllm = self.path == "/v1/completions"
        prompt = request["prompt"] if is_vllm else request["input_ids"]
        text = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
        if "<tool_response>" in tokenizer.decode(prompt):
            text = "It is 5."
        ids = tokenizer.encode_documents([f"<think>\n\n</think>\n\n{text}<|im_end|>"])[0].tolist()
        logprobs = [-0.1] * len(ids)
        pairs = [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=True)]
        meta = {"finish_reason": {"type": "stop", "matched": ids[-1]}, "output_token_logprobs": pairs}
        body: dict[str, Any] = {"output_ids": ids, "meta_info": meta}
        if is_vllm:
            choice = {"index": 0, "finish_reason": "stop", "prompt_token_ids": prompt, "token_ids": ids}
            body = {"choices": [{**choice, "logprobs": {"token_logprobs": logprobs}}]}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *values: Any) -> None:
        """Say nothing."""


def add(name: str, arguments: str) -> str:
    """Run the tool."""
    given = json.loads(arguments)
    return str(given["a"] + given["b"])


def main() -> None:
    """Run two episodes with the requests of each server, and compile them."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    samplers: dict[str, Callable[[str, Sequence[list[int]]], list[Sample]]]
    samplers = {"vLLM": sample_vllm, "SGLang": sample_sglang}
    for name, sample in samplers.items():
        questions = [[{"role": "user", "content": f"What is 2 + 3{mark}"}] for mark in ("?", ", please?")]
        episodes = [AgentEpisode(renderer, question, [ADD], add) for question in questions]
        run_episodes(episodes, partial(sample, url), max_calls=4)
        records = [renderer.row(episode.rollout(), id=f"sum{n}") for n, episode in enumerate(episodes)]
        dataset = chatmill.compile(records, "bytes", template="qwen3", add_control_tokens=True)
        proofs = [answer.proof.value for episode in episodes for answer in episode.answers]
        print(
            f"{name}: {' '.join(proofs)}; {len(dataset)} rows, {int((dataset[0].weights > 0).sum())} ids of the first "
            "trained"
        )
    server.shutdown()
    server.server_close()


if __name__ == "__main__":
    main()
