"""The library of `shared_memory.cpp`: compiled once per user, Python and processor.

Compiling takes about two seconds, and the library is kept in the user's cache folder. The launcher
compiles it before it starts ranks (`unavailable_reason`), so that no rank waits for it.
"""

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
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from labkit.parallel.transport.base import SharedMemoryUnavailable

SOURCE = Path(__file__).with_name("shared_memory.cpp")
FLAGS = ["-O3", "-march=native", "-std=c++17", "-shared", "-fPIC"]
COMPILE_TIMEOUT_S = 120.0
# A variable of ranks: why their launcher has no library. Else each would try to compile it again.
FAILURE = "LABKIT_SHARED_MEMORY_FAILURE"


def unavailable_reason() -> str | None:
    """Compile the library if needed; return why there is none, or None."""
    try:
        load_library()
    except SharedMemoryUnavailable as error:
        return str(error)
    return None


@cache
def load_library() -> Any:
    """Return the library; compile it first if nobody has. SharedMemoryUnavailable says in one line
    what is missing."""
    if reason := os.environ.get(FAILURE):
        raise SharedMemoryUnavailable(reason)
    try:
        # PyDLL keeps the interpreter locked, since the functions read Python's objects; they unlock
        # it while they wait.
        library: Any = ctypes.PyDLL(str(_find_or_compile()))
    except OSError as error:
        raise SharedMemoryUnavailable(str(error)) from error
    longs = ctypes.POINTER(ctypes.c_long)
    library.mailbox_bytes.argtypes = [ctypes.c_long]
    library.mailbox_bytes.restype = ctypes.c_long
    library.slot_bytes.restype = ctypes.c_long
    library.connect_mailboxes.restype = ctypes.c_void_p
    library.connect_mailboxes.argtypes = [ctypes.c_long, ctypes.c_long, longs, longs]
    library.connect_mailboxes.argtypes += [ctypes.c_double, ctypes.c_bool, ctypes.py_object]
    for function in (library.end_call, library.leave_group, library.disconnect_mailboxes):
        function.argtypes = [ctypes.c_void_p]
        function.restype = None
    library.run_rounds.argtypes = [ctypes.c_void_p, ctypes.py_object, ctypes.c_long, ctypes.c_long]
    library.run_rounds.restype = ctypes.py_object
    return library


def _find_or_compile() -> Path:
    folder = _cache_folder() / f"shared-memory-{_build_key()}"
    library = folder / "library.so"
    if not library.exists():
        compiler = _find_compiler()
        folder.mkdir(exist_ok=True)
        with (folder / "lock").open("w") as file:
            # The kernel drops the lock when its process ends, however it ends.
            fcntl.flock(file, fcntl.LOCK_EX)
            if not library.exists():
                _compile(compiler, library)
    return library


def _compile(compiler: str, library: Path) -> None:
    headers = [f"-I{folder}" for folder in _header_folders()]
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        output = Path(scratch) / "library.so"
        try:
            subprocess.run(
                [compiler, *FLAGS, *headers, str(SOURCE), "-o", str(output)],
                check=True,
                capture_output=True,
                text=True,
                # The compiler's temporary files go where the library goes: /tmp may be full.
                env=os.environ | {"TMPDIR": scratch, "LC_ALL": "C"},
                timeout=COMPILE_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as error:
            raise SharedMemoryUnavailable("compiling took too long") from error
        except subprocess.CalledProcessError as error:
            lines = error.stderr.strip().splitlines() or [f"exit status {error.returncode}"]
            reason = next((line for line in lines if "error" in line.lower()), lines[-1])
            raise SharedMemoryUnavailable(f"{compiler} failed: {reason}") from error
        # At once and complete: another process loads it as soon as it has this name.
        output.replace(library)


def _find_compiler() -> str:
    if not sys.platform.startswith("linux"):
        raise SharedMemoryUnavailable(f"it is for Linux, not for {sys.platform}")
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise SharedMemoryUnavailable(
            f"there is no C++ compiler {compiler!r}: install one (Debian: apt install g++)"
        )
    if not (_header_folders()[0] / "Python.h").exists():
        raise SharedMemoryUnavailable(
            "there is no Python.h: install Python's headers (Debian: apt install python3-dev)"
        )
    return compiler


def _header_folders() -> list[Path]:
    """Return the folders of Python's and torch's headers."""
    return [Path(sysconfig.get_path("include")), Path(torch.__file__).parent / "include"]


def _build_key() -> str:
    """Digest of what a build depends on, but for the compiler: source, flags, Python, torch,
    processor."""
    # Machines may share a home folder: what -march=native makes for one may be illegal on another.
    processor = ""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    parts = [
        SOURCE.read_text(),
        *FLAGS,
        sys.version,
        torch.__version__,
        platform.machine(),
        processor,
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _cache_folder() -> Path:
    """Return the user's cache folder, to which nobody else can write: code is loaded from it."""
    with suppress(OSError, RuntimeError):  # a user without a home
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "labkit"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        flags = os.statvfs(folder).f_flag
        is_private = status.st_uid == os.getuid() and not status.st_mode & 0o022
        if is_private and not flags & (os.ST_NOEXEC | os.ST_RDONLY):
            return folder
    raise SharedMemoryUnavailable(
        "expected a private cache folder that may hold code: set XDG_CACHE_HOME to one"
    )
