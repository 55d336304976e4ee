"""Who removes the directories of a parent that was killed before any of its ranks could.

Ranks clean up after their parent, but for a second, while the fork server imports torch, there are none. So a shell
waits for the end of a pipe that only the parent holds.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.util
import subprocess
from pathlib import Path

# Ranks that are there remove the same directory, or still write to it: more than once.
_SCRIPT = 'trap "" INT TERM HUP; read -r _; for _ in 1 2 3 4 5; do rm -rf -- "$@"; sleep 0.2; done'


class Janitor:
    """Removes `directory`, and the one with the fork server's socket, if this process ends without `dismiss`."""

    def __init__(self, directory: Path) -> None:
        directories = [str(directory)]
        if "forkserver" in multiprocessing.get_all_start_methods():
            directories.append(multiprocessing.util.get_temp_dir())  # where the server will listen
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "labkit-janitor", *directories],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # out of reach of a Ctrl-C, and of a kernel that waits for its children
        )

    def dismiss(self) -> None:
        """The parent has cleaned up itself. Safe to repeat."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
