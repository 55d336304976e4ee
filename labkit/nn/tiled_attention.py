"""FlashAttention-2 in plain PyTorch: runs anywhere, memory linear in the sequence.

The scores are visited in square tiles of queries by keys that stay in cache (`tile_side`). The
softmax is carried along a row of tiles ("online"): a running maximum, a running sum, and an output
that is rescaled when the maximum grows. The backward pass recomputes the tiles from the logsumexp.

Source: Dao 2023, FlashAttention-2 (arXiv:2307.08691): `tiled_forward` is algorithm 1,
`tiled_backward` algorithm 2. Dimension letters: B, all leading dimensions in one, and Q, K, D as in
`attention.py`.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from labkit.nn.attention import VersionWatch, check_attention_inputs, query_group, softmax_scale


class TiledAttention(torch.autograd.Function):
    """`TiledAttention.apply(q, k, v, causal, scale)` -> output (..., Q, D).

    q is (..., Q, D), k and v are (..., K, D), of float32, bfloat16, float16 or float64. Tiles are
    computed in float32 (float64 for float64). ValueError for inputs that do not fit together.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None
    ) -> Tensor:
        output, logsumexp = tiled_forward(q, k, v, causal, scale=scale)
        # Not `output` itself: autograd would refuse backward if a caller changed it in place. A
        # compiler knows no `VersionWatch`, so a copy is saved.
        if torch.compiler.is_compiling():
            saved = output.clone()
            ctx.watch = None
        else:
            saved = output.data
            ctx.watch = VersionWatch(output)
        ctx.save_for_backward(q, k, v, saved, logsumexp)
        ctx.causal = causal
        ctx.scale = scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, output, logsumexp = ctx.saved_tensors
        if ctx.watch is not None and ctx.watch.is_modified:
            output, _ = tiled_forward(q, k, v, ctx.causal, scale=ctx.scale)
        gradients = tiled_backward(
            q, k, v, output, logsumexp, grad_output, ctx.causal, scale=ctx.scale
        )
        return *gradients, None, None


def tiled_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, *, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return output (..., Q, D) in q's dtype, and logsumexp (..., Q) in natural logs.

    The logsumexp is float32, or float64.
    """
    check_attention_inputs(q, k, v, scale=scale)
    dtype = torch.promote_types(q.dtype, torch.float32)
    group = query_group(q, k)
    scale = softmax_scale(q, scale)
    whole_output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    whole_logsumexp = torch.empty(q.shape[:-1], dtype=dtype, device=q.device)
    q, k, v, output = map(_flatten, (q, k, v, whole_output))  # (B, Q, D), (B / group, K, D)
    logsumexp = whole_logsumexp.view(q.shape[:2])
    side = tile_side(q)
    scores_buffer = torch.empty(len(q) * side * side, dtype=dtype, device=q.device)

    # Autocast would round the tiles, which are summed up in a wider dtype.
    with torch.autocast(q.device.type, enabled=False):
        for rows in _blocks(0, q.shape[1], side):
            q_block = q[:, rows].to(dtype) * scale
            # -inf and zeros: the first tile takes their place, as every query sees key 0.
            row_max = torch.full_like(q_block[..., :1], -math.inf)
            row_sum = torch.zeros_like(row_max)
            accumulator = torch.zeros_like(q_block)
            # Tiles that are hidden altogether are not visited.
            visible = min(k.shape[1], rows.stop) if causal else k.shape[1]
            for columns in _blocks(0, visible, side):
                k_block, v_block = (_key_block(x, columns, dtype, group) for x in (k, v))
                scores = _view(scores_buffer, q_block, k_block)
                torch.bmm(q_block, k_block.transpose(1, 2), out=scores)
                if causal:
                    _hide_future(scores, rows, columns)
                new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
                probabilities = scores.sub_(new_max).exp_()  # not normalized yet
                rescale = torch.exp(row_max - new_max)
                row_max = new_max
                row_sum.mul_(rescale).add_(probabilities.sum(-1, keepdim=True))
                accumulator.mul_(rescale).baddbmm_(probabilities, v_block)
            output[:, rows] = accumulator.div_(row_sum)
            logsumexp[:, rows] = row_sum.log_().add_(row_max).squeeze(-1)
    return whole_output, whole_logsumexp


def tiled_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    grad_output: Tensor,
    causal: bool,
    *,
    scale: float | None = None,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of q, k and v from the saved tensors.

    delta = rowsum(dO * O); for each tile:

    P = exp(scale * Q K^T - logsumexp)      dS = P * (dO V^T - delta)
    dV += P^T dO      dQ += scale * dS K      dK += scale * dS^T Q

    `into`: memory for the gradients, in the dtype of logsumexp; that of q is added to what is
    there.
    """
    q_dtype = q.dtype
    dtype = logsumexp.dtype
    group = query_group(q, k)
    scale = softmax_scale(q, scale)
    if into is None:
        new_k, new_v = (torch.empty(k.shape, dtype=k.dtype, device=k.device) for _ in range(2))
        into = torch.zeros(q.shape, dtype=dtype, device=q.device), new_k, new_v
    # Every block of keys adds to the gradient of q: it is in the wider dtype until the end.
    grad_q, grad_k, grad_v = (x.view(-1, *x.shape[-2:]) for x in into)
    q, k, v, output, grad_output = map(_flatten, (q, k, v, output, grad_output))
    minus_logsumexp = logsumexp.reshape(*q.shape[:2], 1).neg()
    minus_delta = (grad_output.to(dtype) * output).sum(-1, keepdim=True).neg_()
    side = tile_side(q)
    p_buffer, ds_buffer = torch.empty(2, len(q) * side * side, dtype=dtype, device=q.device)

    with torch.autocast(q.device.type, enabled=False):
        for columns in _blocks(0, k.shape[1], side):
            k_block, v_block = (_key_block(x, columns, dtype, group) for x in (k, v))
            k_block = k_block * scale
            grad_k_block = torch.zeros_like(k_block)
            grad_v_block = torch.zeros_like(v_block)
            # Earlier queries do not see these keys.
            for rows in _blocks(columns.start if causal else 0, q.shape[1], side):
                q_block = q[:, rows].to(dtype)
                grad_block = grad_output[:, rows].to(dtype)
                p = _view(p_buffer, q_block, k_block)
                ds = _view(ds_buffer, q_block, k_block)
                torch.baddbmm(minus_logsumexp[:, rows], q_block, k_block.transpose(1, 2), out=p)
                if causal:
                    _hide_future(p, rows, columns)
                p.exp_()
                grad_v_block.baddbmm_(p.transpose(1, 2), grad_block)
                torch.baddbmm(minus_delta[:, rows], grad_block, v_block.transpose(1, 2), out=ds)
                ds.mul_(p)
                grad_q[:, rows].baddbmm_(ds, k_block)
                grad_k_block.baddbmm_(ds.transpose(1, 2), q_block)
            for grad, block in ((grad_k, grad_k_block.mul_(scale)), (grad_v, grad_v_block)):
                grad[:, columns] = block.unflatten(0, (-1, group)).sum(1) if group > 1 else block
    return into[0].to(q_dtype), into[1], into[2]


def _blocks(first: int, last: int, side: int) -> Iterator[slice]:
    """[first, last) in slices of `side`; the last one may be shorter."""
    return (slice(start, min(start + side, last)) for start in range(first, last, side))


def _key_block(x: Tensor, columns: slice, dtype: torch.dtype, group: int) -> Tensor:
    """Keys or values of a tile for each query head, (B, side, D)."""
    block = x[:, columns].to(dtype)
    return block.repeat_interleave(group, 0) if group > 1 else block


def _hide_future(scores: Tensor, rows: slice, columns: slice) -> None:
    """Set the scores of keys after their query to -inf; blocks below the diagonal have none."""
    if columns.stop - 1 > rows.start:
        future = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device)
        scores.masked_fill_(future.triu_(rows.start - columns.start + 1), -math.inf)


def tile_side(q: Tensor) -> int:
    """Return the queries and keys in a tile: a power of two, for B tiles of a fixed size together.

    Measured on 2 cores of an EPYC, forward and backward at B 1, Q = K = 4096, D 64: side 512
    0.18 s, 256 0.20 s, 128 0.27 s; naive attention 0.50 s.
    """
    if q.device.type == "cpu":
        # 2 MiB in float32, which stay in the second-level cache of two cores. Below a side of 64
        # the Python loop costs more than the arithmetic.
        scores = 2**19
        smallest = 64
        largest = 512
    else:
        # A GPU needs enough work in each launch; untuned.
        scores = 2**24
        smallest = 256
        largest = 2048
    side = 2 ** int(math.log2(math.sqrt(scores / q.shape[0])))
    return max(smallest, min(side, largest))


def _view(buffer: Tensor, q_block: Tensor, k_block: Tensor) -> Tensor:
    """Return the start of the buffer as (B, block_q, block_k), contiguous at edges too."""
    shape = q_block.shape[0], q_block.shape[1], k_block.shape[1]
    return buffer[: math.prod(shape)].view(shape)


def _flatten(x: Tensor) -> Tensor:
    return x.reshape(-1, *x.shape[-2:])
