"""The contract of every data-parallel wrapper, however it averages gradients.

    model = BucketedDDP(model)            parameters and buffers become those of rank 0
    loss = criterion(model(inputs), targets)
    loss.backward()                       when it returns, every gradient is the mean over ranks
    optimizer.step()

A pass is a backward pass whose gradients are averaged. The wrapper's forward pass arms it: it begins at the first
gradient that reaches an output or a parameter, and queues a callback that autograd runs at its end, where the wrapper
finishes. A backward pass through `wrapper.module(x)` is local. One inside of another (re-entrant checkpointing) is part
of it. For that there is a hook on the outputs, in sequences, mappings and dataclasses: no parameter may hear of the
outer pass.

What is averaged is `p.grad` as it stands. What `no_sync` accumulated is in it; what an earlier pass averaged is equal
on all ranks, and its mean is itself. So several losses, each with a backward pass, need no extra care.

Unlike torch's DistributedDataParallel, each pass is looked at by itself: a parameter without a gradient is named before
the optimizer uses the others, and passes through a part of the model (a loss per head) need `find_unused=True`. With
that, collectives begin when the pass is over: an inner pass may add to a gradient that the outer one has set.
"""

import contextlib
import threading
import weakref
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.parallel.backward_pass import BackwardPass, tensors_in
from labkit.parallel.data_parallel.consistency import broadcast, check_module, check_replicas
from labkit.parallel.data_parallel.hooks import GradientHooks
from labkit.parallel.data_parallel.join import UnevenInputs
from labkit.parallel.data_parallel.reducer import TORCH, check_reducer, make_reducer
from labkit.parallel.disable_compile import disable_compile
from labkit.parallel.transport.select_transport import member_group


class UnusedParameterError(RuntimeError):
    """A backward pass gave some parameters no gradient."""


class DataParallel(nn.Module, UnevenInputs):
    """Base of the wrappers. `module` is the model; names in a `state_dict` begin with "module.", as torch's do.

    Args:
        module: the same on all ranks but for its values. Parameters frozen now stay frozen; others may be for a while.
            A new wrapper of it takes it over. To copy or save, take `wrapper.module`: a wrapper is tied to its ranks.
        device_ids: None, or the model's one device; for torch's sake.
        group: the process group; None: all ranks. Also as `process_group`.
        find_unused: parameters may get no gradient in some passes, not the same ones on every rank. It costs one small
            collective per pass; without it such a pass raises UnusedParameterError. Also as `find_unused_parameters`.
        broadcast_buffers: before each forward pass in training mode, buffers become those of rank 0.
        finish_in_backward: if False, the caller calls `finish_gradient_synchronization()` after each `backward()`: for
            measuring what a step waits for.
        all_reduce: what sums: "torch" (torch.distributed), or labkit's all-reduce over a transport: "shared" (memory
            that the ranks of one host map), "point_to_point", or "auto", which is shared if that is possible.

    Raises ValueError, on all ranks, if model or arguments differ between them and for what `check_module` refuses;
    RuntimeError or ValueError in forward and backward, with the name of the parameter, instead of a wrong mean.
    """

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
        # Backward visits a model from its end: in this order gradients become ready, more or less.
        trained = {name: p for name, p in reversed(list(module.named_parameters())) if p.requires_grad}
        self._names, self._parameters_in_order = list(trained), list(trained.values())
        settings, refused = dict[str, object](), None
        try:
            check_module(module, device_ids)
            check_reducer(all_reduce, self._parameters_in_order)
            settings = self._settings() | {"all_reduce": all_reduce}
        except Exception as error:
            refused = error
        check_replicas(module, settings, group, refused)
        self._reducer = make_reducer(all_reduce, group, self._parameters_in_order)
        broadcast([*module.parameters(), *module.buffers()], group)
        self._broadcast_before_forward = True
        self._is_armed = False
        self._lock = threading.Lock()  # autograd calls hooks in one thread per device
        self._pass = BackwardPass()
        self._ready = [False] * len(trained)
        self._hooks = GradientHooks(self, type(self)._mark_ready, self._parameters_in_order)

    def _settings(self) -> dict[str, object]:
        """Return what must be the same on every rank, besides the model. Raises ValueError for what cannot be."""
        return {
            "wrapper": type(self).__name__,
            "find_unused": self.find_unused,
            "broadcast_buffers": self.broadcast_buffers,
        }

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a data-parallel wrapper is tied to its ranks: copy or save its `module`, and wrap that")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module. Whether the next backward pass synchronizes is decided here, as with torch's.

        Buffers become those of rank 0 before it if the forward pass before could have changed them: in training, and
        once in evaluation after training.
        """
        self._before_forward()
        outputs = self.module(*args, **kwargs)
        self._after_forward(outputs)
        return outputs

    @disable_compile
    def _before_forward(self) -> None:
        trains = torch.is_grad_enabled() and self.require_backward_grad_sync
        # Checkpointing may run a forward pass in the middle of backward, which belongs to that.
        if torch.is_grad_enabled() and not self._pass.is_running:
            self._check_parameters()
            self._leave_unfinished_pass()
            self._is_armed = trains
            self._versions = self._list_versions()
        source = self.notify(trains, self._broadcast_before_forward)
        if self.broadcast_buffers and self._broadcast_before_forward:
            broadcast(self.module.buffers(), self.group, source)
        self._broadcast_before_forward = trains

    @disable_compile
    def _after_forward(self, outputs: Any) -> None:
        if self._is_armed and not self._pass.is_running:
            for name, before, after in zip(self._names, self._versions, self._list_versions(), strict=True):
                if before != after:
                    raise RuntimeError(f"forward changed {name} in place (max_norm?), by what this rank alone has seen")
            for node in {tensor.grad_fn for tensor in tensors_in(outputs) if tensor.grad_fn is not None}:
                node.register_prehook(partial(_output_hook, weakref.ref(self)))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let passes whose forward runs in here add to the local gradients; the next one outside averages the sum."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Return once every gradient of the last backward pass is the mean over ranks. Idempotent."""
        missing = [index for index, ready in enumerate(self._ready) if not ready]
        late = set(self._hooks.rebind([index for index in missing if self._parameters_in_order[index].requires_grad]))
        missing = [index for index in missing if index not in late]
        if len(missing) == len(self._ready):  # torch.autograd.grad, say, which passes through and sets no gradient
            self._forget_pass()
            return
        frozen = [index for index in missing if not self._parameters_in_order[index].requires_grad]
        if len(missing) > len(frozen) and not self.find_unused:
            # nothing is waited for: ranks on which nothing is missing have begun other collectives
            names = [self._names[index] for index in reversed(missing)]
            raise UnusedParameterError(
                f"the backward pass gave no gradient to {', '.join(names[:5])}{', ...' if names[5:] else ''}: use it "
                "in every step, freeze it, or pass find_unused=True (for passes of parts of the model, too)"
            )
        self.average(absent=frozen)

    def average(self, absent: Sequence[int]) -> None:
        """Average what is not averaged yet. Parameters at `absent` count as zero, and keep the gradient they have."""
        parameters = self._parameters_in_order
        before = {index: parameters[index].grad for index in absent}
        for index in absent:
            parameters[index].grad = None
        has_gradient = [parameter.grad is not None for parameter in parameters]
        overlaps = self._overlaps
        self._finish([index for index, ready in enumerate(self._ready) if not (ready and overlaps)])
        if self._mean_factor != 1:
            torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], self._mean_factor)
        if self.find_unused:  # last: every rank begins the same collectives in the same order
            self._clear_globally_unused(has_gradient)
        for index, gradient in before.items():
            if (mean := parameters[index].grad) is not None and mean.any() and not self._join_config.enable:
                raise RuntimeError(f"{self._names[index]} is frozen on this rank and trained on another")
            parameters[index].grad = gradient
        self._forget_pass()

    @property
    def _overlaps(self) -> bool:
        """Whether gradients are averaged while backward goes on."""
        return False

    def _gradient_ready(self, index: int) -> None:
        """Average `p.grad` of the parameter at `index`, which is complete on this rank, while backward goes on."""

    @abstractmethod
    def _finish(self, pending: list[int]) -> None:
        """Average what is not averaged yet; `_gradient_ready` was not called for the parameters at `pending`."""

    def _abandon(self) -> None:
        """Wait for collectives under way."""

    def _mark_ready(self, index: int, gradient: Tensor | None) -> None:
        """Note a gradient, and average it now if that is what this wrapper does. The hook of each parameter."""
        with self._lock:
            if not self._pass.is_running:
                if not self._is_armed:
                    return
                self._begin_pass()
            self._check_gradient(index, gradient)
            is_second, self._ready[index] = self._ready[index], True
            if self._overlaps:
                if is_second:
                    raise RuntimeError(
                        f"one backward pass gave {self._names[index]} a gradient twice, the second after it was sent: "
                        "if a parameter is used inside and outside of a re-entrant checkpoint, pass find_unused=True"
                    )
                self._gradient_ready(index)

    def _check_gradient(self, index: int, added: Tensor | None) -> None:
        """Refuse a gradient that cannot be averaged, or was used before; `added` is what autograd gave."""
        parameter, name = self._parameters_in_order[index], self._names[index]
        if parameter._version != self._versions[index]:
            raise RuntimeError(
                f"{name} was updated in backward, before its gradient was averaged: update it afterwards"
            )
        gradient = parameter.grad
        if gradient is None:
            if added is not None:
                raise ValueError(f"a hook took the gradient of {name} away before it was averaged: take it afterwards")
        elif gradient.layout is not torch.strided:
            raise ValueError(f"expected dense gradients, got a sparse one for {name}")
        elif gradient.requires_grad:
            raise ValueError(
                f"expected backward() without create_graph for {name}: take torch.autograd.grad for penalties"
            )

    def _check_parameters(self) -> None:
        """Refuse a model that was wrapped again, or has other parameters than when it was wrapped."""
        if self._hooks.is_superseded:
            raise RuntimeError("this model, or a part of it, was wrapped again: use the newest wrapper, or wrap copies")
        averaged = set(map(id, self._parameters_in_order))
        for name, parameter in self.module.named_parameters():
            # functional_call puts other tensors there for the time of a call
            if parameter.requires_grad and id(parameter) not in averaged and isinstance(parameter, nn.Parameter):
                raise RuntimeError(f"{name} was added, replaced or unfrozen after wrapping: wrap the model again")

    def _list_versions(self) -> list[int]:
        """Return how often each parameter was changed in place."""
        return [parameter._version for parameter in self._parameters_in_order]

    def _begin_pass(self) -> None:
        """Ask autograd, on the first sign of a backward pass, to call back at its end."""
        if self._hooks.is_superseded:
            self._check_parameters()
        self._leave_unfinished_pass()
        self._hooks.come_last()
        self._versions = self._list_versions()
        self._pass.begin(self._end_pass)

    def _end_pass(self) -> None:
        self._is_armed = False
        if self.finish_in_backward:
            self.finish_gradient_synchronization()

    def _leave_unfinished_pass(self) -> None:
        """Forget a pass that an exception ended, once its collectives are over; RuntimeError if nobody finished it."""
        if any(self._ready):
            if not self.finish_in_backward:
                raise RuntimeError("call finish_gradient_synchronization() after each backward pass")
            self._abandon()
        self._forget_pass()

    def _forget_pass(self) -> None:
        self._pass.forget()
        self._ready = [False] * len(self._parameters_in_order)

    def _clear_globally_unused(self, has_gradient: list[bool]) -> None:
        """Leave no gradient to a parameter that had none on any rank, of this pass or accumulated before."""
        for is_used, parameter in zip(self._sync_used_flags(has_gradient), self._parameters_in_order, strict=True):
            if not is_used:
                parameter.grad = None

    def _sync_used_flags(self, has_gradient: list[bool]) -> list[bool]:
        """Return which parameters had a gradient on any rank. A collective."""
        flags = torch.tensor(has_gradient, dtype=torch.int32, device=self.join_device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
        return [bool(flag) for flag in flags.tolist()]

    @property
    def join_device(self) -> torch.device:
        """The device of the model."""
        return self._parameters_in_order[0].device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The process group, never None."""
        return member_group(self.group)


def _output_hook(wrapper: "weakref.ref[DataParallel]", gradients: tuple[Tensor, ...]) -> None:
    """Begin the pass that has reached an output."""
    if (alive := wrapper()) is not None:
        with alive._lock:
            if not alive._pass.is_running:
                alive._begin_pass()
