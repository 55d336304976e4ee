"""Uneven inputs: ranks that have run out of batches take part in the collectives of those that have not."""

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

    Before each forward pass under a `Join` every rank says, in one small all-reduce, whether it has a batch, and which
    collectives follow. A joined rank adds zeros to the gradients; at the end all take the model of the last one.
    """

    module: nn.Module
    group: dist.ProcessGroup | None
    _ready: list[bool]
    _mean_factor = 1.0
    """What corrects a mean over all ranks to one over those with a batch."""
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
        """Return the wrapper itself. Gradients are divided by the number of all ranks, or of those with a batch."""
        self._divides_by_active = not divide_by_initial_world_size
        return self

    def main_hook(self) -> None:
        """Take part in one step of the others."""
        source, follows = self._exchange(0)
        if follows & BROADCASTS:
            broadcast(self.module.buffers(), self.group, source)
        if follows & TRAINS:
            self.average(absent=range(len(self._ready)))

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take over the model of a rank that had a batch last."""
        source, _ = self._exchange(ACTIVE * is_last_joiner)
        broadcast([*self.module.parameters(), *self.module.buffers()], self.group, source)
        self._mean_factor, self._join_config = 1.0, _JoinConfig.construct_disabled_join_config()

    def notify(self, trains: bool, broadcasts: bool) -> int:
        """Under `join`, tell the others that a forward pass follows. Return the rank whose buffers count."""
        if not self._join_config.enable:
            return 0
        Join.notify_join_context(self)
        return self._exchange(ACTIVE + TRAINS * trains + BROADCASTS * broadcasts)[0]

    @abstractmethod
    def average(self, absent: Sequence[int]) -> None:
        """Average gradients; those of parameters at `absent` take part as zeros."""

    def _exchange(self, state: int) -> tuple[int, int]:
        """Return the first rank that is not joined, and its state. A collective."""
        states = torch.zeros(dist.get_world_size(self.group), dtype=torch.int32, device=self.join_device)
        states[dist.get_rank(self.group)] = state
        dist.all_reduce(states, group=self.group)
        active = [rank for rank, value in enumerate(states.tolist()) if value]
        self._mean_factor = len(states) / len(active) if self._divides_by_active else 1.0
        return active[0], int(states[active[0]])
