"""One rank as its parent sees it: a process, a pipe to it, and what it wrote."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import signal
import sys
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import torch.multiprocessing

from labkit.parallel.ranks import rank as rank_side
from labkit.parallel.ranks import whose_turn
from labkit.parallel.ranks.log import RankLog

JOIN_TIMEOUT_S = 5.0
# What multiprocessing takes for the exit code of a rank whose fork server has died: it may still be running.
STATUS_LOST = 255

# Not state: it keeps two threads that start ranks at once from exchanging `__main__` under each other.
_HIDING_MAIN = threading.Lock()


@dataclass
class RankProcess:
    """One rank: its process, the two ends of its pipe, and the files it writes."""

    number: int
    process: BaseProcess
    pipe: connection.Connection[Any, Any]
    pipe_of_rank: connection.Connection[Any, Any]
    log: RankLog
    stacks_path: Path
    turn_path: Path
    talking: bool = True
    """Its end of the pipe is open."""
    alive: bool = True
    """Its death has not been noticed yet."""
    identity: psutil.Process | None = None
    """The process that was started: its id and when it began. None before, and if it ended at once."""

    @classmethod
    def prepared(
        cls,
        context: ForkServerContext | SpawnContext,
        plan: rank_side.GroupPlan,
        number: int,
        directory: Path,
    ) -> RankProcess:
        """A rank that has not been started."""
        pipe, pipe_of_rank = context.Pipe()
        arguments = (plan, number, directory, pipe_of_rank)
        process = context.Process(target=rank_side.main, args=arguments, name=f"labkit-rank-{number}")
        log = RankLog(rank_side.log_path(directory, number))
        stacks, turn = rank_side.stacks_path(directory, number), rank_side.turn_path(directory, number)
        return cls(number, process, pipe, pipe_of_rank, log, stacks, turn)

    def start(self) -> None:
        """Start the process; it gets its end of the pipe, so that its end ends the pipe."""
        with interrupts_deferred():  # until it is known whom to end
            with _main_module_hidden():
                self.process.start()
            with contextlib.suppress(psutil.NoSuchProcess):
                self.identity = psutil.Process(self.process.pid)
        self.pipe_of_rank.close()

    def tell(self, word: tuple[int, Mapping[str, str]] | None) -> None:
        """Send the index of a point and what it is measured without (`whose_turn.new_point`), or None for the end."""
        with contextlib.suppress(OSError):  # it has died; the parent learns that from the sentinel
            self.pipe.send(word)

    def read(self) -> dict[str, Any] | None:
        """The next message if there is one, without waiting for it to begin."""
        try:
            return json.loads(self.pipe.recv_bytes()) if self.talking and self.pipe.poll() else None
        except (EOFError, OSError):
            self.talking = False
            return None

    def is_idle(self) -> bool:
        """Whether it is there and waits to be told something: its pipe has neither a message nor an end."""
        return self.alive and not connection.wait([self.process.sentinel, self.pipe], 0)

    def ask_for_stacks(self) -> None:
        """Have it write its stacks; faulthandler does so also while the rank is inside C++."""
        if not connection.wait([self.process.sentinel], 0):
            self._signal(rank_side.STACKS_SIGNAL)

    def stacks(self) -> str:
        """The stacks it has written so far."""
        with contextlib.suppress(FileNotFoundError):  # it has not begun, or somebody has cleaned up
            return self.stacks_path.read_text(errors="replace")
        return ""

    def turn(self) -> whose_turn.Turn:
        """Whose turn it is on this rank, or was when it ended."""
        return whose_turn.turn_in(self.turn_path)

    def stop(self) -> None:
        """Let it write nothing more. Should the parent die now, the kernel continues it, and it cleans up."""
        self._signal_all(signal.SIGSTOP)

    def kill(self) -> None:
        """End the rank and what its worker has started, by SIGKILL: blocked or stopped, it heeds nothing less."""
        if not self._signal_all(signal.SIGKILL):
            self._signal(signal.SIGKILL)

    def release(self) -> None:
        """Wait until the process is gone, and close what is held of it. Safe to repeat."""
        if self._pid() is not None:
            self.process.join(JOIN_TIMEOUT_S)
        self.pipe.close()
        self.pipe_of_rank.close()
        with contextlib.suppress(ValueError):  # the kernel cannot end it yet, and will when it can
            self.process.close()

    def _pid(self) -> int | None:
        try:
            return self.process.pid
        except ValueError:  # released
            return None

    def _signal(self, number: signal.Signals) -> None:
        """To the rank alone, if it is there."""
        if self.identity is not None:
            with contextlib.suppress(psutil.NoSuchProcess):  # which it also says of another process with that id
                self.identity.send_signal(number)

    def _signal_all(self, number: signal.Signals) -> bool:
        """To the rank and what its worker has started; False if they are no process group, or all of it is gone.

        The fork server reaps a rank that ends, and the system may give its id to another process. As long as there is
        one left of its group, it does not. So the group is the rank's if the rank is there, or nobody has the id.
        """
        pid = self._pid()
        is_there = self.identity is not None and self.identity.is_running()
        if pid is None or (not is_there and psutil.pid_exists(pid)):
            return False
        try:
            os.killpg(pid, number)
        except OSError:
            return False
        return True


def start_context(preload: Sequence[str] = ()) -> ForkServerContext | SpawnContext:
    """A fork server that has imported torch and nothing of ours, or spawn where there is none.

    Only torch is preloaded, so that an edited module of labkit or of the reader takes effect in the next group.
    The server is a fresh process without CUDA: ranks forked from it may use CUDA even where the parent does.
    The context is torch's, so that a tensor can be handed over by what is made of it, as by queues. `preload` are
    further modules, of a server that several processes share (`shared_server`).
    """
    if "forkserver" not in torch.multiprocessing.get_all_start_methods():
        return torch.multiprocessing.get_context("spawn")
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", *preload])
    # What is forked must have no threads: OpenMP and BLAS read these when torch loads them, in the server.
    # A rank sets its own number of threads later, and gets this process's variables as they are.
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
    # And what it imports is not to be looked for in the working directory, where a reader's `torch.py` may lie.
    variables = dict.fromkeys((*names, "PYTHONSAFEPATH"), "1")
    with interrupts_deferred(), variables_set(variables), _helpers_apart():
        multiprocessing.forkserver.ensure_running()
    return context


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Hold back a KeyboardInterrupt until the end of the block; a second one comes through at once.

    Raised while multiprocessing starts a process, it would leave one whose id nobody has learned, and which nobody
    can end. A changed handler does it, and not a signal mask: of the threads of a Jupyter kernel another one takes
    the signal, and Python interrupts the main thread all the same.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield  # no other thread is ever interrupted
        return
    came: list[tuple[int, types.FrameType | None]] = []

    def hold_back(number: int, frame: types.FrameType | None) -> None:
        came.append((number, frame))
        if len(came) > 1:
            handler(number, frame)

    signal.signal(signal.SIGINT, hold_back)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if len(came) == 1:
            handler(*came[0])


@contextlib.contextmanager
def variables_set(environment: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process for a while."""
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _helpers_apart() -> Iterator[None]:
    """Give the fork server, and the resource tracker that comes with it, a process group of their own.

    A Jupyter kernel that is asked to shut down waits for every child in its own group, half a minute if need be,
    and these two are there as long as it is. Whoever asked loses patience after 5 s and kills the kernel, which
    then cleans up nothing. multiprocessing has no option for it, so its way to start helpers is replaced meanwhile.
    """
    before = multiprocessing.util.spawnv_passfds
    multiprocessing.util.spawnv_passfds = _spawn_apart
    try:
        yield
    finally:
        multiprocessing.util.spawnv_passfds = before


def _spawn_apart(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
    for descriptor in passfds:
        os.set_inheritable(descriptor, True)
    return os.posix_spawn(path, list(args), os.environ, setpgroup=0)


@contextlib.contextmanager
def _main_module_hidden() -> Iterator[None]:
    """Start processes that do not import the parent's `__main__` again.

    multiprocessing tells every child the file of `sys.modules["__main__"]`, and the child runs it: a script
    without a guard would start ranks in its ranks, and pytest's would be imported in each. Ranks have no use
    for it, since cloudpickle carries what is defined there. A module without a file leaves nothing to tell.
    """
    with _HIDING_MAIN:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main
