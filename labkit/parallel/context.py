"""Context parallelism: ranks have parts of a sequence, and attention passes keys and values around.

    q, k, v = (split_sequence(x, 2) for x in (q, k, v))    this rank's positions of (B, H, S, D)
    output = ring_attention(q, k, v)                       of these; backward gives their gradients

    model = context_parallel(Transformer(...))             all its attention across ranks
    targets = next_tokens(tokens)                          of whole sequences, before the split
    tokens, targets = (split_sequence(x, 1) for x in (tokens, targets))
    mean_loss(model(tokens), targets).backward()           then average gradients over ranks

`context_layout` has the layouts, which decide the positions of each rank, `context_attention` the
ring, and `losses` the targets and the loss.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.nn.attention_implementations import IMPLEMENTATIONS, RESERVED
from labkit.nn.transformer import RotaryPositions, Transformer
from labkit.parallel.agreement import agree_once
from labkit.parallel.backward_pass import report_failures
from labkit.parallel.context_attention import gather_attention, ring_attention
from labkit.parallel.context_layout import (
    LAYOUTS,
    count_parts,
    join_sequence,
    local_positions,
    split_sequence,
)
from labkit.parallel.losses import mean_loss, next_tokens
from labkit.parallel.transport import AUTO, Group, member_group
from labkit.torch_private import ConvNd, NormBase

__all__ = [
    "LAYOUTS",
    "context_parallel",
    "gather_attention",
    "join_sequence",
    "local_positions",
    "mean_loss",
    "next_tokens",
    "ring_attention",
    "split_sequence",
]


def context_parallel(
    model: Transformer,
    group: Group = None,
    *,
    attention: Callable[..., Tensor] = ring_attention,
    layout: str = "zigzag",
    transport: str = AUTO,
) -> Transformer:
    """Let a Transformer attend across ranks, and rotate at the positions of its layout; return it.

    It then maps this rank's tokens, (B, S / p), to their logits. Its attention is replaced by
    `attention`, causal and with the scale 1 / sqrt(D). With `mean_loss`, the mean of the ranks'
    gradients is the gradient of the sequence's loss; the mean of their mean losses is not if ranks
    have different numbers of targets that count.

    A collective. Raises ValueError, on all ranks, for another layout, for a model with other
    attention than labkit's (a mask of its own would be lost), and for layers that would see this
    rank's positions only.
    """
    members = member_group(group)

    def describe() -> dict[str, object]:
        count_parts(2 * members.size(), members.size(), layout)
        _check_model(model)
        return {"layout": layout, "attention": getattr(attention, "__name__", attention)}

    agree_once("layout and attention", describe, members)
    report_failures(model, members)
    for layer in model.layers:
        block: Any = layer.attention
        block.attend = _Attend(attention, members, layout, transport)
        block.rotate = _Rotate(model.positions, members, layout)
    return model


def _check_model(model: Any) -> None:
    labkits = [IMPLEMENTATIONS[name] for name in RESERVED]
    if not isinstance(getattr(model, "positions", None), RotaryPositions):
        raise ValueError(
            f"expected a model like labkit's Transformer, got a {type(model).__name__} without"
            " rotary `positions`"
        )
    for number, layer in enumerate(model.layers):
        block: Any = getattr(layer, "attention", None)
        if not hasattr(block, "attend") or not hasattr(block, "rotate"):
            raise ValueError(
                f"expected `attend` and `rotate` in each layer's attention, and layer {number} has"
                f" {type(block).__name__}, which would see this rank's positions only"
            )
        attend = block.attend
        is_flash = getattr(attend, "__module__", "") == "labkit.nn.flash_attention"
        if not (isinstance(attend, _Attend) or is_flash or attend in labkits):
            raise ValueError(
                "expected attention of labkit.nn, whose place ring attention can take, and layer"
                f" {number} has {getattr(attend, '__name__', attend)!s:.80}: its mask or scale"
                " would be lost"
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention | nn.RNNBase | ConvNd | NormBase):
            raise ValueError(
                f"expected layers that treat each position alone, and {name} is a"
                f" {type(module).__name__}, which would see this rank's positions only"
            )


@dataclass(frozen=True)
class _Attend:
    """Attention across ranks in the place of a model's."""

    method: Callable[..., Tensor]
    group: dist.ProcessGroup
    layout: str
    transport: str

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        options = {"group": self.group, "layout": self.layout, "transport": self.transport}
        return self.method(q, k, v, is_causal=causal, **options)

    def __deepcopy__(self, memo: object) -> _Attend:
        return self  # a process group cannot be copied


@dataclass(frozen=True)
class _Rotate:
    """Rotation at the positions of this rank."""

    positions: RotaryPositions
    group: dist.ProcessGroup
    layout: str
    _local: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict, compare=False)
    """The positions of the last call, by length of the sequence and device."""

    def __call__(self, x: Tensor) -> Tensor:
        length = x.shape[-2] * self.group.size()
        longest = len(self.positions.cosines)
        if length > longest:
            raise ValueError(
                f"expected at most {longest} positions on all ranks together, got {length}"
            )
        key = (length, x.device)
        if key not in self._local:
            # Kept, since a copy to a GPU waits for all that its stream has to do.
            self._local.clear()
            positions = local_positions(length, group=self.group, layout=self.layout)
            self._local[key] = positions.to(x.device)
        return self.positions(x, self._local[key])

    def __deepcopy__(self, memo: Any) -> _Rotate:
        return _Rotate(copy.deepcopy(self.positions, memo), self.group, self.layout)
