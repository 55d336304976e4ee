"""Collectives in the background, one after the other, over a transport that nothing else uses.

On a CPU a thread runs them while the caller goes on. A layer that communicates meanwhile (SyncBatchNorm) needs another
transport. Kernels on a GPU run in the background anyway: CUDA tensors need no thread.
"""

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from labkit.parallel.collectives import all_gather
from labkit.parallel.transport import make_separate_transport

Wait = Callable[..., object]
"""Waits for the end of an action, at most so many seconds if given, and raises its error; False if it has not ended."""
Collective = Callable[..., None]
END_OF_PASS = "the end of backward"


class Channel:
    """Runs actions in the order in which they are started. All ranks of a group create it together."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, preference: str) -> None:
        # Now: in the middle of backward, ranks would not create it at the same moment.
        self.group, self.transport = group, make_separate_transport(group, device, preference)
        self._in_thread = device.type == "cpu"
        self._tasks: queue.SimpleQueue[_Task | None] | None = None

    def call(self, collective: Collective, tensors: object, *args: object) -> None:
        """Run `collective(tensors, group, ...)` over the channel's transport now. Nothing else may be in flight."""
        collective(tensors, self.group, *args, transport=self.transport)

    def start(self, action: Callable[[], None]) -> Wait:
        """Start an action; return what waits for its end."""
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


class CheckedChannel(Channel):
    """A channel whose ranks check, before each collective, that all of them start the same one.

    Ranks that start different ones would hang, or mix up tensors. On a CPU each sends 8 bytes for it. On a GPU the
    check would wait for the device, and is left out.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, preference: str, names: Sequence[str]):
        """`names` of all collectives, the same on every rank."""
        super().__init__(group, device, preference)
        self._names = [END_OF_PASS, *names]
        self._is_checked = device.type == "cpu" and self.transport.world_size > 1
        self._error: RuntimeError | None = None

    def start_checked(self, name: str, action: Callable[[], None], n_trained: int = 0) -> Wait:
        """Start the collective `name`, in which `n_trained` parameters take part; as `start`."""
        return self.start(partial(self._run_checked, name, action, n_trained))

    def _run_checked(self, name: str, action: Callable[[], None], n_trained: int) -> None:
        if self._is_checked and self._error is None:
            codes = torch.zeros(self.transport.world_size, dtype=torch.int64)
            codes[self.transport.rank] = self._names.index(name) + len(self._names) * n_trained
            self.call(all_gather, codes)
            if len(set(codes.tolist())) > 1:
                pairs = [divmod(code, len(self._names)) for code in codes.tolist()]
                got = ", ".join(f"rank {r} at {self._names[i]} with {n} trained" for r, (n, i) in enumerate(pairs))
                self._error = RuntimeError(f"expected all ranks to run the same units in the same order; got {got}")
        if self._error is not None:
            raise self._error
        action()


class _Task:
    """An action for the thread, and its error."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self._is_done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            with torch.no_grad():  # each thread has a grad mode
                self._action()
        except BaseException as error:
            self._error = error
        del self._action  # its tensors may be released long before the wait
        self._is_done.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        is_done = self._is_done.wait(timeout_s)
        if is_done and self._error is not None:
            raise self._error
        return is_done


def _work(tasks: "queue.SimpleQueue[_Task | None]", threads: int) -> None:
    torch.set_num_threads(threads)  # OpenMP counts per thread
    while True:
        task = tasks.get()
        if task is None:
            return
        task.run()
        del task  # an idle thread keeps no tensor and no transport alive
