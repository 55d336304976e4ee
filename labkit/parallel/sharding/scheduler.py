"""When FSDP gathers a unit's parameters (by `gather.plan_gather`), releases them, and averages
gradients.

    a call     before: gather the unit, so that its hooks see whole parameters, and prefetch those that followed it in
               the last forward pass; after: release it
    backward   an output of the unit gets a gradient: release the units that all ranks have completed, gather this
               one again, prefetch, and average the released ones
    the end    ranks exchange which parameters have gradients, and average the rest

Collectives have one order on all ranks, which NCCL needs: a unit's average starts when backward
reaches another unit and every rank has said that it is complete. A call during a backward pass
(checkpointing) belongs to the pass: its unit stays whole until it has gradients. Second derivatives
(`create_graph`) and backward passes during a forward pass would keep all units whole, and are
refused.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from itertools import islice
from operator import and_
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.utils import _apply_to_tensors

from labkit.parallel.collectives import all_gather
from labkit.parallel.overlap import (
    END_OF_PASS,
    BackwardPass,
    CheckedChannel,
    Wait,
    tensors_in,
    weak_hook,
)
from labkit.parallel.prepare import disable_compile
from labkit.parallel.sharding.unit import Options, Token, Unit

MAX_WAITING = 62  # units whose state fits into an integer
OF_EVERY_MODULE = vars(nn.Module()).keys()  # attributes that hold no outputs


class UnitScheduler:
    """Gathers, releases and averages the units of a model, the last of which is the model
    itself."""

    def __init__(self, units: Sequence[Unit], options: Options, channel: CheckedChannel) -> None:
        self._units = list(units)
        self._options = options
        self._channel = channel
        self.lock = threading.RLock()  # autograd calls hooks in one thread per device
        self._pass = BackwardPass()
        self._calls_in_progress = 0
        self._order: list[Unit] = []
        """Units in the order in which the last forward pass called them."""
        self._active: list[Unit] = []
        """Units that this backward pass has reached, and that are whole."""
        self._reached: set[Token] = set()
        """Calls and inputs of units that it has reached."""
        self._ahead: list[Unit] = []
        """Units that this pass, forward or backward, has not reached yet, in the expected order."""
        self._waits: list[Wait] = []
        self._parameters = [parameter for unit in units for parameter in unit.parameters]
        self._by_whole = {
            parameter.whole: (unit, parameter) for unit in units for parameter in unit.parameters
        }
        # refers to no unit: torch hides it from the collector
        hook = weak_hook(self, UnitScheduler._note_gradient)
        for unit in units:
            run_around(unit.module, partial(self._run_unit, unit))  # each later call of the module
        for whole in self._by_whole:
            if whole.requires_grad:
                whole.register_post_accumulate_grad_hook(hook)

    # Forward

    def _run_unit(self, unit: Unit, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Gather the unit, call its module, release the unit."""
        self._before_call(unit)
        try:
            args, kwargs = cast((args, kwargs), self._options.compute_dtype)
            inputs = self._watch_inputs(unit, (args, kwargs))
            outputs = call(*args, **kwargs)
            self._watch_outputs(unit, outputs, inputs)
            return outputs
        finally:
            self._after_call(unit)

    @disable_compile
    def _before_call(self, unit: Unit) -> None:
        if not self._calls_in_progress and not self._pass.is_running:
            self._begin_forward()
        if not unit.is_attached:
            unit.sync_with_shards()
        if self._is_recomputing:
            unit.ready.clear()
            self._enter_backward(unit)
        else:
            unit.make_whole()
            self._order.append(unit)
            self._prefetch_after(unit)
        self._calls_in_progress += 1
        unit.calls_in_progress += 1
        unit.attach(whole=True)

    @disable_compile
    def _after_call(self, unit: Unit) -> None:
        unit.calls_in_progress -= 1
        self._calls_in_progress -= 1
        if not unit.calls_in_progress and unit not in self._active:
            unit.attach(whole=False)
            if self._options.reshard_after_forward or not torch.is_grad_enabled():
                is_inside = self._calls_in_progress or self._pass.is_running
                for each in [unit] if is_inside else self._units:  # and prefetched ones
                    each.release()

    def _begin_forward(self) -> None:
        self._abandon_unfinished()
        self._ahead = self._order
        self._order = []
        for unit in self._units:
            unit.release()

    def _prefetch_after(self, unit: Unit) -> None:
        """Start to gather the units that are expected after this one."""
        if unit in self._ahead:
            position = self._ahead.index(unit)
            del self._ahead[position]
            following = (each for each in self._ahead[position:] if each.parameters)
            for each in islice(following, self._options.prefetch):
                each.start_gather()

    @disable_compile
    def _watch_inputs(self, unit: Unit, inputs: Any) -> set[Any]:
        """Return the nodes that autograd reaches when the unit's inputs have gradients."""
        if not torch.is_grad_enabled():
            return set()
        nodes = {
            get_gradient_edge(each).node for each in _tensors(inputs, unit) if each.requires_grad
        }
        for node in nodes if unit.has_frozen and not self._is_recomputing else ():
            unit.inputs.add(token := Token())
            node.register_prehook(weak_hook(self, UnitScheduler._input_reached, token))
        return nodes

    @disable_compile
    def _watch_outputs(self, unit: Unit, outputs: Any, inputs: set[Any]) -> None:
        if torch.is_grad_enabled():
            hook = weak_hook(
                self, UnitScheduler._output_reached, unit, Token(), unit.gathered_versions
            )
            for node in {*_nodes(_tensors(outputs, unit))} - inputs:
                node.register_prehook(hook)

    # Backward

    @property
    def _is_recomputing(self) -> bool:
        return self._pass.is_running and torch.is_grad_enabled()

    def _begin_backward(self) -> None:
        """Note a sign of a backward pass; the first one begins it."""
        is_running = self._pass.is_running
        if torch.is_grad_enabled() or (self._calls_in_progress and not is_running):
            raise RuntimeError(
                "FSDP differentiates a forward pass once, after it: use BucketedDDP for penalties"
            )
        if not is_running:
            self._abandon_unfinished()
            self._ahead = list(dict.fromkeys(reversed(self._order)))
            self._pass.begin(self._end)

    def _output_reached(self, unit: Unit, call: Token, versions: object, gradients: Any) -> None:
        if versions != unit.current_versions():
            raise RuntimeError(
                f"parameters of {unit.name} changed between forward and backward: step after"
                " backward"
            )
        self._begin_backward()
        if call not in self._reached:
            self._reached.add(call)
            self._enter_backward(unit)

    def _input_reached(self, token: Token, gradients: Any) -> None:
        self._reached.add(token)

    def _enter_backward(self, unit: Unit) -> None:
        """Average and release the units that all ranks have completed, and make this one whole. A
        collective."""
        waiting = [each for each in self._active if not (each.ends_with_pass or each.is_averaged)][
            :MAX_WAITING
        ]
        over = self._find_over(unit, waiting) if waiting else []
        for each in over:
            self._active.remove(each)
            each.release()
        if unit not in self._active:
            self._active.append(unit)
            unit.make_whole()
            unit.attach(whole=True)  # for checkpoints of a part of it
            self._prefetch_after(unit)
        for each in over:
            self._start_average(each)

    def _find_over(self, unit: Unit, waiting: list[Unit]) -> list[Unit]:
        """Return the units that every rank has completed. A collective: all ranks are entering
        `unit`."""
        bits = sum(
            1 << number for number, each in enumerate(waiting) if each.is_over(self._reached)
        )
        on_all = reduce(and_, self._channel.exchange(unit.name, bits))
        return [each for number, each in enumerate(waiting) if on_all >> number & 1]

    def _start_average(self, unit: Unit) -> None:
        if unit.trained:
            # one at a time, else whole gradients of many units would be alive at once
            for wait in self._waits[-1:]:
                wait()
            with torch.no_grad():
                self._waits.append(unit.start_average())

    def _note_gradient(self, whole: nn.Parameter) -> None:
        """Note a complete gradient."""
        self._begin_backward()
        unit, parameter = self._by_whole[whole]
        if whole.grad is not None and whole.grad.layout is not torch.strided:
            raise ValueError(f"expected dense gradients, got a sparse one in {unit.name}")
        unit.ready.add(parameter)

    # The end of backward

    def _end(self) -> None:
        try:
            with torch.no_grad():
                self._finish()
        finally:
            self._reset()

    def _finish(self) -> None:
        """Average the rest, and assign all averages. A collective."""
        for unit in self._exchange_flags():
            self._start_average(unit)
        self._wait()
        for parameter in self._parameters:
            parameter.assign_means()

    def _exchange_flags(self) -> list[Unit]:
        """Note which parameters were used on any rank; return the units to be averaged."""
        flags = [
            parameter.is_used or parameter.whole.grad is not None for parameter in self._parameters
        ]
        flags += [unit.has_gradients for unit in self._units]
        self._channel.exchange(END_OF_PASS, 0)
        transport = self._channel.between_cpus
        by_rank = torch.zeros(transport.world_size, len(flags), dtype=torch.uint8)
        by_rank[transport.rank] = torch.tensor(flags)
        all_gather(by_rank, transport=transport)
        on_any = iter(by_rank.any(0).tolist())
        for parameter in self._parameters:
            parameter.is_used = next(on_any)
        return [unit for unit in self._units if next(on_any)]

    def _wait(self) -> None:
        waits = self._waits
        self._waits = []
        for wait in waits:
            wait()

    def _abandon_unfinished(self) -> None:
        """Forget a pass that an exception ended, once its collectives are over."""
        if self._pass.is_unfinished:
            self._wait()
            for parameter in self._parameters:
                parameter.whole.grad = None
            self._reset()

    def _reset(self) -> None:
        """Forget this pass, and release all units that no call needs."""
        for unit in self._units:
            unit.reset_pass()
            if not unit.calls_in_progress:
                unit.release()
        self._active = []
        self._reached.clear()
        self._pass.reset()


def run_around(module: nn.Module, run: Callable[..., Any]) -> None:
    """Let `run(call, *args, **kwargs)` run each call of the module, hooks included, compiled or
    not."""
    for name in ("_call_impl", "_compiled_call_impl"):
        if (call := getattr(module, name)) is not None:
            setattr(module, name, partial(run, call))


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Cast the floating-point tensors in a value, in containers, too; None: leave them."""
    if dtype is None:
        return value
    return _apply_to_tensors(
        lambda each: each.to(dtype) if each.is_floating_point() else each, value
    )


def _nodes(tensors: Iterator[Tensor]) -> Iterator[Any]:
    """Yield the nodes that autograd reaches first on its way to what made these tensors.

    A view that is changed in place later gets another node; its base keeps the node.
    """
    for tensor in tensors:
        for each in (tensor, tensor._base):
            if each is not None and each.grad_fn is not None:
                yield each.grad_fn


def _tensors(value: Any, unit: Unit) -> Iterator[Tensor]:
    """Yield the tensors in a unit's inputs or outputs, and those that its modules have as
    attributes."""
    yield from tensors_in(value)
    for attributes in map(vars, unit.modules):
        for name in attributes.keys() - OF_EVERY_MODULE:
            if isinstance(attributes[name], Tensor | list | tuple | dict) and not name.startswith(
                "_"
            ):
                yield from tensors_in(attributes[name])
