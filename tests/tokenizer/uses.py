"""Everything that a build does with the tokenizer and the template of a model folder."""

from __future__ import annotations

import itertools
from pathlib import Path

import chatmill
from chatmill.core.conversation import Conversation, Message, Role
from chatmill.render.registry import bind, has_template
from chatmill.tokenizer.backends import Engine
from chatmill.tokenizer.load import load_tokenizer, with_control_tokens
from chatmill.tokenizer.tokenizer import Tokenizer

TEXTS = ["", " ", "hi a", "a  b\n", "<|im_end|> <tool>x", "ça 漢字 😀"]
CHATS = [
    Conversation((Message(Role.USER, "hi a"), Message(Role.ASSISTANT, "ab <tool> 漢"))),
    Conversation((Message(Role.USER, " hi"), Message(Role.ASSISTANT, ""))),
]


def use_folder(folder: Path) -> None:
    """Load, encode, decode, render with the folder's own template; whatever is wrong in the files is raised."""
    has_template(folder)
    for tokenizer in (load_tokenizer(folder), load_tokenizer(folder, engine=Engine.REFERENCE, strict_text=True)):
        for one in (tokenizer, with_control_tokens(tokenizer, ["<|new|>"]), tokenizer.for_documents()):
            _encode(one)
        template = bind(str(folder), tokenizer)
        chatmill.render_conversations(CHATS, template)


def _encode(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.fingerprint) == 64
    for encode in (tokenizer.encode_batch, tokenizer.encode_documents):
        ids, offsets = encode(TEXTS)
        assert offsets[-1] == len(ids)
        assert not len(ids) or 0 <= ids.min() <= ids.max() < tokenizer.vocab_size
        for begin, end in itertools.pairwise(offsets):
            tokenizer.decode(ids[begin:end])
