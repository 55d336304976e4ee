"""One fork server of ranks for several measuring processes, one after the other, all forked from one process.

A server of one's own has torch to import, and each of its ranks what its worker imports: seconds per lab of a report,
in which nothing is measured. A process that several measuring processes are forked from starts the server ahead of
them (`share`), with all that their ranks will import; each of these takes it over (`adopt`). Ranks are forked from the
server as ever, which runs nothing of ours: what one lab does, no rank of the next one sees.

Only where no module is edited meanwhile: the server keeps what it has imported.
"""

from __future__ import annotations

import multiprocessing.forkserver
import multiprocessing.process
import multiprocessing.resource_tracker
import os
from collections.abc import Sequence
from typing import Any

import psutil

from labkit.parallel.ranks.process import start_context, variables_set
from labkit.parallel.ranks.rank import SERVER_OF_SEVERAL


def share(preload: Sequence[str]) -> None:
    """Start the fork server, with these modules beside torch, for processes that are forked from this one."""
    with variables_set({SERVER_OF_SEVERAL: "1"}):
        start_context(preload)


def adopt() -> None:
    """In a process that was just forked from the one which started the server: use that server, while it is there.

    multiprocessing would wait for it as for a child of its own, which it is not.
    """
    # A folder of this process's own: what cleans up after it must not take the server's socket.
    multiprocessing.process.current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]
    server: Any = multiprocessing.forkserver._forkserver
    if server._forkserver_pid is None:
        return
    try:
        shared = psutil.Process(server._forkserver_pid)
    except psutil.NoSuchProcess:
        shared = None
    own = server.ensure_running

    def ensure_running() -> None:
        if shared is not None and shared.is_running() and shared.status() != psutil.STATUS_ZOMBIE:
            multiprocessing.resource_tracker.ensure_running()
            return
        os.close(server._forkserver_alive_fd)
        server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None
        server.ensure_running = multiprocessing.forkserver.ensure_running = own
        own()

    server.ensure_running = multiprocessing.forkserver.ensure_running = ensure_running
