"""Worker of the attention lab: check every implementation, then time those that pass.

Each implementation is compared with float64 in a pass whose peak memory is recorded. One that does
not fit, cannot run here, raises, or takes longer for a single pass than all rounds may, becomes a
row with the reason.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from labkit.bench.check import refusal_columns, status_columns
from labkit.bench.clock import time_once
from labkit.bench.memory import record_allocations, saved_for_backward
from labkit.costs.attention import explicit_peak, tiled_saved
from labkit.lab.point import SessionPoint
from labkit.lab.units import format_bytes, format_seconds
from labkit.machine.cgroups import available_memory_bytes
from labkit.nn.attention_implementations import IMPLEMENTATIONS, RESERVED, unavailable_reason
from labkit.nn.attention_problem import (
    AttentionProblem,
    Passes,
    affordable_heads,
    check,
    reference_flop,
)
from labkit.studies.shared.alternatives import row_of, sum_rounds, timed_rows

EXPLICIT = "explicit"
COMPILED = "compiled"
TILED = "tiled"
FLASH = "flash"
# Implementations that build the whole matrix of scores.
WHOLE_MATRIX = (EXPLICIT, COMPILED, "sdpa_math")
# Implementations whose first call compiles or tunes tiles.
SLOW_AT_FIRST = (COMPILED, FLASH)
# Planned seconds of such a first call.
COMPILE_S = 3.0
# Planned rate of the check in float64: that of a GPU without units for it.
FLOAT64_FLOP_PER_S = 5e11
FORWARD = "forward"
BACKWARD = "backward"
BOTH = "forward and backward"
MARGIN = 1.1  # over the formulas: allocators round up, and matmuls have workspaces
WARM_UP_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class AttentionPoint(SessionPoint):
    """Implementations to compare on one problem, (batch, sequence, head_dim).

    A head counts as a sequence.
    """

    batch: int
    sequence: int
    head_dim: int
    dtype: str = "float32"
    device: str = "cpu"
    causal: bool = True
    implementations: tuple[str, ...] = ()
    max_bytes: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def needed_bytes(self) -> float:
        """Memory of the leanest implementation.

        One that does not fit becomes a row of its point.
        """
        return min(map(self.needed_by, self.implementations))

    @property
    def planned_s(self) -> float:
        slow: tuple[str, ...] = (COMPILED,)
        check_s = 0.0
        if self.device == "cuda":  # on a CPU, Triton's kernel is not run
            slow = SLOW_AT_FIRST
            heads = affordable_heads(self.batch, self.sequence, self.head_dim)
            check_s = heads * reference_flop(self.sequence, self.head_dim) / FLOAT64_FLOP_PER_S
        n_compiled = len({*slow} & {*self.implementations})
        return super().planned_s + COMPILE_S * n_compiled + check_s

    def needed_by(self, implementation: str) -> float:
        """Return the predicted memory of both passes, with inputs and a margin."""
        element_bytes = self.torch_dtype.itemsize
        if implementation == "sdpa_math":  # which computes in float32, whatever the inputs are
            element_bytes = max(4, element_bytes)
        size = self.batch, self.sequence, self.head_dim, element_bytes
        # Of a user's, nothing is known: it may build the matrix, too.
        if implementation in WHOLE_MATRIX or implementation not in RESERVED:
            return MARGIN * sum(explicit_peak(*size, causal=self.causal).values())
        # What is held between the passes, and as much again for gradients and tiles.
        return MARGIN * 2 * sum(tiled_saved(*size).values())


def measure(point: AttentionPoint) -> Iterator[dict[str, Any]]:
    """Yield rows by `phase`: checks and peaks, tensors held, seconds.

    "both" has checks and peaks, "saved" the tensors held between the passes.
    """
    shape = (point.batch, point.sequence, point.head_dim)
    problem: AttentionProblem | None = None
    right: dict[str, Passes] = {}
    for name in point.implementations:
        row: dict[str, Any] = {"implementation": name, "phase": "both"}
        reason = _refusal_reason(point, name)
        if reason is not None:
            yield row | refusal_columns(reason)
            continue
        if problem is None:
            # Only now: its exact results take memory that no refused implementation needs.
            problem = AttentionProblem(
                shape, point.torch_dtype, point.device, causal=point.causal, seed=point.seed
            )
        passes = Passes(problem, IMPLEMENTATIONS[name])
        row |= row_of(name, partial(_examine, point, problem, passes, name), device=point.device)
        yield row
        if row["status"] != "ok":
            passes.release()
            continue
        right[name] = passes
        # A second session would only say the same again.
        if point.session == 1:
            saved = saved_for_backward(passes.forward)[1]  # distinct storages, inputs included
            passes.release()
            yield {"implementation": name, "phase": "saved", "saved_bytes": sum(saved.values())}
    yield from _time(point, right)


def _refusal_reason(point: AttentionPoint, name: str) -> str | None:
    """Return why an implementation is not run at this point, or None."""
    device = torch.device(point.device)
    reason = unavailable_reason(name, device, point.torch_dtype, point.head_dim)
    if reason is not None:
        return reason
    needed = point.needed_by(name)
    available = available_memory_bytes()
    if device.type == "cuda":
        # What the allocator keeps of earlier alternatives is free for this one.
        torch.cuda.empty_cache()
        available = torch.cuda.mem_get_info()[0]
    needs = f"needs {format_bytes(needed)} ({MARGIN} times the prediction)"
    if needed > available:
        return f"{needs}, {format_bytes(available)} available"
    if 0 < point.max_bytes < needed:
        return f"{needs}, more than max_bytes, {format_bytes(point.max_bytes)}"
    return None


def _examine(
    point: AttentionPoint, problem: AttentionProblem, passes: Passes, name: str
) -> dict[str, Any]:
    """Warm up, then run one pass with its peak memory, and compare it with float64."""
    _ = problem.reference  # computed now, not inside the measured pass
    # Libraries allocate workspaces in their first call, which must not count in this problem's
    # peak. Compiled code is of one shape: a smaller problem would compile it twice.
    warm_up = passes
    if name not in SLOW_AT_FIRST:
        # Of the same head dimension, by which libraries choose their kernels.
        shape = (1, WARM_UP_TOKENS, point.head_dim)
        small = AttentionProblem(shape, point.torch_dtype, point.device, causal=point.causal)
        warm_up = Passes(small, IMPLEMENTATIONS[name])
    warm_up.run_checked()
    with record_allocations(point.device) as record, record.window(BOTH):
        results, pass_s = time_once(passes.run_checked, point.device)
    error, wrong = check(problem, results)
    row: dict[str, Any] = {"error": error, **status_columns(wrong)}
    if wrong is None and point.rounds_s is not None and pass_s > point.rounds_s:
        del results  # the next pass needs their memory
        # Once more: the first may have met a stall.
        pass_s = min(pass_s, time_once(passes.run_checked, point.device)[1])
        if pass_s > point.rounds_s:
            limit = format_seconds(point.rounds_s)
            row["status"] = "too_slow"
            row["reason"] = f"{format_seconds(pass_s)} for one pass, and {limit} for all rounds"
    if point.session == 1:
        row["peak_bytes"] = record.peaks[BOTH]
    return row


def _time(point: AttentionPoint, right: dict[str, Passes]) -> Iterator[dict[str, Any]]:
    """Time forward and backward in turns, and add up both in each round."""
    phases = {
        name: {phase: getattr(passes, phase) for phase in (FORWARD, BACKWARD)}
        for name, passes in right.items()
    }
    rows = {name: {"implementation": name, "status": "ok"} for name in right}
    seconds: dict[str, list[float]] = {}
    for row in timed_rows(rows, phases, device=point.device, **point.rounds):
        yield row
        # An implementation's row of the forward pass comes just before that of backward.
        if "phase" in row:
            seconds[row["phase"]] = row["seconds"]
        if row.get("phase") == BACKWARD:
            both_s = sum_rounds(seconds, (FORWARD, BACKWARD))
            yield row | {"phase": BOTH, "seconds": both_s, "is_sum": True}
