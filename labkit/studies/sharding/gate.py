"""The gate of sharding: are parameters, after two steps, those of one process with the batches of all ranks?

What is wrong after the first one has spread by the second: of a reader's way, the first that is wrong is told.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn

from labkit.bench.check import first_failing_rank, largest, max_over_ranks
from labkit.studies.sharding.training import OPTIMIZERS, ShardingPoint, workload_of
from labkit.studies.shared.gradient_check import furthest

GATE_STEPS = 2
LARGEST_ERROR = 1e-2
"""Of a parameter, over the largest change of its tensor."""
ROUNDING = 1e-6
"""A gradient so much smaller than the largest of the model is rounding, and what AdamW makes of it says nothing."""
NONE = -1
"""Stands for the element of a tensor that is not there, or not whole."""


@dataclass(frozen=True)
class OneProcess:
    """What all ways must come to after a step."""

    expected: Mapping[str, Tensor]
    scales: Mapping[str, float]
    """By parameter, the largest change of its tensor: of the whole model where its gradients are rounding."""
    trained: frozenset[str]
    """Names of parameters that an optimizer updates; others are frozen."""

    def check(self, found: Mapping[str, Tensor]) -> tuple[float, str]:
        """The largest error of any rank over that scale, and "ok" or where it is wrong. A collective; all get the same.

        "wrong: rank 1, layers.0.weight, element 5: expected 0.5, got 0.25" is the largest error of the first such rank.
        """
        errors = {name: self._error(found.get(name), name) for name in self.expected}
        worst = max(errors, key=errors.__getitem__)
        error = max_over_ranks(errors[worst])
        if error <= LARGEST_ERROR:
            return error, "ok"
        first = first_failing_rank(
            self._off(found.get(worst), worst) if errors[worst] > LARGEST_ERROR else (-1, 0, 0, 0)
        )
        assert first is not None, "the largest error is that of some rank"
        rank, (index, element, expected, got) = first
        name = list(self.expected)[int(index)]
        where = f"wrong: rank {rank}, {name}"
        if element == NONE:
            return error, f"{where}: expected a tensor of shape {tuple(self.expected[name].shape)}, got another or none"
        return error, f"{where}, element {element:.0f}: expected {expected:.6g}, got {got:.6g}"

    def _error(self, found: Tensor | None, name: str) -> float:
        if found is None or found.shape != self.expected[name].shape:
            return math.inf
        off, scale = largest(found - self.expected[name]), self.scales[name]
        if math.isnan(off) or (off and not scale):
            return math.inf
        return off / scale if scale else 0.0

    def _off(self, found: Tensor | None, name: str) -> tuple[int, int, float, float]:
        expected, index = self.expected[name], list(self.expected).index(name)
        if found is None or found.shape != expected.shape:
            return index, NONE, 0.0, 0.0
        return index, *furthest(found, expected)


def train_in_one_process(point: ShardingPoint, device: str) -> list[OneProcess]:
    """Each of the same steps, without any rank's help."""
    workloads = [workload_of(point, device, rank) for rank in range(dist.get_world_size())]
    model = workloads[0].build()
    start = _copied(model)
    make, settings = OPTIMIZERS[point.optimizer]
    optimizer = make(model.parameters(), **settings)
    steps = []
    for _ in range(GATE_STEPS):
        optimizer.zero_grad()
        for workload in workloads:
            (workload.loss(model) / len(workloads)).backward()
        optimizer.step()
        steps.append(_after(model, start))
    return steps


def _after(model: nn.Module, start: Mapping[str, Tensor]) -> OneProcess:
    slopes = {name: largest(value.grad) for name, value in model.named_parameters() if value.grad is not None}
    expected = _copied(model)
    changes = {name: largest(value - start[name]) for name, value in expected.items()}
    flat, most = ROUNDING * max(slopes.values(), default=0.0), max(changes.values())
    scales = {name: most if 0 < slopes.get(name, 0) <= flat else change for name, change in changes.items()}
    trained = frozenset(name for name, value in model.named_parameters() if value.requires_grad)
    return OneProcess(expected, scales, trained)


def _copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}
