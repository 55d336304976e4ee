"""Parts of communication that overlaps with backward, for data-parallel wrappers and FSDP.

`GradientHooks`, for wrappers, call back when a gradient is ready (`backward_pass` at the end).

A `Channel` runs collectives in the background, one after the other, over a transport of its own: on
a CPU in a thread, on a GPU in a stream, while the caller goes on. A layer that communicates
meanwhile (SyncBatchNorm) needs another transport.
"""

import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from labkit.parallel.collectives import all_reduce
from labkit.parallel.failures import explain_failure
from labkit.parallel.prepare import FLOAT_TYPES
from labkit.parallel.traffic import record_collective
from labkit.parallel.transport import CHOICES, make_separate_transport, member_group

Wait = Callable[[], object]  # waits for the end of an action, and raises its error
TORCH = "torch"


def weak_hook(owner: Any, method: Callable[..., None], *args: object) -> Callable[..., None]:
    """Return a hook for autograd that calls `method(owner, ...)` under `owner.lock`. It does not
    keep `owner` alive."""
    reference = weakref.ref(owner)

    def call(*more: object) -> None:
        if (alive := reference()) is not None:
            with alive.lock:
                method(alive, *args, *more)

    return call


class GradientHooks:
    """Calls `method(owner, index, ...)` when autograd has added the gradient to a parameter's
    `grad`, as `weak_hook`.

    Hooks are on AccumulateGrad nodes, as in torch's DistributedDataParallel: hooks on the tensor or
    node that clip a gradient run before, and undefined gradients (None) are noticed. A parameter
    has one owner, the newest.
    """

    def __init__(self, owner: Any, method: Callable[..., None], parameters: Sequence[nn.Parameter]):
        self.is_superseded = False  # whether another owner has taken over a parameter
        self._parameters = parameters
        self._hooks = [weak_hook(owner, method, index) for index in range(len(parameters))]
        self._nodes: list[Any] = [None] * len(parameters)
        self._handles: list[RemovableHandle] = []
        self.rebind(range(len(parameters)))

    def rebind(self, indices: Sequence[int]) -> list[int]:
        """Hook the parameters whose node is new, as after a change of dtype. Return their
        indices."""
        new = []
        for index in indices:
            with torch.inference_mode(False):
                node = get_gradient_edge(self._parameters[index]).node
            if node is not self._nodes[index]:
                self._nodes[index] = node
                self._handles.append(handle := node.register_hook(self._hooks[index]))
                hooks = handle.hooks_dict_ref() or {}
                for number, other in [(number, _by_handle.get(number, self)) for number in hooks]:
                    if other is not self:
                        # Otherwise both wrappers would average the gradient.
                        del hooks[number]
                        other.is_superseded = True
                _by_handle[handle.id] = self
                new.append(index)
        return new

    def check_newest(self) -> None:
        """Raise RuntimeError if another owner has taken over a parameter."""
        if self.is_superseded:
            raise RuntimeError(
                "this model, or a part of it, was wrapped again: use the newest wrapper, or wrap"
                " copies"
            )

    def move_to_end(self) -> None:
        """Move behind hooks that were registered later. Autograd calls them in the order of
        insertion."""
        for handle in self._handles:
            hooks = handle.hooks_dict_ref()
            if hooks is not None and len(hooks) > 1 and handle.id in hooks:
                hooks[handle.id] = hooks.pop(handle.id)


_by_handle: weakref.WeakValueDictionary[int, GradientHooks] = weakref.WeakValueDictionary()


def tensors_in(value: Any, depth: int = 4) -> Iterator[Tensor]:
    """Yield the tensors in a model's inputs or outputs: in containers and attributes of objects, up
    to `depth` deep."""
    if isinstance(value, Tensor):
        yield value
    elif depth and not isinstance(value, str | bytes | int | float | nn.Module | type | None):
        parts: Iterable[Any] = value
        if isinstance(value, Mapping):
            parts = value.values()
        elif not isinstance(value, list | tuple | set | frozenset):
            slots = [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
            parts = [*getattr(value, "__dict__", {}).values(), *slots]
        for part in parts:
            yield from tensors_in(part, depth - 1)


class _Task:
    """An action, and its end."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.action: Callable[[], None] | None = action
        self.end: Future[None] = Future()

    def run(self) -> None:
        error = None
        try:
            with torch.no_grad():  # each thread has a grad mode
                assert self.action is not None
                self.action()
        except BaseException as raised:
            error = raised
        # Now: the wait for the end may be long after it, and the action has tensors.
        self.action = None
        if error is None:
            self.end.set_result(None)
        else:
            self.end.set_exception(error)


class Channel:
    """Runs actions in the order in which they are started. All ranks of a group create it
    together."""

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, preference: str
    ) -> None:
        # Now: in the middle of backward, ranks would not create it at the same moment.
        self.transport = make_separate_transport(group, device, preference)
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
        self._tasks: queue.SimpleQueue[_Task | None] | None = None

    def start(self, action: Callable[[], None], reads: Iterable[Tensor] = ()) -> Wait:
        """Start an action; return what waits for its end, once.

        `reads`: tensors that the action reads and the caller may release before its end.
        """
        task = _Task(action)
        if self._stream is not None:
            return self._start_in_stream(self._stream, task, reads)
        if self._tasks is None:
            self._tasks = queue.SimpleQueue()
            threading.Thread(
                target=_work, args=(self._tasks, torch.get_num_threads()), daemon=True
            ).start()
            # The thread holds the queue and not the channel, so a channel can go; None ends the
            # thread.
            weakref.finalize(self, self._tasks.put, None)
        self._tasks.put(task)
        return task.end.result

    def _start_in_stream(
        self, stream: torch.cuda.Stream, task: _Task, reads: Iterable[Tensor]
    ) -> Wait:
        """Queue the action's kernels in the stream; the wait makes the caller's stream wait, not
        the CPU."""
        # What the action reads, and the memory that it writes to, is still in use there.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            task.run()
        end = stream.record_event()
        for tensor in reads:
            # Otherwise the allocator gives their memory to kernels that do not wait for the stream.
            tensor.record_stream(stream)

        def wait() -> None:
            task.end.result()
            torch.cuda.current_stream(self._device).wait_event(end)

        return wait


def check_all_reduce(name: str, tensors: Iterable[Tensor]) -> None:
    """Raise ValueError unless `BackgroundAllReduce` has the name and can average the tensors."""
    names = (TORCH, *CHOICES)
    if name not in names:
        raise ValueError(f"all_reduce must be one of {', '.join(names)}; got {name!r}")
    dtypes = {tensor.dtype for tensor in tensors} - {*FLOAT_TYPES}
    if name != TORCH and dtypes:
        raise ValueError(
            f"labkit's all-reduce adds real numbers, got {', '.join(map(str, dtypes))}"
        )


class BackgroundAllReduce:
    """All-reduces of dense vectors over the ranks of a group, in place, in the order of the calls.

    torch            dist.all_reduce, which gloo and NCCL run in the background
    auto             the same on NCCL, else labkit's all-reduce over the transport that suits
    shared, point_to_point    labkit's all-reduce over that transport
    """

    def __init__(
        self, name: str, group: dist.ProcessGroup | None, devices: Iterable[torch.device]
    ) -> None:
        """Connect the devices. A collective."""
        self.group = group
        self.channels: dict[torch.device, Channel] = {}
        self._is_recorded = name != TORCH
        if name != TORCH:
            channels = {device: Channel(group, device, name) for device in dict.fromkeys(devices)}
            for device, channel in channels.items():
                if channel.transport.collective_group is None:
                    self.channels[device] = channel

    def start(self, vector: Tensor, op: str = "mean") -> Wait:
        """Start a mean or a "sum"; return a function that waits for its end."""
        if channel := self.channels.get(vector.device):
            return channel.start(partial(all_reduce, vector, op=op, transport=channel.transport))
        p = dist.get_world_size(self.group)
        if self._is_recorded:
            record_collective("all_reduce", "nccl", [vector], 2 * vector.nbytes * (p - 1) / p)
        if op == "mean":
            vector.div_(p)
        work = dist.all_reduce(vector, group=self.group, async_op=True)
        assert work is not None, "async_op=True returns the work"
        return partial(self._wait, work)

    def _wait(self, work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            explain_failure(error, member_group(self.group).get_group_store())
            raise

    def average(self, vector: Tensor) -> None:
        """Replace the vector by its mean over ranks."""
        if channel := self.channels.get(vector.device):
            all_reduce(vector, transport=channel.transport)  # without the thread
        else:
            self.start(vector)()


def _work(tasks: "queue.SimpleQueue[_Task | None]", threads: int) -> None:
    torch.set_num_threads(threads)  # OpenMP counts per thread
    while (task := tasks.get()) is not None:
        task.run()
        del task  # an idle thread keeps no transport alive
