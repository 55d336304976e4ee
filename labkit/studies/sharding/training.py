"""A point of the sharding lab, and one way to train its model."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from labkit.lab.own_models import source_of
from labkit.lab.point import TimedPoint
from labkit.nn import workloads
from labkit.parallel.sharding.implementations import shard

OPTIMIZERS: Mapping[str, tuple[type[Optimizer], Mapping[str, Any]]] = MappingProxyType(
    {"AdamW": (AdamW, {"lr": 1e-3, "eps": 1e-5}), "SGD": (SGD, {"lr": 0.5})}
)
"""One that costs much per parameter, one that costs little. AdamW's `eps` is above what rounding makes of a gradient:
three ranks add in another order than one process. SGD's `lr` is such that rounding is little beside an update."""


@dataclass(frozen=True, kw_only=True)
class ShardingPoint(TimedPoint):
    """A model, a batch, an optimizer, a transport, and the ways that are compared on them."""

    kind: str
    size: str
    transport: str
    """What labkit's ways send by; torch's send by the backend."""
    ways: tuple[str, ...]
    optimizer: str = "AdamW"
    device: str = "cpu"
    batch: int = 1
    context_length: int = 32
    machine_bytes: int = 0
    """Memory of the device, or of the machine whose ranks share it."""

    def title(self) -> str:
        about = f"{self.kind}, {self.size}, {self.optimizer}, {self.transport}, batch {self.batch}"
        return f"{super().title()}, {about}"


def workload_of(point: ShardingPoint, device: str, rank: int) -> workloads.Workload:
    """The model, and the batch of a rank."""
    return workloads.workload_of(
        source_of(point.size),
        batch=point.batch,
        context_length=point.context_length,
        device=device,
        seed=point.seed_of(rank),
    )


class Training:
    """One way to train: a copy of the model in its shards, and its optimizer."""

    def __init__(self, way: str, point: ShardingPoint, device: str):
        self._workload = workload_of(point, device, dist.get_rank())
        optimizer, settings = OPTIMIZERS[point.optimizer]
        self.model, self.optimizer = shard(
            way, self._workload.build(), optimizer, transport=point.transport, **settings
        )
        self._finish = getattr(self.model, "finish_gradient_synchronization", None)
        self._loss: Tensor | None = None

    def forward(self) -> None:
        self._loss = self._workload.loss(self.model)

    def backward(self) -> None:
        assert self._loss is not None, "forward comes first"
        self._loss.backward()
        self._loss = None
        if self._finish is not None:  # labkit's and torch's have finished; a reader's may not have
            self._finish()

    def step(self) -> None:
        self.optimizer.step()

    def run(self) -> None:
        self.optimizer.zero_grad()
        self.forward()
        self.backward()
        self.step()
