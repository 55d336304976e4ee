"""Measuring forward and backward passes of attention: what a rank runs for a point of either attention lab.

Imports torch and the instruments only. Each implementation is checked against float64 first, in a pass whose peak
memory is measured on the way; then those that are right take turns. One that does not fit, cannot run here, raises, or
takes longer for a single pass than all rounds may becomes a row whose `gate` says why.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from labkit.bench.check import verdict
from labkit.bench.clock import timed_once
from labkit.bench.memory import SavedTensor, peak_memory_growth, saved_for_backward
from labkit.costs.attention import explicit_peak, tiled_saved
from labkit.lab.point import SessionPoint
from labkit.lab.units import format_bytes, format_seconds
from labkit.machine.cgroups import available_memory_bytes
from labkit.nn.attention_implementations import RESERVED, attention_named
from labkit.nn.attention_problem import AttentionProblem, Checked, Passes, check
from labkit.studies.shared.alternatives import Failed, attempt, timed_phases
from labkit.studies.shared.compiler import keep_what_is_compiled, make_compiler_ready

EXPLICIT, COMPILED, TILED, FLASH = "explicit", "compiled", "tiled", "flash"
WHOLE_MATRIX = (EXPLICIT, COMPILED, "sdpa_math")
"""Implementations that build the whole matrix of scores."""
SLOW_AT_FIRST = (COMPILED, FLASH)
"""Those whose first call compiles, or tries tiles."""
PHASES = ("forward", "backward")
# More than is predicted may be needed: allocators round up, and products have work areas.
MARGIN = 1.1
NEEDS = f"needs {{}} ({MARGIN} times the prediction)"
TOO_SLOW = "right, but too slow to time"
SMALL = 64  # tokens of a problem that warms an implementation up


@dataclass(frozen=True, kw_only=True)
class PassesPoint(SessionPoint):
    """Implementations to compare on one problem: (batch, sequence, head_dim), one head."""

    sweep: str
    batch: int
    sequence: int
    head_dim: int
    dtype: str = "float32"
    device: str = "cpu"
    causal: bool = False
    implementations: tuple[str, ...] = ()
    warmup: int = 1
    repeats: int = 8
    """0: memory only."""
    most_bytes: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def needed_bytes(self, implementation: str) -> int:
        """Memory of a forward and backward pass, inputs included, as predicted."""
        # math SDPA computes in float32, whatever it is given
        element = max(4, self.torch_dtype.itemsize) if implementation == "sdpa_math" else self.torch_dtype.itemsize
        size = self.batch, self.sequence, self.head_dim, element
        if implementation in WHOLE_MATRIX or implementation not in RESERVED:  # a reader's own may build it
            return sum(explicit_peak(*size, causal=self.causal).values())
        return 2 * sum(tiled_saved(*size).values())  # as much again for gradients and tiles

    def title(self) -> str:
        return f"{self.device}, {self.dtype}, {self.sequence} tokens, head dimension {self.head_dim}"


def measure_passes(point: PassesPoint) -> Iterator[dict[str, Any]]:
    """Rows by `phase`: seconds of each repeat ("forward", "backward"), and each tensor kept between them ("saved")."""
    problem: AttentionProblem | None = None
    right: dict[str, Passes] = {}
    for name in point.implementations:
        reason = _why_not(point, name)
        if reason is not None:
            yield {"implementation": name, "phase": "both", "check": reason}
            continue
        problem = problem or problem_of(point)
        passes = problem.passes(attention_named(name).attend)
        found = attempt(name, partial(_examine_and_account, point, problem, passes, name), device=point.device)
        if isinstance(found, Failed):
            passes.release()
            yield {"implementation": name, "phase": "both", "check": found.reason}
            continue
        row, saved = found
        yield from saved
        if row["check"] == "ok":
            right[name] = passes
        yield row | {"phase": "both"}
    if right and point.repeats:
        yield from _time(point, right)


def _examine_and_account(
    point: PassesPoint, problem: AttentionProblem, passes: Passes, name: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    row = {"implementation": name} | _examine(point, problem, passes, name)
    if point.session > 1:  # memory is the same every time, and code may have been compiled before
        return row | {"peak_bytes": None, "first_call_s": None}, []
    return row, list(_accounting(problem, passes, name))


def problem_of(point: PassesPoint) -> AttentionProblem:
    shape = (point.batch, point.sequence, point.head_dim)
    return AttentionProblem(shape, point.torch_dtype, point.device, causal=point.causal, seed=point.seed)


def _why_not(point: PassesPoint, name: str) -> str | None:
    """Why an implementation is not run at this point, or None."""
    device = torch.device(point.device)
    if (reason := attention_named(name).unavailable_reason(device, point.torch_dtype, point.head_dim)) is not None:
        return reason
    needed = MARGIN * point.needed_bytes(name)
    if needed > (available := _available_bytes(point.device)):
        return f"{NEEDS.format(format_bytes(needed))}, {format_bytes(available)} available"
    if 0 < point.most_bytes < needed:
        return f"{NEEDS.format(format_bytes(needed))}, more than most_bytes, {format_bytes(point.most_bytes)}"
    return None


def _available_bytes(device: str) -> int:
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]
    return available_memory_bytes()


def _examine(point: PassesPoint, problem: AttentionProblem, passes: Passes, name: str) -> dict[str, Any]:
    """First call (compilation, apart), then one pass with its peak memory, held against float64."""
    row: dict[str, Any] = {"available_bytes": _available_bytes(point.device)}
    _ = problem.reference  # made here, not inside what is measured
    if name in SLOW_AT_FIRST:
        if name == COMPILED:
            if point.session > 1:
                keep_what_is_compiled()
            make_compiler_ready(point.device)
        row["first_call_s"] = timed_once(passes.run_checked, point.device)[1]  # its result must not stay in memory
    else:  # the work areas of libraries are made once, and are not this problem's
        small = AttentionProblem((1, SMALL, point.head_dim), point.torch_dtype, point.device, causal=point.causal)
        small.passes(attention_named(name).attend).run_checked()
    with peak_memory_growth(point.device) as memory:
        found, pass_s = timed_once(passes.run_checked, point.device)
    checked = check(problem, found)
    gate = gate_of(checked)
    if gate == "ok" and point.rounds_s is not None and pass_s > point.rounds_s:
        del found
        again_s = timed_once(passes.run_checked, point.device)[1]  # the first may have met a stall
        if (pass_s := min(pass_s, again_s)) > point.rounds_s:
            ends = format_seconds(point.rounds_s)
            gate = f"{TOO_SLOW}: {format_seconds(pass_s)} for one pass, and {ends} for all rounds"
    return row | {"peak_bytes": memory.growth_bytes, "error": checked.error, "check": gate}


def gate_of(checked: Checked) -> str:
    """ "ok", or what is wrong and where, of all rows together or of a single one."""
    if checked.is_right:
        return "ok"
    if not checked.error <= checked.limit:
        return f"{verdict(checked.error, checked.limit)}; {checked.where}"
    return f"{verdict(checked.row_error, checked.row_limit)} of a single row; {checked.where}"


def _accounting(problem: AttentionProblem, passes: Passes, name: str) -> Iterator[dict[str, Any]]:
    """One row a tensor that is held between the passes."""
    output, saved = saved_for_backward(passes.forward)
    known = {x.untyped_storage().data_ptr(): letter for x, letter in zip(problem.inputs, "qkv", strict=True)}
    known[output.untyped_storage().data_ptr()] = "output"
    del output
    passes.release()
    for tensor in saved:
        what = known.get(tensor.address) or _named_by_shape(tensor, problem)
        shape = "x".join(map(str, tensor.shape))
        row = {"implementation": name, "phase": "saved", "tensor": what, "shape": shape, "tensor_dtype": tensor.dtype}
        yield row | {"saved_bytes": tensor.n_bytes}


def _named_by_shape(tensor: SavedTensor, problem: AttentionProblem) -> str:
    """What a tensor of this shape is; the compiler's own layouts have no name."""
    batch, sequence, _ = problem.q.shape
    return {(batch, sequence, sequence): "probabilities", (batch, sequence): "logsumexp"}.get(tensor.shape, "other")


def _time(point: PassesPoint, right: dict[str, Passes]) -> Iterator[dict[str, Any]]:
    """Forward and backward of each in turn: a backward pass follows its own forward pass."""
    alternatives = {name: {phase: getattr(passes, phase) for phase in PHASES} for name, passes in right.items()}
    rows = {name: {"implementation": name, "phase": "both", "check": "ok"} for name in right}
    yield from timed_phases(rows, alternatives, device=point.device, **point.rounds)
