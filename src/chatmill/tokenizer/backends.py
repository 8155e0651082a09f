"""The two engines that encode pure text: gigatoken (fast) and Hugging Face `tokenizers` (reference and fallback)."""

from __future__ import annotations

import contextlib
import tempfile
import unicodedata
import warnings
from collections.abc import Iterator, Sequence
from enum import StrEnum
from functools import cached_property
from itertools import chain, groupby
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from chatmill.core.machine_limits import refuse_out_of_memory
from chatmill.core.texts import Texts
from chatmill.core.tokens import offsets_of
from chatmill.errors import SlowEngineWarning, TokenizerError
from chatmill.tokenizer.json_file import BytePairModel, TokenizerJson

Encoded = tuple[NDArray[np.int32], NDArray[np.int64]]
"""Flat token ids of many texts, and one more offset than there are texts."""
ENGINE_FAILURES = (ValueError, TypeError, KeyError, RuntimeError, NotImplementedError, OSError)
"""What the libraries raise when they cannot load a vocabulary (their Rust errors arrive as one of these)."""


NORMAL_FORMS = frozenset({"", "NFC", "NFD", "NFKC", "NFKD"})
"""No normalizer, and those that leave ASCII text as it is."""
OLDER = "pip install 'tokenizers<1', as tokenizers 1.0 does not say that"
FEW_TEXTS = 64
"""Up to this many texts are passed as strings: a flat array has a fixed cost of half a millisecond."""


class FastEngineMissing(RuntimeError):  # noqa: N818 - it names a state; callers fall back
    """gigatoken cannot be imported: it is not installed, or not for this machine."""


_WARNED: set[str] = set()


def warn_of_fallback(problem: str) -> None:
    """Warn, once in a process, that the reference engine does the work of the fast one."""
    if problem not in _WARNED:
        _WARNED.add(problem)
        warnings.warn(problem, SlowEngineWarning, stacklevel=2)


def _gigatoken() -> Any:
    """Import the library with all that it needs; a broken one may raise anything."""
    try:
        import awkward  # noqa: F401 - gigatoken gives its results as awkward arrays
        import gigatoken
    except Exception as error:
        refuse_out_of_memory(error, "gigatoken cannot be imported")
        raise FastEngineMissing(
            f"gigatoken cannot be imported ({type(error).__name__}: {error}). The reference engine encodes instead: "
            "the same ids, much more slowly. Install it again with: pip install --force-reinstall gigatoken"
        ) from error
    return gigatoken


class Engine(StrEnum):
    """Which library encodes text."""

    FAST = "fast"
    """gigatoken, where it loads the vocabulary and agrees with the reference on the probe."""
    UNCHECKED = "unchecked"
    """gigatoken alone: for workers, which compare it with the answers that their driver has from a reference."""
    REFERENCE = "reference"
    """`tokenizers` or `tiktoken`, without gigatoken: the slow path that proofs are made with."""


class Backend(Protocol):
    """Encodes text that holds no control tokens."""

    name: str

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        """Flat ids and offsets of many texts."""
        ...


class GigatokenBackend:
    """Exact byte-pair encoding at the speed of the machine; one thread, so that processes can share the cores."""

    name = "gigatoken"

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is a `gigatoken.Tokenizer` without added tokens."""
        self._tokenizer = tokenizer

    @classmethod
    def from_json(cls, text: bytes) -> GigatokenBackend:
        """Load a stripped tokenizer.json."""
        return cls(_gigatoken().Tokenizer.from_json(text))

    @classmethod
    def from_o200k(cls, path: str) -> GigatokenBackend:
        """Load the rank file of o200k, without special tokens."""
        return cls(_gigatoken().Tokenizer.from_tiktoken(path, pretokenizer="o200k", special_tokens={}))

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        """Flat ids and offsets of many texts."""
        if not len(texts):
            return np.empty(0, dtype=np.int32), np.zeros(1, dtype=np.int64)
        if isinstance(texts, Texts) and len(texts) > FEW_TEXTS:
            batch = as_awkward(texts)
        else:
            batch = texts if isinstance(texts, list) else list(texts)
        layout = self._tokenizer.encode_batch(batch, parallel=False).layout
        offsets = np.asarray(layout.offsets.data, dtype=np.int64)
        ids = np.asarray(layout.content.data)[offsets[0] : offsets[-1]].view(np.int32)
        return ids, offsets - offsets[0] if offsets[0] else offsets

    def vocabulary(self) -> dict[int, bytes]:
        """Return the bytes of every id."""
        return dict(self._tokenizer.vocab)


def as_awkward(texts: Texts) -> Any:
    """Texts as the flat array of strings that gigatoken reads without making objects of them."""
    import awkward
    from awkward.contents import ListOffsetArray, NumpyArray
    from awkward.index import Index64

    characters = NumpyArray(texts.packed().data, parameters={"__array__": "char"})
    return awkward.Array(ListOffsetArray(Index64(texts.offsets), characters, parameters={"__array__": "string"}))


class HuggingFaceBackend:
    """The `tokenizers` library: slower, knows every model type, and reports where each token is in the text.

    Its version 1.0 does not report that, and has no normalizer to be asked: vocabularies that need either are refused.
    """

    name = "tokenizers"

    def __init__(self, text: bytes, file: TokenizerJson | None = None) -> None:
        """`text` is a tokenizer.json without added tokens and post-processor; it is loaded when it is first needed.

        `file` is the file that it is of, where parts of that are decoded already.
        """
        self._text = text
        self._file = file

    @classmethod
    def from_json(cls, text: bytes, file: TokenizerJson | None = None) -> HuggingFaceBackend:
        """Load a stripped tokenizer.json now."""
        loaded = cls(text, file)
        assert loaded._tokenizer is not None
        return loaded

    @cached_property
    def _tokenizer(self) -> Any:
        with _told_as_errors("this vocabulary cannot be loaded"):
            return self._load()

    def _load(self) -> Any:
        import tokenizers

        if hasattr(tokenizers.Tokenizer, "from_str"):
            file = self._file
            self._file = None
            model = None if file is None else file.byte_pair_model(self._text)
            if model is not None:
                with contextlib.suppress(Exception):  # parsing the file says better what is wrong in it
                    return _from_byte_pairs(model)
            return tokenizers.Tokenizer.from_str(self._text.decode())
        with tempfile.NamedTemporaryFile(suffix=".json") as copy:  # 1.0 reads files alone
            copy.write(self._text)
            copy.flush()
            return tokenizers.Tokenizer.from_file(copy.name)

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        """Flat ids and offsets of many texts."""
        encode = getattr(self._tokenizer, "encode_batch_fast", self._tokenizer.encode_batch)
        with _told_as_errors("this vocabulary cannot encode text"):
            return _flat([encoding.ids for encoding in encode(list(texts), add_special_tokens=False)])

    def id_of(self, token: str) -> int | None:
        """Look up the id of a token; None if the vocabulary does not have it."""
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def tokens_before(self, texts: Sequence[str], cuts: Sequence[int]) -> NDArray[np.int64]:
        """Count, for each text, the tokens that start before character `cuts[i]`."""
        if not hasattr(self._tokenizer, "normalizer"):
            raise TokenizerError(f"this vocabulary needs to know where tokens are in the text: {OLDER}")
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        counts = [
            sum(start < cut for start, _ in encoding.offsets) for encoding, cut in zip(encodings, cuts, strict=True)
        ]
        return np.array(counts, dtype=np.int64)

    def normalize(self, text: str) -> str:
        """Apply the declared normalizer to a text."""
        if hasattr(self._tokenizer, "normalizer"):
            normalizer = self._tokenizer.normalizer
            return text if normalizer is None else str(normalizer.normalize_str(text))
        if self._form not in NORMAL_FORMS:
            raise TokenizerError(f"this vocabulary has a normalizer of its own ({self._form}): {OLDER}")
        return unicodedata.normalize(self._form, text) if self._form else text  # type: ignore[arg-type]

    @cached_property
    def _form(self) -> str:
        """The type of the normalizer."""
        return str((msgspec.json.decode(self._text).get("normalizer") or {}).get("type", ""))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids that hold no control tokens."""
        with _told_as_errors("this vocabulary cannot decode ids"):
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def _from_byte_pairs(model: BytePairModel) -> Any:
    """Make a tokenizer of `tokenizers` whose model is given in Python objects."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(model.shell.decode())
    tokenizer.model = tokenizers.models.BPE(vocab=model.vocab, merges=model.merges, **model.options)
    for is_special, group in groupby(model.added, lambda token: bool(token.get("special"))):
        tokens = [tokenizers.AddedToken(**{name: token[name] for name in token if name != "id"}) for token in group]
        if is_special:
            tokenizer.add_special_tokens(tokens)
        else:
            tokenizer.add_tokens(tokens)
    return tokenizer


@contextlib.contextmanager
def _told_as_errors(doing: str) -> Iterator[None]:
    """Turn a failure of `tokenizers`, which raises bare `Exception`, into an error with its words."""
    try:
        yield
    except (UnicodeError, TypeError):  # the text has no UTF-8 form: the caller says which one
        raise
    except Exception as error:
        refuse_out_of_memory(error, doing)
        raise TokenizerError(f"{doing}: {error}") from None


class TiktokenBackend:
    """The `tiktoken` library, as the reference for .tiktoken rank files."""

    name = "tiktoken"

    def __init__(self, ranks: dict[bytes, int], pattern: str) -> None:
        """`pattern` is the split regular expression itself."""
        import tiktoken

        self._encoding = tiktoken.Encoding("chatmill", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        """Flat ids and offsets of many texts."""
        return _flat([self._encoding.encode_ordinary(text) for text in texts])


def _flat(rows: list[list[int]]) -> Encoded:
    """Return the ids of all texts, and the offsets of each."""
    offsets = offsets_of(np.array(list(map(len, rows)), dtype=np.int64))
    return np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=int(offsets[-1])), offsets
