"""Worker of the lab on your own training: the parts of a step, its lines, and changes in turns."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from labkit.bench.check import OK, refusal_columns
from labkit.bench.clock import time_parts_interleaved
from labkit.bench.intervals import estimate_paired
from labkit.lab.point import TimedPoint
from labkit.studies.shared.alternatives import row_of, sum_rounds
from labkit.studies.your_training.arguments import Make, default_batch, find_batches, measure_values
from labkit.studies.your_training.attention import attention_rows
from labkit.studies.your_training.changes import CHANGES, COMPILE, apply
from labkit.studies.your_training.check import compare_results
from labkit.studies.your_training.lines import line_rows
from labkit.studies.your_training.loop import PARTS, Loop, time_steps
from labkit.studies.your_training.memory import count_peak, memory_rows
from labkit.studies.your_training.ranks import measure_ranks
from labkit.studies.your_training.setup import (
    SetupError,
    Training,
    build,
    check_first_step,
    load_setup,
    tensors_in,
)
from labkit.studies.your_training.yardstick import time_yardstick

YOURS = "yours"
STEP = "step"
YARDSTICK = "yardstick"
TOGETHER = "all that pay"
# Share of a step below which a change does not pay, whatever its interval says.
MIN_GAIN = 0.03
# Seconds for which lines are sampled: a thousand samples.
LINES_S = 1.0
# Seconds of an epoch whose end the timed steps may reach.
LONGEST_EPOCH_S = 5.0
# Seconds that a plan allows for compiling, once alone and once with all that pay.
COMPILE_S = 20.0
Setup = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class YourTrainingPoint(TimedPoint):
    """A setup, and what of it is measured: "step", "changes", "argument" or "ranks"."""

    sweep: str
    file: str = ""
    """ "train.py:setup", with an absolute path; "" for a notebook's function."""
    arguments: tuple[tuple[str, Any], ...] = ()
    changes: tuple[str, ...] = ()
    swept: str = ""
    """The argument whose values are compared."""
    swept_values: tuple[Any, ...] = ()
    """None: batches around the setup's default, up to what fits."""

    @property
    def contests(self) -> int:
        """Number of sets of rounds: one, or one per change, for all that pay and for SDPA."""
        return len(self.changes) + 2 if self.changes else 1

    @property
    def planned_s(self) -> float:
        return super().planned_s + COMPILE_S * (COMPILE in self.changes)


def measure(point: YourTrainingPoint, setup: Setup | None = None) -> Iterator[dict[str, Any]]:
    """Yield rows of the sweep that the point belongs to; a setup that is wrong is one row.

    `setup` is a notebook's function, measured if the point names no file.
    """
    try:
        function = load_setup(point.file) if point.file else setup
        if function is None:
            raise SetupError("expected a setup, such as --set file=train.py:setup")
        # A fresh training each time, with the same parameters.
        make = partial(build, function, point.seed, **dict(point.arguments))
        sweeps: dict[str, Callable[..., Iterator[dict[str, Any]]]] = {
            "step": measure_step,
            "changes": measure_changes,
            "argument": partial(measure_argument, setup=function),
            "ranks": measure_ranks,
        }
        yield from sweeps[point.sweep](point, make)
    except SetupError as error:
        yield refusal_columns(str(error))


def measure_step(point: YourTrainingPoint, make: Make) -> Iterator[dict[str, Any]]:
    """Yield what was found, seconds of each part of a step, then its lines and its memory."""
    training = make()
    batch, without_gradient = check_first_step(training)
    loop = Loop(training)
    found = describe_training(training, batch, without_gradient)
    yield {"kind": "found", **found, "flops": count_flops(loop, batch)}
    warmup = point.warmup + loop.prefetched
    options = point.rounds | {"warmup": warmup}
    device = training.device
    yardstick_s = time_yardstick()
    with loop.turn():
        samples = time_parts_interleaved({YOURS: loop.parts}, device=device, **options)[YOURS]
        samples[STEP] = sum_rounds(samples, PARTS)
        for part, seconds in samples.items():
            yield {"kind": "part", "part": part, "seconds": seconds}
        # Not between the steps: workers of a loader would go on in the meantime.
        yield {"kind": YARDSTICK, "seconds": yardstick_s + time_yardstick()}
        # On a GPU operators run behind the lines that launch them: stacks say nothing.
        if device.type == "cpu":
            n_steps = max(3, round(LINES_S / float(np.median(samples[STEP]))))
            yield from ({"kind": "line"} | row for row in line_rows(loop, n_steps))
        yield from ({"kind": "memory"} | row for row in memory_rows(loop))


def measure_changes(point: YourTrainingPoint, make: Make) -> Iterator[dict[str, Any]]:
    """Yield seconds of a step under each change and of yours, interleaved.

    The changes that pay are measured together in the end. Each comparison is a session: its
    ratios are to yours of the same minute. Before all, attention by hand is compared with SDPA.
    """
    loop = Loop(make())
    with loop.turn():
        yield from attention_rows(loop, point.rounds)
    gains = []
    for session, name in enumerate(point.changes, 1):
        reason = CHANGES[name].refusal(make())
        if reason is not None:
            yield {"change": name, **refusal_columns(reason)}
            continue
        rows = [row | {"session": session} for row in compare(point, make, name, (name,))]
        yield from rows
        if _pays(rows):
            gains.append(name)
    if len(gains) > 1:
        rows = list(compare(point, make, TOGETHER, tuple(gains)))
        yield from (row | {"session": len(point.changes) + 1} for row in rows)


def measure_argument(
    point: YourTrainingPoint, make: Make, setup: Setup
) -> Iterator[dict[str, Any]]:
    """Yield seconds per sample by value of an argument; first the largest batch that fits."""
    values: Sequence[Any] = point.swept_values
    if not values:
        fits, values = find_batches(make, default_batch(setup))
        yield fits
    yield from measure_values(make, point.swept, values, point.rounds)


def compare(
    point: YourTrainingPoint, make: Make, label: str, names: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    """Yield two rows, yours and the changed one; one row with a reason if the change fails."""
    is_exact = all(CHANGES[name].precision == "float32" for name in names)
    precision = "float32" if is_exact else "bfloat16"
    loops = {YOURS: Loop(make())}
    yours = loops[YOURS]

    def check() -> dict[str, Any]:
        loops[label] = changed = apply(make(), names)
        columns = compare_results(yours, changed, precision=precision, seed=point.seed)
        if COMPILE in names:
            # The last batch is smaller, and compiled when it first comes.
            with changed.turn():
                changed.run_epoch(LONGEST_EPOCH_S)
        for loop in loops.values():
            loop.warm_up()
        if any(CHANGES[name].saves_memory for name in names):
            # The peak of a step, counted, relative to yours.
            columns["peak_ratio"] = count_peak(changed) / count_peak(yours)
        return columns | {"made_of": ", ".join(names)}

    row = {"change": label} | row_of(label, check, device=str(yours.training.device))
    if row["status"] != "ok":  # nobody should want it, however fast it is
        yield row
        return
    rows = {YOURS: {"change": YOURS, **OK}, label: row}
    yield from time_steps(loops, rows, **point.rounds)


def _pays(rows: list[dict[str, Any]]) -> bool:
    """Return whether a right change is faster by `MIN_GAIN` or more, with confidence."""
    if len(rows) != 2 or any(row["status"] != "ok" for row in rows):
        return False
    # Of the same turns, in logarithms: a slow minute slows both by the same factor.
    yours, changed = (np.log(row["seconds"]) for row in rows)
    return bool(estimate_paired(changed - yours).high < np.log(1 - MIN_GAIN))


def count_flops(loop: Loop, batch: Any) -> int:
    """Return FLOPs of one forward and backward pass: of matmuls, convolutions and attention."""
    with FlopCounterMode(display=False) as counter:
        loop.gradients(batch)
    return int(counter.get_total_flops())


def describe_training(training: Training, batch: Any, without: list[str]) -> dict[str, Any]:
    """Return columns of what a setup returned: model, parameters, batch, optimizer, loader."""
    model: nn.Module = training.model
    loader: Any = training.batches
    tensors = tensors_in(batch)
    return {
        "model": type(model).__name__,
        "n_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "batch_shape": " x ".join(map(str, tensors[0].shape)) if tensors else "",
        "optimizer": type(training.optimizer).__name__,
        "has_own_optimizer": training.has_own_optimizer,
        "batches": type(loader).__name__,
        "loader_workers": getattr(loader, "num_workers", 0),
        "device": str(training.device),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "without_gradient": ", ".join(without),
    }
