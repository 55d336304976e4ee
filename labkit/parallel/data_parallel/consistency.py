"""Ranks that differ: other models are refused, rank 0's values are copied, ranks without batches
join the others."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parameter import is_lazy

from labkit.parallel.agreement import agree_per_pass, describe_parameter
from labkit.parallel.messages import cpu_group
from labkit.parallel.prepare import disable_compile
from labkit.parallel.transport import member_group
from labkit.torch_private import broadcast_coalesced, disabled_join_config, preserve_version_counter

# a broadcast packs small tensors into vectors of this size, two of which are in flight
COALESCED_BYTES = 2**26
ACTIVE = 1
TRAINS = 2
# What a rank announces to ranks that have joined, together.
BROADCASTS = 4


class UnusedParameterError(RuntimeError):
    """A backward pass gave some parameters no gradient."""


def check_module(module: nn.Module, device_ids: Sequence[int | torch.device] | None) -> None:
    """Raise ValueError for a module whose gradients no wrapper can average, or that is on another
    device."""
    for name, part in module.named_modules():
        if hasattr(part, "no_sync"):
            got = f"{name or 'the model'}, a {type(part).__name__}"
            raise ValueError(f"expected a model without a wrapper in it, got {got}")
        if not isinstance(part, nn.Embedding | nn.EmbeddingBag):
            continue
        if part.sparse:
            raise ValueError(f"expected dense gradients, and {name or 'it'} has sparse=True")
        if part.max_norm is not None:
            raise ValueError(
                f"expected dense updates, and {name or 'it'} has max_norm, which changes only the"
                " rows that a rank sees"
            )
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        check_values(name, tensor)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ValueError("expected a module with at least one parameter that requires a gradient")
    if device_ids and [torch.device(each) for each in device_ids] != [
        next(module.parameters()).device
    ]:
        raise ValueError(
            f"expected device_ids=None, or the model's one device, got {list(device_ids)}"
        )


def check_no_new_parameters(module: nn.Module, averaged: Iterable[Tensor]) -> None:
    """Raise RuntimeError for parameters that need a gradient and are not among the averaged ones.

    Called in each forward pass, on this rank alone: users add layers without a word to us. It took
    0.4 ms for the 161 parameters of a ResNet-50.
    """
    known = set(map(id, averaged))
    for name, parameter in module.named_parameters():
        # During a functional_call, plain tensors take the place of parameters.
        is_new = id(parameter) not in known and isinstance(parameter, nn.Parameter)
        if is_new and parameter.requires_grad:
            raise RuntimeError(
                f"{name} was added, replaced or unfrozen after wrapping: wrap the model again"
            )


def check_gradient(name: str, parameter: Tensor, added: Tensor | None) -> None:
    """Raise ValueError for a gradient that cannot be averaged. `added`: what autograd has added."""
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
            f"expected backward() without create_graph for {name}: use torch.autograd.grad instead"
        )


def check_values(name: str, tensor: Tensor) -> None:
    """Raise ValueError for a parameter or buffer without values, or with values that cannot
    change."""
    if is_lazy(tensor):
        raise ValueError(
            f"expected a model that knows its shapes, and {name} is lazy: run a batch through it"
            " first"
        )
    if tensor.is_meta:
        raise ValueError(
            f"expected a model with values, and {name} is on meta: call to_empty() and"
            " initialize it"
        )
    if tensor.is_inference():
        raise ValueError(
            f"expected a model made outside of torch.inference_mode, and {name} was made inside"
        )


def describe_model(module: nn.Module) -> dict[str, str]:
    """Describe what data-parallel replicas have in common: all but the values.

    Strides of gradients, too, since gradients are averaged in the order of memory.
    """
    state = [*module.named_parameters(), *module.named_buffers()]
    return {name: describe_parameter(tensor) for name, tensor in state}


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor], group: dist.ProcessGroup | None, source: int = 0) -> None:
    """Overwrite every tensor with that of group rank `source`. Small ones of a dtype and device
    travel together.

    Version counters stay, as in torch's wrapper: an earlier graph may have saved a buffer.
    """
    if detached := tuple(tensor.detach() for tensor in tensors):
        # tensors of inference mode have no versions
        with_versions = tuple(tensor for tensor in detached if not tensor.is_inference())
        with preserve_version_counter(with_versions):
            broadcast_coalesced(member_group(group), detached, COALESCED_BYTES, source)


def sync_used_flags(is_used: Sequence[bool], group: dist.ProcessGroup | None) -> list[bool]:
    """Return which parameters have a gradient on any rank. A collective."""
    flags = torch.tensor(is_used, dtype=torch.int32)
    # Between CPUs, so that nothing waits for a GPU.
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=cpu_group(group))
    return flags.bool().tolist()


class UnevenInputs(Joinable, JoinHook):
    """A wrapper's part in `torch.distributed.algorithms.Join`.

    Under a `Join`, each forward pass begins with a small all-reduce: does a rank have a batch, and
    which collectives follow? A joined rank adds zeros to the gradients. At the end, all ranks copy
    the model of the last active one.
    """

    module: nn.Module
    group: dist.ProcessGroup | None
    broadcast_buffers: bool
    _ready: list[bool]
    _mean_factor = 1.0  # turns a mean over all ranks into one over the active ranks
    _divides_by_active = False

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return a context for uneven inputs, as torch's wrapper does."""
        options = {"divide_by_initial_world_size": divide_by_initial_world_size}
        return Join([self], enable, throw_on_early_termination, **options)

    def join_hook(self, divide_by_initial_world_size: bool = True, **_: Any) -> JoinHook:
        """Return the wrapper. Gradients are divided by the number of all ranks, or of the active
        ones."""
        self._divides_by_active = not divide_by_initial_world_size
        return self

    def main_hook(self) -> None:
        """Take part in one step of the active ranks."""
        source, follows = self._exchange(0)
        if follows & BROADCASTS:
            broadcast(self.module.buffers(), self.group, source)
        if follows & TRAINS:
            self.average(absent=range(len(self._ready)))

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the model of a rank that joined last."""
        source, _ = self._exchange(ACTIVE * is_last_joiner)
        buffers = self.module.buffers() if self.broadcast_buffers else ()
        broadcast([*self.module.parameters(), *buffers], self.group, source)
        self._mean_factor = 1.0
        self._join_config = disabled_join_config()

    @disable_compile
    def notify_joined_ranks(self) -> None:
        """Tell joined ranks of a forward pass; RuntimeError on all if none may join early."""
        # All ranks have that error: reported by a pass, it would be taken for one rank's alone.
        if self._join_config.enable:
            Join.notify_join_context(self)

    def announce_forward(self, *, trains: bool, broadcasts: bool) -> int:
        """Announce a forward pass to joined ranks. Return the rank whose buffers are broadcast."""
        if not self._join_config.enable:
            return 0
        return self._exchange(ACTIVE + TRAINS * trains + BROADCASTS * broadcasts)[0]

    @property
    def join_device(self) -> torch.device:
        """The device of the model."""
        return next(self.module.parameters()).device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The process group, never None."""
        return member_group(self.group)

    @abstractmethod
    def average(self, absent: Sequence[int]) -> None:
        """Average gradients; parameters at `absent` count as zeros."""

    def _exchange(self, state: int) -> tuple[int, int]:
        """Return the last active rank, whose buffers are broadcast as in torch, and its state. A
        collective."""
        rows = agree_per_pass("wrapper", dict, self.group, numbers=[state])
        states = [number for (number,) in rows]
        active = [rank for rank, value in enumerate(states) if value]
        self._mean_factor = len(states) / len(active) if self._divides_by_active else 1.0
        return active[-1], states[active[-1]]
