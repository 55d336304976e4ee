"""The table of implementations to choose from: labkit's wrappers and torch's, under one call."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labkit.parallel.data_parallel.after_backward import FlatDDP, NaiveDDP
from labkit.parallel.data_parallel.during_backward import BucketedDDP, OverlappedDDP

TORCH = "torch"

_WRAPPERS: Mapping[str, Callable[[nn.Module, float, bool], nn.Module]] = MappingProxyType(
    {
        TORCH: lambda module, bucket_mb, _: DistributedDataParallel(
            module, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True
        ),
        "naive": lambda module, _, finish: NaiveDDP(module, finish_in_backward=finish),
        "flat": lambda module, _, finish: FlatDDP(module, finish_in_backward=finish),
        "overlapped": lambda module, _, finish: OverlappedDDP(module, finish_in_backward=finish),
        "bucketed": lambda module, bucket_mb, finish: BucketedDDP(
            module, bucket_mb=bucket_mb, finish_in_backward=finish
        ),
        "bucketed_sync": lambda module, bucket_mb, finish: BucketedDDP(
            module, bucket_mb=bucket_mb, overlap=False, finish_in_backward=finish
        ),
    }
)
IMPLEMENTATIONS = tuple(_WRAPPERS)
BUCKETED = (TORCH, "bucketed", "bucketed_sync")
"""Those to which a bucket size means something."""


def wrap(name: str, module: nn.Module, *, bucket_mb: float = 25.0, finish_in_backward: bool = True) -> nn.Module:
    """The module under a wrapper. `bucket_mb` is in MiB on every side; torch's finishes in backward always.

    ValueError for a name that is none of `IMPLEMENTATIONS`.
    """
    if name not in _WRAPPERS:
        raise ValueError(f"no data-parallel implementation named {name!r}; there are {', '.join(IMPLEMENTATIONS)}")
    return _WRAPPERS[name](module, bucket_mb, finish_in_backward)
