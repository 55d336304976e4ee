"""Which layouts to try: every possible one is predicted, the fastest that fit come first."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from labkit.scaling.constants import Constants, load_constants
from labkit.scaling.hardware import Hardware
from labkit.scaling.layout import Layout, why_impossible
from labkit.scaling.model import Model, Numbers
from labkit.scaling.prediction import Predictions, is_unstable, predict_runs
from labkit.scaling.runs import Run, Runs

LARGEST_MICRO_BATCH = 64
INTERLEAVED = (1, 2, 4)


@dataclass(frozen=True)
class Candidate:
    """A layout and what it would take; `step_s` with its 90 % interval."""

    layout: Layout
    step_s: float
    interval_90: tuple[float, float]
    peak_gib: float
    out_of_memory: float


def search(
    model: Model,
    hardware: Hardware,
    gpus: int,
    *,
    seq_len: int,
    global_batch: int,
    framework: str = "generic",
    precision: str = "bf16",
    keep: int | None = None,
    constants: Constants | None = None,
) -> list[Candidate]:
    """Layouts for this many GPUs that are expected to fit, the best first. ValueError if there is none.

    Layouts whose memory makes steps unstable come after all others.
    """
    if gpus < 1 or global_batch < 1 or seq_len < 1:
        raise ValueError(f"expected 1 or more GPUs, sequences and tokens, got {gpus}, {global_batch} and {seq_len}")
    layouts = [
        layout
        for layout in _layouts(model, hardware, gpus, global_batch, precision)
        if why_impossible(layout, model, seq_len) is None
    ]
    if not layouts:
        raise ValueError(f"no layout divides {model.layers} layers and {global_batch} sequences over {gpus} GPUs")
    runs = Runs.of([Run(model, hardware, layout, seq_len, framework) for layout in layouts])
    found = predict_runs(runs, constants or load_constants())
    order = [row for row in np.argsort(preference_s(runs, found)) if found.fits[row]]
    if not order:
        least = int(np.argmin(found.peak_gib))
        raise ValueError(
            f"no layout fits on {gpus} x {hardware.name}: the smallest needs {found.peak_gib[least]:.0f} GiB a GPU"
        )
    return [
        Candidate(
            layouts[row],
            float(found.step_s[row]),
            (float(found.low_90[row]), float(found.high_90[row])),
            float(found.peak_gib[row]),
            float(found.out_of_memory[row]),
        )
        for row in order[:keep]
    ]


def preference_s(runs: Runs, found: Predictions) -> Numbers:
    """What to rank by: seconds, more by the chance of running out of memory, far more if unstable or too large."""
    risk = 1 / (1 - np.minimum(found.out_of_memory, 0.99))
    slow = np.where(is_unstable(runs, found), 3.0, 1.0)  # published ones are 1.5 to 8 times slow
    return found.step_s * risk * slow * np.where(found.fits, 1.0, 1e3)


def _layouts(model: Model, hardware: Hardware, gpus: int, global_batch: int, precision: str) -> Iterator[Layout]:
    """Powers of two for most degrees; tensor parallelism inside a node; schedules and sharding that go with them."""
    for tp in _powers(min(gpus, hardware.gpus_per_node, model.heads)):
        for pp in _divisors(gpus // tp, model.layers):
            if gpus % (tp * pp):
                continue
            dp = gpus // (tp * pp)
            for micro_batch in _powers(min(max(global_batch // dp, 1), LARGEST_MICRO_BATCH)):
                for vp in INTERLEAVED if pp > 1 else (1,):
                    for shard in ("none",) if dp == 1 else ("none", "zero1") if pp > 1 else ("none", "zero1", "zero3"):
                        for recompute in ("none", "selective", "full"):
                            yield Layout(
                                tp=tp,
                                sequence_parallel=tp > 1,
                                pp=pp,
                                vp=vp,
                                dp=dp,
                                shard=shard,
                                micro_batch=micro_batch,
                                global_batch=global_batch,
                                recompute=recompute,
                                precision=precision,
                            )


def _powers(largest: int) -> Iterator[int]:
    value = 1
    while value <= largest:
        yield value
        value *= 2


def _divisors(gpus: int, layers: int) -> Iterator[int]:
    """Pipeline degrees that divide the GPUs, and the layers evenly or by powers of two."""
    return (
        degree
        for degree in range(1, min(gpus, layers) + 1)
        if gpus % degree == 0 and (layers % degree == 0 or degree & (degree - 1) == 0)
    )
