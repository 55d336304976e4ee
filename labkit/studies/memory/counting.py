"""Counts the memory of a training step on fake tensors, with every storage in a ledger.

Nothing is allocated, so models are counted that this machine cannot hold.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from labkit.bench.ledger import Allocation, AllocationLedger, Peak, peak_between, timeline_between
from labkit.machine.user_lines import user_file
from labkit.nn.training import TrainingStep
from labkit.torch_private import fake_tensor_mode

# Parts of a peak. `recomputed`: activations that checkpointing computes again during backward.
# `inputs`: tokens and tables of rotary positions.
PARTS = (
    "parameters",
    "optimizer",
    "gradients",
    "activations",
    "recomputed",
    "temporaries",
    "inputs",
)

LISTED = 10  # allocations


class CountedStep:
    """Phases of a training under a ledger: where each begins and ends, and its peak."""

    def __init__(self, ledger: AllocationLedger, step: TrainingStep):
        self.ledger = ledger
        self.step = step
        self.spans: dict[str, tuple[int, int]] = {}
        """First and last moment of each phase."""
        ledger.label("parameters", step.model.parameters())

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        start = self.ledger.moment
        yield
        self.spans[name] = (start, self.ledger.moment)

    def infer(self) -> None:
        with self._span("inference"), self.ledger.phase("inference"):
            self.step.infer()

    def forward(self) -> None:
        with self._span("forward"):
            self._forward()
        self.step.drop_gradients()

    def full_step(self) -> None:
        """Run one step with AdamW's states allocated, as in every step but the first."""
        # An update alone makes the states, without the allocations of another step.
        for parameter in self.step.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.step.optimizer_step()
        states = (value for state in self.step.optimizer.state.values() for value in state.values())
        self.ledger.label(
            "optimizer", (value for value in states if isinstance(value, torch.Tensor))
        )
        with self._span("full_step"):
            self._forward()
            with self.ledger.phase("backward"):
                self.step.backward()
            self.ledger.label(
                "gradients", (p.grad for p in self.step.model.parameters() if p.grad is not None)
            )
            with self.ledger.phase("optimizer"):
                self.step.optimizer_step()

    def peak(self, phase: str) -> Peak:
        return peak_between(self.ledger.allocations, *self.spans[phase])

    def _forward(self) -> None:
        with self.ledger.phase("forward"):
            self.step.forward()
        self.ledger.label_alive("activations", "forward")


def _name_source(path: str) -> str:
    """Return the name of a file of the model; "" for one that is not under study."""
    # Lines of the model, not of the lab that calls it.
    if "labkit/nn/" in path:
        return path.rpartition("/")[2]
    return user_file(path)


def count_phases(phases: Sequence[str], **arguments: Any) -> CountedStep:
    """Run `phases` of a `TrainingStep(**arguments)` on fake tensors under a ledger."""
    with (
        fake_tensor_mode(),
        AllocationLedger(device=arguments.get("device", "cpu"), source=_name_source) as ledger,
    ):
        counted = CountedStep(ledger, TrainingStep(**arguments))
        run = {
            "inference": counted.infer,
            "forward": counted.forward,
            "full_step": counted.full_step,
        }
        # In this order: AdamW's states stay after a full step.
        for phase in run:
            if phase in phases:
                run[phase]()
        for allocation in ledger.allocations:
            allocation.category = allocation.category or _category(allocation)
    return counted


def _category(allocation: Allocation) -> str:
    """Return the part of a peak that an allocation without a label belongs to."""
    if allocation.recomputed:
        return "recomputed"
    return "temporaries" if allocation.phase else "inputs"


def count_rows(
    phases: Sequence[str], *, has_details: bool, **arguments: Any
) -> Iterator[dict[str, Any]]:
    """Yield a row per phase with its peak and the parts of it.

    With `has_details`, also the full step's timeline and its largest allocations.
    """
    counted = count_phases(phases, **arguments)
    for phase in phases:
        peak = counted.peak(phase)
        row = {"table": "peak", "method": "counted", "phase": phase, "peak_bytes": peak.n_bytes}
        yield row | _parts(peak.by_category())
    if has_details:
        start, end = counted.spans["full_step"]
        for moment, live in timeline_between(counted.ledger.allocations, start, end):
            yield {"table": "timeline", "moment": moment - start} | _parts(live)
        yield from _allocation_rows(counted)


def _parts(by_category: Mapping[str, int]) -> dict[str, int]:
    return {f"{part}_bytes": by_category.get(part, 0) for part in PARTS}


def _allocation_rows(counted: CountedStep) -> Iterator[dict[str, Any]]:
    """Yield the largest allocations of the step, and the largest at its peak.

    Those with the same operator, line, phase, category and size are one row.
    """
    start, end = counted.spans["full_step"]
    at_peak = {id(allocation) for allocation in counted.peak("full_step").live}
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for allocation in counted.ledger.allocations:
        if not start <= allocation.born < end:
            continue
        about = {
            "operator": allocation.operator,
            "line": allocation.line,
            "part_of_step": allocation.phase,
            "category": allocation.category,
            "n_bytes": allocation.n_bytes,
        }
        row = rows.setdefault(tuple(about.values()), about | {"times": 0, "at_peak_bytes": 0})
        row["times"] += 1
        if id(allocation) in at_peak:
            row["at_peak_bytes"] += allocation.n_bytes
    # Many small ones may hold most of a peak, and a large one may be gone by then.
    largest = sorted(rows.values(), key=lambda row: -row["n_bytes"])[:LISTED]
    at_peak_most = sorted(rows.values(), key=lambda row: -row["at_peak_bytes"])[:LISTED]
    for row in rows.values():
        if row in largest or row in at_peak_most:
            yield {"table": "allocation"} | row
