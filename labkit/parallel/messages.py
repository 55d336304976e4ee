"""Values of all ranks as JSON, through the store of their group.

torch's collectives of objects unpickle a peer's bytes, and a pickle runs code.
"""

import json
import weakref
from typing import Any

import torch
import torch.distributed as dist

from labkit.torch_private import count_process_groups

_cpu_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = (
    weakref.WeakKeyDictionary()
)


def gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's JSON-able `value`, by rank of the group (None: all ranks). A collective.

    Takes milliseconds, whatever the length of the values. Raises an error of torch if a rank ends,
    or if one does not call within the time limit of the group or of its store.
    """
    members = _members(group)
    store = members.get_group_store()
    rank = members.rank()
    number = store.add(f"JSON calls of rank {rank}", 1)
    store.set(f"JSON {number} of rank {rank}", json.dumps(value))
    # A store would wait in vain for a rank that has ended; a collective fails at once.
    dist.all_reduce(torch.zeros(1, device="cpu"), group=cpu_group(group))
    # Now every rank has called, so it has read all values of the call before.
    store.delete_key(f"JSON {number - 1} of rank {rank}")
    return [json.loads(store.get(f"JSON {number} of rank {r}")) for r in range(members.size())]


def cpu_group(group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """Return the group of the same ranks that takes CPU tensors: the group itself, if it can.

    NCCL cannot, so its ranks get a gloo group. The first call is a collective.

    Raises ValueError, on all ranks, if they are in different numbers of groups.
    """
    members = _members(group)
    if "cpu:" in dist.get_backend_config(members):
        return members
    if members not in _cpu_groups:
        _check_group_counts(members)
        ranks = dist.get_process_group_ranks(members)
        # Only the members call: ranks outside of the group know nothing of this.
        _cpu_groups[members] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _cpu_groups[members]


def _check_group_counts(members: Any) -> None:
    """Raise ValueError unless all ranks would give their new group the same name.

    torch forms it from the number of groups that a rank is in. Ranks with other numbers would wait
    for each other under other names, until the time limit.
    """
    store = members.get_group_store()
    store.set(f"groups of rank {members.rank()}", str(count_process_groups()))
    counts = [int(store.get(f"groups of rank {rank}")) for rank in range(members.size())]
    if len(set(counts)) > 1:
        raise ValueError(
            f"expected ranks in equally many process groups, got {counts}: make each group with"
            " dist.new_group on all ranks"
        )


def _members(group: dist.ProcessGroup | None) -> Any:
    return group or dist.GroupMember.WORLD
