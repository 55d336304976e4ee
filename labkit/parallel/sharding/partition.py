"""How a model is cut into units, and which parameters belong to which."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

Units = Iterable[type[nn.Module] | nn.Module]


def find_units(module: nn.Module, units: Units | None) -> list[nn.Module]:
    """Return the units in the order of the model. The last is the model itself, with the parameters
    of no other.

    None: the items of the outermost lists and sequences, usually layers, and outside of them every
    module with parameters and a forward. ValueError for a unit that is not in the model, or that
    has no forward.
    """
    if units is None:
        return [*dict.fromkeys(_layers(module, isinstance(module, nn.Sequential))), module]
    chosen = set[nn.Module]()
    for unit in units:
        kind = unit if isinstance(unit, type) else type(unit)
        matching = [
            each
            for each in module.modules()
            if each is unit or (kind is unit and isinstance(each, kind))
        ]
        if not matching or not all(map(_has_forward, matching)):
            raise ValueError(
                f"expected units with a forward in the model, or their classes; got {kind.__name__}"
            )
        chosen.update(matching)
    return [*(each for each in module.modules() if each in chosen and each is not module), module]


def _layers(module: nn.Module, in_list: bool) -> Iterator[nn.Module]:
    # it reads its children's parameters
    if isinstance(module, nn.MultiheadAttention | nn.TransformerEncoderLayer):
        return
    for child in module.children():
        if next(child.parameters(), None) is None:
            continue
        is_list = isinstance(child, nn.ModuleList | nn.ModuleDict)
        holds_layers = any(
            isinstance(each, nn.ModuleList | nn.ModuleDict | nn.Sequential)
            for each in child.modules()
        )
        if is_list or (holds_layers and not in_list):
            yield from _layers(child, is_list or isinstance(child, nn.Sequential))
        elif _has_forward(child):
            yield child


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward and not isinstance(
        module, nn.ModuleList | nn.ModuleDict
    )


@dataclass
class ManagedParameter:
    """A parameter, its name in the model, and its owners: modules, and its name in each."""

    parameter: nn.Parameter
    name: str
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)
    units: set[int] = field(default_factory=set)


@dataclass
class UnitMembers:
    """A unit's name in the model, and the modules and parameters that are in no unit inside it."""

    name: str
    module: nn.Module
    modules: list[nn.Module] = field(default_factory=list)
    parameters: list[ManagedParameter] = field(default_factory=list)
    shares_with_model: bool = False
    """It has a parameter that is tied to another unit's, and so belongs to the model."""


def partition(
    units: Sequence[nn.Module], ignored: Collection[nn.Parameter] = ()
) -> list[UnitMembers]:
    """Return the members of each unit. The last unit is the model.

    Parameters of several units belong to the model; `ignored` ones to none.
    """
    model = units[-1]
    last = len(units) - 1
    numbers = {unit: number for number, unit in enumerate(units)}
    names = {module: name or "the model" for name, module in model.named_modules()}
    members = [UnitMembers(names[unit], unit) for unit in units]
    managed: dict[nn.Parameter, ManagedParameter] = {}
    unit_at: dict[str, int] = {}
    # With duplicates: a module may be part of several units, and parents come before children.
    for path, module in model.named_modules(remove_duplicate=False):
        parent = path.rpartition(".")[0]
        number = numbers.get(module, unit_at.get(parent, last))
        unit_at[path] = number
        members[number].modules.append(module)
        for name, parameter in module._parameters.items():
            if parameter is None or parameter in ignored:
                continue
            full_name = f"{path}.{name}".lstrip(".")
            entry = managed.setdefault(parameter, ManagedParameter(parameter, full_name))
            if (module, name) not in entry.owners:
                entry.owners.append((module, name))
            entry.units.add(number)
    for entry in managed.values():
        # Tied over units, it must be in memory while either runs: the model's unit always is.
        number = last if len(entry.units) > 1 else min(entry.units)
        members[number].parameters.append(entry)
        for unit in entry.units - {number}:
            members[unit].shares_with_model = True
    return members
