"""Memory that runs out for real, in a cgroup with a limit: the kernel kills, and the message says
that it did."""

import os
import shlex
import uuid
from contextlib import suppress
from pathlib import Path

import pytest

from tests.faults.check import settings, until
from tests.faults.worker import INSIDE, SHARED, WRITING

pytestmark = pytest.mark.faults
LIMIT_MIB = 1536  # the command line, its fork server and two ranks take less than half of it
MOUNTS = {
    "memory": ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
}
MOUNTS[""] = ("/sys/fs/cgroup", "memory.max", "memory.swap.max")


def _limited(limit_bytes):
    """Return a new cgroup with a limit, inside this process's or else at the top; None if neither
    is possible."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, own = line.split(":", 2)
        if controllers not in MOUNTS:
            continue
        mount, limit, swap = MOUNTS[controllers]
        for above in (f"{mount}{own}", mount):
            folder = Path(above, f"labkit-{uuid.uuid4().hex}")
            try:
                folder.mkdir()
            except OSError:
                continue
            with suppress(OSError):
                (folder / limit).write_text(str(limit_bytes))
                with suppress(OSError):  # a kernel that does not count swap
                    (folder / swap).write_text(str(limit_bytes if controllers else 0))
                return folder
            folder.rmdir()
    return None


@pytest.fixture
def cgroup():
    """A command prefix that starts in a separate cgroup."""
    folder = (
        _limited(LIMIT_MIB * 2**20)
        if os.geteuid() == 0 and Path("/proc/self/cgroup").exists()
        else None
    )
    if folder is None:
        pytest.skip("a memory limit needs a cgroup of its own, and none can be made here")
    yield ["sh", "-c", f'echo $$ > {shlex.quote(str(folder))}/cgroup.procs && exec "$@"', "sh"]
    until(lambda: _removed(folder))


def _removed(folder):
    with suppress(OSError):  # somebody is still in it
        folder.rmdir()
    return not folder.exists()


@pytest.mark.parametrize("moment", [SHARED, INSIDE, WRITING])
def test_a_rank_that_the_kernel_kills_costs_a_point_that_says_so(victim, cgroup, moment):
    hit = victim().start(
        *settings(action="fills memory", moment=moment, timeout_s=600.0), prefix=cgroup
    )
    status, said = hit.finish()
    (run,) = hit.runs()
    coverage = run.coverage()
    assert coverage["status"].tolist() == ["ok", "oom", "ok"], said
    reason = coverage["reason"].tolist()[1]
    assert reason == "rank 1 was killed by SIGKILL: out of memory, by the kernel"
    assert status == 0, said  # as for any point that is too large
    assert sorted(run.frame()["number"].unique()) == [0, 2]
    hit.assert_nothing_left()


def test_a_parent_that_the_kernel_kills_keeps_what_was_measured(victim, cgroup):
    hit = victim()
    asked = settings(action="fills memory, the parent first", moment=INSIDE, timeout_s=600.0)
    status, said = hit.start(*asked, prefix=cgroup).finish()
    assert status == -9, said
    hit.assert_nothing_left()
    (run,) = hit.runs()
    assert run.coverage()["status"].tolist() == ["ok", "pending", "pending"]
    hit.resume()
    hit.assert_nothing_left()
