"""Attention across ranks: by a ring that passes blocks of keys and values, or with all gathered.

Rank r attends to one block of keys and values after another, its own first, and merges the results
by their softmax statistics. Meanwhile the next block travels around the ring: p-1 messages forward,
and p-1 backward. The gradients of the blocks follow one step behind, in the accumulator's dtype.

`gather_attention` gathers all keys and values on every rank, and reduce-scatters their gradients.
It sends the same bytes, but holds p blocks at once instead of two or three.

`labkit.costs.communication.context_parallel_calls` lists the messages of a step.

Sources: Liu, Zaharia & Abbeel 2023 (arXiv:2310.01889) for the ring; Dao 2023 (arXiv:2307.08691) for
the statistics; Dubey et al. 2024 (arXiv:2407.21783), section 3.3.2, for gathering.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from labkit.nn.attention import check_attention_inputs
from labkit.parallel.agreement import agree_per_pass
from labkit.parallel.collectives import all_gather, reduce_scatter
from labkit.parallel.context_blocks import add_gradients, attend_to_block
from labkit.parallel.context_layout import count_parts
from labkit.parallel.exchange import exchange, start_exchange
from labkit.parallel.failures import check_group
from labkit.parallel.messages import cpu_group
from labkit.parallel.prepare import disable_compile
from labkit.parallel.transport import AUTO, Group, member_group

# Of each group, the calls on which its ranks have agreed.
_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, set[str]] = weakref.WeakKeyDictionary()


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
    """Compute as `ring_attention`, with all keys and values on every rank at once."""
    return _attend(_Gathered, q, k, v, is_causal, group, layout, transport)


class _Call(NamedTuple):
    """Options of one call. `description`: of all that must be the same on all ranks."""

    method: type[_Gathered]
    is_causal: bool
    group: dist.ProcessGroup
    layout: str
    transport: str
    description: str

    def visible(self, source: int, length: int) -> tuple[slice, slice, bool] | None:
        """Return the queries that see keys of a rank's block, these keys, and if with a mask."""
        everything = slice(0, length)
        rank = self.group.rank()
        if not self.is_causal or source == rank:
            return everything, everything, self.is_causal
        is_earlier = source < rank
        if self.layout == "contiguous" and is_earlier:
            return everything, everything, False
        if self.layout == "contiguous":
            return None
        # Zigzag: each rank has an early half and a late one.
        if is_earlier:
            return everything, slice(0, length // 2), False
        return slice(length // 2, length), everything, False


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
    check_group(members)
    call = {
        "shape of q": tuple(q.shape),
        "shape of k": tuple(k.shape),
        "shape of v": tuple(v.shape),
        "dtypes": (q.dtype, k.dtype, v.dtype),
        "is_causal": is_causal,
        "layout": layout,
        "transport": transport,
        "method": method.__name__,
        "has a backward pass": torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)),
    }

    def describe() -> dict[str, object]:
        check_attention_inputs(q, k, v)
        count_parts(q.shape[-2] * members.size(), members.size(), layout)
        if q.shape[-2] != k.shape[-2]:
            raise ValueError(
                f"expected as many keys as queries, got {k.shape[-2]} and {q.shape[-2]}"
            )
        return call

    # Once per kind of call, not in each layer: all ranks would wait for the slowest there.
    # Afterwards neighbors compare descriptions along with the first block.
    description = str(call)
    agreed = _agreed.setdefault(members, set())
    if description not in agreed:
        agree_per_pass("shapes and options", describe, members)
        agreed.add(description)
    options = _Call(method, is_causal, members, layout, transport, description)
    output: Tensor = _Attention.apply(q, k, v, options)
    return output


class _Attention(torch.autograd.Function):
    """Attention over blocks of keys and values. Saves q, k, v, the output and the logsumexp."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
        output = logsumexp = torch.empty(0)
        for source, block in call.method(call, "forward").blocks(k, v):
            visible = call.visible(source, q.shape[-2])
            if visible is None:
                continue
            rows, columns, is_causal = visible
            keys, values = block[..., columns, :]
            result = attend_to_block(q[..., rows, :], keys, values, is_causal)
            if source == call.group.rank():
                # Comes first, and all queries see some of its keys: the others are merged into it.
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
        # contiguous, whatever the strides of q
        grad_q = torch.zeros(q.shape, dtype=logsumexp.dtype, device=q.device)
        blocks = call.method(call, "backward")
        for source, block in blocks.blocks(k, v):
            # In the accumulator's dtype: each rank that the gradients visit adds to them.
            grad_block = torch.zeros_like(block, dtype=logsumexp.dtype)
            visible = call.visible(source, q.shape[-2])
            if visible is not None:
                rows, columns, is_causal = visible
                keys, values = block[..., columns, :]
                add_gradients(
                    q[..., rows, :],
                    keys,
                    values,
                    output[..., rows, :],
                    logsumexp[..., rows],
                    grad[..., rows, :],
                    is_causal,
                    into=(grad_q[..., rows, :], *grad_block[..., columns, :]),
                )
            # Also zeros: they travel on, and the next rank waits for them.
            blocks.add(source, grad_block)
        grad_k, grad_v = blocks.finish().to(q.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, None


def _merge(output: Tensor, logsumexp: Tensor, other: Tensor, other_logsumexp: Tensor) -> None:
    """Merge the attention to further keys into that to the first ones, in place.

    Each is weighted by its keys' share of the softmax's sum.
    """
    total = torch.logaddexp(logsumexp, other_logsumexp)
    share = (logsumexp - total).exp_().unsqueeze(-1)
    other_share = (other_logsumexp - total).exp_().unsqueeze(-1)
    output.mul_(share).addcmul_(other, other_share)
    logsumexp.copy_(total)


class _Gathered:
    """Gathers all keys and values, and reduce-scatters their gradients.

    A block is (2, ..., length / p, D).
    """

    def __init__(self, call: _Call, direction: str) -> None:
        self._word = zlib.crc32(f"{direction} {call.description}".encode())
        self.group = call.group
        self.transport = call.transport
        self.rank = call.group.rank()
        self.p = call.group.size()

    def blocks(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield every rank and its block: this rank's first, then those of the ranks before it."""
        # Keys and values travel together: half as many messages.
        blocks = k.new_empty(self.p, 2, *k.shape)
        torch.stack([k, v], out=blocks[self.rank])
        all_gather(blocks, self.group, transport=self.transport)
        self._compare_with_neighbor()
        for step in range(self.p):
            source = (self.rank - step) % self.p
            yield source, blocks[source]

    def add(self, source: int, gradients: Tensor) -> None:
        """Hand over this rank's part of a block's gradient: of every block, in their order."""
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

    def _compare_with_neighbor(self) -> None:
        """Raise RuntimeError if the left neighbor makes another call, as after a lost backward.

        Its blocks may have the same size, so the numbers would be mixed up without a word.
        """
        if self.p == 1:
            return
        words = torch.tensor([self._word, 0])
        right = (self.rank + 1) % self.p
        left = (self.rank - 1) % self.p
        group = cpu_group(self.group)
        exchange(words[:1], right, words[1:], left, group, transport=self.transport)
        if words[0] != words[1]:
            raise RuntimeError(
                f"rank {left} is in another attention call or pass than rank {self.rank}: all ranks"
                " must run the same forward and backward passes"
            )


class _Ring(_Gathered):
    """Passes one block at a time from the left neighbor to the right one.

    Meanwhile the caller computes.
    """

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
            # After the first message, which all ranks have started: a rank in another call is
            # noticed here.
            if step == 0:
                self._compare_with_neighbor()
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
        if self.p > 1:
            self._total.add_(self._landing)
        return self._total

    def _pass_on(self, sent: Tensor, received: Tensor) -> Callable[[], None]:
        right = (self.rank + 1) % self.p
        left = (self.rank - 1) % self.p
        return start_exchange(sent, right, received, left, self.group, transport=self.transport)
