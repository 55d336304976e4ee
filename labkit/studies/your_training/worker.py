"""Worker of the lab on your own training: the parts of a step, its lines, and changes in turns."""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from labkit.bench.check import OK, describe_error, largest, status_columns
from labkit.bench.clock import time_interleaved, time_parts_interleaved
from labkit.bench.intervals import estimate_paired
from labkit.lab.point import TimedPoint
from labkit.parallel.ranks.results import is_out_of_memory
from labkit.studies.shared.checks import TOLERANCES
from labkit.studies.your_training.changes import CHANGES, apply_all
from labkit.studies.your_training.lines import line_rows
from labkit.studies.your_training.loop import PARTS, Loop
from labkit.studies.your_training.setup import (
    SetupError,
    Training,
    build,
    check_first_step,
    load_setup,
    seed_everything,
)
from labkit.torch_private import tree_leaves

YOURS = "yours"
CHANGED = "changed"
STEP = "step"
TOGETHER = "together"
MIN_GAIN = 0.03
"""Share of a step below which a change does not pay, whatever its interval says."""
TURN_S = 0.1
"""Seconds of a turn: of several steps, if they are short."""
MAX_CALLS = 20
LINES_S = 1.0
"""Seconds for which lines are sampled: a thousand samples."""
FLOOR = 1e-3
"""Smallest scale of a gradient's error, as a share of the model's largest gradient.

Some gradients are rounding alone, such as that of a bias before batch norm: their exact value is 0.
"""
TRAINED_STEPS = 10
"""Steps after which the losses of yours and of an inexact change are compared."""


@dataclass(frozen=True, kw_only=True)
class YourTrainingPoint(TimedPoint):
    """A setup, and what of it is measured: "step" or "changes"."""

    sweep: str
    setup: str
    """ "train.py:setup", with an absolute path."""
    arguments: tuple[tuple[str, int | float | str], ...] = ()
    changes: tuple[str, ...] = ()

    @property
    def planned_s(self) -> float:
        return super().planned_s * max(1, len(self.changes))


def measure(point: YourTrainingPoint) -> Iterator[dict[str, Any]]:
    """Yield rows of the sweep that the point belongs to; a setup that is wrong is one row."""
    bench = Bench(point)
    sweeps = {"step": bench.measure_step, "changes": bench.measure_changes}
    try:
        yield from sweeps[point.sweep]()
    except SetupError as error:
        yield {"status": "refused", "reason": str(error)}


@dataclass
class Bench:
    """Builds trainings of one setup, and measures them."""

    point: YourTrainingPoint
    _step_s: float = field(default=0.0)

    def build(self) -> Training:
        """A fresh training: the same parameters each time."""
        function = load_setup(self.point.setup)
        return build(function, self.point.seed, **dict(self.point.arguments))

    def measure_step(self) -> Iterator[dict[str, Any]]:
        """Yield what was found, seconds of each part of a step, and the lines."""
        training = self.build()
        batch, without_gradient = check_first_step(training)
        yield {"kind": "found", **describe_training(training, batch, without_gradient)}
        loop = Loop(training)
        loop.begin()
        warmup = self.point.warmup + loop.prefetched
        options = self.point.rounds | {"warmup": warmup}
        device = training.device
        samples = time_parts_interleaved({YOURS: loop.parts}, device=device, **options)[YOURS]
        steps = [sum(parts) for parts in zip(*(samples[part] for part in PARTS), strict=True)]
        for part, seconds in (*samples.items(), (STEP, steps)):
            yield {"kind": "part", "part": part, "seconds": seconds}
        if device.type == "cpu":
            step_s = sorted(steps)[len(steps) // 2]
            n_steps = max(3, round(LINES_S / step_s))
            yield from ({"kind": "line"} | row for row in line_rows(loop, n_steps))
        loop.end()

    def measure_changes(self) -> Iterator[dict[str, Any]]:
        """Yield seconds of a step under each change and of yours, interleaved.

        The changes that pay are measured together in the end.
        """
        gains = []
        for name in self.point.changes:
            if reason := CHANGES[name].refusal(self.build()):
                yield {"change": name, "status": "refused", "reason": reason}
                continue
            rows = list(self._compare(name, (name,)))
            yield from rows
            if self._pays(rows):
                gains.append(name)
        if len(gains) > 1:
            yield from self._compare(TOGETHER, tuple(gains))

    def _compare(self, label: str, names: tuple[str, ...]) -> Iterator[dict[str, Any]]:
        """Yield two rows, yours and the changed one; one row with a reason if the change fails."""
        about = {"change": label, "parts_of_change": " + ".join(names)}
        try:
            yours = Loop(self.build())
            changed = Loop(self.build())
            apply_all(changed, names)
            checked = self._check(yours, changed, names)
            seconds = self._time(yours, changed)
        except SetupError as error:
            yield about | {"status": "failed", "reason": str(error)}
            return
        except Exception as error:
            status = "oom" if is_out_of_memory(error) else "failed"
            text = str(error).strip().partition("\n")[0][:200]
            yield about | {"status": status, "reason": f"{type(error).__name__}: {text}"}
            return
        yield about | {"variant": YOURS, **OK, "seconds": seconds[YOURS]}
        yield about | checked | {"variant": CHANGED, "seconds": seconds[CHANGED]}

    def _check(self, yours: Loop, changed: Loop, names: tuple[str, ...]) -> dict[str, Any]:
        """Compare loss, gradients and a few steps. `first_s`: the first pass, with compilation."""
        changes = [CHANGES[name] for name in names]
        seed = self.point.seed
        loops = (yours, changed)
        batch, other_batch = (first_batch(loop.training, seed) for loop in loops)
        draws_differently = largest_batch_difference(batch, other_batch) > 0
        models = [loop.training.model for loop in loops]
        was_training = [model.training for model in models]
        if is_random(yours, batch, seed):
            # Compilers and workers draw other random numbers: compared without dropout.
            for model in models:
                model.eval()
        expected_loss, expected = yours.gradients(batch)
        changed.begin()
        start = time.perf_counter()
        loss, actual = changed.gradients(batch)
        first_s = time.perf_counter() - start
        precision = "float32" if all(one.precision == "float32" for one in changes) else "bfloat16"
        error = gradient_error(actual, expected, is_exact=precision == "float32")
        wrong = describe_error(error, TOLERANCES[precision])
        trained = {}
        if wrong is None:
            trained["trained_loss"] = trained_loss(changed, batch)
        changed.end()
        if wrong is None:
            trained["trained_loss_of_yours"] = trained_loss(yours, batch)
        for model, mode in zip(models, was_training, strict=True):
            model.train(mode)
        return {
            **status_columns(wrong),
            "error": error,
            "first_s": first_s,
            "loss": loss,
            "loss_of_yours": expected_loss,
            "draws_differently": draws_differently,
            "is_exact": precision == "float32" and not draws_differently,
            **trained,
        }

    def _time(self, yours: Loop, changed: Loop) -> Mapping[str, list[float]]:
        """Seconds of a step, a mean over each turn, interleaved."""
        loops = {YOURS: yours, CHANGED: changed}
        running: list[Loop] = []

        def begin(name: str) -> None:
            while running:
                running.pop().end()
            loops[name].begin()
            running.append(loops[name])

        for name in loops:  # warm up, and learn how long a step is
            begin(name)
            loops[name].step()
        start = time.perf_counter()
        changed.step()
        step_s = time.perf_counter() - start
        most_prefetched = max(loop.prefetched for loop in loops.values())
        calls = max(1, min(MAX_CALLS, round(TURN_S / step_s)), 2 * most_prefetched)
        samples = time_interleaved(
            {name: loop.step for name, loop in loops.items()},
            device=yours.training.device,
            calls=calls,
            prepare=begin,
            **self.point.rounds,
        )
        while running:
            running.pop().end()
        return samples

    def _pays(self, rows: list[dict[str, Any]]) -> bool:
        """Whether a right change is faster by `MIN_GAIN` or more, with confidence."""
        if len(rows) != 2 or any(row["status"] != "ok" for row in rows):
            return False
        yours, changed = (torch.tensor(row["seconds"]).log().numpy() for row in rows)
        estimate = estimate_paired(changed - yours)
        return bool(estimate.high < -MIN_GAIN)


def first_batch(training: Training, seed: int) -> Any:
    """The first batch of an epoch, drawn with seeded random numbers."""
    seed_everything(seed)
    return next(training.forever())


def trained_loss(loop: Loop, batch: Any) -> float:
    """The loss after some steps on one batch. The parameters are those from before, afterwards."""
    state = loop.training.model.state_dict()
    before = {name: value.clone() for name, value in state.items()}
    for _ in range(TRAINED_STEPS):
        loop.use(batch)
        loop.forward()
        loop.backward()
        loop.update()
    loop.use(batch)
    with torch.no_grad():
        loss = float(loop.forward())
    loop.training.model.load_state_dict(before)
    return loss


def gradient_error(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], *, is_exact: bool
) -> float:
    """Error of gradients, by parameter name; infinite for NaN or for other names.

    Exact changes: the largest error of an element, relative to the largest of its tensor. In 16
    bits single elements may be off by much (a ReLU that rounds to the other side): the norm of all
    errors, relative to the norm of all gradients.
    """
    if actual.keys() != expected.keys():
        return math.inf
    differences = {name: actual[name] - one for name, one in expected.items()}
    if is_exact:
        least = FLOOR * max((largest(one) for one in expected.values()), default=0.0)
        errors = [
            largest(differences[name]) / max(largest(one), least, 1e-30)
            for name, one in expected.items()
        ]
        error = math.nan if any(map(math.isnan, errors)) else max(errors, default=0.0)
    else:
        off = math.hypot(*(float(one.norm()) for one in differences.values()))
        error = off / max(math.hypot(*(float(one.norm()) for one in expected.values())), 1e-30)
    return math.inf if math.isnan(error) else error


def is_random(loop: Loop, batch: Any, seed: int) -> bool:
    """Whether the loss depends on the state of the random numbers, as under dropout."""
    losses = []
    for number in (seed, seed + 1):
        seed_everything(number)
        loop.use(batch)
        with torch.no_grad():
            losses.append(float(loop.forward()))
    return losses[0] != losses[1]


def largest_batch_difference(one: Any, other: Any) -> float:
    """The largest difference of two batches' tensors; infinite if they are of other kinds."""
    pairs = list(zip(tree_leaves(one), tree_leaves(other), strict=False))
    if len(tree_leaves(one)) != len(tree_leaves(other)):
        return float("inf")
    largest = 0.0
    for a, b in pairs:
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.shape == b.shape:
            largest = max(largest, float((a.double() - b.double()).abs().max()) if a.numel() else 0)
    return largest


def describe_training(training: Training, batch: Any, without: list[str]) -> dict[str, Any]:
    """What a setup returned: model, parameters, batch, optimizer, loader."""
    model: nn.Module = training.model
    loader: Any = training.batches
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    return {
        "model": type(model).__name__,
        "n_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "batch_shape": " x ".join(map(str, tensors[0].shape)) if tensors else "",
        "optimizer": type(training.optimizer).__name__,
        "has_own_optimizer": training.has_own_optimizer,
        "batches": type(loader).__name__,
        "loader_workers": getattr(loader, "num_workers", 0),
        "device": str(training.device),
        "without_gradient": ", ".join(without),
    }
