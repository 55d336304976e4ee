"""Numbers of an advice as people read them: layouts, intervals, causes."""

from collections.abc import Mapping

from labkit.lab.units import format_number
from labkit.scaling.advice import has_room
from labkit.scaling.layout import Layout
from labkit.scaling.prediction import FITS_SHARE
from labkit.scaling.search import Candidate

SHARDS: Mapping[str, str] = {
    "none": "whole copies",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "FSDP (ZeRO-3)",
    "hsdp": "FSDP inside nodes",
}
PARTS: Mapping[str, str] = {
    "compute": "compute",
    "launch": "CPU launches",
    "tensor_parallel": "tensor-parallel collectives",
    "context_parallel": "keys and values around the ring",
    "gather": "gathering parameters",
    "pipeline": "pipeline bubble and transfers",
    "data_parallel": "gradient reduction",
    "optimizer": "optimizer",
    "stragglers": "waiting for the slowest node",
}
"""What the sums of `labkit.scaling.advice.SUMS` are called."""
TERMS: Mapping[str, str] = {
    **PARTS,
    "tensor_parallel": "tensor parallel",
    "context_parallel": "context parallel",
    "gather": "gathering",
    "pipeline": "pipeline",
    "data_parallel": "gradients",
    "stragglers": "waiting",
}
"""The same in a narrow column."""
RECOMPUTE: Mapping[str, str] = {"none": "nothing", "selective": "attention", "full": "every layer"}
CLEAR = 0.01
"""A predicted difference below this is none."""


def arrangement(layout: Layout) -> str:
    """Who works on what: "tp 2, dp 16, ZeRO-1"."""
    degrees = [f"{name} {getattr(layout, name)}" for name in ("tp", "pp", "cp", "dp") if getattr(layout, name) > 1]
    if layout.vp > 1:
        degrees.append(f"{layout.vp} chunks per stage")
    ranks = layout.dp * layout.cp
    return ", ".join([*degrees, *([SHARDS[layout.shard]] if ranks > 1 else [])]) or "one GPU"


def batch(layout: Layout) -> str:
    """Sequences of a micro-batch, and how many of them accumulate."""
    return f"{layout.micro_batch} x {layout.micro_batches:.0f}"


def seconds(value: float) -> str:
    return f"{format_number(value)} s" if value >= 1 else f"{1000 * value:.3g} ms"


def large(value: float) -> str:
    """1234567 -> "1.23 M"; tokens, parameters."""
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.3g}"


def percent(share: float) -> str:
    if 0 < abs(share) < 1e-3:
        return "below 0.1 %"
    return f"{100 * share:.0f} %" if abs(share) >= 0.095 else f"{100 * share:.2g} %"


def signed(share: float) -> str:
    """A difference: "+12 %", or that there is none."""
    return "no clear difference" if abs(share) < CLEAR else f"{'+' if share > 0 else '-'}{percent(abs(share))}"


def memory(candidate: Candidate, memory_gib: float) -> str:
    """What of a GPU's memory it takes, and whether that is risky."""
    risk = "" if has_room(candidate) else f", {percent(candidate.out_of_memory)} risk"
    return f"{candidate.peak_gib:.0f} of {memory_gib:.0f} GiB{risk}"


def cause(candidate: Candidate, best: Candidate, what: str, memory_gib: float) -> str:
    """Why a layout loses against the best one, in a few words."""
    if what == "memory":
        return f"does not fit: {candidate.peak_gib:.0f} GiB at least, {FITS_SHARE * memory_gib:.0f} can be used"
    if what == "unstable":
        return f"{candidate.peak_gib:.0f} of {memory_gib:.0f} GiB: so near the limit that steps become slow"
    slower = candidate.step_s / best.step_s - 1
    if slower < -CLEAR:
        reason = "but nobody published the like" if has_room(candidate) else f"but {memory(candidate, memory_gib)}"
        return f"{signed(slower)}, {reason}"
    if slower < CLEAR:
        return "no clear difference"
    return f"{signed(slower)}: {_lost(candidate.layout, best.layout, what)}"


def _lost(layout: Layout, best: Layout, what: str) -> str:
    if what != "compute":
        return PARTS[what]
    order = ("none", "selective", "full")
    if order.index(layout.recompute) > order.index(best.recompute):
        return f"to fit, it recomputes {RECOMPUTE[layout.recompute]}"
    return "smaller products are slower"
