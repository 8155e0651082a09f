"""The device that a user names, checked once and in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chatmill.errors import ConfigError

if TYPE_CHECKING:
    import torch


def named_device(name: Any) -> torch.device:
    """The torch device of a name; one that does not exist, or is not in this machine, is a `ConfigError`."""
    import torch

    try:
        device = torch.device(name)
    except (RuntimeError, TypeError, ValueError):
        raise ConfigError(f"device is {name!r}; give cpu, cuda, cuda:1, mps, ...") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r}, but torch sees no GPU here: give cpu, or install torch with CUDA")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device is {name!r}, but there are {torch.cuda.device_count()} GPUs, counted from 0")
    return device
