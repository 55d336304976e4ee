"""The compiled core: the same bits as Python's version, built once, and done without where it cannot be built."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from labkit.parallel.collectives import ALGORITHMS
from labkit.parallel.core import build
from labkit.parallel.core.build import COMPILED, PYTHON, VARIABLE
from labkit.parallel.launch import run_ranks
from labkit.parallel.transport import SHARED
from labkit.parallel.transport.choice import own_transport
from labkit.parallel.transport.contract import Step
from labkit.parallel.transport.semaphores import Semaphores
from tests.parallel.versions import shared_transport

pytestmark = [
    pytest.mark.usefixtures("workers_travel_by_value"),
    pytest.mark.skipif(bool(Semaphores.unavailable()), reason=Semaphores.unavailable() or "there are some"),
]

TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
CPU = torch.device("cpu")


@pytest.mark.parametrize("version", [COMPILED])
def test_both_versions_give_the_same_bits(version: str) -> None:
    """Of sums and means of three, which are rounded: small, large, subnormal and infinite numbers, and none."""
    wrong = run_ranks(_check_bits, version, world_size=3)
    assert [text for of_rank in wrong for text in of_rank] == []


def _check_bits(version: str) -> list[str]:
    compiled = shared_transport(version)
    os.environ[VARIABLE] = PYTHON
    python, why = own_transport(None, CPU, SHARED)
    assert not why
    assert python.why_python  # type: ignore[attr-defined]
    numbers = torch.Generator().manual_seed(dist.get_rank())
    wrong = []
    for dtype in TYPES:
        for length in (1, 7, 1000, 300_001):
            x = torch.randn(length, dtype=torch.float64, generator=numbers)
            scale = 10.0 ** torch.randint(-9, 5, (length,), dtype=torch.float64, generator=numbers)
            x = (x * scale).to(dtype)
            x[::101], x[1::211], x[2::307] = torch.inf, -torch.inf, torch.nan
            for name, algorithm in ALGORITHMS.items():
                for op in ("sum", "mean"):
                    one, other = x.clone(), x.clone()
                    algorithm(one, op=op, transport=compiled)
                    algorithm(other, op=op, transport=python)
                    same = (one.view(torch.uint8) == other.view(torch.uint8)).view(length, -1).all(1)
                    if not bool((same | (one.isnan() & other.isnan())).all()):
                        wrong.append(f"rank {dist.get_rank()}: {name} {op} {length} {dtype}")
    return wrong


@pytest.mark.parametrize("version", [COMPILED])
def test_what_the_core_cannot_add_is_refused_before_anything_is_sent(version: str) -> None:
    assert run_ranks(_add_bytes, version, world_size=2) == [["refused", 0]] * 2


def _add_bytes(version: str) -> list[str | int]:
    transport = shared_transport(version)
    other, x = 1 - transport.rank, torch.ones(3, dtype=torch.uint8)
    try:
        transport.run([Step(x, other, x, other, True)])
    except ValueError:
        swapped = transport._semaphores[transport.rank]
        return ["refused", sum(swapped.is_posted(number) for number in range(6))]
    return ["added", 0]


def test_an_unknown_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "fortran")
    with pytest.raises(ValueError, match="compiled or python"):
        build.load(1.0)


WAITING_AT_THE_END = """
import mmap, sys, threading, time
import numpy as np, torch
from labkit.parallel.core import build
from labkit.parallel.transport.contract import Step
waits = threading.Event()
def wait(*_):
    waits.set()
    time.sleep(1000)
mailboxes = [mmap.mmap(-1, 1 << 20) for _ in range(2)]
addresses = tuple(int(np.frombuffer(one, dtype=np.uint8).ctypes.data) for one in mailboxes)
link = build.load(100.0).Link(
    0, 4096, 65536, 1024, 524288, 1024, 8, 2, 1024, 1024, False, addresses, (wait,) * 5, (torch.float32,)
)
step = Step(None, 1, torch.zeros(4), 1, False)
threading.Thread(target=link.run, args=([step], 1), daemon=True).start()
waits.wait()
sys.exit(3)
"""


def test_a_program_that_ends_while_a_thread_waits_ends_as_it_says() -> None:
    """Python ends such a thread where it comes back, which a C++ destructor would take the process down for."""
    done = subprocess.run([sys.executable, "-c", WAITING_AT_THE_END], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (3, "")


# Building: in processes of their own, which have not looked for it yet.

LOOK = (
    "import torch\nfrom labkit.parallel.core import build\n"
    "try:\n    print(build.load(100.0).__file__)\n"
    "except build.CoreUnavailable as error:\n    print('none:', error)"
)


def _start(cache: Path, **environment: str) -> subprocess.Popen[str]:
    told = {**os.environ, "XDG_CACHE_HOME": str(cache), "TMPDIR": str(cache.parent), VARIABLE: COMPILED}
    return subprocess.Popen([sys.executable, "-c", LOOK], env={**told, **environment}, stdout=-1, stderr=-1, text=True)


def _said(process: subprocess.Popen[str]) -> str:
    out, error = process.communicate(timeout=200)
    assert (process.returncode, error) == (0, "")
    return out.strip()


@pytest.mark.parametrize("environment", [{VARIABLE: PYTHON}, {"PATH": "/nowhere"}], ids=["not wanted", "no tools"])
def test_without_it_the_reason_is_told(tmp_path: Path, environment: dict[str, str]) -> None:
    assert _said(_start(tmp_path / "cache", **environment)).startswith("none: ")


@pytest.mark.slow
@pytest.mark.parametrize("version", [COMPILED])
def test_processes_that_start_together_build_it_once_and_print_nothing(tmp_path: Path, version: str) -> None:
    cache = tmp_path / "cache"
    files = {_said(process) for process in [_start(cache) for _ in range(4)]}
    assert len(files) == 1
    (file,) = files
    made = Path(file).stat()
    assert _said(_start(cache)) == file
    assert Path(file).stat().st_mtime_ns == made.st_mtime_ns
    assert {path.name for path in Path(file).parent.iterdir()} == {"core.so", "lock"}


@pytest.mark.slow
@pytest.mark.parametrize("version", [COMPILED])
def test_where_the_cache_cannot_be_used_it_is_kept_among_temporary_files(tmp_path: Path, version: str) -> None:
    others = tmp_path / "others" / "labkit"
    others.mkdir(parents=True)
    others.chmod(0o777)  # whoever may write there could put code there
    assert Path(_said(_start(others.parent, TMPDIR=str(tmp_path)))).parents[2] == tmp_path
    (tmp_path / "file").touch()
    assert Path(_said(_start(tmp_path / "file", TMPDIR=str(tmp_path)))).parents[2] == tmp_path


@pytest.mark.slow
def test_a_build_that_fails_is_told_and_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "core.cpp"
    source.write_text("this is no C++")
    monkeypatch.setattr(build, "SOURCE", source)
    monkeypatch.setattr(build, "_loaded", [])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert "could not be compiled" in build.prepare()
    monkeypatch.setattr(build, "_build", None)  # a second try would be one call too many
    assert "could not be compiled" in build.prepare()
