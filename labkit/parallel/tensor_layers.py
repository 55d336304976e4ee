"""Layers of a model that is cut over ranks.

A layer is cut in place: it stays the same object, with its names, hooks and attributes, and gets a
class that is derived from its own. Letters as in `labkit.nn.transformer`; p ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from labkit.parallel.layouts import Layout, find_layout
from labkit.parallel.losses import IGNORED
from labkit.parallel.tensor_collectives import Ranks, cut, enter_or_leave, part_lengths
from labkit.torch_private import DisableTorchFunctionSubclass, assert_async


class ParallelLayer(nn.Module):
    """A layer that knows its ranks, which are set after its class has changed."""

    ranks: Ranks


class CutLayer(ParallelLayer):
    """A layer of which each rank has a part."""

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw whole parameters, and keep this rank's parts: with one seed, one process' values."""
        own = dict(self.named_parameters(recurse=False))
        layouts = {name: find_layout(p, self.ranks.group) for name, p in own.items()}
        is_cut = [name for name, layout in layouts.items() if layout.dim is not None]
        for name in is_cut:
            setattr(self, name, nn.Parameter(own[name].new_empty(layouts[name].shape)))
        try:
            super().reset_parameters()  # type: ignore[misc]
            for name in is_cut:
                # All ranks draw the whole matrix, so that their generators stay alike.
                own[name].copy_(cut(getattr(self, name), layouts[name]))
        finally:
            for name in is_cut:
                setattr(self, name, own[name])


class RowsLinear(CutLayer, nn.Linear):
    """A linear layer's rows: some of its outputs. Megatron's ColumnParallelLinear."""

    enters = True
    """Whether its input is replicated; False inside of a block, which has entered already."""

    def forward(self, x: Tensor) -> Tensor:
        if self.enters:
            x = self.ranks.enter(x)
        return _linear(x, self.weight, self.bias)


class ColumnsLinear(CutLayer, nn.Linear):
    """A linear layer's columns: of some inputs, summed over ranks. Megatron's RowParallelLinear."""

    def forward(self, x: Tensor) -> Tensor:
        # behind the sum all ranks have the same, as dropout of it must leave it
        self.ranks.end_local()
        y = self.ranks.leave(_linear(x, self.weight, None))
        bias: Any = self.bias
        if bias is None:
            return y
        if self.ranks.sequence_parallel:  # added to this rank's tokens only
            bias = self.ranks.sum_gradient(bias)
        return y + bias.to(y.dtype)


class SummedLayer(ParallelLayer):
    """A layer that each rank applies to other activations: it sums its parameters' gradients.

    A hook on the parameters would do, but FSDP refuses these, since it replaces the parameters.
    """

    summed: Sequence[str]

    def forward(self, *inputs: Any, **options: Any) -> Any:
        own = {name: getattr(self, name) for name in self.summed}
        for name, parameter in own.items():
            self._parameters[name] = self.ranks.sum_gradient(parameter)  # type: ignore[assignment]
        try:
            return super().forward(*inputs, **options)
        finally:
            # Also after an error: the optimizer has these.
            self._parameters.update(own)


class VocabularyEmbedding(CutLayer, nn.Embedding):
    """Some rows of an embedding; tokens of other ranks' rows give zeros, and all are summed."""

    def forward(self, tokens: Tensor) -> Tensor:
        check_indices("tokens", tokens, self.num_embeddings)
        p = self.ranks.group.size()
        if self.ranks.sequence_parallel and tokens.shape[-1] % p:
            got = tokens.shape[-1]
            raise ValueError(f"expected a sequence that {p} ranks divide, got {got} tokens")
        first = first_row(self.ranks, self.num_embeddings)
        weight = self.weight
        with DisableTorchFunctionSubclass():  # as in `_linear`
            local, is_here = _local_indices(tokens, first, len(weight))
            padding = None  # whose row gets no gradient
            if self.padding_idx is not None and 0 <= self.padding_idx - first < len(weight):
                padding = self.padding_idx - first
            rows = embedding(local, weight, padding)  # of other ranks' tokens: row 0, masked below
        return self.ranks.leave(rows.masked_fill(~is_here.unsqueeze(-1), 0))


class VocabularyLinear(RowsLinear):
    """A linear layer to logits. They are whole on every rank, unless the loss takes the parts."""

    gathers = True

    def forward(self, x: Tensor) -> Tensor:
        parts = super().forward(x)
        if not self.gathers:
            return parts
        shape = torch.Size((*parts.shape[:-1], self.out_features))
        join = partial(
            self.ranks.join, layout=Layout(self.ranks.group, parts.dim() - 1, shape=shape)
        )
        lengths = part_lengths(self.out_features, self.ranks.group.size())
        rank = self.ranks.group.rank()
        return enter_or_leave(parts, join, lambda grad: grad.split(lengths, -1)[rank])


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply a part of a matrix, without asking `CutTensor`, which takes as long as a small product.

    It has nothing against this one. How a weight is computed from other parameters, as
    `weight_norm` does, it is asked before.
    """
    with DisableTorchFunctionSubclass():
        return linear(x, weight, bias)


def cut_class(kind: type[ParallelLayer], layer: type[nn.Module]) -> type[ParallelLayer]:
    """Return the class of a cut layer: `kind`, and for all else the layer's class."""
    name = f"{kind.__name__}Of{layer.__name__}"
    return _cut_classes.setdefault((kind, layer), type(name, (kind, layer), {}))


_cut_classes: dict[tuple[type, type], type[ParallelLayer]] = {}


def first_row(ranks: Ranks, rows: int) -> int:
    """Return the number of this rank's first row."""
    return sum(part_lengths(rows, ranks.group.size())[: ranks.group.rank()])


def check_indices(name: str, indices: Tensor, rows: int) -> None:
    """Raise ValueError, the same on all ranks, for an index that no rank has.

    On a GPU the kernel raises later, as torch's embedding does, so that nothing waits for it here.
    """
    if not indices.numel():
        return
    if indices.is_cuda:
        assert_async(((indices >= 0) & (indices < rows)).all())
        return
    low, high = (int(bound) for bound in indices.aminmax())
    if low < 0 or high >= rows:
        raise ValueError(f"expected {name} from 0 to {rows - 1}, got {low} to {high}")


class VocabularyLoss(torch.autograd.Function):
    """Cross-entropy of logits in parts: one all-gather of (logsumexp, target's logit) per token.

    Without any target the loss is NaN and gradients are 0, as of torch's cross_entropy.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, ranks: Ranks) -> Tensor:
        # (B S, V / p)
        # The exponentials of 16-bit logits are added up over the vocabulary, for which 16 bits are
        # few.
        wide = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
        counts = targets.flatten() != IGNORED
        local, is_here = _local_indices(targets.flatten(), first, logits.shape[-1])
        own = wide.gather(1, local.unsqueeze(1)).squeeze(1).masked_fill(~is_here, 0)
        both = ranks.gather(torch.stack([wide.logsumexp(1), own])).view(-1, 2, len(local))
        logsumexp = both[:, 0].logsumexp(0)
        ctx.save_for_backward(logits, logsumexp, local, is_here, counts)
        losses = (logsumexp - both[:, 1].sum(0)).masked_fill(~counts, 0)
        # A selection by mask would wait for a GPU to know its length.
        return losses.sum() / counts.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if torch.is_grad_enabled():
            raise ValueError(
                "expected create_graph=False for model(tokens, targets): for second derivatives,"
                " compute the loss from model(tokens)"
            )
        logits, logsumexp, local, is_here, counts = ctx.saved_tensors
        result = logits.flatten(0, -2).to(logsumexp.dtype).sub(logsumexp.unsqueeze(1)).exp_()
        result.scatter_add_(1, local.unsqueeze(1), -is_here.to(result.dtype).unsqueeze(1))
        result.mul_((counts * grad / counts.sum().clamp(min=1)).unsqueeze(1))
        return result.view(logits.shape).to(logits.dtype), None, None, None


def _local_indices(indices: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return indices relative to `first`, 0 for other ranks' rows, and a mask of this rank's."""
    local = indices - first
    is_here = (local >= 0) & (local < rows)
    return local.masked_fill(~is_here, 0), is_here
