"""Uneven inputs: a rank without batches joins the collectives of the ranks that still train."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig

from labkit.parallel.data_parallel.consistency import broadcast

ACTIVE, TRAINS, BROADCASTS = 1, 2, 4


class UnevenInputs(Joinable, JoinHook):
    """A wrapper's part in `torch.distributed.algorithms.Join`.

    Under a `Join`, each forward pass begins with a small all-reduce: does a rank have a batch, and which collectives
    follow? A joined rank adds zeros to the gradients. At the end, all ranks copy the model of the last active one.
    """

    module: nn.Module
    group: dist.ProcessGroup | None
    broadcast_buffers: bool
    _ready: list[bool]
    _mean_factor = 1.0
    """Turns a mean over all ranks into one over the active ranks."""
    _divides_by_active = False

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return a context for uneven inputs, as torch's wrapper does."""
        options = {"divide_by_initial_world_size": divide_by_initial_world_size}
        return Join([self], enable, throw_on_early_termination, **options)

    def join_hook(self, divide_by_initial_world_size: bool = True, **_: Any) -> JoinHook:
        """Return the wrapper. Gradients are divided by the number of all ranks, or of the active ones."""
        self._divides_by_active = not divide_by_initial_world_size
        return self

    def main_hook(self) -> None:
        """Take part in one step of the active ranks."""
        source, follows = self._exchange(0)
        if follows & BROADCASTS:
            broadcast(self.module.buffers(), self.group, source)
        if follows & TRAINS:
            self.average(absent=range(len(self._ready)))

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the model of a rank that joined last."""
        source, _ = self._exchange(ACTIVE * is_last_joiner)
        buffers = self.module.buffers() if self.broadcast_buffers else ()
        broadcast([*self.module.parameters(), *buffers], self.group, source)
        self._mean_factor, self._join_config = 1.0, _JoinConfig.construct_disabled_join_config()

    def announce_forward(self, *, trains: bool, broadcasts: bool) -> int:
        """Announce a forward pass to joined ranks. Return the rank whose buffers are broadcast."""
        if not self._join_config.enable:
            return 0
        Join.notify_join_context(self)
        return self._exchange(ACTIVE + TRAINS * trains + BROADCASTS * broadcasts)[0]

    @abstractmethod
    def average(self, absent: Sequence[int]) -> None:
        """Average gradients; parameters at `absent` count as zeros."""

    def _exchange(self, state: int) -> tuple[int, int]:
        """Return the last active rank, whose buffers are broadcast as in torch, and its state. A collective."""
        states = torch.zeros(dist.get_world_size(self.group), dtype=torch.int32, device=self.join_device)
        states[dist.get_rank(self.group)] = state
        dist.all_reduce(states, group=self.group)
        active = [rank for rank, value in enumerate(states.tolist()) if value]
        self._mean_factor = len(states) / len(active) if self._divides_by_active else 1.0
        return active[-1], int(states[active[-1]])
