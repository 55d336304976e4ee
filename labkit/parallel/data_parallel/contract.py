"""What every data-parallel wrapper does, whatever way it averages gradients.

    model = BucketedDDP(model)            parameters and buffers become those of rank 0
    loss = criterion(model(inputs), targets)
    loss.backward()                       when it returns, every gradient is the mean over ranks
    optimizer.step()

The behavior is that of torch's DistributedDataParallel where it has one; what differs is said at the method.

How a wrapper hears of gradients: a hook on each parameter, called when autograd has put the gradient into
`p.grad`. The first sign of a backward pass, a gradient of the model's output or of a parameter, queues a callback that
autograd runs at the pass's end: there the wrapper finishes, so that nobody has to call anything.

A backward pass inside of a backward pass (re-entrant checkpointing) is part of it, as long as the outer one was heard
of first. For that there is a hook on the outputs, too: a model may be checkpointed as a whole, so that no parameter
hears of the outer pass. Outputs are looked for in sequences, mappings and dataclasses.

What is averaged is `p.grad` as it stands. Gradients accumulated under `no_sync` are in it; what an earlier
backward pass has averaged already is equal on all ranks, and its mean is itself. So several losses, each with a
backward pass of its own, need no extra care.

Two differences from torch's. It waits until every parameter has been heard of since the forward pass, and complains
at the next one. Here each outermost backward pass is looked at by itself, so that a parameter without a gradient is
named before the optimizer uses the others; passes that reach only a part of the model (a loss a head) need
`find_unused=True` therefore. And with `find_unused=True` every collective begins when the pass is over: which gradients
are complete before that, nobody knows, since an inner pass may add to a gradient that the outer one has set.
"""

import contextlib
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.parallel.backward_pass import BackwardPass, tensors_in
from labkit.parallel.data_parallel.averaging import TORCH, Average, average_named
from labkit.parallel.data_parallel.hooks import GradientHooks
from labkit.parallel.data_parallel.layout import check_gradient
from labkit.parallel.data_parallel.replicas import broadcast, check_replicas
from labkit.parallel.disable_compile import disable_compile
from labkit.parallel.transport.select_transport import member_group

Empty = Callable[[int, torch.dtype, torch.device], Tensor]
NOT_COPIED = ("_lock", "_pass", "_gradient_hooks")


class UnusedParameterError(RuntimeError):
    """A backward pass gave some parameters no gradient, and the wrapper was not told that this may happen."""


class DataParallel(nn.Module, ABC):
    """Base of the wrappers. `module` is the model; names in a `state_dict` begin with "module.", as torch's do.

    Args:
        module: the same on all ranks but for its values; parameters frozen now are left alone, and stay frozen.
            Whoever wraps it again takes it over: the older wrapper's next forward pass is a RuntimeError.
        group: the process group; None: all ranks.
        find_unused: parameters may get no gradient in some backward passes, not the same ones on every rank.
            It costs one small collective a pass. Without it such a pass raises UnusedParameterError.
        broadcast_buffers: before each forward pass in training mode, buffers become those of rank 0.
        finish_in_backward: if False, `backward()` may return before the gradients are averaged, and the caller
            calls `finish_gradient_synchronization()` after each: for measuring what a step waits for.
        all_reduce: who sums: "torch" (torch.distributed), or labkit's own all-reduce over a transport: "shared" (memory
            that the ranks of one host map), "point_to_point", or "auto", which is shared where that is possible.

    A wrapper can be copied (`copy.deepcopy`, without a collective): the copy averages over the same ranks. It can be
    saved, and loaded by ranks of any number, unless it has a group of its own or labkit's all-reduce.

    Raises ValueError, on all ranks of the group, if no parameter is trained, arguments differ between ranks, or a
    parameter or buffer does in name, shape, dtype or, if trained, strides; on a rank that is not of the group; and in
    backward if gradients are sparse, made with `create_graph`, or taken away by a hook.
    """

    _average: Average
    _refused: Exception | None = None

    def __init__(
        self,
        module: nn.Module,
        *,
        group: dist.ProcessGroup | None = None,
        find_unused: bool = False,
        broadcast_buffers: bool = True,
        finish_in_backward: bool = True,
        all_reduce: str = TORCH,
    ):
        member_group(group)
        super().__init__()
        self.module = module
        self.find_unused = find_unused
        self.broadcast_buffers = broadcast_buffers
        self.finish_in_backward = finish_in_backward
        check_replicas(module, {**self._settings(), "all_reduce": all_reduce}, group, self._refused)
        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        # Backward visits a model from its end: in this order gradients become ready, more or less.
        self._names, self._parameters_in_order = map(list, zip(*reversed(trained), strict=True))
        self._average = average_named(all_reduce, group, self._parameters_in_order)
        self._synchronize = True
        self._synchronize_this_pass = True
        self._broadcast_before_forward = True
        broadcast([*module.parameters(), *module.buffers()], group)
        self._attach(self._average.empty)

    def _settings(self) -> dict[str, object]:
        """What must be the same on every rank, besides the model."""
        return {
            "wrapper": type(self).__name__,
            "find_unused": self.find_unused,
            "broadcast_buffers": self.broadcast_buffers,
        }

    def _attach(self, empty: Empty) -> None:
        """Make what belongs to this very object: hooks, and the state of a pass. `empty` gives memory for buffers."""
        self.world_size = member_group(self.group).size()
        # Autograd calls hooks in one thread per device.
        self._lock = threading.Lock()
        self._pass = BackwardPass()
        self._forget_pass()
        averaged = set(map(id, self._parameters_in_order))
        left_alone = {name: p for name, p in self.module.named_parameters() if id(p) not in averaged}
        self._gradient_hooks = GradientHooks(self, type(self)._mark_ready, self._parameters_in_order, left_alone)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in NOT_COPIED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._attach(_empty)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's. Whether the next backward pass synchronizes is decided here, as with torch's.

        Buffers become those of rank 0 before it if the pass before it could have changed them: in training, and
        once in evaluation after training.
        """
        self._before_forward()
        outputs = self.module(*args, **kwargs)
        self._watch(outputs)
        return outputs

    @disable_compile
    def _before_forward(self) -> None:
        # Checkpointing may run a forward pass in the middle of backward, which belongs to that.
        if torch.is_grad_enabled() and not self._pass.is_running:
            self._gradient_hooks.check()
            self._leave_unfinished_pass()
            self._synchronize_this_pass = self._synchronize
        if self.broadcast_buffers and self._broadcast_before_forward:
            broadcast(list(self.module.buffers()), self.group)
        self._broadcast_before_forward = torch.is_grad_enabled() and self._synchronize

    @disable_compile
    def _watch(self, outputs: Any) -> None:
        """Hear of backward passes through these outputs before anything they run inside of them."""
        if self._synchronize:
            for node in {tensor.grad_fn for tensor in tensors_in(outputs) if tensor.grad_fn is not None}:
                node.register_prehook(partial(_output_hook, weakref.ref(self)))

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Over whose ranks gradients are averaged; None: all."""
        return self._average.group

    @property
    def transports(self) -> dict[str, tuple[str, str]]:
        """By device, what carries the gradients, and why it is not shared memory; empty if torch's all-reduce does."""
        return self._average.in_use

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Passes whose forward runs in here add to the local gradients; the next one outside averages the sum."""
        before, self._synchronize = self._synchronize, False
        try:
            yield
        finally:
            self._synchronize = before

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Return once every gradient of the last backward pass is the mean over ranks. Idempotent."""
        if not any(self._ready):  # torch.autograd.grad, say, which passes through the model and sets no gradient
            self._forget_pass()
            return
        missing = [index for index, ready in enumerate(self._ready) if not ready]
        if missing and not self.find_unused:
            # nothing is waited for: ranks on which nothing is missing have begun other collectives
            raise UnusedParameterError(self._unused_message(missing))
        has_gradient = [p.grad is not None for p in self._parameters_in_order] if self.find_unused else []
        self._finish(missing if self._overlaps else list(range(len(self._ready))))
        if self.find_unused:  # last: every rank begins the same collectives in the same order
            self._clear_globally_unused(has_gradient)
        self._forget_pass()

    @property
    def _overlaps(self) -> bool:
        """Whether gradients are averaged while backward goes on, each as soon as it is there."""
        return False

    def _gradient_ready(self, index: int) -> None:
        """`p.grad` of the parameter at `index` is complete on this rank; backward goes on. For those that overlap."""

    @abstractmethod
    def _finish(self, pending: list[int]) -> None:
        """Average what is not averaged yet; `_gradient_ready` was not called for the parameters at `pending`."""

    def _abandon(self) -> None:
        """Wait for collectives under way; gradients that are in none are left as this rank's own."""

    def _mark_ready(self, index: int, parameter: Tensor) -> None:
        """The hook: note the gradient, and average it now if that is what this wrapper does.

        Autograd records nothing while it runs hooks, unless a graph was asked for, which is refused.
        """
        if not self._synchronize_this_pass:
            return
        check_gradient(self._names[index], parameter.grad)
        overlaps = self._overlaps
        with self._lock:
            self._begin_pass()
            if overlaps and self._ready[index]:
                raise RuntimeError(
                    f"one backward pass gave {self._names[index]} a gradient twice, the second after it was sent: "
                    "where a parameter is used inside and outside of a re-entrant checkpoint, pass find_unused=True"
                )
            self._ready[index] = True
            if overlaps:
                self._gradient_ready(index)

    def _begin_pass(self) -> None:
        """On the first sign of a backward pass ask to be called back at its end."""
        if self._pass.is_running:
            return
        self._leave_unfinished_pass()
        self._gradient_hooks.come_last()
        self._pass.begin(self._end_pass)

    def _end_pass(self) -> None:
        if self.finish_in_backward:
            self.finish_gradient_synchronization()

    def _leave_unfinished_pass(self) -> None:
        """Before a new pass: one that an exception ended is forgotten, once its collectives are over.

        RuntimeError if it is unfinished because nobody finished it.
        """
        if any(self._ready):
            if not self.finish_in_backward:
                raise RuntimeError("call finish_gradient_synchronization() after each backward pass")
            self._abandon()
        self._forget_pass()

    def _forget_pass(self) -> None:
        self._pass.forget()
        self._ready = [False] * len(self._parameters_in_order)

    def _clear_globally_unused(self, has_gradient: list[bool]) -> None:
        """A parameter that had no gradient on any rank, from this pass or accumulated before, keeps none."""
        for used, parameter in zip(self._globally_used(has_gradient), self._parameters_in_order, strict=True):
            if not used:
                parameter.grad = None

    def _globally_used(self, has_gradient: list[bool]) -> list[bool]:
        """Which parameters had a gradient on any rank. A collective."""
        flags = torch.tensor(has_gradient, dtype=torch.int32, device=self._parameters_in_order[0].device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
        return [bool(flag) for flag in flags.tolist()]

    def _unused_message(self, missing: list[int]) -> str:
        names = [self._names[index] for index in reversed(missing)]
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        return (
            f"the backward pass gave no gradient to {shown}: use every parameter in every step, "
            "freeze it before wrapping, or pass find_unused=True (for backward passes of parts of the model, too)"
        )


def _output_hook(wrapper: "weakref.ref[DataParallel]", gradients: tuple[Tensor, ...]) -> None:
    """The hook on an output: a backward pass has reached it."""
    if (alive := wrapper()) is not None and alive._synchronize_this_pass:
        with alive._lock:
            alive._begin_pass()


def _empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory like any other: what is shared with other processes would have to be made by all at once."""
    return torch.empty(numel, dtype=dtype, device=device)
