"""When FSDP communicates, as `FSDPState` of torch's FSDP2: the schedule of all units of a model.

One call of a model, forward and backward, step by step. Each step calls those of `Unit`:

    _root_pre_forward     a forward pass begins: ranks agree on the model
    _pre_forward          unshard the unit, and prefetch those that followed it in the last pass
    _post_forward         reshard it
    _root_post_forward    the forward pass ends: reshard what was prefetched, and not called
    abort_forward         in its place, after an exception
    _root_pre_backward    the first output has its gradient: a backward pass begins
    _pre_backward         an output of the unit has its gradient: unshard it again, prefetch
    _post_backward        its inputs have theirs: reshard it, reduce-scatter its gradients
    _root_post_backward_final_callback
                          the backward pass ends: ranks agree on gradients, _post_backward of units
                          whose inputs need no gradient, and shards get their gradients
    _reset_backward       forget the backward pass, also one that an exception has ended

n units of which none stays in memory take n all-gathers in forward, n in backward, and n
reduce-scatters. Ranks agree twice per step: when a forward pass begins, and when a backward pass
ends. A forward pass in which no module in training made a graph ends with an agreement, too.

All ranks must run the same units in the same order. Messages through shared memory say which unit
they belong to. Others do not: parameters of equal size would be mixed up in silence. So each
agreement compares what the ranks have communicated since the last one.

A forward pass during a backward pass recomputes for activation checkpointing: its units stay
unsharded until their post_backward. Second derivatives (`create_graph`) and backward passes during
a forward pass would keep all units in memory, and are refused.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from labkit.parallel.backward_pass import BackwardPass
from labkit.parallel.overlap import Channel
from labkit.parallel.prepare import disable_compile
from labkit.parallel.sharding.hooks import Hook, cast, find_gradient_nodes, register_post_backward
from labkit.parallel.sharding.pass_agreement import PassAgreement
from labkit.parallel.sharding.penalty import OUTSIDE, ShardInLoss
from labkit.parallel.sharding.sharded import Sharded
from labkit.parallel.sharding.unit import Options, Unit

T = TypeVar("T")


class FSDPState:
    """The schedule of units, the last of which is the model itself."""

    def __init__(
        self,
        units: Sequence[Unit],
        options: Options,
        channel: Channel,
        group: dist.ProcessGroup | None,
        ignored: Sequence[nn.Parameter],
        collectives: list[str],
    ) -> None:
        """`collectives`: the list to which units add those that they start."""
        self._units = list(units)
        self._options = options
        self._agreement = PassAgreement(channel, group, collectives, units, ignored)
        # The unit whose call began the forward pass that is going on.
        self._root: Unit | None = None
        # Units in the order in which the last forward pass called them.
        self._order: list[Unit] = []
        # Units that this pass, forward or backward, has yet to reach, if it is as the last one.
        self._expected: list[Unit] = []
        # A backward pass may follow the forward pass that is going on.
        self._has_backward = False
        self._backward = BackwardPass(group)
        # The unit whose reduce-scatter may be in flight.
        self._last_reduced: Unit | None = None
        for unit in units:
            # Before the user's hooks, which may read the unit's parameters.
            unit.module.register_forward_pre_hook(
                partial(self._pre_forward, unit), prepend=True, with_kwargs=True
            )
            unit.module.register_forward_hook(partial(self._post_forward, unit), with_kwargs=True)
            unit.module.register_forward_hook(
                partial(self._abort_if_root, unit), with_kwargs=True, always_call=True
            )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a module of FSDP is tied to its ranks: save its state_dict()")

    def set_shard_class(self, shard_class: type[Sharded]) -> None:
        """Begin or end that losses may be computed from shards: `ShardInLoss` or `Sharded`."""
        for unit in self._units:
            for parameter in unit.parameters:
                # Others stay, so that those which torch has swapped are found.
                if type(parameter.sharded) in (Sharded, ShardInLoss):
                    parameter.sharded.__class__ = shard_class

    # Forward

    @disable_compile
    def _pre_forward(self, unit: Unit, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        is_inside = self._units[-1].is_unsharded or self._backward.is_running
        if unit.shares_with_model and not is_inside:
            raise RuntimeError(OUTSIDE)
        # After an interrupted pass its root is still there, and begins again.
        if not self._backward.is_running and (self._root is None or self._root is unit):
            self._root_pre_forward(unit)
        self._unshard_and_prefetch(unit)
        # A recomputation runs units in another order, which no pass will follow.
        if not self._backward.is_running:
            self._order.append(unit)
        if self._options.compute_dtype is not None:
            args, kwargs = cast((args, kwargs), self._options.compute_dtype)
        if torch.is_grad_enabled():
            args, kwargs = register_post_backward(Hook(self._post_backward, unit), args, kwargs)
            unit.nodes_before = find_gradient_nodes(unit.modules, (args, kwargs))
        return args, kwargs

    def _root_pre_forward(self, unit: Unit) -> None:
        """Begin a forward pass with the unit that is called first. A collective."""
        self.set_shard_class(Sharded)
        if self._backward.is_unfinished:
            self._reset_backward()
        self._root = unit
        self._has_backward = False
        self._expected = self._order
        self._order = []
        for each in self._units:
            each.reshard(keep_memory=not self._options.reshard_after_backward)
        # A unit whose shards changed on one rank is gathered by all: it is one collective.
        is_stale = self._agree(self._agreement.before_forward)
        for each, is_stale_anywhere in zip(self._units, is_stale, strict=True):
            if is_stale_anywhere:
                each.gather_again()
            each.set_requires_grad_if_needed()

    @disable_compile
    def _post_forward(self, unit: Unit, _: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        unit.check_unsharded()
        if isinstance(outputs, Iterator):
            # Its code may run later, and its tensors cannot be looked at without using it up.
            raise ValueError(f"{unit.name} returned an iterator: return outputs in a container")
        if torch.is_grad_enabled():
            has_graph = self._register_pre_backward_hook(unit, outputs)
            # A module in evaluation may have a graph that nobody will use.
            self._has_backward |= has_graph and unit.module.training
        if self._backward.is_running:
            return  # its post_backward reshards what is recomputed
        keep_memory = torch.is_grad_enabled() and not self._options.reshard_after_forward
        keep_memory |= not self._options.reshard_after_backward
        unit.reshard(keep_memory=keep_memory)
        if unit is self._root:
            self._root_post_forward(keep_memory)

    def _register_pre_backward_hook(self, unit: Unit, outputs: Any) -> bool:
        """Hook the graph of a unit's outputs; return whether there is one."""
        hook = Hook(self._pre_backward, unit, unit.shard_versions())
        # An input that the unit returns as it is needs none of its parameters.
        nodes = find_gradient_nodes(unit.modules, outputs) - unit.nodes_before
        unit.nodes_before = set()
        for node in nodes:
            node.register_prehook(hook)
        return bool(nodes)

    def _root_post_forward(self, keep_memory: bool) -> None:
        """End a forward pass. A collective if no module in training has made a graph."""
        self._root = None
        for unit in self._units:
            unit.reshard(keep_memory=keep_memory)
        if self._has_backward or not self._units[-1].module.training:
            self.set_shard_class(ShardInLoss)
        if not self._has_backward:
            # Outputs of the wrong unit would be used before the ranks agree again.
            self._agree(self._agreement.after_evaluation)

    @disable_compile
    def _abort_if_root(self, unit: Unit, *_: object) -> None:
        """Hook after every call: an exception in a unit that was called directly ends the pass."""
        if unit is self._root:
            self.abort_forward()

    def call_as_forward(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the model as if it were its forward."""
        model = self._units[-1]
        if model.is_unsharded:  # its forward, or a recomputation, calls it
            return method(*args, **kwargs)
        args, kwargs = self._pre_forward(model, model.module, args, kwargs)
        try:
            outputs = method(*args, **kwargs)
            self._post_forward(model, model.module, args, kwargs, outputs)
        finally:
            self._abort_if_root(model)
        return outputs

    def abort_forward(self) -> None:
        """End a forward pass that an exception has ended, if there is one. No collective."""
        if self._root is None:
            return
        self._root = None
        if not self._backward.is_running:
            for unit in self._units:
                unit.reshard(keep_memory=not self._options.reshard_after_backward)

    # Forward and backward

    def _unshard_and_prefetch(self, unit: Unit) -> None:
        following = self._pop_expected(unit)
        unit.unshard()
        # Started before the wait: their messages travel while this unit computes.
        for each in following[: self._options.prefetch]:
            each.unshard()
        unit.wait_for_unshard()

    def _pop_expected(self, unit: Unit) -> list[Unit]:
        """Remove a unit that the pass has reached; return those that are expected after it."""
        if unit not in self._expected:
            return []
        position = self._expected.index(unit)
        del self._expected[position]
        return self._expected[position:]

    # Backward

    def _pre_backward(self, unit: Unit, versions: object, _: object) -> None:
        if torch.is_grad_enabled() or (self._root is not None and not self._backward.is_running):
            raise RuntimeError(
                "FSDP differentiates a forward pass once, after it: use BucketedDDP for penalties"
            )
        if versions != unit.shard_versions():
            raise RuntimeError(
                f"parameters of {unit.name} changed between forward and backward: step after"
                " backward"
            )
        if not self._backward.is_running:
            self._root_pre_backward()
        self._unshard_and_prefetch(unit)

    def _root_pre_backward(self) -> None:
        """Begin a backward pass, at the first output that has its gradient."""
        if self._backward.is_unfinished:
            self._reset_backward()
        self.set_shard_class(Sharded)
        self._expected = self._order[::-1]
        for unit in self._units:
            # A user may have frozen or thawed parameters since the forward pass of this backward.
            unit.set_requires_grad_if_needed()
        self._backward.begin(self._root_post_backward_final_callback)

    def _post_backward(self, unit: Unit) -> None:
        # One reduce-scatter at a time: the unsharded gradients of several units would fill memory.
        if self._last_reduced is not None:
            self._last_reduced.wait_for_reduce_scatter()
        self._last_reduced = unit
        unit.post_backward()

    def _root_post_backward_final_callback(self) -> None:
        """End a backward pass: reduce the rest, give shards their gradients. A collective."""
        try:
            # Autograd calls back in the grad mode of `backward`'s caller.
            with torch.no_grad():
                unreduced, used = self._agree(self._agreement.after_backward)
                # The order in which backward reaches them, the same on all ranks.
                for unit in reversed(unreduced):
                    self._post_backward(unit)
                for unit, used_in_unit in zip(self._units, used, strict=True):
                    unit.finalize_backward(used_in_unit)
        except BaseException:
            # What resetting raises follows from the error that ended the pass.
            with suppress(Exception):
                self._reset_backward()
            raise
        self._reset_backward()

    def _reset_backward(self) -> None:
        """Forget a backward pass, and reshard all units; then raise the first error of them."""
        self._last_reduced = None
        self._backward.reset()
        errors = list[Exception]()
        for unit in self._units:
            try:
                unit.reset_backward()
            except Exception as error:
                # The other units' messages, too, must end before their memory is used again.
                errors.append(error)
        if errors:
            raise errors[0]

    def _agree(self, on: Callable[[], T]) -> T:
        """Call one of the agreements. A collective."""
        try:
            return on()
        except RuntimeError:
            # Ranks that ran different units would prefetch different ones in the next pass.
            self._order = []
            self._expected = []
            raise
