"""JSON among the ranks of a group, through its store.

torch's collectives of objects unpickle a peer's bytes, and a pickle runs code.
"""

import json
from typing import Any

import torch
import torch.distributed as dist


def gather_json(
    value: Any, group: dist.ProcessGroup | None = None, device: torch.device | None = None
) -> list[Any]:
    """Return every rank's JSON-able `value`, by rank of the group (None: all ranks). A collective.

    Ranks meet on `device`; None: the CPU, or the current GPU if the group's backend is NCCL.
    """
    members: Any = dist.GroupMember.WORLD if group is None else group
    store = members.get_group_store()
    rank = members.rank()
    key = f"JSON {store.add(f'calls of rank {rank}', 1)} of rank"
    store.set(f"{key} {rank}", json.dumps(value))
    here = torch.zeros(1, device=device or meeting_device(group))
    dist.all_reduce(here, group=group)
    here.item()  # waits for a GPU, too: a store does not notice that a rank is lost
    return [json.loads(store.get(f"{key} {other}")) for other in range(members.size())]


def meeting_device(group: dist.ProcessGroup | None = None) -> str:
    """Return the device whose tensors a group's collectives take, "cpu" or "cuda"."""
    return "cuda" if dist.get_backend(group) == "nccl" else "cpu"
