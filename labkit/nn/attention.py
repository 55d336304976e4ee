"""Explicit softmax attention, the oracle of this package.

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

import math
from collections.abc import Callable

import torch
from torch import Tensor

Attention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALL_DTYPES = (*KERNEL_DTYPES, torch.float64)


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
        names = ", ".join(dtype_name(dtype) for dtype in dtypes)
        got = ", ".join(dtype_name(x.dtype) for x in (q, k, v))
        raise ValueError(f"expected q, k and v of one dtype among {names}; got {got}")
    if not (q.device == k.device == v.device):
        raise ValueError(f"expected q, k and v on one device; got {q.device}, {k.device}, {v.device}")


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32"."""
    return str(dtype).removeprefix("torch.")


# ------------------------------------------------------------------------------------------ the oracle


def explicit_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Softmax attention that builds the whole (..., Q, K) matrix: output (..., Q, D) in the dtype of q.

    All arithmetic is in the dtype of the inputs; give it float64 and it is the oracle.
    """
    check_attention_inputs(q, k, v)
    return unchecked_explicit_attention(q, k, v, causal)


def unchecked_explicit_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The arithmetic alone, for what has checked its inputs: `torch.compile` makes a graph of it."""
    return torch.softmax(masked_scores(q, k, causal), dim=-1) @ v


def masked_scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """(..., Q, K), scaled; -inf where a query may not see a key."""
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
