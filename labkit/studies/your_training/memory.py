"""Memory of one step of a training, by what holds it at the peak: states, and lines of the file."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from labkit.bench.ledger import AllocationLedger, peak_between
from labkit.lab.user_lines import user_file
from labkit.machine.cgroups import available_memory_bytes
from labkit.studies.shared.held import storage_bytes
from labkit.studies.your_training.loop import Loop
from labkit.torch_private import tree_leaves

ELSEWHERE = "other code"
GRADIENTS = "gradients"


def memory_rows(loop: Loop) -> Iterator[dict[str, Any]]:
    """Run one step of a loop in its turn; yield a row per holder of memory at the step's peak.

    `holder`: "parameters", "optimizer states", "gradients", or the line of the reader's that
    allocated it, in the backward pass the line that is differentiated. Bytes are counted from what
    operators return, without a kernel's scratch and the allocator's rounding.
    """
    training = loop.training
    loop.take_batch()  # before the ledger: the batch is the loader's
    with AllocationLedger(device=str(training.device), source=user_file) as ledger:
        loop.forward()
        loop.backward()
        gradients = [one.grad for one in training.model.parameters() if one.grad is not None]
        ledger.label(GRADIENTS, gradients)
        loop.update()
    peak = peak_between(ledger.allocations, 0, ledger.moment)
    held: Counter[str] = Counter()
    for allocation in peak.live:
        held[allocation.category or allocation.line or ELSEWHERE] += allocation.n_bytes
    # Not in the ledger, which has only what this step allocates.
    model = training.model
    held["parameters"] = storage_bytes([*model.parameters(), *model.buffers()])
    held["optimizer states"] = storage_bytes(tree_leaves([*training.optimizer.state.values()]))
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
