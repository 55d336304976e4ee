"""Pipeline parallelism: each rank has some consecutive layers, and micro-batches pass through them.

    pipeline = Pipeline(layers, schedule="1f1b", micro_batches=8)     keeps this rank's layers
    loss = pipeline.step(inputs, targets, loss_function)              forward and backward
    torch.optim.AdamW(pipeline.parameters()).step()

`pipeline_schedule` has the schedules, what they idle and hold, and why no message waits forever.
`pipeline_pass` carries one out: every micro-batch's activations go to the next stage, and their
gradients to the stage before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler

from labkit.parallel.agreement import agree_once, describe_parameter
from labkit.parallel.data_parallel.consistency import broadcast
from labkit.parallel.gradients import find_overflow, fork_seed, mark_overflow
from labkit.parallel.layouts import Layout, add_layout, each_parameter
from labkit.parallel.pipeline_agreement import agree_on_batch, agree_on_inputs
from labkit.parallel.pipeline_layers import (
    check_cuts,
    check_state,
    find_tied,
    gather_shapes,
    gather_state,
    gradients_set_aside,
    mark_replicated,
    measure_layers,
    sum_tied,
)
from labkit.parallel.pipeline_messages import Messages, empty_like_header, make_header
from labkit.parallel.pipeline_pass import Loss, Pass, Plan
from labkit.parallel.pipeline_schedule import TaskTime, balance, make_schedule, plan_rank
from labkit.parallel.transport import AUTO, find_transport, member_group
from labkit.torch_private import foreach_mul_

__all__ = ["Pipeline", "measure_layers"]

PREFIX = "layers."  # of names in this rank's state


class Pipeline(nn.Module):
    """This rank's stages of a list of layers. `layers` has its layers, by their number in the list.

    Args:
        layers: modules that map one tensor to one float tensor, not in place; the same list on
            every rank. Rank 0's values are broadcast. The gradient of a parameter that several
            ranks share (a tied embedding) is summed.
        micro_batches: equal parts of a batch, along its first dimension.
        schedule: "gpipe", "1f1b" or "interleaved".
        group: the process group, whose rank r has stage r; None: all ranks.
        chunks: stages per rank; None: 2 if interleaved, else 1.
        costs: cost of each layer, in any unit (`measure_layers`), to balance stages by; None: its
            parameters.
        recompute: keep only the inputs of stages, and repeat their forward pass before backward.
        transport: as for `labkit.parallel.collectives.all_reduce`.

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
        self.group = member_group(group)
        self.rank = self.group.rank()
        self.ranks = self.group.size()
        self.micro_batches = micro_batches
        self.recompute = recompute
        if chunks is None:
            chunks = 2 if schedule == "interleaved" else 1
        self.chunks = chunks
        n_stages = self.chunks * self.ranks
        if costs is None:
            costs = [sum(p.numel() for p in layer.parameters()) for layer in layers]
        whole = nn.ModuleList(layers)

        def describe() -> dict[str, object]:
            self.schedule = make_schedule(schedule, self.ranks, micro_batches, chunks=self.chunks)
            if len(layers) < n_stages or len(costs) != len(layers):
                raise ValueError(
                    f"expected {n_stages} layers or more with a cost each, got {len(layers)}"
                )
            check_cuts(whole, self.group)
            return {
                "schedule": schedule,
                "micro_batches": micro_batches,
                "chunks": self.chunks,
                "costs": list(costs),
                "recompute": recompute,
                "transport": transport,
                **{name: describe_parameter(p) for name, p in whole.named_parameters()},
            }

        agree_once("pipeline", describe, self.group)
        broadcast([*whole.parameters(), *whole.buffers()], self.group)
        self.device = next((p.device for p in whole.parameters()), torch.device("cpu"))
        self._transport = find_transport(self.group, self.device, transport)
        self._messages = Messages(self.group, self._transport, self.device)
        self.stages = balance(costs, n_stages)
        local = self.stages[self.rank :: self.ranks]
        self.layers = nn.ModuleDict(
            {str(number): layers[number] for stage in local for number in stage}
        )
        # By name, because FSDP replaces parameters.
        self._tied = find_tied(layers, self.stages, self.ranks, PREFIX)
        for names in self._tied:
            if self.rank in names:
                # `clip_grad_norm_` counts the gradient once.
                layout = Layout(self.group, copies=len(names))
                add_layout(self.get_parameter(names[self.rank]), layout)
        self.tensor_groups = mark_replicated(whole, self)
        self._names = list(whole.state_dict())
        self._plan = plan_rank(self.schedule, self.rank)
        self._marks: list[tuple[Any, Any, Any]] = []
        self.peak_held = 0

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a pipeline is tied to its ranks: save gather_state_dict(), or make it again from"
            " copies of the layers"
        )

    @property
    def times(self) -> list[TaskTime]:
        """When each task of the last step ran; on a GPU, for which it waits, from the first on."""
        if self.device.type != "cuda":
            return [TaskTime(*marks) for marks in self._marks]
        torch.cuda.synchronize(self.device)
        origin = self._marks[0][1]
        return [
            TaskTime(task, origin.elapsed_time(start) / 1000, origin.elapsed_time(end) / 1000)
            for task, start, end in self._marks
        ]

    def step(
        self,
        inputs: Tensor,
        targets: Tensor,
        loss_function: Loss,
        data_group: dist.ProcessGroup | None = None,
        scaler: GradScaler | None = None,
    ) -> Tensor:
        """Add a batch's gradients to those of this rank's parameters; return its loss, float64.

        inputs and targets (B, ...), alike on all ranks, also those with other parts of cut layers,
        B a multiple of the micro-batches. If inputs are a leaf that requires a gradient, rank 0
        gets it.

        `loss_function(outputs, targets)` returns a mean, and the loss is the mean over
        micro-batches. Or it returns (sum, count) (`losses.summed_loss`), and the loss is the sum
        over all targets that count, divided by their number; zero without any. Masked targets need
        the second: a mean of means is another number, and warned of. `data_group`: the ranks with
        this stage of other batches. Sums and counts are then those of all batches, and the mean
        over that group (`wrapper.average`) is the gradient of the loss.

        `scaler`: scales the loss, and may then be used as in one process: an overflow on one rank
        makes all skip.

        Raises ValueError, on all ranks, for another batch, for a loss with parameters, if batches
        or scales differ between ranks, and if some ranks have frozen a tied weight, others not.
        An error of a layer or of the loss is raised on its rank, and ValueError with its text on
        the others; gradients are then as before.
        """
        if scaler is not None and not scaler.is_enabled():
            scaler = None
        typical_count = agree_on_batch(
            self, inputs, targets, loss_function, self._tied, data_group, scaler
        )
        # The gradients of this step are corrected by the number of targets, earlier ones are not.
        with gradients_set_aside(each_parameter(self)):
            with fork_seed(self.group):  # else all stages drop the same positions
                run = self._run(
                    self._plan,
                    inputs.chunk(self.micro_batches),
                    targets=targets.chunk(self.micro_batches),
                    loss_function=loss_function,
                    typical_count=typical_count,
                    scaler=scaler,
                )
            loss = self._finish_step(run, data_group, scaler)
        self._marks = run.marks
        self.peak_held = run.peak_held
        return loss

    def evaluate(self, inputs: Tensor) -> Tensor:
        """Return the whole model's outputs for a batch, (B, ...), on every rank. A collective.

        In evaluation mode and without gradients; afterwards every module's mode is as before.
        inputs (B, ...), alike on all ranks. Errors as `step`.
        """
        agree_on_inputs(self, inputs)
        parts = inputs.tensor_split(min(len(inputs), self.micro_batches))
        orders = [
            [task for task in order if task.kind == "F" and task.micro_batch < len(parts)]
            for order in self.schedule
        ]
        # One by one, since a user may have put some of them into evaluation mode, as a frozen
        # BatchNorm.
        modes = {module: module.training for module in self.modules()}
        self.eval()
        try:
            with torch.no_grad():
                run = self._run(plan_rank(orders, self.rank), parts)
        finally:
            for module, mode in modes.items():
                module.training = mode
        local = torch.cat(run.outputs) if run.outputs else None
        header = run.agree_on_end(make_header(local))[-1]  # the last rank has the last stage
        outputs = empty_like_header(header, self.device) if local is None else local
        assert isinstance(outputs, Tensor)
        broadcast([outputs], self.group, self.ranks - 1)
        return outputs

    @torch.no_grad()
    def gather_state_dict(self, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return the state of the whole list of layers, as `nn.Sequential`'s, on every rank.

        A collective: call it on all ranks. `state`: this rank's state, if something else holds it
        (FSDP's `consolidated_state_dict(to=None)`).
        """
        if state is None:
            state = self.state_dict()
        local = {name.removeprefix(PREFIX): value for name, value in state.items()}
        whole = gather_state(local, self.group, self.device)
        # in the order of the list; behind them, what was added to layers later
        listed = [name for name in self._names if name in whole]
        return {name: whole[name] for name in [*listed, *whole]}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load this rank's part of the whole list's state (`gather_state_dict`), or its own state.

        A collective. ValueError unless names and shapes are those that the layers have now.
        """
        if any(name.startswith(PREFIX) for name in state_dict):
            return super().load_state_dict(state_dict, strict, assign)
        if strict:
            check_state(state_dict, gather_shapes(self.state_dict(), self.group, PREFIX))
        local = {
            f"{PREFIX}{name}": value
            for name, value in state_dict.items()
            if name.partition(".")[0] in self.layers
        }
        return super().load_state_dict(local, strict, assign)

    def _run(self, plan: Plan, inputs: Sequence[Tensor], **options: Any) -> Pass:
        """Carry out a pass of micro-batches. `options`: as for `Pass`."""
        stages = {}
        for stage in range(self.rank, len(self.stages), self.ranks):
            numbers = self.stages[stage]
            stages[stage] = nn.Sequential(*[self.layers[str(number)] for number in numbers])
        run = Pass(
            stages,
            len(self.stages),
            self.group,
            self._messages,
            self.device,
            inputs,
            recompute=self.recompute,
            **options,
        )
        run.run(plan)
        return run

    @torch.no_grad()
    def _finish_step(
        self, run: Pass, data_group: dist.ProcessGroup | None, scaler: GradScaler | None
    ) -> Tensor:
        """Return the loss, once tied gradients are summed and divided by the number of targets."""
        has_gradient = [
            self.rank in names and self.get_parameter(names[self.rank]).grad is not None
            for names in self._tied
        ]
        loss, factor, is_used = run.agree_on_loss(has_gradient, data_group)
        for names, is_used_anywhere in zip(self._tied, is_used, strict=True):
            # Where no owner has a gradient, there is none: zeros would decay the parameter.
            if is_used_anywhere and self.rank in names:
                parameter = self.get_parameter(names[self.rank])
                sum_tied(parameter, list(names), self.group, self._transport)
        gradients = []
        if factor != 1 or scaler is not None:
            gradients = [p.grad for p in self.parameters() if p.grad is not None]
        if factor != 1 and gradients:
            foreach_mul_(gradients, factor)
        if scaler is not None:
            # Only now: sums of tied gradients and the factor may overflow, too.
            has_overflow = bool(find_overflow(self.parameters()))
            if any(flag for (flag,) in run.agree_on_end([has_overflow])):
                mark_overflow(gradients)
        return torch.tensor(loss, dtype=torch.float64, device=self.device)
