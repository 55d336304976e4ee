"""Units of a model, whose parameters are gathered and given back together: which modules, and which parameters."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

Units = Iterable[type[nn.Module] | nn.Module]


@dataclass
class Slot:
    """A parameter: its names, where modules have it, and what is to be done with it."""

    parameter: nn.Parameter
    names: list[str] = field(default_factory=list)
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)
    users: set[int] = field(default_factory=set)
    """Numbers of the units that have it."""


def find_units(module: nn.Module, units: Units | None) -> list[nn.Module]:
    """The units, in the order of the model, the model itself at the end: what belongs to no other belongs to that.

    None: the items of the outermost lists and sequences, which are layers as a rule, and besides these whatever has
    parameters and a forward pass. ValueError for a unit that is not in the model, and for a class that nothing is of.
    """
    if units is None:
        return [*dict.fromkeys(_layers(module, isinstance(module, nn.Sequential))), module]
    chosen = list(units)
    for unit in chosen:
        if not any(each is unit or (isinstance(unit, type) and isinstance(each, unit)) for each in module.modules()):
            raise ValueError(f"expected units that are in the model, or classes of such; got {_name(unit)}")
    classes = tuple(unit for unit in chosen if isinstance(unit, type))
    named = {id(unit) for unit in chosen if not isinstance(unit, type)}
    matching = [each for each in module.modules() if isinstance(each, classes) or id(each) in named]
    for each in matching:
        if not _has_forward(each):
            raise ValueError(f"expected units that have a forward pass, got {type(each).__name__}")
    return [*(each for each in matching if each is not module), module]


def _layers(module: nn.Module, in_list: bool) -> Iterator[nn.Module]:
    if isinstance(module, nn.MultiheadAttention):  # it reads the parameters of its part
        return
    for child in module.children():
        if next(child.parameters(), None) is None:
            continue
        is_list = isinstance(child, nn.ModuleList | nn.ModuleDict)
        holds_layers = any(isinstance(each, nn.ModuleList | nn.ModuleDict | nn.Sequential) for each in child.modules())
        if is_list or (holds_layers and not in_list):
            yield from _layers(child, is_list or isinstance(child, nn.Sequential))
        elif _has_forward(child):
            yield child


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward and not isinstance(module, nn.ModuleList | nn.ModuleDict)


def _name(unit: object) -> str:
    return unit.__name__ if isinstance(unit, type) else type(unit).__name__


def modules_by_unit(units: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """The modules of each unit, but for those of units inside of it; every module once."""
    numbers, visited = {id(unit): number for number, unit in enumerate(units)}, set[int]()
    modules: list[list[nn.Module]] = [[] for _ in units]
    for _, module, number in _walk(units[-1], numbers, "", len(units) - 1):
        if id(module) not in visited:
            visited.add(id(module))
            modules[number].append(module)
    return modules


def slots_by_unit(units: Sequence[nn.Module]) -> list[list[Slot]]:
    """The parameters of each unit: of what is inside of several, the innermost; what several units use, the last's."""
    numbers = {id(unit): number for number, unit in enumerate(units)}
    slots: dict[int, Slot] = {}
    for prefix, module, number in _walk(units[-1], numbers, "", len(units) - 1):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                slot = slots.setdefault(id(parameter), Slot(parameter))
                slot.names.append(prefix + name)
                slot.owners += [(module, name)] if (module, name) not in slot.owners else []
                slot.users.add(number)
    by_unit: list[list[Slot]] = [[] for _ in units]
    for slot in slots.values():
        by_unit[len(units) - 1 if len(slot.users) > 1 else min(slot.users)].append(slot)
    return by_unit


def _walk(module: nn.Module, numbers: dict[int, int], prefix: str, unit: int) -> Iterator[tuple[str, nn.Module, int]]:
    """Every module, as often as it is registered: prefix of its names, and the number of its unit."""
    unit = numbers.get(id(module), unit)
    yield prefix, module, unit
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, numbers, f"{prefix}{name}.", unit)
