"""Executes notebooks in one kernel: failures are kept, progress is passed on.

papermill inserts the parameters and executes the cells, by an engine that shares one kernel among
notebooks.
"""

import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import papermill
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import run_sync
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import Engine, papermill_engines
from papermill.exceptions import PapermillExecutionError
from papermill.log import logger
from traitlets import default

from labkit.lab.declaration import Lab
from labkit.lab.project import write_file
from labkit.lab.runs.progress import PROGRESS_MIME, MeasuringInterrupted, Progress

# A kernel of torch, pandas and matplotlib has a million objects, and none of them is garbage:
# Python would look through them a dozen times while it imports, and once more at its end.
KERNEL_START = (
    "__import__('logging').getLogger('matplotlib').setLevel('ERROR');"  # as the command line
    " __import__('gc').set_threshold(50_000);"
    " __import__('atexit').register(__import__('gc').freeze);"
    " __import__('labkit.parallel.ranks.fork_server', fromlist=['']).PRELOADED.extend({})"
)
ENGINE = "labkit"
# GPU memory that is free is part of the machine's description: the next notebook reads it anew.
RESET = (
    "get_ipython().reset(new_session=True); "
    "__import__('labkit.machine.description', fromlist=['']).describe_machine.cache_clear()"
)

INTERRUPTED = ("KeyboardInterrupt", MeasuringInterrupted.__name__)


class NotebookFailed(RuntimeError):
    """A notebook did not run to its end. The message is one line; the notebook is saved."""


class _KernelManager(AsyncKernelManager):
    """Starts kernels that do not warn, and ends them without interrupting."""

    # ipykernel warns if its channels are not encrypted.
    @default("transport_encryption")
    def _encrypt(self) -> str:
        return "auto"

    # A kernel that is still busy with its last message would print the interrupt.
    async def _async_interrupt_kernel(self) -> None:
        pass


class Kernel:
    """A kernel for several notebooks, each of which starts with an empty namespace.

    Imports and the start of a fork server would take several seconds per notebook. The server has
    what the ranks of all `studies` need.
    """

    def __init__(self, studies: Iterable[Lab] = ()) -> None:
        # This interpreter: no folder is searched for other kernels.
        specs = KernelSpecManager(kernel_dirs=[])
        self.manager = _KernelManager(kernel_name="python3", kernel_spec_manager=specs)
        # IPython warns if it cannot write to the home directory, where it would keep a history.
        self.ipython_folder = tempfile.TemporaryDirectory(prefix="labkit-")
        self.start_line = KERNEL_START.format(
            sorted({module for study in studies for module in study.preload})
        )

    def close(self) -> None:
        """End the process; the next notebook starts another one."""
        try:
            if self.manager.has_kernel:
                run_sync(self.manager.shutdown_kernel)()
        finally:
            # A kernel that follows makes it anew.
            self.ipython_folder.cleanup()


class _Client(PapermillNotebookClient):
    """papermill's client in a shared kernel; passes a lab's progress on to the caller."""

    def __init__(
        self, notebook_manager: Any, kernel: Kernel, on_progress: Callable[[Progress], None]
    ):
        super().__init__(
            notebook_manager,
            km=kernel.manager,
            # A lab has deadlines of its own, one per point.
            timeout=None,
            startup_timeout=60,
            # A reader's `random.py` in the working directory must not stand in for Python's.
            extra_arguments=[
                f"--IPKernelApp.exec_lines={kernel.start_line}",
                "--IPKernelApp.ignore_cwd=True",
            ],
            log=logger,
        )
        self._on_progress = on_progress
        self._is_used = kernel.manager.has_kernel
        self._environment = os.environ | {"IPYTHONDIR": kernel.ipython_folder.name}

    def execute(self, **options: Any) -> Any:
        """Execute every cell; the kernel stays, this client's channels do not."""
        try:
            return super().execute(env=self._environment, **options)
        finally:
            if self.kc is not None:
                self.kc.stop_channels()

    def papermill_execute_cells(self) -> None:
        """Execute every cell, in an empty namespace."""
        if self._is_used:
            self.wait_for_reply(self.kc.execute(RESET, silent=True))
        with _handing_on_interrupts(self.km.provisioner.pid):
            super().papermill_execute_cells()

    def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
        record = msg["content"].get("data", {}).get(PROGRESS_MIME)
        if record:
            self._on_progress(Progress(**record))
        return super().process_message(msg, cell, cell_index)


class _Engine(Engine):
    """Executes a notebook in a shared kernel and saves it as `target`, up to a failed cell."""

    @classmethod
    def execute_managed_notebook(
        cls,
        nb_man: Any,
        kernel_name: str,
        *,
        kernel: Kernel,
        on_progress: Callable[[Progress], None],
        target: Path,
        **_: Any,
    ) -> Any:
        try:
            return _Client(nb_man, kernel, on_progress).execute()
        finally:
            write_file(target, nbformat.writes(nb_man.nb))


@contextmanager
def _handing_on_interrupts(kernel: int) -> Iterator[None]:
    """Let Ctrl-C interrupt the cell, as in JupyterLab; a second one is for this process."""
    # A kernel that is shut down while a cell runs would print a traceback of its own sockets.

    def hand_on(*_: Any) -> None:
        signal.signal(signal.SIGINT, before)
        os.kill(kernel, signal.SIGINT)

    # Only the main thread gets signals.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, hand_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def execute_notebook(
    notebook: str,
    target: Path,
    parameters: Mapping[str, Any],
    kernel: Kernel,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> None:
    """Run a notebook, given as text, and save it, outputs included, as `target`.

    `parameters` are names that its parameters cell sets (`report_parameters`).

    Raises:
        NotebookFailed: a cell failed or the kernel died; `target` holds the notebook up to there.
        KeyboardInterrupt: on Ctrl-C, once the rows of the interrupted cell are kept and its ranks
            have ended.
    """
    # papermill reads a file; the committed notebook may not be the one in the working tree.
    write_file(target, notebook)
    papermill_engines.register(ENGINE, _Engine)
    try:
        papermill.execute_notebook(
            # papermill replaces names in braces, which a folder may have, by parameters.
            str(target).replace("{", "{{").replace("}", "}}"),
            None,
            parameters=parameters,
            engine_name=ENGINE,
            kernel_name="python3",
            progress_bar=False,
            kernel=kernel,
            on_progress=on_progress,
            target=target,
        )
    except PapermillExecutionError as error:
        if error.ename in INTERRUPTED:
            raise KeyboardInterrupt from None
        raise NotebookFailed(f"{error.ename}: {error.evalue}") from error
    except RuntimeError as error:  # nbclient: the kernel died
        kernel.close()
        raise NotebookFailed(str(error) or type(error).__name__) from error
