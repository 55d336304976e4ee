"""When FSDP communicates, as `FSDPState` of torch's FSDP2: the schedule of all units of a model.

    pre_forward         unshard the unit, and prefetch those that followed it in the last pass
    post_forward        reshard it
    pre_backward        an output of the unit has its gradient: unshard it again, prefetch
    post_backward       its inputs have theirs: reshard it, reduce-scatter its gradients
    finalize_backward   the pass ends: reduce-scatter what is left, give shards their gradients

n units of which none stays in memory take n all-gathers in forward, n in backward, and n
reduce-scatters. Ranks agree twice per step: on the model when a forward pass begins, and on the
parameters that got gradients when a backward pass ends. A forward pass that no backward pass will
follow ends with an agreement, too.

All ranks must run the same units in the same order. Messages through shared memory say which unit
they belong to. Others do not: parameters of equal size would be mixed up in silence. So each
agreement compares what the ranks have communicated since the last one.

A forward pass during a backward pass recomputes for activation checkpointing: its units stay
unsharded until their post_backward. Second derivatives (`create_graph`) and backward passes during
a forward pass would keep all units in memory, and are refused.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labkit.parallel.overlap import BackwardPass, Channel
from labkit.parallel.prepare import disable_compile
from labkit.parallel.sharding.agreement import PassAgreement
from labkit.parallel.sharding.hooks import Hook, cast, find_gradient_nodes, register_post_backward
from labkit.parallel.sharding.penalty import ShardInLoss
from labkit.parallel.sharding.sharded import Sharded
from labkit.parallel.sharding.unit import Options, Unit, uncopyable


class FSDPState:
    """The schedule of units, the last of which is the model itself."""

    __deepcopy__ = __reduce_ex__ = uncopyable("a module of FSDP")

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
        n_flags = sum(1 + len(unit.parameters) for unit in units)
        self._agreement = PassAgreement(channel, group, collectives, n_flags)
        self._names = {
            parameter.sharded: parameter.name for unit in units for parameter in unit.parameters
        }
        self._ignored = set(ignored)
        # The unit whose call began the forward pass that is going on.
        self._root: Unit | None = None
        # Units in the order in which the last forward pass called them.
        self._order: list[Unit] = []
        # Units that this pass, forward or backward, has yet to reach, if it is as the last one.
        self._expected: list[Unit] = []
        # A backward pass may follow the forward pass that is going on.
        self._has_backward = False
        self._backward = BackwardPass()
        # The unit whose reduce-scatter may be in flight.
        self._last_reduced: Unit | None = None
        for unit in units:
            unit.module.register_forward_pre_hook(
                partial(self._pre_forward, unit), prepend=True, with_kwargs=True
            )
            unit.module.register_forward_hook(partial(self._post_forward, unit), with_kwargs=True)
            unit.module.register_forward_hook(
                partial(self._after_call, unit), with_kwargs=True, always_call=True
            )

    def set_shard_class(self, shard_class: type[Sharded]) -> None:
        """Begin or end that losses may be computed from shards: `ShardInLoss` or `Sharded`."""
        for shard in self._names:
            # Others stay, so that those which torch has swapped are found.
            if type(shard) in (Sharded, ShardInLoss):
                shard.__class__ = shard_class

    # Forward

    @disable_compile
    def _pre_forward(self, unit: Unit, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        # After an interrupted pass its root is still there, and begins again.
        if not self._backward.is_running and (self._root is None or self._root is unit):
            self._root_pre_forward(unit)
        unit.unshard()
        self._prefetch_unshard(unit)
        unit.wait_for_unshard()
        if not self._backward.is_running:
            self._order.append(unit)
        if self._options.compute_dtype is not None:
            args, kwargs = cast((args, kwargs), self._options.compute_dtype)
        if torch.is_grad_enabled():
            args, kwargs = register_post_backward(Hook(self._post_backward, unit), args, kwargs)
            unit.nodes_before = find_gradient_nodes(unit.modules, (args, kwargs))
        return args, kwargs

    def _root_pre_forward(self, unit: Unit) -> None:
        """Begin a forward pass: ranks agree on the model. A collective."""
        self.set_shard_class(Sharded)
        if self._backward.is_unfinished:
            self._reset_iteration()
        self._root = unit
        self._has_backward = False
        self._expected = self._order
        self._order = []
        for each in self._units:
            each.reshard(keep_memory=not self._options.reshard_after_backward)
        for each, is_stale in zip(self._units, self._agree_on_model(), strict=True):
            if is_stale:
                each.has_all_rows = False  # it keeps its memory, and is gathered again
            each.sync_requires_grad()

    @disable_compile
    def _post_forward(self, unit: Unit, _: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        unit.check_unsharded()
        if torch.is_grad_enabled():
            hook = Hook(self._pre_backward, unit, unit.shard_versions())
            nodes = find_gradient_nodes(unit.modules, outputs) - unit.nodes_before
            for node in nodes:
                node.register_prehook(hook)
            unit.nodes_before = set()
            self._has_backward |= bool(nodes) and unit.module.training
        if self._backward.is_running:
            return  # post_backward reshards it
        keep_memory = torch.is_grad_enabled() and not self._options.reshard_after_forward
        keep_memory |= not self._options.reshard_after_backward
        unit.reshard(keep_memory=keep_memory)
        if unit is self._root:
            self._root = None
            for each in self._units:  # also those that were prefetched, but not called
                each.reshard(keep_memory=keep_memory)
            if self._has_backward:
                self.set_shard_class(ShardInLoss)
            else:
                # Outputs of the wrong unit would be used before the ranks agree again.
                self._agree("end of evaluation", dict, [])

    @disable_compile
    def _after_call(self, unit: Unit, *_: object) -> None:
        """End a forward pass that an exception has ended in a unit that was called directly."""
        if unit is self._root:
            self.reset_forward()

    def reset_forward(self) -> None:
        """End a forward pass that an exception has ended, if there is one."""
        if self._root is None:
            return
        self._root = None
        if not self._backward.is_running:
            for unit in self._units:
                unit.reshard(keep_memory=not self._options.reshard_after_backward)

    def _prefetch_unshard(self, unit: Unit) -> None:
        """Start to unshard the units that are expected after one that a pass has reached."""
        if unit in self._expected:
            position = self._expected.index(unit)
            del self._expected[position]
            for each in self._expected[position : position + self._options.prefetch]:
                each.unshard()

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
            if self._backward.is_unfinished:
                self._reset_iteration()
            self.set_shard_class(Sharded)
            self._expected = self._order[::-1]
            for each in self._units:
                # Another forward pass may have run while they were frozen, or trained.
                each.sync_requires_grad()
            self._backward.begin(self._root_post_backward_final_callback)
        unit.unshard()
        self._prefetch_unshard(unit)
        unit.wait_for_unshard()

    def _post_backward(self, unit: Unit) -> None:
        # One reduce-scatter at a time: the unsharded gradients of several units would fill memory.
        if self._last_reduced is not None:
            self._last_reduced.wait_for_reduce_scatter()
        self._last_reduced = unit
        unit.post_backward()

    def _root_post_backward_final_callback(self) -> None:
        """End a backward pass. A collective."""
        try:
            with torch.no_grad():
                self._finalize_backward()
        except BaseException:
            # What resetting raises follows from the error that ended the pass.
            with suppress(Exception):
                self._reset_iteration()
            raise
        self._reset_iteration()

    def _finalize_backward(self) -> None:
        parameters = [parameter for unit in self._units for parameter in unit.parameters]
        has_gradient = [
            parameter.has_gradient or parameter.unsharded.grad is not None
            for parameter in parameters
        ]
        is_unreduced = [unit.has_unreduced_gradients for unit in self._units]
        on_any_rank = iter(
            self._agree("gradients", self._describe_gradients, [*is_unreduced, *has_gradient])
        )
        unreduced = [unit for unit in self._units if next(on_any_rank)]
        for unit in reversed(unreduced):
            self._post_backward(unit)
        for unit in self._units:
            unit.finalize_backward([next(on_any_rank) for _ in unit.parameters])

    def _describe_gradients(self) -> dict[str, object]:
        """Return which parameters this backward pass trains. ValueError for sparse gradients."""
        for unit in self._units:
            for name in unit.sparse_gradients:
                raise ValueError(f"expected dense gradients, got a sparse one of {name}")
        return self._describe_trained()

    def _reset_iteration(self) -> None:
        """Forget a backward pass, and reshard all units; then raise the first error of them."""
        self._last_reduced = None
        self._backward.reset()
        errors = list[Exception]()
        for unit in self._units:
            try:
                unit.wait_for_reduce_scatter()
            except Exception as error:
                errors.append(error)
            unit.reset_iteration()
            try:
                unit.reshard(keep_memory=not self._options.reshard_after_backward)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    # Agreement

    def _agree_on_model(self) -> list[bool]:
        """Return for each unit whether its parameters are to be gathered again. A collective.

        ValueError, on all ranks, if one has replaced, moved or added parameters, trains others, or
        has gradients that no backward pass has averaged.
        """

        def describe() -> dict[str, object]:
            self._check_parameters()
            for unit in self._units:
                if unit.has_unreduced_gradients:
                    raise ValueError(
                        f"gradients of {unit.name} were not averaged: FSDP found no output of it;"
                        " return outputs in containers or objects"
                    )
            return self._describe_trained()

        # A unit whose shards changed on one rank is gathered by all.
        is_stale = [unit.has_all_rows and unit.is_stale for unit in self._units]
        return self._agree("model", describe, is_stale)

    def _agree(
        self, phase: str, describe: Callable[[], dict[str, object]], flags: list[bool]
    ) -> list[bool]:
        """Compare the ranks' passes so far; return which flags any rank has set. A collective."""
        try:
            return self._agreement.agree(phase, describe, flags)
        except RuntimeError:
            # Ranks that ran different units would prefetch different ones in the next pass.
            self._order = []
            self._expected = []
            raise

    def _describe_trained(self) -> dict[str, object]:
        names = [name for parameter, name in self._names.items() if parameter.requires_grad]
        return {"trained parameters": names}

    def _check_parameters(self) -> None:
        """Raise ValueError unless the model has the parameters with which it was wrapped."""
        model = self._units[-1].module
        present = {
            parameter
            for module in model.modules()
            for parameter in module._parameters.values()
            if parameter is not None
        }
        for parameter, name in self._names.items():
            if parameter not in present:
                raise ValueError(f"{name} was replaced or removed: change the model, then wrap it")
            if type(parameter) is not Sharded:  # torch has swapped it for a result of to()
                raise ValueError(f"{name} was moved or cast: move and cast the model, then wrap it")
        if len(present) > len(self._names):
            for name, parameter in model.named_parameters():
                if parameter not in self._names and parameter not in self._ignored:
                    raise ValueError(
                        f"{name} was added to the model: change the model, then wrap it"
                    )
