"""Pipeline parallelism: each rank has some consecutive layers, and micro-batches pass through the
ranks.

    pipeline = Pipeline(layers, schedule="1f1b", micro_batches=8)     this rank keeps its stage's layers
    loss = pipeline.step(inputs, targets, loss_function)              forward and backward of the whole batch
    torch.optim.AdamW(pipeline.parameters()).step()

`labkit.parallel.pipeline_schedule` has the schedules, what they idle and hold, and why no message
waits forever. A step sends every micro-batch's activations to the next stage, and their gradients
to the stage before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from labkit.parallel.agreement import (
    agree_once,
    agree_per_pass,
    describe_parameter,
    describe_values,
)
from labkit.parallel.collectives import all_reduce
from labkit.parallel.data_parallel.consistency import broadcast
from labkit.parallel.exchange import exchange
from labkit.parallel.pipeline_schedule import Task, TaskTime, balance, make_schedule, plan_rank
from labkit.parallel.prepare import FLOAT_TYPES
from labkit.parallel.transport import AUTO, find_transport, member_group

HEADER = 12  # numbers that announce an activation: dtype, dimensions, and sizes


def measure_layers(
    layers: Sequence[nn.Module],
    inputs: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    repeats: int = 3,
) -> list[float]:
    """Return the seconds of each layer's forward pass, best of `repeats`, the mean over ranks. A
    collective."""
    seconds = torch.zeros(len(layers), dtype=torch.float64, device=inputs.device)
    with torch.no_grad():
        for number, layer in enumerate(layers):
            times = []
            for _ in range(repeats):
                start = time.perf_counter()
                outputs = layer(inputs)
                if inputs.is_cuda:
                    torch.cuda.synchronize(inputs.device)
                times.append(time.perf_counter() - start)
            inputs = outputs
            seconds[number] = min(times)
    all_reduce(seconds, group)
    return seconds.tolist()


class Pipeline(nn.Module):
    """This rank's stages of a list of layers. `layers` has its layers, by their number in the list.

    Args:
        layers: modules that map one tensor to one float tensor, not in place; the same list on
        every rank. Rank 0's
            values are broadcast. The gradient of a parameter that several ranks share (a tied
            embedding) is summed.
        schedule: "gpipe", "1f1b" or "interleaved". micro_batches: equal parts of a batch, along its
        first dimension. group: the process group, whose rank r has stage r; None: all ranks.
        chunks: stages per rank; None: 2 if interleaved, else 1. costs: cost of each layer, in any
        unit (`measure_layers`), to balance stages by; None: its parameters. recompute: keep only
        the inputs of stages, and repeat their forward pass before backward. transport: as for
        `labkit.parallel.collectives.all_reduce`.

    After a step, `times` has when each task ran, and `peak_held` the most micro-batches held.
    Average over data-parallel ranks after it: `wrapper = BucketedDDP(pipeline, group=...)`, then
    `wrapper.average(absent=())`.

    Raises ValueError, on all ranks, for fewer layers than stages, for arguments that cannot work,
    and if layers or arguments differ between ranks.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        micro_batches: int,
        schedule: str = "1f1b",
        group: dist.ProcessGroup | None = None,
        chunks: int | None = None,
        costs: Sequence[float] | None = None,
        recompute: bool = False,
        transport: str = AUTO,
    ) -> None:
        super().__init__()
        self.group = members = member_group(group)
        self.rank = members.rank()
        self.ranks = members.size()
        self.micro_batches = micro_batches
        self.recompute = recompute
        self.chunks = chunks = (2 if schedule == "interleaved" else 1) if chunks is None else chunks
        costs = (
            [sum(p.numel() for p in layer.parameters()) for layer in layers]
            if costs is None
            else list(costs)
        )
        named = {
            f"{number}.{name}": parameter
            for number, layer in enumerate(layers)
            for name, parameter in layer.named_parameters()
        }

        def describe() -> dict[str, object]:
            self.schedule = make_schedule(schedule, self.ranks, micro_batches, chunks=chunks)
            if len(layers) < chunks * self.ranks or len(costs) != len(layers):
                raise ValueError(
                    f"expected {chunks * self.ranks} layers or more with a cost each, got"
                    f" {len(layers)}"
                )
            return {
                "schedule": schedule,
                "micro_batches": micro_batches,
                "chunks": chunks,
                "costs": costs,
                "recompute": recompute,
                "transport": transport,
                **{name: describe_parameter(parameter) for name, parameter in named.items()},
            }

        agree_once("pipeline", describe, members)
        self.device = next((p.device for p in named.values()), torch.device("cpu"))
        broadcast(
            dict.fromkeys(
                each for layer in layers for each in (*layer.parameters(), *layer.buffers())
            ),
            members,
        )
        self._transport = find_transport(members, self.device, transport)
        self.stages = balance(costs, chunks * self.ranks)
        own = self.stages[self.rank :: self.ranks]
        self.layers = nn.ModuleDict(
            {str(number): layers[number] for stage in own for number in stage}
        )
        self._tied = self._find_tied(layers)
        self._plan = plan_rank(self.schedule, self.rank)
        self._shapes: dict[tuple[str, int], tuple[torch.Size, torch.dtype]] = {}
        self._marks: list[tuple[Task, Any, Any]] = []
        self.peak_held = 0

    @property
    def times(self) -> list[TaskTime]:
        """When each task of the last step ran. On a GPU, from the first task's start; reading waits
        for the GPU."""
        if self.device.type != "cuda":
            return [TaskTime(*marks) for marks in self._marks]
        torch.cuda.synchronize(self.device)
        seconds = [
            [self._marks[0][1].elapsed_time(event) / 1000 for event in events]
            for _, *events in self._marks
        ]
        return [
            TaskTime(task, *ends) for (task, *_), ends in zip(self._marks, seconds, strict=True)
        ]

    def _find_tied(self, layers: Sequence[nn.Module]) -> list[tuple[nn.Parameter, list[int]]]:
        """Return the parameters that this rank and others have, with the ranks that do."""
        owners: dict[nn.Parameter, set[int]] = {}
        for stage, numbers in enumerate(self.stages):
            for parameter in (p for number in numbers for p in layers[number].parameters()):
                owners.setdefault(parameter, set()).add(stage % self.ranks)
        return [
            (p, sorted(ranks))
            for p, ranks in owners.items()
            if self.rank in ranks and len(ranks) > 1
        ]

    def step(
        self, inputs: Tensor, targets: Tensor, loss_function: Callable[[Any, Tensor], Tensor]
    ) -> Tensor:
        """Add the gradients of a batch to those of this rank's parameters; return its loss,
        float64, on every rank.

        inputs and targets (B, ...), alike on all ranks, B a multiple of the micro-batches; the loss
        is the mean of `loss_function(outputs, targets)` over micro-batches. If inputs require a
        gradient, rank 0 gets it.

        Raises ValueError, on all ranks, for another batch, and if shapes differ between ranks.
        """
        batch = {"inputs": describe_values(inputs), "targets": describe_values(targets)}
        batches = (
            f"{tuple(inputs.shape)} {inputs.dtype} {torch.is_autocast_enabled(self.device.type)}"
        )
        agree_per_pass("inputs and targets", lambda: batch, self.group)
        if (
            inputs.dim() < 1
            or len(inputs) % self.micro_batches
            or len(inputs) != len(targets)
            or not len(inputs)
        ):
            got = f"{tuple(inputs.shape)} inputs and {tuple(targets.shape)} targets"
            raise ValueError(
                f"expected a batch that {self.micro_batches} micro-batches divide, got {got}"
            )
        parts = list(
            zip(inputs.chunk(self.micro_batches), targets.chunk(self.micro_batches), strict=True)
        )
        before = [parameter.grad for parameter, _ in self._tied]
        for parameter, _ in self._tied:
            parameter.grad = None
        run = _Run(self, parts, loss_function, batches)
        for is_message, task in self._plan:
            if is_message:
                run.pass_on(task)
            else:
                run.compute(task)
        self._marks = run.marks
        self.peak_held = run.peak_held
        for (parameter, owners), earlier in zip(self._tied, before, strict=True):
            self._sum_tied(parameter, owners, earlier)
        all_reduce(run.loss, self.group, "sum", transport=self._transport)
        return run.loss[0]

    def run_stage(self, stage: int, x: Tensor) -> Tensor:
        """Run the layers of a stage that this rank has."""
        for number in self.stages[stage]:
            x = self.layers[str(number)](x)
        return x

    def _sum_tied(self, parameter: nn.Parameter, owners: list[int], earlier: Tensor | None) -> None:
        """Sum a gradient over the ranks that have the parameter, in the order of ranks, and add the
        earlier one."""
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
        place = owners.index(self.rank)
        number = len(owners)
        parts = [own if i == place else torch.empty_like(own) for i in range(number)]
        for distance in range(1, number):
            to = (place + distance) % number
            source = (place - distance) % number
            exchange(
                own,
                owners[to],
                parts[source],
                owners[source],
                self.group,
                transport=self._transport,
            )
        total = torch.stack(parts).sum(0)
        parameter.grad = total if earlier is None else earlier + total


class _Run:
    """One step: messages that arrived, messages to send, and activations held for backward."""

    def __init__(
        self,
        pipeline: Pipeline,
        parts: list[tuple[Tensor, Tensor]],
        loss_function: Any,
        batches: str,
    ) -> None:
        self._pipeline = pipeline
        self._parts = parts
        self._loss_function = loss_function
        self._batches = batches
        self._last = len(pipeline.stages) - 1
        self._arrived: dict[Task, Tensor] = {}
        self._outgoing: dict[Task, Tensor] = {}
        self._held: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.marks: list[tuple[Task, Any, Any]] = []
        self.peak_held = 0
        self.loss = torch.zeros(1, dtype=torch.float64, device=pipeline.device)

    def compute(self, task: Task) -> None:
        start = self._mark()
        (self._forward if task.kind == "F" else self._backward)(task)
        self.marks.append((task, start, self._mark()))
        self.peak_held = max(self.peak_held, len(self._held))

    def _mark(self) -> Any:
        """Return this moment, or on a GPU an event in its stream."""
        if self._pipeline.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _forward(self, task: Task) -> None:
        pipeline = self._pipeline
        inputs, targets = self._parts[task.micro_batch]
        x = self._arrived.pop(task).requires_grad_() if task.stage else inputs
        if pipeline.recompute:
            y = checkpoint(pipeline.run_stage, task.stage, x, use_reentrant=False)
        else:
            y = pipeline.run_stage(task.stage, x)
        if task.stage == self._last:
            y = self._loss_function(y, targets) / len(self._parts)
            self.loss += y.detach()
        elif isinstance(y, Tensor) and y.dtype in FLOAT_TYPES:
            self._outgoing[task] = y.detach()
        else:
            raise ValueError(
                f"expected stage {task.stage} to give a float tensor, got"
                f" {getattr(y, 'dtype', type(y))}"
            )
        self._held[task.stage, task.micro_batch] = x, y

    def _backward(self, task: Task) -> None:
        x, y = self._held.pop((task.stage, task.micro_batch))
        gradient = None if task.stage == self._last else self._arrived.pop(task)
        if y.requires_grad:
            y.backward(gradient)
        if task.stage:
            self._outgoing[task] = torch.zeros_like(x) if x.grad is None else x.grad

    def pass_on(self, task: Task) -> None:
        """Send or receive the message after a task: an activation or its gradient."""
        pipeline = self._pipeline
        there = task.destination
        source, target = (each.stage % pipeline.ranks for each in (task, there))
        if source == target:
            self._arrived[there] = self._outgoing.pop(task)
            return
        boundary = self._batches, min(task.stage, there.stage)
        sent = self._outgoing.pop(task) if pipeline.rank == source else None
        if boundary not in pipeline._shapes:
            pipeline._shapes[boundary] = self._announce(sent, source, target)
        shape, dtype = pipeline._shapes[boundary]
        if sent is None:
            received = self._arrived[there] = torch.empty(
                shape, dtype=dtype, device=pipeline.device
            )
        elif (sent.shape, sent.dtype) != (shape, dtype):
            shapes = f"{tuple(shape)}, got {tuple(sent.shape)}"
            raise ValueError(f"expected stages to give every micro-batch one shape, {shapes}")
        self._transfer(received if sent is None else sent, source, target)

    def _announce(
        self, sent: Tensor | None, source: int, target: int
    ) -> tuple[torch.Size, torch.dtype]:
        """Send shape and dtype of a boundary's activations ahead of the first one, or receive
        them."""
        pipeline = self._pipeline
        header = torch.zeros(HEADER, dtype=torch.int64, device=pipeline.device)
        if sent is not None:
            header[: 2 + sent.dim()] = torch.tensor(
                [FLOAT_TYPES.index(sent.dtype), sent.dim(), *sent.shape]
            )
        self._transfer(header, source, target)
        kind, dims, *sizes = header.tolist()
        return torch.Size(sizes[:dims]), FLOAT_TYPES[kind]

    def _transfer(self, tensor: Tensor, source: int, target: int) -> None:
        """Send a tensor, or receive it in place."""
        pipeline = self._pipeline
        sent, received = (tensor, None) if pipeline.rank == source else (None, tensor)
        exchange(sent, target, received, source, pipeline.group, transport=pipeline._transport)
