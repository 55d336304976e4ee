"""Attention by hand in a reader's forward pass, and what torch's SDPA would save at its shapes.

It is found in the operators: a batched matmul, a softmax of its result, and a batched matmul with
that. No code of the reader's can be replaced, so both are timed alone, at the shapes found.
"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from labkit.bench.check import (
    OK,
    describe_error,
    largest_difference,
    refusal_columns,
    status_columns,
)
from labkit.studies.shared.alternatives import timed_rows
from labkit.studies.shared.checks import TOLERANCES
from labkit.studies.your_training.lines import user_lines
from labkit.studies.your_training.loop import Loop
from labkit.torch_private import TorchDispatchMode

BY_HAND = "by hand"
SDPA = "SDPA"
# Fewest keys of attention: a softmax over fewer may choose among experts.
MIN_TOKENS = 16
# Scores below it are masked: some models add a large negative number, not minus infinity.
HIDDEN = -1e4
# Shapes that are timed, those with the most scores.
MAX_SHAPES = 2
aten = torch.ops.aten
PRODUCTS = (aten.bmm.default, aten.baddbmm.default)
SUMS = (aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.sub_.Tensor)


@dataclass(frozen=True)
class AttentionShape:
    """Attention of a forward pass: where, how large, and which scores it hides."""

    line: str
    """The reader's line of the softmax."""
    leading: tuple[int, ...]
    """Batch and heads."""
    queries: int
    keys: int
    head_dim: int
    mask: str
    """ "none", "causal", or "other"."""
    has_bias: bool
    """Whether something is added to the scores that hides none of them, such as ALiBi."""
    dtype: torch.dtype

    @property
    def n_scores(self) -> int:
        """Elements of the scores: time and memory by hand grow with them."""
        return torch.Size((*self.leading, self.queries, self.keys)).numel()

    def __str__(self) -> str:
        sizes = " x ".join(map(str, (*self.leading, self.queries, self.keys)))
        return f"{sizes}, head dimension {self.head_dim}"


@dataclass
class _Scores:
    """What an operator's result was made of: a batched matmul, then perhaps a softmax."""

    head_dim: int
    has_bias: bool = False
    shape: AttentionShape | None = None


class AttentionFinder(TorchDispatchMode):
    """Finds the attention by hand among the operators of a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[AttentionShape] = []
        """Each once, in the order of the pass."""
        self._scores: dict[int, _Scores] = {}
        """By address. Every operator renews that of its result, so none is of a freed tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        output = result[0] if isinstance(result, tuple) and result else result
        if not isinstance(output, Tensor):
            return result
        inputs = [one for one in args if isinstance(one, Tensor)]
        made_of = None
        for one in inputs:
            # A mask or a scale leaves the number of scores as it is.
            if one.numel() == output.numel():
                made_of = made_of or self._scores.get(_address(one))
        if func in SUMS and made_of is not None:
            added = [one for one in inputs if self._scores.get(_address(one)) is not made_of]
            has_bias = made_of.has_bias or any(map(_is_bias, added))
            made_of = replace(made_of, has_bias=has_bias)
        if func in PRODUCTS:
            # The last two inputs are multiplied; `baddbmm` adds the first to their product.
            left = inputs[-2]
            weights = self._scores.get(_address(left))
            shape = weights.shape if weights is not None else None
            if shape is not None and shape not in self.shapes:
                self.shapes.append(shape)
            # Any product may be one of queries and keys: only a softmax of it tells.
            has_bias = any(map(_is_bias, inputs[:-2])) and (kwargs or {}).get("beta", 1) != 0
            made_of = _Scores(left.shape[-1], has_bias)
        elif func is aten._softmax.default and made_of is not None:
            made_of = replace(made_of, shape=_describe(inputs[0], args[1], made_of))
        self._scores.pop(_address(output), None)
        if made_of is not None:
            self._scores[_address(output)] = made_of
        return result


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_bias(added: Tensor) -> bool:
    """Return whether what is added to scores does more than hide some of them."""
    return bool(((added != 0) & (added > HIDDEN)).any())


def _describe(scores: Tensor, dim: int, made_of: _Scores) -> AttentionShape | None:
    """Describe the attention of which these are the scores; None if it is no attention."""
    if scores.dim() < 3 or scores.shape[-1] < MIN_TOKENS:
        return None
    if dim % scores.dim() != scores.dim() - 1:
        return None
    *leading, queries, keys = scores.shape
    hidden = scores.reshape(-1, queries, keys)[0] < HIDDEN
    mask = "other"
    if not hidden.any():
        mask = "none"
    elif torch.equal(hidden, torch.ones_like(hidden).triu(1)):
        mask = "causal"
    return AttentionShape(
        # Above this function and the finder's: the operator's caller.
        line=user_lines(sys._getframe(2))[0],
        leading=tuple(leading),
        queries=queries,
        keys=keys,
        head_dim=made_of.head_dim,
        mask=mask,
        has_bias=made_of.has_bias,
        dtype=scores.dtype,
    )


def find_attention(loop: Loop) -> list[AttentionShape]:
    """Run a forward pass of a loop in its turn; return the shapes of its attention by hand."""
    loop.take_batch()
    with AttentionFinder() as finder:
        loop.forward()
    loop.backward()
    loop.training.optimizer.zero_grad()
    return finder.shapes


def attention_rows(loop: Loop, rounds: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield seconds of forward and backward pass, by hand and by SDPA, for the largest shapes.

    SDPA is timed only if its gradients are those by hand.
    """
    device = loop.training.device
    shapes = sorted(find_attention(loop), key=lambda one: one.n_scores, reverse=True)
    for shape in shapes[:MAX_SHAPES]:
        about = {"kind": "attention", "line": shape.line, "shape": str(shape)}
        if shape.has_bias:
            # SDPA would need it as a mask of numbers, and most of its fused kernels take none.
            reason = "a bias is added to the scores, with which SDPA is not tried"
            yield about | {"attention": SDPA, **refusal_columns(reason)}
            continue
        passes = _passes(shape, device)
        rows = {name: about | OK | {"attention": name} for name in passes}
        gradients = {name: dict(zip("qkv", run(), strict=True)) for name, run in passes.items()}
        error = largest_difference(gradients[SDPA], gradients[BY_HAND])
        tolerance = TOLERANCES[str(shape.dtype).removeprefix("torch.")]
        rows[SDPA] |= status_columns(describe_error(error, tolerance))
        yield from timed_rows(rows, passes, device=str(device), **rounds)


def _passes(shape: AttentionShape, device: torch.device) -> dict[str, Callable[[], Any]]:
    """Return functions that run a forward and a backward pass and return the gradients."""
    # Four dimensions, as fused kernels expect. All of them take batch and heads alike.
    heads = math.prod(shape.leading)
    queries = torch.Size((1, heads, shape.queries, shape.head_dim))
    keys = torch.Size((1, heads, shape.keys, shape.head_dim))
    options: dict[str, Any] = {"dtype": shape.dtype, "device": device}
    inputs = [torch.randn(size, **options, requires_grad=True) for size in (queries, keys, keys)]
    outer = torch.randn(queries, **options)
    # Another mask takes as long as this one.
    hidden = torch.ones(shape.queries, shape.keys, dtype=torch.bool, device=device).triu(1)
    masks: dict[str, dict[str, Any]] = {
        "none": {},
        "causal": {"is_causal": True},
        "other": {"attn_mask": ~hidden},
    }
    sdpa = partial(scaled_dot_product_attention, **masks[shape.mask])

    def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) / shape.head_dim**0.5
        if shape.mask != "none":
            scores = scores.masked_fill(hidden, -math.inf)
        return scores.softmax(-1) @ v

    def gradients(attend: Callable[..., Tensor]) -> Any:
        return torch.autograd.grad(attend(*inputs), inputs, outer)

    return {BY_HAND: partial(gradients, by_hand), SDPA: partial(gradients, sdpa)}
