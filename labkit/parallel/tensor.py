"""Tensor parallelism: every matrix of the Transformer is cut over the ranks, which exchange
activations.

    model = tensor_parallel(Transformer(shape, context_length=1024))
    loss = model(tokens, targets)        mean cross-entropy; logits stay in parts
    loss.backward()                      gradients of this rank's parts of the parameters
    logits = model(tokens)               whole, on every rank

Every rank gets the same tokens. Queries, keys, values, gate and up are cut by rows (each rank has
whole heads), the two matrices behind them by columns, embedding and output by the vocabulary. So a
block begins with activations that all ranks have, and ends with a sum over ranks:

    enters a block     forward: nothing                    backward: all-reduce
    leaves a block     forward: all-reduce                 backward: nothing

With sequence parallelism, norms and residuals are cut over the tokens, and each all-reduce becomes
two halves:

    enters a block     forward: all-gather of tokens       backward: reduce-scatter
    leaves a block     forward: reduce-scatter             backward: all-gather of gradients

It sends the same bytes, and each rank keeps 1/p of the activations between blocks. A norm then sees
this rank's tokens only, and the gradient of its gain is summed over ranks.

The loss exchanges two numbers per token and rank: logsumexp of its logits, and the target's logit
if it has that. `labkit.costs.communication.tensor_parallel_calls` lists every collective of a step.
Letters as in `labkit.nn.transformer`; p ranks, r this rank.

Sources: Shoeybi et al. 2019 (arXiv:1909.08053), section 3; Korthikanti et al. 2022
(arXiv:2205.05198), section 4.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import embedding

from labkit.nn.transformer import Matrix, RMSNorm, Transformer
from labkit.parallel.agreement import (
    agree_once,
    agree_per_pass,
    describe_parameter,
    describe_values,
)
from labkit.parallel.collectives import all_gather, all_reduce, reduce_scatter
from labkit.parallel.data_parallel.consistency import broadcast
from labkit.parallel.transport import AUTO, CHOICES, member_group

Group = dist.ProcessGroup | None
Tensors = Callable[[Tensor], Tensor]
TORCH = "torch"
# labkit's collectives over a transport, or those of torch.distributed
TRANSPORTS = (*CHOICES, TORCH)
IGNORED = -100  # the target of a position without a loss, as in `torch.nn.functional.cross_entropy`


def tensor_parallel(
    model: Transformer,
    group: Group = None,
    *,
    sequence_parallel: bool = False,
    transport: str = AUTO,
) -> TensorParallel:
    """Cut the model's parameters over the ranks of `group` (None: all), in place, and wrap it. A
    collective.

    The model is whole on every rank before, and takes the values of the group's rank 0.
    `transport`: "auto", "shared" or "point_to_point" for labkit's collectives; "torch" for those of
    torch.distributed.

    Raises ValueError, on all ranks, for a model other than an uncut `Transformer`, for heads that p
    does not divide, for fewer rows than ranks, for another transport, and if models or arguments
    differ between ranks.
    """
    return TensorParallel(model, group, sequence_parallel=sequence_parallel, transport=transport)


class TensorParallel(nn.Module):
    """A Transformer cut over ranks. `module` has this rank's parts; call it through this wrapper
    only."""

    def __init__(
        self, model: Transformer, group: Group, *, sequence_parallel: bool, transport: str
    ) -> None:
        super().__init__()
        members = member_group(group)

        def describe() -> dict[str, object]:
            _check_model(model, members.size(), transport)
            return {
                "sequence_parallel": sequence_parallel,
                "transport": transport,
                **{name: describe_parameter(tensor) for name, tensor in model.named_parameters()},
            }

        agree_once("model", describe, members)
        broadcast([*model.parameters(), *model.buffers()], members)
        self.module: Any = model
        self.sequence_parallel = sequence_parallel
        self._ranks = ranks = _Ranks(members, transport)
        self._cuts = _cut_parameters(model, ranks)
        self._add_communication()

    def _add_communication(self) -> None:
        """Add a collective where activations enter and leave each block."""
        model = self.module
        ranks = self._ranks
        halves: tuple[Tensors, Tensors] = (ranks.gather_tokens, ranks.scatter_tokens)
        enter = halves if self.sequence_parallel else (_view, ranks.copy_sum)
        leave = halves[::-1] if self.sequence_parallel else (ranks.sum, _view)
        first_row = sum(self._cuts["embedding.weight"][1][: ranks.group.rank()])
        model.embedding = _VocabularyEmbedding(model.embedding.weight, first_row)
        blocks = [b for layer in model.layers for b in (layer.attention, layer.feed_forward)]
        for block in (*blocks, model.output):
            block.register_forward_pre_hook(lambda _, inputs: _Conjugate.apply(*inputs, *enter))
        for block in (*blocks, model.embedding):
            block.register_forward_hook(lambda _, inputs, output: _Conjugate.apply(output, *leave))
        if self.sequence_parallel:
            for parent in (model, *model.layers):
                for name, child in list(parent.named_children()):
                    if isinstance(child, RMSNorm):
                        setattr(parent, name, _TokenParallelNorm(child, ranks))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Tokens (B, S), int64, alike on all ranks, to logits (B, S, V); with targets (B, S), to
        their mean loss.

        Raises ValueError, on all ranks, for tokens and targets that differ between ranks, for other
        shapes, and with sequence parallelism for a sequence that p does not divide.
        """
        self._check(tokens, targets)
        parts = self.module(tokens)  # (B, S, V / p)
        if targets is None:
            lengths = self._cuts["output.weight"][1]
            rank = self._ranks.group.rank()
            join = partial(_join_parts, dim=2, lengths=lengths, ranks=self._ranks)
            logits: Tensor = _Conjugate.apply(
                parts, join, lambda grad: grad.split(lengths, 2)[rank]
            )
            return logits
        loss: Tensor = _VocabularyLoss.apply(
            parts, targets, self.module.embedding.first, self._ranks
        )
        return loss

    def _check(self, tokens: Tensor, targets: Tensor | None) -> None:
        batch = {"tokens": describe_values(tokens)}
        if targets is not None:
            batch["targets"] = describe_values(targets)
        agree_per_pass("tokens and targets", lambda: batch, self._ranks.group)
        p = self._ranks.group.size()
        if self.sequence_parallel and tokens.dim() == 2 and tokens.shape[1] % p:
            raise ValueError(
                f"expected a sequence that {p} ranks divide, got {tokens.shape[1]} tokens"
            )
        if targets is not None and (targets.shape != tokens.shape or targets.dtype != torch.int64):
            raise ValueError(f"expected int64 targets in the shape of the tokens, got {batch}")
        last = self.module.shape.vocabulary - 1
        for indices in (tokens, tokens[:0] if targets is None else targets[targets != IGNORED]):
            if indices.numel() and (indices.min() < 0 or indices.max() > last):
                raise ValueError(
                    f"expected tokens from 0 to {last}, got {indices.min()} to {indices.max()}"
                )

    @torch.no_grad()
    def gather_state_dict(self, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return the whole model's `state_dict`, on every rank. A collective.

        `state`: this rank's parts, by name, if something else holds them (FSDP's
        `consolidated_state_dict(to=None)`).
        """
        parts = self.state_dict() if state is None else state
        named = {name.removeprefix("module."): part for name, part in parts.items()}
        return {
            name: (
                _join_parts(part, *self._cuts[name], self._ranks)
                if name in self._cuts
                else part.clone()
            )
            for name, part in named.items()
        }


def _check_model(model: Any, p: int, transport: str) -> None:
    expected = ""
    if transport not in TRANSPORTS:
        expected = f"a transport among {', '.join(TRANSPORTS)}, got {transport!r}"
    elif isinstance(getattr(model, "embedding", None), _VocabularyEmbedding) or not isinstance(
        model, Transformer
    ):
        expected = (
            f"a labkit.nn.transformer.Transformer that is not cut, got {type(model).__name__}"
        )
    elif model.shape.n_heads % p:
        expected = f"heads that {p} ranks divide, got {model.shape.n_heads}"
    elif min(model.shape.vocabulary, model.shape.d_ff) < p:
        expected = (
            f"a vocabulary and d_ff of {p} rows or more, got {model.shape.vocabulary} and"
            f" {model.shape.d_ff}"
        )
    if expected:
        raise ValueError(f"expected {expected}")


def _cut_parameters(model: Any, ranks: _Ranks) -> dict[str, tuple[int, list[int]]]:
    """Replace every matrix by this rank's part; return the dimension of each cut and all ranks'
    lengths, by name."""
    rows = ("queries", "keys", "values", "gate", "up")
    columns = ("attention.output", "feed_forward.down")
    names = [name for name, part in model.layers.named_modules() if isinstance(part, Matrix)]
    dims = {
        f"layers.{name}.weight": 0 if name.endswith(rows) else 1
        for name in names
        if name.endswith(rows + columns)
    }
    for layer in model.layers:
        layer.attention.n_heads //= ranks.group.size()
    parts: dict[nn.Parameter, nn.Parameter] = {}  # a parameter that two matrices share stays one
    cuts = {}
    for name, dim in {"embedding.weight": 0, "output.weight": 0, **dims}.items():
        matrix = model.get_submodule(name.removesuffix(".weight"))
        whole = matrix.weight
        splits = whole.detach().tensor_split(ranks.group.size(), dim)
        cuts[name] = dim, [split.shape[dim] for split in splits]
        parts.setdefault(
            whole,
            nn.Parameter(splits[ranks.group.rank()].clone(), requires_grad=whole.requires_grad),
        )
        matrix.weight = parts[whole]
    return cuts


@dataclass(frozen=True)
class _Ranks:
    """Collectives of the group, labkit's or torch.distributed's."""

    group: dist.ProcessGroup
    transport: str

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.transport == TORCH:
            dist.all_reduce(tensor, group=self.group)
        else:
            all_reduce(tensor, self.group, "sum", transport=self.transport)
        return tensor

    def copy_sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks, contiguous."""
        return self.sum(tensor.clone(memory_format=torch.contiguous_format))

    def gather(self, part: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """Return all ranks' parts in a row, a vector; `sizes`: elements of each rank's part if they
        differ."""
        sizes = sizes or [part.numel()] * self.group.size()
        if self.transport == TORCH:  # gloo gathers equal parts only
            padded = torch.cat([part.reshape(-1), part.new_empty(max(sizes) - part.numel())])
            landings = [torch.empty_like(padded) for _ in sizes]
            dist.all_gather(landings, padded, group=self.group)
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
            dist.reduce_scatter(
                part.view(-1), list(x.reshape(-1).split(part.numel())), group=self.group
            )
        else:
            reduce_scatter(
                x.contiguous(), self.group, "sum", into=part.view(-1), transport=self.transport
            )
        return part


def _view(x: Tensor) -> Tensor:
    return x.view_as(x)


class _Conjugate(torch.autograd.Function):
    """Apply one function forward and another backward, both outside of autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Tensors, back: Tensors) -> Tensor:
        ctx.back = back
        result = there(x)
        if result is x:
            ctx.mark_dirty(x)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


def _join_parts(part: Tensor, dim: int, lengths: Sequence[int], ranks: _Ranks) -> Tensor:
    """Gather parts that were cut by dimension `dim` into these lengths."""
    others = part.numel() // part.shape[dim]
    sizes = [length * others for length in lengths]
    parts = ranks.gather(part.contiguous(), sizes).split(sizes)
    shapes = [(*part.shape[:dim], length, *part.shape[dim + 1 :]) for length in lengths]
    return torch.cat([each.view(shape) for each, shape in zip(parts, shapes, strict=True)], dim)


class _VocabularyEmbedding(nn.Module):
    """This rank's rows of an embedding, from `first` on; tokens of other rows give zeros."""

    def __init__(self, weight: nn.Parameter, first: int) -> None:
        super().__init__()
        self.weight = weight
        self.first = first

    def forward(self, tokens: Tensor) -> Tensor:
        local, is_here = _local_indices(tokens, self.first, len(self.weight))
        return embedding(local, self.weight).masked_fill(~is_here.unsqueeze(-1), 0)


class _TokenParallelNorm(RMSNorm):
    """A norm of this rank's tokens, which sums the gradient of its gain over ranks."""

    def __init__(self, norm: RMSNorm, ranks: _Ranks) -> None:
        super().__init__(len(norm.gain), eps=norm.eps)
        self.gain = norm.gain
        self._ranks = ranks

    def forward(self, x: Tensor) -> Tensor:
        return self.normalize(x, _Conjugate.apply(self.gain, _view, self._ranks.copy_sum))


class _VocabularyLoss(torch.autograd.Function):
    """Cross-entropy of logits in parts: one all-gather of (logsumexp, target's logit) per token."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, ranks: _Ranks) -> Tensor:
        # (B S, V / p)
        wide = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
        counts = targets.flatten() != IGNORED
        local, is_here = _local_indices(targets.flatten(), first, logits.shape[-1])
        own = wide.gather(1, local.unsqueeze(1)).squeeze(1).masked_fill(~is_here, 0)
        both = ranks.gather(torch.stack([wide.logsumexp(1), own])).view(-1, 2, len(local))
        logsumexp = both[:, 0].logsumexp(0)
        ctx.save_for_backward(logits, logsumexp, local, is_here, counts)
        return (logsumexp - both[:, 1].sum(0))[counts].mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, logsumexp, local, is_here, counts = ctx.saved_tensors
        result = logits.flatten(0, 1).to(logsumexp.dtype).sub(logsumexp.unsqueeze(1)).exp_()
        result.scatter_add_(1, local.unsqueeze(1), -is_here.to(result.dtype).unsqueeze(1))
        result.mul_((counts * grad / counts.sum()).unsqueeze(1))
        return result.view(logits.shape).to(logits.dtype), None, None, None


def _local_indices(indices: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return indices relative to `first`, 0 for other ranks' rows, and a mask of this rank's."""
    local = indices - first
    is_here = (local >= 0) & (local < rows)
    return local.masked_fill(~is_here, 0), is_here
