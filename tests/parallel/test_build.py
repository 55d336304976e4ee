"""Compiling the shared-memory library: once, by one process, for this user; and what happens if that fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.parallel.transport import build

pytestmark = pytest.mark.skipif(build.unavailable_reason() is not None, reason=str(build.unavailable_reason()))

LOAD = """
from labkit.parallel.transport import build
from labkit.parallel.transport.base import SharedMemoryUnavailable
try:
    print(build.load(100.0)._name)
except SharedMemoryUnavailable as error:
    print("none:", error)
"""


def _start(cache: Path, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "TMPDIR": str(cache.parent), **variables}
    return subprocess.Popen([sys.executable, "-c", LOAD], env=environment, stdout=-1, stderr=-1, text=True)


def _output(process: subprocess.Popen[str]) -> str:
    out, error = process.communicate(timeout=200)
    assert (process.returncode, error) == (0, "")
    return out.strip()


def _compiler(folder: Path, script: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\necho called >> {folder}/calls\n{script}\n")
    path.chmod(0o700)
    return str(path)


def test_processes_that_start_together_build_it_once_and_print_nothing(tmp_path: Path) -> None:
    cache, compiler = tmp_path / "cache", _compiler(tmp_path, 'exec c++ "$@"')
    files = {_output(process) for process in [_start(cache, CXX=compiler) for _ in range(3)]}
    (file,) = files
    assert _output(_start(cache)) == file
    assert (tmp_path / "calls").read_text() == "called\n"
    assert {path.name for path in Path(file).parent.iterdir()} == {"library.so", "lock"}


def test_a_failure_is_one_line_and_not_kept(tmp_path: Path) -> None:
    message = "cc1plus: error: cannot write: No space left on device"
    compiler = _compiler(tmp_path, f'echo "In file x:"; echo "{message}" >&2; exit 1')
    assert _output(_start(tmp_path / "cache", CXX=compiler)) == f"none: {compiler} failed: {message}"
    assert _output(_start(tmp_path / "cache", CXX=compiler, LABKIT_SHARED_MEMORY_FAILURE="none")) == "none: none"
    assert (tmp_path / "calls").read_text() == "called\n"  # ranks take their launcher's word
    assert _output(_start(tmp_path / "cache")).endswith("library.so")


def test_a_full_temporary_folder_does_not_matter(tmp_path: Path) -> None:
    compiler = _compiler(tmp_path, 'case "$TMPDIR" in */cache/labkit/*) exec c++ "$@";; esac; exit 1')
    assert _output(_start(tmp_path / "cache", CXX=compiler)).endswith("library.so")


@pytest.mark.parametrize(
    ("variables", "hint"), [({"PATH": "/nowhere"}, "apt install g++"), ({"CXX": "no-such-compiler"}, "apt install g++")]
)
def test_a_missing_compiler_is_named_with_what_to_install(tmp_path: Path, variables: dict[str, str], hint: str) -> None:
    text = _output(_start(tmp_path / "cache", **variables))
    assert text.startswith("none: ")
    assert hint in text


def test_missing_headers_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_libraries", [])
    monkeypatch.setattr(build.sysconfig, "get_path", lambda _: str(tmp_path))
    assert "python3-dev" in str(build.unavailable_reason())


def test_folders_that_others_can_write_to_or_that_forbid_execution_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, temporary = tmp_path / "cache", tmp_path / "temporary"
    (cache / "labkit").mkdir(parents=True)
    temporary.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(temporary))
    (cache / "labkit").chmod(0o777)
    assert build._cache_folder().parent == temporary
    (cache / "labkit").chmod(0o700)
    assert build._cache_folder().parent == cache
    real = os.statvfs

    class NoExec:
        f_flag = os.ST_NOEXEC

    monkeypatch.setattr(os, "statvfs", lambda path: NoExec if Path(path).is_relative_to(cache) else real(path))
    assert build._cache_folder().parent == temporary
    monkeypatch.setattr(os, "statvfs", lambda path: NoExec)
    monkeypatch.setattr(build, "_libraries", [])
    reason = str(build.unavailable_reason())
    assert "XDG_CACHE_HOME" in reason
    assert "\n" not in reason
