"""From a module to units: one after the other made real if need be, given rank 0's values, and cut into shards."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.parallel.data_parallel.consistency import broadcast
from labkit.parallel.data_parallel.layout import strides_like
from labkit.parallel.prepare import FLOAT_TYPES
from labkit.parallel.sharding.flat import Flat
from labkit.parallel.sharding.partition import by_elements, by_parameters
from labkit.parallel.sharding.unit import MODULES, Unit
from labkit.parallel.sharding.units import modules_by_unit, slots_by_unit

Initialize = Callable[[nn.Module], object]


def reset_parameters(module: nn.Module) -> None:
    """What torch's own modules fill their parameters and buffers with."""
    module.reset_parameters()  # type: ignore[operator]


def check_module(module: nn.Module, device: torch.device, initialize: Initialize) -> None:
    """ValueError for parameters that cannot be sharded, and for what is on the meta device and cannot be made."""
    tensors = [*module.parameters(), *module.buffers()]
    if elsewhere := {str(tensor.device) for tensor in tensors} - {str(device), "meta"}:
        raise ValueError(f"expected all parameters and buffers on {device}, or on meta; got {', '.join(elsewhere)}")
    for name, parameter in module.named_parameters():
        if parameter.layout is not torch.strided:
            raise ValueError(f"expected dense parameters, got {name}, {parameter.layout}")
        if parameter.requires_grad and parameter.dtype not in FLOAT_TYPES:
            raise ValueError(f"labkit adds real floating-point numbers only; {name} is trained and {parameter.dtype}")
    for name, each in module.named_modules():
        if each in MODULES:
            raise ValueError(f"expected a module that is not sharded yet, and {name or 'the model'} is")
        if initialize is reset_parameters and _is_on_meta(each) and not hasattr(each, "reset_parameters"):
            kind = type(each).__name__
            raise ValueError(
                f"{name or 'the model'} ({kind}) is on meta and has no reset_parameters(): pass initialize"
            )


def make_units(
    modules: Sequence[nn.Module],
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    compute_dtype: torch.dtype | None,
    replicate_below: int,
    elementwise: bool,
    initialize: Initialize,
) -> list[Unit]:
    """Units of these modules, the whole model last. A collective; one unit at a time is whole."""
    loads = {trained: [0] * group.size() for trained in (True, False)}
    units, members = [], modules_by_unit(modules)
    for number, (module, slots) in enumerate(zip(modules, slots_by_unit(modules), strict=True)):
        for below in members[number]:
            _make_real(below, device, initialize)
        values = [_dense(getattr(*slot.owners[0]).detach()) for slot in slots]
        broadcast([*values, *(buffer for below in members[number] for buffer in below.buffers(recurse=False))], group)
        kinds: dict[tuple[torch.dtype, bool, bool], list[int]] = {}
        for at, slot in enumerate(slots):
            kinds.setdefault((slot.like.dtype, slot.is_trained, slot.like.dim() < replicate_below), []).append(at)
        flats = []
        for (dtype, _, is_replicated), of_kind in kinds.items():
            alike = [slots[at].like for at in of_kind]
            if is_replicated:
                pieces = None
            else:
                pieces = by_elements(alike, 0, group.size()) if elementwise else by_parameters(alike, 0, loads)
            computed = compute_dtype if compute_dtype is not None and dtype.is_floating_point else dtype
            whole = [values[at] for at in of_kind]
            flats.append(Flat([slots[at] for at in of_kind], whole, pieces, group.rank(), computed))
        inside = set(module.modules()) - {module}
        units.append(Unit(number, module, flats, any(other in inside for other in modules)))
    return units


def _make_real(module: nn.Module, device: torch.device, initialize: Initialize) -> None:
    if _is_on_meta(module):
        module.to_empty(device=device, recurse=False)
        with torch.no_grad():
            initialize(module)


def _is_on_meta(module: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)))


def _dense(value: Tensor) -> Tensor:
    if value.stride() == strides_like(value):
        return value
    return torch.empty_strided(value.shape, strides_like(value), dtype=value.dtype, device=value.device).copy_(value)
