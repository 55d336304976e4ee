"""Checks a training over ranks: parameters after two steps must be those of one process with all batches.

A gradient that is wrong in the first step has spread by the second.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from labkit.bench.check import largest, max_over_ranks
from labkit.nn.training import Workload
from labkit.studies.shared.gradient_check import MISSING, RIGHT, Deviation, describe_first, furthest

STEPS = 2
TOLERANCE = 1e-2
"""Error of an element, relative to the largest change of its tensor."""
ROUNDING = 1e-6
"""Gradients this small, relative to the largest of the model, are rounding: AdamW's update of them says nothing."""


@dataclass(frozen=True)
class Reference:
    """Parameters after a training in one process."""

    expected: Mapping[str, Tensor]
    scales: Mapping[str, float]
    """The largest change of each parameter, or of the whole model if its gradients are rounding."""

    def check(self, parameters: Mapping[str, Tensor]) -> tuple[float, str]:
        """The largest relative error of any rank, and "ok" or where the first failing rank is wrong. A collective.

        All ranks get the same: "wrong: rank 1, layers.0.weight, element 5: expected 0.5, got 0.25".
        """
        errors, deviations = zip(*(self._compare(parameters.get(name), name) for name in self.expected), strict=True)
        return max_over_ranks(max(errors)), describe_first(list(self.expected), deviations) or "ok"

    def _compare(self, actual: Tensor | None, name: str) -> tuple[float, Deviation]:
        """Return the relative error of a parameter, and its worst element if that is wrong."""
        expected, scale = self.expected[name], self.scales[name]
        if actual is None or actual.shape != expected.shape:
            return math.inf, (MISSING, 0.0, 0.0)
        difference = largest(actual - expected)
        error = difference / scale if scale else math.inf if difference else 0.0
        if error <= TOLERANCE:
            return error, (RIGHT, 0.0, 0.0)
        return math.inf if math.isnan(error) else error, furthest(actual, expected)


def train_in_one_process(
    workloads: list[Workload], optimizer_class: type[Optimizer], settings: Mapping[str, Any]
) -> Reference:
    """Train two steps on the mean loss of all ranks' workloads."""
    model = workloads[0].build()
    start = _copy_parameters(model)
    optimizer = optimizer_class(model.parameters(), **dict(settings))
    for _ in range(STEPS):
        optimizer.zero_grad()
        for workload in workloads:
            (workload.loss(model) / len(workloads)).backward()
        optimizer.step()
    slopes = {name: largest(value.grad) for name, value in model.named_parameters() if value.grad is not None}
    expected = _copy_parameters(model)
    changes = {name: largest(value - start[name]) for name, value in expected.items()}
    flat, most = ROUNDING * max(slopes.values(), default=0.0), max(changes.values())
    scales = {name: most if 0 < slopes.get(name, 0) <= flat else change for name, change in changes.items()}
    return Reference(expected, scales)


def _copy_parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}
