"""A small GPT that reads packed rows: RoPE, RMSNorm, grouped queries, SwiGLU, a tied or untied head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import silu

from chatmill.errors import ConfigError, UnknownNameError, member
from chatmill.train.attention import (
    Attention,
    Form,
    RowDocuments,
    attend,
    choose_attention,
    documents_of_positions,
    prepare,
    whole_row_documents,
)
from chatmill.train.checkpoint import load_module, save_module

if TYPE_CHECKING:
    from chatmill.train.trainer import FitResult


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """The sizes of a GPT."""

    vocab_size: int
    layers: int = 12
    hidden: int = 768
    heads: int = 12
    kv_heads: int | None = None
    """Heads of keys and values; None: as many as `heads`."""
    ffn: int | None = None
    """Width inside the SwiGLU; None: 8/3 of `hidden`, rounded up to a multiple of 64."""
    tied: bool = True
    """Whether the head shares the embedding's weight."""
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    init_std: float = 0.02

    def __post_init__(self) -> None:
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.ffn is None:
            object.__setattr__(self, "ffn", -(-self.hidden * 8 // (3 * 64)) * 64)
        for name in ("vocab_size", "layers", "hidden", "heads", "kv_heads", "ffn"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"model: {name} is {value!r}; it must be a whole number, 1 or more")
        if self.hidden % self.heads or (self.hidden // self.heads) % 2:
            raise ConfigError(
                f"model: hidden {self.hidden} by heads {self.heads} must give an even whole number per head"
            )
        if self.heads % self.key_heads:
            raise ConfigError(f"model: heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")

    @property
    def head_size(self) -> int:
        """Numbers per head."""
        return self.hidden // self.heads

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        assert self.kv_heads is not None
        return self.kv_heads

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> GPTConfig:
        """What `to_json` gave; an unknown name is refused."""
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise UnknownNameError("size of the model", name, known)
        return cls(**values)


Slot = list[torch.Tensor]
"""Keys and values of one layer while decoding, (rows, kv heads, tokens so far, size) each; empty at first."""


class RMSNorm(nn.Module):
    """Divides by the root mean square, in float32 at least, and scales."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., size) -> the same shape and dtype."""
        wide = x if x.dtype == torch.float64 else x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (scaled * self.weight).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions: pairs of the first and second half of each head turn by their angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Block(nn.Module):
    """Attention and SwiGLU, each behind a norm and added to the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = config.heads, config.key_heads, config.head_size
        assert config.ffn is not None
        self.attention_norm = RMSNorm(config.hidden, config.norm_eps)
        self.qkv = nn.Linear(config.hidden, (self.heads + 2 * self.kv_heads) * self.size, bias=False)
        self.attention_out = nn.Linear(config.hidden, config.hidden, bias=False)
        self.ffn_norm = RMSNorm(config.hidden, config.norm_eps)
        self.ffn_in = nn.Linear(config.hidden, 2 * config.ffn, bias=False)
        self.ffn_out = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, form: Form, slot: Slot | None = None
    ) -> torch.Tensor:
        """(rows, width, hidden) -> the same shape; with a slot, `x` holds what is new."""
        rows, width, hidden = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(rows, width, -1, self.size).transpose(1, 2)
        query, key, value = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        query, key = (rotate(part, cos, sin).to(value.dtype) for part in (query, key))
        if slot is not None:
            slot[:] = (torch.cat(pair, dim=2) for pair in zip(slot or (key[:, :, :0],) * 2, (key, value), strict=True))
            key, value = slot
        mixed = attend(query, key, value, form).transpose(1, 2).reshape(rows, width, hidden)
        x = x + self.attention_out(mixed)
        gate, up = self.ffn_in(self.ffn_norm(x)).chunk(2, dim=-1)
        out: torch.Tensor = x + self.ffn_out(silu(gate) * up)
        return out


class GPT(nn.Module):
    """A decoder of the common kind; `model(input_ids, position_ids)` gives logits (rows, width, vocabulary)."""

    def __init__(self, config: GPTConfig, *, attention: Attention | str = Attention.AUTO) -> None:
        """Random weights from torch's global seed."""
        super().__init__()
        self.config = config
        self.attention = member(Attention, "attention", attention)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        self.head = None if config.tied else nn.Linear(config.hidden, config.vocab_size, bias=False)
        half = torch.arange(0, config.head_size, 2, dtype=torch.float32)
        self.register_buffer("frequencies", config.rope_theta ** (-half / config.head_size), persistent=False)
        self.frequencies: torch.Tensor
        self._init_weights()

    def _init_weights(self) -> None:
        """Normal; what writes into the stream is smaller the more layers there are."""
        std = self.config.init_std
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                scale = (2 * self.config.layers) ** -0.5 if name.endswith("_out.weight") else 1.0
                nn.init.normal_(parameter, std=std * scale)

    head_is_linear = True
    """Logits are the hidden states times `head_weight`, nothing more."""

    @property
    def head_weight(self) -> torch.Tensor:
        """(vocabulary, hidden): logits are `hidden @ head_weight.T`."""
        return self.embedding.weight if self.head is None else self.head.weight

    def hidden_states(self, input_ids: torch.Tensor, documents: RowDocuments) -> torch.Tensor:
        """The last hidden states (rows, width, hidden), documents kept apart."""
        x = self.embedding(input_ids)
        kind = choose_attention(self.attention, x.device, _activation_dtype(x))
        form = prepare(documents, kind)
        cos, sin = self._angles(documents.position_ids, x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin, form)
        out: torch.Tensor = self.norm(x)
        return out

    def step(self, input_ids: torch.Tensor, position: int, cache: list[Slot]) -> torch.Tensor:
        """Decoding: the logits (rows, vocabulary) behind new tokens that begin at `position`; fills the cache.

        `cache` has one slot per layer; after the first call, one new token at a time.
        """
        x = self.embedding(input_ids)
        places = torch.arange(position, position + input_ids.shape[1], device=x.device).expand(input_ids.shape)
        cos, sin = self._angles(places, x.dtype)
        for block, slot in zip(self.blocks, cache, strict=True):
            x = block(x, cos, sin, None, slot)
        logits: torch.Tensor = self.norm(x[:, -1]) @ self.head_weight.T.to(x.dtype)
        return logits

    def _angles(self, position_ids: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin (rows, 1, width, size / 2), in float32 at least."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        angles = position_ids[:, None, :, None].to(wide) * self.frequencies.to(wide)
        return angles.cos(), angles.sin()

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits (rows, width, vocabulary); documents begin where positions are 0, or where `seq_idx` changes.

        Training never calls this: it needs the hidden states alone.
        """
        if position_ids is None and seq_idx is None:
            documents = whole_row_documents(input_ids.shape, input_ids.device)
        elif position_ids is None:
            raise ConfigError("give position_ids with seq_idx: they begin at 0 in every document")
        else:
            documents = documents_of_positions(position_ids, seq_idx)
        hidden = self.hidden_states(input_ids, documents)
        return hidden @ self.head_weight.T.to(hidden.dtype)

    def grow(self, rows: int) -> None:
        """More rows of the embedding (and of an untied head); each new one is the mean of the old ones."""
        weight = grown_rows(self.embedding.weight.data, rows)
        self.embedding = nn.Embedding(rows, weight.shape[1], _weight=weight)
        if self.head is not None:
            head = nn.Linear(self.config.hidden, rows, bias=False).to(self.head.weight)
            head.weight.data = grown_rows(self.head.weight.data, rows)
            self.head = head
        self.config = replace(self.config, vocab_size=rows)

    def save_weights(self, folder: Path) -> None:
        """`model.safetensors` and `model.json`."""
        save_module(folder, self, self.config.to_json())

    def load_weights(self, folder: Path) -> None:
        """What `save_weights` wrote; the sizes must be these."""
        load_module(folder, self)

    def compile_layers(self) -> None:
        """Compile the code that all layers share, once."""
        for block in self.blocks:
            block.compile(dynamic=False)

    def fit(self, loader: Any, **options: Any) -> FitResult:
        """Train on a loader of spec 4 (or any iterable of its batches); see `chatmill.train.trainer.fit`."""
        from chatmill.train.trainer import fit

        return fit(self, loader, **options)


def grown_rows(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """A weight with more rows: the old ones, and their mean in each new one."""
    mean = weight.float().mean(0, keepdim=True).to(weight.dtype)
    return torch.cat([weight, mean.expand(rows - len(weight), *weight.shape[1:])])


def _activation_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype in which linear layers compute: autocast's, where it is on."""
    return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
