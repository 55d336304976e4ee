"""Which device a rank works on: decided here, for all that ranks do."""

from __future__ import annotations

import torch
import torch.distributed as dist

from labkit.parallel.ranks.joined import index_on_this_node, is_joined


def use_device(kind: str, rank: int | None = None) -> str:
    """The device of this rank, "cpu" or "cuda:1", made the current one: clocks mark its stream.

    Ranks of one machine take its GPUs in turn, by their number on that machine: under torchrun LOCAL_RANK, and for
    ranks started here their rank, which is 0 without a process group. Several share one where there are fewer.
    `rank` is for a rank that has no process group yet.
    """
    if kind == "cpu":
        return kind
    if rank is None:
        rank = dist.get_rank() if dist.is_initialized() else 0
    number = index_on_this_node() if is_joined() else rank
    device = f"cuda:{number % torch.cuda.device_count()}"
    torch.cuda.set_device(device)
    return device
