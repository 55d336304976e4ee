"""A lab as a reader has it in JupyterLab: opened, changed, run, interrupted, run again, in a real browser.

The server is the test's own, on loopback, with a token, its own settings and a copy of the notebooks.
"""

import importlib.util
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress

import nbformat
import psutil
import pytest

from labkit.lab.notebook import PAGE_MIME
from labkit.lab.project import notebook_path, project_root
from tests.browser import CHROMIUM

LAB = notebook_path("all_reduce").name
SMALL = """
profile = "smoke"
run = None
world_sizes = [3]
many_world_sizes = []
transport_world_sizes = []
backends = ["gloo"]
"""
LONG = f"{SMALL}repeats = 100_000\ntimeout_s = 3600.0\n"  # an hour, were nobody to interrupt it

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium to open JupyterLab with"),
    pytest.mark.skipif(not importlib.util.find_spec("jupyterlab"), reason="no jupyterlab"),
]


def _until(condition, waited_for, deadline_s=90.0):
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end, f"waited in vain for {waited_for}"
        time.sleep(0.05)
    return value


def _options_of_make_lab():
    """What `make lab` gives JupyterLab, but for where it is rooted and what it opens."""
    given = subprocess.check_output(
        ["make", "-s", "-n", "lab"], cwd=project_root(), text=True, stderr=subprocess.DEVNULL
    )
    return [option for option in given.split() if option.startswith(("--KernelManager.", "--FileContentsManager."))]


class _Server:
    """JupyterLab, all it writes in a folder of its own, and every process that descends from it."""

    def __init__(self, folder):
        self.root = folder
        self.notebooks = shutil.copytree(project_root() / "notebooks", folder / "notebooks")
        self.log = folder / "server.log"
        self._runtime = folder / "runtime"
        own = {"JUPYTER_RUNTIME_DIR": self._runtime, "JUPYTER_CONFIG_DIR": folder / "config"}
        own |= {"JUPYTER_DATA_DIR": folder / "data", "IPYTHONDIR": folder / "ipython"}
        own |= {"JUPYTERLAB_SETTINGS_DIR": folder / "settings", "JUPYTERLAB_WORKSPACES_DIR": folder / "workspaces"}
        self._keep_quiet(folder / "settings")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1"]
        command += [f"--port={port}", f"--IdentityProvider.token={secrets.token_hex(16)}"]
        command += [f"--ServerApp.root_dir={self.root}", *_options_of_make_lab()]
        environment = os.environ | {name: str(path) for name, path in own.items()}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    @staticmethod
    def _keep_quiet(settings):
        """It would ask whether it may fetch news, in a window over the notebook."""
        path = settings / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"fetchNews": "false", "checkForUpdates": False}))

    def url(self, notebook):
        """The address of a notebook, once the server listens and has written its own."""
        about = self._runtime / f"jpserver-{self.process.pid}.json"
        _until(lambda: self.process.poll() is not None or (about.exists() and about.stat().st_size), "the server")
        assert self.process.poll() is None, self.log.read_text()
        told = json.loads(about.read_text())
        return f"{told['url']}lab/tree/notebooks/{notebook}?token={told['token']}"

    def family(self):
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def ranks(self):
        """Processes forked by a fork server: they have its command line, and so has their parent."""
        found = []
        for process in self.family():
            with suppress(psutil.Error, AttributeError):
                commands = [" ".join(some.cmdline()) for some in (process, process.parent())]
                if all("forkserver" in command for command in commands):
                    found.append(process)
        return found

    def end(self):
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


class _Notebook:
    """An opened notebook: what a reader does with it, and what is then in it."""

    def __init__(self, page, path):
        self._page = page
        self._path = path
        self._cells = page.locator(".jp-CodeCell")
        expected = sum(cell.cell_type == "code" for cell in self._read().cells)
        _until(lambda: self._cells.count() == expected, "the notebook")
        page.get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=90_000)

    def write_parameters(self, source):
        self._cells.first.locator(".cm-content").click()
        self._page.keyboard.press("Control+a")
        self._page.keyboard.insert_text(source.strip())

    def run_all(self):
        """As a reader does: once more if nothing happens, as just after a slow start of the kernel."""
        for _ in range(3):
            self._choose("Run", "Run All Cells")
            with suppress(AssertionError):
                _until(lambda: any("*" in prompt for prompt in self.prompts()), "a cell to run", deadline_s=10)
                return
        raise AssertionError("no cell runs")

    def interrupt(self):
        self._choose("Kernel", "Interrupt Kernel")

    def _choose(self, menu, entry):
        self._page.get_by_role("menuitem", name=menu, exact=True).click()
        self._page.locator(".lm-Menu-item").filter(has_text=entry).first.click()

    def clear_and_save(self):
        """The notebook's bytes with outputs cleared."""
        self._choose("Edit", "Clear Outputs of All Cells")
        self.saved()
        return self._path.read_bytes()

    def wait_until_idle(self):
        """Until the kernel has nothing to do, and no cell waits for it."""
        idle = self._page.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]')
        _until(lambda: idle.count() and not any("*" in prompt for prompt in self.prompts()), "the kernel")

    def prompts(self):
        """What stands before each code cell: `[3]:`, `[*]:` while it waits or runs, or `[ ]:`."""
        return self._cells.locator(".jp-InputPrompt").all_text_contents()

    def text_below(self, source):
        """What the page shows below a cell; "" if that is nothing."""
        return "\n".join(self._cells.filter(has_text=source).locator(".jp-OutputArea").all_text_contents())

    def alignment_of(self, selector):
        """JupyterLab has a style for tables that labkit's must outweigh."""
        return self._page.locator(selector).first.evaluate("cell => getComputedStyle(cell).textAlign")

    def saved(self):
        """The code cells as saved now."""
        before = self._path.stat().st_mtime_ns
        self._page.keyboard.press("Escape")
        self._page.keyboard.press("Control+s")
        _until(lambda: self._path.stat().st_mtime_ns != before, "the notebook to be saved")
        notebook = _until(self._read, "the notebook to be saved whole")
        return [cell for cell in notebook.cells if cell.cell_type == "code"]

    def _read(self):
        with suppress(nbformat.reader.NotJSONError):
            return nbformat.read(self._path, as_version=4)


def _outputs(cells, kind):
    return [output for cell in cells for output in cell.outputs if output.output_type == kind]


def _parameters(path):
    (cell,) = [c for c in nbformat.read(path, as_version=4).cells if "parameters" in c.metadata.get("tags", [])]
    return cell.source


def _measuring(cells):
    (cell,) = [cell for cell in cells if "lab.measure()" in cell.source]
    return cell


def _page_record(notebook, server):
    """What the finished notebook leaves for the index, after a look at everything else it shows."""
    _until(lambda: all(any(map(str.isdigit, prompt)) for prompt in notebook.prompts()), "every cell to have run")
    notebook.wait_until_idle()
    assert server.ranks() == []
    cells = notebook.saved()
    assert _outputs(cells, "error") == []
    assert _outputs(cells, "stream") == []
    (line,) = _measuring(cells).outputs
    assert "points planned" in line.data["text/html"]
    (record,) = [output.data[PAGE_MIME] for output in _outputs(cells, "display_data") if PAGE_MIME in output.data]
    return record


@pytest.fixture
def server(tmp_path):
    running = _Server(tmp_path)
    try:
        yield running
    finally:
        running.end()


@pytest.fixture
def notebook(server):
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as browsers:
        browser = browsers.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        try:
            page = browser.new_page(viewport={"width": 1280, "height": 1000})
            page.goto(server.url(LAB))
            yield _Notebook(page, server.notebooks / LAB)
        finally:
            browser.close()


def test_run_all_then_interrupt_a_longer_sweep_then_another_parameter(server, notebook):
    notebook.write_parameters(SMALL)
    notebook.run_all()
    record = _page_record(notebook, server)
    assert record["coverage"] == {"ok": 6}
    assert any("3 ranks" in effect["setting"] for effect in record["answers"][1]["effects"])
    assert notebook.alignment_of(".labkit-card td") == "left"

    notebook.write_parameters(LONG)
    notebook.run_all()
    _until(server.ranks, "ranks to measure")
    _until(lambda: "of 6 points" in notebook.text_below("lab.measure()"), "the progress line")
    notebook.interrupt()
    _until(lambda: not server.ranks(), "the ranks to end", deadline_s=20)
    notebook.wait_until_idle()
    cells = notebook.saved()
    line, error = _measuring(cells).outputs
    assert re.search("of 6 points   .* so far   interrupted", line.data["text/html"])
    assert len(error.traceback) == 1
    assert "KeyboardInterrupt: interrupted; what was measured is kept" in error.traceback[0]
    assert _outputs(cells, "error") == [error]

    notebook.write_parameters(SMALL.replace("[3]", "[2]"))
    notebook.run_all()
    record = _page_record(notebook, server)
    assert record["coverage"] == {"ok": 6}
    assert any("2 ranks" in effect["setting"] for effect in record["answers"][1]["effects"])

    notebook.write_parameters(_parameters(notebook_path("all_reduce")))
    assert notebook.clear_and_save() == notebook_path("all_reduce").read_bytes()
