"""What is run for a point of the attention lab: check every implementation, then time those that are right.

Each implementation is checked against float64 first, in a pass whose peak memory is measured on the way. One that does
not fit, cannot run here, raises, or takes longer for a single pass than all rounds may, becomes a row that says why.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from labkit.bench.check import verdict
from labkit.bench.clock import timed_once
from labkit.bench.memory import peak_memory_growth, saved_for_backward
from labkit.costs.attention import explicit_peak, tiled_saved
from labkit.lab.point import SessionPoint, skip_reason
from labkit.lab.units import format_bytes, format_seconds
from labkit.machine import available_memory_bytes
from labkit.nn.attention_implementations import RESERVED, attention_named
from labkit.nn.attention_problem import AttentionProblem, Checked, Passes, check
from labkit.studies.shared.alternatives import Failed, run_guarded, timed_phases
from labkit.studies.shared.compiler import keep_what_is_compiled, make_compiler_ready

if TYPE_CHECKING:
    from labkit.machine import Machine

EXPLICIT, COMPILED, TILED, FLASH = "explicit", "compiled", "tiled", "flash"
WHOLE_MATRIX = (EXPLICIT, COMPILED, "sdpa_math")
"""Implementations that build the whole matrix of scores."""
SLOW_AT_FIRST = (COMPILED, FLASH)
"""Implementations whose first call compiles, or tries tiles."""
FORWARD, BACKWARD, BOTH = "forward", "backward", "forward and backward"
MARGIN = 1.1  # allocators round up, and products have work areas
NEEDS = f"needs {{}} ({MARGIN} times the prediction)"
TOO_SLOW = "right, but too slow to time"
WARM_UP_TOKENS = 64
COMPILE_S = 5.0  # in a plan, for one shape: as long as on two cores of a CPU
MIN_PEAK_BYTES = 64 * 2**20  # of naive attention: resident sets count whole pages, in which smaller peaks drown


@dataclass(frozen=True, kw_only=True)
class AttentionPoint(SessionPoint):
    """Implementations to compare on one problem, (batch, sequence, head_dim); a head counts as a sequence."""

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
    def series(self) -> tuple[Hashable, float]:
        return (self.device, self.dtype, self.batch, self.head_dim), self.sequence

    def needed_bytes(self, implementation: str) -> float:
        """Predicted memory of a forward and backward pass, inputs included, with a margin."""
        # SDPA's unfused backend computes in float32, whatever the inputs are.
        element = max(4, self.torch_dtype.itemsize) if implementation == "sdpa_math" else self.torch_dtype.itemsize
        size = self.batch, self.sequence, self.head_dim, element
        if implementation in WHOLE_MATRIX or implementation not in RESERVED:  # a user's own may build the matrix
            return MARGIN * sum(explicit_peak(*size, causal=self.causal).values())
        return MARGIN * 2 * sum(tiled_saved(*size).values())  # as much again for gradients and tiles

    @property
    def planned_s(self) -> float:
        return super().planned_s + COMPILE_S * (COMPILED in self.implementations)

    def skip_reason(self, machine: "Machine") -> str | None:
        """A reason if nothing fits; an implementation that does not fit becomes a row of its point."""
        return skip_reason(machine, self.device, min(map(self.needed_bytes, self.implementations)), says=NEEDS)

    def title(self) -> str:
        return f"{self.device}, {self.dtype}, {self.sequence} tokens, head dimension {self.head_dim}"


def measure(point: AttentionPoint) -> Iterator[dict[str, Any]]:
    """Rows by `phase`: checks and peaks ("both"), tensors held between the passes ("saved"), seconds of each repeat."""
    shape = (point.batch, point.sequence, point.head_dim)
    problem: AttentionProblem | None = None
    right: dict[str, Passes] = {}
    for name in point.implementations:
        row: dict[str, Any] = {"implementation": name, "phase": "both"}
        reason = _refusal(point, name)
        if reason is not None:
            yield row | {"not_measured": reason}
            continue
        if problem is None:
            problem = AttentionProblem(shape, point.torch_dtype, point.device, causal=point.causal, seed=point.seed)
        passes = problem.passes(attention_named(name).attend)
        result = run_guarded(name, partial(_examine, point, problem, passes, name), device=point.device)
        if isinstance(result, Failed):
            passes.release()
            yield row | {"check": result.reason}
            continue
        yield row | result
        if result["check"] == "ok":
            right[name] = passes
            if point.session == 1:
                yield {"implementation": name, "phase": "saved", "saved_bytes": _held_bytes(passes)}
    yield from _time(point, right)


def _refusal(point: AttentionPoint, name: str) -> str | None:
    """Why an implementation is not run at this point, or None."""
    device = torch.device(point.device)
    if (reason := attention_named(name).unavailable_reason(device, point.torch_dtype, point.head_dim)) is not None:
        return reason
    needed = point.needed_bytes(name)
    if needed > (available := _available_bytes(point.device)):
        return f"{NEEDS.format(format_bytes(needed))}, {format_bytes(available)} available"
    if 0 < point.max_bytes < needed:
        return f"{NEEDS.format(format_bytes(needed))}, more than max_bytes, {format_bytes(point.max_bytes)}"
    return None


def _available_bytes(device: str) -> int:
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]
    return available_memory_bytes()


def _examine(point: AttentionPoint, problem: AttentionProblem, passes: Passes, name: str) -> dict[str, Any]:
    """Run the first call, then one pass with its peak memory, and compare that with float64."""
    _ = problem.reference  # computed now, not inside the measured pass
    first_call_s = _first_call(point, passes, name)
    with peak_memory_growth(point.device) as memory:
        results, pass_s = timed_once(passes.run_checked, point.device)
    checked = check(problem, results)
    row: dict[str, Any] = {"error": checked.error, "check": describe_check(checked)}
    if row["check"] == "ok" and point.rounds_s is not None and pass_s > point.rounds_s:
        del results
        pass_s = min(pass_s, timed_once(passes.run_checked, point.device)[1])  # the first may have met a stall
        if pass_s > point.rounds_s:
            limit = format_seconds(point.rounds_s)
            row["check"] = f"{TOO_SLOW}: {format_seconds(pass_s)} for one pass, and {limit} for all rounds"
    if point.session == 1:  # memory is the same every time, and code may have been compiled before
        row["first_call_s"] = first_call_s
        if point.needed_bytes(EXPLICIT) >= MIN_PEAK_BYTES:
            row["peak_bytes"] = memory.growth_bytes
    return row


def _first_call(point: AttentionPoint, passes: Passes, name: str) -> float | None:
    """Compile, or make the work areas of libraries with a small problem: they are not this problem's."""
    if name in SLOW_AT_FIRST:
        if name == COMPILED:
            if point.session > 1:
                keep_what_is_compiled()
            make_compiler_ready(point.device)
        return timed_once(passes.run_checked, point.device)[1]
    shape = (1, WARM_UP_TOKENS, point.head_dim)
    small = AttentionProblem(shape, point.torch_dtype, point.device, causal=point.causal)
    small.passes(attention_named(name).attend).run_checked()
    return None


def describe_check(checked: Checked) -> str:
    """ "ok", or what is wrong and where, in all rows together or in a single one."""
    if checked.is_right:
        return "ok"
    if not checked.error <= checked.limit:
        return f"{verdict(checked.error, checked.limit)}; {checked.where}"
    return f"{verdict(checked.row_error, checked.row_limit)} of a single row; {checked.where}"


def _held_bytes(passes: Passes) -> int:
    """Bytes of the distinct storages that autograd keeps between the passes, inputs included."""
    saved = saved_for_backward(passes.forward)[1]
    passes.release()
    return sum(tensor.n_bytes for tensor in saved)


def _time(point: AttentionPoint, right: dict[str, Passes]) -> Iterator[dict[str, Any]]:
    """Time forward and backward in turn, and add both of each round; a backward pass follows its own forward pass."""
    phases = {name: {phase: getattr(passes, phase) for phase in (FORWARD, BACKWARD)} for name, passes in right.items()}
    rows = {name: {"implementation": name, "check": "ok"} for name in right}
    forward: dict[str, list[float]] = {}
    for row in timed_phases(rows, phases, device=point.device, **point.rounds):
        yield row
        if row.get("phase") == FORWARD:
            forward[row["implementation"]] = row["seconds"]
        elif row.get("phase") == BACKWARD:
            both = [sum(pair) for pair in zip(forward[row["implementation"]], row["seconds"], strict=True)]
            yield row | {"phase": BOTH, "seconds": both}
