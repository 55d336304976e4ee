"""Units of a model, whose parameters are gathered and given back together: what they are, and what belongs to which."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from labkit.parallel.data_parallel.layout import strides_like
from labkit.parallel.sharding.flat import Slot

Units = Iterable[type[nn.Module] | nn.Module]
LISTS = (nn.ModuleList, nn.ModuleDict)
"""They hold modules, and have no forward pass of their own."""


def find_units(module: nn.Module, units: Units | None) -> list[nn.Module]:
    """The units, in the order of the model, the model itself at the end: what belongs to no other belongs to that.

    None: the items of the outermost lists and sequences, which are layers as a rule, and beside these whatever has
    parameters. ValueError for a unit that is not in the model, and for a class that nothing in it is of.
    """
    if units is None:
        found = list(dict.fromkeys(_layers(module, isinstance(module, nn.Sequential))))
    else:
        asked = list(units)
        classes = tuple(unit for unit in asked if isinstance(unit, type))
        chosen = {id(unit) for unit in asked if not isinstance(unit, type)}
        found = [each for each in module.modules() if isinstance(each, classes) or id(each) in chosen]
        found = [each for each in found if each is not module]
        for unit in asked:
            if not any(
                each is unit or (isinstance(unit, type) and isinstance(each, unit)) for each in module.modules()
            ):
                raise ValueError(f"expected units that are in the model, or classes of such; got {_name(unit)}")
            if isinstance(unit, LISTS) or (isinstance(unit, type) and issubclass(unit, LISTS)):
                raise ValueError(f"expected units that have a forward pass, got {_name(unit)}")
    return [*found, module]


def _layers(module: nn.Module, in_list: bool) -> Iterator[nn.Module]:
    for child in module.children():
        if next(child.parameters(), None) is None:
            continue
        if isinstance(child, LISTS):
            yield from _layers(child, True)
        elif in_list or not any(isinstance(below, (*LISTS, nn.Sequential)) for below in child.modules()):
            yield child
        else:
            yield from _layers(child, isinstance(child, nn.Sequential))


def _name(unit: object) -> str:
    return unit.__name__ if isinstance(unit, type) else type(unit).__name__


def modules_by_unit(units: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """The modules of each unit, but for those of units inside of it; every module once."""
    numbers, taken = {id(unit): number for number, unit in enumerate(units)}, set[int]()
    found: list[list[nn.Module]] = [[] for _ in units]
    for _, module, number in _walk(units[-1], numbers, "", len(units) - 1):
        if id(module) not in taken:
            taken.add(id(module))
            found[number].append(module)
    return found


def slots_by_unit(units: Sequence[nn.Module]) -> list[list[Slot]]:
    """The parameters of each unit: of what is inside of several, the innermost; what several units use, the last's."""
    numbers = {id(unit): number for number, unit in enumerate(units)}
    slots: dict[int, Slot] = {}
    users: dict[int, set[int]] = {}
    for prefix, module, number in _walk(units[-1], numbers, "", len(units) - 1):
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            slot = slots.setdefault(id(parameter), Slot([], [], _on_meta(parameter), parameter.requires_grad))
            slot.names.append(prefix + name)
            slot.owners += [(module, name)] if (module, name) not in slot.owners else []
            users.setdefault(id(parameter), set()).add(number)
    found: list[list[Slot]] = [[] for _ in units]
    for key, slot in slots.items():
        number = users[key].pop()
        found[len(units) - 1 if users[key] else number].append(slot)
    return found


def _walk(module: nn.Module, numbers: dict[int, int], prefix: str, unit: int) -> Iterator[tuple[str, nn.Module, int]]:
    """Every module, as often as it is registered: prefix of its names, and the number of its unit."""
    unit = numbers.get(id(module), unit)
    yield prefix, module, unit
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, numbers, f"{prefix}{name}.", unit)


def _on_meta(parameter: Tensor) -> Tensor:
    strides = strides_like(parameter)
    return torch.empty_strided(parameter.shape, strides, dtype=parameter.dtype, device="meta")
