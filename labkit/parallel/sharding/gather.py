"""ZeRO-3's gather: a unit's call gathers its parameters, rank by rank, and releases them; backward does so again.

    a call     before: gather the unit and prefetch those that followed it in the last forward pass, so that its hooks
               see whole parameters; after: release it
    backward   an output of the unit gets a gradient: gather it again, and prefetch; all of its parameters have
               gradients: start to average these, and release it
    the end    ranks exchange which parameters have gradients, and average the rest

A call during a backward pass (checkpointing) belongs to the pass: its unit stays whole until it has gradients. Second
derivatives (`create_graph`) and backward passes during a forward pass would keep all units whole, and are refused.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.utils import _apply_to_tensors

from labkit.parallel.background_comm import CheckedChannel
from labkit.parallel.backward_pass import tensors_in
from labkit.parallel.collectives import copy_steps
from labkit.parallel.disable_compile import disable_compile
from labkit.parallel.prepare import cut
from labkit.parallel.sharding.gradients import Bucket, GradientPass
from labkit.parallel.sharding.rows import (
    MESSAGES_IN_FLIGHT,
    row_strides,
    rows_by_rank,
    separate_small,
    unpack,
    with_strides,
)
from labkit.parallel.sharding.units import Token, Unit
from labkit.parallel.traffic import count_traffic
from labkit.parallel.transport import AUTO, find_transport
from labkit.parallel.transport.base import Step, Transport


class GatherPass(GradientPass):
    """Gathers, releases and averages the units of a model, the last of which is the model itself."""

    def __init__(
        self,
        units: Sequence[Unit],
        gathers: CheckedChannel,
        averages: CheckedChannel,
        *,
        compute_dtype: torch.dtype | None,
        reshard_after_forward: bool,
        prefetch: int,
        replicated: Sequence[nn.Parameter],
    ):
        super().__init__(units, gathers, averages, replicated=replicated, is_in_order=False)
        self._units, self._gathers = list(units), gathers
        self._compute_dtype, self._reshard, self._n_prefetched = compute_dtype, reshard_after_forward, prefetch
        self._depth = 0
        self._order: list[Unit] = []
        self._last_order: list[Unit] = []
        self._hooked: set[nn.Parameter] = set()
        for unit in units:
            run_around(unit.module, partial(self._run_unit, unit))

    # Forward

    def _run_unit(self, unit: Unit, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Gather the unit, call its module, release the unit."""
        self._before_call(unit)
        try:
            args, kwargs = cast((args, kwargs), self._compute_dtype)
            inputs = self._watch_inputs(unit, (args, kwargs))
            outputs = call(*args, **kwargs)
            self._watch_outputs(unit, outputs, inputs)
            return outputs
        finally:
            self._after_call(unit)

    @disable_compile
    def _before_call(self, unit: Unit) -> None:
        if not self._depth and not self.is_running:
            self._begin_forward()
        if not unit.is_attached:
            unit.sync_with_shards()
            self._hook_gradients(unit)
        if self._is_recomputing:
            unit.ready.clear()
            self._enter_backward(unit)
        else:
            self._gather(unit)
            position = len(self._order)
            self._order.append(unit)
            if self._last_order[position : position + 1] == [unit]:
                self._prefetch(self._last_order[position + 1 :])
        self._depth += 1
        unit.depth += 1
        unit.attach(whole=True)

    @disable_compile
    def _after_call(self, unit: Unit) -> None:
        unit.depth -= 1
        self._depth -= 1
        if not unit.depth and not unit.in_backward:
            unit.attach(whole=False)
            if self._reshard or not torch.is_grad_enabled():
                for each in [unit] if self._depth or self.is_running else self._units:  # and prefetched ones
                    each.release()

    def _gather(self, unit: Unit) -> None:
        """Make the unit's parameters whole. A collective."""
        self._start_gather(unit)
        unit.finish_gather()

    def _start_gather(self, unit: Unit) -> None:
        if not unit.is_whole:
            unit.allocate()
            if unit.whole:
                unit.wait = self._gathers.start_checked(unit.name, partial(self._exchange_rows, unit))

    def _exchange_rows(self, unit: Unit) -> None:
        unit.copy_own_rows()
        self._gathers.call(gather_rows, unit.places)

    def _prefetch(self, following: Sequence[Unit]) -> None:
        for unit in [unit for unit in following if unit.whole][: self._n_prefetched]:
            self._start_gather(unit)

    def _begin_forward(self) -> None:
        if torch.is_grad_enabled():
            self.abandon_unfinished()
        self._last_order, self._order = self._order, []
        for unit in self._units:
            unit.release()

    def _hook_gradients(self, unit: Unit) -> None:
        for p in unit.whole:
            if p.requires_grad and p not in self._hooked:
                self._hooked.add(p)
                p.register_post_accumulate_grad_hook(self.hook(self.note_gradient, unit))

    @disable_compile
    def _watch_inputs(self, unit: Unit, inputs: Any) -> set[Any]:
        """Return the nodes that autograd reaches when the unit's inputs have gradients."""
        if not torch.is_grad_enabled():
            return set()
        nodes = {get_gradient_edge(each).node for each in _tensors(inputs, unit) if each.requires_grad}
        for node in nodes if unit.has_frozen and not self._is_recomputing else ():
            unit.pending_inputs.add(token := Token())
            node.register_prehook(partial(self.hook(self._input_reached, unit), token))
        return nodes

    @disable_compile
    def _watch_outputs(self, unit: Unit, outputs: Any, inputs: set[Any]) -> None:
        if torch.is_grad_enabled():
            for node in {*_nodes(_tensors(outputs, unit))} - inputs:
                node.register_prehook(self.hook(self._output_reached, unit, unit.gathered_versions))

    # Backward

    @property
    def _is_recomputing(self) -> bool:
        return self.is_running and torch.is_grad_enabled()

    def begin(self, *_: object) -> None:
        """Note a sign of a backward pass; the first one begins it."""
        if torch.is_grad_enabled() or (self._depth and not self.is_running):
            raise RuntimeError("FSDP differentiates a forward pass once, after it: use ReduceScatterDDP for penalties")
        super().begin()

    def note_gradient(self, bucket: Bucket, parameter: nn.Parameter) -> None:
        """Note a complete gradient, start to average complete units, and release units that are over."""
        assert isinstance(bucket, Unit)
        self.begin()
        self._note_entry(bucket)
        super().note_gradient(bucket, parameter)
        self._release_if_over(bucket)

    def _output_reached(self, unit: Unit, versions: object, gradients: Any) -> None:
        if versions != unit.current_versions():
            raise RuntimeError(f"parameters of {unit.name} changed between forward and backward: step after backward")
        self.begin()
        self._enter_backward(unit)

    def _input_reached(self, unit: Unit, token: Token, gradients: Any) -> None:
        unit.pending_inputs.discard(token)
        unit.reached_inputs.add(token)
        self._release_if_over(unit)

    def _enter_backward(self, unit: Unit) -> None:
        is_new = not unit.in_backward
        self._note_entry(unit)
        self._gather(unit)
        unit.attach(whole=True)  # for checkpoints of a part of it
        if is_new:
            order = list(dict.fromkeys(reversed(self._order)))
            position = order.index(unit) if unit in order else len(order)
            self._prefetch([other for other in order[position + 1 :] if not other.in_backward])

    def _note_entry(self, unit: Unit) -> None:
        if not unit.in_backward:
            unit.in_backward = True
            self.queue_bucket(unit)

    def _release_if_over(self, unit: Unit) -> None:
        if unit.in_backward and not unit.depth and unit.is_over:
            unit.release()

    def reset(self) -> None:
        """Release all units that nothing needs, and forget this pass."""
        super().reset()
        for unit in self._units:
            if not unit.depth:
                unit.release()


@disable_compile
def gather_rows(
    tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None, *, transport: str | Transport = AUTO
) -> None:
    """Complete, in place, tensors on one device of which each rank has its rows. A collective.

    Rank r sends its rows of each tensor to every other rank, which receives them in their place: n (p-1)/p bytes sent
    per rank for n bytes of tensors. Only the rows of small tensors are copied.
    """
    tensors = [tensor for tensor in tensors if tensor.dim() and tensor.numel()]
    if not tensors:
        return
    via = find_transport(group, tensors[0].device, transport)
    p, depth = via.world_size, max(1, MESSAGES_IN_FLIGHT * (via.world_size - 1))
    dense = [with_strides(tensor, row_strides(tensor)).to(via.device) for tensor in tensors]
    blocks = [[rows.view(torch.uint8) for rows in rows_by_rank(each, p)] for each in dense]
    large, small = separate_small(blocks)
    packed = [torch.cat(rows) for rows in zip(*small, strict=True)]
    steps: list[Step] = []
    for by_rank in [*large, packed] if small else large:
        steps += chain.from_iterable(copy_steps(cut(by_rank, via, depth), via))
    count_traffic(via, "all_gather", "butterfly", tensors).run(steps, depth)
    for vector, rows in zip(packed, zip(*small, strict=True), strict=True):
        unpack(vector, rows)
    for tensor, each in zip(tensors, dense, strict=True):
        if each is not tensor:
            tensor.copy_(each)
    torch.autograd.graph.increment_version(tensors)  # messages are written past torch


def run_around(module: nn.Module, run: Callable[..., Any]) -> None:
    """Let `run(call, *args, **kwargs)` run each call of the module, hooks included, compiled or not."""
    for name in ("_call_impl", "_compiled_call_impl"):
        if (call := getattr(module, name)) is not None:
            setattr(module, name, partial(run, call))


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Cast the floating-point tensors in a value, in containers, too; None: leave them."""
    if dtype is None:
        return value
    return _apply_to_tensors(lambda each: each.to(dtype) if each.is_floating_point() else each, value)


def _nodes(tensors: Iterator[Tensor]) -> Iterator[Any]:
    """Yield the nodes that autograd reaches first on its way to what made these tensors.

    A view that is changed in place later gets another node; its base keeps the node.
    """
    for tensor in tensors:
        for each in (tensor, tensor._base):
            if each is not None and each.grad_fn is not None:
                yield each.grad_fn


def _tensors(value: Any, unit: Unit) -> Iterator[Tensor]:
    """Yield the tensors in a unit's inputs or outputs, and those that its modules have as attributes."""
    yield from tensors_in(value)
    for module in unit.modules:
        for name, attribute in vars(module).items():
            if not name.startswith("_") and isinstance(attribute, Tensor | list | tuple | dict):
                yield from tensors_in(attribute)
