"""Any causal language model of transformers in the same trainer: hidden states, head, and how documents stay apart.

Packed documents are kept apart in the way that the isolation check of this package finds to work with the model:
position ids without an attention mask and without a cache, else an additive 4D mask; a model for which neither does
is refused.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn

from chatmill.errors import ConfigError
from chatmill.load.document_masks import dense_document_mask
from chatmill.train.attention import RowDocuments, documents_of_positions, whole_row_documents
from chatmill.train.hf_model import load_hf_model
from chatmill.train.isolation import check_isolation

PROBE = (8, 1, 7, 16)
"""Documents of the row on which a model is tried."""


class ForeignModel(nn.Module):
    """A transformers model as the trainer sees one."""

    def __init__(self, model: Any) -> None:
        """`model` as `AutoModelForCausalLM` gave it."""
        super().__init__()
        self.inner = model
        model.config.use_cache = False
        takes = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in takes
        self._takes_cache = "use_cache" in takes
        self._with_mask: bool | None = None
        self.head_is_linear = self._head_is_linear()

    @property
    def head_weight(self) -> torch.Tensor:
        """(vocabulary, hidden)."""
        weight: torch.Tensor = self.inner.get_output_embeddings().weight
        return weight

    def hidden_states(self, input_ids: torch.Tensor, documents: RowDocuments) -> torch.Tensor:
        """The last hidden states, behind the final norm."""
        hidden: torch.Tensor = self.inner.base_model(input_ids=input_ids, **self._boundaries(documents))[0]
        return hidden

    def logits(self, input_ids: torch.Tensor, documents: RowDocuments) -> torch.Tensor:
        """(rows, width, vocabulary): for models that do more to the head's output than the product."""
        logits: torch.Tensor = self.inner(input_ids=input_ids, **self._boundaries(documents)).logits
        return logits

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, seq_idx: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits of packed rows, as `chatmill.train.gpt.GPT` gives them."""
        return self.logits(input_ids, documents_of_positions(position_ids, seq_idx))

    def _boundaries(self, documents: RowDocuments) -> dict[str, Any]:
        given: dict[str, Any] = {"use_cache": False} if self._takes_cache else {}
        if self._takes_positions:
            given["position_ids"] = documents.position_ids
        if documents.seq_idx is not None:
            if self._with_mask is None:
                self._with_mask = self._needs_mask()
            if self._with_mask:
                given["attention_mask"] = dense_document_mask(documents.seq_idx, self.inner.dtype)
        return given

    def _needs_mask(self) -> bool:
        """Try the two ways on a small packed row; the first that isolates is used."""
        ids, positions = self._probe()
        reports = []
        for with_mask in (False, True):
            self._with_mask = with_mask
            reports.append(check_isolation(self, {"input_ids": ids, "position_ids": positions}))
            if reports[-1].passed:
                return with_mask
        self._with_mask = None
        raise ConfigError(
            f"{type(self.inner).__name__} lets packed documents see each other, by position ids and by a 4D mask "
            f"alike; train it on rows of one episode each (pack: false).\n{reports[0]}"
        )

    def _probe(self) -> tuple[torch.Tensor, torch.Tensor]:
        device = self.head_weight.device
        generator = torch.Generator().manual_seed(0)
        vocabulary = min(len(self.head_weight), 1000)
        ids = torch.randint(0, vocabulary, (1, sum(PROBE)), generator=generator)
        return ids.to(device), torch.cat([torch.arange(n) for n in PROBE])[None].to(device)

    @torch.no_grad()
    def _head_is_linear(self) -> bool:
        """Whether logits are the hidden states times the head's weight; a soft cap or a scale says no."""
        head = self.inner.get_output_embeddings()
        if head is None or getattr(head, "bias", None) is not None:
            return False
        was_training = self.inner.training
        self.inner.eval()
        ids, _ = self._probe()
        ids = ids[:, : PROBE[0]]
        documents = whole_row_documents(ids.shape, ids.device)
        logits = self.logits(ids, documents)
        product = self.hidden_states(ids, documents) @ head.weight.T
        self.inner.train(was_training)
        return bool(torch.allclose(logits, product.to(logits.dtype), rtol=1e-2, atol=1e-3))

    @torch.no_grad()
    def grow(self, rows: int) -> None:
        """More rows of embedding and head; each new one is the mean of the old ones."""
        old = len(self.inner.get_input_embeddings().weight)
        self.inner.resize_token_embeddings(rows, mean_resizing=False)
        head = self.inner.get_output_embeddings()
        for part in (self.inner.get_input_embeddings().weight, head.weight, getattr(head, "bias", None)):
            if part is not None:
                part[old:] = part[:old].float().mean(0).to(part.dtype)

    def save_weights(self, folder: Path) -> None:
        """A folder that transformers can open."""
        self.inner.save_pretrained(folder, safe_serialization=True)

    def load_weights(self, folder: Path) -> None:
        """What `save_weights` wrote, into this model."""
        stored = load_hf_model(folder, dtype=str(self.inner.dtype).removeprefix("torch."))
        self.inner.load_state_dict(stored.state_dict())

    def compile_layers(self) -> None:
        """Compile the whole model: its layers are not known here."""
        self.inner.base_model.compile()

    def fit(self, loader: Any, **options: Any) -> Any:
        """Train; see `chatmill.train.trainer.fit`."""
        from chatmill.train.trainer import fit

        return fit(self, loader, **options)


def load_foreign(
    folder: str | Path, *, dtype: torch.dtype = torch.float32, random_weights: bool = False
) -> ForeignModel:
    """A model folder of transformers (config.json and weights); nothing is downloaded.

    `random_weights` reads config.json alone and draws weights from torch's global seed.
    """
    name = str(dtype).removeprefix("torch.")
    return ForeignModel(load_hf_model(folder, dtype=name, random_weights=random_weights))
