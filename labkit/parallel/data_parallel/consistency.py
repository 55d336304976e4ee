"""The same model on every rank: models that differ are refused on all ranks, then rank 0's values are copied."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.parameter import is_lazy

from labkit.parallel.ranks.messages import gather_json
from labkit.parallel.transport import member_group

COALESCED_BYTES = 2**26
"""A broadcast packs small tensors into vectors of this size, two of which are in flight."""


def check_module(module: nn.Module, device_ids: Sequence[int | torch.device] | None) -> None:
    """Raise ValueError for a module whose gradients no wrapper can average, or that is on another device."""
    for name, part in module.named_modules():
        if hasattr(part, "no_sync"):
            raise ValueError(f"expected a model without a wrapper in it, got {_path(name)}, a {type(part).__name__}")
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and (part.sparse or part.max_norm is not None):
            reason = "sparse=True" if part.sparse else "max_norm, which changes only the rows that a rank sees"
            raise ValueError(f"expected an embedding with dense gradients and updates, and {_path(name)} has {reason}")
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        check_values(name, tensor)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ValueError("expected a module with at least one parameter that requires a gradient")
    if device_ids and [torch.device(each) for each in device_ids] != [next(module.parameters()).device]:
        raise ValueError(f"expected device_ids=None, or the model's one device, got {list(device_ids)}")


def check_values(name: str, tensor: Tensor) -> None:
    """Raise ValueError for a parameter or buffer without values, or with values that cannot change."""
    if is_lazy(tensor):
        raise ValueError(f"expected a model that knows its shapes, and {name} is lazy: run a batch through it first")
    if tensor.is_meta:
        raise ValueError(f"expected a model with values, and {name} is on meta: call to_empty() and initialize it")
    if tensor.is_inference():
        raise ValueError(f"expected a model made outside of torch.inference_mode, and {name} was made inside")


def check_replicas(
    module: nn.Module, check: Callable[[], Mapping[str, object]], group: dist.ProcessGroup | None
) -> None:
    """Raise ValueError, on every rank or on none, unless models and settings are the same. A collective.

    `check` returns the settings, or raises its error. Compares names, shapes, dtypes, `requires_grad`, and the strides
    of trained parameters, since gradients are averaged in the order of memory.
    """
    settings: Mapping[str, object] = {}
    state, refusal = [*module.named_parameters(), *module.named_buffers()], None
    try:
        settings = check()
    except Exception as error:
        state, refusal = [], error
    described = [describe(name, tensor) for name, tensor in state]
    check_same_on_all_ranks("model", settings, described, group, refusal, state[0][1].device if state else None)


def check_same_on_all_ranks(
    what: str,
    settings: Mapping[str, object],
    tensors: Iterable[str],
    group: dist.ProcessGroup | None,
    refused: Exception | None = None,
    device: torch.device | None = None,
) -> None:
    """Raise ValueError, on every rank or on none, unless settings and descriptions of tensors are equal. A collective.

    `device`: as for `gather_json`. A rank that cannot go on passes its error as `refused`: it is raised there, and the
    other ranks raise ValueError.
    """
    described = [*(f"{name}={value}" for name, value in settings.items()), *tensors]
    by_rank = gather_json(None if refused else described, group, device)
    if refused is not None:
        raise refused
    if None in by_rank:
        raise ValueError(f"expected the same {what} on every rank; one of the others raised an error")
    if len(numbers := {*map(len, by_rank)}) > 1:
        raise ValueError(f"expected the same {what} on every rank, got {sorted(numbers)} tensors and settings")
    for of_ranks in zip(*by_rank, strict=True):
        if len({*of_ranks}) > 1:
            raise ValueError(f"expected the same {what} on every rank; they differ at {of_ranks[0]} (rank 0's)")


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor], group: dist.ProcessGroup | None, source: int = 0) -> None:
    """Overwrite every tensor with that of group rank `source`. Small ones of a dtype and device travel together.

    Version counters stay, as in torch's wrapper: an earlier graph may have saved a buffer.
    """
    if detached := tuple(tensor.detach() for tensor in tensors):
        with _unsafe_preserve_version_counter(detached):
            dist._broadcast_coalesced(  # type: ignore[attr-defined]
                member_group(group), list(detached), COALESCED_BYTES, source
            )


def strides_like(parameter: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor made like this one: its own if it is dense, else contiguous ones."""
    return torch.empty_like(parameter, device="meta").stride()


def describe(name: str, tensor: Tensor) -> str:
    """Describe a parameter or buffer: shape, dtype, and strides of a gradient."""
    trained = f"trained, strides {strides_like(tensor)}" if tensor.requires_grad else "not trained"
    return f"{name}: {tuple(tensor.shape)}, {tensor.dtype}, {trained}"


def _path(name: str) -> str:
    return name or "the model"
