"""A notebook's kernel that is interrupted, restarted or killed while a cell measures, and papermill that is ended."""

import os
import shlex
import signal
import subprocess
import sys
from contextlib import suppress

import nbformat
import psutil
import pytest
from jupyter_client.manager import KernelManager

from labkit.lab.project import project_root
from tests.faults.check import Victim, note, until
from tests.faults.worker import BEFORE, BETWEEN, INSIDE, WRITING

IMPORTS = """
from tests.faults.victim import STUDY, FaultyConfig
from labkit.lab.measure import measure
"""
# A rank stops and the other waits for it; at any other moment, the parent itself pauses there, once.
STOPPING = """
measure(STUDY, FaultyConfig(action="SIGSTOP", moment="inside a collective", timeout_s=60.0), profile="smoke")
"""
AFTER = """
measure(STUDY, FaultyConfig(), profile="smoke").coverage()["status"].tolist()
"""
MOMENTS = (BEFORE, INSIDE, BETWEEN, WRITING)
KEPT = {BEFORE: 0, INSIDE: 1, BETWEEN: 1, WRITING: 0}
"""Points that have ended by then, of three."""


def cell(moment):
    return IMPORTS + (STOPPING if moment == INSIDE else AFTER)


def cases(moments_by_how):
    return [
        pytest.param(how, moment, id=f"{how}, {moment}") for how in moments_by_how for moment in moments_by_how[how]
    ]


class _InNotebook(Victim):
    """A victim whose parent is a kernel, which measures when it is hit at a moment."""

    def __init__(self, folder, moment):
        super().__init__(folder, LABKIT_FAULT_PAUSE="" if moment == INSIDE else moment)
        self.moment = moment
        self.environment |= {"LABKIT_FAULT_FOLDER": str(self.folder), "PYTHONPATH": str(project_root())}
        # what belongs to Jupyter: its connection files
        self.environment |= {
            "JUPYTER_RUNTIME_DIR": str(self.folder / "jupyter"),
            "IPYTHONDIR": str(self.folder / "ipython"),
        }

    def is_at_its_moment(self):
        if self.moment == INSIDE:
            return any(process.status() == psutil.STATUS_STOPPED for process in self.processes())
        return (self.folder / "paused").exists()

    def assert_kept(self):
        kept = KEPT[self.moment]
        assert self.runs()[0].coverage()["status"].tolist() == ["ok"] * kept + ["pending"] * (3 - kept)
        return f"{kept} of 3 points kept"

    def assert_kernel_alone(self, kernel_pid):
        """Of a kernel that goes on, its fork server may stay; no rank does, and no directory."""
        until(lambda: len(self.leftovers_beside(kernel_pid)) == 0, 20)
        assert self.leftovers_beside(kernel_pid) == []

    def leftovers_beside(self, kernel_pid):
        with suppress(psutil.Error):
            own = {kernel_pid, *(child.pid for child in psutil.Process(kernel_pid).children())}
            ranks = [str(p.pid) for p in self.processes() if p.pid not in own]
            return [*ranks, *map(str, self.temporary.rglob("labkit-*/**"))]
        return ["the kernel is gone"]


@pytest.fixture
def measuring(tmp_path, moment):
    """A kernel in a cell that measures, at a moment."""
    hit = _InNotebook(tmp_path, moment)
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(env=hit.environment, cwd=str(project_root()))
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=60)
    client.execute(cell(moment), store_history=True)
    until(hit.is_at_its_moment, 60)
    assert hit.is_at_its_moment()
    yield hit, manager, client
    client.stop_channels()
    with suppress(Exception):
        manager.shutdown_kernel(now=True)
    hit.kill()


def told(client, code):
    """What a cell returned, as text, once those before it are done."""
    sent = client.execute(code)
    while True:
        message = client.get_iopub_msg(timeout=90)
        if message["parent_header"].get("msg_id") != sent:
            continue
        if message["msg_type"] == "execute_result":
            return message["content"]["data"]["text/plain"]
        if message["msg_type"] == "error":
            return f"{message['content']['ename']}: {message['content']['evalue']}"


@pytest.mark.faults
@pytest.mark.parametrize("moment", MOMENTS)
def test_an_interrupted_cell_leaves_no_rank_and_the_next_cell_measures(measuring, moment):
    hit, manager, client = measuring
    manager.interrupt_kernel()
    assert client.get_shell_msg(timeout=60)["content"]["ename"] == "KeyboardInterrupt"
    assert told(client, AFTER) == "['ok', 'ok', 'ok']"
    hit.assert_kernel_alone(manager.provisioner.process.pid)
    note("JupyterLab: interrupt", moment, f"{hit.assert_kept()}, the next cell measures 3 of 3")


@pytest.mark.faults
@pytest.mark.parametrize(("how", "moment"), cases({"asked": (INSIDE, WRITING), "killed": (INSIDE,)}))
def test_a_restarted_kernel_leaves_nothing(measuring, how, moment):
    hit, manager, client = measuring
    before = {process.pid for process in hit.processes()}
    manager.restart_kernel(now=how == "killed", env=hit.environment)
    until(lambda: not before & {process.pid for process in hit.processes()}, 20)
    assert not before & {process.pid for process in hit.processes()}
    client.wait_for_ready(timeout=60)
    assert told(client, IMPORTS + AFTER) == "['ok', 'ok', 'ok']"
    hit.assert_kernel_alone(manager.provisioner.process.pid)
    note(f"JupyterLab: restart, {how}", moment, f"{hit.assert_kept()}, then 3 of 3")


@pytest.mark.faults
@pytest.mark.parametrize(
    ("how", "moment"),
    cases({"timeout": (INSIDE,), "SIGKILL": MOMENTS, "SIGTERM": (INSIDE,), "SIGINT": (INSIDE,)}),
)
def test_papermill_that_is_ended(tmp_path, how, moment):
    hit = _InNotebook(tmp_path, moment)
    source, target = tmp_path / "in.ipynb", tmp_path / "out.ipynb"
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell(moment))],
        metadata={"kernelspec": {"name": "python3", "display_name": "", "language": "python"}},
    )
    nbformat.write(notebook, source)
    limit = "--execution-timeout 12" if how == "timeout" else ""
    command = f"{sys.executable} -m papermill {source} {target} -k python3 --no-progress-bar {limit}"
    hit.process = subprocess.Popen(
        shlex.split(command),
        env=hit.environment,
        cwd=project_root(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until(hit.is_at_its_moment, 60)
        if how != "timeout":
            assert hit.is_at_its_moment()
            os.kill(hit.process.pid, getattr(signal, how))
        status, said = hit.finish(60)
        assert status != 0, said
        until(lambda: not list(hit.processes()) and not list(hit.temporary.glob("labkit-*")), 30)
        assert list(hit.processes()) == []
        assert list(hit.temporary.glob("labkit-*")) == []
        note(f"papermill: {how}", moment, f"{hit.assert_kept()}, nothing left")
    finally:
        hit.kill()
