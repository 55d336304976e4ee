"""Explicit softmax attention, the oracle of this package, and the table of implementations to choose from.

    scores = q k^T / sqrt(D)          masked with -inf where a query may not see a key
    output = softmax(scores) v

Every implementation answers to this file: the same arguments `(q, k, v, causal)`, the same checks, the
same mask.  `tiled_attention.py` computes the same numbers block by block in PyTorch, `flash_attention.py`
does it in Triton.

Dimension letters, here and in the two other files:

    ...  any leading dimensions, usually (batch, heads)
    Q    queries, the sequence of q
    K    keys, the sequence of k and v
    D    head dimension

Causal means that query i sees the keys j <= i, counted from the start of both sequences ("top left", what
`torch.nn.functional.scaled_dot_product_attention(is_causal=True)` does).  So a query always sees key 0, and
with K > Q the last keys are seen by nobody.
"""

import functools
import math
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from labkit.nn.triton_launches import NO_TRITON, has_triton, why_triton_cannot_launch

Attention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALL_DTYPES = (*KERNEL_DTYPES, torch.float64)

COMPILED_FROM = (7, 0)
"""The oldest compute capability that `torch.compile` compiles for (`torch._dynamo.device_interface`)."""
GRAPH_LIMIT = 256
"""Graphs that `torch.compile` may make of the explicit version in a process; PyTorch's own limit is 8."""


# ---------------------------------------------------------------- checks shared by all implementations


def check_attention_inputs(q: Tensor, k: Tensor, v: Tensor, *, dtypes: tuple[torch.dtype, ...] = ALL_DTYPES) -> None:
    """Raise ValueError unless q is (..., Q, D), k and v are (..., K, D), and all share dtype and device.

    The leading dimensions must be equal (nothing is broadcast) and no dimension may be empty.
    """
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    expected = "expected q (..., queries, head_dim), k and v (..., keys, head_dim)"
    if q.dim() < 2 or k.dim() < 2 or v.dim() < 2:
        raise ValueError(f"{expected}; got {shapes}")
    if k.shape != v.shape:
        raise ValueError(f"{expected}, k and v of one shape; got {shapes}")
    if q.shape[:-2] != k.shape[:-2]:
        raise ValueError(f"{expected} with equal leading dimensions; got {shapes}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"{expected} with one head_dim; got {shapes}")
    if 0 in q.shape or 0 in k.shape:
        raise ValueError(f"{expected}, no dimension empty; got {shapes}")
    if not (q.dtype == k.dtype == v.dtype) or q.dtype not in dtypes:
        names = ", ".join(_dtype_name(dtype) for dtype in dtypes)
        got = ", ".join(_dtype_name(x.dtype) for x in (q, k, v))
        raise ValueError(f"expected q, k and v of one dtype among {names}; got {got}")
    if not (q.device == k.device == v.device):
        raise ValueError(f"expected q, k and v on one device; got {q.device}, {k.device}, {v.device}")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ------------------------------------------------------------------------------------------ the oracle


def explicit_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Softmax attention that builds the whole (..., Q, K) matrix: output (..., Q, D) in the dtype of q.

    All arithmetic is in the dtype of the inputs; give it float64 and it is the oracle.
    """
    check_attention_inputs(q, k, v)
    return _explicit(q, k, v, causal)


def explicit_attention_with_logsumexp(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """The same, with the natural logarithm of the softmax denominators, (..., Q), in at least float32."""
    check_attention_inputs(q, k, v)
    scores = _masked_scores(q, k, causal)
    return torch.softmax(scores, dim=-1) @ v, torch.logsumexp(scores.to(accumulator_dtype(q.dtype)), dim=-1)


def _explicit(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return torch.softmax(_masked_scores(q, k, causal), dim=-1) @ v


def _masked_scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    scores = (q @ k.transpose(-2, -1)) * softmax_scale(q)  # (..., Q, K)
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    return scores


def softmax_scale(q: Tensor) -> float:
    """1 / sqrt(D)."""
    return 1.0 / math.sqrt(q.shape[-1])


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and of the logsumexp: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# ----------------------------------------------------------------------------- the implementations


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


@functools.cache
def _compiled_explicit() -> Attention:
    return torch.compile(_explicit, fullgraph=True, dynamic=False)


def _tiled(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    from labkit.nn.tiled_attention import TiledAttention

    return TiledAttention.apply(q, k, v, causal)


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    from labkit.nn.flash_attention import flash_attention  # needs Triton, which not every machine has

    return flash_attention(q, k, v, causal)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    check_attention_inputs(q, k, v)
    # the fused backends want exactly (batch, heads, sequence, head_dim)
    q4, k4, v4 = (x.reshape(1, -1, *x.shape[-2:]) if x.dim() != 4 else x for x in (q, k, v))
    return scaled_dot_product_attention(q4, k4, v4, is_causal=causal).reshape(q.shape)


def _sdpa_by(backend: SDPBackend) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        with sdpa_kernel(backend):
            return _sdpa(q, k, v, causal)

    return attend


# ------------------------------------------------------------------------------------- availability


def _always(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    return None if dtype in ALL_DTYPES else f"not defined for {_dtype_name(dtype)}"


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
    choices: dict[str, tuple[str, Attention]] = {
        "sdpa_math": ("PyTorch's SDPA, unfused", _sdpa_by(SDPBackend.MATH)),
        "sdpa_flash": ("PyTorch's SDPA, FlashAttention-2", _sdpa_by(SDPBackend.FLASH_ATTENTION)),
        "sdpa_efficient": ("PyTorch's SDPA, memory-efficient", _sdpa_by(SDPBackend.EFFICIENT_ATTENTION)),
        "sdpa_cudnn": ("PyTorch's SDPA, cuDNN", _sdpa_by(SDPBackend.CUDNN_ATTENTION)),
        "sdpa": ("PyTorch's SDPA, the backend it chooses itself", _sdpa),
    }
    return [Implementation(name, text, fn, _why_no_sdpa(fn)) for name, (text, fn) in choices.items()]


IMPLEMENTATIONS: Mapping[str, Implementation] = MappingProxyType(
    {
        row.name: row
        for row in [
            Implementation("explicit", "the whole matrix, eager PyTorch", explicit_attention, _always),
            Implementation("compiled", "the whole matrix, torch.compile", _compiled, _why_no_compiled),
            Implementation("tiled", "FlashAttention-2 in plain PyTorch", _tiled, _always),
            Implementation("flash", "FlashAttention-2 in Triton", _flash, _why_no_flash),
            *_sdpa_rows(),
        ]
    }
)
