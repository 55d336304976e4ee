"""What the data-parallel lab compares: ways to train one workload, each with a model and an optimizer of its own.

They are named "implementation@size of every bucket in MiB", or "implementation" with the default buckets. "local" is
the bare model: the same step without communication.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from labkit.bench.clock import Stopwatch
from labkit.nn.workloads import Workload
from labkit.parallel.data_parallel.implementations import LOCAL, wrap
from labkit.studies.shared.gradient_gate import check_completeness

PHASES = ("forward", "backward", "optimizer")
FINISH = "finish"
"""The range around what a wrapper does after its backward pass: waiting, and collectives that it begins there."""


def split_name(alternative: str) -> tuple[str, float | None]:
    """ "torch@25" -> ("torch", 25.0); None for the default buckets."""
    name, _, bucket_mb = alternative.partition("@")
    return name, float(bucket_mb) if bucket_mb else None


class Alternative:
    """One way to train the workload: a copy of the model under its wrapper, and plain SGD."""

    def __init__(self, name: str, workload: Workload, device: str):
        self.implementation, self.bucket_mb = split_name(name)
        model = workload.build()
        self.model: Any = model
        if self.implementation != LOCAL:
            # labkit's wrappers finish when told to, so that the waiting can be told apart
            self.model = wrap(self.implementation, model, bucket_mb=self.bucket_mb, finish_in_backward=False)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        self._finish = getattr(self.model, "finish_gradient_synchronization", None)
        self.waiting = Stopwatch(device)
        self._loss_of = workload.loss
        self._loss: Tensor | None = None

    def forward(self) -> None:
        self._loss = self._loss_of(self.model)

    def backward(self) -> None:
        """When it returns, gradients are averaged; `waiting` has the time from the end of the pass on."""
        assert self._loss is not None, "forward comes first"
        self._loss.backward()
        self._loss = None
        if self._finish is not None:  # torch's has finished already
            with record_function(FINISH):
                self.waiting.start()
                self._finish()
                self.waiting.stop()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def run(self) -> None:
        """One step."""
        self.forward()
        self.backward()
        self.step()

    def accumulate(self, micro_batches: int = 1, *, only_last: bool = False) -> None:
        """Gradients of so many micro-batches, averaged after each of them, or after the last one only (`no_sync`)."""
        for micro_batch in range(micro_batches):
            silent = only_last and micro_batch < micro_batches - 1
            with self.model.no_sync() if silent else nullcontext():
                self.forward()
                self.backward()

    def completeness(self) -> str:
        """ "ok", or what `check_completeness` finds wrong of its averages."""
        if self.implementation == LOCAL:
            return "ok"
        return check_completeness(self.parameters, self.accumulate)
