"""Collectives in the background, one after the other, over a transport that nothing else uses.

A thread carries them out while the caller goes on, so a layer that synchronizes meanwhile (SyncBatchNorm) needs another
transport. Kernels on a GPU run in the background anyway: CUDA tensors need no thread.
"""

import queue
import threading
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist

from labkit.parallel.transport import make_separate_transport

Wait = Callable[[], object]
Collective = Callable[..., None]


class Channel:
    """Carries out what is started here, in that order. Made by all ranks of a group together."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, preference: str) -> None:
        # Now: in the middle of backward, ranks would not make it at the same moment.
        selection = make_separate_transport(group, device, preference)
        self.group, self.transport = group, selection.transport
        self.in_use = (selection.transport.name, selection.reason)
        self._in_thread = device.type == "cpu"
        self._tasks: queue.SimpleQueue[_Task | None] | None = None

    def call(self, collective: Collective, tensors: object, *args: object) -> None:
        """Run `collective(tensors, group, ...)` over the channel's transport now: nothing else may be under way."""
        collective(tensors, self.group, *args, transport=self.transport)

    def start(self, action: Callable[[], None]) -> Wait:
        """Start; return a function that waits for the end, and raises what the action raised."""
        task = _Task(action)
        if not self._in_thread:
            task.run()
            return task.wait
        if self._tasks is None:
            self._tasks = queue.SimpleQueue()
            threading.Thread(target=_work, args=(self._tasks, torch.get_num_threads()), daemon=True).start()
            weakref.finalize(self, self._tasks.put, None)
        self._tasks.put(task)
        return task.wait


class _Task:
    """An action for the thread, and how it ended."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self._is_done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            with torch.no_grad():  # each thread has its own grad mode
                self._action()
        except BaseException as error:
            self._error = error
        del self._action  # its tensors may be released long before somebody waits
        self._is_done.set()

    def wait(self) -> None:
        self._is_done.wait()
        if self._error is not None:
            raise self._error


def _work(tasks: "queue.SimpleQueue[_Task | None]", threads: int) -> None:
    torch.set_num_threads(threads)  # OpenMP counts for each thread anew
    while True:
        task = tasks.get()
        if task is None:
            return
        task.run()
        del task  # while the thread waits for the next one, it keeps no tensor and no transport alive
