"""A ledger of tensor memory: every storage from its allocation to its release.

    with FakeTensorMode(), AllocationLedger(source=name) as ledger:      # or without FakeTensorMode
        step = ...
        ledger.label("parameters", step.model.parameters())
        with ledger.phase("forward"):
            step.forward()
        ledger.label_alive("activations", "forward")
    peak_between(ledger.allocations, 0, ledger.moment).by_category()

Under `FakeTensorMode` tensors have no memory, so a step of any size is counted on any machine. The
ledger sees what operators return to PyTorch's dispatcher: neither a kernel's scratch nor what
libraries allocate. A storage that an operator resizes is a new allocation from then on.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from traceback import walk_stack
from typing import Any

import numpy as np
import torch
from torch import Tensor

from labkit.torch_private import TorchDispatchMode, current_autograd_node, tree_leaves

RESIZE = torch.ops.inductor.resize_storage_bytes_.default
_autograd: Any = torch.autograd  # its sequence numbers are not in its types


@dataclass
class Allocation:
    """One storage. Moments are numbers of events (allocations and releases), counted from 0."""

    n_bytes: int
    born: int
    operator: str
    line: str
    """The line that allocated it, "file.py:12"; in a backward pass, the one differentiated."""
    phase: str
    recomputed: bool
    """Whether activation checkpointing allocated it, as it repeats a part in backward."""
    freed: int | None = None
    category: str = ""


@dataclass(frozen=True)
class Peak:
    """The highest sum of live storages, the moment it is first reached, and these storages."""

    n_bytes: int
    moment: int
    live: Sequence[Allocation]

    def by_category(self) -> dict[str, int]:
        totals = dict.fromkeys(_categories(self.live), 0)
        for allocation in self.live:
            totals[allocation.category] += allocation.n_bytes
        return totals


class AllocationLedger(TorchDispatchMode):
    """Follows every storage that operators allocate on `device` while it is active.

    `source` names a file of the code under study by its path; "" for other files. Sizes are as
    requested, before an allocator rounds them up.
    """

    def __init__(self, *, device: str = "cpu", source: Callable[[str], str] = lambda path: ""):
        super().__init__()
        self.allocations: list[Allocation] = []
        self.moment = 0
        self._device_type = torch.device(device).type
        self._source = source
        self._phase = ""
        self._alive: dict[int, tuple[weakref.ref[Any], Allocation]] = {}
        # sequence number of an autograd node -> line of the forward pass
        self._lines: dict[int, str] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name the phase of the block."""
        self._phase = name
        try:
            yield
        finally:
            self._phase = ""

    def label(self, category: str, tensors: Iterable[Tensor]) -> None:
        """Assign the storages of `tensors` to a category, for their whole lives."""
        for tensor in tensors:
            entry = self._alive.get(tensor.untyped_storage()._cdata)
            if entry is not None:
                entry[1].category = category

    def label_alive(self, category: str, phase: str) -> None:
        """Assign live allocations of `phase` that have no category yet."""
        for _, allocation in self._alive.values():
            if allocation.phase == phase and not allocation.category:
                allocation.category = category

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        line = self._line()
        operator = str(func.overloadpacket).removeprefix("aten.")
        created = result
        # It returns nothing: the storage of its argument has another size from now on.
        if func is RESIZE:
            operator = "resize_storage"
            created = args[0]
            key = created.untyped_storage()._cdata
            if key in self._alive:
                self._end(key)
        for value in tree_leaves(created):
            if isinstance(value, Tensor) and value.device.type == self._device_type:
                self._add(value.untyped_storage(), operator, line)
        return result

    def _add(self, storage: torch.UntypedStorage, operator: str, line: str) -> None:
        # Storages, since views share them.
        key = storage._cdata
        n_bytes = storage.nbytes()
        if key in self._alive or not n_bytes:
            return
        # A backward pass has gradients switched off, but where checkpointing repeats a forward one.
        recomputed = torch.is_grad_enabled() and current_autograd_node() is not None
        allocation = Allocation(n_bytes, self.moment, operator, line, self._phase, recomputed)
        self.moment += 1
        self.allocations.append(allocation)
        # Weak, so that the ledger frees nothing later than it would be.
        self._alive[key] = (weakref.ref(storage, lambda _: self._end(key)), allocation)

    def _end(self, key: int) -> None:
        self._alive.pop(key)[1].freed = self.moment
        self.moment += 1

    def _line(self) -> str:
        """Return the current line under study, and remember it for its operator's backward pass."""
        # In a backward pass, but not in a forward one that checkpointing repeats there.
        node = current_autograd_node()
        if node is not None and not torch.is_grad_enabled():
            return self._lines.get(node._sequence_nr(), "")
        line = _calling_line(self._source)
        if torch.is_grad_enabled():
            # A node of the graph is numbered just before its operator runs.
            self._lines.setdefault(_autograd._get_sequence_nr() - 1, line)
        return line


def _calling_line(source: Callable[[str], str]) -> str:
    """Return the innermost frame of the code under study, as "file.py:12"; "" if there is none."""
    for frame, line in walk_stack(sys._getframe(2)):
        name = source(frame.f_code.co_filename)
        if name:
            return f"{name}:{line}"
    return ""


def peak_between(allocations: Sequence[Allocation], start: int, end: int) -> Peak:
    """Return the highest sum of live bytes from `start` (before its event) up to before `end`."""
    totals = _live_bytes(allocations, start, end)[1].sum(axis=1)
    moment = start - 1 + int(totals.argmax())
    live = [a for a in allocations if a.born <= moment and (a.freed is None or a.freed > moment)]
    return Peak(int(totals.max()), moment, live)


def timeline_between(
    allocations: Sequence[Allocation], start: int, end: int, points: int = 200
) -> list[tuple[int, dict[str, int]]]:
    """Return (moment, live bytes by category) at the top of each of about `points` stretches."""
    categories, live = _live_bytes(allocations, start, end)
    totals = live.sum(axis=1)
    stretch = max(1, (end - start) // points)
    timeline = []
    for first in range(0, len(totals), stretch):
        # The top of a stretch: a figure with fewer points still has every peak.
        row = first + int(totals[first : first + stretch].argmax())
        by_category = dict(zip(categories, live[row].tolist(), strict=True))
        timeline.append((max(start, start - 1 + row), by_category))
    return timeline


def _live_bytes(
    allocations: Sequence[Allocation], start: int, end: int
) -> tuple[list[str], np.ndarray]:
    """Return the categories, and live bytes of each, (moments, categories).

    After the event before `start`, and after each one up to `end`.
    """
    categories = _categories(allocations)
    changes = np.zeros((end + 1, len(categories)), dtype=np.int64)  # row 0: before the first event
    for allocation in allocations:
        column = categories.index(allocation.category)
        if allocation.born < end:
            changes[allocation.born + 1, column] += allocation.n_bytes
        if allocation.freed is not None and allocation.freed < end:
            changes[allocation.freed + 1, column] -= allocation.n_bytes
    return categories, changes.cumsum(axis=0)[start:]


def _categories(allocations: Iterable[Allocation]) -> list[str]:
    return list(dict.fromkeys(allocation.category for allocation in allocations))
