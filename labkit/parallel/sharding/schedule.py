"""When units are gathered, given back and averaged: what happens around forward passes and in backward passes.

    forward    before a unit: gather it, and begin to gather those that came next in the pass before; after it: give
               it back
    backward   when its output gets a gradient: gather it again, and begin to gather those that went before it;
               when all its parameters have gradients: begin to average these; when its inputs have, too: give it back
    the end    what the ranks tell one another about parameters without gradients; the rest is averaged

Ranks have to begin collectives in one order. Gathers have a channel of their own, and follow the units' passes, which
must come in the same order on all ranks: at the end of a backward pass they compare notes. Gradients have another,
and are averaged in the order in which backward comes to the units, each waiting for those before it; so ranks may
differ in which parameters of a unit are used.

A forward pass inside of a backward pass (checkpointing) is part of it: what it gathers stays until it has gradients.
"""

import functools
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_map

from labkit.parallel.background_comm import Channel
from labkit.parallel.backward_pass import BackwardPass, tensors_in
from labkit.parallel.disable_compile import disable_compile
from labkit.parallel.sharding.gradients import Gradients, next_trace
from labkit.parallel.sharding.unit import Unit


class Schedule:
    """Runs the units of a model; gradients are averaged once `finish` has returned."""

    def __init__(
        self,
        units: Sequence[Unit],
        gathers: Channel,
        reductions: Channel,
        *,
        compute_dtype: torch.dtype | None,
        reshard_after_forward: bool,
        prefetch: int,
        finish_in_backward: bool,
    ):
        self.units, self.gathers = list(units), gathers
        self._gradients = Gradients(units, gathers, reductions)
        self.compute_dtype, self.reshard_after_forward, self.prefetch = compute_dtype, reshard_after_forward, prefetch
        self.finish_in_backward = finish_in_backward
        self.synchronize = True
        self._synchronize_this_pass = True
        self._lock = threading.RLock()  # autograd calls hooks in one thread per device
        self._pass = BackwardPass()
        self._entered: list[Unit] = []
        self._order: list[Unit] = []
        self._order_before: list[Unit] = []
        self._trace = 0
        self._is_differentiable = self._keeps = False
        for unit in self.units:
            self._wrap(unit)
            for at, number in unit.trained():
                hook = partial(_gradient_hook, weakref.ref(self), unit.number, at, number)
                unit.flats[at].full[number].register_post_accumulate_grad_hook(hook)

    def _wrap(self, unit: Unit) -> None:
        original = unit.module.forward

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self._before_forward(unit, args, kwargs)
            outputs = None
            try:
                outputs = original(*args, **kwargs)
            finally:
                self._after_forward(unit, outputs)
            return outputs

        unit.module.forward = forward

    # Forward

    @disable_compile
    def begin_forward(self) -> None:
        """Before a forward pass of the model."""
        if self._pass.is_running:
            return
        if torch.is_grad_enabled():
            self._leave_unfinished_pass()
            self._synchronize_this_pass = self.synchronize
        self._order_before, self._order = self._order, []
        for unit in self.units:  # the optimizer may have changed the shards since
            unit.release()
            unit.waits_for.clear()

    @disable_compile
    def end_forward(self) -> None:
        """After it, or after an exception in it."""
        if not self._pass.is_running and (self.reshard_after_forward or not torch.is_grad_enabled()):
            for unit in self.units:
                unit.release()

    @disable_compile
    def _before_forward(self, unit: Unit, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if self.compute_dtype is not None:
            args, kwargs = tree_map(self._cast, (args, kwargs))
        if self._is_recomputing():
            self._enter(unit)
            return args, kwargs
        self._gather(unit)
        at = len(self._order)
        self._order.append(unit)
        if self._order_before[at : at + 1] == [unit]:
            self._start_gathering(self._order_before[at + 1 :])
        if torch.is_grad_enabled():
            for tensor in tensors_in((args, kwargs)):
                if tensor.requires_grad:
                    node = get_gradient_edge(tensor).node
                    number = node._sequence_nr()
                    unit.waits_for.add(number)
                    node.register_prehook(partial(_input_hook, weakref.ref(self), number))
        return args, kwargs

    @disable_compile
    def _after_forward(self, unit: Unit, outputs: Any) -> None:
        if unit.in_backward:
            return
        if torch.is_grad_enabled():
            for node in {tensor.grad_fn for tensor in tensors_in(outputs) if tensor.grad_fn is not None}:
                node.register_prehook(partial(_output_hook, weakref.ref(self), unit.number, node._sequence_nr()))
        if self.reshard_after_forward or not torch.is_grad_enabled():
            unit.release()

    def _cast(self, value: Any) -> Any:
        return value.to(self.compute_dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    def _is_recomputing(self) -> bool:
        return self._pass.is_running and torch.is_grad_enabled()

    def _gather(self, unit: Unit) -> None:
        self._start(unit)
        unit.finish_gathering()

    def _start(self, unit: Unit) -> None:
        if not unit.is_whole:
            unit.start_gathering(self.gathers)
            self._trace = next_trace(self._trace, unit.number)

    def _start_gathering(self, following: Sequence[Unit]) -> None:
        """Begin with the next units that take a collective."""
        for unit in [unit for unit in following if unit.is_sharded][: self.prefetch]:
            self._start(unit)

    # Backward

    def output_reached(self, unit: Unit, node: int) -> None:
        """A unit's output has its gradient: so have the inputs of those that took it."""
        with self._lock:
            if torch.is_grad_enabled():  # this pass is differentiated, too, by one that reads the parameters again
                self._is_differentiable = self._keeps = True
            self._begin_pass()
            self.input_reached(node)
            self._enter(unit)

    def input_reached(self, node: int) -> None:
        """The inputs that this node of autograd made have their gradients."""
        with self._lock:
            for unit in self._entered:
                if node in unit.waits_for:
                    unit.waits_for.discard(node)
                    self._release_if_over(unit)

    def gradient_ready(self, unit: Unit, at: int, number: int) -> None:
        """A whole parameter, of the flat at `at`, has its gradient on this rank."""
        flat = unit.flats[at]
        gradient = flat.full[number].grad
        if gradient is not None and gradient.is_sparse:
            raise ValueError(f"expected dense gradients, got a sparse one for {flat.slots[number].names[0]}")
        with self._lock, torch.no_grad():
            self._begin_pass()
            self._note(unit)
            unit.heard.add((at, number))
            if self._synchronize_this_pass:
                self._gradients.reduce_complete(self._entered)
            else:
                flat.keep(number)
            self._release_if_over(unit)

    def _begin_pass(self) -> None:
        if not self._pass.is_running:
            self._leave_unfinished_pass()
            self._pass.begin(self._end_pass)

    def _enter(self, unit: Unit) -> None:
        is_new = not unit.in_backward
        self._note(unit)
        self._gather(unit)
        if is_new:
            order = list(dict.fromkeys(reversed(self._order)))
            at = order.index(unit) if unit in order else len(order)
            self._start_gathering([other for other in order[at + 1 :] if not other.in_backward])

    def _note(self, unit: Unit) -> None:
        if not unit.in_backward:
            unit.in_backward = True
            self._entered.append(unit)
            self._trace = next_trace(self._trace, unit.number)

    def _release_if_over(self, unit: Unit) -> None:
        if unit.is_over and not self._keeps:
            unit.release()

    def _end_pass(self) -> None:
        if self.finish_in_backward or not self._synchronize_this_pass:
            self.finish()
        else:
            self._release_all()

    def _release_all(self) -> None:
        for unit in self.units:
            if self._is_differentiable:
                unit.detach()
            else:
                unit.release()
        self._keeps, self._is_differentiable = self._is_differentiable, False

    @torch.no_grad()
    def finish(self) -> None:
        """Average what is not averaged yet of the last backward pass. A collective, if there is such a pass."""
        if not self._entered:
            return
        try:
            if self._synchronize_this_pass:
                trace, self._trace = self._trace, 0
                self._gradients.finish(self._entered, trace)
        finally:
            self._release_all()
            self._leave_pass()

    def _leave_unfinished_pass(self) -> None:
        """Before a new pass: one that an exception ended is forgotten, once its collectives are over.

        RuntimeError if it is unfinished because nobody finished it.
        """
        if not self._entered:
            return
        if not self.finish_in_backward:
            raise RuntimeError("call finish_gradient_synchronization() after each backward pass")
        self._gradients.forget()
        for unit in self.units:
            unit.release()
        self._trace = 0
        self._leave_pass()

    def _leave_pass(self) -> None:
        for unit in self._entered:
            unit.leave_backward()
        self._entered = []
        self._pass.forget()


def _gradient_hook(schedule: "weakref.ref[Schedule]", unit: int, at: int, number: int, parameter: Tensor) -> None:
    """The hook on a whole parameter; `Schedule.gradient_ready`, if there still is one."""
    if (alive := schedule()) is not None:
        alive.gradient_ready(alive.units[unit], at, number)


def _output_hook(schedule: "weakref.ref[Schedule]", unit: int, node: int, gradients: Any) -> None:
    if (alive := schedule()) is not None:
        alive.output_reached(alive.units[unit], node)


def _input_hook(schedule: "weakref.ref[Schedule]", node: int, gradients: Any) -> None:
    if (alive := schedule()) is not None:
        alive.input_reached(node)
