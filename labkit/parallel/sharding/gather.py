"""Units of FSDP: modules whose parameters are gathered, are whole, and are given back at the same time.

    shards   what the optimizer sees: this rank's rows, in the parameters' dtype; always there
    whole    what the unit computes with: parameters in the compute dtype, in memory that comes with `start_gathering`
             and goes with `release`

Autograd keeps `whole`, or views of it, for the backward pass. They name memory that is given back and gathered again
in between, so that autograd need not know. Reading it while it is away is an error: `release` counts up the tensors'
versions, as if they had been changed in place, and `start_gathering` counts them back.
"""

import weakref
from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from labkit.parallel.background_comm import Wait
from labkit.parallel.sharding.gradients import Bucket
from labkit.parallel.sharding.line import Line
from labkit.parallel.sharding.rows import Sharded, gather_rows, own_rows, row_strides, shard_parameter
from labkit.parallel.sharding.units import Slot

ALIGNMENT_BYTES = 64

_resize = torch.ops.inductor.resize_storage_bytes_  # an operator, which a ledger of memory sees


class Token:
    """An input that a unit's backward waits for; gone when the graph is."""


class Unit(Bucket):
    """Modules whose parameters are whole at the same time; `place` is its name in the model."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        modules: Sequence[nn.Module],
        slots: Sequence[Slot],
        dtypes: Sequence[torch.dtype],
        mesh: DeviceMesh,
    ):
        """`dtypes`: that each parameter is computed with in."""
        self.module, self.modules, self.slots = module, list(modules), list(slots)
        like = [slot.parameter.detach() for slot in slots]
        shards = [shard_parameter(slot.parameter, mesh, copy=True) for slot in slots]
        lengths = [each.numel() * dtype.itemsize for each, dtype in zip(like, dtypes, strict=True)]
        starts = [0, *accumulate(-(-length // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for length in lengths)]
        self._memory = torch.empty(starts[-1], dtype=torch.uint8, device=like[0].device if like else mesh.device_type)

        def lay_out(memory: Tensor) -> list[Tensor]:
            parts = (memory[start : start + length] for start, length in zip(starts, lengths, strict=False))
            return [
                part.view(dtype).as_strided(each.shape, row_strides(each))
                for part, dtype, each in zip(parts, dtypes, like, strict=True)
            ]

        self._places = lay_out(self._memory)
        self._own = [own_rows(place, mesh.get_local_rank(), mesh.size()) for place in self._places]
        whole = [nn.Parameter(view, requires_grad=False) for view in lay_out(self._memory.data)]
        for parameter, shard in zip(whole, shards, strict=True):
            parameter.__dict__.update(shard.__dict__)
        super().__init__(name, whole, shards)
        self._attach(whole=False)
        _resize(self._memory, 0)
        self._wait: Wait | None = None
        self.gathered_versions: list[tuple[int, int, int]] = []
        """Those of the shards when they were gathered last."""
        self.is_whole = False
        """Gathered, or being gathered."""
        self.is_attached = False
        """Modules have whole parameters."""
        self.is_held = False
        """Kept whole until a graph that autograd has made of a backward pass has been used."""
        self.in_backward = False
        """The backward pass has come here."""
        self.depth = 0
        """How many calls of its module are under way."""
        self.pending_inputs: weakref.WeakSet[Token] = weakref.WeakSet()
        self.reached_inputs: weakref.WeakSet[Token] = weakref.WeakSet()

    @property
    def has_frozen(self) -> bool:
        return any(not p.requires_grad for p in self.whole)

    @property
    def is_over(self) -> bool:
        """Whether backward needs its parameters no more: each gradient comes after all uses of the parameter."""
        is_complete = self.is_complete and not (self.is_last and self.whole)
        return is_complete and not self.is_held and not (self.has_frozen and self.pending_inputs)

    @property
    def is_stale(self) -> bool:
        """Whether shards have changed since they were gathered."""
        return self.gathered_versions != self.current_versions()

    def current_versions(self) -> list[tuple[int, int, int]]:
        """Return address and versions of each shard and its rows, which tell whether they have changed."""
        rows = [shard._local_tensor for shard in self.shards]
        return [(row.data_ptr(), row._version, shard._version) for row, shard in zip(rows, self.shards, strict=True)]

    def start_gathering(self, line: Line) -> None:
        """Begin to make the parameters whole. A collective."""
        if not self.is_whole:
            self.is_whole, self.gathered_versions = True, self.current_versions()
            if self.whole:
                _resize(self._memory, self._memory.nbytes)
                torch._C._autograd._unsafe_set_version_counter(tuple(self.whole), (0,) * len(self.whole))
                self._wait = line.start(self.place, partial(self._gather, line))

    def _gather(self, line: Line) -> None:
        torch._foreach_copy_(self._own, [shard._local_tensor for shard in self.shards])
        line.call(gather_rows, self._places)

    def finish_gathering(self) -> None:
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()

    def release(self) -> None:
        """Give the memory of whole parameters back."""
        self.attach(whole=False)
        if self.is_whole:
            self.finish_gathering()
            self.is_whole = self.is_held = False
            if self.whole:
                _resize(self._memory, 0)
                torch.autograd.graph.increment_version(self.whole)

    def attach(self, *, whole: bool) -> None:
        """Modules have whole parameters, or shards."""
        if whole != self.is_attached:
            self._attach(whole=whole)

    def _attach(self, *, whole: bool) -> None:
        self.is_attached = whole
        for slot, parameter in zip(self.slots, self.whole if whole else self.shards, strict=True):
            for module, name in slot.owners:
                module._parameters[name] = parameter

    def follow(self) -> None:
        """What users have frozen or thawed is so for whole parameters; ValueError for what cannot be followed."""
        for slot, shard, whole in zip(self.slots, self.shards, self.whole, strict=True):
            if any(module._parameters.get(name) is not shard for module, name in slot.owners):
                raise ValueError(f"{slot.names[0]} was replaced or removed: change the model before wrapping it")
            if type(shard) is not Sharded:
                raise ValueError(f"{slot.names[0]} was moved or cast: put the model where it is to be before wrapping")
            if whole.requires_grad != shard.requires_grad:
                whole.requires_grad_(shard.requires_grad)

    def leave_pass(self) -> None:
        super().leave_pass()
        self.in_backward = False
        self.pending_inputs |= self.reached_inputs  # a graph may be gone through again
        self.reached_inputs.clear()
