"""Memory of one step of a training, by what holds it at the peak: states, and lines of the file."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from labkit.bench.ledger import AllocationLedger, peak_between
from labkit.machine.cgroups import available_memory_bytes
from labkit.machine.user_lines import user_file
from labkit.studies.shared.held import storage_bytes
from labkit.studies.your_training.loop import Loop
from labkit.studies.your_training.setup import tensors_in

ELSEWHERE = "other code"
GRADIENTS = "gradients"
UPDATE = "the optimizer's step"
PARAMETERS = "parameters"
STATES = "optimizer states"
BATCH = "batch"


def memory_rows(loop: Loop) -> Iterator[dict[str, Any]]:
    """Run one step of a loop in its turn; yield a row per holder of memory at the step's peak.

    `holder`: "parameters" with the buffers, "optimizer states", "gradients", the optimizer's step
    with its temporary tensors, or the line of the reader's that allocated it, in the backward pass
    the line that is differentiated. Bytes are counted from what operators return, without the
    batch, a kernel's scratch and the allocator's rounding.
    """
    training = loop.training
    model = training.model
    batch = loop.take_batch()
    with AllocationLedger(device=str(training.device), source=user_file) as ledger:
        loop.forward()
        loop.backward()
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        ledger.label(GRADIENTS, gradients)
        with ledger.phase(UPDATE):
            loop.update()
    kept = {
        PARAMETERS: [*model.parameters(), *model.buffers()],
        STATES: tensors_in([*training.optimizer.state.values()]),
        BATCH: tensors_in(batch),
    }
    # An operator that returns a view of these, or writes into them, has allocated nothing.
    for holder, tensors in kept.items():
        ledger.label(holder, tensors)
    allocations = [one for one in ledger.allocations if one.category not in kept]
    peak = peak_between(allocations, 0, ledger.moment)
    held = Counter({name: storage_bytes(kept[name]) for name in (PARAMETERS, STATES)})
    for allocation in peak.live:
        holder = allocation.category or allocation.line or allocation.phase or ELSEWHERE
        held[holder] += allocation.n_bytes
    for holder, n_bytes in held.most_common():
        if n_bytes:
            yield {"holder": holder, "held_bytes": n_bytes, "peak_bytes": held.total()}


def count_peak(loop: Loop) -> int:
    """Return the bytes at the peak of a step, counted."""
    with loop.turn():
        return int(next(memory_rows(loop))["peak_bytes"])


def available_bytes(device: torch.device) -> int:
    """Return the bytes that a training on this device may take."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_memory_bytes()
