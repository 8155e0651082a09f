"""What has to be set so that megatron-core trains on CPUs: it names the device "cuda" in many places.

- Tensors that are made on, or moved to, "cuda" stay on the CPU (a torch function mode).
- `torch.cuda.current_device()` answers "cpu", and `torch.cuda.current_stream()` something that is there (0.19 asks).
- The tracker of CUDA random states is the one for inference, which does nothing. So dropout must be 0.
- Weights are initialized on the CPU (`use_cpu_initialization`), which also makes them equal for any tensor parallelism.
- Gradients are not clipped (`clip_grad=0`): megatron-core's clipping asserts CUDA tensors.

Not for training: for tests, and for trying a script before a GPU is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from torch.overrides import TorchFunctionMode


class _CudaIsCpu(TorchFunctionMode):
    """Every call that names a CUDA device means the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        named = {name: _cpu(value) if name == "device" else value for name, value in (kwargs or {}).items()}
        if func is torch.Tensor.to:
            args = [_cpu(value) for value in args]
        return func(*args, **named)


def _cpu(value: Any) -> Any:
    is_cuda = isinstance(value, (str, torch.device)) and str(value).startswith("cuda")
    return "cpu" if is_cuda else value


@contextlib.contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Inside, megatron-core runs on the CPU."""
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    with (
        mock.patch.object(torch.cuda, "current_device", return_value="cpu"),
        mock.patch.object(torch.cuda, "current_stream"),
        _CudaIsCpu(),
    ):
        yield
