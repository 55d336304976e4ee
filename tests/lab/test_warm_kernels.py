"""Kernels that are forked from one process: each is its own, and nothing outlives the command."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from types import SimpleNamespace

import psutil
import pytest
from nbformat.v4 import new_notebook
from papermill.clientwrap import PapermillNotebookClient

from labkit.lab.commands.execute import EncryptedKernelManager, _Client, _KernelManager
from tests.commands import carry_out

MARK = "LABKIT_TEST_MARK"

PROGRAM = """
import asyncio, json, os, signal
from labkit.lab.commands.warm_kernels import WarmKernels, without_threads
with without_threads():
    from labkit.lab.commands.execute import _KernelManager
nest = WarmKernels.begun(["labkit.studies.precision.lab"], ranks=["labkit.studies.limits.worker"])
ASKED = '''
import json, os, sys, torch
from labkit.machine.load import own_processes
from labkit.parallel.launch import run_ranks
known = "labkit.studies.precision.lab" in sys.modules
def parent():
    return os.getppid()
servers = run_ranks(parent, world_size=2)
own = {process.pid for process in own_processes()}
print(json.dumps([os.getppid(), os.getpid(), known, hasattr(json, "left"), servers, sorted(own)]))
json.left = True
'''

async def ask():
    manager = _KernelManager(kernel_name="python3")
    manager.warm = nest
    await manager.start_kernel()
    client = manager.client()
    client.start_channels()
    await client.wait_for_ready(timeout=60)
    said = []
    await client.execute_interactive(ASKED, timeout=60, output_hook=lambda message: said.append(message["content"]))
    client.stop_channels()
    await manager.shutdown_kernel()
    return json.loads("".join(content.get("text", "") for content in said))

async def main():
    found = [await ask(), await ask()]
    os.kill(found[0][0], signal.SIGKILL)
    try:
        is_gone = not nest.start([], {})
    except OSError:  # which has the manager start a kernel as ever
        is_gone = True
    print(json.dumps({"here": os.getpid(), "found": found, "is_gone": is_gone}))

asyncio.run(main())
"""


def test_each_kernel_is_a_process_of_its_own_and_says_if_it_cannot_be_forked(tmp_path):
    outcome = carry_out([sys.executable, "-c", PROGRAM], tmp_path)
    assert outcome.returncode == 0, outcome.stderr
    told = json.loads(outcome.stdout.splitlines()[-1])
    first, second = told["found"]
    nest, pid, knew, was_changed, servers, own = first
    again, other, knew_too, was_changed_too, others, _ = second
    assert nest == again != told["here"]
    assert pid != other
    assert [knew, knew_too] == [True, True]
    assert [was_changed, was_changed_too] == [False, False]
    assert len({*servers, *others}) == 1  # one fork server has all ranks
    assert {pid, *servers} <= set(own)  # what ranks take of the cores is not the load of other programs
    assert told["is_gone"]


@pytest.mark.slow  # of a process that measures by itself, tests/lab/test_killed.py shows it
def test_nothing_survives_a_report_that_is_killed(tmp_path):
    mark, runs = uuid.uuid4().hex, tmp_path / "data" / "runs" / "sync_batchnorm"
    command = [sys.executable, "-m", "labkit", "report", "sync_batchnorm", "--profile", "smoke"]
    environment = os.environ | {MARK: mark, "LABKIT_HOME": str(tmp_path)}
    report = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _await(lambda: any('"kind":"row"' in path.read_text() for path in runs.glob("*.jsonl")))
        assert len(_family(mark)) > 3  # the command, what kernels are forked from, a kernel, ranks
        report.send_signal(signal.SIGKILL)
        report.wait()
        _await(lambda: not _family(mark))
    finally:
        for process in _family(mark):
            process.kill()
        report.wait()


def _family(mark):
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


def _await(condition, deadline_s=60.0):
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def test_a_kernel_whose_cells_all_ran_is_not_interrupted_before_it_ends(monkeypatch):
    """It would say so in the terminal, if it is still at its last message."""
    interrupted = []

    async def interrupt(manager):
        interrupted.append(manager.has_finished)

    monkeypatch.setattr(EncryptedKernelManager, "_async_interrupt_kernel", interrupt)
    monkeypatch.setattr(PapermillNotebookClient, "papermill_execute_cells", lambda client: None)
    client = _Client(SimpleNamespace(nb=new_notebook()), lambda progress: None, None)
    client.km = _KernelManager()
    client.km.provisioner = SimpleNamespace(pid=os.getpid())
    asyncio.run(client.km._async_interrupt_kernel())
    client.papermill_execute_cells()
    asyncio.run(client.km._async_interrupt_kernel())
    assert interrupted == [False]
