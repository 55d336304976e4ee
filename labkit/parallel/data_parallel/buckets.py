"""Buckets: gradients that are averaged together, in one flat buffer that lives as long as the wrapper."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from labkit.parallel.data_parallel.layout import strides_like

Schedule = Callable[[dict[str, Tensor]], Sequence[Iterable[str]]]
"""From trained parameters by name, as backward makes their gradients, to the names in each bucket, in order."""
MIB = 2**20
ALIGNMENT = 16  # elements: 64 bytes of float32


class Bucket:
    """Some parameters, by index, and a flat buffer with a view for the gradient of each."""

    def __init__(self, indices: Sequence[int], parameters: Sequence[Tensor], buffer: Tensor):
        """`parameters` are those of the indices, of one dtype and device; `buffer` holds as many elements."""
        self.indices = tuple(indices)
        self.buffer = buffer.zero_()
        self.views: dict[int, Tensor] = {}
        offset = 0
        for index, parameter in zip(indices, parameters, strict=True):
            self.views[index] = self.buffer.as_strided(
                parameter.shape, strides_like(parameter), buffer.storage_offset() + offset
            )
            offset += parameter.numel()
        self.missing = len(self.indices)
        """Gradients of this pass that have not come yet."""


def make_buckets(
    assigned: Sequence[Sequence[int]],
    parameters: Sequence[Tensor],
    empty: Callable[[int, torch.dtype, torch.device], Tensor],
) -> list[Bucket]:
    """Buckets of these parameters by index; those of a dtype and device lie in one piece of memory, from `empty`."""
    sizes = [sum(parameters[index].numel() for index in indices) for indices in assigned]
    kinds = [(parameters[indices[0]].dtype, parameters[indices[0]].device) for indices in assigned]
    buckets: dict[int, Bucket] = {}
    for kind in dict.fromkeys(kinds):
        numbers = [number for number, of_bucket in enumerate(kinds) if of_bucket == kind]
        aligned = [-(-sizes[number] // ALIGNMENT) * ALIGNMENT for number in numbers]
        memory = empty(sum(aligned), *kind)
        for number, part in zip(numbers, memory.split(aligned), strict=True):
            indices = assigned[number]
            buckets[number] = Bucket(indices, [parameters[index] for index in indices], part[: sizes[number]])
    return [buckets[number] for number in range(len(assigned))]


def assign_to_buckets(parameters: Sequence[Tensor], bucket_mb: float, first_bucket_mb: float) -> list[list[int]]:
    """Indices by bucket, in the given order; a bucket is full once it holds `bucket_mb` MiB of gradients or more.

    One dtype and device a bucket. The first bucket of each is full at `first_bucket_mb`, so that communication
    begins early; a parameter larger than a bucket has one of its own or ends one. As torch's
    `_compute_bucket_assignment_by_size`. Buckets come in the order in which they are full.
    """
    if not (bucket_mb > 0 and first_bucket_mb > 0):
        raise ValueError(f"expected bucket sizes above 0 MB, got {bucket_mb} and {first_bucket_mb}")
    done: list[list[int]] = []
    begun: set[tuple[torch.dtype, torch.device]] = set()
    filling: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, parameter in enumerate(parameters):
        key = (parameter.dtype, parameter.device)
        bucket = filling.setdefault(key, [])
        bucket.append(index)
        n_bytes = sum(parameters[i].numel() * parameters[i].element_size() for i in bucket)
        if n_bytes >= MIB * (bucket_mb if key in begun else min(first_bucket_mb, bucket_mb)):
            done.append(filling.pop(key))
            begun.add(key)
    return done + sorted(filling.values())


def assign_by_schedule(schedule: Schedule, parameters: Mapping[str, Tensor]) -> list[list[int]]:
    """Indices by bucket, as a schedule has it. ValueError unless every parameter is in one bucket, of one dtype."""
    assigned = [list(names) for names in schedule(dict(parameters))]
    times = Counter(name for names in assigned for name in names)
    for name in {**parameters, **times}:
        if name not in parameters:
            raise ValueError(f"expected names of parameters, got {name!r}")
        if times[name] != 1:
            raise ValueError(f"expected every parameter in one bucket, got {name!r} in {times[name]}")
    for names in assigned:
        if len({(parameters[name].dtype, parameters[name].device) for name in names}) != 1:
            raise ValueError(f"expected parameters of one dtype and device in a bucket, got {names!r:.80}")
    places = {name: index for index, name in enumerate(parameters)}
    return [[places[name] for name in names] for names in assigned]
