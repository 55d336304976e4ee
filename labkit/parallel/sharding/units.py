"""Units of FSDP: modules whose parameters are gathered, whole and released at the same time.

    shards   for the optimizer: this rank's rows, in the parameters' dtype; always there
    whole    for the module: parameters in the compute dtype, in memory from `allocate` to `release`

Autograd saves `whole`, or views of it, for the backward pass. Their memory is released and gathered again in between,
which autograd does not notice. To read released memory is an error: `release` raises the tensors' version counters, as
a change in place would, and `allocate` resets them.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _BatchNorm

from labkit.parallel.background_comm import Wait
from labkit.parallel.sharding.gradients import Bucket
from labkit.parallel.sharding.rows import Sharded, own_rows, row_strides, shard_parameter

Units = Iterable[type[nn.Module] | nn.Module]
ALIGNMENT_BYTES = 64

_resize = torch.ops.inductor.resize_storage_bytes_  # an operator, which the allocation ledger sees


def find_units(module: nn.Module, units: Units | None) -> list[nn.Module]:
    """Return the units in the order of the model. The last is the model itself, with the parameters of no other.

    None: the items of the outermost lists and sequences, usually layers, and outside of them every module with
    parameters and a forward. ValueError for a unit that is not in the model, or that has no forward.
    """
    if units is None:
        return [*dict.fromkeys(_layers(module, isinstance(module, nn.Sequential))), module]
    units = list(units)
    for unit in units:
        if not any(each is unit or (isinstance(unit, type) and isinstance(each, unit)) for each in module.modules()):
            name = unit.__name__ if isinstance(unit, type) else type(unit).__name__
            raise ValueError(f"expected units that are in the model, or classes of such; got {name}")
    classes = tuple(unit for unit in units if isinstance(unit, type))
    matching = [each for each in module.modules() if isinstance(each, classes) or each in units]
    for each in matching:
        if not _has_forward(each):
            raise ValueError(f"expected units that have a forward, got {type(each).__name__}")
    return [*(each for each in matching if each is not module), module]


def _layers(module: nn.Module, in_list: bool) -> Iterator[nn.Module]:
    if isinstance(module, nn.MultiheadAttention | nn.TransformerEncoderLayer):  # it reads its children's parameters
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


@dataclass
class Slot:
    """A parameter, its name in the model, and the modules that have it, each with its name there."""

    parameter: nn.Parameter
    name: str
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)
    units: set[int] = field(default_factory=set)


def partition(units: Sequence[nn.Module]) -> list[tuple[list[nn.Module], list[Slot]]]:
    """Return modules and parameters by innermost unit. Parameters of several units belong to the last."""
    numbers, last = {unit: number for number, unit in enumerate(units)}, len(units) - 1
    owner: dict[nn.Module, int] = {}
    slots: dict[nn.Parameter, Slot] = {}

    def visit(module: nn.Module, prefix: str, number: int) -> None:
        number = numbers.get(module, number)
        owner.setdefault(module, number)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                slot = slots.setdefault(parameter, Slot(parameter, prefix + name))
                slot.owners += [(module, name)] if (module, name) not in slot.owners else []
                slot.units.add(number)
        for name, child in module._modules.items():
            if child is not None:
                visit(child, f"{prefix}{name}.", number)

    visit(units[-1], "", last)
    parts: list[tuple[list[nn.Module], list[Slot]]] = [([], []) for _ in units]
    for module, number in owner.items():
        parts[number][0].append(module)
    for slot in slots.values():
        parts[last if len(slot.units) > 1 else min(slot.units)][1].append(slot)
    return parts


class Token:
    """An input whose gradient a unit's frozen parameters wait for. It goes with its graph."""


class Unit(Bucket):
    """Modules whose parameters are whole at the same time; `name` is the unit's name in the model."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        modules: Sequence[nn.Module],
        slots: Sequence[Slot],
        mesh: DeviceMesh,
        *,
        compute_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
        is_last: bool,
    ):
        """Cut the parameters of `slots` into shards, and put these into the modules."""
        self.module, self.modules, self.slots = module, list(modules), list(slots)
        like = [slot.parameter.detach() for slot in slots]
        dtypes = [_dtype(slot, compute_dtype) for slot in slots]
        shards = [shard_parameter(slot.parameter, mesh, copy=True) for slot in slots]
        lengths = [each.numel() * dtype.itemsize for each, dtype in zip(like, dtypes, strict=True)]
        starts = [0, *accumulate(-(-length // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for length in lengths)]
        self._memory = torch.empty(starts[-1], dtype=torch.uint8, device=like[0].device if like else mesh.device_type)

        def make_views(memory: Tensor) -> list[Tensor]:
            parts = (memory[start : start + length] for start, length in zip(starts, lengths, strict=False))
            return [
                part.view(dtype).as_strided(each.shape, row_strides(each))
                for part, dtype, each in zip(parts, dtypes, like, strict=True)
            ]

        self.places = make_views(self._memory)
        """Where rows are gathered; whole parameters, the same memory, have version counters of their own."""
        self._own = [own_rows(place, mesh.get_local_rank(), mesh.size()) for place in self.places]
        whole = [nn.Parameter(view, requires_grad=False) for view in make_views(self._memory.data)]
        for parameter, shard in zip(whole, shards, strict=True):
            parameter.__dict__.update(shard.__dict__)
        super().__init__(name, whole, shards, shards, reduce_dtype, is_last)
        self.is_attached = True
        """Modules have whole parameters."""
        self.attach(whole=False)
        _resize(self._memory, 0)
        self.wait: Wait | None = None
        """Waits for a gather in flight."""
        self.gathered_versions: list[tuple[int, int, int]] = []
        """Versions of the shards at the last gather."""
        self.is_whole = False
        """Gathered, or being gathered."""
        self.in_backward = False
        """The backward pass has reached it."""
        self.depth = 0
        """Calls of its module in progress."""
        self.pending_inputs: weakref.WeakSet[Token] = weakref.WeakSet()
        self.reached_inputs: weakref.WeakSet[Token] = weakref.WeakSet()

    @property
    def has_frozen(self) -> bool:
        return any(not p.requires_grad for p in self.whole)

    @property
    def is_over(self) -> bool:
        """Whether backward needs its parameters no more. A gradient is complete after all uses of its parameter."""
        is_complete = self.is_complete and not (self.is_last and self.whole)
        return is_complete and not (self.has_frozen and self.pending_inputs)

    def current_versions(self) -> list[tuple[int, int, int]]:
        """Return address and versions of each shard and its rows, which tell whether they have changed."""
        rows = [shard._local_tensor for shard in self.shards]
        return [(row.data_ptr(), row._version, shard._version) for row, shard in zip(rows, self.shards, strict=True)]

    def allocate(self) -> None:
        """Allocate memory for whole parameters."""
        self.is_whole, self.gathered_versions = True, self.current_versions()
        if self.whole:
            _resize(self._memory, self._memory.nbytes)
            torch._C._autograd._unsafe_set_version_counter(tuple(self.whole), (0,) * len(self.whole))

    def copy_own_rows(self) -> None:
        """Copy this rank's rows to their places."""
        torch._foreach_copy_(self._own, [shard._local_tensor for shard in self.shards])

    def release(self) -> None:
        """Release the memory of whole parameters."""
        self.attach(whole=False)
        if self.is_whole:
            self.finish_gather()
            self.is_whole = False
            if self.whole:
                _resize(self._memory, 0)
                torch.autograd.graph.increment_version(self.whole)

    def finish_gather(self) -> None:
        """Wait for a gather in flight."""
        wait, self.wait = self.wait, None
        if wait is not None:
            wait()

    def attach(self, *, whole: bool) -> None:
        """Put whole parameters, or shards, into the modules."""
        if whole == self.is_attached:
            return
        self.is_attached = whole
        for slot, parameter in zip(self.slots, self.whole if whole else self.shards, strict=True):
            for module, name in slot.owners:
                module._parameters[name] = parameter

    def sync_with_shards(self) -> None:
        """Freeze and thaw whole parameters as the user did the shards; ValueError for replaced, moved or cast ones."""
        for slot, shard, whole in zip(self.slots, self.shards, self.whole, strict=True):
            if any(module._parameters.get(name) is not shard for module, name in slot.owners):
                raise ValueError(f"{slot.name} was replaced or removed: change the model before wrapping it")
            if type(shard) is not Sharded:
                raise ValueError(f"{slot.name} was moved or cast: move and cast the model before wrapping it")
            if whole.requires_grad != shard.requires_grad:
                whole.requires_grad_(shard.requires_grad)

    def reset_pass(self) -> None:
        super().reset_pass()
        self.in_backward = False
        self.pending_inputs |= self.reached_inputs  # autograd may run a graph again
        self.reached_inputs.clear()


def _dtype(slot: Slot, compute_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype that a parameter is computed in; BatchNorm keeps its own."""
    own = slot.parameter.dtype
    keeps = not own.is_floating_point or any(isinstance(owner, _BatchNorm) for owner, _ in slot.owners)
    return own if keeps or compute_dtype is None else compute_dtype
