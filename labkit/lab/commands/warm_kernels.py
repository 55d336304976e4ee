"""Kernels that are forked from a process which has imported what they import, a second or two less for each.

    kernels = WarmKernels.begun(modules)      # early: this process must not have a second thread yet
    kernels.start(arguments, variables)

`begun` forks the *nest*: a process without threads that imports what notebooks of labs do and then waits. It forks a
kernel when it is told to, and says how that ended. Every kernel is a process of its own, in a session of its own, with
nothing in it but modules: what one notebook does, no other sees. The ranks' fork server is shared likewise
(`labkit.parallel.ranks.fork_server`). Whatever ends this process ends the nest, and a kernel whose nest has gone.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import NoReturn

# What no other import of this process has loaded by then.
OF_NOTEBOOKS = ("labkit.lab.notebook", "labkit.lab.figures", "ipykernel.kernelapp", "ipykernel.ipkernel")
COMPILER = "torch._dynamo"  # which torch loads when it makes an optimizer: a second and a half
OF_RANKS = (COMPILER, "torch.distributed.optim")
MOST_BYTES = 2**20  # of a request: arguments and variables
STATUS_LOST = -signal.SIGKILL  # of a kernel whose nest is gone


class WarmKernels:
    """The nest, as the process sees it that it was forked from."""

    def __init__(self, nest: int, line: socket.socket):
        self._nest = nest
        self._line = line

    @classmethod
    def begun(cls, modules: Sequence[str], *, ranks: Sequence[str] | None) -> WarmKernels | None:
        """Fork the nest, which imports `modules`; `ranks` is what the ranks that kernels start import, None for none.

        None where a process cannot be forked safely.
        """
        if not sys.platform.startswith("linux") or len(list(Path("/proc/self/task").iterdir())) > 1:
            return None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        nest = os.fork()
        if nest == 0:
            ours.close()
            _be_nest(theirs, modules, ranks)
        theirs.close()
        return cls(nest, ours)

    def start(self, arguments: Sequence[str], variables: Mapping[str, str], folder: str | None = None) -> Kernel:
        """A kernel with these arguments of `ipykernel_launcher`, environment variables and working directory.

        OSError if the nest is gone.
        """
        ours, theirs = socket.socketpair()
        request = json.dumps([list(arguments), dict(variables), folder or str(Path.cwd())]).encode()
        with theirs:
            socket.send_fds(self._line, [request], [theirs.fileno()])
        told = ours.recv(32)
        if not told:
            raise OSError("the process that starts kernels has ended")
        return Kernel(int(told), ours)

    def close(self) -> None:
        """End the nest. Safe to repeat."""
        if self._line.fileno() >= 0:
            self._line.close()
            os.waitpid(self._nest, 0)


class Kernel:
    """A kernel that was forked, as `subprocess.Popen` tells of one that was started."""

    stdin = stdout = stderr = None

    def __init__(self, pid: int, line: socket.socket):
        self.pid = pid
        self.returncode: int | None = None
        self._line = line

    def poll(self) -> int | None:
        """Its exit status, negative if a signal ended it; None while it runs."""
        return self._status(socket.MSG_DONTWAIT)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. subprocess.TimeoutExpired if it does not come."""
        if self.returncode is None:
            self._line.settimeout(timeout)
            try:
                self.returncode = self._status(0)
            except TimeoutError:
                raise subprocess.TimeoutExpired("kernel", timeout or 0.0) from None
        assert self.returncode is not None, "a blocking wait has an answer"
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _status(self, flags: int) -> int | None:
        if self.returncode is None:
            try:
                told = self._line.recv(32, flags)
            except BlockingIOError:
                return None
            self.returncode = int(told) if told else STATUS_LOST
            self._line.close()
        return self.returncode


@contextmanager
def without_threads() -> Iterator[None]:
    """NumPy, imported inside, starts no threads of its own: a process that has some cannot be forked safely."""
    name = "OPENBLAS_NUM_THREADS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _be_nest(line: socket.socket, modules: Sequence[str], ranks: Sequence[str] | None) -> NoReturn:
    """Import, then fork a kernel for each request, until the other end of the line is closed."""
    status = 1
    try:
        os.setsid()  # out of reach of a terminal's Ctrl-C
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        modules = [*OF_NOTEBOOKS, *modules]
        if ranks is not None:  # to draw a run, few labs need the compiler
            modules.append(COMPILER)
            from labkit.machine import load
            from labkit.parallel.ranks import fork_server

            load.FORK_SERVERS.append(fork_server.start([*OF_RANKS, *ranks]))
        with without_threads():
            for module in modules:
                import_module(module)
        gc.freeze()
        _fork_kernels(line)
        status = 0
    finally:
        with contextlib.suppress(Exception):
            _run_exit_handlers()
        os._exit(status)


def _fork_kernels(line: socket.socket) -> None:
    kernels: dict[int, socket.socket] = {}
    wakes, woken = socket.socketpair()
    for one in (wakes, woken):
        one.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler of Python's there is no waking
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    with selectors.DefaultSelector() as selector:
        selector.register(line, selectors.EVENT_READ)
        selector.register(wakes, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if wakes in ready:
                wakes.recv(4096)
                _tell_of_ended(kernels)
            if line not in ready:
                continue
            request, descriptors, *_ = socket.recv_fds(line, MOST_BYTES, 1)
            if not request:
                return
            arguments, variables, folder = json.loads(request)
            told = socket.socket(fileno=descriptors[0])
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for one in (line, wakes, woken, told, *kernels.values()):
                    one.close()
                _be_kernel(arguments, variables, folder)
            told.send(str(pid).encode())
            kernels[pid] = told


def _tell_of_ended(kernels: dict[int, socket.socket]) -> None:
    for pid in list(kernels):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with kernels.pop(pid) as told, contextlib.suppress(OSError):  # nobody may wait for it any more
                told.send(str(os.waitstatus_to_exitcode(status)).encode())


def _be_kernel(arguments: list[str], variables: dict[str, str], folder: str) -> NoReturn:
    """The life of a kernel, in the place of `python -m ipykernel_launcher`."""
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(variables)
        os.chdir(folder)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        _serve_notebook(arguments)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            _run_exit_handlers()
        os._exit(status)


def _serve_notebook(arguments: list[str]) -> None:
    import matplotlib as mpl
    from ipykernel.kernelapp import IPKernelApp

    if sys.path[0] in {str(Path.cwd()), str(Path(sys.argv[0]).parent)} and not sys.flags.safe_path:
        del sys.path[0]  # of the command; IPython adds the working directory's
    sys.argv = ["ipykernel_launcher.py", *arguments]
    # As ipykernel sets it, which is too late for a matplotlib that is there already.
    mpl.rcParams["backend"] = os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    application = IPKernelApp.instance(parent_handle=os.getppid())  # it ends with the nest
    application.initialize(arguments)
    application.start()


def _run_exit_handlers() -> None:
    """What the interpreter does at its end, which a forked process does not come to."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
