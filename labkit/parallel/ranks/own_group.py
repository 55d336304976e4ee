"""A process group as torch's default one for a while, in place of the one that there may be."""

from __future__ import annotations

import gc
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


class OwnGroup:
    """torch's default process group from when it is made until `leave`; then the one of before is, or none.

    What a worker may do to it, and to groups that it makes of it, stays in it: keys, names and pending collectives of
    the caller's groups are not touched. torch has no public way to exchange its default group, and its functions
    without a `group` know no other; so this sets what `init_process_group` and `destroy_process_group` set.
    """

    def __init__(
        self,
        backend: str,
        *,
        store: Any,
        rank: int,
        world_size: int,
        timeout_s: float,
        device: torch.device | None,
    ) -> None:
        """A collective. `store` is for this group alone; `device` is the rank's own under NCCL, and else None."""
        self._backend = backend
        self._before = (c10d._world.default_pg, c10d._world.group_count, sys.excepthook)
        self._known = set(c10d._world.pg_map)
        self._is_left = False
        c10d._update_default_pg(None)
        try:
            dist.init_process_group(
                backend,
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
                device_id=device,
            )
        except BaseException:
            self.leave()
            raise

    def abort(self) -> None:
        """Under NCCL, have the collectives that this rank is in, or still enters, fail.

        gloo's do not end by that, and an aborted group of gloo keeps its connections, for whose end its peers wait.
        """
        if self._backend == "nccl":
            for group in self._made():
                group.abort()

    def leave(self) -> None:
        """Take down this group and all that were made of it, and put back the one of before. Safe to repeat.

        Under gloo the connections end with the last reference to the group, and with them the waiting of the ranks at
        their other ends: so what has gone wrong, and keeps a reference, should be gone before.
        """
        if self._is_left:
            return
        self._is_left = True
        default, count, hook = self._before
        c10d._update_default_pg(default)
        for group in self._made():
            dist.destroy_process_group(group)
        c10d._world.group_count, sys.excepthook = count, hook
        gc.collect()

    def _made(self) -> list[Any]:
        """The groups that were not there before, the latest first."""
        return [group for group in reversed(list(c10d._world.pg_map)) if group not in self._known]
