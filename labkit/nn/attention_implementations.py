"""The table of attention implementations to choose from: explicit, compiled, tiled, Triton, PyTorch's own.

Every one answers to `attention.py`: the same arguments `(q, k, v, causal)`, the same checks, the same mask.
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
    explicit_attention,
    unchecked_explicit_attention,
)
from labkit.nn.tiled_attention import TiledAttention
from labkit.nn.triton_launches import NO_TRITON, has_triton, why_triton_cannot_launch

COMPILED_FROM = (7, 0)
"""The oldest compute capability that `torch.compile` compiles for (`torch._dynamo.device_interface`)."""
GRAPH_LIMIT = 256
"""Graphs that `torch.compile` may make of the explicit version in a process; PyTorch's own limit is 8."""


@dataclass(frozen=True)
class Implementation:
    """One way to compute attention: a row of `IMPLEMENTATIONS`."""

    name: str
    description: str
    attend: Attention
    """(q, k, v, causal) -> output; differentiable."""
    why_unavailable: Callable[[torch.device, torch.dtype, int], str | None]
    """(device, dtype, head_dim) -> why it cannot run there, or None if it can."""


def attention_named(name: str) -> Implementation:
    """Look an implementation up; ValueError that lists the names there are."""
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"no attention named {name!r}; there are {', '.join(IMPLEMENTATIONS)}")
    return IMPLEMENTATIONS[name]


def _compiled(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """`torch.compile` of the explicit version, a graph for every shape.

    A sweep has more shapes than the 8 graphs a function gets by default: the limit is raised, and `fullgraph` makes
    an error of what would be a silent return to eager beyond it.
    """
    check_attention_inputs(q, k, v)
    with torch._dynamo.config.patch(recompile_limit=GRAPH_LIMIT, accumulated_recompile_limit=4 * GRAPH_LIMIT):
        return _compiled_explicit()(q, k, v, causal)


@cache
def _compiled_explicit() -> Attention:
    return torch.compile(unchecked_explicit_attention, fullgraph=True, dynamic=False)


def _tiled(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return TiledAttention.apply(q, k, v, causal)


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    from labkit.nn.flash_attention import flash_attention  # needs Triton, which not every machine has

    return flash_attention(q, k, v, causal)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool, *, backend: SDPBackend | None = None) -> Tensor:
    check_attention_inputs(q, k, v)
    # the fused backends want exactly (batch, heads, sequence, head_dim)
    q4, k4, v4 = (x.reshape(1, -1, *x.shape[-2:]) if x.dim() != 4 else x for x in (q, k, v))
    with nullcontext() if backend is None else sdpa_kernel(backend):
        return scaled_dot_product_attention(q4, k4, v4, is_causal=causal).reshape(q.shape)


# ------------------------------------------------------------------------------------- availability


def _always(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    return None if dtype in ALL_DTYPES else f"not defined for {dtype_name(dtype)}"


def why_nothing_compiles(device_type: str) -> str | None:
    """Why `torch.compile` has nothing to compile with on "cpu" or "cuda", or None."""
    if device_type == "cuda":
        capability = torch.cuda.get_device_capability()
        if capability < COMPILED_FROM:
            return f"torch.compile needs compute capability 7.0 or newer, not {capability[0]}.{capability[1]}"
        reason = why_triton_cannot_launch()
        return None if reason is None else f"torch.compile needs Triton on a GPU: {reason}"
    if device_type == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++", "cl"))):
        return "torch.compile needs a C++ compiler on a CPU; there is none on the path"
    return None


def _why_no_compiled(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    return why_nothing_compiles(device.type) or _always(device, dtype, head_dim)


def _why_no_flash(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    if not has_triton():
        return NO_TRITON
    from labkit.nn.flash_attention import why_unavailable

    return why_unavailable(device, dtype, head_dim)


def _why_no_sdpa(attend: Attention) -> Callable[[torch.device, torch.dtype, int], str | None]:
    """Ask PyTorch by trying: forward and backward of one small problem.  Its warnings are the reason."""

    def why(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        with warnings.catch_warnings(record=True) as told, torch.enable_grad():
            warnings.simplefilter("always")
            try:
                q, k, v = torch.zeros(3, 1, 2, 64, head_dim, device=device, dtype=dtype).requires_grad_()
                attend(q, k, v, False).sum().backward()
            except Exception as error:  # of any type: each library that a backend calls has its own
                said = str(error).partition("\n")[0] or type(error).__name__
                return " ".join([said, *(str(warning.message) for warning in told)])
        return None

    return why


def _sdpa_rows() -> list[Implementation]:
    choices = {
        "sdpa_math": ("unfused", SDPBackend.MATH),
        "sdpa_flash": ("FlashAttention-2", SDPBackend.FLASH_ATTENTION),
        "sdpa_efficient": ("memory-efficient", SDPBackend.EFFICIENT_ATTENTION),
        "sdpa_cudnn": ("cuDNN", SDPBackend.CUDNN_ATTENTION),
        "sdpa": ("the backend it chooses itself", None),
    }
    return [
        Implementation(name, f"PyTorch's SDPA, {text}", attend := partial(_sdpa, backend=backend), _why_no_sdpa(attend))
        for name, (text, backend) in choices.items()
    ]


IMPLEMENTATIONS: dict[str, Implementation] = {
    row.name: row
    for row in [
        Implementation("explicit", "the whole matrix, eager PyTorch", explicit_attention, _always),
        Implementation("compiled", "the whole matrix, torch.compile", _compiled, _why_no_compiled),
        Implementation("tiled", "FlashAttention-2 in plain PyTorch", _tiled, _always),
        Implementation("flash", "FlashAttention-2 in Triton", _flash, _why_no_flash),
        *_sdpa_rows(),
    ]
}
"""What there is to choose from; a reader may add to it (`register`)."""
RESERVED = frozenset(IMPLEMENTATIONS)


def register(name: str, attend: Attention) -> dict[str, Implementation]:
    """Add a reader's attention: (q, k, v, causal) -> output, each (batch, sequence, head_dim), scale 1/sqrt(head_dim).

    It has to be differentiable. ValueError for a name that is taken.
    """
    if name in RESERVED:
        raise ValueError(f"expected a name other than {', '.join(sorted(RESERVED))}")
    IMPLEMENTATIONS[name] = Implementation(name, "a reader's own", attend, _always)
    return IMPLEMENTATIONS
