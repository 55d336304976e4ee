"""Values of a setup's argument, tried in turns: seconds per sample, and the batch that fits."""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any

from torch import Tensor

from labkit.bench.check import OK
from labkit.studies.shared.alternatives import row_of
from labkit.studies.shared.held import FIT_SHARE
from labkit.studies.your_training.loop import Loop, time_steps
from labkit.studies.your_training.memory import available_bytes, count_peak
from labkit.studies.your_training.setup import (
    Loss,
    SetupError,
    Training,
    check_first_step,
    tensors_in,
)

BATCH = "batch"
# Batches that are measured, as multiples of the default.
FACTORS = (0.5, 1, 2, 4, 8)
# Factor by which the peak of twice the batch shows what a sample takes. Activations alone would
# double it; parameters and states do not grow.
MIN_GROWTH = 1.5
MAX_FACTOR = 64
Make = Callable[..., Training]


def measure_values(
    make: Make, name: str, values: Sequence[Any], rounds: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield seconds per sample for each value of an argument, measured in turns."""
    loops: dict[str, Loop] = {}
    samples: dict[str, Samples] = {}

    def check(label: str, value: Any) -> dict[str, Any]:
        training = make(**{name: value})
        batch, _ = check_first_step(training)
        samples[label] = Samples(training.loss)
        counted = replace(training, loss=samples[label])
        loop = Loop(counted, settings=[samples[label].turn])
        loop.warm_up()
        loops[label] = loop
        return OK | {"n_samples": count_samples(batch)}

    rows = {}
    for value in values:
        label = f"{name}={value}"
        # The device of a setup that raises is not known: it is that of the others.
        devices = [str(loop.training.device) for loop in loops.values()] or ["cpu"]
        checked = row_of(label, partial(check, label, value), device=devices[0])
        rows[label] = {"kind": "argument", "argument": label} | checked
    for row in time_steps(loops, rows, **rounds):
        if "seconds" in row:
            label = row["argument"]
            # Per sample, so that batches of different sizes compare. A turn begins with steps that
            # are not timed.
            turns = samples[label].turns[-len(row["seconds"]) :]
            sizes = [fmean(turn[loops[label].prefetched :]) for turn in turns]
            row["seconds"] = [step / size for step, size in zip(row["seconds"], sizes, strict=True)]
        yield row


@dataclass
class Samples:
    """A loss that counts the samples of each batch by turn: the last one of an epoch has fewer."""

    loss: Loss
    turns: list[list[int]] = field(default_factory=list)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Begin to count a turn."""
        self.turns.append([])
        yield

    def __call__(self, model: Any, batch: Any) -> Tensor:
        self.turns[-1].append(count_samples(batch))
        return self.loss(model, batch)


def count_samples(batch: Any) -> int:
    """Return the length of the first dimension of a batch's first tensor; 1 without one."""
    for tensor in tensors_in(batch):
        if tensor.dim() > 0:
            return max(1, len(tensor))
    return 1


def default_batch(setup: Callable[..., Any]) -> int:
    """Return the default of a setup's argument `batch`. SetupError without one."""
    parameter = inspect.signature(setup).parameters.get(BATCH)
    default = parameter.default if parameter is not None else None
    if not isinstance(default, int) or default < 1:
        raise SetupError("expected an argument `batch` with a default, as in `def setup(batch=8)`")
    return default


def find_batches(make: Make, default: int) -> tuple[dict[str, Any], list[int]]:
    """Return a row with the largest batch that fits, and the batches to measure.

    Peaks are counted, and the batch is doubled until the peak grows with it: of a small batch it is
    the optimizer's. The last difference is what a sample takes; the rest does not grow. No batch
    has more than `n_samples`, the data set's if it has a length.
    """
    training = make(batch=default)
    n_samples = _data_set_length(training)
    size = default
    if 2 * size > n_samples:
        size = max(1, int(n_samples) // 2)
    peak = count_peak(Loop(make(batch=size)))
    doubled = count_peak(Loop(make(batch=2 * size)))
    while doubled < MIN_GROWTH * peak and size < MAX_FACTOR * default and 4 * size <= n_samples:
        size *= 2
        peak = doubled
        doubled = count_peak(Loop(make(batch=2 * size)))
    sample_bytes = max(1.0, (doubled - peak) / size)
    fixed_bytes = peak - size * sample_bytes
    available = available_bytes(training.device)
    fits = (FIT_SHARE * available - fixed_bytes) / sample_bytes
    largest = math.floor(min(fits, n_samples))
    row = {
        "kind": "fits",
        "largest_batch": largest,
        "is_all_data": fits > n_samples,
        "sample_bytes": sample_bytes,
        "available_bytes": float(available),
    }
    sizes = sorted({max(1, round(factor * default)) for factor in FACTORS})
    return row, [size for size in sizes if size <= max(largest, default)]


def _data_set_length(training: Training) -> float:
    """Return the samples of a training's data set; infinity if it has no length."""
    data: Any = getattr(training.batches, "dataset", None)
    if isinstance(data, Sized):
        return len(data)
    return math.inf
