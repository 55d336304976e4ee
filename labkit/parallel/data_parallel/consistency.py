"""Ranks that differ: other models are refused, rank 0's values are copied, ranks without batches
join the others."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig
from torch.nn.parameter import is_lazy

from labkit.parallel.messages import gather_json
from labkit.parallel.transport import member_group

# a broadcast packs small tensors into vectors of this size, two of which are in flight
COALESCED_BYTES = 2**26
ACTIVE = 1
TRAINS = 2
BROADCASTS = 4
"""What a rank announces to ranks that have joined, together."""


def check_module(module: nn.Module, device_ids: Sequence[int | torch.device] | None) -> None:
    """Raise ValueError for a module whose gradients no wrapper can average, or that is on another
    device."""
    for name, part in module.named_modules():
        if hasattr(part, "no_sync"):
            got = f"{name or 'the model'}, a {type(part).__name__}"
            raise ValueError(f"expected a model without a wrapper in it, got {got}")
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and (
            part.sparse or part.max_norm is not None
        ):
            reason = (
                "sparse=True"
                if part.sparse
                else "max_norm, which changes only the rows that a rank sees"
            )
            raise ValueError(
                f"expected embeddings with dense gradients and updates, and {name or 'it'} has"
                f" {reason}"
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


def check_replicas(
    module: nn.Module, check: Callable[[], Mapping[str, object]], group: dist.ProcessGroup | None
) -> None:
    """Raise ValueError, on every rank or on none, unless models and settings are the same. A
    collective.

    `check` returns the settings, or raises its error. Compares names, shapes, dtypes,
    `requires_grad`, and the strides of trained parameters, since gradients are averaged in the
    order of memory.
    """
    try:
        settings = check()
    except Exception as refusal:
        check_same_on_all_ranks("model", {}, [], group, refusal)
    else:
        state = [*module.named_parameters(), *module.named_buffers()]
        described = [describe(name, tensor) for name, tensor in state]
        check_same_on_all_ranks("model", settings, described, group, device=state[0][1].device)


def check_same_on_all_ranks(
    what: str,
    settings: Mapping[str, object],
    tensors: Iterable[str],
    group: dist.ProcessGroup | None,
    refused: Exception | None = None,
    device: torch.device | None = None,
) -> None:
    """Raise ValueError, on every rank or on none, unless settings and descriptions of tensors are
    equal. A collective.

    A rank that cannot go on passes its error as `refused`: it is raised there, and the other ranks
    raise ValueError. `device`: as for `gather_json`.
    """
    described = [*(f"{name}={value}" for name, value in settings.items()), *tensors]
    by_rank = gather_json(None if refused else described, group, device)
    if refused is not None:
        raise refused
    if None in by_rank:
        raise ValueError(
            f"expected the same {what} on every rank; one of the others raised an error"
        )
    if len(numbers := {*map(len, by_rank)}) > 1:
        raise ValueError(
            f"expected the same {what} on every rank, got {sorted(numbers)} tensors and settings"
        )
    for first, *others in zip(*by_rank, strict=True):
        if {*others} - {first}:
            raise ValueError(
                f"expected the same {what} on every rank; they differ at {first} (rank 0's)"
            )


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor], group: dist.ProcessGroup | None, source: int = 0) -> None:
    """Overwrite every tensor with that of group rank `source`. Small ones of a dtype and device
    travel together.

    Version counters stay, as in torch's wrapper: an earlier graph may have saved a buffer.
    """
    if detached := tuple(tensor.detach() for tensor in tensors):
        with _unsafe_preserve_version_counter(detached):
            dist._broadcast_coalesced(  # type: ignore[attr-defined]
                member_group(group), list(detached), COALESCED_BYTES, source
            )


def strides_like(parameter: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor made like this one: its own if it is dense, else contiguous
    ones."""
    return torch.empty_like(parameter, device="meta").stride()


def describe(name: str, tensor: Tensor) -> str:
    """Describe a parameter or buffer: shape, dtype, and strides of a gradient."""
    trained = f"trained, strides {strides_like(tensor)}" if tensor.requires_grad else "not trained"
    return f"{name}: {tuple(tensor.shape)}, {tensor.dtype}, {trained}"


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
        self._join_config = _JoinConfig.construct_disabled_join_config()

    def announce_forward(self, *, trains: bool, broadcasts: bool) -> int:
        """Announce a forward pass to joined ranks. Return the rank whose buffers are broadcast."""
        if not self._join_config.enable:
            return 0
        Join.notify_join_context(self)
        return self._exchange(ACTIVE + TRAINS * trains + BROADCASTS * broadcasts)[0]

    @abstractmethod
    def average(self, absent: Sequence[int]) -> None:
        """Average gradients; parameters at `absent` count as zeros."""

    def _exchange(self, state: int) -> tuple[int, int]:
        """Return the last active rank, whose buffers are broadcast as in torch, and its state. A
        collective."""
        states = torch.zeros(
            dist.get_world_size(self.group), dtype=torch.int32, device=self.join_device
        )
        states[dist.get_rank(self.group)] = state
        dist.all_reduce(states, group=self.group)
        active = [rank for rank, value in enumerate(states.tolist()) if value]
        self._mean_factor = len(states) / len(active) if self._divides_by_active else 1.0
        return active[-1], int(states[active[-1]])
