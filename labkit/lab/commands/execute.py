"""Executing a notebook strictly: parameters checked first, failures kept, progress passed on.

papermill only warns of an unknown parameter and does not mark every failure in the notebook it saves; here the
parameters are checked against the lab before a kernel starts, and success is judged by the exception.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import papermill
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import CellExecutionError
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import Engine, papermill_engines
from papermill.exceptions import PapermillExecutionError
from papermill.log import logger
from traitlets import default

from labkit.lab.config import ParameterError
from labkit.lab.declaration import Lab
from labkit.lab.notebook import check_parameters
from labkit.lab.parameter_cells import literal_assignments
from labkit.lab.progress_lines import PROGRESS_MIME, MeasuringInterrupted
from labkit.lab.runs.progress import Progress

ENGINE = "labkit"
# A kernel of torch, pandas and matplotlib has a million objects, and none of them is garbage: Python would look through
# them a dozen times while it imports, and once more at its end. In this way a lab takes two seconds less.
KERNEL_START = "__import__('gc').set_threshold(50_000); __import__('atexit').register(__import__('gc').freeze)"

SAVED_EVERY_S = 10.0
INTERRUPTED = ("KeyboardInterrupt", MeasuringInterrupted.__name__)


class NotebookFailed(RuntimeError):
    """A notebook did not run to its end. The message is the error in one line; the notebook is saved."""


class EncryptedKernelManager(AsyncKernelManager):
    """ipykernel warns of its unencrypted TCP ports unless the manager offers encryption."""

    @default("transport_encryption")
    def _encrypt(self) -> str:
        return "auto"


class _KernelManager(EncryptedKernelManager):
    """Leaves a kernel alone that has run all its cells.

    Jupyter interrupts every kernel that is to end. One still busy with its last message would say so in the terminal.
    """

    has_finished = False

    async def _async_interrupt_kernel(self) -> None:
        if not self.has_finished:
            await super()._async_interrupt_kernel()


class _Client(PapermillNotebookClient):
    """papermill's client, which passes a lab's progress on to whoever runs the notebook."""

    def __init__(self, notebook_manager: Any, on_progress: Callable[[Progress], None], **options: Any):
        super().__init__(notebook_manager, **options)
        self._on_progress = on_progress

    def papermill_execute_cells(self) -> None:
        with _handing_on_interrupts(self.km.provisioner.pid):
            super().papermill_execute_cells()
        self.km.has_finished = True

    def process_message(self, message: dict[str, Any], *arguments: Any, **options: Any) -> Any:
        record = message["content"].get("data", {}).get(PROGRESS_MIME)
        if record:
            self._on_progress(Progress(**record))
        return super().process_message(message, *arguments, **options)


@contextmanager
def _handing_on_interrupts(kernel: int) -> Iterator[None]:
    """Ctrl-C interrupts the cell, as in JupyterLab; a second one is for this process.

    A kernel that is shut down while a cell runs prints a traceback of its own sockets.
    """

    def hand_on(*_: Any) -> None:
        signal.signal(signal.SIGINT, before)
        os.kill(kernel, signal.SIGINT)

    if threading.current_thread() is not threading.main_thread():  # it gets no signals
        yield
        return
    before = signal.signal(signal.SIGINT, hand_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _LabEngine(Engine):
    @classmethod
    def execute_managed_notebook(
        cls,
        notebook_manager: Any,
        kernel_name: str,
        *,
        on_progress: Callable[[Progress], None],
        **_: Any,
    ) -> Any:
        client = _Client(
            notebook_manager,
            on_progress,
            kernel_name=kernel_name,
            kernel_manager_class=_KernelManager,
            timeout=None,  # a lab has deadlines of its own, one a point
            startup_timeout=60,
            extra_arguments=[f"--IPKernelApp.exec_lines={KERNEL_START}"],
            log=logger,
        )
        notebook_manager.save = _seldom(notebook_manager.save)
        try:
            return client.execute()
        finally:
            del notebook_manager.save  # the last time, papermill saves it whole


def _seldom(save: Callable[[], None]) -> Callable[..., None]:
    """papermill saves a notebook before and after each cell: with figures that takes a second of a page."""
    last = time.monotonic()

    def save_if_due(**_: Any) -> None:
        nonlocal last
        if time.monotonic() - last > SAVED_EVERY_S:
            save()
            last = time.monotonic()

    return save_if_due


def execute_notebook(
    study: Lab,
    source: Path,
    target: Path,
    parameters: Mapping[str, Any],
    *,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> None:
    """Run a lab's notebook with `parameters` and save it, outputs included, as `target`.

    Raises:
        ParameterError: before a kernel starts, if a parameter is not the notebook's or not valid.
        NotebookFailed: a cell failed or the kernel died; `target` holds the notebook up to there.
        KeyboardInterrupt: on Ctrl-C, once what a cell was measuring is kept and its ranks have ended.
    """
    in_cell = notebook_parameters(source)
    given = _as_in_cell(in_cell, parameters)
    check_parameters(study, in_cell | given)
    target.parent.mkdir(parents=True, exist_ok=True)
    running = target.with_suffix(".running.ipynb")
    papermill_engines.register(ENGINE, _LabEngine)
    try:
        papermill.execute_notebook(
            source,
            running,
            parameters=given,
            engine_name=ENGINE,
            kernel_name="python3",  # this interpreter, whatever kernels are registered
            progress_bar=False,
            on_progress=on_progress,
        )
    except PapermillExecutionError as error:
        if error.ename in INTERRUPTED:
            raise KeyboardInterrupt from None
        raise NotebookFailed(f"{error.ename}: {error.evalue}") from error
    except CellExecutionError as error:
        raise NotebookFailed(str(error).strip().splitlines()[-1]) from error
    except RuntimeError as error:  # nbclient: the kernel died
        raise NotebookFailed(str(error) or type(error).__name__) from error
    finally:
        if running.exists():
            running.replace(target)


def _as_in_cell(in_cell: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters by the names of the cell, all others in `config`: they win over what the cell says there."""
    given = {name: value for name, value in parameters.items() if name in in_cell}
    others = {name: value for name, value in parameters.items() if name not in in_cell}
    more = given.get("config", in_cell.get("config")) or {}
    if isinstance(more, dict) and (others or more.keys() & given.keys()):
        given["config"] = {name: value for name, value in more.items() if name not in given} | others
    return given


def notebook_parameters(path: Path) -> dict[str, Any]:
    """The defaults in the cell tagged `parameters`. ParameterError if there is no such cell, or none of literals."""
    for cell in nbformat.read(path, as_version=4).cells:
        if "parameters" in cell.metadata.get("tags", []):
            try:
                values = literal_assignments(cell.source)
            except (ValueError, SyntaxError) as error:
                raise ParameterError(f"{path.name}: the parameters cell cannot be read: {error}") from None
            if values or not cell.source.strip():
                return values
            raise ParameterError(f"{path.name}: the parameters cell sets no parameter")
    raise ParameterError(f"{path.name}: no cell is tagged `parameters`")
