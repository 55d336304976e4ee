"""The norm of gradients that lie in shards, and clipping by it."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.parallel.collectives import all_gather


@torch.no_grad()
def clip_by_global_norm(
    sharded: Sequence[Tensor],
    replicated: Sequence[Tensor],
    max_norm: float,
    norm_type: float,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> Tensor:
    """Scale gradients so that the norm of all of them is at most `max_norm`; their norm before, float64, a scalar.

    `sharded`: this rank's parts; `replicated`: what all ranks have alike, counted once. As torch's `clip_grad_norm_`;
    the norm is the same on all ranks to the bit. A collective.
    """
    norms = torch.zeros(dist.get_world_size(group), dtype=torch.float64, device=device)
    norms[dist.get_rank(group)] = _norm(sharded, norm_type, device)
    all_gather(norms, group)
    total = torch.linalg.vector_norm(torch.cat([norms, _norm(replicated, norm_type, device)[None]]), norm_type)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in (*sharded, *replicated):
        gradient.mul_(scale.to(gradient.dtype))
    return total


def _norm(gradients: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Of all of them together, float64, a scalar."""
    each = [torch.linalg.vector_norm(g, norm_type, dtype=_wide(g)).double() for g in gradients if g.numel()]
    return torch.linalg.vector_norm(torch.stack(each), norm_type) if each else torch.zeros((), device=device).double()


def _wide(gradient: Tensor) -> torch.dtype:
    return torch.promote_types(gradient.dtype, torch.float32)
