"""Collectives of tensor parallelism, and their derivatives.

    replicated x  -- enter --> this rank's rows --> heads, features --> its columns -- leave --> x

                     forward                    backward
    enter            nothing                    all-reduce
    leave            all-reduce                 nothing

With sequence parallelism, x outside has this rank's tokens only:

    enter            all-gather of tokens       reduce-scatter
    leave            reduce-scatter             all-gather of gradients

Letters as in `labkit.nn.transformer`; p ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.parallel.collectives import all_gather, all_reduce, reduce_scatter
from labkit.parallel.failures import explain_failure
from labkit.parallel.gradients import fork_generators, restore_generators
from labkit.parallel.layouts import Layout

TORCH = "torch"
Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Ranks:
    """Collectives of the group, labkit's or torch.distributed's."""

    group: dist.ProcessGroup
    transport: str
    sequence_parallel: bool
    _outside: list[list[Tensor]] = field(default_factory=list)
    """Generators' states outside of what differs between ranks; empty in evaluation."""

    def __deepcopy__(self, memo: object) -> Ranks:
        return self  # a process group cannot be copied; copies of a model share it

    def enter(self, x: Tensor) -> Tensor:
        """Bring activations into a region of cut matrices: (B, S, d), or (B, S / p, d)."""
        if self.sequence_parallel:
            return enter_or_leave(x, self.gather_tokens, self.scatter_tokens)
        return enter_or_leave(x, _view, self.copy_sum)

    def leave(self, x: Tensor) -> Tensor:
        """Sum the parts of activations over ranks. May overwrite x."""
        if self.sequence_parallel:
            return enter_or_leave(x, self.scatter_tokens, self.gather_tokens)
        return enter_or_leave(x, self.sum, _view, self.copy_sum)

    def sum_gradient(self, parameter: Tensor) -> Tensor:
        """Return a parameter whose gradient will be summed over ranks."""
        return enter_or_leave(parameter, _view, self.copy_sum)

    def begin_local(self, layer: nn.Module) -> None:
        """Begin what differs between ranks: the inside of a block, or dropout. See `fork_seed`."""
        self._outside.append(fork_generators(self.group) if layer.training else [])

    def end_local(self) -> None:
        """Go on with activations and random numbers that all ranks have. Idempotent."""
        if self._outside:
            states = self._outside.pop()
            if states:
                restore_generators(states)

    @property
    def is_local(self) -> bool:
        """Whether activations differ between ranks here."""
        return bool(self._outside)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.transport == TORCH:
            self._call_torch(dist.all_reduce, tensor)
        else:
            all_reduce(tensor, self.group, "sum", transport=self.transport)
        return tensor

    def _call_torch(self, collective: Callable[..., Any], *tensors: Any) -> None:
        try:
            collective(*tensors, group=self.group)
        except RuntimeError as error:
            explain_failure(error, self.group.get_group_store())
            raise

    def copy_sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks, contiguous."""
        return self.sum(tensor.clone(memory_format=torch.contiguous_format))

    def gather(self, part: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """Return all ranks' parts as one vector; `sizes`: elements of each part if they differ."""
        sizes = sizes or [part.numel()] * self.group.size()
        if self.transport == TORCH:  # gloo gathers equal parts only
            padded = torch.cat([part.reshape(-1), part.new_empty(max(sizes) - part.numel())])
            landings = [torch.empty_like(padded) for _ in sizes]
            self._call_torch(dist.all_gather, landings, padded)
            return torch.cat(
                [landing[:size] for landing, size in zip(landings, sizes, strict=True)]
            )
        whole = part.new_empty(sum(sizes))
        whole.split(list(sizes))[self.group.rank()].copy_(part.reshape(-1))
        all_gather(whole, self.group, sizes=sizes, transport=self.transport)
        return whole

    def gather_tokens(self, x: Tensor) -> Tensor:
        """Return all ranks' tokens, (B, S / p, d) to (B, S, d).

        Rank r has the r-th of p equal pieces of all B S tokens, in their order in memory: nothing
        moves for B > 1.
        """
        return self.gather(x).view(x.shape[0], -1, x.shape[2])

    def scatter_tokens(self, x: Tensor) -> Tensor:
        """Return this rank's tokens of the sum over ranks, (B, S, d) to (B, S / p, d)."""
        part = x.new_empty(x.shape[0], x.shape[1] // self.group.size(), x.shape[2])
        if self.transport == TORCH:
            parts = list(x.reshape(-1).split(part.numel()))
            self._call_torch(dist.reduce_scatter, part.view(-1), parts)
        else:
            into = part.view(-1)
            reduce_scatter(x.contiguous(), self.group, "sum", into=into, transport=self.transport)
        return part

    def join(self, part: Tensor, layout: Layout) -> Tensor:
        """Gather all ranks' parts of a tensor into the whole one."""
        dim = layout.dim
        assert dim is not None
        shapes = []
        for length in part_lengths(layout.shape[dim], self.group.size()):
            shapes.append((*layout.shape[:dim], length, *layout.shape[dim + 1 :]))
        sizes = [torch.Size(shape).numel() for shape in shapes]
        flat_parts = self.gather(part.contiguous(), sizes).split(sizes)
        parts = [flat.view(shape) for flat, shape in zip(flat_parts, shapes, strict=True)]
        return torch.cat(parts, dim)


def part_lengths(length: int, ranks: int) -> list[int]:
    """Return the length of each rank's part, as `torch.chunk` and DTensor cut; 0 at the end."""
    longest = -(-length // ranks)
    return [max(0, min(longest, length - rank * longest)) for rank in range(ranks)]


def cut(whole: Tensor, layout: Layout) -> Tensor:
    """Return a copy of this rank's part."""
    assert layout.dim is not None
    lengths = part_lengths(whole.shape[layout.dim], layout.group.size())
    return whole.split(lengths, layout.dim)[layout.group.rank()].clone()


def _view(x: Tensor) -> Tensor:
    return x.view_as(x)


def enter_or_leave(
    x: Tensor, forward: Function, backward: Function, again: Function | None = None
) -> Tensor:
    result: Tensor = _Conjugate.apply(x, forward, backward, again or forward)
    return result


class _Conjugate(torch.autograd.Function):
    """Apply one function forward and another backward, which have no graph of their own.

    Each is the derivative of the other, since ranks that have the same activations count as one.
    `again`: the forward function of a second derivative, which must not work in place.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward: Function, backward: Function, again: Function
    ) -> Tensor:
        ctx.back = backward
        ctx.again = again
        result = forward(x)
        if result is x:
            # A collective has overwritten it: autograd must refuse whoever saved the old values.
            ctx.mark_dirty(x)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if torch.is_grad_enabled():  # create_graph=True
            return _Conjugate.apply(grad, ctx.back, ctx.again, ctx.back), None, None, None
        return ctx.back(grad), None, None, None
