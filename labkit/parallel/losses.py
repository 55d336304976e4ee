"""Losses of language models as sum and count, for batches of which each rank has a part.

The mean of the ranks' means is not the mean over the batch if ranks have different numbers of
targets that count (masked prompts, padding), and it is NaN if one has none. So ranks add up sums
and counts, and divide once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from labkit.parallel.collectives import all_reduce
from labkit.parallel.transport import member_group

IGNORED = -100
"""Target of a position without a loss, as in `torch.nn.functional.cross_entropy`."""


def next_tokens(tokens: Tensor) -> Tensor:
    """Return the targets of a language model, (B, S): at each position the token after it.

    The last position has none (`IGNORED`). Make targets of whole sequences, before they are split
    over ranks: the target of a part's last token is the first one of another rank's part.
    """
    targets = tokens.roll(-1, dims=1)
    targets[:, -1] = IGNORED
    return targets


def summed_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of cross-entropies of logits (..., V) and the number of targets that count.

    Targets (...), int64, may be `IGNORED`. Without any target both are zero.
    """
    # The exponentials of many 16-bit logits cannot be added up in 16 bits.
    wide = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    total = cross_entropy(wide, targets.flatten(), reduction="sum", ignore_index=IGNORED)
    return total, (targets != IGNORED).sum()


def mean_loss(logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the mean cross-entropy over all targets that count, on all ranks of a group.

    Each rank has other positions or sequences, as with context or data parallelism: logits
    (..., V), targets (...). The mean over the ranks of the gradients (`BucketedDDP` of this group)
    is the gradient of the loss. Without a target on any rank, loss and gradients are zeros. A
    collective of the group (None: all ranks), in its forward pass only.
    """
    total, count = summed_loss(logits, targets)
    # In one message, and in float64: a count is exact, whatever the dtype of the loss.
    sums = torch.stack([total.detach().double(), count.double()])
    all_reduce(sums, group, "sum")
    # A tensor, so that a GPU need not be waited for.
    scale = 1 / sums[1].clamp(min=1)
    mean: Tensor = _ScaledLoss.apply(
        # Times p, since wrappers average gradients over ranks: the gradient is then that of a sum.
        total,
        (sums[0] * scale).to(total.dtype),
        scale.to(total.dtype) * member_group(group).size(),
    )
    return mean


class _ScaledLoss(torch.autograd.Function):
    """Have the value of one loss and a multiple of another one's gradient."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, value: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (scale,) = ctx.saved_tensors
        return gradient * scale, None, None
