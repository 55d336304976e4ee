"""Collectives in the background, in the order in which they are begun, over a transport that nobody else uses.

Nobody else, because a thread carries them out while the caller goes on: a layer that synchronizes meanwhile
(SyncBatchNorm) would meet their messages. Kernels on a GPU run in the background anyway: CUDA tensors need no thread.
"""

import queue
import threading
import time
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.parallel.traffic import Collective as Call
from labkit.parallel.traffic import calls_of_this_thread
from labkit.parallel.transport import empty_for_all_reduce, own_transport

Wait = Callable[[], object]
Collective = Callable[..., None]


class Channel:
    """What is begun here is carried out one after the other. Made by all ranks of a group together."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, preference: str) -> None:
        # Now: made in the middle of backward, ranks would not make them at the same moment.
        found = own_transport(group, device, preference)
        self.group, self.transport = group, found.transport
        self.in_use = (found.transport.name, found.why)
        self._in_thread = device.type == "cpu"
        self._tasks: queue.SimpleQueue[_Task | None] | None = None

    def call(self, collective: Collective, vector: Tensor, *args: object, **options: object) -> None:
        """`collective(vector, group, ...)` over the channel's transport, at once: nothing else may be under way."""
        collective(vector, self.group, *args, transport=self.transport, **options)

    def start(self, action: Callable[[], None]) -> Wait:
        """Begin; call what is returned to wait for the end. It raises what the action did."""
        task = _Task(action)
        if not self._in_thread:
            task.do()
            return task.wait
        if self._tasks is None:
            self._tasks = queue.SimpleQueue()
            threading.Thread(target=_work, args=(self._tasks, torch.get_num_threads()), daemon=True).start()
            weakref.finalize(self, self._tasks.put, None)
        self._tasks.put(task)
        return task.wait

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what will travel again and again. A collective."""
        return empty_for_all_reduce(numel, dtype, device, self.group, self.transport)


class _Task:
    """Something a thread does, and its end."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self._is_done = threading.Event()
        self._error: BaseException | None = None
        self._calls: list[Call] = []

    def do(self) -> None:
        try:
            # each thread has a mode of its own
            with torch.no_grad(), calls_of_this_thread() as self._calls:
                self._action()
        except BaseException as error:
            self._error = error
        del self._action  # its tensors may be done with long before somebody waits
        self._is_done.set()

    def wait(self) -> None:
        needed_s = time.perf_counter()
        self._is_done.wait()
        for call in self._calls:
            call.needed_s = needed_s if call.needed_s is None else call.needed_s
        if self._error is not None:
            raise self._error


def _work(tasks: "queue.SimpleQueue[_Task | None]", threads: int) -> None:
    torch.set_num_threads(threads)  # OpenMP counts for each thread anew
    while True:
        task = tasks.get()
        if task is None:
            return
        task.do()
        del task  # while the thread waits for the next, it keeps no tensor and no transport alive
