"""What a sharded optimizer checks before any collective, and what ranks compare of it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from labkit.parallel.data_parallel.layout import strides_like


def check_parameters(parameters: list[Tensor]) -> None:
    """ValueError for parameters that an optimizer in shards cannot take."""
    check(len(parameters) > 0, "expected one parameter or more")
    check(len(set(parameters)) == len(parameters), "expected every parameter once")
    check(len({p.device for p in parameters}) == 1, "expected parameters on one device")
    check(
        all(p.layout is torch.strided and (not p.numel() or p.stride() == strides_like(p)) for p in parameters),
        "expected dense parameters, whose elements lie side by side in memory",
    )


def describe_parameter(parameter: Tensor) -> str:
    """What has to be alike on all ranks."""
    return f"{tuple(parameter.shape)}, {parameter.dtype}, strides {parameter.stride()}, {parameter.requires_grad}"


def describe_group(group: Mapping[str, Any]) -> str:
    """The same of a parameter group."""
    plain = {name: value for name, value in group.items() if isinstance(value, bool | int | float | str | tuple | None)}
    return f"{len(group['params'])} parameters, {plain}"


def check(is_right: bool, expected: str) -> None:
    """ValueError that says what was expected, unless it is right."""
    if not is_right:
        raise ValueError(expected)
