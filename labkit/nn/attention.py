"""Naive softmax attention, the oracle of this package.

    scores = scale * q k^T            masked with -inf where a query may not see a key
    output = softmax(scores) v

Every implementation follows this file: the arguments `(q, k, v, causal)`, the checks, the mask.
Dimension letters:

    ...  any leading dimensions, usually (batch, heads)      D    head dimension
    Q    queries, the sequence of q                          K    keys, the sequence of k and v

Causal: query i sees the keys j <= i, counted from the start of both sequences ("top left", as in
`torch.nn.functional.scaled_dot_product_attention(is_causal=True)`). So each query sees key 0, and
with K > Q no query sees the last keys.

Grouped queries (Ainslie et al. 2023, arXiv:2305.13245): k and v may have fewer heads, dimension -3,
if the heads of q are a multiple; query head h then uses their head h // group.
"""

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from labkit.torch_private import preserve_version_counter

Attention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALL_DTYPES = (*KERNEL_DTYPES, torch.float64)


def check_attention_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    dtypes: tuple[torch.dtype, ...] = ALL_DTYPES,
) -> None:
    """Raise ValueError unless q is (..., Q, D) and k, v are (..., K, D), of one dtype and device.

    The leading dimensions must be equal (nothing is broadcast) but for grouped queries; no
    dimension may be empty.
    """
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    expected = "expected q (..., queries, head_dim), k and v (..., keys, head_dim)"
    if q.dim() < 2 or k.dim() < 2 or v.dim() < 2:
        raise ValueError(f"{expected}; got {shapes}")
    if k.shape != v.shape:
        raise ValueError(f"{expected}, k and v of one shape; got {shapes}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"{expected} with one head_dim; got {shapes}")
    # A softmax over no keys has no value, and empty queries, heads or batches are a mistake.
    if 0 in q.shape or 0 in k.shape:
        raise ValueError(f"{expected}, no dimension empty; got {shapes}")
    # Grouped queries: heads alone may differ, dimension -3.
    if (
        q.dim() != k.dim()
        or q.shape[:-3] != k.shape[:-3]
        or (q.dim() > 2 and q.shape[-3] % k.shape[-3])
    ):
        raise ValueError(
            f"{expected} with equal leading dimensions, or heads of q a multiple of k's; got"
            f" {shapes}"
        )
    if not (q.dtype == k.dtype == v.dtype) or q.dtype not in dtypes:
        names = ", ".join(map(dtype_name, dtypes))
        got = ", ".join(map(dtype_name, (q.dtype, k.dtype, v.dtype)))
        raise ValueError(f"expected q, k and v of one dtype among {names}; got {got}")
    if not (q.device == k.device == v.device):
        raise ValueError(
            f"expected q, k and v on one device; got {q.device}, {k.device}, {v.device}"
        )
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(f"expected a positive, finite scale, got {scale}")


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without its module: "float32"."""
    return str(dtype).removeprefix("torch.")


def naive_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, *, scale: float | None = None
) -> Tensor:
    """Compute softmax attention (..., Q, D) with the whole (..., Q, K) matrix.

    All arithmetic is in the dtype of the inputs; with float64 it is the oracle. `scale` defaults to
    1 / sqrt(D).
    """
    check_attention_inputs(q, k, v, scale=scale)
    return torch.softmax(masked_scores(q, k, causal, scale), dim=-1) @ repeat_heads(v, q)


def masked_scores(q: Tensor, k: Tensor, causal: bool, scale: float | None = None) -> Tensor:
    """Return scaled scores (..., Q, K); -inf where a query may not see a key."""
    scores = (q @ repeat_heads(k, q).transpose(-2, -1)) * softmax_scale(q, scale)
    if causal:
        # "Top left": query i sees keys 0 to i, whatever the two lengths are.
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~visible, -math.inf)
    return scores


def query_group(q: Tensor, k: Tensor) -> int:
    """Return the number of query heads that share a head of keys."""
    return q.shape[-3] // k.shape[-3] if q.dim() > 2 else 1


def repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    """Return k or v with as many heads as q."""
    group = query_group(q, x)
    return x if group == 1 else x.repeat_interleave(group, dim=-3)


def softmax_scale(q: Tensor, scale: float | None = None) -> float:
    """Return `scale`, by default 1 / sqrt(D)."""
    return 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale


class VersionWatch:
    """Whether a tensor is modified in place from now on; holds none of its memory.

    With it a forward pass saves `output.data`, whose version autograd does not check, and backward
    computes the output again if a caller has changed it. Tensors of inference mode have no version,
    and no backward pass.
    """

    def __init__(self, x: Tensor):
        self._token = x.detach()  # shares the version counter
        if not x.is_inference():
            # Without arguments `set_` lets go of the memory, and would count as a change.
            with preserve_version_counter(self._token):
                cast(Any, self._token).set_()
            self._version: int = self._token._version

    @property
    def is_modified(self) -> bool:
        return bool(self._token._version != self._version)
