"""A training step in phases, as the labs on data parallelism and sharding time it."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import record_function

from labkit.bench.clock import Stopwatch

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
FINISH = "finish"
"""Range of the profiler around what a wrapper does after its backward pass."""


class Trainer:
    """A model under its wrapper, with an optimizer and a loss."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, compute_loss: Callable[[nn.Module], Tensor], device: str = "cpu"
    ):
        self.model: Any = model
        self.optimizer = optimizer
        self.waiting = Stopwatch(device)
        """Laps from the end of a backward pass until gradients are averaged, for wrappers that finish separately."""
        self._finish = getattr(model, "finish_gradient_synchronization", None)
        self._compute_loss = compute_loss
        self._loss: Tensor | None = None

    def forward(self) -> None:
        self._loss = self._compute_loss(self.model)

    def backward(self) -> None:
        """Run the backward pass until gradients are averaged."""
        assert self._loss is not None, "forward comes first"
        self._loss.backward()
        self._loss = None
        if self._finish is not None:  # torch's wrappers have finished already
            with record_function(FINISH):
                self.waiting.start()
                self._finish()
                self.waiting.stop()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.forward()
        self.backward()
        self.update()

    @property
    def phases(self) -> dict[str, Callable[[], None]]:
        return {FORWARD: self.forward, BACKWARD: self.backward, OPTIMIZER: self.update}
