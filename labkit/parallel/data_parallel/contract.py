"""What every data-parallel wrapper does, whatever way it averages gradients.

    model = BucketedDDP(model)            parameters and buffers become those of rank 0
    loss = criterion(model(inputs), targets)
    loss.backward()                       when it returns, every gradient is the mean over ranks
    optimizer.step()

The behavior is that of torch's DistributedDataParallel where it has one; what differs is said at the method.

How a wrapper hears of gradients: a hook on each parameter, called when autograd has put the gradient into
`p.grad`. The first hook of a backward pass queues a callback that autograd runs at the pass's end: there the
wrapper finishes, so that nobody has to call anything.

What is averaged is `p.grad` as it stands. Gradients accumulated under `no_sync` are in it; what an earlier
backward pass has averaged already is equal on all ranks, and its mean is itself. So several losses, each with a
backward pass of its own, need no extra care.

One difference from torch's: it waits until every parameter has been heard of since the forward pass, and complains
at the next one. Here each backward pass is looked at by itself, so that a parameter without a gradient is named before
the optimizer uses the others. Passes that reach only a part of the model (a loss a head, re-entrant checkpointing) need
`find_unused=True` therefore.
"""

import contextlib
import hashlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from labkit.parallel.data_parallel.averaging import TORCH, average_named

COALESCED_BYTES = 2**26
"""Copies made for a broadcast take no more memory than this."""


class UnusedParameterError(RuntimeError):
    """A backward pass gave some parameters no gradient, and the wrapper was not told that this may happen."""


class DataParallel(nn.Module, ABC):
    """Base of the wrappers. `module` is the model; names in a `state_dict` begin with "module.", as torch's do.

    Args:
        module: the same on all ranks but for its values; parameters frozen now are left alone.
        group: the process group; None: all ranks.
        find_unused: parameters may get no gradient in some backward passes, not the same ones on every rank.
            It costs one small collective a pass. Without it such a pass raises UnusedParameterError.
        broadcast_buffers: before each forward pass in training mode, buffers become those of rank 0.
        finish_in_backward: if False, `backward()` may return before the gradients are averaged, and the caller
            calls `finish_gradient_synchronization()` after each: for measuring what a step waits for.
        all_reduce: who sums: "torch" (torch.distributed), or labkit's own all-reduce over a transport: "shared" (memory
            that the ranks of one host map), "point_to_point", or "auto", which is shared where that is possible.

    Raises ValueError if no parameter is trained, a parameter or buffer differs between ranks in name, shape or
    dtype, or gradients would be sparse.
    """

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
        super().__init__()
        self.module = module
        self.group = group
        self.world_size = dist.get_world_size(group)
        self.find_unused = find_unused
        self.broadcast_buffers = broadcast_buffers
        self.finish_in_backward = finish_in_backward
        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        _check_model(module, trained, group)
        # Backward visits a model from its end: in this order gradients become ready, more or less.
        self._names, self._parameters_in_order = map(list, zip(*reversed(trained), strict=True))
        self._average = average_named(all_reduce, group, self._parameters_in_order)
        self._synchronize = True
        self._synchronize_this_pass = True
        self._backward_pass: int | None = None
        self._heard: list[bool] = []
        self._forget_pass()
        _broadcast([*module.parameters(), *module.buffers()], group)
        self._broadcast_before_forward = True
        # Weakly: a parameter holds its hooks where the garbage collector does not look.
        hooks = [
            p.register_post_accumulate_grad_hook(partial(_tell, weakref.ref(self), index))
            for index, p in enumerate(self._parameters_in_order)
        ]
        weakref.finalize(self, _remove, hooks)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's. Whether the next backward pass synchronizes is decided here, as with torch's.

        Buffers become those of rank 0 before it if the pass before it could have changed them: in training, and
        once in evaluation after training.
        """
        if torch.is_grad_enabled():
            self._leave_unfinished_pass()
            self._synchronize_this_pass = self._synchronize
        if self.broadcast_buffers and self._broadcast_before_forward:
            _broadcast(list(self.module.buffers()), self.group)
        self._broadcast_before_forward = torch.is_grad_enabled() and self._synchronize
        return self.module(*args, **kwargs)

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
        """Return once every gradient of the last backward pass is the mean over ranks. Again: does nothing."""
        if self._backward_pass is None:
            return
        missing = [index for index, heard in enumerate(self._heard) if not heard]
        if missing and not self.find_unused:
            # nothing is waited for: ranks on which nothing is missing have begun other collectives
            raise UnusedParameterError(self._unused_message(missing))
        has_gradient = [p.grad is not None for p in self._parameters_in_order]
        self._finish(missing)
        if self.find_unused:  # last: every rank begins the same collectives in the same order
            self._drop_gradients_of_nobody(has_gradient)
        self._forget_pass()

    @abstractmethod
    def _gradient_ready(self, index: int) -> None:
        """`p.grad` of the parameter at `index` is complete on this rank; backward goes on."""

    @abstractmethod
    def _finish(self, missing: list[int]) -> None:
        """Average what is not averaged yet. Parameters at `missing` were not visited on this rank in this pass."""

    @abstractmethod
    def _abandon(self) -> None:
        """Wait for collectives under way; gradients that are in none are left as this rank's own."""

    def _hear(self, index: int, parameter: Tensor) -> None:
        """The hook: note the gradient, and on a pass's first one ask to be called back at its end."""
        if not self._synchronize_this_pass:
            return
        gradient = parameter.grad
        assert gradient is not None, "autograd calls the hook after it has set the gradient"
        if gradient.is_sparse:
            raise ValueError(f"expected dense gradients, got a sparse one for {self._names[index]}")
        backward_pass = torch._C._current_graph_task_id()
        if self._backward_pass != backward_pass:
            self._leave_unfinished_pass()
            self._backward_pass = backward_pass
            if self.finish_in_backward:
                Variable._execution_engine.queue_callback(self.finish_gradient_synchronization)
        self._heard[index] = True
        with torch.no_grad():
            self._gradient_ready(index)

    def _leave_unfinished_pass(self) -> None:
        """Before a new pass: one that an exception ended is forgotten, once its collectives are over.

        RuntimeError if it is unfinished because nobody finished it.
        """
        if self._backward_pass is not None:
            if not self.finish_in_backward:
                raise RuntimeError("call finish_gradient_synchronization() after each backward pass")
            self._abandon()
        self._forget_pass()

    def _forget_pass(self) -> None:
        self._backward_pass = None
        self._heard = [False] * len(self._parameters_in_order)

    def _drop_gradients_of_nobody(self, has_gradient: list[bool]) -> None:
        """A parameter that had no gradient on any rank, from this pass or accumulated before, keeps none."""
        flags = torch.tensor(has_gradient, dtype=torch.int32, device=self._parameters_in_order[0].device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
        for used, parameter in zip(flags.tolist(), self._parameters_in_order, strict=True):
            if not used:
                parameter.grad = None

    def _unused_message(self, missing: list[int]) -> str:
        names = [self._names[index] for index in reversed(missing)]
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        return (
            f"the backward pass gave no gradient to {shown}: use every parameter in every step, "
            "freeze it before wrapping, or pass find_unused=True (for backward passes of parts of the model, too)"
        )


def _tell(wrapper: "weakref.ref[DataParallel]", index: int, parameter: Tensor) -> None:
    """The hook on a parameter: its wrapper hears of it, if there still is one."""
    if (alive := wrapper()) is not None:
        alive._hear(index, parameter)


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def gradient_in_layout(parameter: Tensor) -> Tensor:
    """The parameter's gradient (zeros if it has none), in the strides of the parameter: equal on all ranks."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    elif parameter.grad.stride() != strides_like(parameter):
        parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
    return parameter.grad


def strides_like(parameter: Tensor) -> tuple[int, ...]:
    """The strides of a tensor made like this one: its own where it is dense, else those of a contiguous one."""
    return torch.empty_like(parameter, device="meta").stride()


def flat_view(dense: Tensor) -> Tensor:
    """All elements of a dense tensor in the order in which they lie in memory, (n,): collectives want that."""
    return dense.as_strided((dense.numel(),), (1,), dense.storage_offset())


def _check_model(module: nn.Module, trained: list[tuple[str, nn.Parameter]], group: dist.ProcessGroup | None) -> None:
    """ValueError unless something is trained and the model is the same one on every rank."""
    if not trained:
        raise ValueError("expected a module with at least one parameter that requires a gradient")
    state = [*module.named_parameters(), *module.named_buffers()]
    described = [f"{name}: {tuple(x.shape)}, {x.dtype}, requires_grad={x.requires_grad}" for name, x in state]
    digests = torch.tensor([_digest(text) for text in described], device=trained[0][1].device)
    number = torch.tensor([len(digests), -len(digests)], device=digests.device)
    dist.all_reduce(number, op=dist.ReduceOp.MAX, group=group)
    most, fewest = int(number[0]), -int(number[1])
    if most != fewest:
        raise ValueError(f"expected the same model on every rank, got {fewest} to {most} parameters and buffers")
    bounds = torch.stack([digests, -digests])
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    if differing := (bounds[0] != -bounds[1]).nonzero().flatten().tolist():
        raise ValueError(f"expected the same model on every rank; they differ at {described[differing[0]]} (here)")


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])


@torch.no_grad()
def _broadcast(tensors: Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
    """Every tensor becomes that of the group's first rank; small ones of a dtype and device travel together."""
    for together in _coalesced([tensor.detach() for tensor in tensors]):
        flat = torch.cat([tensor.reshape(-1) for tensor in together])
        dist.broadcast(flat, group=group, group_src=0)
        pieces = flat.split([tensor.numel() for tensor in together])
        for tensor, piece in zip(together, pieces, strict=True):
            tensor.copy_(piece.view(tensor.shape))


def _coalesced(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype and device, at most `COALESCED_BYTES` together unless one alone is larger."""
    filling: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        key = (tensor.dtype, tensor.device)
        together = filling.setdefault(key, [])
        if together and sum(t.nbytes for t in together) + tensor.nbytes > COALESCED_BYTES:
            yield together
            filling[key] = together = []
        together.append(tensor)
    yield from filling.values()
