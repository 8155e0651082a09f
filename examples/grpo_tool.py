"""GRPO with a tool through TRL's `rollout_func`, on ids that are never encoded again.

    python examples/grpo_tool.py --steps 20              # log-probabilities of trainer and sampler agree
    python examples/grpo_tool.py --steps 20 --reencode   # ids from text: they do not, and the script says so

A small model of random weights samples with `generate`. Its answers are held to a call of `add` and a sentence, in
whatever tokens it likes: most of them are not those that the tokenizer would give. It is rewarded for few tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LogitsProcessor, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

import chatmill
from chatmill.rollouts.adapters.trl import rollout_func
from chatmill.rollouts.episodes import Sample

TEMPLATE = Path(chatmill.__file__).parent / "render" / "templates" / "qwen3.jinja"
PROPERTIES = {"a": {"type": "integer"}, "b": {"type": "integer"}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": PROPERTIES}},
    }
]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
TOLERANCE = 2e-3
"""How far two log-probabilities may be apart in float32: one from the cache, the other from one forward pass."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Train a small byte-level vocabulary."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    texts = [TEMPLATE.read_text(), json.dumps(TOOLS)]
    texts += [f'{{"name": "add", "arguments": {{"a": {n}, "b": {n * 7}}}}} The sum is {n}.' for n in range(2000)]
    inner.train_from_iterator(texts, trainer)
    inner.add_special_tokens(SPECIALS)
    inner.add_tokens(MARKS)
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.chat_template = TEMPLATE.read_text()
    return made


class SpellsTexts(LogitsProcessor):
    """Lets each sequence write its own text, in any tokens, and then the stop."""

    def __init__(self, texts: list[str], pieces: dict[bytes, int], stop: int, prompt_size: int) -> None:
        """`pieces` are the tokens by their bytes."""
        self._texts = [text.encode() for text in texts]
        self._bytes = {token_id: piece for piece, token_id in pieces.items()}
        self._pieces, self._stop, self._size = pieces, stop, prompt_size
        self._longest = max(map(len, pieces))

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Mask all tokens that do not go on with the text."""
        allowed = torch.full_like(scores, float("-inf"))
        for row, ids in enumerate(input_ids[:, self._size :].tolist()):
            written = b"".join(self._bytes.get(token_id, b"") for token_id in ids)
            rest = self._texts[row][len(written) :]
            sizes = range(1, min(self._longest, len(rest)) + 1)
            fitting = [self._pieces[rest[:size]] for size in sizes if rest[:size] in self._pieces] or [self._stop]
            allowed[row, fitting] = scores[row, fitting]
        return allowed


class Sampler:
    """Samples with `generate` of the trainer's model."""

    def __init__(self, renderer: chatmill.Renderer, seed: int) -> None:
        """`seed` decides the texts."""
        self._chance = random.Random(seed)
        tokenizer = renderer.tokenizer
        self._pieces = {piece: token_id for token_id, piece in tokenizer.text_tokens.items()}
        self._stop = tokenizer.control("<|im_end|>")
        self._pad = tokenizer.control("<|endoftext|>")
        self._tokenizer = tokenizer

    def __call__(self, prompts: list[list[int]], trainer: Any) -> list[Sample]:
        """Sample one answer for each prompt."""
        model, device = trainer.accelerator.unwrap_model(trainer.model), trainer.accelerator.device
        size = max(map(len, prompts))
        ids = torch.full((len(prompts), size), self._pad, device=device)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, size - len(prompt) :] = torch.tensor(prompt, device=device)
            mask[row, size - len(prompt) :] = 1
        texts = [self._text(prompt) for prompt in prompts]
        was_training = model.training
        model.eval()
        with torch.no_grad():
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=400,
                do_sample=True,
                top_k=0,
                eos_token_id=self._stop,
                pad_token_id=self._pad,
                logits_processor=[SpellsTexts(texts, self._pieces, self._stop, size)],
                output_logits=True,
                return_dict_in_generate=True,
            )
        model.train(was_training)
        logprobs = torch.stack(out.logits, 1).float().log_softmax(-1)
        sampled = out.sequences[:, size:]
        chosen = logprobs.gather(-1, sampled.unsqueeze(-1)).squeeze(-1)
        found: list[Sample] = []
        for row, listed in zip(sampled.tolist(), chosen.tolist(), strict=True):
            end = row.index(self._stop) + 1
            found.append(Sample(row[:end], listed[:end], "stop"))
        return found

    def _text(self, prompt: list[int]) -> str:
        """Return what an answer says: a call first, a sentence after its result."""
        said = self._tokenizer.decode(prompt)
        empty = "<think>\n\n</think>\n\n"
        if "<tool_response>" in said.rpartition("<|im_start|>user")[2]:
            result = said.rpartition("<tool_response>\n")[2].partition("\n")[0]
            return f"{empty}The sum is {result}."
        a, b = self._chance.randrange(1000), self._chance.randrange(1000)
        return f'{empty}<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'


class CheckedTrainer(GRPOTrainer):
    """Holds its own log-probabilities against the sampler's."""

    def __init__(self, **options: Any) -> None:
        """Nothing is compared yet."""
        self.sampled: dict[tuple[int, ...], tuple[list[float], list[int]]] = {}
        self.worst: list[float] = []
        super().__init__(**options)

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **named: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*arguments, **named)
        self._own = found[0].detach()
        return found

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        loss = super()._compute_loss(model, inputs)
        for row in range(len(self._own)):
            size = int(inputs["completion_mask"][row].sum())
            key = tuple(inputs["completion_ids"][row][:size].tolist())
            expected, mask = self.sampled[key]
            wanted, here = torch.tensor(expected), torch.tensor(mask) > 0
            difference = (self._own[row][:size].float().cpu() - wanted)[here].abs().max()
            self.worst.append(float(difference))
        return loss


def add(name: str, arguments: str) -> str:
    """Run the tool."""
    given = json.loads(arguments)
    return str(given["a"] + given["b"])


def reencoded(column: dict[str, Any], row: int, tokenizer: Any) -> None:
    """Replace the ids of a completion by those of its text, as a trainer does that keeps text alone."""
    text = tokenizer.decode(column["completion_ids"][row])
    ids = tokenizer.encode_documents([text])[0].tolist()
    for name, filler in (("logprobs", 0.0), ("env_mask", 1)):
        column[name][row] = (column[name][row] + [filler] * len(ids))[: len(ids)]
    column["completion_ids"][row] = ids


def main() -> None:
    """Train, and compare log-probabilities."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--reencode", action="store_true")
    given = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    renderer = chatmill.Renderer(tokenizer)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    sampler = Sampler(renderer, seed=1)
    roll = rollout_func(renderer, sampler, tools=TOOLS, run_tool=add, max_calls=2)
    counts = {"episodes": 0, "answers": 0, "proved": 0, "sampled": 0, "not canonical": 0}

    def checked(prompts: Any, trainer: CheckedTrainer) -> dict[str, Any]:
        column = roll(prompts, trainer)
        for row in range(len(column["completion_ids"])):
            ids, messages = column["completion_ids"][row], column["messages"][row]
            counts["episodes"] += 1
            counts["answers"] += sum(message["role"] == "assistant" for message in messages)
            counts["proved"] += bool(messages[1].get("tool_calls")) + messages[-1]["content"].startswith("The sum is")
            counts["sampled"] += sum(column["env_mask"][row])
            text = renderer.tokenizer.decode(ids)
            counts["not canonical"] += renderer.tokenizer.encode_documents([text])[0].tolist() != ids
            if given.reencode:
                reencoded(column, row, renderer.tokenizer)
            trainer.sampled[tuple(column["completion_ids"][row])] = column["logprobs"][row], column["env_mask"][row]
        del column["messages"]
        return column

    def few_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [-len(ids) / 100 for ids in completion_ids]

    questions = [[{"role": "user", "content": f"What is the sum? Case {index}."}] for index in range(64)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder, max_steps=given.steps, per_device_train_batch_size=8, num_generations=4,
            gradient_accumulation_steps=1, max_completion_length=1024, learning_rate=1e-3, beta=0.0, temperature=1.0,
            bf16=False, logging_steps=5, save_strategy="no", report_to="none", disable_tqdm=True, seed=0,
            use_cpu=not torch.cuda.is_available(),
        )  # fmt: skip
        trainer = CheckedTrainer(
            model=Qwen3ForCausalLM(config), args=arguments, processing_class=tokenizer, rollout_func=checked,
            reward_funcs=few_tokens, train_dataset=Dataset.from_dict({"prompt": questions}),
        )  # fmt: skip
        start = time.time()
        trainer.train()
    worst = max(trainer.worst)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    verdict = "agree" if worst <= TOLERANCE else "DIFFER"
    found = {
        "device": device,
        "steps": trainer.state.global_step,
        "seconds": round(time.time() - start),
        **{name.replace(" ", "_"): count for name, count in counts.items()},
        "rows_compared": len(trainer.worst),
        "largest_difference": worst,
        "log_probabilities": verdict,
    }
    print(json.dumps(found))
    raise SystemExit(0 if worst <= TOLERANCE else 1)


if __name__ == "__main__":
    main()
