"""Is the model the same one on every rank? And making it so: values of the first rank for all."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from labkit.parallel.data_parallel.layout import strides_like
from labkit.parallel.transport.select_transport import member_group

COALESCED_BYTES = 2**26
"""A broadcast copies some tensors together, until they are this large; two of these copies are on their way at once."""


def check_replicas(
    module: nn.Module,
    settings: Mapping[str, object],
    group: dist.ProcessGroup | None,
    refused: Exception | None = None,
) -> None:
    """ValueError, on every rank or on none, unless settings and model are the same and something is trained.

    A collective; `refused` as for `check_same_on_all_ranks`. What counts of a model: names, shapes, dtypes and what is
    trained; the strides of what is trained, too, since gradients are averaged in the order in which they lie in memory.
    """
    state = [*module.named_parameters(), *module.named_buffers()]
    described = [describe(name, tensor) for name, tensor in state]
    device = state[0][1].device if state else device_of(group)
    check_same_on_all_ranks("model", settings, described, device, group, refused)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ValueError("expected a module with at least one parameter that requires a gradient")


def check_same_on_all_ranks(
    what: str,
    settings: Mapping[str, object],
    tensors: Sequence[str],
    device: torch.device,
    group: dist.ProcessGroup | None,
    refused: Exception | None = None,
) -> None:
    """ValueError, on every rank or on none, unless settings and descriptions of tensors are the same. A collective.

    As many settings on every rank; `device` is where the group's collectives work. A rank that cannot go on gives what
    it has `refused` for, and raises that once all ranks know of it.
    """
    described = [*(f"{name}={value}" for name, value in settings.items()), *tensors]
    number = torch.tensor([len(tensors), -len(tensors), refused is not None], device=device)
    dist.all_reduce(number, op=dist.ReduceOp.MAX, group=group)
    if refused is not None:
        raise refused
    most, fewest, somebody_refused = int(number[0]), -int(number[1]), bool(number[2])
    if somebody_refused:
        raise ValueError(f"expected the same {what} on every rank; one of the others raised an error")
    if most != fewest:
        raise ValueError(f"expected the same {what} on every rank, got {fewest} to {most} parameters and buffers")
    digests = torch.tensor([_digest(text) for text in described], device=device)
    bounds = torch.stack([digests, -digests])
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    if differing := (bounds[0] != -bounds[1]).nonzero().flatten().tolist():
        raise ValueError(f"expected the same {what} on every rank; they differ at {described[differing[0]]} (here)")


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
    """Overwrite every tensor by the group's first rank's; small ones of a dtype and device travel together.

    Version counters stay, as with torch's wrapper: a graph made before may have saved a buffer.
    """
    if detached := tuple(tensor.detach() for tensor in tensors):
        with _unsafe_preserve_version_counter(detached):
            # as torch's own wrapper does
            dist._broadcast_coalesced(  # type: ignore[attr-defined]
                member_group(group), list(detached), COALESCED_BYTES, 0
            )


def describe(name: str, tensor: Tensor) -> str:
    """What has to be alike on all ranks."""
    trained = f"trained, strides {strides_like(tensor)}" if tensor.requires_grad else "not trained"
    return f"{name}: {tuple(tensor.shape)}, {tensor.dtype}, {trained}"


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Where the group's collectives work, for a model without a tensor."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
