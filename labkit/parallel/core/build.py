"""The compiled core of the transport over shared memory: built once, kept, loaded; or why there is none.

`core.cpp` does what `messages.py`, `swaps.py` and `boards.py` do, with the same memory and the same semaphores. It is
there for short messages: between two collectives a program has done other things, and Python whose code and objects
come from the farthest cache takes longer than the message. Ranks with it and ranks without it can be in one group.

Torch's own builder compiles it, in a process of its own, for this Python and this processor, and it is kept in the
user's cache folder (`$XDG_CACHE_HOME`, `~/.cache`), else in a folder of the user's own among the temporary files.
The launcher builds it before it starts ranks (`prepare`). Where there is no compiler, no `ninja`, no headers of
Python, or nowhere to keep it, Python's version runs, silently; `LABKIT_CORE=python` asks for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

VARIABLE = "LABKIT_CORE"
COMPILED, PYTHON = "compiled", "python"
SOURCE = Path(__file__).with_name("core.cpp")
FLAGS = ["-O3", "-march=native", "-ffp-contract=off", "-std=c++17"]
BUILD_S = 120.0
BUILD = (
    "import sys; from torch.utils.cpp_extension import load; "
    "load('core', [sys.argv[1]], extra_cflags=sys.argv[3:], build_directory=sys.argv[2], with_cuda=False)"
)
_loaded: list[ModuleType | str] = []  # once it has been looked for


class CoreUnavailable(RuntimeError):
    """There is no compiled core here; the message says why."""


def load(patience_s: float) -> ModuleType:
    """The module with `Link`, built now if it has not been. CoreUnavailable where it cannot be, or is not wanted.

    `patience_s`: how long building may take; Python's version runs in this process where that is over.
    """
    if not _is_wanted():
        raise CoreUnavailable(f"{VARIABLE}={PYTHON}")
    loaded = _load(patience_s)
    if isinstance(loaded, str):
        raise CoreUnavailable(loaded)
    return loaded


def prepare() -> str:
    """Build it, if it can be and has not been: before ranks are started, of which none has to wait for it then.

    Which version they will run, in words.
    """
    if not _is_wanted():
        return f"in Python ({VARIABLE}={PYTHON})"
    try:
        _built(BUILD_S)
    except (OSError, CoreUnavailable) as error:
        return f"in Python ({error})"
    return COMPILED


def _is_wanted() -> bool:
    wanted = os.environ.get(VARIABLE, COMPILED)
    if wanted not in (COMPILED, PYTHON):
        raise ValueError(f"{VARIABLE} must be {COMPILED} or {PYTHON}, got {wanted!r}")
    return wanted == COMPILED


def _load(patience_s: float) -> ModuleType | str:
    """The module, or why there is none: looked for once a process."""
    if not _loaded:
        try:
            spec = importlib.util.spec_from_file_location("core", _built(patience_s))
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            _loaded.append(module)
        except (OSError, ImportError, CoreUnavailable) as error:
            _loaded.append(f"{error}")
    return _loaded[0]


def _built(patience_s: float) -> Path:
    """The file, which is made if it is not there. CoreUnavailable, OSError."""
    deadline = time.monotonic() + patience_s
    folder = _folder() / f"core-{_key()}"
    path, failure = folder / "core.so", folder / "failure.txt"
    if path.exists():
        return path
    _check_tools()
    folder.mkdir(exist_ok=True)
    with _locked(folder / "lock", deadline):
        if path.exists():
            return path
        if failure.exists():
            raise CoreUnavailable(failure.read_text())
        with tempfile.TemporaryDirectory(dir=folder) as build:
            _build(build, failure, deadline)
            (Path(build) / "core.so").replace(path)
    return path


def _build(build: str, failure: Path, deadline: float) -> None:
    # A process of its own: the builder imports much, and changes what it finds.
    command = [sys.executable, "-c", BUILD, str(SOURCE), build, *FLAGS]
    try:
        done = subprocess.run(
            command,
            cwd=build,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=deadline - time.monotonic(),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CoreUnavailable("it was not compiled in time") from error
    if done.returncode != 0:
        (Path(build) / "failure.txt").write_text(f"it could not be compiled: {done.stderr[-2000:]}")
        (Path(build) / "failure.txt").replace(failure)
        raise CoreUnavailable(failure.read_text())


def _check_tools() -> None:
    if not sys.platform.startswith("linux"):
        raise CoreUnavailable(f"it is for Linux, not for {sys.platform}")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        raise CoreUnavailable("the headers of Python are missing")
    for tool in ("ninja", os.environ.get("CXX", "c++")):
        if shutil.which(tool) is None:
            raise CoreUnavailable(f"there is no {tool}")


def _key() -> str:
    """What a build depends on: source, flags, Python, torch's headers, processor."""
    flags = ""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    about = [SOURCE.read_text(), *FLAGS, sys.version, version("torch"), platform.machine(), flags]
    return hashlib.sha256("\n".join(about).encode()).hexdigest()[:16]


def _folder() -> Path:
    """A folder of this user alone, in which files can be made."""
    candidates = [Path(tempfile.gettempdir()) / f"labkit-{os.getuid()}"]
    with suppress(RuntimeError):  # a user without a home
        cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
        candidates.insert(0, Path(cache) / "labkit")
    for folder in candidates:
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            about = folder.stat()
            # Code that others could write is not loaded.
            if about.st_uid == os.getuid() and not about.st_mode & 0o022 and os.access(folder, os.W_OK | os.X_OK):
                return folder
    raise CoreUnavailable("there is no folder to keep it in")


@contextmanager
def _locked(path: Path, deadline: float) -> Iterator[None]:
    """One process at a time; a lock goes with its process."""
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise CoreUnavailable("another process is still compiling it") from error
                time.sleep(0.02)
        yield
