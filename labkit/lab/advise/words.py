"""Numbers, layouts and causes of an advice as people read them."""

from collections.abc import Mapping

from labkit.lab.units import format_number
from labkit.scaling.advice import has_room
from labkit.scaling.layout import RECOMPUTE as RECOMPUTE_ORDER
from labkit.scaling.layout import Layout
from labkit.scaling.prediction import FITS_SHARE, Prediction

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
"""Names of the sums in `labkit.scaling.advice.SUMS`."""
RECOMPUTE: Mapping[str, str] = {"none": "nothing", "selective": "attention", "full": "every layer"}
CLEAR = 0.01
"""A predicted difference below this is none."""


def arrangement(layout: Layout) -> str:
    """Degrees and sharding: "tp 2, dp 16, ZeRO-1"."""
    degrees = [f"{name} {getattr(layout, name)}" for name in ("tp", "pp", "cp", "dp") if getattr(layout, name) > 1]
    if layout.vp > 1:
        degrees.append(f"{layout.vp} chunks per stage")
    if layout.dp * layout.cp > 1:
        degrees.append(SHARDS[layout.shard])
    return ", ".join(degrees) or "one GPU"


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
        return "below 0.1%"
    return f"{100 * share:.0f}%" if abs(share) >= 0.095 else f"{100 * share:.2g}%"


def signed(share: float) -> str:
    """A difference: "+12%"."""
    return "no clear difference" if abs(share) < CLEAR else f"{'+' if share > 0 else '-'}{percent(abs(share))}"


def memory(prediction: Prediction, memory_gib: float) -> str:
    """Memory of the fullest GPU, with the risk of running out if there is one."""
    risk = "" if has_room(prediction) else f", {percent(prediction.out_of_memory)} risk"
    return f"{prediction.peak_gib:.0f} of {memory_gib:.0f} GiB{risk}"


def describe_cause(prediction: Prediction, best: Prediction, cause: str, memory_gib: float) -> str:
    """Why a layout loses against the best one, in a few words."""
    if cause == "memory":
        return f"does not fit: {prediction.peak_gib:.0f} GiB at least, {FITS_SHARE * memory_gib:.0f} can be used"
    if cause == "unstable":
        return f"{prediction.peak_gib:.0f} of {memory_gib:.0f} GiB: so near the limit that steps become slow"
    slower = prediction.step_s / best.step_s - 1
    if slower < -CLEAR:
        reason = "further from published runs" if has_room(prediction) else memory(prediction, memory_gib)
        return f"{signed(slower)}, but {reason}"
    if slower < CLEAR:
        return "no clear difference"
    if cause == "compute":
        recomputes_more = RECOMPUTE_ORDER.index(prediction.layout.recompute) > RECOMPUTE_ORDER.index(
            best.layout.recompute
        )
        recomputed = f"to fit, it recomputes {RECOMPUTE[prediction.layout.recompute]}"
        return f"{signed(slower)}: {recomputed if recomputes_more else 'smaller matmuls are slower'}"
    return f"{signed(slower)}: {PARTS[cause]}"
