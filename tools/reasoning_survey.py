"""Outcomes of answers with reasoning where prompts open it: `python -m tools.reasoning_survey FOLDER`.

FOLDER has the published templates. For each of them the outcomes of 30 bundled conversations are counted, once with the
reasoning in its own field and once in tags.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from chatmill.core.conversation import Conversation, Message, Role
from chatmill.errors import RecordError
from chatmill.read.conversations import ConversationFile
from tools.template_survey import bind_bytes

CONVERSATIONS = Path(__file__).parents[1] / "tests" / "data" / "conversations"
RECORDS = 30
NAMES = (
    "llamacpp/Apriel-1.6-15b-Thinker-fixed",
    "llamacpp/llama-cpp-deepseek-r1",
    "trl/deepseek_r1_distill",
    "trl/deepseek_r1_distill_training",
    "trl/deepseekv3",
    "trl/deepseekv3_training",
    "vllm/tool_chat_template_deepseekv31",
    "axolotl/qwen3",
    "axolotl/qwen3_5",
    "llamacpp/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "trl/nemotron_3_5_lightning",
    "trl/nemotron_3_5_lightning_training",
    "trl/nemotron_3_nano_training",
    "trl/nemotron_3_super",
    "trl/nemotron_3_super_training",
    "trl/nemotron_3_ultra",
    "trl/nemotron_3_ultra_training",
)


def sample(count: int) -> list[Conversation]:
    """Return the first conversations of all sources in turn."""
    readers = [iter(ConversationFile(path)) for path in sorted(CONVERSATIONS.glob("*.jsonl.gz"))]
    found: list[Conversation] = []
    while len(found) < count:
        found += [one for one in (next(reader, None) for reader in readers) if one is not None]
    return found[:count]


def with_reasoning(conversation: Conversation, *, in_tags: bool) -> Conversation:
    """Return a conversation in which every answer has reasoning."""
    messages: list[Message] = []
    for index, message in enumerate(conversation.messages):
        if message.role is Role.ASSISTANT:
            reasoning = message.reasoning or f"Let me see, step {index}.\nThen I know."
            if in_tags:
                content = f"<think>\n{reasoning}\n</think>\n\n{message.content}"
                message = message._replace(reasoning=None, content=content, has_content=True)
            else:
                message = message._replace(reasoning=reasoning)
        messages.append(message)
    return conversation._replace(messages=tuple(messages))


def main(folder: Path) -> None:
    """Print a line for each template and form."""
    records = sample(RECORDS)
    for name in NAMES:
        path = folder / f"{name}.jinja"
        template = bind_bytes(name, path.read_text(encoding="utf-8"))
        for in_tags in (False, True):
            outcomes: Counter[str] = Counter()
            for record in records:
                try:
                    template.text_documents(with_reasoning(record, in_tags=in_tags))
                    outcomes["trained"] += 1
                except RecordError as error:
                    outcomes[error.code] += 1
            print(name, "tags" if in_tags else "field", dict(outcomes), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
