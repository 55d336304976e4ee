"""The table of implementations to choose from: labkit's wrappers and torch's, under one call."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labkit.parallel.data_parallel.overlapped import BucketedDDP, OverlappedDDP
from labkit.parallel.data_parallel.synchronous import FlatDDP, NaiveDDP
from labkit.parallel.transport import SHARED

TORCH = "torch"
LOCAL = "local"
"""A model without a wrapper, with which the others are compared; no implementation has this name."""
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
"""By name: a wrapper and its options. A reader may add one (`register`)."""
OWN_NAMES = tuple(name for name in IMPLEMENTATIONS if name != TORCH)
"""labkit's wrappers."""
OVER_SHARED_MEMORY = ("bucketed_shared", "naive_shared")
"""Those for CPU tensors of ranks on one host only."""
BUCKETED = (TORCH, "bucketed", "bucketed_shared", "bucketed_sync")
"""Those that have a bucket size."""
DEFAULT_LAYOUT = "25 MiB, the first one 1 MiB"
"""The buckets without a size, of labkit's wrappers as of torch's."""


def register(name: str, wrapper: Callable[[nn.Module], nn.Module]) -> dict[str, Any]:
    """Add a reader's wrapper: called with the model, it returns a module whose gradients are means after `backward()`.

    If it has a method `finish_gradient_synchronization`, that is called first. ValueError for a name that is taken.
    """
    if name in (taken := (LOCAL, TORCH, *OWN_NAMES)):
        raise ValueError(f"expected a name other than {', '.join(taken)}")
    IMPLEMENTATIONS[name] = (wrapper, {})
    return IMPLEMENTATIONS


def wrap(name: str, module: nn.Module, *, bucket_mb: float | None = None, finish_in_backward: bool = True) -> nn.Module:
    """Return the module under a wrapper; torch's finishes in backward always.

    `bucket_mb`, in MiB, is the size of every bucket, the first one's too, on every side. None: `DEFAULT_LAYOUT`.
    Raises ValueError for a name that is none of `IMPLEMENTATIONS`.
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"no data-parallel implementation named {name!r}; there are {', '.join(IMPLEMENTATIONS)}")
    wrapper, options = IMPLEMENTATIONS[name]
    if name in BUCKETED:
        options = options | {"bucket_cap_mb": bucket_mb}
    if name in OWN_NAMES:
        options = options | {"finish_in_backward": finish_in_backward}
    return wrapper(module, **options)
