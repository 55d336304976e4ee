"""The table of attention implementations: naive, compiled, tiled, Triton, PyTorch's SDPA.

All follow `attention.py`: the arguments `(q, k, v, causal)`, the checks, the mask.  Naive attention is called
"explicit" in the table, as in recorded runs.
"""

import shutil
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from labkit.nn.attention import (
    ALL_DTYPES,
    Attention,
    check_attention_inputs,
    dtype_name,
    naive_attention,
    naive_attention_unchecked,
    query_group,
)
from labkit.nn.tiled_attention import TiledAttention
from labkit.nn.triton_launches import NO_TRITON, has_triton, no_launch_reason

COMPILED_FROM = (7, 0)
"""The oldest compute capability that `torch.compile` compiles for (`torch._dynamo.device_interface`)."""
GRAPH_LIMIT = 256
"""Graphs that `torch.compile` may make of naive attention in a process; PyTorch's limit is 8."""


@dataclass(frozen=True)
class Implementation:
    """A row of `IMPLEMENTATIONS`."""

    name: str
    attend: Attention
    """(q, k, v, causal) -> output; differentiable."""
    unavailable_reason: Callable[[torch.device, torch.dtype, int], str | None]
    """(device, dtype, head_dim) -> the reason why it cannot run there, or None."""


def attention_named(name: str) -> Implementation:
    """Look an implementation up; ValueError that lists the names there are."""
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"no attention named {name!r}; there are {', '.join(IMPLEMENTATIONS)}")
    return IMPLEMENTATIONS[name]


def _compiled(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """`torch.compile` of naive attention, one graph per shape.

    A sweep has more shapes than the 8 graphs a function gets by default.  The limit is raised, and `fullgraph` raises
    beyond it, where torch would silently return to eager mode.
    """
    check_attention_inputs(q, k, v)
    with torch._dynamo.config.patch(recompile_limit=GRAPH_LIMIT, accumulated_recompile_limit=4 * GRAPH_LIMIT):
        return _compiled_naive()(q, k, v, causal)


@cache
def _compiled_naive() -> Attention:
    return torch.compile(naive_attention_unchecked, fullgraph=True, dynamic=False)


def _tiled(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return TiledAttention.apply(q, k, v, causal)


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    from labkit.nn.flash_attention import flash_attention  # needs Triton, which not every machine has

    return flash_attention(q, k, v, causal)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool, *, backend: SDPBackend | None = None) -> Tensor:
    check_attention_inputs(q, k, v)
    # the fused backends want exactly (batch, heads, sequence, head_dim)
    q4, k4, v4 = (x.reshape(1, -1, *x.shape[-2:]) if x.dim() != 4 else x for x in (q, k, v))
    grouped = query_group(q, k) > 1
    with nullcontext() if backend is None else sdpa_kernel(backend):
        return scaled_dot_product_attention(q4, k4, v4, is_causal=causal, enable_gqa=grouped).reshape(q.shape)


# ------------------------------------------------------------------------------------- availability


def _dtype_reason(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    return None if dtype in ALL_DTYPES else f"not defined for {dtype_name(dtype)}"


def no_compiler_reason(device_type: str) -> str | None:
    """Why `torch.compile` cannot compile for "cpu" or "cuda" here, or None."""
    if device_type == "cuda":
        capability = torch.cuda.get_device_capability()
        if capability < COMPILED_FROM:
            return f"torch.compile needs compute capability 7.0 or newer, not {capability[0]}.{capability[1]}"
        reason = no_launch_reason()
        return None if reason is None else f"torch.compile needs Triton on a GPU: {reason}"
    if device_type == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++", "cl"))):
        return "torch.compile needs a C++ compiler on a CPU; there is none on the path"
    return None


def _no_compiled_reason(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    return no_compiler_reason(device.type) or _dtype_reason(device, dtype, head_dim)


def _no_flash_reason(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    if not has_triton():
        return NO_TRITON
    from labkit.nn.flash_attention import unavailable_reason

    return unavailable_reason(device, dtype, head_dim)


def _no_sdpa_reason(attend: Attention) -> Callable[[torch.device, torch.dtype, int], str | None]:
    """Try forward and backward of one small problem.  PyTorch's error and warnings are the reason."""

    def reason(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        with warnings.catch_warnings(record=True) as caught, torch.enable_grad():
            warnings.simplefilter("always")
            try:
                q, k, v = torch.zeros(3, 1, 2, 64, head_dim, device=device, dtype=dtype).requires_grad_()
                attend(q, k, v, False).sum().backward()
            except Exception as error:  # of any type: each library that a backend calls has its own
                message = str(error).partition("\n")[0] or type(error).__name__
                return " ".join([message, *(str(warning.message) for warning in caught)])
        return None

    return reason


SDPA_BACKENDS = {
    "sdpa_math": SDPBackend.MATH,
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa": None,  # torch's choice
}
IMPLEMENTATIONS: dict[str, Implementation] = {
    "explicit": Implementation("explicit", naive_attention, _dtype_reason),
    "compiled": Implementation("compiled", _compiled, _no_compiled_reason),
    "tiled": Implementation("tiled", _tiled, _dtype_reason),
    "flash": Implementation("flash", _flash, _no_flash_reason),
}
"""All implementations by name, with SDPA's backends below; `register` adds a user-defined one."""
for name, backend in SDPA_BACKENDS.items():
    IMPLEMENTATIONS[name] = Implementation(name, attend := partial(_sdpa, backend=backend), _no_sdpa_reason(attend))
RESERVED = frozenset(IMPLEMENTATIONS)


def register(name: str, attend: Attention) -> dict[str, Implementation]:
    """Add a user-defined attention: (q, k, v, causal) -> output, each (batch, sequence, head_dim).

    Its scale is 1/sqrt(head_dim), and it must be differentiable. ValueError for a name that is taken.
    """
    if name in RESERVED:
        raise ValueError(f"expected a name other than {', '.join(sorted(RESERVED))}")
    IMPLEMENTATIONS[name] = Implementation(name, attend, _dtype_reason)
    return IMPLEMENTATIONS
