"""Context parallelism: each rank has a part of the sequence, and attention passes keys and values
around.

    q, k, v = (split_sequence(x, 2) for x in (q, k, v))      this rank's positions of (batch, heads, length, head dim)
    output = ring_attention(q, k, v)                         of these positions; backward gives their gradients

Rank r attends to one block of keys and values after another, its own first, and merges the results
by their softmax statistics. Meanwhile the next block travels around the ring: p-1 messages forward,
and p-1 backward. The gradients of the blocks follow one step behind, in the accumulator's dtype.

`gather_attention` gathers all keys and values on every rank, and reduce-scatters their gradients.
It sends the same bytes, but holds p blocks at once instead of two or three.

Layouts, for p ranks and causal attention in which query i sees keys up to i:

    contiguous    rank r has the r-th of p parts. It needs r+1 of p blocks. All wait for the last rank, so ranks work
                  for (p+1)/2p of the time.
    zigzag        rank r has the r-th and the r-th last of 2p parts. Its queries see the first half of an earlier
                  rank's block; their second half sees all of a later rank's. All ranks have equal
                  work.

`labkit.costs.communication.context_parallel_calls` lists the messages of a step.

Sources: Liu, Zaharia & Abbeel 2023 (arXiv:2310.01889) for the ring; Dao 2023 (arXiv:2307.08691) for
the statistics; Dubey et al. 2024 (arXiv:2407.21783), section 3.3.2, for zigzag and for gathering.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from labkit.nn.attention import check_attention_inputs
from labkit.nn.tiled_attention import tiled_backward, tiled_forward
from labkit.nn.transformer import RotaryPositions, Transformer
from labkit.parallel.agreement import agree_per_pass
from labkit.parallel.collectives import all_gather, reduce_scatter
from labkit.parallel.exchange import start_exchange
from labkit.parallel.prepare import disable_compile
from labkit.parallel.transport import AUTO, member_group

LAYOUTS = ("zigzag", "contiguous")
Group = dist.ProcessGroup | None


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = True,
    group: Group = None,
    layout: str = "zigzag",
    transport: str = AUTO,
) -> Tensor:
    """Attend to the whole sequence from this rank's positions: q, k, v and result (..., length / p,
    head dimension).

    k and v may have fewer heads, as in `labkit.nn.attention`. float16, bfloat16, float32 or
    float64; sums are in float32, or float64.

    Raises ValueError, on all ranks, for an unknown layout, for shapes that do not fit together or
    differ between ranks, and with zigzag for an odd local length: the sequence must be a multiple
    of p, or 2p.
    """
    return _attend(_Ring, q, k, v, is_causal, group, layout, transport)


def gather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = True,
    group: Group = None,
    layout: str = "zigzag",
    transport: str = AUTO,
) -> Tensor:
    """Compute the same as `ring_attention` with all keys and values on every rank. Same arguments
    and errors."""
    return _attend(_Gathered, q, k, v, is_causal, group, layout, transport)


def context_parallel(
    model: Transformer,
    group: Group = None,
    *,
    attention: Callable[..., Tensor] = ring_attention,
    layout: str = "zigzag",
    transport: str = AUTO,
) -> Transformer:
    """Let a Transformer attend across ranks, and rotate at the positions of its layout; return it.

    It then maps this rank's tokens, (B, S / p), to their logits. Average gradients over the ranks,
    as with data parallelism: the mean of the ranks' mean losses is that of the sequence.
    """
    options = {"group": group, "layout": layout, "transport": transport}
    for layer in model.layers:
        block: Any = layer.attention
        block.attend = lambda q, k, v, causal: attention(q, k, v, is_causal=causal, **options)
        block.rotate = partial(_rotate, model.positions, group, layout)
    return model


def _rotate(positions: RotaryPositions, group: Group, layout: str, x: Tensor) -> Tensor:
    length = x.shape[-2] * member_group(group).size()
    if length > (longest := len(positions.cosines)):
        raise ValueError(
            f"expected at most {longest} positions on all ranks together, got {length}"
        )
    return positions(x, local_positions(length, group=group, layout=layout).to(x.device))


def local_positions(
    length: int, *, group: Group = None, layout: str = "zigzag", rank: int | None = None
) -> Tensor:
    """Return a rank's positions in a sequence of `length`, (length / p,), int64; `rank`: of the
    group, None: this one.

    Raises ValueError for a length that is not a multiple of p, or of 2p with zigzag.
    """
    members = member_group(group)
    pieces = torch.arange(length).chunk(_count_parts(length, members.size(), layout))
    rank = members.rank() if rank is None else rank
    return torch.cat([pieces[rank], pieces[-1 - rank]]) if layout == "zigzag" else pieces[rank]


def split_sequence(x: Tensor, dim: int, *, group: Group = None, layout: str = "zigzag") -> Tensor:
    """Return this rank's positions of a tensor that has the whole sequence in dimension `dim`.
    Errors as above."""
    return x.index_select(
        dim, local_positions(x.shape[dim], group=group, layout=layout).to(x.device)
    )


@torch.no_grad()
def join_sequence(
    x: Tensor, dim: int, *, group: Group = None, layout: str = "zigzag", transport: str = AUTO
) -> Tensor:
    """Return the whole of a tensor that `split_sequence` has split, on every rank, without its
    graph. A collective."""
    members = member_group(group)
    p = members.size()
    length = x.shape[dim] * members.size()
    parts = x.new_empty(p, *x.shape)
    parts[members.rank()] = x
    all_gather(parts, group, transport=transport)
    by_rank = [local_positions(length, group=group, layout=layout, rank=rank) for rank in range(p)]
    places = torch.cat(by_rank).to(x.device)
    return torch.cat(list(parts), dim).index_select(dim, places.argsort())


def _count_parts(length: int, p: int, layout: str) -> int:
    if layout not in LAYOUTS:
        raise ValueError(f"expected a layout among {', '.join(LAYOUTS)}, got {layout!r}")
    parts = 2 * p if layout == "zigzag" else p
    if length < parts or length % parts:
        raise ValueError(f"expected a sequence that {parts} parts divide, got {length} positions")
    return parts


class _Call(NamedTuple):
    """Options of one call."""

    method: type[_Gathered]
    is_causal: bool
    group: dist.ProcessGroup
    layout: str
    transport: str

    def visible(self, source: int, length: int) -> tuple[slice, slice, bool] | None:
        """Return the queries that see keys of a rank's block, these keys, and whether a causal mask
        is needed."""
        everything = slice(0, length)
        rank = self.group.rank()
        if not self.is_causal or source == rank:
            return everything, everything, self.is_causal
        if self.layout == "contiguous":
            return (everything, everything, False) if source < rank else None
        first = slice(0, length // 2)
        second = slice(length // 2, length)
        return (everything, first, False) if source < rank else (second, everything, False)


@disable_compile
def _attend(
    method: type[_Gathered],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    group: Group,
    layout: str,
    transport: str,
) -> Tensor:
    members = member_group(group)

    def describe() -> dict[str, object]:
        check_attention_inputs(q, k, v)
        _count_parts(q.shape[-2] * members.size(), members.size(), layout)
        if q.shape[-2] != k.shape[-2]:
            raise ValueError(
                f"expected as many keys as queries, got {k.shape[-2]} and {q.shape[-2]}"
            )
        return {
            "shape of q": tuple(q.shape),
            "shape of k and v": tuple(k.shape),
            "dtype": q.dtype,
            "is_causal": is_causal,
            "layout": layout,
            "transport": transport,
            "method": method.__name__,
            "has a backward pass": torch.is_grad_enabled()
            and any(x.requires_grad for x in (q, k, v)),
        }

    agree_per_pass("shapes and options", describe, members)
    output: Tensor = _Attention.apply(q, k, v, _Call(method, is_causal, members, layout, transport))
    return output


class _Attention(torch.autograd.Function):
    """Forward and backward over blocks of keys and values. Saves q, k, v, the output and the
    logsumexp."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
        dtype = torch.promote_types(q.dtype, torch.float32)
        wide = q.to(dtype)
        output = logsumexp = torch.empty(0)
        for source, block in call.method(call).blocks(k, v):
            if part := call.visible(source, q.shape[-2]):
                rows, columns, is_causal = part
                keys, values = block[..., columns, :].to(dtype)
                result = tiled_forward(wide[..., rows, :], keys, values, is_causal)
                if source == call.group.rank():  # comes first, and all queries see some of its keys
                    output, logsumexp = result
                else:
                    _merge(output[..., rows, :], logsumexp[..., rows], *result)
        output = output.to(q.dtype)
        ctx.save_for_backward(q, k, v, output, logsumexp)
        ctx.call = call
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, output, logsumexp = ctx.saved_tensors
        call = ctx.call
        dtype = logsumexp.dtype
        queries = [x.to(dtype) for x in (q, output, grad)]
        # contiguous, whatever the strides of q
        grad_q = torch.zeros(q.shape, dtype=dtype, device=q.device)
        blocks = call.method(call)
        for source, block in blocks.blocks(k, v):
            blocks.add(source, _differentiate(call, source, block, queries, logsumexp, grad_q))
        grad_k, grad_v = blocks.finish().to(q.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, None


def _differentiate(
    call: _Call,
    source: int,
    block: Tensor,
    queries: Sequence[Tensor],
    logsumexp: Tensor,
    grad_q: Tensor,
) -> Tensor:
    """Return the gradient of a block, in the accumulator's dtype, and add to that of q. `queries`:
    q, output, grad."""
    gradients = torch.zeros_like(block, dtype=logsumexp.dtype)
    if part := call.visible(source, logsumexp.shape[-1]):
        rows, columns, is_causal = part
        keys, values = block[..., columns, :].to(logsumexp.dtype)
        q, output, grad = (x[..., rows, :] for x in queries)
        into = (grad_q[..., rows, :], *gradients[..., columns, :])
        tiled_backward(q, keys, values, output, logsumexp[..., rows], grad, is_causal, into=into)
    return gradients


def _merge(output: Tensor, logsumexp: Tensor, other: Tensor, other_logsumexp: Tensor) -> None:
    """Add the attention to further keys, in place: both outputs are weighted by their share of the
    softmax's sum."""
    total = torch.logaddexp(logsumexp, other_logsumexp)
    own_share, other_share = (
        (each - total).exp_().unsqueeze(-1) for each in (logsumexp, other_logsumexp)
    )
    output.mul_(own_share).addcmul_(other, other_share)
    logsumexp.copy_(total)


class _Gathered:
    """Gathers all keys and values, and reduce-scatters their gradients. A block is (2, ..., length
    / p, D)."""

    def __init__(self, call: _Call) -> None:
        self.group = call.group
        self.transport = call.transport
        self.rank = call.group.rank()
        self.p = call.group.size()

    def blocks(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield every rank and its block: this rank's first, then those of the ranks before it."""
        blocks = k.new_empty(self.p, 2, *k.shape)
        torch.stack([k, v], out=blocks[self.rank])
        all_gather(blocks, self.group, transport=self.transport)
        for step in range(self.p):
            source = (self.rank - step) % self.p
            yield source, blocks[source]

    def add(self, source: int, gradients: Tensor) -> None:
        """Hand over this rank's part of a block's gradient. Called for every block, in their
        order."""
        if source == self.rank:
            self._gradients = gradients.new_empty(self.p, *gradients.shape)
        self._gradients[source] = gradients

    def finish(self) -> Tensor:
        """Return the gradient of this rank's block."""
        total = torch.empty_like(self._gradients[0])
        reduce_scatter(
            self._gradients, self.group, "sum", into=total.view(-1), transport=self.transport
        )
        return total


class _Ring(_Gathered):
    """Passes one block at a time from the left neighbor to the right one, while the caller
    computes."""

    _total: Tensor
    _landing: Tensor
    _wait: Callable[[], None] = staticmethod(lambda: None)

    def blocks(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor]]:
        block = torch.stack([k, v])
        for step in range(self.p - 1):
            following = torch.empty_like(block)
            wait = self._pass_on(block, following)
            yield (self.rank - step) % self.p, block
            wait()
            block = following
            del wait, following  # which hold both blocks
        yield (self.rank + 1) % self.p, block

    def add(self, source: int, gradients: Tensor) -> None:
        if source == self.rank:  # what others add arrives at the end
            self._total = gradients
            return
        self._wait()
        if (source + 1) % self.p != self.rank:  # the left neighbor has added to this block before
            gradients += self._landing
        self._landing = torch.empty_like(gradients)
        self._wait = self._pass_on(gradients, self._landing)

    def finish(self) -> Tensor:
        self._wait()
        return self._total.add_(self._landing) if self.p > 1 else self._total

    def _pass_on(self, sent: Tensor, received: Tensor) -> Callable[[], None]:
        right = (self.rank + 1) % self.p
        left = (self.rank - 1) % self.p
        return start_exchange(sent, right, received, left, self.group, transport=self.transport)
