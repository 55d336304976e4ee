"""JupyterLab as `make lab` starts it, and an opened notebook in Chromium: what a reader does there,
and then sees.

The server is the test's own, on loopback, with a token, its own settings and a copy of the
notebooks.
"""

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import nbformat
import psutil

from labkit.lab.project import checkout


def until(condition, waited_for, deadline_s=240.0):
    """What `condition` gives, once that is something."""
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end, f"waited in vain for {waited_for}"
        time.sleep(0.05)
    return value


class Server:
    """JupyterLab, all it writes in a folder of its own, and every process that descends from it."""

    def __init__(self, folder):
        self.root = folder
        self.notebooks = shutil.copytree(checkout() / "notebooks", folder / "notebooks")
        self.log = folder / "server.log"
        self._runtime = folder / "runtime"
        command = [
            sys.executable,
            "-m",
            "jupyterlab",
            "--no-browser",
            "--allow-root",
            "--ip=127.0.0.1",
        ]
        command += [f"--ServerApp.root_dir={self.root}", *_options_of_make_lab()]
        own = {"HOME": folder, "LABKIT_HOME": folder, "JUPYTER_RUNTIME_DIR": self._runtime}
        # as `make lab` has them
        own |= {"JUPYTER_CONFIG_PATH": checkout() / ".jupyter"}
        own |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        environment = os.environ | {name: str(value) for name, value in own.items()}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def url(self, notebook):
        """The address of a notebook, once the server listens and has written its own."""
        about = self._runtime / f"jpserver-{self.process.pid}.json"
        until(
            lambda: self.process.poll() is not None or (about.exists() and about.stat().st_size),
            "the server",
        )
        assert self.process.poll() is None, self.log.read_text()
        server = json.loads(about.read_text())
        # no tabs of before
        return f"{server['url']}lab/tree/notebooks/{notebook}?token={server['token']}&reset"

    def family(self):
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def ranks(self):
        """Processes forked by a fork server, which has its parent's command line, as they have."""
        found = []
        for process in self.family():
            with suppress(psutil.Error, AttributeError):
                commands = [" ".join(some.cmdline()) for some in (process, *process.parents()[:2])]
                if all("server_process.py" in command for command in commands):
                    found.append(process)
        return found

    def close(self):
        """Leave nothing of it."""
        family = self.family()
        self.process.terminate()
        try:
            self.process.wait(30)
        finally:
            left = psutil.wait_procs(family, timeout=10)[1]
            for process in left:
                process.kill()
            self.process.kill()
            self.process.wait()
        assert not left


def _options_of_make_lab():
    """What `make lab` gives JupyterLab, but for where it is rooted and what it opens."""
    given = subprocess.check_output(
        ["make", "-s", "-n", "lab"], cwd=checkout(), text=True, stderr=subprocess.DEVNULL
    )
    return [
        option
        for option in given.split()
        if option.startswith(("--KernelManager.", "--FileContentsManager."))
    ]


class Notebook:
    """An opened notebook: what a reader does with it, and what is then in it. Words of its source
    name a cell."""

    def __init__(self, page, path):
        self.page = page
        self._path = path
        self._cells = page.locator(".jp-CodeCell")
        expected = sum(cell.cell_type == "code" for cell in self._read().cells)
        until(lambda: self._cells.count() == expected, "the notebook")
        page.get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=90_000)

    def write_parameters(self, source):
        self._write(self._cells.first, source)

    def begin(self, parameters):
        """Runs the parameters cell with these, and the one that opens the lab."""
        self.write_parameters(parameters)
        self.run("profile =")
        self.run("import open_lab")
        self.run("lab = open_lab")

    def write(self, source, new):
        """Puts other code into a cell."""
        self._write(self._cell(source), new)

    def start(self, source):
        """Runs a cell, and waits for nothing but its start."""
        cell = self._cell(source)
        before = cell.locator(".jp-InputPrompt").text_content()
        cell.locator(".cm-content").click()
        self.page.keyboard.press("Control+Enter")
        until(
            lambda: cell.locator(".jp-InputPrompt").text_content() != before, f"{source!r} to start"
        )

    def run(self, source):
        """Runs a cell, waits for its end; what the page shows below it."""
        self.start(source)
        prompt = self._cell(source).locator(".jp-InputPrompt")
        until(lambda: "*" not in prompt.text_content(), f"{source!r} to end")
        return self.text_below(source)

    def run_new(self, source, below):
        """Writes a new cell below another one and runs it; what the page shows below it."""
        count = self._cells.count()
        self._cell(below).locator(".cm-content").click()
        self.page.keyboard.press("Escape")
        self.page.keyboard.press("b")
        until(lambda: self._cells.count() == count + 1, "a new cell")
        new = self.page.locator(".jp-CodeCell.jp-mod-active")
        self._write(new, source)
        return self.run(source.strip().splitlines()[-1])

    def run_all(self):
        """As a reader does: once more if nothing happens, as just after a slow start of the
        kernel."""
        for _ in range(3):
            self._choose("Run", "Run All Cells")
            with suppress(AssertionError):
                until(
                    lambda: any("*" in prompt for prompt in self.prompts()),
                    "a cell to run",
                    deadline_s=10,
                )
                return
        raise AssertionError("no cell runs")

    def interrupt(self):
        self._choose("Kernel", "Interrupt Kernel")

    def close(self):
        """Ends its kernel, too."""
        self._choose("Kernel", "Shut Down Kernel")
        self.page.close()

    def clear_and_save(self):
        """The notebook's bytes with outputs cleared."""
        self._choose("Edit", "Clear Outputs of All Cells")
        self.saved()
        return self._path.read_bytes()

    def wait_until_idle(self):
        """Until the kernel has nothing to do, and no cell waits for it."""
        idle = self.page.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]')
        until(
            lambda: idle.count() and not any("*" in prompt for prompt in self.prompts()),
            "the kernel",
        )

    def prompts(self):
        """What stands before each code cell: `[3]:`, `[*]:` while it waits or runs, or `[ ]:`."""
        return self._cells.locator(".jp-InputPrompt").all_text_contents()

    def text_below(self, source):
        """What the page shows below a cell; "" if that is nothing."""
        cell = self._cell(source)
        cell.scroll_into_view_if_needed()  # what is out of sight has no text
        return "\n".join(cell.locator(".jp-OutputArea").all_inner_texts())

    def points_drawn_below(self, source):
        """The CSVs of the points of the figures below a cell, as their links have them, once a
        figure is seen."""
        output = self._cell(source).locator(".jp-OutputArea")
        assert output.locator("figure img").first.bounding_box()["width"] > 100
        links = [link.get_attribute("href") for link in output.get_by_text("Points (CSV)").all()]
        return "".join(base64.b64decode(link.partition("base64,")[2]).decode() for link in links)

    def alignment_of(self, selector):
        """JupyterLab has a style for tables that labkit's must outweigh."""
        return self.page.locator(selector).first.evaluate(
            "cell => getComputedStyle(cell).textAlign"
        )

    def saved(self):
        """The code cells as saved now."""
        before = self._path.stat().st_mtime_ns
        self.page.keyboard.press("Escape")
        self.page.keyboard.press("Control+s")
        until(lambda: self._path.stat().st_mtime_ns != before, "the notebook to be saved")
        notebook = until(self._read, "the notebook to be saved whole")
        return [cell for cell in notebook.cells if cell.cell_type == "code"]

    def _cell(self, source):
        return self._cells.filter(has=self.page.locator(".cm-content", has_text=source)).last

    def _write(self, cell, source):
        cell.locator(".cm-content").click()
        self.page.keyboard.press("Control+a")
        self.page.keyboard.insert_text(source.strip())

    def _choose(self, menu, entry):
        self.page.get_by_role("menuitem", name=menu, exact=True).click()
        self.page.locator(".lm-Menu-item").filter(has_text=entry).first.click()

    def _read(self):
        with suppress(nbformat.reader.NotJSONError):
            return nbformat.read(self._path, as_version=4)
