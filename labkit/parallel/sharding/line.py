"""Collectives of sharding in the background, checked to be the same on all ranks."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from labkit.parallel.background_comm import Channel, Wait
from labkit.parallel.collectives import all_gather
from labkit.parallel.transport.select_transport import member_group

END_OF_PASS = "the end of backward"


class Line:
    """Collectives in the background, one after the other, each after a check that all ranks begin the same one.

    A rank that does something else would wait for the others forever, or mix up their tensors. On a CPU ranks compare
    8 bytes each before a collective; on a GPU that would wait for the device, and nothing is compared.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, transport: str, places: Sequence[str]):
        """`places`: all that can be begun here, alike on all ranks."""
        self.channel, self._places = Channel(group, device, transport), [END_OF_PASS, *places]
        members = member_group(group)
        self._rank, self._p, self._is_checked = members.rank(), members.size(), device.type == "cpu"
        self._error: RuntimeError | None = None

    def start(self, place: str, action: Callable[[], None], trained: int = 0) -> Wait:
        """Begin; call what is returned to wait for the end. `trained`: how many parameters take part."""
        return self.channel.start(partial(self._run, place, action, trained))

    def call(self, collective: Callable[..., None], tensors: Any, *args: Any) -> None:
        """`collective(tensors, group, ...)`, within an action."""
        self.channel.call(collective, tensors, *args)

    def _run(self, place: str, action: Callable[[], None], trained: int) -> None:
        if self._error is not None:
            raise self._error
        if self._is_checked and self._p > 1:
            numbers = torch.zeros(self._p, dtype=torch.float64)
            numbers[self._rank] = self._places.index(place) + len(self._places) * trained
            self.channel.call(all_gather, numbers)
            if len(set(numbers.tolist())) > 1:
                at = [divmod(int(number), len(self._places)) for number in numbers.tolist()]
                got = ", ".join(f"rank {r} at {self._places[n]} with {m} trained" for r, (m, n) in enumerate(at))
                self._error = RuntimeError(f"expected all ranks to run the same units in the same order; got {got}")
                raise self._error
        action()
