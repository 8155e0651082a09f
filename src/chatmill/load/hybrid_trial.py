"""Tries which boundaries a hybrid model reads, on a tiny copy of its config with random weights."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from chatmill.core.blocks import boundaries_from_starts
from chatmill.errors import ConfigError
from chatmill.load.boundary_keys import WAYS, Needs, text_config
from chatmill.load.reference_kernels import with_reference_kernels

if TYPE_CHECKING:
    import torch

STARTS, TOKENS = (0, 9, 10), 24
"""Documents of the row that is tried."""
MOVED, ALONE = 1e-6, 1e-3
"""Allowed movement by another document, and difference from a document alone, times the largest logit."""
SMALLEST_WIDTH = 64
WEIGHTS, DECAY = 0.2, -3.0
"""Spread of the weights and logarithm of the decay of states: a leak is to be seen, not to fade."""
LISTS_OF_LAYERS = ("_ids", "_idxs", "_indices")
"""How the names of lists of layer numbers end; lists of words that are as long as the model have one for each layer."""

_FOUND: dict[tuple[type, str], Needs | None] = {}
"""What has been tried in this process, by the class of the model and its tiny config."""


def find_needs(model: Any, config: Any) -> Needs | None:
    """Find the fewest keys with which a tiny copy of a model keeps documents apart; None if none do.

    The copy runs with reference kernels, so this tells what the model passes to its kernels, whichever are installed.
    If a fast kernel is missing, transformers raises an error for a batch with boundaries for it.
    """
    import torch

    text = tiny_config(text_config(config))
    kind = _class_of(model, text)
    key = (kind, text.to_json_string())
    if key in _FOUND:
        return _FOUND[key]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tiny = with_reference_kernels(kind)._from_config(text, experts_implementation="eager").eval()
        for name, parameter in tiny.named_parameters():
            if name.endswith("A_log"):
                parameter.data.fill_(DECAY)
        ids = torch.randint(3, text.vocab_size, (1, TOKENS))
        other = torch.randint(3, text.vocab_size, (1, STARTS[1]))
    found = None
    for needs in map(Needs.of_recurrent, sorted(WAYS, key=len)):
        try:
            if _isolates(tiny, ids, other, needs):
                found = needs
                break
        except (TypeError, ValueError, RuntimeError):
            if not needs.keys:  # the call that all others add to
                raise
    _FOUND[key] = found
    return found


def _isolates(tiny: Any, ids: torch.Tensor, other: torch.Tensor, needs: Needs) -> bool:
    """Return whether later documents do not change with the first, and the last is the same as alone."""
    import torch

    segments = boundaries_from_starts([list(STARTS)], np.array([TOKENS])).segments(TOKENS)
    inputs = {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for name, value in needs.inputs(segments, tiny.dtype).items()
    }
    positions = torch.from_numpy(segments.position_ids)
    last = STARTS[-1]
    with torch.no_grad():
        packed = tiny(input_ids=ids, position_ids=positions, use_cache=False, **inputs).logits
        changed = torch.cat([other, ids[:, STARTS[1] :]], dim=1)
        moved = tiny(input_ids=changed, position_ids=positions, use_cache=False, **inputs).logits
        alone = tiny(input_ids=ids[:, last:], use_cache=False).logits
    scale = max(1.0, float(packed.abs().max()))
    behind = float((packed - moved)[:, STARTS[1] :].abs().max())
    unlike = float((packed[:, last:] - alone).abs().max())
    return behind <= MOVED * scale and unlike <= ALONE * scale


def _class_of(model: Any, text: Any) -> Any:
    """Find the causal language model class of a model or config."""
    import transformers

    kind = type(getattr(model, "get_base_model", lambda: model)())
    if hasattr(kind, "_from_config"):
        return kind
    try:
        return transformers.AutoModelForCausalLM._model_mapping[type(text)]
    except KeyError:
        raise ConfigError(f"transformers has no causal language model for a {type(text).__name__}") from None


def tiny_config(config: Any) -> Any:
    """Return a copy of a config with one layer of each kind, few experts, few heads and a small vocabulary.

    Widths and numbers of heads are divided by one number, and what is in a head is kept, so that products which must
    be equal stay equal.
    """
    tiny = copy.deepcopy(config)
    numbers = {name: value for name, value in config.to_dict().items() if type(value) is int and value > 0}
    widths = [name for name in numbers if name.endswith(("hidden_size", "intermediate_size", "d_ssm", "lru_width"))]
    heads = [name for name in numbers if name.endswith("heads")]
    shared = [name for name in heads if "key" in name] + [name for name in numbers if name.endswith("groups")]
    width = numbers["hidden_size"]
    common = math.gcd(width, *(numbers[name] for name in heads if name not in shared))
    divisor = max(d for d in range(1, common + 1) if common % d == 0 and (d == 1 or width >= d * SMALLEST_WIDTH))
    small = {name: max(1, numbers[name] // divisor) for name in (*widths, *heads, *shared)}
    small |= {name: min(4, numbers[name]) for name in numbers if name.endswith("_experts") and "shared" not in name}
    small |= {name: min(2, numbers[name]) for name in numbers if "experts_per_tok" in name}
    small |= {name: 1 for name in ("n_group", "topk_group", "num_expert_group") if name in numbers}
    small |= {"vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    for name, value in (small | _few_layers(config)).items():
        setattr(tiny, name, value)
    tiny.initializer_range = WEIGHTS
    return tiny


def _few_layers(config: Any) -> dict[str, Any]:
    """Return the lists of a config for the first layer of each kind."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    count = config.num_hidden_layers
    kept = sorted({kind: number for number, kind in reversed(list(enumerate(kinds or ())))}.values())
    if not kept:
        return {"num_hidden_layers": min(count, 4)}
    cut: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        if isinstance(value, list) and name.endswith(LISTS_OF_LAYERS):
            cut[name] = [new for new, old in enumerate(kept) if old in value]
        elif isinstance(value, list) and len(value) == count and all(isinstance(kind, str) for kind in value):
            cut[name] = [value[number] for number in kept]
    return {**cut, "num_hidden_layers": len(kept)}
