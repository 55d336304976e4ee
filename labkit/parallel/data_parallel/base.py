"""The contract of all data-parallel wrappers, however they average gradients.

    model = BucketedDDP(model)            parameters and buffers become rank 0's
    loss = criterion(model(inputs), targets)
    loss.backward()                       on return, every gradient is the mean over ranks
    optimizer.step()

The wrapper's forward arms a pass. The pass begins when a gradient reaches an output or a parameter,
and ends in a callback that autograd runs after backward. A backward through `wrapper.module(x)`
stays local. A backward inside of another one (re-entrant checkpointing) belongs to the outer one.

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
from labkit.parallel.data_parallel.consistency import (
    UnevenInputs,
    broadcast,
    check_module,
    describe_model,
)
from labkit.parallel.overlap import (
    TORCH,
    BackgroundAllReduce,
    BackwardPass,
    GradientHooks,
    tensors_in,
    weak_hook,
)
from labkit.parallel.prepare import FLOAT_TYPES, disable_compile
from labkit.parallel.transport import CHOICES, member_group
from labkit.torch_private import foreach_mul_


class UnusedParameterError(RuntimeError):
    """A backward pass gave some parameters no gradient."""


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
    name rather than average wrongly.
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
        self.group = group = process_group if group is None else group
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
        agree_once("model", partial(self._describe, device_ids, all_reduce), group)
        self._all_reduce = BackgroundAllReduce(
            all_reduce, group, (p.device for p in trained.values())
        )
        broadcast([*module.parameters(), *module.buffers()], group)
        self._broadcasts_next_forward = True
        self._is_armed = False
        self.lock = threading.Lock()  # autograd calls hooks in one thread per device
        self._pass = BackwardPass()
        self._ready = [False] * len(trained)
        self._hooks = GradientHooks(self, type(self)._mark_ready, self._backward_order)

    def _describe(
        self, device_ids: Sequence[int | torch.device] | None, all_reduce: str
    ) -> dict[str, object]:
        """Describe what must be the same on every rank. Raises ValueError if it is invalid."""
        check_module(self.module, device_ids)
        if all_reduce not in (names := (TORCH, *CHOICES)):
            raise ValueError(f"all_reduce must be one of {', '.join(names)}; got {all_reduce!r}")
        dtypes = {p.dtype for p in self._backward_order} - {*FLOAT_TYPES}
        if all_reduce != TORCH and dtypes:
            raise ValueError(
                f"labkit's all-reduce adds real numbers, got {', '.join(map(str, dtypes))}"
            )
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
        """Run the module. As with torch's wrapper, this call decides whether the next backward pass
        synchronizes."""
        self._before_forward()
        outputs = self.module(*args, **kwargs)
        self._after_forward(outputs)
        return outputs

    @disable_compile
    def _before_forward(self) -> None:
        trains = torch.is_grad_enabled() and self.require_backward_grad_sync
        # A forward pass during backward (checkpointing) belongs to the backward pass.
        if torch.is_grad_enabled() and not self._pass.is_running:
            self._check_parameters()
            self._abandon_unfinished_pass()
            self._is_armed = trains
            self._versions = self._list_versions()
        broadcasts = self.broadcast_buffers and self._broadcasts_next_forward
        source = self.announce_forward(trains=trains, broadcasts=broadcasts)
        if broadcasts:
            broadcast(self.module.buffers(), self.group, source)
        # only training changes buffers: evaluation after it needs one broadcast
        self._broadcasts_next_forward = trains

    @disable_compile
    def _after_forward(self, outputs: Any) -> None:
        if self._is_armed and not self._pass.is_running:
            for name, before, after in zip(
                self._names, self._versions, self._list_versions(), strict=True
            ):
                if before != after:
                    raise RuntimeError(
                        f"forward changed {name} in place (max_norm?), by this rank's data alone"
                    )
            for node in {
                tensor.grad_fn for tensor in tensors_in(outputs) if tensor.grad_fn is not None
            }:
                node.register_prehook(weak_hook(self, DataParallel._output_reached))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of forward passes in this block local. The next pass outside averages
        the sum."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Return once every gradient of the last backward pass is the mean over ranks.
        Idempotent."""
        parameters = self._backward_order
        missing = [index for index, is_ready in enumerate(self._ready) if not is_ready]
        late = set(
            self._hooks.rebind([index for index in missing if parameters[index].requires_grad])
        )
        missing = [index for index in missing if index not in late]
        if len(missing) == len(parameters):  # torch.autograd.grad, for example, sets no gradient
            self._reset_pass()
            return
        frozen = [index for index in missing if not parameters[index].requires_grad]
        if len(missing) > len(frozen) and not self.find_unused:
            # wait for nothing: other ranks may have started other collectives
            names = [self._names[index] for index in reversed(missing)]
            raise UnusedParameterError(
                "the backward pass gave no gradient to"
                f" {', '.join(names[:5])}{', ...' if names[5:] else ''}: use it in every step,"
                " freeze it, or pass find_unused=True (for passes of parts of the model, too)"
            )
        self.average(absent=frozen)

    def average(self, absent: Sequence[int]) -> None:
        """Average what is not averaged yet. Parameters at `absent` count as zeros and keep their
        gradients."""
        parameters = self._backward_order
        before = {index: parameters[index].grad for index in absent}
        for index in absent:
            parameters[index].grad = None
        has_gradient = [parameter.grad is not None for parameter in parameters]
        self._finish(
            [i for i, is_ready in enumerate(self._ready) if not (is_ready and self._overlaps)]
        )
        if self._mean_factor != 1:
            foreach_mul_([p.grad for p in parameters if p.grad is not None], self._mean_factor)
        # new or accumulated; last: every rank starts the same collectives in the same order
        if self.find_unused:
            flags = torch.tensor(has_gradient, dtype=torch.int32, device=self.join_device)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
            for parameter, is_used in zip(parameters, flags.tolist(), strict=True):
                parameter.grad = parameter.grad if is_used else None
        for index, gradient in before.items():
            if (
                (mean := parameters[index].grad) is not None
                and mean.any()
                and not self._join_config.enable
            ):
                raise RuntimeError(
                    f"{self._names[index]} is frozen on this rank and trained on another"
                )
            parameters[index].grad = gradient
        self._reset_pass()

    def _gradient_ready(self, index: int) -> None:
        """Average the complete `p.grad` of the parameter at `index` during backward, if this
        wrapper overlaps."""

    @abstractmethod
    def _finish(self, pending: list[int]) -> None:
        """Average the rest. `pending`: indices for which `_gradient_ready` was not called."""

    def _wait(self) -> None:
        """Wait for collectives in flight."""

    def _output_reached(self, gradients: tuple[Tensor, ...]) -> None:
        if not self._pass.is_running:
            self._begin_pass()

    def _mark_ready(self, index: int, _: object, gradients: tuple[Tensor | None]) -> None:
        """Note that `p.grad` has the gradient that autograd passes here. Each parameter's hook."""
        if not self._pass.is_running:
            if not self._is_armed:
                return
            self._begin_pass()
        self._check_gradient(index, gradients[0])
        is_second = self._ready[index]
        self._ready[index] = True
        if self._overlaps:
            if is_second:
                raise RuntimeError(
                    f"one backward pass gave {self._names[index]} a gradient twice, the second"
                    " after it was sent: if a parameter is used inside and outside of a re-entrant"
                    " checkpoint, pass find_unused=True"
                )
            self._gradient_ready(index)

    def _check_gradient(self, index: int, added: Tensor | None) -> None:
        """Refuse a gradient that cannot be averaged or was used before its average."""
        parameter = self._backward_order[index]
        name = self._names[index]
        if parameter._version != self._versions[index]:
            raise RuntimeError(
                f"{name} was updated in backward, before its gradient was averaged: update it later"
            )
        gradient = parameter.grad
        if gradient is None:
            if added is not None:
                raise ValueError(
                    f"a hook took the gradient of {name} away before it was averaged: take it later"
                )
        elif gradient.layout is not torch.strided:
            raise ValueError(f"expected dense gradients, got a sparse one for {name}")
        elif gradient.requires_grad:
            raise ValueError(
                f"expected backward() without create_graph for {name}: use torch.autograd.grad"
                " instead"
            )

    def _check_parameters(self) -> None:
        """Refuse a model that was wrapped again, or that has new parameters."""
        if self._hooks.is_superseded:
            raise RuntimeError(
                "this model, or a part of it, was wrapped again: use the newest wrapper, or wrap"
                " copies"
            )
        averaged = set(map(id, self._backward_order))
        for name, parameter in self.module.named_parameters():
            # during a functional_call, plain tensors take the place of parameters
            if (
                parameter.requires_grad
                and id(parameter) not in averaged
                and isinstance(parameter, nn.Parameter)
            ):
                raise RuntimeError(
                    f"{name} was added, replaced or unfrozen after wrapping: wrap the model again"
                )

    def _list_versions(self) -> list[int]:
        """Return how often each parameter was changed in place."""
        return [parameter._version for parameter in self._backward_order]

    def _begin_pass(self) -> None:
        """Begin a pass at the first sign of backward: autograd will call back at its end."""
        if self._hooks.is_superseded:
            self._check_parameters()
        self._abandon_unfinished_pass()
        self._hooks.move_to_end()
        self._versions = self._list_versions()
        self._pass.begin(self._end_pass)

    def _end_pass(self) -> None:
        # after torch.autograd.grad, as for a penalty, backward may follow
        self._is_armed = not any(self._ready)
        if self.finish_in_backward:
            self.finish_gradient_synchronization()

    def _abandon_unfinished_pass(self) -> None:
        """Reset a pass that an exception ended, once its collectives are over."""
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

    @property
    def join_device(self) -> torch.device:
        """The device of the model."""
        return self._backward_order[0].device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The process group, never None."""
        return member_group(self.group)
