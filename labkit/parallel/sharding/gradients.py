"""Gradients of units, averaged over ranks: what is complete at once, the rest when the backward pass is over.

Units are averaged in the order in which backward comes to them, each waiting for those before it, but for units around
others, which are complete last and averaged at the end. So every rank begins the same collectives in the same order,
even if a parameter gets no gradient on some of them.
"""

from collections.abc import Sequence
from functools import partial

import torch

from labkit.parallel.background_comm import Channel, Wait
from labkit.parallel.collectives import all_reduce
from labkit.parallel.sharding.unit import Unit

TRACE_MODULUS = 1_000_003
"""Of the number that stands for an order of units: its square is exact in float64."""


def next_trace(trace: int, unit: int) -> int:
    """The number that stands for an order of units, one unit longer."""
    return (trace * 31 + unit + 1) % TRACE_MODULUS


class Gradients:
    """Those of all units; `gathers` is idle when a pass is over, and then carries what ranks tell one another."""

    def __init__(self, units: Sequence[Unit], gathers: Channel, reductions: Channel):
        """A collective."""
        self._units, self._gathers, self._reductions = list(units), gathers, reductions
        flats = [flat for unit in units for flat in unit.flats]
        n_bytes = [flat.numel * flat.compute_dtype.itemsize for unit in units for flat in unit.reduced_flats]
        self._buffer = torch.empty(max(n_bytes, default=0), dtype=torch.uint8, device=flats[0].memory.device)
        self._waits: list[Wait] = []
        self._begun = 0

    def reduce_complete(self, entered: Sequence[Unit]) -> None:
        """Begin with units that have all their gradients; `entered`: those that backward has come to, in order."""
        queue = [unit for unit in entered if not unit.holds_units]
        while self._begun < len(queue) and queue[self._begun].is_complete:
            if not queue[self._begun].is_reduced:
                self._reduce(queue[self._begun])
            self._begun += 1

    def finish(self, entered: Sequence[Unit], trace: int) -> None:
        """Average all the rest, and hand it over to the shards. A collective.

        RuntimeError, on all ranks, if they have not run the same units in the same order, of which `trace` is told.
        """
        has_gradient, again = self._compare_notes(trace)
        for unit in sorted(entered, key=lambda unit: unit.holds_units):
            if not unit.is_reduced and any(any(has_gradient[id(flat)]) for flat in unit.reduced_flats):
                self._reduce(unit)
        for unit in self._units:
            if again[unit.number]:
                self._reduce(unit)
        self._average_replicated(has_gradient)
        self._wait()
        for unit in self._units:
            for at in dict.fromkeys(at for at, _ in unit.trained()):
                unit.flats[at].assign(has_gradient[id(unit.flats[at])])

    def forget(self) -> None:
        """Of a pass that an exception has ended, once its collectives are over."""
        self._wait()
        for unit in self._units:
            for flat in unit.flats:
                flat.forget()

    def _wait(self) -> None:
        waits, self._waits, self._begun = self._waits, [], 0
        for wait in waits:
            wait()

    def _reduce(self, unit: Unit) -> None:
        unit.is_reduced = True
        for flat in unit.reduced_flats:
            for wait in self._waits[-1:]:
                wait()  # there is one buffer
            vector = self._buffer[: flat.numel * flat.compute_dtype.itemsize].view(flat.compute_dtype)
            flat.pack(vector)
            self._waits.append(self._reductions.start(partial(flat.reduce, vector, self._reductions)))

    def _compare_notes(self, trace: int) -> tuple[dict[int, list[bool]], list[bool]]:
        """Which parameters have a gradient on any rank, by flat; which units have one on any that is still to average.

        Still to average: from an earlier pass, or one that came when the unit had been complete.
        """
        trained = [(unit, *each) for unit in self._units for each in unit.trained()]
        of_gradients, of_units = [0.0] * len(trained), [0.0] * len(self._units)
        for place, (unit, at, number) in enumerate(trained):
            is_pending = unit.flats[at].has_gradient(number)
            of_gradients[place] = is_pending or (at, number) in unit.heard
            if is_pending and not unit.flats[at].is_replicated and (unit.is_reduced or not unit.in_backward):
                of_units[unit.number] = 1
        notes = torch.tensor([*of_gradients, *of_units, trace, trace**2], dtype=torch.float64)
        self._gathers.start(partial(self._gathers.call, all_reduce, notes, "sum"))()
        found = notes.tolist()
        if self._gathers.transport.world_size * found[-1] != found[-2] ** 2:  # equal numbers, and only these
            raise RuntimeError("expected all ranks to run the same units in the same order, since all gather a unit")
        has_gradient: dict[int, list[bool]] = {id(flat): [] for unit in self._units for flat in unit.flats}
        for (unit, at, _), flag in zip(trained, found, strict=False):
            has_gradient[id(unit.flats[at])].append(flag > 0)
        return has_gradient, [flag > 0 for flag in found[len(trained) : -2]]

    def _average_replicated(self, has_gradient: dict[int, list[bool]]) -> None:
        """All gradients of replicated parameters of a dtype together."""
        flats = [flat for unit in self._units for flat in unit.flats if flat.is_replicated]
        flats = [flat for flat in flats if any(has_gradient[id(flat)])]
        for dtype in dict.fromkeys(flat.compute_dtype for flat in flats):
            together = [flat for flat in flats if flat.compute_dtype == dtype]
            vector = torch.empty(sum(flat.numel for flat in together), dtype=dtype, device=together[0].memory.device)
            parts = vector.split([flat.numel for flat in together])
            for flat, part in zip(together, parts, strict=True):
                flat.pack(part)
            self._reductions.start(partial(self._reductions.call, all_reduce, vector, "mean"))()
            for flat, part in zip(together, parts, strict=True):
                flat.results.append(part.to(flat.dtype, copy=True))
