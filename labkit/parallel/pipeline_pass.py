"""One pass of a batch through a pipeline: the tasks of a rank, and the messages between its stages.

A rank that fails sends failures in place of its remaining messages. A rank that receives one
computes nothing any more and does the same. So no rank waits for a message that never comes, all
reach the end of the pass, and there they compare how it went.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.checkpoint import checkpoint

from labkit.parallel.losses import IGNORED
from labkit.parallel.pipeline_agreement import agree_on_success, sum_over
from labkit.parallel.pipeline_layers import on_copies_of_buffers
from labkit.parallel.pipeline_messages import Failed, Messages
from labkit.parallel.pipeline_schedule import Task
from labkit.parallel.prepare import FLOAT_TYPES

Loss = Callable[[Any, Tensor], Any]
"""(outputs, targets) to a mean, one number, or to (sum, count)."""
Plan = Sequence[tuple[bool, Task]]


class Pass:
    """A pass of micro-batches through the stages of this rank.

    `stages` has the layers of each stage, by its number; other ranks' stages are not in it.
    `inputs` and `targets` are those of each micro-batch, `recompute` as for `Pipeline`. Without
    a loss function it only goes forward. `typical_count`: the same number on all ranks that have
    parts of a batch, by which they divide sums of losses. `scaler`: multiplies the loss.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Sequential],
        n_stages: int,
        group: dist.ProcessGroup,
        messages: Messages,
        device: torch.device,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor] = (),
        loss_function: Loss | None = None,
        *,
        typical_count: float = 1.0,
        scaler: GradScaler | None = None,
        recompute: bool = False,
    ) -> None:
        self._stages = stages
        self._last = n_stages - 1
        self._group = group
        self._messages = messages
        self._device = device
        self._inputs = inputs
        self._targets = targets
        self._loss_function = loss_function
        self._typical_count = typical_count
        self._scaler = scaler
        if scaler is not None:
            # On all ranks: torch's scaler has no scale before its first call, and cannot unscale.
            scaler.scale(torch.zeros((), device=device))
        self._recompute = recompute
        self._arrived: dict[Task, Tensor | Failed | None] = {}
        self._outgoing: dict[Task, Tensor | Failed | None] = {}
        # Inputs and outputs of stages whose backward pass is to come.
        self._held: dict[tuple[int, int], tuple[Tensor, Any]] = {}
        self.peak_held = 0
        self.marks: list[tuple[Task, Any, Any]] = []
        self.error: Exception | None = None
        self.has_failed = False
        self.outputs: list[Tensor] = []
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        self.divisor = 0.0
        self._returns_means = False  # on the rank with the loss

    def run(self, plan: Plan) -> None:
        """Carry out the tasks and messages of this rank. `error`: what a layer or the loss raised.

        Errors of messages, as when a rank has ended, are raised at once: nothing can be sent.
        """
        for is_message, task in plan:
            if is_message:
                self._pass_on(task)
            elif not self.has_failed:
                start = self._mark()
                try:
                    if task.kind == "F":
                        self._forward(task)
                    else:
                        self._backward(task)
                except Exception as error:
                    self.error = error
                    self._fail()
                self.marks.append((task, start, self._mark()))
                self.peak_held = max(self.peak_held, len(self._held))

    def agree_on_end(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of all ranks, by rank. A collective.

        If a rank has failed, its error is raised there, and ValueError with its text elsewhere.
        """
        return agree_on_success("pass", self.error, self._group, numbers)

    def agree_on_loss(
        self, flags: Sequence[bool], data_group: dist.ProcessGroup | None
    ) -> tuple[float, float, list[bool]]:
        """Return the loss, the factor of gradients, and which flags any rank has set.

        A collective. Errors as `agree_on_end`, and those of the pipelines of other batches. All
        ranks warn if the loss returns means of micro-batches with other numbers of targets.
        """
        # On the rank with the loss alone: counting waits for a GPU.
        is_mean_of_means = self._returns_means and len(self._count_targets()) > 1
        flags = [*flags, is_mean_of_means]
        local = torch.tensor([self.loss_sum, self.count, self.divisor], dtype=torch.float64)
        problem: Exception | None = None
        by_rank: list[list[int]] = []
        total = count = divisor = 0.0
        try:
            by_rank = self.agree_on_end([*local.view(torch.int64).tolist(), *map(int, flags)])
            # the last rank has the loss
            total, count, divisor = torch.tensor(by_rank[-1][:3]).view(torch.float64).tolist()
        except Exception as error:
            problem = error
        data_ranks = 1
        if data_group is not None:
            total, count, data_ranks = sum_over(data_group, total, count, problem)
        if problem is not None:
            raise problem
        any_rank = [any(row[3 + number] for row in by_rank) for number in range(len(flags))]
        # Where warnings are errors, one of a single rank would let the others wait for it.
        if any_rank.pop():
            counts = self._count_targets()
            warnings.warn(
                f"micro-batches have {min(counts)} to {max(counts)} targets that count, so the mean"
                " of their means is not the batch's: let the loss return (sum, count), as"
                " labkit.parallel.losses.summed_loss",
                stacklevel=5,
            )
        if not count:
            return total, 1.0, any_rank
        return total / count, divisor * data_ranks / count, any_rank

    def _count_targets(self) -> set[int]:
        """Return the different numbers of targets that count in a micro-batch."""
        if self._targets[0].is_floating_point():
            return set()
        return {int((targets != IGNORED).sum()) for targets in self._targets}

    def _fail(self) -> None:
        self.has_failed = True
        self._held.clear()  # its memory may be what is missing

    def _mark(self) -> Any:
        """Return this moment, or on a GPU an event in its stream."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _forward(self, task: Task) -> None:
        x: Any = self._inputs[task.micro_batch]
        if task.stage:
            x = self._arrived.pop(task)
        stage = self._stages[task.stage]
        if self._recompute and torch.is_grad_enabled():
            contexts = partial(_recompute_contexts, stage)
            y = checkpoint(stage, x, use_reentrant=False, context_fn=contexts)
        else:
            y = stage(x)
        if task.stage == self._last and self._loss_function is not None:
            y = self._add_loss(y, self._targets[task.micro_batch])
        else:
            _check_output(task.stage, y)
            if task.stage == self._last:
                self.outputs.append(y.detach())
            else:
                # Detached: a stage's graph ends at its outputs, and the next stage has a leaf of
                # its own.
                self._outgoing[task] = y.detach().requires_grad_(y.requires_grad)
        if self._loss_function is not None:
            self._held[task.stage, task.micro_batch] = x, y

    def _add_loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """Add a micro-batch's loss to the sum; return what its backward pass begins with."""
        assert self._loss_function is not None
        result = self._loss_function(outputs, targets)
        self._returns_means = not isinstance(result, tuple)
        if self._returns_means:
            # A mean counts as one target: the mean over the batch is then that of the means.
            result = (result, 1.0)
        total, count = result
        if not isinstance(total, Tensor) or total.numel() != 1 or not total.is_floating_point():
            got = f"{tuple(total.shape)} {total.dtype}" if isinstance(total, Tensor) else total
            raise ValueError(
                f"expected a loss of one floating-point number, or (sum, count), got {got!s:.80}"
            )
        # The number of targets that count is known only after the last micro-batch, and backward
        # passes begin before: gradients are corrected then. In ring attention and in FSDP's
        # reduce-scatters they meet those of other ranks earlier: so all divide by the same number.
        self.divisor = self._typical_count
        if self._returns_means:
            self.divisor = float(len(self._inputs))
        total = total.reshape(())
        self.loss_sum += total.detach()
        self.count += count
        start = total / self.divisor
        if self._scaler is not None:
            start = self._scaler.scale(start)
        return start

    def _backward(self, task: Task) -> None:
        x, y = self._held.pop((task.stage, task.micro_batch))
        gradient: Any = None
        if task.stage < self._last:
            gradient = self._arrived.pop(task)
        # Nothing arrives where nothing behind needs this stage's outputs, as in one process.
        if y.requires_grad and (gradient is not None or task.stage == self._last):
            y.backward(gradient)
        # None travels, too: the stage before waits for word of every micro-batch.
        if task.stage:
            self._outgoing[task] = x.grad

    def _pass_on(self, task: Task) -> None:
        """Send or receive the message after a task: an activation or its gradient."""
        there = task.destination
        source = task.stage % self._group.size()
        target = there.stage % self._group.size()
        way = task.kind, task.stage
        content: Tensor | Failed | None
        if self._group.rank() == source:
            content = Failed() if self.has_failed else self._outgoing.pop(task)
            # Two stages of one rank hand over without a message.
            if source != target:
                self._messages.send(content, target, way)
                return
        else:
            content = self._messages.receive(source, way)
        if isinstance(content, Failed):
            self._fail()
        self._arrived[there] = content


def _check_output(stage: int, y: Any) -> None:
    if isinstance(y, Tensor) and y.dtype in FLOAT_TYPES and y.layout is torch.strided:
        return
    got = f"{y.layout} of {y.dtype}" if isinstance(y, Tensor) else type(y).__name__
    raise ValueError(f"expected stage {stage} to return one dense float tensor, got {got}")


def _recompute_contexts(
    stage: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a stage's forward pass and of its repetition before backward."""
    return nullcontext(), on_copies_of_buffers(stage)
