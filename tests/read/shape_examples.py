"""The same conversation in every shape."""

from __future__ import annotations

import json

from chatmill.core.conversation import Message, Role

Q, A = Message(Role.USER, "q"), Message(Role.ASSISTANT, "a")
OPENAI = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
SHAREGPT = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
ALPACA = {"instruction": "q", "output": "a"}
PAIR = {"prompt": "q", "completion": "a"}
HARMONY = {"messages_json": json.dumps(OPENAI)}
EXAMPLES = {
    "openai": OPENAI,
    "sharegpt": SHAREGPT,
    "alpaca": ALPACA,
    "prompt_completion": PAIR,
    "harmony": HARMONY,
    "instruction_response": {"instruction": "q", "response": "a"},
    "question_answer": {"question": "q", "answer": "a"},
}
