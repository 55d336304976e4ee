"""A training that is run step by step, as its loop would: take a batch, forward, backward, update.

loop = Loop(training)
with loop.turn():
    loop.take_batch(); loop.forward(); loop.backward(); loop.update()     # or loop.step()
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from labkit.bench.clock import time_once
from labkit.nn.training import BACKWARD, FORWARD, OPTIMIZER
from labkit.studies.shared.alternatives import timed_rows
from labkit.studies.your_training.setup import Training, errors_in_one_line

INPUT = "input"
PARTS = (INPUT, FORWARD, BACKWARD, OPTIMIZER)
# Seconds of a turn: of several steps, if they are short.
TURN_S = 0.05
MAX_CALLS = 20
Context = Callable[[], AbstractContextManager[Any]]


@dataclass
class Loop:
    """Runs the steps of a training. Several loops take turns in one process."""

    training: Training
    call: Any = None
    """What the loss gets as the model: the model itself, or a compiled one."""
    settings: Sequence[Context] = ()
    """Settings of the process that hold in its turns, such as the number of threads."""
    part: str = ""
    """The part of a step that runs."""
    step_s: float = math.nan
    """Seconds of the step that ended the warm-up."""
    _batches: Iterator[Any] | None = None
    _batch: Any = None
    _loss: Tensor | None = None

    def __post_init__(self) -> None:
        if self.call is None:
            self.call = self.training.model

    @property
    def prefetched(self) -> int:
        """Batches that the loader's workers prepare ahead; 0 without workers."""
        loader = self.training.batches
        if not isinstance(loader, DataLoader) or loader.num_workers == 0:
            return 0
        # torch's default is 2 per worker.
        return loader.num_workers * (loader.prefetch_factor or 2)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Run a turn, in which the loop's settings hold and the loader's workers live."""
        with ExitStack() as settings:
            for setting in self.settings:
                settings.enter_context(setting())
            if self._batches is None:
                self._batches = self.training.forever()
            try:
                yield
            finally:
                # Workers would go on during the turns of others, and a batch would fill memory.
                if self.prefetched:
                    self._stop_workers()
                self._batch = None

    def warm_up(self) -> None:
        """Run a turn of a few steps, and learn how long one takes."""
        with self.turn():
            self.step()
            self.reach_steady_state()
            self.step_s = time_once(self.step, self.training.device)[1]

    def reach_steady_state(self) -> None:
        """Run steps until the loader's workers are in the middle of an epoch."""
        # Their first batches are late, or were prepared while nobody needed them. And the first
        # step after a fork copies the pages that it writes.
        for _ in range(self.prefetched):
            self.step()

    def _stop_workers(self) -> None:
        self._batches = None
        # Persistent workers only end with this iterator, which the loader keeps.
        loader: Any = self.training.batches
        loader._iterator = None

    def take_batch(self) -> Any:
        """Wait for the next batch; return it."""
        assert self._batches is not None, "a batch is taken in a turn"
        self.part = INPUT
        with errors_in_one_line("taking a batch"):
            self._batch = next(self._batches)
        return self._batch

    def forward(self, batch: Any = None) -> Tensor:
        """Run the forward pass and the loss on a batch, or on the one taken; return the loss."""
        self.part = FORWARD
        if batch is not None:
            self._batch = batch
        with errors_in_one_line("the forward pass"):
            self._loss = self.training.loss(self.call, self._batch)
        return self._loss

    def backward(self) -> None:
        """Run the backward pass."""
        assert self._loss is not None, "forward comes first"
        self.part = BACKWARD
        with errors_in_one_line("the backward pass"):
            self._loss.backward()
        self._loss = None

    def update(self) -> None:
        """Update the parameters and drop the gradients."""
        self.part = OPTIMIZER
        with errors_in_one_line("the optimizer's step"):
            self.training.optimizer.step()
            self.training.optimizer.zero_grad()

    def step(self) -> None:
        """Run one whole step, with its wait for input."""
        self.step_on(self.take_batch())

    def step_on(self, batch: Any) -> None:
        """Run a step on this batch."""
        self.forward(batch)
        self.backward()
        self.update()

    def run_epoch(self, most_s: float) -> None:
        """Run the steps of an epoch, or as many as fit into some seconds."""
        end = time.perf_counter() + most_s
        for batch in self.training.batches:
            self.step_on(batch)
            if time.perf_counter() > end:
                break

    @property
    def parts(self) -> dict[str, Callable[[], Any]]:
        """Return the parts of a step by name, in order."""
        actions = (self.take_batch, self.forward, self.backward, self.update)
        return dict(zip(PARTS, actions, strict=True))

    def gradients(self, batch: Any) -> tuple[float, dict[str, Tensor]]:
        """Return loss and gradients on a batch, by parameter name; they are dropped here."""
        loss = float(self.forward(batch).detach())
        self.backward()
        # Copied in float32: the next pass writes into the same tensors, and 16 bits are compared.
        gradients = {
            name: parameter.grad.detach().float().clone()
            for name, parameter in self.training.model.named_parameters()
            if parameter.grad is not None
        }
        # The optimizer may not have all of them: they would be in the next pass's gradients.
        self.training.model.zero_grad()
        return loss, gradients


@contextmanager
def taking_turns(loops: Mapping[str, Loop]) -> Iterator[Callable[[str], None]]:
    """Yield a function that ends the turn of one loop and begins that of another, by name."""
    with ExitStack() as turn:

        def begin(name: str) -> None:
            turn.close()
            turn.enter_context(loops[name].turn())
            loops[name].reach_steady_state()

        yield begin


def time_steps(
    loops: Mapping[str, Loop], rows: Mapping[str, dict[str, Any]], **rounds: Any
) -> Iterator[dict[str, Any]]:
    """Yield each row with seconds of a step of its loop, a mean over each turn, interleaved.

    Loops are warm. Rows without a loop are those of what failed. `rounds`: options of the clock.
    """
    if not loops:
        yield from rows.values()
        return
    device = next(iter(loops.values())).training.device
    step_s = max(loop.step_s for loop in loops.values())
    # At least what a loader's workers have prepared when a turn begins: fewer would be free. And
    # they end their batches together, so that one step alone would wait for all of them.
    most_prefetched = max(loop.prefetched for loop in loops.values())
    calls = max(1, min(MAX_CALLS, round(TURN_S / step_s)), most_prefetched)
    steps = {name: loop.step for name, loop in loops.items()}
    with taking_turns(loops) as begin:
        yield from timed_rows(rows, steps, device=str(device), calls=calls, prepare=begin, **rounds)
