"""A notebook's kernel that is interrupted, restarted or killed while a cell measures, and papermill
that is ended."""

import os
import shlex
import signal
import sys
from contextlib import ExitStack, contextmanager, suppress

import nbformat
import psutil
import pytest
from jupyter_client.manager import KernelManager

from labkit.lab.project import checkout
from tests.faults.check import PATIENCE_S, Victim, until
from tests.faults.worker import BEFORE, BETWEEN, INSIDE, WRITING

pytestmark = pytest.mark.faults

IMPORTS = """
from tests.faults.victim import LAB, FaultyConfig
from labkit.lab.runs.measure import measure
"""
# A rank stops and the other waits for it; at any other moment, the parent itself pauses there,
# once.
STOPPING = """
config = FaultyConfig(action="SIGSTOP", moment="inside a collective", timeout_s=600.0)
measure(LAB, config, profile="smoke")
"""
AFTER = """
measure(LAB, FaultyConfig(), profile="smoke").coverage()["status"].tolist()
"""
KEPT = {BEFORE: 0, INSIDE: 1, BETWEEN: 1, WRITING: 0}
"""Points that have ended by then, of three."""


def cell(moment):
    return IMPORTS + (STOPPING if moment == INSIDE else AFTER)


class _InNotebook(Victim):
    """A victim whose parent is a kernel, which measures when it is hit at a moment."""

    def __init__(self, folder, moment):
        super().__init__(folder, LABKIT_FAULT_PAUSE="" if moment == INSIDE else moment)
        self.moment = moment
        self.environment |= {"LABKIT_FAULT_FOLDER": str(self.folder), "PYTHONPATH": str(checkout())}
        # Jupyter's connection files
        for name in ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
            self.environment[name] = str(self.folder / name)

    def is_at_its_moment(self):
        if self.moment == INSIDE:
            return self.is_any_stopped()
        return (self.folder / "paused").exists()

    def assert_kept(self):
        kept = KEPT[self.moment]
        assert self.runs()[0].coverage()["status"].tolist() == ["ok"] * kept + ["pending"] * (
            3 - kept
        )

    def assert_kernel_alone(self, kernel_pid):
        """The fork server of a kernel that goes on may stay; no rank does, and no directory."""
        until(lambda: not self._left_with(kernel_pid), 60)

    def _left_with(self, kernel_pid):
        with suppress(psutil.Error):
            children = psutil.Process(kernel_pid).children()
            own = {
                kernel_pid,
                *(each.pid for child in children for each in (child, *child.children())),
            }
            ranks = [str(p.pid) for p in self.processes() if p.pid not in own]
            return [*ranks, *map(str, self.temporary.rglob("labkit-*/**"))]
        return ["the kernel is gone"]


@contextmanager
def measuring(folder, moment):
    """A kernel in a cell that measures, at a moment."""
    hit = _InNotebook(folder, moment)
    # Not TCP: a kernel's ports are free from when they are chosen until it is up, and another
    # process may get one.
    manager = KernelManager(
        kernel_name="python3", transport="ipc", connection_file=str(folder / "kernel.json")
    )
    with ExitStack() as over:
        over.callback(hit.kill)
        over.callback(_shut_down, manager)
        manager.start_kernel(env=hit.environment, cwd=str(checkout()))
        client = manager.client()
        client.start_channels()
        over.callback(client.stop_channels)
        client.wait_for_ready(timeout=PATIENCE_S)
        client.execute(cell(moment), store_history=True)
        until(hit.is_at_its_moment)
        yield hit, manager, client


def _shut_down(manager):
    with suppress(Exception):
        manager.shutdown_kernel(now=True)


def execute_reply(client):
    """How the cell ended; a slow kernel is asked several times whether it is ready, and answers
    each time."""
    while (message := client.get_shell_msg(timeout=PATIENCE_S))["msg_type"] != "execute_reply":
        pass
    return message["content"]


def evaluate(client, code):
    """The text of a cell's value, once those before it are done."""
    sent = client.execute(code)
    attempt = 1
    while True:
        message = client.get_iopub_msg(timeout=PATIENCE_S)
        if message["parent_header"].get("msg_id") != sent:
            continue
        if message["msg_type"] == "execute_result":
            return message["content"]["data"]["text/plain"]
        if message["msg_type"] == "error":
            return f"{message['content']['ename']}: {message['content']['evalue']}"
        if message["content"].get("execution_state") == "idle":
            # Over without having run: what comes right after an interrupt, a kernel throws away
            # with its queue.
            assert attempt < 5, "the kernel does not run the cell"
            sent = client.execute(code)
            attempt = attempt + 1


@pytest.mark.parametrize("moment", KEPT)
def test_an_interrupted_cell_leaves_no_rank_and_the_next_cell_measures(tmp_path, moment):
    with measuring(tmp_path, moment) as (hit, manager, client):
        manager.interrupt_kernel()
        assert execute_reply(client)["ename"] == "KeyboardInterrupt"
        assert evaluate(client, AFTER) == "['ok', 'ok', 'ok']"
        hit.assert_kernel_alone(manager.provisioner.process.pid)
        hit.assert_kept()


@pytest.mark.parametrize(("now", "moment"), [(False, INSIDE), (False, WRITING), (True, INSIDE)])
def test_a_restarted_kernel_leaves_nothing(tmp_path, now, moment):
    with measuring(tmp_path, moment) as (hit, manager, client):
        before = {process.pid for process in hit.processes()}
        manager.restart_kernel(now=now, env=hit.environment)
        until(lambda: not before & {process.pid for process in hit.processes()}, 60)
        client.wait_for_ready(timeout=PATIENCE_S)
        assert evaluate(client, IMPORTS + AFTER) == "['ok', 'ok', 'ok']"
        hit.assert_kernel_alone(manager.provisioner.process.pid)
        hit.assert_kept()


@pytest.mark.parametrize(
    ("how", "moment"),
    [
        *((how, INSIDE) for how in ("timeout", "SIGTERM", "SIGINT")),
        *(("SIGKILL", moment) for moment in KEPT),
    ],
)
def test_papermill_that_is_ended(tmp_path, how, moment):
    hit = _InNotebook(tmp_path, moment)
    source = tmp_path / "in.ipynb"
    target = tmp_path / "out.ipynb"
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell(moment))],
        metadata={"kernelspec": {"name": "python3", "display_name": "", "language": "python"}},
    )
    nbformat.write(notebook, source)
    limit = "--execution-timeout 60" if how == "timeout" else ""
    command = (
        f"{sys.executable} -m papermill {source} {target} -k python3 --no-progress-bar {limit}"
    )
    try:
        hit.run(shlex.split(command), checkout())
        until(hit.is_at_its_moment)
        if how != "timeout":
            os.kill(hit.process.pid, getattr(signal, how))
        status, output = hit.finish()
        assert status != 0, output
        hit.assert_kept()
        until(lambda: not list(hit.processes()) and not list(hit.temporary.glob("labkit-*")), 60)
    finally:
        hit.kill()
