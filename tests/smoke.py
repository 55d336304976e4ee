"""The tour, and all labs at profile `smoke`, one after the other in one process: `python -m tests.smoke FOLDER`.

The cells, in IPython, the pages and the index are those of `labkit report`; without a kernel and its imports for each
lab, and the fork server of all labs has what their workers import. What is left out is papermill's and the kernel's:
`tests/test_adding_a_lab.py` reports by command, and `make test-all` all labs, and the tour by papermill. The model
called nano is a ninth of it, so runs belong in a $LABKIT_HOME of their own, where nobody takes them for others.
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
from labkit.lab.project import notebook_path, notebooks_directory
from labkit.studies import LABS, load_lab
from tests import small_nano  # noqa: F401  which makes nano small
from tests.fork_server import preload

PROGRAM = sys.modules["__main__"]
TOUR = notebooks_directory() / "00_start_here.ipynb"

preload("tests.small_nano")


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
    node = parameterize_notebook(node, {"profile": "smoke"} | parameters, kernel_name="python3")
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


def main(folder: Path) -> None:
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])  # of the fork server, which loads tests.small_nano
    shell = _Shell.instance(config=Config(HistoryManager={"enabled": False}))
    (folder / "notebooks").mkdir(parents=True)
    gc.freeze()  # modules stay: each shell that is emptied looks for garbage
    os.chdir(folder)  # notebooks run from any directory
    execute(TOUR, shell, folder / "notebooks" / TOUR.name, repeats=6)
    for lab in LABS:
        notebook = folder / "notebooks" / f"{lab}.ipynb"
        study = load_lab(lab)
        fewer = {"repeats": 3} if "repeats" in type(study.profiles["smoke"]).model_fields else {}
        execute(notebook_path(lab), shell, notebook, config=fewer)
        export_page(notebook, folder / f"{lab}.html", study)
    write_index(map(load_lab, LABS), folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
