"""The tour, and the pages of all labs, one after the other in one process: `python -m tests.smoke FOLDER FORK_SERVER`.

The cells, in IPython, the pages and the index are those of `labkit report`; without a kernel and its imports for each
lab, and the fork server may be one that has what all workers import. Some labs measure at profile `smoke`, with half of
its rounds, and the rest draw their recorded runs. What is left out is papermill's and the kernel's:
`tests/test_adding_a_lab.py` reports by command, and `make test-all` measures all labs, the tour by papermill.
"""

import gc
import io
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import nbformat
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook
from traitlets import Type
from traitlets.config import Config

from labkit.lab.pages.record import write_index
from labkit.lab.pages.report import export_page
from labkit.lab.project import notebook_path, notebooks_directory, recorded_directory
from labkit.studies import LABS, load_lab
from tests import small_steps  # noqa: F401
from tests.fork_server import borrow, preload

PROGRAM = sys.modules["__main__"]
TOUR = notebooks_directory() / "00_start_here.ipynb"
MEASURED = ("limits", "training_step", "precision", "all_reduce", "sync_batchnorm", "tuned_step")
"""Labs that take a second or two; the others' pages are those of their recorded runs."""


class _Publisher(DisplayPublisher):
    """Keeps what a cell shows, as a notebook keeps it: what is shown again replaces what was shown."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.shown: list[Any] = []
        self._by_id: dict[str, Any] = {}

    def publish(
        self, data: Any, metadata: Any = None, *, transient: Any = None, update: bool = False, **_: Any
    ) -> None:
        name = (transient or {}).get("display_id")
        if update:
            self._by_id[name] |= {"data": data, "metadata": metadata or {}}
            return
        output = nbformat.v4.new_output("display_data", data=data, metadata=metadata or {})
        self.shown.append(output)
        self._by_id[name] = output


class _Hook(DisplayHook):
    """Keeps the value of a cell's last line with what it shows."""

    def write_output_prompt(self) -> None:
        pass

    def write_format_data(self, format_dict: Any, md_dict: Any = None) -> None:
        self.shell.display_pub.publish(format_dict, md_dict)


class _Shell(InteractiveShell):
    display_pub_class = Type(_Publisher)
    displayhook_class = Type(_Hook)


def execute(source: Path, shell: InteractiveShell, notebook: Path, **parameters: Any) -> None:
    """Every cell of a notebook; raises what a cell raises."""
    node = load_notebook_node(str(source))
    node = parameterize_notebook(node, parameters, kernel_name="python3")
    sys.modules["__main__"] = PROGRAM  # the ranks' own, which a shell would be
    shell.reset(new_session=True)
    for cell in node.cells:
        if cell.cell_type == "code":
            shell.display_pub.shown = cell.outputs = []
            with redirect_stdout(io.StringIO()) as said, redirect_stderr(io.StringIO()) as complained:
                result = shell.run_cell(cell.source, store_history=True)
            result.raise_error()
            for name, stream in (("stdout", said), ("stderr", complained)):
                if text := stream.getvalue():
                    cell.outputs.append(nbformat.v4.new_output("stream", name=name, text=text))
    nbformat.write(node, notebook)


def main(folder: Path, fork_server: Path) -> None:
    """Write the pages; by the fork server that another process lends, if it lends one."""
    if fork_server.exists():
        borrow(fork_server)
    else:
        preload()
    shell = _Shell.instance(config=Config(HistoryManager={"enabled": False}))
    (folder / "notebooks").mkdir(parents=True)
    gc.freeze()  # modules stay: each shell that is emptied looks for garbage
    os.chdir(folder)  # notebooks run from any directory
    execute(TOUR, shell, folder / "notebooks" / TOUR.name, repeats=3)
    for lab in LABS:
        notebook = folder / "notebooks" / f"{lab}.ipynb"
        study = load_lab(lab)
        (recorded,) = (recorded_directory() / lab).glob("*.jsonl")
        fewer = {"repeats": 3} if "repeats" in type(study.profiles["smoke"]).model_fields else {}
        parameters = {"profile": "smoke", "config": fewer} if lab in MEASURED else {"run": recorded.stem}
        execute(notebook_path(lab), shell, notebook, **parameters)
        export_page(notebook, folder / f"{lab}.html", study)
    write_index(map(load_lab, LABS), folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
