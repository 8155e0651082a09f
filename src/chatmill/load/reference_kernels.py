"""Reference kernels in plain PyTorch, which keep packed documents apart, in place of the fast ones of hybrid models.

They have the names and the signatures of causal_conv1d, mamba_ssm and flash-linear-attention, as far as boundaries go:
whether a model hands the boundaries of its batch to its kernels can be seen with them on any machine. They go token
by token, so they are slow.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

from chatmill.errors import ConfigError

Tensor = torch.Tensor
COPY = "_with_reference_kernels"
"""What the copy of a module is called after the module's name."""


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Convolve x (batch, channels, tokens) with weight (channels, width); a token sees its own document alone."""
    width, tokens = weight.shape[1], x.shape[2]
    number = x.new_zeros((len(x), tokens), dtype=torch.int32) if seq_idx is None else seq_idx
    before = functional.pad(x, (width - 1, 0))
    numbers = functional.pad(number, (width - 1, 0))
    out = torch.zeros_like(x) if bias is None else bias[:, None].to(x).expand_as(x)
    for place in range(width):
        same = (numbers[:, place : place + tokens] == number)[:, None]
        out = out + torch.where(same, before[:, :, place : place + tokens], 0) * weight[:, place, None]
    return functional.silu(out) if activation in ("silu", "swish") else out


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    *,
    D: Tensor,
    dt_bias: Tensor,
    z: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
) -> Any:
    """Return the scan of Mamba 2 over x (batch, tokens, heads, dim) and B, C (batch, tokens, groups, state)."""
    kind = _accurate(x)
    values, steps = x.to(kind), dt.to(kind) + dt_bias.to(kind)
    steps = (functional.softplus(steps) if dt_softplus else steps).clamp(*dt_limit)
    heads = x.shape[2] // B.shape[2]
    into, out_of = (matrix.to(kind).repeat_interleave(heads, dim=2) for matrix in (B, C))
    decay = _kept((steps * A.to(kind)).exp(), seq_idx)
    state = values.new_zeros((len(x), *x.shape[2:], B.shape[3])) if initial_states is None else initial_states.to(kind)
    written = []
    for t in range(x.shape[1]):
        update = (steps[:, t, :, None] * values[:, t])[..., None] * into[:, t, :, None]
        state = state * decay[:, t, :, None, None] + update
        written.append((state * out_of[:, t, :, None]).sum(-1))
    scanned = torch.stack(written, dim=1) + values * D[:, None].to(kind)
    if z is not None:
        scanned = scanned * functional.silu(z.to(kind))
    scanned = scanned.to(x.dtype)
    return (scanned, state) if return_final_states else scanned


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    activation: str = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Any:
    """Return all of a Mamba 2 layer after its first projection, as training calls it."""
    heads, channels = len(A), len(conv1d_weight)
    inner = zxbcdt.shape[-1] - channels - heads
    gate, mixed, dt = torch.split(zxbcdt, [inner, channels, heads], dim=-1)
    mixed = causal_conv1d_fn(mixed.transpose(1, 2), conv1d_weight, conv1d_bias, seq_idx, activation).transpose(1, 2)
    x, B, C = torch.split(mixed, [inner, (channels - inner) // 2, (channels - inner) // 2], dim=-1)
    out, state = mamba_chunk_scan_combined(
        x.reshape(*x.shape[:2], heads, -1),
        dt,
        A,
        B.reshape(*B.shape[:2], ngroups, -1),
        C.reshape(*C.shape[:2], ngroups, -1),
        chunk_size,
        D=D,
        dt_bias=dt_bias,
        initial_states=initial_states,
        seq_idx=seq_idx,
        dt_softplus=True,
        dt_limit=dt_limit,
        return_final_states=True,
    )
    out = out.flatten(-2)
    gated = functional.silu(gate)
    if rmsnorm_weight is None:
        out = out * gated
    else:
        normed = (out if norm_before_gate else out * gated).reshape(*out.shape[:2], ngroups, -1)
        normed = functional.rms_norm(normed, normed.shape[-1:], eps=rmsnorm_eps).flatten(-2) * rmsnorm_weight
        out = normed * gated if norm_before_gate else normed
    if outproj_weight is not None:
        out = functional.linear(out.to(outproj_weight.dtype), outproj_weight, outproj_bias)
    return (out, state) if return_final_states else out


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule over q, k, v (batch, tokens, heads, dim); g (batch, tokens, heads) is a log of decays.

    In Kimi's rule every channel of the keys has its own: g (batch, tokens, heads, dim).
    """
    decay = g if g.ndim == q.ndim else g[..., None]
    kind = _accurate(q)
    query, key, value, rate = (tensor.to(kind) for tensor in (q, k, v, beta))
    if use_qk_l2norm_in_kernel:
        query, key = (t * torch.rsqrt((t * t).sum(-1, keepdim=True) + 1e-6) for t in (query, key))
    query = query * (q.shape[-1] ** -0.5 if scale is None else scale)
    kept = _kept(decay.to(kind).exp(), _numbers(cu_seqlens, q))
    shape = (len(q), *k.shape[2:], v.shape[-1])
    state = value.new_zeros(shape) if initial_state is None else initial_state.to(kind)
    written = []
    for t in range(q.shape[1]):
        state = state * kept[:, t, ..., None]
        recalled = (state * key[:, t, ..., None]).sum(-2)
        state = state + key[:, t, ..., None] * (rate[:, t, :, None] * (value[:, t] - recalled))[..., None, :]
        written.append((state * query[:, t, ..., None]).sum(-2))
    return torch.stack(written, dim=1).to(q.dtype), state if output_final_state else None


def _accurate(tensor: Tensor) -> torch.dtype:
    """Return what kernels calculate in: float32, as the fast ones, or float64 in a model of float64."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _kept(decay: Tensor, numbers: Tensor | None) -> Tensor:
    """Return what each token keeps of the state before it: its decay, or nothing at the first token of a document."""
    if numbers is None:
        return decay
    begins = torch.diff(numbers, dim=1, prepend=numbers[:, :1] - 1) != 0
    return torch.where(begins.view(*begins.shape, *[1] * (decay.ndim - 2)), 0, decay)


def _numbers(cu_seqlens: Tensor | None, q: Tensor) -> Tensor | None:
    """Return the number of each token's document; as the fast kernels, of one row only."""
    if cu_seqlens is None:
        return None
    if len(q) != 1:
        raise ValueError(f"cu_seqlens is for one row of all documents, and there are {len(q)} rows")
    places = torch.arange(q.shape[1], device=q.device)
    return torch.searchsorted(cu_seqlens.to(places)[1:], places, right=True)[None]


def _package(name: str, **functions: Any) -> ModuleType:
    package = ModuleType(name)
    package.__spec__ = importlib.util.spec_from_loader(name, loader=None)
    vars(package).update(functions)
    return package


def _packages() -> dict[str, ModuleType]:
    """Return the packages of the fast kernels with the reference kernels inside."""
    scans = SimpleNamespace(
        mamba_chunk_scan_combined=mamba_chunk_scan_combined,
        mamba_split_conv1d_scan_combined=mamba_split_conv1d_scan_combined,
    )
    rules = SimpleNamespace(chunk_gated_delta_rule=chunk_gated_delta_rule)
    linear = SimpleNamespace(gated_delta_rule=rules, kda=SimpleNamespace(chunk_kda=chunk_gated_delta_rule))
    return {
        "causal_conv1d": _package("causal_conv1d", causal_conv1d_fn=causal_conv1d_fn),
        "mamba_ssm": _package("mamba_ssm", ops=SimpleNamespace(triton=SimpleNamespace(ssd_combined=scans))),
        "fla": _package("fla", ops=linear),
    }


@contextmanager
def _importable(packages: dict[str, ModuleType]) -> Iterator[None]:
    """`import` gives these packages, whatever is installed."""
    before = {name: sys.modules.get(name) for name in packages}
    sys.modules.update(packages)
    try:
        yield
    finally:
        for name, package in before.items():
            del sys.modules[name]
            if package is not None:
                sys.modules[name] = package


def with_reference_kernels(model_class: type) -> Any:
    """Return the same class of transformers, out of a copy of its module that has found the reference kernels.

    Modules choose their kernels when they are imported, so the copy leaves the model's own module as it is.
    """
    name = model_class.__module__ + COPY
    if name not in sys.modules:
        file = getattr(sys.modules[model_class.__module__], "__file__", None)
        spec = importlib.util.spec_from_file_location(name, file) if file else None
        if spec is None or spec.loader is None:
            raise ConfigError(f"{model_class.__name__} has no source file, so it cannot be given reference kernels")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            with _importable(_packages()):
                spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return getattr(sys.modules[name], model_class.__name__)
