"""Data-parallel training: four wrappers that average gradients over ranks, and torch's, by name.

``base``         `DataParallel`, the contract: when a pass begins and ends, what is refused
``wrappers``     `NaiveDDP`, `FlatDDP`, `OverlappedDDP`, `BucketedDDP`
``buckets``      the assignment of gradients to buckets, and their memory
``consistency``  the same model on every rank, or a refusal on every rank; uneven inputs
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labkit.parallel.data_parallel.base import DataParallel
from labkit.parallel.data_parallel.consistency import UnusedParameterError
from labkit.parallel.data_parallel.wrappers import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
from labkit.parallel.transport import SHARED

__all__ = [
    "BucketedDDP",
    "DataParallel",
    "FlatDDP",
    "NaiveDDP",
    "OverlappedDDP",
    "UnusedParameterError",
    "wrap",
]

TORCH = "torch"
# a model without a wrapper, the baseline of comparisons; no implementation has this name
LOCAL = "local"
# Wrappers and their options by name. `register` adds a user's.
IMPLEMENTATIONS: dict[str, tuple[Callable[..., nn.Module], dict[str, Any]]] = {
    TORCH: (DistributedDataParallel, {"gradient_as_bucket_view": True}),
    "naive": (NaiveDDP, {}),
    "flat": (FlatDDP, {}),
    "overlapped": (OverlappedDDP, {}),
    "bucketed": (BucketedDDP, {}),
    "bucketed_shared": (BucketedDDP, {"all_reduce": SHARED}),
    "naive_shared": (NaiveDDP, {"all_reduce": SHARED}),
    "bucketed_sync": (BucketedDDP, {"overlap": False}),
}
OWN_NAMES = tuple(name for name in IMPLEMENTATIONS if name != TORCH)
# wrappers for CPU tensors of ranks on one host only
OVER_SHARED_MEMORY = ("bucketed_shared", "naive_shared")
# Wrappers with a bucket size. Default: 25 MiB, and 1 MiB for the first bucket, in labkit's as in
# torch's.
BUCKETED = (TORCH, "bucketed", "bucketed_shared", "bucketed_sync")


def register(name: str, wrapper: Callable[[nn.Module], nn.Module]) -> dict[str, Any]:
    """Add a user's wrapper: called with the model, it returns a module whose gradients are means
    after `backward()`.

    If it has a method `finish_gradient_synchronization`, that is called first. ValueError for a
    name that labkit has.
    """
    if name in (taken := (LOCAL, TORCH, *OWN_NAMES)):
        raise ValueError(f"expected a name other than {', '.join(taken)}")
    IMPLEMENTATIONS[name] = (wrapper, {})
    return IMPLEMENTATIONS


def wrap(
    name: str,
    module: nn.Module,
    *,
    bucket_mb: float | None = None,
    finish_in_backward: bool = True,
    find_unused: bool = False,
) -> nn.Module:
    """Wrap the module by the implementation of this name. ValueError for an unknown name.

    `bucket_mb`: MiB of every bucket, the first included, of those with buckets; None for the
    default. `finish_in_backward`: of labkit's, as torch's always does. `find_unused`: parameters
    may get no gradient.
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"expected one of {', '.join(IMPLEMENTATIONS)}, got {name!r}")
    wrapper, options = IMPLEMENTATIONS[name]
    if find_unused:
        options = options | {"find_unused_parameters": True}
    if name in BUCKETED:
        options = options | {"bucket_cap_mb": bucket_mb}
    if name in OWN_NAMES:
        options = options | {"finish_in_backward": finish_in_backward}
    return wrapper(module, **options)
