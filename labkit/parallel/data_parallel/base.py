"""The contract of all data-parallel wrappers, however they average gradients.

    model = BucketedDDP(model)            parameters and buffers become rank 0's
    loss = criterion(model(inputs), targets)
    loss.backward()                       on return, every gradient is the mean over ranks
    optimizer.step()

One pass, by the names of its steps:

    _pre_forward          check the model, broadcast buffers, decide whether backward synchronizes
    _post_forward         hook the outputs
    _prepare_for_backward a gradient has reached an output, or a parameter: the pass begins
    _mark_ready           a parameter's gradient is complete; wrappers that overlap send it
    _finalize_backward    autograd is done: average what is left

A backward through `wrapper.module(x)` stays local. A backward inside of another one (re-entrant
checkpointing) belongs to the outer one.

Averaged is `p.grad` as it stands, with what `no_sync` accumulated. Gradients that an earlier pass
averaged are equal on all ranks, so a second average leaves them as they are.

Unlike torch's DistributedDataParallel, each pass is checked by itself: a parameter without a
gradient is named before the optimizer runs, and a pass through a part of the model (one loss per
head) needs `find_unused=True`. With that, collectives start after backward: an inner pass may still
add to a gradient.
"""

import contextlib
import threading
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.parallel.agreement import agree_once
from labkit.parallel.backward_pass import BackwardPass
from labkit.parallel.data_parallel.consistency import (
    UnevenInputs,
    UnusedParameterError,
    broadcast,
    check_gradient,
    check_module,
    check_no_new_parameters,
    describe_model,
    sync_used_flags,
)
from labkit.parallel.failures import check_group, report_failure
from labkit.parallel.overlap import (
    TORCH,
    BackgroundAllReduce,
    GradientHooks,
    check_all_reduce,
    tensors_in,
    weak_hook,
)
from labkit.parallel.prepare import disable_compile
from labkit.parallel.transport import member_group
from labkit.torch_private import foreach_mul_


class DataParallel(nn.Module, UnevenInputs):
    """Base of the wrappers. Names in a `state_dict` begin with "module.", as torch's do.

    Args:
        module: the model, the same on all ranks except for its values. Parameters that are frozen
            now must stay frozen; others may be frozen for a while. A new wrapper of it replaces
            this one. Copy or save `wrapper.module`.
        device_ids: None, or the model's one device, as torch's wrapper takes it.
        group: the process group; None: all ranks. Also as `process_group`.
        find_unused: parameters may get no gradient in a pass, different ones on each rank. Costs
            one small collective per pass; without it such a pass raises UnusedParameterError. Also
            as `find_unused_parameters`.
        broadcast_buffers: before each forward pass in training mode, buffers become rank 0's.
        finish_in_backward: if False, call `finish_gradient_synchronization()` after each
            `backward()`, to measure how long a step waits for it.
        all_reduce: "torch" (torch.distributed), or labkit's all-reduce over a transport: "shared"
            (memory shared by the ranks of one host), "point_to_point", or "auto": shared if
            possible.

    Raises ValueError, on all ranks, if model or arguments differ between them or `check_module`
    refuses the model. Forward and backward raise RuntimeError or ValueError with the parameter's
    name rather than average wrongly. If a pass fails on some ranks only, all raise within two
    seconds, and so does every later pass.
    """

    _overlaps = False  # whether gradients are averaged during backward

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        find_unused: bool = False,
        broadcast_buffers: bool = True,
        finish_in_backward: bool = True,
        all_reduce: str = TORCH,
        process_group: dist.ProcessGroup | None = None,
        find_unused_parameters: bool = False,
    ):
        self.group = group = group or process_group
        self.world_size = member_group(group).size()
        nn.Module.__init__(self)
        UnevenInputs.__init__(self)
        self.module = module
        self.find_unused = find_unused or find_unused_parameters
        self.broadcast_buffers = broadcast_buffers
        self.finish_in_backward = finish_in_backward
        self.require_backward_grad_sync = True
        # Backward visits a model from its end: gradients become ready in about this order.
        trained = {
            name: p for name, p in reversed(list(module.named_parameters())) if p.requires_grad
        }
        self._names = list(trained)
        self._backward_order = list(trained.values())
        # Before anything is broadcast or hooked: a refused model stays as it was.
        agree_once("model", partial(self._describe, device_ids, all_reduce), group)
        devices = (p.device for p in self._backward_order)
        self._all_reduce = BackgroundAllReduce(all_reduce, group, devices)
        broadcast([*module.parameters(), *module.buffers()], group)
        self._broadcasts_next_forward = True
        self._is_armed = False
        self.lock = threading.Lock()  # autograd calls hooks in one thread per device
        self._pass = BackwardPass(group)
        self._ready = [False] * len(trained)
        self._hooks = GradientHooks(self, type(self)._mark_ready, self._backward_order)

    def _describe(
        self, device_ids: Sequence[int | torch.device] | None, all_reduce: str
    ) -> dict[str, object]:
        """Describe what must be the same on every rank. Raises ValueError if it is invalid."""
        check_module(self.module, device_ids)
        check_all_reduce(all_reduce, self._backward_order)
        return {
            "wrapper": type(self).__name__,
            "all_reduce": all_reduce,
            "find_unused": self.find_unused,
            "broadcast_buffers": self.broadcast_buffers,
            **describe_model(self.module),
        }

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a data-parallel wrapper is tied to its ranks: copy or save its `module`, and wrap that"
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module. As torch's, this call decides if the next backward pass synchronizes."""
        self.notify_joined_ranks()
        try:
            self._pre_forward()
            outputs = self.module(*args, **kwargs)
            self._post_forward(outputs)
        except Exception as error:
            if self.require_backward_grad_sync and torch.is_grad_enabled():
                report_failure(error, self.group)  # other ranks' backward passes wait
            raise
        return outputs

    @disable_compile
    def _pre_forward(self) -> None:
        trains = torch.is_grad_enabled() and self.require_backward_grad_sync
        if torch.is_grad_enabled() and not self._pass.is_running:  # not one of checkpointing
            self._hooks.check_newest()
            check_no_new_parameters(self.module, self._backward_order)
            self._abandon_unfinished_pass()
            self._is_armed = trains
            self._versions = [p._version for p in self._backward_order]
        broadcasts = self.broadcast_buffers and self._broadcasts_next_forward
        source = self.announce_forward(trains=trains, broadcasts=broadcasts)
        if broadcasts:
            broadcast(self.module.buffers(), self.group, source)
        # Only training changes buffers: evaluation after it needs one broadcast.
        self._broadcasts_next_forward = trains

    @disable_compile
    def _post_forward(self, outputs: Any) -> None:
        if not self._is_armed or self._pass.is_running:
            return
        for index, name in enumerate(self._names):
            if self._backward_order[index]._version != self._versions[index]:
                raise RuntimeError(
                    f"forward changed {name} in place (max_norm?), by this rank's data alone"
                )
        # A pass that reaches outputs, and no parameter, must name the parameters that it missed.
        for node in {tensor.grad_fn for tensor in tensors_in(outputs)}:
            if node is not None:
                node.register_prehook(weak_hook(self, DataParallel._output_reached))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients of forward passes in this block local; the next pass averages the sum."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Return once every gradient of the last pass is the mean over ranks. Idempotent."""
        parameters = self._backward_order
        missing = [index for index, is_ready in enumerate(self._ready) if not is_ready]
        # A change of dtype gives a parameter another node, without our hook: it is not missing.
        trained = [index for index in missing if parameters[index].requires_grad]
        late = set(self._hooks.rebind(trained))
        missing = [index for index in missing if index not in late]
        if len(missing) == len(parameters):  # torch.autograd.grad, for example, sets no gradient
            self._reset_pass()
            return
        frozen = [index for index in missing if not parameters[index].requires_grad]
        if len(missing) > len(frozen) and not self.find_unused:
            # Wait for nothing: other ranks may have started other collectives.
            names = [self._names[index] for index in reversed(missing)]
            raise UnusedParameterError(
                "the backward pass gave no gradient to"
                f" {', '.join(names[:5])}{', ...' if names[5:] else ''}: use it in every step,"
                " freeze it, or pass find_unused=True (for passes of parts of the model, too)"
            )
        self.average(absent=frozen)

    def average(self, absent: Sequence[int]) -> None:
        """Average the rest; parameters at `absent` count as zeros and keep their gradients."""
        parameters = self._backward_order
        before = {index: parameters[index].grad for index in absent}
        for index in absent:
            parameters[index].grad = None
        has_gradient = [parameter.grad is not None for parameter in parameters]
        is_sent = [is_ready and self._overlaps for is_ready in self._ready]
        self._finish([index for index in range(len(parameters)) if not is_sent[index]])
        if self._mean_factor != 1:
            foreach_mul_([p.grad for p in parameters if p.grad is not None], self._mean_factor)
        # After the gradients, because every rank starts the same collectives in the same order.
        if self.find_unused:
            is_used_anywhere = sync_used_flags(has_gradient, self.group)
            for parameter, is_used in zip(parameters, is_used_anywhere, strict=True):
                # As without a wrapper: an optimizer skips what no rank has used.
                if not is_used:
                    parameter.grad = None
        for index, gradient in before.items():
            mean = parameters[index].grad
            # A rank that has joined sees the others' gradients here, and keeps none.
            if mean is not None and mean.any() and not self._join_config.enable:
                raise RuntimeError(
                    f"{self._names[index]} is frozen on this rank and trained on another"
                )
            parameters[index].grad = gradient
        self._reset_pass()

    def _gradient_ready(self, index: int) -> None:
        """Average the complete `p.grad` of a parameter in backward, if this wrapper overlaps."""

    @abstractmethod
    def _finish(self, pending: list[int]) -> None:
        """Average the rest. `pending`: indices for which `_gradient_ready` was not called."""

    def _wait(self) -> None:
        """Wait for collectives in flight."""

    def _output_reached(self, gradients: tuple[Tensor, ...]) -> None:
        if not self._pass.is_running:
            self._prepare_for_backward()

    def _mark_ready(self, index: int, _: object, gradients: tuple[Tensor | None]) -> None:
        """Note that `p.grad` has the gradient that autograd passes here. Each parameter's hook."""
        if not self._pass.is_running:
            if not self._is_armed:
                return
            self._prepare_for_backward()
        name = self._names[index]
        if self._backward_order[index]._version != self._versions[index]:
            raise RuntimeError(
                f"{name} was updated in backward, before its gradient was averaged: update it later"
            )
        check_gradient(name, self._backward_order[index], gradients[0])
        if self._overlaps and self._ready[index]:
            raise RuntimeError(
                f"one backward pass gave {name} a gradient twice, the second after it was sent: if"
                " a parameter is used inside and outside of a re-entrant checkpoint, pass"
                " find_unused=True"
            )
        self._ready[index] = True
        if self._overlaps:
            self._gradient_ready(index)

    def _prepare_for_backward(self) -> None:
        """Begin a pass at the first sign of backward: autograd will call back at its end."""
        self._hooks.check_newest()
        self._abandon_unfinished_pass()
        # Users' hooks that clip or scale a gradient run before ours sends it.
        self._hooks.move_to_end()
        # Again: an optimizer may have stepped between this pass's forward and its backward.
        self._versions = [p._version for p in self._backward_order]
        self._pass.begin(self._finalize_backward)

    def _finalize_backward(self) -> None:
        self._is_armed = not any(self._ready)  # autograd.grad, as for a penalty, sets none
        if self.finish_in_backward:
            self.finish_gradient_synchronization()

    def _abandon_unfinished_pass(self) -> None:
        """Reset a pass that an exception ended, once its collectives are over."""
        # If one ended on this rank alone, the others would take this pass's messages for its.
        check_group(self.group)
        if any(self._ready):
            if not self.finish_in_backward:
                raise RuntimeError(
                    "call finish_gradient_synchronization() after each backward pass"
                )
            self._wait()
        self._reset_pass()

    def _reset_pass(self) -> None:
        self._pass.reset()
        self._ready = [False] * len(self._backward_order)
