"""Gradients averaged in buckets while backward still runs: communication hides behind computation, if there is room."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from labkit.parallel.background_comm import Wait
from labkit.parallel.data_parallel.base import DataParallel
from labkit.parallel.data_parallel.layout import count_references, gradient_to_write, strides_like
from labkit.parallel.data_parallel.reducer import LabkitReducer

Schedule = Callable[[dict[str, Tensor]], Sequence[Iterable[str]]]
"""From trained parameters by name, as backward makes their gradients, to the names in each bucket, in order."""
CommHook = Callable[[Any, "Bucket"], torch.futures.Future[Any]]
MIB = 2**20


class BucketedDDP(DataParallel):
    """One collective per bucket, begun as soon as the bucket's last gradient is there. Gradients are views of buckets.

    Args:
        bucket_mb: MiB of gradients from which a bucket is full. As `bucket_cap_mb`, torch's name: of the first, too.
        first_bucket_mb: the same for the first bucket.
        overlap: if False, the collectives begin when backward is over.
        schedule: which parameters are averaged together, and in which order, whatever their sizes.
        gradient_as_bucket_view: if False, gradients are copied out of the buckets again.

    Other arguments as `DataParallel`; ValueError for sizes that are not positive, and for a schedule that leaves a
    parameter out or has one twice.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        *,
        bucket_mb: float = 25.0,
        first_bucket_mb: float = 1.0,
        overlap: bool = True,
        schedule: Schedule | None = None,
        gradient_as_bucket_view: bool = True,
        bucket_cap_mb: float | None = None,
        **options: Any,
    ):
        self.overlap, self.gradient_as_bucket_view = overlap, gradient_as_bucket_view
        self._sizes_mb = (bucket_mb, first_bucket_mb) if bucket_cap_mb is None else (bucket_cap_mb, bucket_cap_mb)
        self._schedule = schedule
        super().__init__(module, device_ids, **options)
        parameters = self._parameters_in_order
        self._buckets = [
            Bucket({index: parameters[index] for index in indices}, number, number == len(self._assigned) - 1)
            for number, indices in enumerate(self._assigned)
        ]
        self._bucket_of = {index: bucket for bucket in self._buckets for index in bucket.parameters}
        self._waits: list[Wait] = []
        self._hook: Callable[[Bucket], torch.futures.Future[Any]] | None = None
        self._divides = isinstance(self._reducer, LabkitReducer)  # else each gradient is, while it is in the cache
        self._divisor = 1 if self._divides else self.world_size

    def _settings(self) -> dict[str, object]:
        parameters = dict(zip(self._names, self._parameters_in_order, strict=True))
        if self._schedule is None:
            self._assigned = assign_to_buckets(self._parameters_in_order, *self._sizes_mb)
        else:
            self._assigned = assign_by_schedule(self._schedule, parameters)
        return super()._settings() | {"sizes of buckets, schedule": (self._sizes_mb, self._assigned)}

    @property
    def bucket_bytes(self) -> list[int]:
        """Sizes of the buckets, in the order in which they are averaged."""
        return [bucket.memory.nbytes for bucket in self._buckets]

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """Let `hook(state, bucket)` average buckets, as torch's hooks do."""
        self._hook, self._divisor = partial(hook, state), 1

    @property
    def _overlaps(self) -> bool:
        return self.overlap and not self.find_unused

    def _begin_pass(self) -> None:
        super()._begin_pass()
        for bucket in self._buckets:
            if bucket.is_kept():
                bucket.allocate()

    def _gradient_ready(self, index: int) -> None:
        self._put(index)
        if not self._bucket_of[index].missing:
            self._begin_full()

    def _finish(self, pending: list[int]) -> None:
        for index in pending:
            self._put(index)
        self._begin_full()
        self._abandon()
        if not self.gradient_as_bucket_view:
            for bucket in self._buckets:
                for index, parameter in bucket.parameters.items():
                    gradient_to_write(parameter).copy_(bucket.views[index])

    def _put(self, index: int) -> None:
        """Divide the gradient, zeros if there is none, into its place; `p.grad` is a view of that from now on."""
        bucket, parameter = self._bucket_of[index], self._parameters_in_order[index]
        view, gradient = bucket.views[index], parameter.grad
        bucket.missing -= 1
        if gradient is not None and bucket.holds(index, gradient):
            if self._divisor > 1:
                view.div_(self._divisor)
            return
        if gradient is None:
            view.zero_()
        elif gradient.dtype != view.dtype or gradient.shape != view.shape:
            raise RuntimeError(f"{self._names[index]} has changed since the model was wrapped: wrap it again")
        else:
            torch.div(gradient, self._divisor, out=view)
        if self.gradient_as_bucket_view:
            parameter.grad = view.detach()  # each time another tensor: `.data = ` changes that one only

    def _begin_full(self) -> None:
        """Begin buckets that are full, in their order: every rank must begin them in the same one."""
        while (next_one := len(self._waits)) < len(self._buckets) and self._buckets[next_one].missing == 0:
            bucket = self._buckets[next_one]
            if self._hook is None:
                self._waits.append(self._reducer.start(bucket.memory, "mean" if self._divides else "sum"))
            else:
                self._waits.append(partial(bucket.take, self._hook(bucket)))

    def _abandon(self) -> None:
        for wait in self._waits:
            wait()

    def _forget_pass(self) -> None:
        super()._forget_pass()
        self._waits = []
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)


class OverlappedDDP(BucketedDDP):
    """One collective per parameter, begun as soon as its gradient is there: buckets of one parameter each.

    Ranks must begin collectives in one order. Gradients may become ready in another, and not in the same one
    everywhere: each waits until all before it have begun.
    """

    def __init__(self, module: nn.Module, device_ids: Sequence[int | torch.device] | None = None, **options: Any):
        super().__init__(module, device_ids, schedule=lambda parameters: [[name] for name in parameters], **options)


class Bucket:
    """Parameters of one dtype and device, by index, and one piece of memory with a view for the gradient of each."""

    def __init__(self, parameters: dict[int, nn.Parameter], number: int, is_last: bool) -> None:
        self.parameters, self._number, self._is_last = parameters, number, is_last
        self.missing = len(parameters)
        """Gradients of this pass that have not come yet."""
        self.allocate()

    def allocate(self) -> None:
        """Take new memory; whoever has gradients in the old one keeps it."""
        some = next(iter(self.parameters.values()))
        sizes = [parameter.numel() for parameter in self.parameters.values()]
        self.memory = torch.zeros(sum(sizes), dtype=some.dtype, device=some.device)
        self.views = {
            index: part.as_strided(parameter.shape, strides_like(parameter))
            for (index, parameter), part in zip(self.parameters.items(), self.memory.split(sizes), strict=True)
        }
        self._places = {index: (view.data_ptr(), view.stride()) for index, view in self.views.items()}
        self._references = count_references(self.memory)

    def holds(self, index: int, gradient: Tensor) -> bool:
        """Whether the gradient is in its place here: `.data = ...` and `.to(...)` put it elsewhere."""
        return (gradient.data_ptr(), gradient.stride()) == self._places[index]

    def is_kept(self) -> bool:
        """Whether somebody has a gradient of an earlier pass, in this memory, that is no parameter's any more."""
        if (extra := count_references(self.memory) - self._references) == 0:
            return False
        gradients = ((index, parameter.grad) for index, parameter in self.parameters.items())
        return extra > sum(gradient is not None and self.holds(index, gradient) for index, gradient in gradients)

    # For communication hooks, by torch's names

    def buffer(self) -> Tensor:
        """Return the memory, (n,)."""
        return self.memory

    def gradients(self) -> list[Tensor]:
        """Return the gradients, views of the memory."""
        return list(self.views.values())

    def index(self) -> int:
        """Return the number of the bucket, from 0 up."""
        return self._number

    def is_last(self) -> bool:
        """Return whether it is the last one of a pass."""
        return self._is_last

    def take(self, average: torch.futures.Future[Any]) -> None:
        """Wait for the result of a communication hook, and keep it."""
        result = average.wait()
        self.memory.copy_(result[0] if isinstance(result, list) else result)


def assign_to_buckets(parameters: Sequence[Tensor], bucket_mb: float, first_bucket_mb: float) -> list[list[int]]:
    """Return indices by bucket, in order; a bucket is full once it holds `bucket_mb` MiB of gradients or more.

    One dtype and device per bucket. The first bucket of each is full at `first_bucket_mb`, so that communication
    begins early; a parameter larger than a bucket has one of its own or ends one. As torch's
    `_compute_bucket_assignment_by_size`. Buckets come in the order in which they are full.
    """
    if not (bucket_mb > 0 and first_bucket_mb > 0):
        raise ValueError(f"expected bucket sizes above 0 MB, got {bucket_mb} and {first_bucket_mb}")
    full: list[list[int]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    limits: dict[tuple[torch.dtype, torch.device], float] = {}
    for index, parameter in enumerate(parameters):
        kind = (parameter.dtype, parameter.device)
        bucket = filling.setdefault(kind, [])
        bucket.append(index)
        n_bytes = sum(parameters[i].numel() * parameters[i].element_size() for i in bucket)
        if n_bytes >= MIB * limits.get(kind, min(first_bucket_mb, bucket_mb)):
            full.append(filling.pop(kind))
            limits[kind] = bucket_mb
    return full + sorted(filling.values())


def assign_by_schedule(schedule: Schedule, parameters: Mapping[str, Tensor]) -> list[list[int]]:
    """Return indices by bucket. Raises ValueError unless every parameter is in one bucket, with others of its dtype."""
    assigned = [list(names) for names in schedule(dict(parameters))]
    times = Counter(name for names in assigned for name in names)
    for name in {**parameters, **times}:
        if name not in parameters or times[name] != 1:
            raise ValueError(f"expected every parameter in one bucket, got {name!r} in {times[name]}")
    for names in assigned:
        if len({(parameters[name].dtype, parameters[name].device) for name in names}) != 1:
            raise ValueError(f"expected parameters of one dtype and device in a bucket, got {names!r:.80}")
    places = {name: index for index, name in enumerate(parameters)}
    return [[places[name] for name in names] for names in assigned]
