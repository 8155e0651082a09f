"""Pictures by the slow path: every token of every picture, and a sample through the model's own processor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from chatmill.core.conversation import Conversation
from chatmill.core.kinds import PICTURE
from chatmill.core.pictures import Picture
from chatmill.errors import RecordError
from chatmill.images.expand import spelled_error
from chatmill.images.files import Pictures, Shown
from chatmill.load.pictures import made_grids
from chatmill.prove.plain import PlainText, SpelledToken
from chatmill.prove.rows import PlainRow
from chatmill.render.model_template import ModelTemplate

SAMPLE = 16
"""Pictures of a chunk that are processed, at least, where it has as many."""


def shown_in(template: ModelTemplate, conversation: Conversation) -> list[Shown]:
    """Return the pictures of a conversation, in order; a `RecordError` for one that cannot be used."""
    pictures = [
        (part, f"messages[{k}].content[{j}]")
        for k, message in enumerate(conversation.messages)
        for j, part in enumerate(message.parts)
        if isinstance(part, Picture)
    ]
    return template.pictures.look(pictures) if pictures else []


def expanded(
    template: ModelTemplate, row: PlainRow, shown: Sequence[Shown]
) -> tuple[PlainRow, list[tuple[int, int, Shown]]]:
    """The tokens of a document with pictures in their places, and the first token and the end of each picture."""
    expander = template.expander
    if expander is None:
        return row, []
    row_made = PlainRow()
    spans: list[tuple[int, int, Shown]] = []
    written = sum(pair == (expander.token, PICTURE) for pair in zip(row.ids, row.kinds, strict=True))
    columns = (row.ids, row.kinds, row.messages, row.logprobs, row.stated)
    for token, kind, message, logprob, stated in zip(*columns, strict=True):
        new = [token]
        if token == expander.token and kind != PICTURE:
            raise spelled_error(expander.rule)
        if token == expander.token:
            if len(spans) == len(shown):
                raise RecordError("the template writes more placeholders than there are pictures", code="images_differ")
            picture = shown[len(spans)]
            new = []
            for text, count in expander.rule.pieces(picture.grid, (picture.height, picture.width), written - 1):
                control = template.tokenizer.control_ids.get(text)
                new += (template.tokenizer.encode(text) if control is None else [control]) * count
            spans.append((len(row_made.ids), len(row_made.ids) + len(new), picture))
        row_made.add(new, [kind] * len(new), message, [logprob] * len(new))
        if token != expander.token:
            row_made.stated[-1] = stated
    return row_made, spans


class ProcessorSample:
    """Runs the first pictures that it sees through the model's own image processor."""

    def __init__(self, pictures: Pictures, model: str) -> None:
        """`model` is the model's folder, or a file in it."""
        path = Path(model)
        self._pictures, self._model = pictures, str(path.parent if path.is_file() else path)
        self._left = SAMPLE
        self.processed = 0
        self.blocked = ""
        """Why no picture could be processed."""

    def wrong(self, conversation: Conversation, shown: Sequence[Shown]) -> Iterator[str]:
        """Yield what the processor makes of pictures, where it is not what was compiled."""
        rule, sources = (
            self._pictures.rule,
            [picture for message in conversation.messages for picture in message.pictures],
        )
        if isinstance(rule, str) or self._left <= 0 or not shown:
            return
        self._left -= len(shown)
        try:
            grids = made_grids(rule, self._model, [self._pictures.read(picture) for picture in sources])
        except ImportError as error:
            self._left, self.blocked = 0, str(error).strip().partition("\n")[0] or rule.family
            return
        self.processed += len(shown)
        for picture, grid in zip(shown, grids, strict=True):
            if picture.grid != grid:
                place = picture.place or "a picture"
                yield f"the model's processor makes {grid} of {place}, and {picture.grid} was compiled"


def processed(text: PlainText, placeholder: str, written: str, names: Sequence[SpelledToken]) -> PlainText:
    """Return a rendering with what the processor writes in the place of a placeholder; `names` are the tokens in it."""
    parts, tokens, at, size = [], [], 0, 0
    for token in text.tokens:
        gap = text.text[at : token.start]
        start = size + len(gap)
        new = written if token.name == placeholder else token.name
        parts += [gap, new]
        if token.name == placeholder:
            tokens += [SpelledToken(name.start + start, name.stop + start, name.name) for name in names]
        else:
            tokens.append(SpelledToken(start, start + len(new), token.name))
        at, size = token.stop, start + len(new)
    return PlainText("".join([*parts, text.text[at:]]), tuple(tokens), text.unknown)
