"""Attention to one block of keys and values, and its gradients, for attention across ranks.

FlashAttention's kernels compute it on a GPU that they run on; on a CPU, and in float64, tiles in
PyTorch do. Both give the logsumexp by which results of several blocks are merged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.nn.attention_implementations import unavailable_reason
from labkit.nn.tiled_attention import tiled_backward, tiled_forward


def uses_flash(q: Tensor) -> bool:
    """Return whether FlashAttention's kernels compute these queries, (..., Q, D)."""
    return q.is_cuda and unavailable_reason("flash", q.device, q.dtype, q.shape[-1]) is None


def attend_to_block(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Return output (..., Q, D) and logsumexp (..., Q), both in float32, or float64."""
    if uses_flash(q):
        from labkit.nn.flash_attention import flash_forward  # needs Triton

        output, logsumexp = flash_forward(q, k, v, is_causal)
        return output.to(logsumexp.dtype), logsumexp
    # Results of blocks are merged by sums of exponentials, for which 16 bits are too few.
    dtype = torch.promote_types(q.dtype, torch.float32)
    return tiled_forward(q.to(dtype), k.to(dtype), v.to(dtype), is_causal)


def add_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    grad: Tensor,
    is_causal: bool,
    into: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Add the block's part of the gradient to that of q, and store those of k and v.

    The output and its logsumexp are those of all keys. `into`: memory for the gradients of q, k and
    v, in the dtype of the logsumexp; those of k and v are zeros before.
    """
    if uses_flash(q):
        from labkit.nn.flash_attention import flash_backward  # needs Triton

        gradients = flash_backward(q, k, v, output, logsumexp, grad, is_causal)
        for total, gradient in zip(into, gradients, strict=True):
            total += gradient
        return
    q, k, v, output, grad = (x.to(logsumexp.dtype) for x in (q, k, v, output, grad))
    tiled_backward(q, k, v, output, logsumexp, grad, is_causal, into=into)
