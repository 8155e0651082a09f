"""Tricky strings on which two engines are compared, in one process or, by the answers of one of them, in two."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chatmill.tokenizer.backends import Backend
from chatmill.tokenizer.tokenizer import Tokenizer

PROBE: tuple[str, ...] = (
    "",
    " ",
    "\n",
    "\n\n\n x\n\n",
    " \t \r\n\r  end",
    "Hello, world! It's what they'll've said; I'M SURE YOU'RE",
    "x=1;y =22;z= 333 ; 4444+55555-666666.7777777 1,234,567.89 ½ Ⅷ ٣٤٥",
    "def f(x):\n\treturn  {'a': [1, 2], \"b\": None}\n\n\n    # comment  \n",
    "https://example.com/a/b?c=d&e=%20#frag user@host.tld C:\\dir\\file.txt",
    "camelCaseHTTPServerID snake_case_name SCREAMING_CASE kebab-case-name",
    "Zürich naïve façade Ångström ﬁ ß ẞ ĳ",
    "Cafe\u0301 e\u0301 \u1100\u1161\u11a8 q\u0307\u0323 \u212b \ufb01",
    "中文分词没有空格，标点「」也要。日本語とカタカナ、ひらがな。한국어 띄어쓰기",
    "العربية مع تشكيلٍ وَأرقام ١٢٣ עברית עם נִקּוּד हिन्दी देवनागरी ภาษาไทยไม่มีเว้นวรรค",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f3f4\U000e0067\U000e007f \u2764\ufe0f 1\ufe0f\u20e3",
    "\ufeffbom\u00a0nbsp\u202fnnbsp\u2028ls\u2029ps\u0085nel\u200bzwsp\u3000wide",
    "a\x00b\x01\x1b[31m\x7f\ue000\uffff\ufffd\U0010ffff",
    "<|im_start|>user\n<|im_end|><|endoftext|> <think>\n</think> <tool_call> <s></s> [INST] <|start|>x<|channel|>",
    "<｜begin▁of▁sentence｜><｜User｜> ▁▁ _ __ ## ##ing",
    "a" * 300 + " " * 70 + "!?" * 40 + "\n" * 33,
    "\u202eevil\u202c Z\u0338\u0322a\u0337 \u200fRTL\u200e",
    "don't DON'T ‘quoted’ “double” …—–",
    "  leading and trailing  ",
    "1234567890" * 12,
    "ῼ ǅ ʰ ⁿ ª º ᾳ Ⓐ ⅷ 𝔘𝔫𝔦 ꙮ",
)


def disagreement(fast: Backend, reference: Backend) -> str | None:
    """Describe the first text of the probe to which two engines give different ids; None if they agree."""
    for text in PROBE:
        ours, _ = fast.encode_batch([text])
        theirs, _ = reference.encode_batch([text])
        if not np.array_equal(ours, theirs):
            return (
                f"{fast.name} and {reference.name} differ on {text[:60]!r}: "
                f"{ours[:12].tolist()} against {theirs[:12].tolist()}"
            )
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAnswers:
    """What a checked tokenizer makes of the probe: small and picklable, for processes that load a fast engine alone."""

    ids: tuple[tuple[int, ...], ...]
    normalized: tuple[str, ...]
    """The texts as the tokenizer's normalizer leaves them."""

    def given_by(self, tokenizer: Tokenizer) -> bool:
        """Return whether a tokenizer gives the same ids, and their bytes, joined, are the normalised texts."""
        return _ids_of(tokenizer) == self.ids and self.bytes_add_up(tokenizer)

    def bytes_add_up(self, tokenizer: Tokenizer) -> bool:
        """Return whether the bytes of the tokens, joined, are the normalised text on the whole probe."""
        return all(
            b"".join(map(tokenizer.text_bytes, row)) == text.encode()
            for row, text in zip(self.ids, self.normalized, strict=True)
        )


def answers_of(tokenizer: Tokenizer) -> ProbeAnswers:
    """Record the answers of a tokenizer whose engine is a reference, or agrees with one."""
    return ProbeAnswers(ids=_ids_of(tokenizer), normalized=tuple(map(tokenizer.normalize, PROBE)))


def _ids_of(tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    encoded = (tokenizer.backend.encode_batch([text])[0] for text in PROBE)  # one by one, as engines are compared
    return tuple(tuple(ids.tolist()) for ids in encoded)
