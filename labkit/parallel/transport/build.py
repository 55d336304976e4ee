"""Compile `shared_memory.cpp`: once per machine, kept in the user's cache folder; or say why that cannot be.

The library is built for this Python and this processor, in about two seconds, and kept in `$XDG_CACHE_HOME/labkit` or
`~/.cache/labkit`, else in a folder of the user's among the temporary files. The launcher builds it before it starts
ranks (`unavailable_reason`), so that no rank waits for it.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from labkit.parallel.transport.base import SharedMemoryUnavailable

SOURCE = Path(__file__).with_name("shared_memory.cpp")
FLAGS = ["-O3", "-march=native", "-ffp-contract=off", "-std=c++17", "-shared", "-fPIC"]
BUILD_S = 120.0
FAILURE = "LABKIT_SHARED_MEMORY_FAILURE"
"""Variable by which a launcher tells its ranks why there is no library, so that not each of them tries again."""
_libraries: list[ctypes.PyDLL] = []  # of this process


def load(patience_s: float = BUILD_S) -> ctypes.PyDLL:
    """Return the library; build it first, within `patience_s` seconds, if nobody has.

    Raises SharedMemoryUnavailable with one line that says why, and what to install.
    """
    if not _libraries:
        if reason := os.environ.get(FAILURE):
            raise SharedMemoryUnavailable(reason)
        try:
            _libraries.append(ctypes.PyDLL(str(_find_or_build(patience_s))))
        except OSError as error:
            raise SharedMemoryUnavailable(str(error)) from error
    return _libraries[0]


def unavailable_reason() -> str | None:
    """Build the library if needed; return why there is none, or None."""
    try:
        load()
    except SharedMemoryUnavailable as error:
        return str(error)
    return None


def _find_or_build(patience_s: float) -> Path:
    deadline = time.monotonic() + patience_s
    folder = _cache_folder() / f"shared-memory-{_build_key()}"
    library = folder / "library.so"
    if not library.exists():
        compiler = _find_compiler()
        folder.mkdir(exist_ok=True)
        with (folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # ends with its process, which gives up in time
            if not library.exists():
                _compile(compiler, folder, deadline)
    return library


def _compile(compiler: str, folder: Path, deadline: float) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        output = Path(scratch) / "library.so"
        command = [compiler, *FLAGS, f"-I{sysconfig.get_path('include')}", str(SOURCE), "-o", str(output)]
        # The compiler's temporary files go where the library goes: /tmp may be full.
        environment = os.environ | {"TMPDIR": scratch, "LC_ALL": "C"}
        patience_s = deadline - time.monotonic()
        try:
            result = subprocess.run(
                command, env=environment, timeout=patience_s, capture_output=True, text=True, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise SharedMemoryUnavailable("compiling took too long") from error
        if result.returncode != 0:
            lines = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
            reason = next((line for line in lines if "error" in line.lower()), lines[-1])
            raise SharedMemoryUnavailable(f"{compiler} failed: {reason}")
        output.replace(folder / "library.so")


def _find_compiler() -> str:
    if not sys.platform.startswith("linux"):
        raise SharedMemoryUnavailable(f"it is for Linux, not for {sys.platform}")
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise SharedMemoryUnavailable(f"there is no C++ compiler {compiler!r}: install one (Debian: apt install g++)")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        raise SharedMemoryUnavailable(
            "there is no Python.h: install Python's headers (Debian: apt install python3-dev)"
        )
    return compiler


def _build_key() -> str:
    """Digest of everything a build depends on: source, flags, Python, processor."""
    processor = ""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    parts = [SOURCE.read_text(), *FLAGS, sys.version, platform.machine(), processor]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _cache_folder() -> Path:
    """Return a folder that only this user can write to, and from which code can be loaded."""
    candidates = [Path(tempfile.gettempdir()) / f"labkit-{os.getuid()}"]
    with suppress(RuntimeError):  # a user without a home
        cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
        candidates.insert(0, Path(cache) / "labkit")
    for folder in candidates:
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.stat()
            is_private = status.st_uid == os.getuid() and not status.st_mode & 0o022
            is_executable = not os.statvfs(folder).f_flag & os.ST_NOEXEC
            if is_private and is_executable and os.access(folder, os.W_OK | os.X_OK):
                return folder
    tried = " and ".join(map(str, candidates))
    raise SharedMemoryUnavailable(f"no private folder that may hold code: set XDG_CACHE_HOME to one (tried {tried})")
