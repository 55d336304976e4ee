"""A unit: modules whose parameters are whole at the same time, and how far it is in the pass that is going on."""

import weakref
from collections.abc import Iterator, Sequence

from torch import nn

from labkit.parallel.background_comm import Channel, Wait
from labkit.parallel.sharding.flat import Flat

MODULES: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
"""Those of units: what is sharded already cannot be once more."""


class Unit:
    """Some of a model's parameters, by kind; `holds_units` if other units are inside of it."""

    def __init__(self, number: int, module: nn.Module, flats: Sequence[Flat], holds_units: bool):
        self.number, self.module, self.flats, self.holds_units = number, module, list(flats), holds_units
        self.is_sharded = any(not flat.is_replicated for flat in flats)
        self.reduced_flats = [flat for flat in flats if flat.is_trained and not flat.is_replicated]
        self._n_trained = sum(len(flat.slots) for flat in flats if flat.is_trained)
        self._waits: list[Wait] = []
        self.is_whole = False
        """Gathered, or being gathered."""
        self.in_backward = False
        """The backward pass has come here."""
        self.is_reduced = False
        """Its gradients of this pass are averaged, or being averaged."""
        self.heard: set[tuple[int, int]] = set()
        """Parameters that have got a gradient in this pass: number of the flat, and in it."""
        self.waits_for: set[int] = set()
        """What runs in backward after it: numbers of the nodes of autograd that made its inputs."""
        self._attach(whole=False)
        MODULES.add(module)

    def trained(self) -> Iterator[tuple[int, int]]:
        """Every trained parameter: number of its flat, and its number there."""
        for at, flat in enumerate(self.flats):
            if flat.is_trained:
                yield from ((at, number) for number in range(len(flat.slots)))

    @property
    def is_complete(self) -> bool:
        """Whether every trained parameter has a gradient."""
        return len(self.heard) == self._n_trained

    @property
    def is_over(self) -> bool:
        """Whether backward needs its parameters no more."""
        return self.is_complete and not self.waits_for

    def start_gathering(self, channel: Channel) -> None:
        if not self.is_whole:
            self.is_whole = True
            self._waits = [wait for flat in self.flats if (wait := flat.gather(channel)) is not None]

    def finish_gathering(self) -> None:
        """Its modules have whole parameters from now on."""
        self._wait()
        self._attach(whole=True)

    def release(self) -> None:
        """Its modules have shards from now on, and the memory of whole parameters is given back."""
        if self.is_whole:
            self._wait()
            self.detach()
            for flat in self.flats:
                flat.release()
            self.is_whole = False

    def detach(self) -> None:
        """Its modules have shards from now on; whole parameters are kept for autograd."""
        self._attach(whole=False)

    def leave_backward(self) -> None:
        self.in_backward = self.is_reduced = False
        self.heard.clear()

    def _wait(self) -> None:
        waits, self._waits = self._waits, []
        for wait in waits:
            wait()

    def _attach(self, *, whole: bool) -> None:
        for flat in self.flats:
            for slot, parameter in zip(flat.slots, flat.full if whole else flat.shards, strict=True):
                for module, name in slot.owners:
                    module._parameters[name] = parameter
