"""When units are gathered, given back and averaged: around calls of their modules, and in backward passes.

    a call     before it: gather the unit, and begin to gather those that came next in the pass before; its hooks see
               whole parameters; after it: give it back
    backward   when an output of the unit gets a gradient: gather it again, and begin to gather those before it; when
               all its parameters have gradients: begin to average these, and give the unit back
    the end    ranks exchange which parameters have gradients; the rest is averaged

A call inside of a backward pass (checkpointing) is part of it: what it gathers stays until it has gradients. A
backward pass inside of a forward pass (`torch.autograd.grad`) averages nothing; what a graph of it (`create_graph`)
needs stays until the next backward pass is over.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.utils import _apply_to_tensors

from labkit.parallel.backward_pass import tensors_in
from labkit.parallel.disable_compile import disable_compile
from labkit.parallel.sharding.gather import Token, Unit
from labkit.parallel.sharding.gradients import Bucket, GradientPass
from labkit.parallel.sharding.line import Line


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    """The same with floating-point tensors in another dtype, wherever they are in it; None: as they are."""
    if dtype is None:
        return value
    return _apply_to_tensors(lambda each: each.to(dtype) if each.is_floating_point() else each, value)


def keep_dtype(module: nn.Module, compute_dtype: torch.dtype) -> None:
    """Let a module compute in the dtype of its parameters and statistics, and return the compute dtype."""
    own = next((each.dtype for each in (*module.parameters(), *module.buffers()) if each.is_floating_point()), None)

    def run(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        args, kwargs = cast((args, kwargs), own)
        return cast(call(*args, **kwargs), compute_dtype)

    run_around(module, run)


def run_around(module: nn.Module, run: Callable[..., Any]) -> None:
    """Let `run(call, *args, **kwargs)` run a call of the module, hooks included, whether it is compiled or not."""
    for name in ("_call_impl", "_compiled_call_impl"):
        if (call := getattr(module, name)) is not None:
            setattr(module, name, partial(run, call))


class Schedule(GradientPass):
    """Runs the units of a model, the last of which is the model itself."""

    def __init__(
        self,
        units: Sequence[Unit],
        gathers: Line,
        reductions: Line,
        device: torch.device,
        *,
        compute_dtype: torch.dtype | None,
        reshard_after_forward: bool,
        prefetch: int,
        replicated: Sequence[nn.Parameter],
    ):
        super().__init__(units, gathers, reductions, device, replicated=replicated, is_in_order=False)
        self._units, self._gathers = list(units), gathers
        self._compute_dtype, self._reshard, self._prefetch = compute_dtype, reshard_after_forward, prefetch
        self._is_inner = False
        """The backward pass is inside of a forward pass."""
        self._depth = 0
        self._entered: list[Unit] = []
        self._order: list[Unit] = []
        self._order_before: list[Unit] = []
        self._hooked: set[nn.Parameter] = set()
        for unit in units:
            run_around(unit.module, partial(self._run, unit))

    # Forward

    def _run(self, unit: Unit, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The unit's module is called."""
        self._before(unit)
        try:
            args, kwargs = cast((args, kwargs), self._compute_dtype)
            inputs = self._watch_inputs(unit, (args, kwargs))
            outputs = call(*args, **kwargs)
            self._watch_outputs(unit, outputs, inputs)
            return outputs
        finally:
            self._after(unit)

    @disable_compile
    def _before(self, unit: Unit) -> None:
        if not self._depth and not self.is_running:
            self._begin_forward()
        if not unit.is_attached:
            self._follow(unit)
        if self._is_recomputing:
            unit.ready.clear()
            self._enter(unit)
        else:
            self._gather(unit)
            at = len(self._order)
            self._order.append(unit)
            if self._order_before[at : at + 1] == [unit]:
                self._gather_ahead(self._order_before[at + 1 :])
        self._depth += 1
        unit.depth += 1
        unit.attach(whole=True)

    @disable_compile
    def _after(self, unit: Unit) -> None:
        unit.depth -= 1
        self._depth -= 1
        if not unit.depth and not unit.in_backward:
            unit.attach(whole=False)
            is_kept = not self._reshard and torch.is_grad_enabled()
            for each in [unit] if self._depth or self.is_running else self._units:  # and what was gathered ahead
                if not is_kept and not each.is_held:
                    each.release()

    def _begin_forward(self) -> None:
        if torch.is_grad_enabled():
            self.leave_unfinished()
        self._order_before, self._order = self._order, []
        for unit in self._units:
            if unit.is_whole and (unit.is_stale or not unit.is_held):
                unit.release()

    def _follow(self, unit: Unit) -> None:
        unit.follow()
        for p in unit.whole:
            if p.requires_grad and p not in self._hooked:
                self._hooked.add(p)
                p.register_post_accumulate_grad_hook(self.hook(self.note_gradient, unit))

    @disable_compile
    def _watch_inputs(self, unit: Unit, inputs: Any) -> set[Any]:
        """Where autograd comes when the unit's inputs have gradients."""
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
                node.register_prehook(partial(self.hook(self._output_reached, unit), unit.gathered_versions))

    @property
    def _is_recomputing(self) -> bool:
        return self.is_running and not self._is_inner and torch.is_grad_enabled()

    def _gather(self, unit: Unit) -> None:
        unit.start_gathering(self._gathers)
        unit.finish_gathering()

    def _gather_ahead(self, following: Sequence[Unit]) -> None:
        for unit in [unit for unit in following if unit.whole][: self._prefetch]:
            unit.start_gathering(self._gathers)

    # Backward

    def begin(self, *_: object) -> None:
        """Note a sign of a backward pass. What an inner one reaches is not averaged."""
        if not self.is_running:
            super().begin()
            self._is_inner = self._depth > 0

    def note_gradient(self, bucket: Bucket, parameter: nn.Parameter) -> None:
        """Note a gradient, average what is complete, and give back what is over."""
        assert isinstance(bucket, Unit)
        self.begin()
        self._note(bucket)
        super().note_gradient(bucket, parameter)
        self._release_if_over(bucket)

    def _output_reached(self, unit: Unit, versions: object, gradients: Any) -> None:
        if versions != unit.current_versions():
            raise RuntimeError(f"parameters of {unit.place} changed between forward and backward: step after backward")
        self.begin()
        self._enter(unit)
        if torch.is_grad_enabled():  # a graph of this pass reads the parameters again
            for each in self._entered:
                each.is_held = True

    def _input_reached(self, unit: Unit, token: Token, gradients: Any) -> None:
        unit.pending_inputs.discard(token)
        unit.reached_inputs.add(token)
        self._release_if_over(unit)

    def _enter(self, unit: Unit) -> None:
        is_new = not unit.in_backward
        self._note(unit)
        self._gather(unit)
        unit.attach(whole=True)  # for checkpoints of a part of it
        if is_new:
            order = list(dict.fromkeys(reversed(self._order)))
            at = order.index(unit) if unit in order else len(order)
            self._gather_ahead([other for other in order[at + 1 :] if not other.in_backward])

    def _note(self, unit: Unit) -> None:
        if not unit.in_backward:
            unit.in_backward = True
            self._entered.append(unit)
            if not self._is_inner:
                self.queue_bucket(unit)

    def _release_if_over(self, unit: Unit) -> None:
        if unit.in_backward and not unit.depth and unit.is_over:
            unit.release()

    def finish(self) -> None:
        """Average the rest, but for a pass that is inside of a forward pass."""
        if not self._is_inner:
            used = [unit for unit in self._units if unit.used]
            super().finish()
            for unit in used:
                unit.is_held = False

    def leave(self) -> None:
        """Give all units back that nothing needs."""
        super().leave()
        for unit in self._units:
            if not unit.depth:
                unit.attach(whole=False)
                if not unit.is_held:
                    unit.release()
        self._entered, self._is_inner = [], False


def _nodes(tensors: Iterator[Tensor]) -> Iterator[Any]:
    """Where autograd comes first on its way to what made these tensors.

    A view that is changed in place later gets another node; what it is a view of keeps its.
    """
    for tensor in tensors:
        for each in (tensor, tensor._base):
            if each is not None and each.grad_fn is not None:
                yield each.grad_fn


def _tensors(value: Any, unit: Unit) -> Iterator[Tensor]:
    """The tensors in what goes into a unit or comes out of it, and those that its modules have as attributes."""
    yield from tensors_in(value)
    for module in unit.modules:
        for name, attribute in vars(module).items():
            if not name.startswith("_") and isinstance(attribute, Tensor | list | tuple | dict):
                yield from tensors_in(attribute)
