"""Commands as a user gives them, and the runs that they have written."""

import os
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress

from labkit.lab.project import runs_directory
from labkit.lab.runs.store import Run, RunFileError


def carry_out(command, folder, variables=None):
    """What a command came to that was carried out in a folder, with variables on top of those of
    the tests."""
    environment = os.environ | (variables or {})
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900
    )


def mounted(mount):
    """A command prefix that mounts in a separate namespace; none where that needs more rights."""
    if (
        os.geteuid()
        or not shutil.which("unshare")
        or subprocess.run(["unshare", "-m", "true"], check=False).returncode
    ):
        return []
    return ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh"]


def labkit(*arguments, cwd=None):
    command = [sys.executable, "-m", "labkit", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=300)


def all_runs():
    """The files of this machine's runs."""
    return set(runs_directory().glob("*/*.jsonl"))


def runs_by(arguments, but=frozenset()):
    """Runs that a command with these arguments has begun, `but` some. Others may be measured at the
    same time."""
    found = set()
    for path in all_runs() - but:
        # not even its first line is written, or it is gone again
        with suppress(RunFileError, FileNotFoundError):
            if Run.load(path).header.command.endswith(shlex.join(arguments)):
                found.add(path)
    return found
