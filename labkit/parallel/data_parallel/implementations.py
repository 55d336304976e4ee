"""The table of implementations to choose from: labkit's wrappers and torch's, under one call."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labkit.parallel.data_parallel.after_backward import FlatDDP, NaiveDDP
from labkit.parallel.data_parallel.during_backward import BucketedDDP, OverlappedDDP
from labkit.parallel.transport import SHARED

TORCH = "torch"
LOCAL = "local"
"""A model without a wrapper, beside which the others are measured; no implementation is named so."""

Wrapper = Callable[[nn.Module, float | None, bool], nn.Module]
"""(module, bucket_mb, finish_in_backward) -> the wrapped module; what means nothing to it, it leaves alone."""

IMPLEMENTATIONS: dict[str, Wrapper] = {
    TORCH: lambda module, bucket_mb, _: DistributedDataParallel(
        module, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True
    ),
    "naive": lambda module, _, finish: NaiveDDP(module, finish_in_backward=finish),
    "flat": lambda module, _, finish: FlatDDP(module, finish_in_backward=finish),
    "overlapped": lambda module, _, finish: OverlappedDDP(module, finish_in_backward=finish),
    "bucketed": lambda module, bucket_mb, finish: BucketedDDP(module, finish_in_backward=finish, **_sizes(bucket_mb)),
    "bucketed_shared": lambda module, bucket_mb, finish: BucketedDDP(
        module, finish_in_backward=finish, all_reduce=SHARED, **_sizes(bucket_mb)
    ),
    "naive_shared": lambda module, _, finish: NaiveDDP(module, finish_in_backward=finish, all_reduce=SHARED),
    "bucketed_sync": lambda module, bucket_mb, finish: BucketedDDP(
        module, overlap=False, finish_in_backward=finish, **_sizes(bucket_mb)
    ),
}
"""What there is to choose from; a reader may add to it (`register`)."""
OWN_NAMES = tuple(name for name in IMPLEMENTATIONS if name != TORCH)
"""labkit's wrappers."""
OVER_SHARED_MEMORY = ("bucketed_shared", "naive_shared")
"""Those for CPU tensors of ranks on one host only."""
BUCKETED = (TORCH, "bucketed", "bucketed_shared", "bucketed_sync")
"""Those to which a bucket size means something."""


DEFAULT_LAYOUT = "25 MiB, the first one 1 MiB"
"""The buckets without a size, of labkit's wrappers as of torch's."""


def _sizes(bucket_mb: float | None) -> dict[str, Any]:
    """Without a size labkit's defaults, which are torch's."""
    return {} if bucket_mb is None else {"bucket_mb": bucket_mb, "first_bucket_mb": bucket_mb}


def register(name: str, wrapper: Callable[[nn.Module], nn.Module]) -> dict[str, Wrapper]:
    """Add a reader's wrapper: called with the model, it returns a module whose gradients are means after `backward()`.

    If it has a method `finish_gradient_synchronization`, that is called first. ValueError for a name that is taken.
    """
    if name in (taken := (LOCAL, TORCH, *OWN_NAMES)):
        raise ValueError(f"expected a name other than {', '.join(taken)}")
    IMPLEMENTATIONS[name] = lambda module, _, finish: wrapper(module)
    return IMPLEMENTATIONS


def wrap(name: str, module: nn.Module, *, bucket_mb: float | None = None, finish_in_backward: bool = True) -> nn.Module:
    """The module under a wrapper; torch's finishes in backward always.

    `bucket_mb`, in MiB, is the size of every bucket, the first one's too, on every side. None: `DEFAULT_LAYOUT`.
    torch makes its first bucket smaller only where no size is given, and so it is done for labkit's.

    ValueError for a name that is none of `IMPLEMENTATIONS`.
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"no data-parallel implementation named {name!r}; there are {', '.join(IMPLEMENTATIONS)}")
    return IMPLEMENTATIONS[name](module, bucket_mb, finish_in_backward)
