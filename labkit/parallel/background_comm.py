"""Collectives in the background, one after the other, over a transport that nothing else uses.

On a CPU a thread runs them while the caller goes on. A layer that communicates meanwhile (SyncBatchNorm) needs another
transport. Kernels on a GPU run in the background anyway: CUDA tensors need no thread.
"""

import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.parallel.collectives import all_gather, all_reduce
from labkit.parallel.transport import AUTO, Transport, find_transport, make_separate_transport, member_group

Wait = Callable[[], object]
"""Waits for the end of an action, and raises its error."""
END_OF_PASS = "the end of backward"
TORCH = "torch"
_groups_on_cpu: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


class Channel:
    """Runs actions in the order in which they are started. All ranks of a group create it together."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, preference: str) -> None:
        # Now: in the middle of backward, ranks would not create it at the same moment.
        self.transport = make_separate_transport(group, device, preference)
        self._in_thread = device.type == "cpu"
        self._tasks: queue.SimpleQueue[_Task | None] | None = None

    def start(self, action: Callable[[], None]) -> Wait:
        """Start an action; return what waits for its end."""
        task = _Task(action)
        if not self._in_thread:
            task.run()
            return task.result
        if self._tasks is None:
            self._tasks = queue.SimpleQueue()
            threading.Thread(target=_work, args=(self._tasks, torch.get_num_threads()), daemon=True).start()
            weakref.finalize(self, self._tasks.put, None)
        self._tasks.put(task)
        return task.result


class BackgroundAllReduce:
    """All-reduces of dense vectors over the ranks of a group, in place, in the order of the calls.

    torch            dist.all_reduce, which gloo and NCCL run in the background
    auto, shared, point_to_point    labkit's all-reduce over that transport
    """

    def __init__(self, name: str, group: dist.ProcessGroup | None, devices: Iterable[torch.device]) -> None:
        """Connect the devices. A collective."""
        self.group = group
        self.channels = (
            {} if name == TORCH else {device: Channel(group, device, name) for device in dict.fromkeys(devices)}
        )

    def start(self, vector: Tensor, op: str = "mean") -> Wait:
        """Start a mean or a "sum"; return a function that waits for its end."""
        if channel := self.channels.get(vector.device):
            return channel.start(partial(all_reduce, vector, op=op, transport=channel.transport))
        if op == "mean":
            vector.div_(dist.get_world_size(self.group))
        work = dist.all_reduce(vector, group=self.group, async_op=True)
        assert work is not None, "async_op=True returns the work"
        return work.wait

    def average(self, vector: Tensor) -> None:
        """Replace the vector by its mean over ranks."""
        if channel := self.channels.get(vector.device):
            all_reduce(vector, transport=channel.transport)  # without the thread
        else:
            self.start(vector)()


class CheckedChannel(Channel):
    """A channel whose ranks check, before each collective, that all of them start the same one.

    Ranks that start different ones would hang, or mix up tensors. The check moves 16 bytes per rank between CPUs. On a
    GPU only `exchange` is checked, since the other collectives do not wait for the CPU.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, preference: str, names: Sequence[str]):
        """`names` of all collectives, the same on every rank."""
        super().__init__(group, device, preference)
        self._names = [END_OF_PASS, *names]
        self._error: RuntimeError | None = None
        if device.type != "cpu":
            group, preference = _group_on_cpu(member_group(group)), AUTO
        self.notes = find_transport(group, torch.device("cpu"), preference)
        """For integers, between CPUs, in the caller's thread."""

    def start_checked(self, name: str, action: Callable[[], None], n_trained: int = 0) -> Wait:
        """Start the collective `name`, in which `n_trained` parameters take part; as `start`."""
        return self.start(partial(self._run_checked, name, action, n_trained) if self._in_thread else action)

    def _run_checked(self, name: str, action: Callable[[], None], n_trained: int) -> None:
        self.exchange(name, 0, n_trained, self.transport)
        action()

    def exchange(self, name: str, number: int, n_trained: int = 0, transport: Transport | None = None) -> list[int]:
        """Return the numbers of all ranks, which must be at the same collective. A collective over `notes`."""
        transport = transport or self.notes
        rows = torch.zeros(transport.world_size, 2, dtype=torch.int64)
        rows[transport.rank] = torch.tensor([self._names.index(name) + len(self._names) * n_trained, number])
        if self._error is None:
            all_gather(rows, transport=transport)
            codes, numbers = rows.t().tolist()
            if len(set(codes)) > 1:
                pairs = [divmod(code, len(self._names)) for code in codes]
                got = ", ".join(f"rank {r} at {self._names[i]} with {n} trained" for r, (n, i) in enumerate(pairs))
                self._error = RuntimeError(f"expected all ranks to run the same units in the same order; got {got}")
        if self._error is not None:
            raise self._error
        return numbers


class _Task(Future[None]):
    """An action for the thread."""

    def __init__(self, action: Callable[[], None]) -> None:
        super().__init__()
        self._action = action

    def run(self) -> None:
        error = None
        try:
            with torch.no_grad():  # each thread has a grad mode
                self._action()
        except BaseException as raised:
            error = raised
        del self._action  # its tensors may be released long before the wait
        if error is None:
            self.set_result(None)
        else:
            self.set_exception(error)


def _work(tasks: "queue.SimpleQueue[_Task | None]", threads: int) -> None:
    torch.set_num_threads(threads)  # OpenMP counts per thread
    while (task := tasks.get()) is not None:
        task.run()
        del task  # an idle thread keeps no tensor and no transport alive


def _group_on_cpu(members: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the same ranks' gloo group, made once. A collective."""
    if members not in _groups_on_cpu:
        ranks = dist.get_process_group_ranks(members)
        _groups_on_cpu[members] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _groups_on_cpu[members]
