"""A unit of FSDP: modules whose parameters are whole at the same time, in one vector per dtype.

    shards   what the optimizer sees: this rank's rows, in the parameters' dtype; always there
    whole    what the unit computes with: parameters in the compute dtype, views of one vector whose memory comes with
             `gather` and goes with `release`

Autograd keeps `whole`, or views of it, for the backward pass. They name memory that is given back and gathered again
in between, so that autograd need not know. Reading it while it is away is an error: `release` counts up the tensors'
versions, as if they had been changed in place, and `gather` counts them back.
"""

import weakref
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from labkit.parallel.background_comm import Wait
from labkit.parallel.collectives import all_gather
from labkit.parallel.sharding.gradients import Bucket, Line
from labkit.parallel.sharding.layout import Layout, Sharded, shard_parameter
from labkit.parallel.sharding.units import Slot

_resize = torch.ops.inductor.resize_storage_bytes_  # an operator, which a ledger of memory sees


class Flat(Bucket):
    """Parameters of one dtype of a unit."""

    def __init__(self, place: str, slots: Sequence[Slot], mesh: DeviceMesh, dtype: torch.dtype, reduce: torch.dtype):
        self.slots = list(slots)
        like = [slot.parameter.detach() for slot in slots]
        shards = [shard_parameter(slot.parameter, mesh, copy=True) for slot in slots]
        self._memory = torch.empty(sum(each.numel() for each in like), dtype=dtype, device=like[0].device)
        self._views = _views(self._memory, like)
        whole = [nn.Parameter(view, requires_grad=False) for view in _views(self._memory.data, like)]
        for parameter, shard in zip(whole, shards, strict=True):
            parameter.__dict__.update(shard.__dict__)
        super().__init__(place, whole, shards, Layout(like, mesh))
        self.reduce_dtype = reduce
        self.attach(whole=False)
        _resize(self._memory, 0)

    @property
    def gathered_bytes(self) -> int:
        """Bytes that travel to make the parameters whole, p - 1 parts of p of them to each rank."""
        return self.layout.numel * self._memory.itemsize

    def gather(self, line: Line, buffer: Tensor) -> Wait:
        """Begin to make the parameters whole, by way of the buffer, bytes. A collective."""
        _resize(self._memory, self._memory.nbytes)
        torch._C._autograd._unsafe_set_version_counter(tuple(self.whole), (0,) * len(self.whole))
        return line.start(self.place, partial(self._gather, line, buffer))

    def _gather(self, line: Line, buffer: Tensor) -> None:
        vector = buffer[: self.gathered_bytes].view(self._memory.dtype)
        own = self.layout.own_views(self.layout.own_part(vector))
        torch._foreach_copy_(own, [shard._local_tensor for shard in self.shards])
        line.call(all_gather, vector)
        self.layout.unpack(vector, self._views)

    def release(self) -> None:
        """Give the memory of whole parameters back."""
        _resize(self._memory, 0)
        torch.autograd.graph.increment_version(self.whole)

    def attach(self, *, whole: bool) -> None:
        """Modules have whole parameters, or shards."""
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


def _views(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Tensors in a vector, end to end, shaped and laid out as these."""
    views, start = [], 0
    for each in like:
        views.append(vector.as_strided(each.shape, torch.empty_like(each, device="meta").stride(), start))
        start += each.numel()
    return views


class Token:
    """An input that a unit's backward waits for; gone when the graph is."""


class Unit:
    """Modules whose parameters are whole at the same time; `name` is in the model."""

    def __init__(self, name: str, module: nn.Module, modules: Sequence[nn.Module], flats: Sequence[Flat]):
        self.name, self.module, self.modules, self.flats = name, module, list(modules), list(flats)
        self._waits: list[Wait] = []
        self._versions: list[tuple[int, int]] = []
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
        self.waits_for: weakref.WeakSet[Token] = weakref.WeakSet()
        self.reached: weakref.WeakSet[Token] = weakref.WeakSet()

    @property
    def has_frozen(self) -> bool:
        return any(not p.requires_grad for flat in self.flats for p in flat.whole)

    @property
    def is_over(self) -> bool:
        """Whether backward needs its parameters no more: each gradient comes after all uses of the parameter."""
        is_complete = all(flat.is_complete and not flat.is_last for flat in self.flats)
        return is_complete and not self.is_held and not (self.has_frozen and self.waits_for)

    @property
    def is_stale(self) -> bool:
        """Whether shards have changed since they were gathered."""
        return self._versions != self._current_versions()

    def _current_versions(self) -> list[tuple[int, int]]:
        return [(s._local_tensor.data_ptr(), s._local_tensor._version) for flat in self.flats for s in flat.shards]

    def start_gathering(self, line: Line, buffer: Tensor) -> None:
        if not self.is_whole:
            self.is_whole, self._versions = True, self._current_versions()
            self._waits = [flat.gather(line, buffer) for flat in self.flats]

    def finish_gathering(self) -> None:
        waits, self._waits = self._waits, []
        for wait in waits:
            wait()

    def attach(self, *, whole: bool) -> None:
        """Modules have whole parameters, or shards."""
        if whole != self.is_attached:
            self.is_attached = whole
            for flat in self.flats:
                flat.attach(whole=whole)

    def release(self) -> None:
        """Give whole parameters back."""
        self.attach(whole=False)
        if self.is_whole:
            self.finish_gathering()
            self.is_whole = self.is_held = False
            for flat in self.flats:
                flat.release()

    def leave_pass(self) -> None:
        self.in_backward = False
        self.waits_for |= self.reached  # a graph may be gone through again
        self.reached.clear()
