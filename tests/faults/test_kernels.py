"""A notebook's kernel that is interrupted, restarted or killed while a cell measures, and papermill that is ended."""

import os
import shlex
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from threading import Lock

import nbformat
import psutil
import pytest
from jupyter_client.manager import KernelManager

from labkit.lab.project import checkout
from tests.faults.check import Victim, at_once, until
from tests.faults.worker import BEFORE, BETWEEN, INSIDE, WRITING

IMPORTS = """
from tests.faults.victim import STUDY, FaultyConfig
from labkit.lab.runs.measure import measure
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


def together(*cases):
    """A parameter of cases that are checked at once."""
    return pytest.param(cases, id=" + ".join(", ".join(case) for case in cases))


def at_once_in(folder, check, cases):
    at_once(check, *((folder / str(number), *case) for number, case in enumerate(cases)))


class _InNotebook(Victim):
    """A victim whose parent is a kernel, which measures when it is hit at a moment."""

    def __init__(self, folder, moment):
        super().__init__(folder, LABKIT_FAULT_PAUSE="" if moment == INSIDE else moment)
        self.moment = moment
        self.environment |= {"LABKIT_FAULT_FOLDER": str(self.folder), "PYTHONPATH": str(checkout())}
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
            children = psutil.Process(kernel_pid).children()
            own = {kernel_pid, *(each.pid for child in children for each in (child, *child.children()))}
            ranks = [str(p.pid) for p in self.processes() if p.pid not in own]
            return [*ranks, *map(str, self.temporary.rglob("labkit-*/**"))]
        return ["the kernel is gone"]


@contextmanager
def measuring(folder, moment):
    """A kernel in a cell that measures, at a moment."""
    hit = _InNotebook(folder, moment)
    # Not TCP: a kernel's ports are free from when they are chosen until it is up, and whatever runs beside may get one.
    manager = KernelManager(kernel_name="python3", transport="ipc", connection_file=str(folder / "kernel.json"))
    with ExitStack() as over:
        over.callback(hit.kill)
        over.callback(_shut_down, manager)
        manager.start_kernel(env=hit.environment, cwd=str(checkout()))
        client = manager.client()
        client.start_channels()
        over.callback(client.stop_channels)
        client.wait_for_ready(timeout=60)
        client.execute(cell(moment), store_history=True)
        until(hit.is_at_its_moment, 60)
        assert hit.is_at_its_moment()
        yield hit, manager, client


def _shut_down(manager):
    with suppress(Exception):
        manager.shutdown_kernel(now=True)


def told(client, code):
    """What a cell returned, as text, once those before it are done."""
    sent, asked = client.execute(code), 1
    while True:
        message = client.get_iopub_msg(timeout=90)
        if message["parent_header"].get("msg_id") != sent:
            continue
        if message["msg_type"] == "execute_result":
            return message["content"]["data"]["text/plain"]
        if message["msg_type"] == "error":
            return f"{message['content']['ename']}: {message['content']['evalue']}"
        if message["content"].get("execution_state") == "idle":
            # Over without having run: what comes right after an interrupt, a kernel throws away with its queue.
            assert asked < 5, "the kernel does not run the cell"
            sent, asked = client.execute(code), asked + 1


@pytest.mark.faults
@pytest.mark.parametrize("cases", [together((BEFORE,), (INSIDE,)), together((BETWEEN,), (WRITING,))])
def test_an_interrupted_cell_leaves_no_rank_and_the_next_cell_measures(tmp_path, cases):
    at_once_in(tmp_path, _check_interrupted, cases)


def _check_interrupted(folder, moment):
    with measuring(folder, moment) as (hit, manager, client):
        manager.interrupt_kernel()
        assert client.get_shell_msg(timeout=60)["content"]["ename"] == "KeyboardInterrupt"
        assert told(client, AFTER) == "['ok', 'ok', 'ok']"
        hit.assert_kernel_alone(manager.provisioner.process.pid)
        return [("JupyterLab: interrupt", moment, f"{hit.assert_kept()}, the next cell measures 3 of 3")]


@pytest.mark.faults
@pytest.mark.parametrize("cases", [together(("asked", INSIDE), ("asked", WRITING), ("killed", INSIDE))])
def test_a_restarted_kernel_leaves_nothing(tmp_path, cases):
    at_once_in(tmp_path, _check_restarted, cases)


def _check_restarted(folder, how, moment):
    with measuring(folder, moment) as (hit, manager, client):
        before = {process.pid for process in hit.processes()}
        manager.restart_kernel(now=how == "killed", env=hit.environment)
        until(lambda: not before & {process.pid for process in hit.processes()}, 20)
        assert not before & {process.pid for process in hit.processes()}
        client.wait_for_ready(timeout=60)
        assert told(client, IMPORTS + AFTER) == "['ok', 'ok', 'ok']"
        hit.assert_kernel_alone(manager.provisioner.process.pid)
        return [(f"JupyterLab: restart, {how}", moment, f"{hit.assert_kept()}, then 3 of 3")]


@pytest.mark.faults
@pytest.mark.parametrize(
    "cases",
    [
        together(("timeout", INSIDE), ("SIGTERM", INSIDE), ("SIGINT", INSIDE)),  # the first waits for most of its time
        together(("SIGKILL", BEFORE), ("SIGKILL", INSIDE)),
        together(("SIGKILL", BETWEEN), ("SIGKILL", WRITING)),
    ],
)
def test_papermill_that_is_ended(tmp_path, cases):
    """One after the other until each is at its moment: the ports of a kernel are free until it has begun."""
    at_once_in(tmp_path, partial(_check_papermill, Lock()), cases)


def _check_papermill(starting, folder, how, moment):
    hit = _InNotebook(folder, moment)
    source, target = folder / "in.ipynb", folder / "out.ipynb"
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell(moment))],
        metadata={"kernelspec": {"name": "python3", "display_name": "", "language": "python"}},
    )
    nbformat.write(notebook, source)
    limit = "--execution-timeout 12" if how == "timeout" else ""
    command = f"{sys.executable} -m papermill {source} {target} -k python3 --no-progress-bar {limit}"
    try:
        with starting:
            hit.process = subprocess.Popen(
                shlex.split(command),
                env=hit.environment,
                cwd=checkout(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            until(hit.is_at_its_moment, 60)
        if how != "timeout":
            assert hit.is_at_its_moment()
            os.kill(hit.process.pid, getattr(signal, how))
        status, said = hit.finish(60)
        assert status != 0, said
        until(lambda: not list(hit.processes()) and not list(hit.temporary.glob("labkit-*")), 30)
        assert list(hit.processes()) == []
        assert list(hit.temporary.glob("labkit-*")) == []
        return [(f"papermill: {how}", moment, f"{hit.assert_kept()}, nothing left")]
    finally:
        hit.kill()
